"""Our own gradient matching: what it recovers, and what it makes of updates that were changed."""

import json
from dataclasses import asdict, replace
from itertools import product

import pytest
import torch
from cases import some

from fedleak.attacks.clock import Clock
from fedleak.attacks.matching import gradient_matching, relaxed_tokens
from fedleak.attacks.matching.dlg import Dlg, Tag
from fedleak.attacks.matching.gradient_distance import squared
from fedleak.attacks.matching.lamp import Lamp
from fedleak.attacks.matching.objective import Objective, rounding
from fedleak.attacks.matching.optimizer import Descent, Search, Watch
from fedleak.attacks.reconstruction import Status
from fedleak.defenses.cast import Cast
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.defenses.mask import Mask
from fedleak.models import CAUSAL_LM, CLASSIFICATION, load_parameters_
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, Observation, UpdateKind
from fedleak.training.settings import LocalTraining
from fedleak.training.wire import partial_update
from fedleak.util.rng import stream

KINDS = [
    ("bert", CLASSIFICATION),
    ("gpt2", CLASSIFICATION),
    ("llama", CLASSIFICATION),
    ("gpt2", CAUSAL_LM),
    ("llama", CAUSAL_LM),
]
TWO_KINDS = [
    pytest.param(kind, marks=[] if kind in (KINDS[0], KINDS[-1]) else pytest.mark.slow)
    for kind in KINDS
]
GRANTED = ("labels", "lengths")
BATCHES = {
    "one text": ["she told us it is over"],
    "one token": ["nobody"],
    "two texts": ["she told us that", "he pays for it now"],
    "one text twice": ["nobody knows it", "nobody knows it"],
    "one token again and again": ["no no no no"],
}
ATTACKS = {"lamp": Lamp(steps=100), "dlg": Dlg(steps=100), "tag": Tag(steps=100)}


def run(attack, seen, model):
    """The answer, which must be plain JSON, and what was reported of the tokens so far."""
    reports = []
    (answer,) = attack.many(
        [seen], model, rngs=[stream(0, "attack")], report=lambda _, how: reports.append(how)
    )
    json.dumps(asdict(answer), allow_nan=False)
    steps = [progress.step for progress in reports]
    assert steps == sorted(steps)
    reports = [progress for progress in reports if not progress.phase]
    losses = [progress.loss for progress in reports]
    assert losses == sorted(losses, reverse=True)
    return answer, reports


def changed(seen, defense):
    return replace(seen, update=defense(seen.update, rng=stream(0, "defense")))


def shared(seen, patterns):
    return replace(seen, update=partial_update(seen.update, patterns))


def never_exact(seen):
    """An update that tells the tokens, but whose other tensors are noised."""
    seen = shared(seen, ["word_emb", "query", "LayerNorm"])
    tensors = dict(seen.update.tensors)
    noised = changed(seen, GaussianNoise(sigma=0.01)).update.tensors
    tensors |= {name: value for name, value in noised.items() if "word_emb" not in name}
    return replace(seen, update=replace(seen.update, tensors=tensors))


# --- undefended updates -----------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "kind"), some(product(BATCHES, KINDS), every=6))
def test_a_whole_update_gives_its_batch_away_with_a_proof(small, observe, kind, batch):
    model = small(*kind)
    truth = observe(model, BATCHES[batch], granted=GRANTED)
    answer, _ = run(ATTACKS["lamp"], truth.seen, model)
    assert sorted(answer.sequences) == sorted(truth.sequences)
    assert answer.verified
    assert max(answer.evidence) < rounding(truth.seen)
    assert answer.tokens == tuple(sorted({t for ids in truth.sequences for t in ids}))
    null = model.family.null_parameters(truth.seen.update.tensors)
    assert answer.diagnostics["left_out"] == len(null)


@pytest.mark.parametrize("attack", ["dlg", "tag"])
def test_other_distances_find_a_short_text_too(small, observe, attack):
    model = small("bert")
    truth = observe(model, BATCHES["one text"], granted=GRANTED)
    answer, _ = run(ATTACKS[attack], truth.seen, model)
    assert answer.sequences == tuple(truth.sequences)
    assert answer.verified


