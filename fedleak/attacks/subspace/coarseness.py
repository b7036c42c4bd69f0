"""What was done to the numbers of an update, and the interval that each of them still gives.

A number that was rounded lies within half a step of what came, a sign only says on which side of
zero it was, a pruned number is smaller than all that were kept, and a masked one may be anything.
Nothing is granted: an update's numbers show what happened to them. The largest tensor behind the
last layer has no gradient that is zero by itself, and few equal numbers.

Shapes: X: any axes.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedleak.attacks.certificate import as_gradient
from fedleak.training.observation import Observation, UpdateKind

_LEVELS = 128
"""Sizes of numbers, at most, from which a tensor counts as quantized: 8 bits."""

_PART = 4096
"""Numbers that are looked at first."""

_EQUAL = 8
"""Numbers that have one size, on average, in such a tensor."""

_ZEROS = 0.02
"""Share of zeros above which numbers were set to zero."""

_PRUNED = 0.01
"""The smallest number of a pruned update, as a share of the median: at least this."""


@dataclass(frozen=True)
class Coarseness:
    """What the numbers of an update say about the gradient's numbers.

    Attributes:
        half_widths: A tensor that came -> how far each number may be from what it was.
        kept: Share of the numbers that came, under a mask.
        signs: Only signs came.
        few_bits: Numbers were rounded to multiples of a step.
    """

    half_widths: Callable[[Tensor], Tensor]
    kept: float = 1.0
    signs: bool = False
    few_bits: bool = False

    def bounds(self, value_X: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the bounds of what each number of a tensor was; its sign is unchanged."""
        half_X = self.half_widths(value_X)
        low_X, high_X = value_X - half_X, value_X + half_X
        low_X = torch.where(value_X > 0, low_X.clamp_min(0), low_X)
        return low_X, torch.where(value_X < 0, high_X.clamp_max(0), high_X)

    def as_noise(self, value_X: Tensor) -> tuple[Tensor, float]:
        """Returns a tensor, and the standard deviation of what it lost, as if that were noise.

        If only signs came, the size of each is 1, of which half counts as lost.
        """
        if self is EXACT:
            return value_X, 0.0
        if self.signs:
            return value_X.sign(), 0.5
        half_X = self.half_widths(value_X)
        known_X = half_X[half_X.isfinite()]
        return value_X, float((known_X.square().mean() / 3).sqrt())


EXACT = Coarseness(torch.zeros_like)
"""Numbers came as they were, but for noise."""


def coarseness(seen: Observation, names: Iterable[str]) -> Coarseness:
    """Returns what was done to the numbers of a gradient; a change of weights counts as exact.

    Args:
        seen: The update.
        names: Of tensors; the largest of them has no number that is zero by itself.
    """
    if seen.update.kind != UpdateKind.GRADIENT:
        return EXACT  # weights round, too
    tensors = as_gradient(seen)
    sizes_X = max((tensors[name] for name in sorted(names)), key=Tensor.numel).abs().flatten()
    kept_X = sizes_X[sizes_X > 0]
    kept = len(kept_X) / len(sizes_X)
    # A part has no more levels than the whole. So what is exact need not be sorted.
    levels_X = torch.unique(kept_X[:_PART])
    if len(levels_X) <= _LEVELS:
        levels_X = torch.unique(kept_X)
    if 0 < len(levels_X) <= _LEVELS and len(kept_X) >= _EQUAL * len(levels_X):
        if len(levels_X) == 1 and kept > 1 - _ZEROS:
            return Coarseness(lambda value_X: torch.full_like(value_X, math.inf), signs=True)
        step = min([float(levels_X[0]), *levels_X.diff().tolist()])
        most = round(float(levels_X[-1]) / step)
        return Coarseness(
            lambda value_X: torch.full_like(value_X, float(value_X.abs().max()) / most / 2),
            few_bits=True,
        )
    if kept > 1 - _ZEROS or not len(kept_X):
        return EXACT
    smallest = min(
        float(value_X.abs().masked_fill(value_X == 0, math.inf).min())
        for value_X in tensors.values()
    )
    if smallest > _PRUNED * float(kept_X.median()):
        return Coarseness(lambda value_X: torch.where(value_X == 0, smallest, 0.0))
    return Coarseness(lambda value_X: torch.where(value_X == 0, math.inf, 0.0), kept)
