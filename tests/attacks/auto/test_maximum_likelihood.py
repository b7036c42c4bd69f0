"""One text under noise: what its rows and the classifier's gradient say, and what is likely."""

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from cases import some

from fedleak.attacks import AttackSetting
from fedleak.attacks.auto.maximum_likelihood import (
    Evidence,
    Head,
    MaximumLikelihood,
    Rows,
    _moved,
    _Search,
    behind_layers,
    is_blurred,
    masked_odds,
    noise_scale,
    used_odds,
    word_odds,
)
from fedleak.attacks.auto.peeling import gradient_of
from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Status
from fedleak.attacks.subspace.coarseness import coarseness
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.defenses.mask import Mask
from fedleak.defenses.prune import Prune
from fedleak.defenses.quantize import Quantize
from fedleak.defenses.sign import Sign
from fedleak.models import CAUSAL_LM, CLASSIFICATION, frame
from fedleak.util.rng import stream

TEXT = "he pays for all of his old friends"


def ask(seen, model, **settings):
    return MaximumLikelihood(**settings)(seen, model, rng=stream(0, "attack"))


def noisy(seen, sigma):
    return replace(seen, update=GaussianNoise(sigma=sigma)(seen.update, rng=stream(0, "noise")))


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("sigma", [0.0, 1e-4])
def test_a_text_is_read_without_its_length_label_or_noise(small, observe, family, sigma):
    model = small(family, CLASSIFICATION, layers=3, width=48)
    truth = observe(model, [TEXT], [1])
    answer = ask(noisy(truth.seen, sigma), model)
    assert answer.sequences == tuple(truth.sequences)
    assert answer.diagnostics["label"] == 1
    assert answer.diagnostics["likely"] == [True]
    assert answer.diagnostics["nearest"] > 3
    assert answer.verified == (not sigma)
    assert "determined" not in answer.diagnostics
    if sigma:
        assert answer.diagnostics["noise_scale"] == pytest.approx(sigma, rel=0.02)


BLURS = (
    Mask(fraction=0.7),
    Quantize(bits=8),
    Quantize(bits=4),
    Prune(fraction=0.9),
    Sign(),
)


def blurred(seen, defense):
    return replace(seen, update=defense(seen.update, rng=stream(0, "blur")))


@pytest.mark.parametrize(
    ("defense", "family"), some(product(BLURS, ["bert", "gpt2"]), every=3), ids=str
)
def test_a_text_is_read_from_coarse_numbers(small, observe, family, defense):
    model = small(family, CLASSIFICATION, layers=3, width=64)
    truth = observe(model, [TEXT], [1])
    seen = blurred(truth.seen, defense)
    assert is_blurred(seen, model)
    answer = ask(seen, model)
    assert answer.sequences == tuple(truth.sequences)
    assert answer.diagnostics["label"] == 1
    # The head of a small GPT-2 is 320 numbers, whose bits may suit another text, too.
    rejects = family == "bert" and not isinstance(defense, Sign)
    assert answer.diagnostics["likely"] == [True] or not rejects
    # What came as it was proves a text; what was rounded proves none.
    assert answer.verified == isinstance(defense, Mask | Prune)


@pytest.mark.parametrize("defense", [*BLURS, Quantize(bits=2)], ids=repr)
def test_the_bounds_hold_the_gradient_and_other_gradients_fall_outside(small, observe, defense):
    """The dense slow version: what was sent, number by number, and the gradient before it."""
    model = small("bert", layers=3, width=64)
    (ids,), seen = (truth := observe(model, [TEXT], [1])).sequences, truth.seen
    names = behind_layers(seen, model)
    sent = blurred(seen, defense)
    coarse = coarseness(sent, names)
    for name in names:
        low, high = coarse.bounds(sent.update.tensors[name])
        own = seen.update.tensors[name]
        room = 1e-6 * own.abs().max()
        assert ((low - room <= own) & (own <= high + room)).all(), name
        value = sent.update.tensors[name]
        assert (low[value > 0] >= 0).all()
        assert (high[value < 0] <= 0).all()
    observed = {name: sent.update.tensors[name] for name in names}
    noise = noise_scale(torch.zeros(9, 9), list(observed.values()))
    head = Head(model, observed, noise, coarse)
    other = (*ids[:2], ids[3], *ids[3:])
    excess = head.excess([ids, other], [0, 1])
    assert float(excess[0, 1]) < 3 < float(excess[[0, 1, 1], [0, 0, 1]].min())
    left = 0.0
    for name in names:
        low, high = (x.double() for x in coarse.bounds(observed[name]))
        own = gradient_of(model, other, 1, names)[name].double()
        left += float(((low - own).clamp_min(0) + (own - high).clamp_min(0)).square().sum())
    if isinstance(defense, Quantize | Sign):  # elsewhere a factor is fitted
        assert float(excess[1, 1]) == pytest.approx(left / noise**2 / head.spread, rel=1e-3)


