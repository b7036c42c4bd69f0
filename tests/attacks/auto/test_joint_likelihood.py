"""Several texts under noise: the score of a state, its changes, and what is read and likely."""

import math
from dataclasses import replace

import pytest
import torch

from fedleak.attacks.auto.joint_likelihood import MOST_TEXTS, Joint, Search, table
from fedleak.attacks.auto.maximum_likelihood import MaximumLikelihood
from fedleak.attacks.auto.peeling import gradient_of
from fedleak.attacks.certificate import as_gradient
from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Status
from fedleak.attacks.subspace.pooled_span import PooledSpan
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.defenses.quantize import Quantize
from fedleak.models import CLASSIFICATION, frame
from fedleak.util.rng import stream

TEXTS = ["he pays for all of his old friends", "the doctor saw a green house"]
SIGMA = 1e-4


@pytest.fixture
def two(small, observe):
    model = small("bert", CLASSIFICATION, layers=2, width=48)
    truth = observe(model, TEXTS, [0, 1])
    update = GaussianNoise(sigma=SIGMA)(truth.seen.update, rng=stream(0, "noise"))
    return model, replace(truth.seen, update=update), tuple(map(tuple, model.encode(TEXTS)))


def search(model, joint, seconds=None):
    placed = table(model, joint.word_VD, joint.place_PD)
    assert placed is not None
    span = PooledSpan(model, {}, SIGMA, 2)
    return Search(model, joint, span, placed, None, None, Clock(seconds))


def test_two_texts_are_read_and_likely(two):
    model, seen, texts = two
    answer = MaximumLikelihood(seconds=60.0)(seen, model, rng=stream(0, "attack"))
    assert answer.sequences, answer.reason
    assert sorted(answer.sequences) == sorted(texts)
    assert answer.diagnostics["likely"] == [True, True]
    assert not answer.verified


def test_right_texts_leave_noise_and_parts_are_those_of_a_recomputed_gradient(two):
    model, seen, texts = two
    observed = as_gradient(seen)
    joint = Joint(model, observed, SIGMA, [0, 1])
    judgement = joint(texts)
    assert judgement.excess < 3
    assert judgement.score > -300
    wrong = (texts[0], (*texts[1][:2], texts[0][2], *texts[1][3:]))
    left = {name: value.double().clone() for name, value in observed.items()}
    for ids, label in zip(wrong, [0, 1], strict=True):
        for name, gradient in gradient_of(model, ids, label, list(left)).items():
            left[name] -= gradient.double() / 2
    family = model.family
    score = 0.0
    for name, value in left.items():
        if name in (family.word_embedding, family.position_embedding):
            continue
        if name == family.token_type_embedding:
            value = value[:1]
        score += part(value, 100)
    longest = max(map(len, wrong)) + 1
    score += sum(part(row, 10) for row in left[family.position_embedding][:longest])
    used = {token for ids in (*wrong, *texts) for token in ids}
    score += sum(part(left[family.word_embedding][token], 10) for token in used)
    assert joint(wrong).score == pytest.approx(score, rel=0.02)
    assert joint(wrong).excess > 6
    assert joint(wrong).score < 4 * judgement.score


def part(left, directions):
    size = left.numel()
    excess = max(float(left.square().sum()) / SIGMA**2 - size, 0.0)
    return -directions / 2 * math.log1p(excess / (directions + 3 * math.sqrt(2 * size)))


def test_the_table_has_the_words_and_the_ends(two):
    model, seen, texts = two
    search_ = search(model, Joint(model, as_gradient(seen), SIGMA, [0, 1]))
    true = {(token, place) for ids in texts for place, token in enumerate(ids) if place}
    pairs = set(search_.placed.variance)
    assert len(pairs & true) >= 0.8 * len(true)
    assert len(pairs - true) <= 0.2 * len(true)


def test_changes_keep_marks_and_lengths_where_these_are_known(two):
    model, seen, texts = two
    open_search = search(model, Joint(model, as_gradient(seen), SIGMA, [0, 1]))
    known = replace(open_search, lengths=[len(ids) for ids in texts])
    first, last = frame(model)
    for place in range(len(first), 10):
        for change in open_search._changes(texts, place):
            for ids in change.values():
                assert ids[: len(first)] == first
                assert ids[len(ids) - len(last) :] == last
                assert len(ids) > len(first) + len(last)
                assert not set(ids[len(first) : len(ids) - len(last)]) & set(model.special_ids())
        for change in known._changes(texts, place):
            after = [change.get(i, ids) for i, ids in enumerate(texts)]
            assert sorted(map(len, after)) == sorted(map(len, texts))


def test_two_texts_that_have_exchanged_their_tails_are_mended(two):
    model, seen, texts = two
    joint = Joint(model, as_gradient(seen), SIGMA, [0, 1])
    one_search = search(model, joint)
    wrong = ((*texts[0][:4], *texts[1][4:]), (*texts[1][:4], *texts[0][4:]))
    assert one_search._improved(wrong, 4) == texts


def test_what_it_does_not_read_it_says_in_a_line(small, observe, two):
    model, seen, _ = two
    clean = observe(model, TEXTS, [0, 1]).seen
    coarse = replace(clean, update=Quantize(bits=4)(clean.update, rng=stream(0, "coarse")))
    answer = MaximumLikelihood()(coarse, model, rng=stream(0, "attack"))
    assert answer.status == Status.ABSTAINED
    assert "these are not whole" in answer.reason
    many = observe(model, TEXTS * 5, [0, 1] * 5).seen
    answer = MaximumLikelihood()(many, model, rng=stream(0, "attack"))
    assert f"at most {MOST_TEXTS} texts" in answer.reason
    loud = GaussianNoise(sigma=10.0)(seen.update, rng=stream(0, "loud"))
    answer = MaximumLikelihood()(replace(seen, update=loud), model, rng=stream(0, "attack"))
    assert "stands out of the noise" in answer.reason


def test_out_of_time_it_answers_and_says_so(two):
    model, seen, texts = two
    answer = MaximumLikelihood(seconds=0.01)(seen, model, rng=stream(0, "attack"))
    assert len(answer.sequences) == len(texts)
    assert answer.diagnostics["time_up"]
    assert answer.diagnostics["likely"] == [False, False]


def test_a_gradient_of_other_weights_is_not_likely(small, observe, two):
    model, _, _ = two
    other = small("bert", CLASSIFICATION, layers=2, width=48, seed=5)
    seen = observe(other, TEXTS, [0, 1]).seen
    update = GaussianNoise(sigma=SIGMA)(seen.update, rng=stream(0, "noise"))
    answer = MaximumLikelihood(seconds=1.0)(
        replace(seen, update=update), model, rng=stream(0, "attack")
    )
    assert not any(answer.diagnostics.get("likely", []))
    assert torch.isfinite(torch.tensor(answer.diagnostics["noise_scale"]))


def test_a_prior_of_another_vocabulary_leads_no_search(two):
    model, seen, texts = two
    attack = MaximumLikelihood(seconds=60.0, prior="builtin/llama-tiny")
    answer = attack(seen, model, rng=stream(0, "attack"))
    assert answer.sequences, answer.reason
    assert sorted(answer.sequences) == sorted(texts)
