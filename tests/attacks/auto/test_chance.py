"""What an answer without a proof is worth."""

import math
from dataclasses import replace

import pytest
import torch

from fedleak.attacks.auto.chance import leaves_noise, noise_of, placebo, worth
from fedleak.attacks.auto.sharpening import Labelled
from fedleak.attacks.certificate import as_gradient, close
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.models import CAUSAL_LM, CLASSIFICATION
from fedleak.observation import ClientUpdate, UpdateKind
from fedleak.rng import stream

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


@pytest.mark.parametrize("known", [True, False], ids=["scale known", "scale unknown"])
@pytest.mark.parametrize("built", KINDS, ids="-".join)
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


def test_chance_in_noise_is_that_of_the_best_of_all_texts_of_a_length(small, observe):
    model = small("bert", width=48)
    truth = observe(model, TEXTS)
    found = worth(model, batch_of(model, truth), as_gradient(truth.seen), rng())
    content = [len(ids) - 2 for ids in truth.sequences]
    least = [n * math.log(len(model.tokenizer)) for n in content]
    assert all(a > b for a, b in zip(found.by_chance, least, strict=True))


@pytest.mark.parametrize("built", KINDS, ids="-".join)
def test_only_the_true_batch_leaves_the_noise(small, observe, built):
    model = small(*built, width=48)
    truth = observe(model, TEXTS)
    seen, batch = noisy(truth, 1e-3), batch_of(model, truth)
    assert leaves_noise(model, batch, seen, rng())
    (one, other) = batch
    wrong = one._replace(ids=(*one.ids[:2], one.ids[2] + 5, *one.ids[3:]))
    assert not leaves_noise(model, [wrong, other], seen, rng())
    assert not leaves_noise(model, [one], seen, rng())
    assert not leaves_noise(model, batch, noisy(truth, 1e-3, granted=False), rng())


def test_another_scale_is_not_the_noise(small, observe):
    model = small("bert", width=48)
    truth = observe(model, TEXTS)
    seen, batch = noisy(truth, 1e-3), batch_of(model, truth)
    for scale in (0.9e-3, 1.1e-3):
        said = replace(seen, knowledge=replace(seen.knowledge, noise_scale=scale))
        assert not leaves_noise(model, batch, said, rng())


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
