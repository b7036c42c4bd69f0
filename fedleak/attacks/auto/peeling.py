"""Takes sequences that are proved out of an update: what is left is an update of the others.

A mean gradient over n sequences is `G = sum_s w_s g_s`, with w_s = 1/n in classification, and in
next-token training the sequence's share of all targets. If the gradients of some are known, the
mean gradient of the others is `(G - sum w_s g_s) / (1 - sum w_s)`.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from fedleak.attacks.certificate import (
    Member,
    as_gradient,
    close,
    multiplicities,
    weighs_clients,
    weights_per_target,
)
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.training.observation import ClientUpdate, Knowledge, Observation, UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.training.steps import Batch, gradient


def peel(
    seen: Observation, model: LanguageModel, members: Sequence[Member], scale: float = 1.0
) -> Observation | None:
    """Returns the observation of the sequences that are not among the members; None without any.

    Args:
        seen: Of one gradient of the model as it was broadcast (`certificate.is_linear`).
        model: At the broadcast weights.
        members: Proved sequences, each once.
        scale: How many times its mean gradient the update is; what is left is a mean gradient.
    """
    repeats = occurrences(model, members, seen)
    left = seen.update.num_examples - sum(repeats)
    share = 1 - sum(member.weight for member in members)
    if left < 1 or share <= 0:
        return None
    observed = as_gradient(seen)
    rest = {name: value / scale for name, value in observed.items()}
    for member in members:
        for label, weight in _weights(member, seen.update.num_examples):
            rest = {
                name: rest[name] - weight * value
                for name, value in gradient_of(model, member.ids, label, list(rest)).items()
            }
    # A number that did not come is still none.
    tensors = {name: (value / share).where(observed[name] != 0, 0) for name, value in rest.items()}
    return replace(
        seen,
        update=ClientUpdate(UpdateKind.GRADIENT, tensors, left),
        knowledge=_without(seen.knowledge, model, members, repeats),
    )


def occurrences(model: LanguageModel, members: Sequence[Member], seen: Observation) -> list[int]:
    """Returns how often each member occurs, as few times as their weights allow."""
    if model.task == CLASSIFICATION:
        return multiplicities(model, members, seen.update.num_examples)
    if weighs_clients(model, seen):
        return [1] * len(members)
    # A weight is occurrences times targets over all targets; whoever has the least occurs once.
    weights = weights_per_target(model, members)
    return [round(weight / min(weights)) for weight in weights]


def _weights(member: Member, batch_size: int) -> list[tuple[int, float]]:
    """Returns the labels of a member, and the weight of its mean loss with each."""
    if member.counts is None:
        return [(0, member.weight)]
    return [(label, count / batch_size) for label, count in enumerate(member.counts) if count]


def gradient_of(
    model: LanguageModel, ids: Sequence[int], label: int, names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Returns the gradient of a sequence's mean loss by parameter name."""
    with torch.enable_grad():
        gradients = gradient(model, Batch([close(model, ids)], [label]), Recipe())
    return {name: gradients[name] for name in names}


def _without(
    known: Knowledge, model: LanguageModel, members: Sequence[Member], repeats: Sequence[int]
) -> Knowledge:
    """Returns what is known of the other sequences: their labels and lengths are those left."""
    gone = [
        (None if member.counts is None else label, len(close(model, member.ids)))
        for member, times in zip(members, repeats, strict=True)
        for label, count in enumerate(member.counts or (times,))
        for _ in range(count)
    ]
    # Where one of the two is not known, any would do.
    size = len(known.labels or known.lengths or ())
    every = list(zip(known.labels or [None] * size, known.lengths or [None] * size, strict=True))
    for label, length in gone:
        fits = (
            pair
            for pair in every
            if (label is None or pair[0] in (None, label)) and pair[1] in (None, length)
        )
        match = next(fits, None)
        if match is not None:
            every.remove(match)
    return replace(
        known,
        labels=None if known.labels is None else tuple(a for a, _ in every if a is not None),
        lengths=None if known.lengths is None else tuple(b for _, b in every if b is not None),
        batch_size=None if known.batch_size is None else max(known.batch_size - len(gone), 1),
    )
