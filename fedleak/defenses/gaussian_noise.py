"""Noise of a fixed size on every number of the update."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from fedleak.defenses import Claims, Defense
from fedleak.observation import ClientUpdate
from fedleak.training.settings import LocalTraining


@dataclass(frozen=True)
class GaussianNoise(Defense):
    """Adds N(0, sigma^2) to every number: what LAMP and DAGER tested. No privacy guarantee.

    Without clipping nothing bounds what one example contributes, so no epsilon follows from it.

    Attributes:
        sigma: Standard deviation of the noise on each number.
    """

    kind: ClassVar[str] = "gaussian_noise"
    noisy: ClassVar[bool] = True
    sigma: Annotated[float, Field(gt=0, allow_inf_nan=False)]

    def __call__(self, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        """Returns the update plus noise."""
        noisy = {
            name: value + self.sigma * torch.randn(value.shape, generator=rng, dtype=value.dtype)
            for name, value in update.tensors.items()
        }
        return replace(update, tensors=noisy)

    def claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns sigma."""
        return Claims(noise_scale=self.sigma)
