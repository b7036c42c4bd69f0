"""Central differential privacy whose clipping norm follows a quantile of the clients' norms."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field

from fedleak.defenses import Claims
from fedleak.defenses.central_dp import CentralDp
from fedleak.defenses.clip import norm_of
from fedleak.training.observation import ClientUpdate
from fedleak.training.privacy.accounting import Positive
from fedleak.training.settings import LocalTraining

FEWEST = 20
"""The noise on the count is a twentieth of the clients, at least: the advice of Andrew et al."""


@dataclass(frozen=True)
class AdaptiveClipping(CentralDp):
    """A trusted server adds noise and learns how short to clip: nobody has to know the norms.

    Andrew et al. 2021, "Differentially private learning with adaptive clipping", algorithm 1: after
    each round the norm is multiplied by exp(-rate (b - quantile)), where b is the share of clients
    whose update is no longer than it, with noise. A client moves the count by one half at most, as
    a half is taken off of each client's one or nothing, and both noises together are one use of
    `noise_multiplier` (theorem 1). So the sum has more noise than it would have alone: at most
    1.155 times, as the deviation of the count's is at least `noise_multiplier`.

    Attributes:
        max_norm: The norm of the first round.
        quantile: The share of clients that should not be clipped.
        rate: Of the norm's logarithm.
    """

    kind: ClassVar[str] = "adaptive_clipping"
    quantile: Annotated[float, Field(ge=0, le=1)] = 0.5
    rate: Positive = 0.2

    def after(self, updates: Iterable[ClientUpdate], *, rng: torch.Generator) -> Self:
        """Returns the defense with the clipping norm of the next round."""
        short = [norm_of(update) <= self.max_norm for update in updates]
        noise = self._noise_on_count(len(short)) * float(torch.randn((), generator=rng))
        count = sum(0.5 if is_short else -0.5 for is_short in short)
        share = 0.5 + (count + noise) / len(short)
        norm = self.max_norm * math.exp(-self.rate * (share - self.quantile))
        return replace(self, max_norm=norm)

    def _noise_on_count(self, clients: int) -> float:
        return max(clients / FEWEST, self._noise)

    def noise_on_mean(self, clients: int, round: int = 1) -> float:
        """Returns the standard deviation of the noise on a number of the mean, at this norm."""
        count = 2 * self._noise_on_count(clients)
        noise = 1 / math.sqrt(self._noise**-2 - count**-2)
        return noise * self.max_norm / clients

    def update_claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns by how much a client moves the sum, and the noise on the next norm."""
        claims = super().update_claims(local, num_examples)
        return replace(claims, norm_noise=self.rate * self._noise_on_count(2) / 2)