@pytest.mark.parametrize(
    "granted",
    [
        (),
        pytest.param(("labels",), marks=pytest.mark.slow),
        pytest.param(("lengths",), marks=pytest.mark.slow),
    ],
)
def test_labels_and_lengths_need_not_be_granted(small, observe, granted):
    model = small("bert", layers=3)
    truth = observe(model, BATCHES["two texts"], granted=granted)
    answer, _ = run(ATTACKS["lamp"], truth.seen, model)
    assert sorted(answer.sequences) == sorted(truth.sequences)
    assert answer.verified


def test_lengths_that_nothing_tells_are_believed_only_where_the_gradient_comes_near(small, observe):
    model = small("bert")
    truth = observe(model, BATCHES["two texts"])
    answer, _ = run(Lamp(steps=4, shapes=3), shared(truth.seen, ["LayerNorm.bias"]), model)
    assert answer.status == Status.ABSTAINED
    assert "lengths are not known" in answer.reason
    assert answer.sequences is None


def test_victims_of_one_call_may_have_batches_of_one_size(small, observe):
    model = small("bert")
    truths = [observe(model, BATCHES[name], granted=GRANTED) for name in ("one text", "one token")]
    answers = ATTACKS["lamp"].many(
        [truth.seen for truth in truths],
        model,
        rngs=[stream(0, "a", i) for i in range(2)],
        report=lambda *_: None,
    )
    assert [answer.sequences for answer in answers] == [tuple(truth.sequences) for truth in truths]


@pytest.mark.parametrize("kind", TWO_KINDS, ids="-".join)
def test_a_sentence_that_fills_up_a_smaller_batch_is_left_alone(
    small, observe, kind, inside, true_ids
):
    model = small(*kind)
    small_one, large_one = (
        observe(model, BATCHES[name], granted=GRANTED) for name in ("one text", "two texts")
    )

    def check(objective, config, rng):
        ids = objective.rows.ids_RBT.clone()
        for r, truth in enumerate((small_one, large_one)):
            ids[r] = true_ids(truth, objective)[r]
        variables = objective.space.variables(ids)
        improved_ids, score_R = relaxed_tokens.improved(Search(objective, config, rng), variables)
        assert torch.equal(improved_ids, ids)
        assert (score_R < objective.exact_R).all()

    inside(check, [small_one.seen, large_one.seen], model, Lamp(starts=1))


# --- a proof ----------------------------------------------------------------------------------


def test_a_few_numbers_that_many_texts_have_prove_nothing(small, observe):
    model = small("bert", num_labels=2, initializer_range=0.02)
    truth = observe(model, BATCHES["two texts"], granted=GRANTED)
    answer, _ = run(Dlg(), shared(truth.seen, ["classifier.bias"]), model)
    assert sorted(answer.sequences) != sorted(truth.sequences)
    assert not answer.verified


def test_only_the_right_texts_are_proved(small, observe):
    model = small("bert")
    truth = observe(model, BATCHES["two texts"], granted=GRANTED)
    answer, _ = run(Lamp(steps=2, discrete="never", starts=1), truth.seen, model)
    assert answer.verified == (sorted(answer.sequences) == sorted(truth.sequences))


# --- updates that were changed ----------------------------------------------------------------


DEFENSES = {
    "masked": Mask(0.9),
    "noised": GaussianNoise(sigma=0.05),
    "in bfloat16": Cast("bfloat16"),
    "in float16": Cast("float16"),
}


