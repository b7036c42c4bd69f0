"""Local differential privacy of the whole update: clip and Gaussian noise."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedleak.defenses import Claims, NoiseOrEpsilon
from fedleak.defenses.clip import clipped
from fedleak.defenses.gaussian_noise import with_noise
from fedleak.training.observation import ClientUpdate
from fedleak.training.privacy.accounting import Epsilon, Neighbouring, Noise, Positive
from fedleak.training.settings import LocalTraining


@dataclass(frozen=True)
class LocalDp(NoiseOrEpsilon):
    """Clips the update and adds Gaussian noise: (epsilon, delta) of all that the client has.

    Any two updates are at most twice the norm apart, so that is the sensitivity. How many examples
    the client has is not protected: it sends their number beside the update.

    Attributes:
        max_norm: L2 norm that the update is clipped to.
        noise_multiplier: Standard deviation of the noise, in sensitivities (2 max_norm).
        epsilon: What all rounds together may spend; in place of a noise multiplier.
    """

    kind: ClassVar[str] = "local_dp"
    neighbouring: ClassVar[Neighbouring] = "replace one, given n"
    max_norm: Positive
    noise_multiplier: Noise | None = None
    epsilon: Epsilon | None = None

    def __call__(self, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        """Returns the clipped update plus noise."""
        return with_noise(clipped(update, self.max_norm), self._sigma, rng)

    def update_claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns norm and noise."""
        return Claims(noise_scale=self._sigma, max_norm=self.max_norm)

    @property
    def _sigma(self) -> float:
        return 2 * self.max_norm * self._noise
