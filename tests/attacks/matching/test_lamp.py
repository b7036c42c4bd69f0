"""LAMP as published: its constants, its loop and its discrete step, against plain versions."""

import copy
from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import some
from torch.nn import functional as F

from fedleak.attacks import AttackSetting, Equipped
from fedleak.attacks.matching import lamp, optimizer
from fedleak.attacks.matching import objective as objectives
from fedleak.attacks.matching.candidate_selection import best_of_batch, best_of_sequence, lm_penalty
from fedleak.attacks.matching.dlg import Dlg, Tag
from fedleak.attacks.matching.lamp import FAITHFUL, Lamp
from fedleak.attacks.matching.optimizer import Descent, Search, best_of_each, initial
from fedleak.attacks.reconstruction import Status
from fedleak.models import CAUSAL_LM, CLASSIFICATION, pad
from fedleak.training.wire import partial_update
from fedleak.util.errors import ConfigError
from fedleak.util.rng import stream

TEXTS = ("she told us it is over", "nobody knows it")
GRANTED = ("labels", "lengths")
KINDS = [("bert", CLASSIFICATION), ("gpt2", CLASSIFICATION), ("gpt2", CAUSAL_LM)]


def without_null(seen, model):
    names = seen.update.tensors.keys()
    kept = sorted(names - model.family.null_parameters(names))
    return replace(seen, update=partial_update(seen.update, kept))


LAMP = Lamp(preset="faithful")


# --- constants --------------------------------------------------------------------------------


def test_discrete_steps_are_where_the_authors_code_has_them():
    def rounds(config):
        return [step for step in range(config.steps + 1) if config.discrete(step)]

    base, large = FAITHFUL["base"], FAITHFUL["large"]
    assert rounds(base) == list(range(226, 1952, 75))
    assert len(rounds(base)) == base.rounds == 24
    assert rounds(large) == list(range(601, 4802, 200))
    assert len(rounds(large)) == large.rounds == 22
    assert not rounds(replace(base, discrete_at="never"))
    assert not rounds(replace(base, discrete_at="at-end"))
    assert replace(base, discrete_at="at-end").rounds == 24
    assert not rounds(Dlg(preset="faithful").method().config)


@pytest.mark.parametrize("size", ["base", "large"])
@pytest.mark.parametrize("steps", [200, 1000])
def test_a_shorter_descent_has_the_same_schedule_in_fewer_steps(size, steps):
    usual = FAITHFUL[size]
    short = usual.shortened(steps)
    assert usual.shortened(None) == usual
    assert short.steps == steps
    assert abs(short.rounds - usual.rounds) <= 2
    times = usual.steps // steps
    for step in range(steps):
        expected = usual.schedule(step * times, usual.steps)
        assert short.schedule(step, steps) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("attack", "at", "expected"),
    [
        (Lamp(preset="faithful"), 1999, 0.01 * 0.89**39),
        (Lamp(preset="faithful", size="large"), 4999, 0.01 * (1 - 4999 / 10_000)),
        (Dlg(preset="faithful"), 2499, 0.1),
        (Dlg(preset="faithful", size="large"), 9999, 0.1 / 10_000),
        (Tag(preset="faithful", size="large"), 5000, 0.03 / 2),
    ],
)
def test_step_sizes_are_those_of_the_authors_code(attack, at, expected):
    config = attack.method().config
    assert config.step_size * config.schedule(at, config.steps) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("attack", "loss", "lm_weight", "norm_weight"),
    [
        (Lamp(preset="faithful"), "cos", 0.2, 1.0),
        (Lamp(preset="faithful", loss="l2l1"), "l2l1", 60.0, 25.0),
        (Lamp(preset="faithful", loss="l2"), "l2", 60.0, 25.0),
        (Lamp(preset="faithful", lm_weight=3.0, norm_weight=0.0), "cos", 3.0, 0.0),
        (Dlg(preset="faithful"), "l2", 0.0, 0.0),
        (Tag(preset="faithful"), "l2l1", 0.0, 0.0),
    ],
)
def test_weights_are_those_of_the_authors_code(attack, loss, lm_weight, norm_weight):
    method = attack.method()
    assert method.loss == loss
    assert (method.config.lm_weight, method.config.norm_weight) == (lm_weight, norm_weight)
    assert method.free_config == method.config
    assert method.scaled == (attack.kind == "lamp")
    published = lamp.reconstruct if attack.kind == "lamp" else optimizer.match_gradients
    assert method.algorithm is published


# --- algorithm 1 ------------------------------------------------------------------------------


