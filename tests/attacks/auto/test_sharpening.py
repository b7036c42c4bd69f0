"""Wrong words are mended by the observed gradient alone."""

from dataclasses import replace

import pytest
import torch

from fedleak.attacks.auto.evidence import compare, slopes, weights
from fedleak.attacks.auto.sharpening import Labelled, sharpened
from fedleak.attacks.certificate import as_gradient, close
from fedleak.attacks.clock import Clock
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.models import CAUSAL_LM, CLASSIFICATION, batch_loss
from fedleak.util.rng import stream

TEXTS = ("she told us that", "nobody knows it")
UNTIED = [
    ("bert", CLASSIFICATION),
    ("gpt2", CLASSIFICATION),
    ("llama", CLASSIFICATION),
    ("llama", CAUSAL_LM),
]
BERT_AND_LLAMA = [
    pytest.param(kind, marks=[] if kind in (UNTIED[0], UNTIED[-1]) else pytest.mark.slow)
    for kind in UNTIED
]


def opened(model, ids):
    """Returns a sequence as attacks on spans give it."""
    return ids if close(model, ids) == ids else tuple(ids[:-1])


def wrong(ids):
    """Returns a sequence with two wrong words."""
    return (ids[0], ids[1] + 7, *ids[2:-2], ids[-2] + 11, ids[-1])


def batch_of(model, truth, change=wrong):
    """Returns the batch with changed sequences, as guesses with the true labels and weights."""
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


def noisy(truth):
    update = GaussianNoise(sigma=1e-3)(truth.seen.update, rng=stream(0, "noise"))
    return as_gradient(replace(truth.seen, update=update))


def mended(model, batch, observed, clock=None):
    reports = []
    mended_texts = sharpened(
        model,
        batch,
        observed,
        stream(0, "orders"),
        clock or Clock(None),
        lambda *how: reports.append(how),
    )
    assert all(0 <= fit <= 1 + 1e-6 for _, fit in reports)
    return mended_texts


@pytest.mark.parametrize("built", BERT_AND_LLAMA, ids="-".join)
def test_wrong_words_are_mended(small, observe, built):
    model = small(*built, width=48)
    truth = observe(model, TEXTS)
    mended_texts = mended(model, batch_of(model, truth), noisy(truth))
    assert mended_texts == [opened(model, ids) for ids in truth.sequences]


@pytest.mark.parametrize(
    "built",
    [*BERT_AND_LLAMA, pytest.param(("gpt2", CAUSAL_LM), marks=pytest.mark.slow)],
    ids="-".join,
)
def test_a_part_of_the_update_is_explained_no_worse(small, observe, built):
    model = small(*built, width=48)
    truth = observe(model, TEXTS)
    observed = {n: g for n, g in noisy(truth).items() if "att" in n}
    before = batch_of(model, truth)
    mended_texts = mended(model, before, observed)
    pairs = compare(model, [*(guess.ids for guess in before), *mended_texts], observed)
    index_of = {
        (s, label): k for k, (s, label) in enumerate(zip(pairs.sequence, pairs.label, strict=True))
    }
    ends = [
        pairs.residual([index_of[first + i, guess.label] for i, guess in enumerate(before)])
        for first in (0, len(before))
    ]
    assert ends[1] < ends[0]


def test_right_words_stay(small, observe):
    model = small("bert")
    truth = observe(model, TEXTS)
    batch = batch_of(model, truth, lambda ids: ids)
    assert mended(model, batch, noisy(truth)) == truth.sequences


def test_out_of_time_guesses_stay_as_they_are(small, observe):
    model = small("bert")
    truth = observe(model, TEXTS)
    batch = batch_of(model, truth)
    assert mended(model, batch, noisy(truth), Clock(-1.0)) == [guess.ids for guess in batch]


def test_deltas_are_the_gradients_at_the_embeddings(small, observe):
    model = small("bert")
    truth = observe(model, TEXTS[:1], [1])
    observed = as_gradient(truth.seen)
    (ids,) = truth.sequences
    _, delta_TD = slopes(model, ids, 1, observed, weights(model, observed))
    rows = observed[model.family.word_embedding]
    assert torch.allclose(rows[ids[1]], delta_TD[1], atol=1e-6)
    loss = batch_loss(model, torch.tensor([ids]), torch.ones(1, len(ids)), torch.tensor([1]))
    assert loss.requires_grad  # parameters are as they were
