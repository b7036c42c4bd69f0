"""Canaries as they enter steps of DP-SGD.

Shapes: K canaries, S numbers of each.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedleak.privacy.canaries import Canaries
from fedleak.training.batches import Records


@dataclass(frozen=True)
class Planted:
    """Canaries as they enter steps of DP-SGD, each as the gradient of one more example.

    Attributes:
        canaries: Where they are.
        coins_K: Which are in: nobody but the client knows.
        norm: Of each before it is clipped.
        records: Canaries and examples as the sampler draws them.
        drawn_K: Which take part in the step of a FedSGD round, in or not; None: not drawn yet, or
            drawn in every local step.
    """

    canaries: Canaries
    coins_K: Tensor
    norm: float
    records: Records
    drawn_K: Tensor | None = None

    def norms(self) -> Tensor:
        """Returns the norm of each [K]."""
        return torch.full((self.canaries.count,), self.norm)

    def add_(self, sums: Mapping[str, Tensor], takes_part_K: Tensor, factors_K: Tensor) -> None:
        """Adds those that are in and take part, each times its factor."""
        sizes_K = self.norm * factors_K * self.coins_K * takes_part_K
        if sizes_K.any():
            self.canaries.add_(sums, self.canaries.directions() * sizes_K.numpy())