def test_what_was_not_coarsened_is_exact(small, observe):
    model = small("bert", layers=3, width=64)
    seen = observe(model, [TEXT], [1]).seen
    names = behind_layers(seen, model)
    value = seen.update.tensors[min(names)]
    for exact in (seen, noisy(seen, 1e-4)):
        low, high = coarseness(exact, names).bounds(value)
        assert torch.equal(low, value)
        assert torch.equal(high, value)


def test_masked_rows_are_compared_where_both_came():
    rows = torch.randn(3, 400, generator=stream(0, "rows"))
    words = torch.cat([rows[:2], rows[1:2] + rows[2:3], torch.zeros(1, 400)])
    masks = torch.rand(7, 400, generator=stream(0, "masks")) < 0.2
    odds = masked_odds(Rows(words * masks[:4], rows * masks[4:], 1e-3, 1e-3, kept=0.2, zeros=True))
    assert odds[0].argmax() == 0
    assert odds[1].argmax() == 1
    assert odds[0, 0] > 30
    # The row of a word at two places is equal at none, and one that did not come says nothing.
    assert odds[1:, 2].tolist() == [-20.0, -20.0]
    assert odds[:, 3].tolist() == [0.0] * 3


def test_odds_of_words_count_beside_those_of_places_that_are_certain():
    """In float32 an odd word's 30 nats are lost beside 1e10."""
    odds = Evidence(torch.zeros(3, 9), torch.full((3,), 1e10), range(3, 4), torch.arange(9.0))
    assert odds((1, 2, 3)) - odds((1, 2, 2)) == pytest.approx(3.0)


def test_a_word_that_is_in_the_text_already_is_tried_again_at_another_place(small):
    """Its row is of both places, so it is equal at neither; the others have their places."""
    model = small("bert", layers=1, width=48)
    around = frame(model)
    word, other, wrong = (id for id in range(50, 53))
    odds_TV = torch.zeros(6, len(model.module.get_input_embeddings().weight))
    odds_TV[:, word] = -20.0
    in_text = torch.full((odds_TV.shape[1],), -25.0)
    in_text[[word, other]] = 30.0
    rows = Evidence(odds_TV, torch.zeros(6), range(5, 6), in_text)
    none: Any = None  # it is not asked
    search = _Search(model, around, rows, none, None, [0], Clock(None))
    near = search._near((*around.first, word, wrong, other, *around.last), 2, 32)
    assert (*around.first, word, word, other, *around.last) in near


def test_texts_in_other_orders_have_two_stretches_exchanged():
    """The obvious slow version: all ways to cut the words in four."""
    ids = (0, 1, 2, 3, 4, 9)
    moved = set[tuple[int, ...]]().union(*(_moved(ids, place, 1) for place in range(1, 5)))
    slow = {
        (0, *ids[1:i], *ids[j:k], *ids[i:j], *ids[k:5], 9)
        for i in range(1, 6)
        for j in range(i, 6)
        for k in range(j, 6)
    }
    assert moved == slow - {ids}


def test_a_gradient_of_other_weights_is_not_likely(small, observe):
    """Its rows give the text, which the classifier does not support."""
    truth = observe(small("bert", layers=3, width=48, seed=1), [TEXT])
    answer = ask(noisy(truth.seen, 1e-4), small("bert", layers=3, width=48))
    assert answer.diagnostics["likely"] == [False]
    assert answer.reason == "nothing proved: a guess, which leaves more than noise"


@pytest.mark.parametrize("sigma", [1.0, 100.0])
def test_noise_that_hides_all_is_no_text(small, observe, sigma):
    model = small("bert", layers=3, width=48)
    answer = ask(noisy(observe(model, [TEXT]).seen, sigma), model)
    assert answer.status == Status.ABSTAINED
    assert "no position's row stands out" in answer.reason


