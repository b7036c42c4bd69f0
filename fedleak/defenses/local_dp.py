"""Local differential privacy of the whole update: clip and Gaussian noise."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from fedleak.defenses import Budget, Claims, Defense
from fedleak.defenses.clip import clipped
from fedleak.training import privacy
from fedleak.training.observation import ClientUpdate
from fedleak.training.privacy import Epsilon, Event, Noise
from fedleak.training.settings import LocalTraining
from fedleak.util.errors import ConfigError

Finite = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class LocalDp(Defense):
    """Clips the update and adds Gaussian noise: (epsilon, delta) of all that the client has.

    Any two updates are at most twice the norm apart, so that is the sensitivity.

    Attributes:
        max_norm: L2 norm that the update is clipped to.
        noise_multiplier: Standard deviation of the noise, in sensitivities (2 max_norm).
        epsilon: What all rounds together may spend; in place of a noise multiplier.
    """

    kind: ClassVar[str] = "local_dp"
    noisy: ClassVar[bool] = True
    max_norm: Finite
    noise_multiplier: Noise | None = None
    epsilon: Epsilon | None = None

    def __post_init__(self) -> None:
        if (self.noise_multiplier is None) == (self.epsilon is None):
            raise ConfigError("give either noise_multiplier or epsilon")

    def solved(self, local: LocalTraining, budget: Budget) -> "LocalDp":
        """Returns the defense with the noise that its epsilon takes."""
        if self.epsilon is None:
            return self
        planned = [_event(1.0) for _ in budget.rounds]
        noise = privacy.noise_multiplier(self.epsilon, planned, budget.delta, budget.accountant)
        return replace(self, noise_multiplier=noise, epsilon=None)

    def __call__(self, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        """Returns the clipped update plus noise."""
        short, sigma = clipped(update, self.max_norm), self._sigma
        noisy = {
            name: value + sigma * torch.randn(value.shape, generator=rng, dtype=value.dtype)
            for name, value in short.tensors.items()
        }
        return replace(update, tensors=noisy)

    def claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns norm and noise."""
        return Claims(noise_scale=self._sigma, max_norm=self.max_norm)

    def event(self, local: LocalTraining, num_examples: int, round: int) -> Event:
        """Returns one use on all that the client has."""
        return _event(self.noise_multiplier or 0.0)

    @property
    def _sigma(self) -> float:
        assert self.noise_multiplier is not None
        return 2 * self.max_norm * self.noise_multiplier


def _event(noise_multiplier: float) -> Event:
    return Event(
        noise_multiplier=noise_multiplier,
        sampling_rate=1.0,
        steps=1,
        unit="client",
        neighbouring="replace one",
    )