@pytest.mark.parametrize(
    ("defense", "attack", "preset"),
    some(product(DEFENSES, ["lamp", "dlg", "tag"], ["best", "faithful"]), every=5),
)
def test_a_changed_update_is_answered_with_numbers(small, observe, defense, attack, preset):
    model = small("bert", num_labels=2)
    truth = observe(model, BATCHES["two texts"], granted=GRANTED)
    seen = changed(truth.seen, DEFENSES[defense])
    if defense == "masked":  # LAMP's code divides by zero here
        tensors = dict(seen.update.tensors)
        tensors["classifier.bias"] = torch.zeros(2)
        seen = replace(seen, update=replace(seen.update, tensors=tensors))
    options = {"steps": 4, "starts": 1, "preset": preset}
    if attack == "lamp":
        options["guesses"] = 2
    answer, reports = run(replace(ATTACKS[attack], **options), seen, model)
    assert answer.status == Status.RECOVERED
    assert [len(ids) for ids in answer.sequences] == [len(ids) for ids in truth.sequences]
    assert all(torch.tensor(progress.loss).isfinite() for progress in reports)
    tensors = seen.update.tensors
    null = set() if preset == "faithful" else model.family.null_parameters(tensors)
    zero = {name for name, value in tensors.items() if not value.any()}
    assert answer.diagnostics["left_out"] == len(zero | null)
    assert zero or defense != "masked"


def test_rounding_to_bfloat16_hides_nothing(small, observe):
    model = small("bert")
    truth = observe(model, BATCHES["one text"], granted=GRANTED)
    answer, _ = run(ATTACKS["lamp"], changed(truth.seen, Cast("bfloat16")), model)
    assert answer.sequences == tuple(truth.sequences)


def test_an_update_of_zeros_is_abstained_from(small, observe):
    model = small("bert")
    truth = observe(model, 1, granted=GRANTED)
    tensors = {name: torch.zeros_like(value) for name, value in truth.seen.update.tensors.items()}
    seen = replace(truth.seen, update=replace(truth.seen.update, tensors=tensors))
    answer, reports = run(Lamp(), seen, model)
    assert answer.status == Status.ABSTAINED
    assert not reports


@pytest.mark.parametrize(("attack", "scale"), some(product(ATTACKS, [1e-30, 1e-10, 1e10]), every=2))
def test_an_update_of_any_size_is_answered_with_numbers(small, observe, attack, scale):
    model = small("bert")
    truth = observe(model, BATCHES["one token"], granted=GRANTED)
    tensors = {name: value * scale for name, value in truth.seen.update.tensors.items()}
    seen = replace(truth.seen, update=replace(truth.seen.update, tensors=tensors))
    run(replace(ATTACKS[attack], steps=2, starts=1), seen, model)


@pytest.mark.parametrize(
    ("attack", "value"), some(product(ATTACKS, [1e25, float("inf"), float("nan")]), every=2)
)
def test_a_number_that_is_not_finite_spoils_only_its_tensor(small, observe, attack, value):
    model = small("bert")
    truth = observe(model, BATCHES["one token"], granted=GRANTED)
    tensors = dict(truth.seen.update.tensors)
    name = next(name for name in tensors if name.endswith("layer.1.output.dense.weight"))
    tensors[name] = tensors[name].clone()
    tensors[name][0, 0] = value
    seen = replace(truth.seen, update=replace(truth.seen.update, tensors=tensors))
    answer, _ = run(replace(ATTACKS[attack], steps=2, starts=1), seen, model)
    assert max(answer.evidence) < 0.5


@pytest.mark.parametrize(
    "kind", [KINDS[0], pytest.param(KINDS[3], marks=pytest.mark.slow)], ids="-".join
)
def test_several_local_steps_are_matched_as_the_sum_of_their_gradients(small, kind, inside):
    model = small(*kind)
    sequences = sorted(model.encode(BATCHES["two texts"]), key=len, reverse=True)
    before = {name: value.clone() for name, value in model.parameters().items()}
    how = LocalTraining(
        kind=UpdateKind.DELTA, batch_size=1, epochs=2, learning_rate=1e-3, dropout=False
    )
    update = local_update_(model, sequences, [0, 1], how, seed=0)
    load_parameters_(model, before)
    lengths = tuple(map(len, sequences))
    knowledge = Knowledge(
        learning_rate=1e-3, local_steps=4, dropout=False, labels=(0, 1), lengths=lengths
    )
    answer, _ = run(
        Lamp(steps=12, starts=1),
        Observation(round=1, client=0, update=update, knowledge=knowledge),
        model,
    )
    assert sorted(answer.sequences) == sorted(map(tuple, sequences))
    assert not answer.verified, "it is not one gradient of the model as it was broadcast"
    assert 0 < answer.diagnostics["distance"] < 0.05

    def check(objective, config, rng):
        ids = objective.rows.ids_RBT.clone()
        for b, sequence in enumerate(sequences):
            ids[0, b, : len(sequence)] = torch.tensor(sequence)
        # A squared distance knows sizes: that of four gradients would be 9 times as far.
        exact = objective.space.exact(objective.rows, ids[:, None])
        assert float(objective.scores(exact)) < 0.05

    inside(
        check,
        [Observation(round=1, client=0, update=update, knowledge=knowledge)],
        model,
        Dlg(starts=1),
    )


