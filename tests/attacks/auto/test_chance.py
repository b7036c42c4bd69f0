"""What an answer without a proof is worth."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import some

from fedleak.attacks.auto.chance import leaves_noise, noise_of, placebo, statistics, worth
from fedleak.attacks.auto.evidence import Pairs
from fedleak.attacks.auto.sharpening import Labelled, sharpened
from fedleak.attacks.certificate import as_gradient, close
from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.models import CAUSAL_LM, CLASSIFICATION
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.util.rng import stream

TEXTS = ("she told us that", "nobody knows it")
KINDS = [("bert", CLASSIFICATION), ("gpt2", CAUSAL_LM), ("llama", CAUSAL_LM)]


def opened(model, ids):
    """Returns a sequence as attacks on spans give it."""
    return ids if close(model, ids) == ids else tuple(ids[:-1])


def batch_of(model, truth, change=lambda ids: ids):
    """Returns the batch with changed sequences, the true labels and weights."""
    classifies, size = model.task == CLASSIFICATION, len(truth.sequences)
    targets = sum(len(ids) - 1 for ids in truth.sequences)
    return [
        Labelled(
            change(opened(model, ids)),
            label if classifies else 0,
            1 / size if classifies else (len(ids) - 1) / targets,
        )
        for ids, label in zip(truth.sequences, truth.labels, strict=True)
    ]


def noisy(truth, sigma, granted=True):
    update = GaussianNoise(sigma=sigma)(truth.seen.update, rng=stream(0, "noise"))
    scale = sigma if granted else None
    return replace(
        truth.seen, update=update, knowledge=replace(truth.seen.knowledge, noise_scale=scale)
    )


def rng():
    return stream(0, "chance")


@pytest.mark.parametrize(("built", "known"), some(product(KINDS, [True, False]), every=3))
def test_true_texts_are_likely_and_random_texts_are_not(small, observe, built, known):
    model = small(*built, width=48)
    truth = observe(model, TEXTS)
    seen, noise = noisy(truth, 3e-3), 3e-3 if known else None
    observed = as_gradient(seen)
    assert worth(model, batch_of(model, truth), observed, rng(), noise).likely == (True, True)
    draws, likely = stream(1, "others"), 0
    for _ in range(5):
        random = batch_of(model, truth, lambda ids: placebo(model, ids, draws))
        likely += sum(worth(model, random, observed, rng(), noise).likely)
    assert likely <= 1  # of 10


@pytest.mark.parametrize("built", KINDS, ids="-".join)
def test_nothing_is_likely_in_mere_noise(small, observe, built):
    model = small(*built, width=48)
    truth = observe(model, TEXTS)
    draws = stream(0, "noise")
    observed = {
        name: torch.randn(value.shape, generator=draws)
        for name, value in as_gradient(truth.seen).items()
    }
    assert not any(worth(model, batch_of(model, truth), observed, rng()).likely)


def test_chance_is_that_of_the_best_of_all_texts_of_a_length_with_any_label(small, observe):
    model = small("bert", width=48)
    truth = observe(model, TEXTS)
    compared = worth(model, batch_of(model, truth), as_gradient(truth.seen), rng())
    texts = [(len(ids) - 2) * math.log(len(model.tokenizer)) for ids in truth.sequences]
    labels, risk = math.log(model.num_labels), math.log(0.05)
    assert compared.by_chance == pytest.approx([nats + labels - risk for nats in texts])


@pytest.mark.parametrize(("built", "null"), some(product(KINDS, ["noise", "shuffled"]), every=3))
def test_a_text_that_was_sought_in_nothing_is_not_likely(small, observe, built, null):
    """The search raises what a text explains far above random texts: that is its work."""
    model = small(*built, width=48)
    truth = observe(model, TEXTS[:1])
    draws = stream(0, "null")
    observed = {
        name: torch.randn(value.shape, generator=draws)
        if null == "noise"
        else value.flatten()[torch.randperm(value.numel(), generator=draws)].view(value.shape)
        for name, value in as_gradient(truth.seen).items()
    }
    (guess,) = batch_of(model, truth, lambda ids: placebo(model, ids, draws))
    sharpened_texts = sharpened(model, [guess], observed, rng(), UNLIMITED, lambda *_: None)
    assert sharpened_texts != [guess.ids]
    compared = worth(model, [guess._replace(ids=sharpened_texts[0])], observed, rng())
    assert compared.likely == (False,)


def test_a_statistic_is_that_of_a_regression():
    draws = stream(0, "regression")
    gradients_KX = torch.randn(6, 400, generator=draws, dtype=torch.float64)
    noise_X = torch.randn(400, generator=draws, dtype=torch.float64)
    observed_X = 0.5 * gradients_KX[2] + noise_X
    pairs = Pairs(
        sequence=tuple(range(6)),
        label=(0,) * 6,
        gram_KK=gradients_KX @ gradients_KX.T,
        observed_K=gradients_KX @ observed_X,
        total=float(observed_X @ observed_X),
    )
    inverse_KK = torch.linalg.inv(gradients_KX @ gradients_KX.T)
    coefficient_K = torch.linalg.lstsq(gradients_KX.T, observed_X[:, None]).solution[:, 0]
    expected_K = coefficient_K / inverse_KK.diagonal().sqrt()
    torch.testing.assert_close(statistics(pairs, range(6)), expected_K, rtol=1e-4, atol=1e-4)
    some = statistics(pairs, [4, 2])
    alone_K = torch.linalg.lstsq(gradients_KX[[4, 2]].T, observed_X[:, None]).solution[:, 0]
    assert float(some[1] / some[0]) == pytest.approx(float(alone_K[1] / alone_K[0]), rel=0.2)


@pytest.mark.parametrize("built", KINDS, ids="-".join)
def test_only_the_true_batch_leaves_the_noise(small, observe, built):
    model = small(*built, width=48)
    truth = observe(model, TEXTS)
    seen, batch = noisy(truth, 1e-3), batch_of(model, truth)
    assert leaves_noise(model, batch, seen, rng())
    (first, second) = batch
    wrong = first._replace(ids=(*first.ids[:2], first.ids[2] + 5, *first.ids[3:]))
    assert not leaves_noise(model, [wrong, second], seen, rng())
    assert not leaves_noise(model, [first], seen, rng())
    assert not leaves_noise(model, batch, noisy(truth, 1e-3, granted=False), rng())


def test_another_scale_is_not_the_noise(small, observe):
    model = small("bert", width=48)
    truth = observe(model, TEXTS)
    seen, batch = noisy(truth, 1e-3), batch_of(model, truth)
    for scale in (0.9e-3, 1.1e-3):
        rescaled = replace(seen, knowledge=replace(seen.knowledge, noise_scale=scale))
        assert not leaves_noise(model, batch, rescaled, rng())


def test_noise_that_hides_a_word_ends_no_search(small, observe):
    model = small("bert", width=48)
    truth = observe(model, TEXTS)
    assert not leaves_noise(model, batch_of(model, truth), noisy(truth, 10.0), rng())


def test_numbers_that_were_not_sent_count_for_nothing(small, observe):
    model = small("bert", width=48)
    truth = observe(model, TEXTS)
    seen = noisy(truth, 1e-3)
    halved = {
        name: value * (torch.rand(value.shape, generator=stream(0, "mask")) < 0.5)
        for name, value in seen.update.tensors.items()
    }
    masked = replace(seen, update=replace(seen.update, tensors=halved))
    assert leaves_noise(model, batch_of(model, truth), masked, rng())


def test_the_noise_on_a_gradient_is_that_on_the_delta_over_the_learning_rate(small, observe):
    model = small("bert")
    truth = observe(model, TEXTS)
    known = replace(truth.seen.knowledge, noise_scale=0.02, learning_rate=0.1, local_steps=1)
    update = ClientUpdate(UpdateKind.DELTA, truth.seen.update.tensors, 2)
    seen = replace(truth.seen, knowledge=known)
    assert noise_of(seen) == 0.02
    assert noise_of(replace(seen, update=update)) == pytest.approx(0.2)
    steps = replace(known, local_steps=3)
    assert noise_of(replace(seen, knowledge=steps)) is None


def test_out_of_time_nothing_is_said_to_be_noise_alone(small, observe):
    model = small("bert", width=48)
    truth = observe(model, TEXTS)
    clock = Clock(-1.0)
    assert not leaves_noise(model, batch_of(model, truth), noisy(truth, 1e-3), rng(), clock)
    assert clock.rang
