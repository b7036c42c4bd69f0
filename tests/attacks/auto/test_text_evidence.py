"""What an update says of single texts: beside a dense slow version, and what it tells apart."""

import math
from dataclasses import replace

import pytest
import torch

from fedleak.attacks.auto.joint_likelihood import Joint
from fedleak.attacks.auto.peeling import gradient_of
from fedleak.attacks.auto.text_evidence import TextEvidence, places_before, separated
from fedleak.attacks.certificate import as_gradient
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.models import CLASSIFICATION
from fedleak.util.rng import stream

TEXTS = ["he pays for all of his old friends", "the doctor saw a green house", "nobody knows it"]
LABELS = [0, 1, 1]
SIGMA = 3e-4


@pytest.fixture(params=["bert", "gpt2"])
def three(small, observe, request):
    """A model, its noisy gradient, the evidence, and the texts in the order of their labels."""
    model = small(request.param, CLASSIFICATION, layers=2, width=48)
    truth = observe(model, TEXTS, LABELS)
    update = GaussianNoise(sigma=SIGMA)(truth.seen.update, rng=stream(0, "noise"))
    observed = as_gradient(replace(truth.seen, update=update))
    joint = Joint(model, observed, SIGMA, LABELS)
    evidence = TextEvidence(model, observed, SIGMA, joint, stream(0, "evidence"))
    return model, observed, evidence, tuple(map(tuple, model.encode(TEXTS)))


def nats(evidence, ids, label):
    (explained,) = evidence.of([ids], label)
    return explained.nats


def test_nats_are_those_of_whitened_gradients_that_are_formed(three):
    model, observed, evidence, texts = three
    names = evidence.names
    assert len(names) == 2 * model.num_layers
    for ids in (texts[0], (*texts[0][:3], texts[1][3], *texts[0][4:])):
        own = gradient_of(model, ids, 0, [*names, model.family.word_embedding])
        along = square = whole = 0.0
        for name, layer in zip(names, evidence.layers, strict=True):
            own_OI, sent_OI = own[name], observed[name]
            if own_OI.shape != (len(layer.out_OO), len(layer.in_II)) or "c_proj" in name:
                own_OI, sent_OI = own_OI.T, sent_OI.T
            mine, sent = (
                layer.out_OO.T @ value_OI @ layer.in_II * layer.white_OI
                for value_OI in (own_OI, sent_OI)
            )
            along += float((mine * sent).sum())
            square += float(mine.square().sum())
            whole += float(sent.square().sum())
        slow = -evidence.count / 2 * math.log1p(-(along**2) / square / whole)
        words = sorted({*ids} - model.special_ids())
        rows = own[model.family.word_embedding][words] / SIGMA
        sent = observed[model.family.word_embedding][words] / SIGMA
        slow += float((rows * sent).sum()) ** 2 / 2 / float(rows.square().sum())
        assert nats(evidence, ids, 0) == pytest.approx(slow, rel=0.02)


def test_a_text_explains_less_with_each_wrong_word_and_other_texts_nothing(three):
    model, _, evidence, texts = three
    for ids, label, other in ((texts[0], 0, texts[1]), (texts[1], 1, texts[0])):
        wrong, worse = (*ids[:2], other[2], *ids[3:]), (*ids[:2], *other[2:4], *ids[4:])
        right = nats(evidence, ids, label)
        assert right > 1.1 * nats(evidence, wrong, label) > 1.1 * nats(evidence, worse, label)
        (strange,) = model.encode(["she sells a big red car"])
        assert right > 10 * nats(evidence, tuple(strange), label)
        assert right > 5 * nats(evidence, ids, 1 - label)


def test_what_is_taken_out_explains_nothing_more_and_others_as_much(three):
    _, _, evidence, texts = three
    before = [nats(evidence, ids, label) for ids, label in zip(texts, LABELS, strict=True)]
    evidence.beside({0: texts[0]})
    after = [nats(evidence, ids, label) for ids, label in zip(texts, LABELS, strict=True)]
    assert after[0] < 0.01 * before[0]
    assert all(b > 0.5 * a for a, b in zip(before[1:], after[1:], strict=True))
    rows = evidence.beside(dict(enumerate(texts)))
    assert all(
        nats(evidence, ids, label) < 0.01 * first
        for ids, label, first in zip(texts, LABELS, before, strict=True)
    )
    # What is left of rows is noise, in its unit.
    assert all(float(part.square().mean()) == pytest.approx(1, rel=0.1) for part in rows)


def test_the_right_change_is_among_the_promising_ones(three):
    _, _, evidence, texts = three
    ids, words = texts[0], range(20, 60)
    for wrong in ((*ids[:3], 30, *ids[4:]), (*ids[:3], *ids[4:]), (*ids[:3], 30, *ids[3:])):
        changed = [(*wrong[:3], word, *wrong[3 + same :]) for word in words for same in (0, 1)]
        changed = [*dict.fromkeys([*changed, (*wrong[:3], *wrong[4:])])]
        changed.insert(40, ids)
        assert ids in evidence.promising(wrong, 0, changed, len(changed) // 4)
    assert evidence.promising(ids, 0, changed[:3], 3) == changed[:3]


def test_a_place_of_a_change_comes_from_that_of_its_neighbours():
    ids = (1, 2, 3, 4, 5)
    assert places_before(ids, (1, 2, 9, 4, 5), 7) == [0, 1, 2, 3, 4, 4, 4]
    assert places_before(ids, (1, 2, 9, 3, 4, 5), 6) == [0, 1, 2, 2, 3, 4]
    assert places_before(ids, (1, 2, 4, 5), 5) == [0, 1, 3, 4, 4]
    assert places_before(ids, (1, 2, 5), 3) == [0, 1, 4]


def test_where_no_layer_is_sent_rows_alone_say_something(three):
    model, observed, _, texts = three
    family = model.family
    tables = {name: observed[name] for name in (family.word_embedding, family.position_embedding)}
    joint = Joint(model, observed, SIGMA, LABELS)
    evidence = TextEvidence(model, tables, SIGMA, joint, stream(0, "evidence"))
    wrong = (*texts[0][:2], texts[1][2], *texts[0][3:])
    assert len(evidence.promising(texts[0], 0, [wrong, *texts], 2)) == 2
    assert nats(evidence, texts[0], 0) > nats(evidence, wrong, 0) > 0


def test_squares_of_a_whitening_have_few_singular_values():
    rng = torch.Generator().manual_seed(1)
    outputs, inputs = (torch.rand(size, generator=rng).mul(8).sub(4).exp() for size in (60, 40))
    square_OI = 1 / (outputs[:, None] * inputs + 1)
    few = separated(square_OI)
    left = few.left_OK @ few.right_KI - square_OI
    assert few.right_KI.shape == (4, 40)
    assert float(left.norm() / square_OI.norm()) < 0.02