def plain_descent(model, truth, observed, start_BTD, fixed_BT, ids_BT, weights, steps):
    """Adam on embeddings with formed gradients, as the authors' code has it."""
    own = dict(model.module.named_parameters())
    table_VD = own[model.family.word_embedding].detach()
    _, mask_BT = pad(truth.sequences, model.tokenizer.pad_token_id, model.device)
    x = start_BTD.clone().requires_grad_()
    adam = torch.optim.Adam([x], lr=0.01)
    for step in range(steps):
        # 40 steps of the 2000 that are usual in one of 5: 0.89 every 50.
        adam.param_groups[0]["lr"] = 0.01 * 0.89 ** (step * 2000 // steps // 50)
        with torch.no_grad():
            x[fixed_BT] = table_VD[ids_BT[fixed_BT]]
        logits = model.family.logits(model.module, mask_BT, ids_BT=None, embeds_BTD=x)
        if model.task == CLASSIFICATION:
            loss = F.cross_entropy(logits, torch.tensor(truth.labels))
        else:
            near = F.normalize(x, dim=-1) @ F.normalize(table_VD, dim=-1).T
            targets = near.argmax(-1).where(~fixed_BT, ids_BT)[:, 1:]
            loss = F.cross_entropy(logits[:, :-1][mask_BT[:, 1:] > 0], targets[mask_BT[:, 1:] > 0])
        gradients = torch.autograd.grad(loss, [own[n] for n in observed], create_graph=True)
        pairs = list(zip(gradients, observed.values(), strict=True))
        if weights is None:
            apart = sum((g - o).square().sum() + 0.01 * (g - o).abs().sum() for g, o in pairs)
        else:
            cosines = [
                F.cosine_similarity(g.flatten(), o.flatten(), dim=0, eps=0) for g, o in pairs
            ]
            apart = 1 - sum(cosines) / len(cosines)
            mean = x.norm(dim=-1)[mask_BT > 0].mean()
            apart = apart + weights * (mean - table_VD.norm(dim=-1).mean()) ** 2
        (x.grad,) = torch.autograd.grad(apart, x)
        adam.step()
    return x.detach()


@pytest.mark.parametrize(("loss", "kind"), some(product(["cos", "tag"], KINDS), every=2))
def test_five_steps_are_those_of_a_plain_descent(small, observe, kind, loss, inside):
    model = small(*kind)
    truth = observe(model, TEXTS, granted=GRANTED)
    seen = without_null(truth.seen, model)
    oracle = replace(model, module=copy.deepcopy(model.module))
    word = model.family.word_embedding
    observed = {n: v for n, v in seen.update.tensors.items() if n != word and v.any()}
    tag = loss == "tag"
    like = Lamp(preset="faithful", guesses=1, steps=5, discrete="never")

    def check(objective, config, rng):
        rows = objective.rows
        start_RBTD = initial(Search(objective, config, rng))
        if not tag:
            lengths = start_RBTD.norm(dim=-1)[~rows.fixed_RBT]
            mean = objective.space.table_VD.norm(dim=-1).mean()
            torch.testing.assert_close(lengths, mean.expand_as(lengths))
        config = replace(config, step_size=0.01, schedule=like.method().config.schedule)
        descent = Descent(start_RBTD, config)
        for step in range(1, 6):
            descent.step(config.loss(objective, step))
        x = plain_descent(
            oracle,
            truth,
            observed,
            start_RBTD[0],
            rows.fixed_RBT[0],
            rows.ids_RBT[0],
            None if tag else 1.0,
            5,
        )
        free = ~rows.fixed_RBT[0]
        assert (x - start_RBTD[0])[free].abs().mean() > 1e-3
        torch.testing.assert_close(descent.now()[0][free], x[free], atol=1e-4, rtol=1e-4)

    inside(check, [seen], model, Tag(preset="faithful", steps=5) if tag else like)


@pytest.mark.parametrize("at_once", [1, 10_000])
def test_the_best_of_random_starts_and_of_its_orders_is_begun_with(
    small, observe, monkeypatch, at_once, inside
):
    model = small("bert")
    truth = observe(model, TEXTS, granted=GRANTED)
    monkeypatch.setattr(objectives, "TOKENS_AT_ONCE", {"cpu": at_once})

    def check(objective, config, rng):
        # As drawn: a start's length changes its distance.
        space, rows = replace(objective.space, norm=None), objective.rows
        objective = replace(objective, space=space)

        def distance(start):
            return float(objective.scores(space.guess(rows, start[:, None]))[0, 0])

        variables = initial(Search(objective, replace(config, guesses=8), [stream(0, "starts")]))
        starts_rng = stream(0, "starts")
        drawn = [space.start(rows, [starts_rng]) for _ in range(8)]
        best = min(drawn, key=distance)
        assert best is not drawn[0]
        assert best is not drawn[-1]
        assert distance(variables) < distance(best)
        for b in range(2):
            # The same vectors in another order.
            free = rows.content(0, b)
            mine, theirs = variables[0, b, free].sum(-1), best[0, b, free].sum(-1)
            assert sorted(mine.tolist()) == pytest.approx(sorted(theirs.tolist()), abs=1e-5)

    inside(check, [without_null(truth.seen, model)], model, LAMP)


def test_what_is_returned_had_the_lowest_loss_on_the_way(small, observe, monkeypatch, inside):
    model = small("bert")
    truth = observe(model, TEXTS, granted=GRANTED)
    way, step = [], Descent.step

    def spy(self, loss):
        before = self.now().clone()
        way.append((float(step(self, loss)), before))
        return torch.tensor([way[-1][0]])

    monkeypatch.setattr(Descent, "step", spy)

    def check(objective, config, rng):
        wild = replace(config, steps=12, step_size=3.0, guesses=1)
        (reconstruction,) = lamp.reconstruct(Search(objective, wild, rng))
        lowest_loss, before = min(way, key=lambda pair: pair[0])
        assert way[-1][0] > lowest_loss
        assert reconstruction.loss == pytest.approx(lowest_loss)
        assert torch.equal(reconstruction.ids_BT, objective.nearest_tokens(before)[0])

    inside(check, [without_null(truth.seen, model)], model, replace(LAMP, discrete="never"))


@pytest.mark.parametrize("preset", ["best", "faithful"])
def test_distances_are_as_they_are_or_shares_of_the_observed_gradient(
    small, observe, preset, inside
):
    model = small("bert")
    truth = observe(model, TEXTS, granted=GRANTED)

    def check(objective, config, rng):
        squares = sum(float(norm_R.square()) for norm_R in objective.target.norms.values())
        expected = 1.0 if preset == "faithful" else squares
        assert objective.normalizer_R.tolist() == [pytest.approx(expected, rel=1e-5)]

    inside(check, [truth.seen], model, Dlg(preset=preset, starts=1))


# --- discrete step ----------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_the_best_of_all_that_was_tried_is_chosen(small, observe, kind, inside):
    model = small(*kind)
    truth = observe(model, TEXTS, granted=GRANTED)

    def check(objective, config, rng):
        rng = stream(0, "tried")
        free_BT = ~objective.rows.fixed_RBT[0]
        tried = objective.rows.ids_RBT[:, None].repeat(1, 30, 1, 1)
        for k in range(30):
            tried[0, k, free_BT] = torch.randint(10, 300, (int(free_BT.sum()),), generator=rng)
        lm_penalty = torch.rand(1, 30, generator=rng)
        space, rows = objective.space, objective.rows
        totals = objective.scores(space.exact(rows, tried)) + lm_penalty
        best = best_of_batch(Search(objective, config, []), tried, lm_penalty)
        k = int(totals.argmin())
        assert torch.equal(best.chosen_RX[0], tried[0, k])
        assert float(best.apart_R + best.lm_penalty_R) == pytest.approx(
            float(totals.min()), abs=1e-5
        )
        equal = best_of_batch(Search(objective, config, []), tried[:, [3, 3]], torch.zeros(1, 2))
        assert torch.equal(equal.chosen_RX[0], tried[0, 3])

        now = space.exact(rows, tried[:, 5][:, None])
        changed = tried[:, 5][:, None].repeat(1, 30, 1, 1)
        changed[:, :, 1] = tried[:, :, 1]
        totals = objective.scores(space.exact(rows, changed)) + lm_penalty
        own = rows.sequences_of([1])
        best = best_of_sequence(
            Search(objective, config, []),
            now,
            1,
            lambda ids_RKT: space.exact(own, ids_RKT[:, :, None, : own.length]),
            tried[:, :, 1],
            lm_penalty,
        )
        assert torch.equal(best.chosen_RX[0], tried[0, int(totals.argmin()), 1])

    inside(check, [without_null(truth.seen, model)], model, LAMP)


def test_the_prior_counts_as_the_mean_over_real_sequences(small, observe, inside, likes_rising):
    model = small("bert")
    seen = [
        observe(model, TEXTS, granted=GRANTED).seen,
        observe(model, TEXTS[:1], granted=GRANTED).seen,
    ]

    def check(objective, config, rng):
        ids = objective.rows.ids_RBT.clone()
        ids[~objective.rows.fixed_RBT] = torch.arange(200, 100, -1)[
            : int((~objective.rows.fixed_RBT).sum())
        ]
        prior, config = likes_rising, replace(config, lm_weight=0.5)
        judged = replace(objective, prior=prior)
        penalty = lm_penalty(Search(judged, config, []), 0, ids[:, None, 0])
        alone = prior.nll(ids[:, 0], objective.rows.mask_RBT[:, 0])
        assert alone.min() > 1
        torch.testing.assert_close(penalty[:, 0], 0.5 * alone / torch.tensor([2.0, 1.0]))
        assert not lm_penalty(
            Search(judged, replace(config, lm_weight=0.0), []), 0, ids[:, None, 0]
        ).any()
        assert not lm_penalty(Search(objective, config, []), 0, ids[:, None, 0]).any()

    inside(check, [without_null(observation, model) for observation in seen], model, LAMP)


def test_of_equally_distant_orders_the_one_that_the_prior_likes_is_chosen(
    small, observe, inside, likes_rising
):
    model = small("bert")
    truth = observe(model, ["nobody knows it", "he pays us"], granted=GRANTED)

    def check(objective, config, rng):
        flat = replace(
            objective,
            distance=lambda gradients, target: torch.full(
                (
                    1,
                    next(iter(gradients.values())).shape[1]
                    if torch.is_tensor(next(iter(gradients.values())))
                    else next(iter(gradients.values()))[-1].left_RKNX.shape[1],
                ),
                0.5,
            ),
        )
        judged = replace(flat, prior=likes_rising)
        ids = objective.rows.ids_RBT.clone()
        free = ~objective.rows.fixed_RBT
        ids[free] = torch.arange(100 + int(free.sum()), 100, -1)
        variables = objective.space.variables(ids)
        for _ in range(4):
            variables = lamp.better_order(
                Search(judged, replace(config, lm_weight=1.0), rng), variables
            )
        read = objective.nearest_tokens(variables)
        for b in range(2):
            places = objective.rows.content(0, b)
            assert read[0, b, places].tolist() == sorted(ids[0, b, places].tolist())
        kept = lamp.better_order(
            Search(flat, replace(config, lm_weight=1.0), rng),
            objective.space.variables(ids),
        )
        assert torch.equal(objective.nearest_tokens(kept), ids), "the present order, of equals"

    inside(check, [without_null(truth.seen, model)], model, LAMP)


@pytest.mark.parametrize("kind", KINDS, ids="-".join)
def test_wrong_orders_are_mended_by_the_gradient(small, observe, kind, inside):
    model = small(*kind)
    truth = observe(model, TEXTS, granted=GRANTED)

    def check(objective, config, rng):
        ids = objective.rows.ids_RBT.clone()
        for b, sequence in enumerate(truth.sequences):
            ids[0, b, : len(sequence)] = torch.tensor(sequence)
        wrong = ids.clone()
        places = objective.rows.content(0, 0)
        wrong[0, 0, places[:2]] = ids[0, 0, places[:2]].flip(0)
        variables = objective.space.variables(wrong)
        assert not torch.equal(objective.nearest_tokens(variables), ids)
        mended = lamp.better_order(Search(objective, config, rng), variables)
        assert torch.equal(objective.nearest_tokens(mended), ids)

    inside(check, [without_null(truth.seen, model)], model, LAMP)


# --- end to end -------------------------------------------------------------------------------


def run(attack, seen, model):
    reports = []
    (answer,) = attack.many(
        [seen], model, rngs=[stream(0, "lamp")], report=lambda _, how: reports.append(how)
    )
    return answer, [progress for progress in reports if not progress.phase]


@pytest.mark.parametrize("discrete", ["during", "at-end", "never"])
def test_words_change_places_when_they_may(small, observe, monkeypatch, discrete):
    model = small("bert", width=16)
    truth = observe(model, ["nobody knows it"], granted=GRANTED)
    seen = replace(
        truth.seen, update=partial_update(truth.seen.update, ["query", "position", "classifier"])
    )
    moved, better_order = [], lamp.better_order

    def spy(*args):
        moved.append(len(steps))
        return better_order(*args)

    steps, step = [], Descent.step

    def counting(self, loss):
        steps.append(1)
        return step(self, loss)

    monkeypatch.setattr(lamp, "better_order", spy)
    monkeypatch.setattr(Descent, "step", counting)
    attack = Lamp(preset="faithful", steps=52, guesses=2, orders=4, discrete=discrete)
    answer, reports = run(attack, seen, model)
    config = replace(attack.method().config, discrete_at="during")
    expected = [s for s in range(1, 53) if config.discrete(s)]
    assert len(expected) > 10
    assert moved == {"during": expected, "at-end": [52] * len(expected), "never": []}[discrete]
    assert answer.status == Status.RECOVERED
    assert [progress.step for progress in reports] == [50, 52]
    assert reports[0].loss >= reports[1].loss
    assert {progress.steps for progress in reports} == {52}


@pytest.mark.core
def test_the_published_attack_finds_a_short_text(small, observe):
    model = small("bert", width=16)
    truth = observe(model, ["nobody knows"], granted=GRANTED)
    attack = Lamp(preset="faithful", steps=100, guesses=20)
    answer, reports = run(attack, without_null(truth.seen, model), model)
    assert answer.sequences == tuple(truth.sequences)
    assert answer.verified
    assert [progress.step for progress in reports] == [50, 100]
    losses = [progress.loss for progress in reports]
    assert losses == sorted(losses, reverse=True)


def test_a_search_that_has_no_time_for_a_step_says_so(small, observe):
    model = small("bert")
    truth = observe(model, TEXTS, granted=GRANTED)
    answer, _ = run(Lamp(preset="faithful", guesses=2, seconds=1e-9), truth.seen, model)
    assert answer.status == Status.ABSTAINED
    assert answer.reason == "no step of the search ends in seconds = 1e-09: give it more"
    assert answer.diagnostics["time_up"]


def test_a_prior_is_asked_for_by_name_and_given_to_the_algorithm(
    small, observe, monkeypatch, likes_rising
):
    from fedleak.attacks.matching import gradient_matching

    model = small("bert")
    truth = observe(model, TEXTS[1:], granted=GRANTED)
    prior, loaded = likes_rising, []
    monkeypatch.setattr(
        gradient_matching.priors,
        "load",
        lambda name, for_model: loaded.append((name, for_model)) or prior,
    )
    given = []

    def algorithm(search):
        objective = search.objective
        given.append(objective.prior)
        return best_of_each(objective.victim_R, objective.rows.ids_RBT, torch.zeros(1))

    method = Lamp.method
    monkeypatch.setattr(Lamp, "method", lambda self: replace(method(self), algorithm=algorithm))
    run(Lamp(prior="builtin/x", starts=1), truth.seen, model)
    run(Lamp(starts=1), truth.seen, model)
    assert given == [prior, None]
    assert loaded == [("builtin/x", model)]


@pytest.mark.parametrize(
    ("kind", "preset"),
    some(product([*KINDS, ("llama", CAUSAL_LM)], ["best", "faithful"]), every=3),
)
def test_a_model_that_transformers_loaded_is_attacked_like_ours(
    small, observe, tmp_path, kind, preset
):
    ours = small(*kind, width=16)
    ours.module.save_pretrained(tmp_path)
    plain = replace(ours, module=type(ours.module).from_pretrained(tmp_path).eval())
    # Its default: fused attention, which has no second derivative.
    assert plain.module.config._attn_implementation == "sdpa"
    truth = observe(ours, ["nobody knows"], granted=GRANTED)
    attack = Lamp(preset=preset, steps=8, guesses=2, orders=8)
    answer, _ = run(attack, truth.seen, plain)
    assert plain.module.config._attn_implementation == "sdpa"
    expected, _ = run(attack, truth.seen, ours)
    assert ours.module.config._attn_implementation == "eager"
    assert answer.sequences == expected.sequences
    assert answer.evidence == pytest.approx(expected.evidence, rel=1e-4, abs=1e-6)


def test_whether_it_can_work_is_said_without_a_look_at_the_prior(small, observe, tmp_path):
    model = small("bert", width=16)
    seen = observe(model, TEXTS, granted=GRANTED).seen
    attack = Lamp(prior=str(tmp_path / "gone"))
    assert attack.obstacle(AttackSetting.of(seen, model)) is None
    assert isinstance(attack, Equipped)
    for needs_it in (attack.check_equipment, lambda: run(attack, seen, model)):
        with pytest.raises(ConfigError, match=r"^prior = .*gone.* there is no such folder"):
            needs_it()
    Lamp().check_equipment()
    Lamp(prior="builtin/gpt2-tiny").check_equipment()
