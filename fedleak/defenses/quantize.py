"""The update in few bits."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from fedleak.defenses import Claims, Defense
from fedleak.training.observation import ClientUpdate
from fedleak.training.settings import LocalTraining


@dataclass(frozen=True)
class Quantize(Defense):
    """Rounds each tensor to evenly spaced numbers, as many as its bits tell. No privacy guarantee.

    They are symmetric about zero, which is one of them, up to the tensor's largest number. With
    `stochastic` a number is rounded up or down at random so that it is right on average (QSGD,
    Alistarh et al. 2017). 16-bit floating point is `cast`. What is captured is what the server
    reads: levels times the tensor's step.

    Attributes:
        bits: Bits of a number.
        stochastic: Round up or down at random, right on average.
    """

    kind: ClassVar[str] = "quantize"
    bits: Annotated[int, Field(ge=2, le=16)]
    stochastic: bool = False

    def __call__(self, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        """Returns the rounded update."""
        return update.changed(lambda value: self._rounded(value, rng))

    def _rounded(self, value: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        most = 2 ** (self.bits - 1) - 1
        step = value.double().abs().max() / most
        if step == 0:
            return value.clone()
        levels = value.double() / step
        up = torch.rand(value.shape, generator=rng) if self.stochastic else 0.5
        rounded: torch.Tensor = (levels + up).floor().clamp(-most, most) * step
        return rounded.to(value.dtype)

    def update_claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns how many numbers there are."""
        return Claims(levels=2**self.bits - 1)