@pytest.mark.parametrize("knows", [{"dropout": True}, {"local_steps": 2}])
def test_what_is_not_one_plain_gradient_is_never_proved(small, observe, knows):
    model = small("bert")
    truth = observe(model, BATCHES["one text"], granted=GRANTED)
    seen = replace(truth.seen, knowledge=replace(truth.seen.knowledge, **knows))
    answer, _ = run(ATTACKS["lamp"], seen, model)
    assert answer.sequences == tuple(truth.sequences)
    assert not answer.verified


# --- the search -------------------------------------------------------------------------------


def test_rows_of_a_victim_that_lag_behind_are_given_up():
    victim_R = torch.tensor([0, 0, 0, 0, 1, 1, 2])
    best_R = torch.tensor([0.4, 0.1, 0.3, 0.2, 0.9, 1e-9, torch.inf])
    exact_R, alive_R = torch.full_like(best_R, 1e-6), torch.arange(7)
    at_first = relaxed_tokens.going(victim_R, best_R, exact_R, alive_R, 0.0)
    assert at_first.tolist() == [0, 1, 2, 3, 6]
    at_last = relaxed_tokens.going(victim_R, best_R, exact_R, alive_R, 1.0)
    assert at_last.tolist() == [1, 6]
    kept = [
        len(relaxed_tokens.going(victim_R, best_R, exact_R, alive_R, i / 16)) for i in range(17)
    ]
    assert kept == sorted(kept, reverse=True)
    # Of those still alive, by their place among them.
    some_R = torch.tensor([0, 2, 3, 6])
    assert relaxed_tokens.going(victim_R, best_R, exact_R, some_R, 1.0).tolist() == [2, 3]
    assert not len(
        relaxed_tokens.going(victim_R[:4], best_R[:4] * 0, exact_R[:4], alive_R[:4], 0.5)
    )


@pytest.mark.parametrize("discrete", ["during", "at-end", "never"])
def test_words_change_places_when_they_may(small, observe, monkeypatch, discrete):
    model = small("bert")
    truth = observe(model, BATCHES["two texts"], granted=GRANTED)
    changes, made = [], relaxed_tokens.sequence_candidates

    def spy(*args):
        changes.append(len(stepped))
        return made(*args)

    stepped, step = [], Descent.step

    def counting(self, loss):
        stepped.append(1)
        return step(self, loss)

    monkeypatch.setattr(relaxed_tokens, "sequence_candidates", spy)
    monkeypatch.setattr(Descent, "step", counting)
    seen = never_exact(truth.seen)
    attack = Lamp(steps=8, starts=1, discrete=discrete)
    _, reports = run(attack, seen, model)
    every = attack.method().config.every
    assert 8 % every == 0
    rounds = range(0, 9, every)
    assert set(changes) == {"during": {*rounds[1:]}, "at-end": {8}, "never": set()}[discrete]
    assert {progress.step for progress in reports} == {*rounds}
    assert {progress.steps for progress in reports} == {8}


@pytest.mark.parametrize(
    "discrete", [pytest.param("during", marks=pytest.mark.slow), "at-end", "never"]
)
def test_the_last_step_is_looked_at_however_many_there_are(small, observe, discrete):
    model = small("bert")
    truth = observe(model, BATCHES["two texts"], granted=GRANTED)
    seen = never_exact(truth.seen)
    attack = Lamp(steps=7, starts=1, discrete=discrete)
    assert 7 % attack.method().config.every
    _, reports = run(attack, seen, model)
    assert reports[-1].step == 7


