"""The ensemble: who is asked, what is handed over, and what the answer is made of."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from cases import some

from fedleak import attacks
from fedleak.attacks import AttackSetting, certificate, clock, replay
from fedleak.attacks.analytic.query_gradients import QueryGradients
from fedleak.attacks.auto import attack as auto
from fedleak.attacks.auto import budget
from fedleak.attacks.auto.attack import Auto
from fedleak.attacks.auto.budget import Pace, Reserve
from fedleak.attacks.auto.chance import placebo
from fedleak.attacks.certificate import Member
from fedleak.attacks.clock import Clock
from fedleak.attacks.matching.batch_structure import NO_CLUES, Clues
from fedleak.attacks.matching.lamp import Lamp
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.attacks.subspace.answer import Reading
from fedleak.attacks.subspace.state_pursuit import StatePursuit
from fedleak.defenses.cast import Cast
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.defenses.mask import Mask
from fedleak.defenses.quantize import Quantize
from fedleak.defenses.sign import Sign
from fedleak.models import CAUSAL_LM, frame
from fedleak.models.lora import Lora, adapt_
from fedleak.training.observation import UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.training.steps import Batch
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

TEXTS = ("she told us that", "nobody knows it", "he pays for all of his old friends")


def ask(attack, seen, model):
    return attack(seen, model, rng=stream(0, "auto"))


@pytest.fixture
def notes_and_plants(monkeypatch):
    """Notes who is asked, with what is left and which clues; answers may be planted by kind.

    Without `query_gradients` and, of several texts, `maximum_likelihood`: either reads all of these
    batches by itself.
    """
    notes, planted, real = [], {}, auto.read_with
    others = tuple(x for x in auto.ENSEMBLE if not isinstance(x[0], QueryGradients))
    monkeypatch.setattr(auto, "MOST_TEXTS", 1)
    monkeypatch.setattr(auto, "ENSEMBLE", others)

    def read(attack, seen, model, clues, rng, on_progress):
        notes.append((attack, seen, clues))
        plant = planted.get(attack.kind)
        return plant if plant is not None else real(attack, seen, model, clues, rng, on_progress)

    monkeypatch.setattr(auto, "read_with", read)
    return notes, planted


def guess(*sequences, status=Status.RECOVERED, verified=False, tokens=None):
    """An answer of an attack."""
    answer = Reconstruction(
        status=status,
        sequences=sequences,
        evidence=(0.5,) * len(sequences),
        tokens=tokens,
        verified=verified,
    )
    return Reading(answer, sequences)


NOTHING = Reading(Reconstruction.none(Status.ABSTAINED, "read nothing"), ())


@pytest.mark.parametrize(
    ("built", "kinds"),
    [
        (("bert",), ["keyspan"]),
        (("gpt2", CAUSAL_LM), ["dager"]),
        (("llama", CAUSAL_LM), ["dager"]),
    ],
)
def test_nobody_is_asked_after_a_proof(small, observe, notes_and_plants, built, kinds):
    model = small(*built, layers=3, width=48)
    truth = observe(model, TEXTS[:2])
    answer = ask(Auto(), truth.seen, model)
    assert [attack.kind for attack, _, _ in notes_and_plants[0]] == kinds
    assert answer.verified
    assert sorted(answer.sequences) == sorted(truth.sequences)
    assert answer.diagnostics["from"] == kinds * 2
    assert answer.diagnostics["version"] == Auto.version


@pytest.mark.parametrize(("family", "rotary"), [("gpt2", False), ("llama", True)])
def test_states_are_pursued_but_where_matching_reads_more(small, observe, family, rotary):
    model = small(family, CAUSAL_LM)
    plain = observe(model, 1).seen
    masked = replace(plain, update=Mask(fraction=0.5)(plain.update, rng=stream(0, "defense")))
    adam = replace(plain, knowledge=replace(plain.knowledge, recipe=Recipe(optimiser="adam")))
    dropped = replace(plain, knowledge=replace(plain.knowledge, dropout=True))
    steps = replace(plain, knowledge=replace(plain.knowledge, local_steps=4))
    adapt_(model.module, Lora(2, 4.0), model.family.classifier)
    adapted = observe(model, 1).seen
    suited = [
        auto._Attempt(Auto(), seen, model, stream(0, "auto"), lambda progress: None)._suits(
            StatePursuit()
        )
        for seen in (plain, dropped, masked, steps, adam, adapted)
    ]
    assert suited == [True, rotary, rotary, True, True, True]


@pytest.mark.parametrize(
    ("family", "defense"),
    some(
        [
            ("llama", GaussianNoise(relative=1.0)),
            ("gpt2", GaussianNoise(relative=1.0)),
            ("gpt2", Sign()),
            ("llama", Sign()),
        ],
        every=2,
    ),
)
def test_noise_and_signs_hide_no_text_of_a_decoder(small, observe, defense, family):
    model = small(family, CAUSAL_LM)
    truth = observe(model, TEXTS[:1])
    blurred = defense(truth.seen.update, rng=stream(0, "defense"))
    answer = ask(Auto(seconds=20.0), replace(truth.seen, update=blurred), model)
    assert answer.sequences == tuple(truth.sequences)
    assert answer.diagnostics["asked"]["state_pursuit"] == "recovered"
    # Nothing but the blur is left, so nobody else is asked, and nothing is proved.
    assert "lamp" not in answer.diagnostics["asked"]
    assert answer.diagnostics["likely"] == [True]
    assert not answer.verified
    assert "only noise or rounding" in answer.reason


def test_where_rows_of_a_decoder_are_no_mixes_states_come_first_or_rows_are_completed(
    small, observe, notes_and_plants
):
    model = small("llama", CAUSAL_LM)
    notes, planted = notes_and_plants
    planted |= dict.fromkeys(("dager", "keyspan", "state_pursuit", "lamp"), NOTHING)
    plain = observe(model, 1).seen
    adam = replace(plain, knowledge=replace(plain.knowledge, recipe=Recipe(optimiser="adam")))
    rounded = replace(plain, update=Quantize(bits=8)(plain.update, rng=stream(0, "defense")))
    cast = replace(plain, update=Cast(dtype="bfloat16")(plain.update, rng=stream(0, "defense")))
    masked = replace(plain, update=Mask(fraction=0.5)(plain.update, rng=stream(0, "defense")))
    recipe = {"recipe": Recipe(optimiser="adam"), "kind": UpdateKind.DELTA, "learning_rate": 1e-3}
    stepped = observe(model, 1, **recipe).seen
    for seen in (plain, rounded, adam, cast, masked, stepped):
        ask(Auto(), seen, model)
    kinds = [attack.kind for attack, _, _ in notes]
    pursued_last = ["dager", "keyspan", "state_pursuit", "lamp"]
    pursued_first = ["state_pursuit", "dager", "keyspan", "lamp"]
    proved_first = ["keyspan", "dager", "state_pursuit", "lamp"]
    completed = ["keyspan", "state_pursuit", "dager", "lamp"]
    assert kinds == [*2 * pursued_last, *pursued_first, *proved_first, *2 * completed]


@pytest.mark.parametrize(("seconds_of_a_token", "in_time"), [(0.0, True), (1.0, False)])
def test_an_attack_that_cannot_begin_in_time_makes_no_answer_late(
    small, observe, notes_and_plants, monkeypatch, seconds_of_a_token, in_time
):
    model = small("llama", CAUSAL_LM)
    truth = observe(model, 1)
    notes, planted = notes_and_plants
    planted |= dict.fromkeys(("keyspan", "state_pursuit", "lamp"), NOTHING)
    monkeypatch.setattr(Pace, "seconds", (0.0, seconds_of_a_token))
    for dager in (guess(*truth.sequences), NOTHING):
        planted["dager"] = dager
        notes.clear()
        answer = ask(Auto(), noisy_of(truth, 1e-2, granted=False), model)
        begun = any(attack.kind == "state_pursuit" for attack, _, _ in notes)
        assert begun == (in_time or dager is NOTHING)
        assert begun or answer.diagnostics["time_up"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_numbers_of_an_update_that_was_cast_are_of_half_precision(small, observe, dtype):
    plain = observe(small("llama", CAUSAL_LM), 1).seen.update
    cast = Cast(dtype=dtype)(plain, rng=stream(0, "defense"))
    one_more = cast.tensors | {"more": plain.tensors[next(iter(plain.tensors))]}
    were_cast = [
        certificate.were_cast(tensors.values())
        for tensors in (plain.tensors, cast.tensors, one_more)
    ]
    assert were_cast == [False, True, False]


@pytest.mark.parametrize(
    ("factor", "remark"), [(0.3, "a clipped one: it is 0.3 times"), (2, "a sum over 2, not a mean")]
)
def test_a_clipped_or_summed_update_is_proved_as_soon(
    small, observe, notes_and_plants, factor, remark
):
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS[:2])
    tensors = {name: factor * value for name, value in truth.seen.update.tensors.items()}
    seen = replace(truth.seen, update=replace(truth.seen.update, tensors=tensors))
    answer = ask(Auto(), seen, model)
    assert [attack.kind for attack, _, _ in notes_and_plants[0]] == ["keyspan"]
    assert answer.verified
    assert sorted(answer.sequences) == sorted(truth.sequences)
    assert answer.diagnostics["scale"] == pytest.approx(factor, rel=1e-4)
    assert remark in answer.reason


def test_what_one_attack_found_is_what_the_next_begins_with(small, observe, notes_and_plants):
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS, granted=("labels", "lengths"))
    notes, planted = notes_and_plants
    first, second, third = truth.sequences
    counts = tuple(int(c == truth.labels[0]) for c in range(model.num_labels))
    wrong = (*second[:-2], first[1], second[-1])
    planted["keyspan"] = guess(first, wrong)._replace(members=(Member(first, 1 / 3, counts),))
    planted["dager"] = NOTHING
    planted["lamp"] = guess(second, third)
    answer = ask(Auto(), truth.seen, model)
    (_, whole, before), *others = notes
    assert whole == truth.seen
    assert before == NO_CLUES
    for _, left, clues in others:
        # The proved text is taken out; the other one is a guess to begin with.
        assert left.update.num_examples == 2
        assert left.knowledge.lengths == tuple(map(len, (second, third)))
        assert clues.sequences == (wrong,)
    assert answer.verified
    assert sorted(answer.sequences) == sorted(truth.sequences)
    kind_by_sequence = dict(zip(answer.sequences, answer.diagnostics["from"], strict=True))
    assert kind_by_sequence == {first: "keyspan", second: "lamp", third: "lamp"}


def test_sentences_of_several_attacks_stand_in_one_answer(small, observe, notes_and_plants):
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS)
    noisy = GaussianNoise(sigma=0.01)(truth.seen.update, rng=stream(0, "noise"))
    first, second, third = truth.sequences
    _, planted = notes_and_plants
    planted["keyspan"] = guess(first, second[::-1], third[::-1])
    planted["dager"] = guess(second, first[::-1])
    planted["lamp"] = guess(third, second[::-1], status=Status.ABSTAINED)
    answer = ask(Auto(), replace(truth.seen, update=noisy), model)
    assert not answer.verified
    assert sorted(answer.sequences) == sorted(truth.sequences)
    kind_by_sequence = dict(zip(answer.sequences, answer.diagnostics["from"], strict=True))
    assert kind_by_sequence == {first: "keyspan", second: "dager", third: "lamp"}


def test_if_nobody_stands_by_anything_it_says_why(small, observe, notes_and_plants):
    model = small("bert", layers=3)
    for kind in ("keyspan", "dager", "lamp"):
        notes_and_plants[1][kind] = NOTHING
    answer = ask(Auto(), observe(model, TEXTS).seen, model)
    assert answer.status == Status.ABSTAINED
    assert answer.reason == "; ".join(
        f"{kind}: read nothing" for kind in ("keyspan", "dager", "lamp")
    )


def shares_of(model, seen, notes_and_plants):
    """Returns the share of the time that each attack gets, if none takes any."""
    for kind in ("keyspan", "dager", "lamp"):
        notes_and_plants[1][kind] = NOTHING
    ask(Auto(seconds=1000.0), seen, model)
    return [attack.seconds / 1000 for attack, _, _ in notes_and_plants[0]]


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize("local_steps", [1, 4])
def test_spans_may_take_most_of_the_time(small, observe, notes_and_plants, local_steps, noise):
    model = small("bert", layers=3, width=48)
    seen = observe(model, TEXTS[:2]).seen
    seen = replace(seen, knowledge=replace(seen.knowledge, local_steps=local_steps))
    noisy = (
        GaussianNoise(sigma=noise)(seen.update, rng=stream(0, "noise")) if noise else seen.update
    )
    shares = shares_of(model, replace(seen, update=noisy), notes_and_plants)
    assert shares[:2] == pytest.approx([0.75, 0.75], abs=0.05)
    assert 0.5 <= shares[2] < 1


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_steps_that_give_the_update_again_end_the_search(small, observe, notes_and_plants, steps):
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS[:2], kind=UpdateKind.DELTA, learning_rate=1e-3)
    batches = [Batch(truth.sequences, [0, 1])] * steps
    seen = replace(truth.seen, knowledge=replace(truth.seen.knowledge, local_steps=steps))
    tensors = replay.steps_again(model, batches, seen)
    seen = replace(seen, update=replace(seen.update, tensors=tensors))
    for status in (Status.ABSTAINED, Status.RECOVERED):
        notes_and_plants[0].clear()
        notes_and_plants[1]["keyspan"] = guess(*truth.sequences, status=status)
        answer = ask(Auto(), seen, model)
        assert [attack.kind for attack, _, _ in notes_and_plants[0]] == ["keyspan"]
        assert answer.verified
        assert answer.status == Status.RECOVERED
        assert sorted(answer.sequences) == sorted(truth.sequences)
        assert answer.evidence == (0.0, 0.0)
        assert answer.diagnostics["replay_cosine"] == pytest.approx(1)
    # One word changed is no proof, and the others are asked.
    wrong = (*truth.sequences[0][:2], truth.sequences[0][2] + 1, *truth.sequences[0][3:])
    notes_and_plants[0].clear()
    notes_and_plants[1].update(
        keyspan=guess(wrong, truth.sequences[1]), dager=NOTHING, lamp=NOTHING
    )
    assert not ask(Auto(), seen, model).verified
    assert len(notes_and_plants[0]) > 1


@pytest.mark.parametrize(("most", "seconds"), [(1, 30.0), (8, 10.0)])
def test_every_stage_ends_in_time(small, observe, monkeypatch, most, seconds):
    monkeypatch.setattr(auto, "MOST_TEXTS", most)
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS[:2], granted=("labels", "lengths"))
    noisy = GaussianNoise(sigma=0.01)(truth.seen.update, rng=stream(0, "noise"))
    now = [0.0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now[0]))
    asked_after = []

    def up(own, step=0.0):
        now[0] += 0.5
        asked_after.append(now[0])
        return up_of(own, step)

    up_of = clock.Clock.up
    monkeypatch.setattr(clock.Clock, "up", up)
    answer = ask(Auto(seconds=seconds), replace(truth.seen, update=noisy), model)
    assert answer.diagnostics["time_up"]
    # However slow the machine is: one part more of each stage.
    assert asked_after[-1] < seconds + 5


def noisy_of(truth, sigma, granted):
    """Returns what the server sees under noise, with or without its scale."""
    update = GaussianNoise(sigma=sigma)(truth.seen.update, rng=stream(0, "noise"))
    known = replace(truth.seen.knowledge, noise_scale=sigma if granted else None)
    return replace(truth.seen, update=update, knowledge=known)


@pytest.mark.parametrize("granted", [True, False])
def test_a_batch_that_leaves_the_known_noise_ends_the_search(
    small, observe, notes_and_plants, granted
):
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS)
    notes_and_plants[1]["keyspan"] = guess(*truth.sequences)
    notes_and_plants[1]["dager"] = notes_and_plants[1]["lamp"] = NOTHING
    answer = ask(Auto(), noisy_of(truth, 1e-3, granted), model)
    assert len(notes_and_plants[0]) == (1 if granted else 3)
    assert sorted(answer.sequences) == sorted(truth.sequences)
    assert not answer.verified
    assert answer.reason.startswith("nothing proved")


def test_each_text_says_whether_it_explains_more_than_random_texts(
    small, observe, notes_and_plants, monkeypatch
):
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS)
    first, *others = truth.sequences
    draws = stream(0, "wrong")
    wrong = [placebo(model, ids, draws) for ids in others]
    seen = noisy_of(truth, 1e-2, granted=False)
    for kind in ("keyspan", "dager"):
        notes_and_plants[1][kind] = NOTHING
    notes_and_plants[1]["lamp"] = guess(first, *wrong)
    monkeypatch.setattr(
        auto, "sharpened", lambda model, batch, *_: [labelled.ids for labelled in batch]
    )
    answer = ask(Auto(), seen, model)
    likely = dict(zip(answer.sequences, answer.diagnostics["likely"], strict=True))
    assert likely[first]
    assert [likely[ids] for ids in wrong if ids in likely] == [False] * (len(likely) - 1)


def test_marks_alone_are_no_text(small, observe, notes_and_plants):
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS[:1])
    (ids,) = truth.sequences
    for kind in ("maximum_likelihood", "keyspan", "dager"):
        notes_and_plants[1][kind] = NOTHING
    notes_and_plants[1]["lamp"] = guess((ids[0], ids[-1]))
    answer = ask(Auto(), noisy_of(truth, 1e-2, granted=True), model)
    assert answer.status == Status.ABSTAINED


def test_a_guess_is_where_gradient_matching_begins(small, observe):
    model = small("bert", layers=3)
    truth = observe(model, TEXTS[:2], granted=("labels", "lengths"))
    kept = {n: g for n, g in truth.seen.update.tensors.items() if "attention" in n}
    update = GaussianNoise(sigma=1e-3)(
        replace(truth.seen.update, tensors=kept), rng=stream(0, "noise")
    )
    seen = replace(truth.seen, update=update)

    def matched(clues):
        (match,) = Lamp(steps=1, starts=1, guesses=1, orders=1).matches(
            [seen], model, rngs=[stream(0, "lamp")], report=lambda *_: None, clues=[clues]
        )
        return sorted(match.sequences)

    right = sorted(truth.sequences)
    assert matched(NO_CLUES) != right
    assert matched(Clues(sequences=tuple(truth.sequences))) == right
    some = tuple(sorted({t for ids in truth.sequences for t in ids} | set(range(20, 40))))
    assert matched(Clues(tokens=some, sequences=tuple(truth.sequences))) == right


def test_the_plan_names_every_attack_and_why_it_is_out(small, observe):
    model = small("llama", CAUSAL_LM)
    truth = observe(model, 2)
    plan = Auto().plan(AttackSetting.of(truth.seen, model))
    assert [(step.kind, step.obstacle is None) for step in plan] == [
        ("position_marginals", False),
        ("maximum_likelihood", False),
        ("keyspan", True),
        ("query_gradients", False),
        ("step_peeling", False),
        ("dager", True),
        ("state_pursuit", True),
        ("lamp", True),
    ]
    assert "rotary" in plan[0].obstacle
    assert isinstance(Auto(), attacks.Planned)


def test_it_is_refused_only_where_all_of_its_attacks_are(small, observe):
    model = small("bert")
    setting = AttackSetting.of(observe(model, 2).seen, model)
    words = replace(setting, shared=frozenset({model.family.word_embedding}))
    assert "beside the word embedding" in Auto().obstacle(words)
    assert Auto().obstacle(replace(setting, shared=frozenset({"classifier.weight"}))) is None


def test_zeros_are_no_batch(small, observe):
    model = small("bert")
    seen = observe(model, 2).seen
    zeros = {name: torch.zeros_like(value) for name, value in seen.update.tensors.items()}
    answer = ask(Auto(), replace(seen, update=replace(seen.update, tensors=zeros)), model)
    assert answer.status == Status.ABSTAINED


def test_out_of_time_for_the_choice_the_first_guesses_are_the_answer_and_it_says_so(
    small, observe, notes_and_plants, monkeypatch
):
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS[:2])
    notes_and_plants[1]["keyspan"] = guess(*truth.sequences)
    notes_and_plants[1]["dager"] = notes_and_plants[1]["lamp"] = NOTHING
    monkeypatch.setattr(Pace, "seconds", (0.0, 1e9))
    answer = ask(Auto(), noisy_of(truth, 1e-2, granted=False), model)
    assert [*answer.sequences] == truth.sequences
    assert answer.diagnostics["likely"] == [False, False]
    assert answer.diagnostics["time_up"]


def test_out_of_time_for_a_choice_what_was_read_first_is_the_answer(
    small, observe, notes_and_plants, monkeypatch
):
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS[:2])
    notes_and_plants[1]["keyspan"] = guess(*truth.sequences)
    notes_and_plants[1]["dager"] = notes_and_plants[1]["lamp"] = guess(
        *(ids[::-1] for ids in truth.sequences)
    )
    monkeypatch.setattr(Reserve, "gradients_in", lambda own, seconds: 0)
    answer = ask(Auto(), noisy_of(truth, 1e-2, granted=False), model)
    assert sorted(answer.sequences) == sorted(truth.sequences)
    assert set(answer.diagnostics["from"]) == {"keyspan"}
    assert answer.diagnostics["time_up"]


def test_an_attack_leaves_time_to_choose_from_what_others_read(
    small, observe, notes_and_plants, monkeypatch
):
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS[:2])
    notes, planted = notes_and_plants
    planted["dager"] = planted["lamp"] = NOTHING
    monkeypatch.setattr(Reserve, "answer", 30.0)
    given = []
    for read in (guess(*truth.sequences), NOTHING):
        planted["keyspan"] = read
        notes.clear()
        ask(Auto(seconds=100.0), noisy_of(truth, 1e-2, granted=False), model)
        given += [attack.seconds for attack, _, _ in notes if attack.kind == "dager"]
    assert given == pytest.approx([0.75 * 70, 0.75 * 100], rel=0.1)


def test_a_part_of_the_time_is_left_for_the_choice_however_short_that_is(small, observe):
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS[:2])
    pace = SimpleNamespace(model=model, seconds=(0.0, 0.0))
    reserve = Reserve(pace, truth.seen, ())
    assert reserve.answer == reserve.mending == 0
    for given in (reserve.before_choice(Clock(100.0)), reserve.before(Clock(100.0))):
        assert given == pytest.approx(92, abs=0.1)


def test_no_time_is_left_to_mend_words_of_clients_with_dropout(small, observe):
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS[:2])
    dropped = replace(truth.seen, knowledge=replace(truth.seen.knowledge, dropout=True))
    pace = SimpleNamespace(model=model, seconds=(0.01, 1e-4))
    assert Reserve(pace, truth.seen, ()).mending > 0
    assert Reserve(pace, dropped, ()).mending == 0


@pytest.mark.parametrize(("seconds_of_a_token", "share"), [(0.0, 0.1), (1e6, 0.75)])
def test_what_a_decoders_spans_do_not_prove_is_matched_soon_if_there_is_time(
    small, observe, notes_and_plants, monkeypatch, seconds_of_a_token, share
):
    model = small("gpt2", CAUSAL_LM, layers=3, width=48)
    truth = observe(model, TEXTS[:2])
    notes, plants = notes_and_plants
    plants |= dict.fromkeys(("dager", "keyspan", "state_pursuit", "lamp"), NOTHING)
    monkeypatch.setattr(Pace, "seconds", (0.0, seconds_of_a_token))
    ask(Auto(seconds=100.0), noisy_of(truth, 1e-2, granted=False), model)
    (keyspan,) = (attack for attack, *_ in notes if attack.kind == "keyspan")
    assert keyspan.seconds == pytest.approx(100 * share, rel=0.1)


def test_gradient_matching_begins_with_the_guesses_that_explain_the_update_best(
    small, observe, notes_and_plants
):
    model = small("gpt2", CAUSAL_LM, layers=3, width=48)
    truth = observe(model, TEXTS[:2])
    right = [ids[: len(ids) - len(frame(model).last)] for ids in truth.sequences]
    wrong = [tuple(reversed(ids)) for ids in right]
    notes, plants = notes_and_plants
    plants["state_pursuit"] = plants["lamp"] = NOTHING
    plants["dager"], plants["keyspan"] = guess(*right), guess(*wrong)
    ask(Auto(), noisy_of(truth, 1e-2, granted=False), model)
    (clues,) = (clues for attack, _, clues in notes if attack.kind == "lamp")
    assert sorted(clues.sequences[:2]) == sorted(right)
    assert sorted(clues.sequences[2:]) == sorted(wrong)


def test_out_of_time_for_a_comparison_nothing_is_likely_and_it_says_so(
    small, observe, notes_and_plants, monkeypatch
):
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS[:2])
    notes_and_plants[1]["keyspan"] = guess(*truth.sequences)
    notes_and_plants[1]["dager"] = notes_and_plants[1]["lamp"] = NOTHING
    asked_for = []

    def few(own, seconds):
        asked_for.append(seconds)
        return 2 * model.num_labels

    monkeypatch.setattr(Reserve, "gradients_in", few)
    answer = ask(Auto(), noisy_of(truth, 1e-2, granted=False), model)
    assert sorted(answer.sequences) == sorted(truth.sequences)
    assert answer.diagnostics["not_compared"]
    assert not any(answer.diagnostics["likely"])
    assert answer.diagnostics["time_up"]


def test_what_gradients_take_is_measured_once_and_only_where_it_is_asked_for(
    small, observe, monkeypatch
):
    monkeypatch.setattr(auto, "MOST_TEXTS", 1)
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS[:2], granted=("labels", "lengths"))
    tried = []
    monkeypatch.setattr(budget, "trial", lambda *_: tried.append(1))
    assert ask(Auto(), truth.seen, model).verified
    assert not tried
    ask(Auto(seconds=1.0), noisy_of(truth, 1e-2, granted=False), model)
    assert len(tried) == 2


def test_a_single_text_is_determined_with_dropout_on_and_nobody_else_is_asked(
    small, observe, notes_and_plants
):
    model = small("bert", layers=3, width=48)
    truth = observe(model, 1, dropout=True, max_length=20)
    answer = ask(Auto(), truth.seen, model)
    assert [attack.kind for attack, _, _ in notes_and_plants[0]] == ["position_marginals"]
    assert answer.sequences == tuple(truth.sequences)
    assert not answer.verified
    assert answer.diagnostics["likely"] == [True]
    assert answer.diagnostics["from"] == ["position_marginals"]
    assert answer.reason.startswith("not recomputed: the only text")


def test_texts_longer_than_a_head_is_wide_are_not_read_by_keyspan_first(small, observe):
    model = small("bert", width=96)
    texts = [
        "she told us that nobody knows it and the old man who lives near the river sold his books",
        "it is said that John gave Mary what they wanted before the children left the house",
    ]
    truth = observe(model, texts)
    assert max(map(len, truth.sequences)) > 24
    answer = ask(Auto(), truth.seen, model)
    assert answer.diagnostics["asked"] == {"query_gradients": "recovered"}
    assert answer.verified
    assert sorted(answer.sequences) == sorted(truth.sequences)
    assert set(answer.diagnostics["from"]) == {"query_gradients"}


def test_long_texts_of_a_decoder_are_read_by_dager_first(small, observe, notes_and_plants):
    model = small("gpt2", width=64, layers=3)
    long = "she told us that nobody knows it and the old man who lives near the river sold books"
    truth = observe(model, [long, TEXTS[1]])
    assert max(map(len, truth.sequences)) > 16
    answer = ask(Auto(), truth.seen, model)
    assert [attack.kind for attack, _, _ in notes_and_plants[0]] == ["dager"]
    assert answer.verified


def test_a_batch_under_noise_begins_with_what_keyspan_read_and_is_settled(
    small, observe, notes_and_plants, monkeypatch
):
    monkeypatch.setattr(auto, "MOST_TEXTS", 8)
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS)
    notes_and_plants[1]["keyspan"] = guess(*truth.sequences[:2])
    answer = ask(Auto(), noisy_of(truth, 1e-4, granted=False), model)
    assert [attack.kind for attack, _, _ in notes_and_plants[0]] == [
        "keyspan",
        "maximum_likelihood",
    ]
    assert set(notes_and_plants[0][1][2].sequences) == {*truth.sequences[:2]}
    assert sorted(answer.sequences) == sorted(truth.sequences)
    assert answer.diagnostics["likely"] == [True] * 3
    assert not answer.verified


@pytest.mark.parametrize("size", [1, 2])
def test_where_the_closed_form_determines_nothing_the_others_are_asked(
    small, observe, notes_and_plants, size
):
    model = small("bert", layers=3, width=48)
    truth = observe(model, size, max_length=10)
    tensors = dict(truth.seen.update.tensors)
    if size == 1:
        del tensors[model.family.position_embedding]  # a client that freezes them
    answer = ask(
        Auto(), replace(truth.seen, update=replace(truth.seen.update, tensors=tensors)), model
    )
    assert [attack.kind for attack, _, _ in notes_and_plants[0]] == ["keyspan"]
    assert answer.verified
    assert sorted(answer.sequences) == sorted(truth.sequences)


def test_a_single_text_under_noise_is_likely_and_nobody_else_is_asked(
    small, observe, notes_and_plants
):
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS[2:])
    answer = ask(Auto(), noisy_of(truth, 1e-4, granted=False), model)
    kinds = [attack.kind for attack, _, _ in notes_and_plants[0]]
    assert kinds == ["position_marginals", "maximum_likelihood"]
    assert answer.sequences == tuple(truth.sequences)
    assert answer.diagnostics["likely"] == [True]
    assert answer.diagnostics["from"] == ["maximum_likelihood"]
    assert not answer.verified
    assert answer.reason.startswith("nothing proved: it leaves all but noise")
