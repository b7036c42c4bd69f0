"""The ensemble: who is asked, what is handed over, and what the answer is made of."""

from dataclasses import replace

import pytest
import torch

from fedleak import attacks
from fedleak.attacks import AttackSetting
from fedleak.attacks.auto import attack as auto
from fedleak.attacks.auto.attack import Auto
from fedleak.attacks.auto.reading import Reading
from fedleak.attacks.certificate import Member
from fedleak.attacks.matching.batch_structure import NO_CLUES, Clues
from fedleak.attacks.matching.lamp import Lamp
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.models import CAUSAL_LM
from fedleak.reconstruction import Reconstruction, Status
from fedleak.rng import stream

TEXTS = ("she told us that", "nobody knows it", "he pays for all of his old friends")


def ask(attack, seen, model):
    return attack(seen, model, rng=stream(0, "auto"))


@pytest.fixture
def asked(monkeypatch):
    """Notes who is asked, with what is left and which clues; answers may be planted by kind."""
    notes, planted, real = [], {}, auto.read

    def read(attack, seen, model, clues, rng, on_progress):
        notes.append((attack, seen, clues))
        plant = planted.get(attack.kind)
        return plant if plant is not None else real(attack, seen, model, clues, rng, on_progress)

    monkeypatch.setattr(auto, "read", read)
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
        (("gpt2", CAUSAL_LM), ["keyspan"]),
        (("llama", CAUSAL_LM), ["dager"]),
    ],
)
def test_nobody_is_asked_after_a_proof(small, observe, asked, built, kinds):
    model = small(*built, layers=3, width=48)
    truth = observe(model, TEXTS[:2])
    answer = ask(Auto(), truth.seen, model)
    assert [attack.kind for attack, _, _ in asked[0]] == kinds
    assert answer.verified
    assert sorted(answer.sequences) == sorted(truth.sequences)
    assert answer.diagnostics["from"] == kinds * 2
    assert answer.diagnostics["version"] == Auto.version


def test_what_one_attack_found_is_what_the_next_begins_with(small, observe, asked):
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS, granted=("labels", "lengths"))
    notes, planted = asked
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
    of = dict(zip(answer.sequences, answer.diagnostics["from"], strict=True))
    assert of == {first: "keyspan", second: "lamp", third: "lamp"}


def test_sentences_of_several_attacks_stand_in_one_answer(small, observe, asked):
    model = small("bert", layers=3, width=48)
    truth = observe(model, TEXTS)
    noisy = GaussianNoise(sigma=0.01)(truth.seen.update, rng=stream(0, "noise"))
    first, second, third = truth.sequences
    _, planted = asked
    planted["keyspan"] = guess(first, second[::-1], third[::-1])
    planted["dager"] = guess(second, first[::-1])
    planted["lamp"] = guess(third, second[::-1], status=Status.ABSTAINED)
    answer = ask(Auto(), replace(truth.seen, update=noisy), model)
    assert not answer.verified
    assert sorted(answer.sequences) == sorted(truth.sequences)
    of = dict(zip(answer.sequences, answer.diagnostics["from"], strict=True))
    assert of == {first: "keyspan", second: "dager", third: "lamp"}


def test_if_nobody_stands_by_anything_it_says_why(small, observe, asked):
    model = small("bert", layers=3)
    for kind in ("keyspan", "dager", "lamp"):
        asked[1][kind] = NOTHING
    answer = ask(Auto(), observe(model, TEXTS).seen, model)
    assert answer.status == Status.ABSTAINED
    assert answer.reason == "; ".join(
        f"{kind}: read nothing" for kind in ("keyspan", "dager", "lamp")
    )


def test_the_time_is_shared_and_what_is_unused_moves_on(small, observe, asked):
    model = small("bert", layers=3)
    for kind in ("keyspan", "dager", "lamp"):
        asked[1][kind] = NOTHING
    ask(Auto(seconds=80.0), observe(model, TEXTS).seen, model)
    shares = [attack.seconds for attack, _, _ in asked[0]]
    # The planted ones take no time: each gets half of all.
    assert shares == pytest.approx([40.0, 40.0, 40.0], rel=0.1)


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
        ("keyspan", False),
        ("dager", True),
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