def test_out_of_time_the_best_so_far_is_the_answer(small, observe, monkeypatch):
    monkeypatch.setattr(gradient_matching, "seconds_of_step", lambda *_: 0.0)
    model = small("bert")
    truth = observe(model, BATCHES["two texts"], granted=GRANTED)
    seen = changed(truth.seen, GaussianNoise(sigma=0.05))
    answer, reports = run(Lamp(seconds=1e-9, starts=1, guesses=1), seen, model)
    assert {progress.step for progress in reports} == {0}
    assert answer.status == Status.RECOVERED
    text = " / ".join(model.decode(ids) for ids in answer.sequences)
    assert reports[-1].text == text


def test_time_may_run_out_within_a_round(small, observe, monkeypatch):
    model = small("bert")
    truth = observe(model, BATCHES["two texts"], granted=GRANTED)
    polls, stepped, step = [], [], Descent.step

    class Runs(gradient_matching.Watch):
        def up(self, step=0.0):
            polls.append(1)
            return bool(stepped)

    def counting(self, loss):
        stepped.append(1)
        return step(self, loss)

    monkeypatch.setattr(gradient_matching, "Watch", Runs)
    monkeypatch.setattr(Descent, "step", counting)
    attack = Lamp(starts=1, discrete="never")
    answer, reports = run(attack, never_exact(truth.seen), model)
    assert answer.status == Status.RECOVERED
    assert len(stepped) == 1
    # What that step led to is looked at.
    assert [progress.step for progress in reports] == [0, attack.method().config.every]


def test_of_equally_distant_texts_the_prior_decides(small, observe, inside, true_ids, likes_rising):
    model = small("bert")
    truth = observe(model, ["nobody knows it", "he pays us"], granted=GRANTED)

    def check(objective, config, rng):
        def flat(gradients, target):
            parts = next(gradient for gradient in gradients.values() if isinstance(gradient, tuple))
            return torch.full((1, parts[-1].left_RKNX.shape[1]), 0.5)

        ids = true_ids(truth, objective)
        variables = objective.space.variables(ids)
        rising, config = likes_rising, replace(config, lm_weight=1.0)
        same = replace(objective, distance=flat)
        judged = replace(same, prior=rising)
        kept, score = relaxed_tokens.improved(Search(same, config, rng), variables)
        assert torch.equal(kept, ids)
        assert score.tolist() == [0.5]
        improved_ids, score = relaxed_tokens.improved(Search(judged, config, rng), variables)
        fewer = sum(
            int(rising.nll(improved_ids[:, b], objective.rows.mask_RBT[:, b])) for b in range(2)
        )
        before = sum(int(rising.nll(ids[:, b], objective.rows.mask_RBT[:, b])) for b in range(2))
        assert fewer < before
        assert float(score) == pytest.approx(0.5 + fewer / 2)
        # What matches exactly needs no prior.
        exact = replace(objective, prior=rising)
        _, score = relaxed_tokens.improved(Search(exact, replace(config, sweeps=0), rng), variables)
        assert float(score) < float(objective.exact_R)

    inside(check, [truth.seen], model, Lamp(starts=1))


@pytest.mark.parametrize("kind", TWO_KINDS, ids="-".join)
def test_wrong_tokens_and_wrong_orders_are_mended_by_the_gradient(
    small, observe, kind, inside, true_ids
):
    model = small(*kind)
    truth = observe(model, BATCHES["two texts"], granted=GRANTED)

    def check(objective, config, rng):
        ids = true_ids(truth, objective)
        first, second = (objective.rows.content(0, b) for b in range(2))
        moved, other, exchanged = ids.clone(), ids.clone(), ids.clone()
        moved[0, 0, first[:3]] = ids[0, 0, [first[2], *first[:2]]]
        other[0, 1, second[0]] = ids[0, 0, first[0]]
        exchanged[0, 0, first[0]] = ids[0, 1, second[0]]
        exchanged[0, 1, second[0]] = ids[0, 0, first[0]]
        for wrong in (moved, other, exchanged):
            same = wrong[..., None] == objective.space.ids_RM[:, None, None]
            variables = 3.0 * same
            # A token that is missing would be read into its place at once.
            if torch.equal(objective.nearest_tokens(variables), ids):
                continue
            improved_ids, score = relaxed_tokens.improved(Search(objective, config, rng), variables)
            # Texts of one class and length are interchangeable.
            assert sorted(improved_ids[0].tolist()) == sorted(ids[0].tolist())
            assert float(score) < float(objective.exact_R)

    inside(check, [truth.seen], model, Lamp(starts=1))


