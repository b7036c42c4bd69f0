"""Tests by how much one example moves an update, over lengths and norms."""

from collections.abc import Sequence
from typing import NamedTuple

from fedleak.audit.defense_checks.bench import (
    ROUNDING,
    Bench,
    Test,
    distance,
    random_texts,
    rounded,
    trained_on,
)
from fedleak.defenses.clip import norm_of
from fedleak.models import CLASSIFICATION
from fedleak.training.observation import ClientUpdate
from fedleak.training.settings import LocalTraining
from fedleak.training.steps import Batch
from fedleak.util.rng import stream_seed

LENGTHS, NORMS, ALIKE = (3, 8, 15, 100), (0.5, 1.5, 30.0, 1e4), (3.0, 30.0)
"""Tokens of the texts of a batch, norms of their gradients in clipping norms, and those norms that
all of a batch have, too."""


class Examples(NamedTuple):
    """Examples of a test; their gradients are multiplied by `scales`, or by 1."""

    sequences: Sequence[Sequence[int]]
    labels: Sequence[int]
    scales: Sequence[float] = ()

    def without(self, place: int) -> "Examples":
        """Returns the examples without one of them."""
        return Examples(*([*part[:place], *part[place + 1 :]] for part in self))


def left_out(bench: Bench, norm: float) -> Test:
    """Tests by how much an example of a batch moves the update: with it and without it.

    Their texts are of many lengths and their gradients of many norms, each length with a small and
    a large one. Then there is one text with two classes, whose gradients are opposite.
    """
    most = norm * bench.local.batch_size
    made = random_texts(bench.model, bench.seed, LENGTHS)
    texts, labels = made.sequences, made.labels
    lengths = [
        norm_of(_trained(bench, Examples([x], [y]), bench.plain))
        for x, y in zip(texts, labels, strict=True)
    ]

    def batch(places: Sequence[int], norms: Sequence[float]) -> Examples:
        scales = [
            norm * most / max(lengths[place], 1e-30)
            for place, norm in zip(places, norms, strict=True)
        ]
        return Examples([texts[i] for i in places], [labels[i] for i in places], scales)

    # Each step is as dear as one of training, so of a batch two examples are left out.
    tried = [
        (batch(range(4), NORMS), [1, 3]),
        (batch(range(4), NORMS[2:] + NORMS[:2]), [0, 3]),
    ]
    # Where a loss is one of the batch, the short ones weigh more when the long one is gone.
    tried += [(batch([0, 0, 0, 3], [norm] * 4), [3]) for norm in ALIKE]
    if bench.model.task == CLASSIFICATION:
        scale = NORMS[2] * most / max(lengths[1], 1e-30)
        tried.append((Examples([texts[1]] * 2, [0, 1], [scale] * 2), [0]))
    moved, where = 0.0, 0
    for examples, places in tried:
        whole = bench.defended(_trained(bench, examples))
        for place in places:
            rest = bench.defended(_trained(bench, examples.without(place)))
            by = distance(whole, rest) - rounded(whole, rest)
            if by > moved:
                moved, where = by, len(examples.sequences[place])
    return (
        f"no example of a batch moves the update by more than {norm:g}",
        moved <= norm * (1 + ROUNDING),
        f"the one that moves it most, of {where} tokens, by {moved:.4g}; texts of up to "
        f"{max(map(len, texts))} tokens and gradients of {NORMS[0]:g} to {NORMS[-1]:g} times the "
        "limit are tried",
    )


def _trained(bench: Bench, examples: Examples, local: LocalTraining | None = None) -> ClientUpdate:
    """Returns the update of a client with these examples, before the defense has it."""
    return trained_on(
        bench.model,
        Batch(examples.sequences, examples.labels),
        local or bench.local,
        seed=stream_seed(bench.seed, "check", 0),
        scales=examples.scales,
    )
