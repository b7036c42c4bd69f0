"""What a client's updates guarantee: events of noise, composed to an epsilon by Opacus.

An event is one use of a Gaussian mechanism on the private data. What is done to its result
afterwards (a mask, a cast, sharing a part) takes nothing from the guarantee and adds no event. A
defense that bounds nobody's influence has no event, and a client without events has no epsilon.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from fedleak.util.errors import ConfigError

Accountant = Literal["rdp", "prv"]
"""Rényi differential privacy (Mironov 2017), or the numerical composition of privacy loss
distributions (Gopi et al. 2021), which is tighter."""

Noise = Annotated[float, Field(ge=1e-6, allow_inf_nan=False)]
Epsilon = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
"""A noise multiplier, and an epsilon to reach: Opacus does not end far beyond these bounds, where
neither guarantees anything."""

PRV_MOST = 200.0
"""The largest epsilon that PRV is asked for: Opacus lays out all losses up to it in memory."""

NONE: Final = "none"
"""Stands where a guarantee would: not a number, and not a blank."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """So many uses of one Gaussian mechanism.

    Attributes:
        noise_multiplier: Standard deviation of the noise, in sensitivities under `neighbouring`.
        sampling_rate: Probability with which a unit takes part in a use; 1: in every one.
        steps: Uses.
        unit: What is protected: an "example", or all that a "client" has.
        neighbouring: What is changed about the data: an example more or less ("add or remove one"),
            its part left out ("zero out one"), or another one ("replace one").
        sampling: "Poisson", or "none": no amplification is counted.
        disjoint: Events with the same mark are on different units: together they count once.
    """

    noise_multiplier: float
    sampling_rate: float
    steps: int
    unit: Literal["example", "client"]
    neighbouring: Literal["add or remove one", "zero out one", "replace one"]
    sampling: Literal["Poisson", "none"] = "none"
    disjoint: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Event":
        """Reads what `to_json` gave."""
        return cls(**value)


@dataclass(frozen=True)
class Spent:
    """What was spent of one unit's privacy.

    Attributes:
        epsilon: At `delta`; infinite where no number bounds it.
        delta: Of the statement.
        events: What it is composed of.
    """

    epsilon: float
    delta: float
    events: tuple[Event, ...]

    @property
    def of(self) -> Event:
        """Returns the last event: it says unit, sampling and neighbouring relation."""
        return self.events[-1]


def compose(events: Sequence[Event], delta: float, accountant: Accountant) -> list[Spent]:
    """Returns what events spend together, for each unit that they protect.

    Raises:
        ConfigError: Events of one unit are under different neighbouring relations, or PRV cannot
            count so large an epsilon.
    """
    spent = []
    for unit in sorted({event.unit for event in events}):
        of_unit = tuple(event for event in events if event.unit == unit)
        if len(relations := sorted({event.neighbouring for event in of_unit})) > 1:
            raise ConfigError(
                f"two defenses protect {unit}s, one under {relations[0]!r} and one under "
                f"{relations[1]!r}: no epsilon is of both: keep one"
            )
        history: dict[tuple[float, float], int] = {}
        for event in _distinct(of_unit):
            use = event.noise_multiplier, event.sampling_rate
            history[use] = history.get(use, 0) + event.steps
        uses = tuple(sorted((*use, steps) for use, steps in history.items()))
        spent.append(Spent(_epsilon(uses, delta, accountant), delta, of_unit))
    return spent


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
    epsilon: float, sampling_rate: float, steps: int, delta: float, accountant: Accountant
) -> float:
    from opacus.accountants.utils import get_noise_multiplier

    try:
        with _loose_bounds():
            multiplier: float = get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=delta,
                sample_rate=sampling_rate,
                steps=steps,
                accountant=accountant,
                epsilon_tolerance=0.001 * epsilon,
            )
    except ValueError as error:
        tighter = ", or set privacy.accountant = 'prv'" if accountant == "rdp" else ""
        raise ConfigError(
            f"epsilon = {epsilon:g} cannot be reached with delta = {delta:g} over {steps} steps: "
            f"raise it{tighter}"
        ) from error
    return multiplier


def _distinct(events: Sequence[Event]) -> list[Event]:
    """Returns the events; of those with one mark, which are on different units, only one."""
    marked = {event.disjoint: event for event in events if event.disjoint is not None}
    return [*(event for event in events if event.disjoint is None), *marked.values()]


@cache
def _epsilon(
    uses: tuple[tuple[float, float, int], ...], delta: float, accountant: Accountant
) -> float:
    from opacus.accountants import RDPAccountant, create_accountant  # it takes seconds to import
    from opacus.accountants.analysis.rdp import get_privacy_spent

    with _loose_bounds():
        orders = RDPAccountant.DEFAULT_ALPHAS
        rdp = sum(steps * _rdp(noise, rate) for noise, rate, steps in uses)
        bound = float(get_privacy_spent(orders=orders, rdp=rdp, delta=delta)[0])
        if accountant == "rdp":
            return bound
        if bound > PRV_MOST:
            raise ConfigError(
                f"privacy.accountant = 'prv' cannot count an epsilon of about {bound:.3g}: its "
                "memory grows with it: use 'rdp'"
            )
        counting = create_accountant(accountant)
        counting.history = list(uses)
        return float(counting.get_epsilon(delta))


@cache
def _rdp(noise: float, rate: float) -> Any:
    """Returns the Rényi divergences of one use, by order: of several they add up."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import compute_rdp

    orders = RDPAccountant.DEFAULT_ALPHAS
    return compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders)


@contextmanager
def _loose_bounds() -> Iterator[None]:
    """Keeps Opacus quiet where its orders end: the bound is right, and a tighter one may exist."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Optimal order is the (smallest|largest) alpha")
        warnings.filterwarnings("ignore", message="divide by zero")
        yield
