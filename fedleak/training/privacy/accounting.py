"""What a client's updates guarantee: events of noise, composed to an epsilon by Opacus.

An event is one use of a Gaussian mechanism on the private data. What is done to its result
afterwards (a mask, a cast, sharing a part) takes nothing from the guarantee and adds no event. A
defense that bounds nobody's influence has no event, and a client without events has no epsilon.
"""

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import Field

from fedleak.util.errors import ConfigError

Accountant = Literal["prv", "rdp"]
"""The smaller bound of Rényi differential privacy (Mironov 2017) and of the numerical composition
of privacy loss distributions (Gopi et al. 2021); or the first alone, which is faster."""

Unit = Literal["example", "client"]
Neighbouring = Literal["zero out one", "replace one, given n"]
"""What an event protects, and what is changed about it (`Event`)."""

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Noise = Annotated[float, Field(ge=1e-6, allow_inf_nan=False)]
Epsilon = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
"""A noise multiplier, and an epsilon to reach: Opacus does not end far beyond these bounds, where
neither guarantees anything."""

PRV_MOST = 100.0
"""The largest epsilon that PRV computes: Opacus keeps all losses up to it in memory."""

LARGEST_LOG_NOISE, NOISE_TOLERANCE = 14.0, 2e-4
"""Ends of the search for noise, in logarithms."""

BOTH_ACCOUNTANTS: Final = "prv"
"""The accountant that lower bounds are compared with: it gives the smallest epsilon."""

FAST_ACCOUNTANT: Final = "rdp"
"""What composes the rounds between those that the other takes seconds for."""

