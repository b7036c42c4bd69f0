"""What a client does so that its update says less: one file per defense.

A defense is a frozen dataclass of its settings with a `kind`, and overrides what it has to do with:
how the client trains (`training`), what becomes of its update (the call), what it claims about the
update (`claims`, which `fedleak.audit.defense_checks` tests) and what it guarantees (`event`). A
defense that decides what the server sees of a round is a `TrustedAggregator`. Defenses return new
values and never change their arguments. Their fields carry bounds as
`Annotated[float, Field(gt=0)]`; `fedleak list` prints the first line of the docstring.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, Self

import torch
from torch import Tensor

from fedleak.models import LanguageModel
from fedleak.training.observation import ClientUpdate, Sight
from fedleak.training.privacy import accounting
from fedleak.training.privacy.accounting import Accountant, Event, Neighbouring, Unit
from fedleak.training.settings import LocalTraining
from fedleak.util.errors import ConfigError
from fedleak.util.plugins import discover, no_dataclass_of

_PIECE = 2**16
"""Numbers whose float64 copies stay in a processor's cache."""


Noises = dict[int, Mapping[str, Tensor]]
"""Noise of a round by the name of the parameter, by round."""


@dataclass(frozen=True, kw_only=True)
class Claims:
    """What a defense says of an update that went through it. None is no claim.

    Attributes:
        noise_scale: Standard deviation of the noise on each number.
        laplace: The noise is Laplace's and not normal.
        relative_noise: The same, in root mean squares of the update before the defense.
        max_norm: L2 norm that the update has at most, the noise aside.
        example_norm: L2 norm by which one example moves it at most, the noise aside.
        masked: Share of the numbers that are set to zero, whichever they are.
        zeros: Share of the numbers that are zero afterwards, at least.
        levels: Different numbers in a tensor, at most.
        absent: Patterns of parameters that are not in it.
        mean_of_clients: What the server sees is the clients' mean, weighted by examples.
        step: Distance between the values that numbers are rounded to, up or down.
        largest_number: Size to which a number is cut off before it is rounded.
        client_norm: L2 norm by which one client moves the sum over clients at most, the noise
            aside, against a client that sends zeros.
        carried: Weights of a round's noise and of those of the rounds before it, in a sum that is
            fresh noise.
        norm_noise: Standard deviation of the noise on the logarithm of the `client_norm` of the
            next round, which follows from the norms of this one, where two clients train.
    """

    noise_scale: float | None = None
    laplace: bool = False
    relative_noise: float | None = None
    max_norm: float | None = None
    example_norm: float | None = None
    masked: float | None = None
    zeros: float | None = None
    levels: int | None = None
    absent: tuple[str, ...] = ()
    mean_of_clients: bool = False
    step: float | None = None
    largest_number: float | None = None
    client_norm: float | None = None
    carried: tuple[float, ...] = ()
    norm_noise: float | None = None


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What an epsilon has to suffice for.

    Attributes:
        delta, accountant: Of the (epsilon, delta) statement.
        num_examples: Examples that the client has.
        rounds: The rounds of the run in which the client takes part.
    """

    delta: float
    accountant: Accountant
    num_examples: int
    rounds: Sequence[int]


class Defense:
    """What every defense has; by itself it does nothing.

    Attributes:
        kind: Its name in experiment files.
        exclusive: Why a client can use only one defense with this reason; None: it can use several.
        noisy: Whether it claims noise.
        reports_training: Whether the figures that a client's training reports are about it.
    """

    kind: ClassVar[str]
    exclusive: ClassVar[str | None] = None
    noisy: ClassVar[bool] = False
    reports_training: ClassVar[bool] = False

    @property
    def scales_with_update(self) -> bool:
        """Whether the scale of its noise depends on the update."""
        return False

    def solved(self, local: LocalTraining, budget: Budget) -> Self:
        """Returns the defense with its noise worked out, if an epsilon was given instead.

        Raises:
            ConfigError: No noise is enough for that epsilon.
        """
        return self

    def training(self, local: LocalTraining) -> LocalTraining:
        """Returns how a client with this defense trains."""
        return local

    def __call__(self, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        """Returns the defended update."""
        return update

    def update_claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns its claims about an update of a client with so many examples."""
        return Claims()

    def event(self, local: LocalTraining, num_examples: int, round: int) -> Event | None:
        """Returns what a round adds to the ledger of such a client; None guarantees nothing."""
        return None

    def obstacle(self, local: LocalTraining, model: LanguageModel) -> str | None:
        """Returns why it cannot be used on this model, and what to do; None if it can."""
        return None

    def schedule_obstacle(self, rounds: Sequence[int]) -> str | None:
        """Returns why it cannot count a client that trains in these rounds; None if it can."""
        return None


