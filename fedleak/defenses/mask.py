"""A random part of the update set to zero."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from fedleak.defenses import Claims, Defense
from fedleak.training.observation import ClientUpdate
from fedleak.training.settings import LocalTraining


@dataclass(frozen=True)
class Mask(Defense):
    """Sets a random fraction of the numbers to zero (LAMP, appendix). No privacy guarantee.

    Attributes:
        fraction: Share of the numbers that are set to zero.
    """

    kind: ClassVar[str] = "mask"
    fraction: Annotated[float, Field(gt=0, lt=1)]

    def __call__(self, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        """Returns the update with each number kept with probability 1 - fraction."""

        def masked(value: torch.Tensor) -> torch.Tensor:
            return value.masked_fill(torch.rand(value.shape, generator=rng) < self.fraction, 0)

        return update.changed(masked)

    def update_claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns the fraction."""
        return Claims(masked=self.fraction)
