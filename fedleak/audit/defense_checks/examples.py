"""Tests how far one example moves an update, for several lengths and norms."""

from collections.abc import Sequence

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
"""Tokens of the texts of a batch; norms of their gradients, in clipping norms; and norms for
batches in which all gradients have the same norm."""


Scaled = tuple[Sequence[int], int, float]
"""A text, its class, and the factor of its gradient."""


def left_out(bench: Bench, norm: float) -> Test:
    """Tests how far an example moves the update: compares a batch with it and without it.

    The texts have many lengths and their gradients many norms, each length with a small and a large
    norm. A classifier also gets one text with two classes, whose gradients are opposite.
    """
    most = norm * bench.local.batch_size
    made = random_texts(bench.model, bench.seed, LENGTHS)
    texts = list(zip(made.sequences, made.labels, strict=True))
    lengths = [norm_of(_trained(bench, [(*text, 1.0)], bench.plain)) for text in texts]

    def scale(place: int, norm: float) -> float:
        return norm * most / max(lengths[place], 1e-30)

    def batch(places: Sequence[int], norms: Sequence[float]) -> list[Scaled]:
        return [(*texts[i], scale(i, norm)) for i, norm in zip(places, norms, strict=True)]

    # Each step costs as much as one of training, so only two examples of a batch are left out.
    tried = [
        (batch(range(4), NORMS), [1, 3]),
        (batch(range(4), NORMS[2:] + NORMS[:2]), [0, 3]),
    ]
    # If the batch has one loss, the short texts weigh more in it without the long one.
    tried += [(batch([0, 0, 0, 3], [norm] * 4), [3]) for norm in ALIKE]
    if bench.model.task == CLASSIFICATION:
        tried.append(([(texts[1][0], label, scale(1, NORMS[2])) for label in (0, 1)], [0]))
    moved, where = 0.0, 0
    for examples, places in tried:
        whole = bench.defended(_trained(bench, examples))
        for place in places:
            others = [*examples[:place], *examples[place + 1 :]]
            rest = bench.defended(_trained(bench, others))
            by = distance(whole, rest) - rounded(whole, rest)
            if by > moved:
                moved, where = by, len(examples[place][0])
    return (
        f"no example of a batch moves the update by more than {norm:g}",
        moved <= norm * (1 + ROUNDING),
        f"the one that moves it most, of {where} tokens, by {moved:.4g}; texts of up to "
        f"{max(map(len, made.sequences))} tokens and gradients of {NORMS[0]:g} to {NORMS[-1]:g} "
        "times the limit are tried",
    )


def _trained(
    bench: Bench, examples: Sequence[Scaled], local: LocalTraining | None = None
) -> ClientUpdate:
    """Returns the update of a client with these examples, before the defense is applied."""
    sequences, labels, scales = zip(*examples, strict=True)
    seed = stream_seed(bench.seed, "check", 0)
    texts = Batch(sequences, labels)
    return trained_on(bench.model, texts, local or bench.local, seed=seed, scales=scales)
