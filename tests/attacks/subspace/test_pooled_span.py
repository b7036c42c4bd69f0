"""Texts by the span of what reaches the loss: its directions, and who is told from whom."""

import math
from dataclasses import replace

import pytest
import torch

from fedleak.attacks.auto.peeling import gradient_of
from fedleak.attacks.certificate import as_gradient
from fedleak.attacks.subspace.pooled_span import SIGMAS, PooledSpan, directions
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.models import CLASSIFICATION
from fedleak.util.rng import stream

TEXTS = ["he pays for all of his old friends", "the doctor saw a green house", "nobody knows it"]
SIGMA = 1e-3


@pytest.mark.parametrize("strength", [40.0, 60.0, 400.0])
def test_the_angle_by_which_noise_turns_a_direction_is_known(strength):
    rng = torch.Generator().manual_seed(0)
    rows, columns = 500, 300
    left = torch.linalg.qr(torch.randn(rows, 2, generator=rng)).Q
    right = torch.linalg.qr(torch.randn(columns, 2, generator=rng)).Q
    noise = 0.01 * torch.randn(rows, columns, generator=rng)
    seen = directions((left * 0.01 * strength) @ right.T + noise, 0.01, 2)
    assert len(seen.tangent_R) == 2
    # What is left of each true direction, of the part that is seen.
    share = (seen.vector_RX @ right).square().sum(0)
    assert ((1 - share) / share).mean() == pytest.approx(float(seen.tangent_R.mean()), rel=0.2)


def test_directions_that_noise_hides_are_not_seen():
    rng = torch.Generator().manual_seed(0)
    noise = torch.randn(200, 100, generator=rng)
    assert not len(directions(noise, 1.0, 4).tangent_R)
    faint = noise + 0.5 * math.sqrt(200) * torch.eye(200, 100)[:1].T.new_ones(200, 1) / 200
    assert not len(directions(faint, 1.0, 4).tangent_R)


def batch(small, observe, family):
    model = small(family, CLASSIFICATION, layers=2, width=48)
    truth = observe(model, TEXTS, [0, 1, 1])
    update = GaussianNoise(sigma=SIGMA)(truth.seen.update, rng=stream(0, "noise"))
    texts = [tuple(ids) for ids in model.encode(TEXTS)]
    return model, as_gradient(replace(truth.seen, update=update)), texts


def changed(model, texts, number):
    """A text with a word of its neighbour, at each place."""
    ids, others = texts[number], texts[number - 1]
    special = model.special_ids()
    return [
        (*ids[:place], others[place], *ids[place + 1 :])
        for place in range(min(len(ids), len(others)))
        if ids[place] != others[place] and not {ids[place], others[place]} & special
    ]


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_texts_of_the_batch_fit_and_those_with_a_wrong_word_do_not(small, observe, family):
    model, observed, texts = batch(small, observe, family)
    span = PooledSpan(model, observed, SIGMA, 3)
    assert span
    assert all(fit.excess < SIGMAS for fit in span.of(texts))
    for number in range(3):
        wrong = changed(model, texts, number)
        assert wrong
        (right, *others) = span.of([texts[number], *wrong])
        assert all(fit.excess > 2 * SIGMAS for fit in others)
        assert all(fit.score < right.score for fit in others)


def test_a_fit_is_that_of_the_states_that_the_model_tells(small, observe):
    model, observed, texts = batch(small, observe, "bert")
    (ids,) = texts[:1]
    module = model.module.bert.encoder.layer[1]
    states = model.module.bert(torch.tensor([ids]), output_hidden_states=True).hidden_states
    attended = module.attention.self(states[1])[0][0, 0]
    given = {
        "attention.output.dense": attended,
        "intermediate.dense": module.attention.output(attended, states[1][0, 0]),
    }
    given["output.dense"] = module.intermediate(given["intermediate.dense"])
    score = excess = free = 0.0
    for name, x in given.items():
        x = x.detach()
        gradient = observed[f"bert.encoder.layer.1.{name}.weight"]
        seen = directions(gradient, SIGMA, 3)
        n = len(x) - len(seen.tangent_R)
        inside = seen.vector_RX @ x
        left = float((x - inside @ seen.vector_RX).square().sum())
        variance = float(inside.square() @ seen.tangent_R + 1e-10 * x.square().sum()) / n
        room = 100 + 3 * math.sqrt(2 * n)
        score -= 50 * math.log(max(left - n * variance, 0) + room * variance)
        excess, free = excess + left / variance - n, free + n
    (fit,) = PooledSpan(model, observed, SIGMA, 3).of([ids])
    assert fit.score == pytest.approx(score, abs=0.5)
    assert fit.excess == pytest.approx(excess / math.sqrt(2 * free), abs=0.05)


def test_neither_classes_nor_shares_of_texts_matter(small, observe):
    model, observed, texts = batch(small, observe, "bert")
    rng = torch.Generator().manual_seed(0)
    clipped = {
        name: SIGMA * torch.randn(value.shape, generator=rng) for name, value in observed.items()
    }
    for ids, label, share in zip(texts, [1, 0, 1], [0.2, 0.5, 0.3], strict=True):
        for name, gradient in gradient_of(model, ids, label, list(clipped)).items():
            clipped[name] += share * gradient
    fits = PooledSpan(model, clipped, SIGMA, 3).of(texts)
    assert all(fit.excess < SIGMAS for fit in fits)


def test_a_slope_is_how_the_score_changes_with_a_word(small, observe):
    model, observed, texts = batch(small, observe, "bert")
    (ids, *_), place, word = changed(model, texts, 0), 3, 200
    own = ids[place]
    assert ids.count(own) == 1
    slope = float(PooledSpan(model, observed, SIGMA, 3).slopes(ids)[place, word])
    table = model.module.get_parameter(model.family.word_embedding)
    step = 1e-3 * (table[word] - table[own]).detach()
    (before,) = PooledSpan(model, observed, SIGMA, 3).of([ids])
    with torch.no_grad():
        table[own] += step
    (after,) = PooledSpan(model, observed, SIGMA, 3).of([ids])
    with torch.no_grad():
        table[own] -= step
    assert after.score - before.score == pytest.approx(1e-3 * slope, rel=0.1, abs=0.01)


def test_without_the_last_layer_nothing_is_seen(small, observe):
    model, observed, texts = batch(small, observe, "bert")
    kept = {name: value for name, value in observed.items() if ".layer.1." not in name}
    span = PooledSpan(model, kept, SIGMA, 3)
    assert not span
    assert [fit.excess for fit in span.of(texts)] == [0.0] * 3
