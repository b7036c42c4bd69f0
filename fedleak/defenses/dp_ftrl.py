"""DP-FTRL: central differential privacy with noise that later rounds take out again."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedleak.defenses import Claims, Noises
from fedleak.defenses.central_dp import CentralDp
from fedleak.training.observation import ClientUpdate
from fedleak.training.privacy.accounting import Event
from fedleak.training.settings import LocalTraining


@dataclass(frozen=True)
class DpFtrl(CentralDp):
    """A trusted server adds noise that is correlated over rounds: more privacy for as much use.

    DP-FTRL by banded matrix factorisation (Kairouz et al. 2021; Choquette-Choo et al. 2023), with
    the banded square root of Kalinin and Lampert (2024): the noise y of the rounds solves C y = z
    for independent z, where C is lower triangular and Toeplitz. What is in the sum of rounds, and
    so in the model, has less of it than of independent noise.

    A client that trains in rounds with `separation` between them has the columns of C in these
    rounds; the squared norm of their sum is at most `charge` for each.

    Attributes:
        bands: Diagonals of C; with 1 it is `central_dp`.
        separation: Rounds from one in which a client trains to its next, at least.
    """

    kind: ClassVar[str] = "dp_ftrl"
    bands: Annotated[int, Field(ge=1, le=10_000)] = 4
    separation: Annotated[int, Field(ge=1)] = 1

    @property
    def coefficients(self) -> Sequence[float]:
        """The first column of C, that of the square root of the matrix of prefix sums."""
        column = [1.0]
        for row in range(1, self.bands):
            column.append(column[-1] * (2 * row - 1) / (2 * row))
        return column

    @property
    def charge(self) -> float:
        """How much a round adds to the squared norm of the sum of the columns of C, at most.

        That is the squared norm of its own column, and twice its products with earlier columns.
        Products get smaller from one diagonal to the next, so `separation` is the worst case.
        """
        column = torch.tensor(self.coefficients, dtype=torch.float64)
        lags = range(0, self.bands, self.separation)
        products = [float(column[lag:] @ column[: self.bands - lag]) for lag in lags]
        return 2 * sum(products) - products[0]

    def corrected(
        self, update: ClientUpdate, earlier: Sequence[torch.Generator], clients: int, kept: Noises
    ) -> ClientUpdate:
        """Returns the update less what earlier rounds carry of its noise."""
        shapes = {name: value.shape for name, value in sorted(update.tensors.items())}
        for round, rng in enumerate(earlier, start=1):
            if round > max(kept, default=0):
                drawn = {n: torch.randn(shape, generator=rng) for n, shape in shapes.items()}
                kept[round] = self._less(drawn, kept, 1.0)
                kept.pop(round - self.bands, None)
        less = self._less(update.tensors, kept, super().noise_on_mean(clients))
        return replace(update, tensors=less)

    def _less(
        self, tensors: Mapping[str, Tensor], before: Noises, scale: float
    ) -> Mapping[str, Tensor]:
        """Returns tensors less the noise of the rounds before, the latest first."""
        latest = [before[round] for round in sorted(before, reverse=True)]
        for coefficient, noise in zip(self.coefficients[1:], latest, strict=False):
            tensors = {name: tensors[name] - scale * coefficient * noise[name] for name in tensors}
        return tensors

    def noise_on_mean(self, clients: int, round: int = 1) -> float:
        """Returns the standard deviation of the noise on a number of the mean in a round.

        The noise of a round is that of the rounds up to it, weighed by a row of the inverse of C.
        """
        row: list[float] = []
        for lag in range(round):
            before = zip(self.coefficients[1:], reversed(row), strict=False)
            row.append(float(lag == 0) - sum(weight * entry for weight, entry in before))
        return super().noise_on_mean(clients) * math.hypot(*row)

    def schedule_obstacle(self, rounds: Sequence[int]) -> str | None:
        """Returns that a client trains too often, if it does."""
        for first, second in pairwise(rounds):
            if second - first < self.separation:
                return (
                    f"separation = {self.separation}, and a client trains in rounds {first} and "
                    f'{second}: lower it, or set federation.participation = "cyclic" with at least '
                    f"{self.separation} times as many clients as train in a round"
                )
        return None

    def update_claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns by how much a client moves the sum, and how noise is correlated."""
        claims = super().update_claims(local, num_examples)
        return replace(claims, carried=tuple(self.coefficients))

    def event(self, local: LocalTraining, num_examples: int, round: int) -> Event:
        """Returns one use on all that the client has, with what it adds to the columns of C."""
        event = super().event(local, num_examples, round)
        return replace(event, noise_multiplier=event.noise_multiplier / self.charge**0.5)