def test_what_it_cannot_read_it_says_in_a_line(small, observe):
    model = small("bert", layers=3, width=48)
    two = observe(model, 2).seen
    dropped = observe(model, 1, dropout=True).seen
    dropped = replace(dropped, knowledge=replace(dropped.knowledge, dropout=True))
    assert "without dropout" in ask(dropped, model).reason
    setting = AttackSetting.of(two, model)
    alone = replace(setting, shared=frozenset({"classifier.weight"}))
    assert "position_embeddings" in MaximumLikelihood().obstacle(alone)
    causal = small("gpt2", CAUSAL_LM)
    other = AttackSetting.of(observe(causal, 1).seen, causal)
    assert "model.task" in MaximumLikelihood().obstacle(other)


def test_the_noise_is_that_of_rows_in_no_text():
    rows = 3e-3 * torch.randn(2000, 64, generator=stream(0, "rows"))
    rows[:20] += 1.0
    assert noise_scale(rows, [rows]) == pytest.approx(3e-3, rel=5e-3)
    # The squares of these are zero in float32, and what is noise would be all signal.
    assert 1e27 * noise_scale(1e-27 * rows, [1e-27 * rows]) == pytest.approx(3e-3, rel=5e-3)
    # Of a mask nothing is Gaussian.
    masked = rows * torch.logspace(-1, 1, 2000)[:, None]
    assert "not Gaussian noise" in noise_scale(masked, [rows])


def test_odds_of_words_are_those_of_the_densities():
    """The dense slow version: normal densities of a word's row with and without the place."""
    noise, width = 0.5, 16
    words = torch.randn(5, width, generator=stream(0, "words"))
    places = 2 * torch.randn(3, width, generator=stream(0, "places"))
    odds = word_odds(Rows(words, places, noise, noise))
    for t, place in enumerate(places):
        energy = max(float(place.square().mean()) - noise**2, 0.03 * noise**2)
        share = energy / (energy + noise**2)
        sigma = noise * math.sqrt(1 + share)
        at, elsewhere = torch.distributions.Normal(share * place, sigma), None
        elsewhere = torch.distributions.Normal(torch.zeros(width), sigma)
        dense = (at.log_prob(words) - elsewhere.log_prob(words)).sum(1)
        torch.testing.assert_close(odds[t], dense, rtol=1e-4, atol=1e-4)


def test_a_row_of_noise_is_thought_unused_and_a_large_one_used():
    width = 384
    noise = torch.randn(50, width, generator=stream(0, "noise")).double().square().sum(1)
    assert (used_odds(noise, width) < 3).all()
    assert float(used_odds(noise, width).mean()) < 0
    assert (used_odds(noise + width, width) > 20).all()


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_the_misfit_is_that_of_the_recomputed_gradient_up_to_a_factor(small, observe, family):
    model = small(family, CLASSIFICATION, layers=3, width=48)
    truth = observe(model, [TEXT], [1])
    names = behind_layers(truth.seen, model)
    seen = noisy(truth.seen, 1e-3).update.tensors
    head = Head(model, {name: 7 * seen[name] for name in sorted(names)}, 7e-3)
    (ids,) = truth.sequences
    other = (*ids[:2], ids[3], *ids[3:])
    excess = head.excess([ids, other], [0, 1])
    target = torch.cat([seen[name].flatten() for name in sorted(names)]).double()
    for i, text in enumerate((ids, other)):
        own = gradient_of(model, text, 1, sorted(names))
        column = torch.cat([value.flatten() for value in own.values()]).double()
        factor = (column @ target / column.square().sum()).clamp_min(0)
        left = float((target - factor * column).square().sum()) / 1e-6
        dense = (left - len(target)) / math.sqrt(2 * len(target))
        assert float(excess[i, 1]) == pytest.approx(dense, rel=1e-3, abs=0.02)
    # The text explains its noise; the other class points the other way.
    assert abs(float(excess[0, 1])) < 3 < float(excess[0, 0])


def test_only_noise_that_hides_a_proof_counts(small, observe):
    model = small("bert", layers=3, width=48)
    seen = observe(model, [TEXT]).seen
    assert not is_blurred(seen, model)
    assert not is_blurred(noisy(seen, 1e-9), model)
    assert is_blurred(noisy(seen, 1e-4), model)


def test_out_of_time_it_says_so(small, observe):
    model = small("bert", layers=3, width=48)
    answer = ask(noisy(observe(model, [TEXT]).seen, 1e-4), model, seconds=1e-6)
    assert answer.diagnostics["time_up"]
