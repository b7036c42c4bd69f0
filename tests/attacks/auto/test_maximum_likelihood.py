"""One text under noise: what its rows and the classifier's gradient say, and what is likely."""

import math
from dataclasses import replace

import pytest
import torch

from fedleak.attacks import AttackSetting
from fedleak.attacks.auto.maximum_likelihood import (
    Head,
    MaximumLikelihood,
    hides_proofs,
    noise_scale,
    used_odds,
    word_odds,
)
from fedleak.attacks.auto.peeling import gradient_of
from fedleak.attacks.reconstruction import Status
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.models import CAUSAL_LM, CLASSIFICATION
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
    assert not answer.verified
    assert "determined" not in answer.diagnostics
    if sigma:
        assert answer.diagnostics["noise_scale"] == pytest.approx(sigma, rel=0.02)


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
    assert "updates of one text" in ask(two, model).reason
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
    # Of a mask nothing is Gaussian.
    masked = rows * torch.logspace(-1, 1, 2000)[:, None]
    assert "not Gaussian noise" in noise_scale(masked, [rows])


def test_odds_of_words_are_those_of_the_densities():
    """The dense slow version: normal densities of a word's row with and without the place."""
    noise, width = 0.5, 16
    words = torch.randn(5, width, generator=stream(0, "words"))
    places = 2 * torch.randn(3, width, generator=stream(0, "places"))
    odds = word_odds(words, places, noise)
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
    attack = MaximumLikelihood()
    names = attack.reads(AttackSetting.of(truth.seen, model)) - set(model.family.embeddings)
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
    assert not hides_proofs(seen, model)
    assert not hides_proofs(noisy(seen, 1e-9), model)
    assert hides_proofs(noisy(seen, 1e-4), model)


def test_out_of_time_it_says_so(small, observe):
    model = small("bert", layers=3, width=48)
    answer = ask(noisy(observe(model, [TEXT]).seen, 1e-4), model, seconds=1e-6)
    assert answer.diagnostics["time_up"]
