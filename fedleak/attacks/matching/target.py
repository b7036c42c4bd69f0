"""The observed gradients that guesses are matched with, as factors where they have a low rank.

Shapes: R rows (each about one victim), X and Y the two sides of a weight, Q rank, S chosen rows.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

FACTORED = 0.3
"""Targets are kept as factors if their rank is below this share of their smaller side."""


class LowRankGradient(NamedTuple):
    """Observed gradients of a weight as `left right^T`."""

    left_RXQ: Tensor
    right_RYQ: Tensor


@dataclass(frozen=True)
class Target:
    """The observed gradients of R rows, by parameter name.

    Attributes:
        tensors: Gradients [R, ...], or their factors.
        norms: Their norms [R]; a tensor whose norm is 0 is left out.
    """

    tensors: Mapping[str, LowRankGradient | Tensor]
    norms: Mapping[str, Tensor]

    @property
    def names(self) -> list[str]:
        """The parameters that are matched."""
        return list(self.tensors)

    def take(self, chosen_S: Tensor) -> "Target":
        """Returns the target of some rows; one may be chosen several times."""
        norms = {name: norm_R[chosen_S] for name, norm_R in self.norms.items()}
        return self._with(lambda tensor: tensor[chosen_S], norms)

    def to(self, dtype: torch.dtype) -> "Target":
        """Returns the target in another precision; norms keep theirs."""
        return self._with(lambda tensor: tensor.to(dtype), self.norms)

    def _with(self, change: Callable[[Tensor], Tensor], norms: Mapping[str, Tensor]) -> "Target":
        tensors = {
            name: LowRankGradient(*map(change, value))
            if isinstance(value, LowRankGradient)
            else change(value)
            for name, value in self.tensors.items()
        }
        return Target(tensors, norms)


def target_of(
    observed: Sequence[Mapping[str, Tensor]], rank: int, whole: Collection[str]
) -> Target:
    """Returns the target of several victims, who sent the same parameters.

    Args:
        observed: Each victim's gradients.
        rank: Tokens in the largest batch: a gradient without noise has no larger rank.
        whole: Parameters whose gradients are not factored: tables, because the gradients of guesses
            are formed, too, and all parameters for an absolute distance.
    """
    tensors: dict[str, LowRankGradient | Tensor] = {}
    norms = {}
    for name in observed[0]:
        value_RXY = torch.stack([tensors_of[name] for tensors_of in observed])
        norms[name] = value_RXY.flatten(1).norm(dim=1)
        small = value_RXY.dim() == 3 and rank < FACTORED * min(value_RXY.shape[1:])
        factors = _low_rank(value_RXY, rank) if small and name not in whole else None
        tensors[name] = value_RXY if factors is None else factors
    return Target(tensors, norms)


def _low_rank(value_RXY: Tensor, rank: int) -> LowRankGradient | None:
    """Returns exact factors of gradients of at most this rank; None if the rank is larger.

    A random range finder (Halko et al. 2011) with one power step, then a check against all of it.
    """
    rng = torch.Generator().manual_seed(0)
    probe_YQ = torch.randn(value_RXY.shape[2], rank + 4, generator=rng).to(value_RXY)
    left_RXQ = torch.linalg.qr(value_RXY @ probe_YQ)[0]
    right_RYQ = torch.linalg.qr(value_RXY.mT @ left_RXQ)[0]
    left_RXQ = value_RXY @ right_RYQ
    rest_R = (value_RXY - left_RXQ @ right_RYQ.mT).flatten(1).norm(dim=1)
    whole_R = value_RXY.flatten(1).norm(dim=1)
    rounding = 32 * torch.finfo(value_RXY.dtype).eps
    return LowRankGradient(left_RXQ, right_RYQ) if (rest_R <= rounding * whole_R).all() else None
