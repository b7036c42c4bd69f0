"""The honest server's sum of updates (McMahan et al. 2017, algorithm 1)."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.observation import ClientUpdate, UpdateKind


class _Sum(NamedTuple):
    """Updates, each times its examples, summed by parameter over the clients that sent it."""

    kind: UpdateKind
    tensors: dict[str, Tensor]
    examples: dict[str, int]
    all_examples: int


def _weighted_sum(updates: Iterable[ClientUpdate], precision: Callable[[str], torch.dtype]) -> _Sum:
    """Sums updates in order, one in memory at a time, each parameter in its precision."""
    sums: dict[str, Tensor] = {}
    examples: dict[str, int] = {}
    kind, all_examples = UpdateKind.GRADIENT, 0
    for update in updates:
        kind, all_examples = update.kind, all_examples + update.num_examples
        for name, tensor in update.tensors.items():
            weighted = tensor.to(precision(name)) * update.num_examples
            sums[name] = sums[name].add_(weighted) if name in sums else weighted
            examples[name] = examples.get(name, 0) + update.num_examples
    return _Sum(kind, sums, examples, all_examples)


def mean_update(updates: Iterable[ClientUpdate]) -> ClientUpdate:
    """Returns the mean of updates, weighted by examples: what secure aggregation reveals.

    Of a parameter it is the mean over the clients that sent it, in float32. It is an update of all
    their examples together.
    """
    total = _weighted_sum(updates, lambda name: torch.float32)
    mean = {name: value / total.examples[name] for name, value in total.tensors.items()}
    return ClientUpdate(total.kind, mean, total.all_examples)


def aggregate(
    broadcast: Mapping[str, Tensor], updates: Iterable[ClientUpdate], learning_rate: float
) -> dict[str, Tensor]:
    """Returns the next global weights: the honest server's step, weighted by examples.

    `updates` is read once and in order, so one update is in memory at a time and the sum does
    not depend on who answered first. It is summed in the weights' precision, whatever the
    clients' is. A parameter that nobody shared stays as it is.
    """
    total = _weighted_sum(updates, lambda name: broadcast[name].dtype)
    scale = -learning_rate if total.kind == UpdateKind.GRADIENT else 1.0
    return {
        name: value + scale * total.tensors[name] / total.examples[name]
        if name in total.tensors
        else value
        for name, value in broadcast.items()
    }
