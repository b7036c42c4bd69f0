"""Normal noise on every number of the update."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedleak.defenses import Claims, Defense, root_mean_square
from fedleak.training.observation import ClientUpdate
from fedleak.training.privacy.accounting import Positive
from fedleak.training.settings import LocalTraining
from fedleak.util.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GaussianNoise(Defense):
    """Adds N(0, sigma^2) to every number: what LAMP and DAGER tested. No privacy guarantee.

    Without clipping nothing bounds what one example contributes, so no epsilon follows from it.

    Attributes:
        sigma: Standard deviation of the noise on each number.
        relative: The same in root mean squares of the client's update, over all of its numbers; in
            place of sigma. So models, batches and updates of other sizes compare.
    """

    kind: ClassVar[str] = "gaussian_noise"
    noisy: ClassVar[bool] = True
    sigma: Positive | None = None
    relative: Positive | None = None

    def __post_init__(self) -> None:
        if (self.sigma is None) == (self.relative is None):
            raise ConfigError("give either sigma or relative")

    @property
    def scales_with_update(self) -> bool:
        """Whether its noise is relative."""
        return self.relative is not None

    def __call__(self, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        """Returns the update plus noise."""
        sigma = self.sigma or (self.relative or 0.0) * root_mean_square(update)
        return with_noise(update, sigma, rng)

    def update_claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns sigma."""
        return Claims(noise_scale=self.sigma, relative_noise=self.relative)


def with_noise(update: ClientUpdate, sigma: float, rng: torch.Generator) -> ClientUpdate:
    """Returns the update plus N(0, sigma^2) on every number."""
    return update.changed(
        lambda value: value + sigma * torch.randn(value.shape, generator=rng, dtype=value.dtype)
    )
