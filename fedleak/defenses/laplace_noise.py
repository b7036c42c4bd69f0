"""Laplace noise of a fixed size on every number of the update."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedleak.defenses import Claims, Defense
from fedleak.training.observation import ClientUpdate
from fedleak.training.privacy.accounting import Positive
from fedleak.training.settings import LocalTraining


@dataclass(frozen=True)
class LaplaceNoise(Defense):
    """Adds Laplace noise of a scale to every number. No privacy guarantee.

    Its standard deviation is sqrt(2) times the scale. Nothing bounds what one example contributes,
    in L1 as this noise would need it, so no epsilon follows.

    Attributes:
        scale: Scale of the noise on each number.
    """

    kind: ClassVar[str] = "laplace_noise"
    noisy: ClassVar[bool] = True
    scale: Positive

    def __call__(self, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        """Returns the update plus noise."""

        def noise(value: torch.Tensor) -> torch.Tensor:
            # By the inverse of the distribution function; in float32 a zero would be infinite.
            u = torch.rand(value.shape, generator=rng, dtype=torch.float64) - 0.5
            drawn = -u.sign() * torch.log1p(-2 * u.abs().clamp_max(0.5 - 1e-16))
            return (self.scale * drawn).to(value.dtype)

        return update.changed(lambda value: value + noise(value))

    def update_claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns the standard deviation."""
        return Claims(noise_scale=math.sqrt(2) * self.scale, laplace=True)