def test_what_is_tried_has_the_present_first_and_keeps_what_is_known(
    small, observe, inside, true_ids
):
    model = small("bert")
    truth = observe(model, BATCHES["two texts"], granted=GRANTED)

    def check(objective, config, rng):
        ids, rows = true_ids(truth, objective), objective.rows
        variables = objective.space.variables(ids)
        bag = set(objective.space.ids_RM[0].tolist())
        for b in range(2):
            tried = relaxed_tokens.sequence_candidates(
                Search(objective, config, rng), variables, ids, b
            )[0]
            assert torch.equal(tried[0], ids[0, b])
            fixed = rows.fixed_RBT[0, b]
            assert torch.equal(tried[:, fixed], ids[0, b, fixed].expand(len(tried), -1))
            content = [tuple(candidate) for candidate in tried[:, ~fixed].tolist()]
            now = content[0]
            orders = [candidate for candidate in content if sorted(candidate) == sorted(now)]
            others = [candidate for candidate in content if sorted(candidate) != sorted(now)]
            assert 1 < len(orders) <= config.orders + 1
            assert 0 < len(others) <= config.orders
            assert len(set(others)) == len(others)
            assert all(
                sum(x != y for x, y in zip(candidate, now, strict=True)) == 1
                for candidate in others
            )
            assert {token for candidate in content for token in candidate} <= bag
        both = relaxed_tokens.exchange_candidates(Search(objective, config, rng), ids)[0]
        assert torch.equal(both[0], ids[0])
        tokens = ids.flatten().sort().values
        for candidate in both:
            assert torch.equal(candidate.flatten().sort().values, tokens)
            assert torch.equal(candidate[rows.fixed_RBT[0]], ids[0][rows.fixed_RBT[0]])
        assert 1 < len(both) <= 2 * config.orders + 1

    inside(check, [truth.seen], model, Lamp(starts=1))


def test_whole_sentences_are_exchanged_only_if_they_differ_in_class(
    small, observe, inside, true_ids
):
    model = small("bert")
    truth = observe(model, ["it is over now", "is it over now"], granted=GRANTED)
    assert len({len(ids) for ids in truth.sequences}) == 1

    def check(objective, config, rng):
        ids = true_ids(truth, objective)
        whole = ids[0].flip(0)
        for labels, there in (([0, 0], False), ([0, 1], True)):
            labelled = replace(objective.rows, labels_RB=torch.tensor([labels]))
            tried = relaxed_tokens.exchange_candidates(
                Search(replace(objective, rows=labelled), config, rng), ids
            )[0]
            assert any(torch.equal(candidate, whole) for candidate in tried) is there

    inside(check, [truth.seen], model, Lamp(starts=1))


def test_what_becomes_of_a_row_does_not_depend_on_the_others(small, observe, inside, true_ids):
    model = small("bert")
    truths = [observe(model, BATCHES[name], granted=GRANTED) for name in ("one text", "two texts")]

    def check(objective, config, rng):
        # The first has nothing to find, the second much.
        ids = torch.cat([true_ids(truth, objective)[r : r + 1] for r, truth in enumerate(truths)])
        free_BT = ~objective.rows.fixed_RBT[1]
        ids[1][free_BT] = ids[1][free_BT].flip(0)
        variables = objective.space.variables(ids)
        states = [generator.get_state() for generator in rng]
        both, score_R = relaxed_tokens.improved(Search(objective, config, rng), variables)
        assert torch.equal(both[0], ids[0])
        assert not torch.equal(both[1], ids[1])
        for r, (generator, was) in enumerate(zip(rng, states, strict=True)):
            generator.set_state(was)
            chosen = torch.tensor([r])
            alone, score = relaxed_tokens.improved(
                Search(objective.take(chosen), config, [generator]), variables[chosen]
            )
            assert torch.equal(alone[0], both[r])
            assert float(score) == pytest.approx(float(score_R[r]), abs=1e-5)

    inside(check, [truth.seen for truth in truths], model, Lamp(starts=1))