class NoiseOrEpsilon(Defense):
    """A defense whose noise is given, or follows from an epsilon. A dataclass has both as fields.

    Attributes:
        unit, neighbouring: Of the `Event` of a round.
        noise_multiplier: Standard deviation of the noise, in sensitivities.
        epsilon: What all rounds together may spend; in place of a noise multiplier.
    """

    noisy: ClassVar[bool] = True
    unit: ClassVar[Unit] = "client"
    neighbouring: ClassVar[Neighbouring] = "zero out one"
    noise_multiplier: float | None
    epsilon: float | None

    def __post_init__(self) -> None:
        if (self.noise_multiplier is None) == (self.epsilon is None):
            raise ConfigError("give either noise_multiplier or epsilon")

    @property
    def _noise(self) -> float:
        """The noise multiplier, once it is worked out."""
        assert self.noise_multiplier is not None
        return self.noise_multiplier

    def solved(self, local: LocalTraining, budget: Budget) -> Self:
        """Returns the defense with the noise that its epsilon takes."""
        if self.epsilon is None:
            return self
        unit = replace(self, noise_multiplier=1.0, epsilon=None)  # type: ignore[type-var]
        planned = [unit.event(local, budget.num_examples, round) for round in budget.rounds]
        noise = accounting.noise_multiplier(self.epsilon, planned, budget.delta, budget.accountant)
        noise /= planned[0].noise_multiplier  # what noise of 1 comes to
        return replace(unit, noise_multiplier=noise)  # type: ignore[type-var]

    def event(self, local: LocalTraining, num_examples: int, round: int) -> Event:
        """Returns one use on the unit that it protects."""
        return Event(
            noise_multiplier=self.noise_multiplier or 0.0,
            unit=self.unit,
            neighbouring=self.neighbouring,
        )


class TrustedAggregator(Defense, ABC):
    """A defense between the clients and the attacker, used by all clients.

    The updates of a round are held until all have come. Then `combined` makes one update of them,
    and only this one is seen and trained with. It changes a client's update after all other
    defenses, wherever it stands in the file.

    Attributes:
        sights: What an attacker may see, `threat.sees`; the first is the default.
        trust: For whom its guarantee does not hold; None: it has none, or nobody has to be trusted.
    """

    exclusive: ClassVar[str | None] = "the server sees one update of a round"
    sights: ClassVar[tuple[Sight, ...]] = ("sum", "models")
    trust: ClassVar[str | None] = None

    @abstractmethod
    def combined(self, updates: Iterable[ClientUpdate], *, rng: torch.Generator) -> ClientUpdate:
        """Returns the update that stands for the round.

        Args:
            updates: The clients' updates in order, as they were sent; one in memory at a time.
            rng: The random stream of the round, for all random draws.
        """

    def corrected(
        self, update: ClientUpdate, earlier: Sequence[torch.Generator], clients: int, kept: Noises
    ) -> ClientUpdate:
        """Returns the result of `combined`, with noise that depends on earlier rounds' noise.

        Args:
            update: What `combined` returned.
            earlier: The random stream of each round before, from the first on.
            clients: How many clients' updates are in it.
            kept: Noise of earlier rounds; this method adds what the next round needs.
        """
        return update

    def after(self, updates: Iterable[ClientUpdate], *, rng: torch.Generator) -> Self:
        """Returns the aggregator of the next round, which may depend on this round's updates.

        Args:
            updates: As for `combined`.
            rng: The random stream of the round, for this method alone.
        """
        return self

    def fewest(self, clients: int) -> int:
        """Returns how many of the clients must answer; with fewer, a round has no update."""
        return 1

    def weight(self, examples: int) -> int:
        """Returns the weight in the mean of an update of so many examples."""
        return examples

    def noise_on_mean(self, clients: int, round: int = 1) -> float:
        """Returns the standard deviation of the noise on a number of the mean of so many updates.

        It is no smaller in later rounds.
        """
        return 0.0

    def round_obstacle(self, clients: int, parameters: Collection[frozenset[str]]) -> str | None:
        """Returns why it cannot combine the updates of a round, and what to do; None if it can.

        Args:
            clients: How many train in a round.
            parameters: What clients send: each set of parameters once.
        """
        return None


def flaw(cls: type) -> str | None:
    """Returns why a class is no defense, and what it lacks; None if it is one."""
    return no_dataclass_of(Defense, cls)


@cache
def kinds() -> Mapping[str, type[Defense]]:
    """Returns the defenses, fedleak's own and those of others, by kind."""
    return discover(sys.modules[__name__]).kinds


def measured(before: ClientUpdate, after: ClientUpdate) -> dict[str, float]:
    """Returns what a defense did to an update: norms, and the share of numbers set to zero.

    `change_norm` is the norm of the difference: for a noise defense, of the noise.
    """
    squares = dict.fromkeys(("norm_before", "norm_after", "change_norm"), 0.0)
    zeroed = numbers = 0
    for name, other in after.tensors.items():
        for one_N, other_N in zip(_pieces(before.tensors[name]), _pieces(other), strict=True):
            for key, value_N in zip(squares, (one_N, other_N, other_N - one_N), strict=True):
                squares[key] += float(value_N.dot(value_N))
            zeroed += int(torch.count_nonzero((other_N == 0) & (one_N != 0)))
        numbers += other.numel()
    norms = {key: math.sqrt(square) for key, square in squares.items()}
    return norms | {"zeroed": zeroed / numbers}


def root_mean_square(update: ClientUpdate) -> float:
    """Returns the root of the mean square of all numbers of an update."""
    pieces = (piece_N for value in update.tensors.values() for piece_N in _pieces(value))
    squares = math.fsum(float(piece_N.dot(piece_N)) for piece_N in pieces)
    return math.sqrt(squares / sum(value.numel() for value in update.tensors.values()))


def _pieces(value: Tensor) -> Iterator[Tensor]:
    """Returns the numbers of a tensor in float64, some at a time.

    On a word embedding of BERT's size that takes an eighth of the time of a copy of the whole.
    """
    return (piece_N.double() for piece_N in torch.split(value.flatten(), _PIECE))