NONE: Final = "none"
"""Stands in place of an epsilon if nothing is guaranteed: not a number, and not a blank."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """One or more uses of one Gaussian mechanism.

    Attributes:
        noise_multiplier: Standard deviation of the noise, in sensitivities under `neighbouring`.
        sampling_rate: Probability with which a unit takes part in a use; 1: in every one.
        steps: Uses.
        unit: What is protected: an "example", or all that a "client" has.
        neighbouring: How neighbouring data sets differ: the unit's contribution is left out ("zero
            out one"), or replaced ("replace one, given n"). A client has the same number of
            examples in both, because clients send it beside their updates.
        sampling: "Poisson", or "none": no amplification is counted.
        disjoint: Events with the same mark are on different units: together they count once.
    """

    noise_multiplier: float
    sampling_rate: float = 1.0
    steps: int = 1
    unit: Unit
    neighbouring: Neighbouring
    sampling: Literal["Poisson", "none"] = "none"
    disjoint: int | None = None


class Use(NamedTuple):
    """One or more uses of a mechanism on one unit; the fields are those of an `Event`."""

    noise_multiplier: float
    sampling_rate: float
    steps: int


@dataclass(frozen=True)
class Spent:
    """What was spent of one unit's privacy.

    Attributes:
        epsilon: At `delta`; infinite where no number bounds it.
        delta: The delta of the statement.
        events: What the epsilon is composed of.
        uses: The uses in them; of events on different units only one counts.
    """

    epsilon: float
    delta: float
    events: tuple[Event, ...]
    uses: tuple[Use, ...]

    @property
    def of(self) -> Event:
        """Returns the last event: it has the unit, sampling and neighbouring relation."""
        return self.events[-1]


def compose(events: Sequence[Event], delta: float, accountant: Accountant) -> list[Spent]:
    """Returns what events spend together, for each unit that they protect.

    Raises:
        ConfigError: Events of one unit are under different neighbouring relations.
    """
    spent = []
    for unit in sorted({event.unit for event in events}):
        of_unit = tuple(event for event in events if event.unit == unit)
        if len(relations := sorted({event.neighbouring for event in of_unit})) > 1:
            raise ConfigError(
                f"two defenses protect {unit}s, one under {relations[0]!r} and one under "
                f"{relations[1]!r}: no epsilon is of both: keep one"
            )
        uses = _uses(of_unit)
        spent.append(Spent(epsilon(uses, delta, accountant), delta, of_unit, uses))
    return spent


def _uses(events: Sequence[Event]) -> tuple[Use, ...]:
    """Returns the uses that events of one unit consist of, in a fixed order."""
    history: Counter[tuple[float, float]] = Counter()
    for event in _distinct(events):
        history[event.noise_multiplier, event.sampling_rate] += event.steps
    return tuple(sorted(Use(*use, steps) for use, steps in history.items()))


def of_all_examples(events: Sequence[Event], held: int, batch_size: int) -> list[Event]:
    """Returns events on all examples of a client (user level), from events on one example.

    A step moves by at most the clipping norm for each of the client's examples in it, so the noise
    is divided by their number. Under Poisson sampling that is at most all, with the probability
    that any is drawn: steps with fewer are a randomised map of those with all. Without it each
    step has a batch of them. Local steps that are not published count as if they were.

    Args:
        events: Events of one client, each on one example.
        held: Examples that the client has.
        batch_size: Examples of a step without sampling.
    """
    taken, of_client = min(batch_size, held), []
    for event in events:
        noise, rate, steps = event.noise_multiplier / held, event.sampling_rate, event.steps
        if rate < 1:
            rate = -math.expm1(held * math.log1p(-rate))
        else:
            noise = event.noise_multiplier / taken
            steps *= 1 if event.disjoint is not None else -(-held // taken)
        use = Use(noise, rate, steps)._asdict()
        of_client.append(replace(event, **use, unit="client", disjoint=None))
    return of_client


def noise_multiplier(
    epsilon: float, planned: Sequence[Event], delta: float, accountant: Accountant
) -> float:
    """Returns the noise multiplier with which planned events, all alike, stay below an epsilon.

    Raises:
        ConfigError: No noise is enough.
    """
    steps = sum(event.steps for event in _distinct(planned))
    return _noise_multiplier(epsilon, planned[0].sampling_rate, steps, delta, accountant)


@cache
def _noise_multiplier(
    target: float, sampling_rate: float, steps: int, delta: float, accountant: Accountant
) -> float:
    from scipy.optimize import brentq  # it takes a while to import

    def excess(log_noise: float) -> float:
        uses = (Use(math.exp(log_noise), sampling_rate, steps),)
        return math.asinh(epsilon(uses, delta, accountant)) - math.asinh(target)

    high = 0.0
    while excess(high) > 0:
        high += 1.0
        if high > LARGEST_LOG_NOISE:
            tighter = ", or set privacy.accountant = 'prv'" if accountant == "rdp" else ""
            raise ConfigError(
                f"epsilon = {target:g} cannot be reached with delta = {delta:g} over {steps} "
                f"steps: raise it{tighter}"
            )
    low = high - 1.0
    while excess(low) < 0:
        low, high = low - 1.0, low
    log_noise = float(brentq(excess, low, high, xtol=NOISE_TOLERANCE))
    while excess(log_noise) > 0:
        log_noise += NOISE_TOLERANCE
    return math.exp(log_noise)


def _distinct(events: Sequence[Event]) -> list[Event]:
    """Returns the events, but only one of those that share a mark: they are on different units."""
    marked = {event.disjoint: event for event in events if event.disjoint is not None}
    return [*(event for event in events if event.disjoint is None), *marked.values()]


@cache
def epsilon(uses: tuple[Use, ...], delta: float, accountant: Accountant) -> float:
    """Returns the epsilon of uses at a delta, at least 0.

    Each accountant gives an upper bound, so "prv" takes the smaller of both: it is never looser.
    Where the bound of "rdp" is above `PRV_MOST`, it is the only one.
    """
    from opacus.accountants import RDPAccountant, create_accountant  # it takes seconds to import
    from opacus.accountants.analysis.rdp import get_privacy_spent

    # Opacus remarks where its orders end: the bound is right, and a tighter one may exist.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the (smallest|largest) alpha")
        warnings.filterwarnings("ignore", message="divide by zero")
        orders = RDPAccountant.DEFAULT_ALPHAS
        rdp = sum(steps * _rdp(noise, rate) for noise, rate, steps in uses)
        bound = max(0.0, float(get_privacy_spent(orders=orders, rdp=rdp, delta=delta)[0]))
        if accountant == "rdp" or bound > PRV_MOST:
            return bound
        counting = create_accountant(accountant)
        counting.history = list(uses)
        return max(0.0, min(bound, float(counting.get_epsilon(delta))))


@cache
def _rdp(noise: float, rate: float) -> Any:
    """Returns the Rényi divergences of one use, by order: those of several uses add up."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import compute_rdp

    orders = RDPAccountant.DEFAULT_ALPHAS
    return compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders)
