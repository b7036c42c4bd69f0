"""Secure aggregation: the server sees the sum over the round's clients, and nothing else."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedleak.defenses import Claims, TrustedAggregator
from fedleak.models import LanguageModel
from fedleak.training.aggregation import WeightedSum
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.privacy.accounting import Positive
from fedleak.training.settings import LocalTraining
from fedleak.util.errors import ConfigError

MODULUS = 2**32
"""The modulus of the masked sums, as Flower sets it."""

FINEST = 1000
"""Fewest levels for each example: a weight is then right to one in two thousand."""


def hidden_among(clients: int) -> str:
    """Returns what a sum of so many clients hides, in words.

    A client that colludes with the server takes its own update out of the sum, so the anonymity set
    is the clients without colluders.
    """
    if clients <= 1:
        return "a sum of one client is its update: nothing is hidden"
    if clients == 2:
        return "a sum hides an update among 2 clients: if one colludes, the server reads the other"
    return (
        f"a sum hides an update among {clients} clients, less those that collude with the server: "
        f"{clients - 1} of them read the last one"
    )


@dataclass(frozen=True)
class SecureSum(TrustedAggregator):
    """Shows the server only the sum of a round's updates, not who sent what. For all clients.

    A protocol such as Bonawitz et al. 2017 sums whole numbers. As in Flower's SecAgg+, each number
    times examples / max_weight is clipped, and rounded up or down at random to one of the levels.
    What the rounding hides is not hidden by the sum: the check of the defense measures it apart.
    Without `clipping` nothing is rounded, which no protocol can do. No privacy guarantee: the sum
    of few clients is one larger batch.

    Attributes:
        clipping: Size to which a number times examples / max_weight is clipped. Flower's is 8.0,
            for weights: a gradient is lost below the step that this gives. Left out: not rounded.
        max_weight: Examples that a client may have in a round; Flower's is 1000. Goes with
            `clipping`.
        levels: Steps between both ends of the clipping; the default is Flower's.
        protocol: "secagg+" runs Flower's SecAgg+; left out: the same sum without its cryptography.
        threshold: Share of a round's clients that must answer each stage of the protocol, two of
            them at least where some refuse.
    """

    kind: ClassVar[str] = "secure_sum"
    clipping: Positive | None = None
    max_weight: Positive | None = None
    levels: Annotated[int, Field(ge=2, le=2**30, multiple_of=2)] = 2**22
    protocol: Literal["secagg+"] | None = None
    threshold: Annotated[float, Field(gt=0, le=1)] = 0.5

    def __post_init__(self) -> None:
        if (self.clipping is None) != (self.max_weight is None):
            raise ConfigError("clipping and max_weight belong together: give both or neither")
        if self.protocol is not None and self.clipping is None:
            raise ConfigError(
                f"protocol = {self.protocol!r} sums whole numbers: give clipping and max_weight"
            )
        if self.max_weight is not None and self.levels < FINEST * self.max_weight:
            raise ConfigError(
                f"levels = {self.levels:,} are fewer than {FINEST:,} for each of max_weight = "
                f"{self.max_weight:g} examples: raise levels or lower max_weight"
            )

    def obstacle(self, local: LocalTraining, model: LanguageModel) -> str | None:
        """Returns that batches weigh too much, if they do."""
        if local.kind == UpdateKind.GRADIENT:
            return self._overweight(local.batch_size)
        return None

    def round_obstacle(self, clients: int, parameters: Collection[frozenset[str]]) -> str | None:
        """Returns why the protocol cannot sum the updates of a round, if it cannot."""
        if self.protocol is None:
            return None
        if len(parameters) > 1:
            return (
                f"protocol = {self.protocol!r} sums updates of the same parameters, and clients "
                "freeze different ones: freeze the same for all"
            )
        if clients < 2:
            return (
                f"protocol = {self.protocol!r} sums two updates or more: raise "
                "federation.clients_per_round"
            )
        if clients * self.levels >= MODULUS:
            return (
                f"the sum of {clients:,} clients with levels = {self.levels:,} is beyond the "
                f"2^32 of protocol = {self.protocol!r}: lower levels"
            )
        return None

    def __call__(self, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        """Returns the update in the numbers that a protocol sums.

        Raises:
            ConfigError: The client has more than `max_weight` examples.
        """
        if self.clipping is None:
            return update
        if (reason := self._overweight(update.num_examples)) is not None:
            raise ConfigError(reason)

        def rounded(value: Tensor) -> Tensor:
            exact = self._in_steps(value, update.num_examples)
            # Down if the draw is below the distance to the step above: right on average.
            draw = torch.rand(value.shape, generator=rng, dtype=torch.float64)
            above = exact.ceil()
            steps = torch.where(draw < above - exact, above - 1, above)
            in_float64 = self._from_steps(steps, update.num_examples)
            # 16 bits would round again, to other numbers.
            return in_float64 if value.dtype == torch.float64 else in_float64.float()

        return update.changed(rounded)

    def on_grid(self, update: ClientUpdate) -> ClientUpdate:
        """Returns a rounded update in float64, in which no number is off by a part of a step."""
        count = update.num_examples
        return update.changed(
            lambda value: self._from_steps(self._in_steps(value, count).round(), count)
        )

    def fewest(self, clients: int) -> int:
        """Returns how many must answer: below two a sum would be a client's own update."""
        return max(2, round(self.threshold * clients))

    def combined(self, updates: Iterable[ClientUpdate], *, rng: torch.Generator) -> ClientUpdate:
        """Returns the mean of the updates, weighted by examples: their sum, divided."""
        total, examples = WeightedSum(), 0
        for update in updates:
            total.add_(replace(update, num_examples=self.weight(update.num_examples)))
            examples += update.num_examples
        return replace(total.mean(), num_examples=examples)

    def update_claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns that the server sees a mean, and to what numbers are rounded."""
        if self.clipping is None:
            return Claims(mean_of_clients=True)
        largest = self.clipping / self._share(num_examples)
        return Claims(mean_of_clients=True, largest_number=largest, step=2 * largest / self.levels)

    def _overweight(self, examples: int) -> str | None:
        if self.max_weight is None or examples <= self.max_weight:
            return None
        return (
            f"a client has {examples} examples in a round, and max_weight = {self.max_weight:g}: "
            "raise max_weight"
        )

    def weight(self, examples: int) -> int:
        """Returns the weight of an update in the sum: a whole number, at most `levels`."""
        if self.max_weight is None:
            return examples
        return round(examples / self.max_weight * self.levels)

    def _share(self, examples: int) -> float:
        """Returns by what an update is multiplied before it is clipped, at most 1."""
        return self.weight(examples) / self.levels

    def _in_steps(self, value: Tensor, examples: int) -> Tensor:
        """Returns numbers as steps from the lower end of the clipping, in float64."""
        assert self.clipping is not None
        small = (value.double() * self._share(examples)).clamp(-self.clipping, self.clipping)
        return (small + self.clipping) * (self.levels / (2 * self.clipping))

    def _from_steps(self, steps: Tensor, examples: int) -> Tensor:
        """Undoes `_in_steps`."""
        assert self.clipping is not None
        small = steps * (2 * self.clipping / self.levels) - self.clipping
        return small / self._share(examples)