# --- precision --------------------------------------------------------------------------------


def test_evidence_is_in_full_precision_also_where_the_search_is_not(small, observe, inside):
    model = small("bert")
    truth = observe(model, BATCHES["two texts"], granted=GRANTED)
    seen = changed(truth.seen, GaussianNoise(sigma=0.02))
    rough, _ = run(Lamp(steps=4, starts=1, guesses=2, precision="mixed"), seen, model)

    def check(objective, config, rng):
        assert objective.rough is None
        ids = objective.rows.ids_RBT.clone()
        for b, sequence in enumerate(rough.sequences):
            ids[0, b, : len(sequence)] = torch.tensor(sequence)
        fine = objective.scores(objective.space.exact(objective.rows, ids[:, None]))
        assert rough.evidence == (pytest.approx(float(fine[0, 0]), abs=1e-6),) * 2

    inside(check, [seen], model, Lamp(starts=1))
    assert {p.dtype for p in model.module.parameters()} == {torch.float32}


def test_a_search_in_lower_precision_finds_and_proves_a_text(small, observe):
    model = small("bert")
    truth = observe(model, BATCHES["one text"], granted=GRANTED)
    answer, _ = run(Lamp(steps=100, precision="mixed"), truth.seen, model)
    assert answer.sequences == tuple(truth.sequences)
    assert answer.verified


@pytest.mark.parametrize("preset", ["best", "faithful"])
def test_the_last_fifth_of_the_steps_is_in_full_precision(small, observe, monkeypatch, preset):
    model = small("bert")
    truth = observe(model, BATCHES["two texts"], granted=GRANTED)
    seen = never_exact(truth.seen)
    dtypes, loss = [], Objective.loss

    def spy(self, variables):
        dtypes.append(next(self.model.module.parameters()).dtype)
        return loss(self, variables)

    monkeypatch.setattr(Objective, "loss", spy)
    options = {"preset": preset, "precision": "mixed", "starts": 1, "guesses": 1}
    run(Lamp(steps=20, discrete="never", **options), seen, model)
    assert len(dtypes) == 20
    assert set(dtypes[:15]) == {torch.bfloat16}
    assert set(dtypes[16:]) == {torch.float32}


def test_a_distance_below_rounding_is_not_taken_for_equal_gradients(
    small, observe, inside, true_ids
):
    model = small("bert")
    truth = observe(model, BATCHES["two texts"], granted=GRANTED)

    def check(objective, config, rng):
        right = true_ids(truth, objective)
        first, second = objective.rows.content(0, 0)[:2]
        wrong = right.clone()
        wrong[0, 0, [first, second]] = right[0, 0, [second, first]]
        assert objective.equal(right).all()
        assert not objective.equal(wrong).any()
        # Whatever a distance hides, nothing ends before the gradients are equal.
        blind = replace(
            objective, distance=lambda gradients, target: 0 * squared(gradients, target)
        )
        steps = []
        watch = Watch(Clock(None), lambda step, phase, guesses: steps.append(step))
        never = replace(config, steps=3, every=1, discrete_at="never")
        with pytest.MonkeyPatch.context() as patch:
            variables = 3.0 * (wrong[..., None] == objective.space.ids_RM[:, None, None])
            patch.setattr(relaxed_tokens, "initial", lambda *_: variables)
            patch.setattr(Descent, "step", lambda *_: None)
            relaxed_tokens.reconstruct(Search(blind, never, rng, watch))
        assert max(steps) == 3

    inside(check, [truth.seen], model, Lamp(starts=1))
