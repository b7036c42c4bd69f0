"""What a client can notice of a malicious server: one file per detector.

A detector is a frozen dataclass of its settings with a `kind`. Called with what the client sees of
a round (`Seen`), before the client trains, it returns a `Finding`: a statistic, the limit above
which it alarms, and a sentence. What happens on an alarm is the client's `action`. A detector that
has no limit by itself says so and alarms only at a limit that the user sets. Nothing here needs
more than NumPy; `fedleak list` prints the first line of the docstring.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedleak.detectors.movement import Movement as Movement
from fedleak.util.errors import FedleakError, UnknownKindError, unknown
from fedleak.util.plugins import discover, no_dataclass_of

Weights = Mapping[str, NDArray[Any]]
"""Parameters by name."""

Floats = NDArray[np.float64]

ROUNDING = float(np.finfo(np.float32).eps)
"""Twice the largest relative error of a number in float32 that is rounded once."""

REFUSED = 1001
"""Code of the Flower error with which a client refuses a round. Its reason reveals no more."""

REFUSAL = "this client refuses the round: it does not trust what it was sent"

SECOND_FACTOR = "lora_B"
"""In the name of an adapter's second factor, which is zero at first and of low rank for long."""

EMBEDDINGS = ("embed", "wte", "wpe")
"""In the names of tables of embeddings, whose rows are alike in honest models too."""


@dataclass(frozen=True)
class Broadcast:
    """A model as a client received it; the public checkpoint is the broadcast of round 1."""

    round: int
    parameters: Weights


@dataclass(frozen=True, kw_only=True)
class Own:
    """What the client can compute on its own batch at the broadcast, each only when it is needed.

    Attributes:
        loss: The mean loss: a forward pass.
        gradient_norm: The L2 norm of the gradient: a forward and a backward pass.
        example_norms: By parameter the L2 norms of each example's gradient [B]: B such passes.
    """

    loss: Callable[[], float]
    gradient_norm: Callable[[], float]
    example_norms: Callable[[], Mapping[str, NDArray[Any]]]

    def longest(self) -> float:
        """Returns the L2 norm of the longest gradient of an example: B passes, too."""
        squares_B = sum(norms_B.astype(float) ** 2 for norms_B in self.example_norms().values())
        return float(np.sqrt(np.max(squares_B)))


@dataclass(frozen=True, kw_only=True)
class Seen:
    """All that one client sees of a round.

    Attributes:
        now: What it was sent.
        before: The last broadcast without an alarm that it kept, at first the public checkpoint;
            None: it has neither.
        shapes: Shapes of the parameters that it was promised.
        settings, contract: What the server asks for now, and asked for when the client joined.
        movement: How an honest server moves the model; None: the client does not know.
        longest: The largest L2 norm of a gradient of one of its own examples, in earlier rounds
            without an alarm; if the app gives only updates, of an update; None: there is none.
        hashes: By round the hashes of its own broadcasts, of this round and of `before`.
        published: By round the hashes that other clients published.
        own: What the client can compute on its own batch; None: the app does not provide it.
    """

    now: Broadcast
    before: Broadcast | None = None
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    contract: Mapping[str, Any] = field(default_factory=dict)
    movement: Movement | None = None
    longest: float | None = None
    hashes: Mapping[int, str] = field(default_factory=dict)
    published: Mapping[int, Sequence[str]] = field(default_factory=dict)
    own: Own | None = None


@dataclass(frozen=True)
class Finding:
    """What a detector found.

    Attributes:
        sentence: In words, with the numbers.
        statistic: None: there was nothing to look at.
        limit: It alarms above this; None: it has no limit.
    """

    sentence: str
    statistic: float | None = None
    limit: float | None = None

    @property
    def alarm(self) -> bool:
        """Whether the statistic is above the limit; NaN counts as above it."""
        known = self.statistic is not None and self.limit is not None
        return known and not self.statistic <= self.limit  # type: ignore[operator]


@dataclass(frozen=True, kw_only=True)
class Detector:
    """What every detector has.

    Attributes:
        kind: Its name in experiment files.
        cost: What it costs a client in a round, in a sentence.
        reads: What it needs of the client: the broadcast's "weights", an "earlier" broadcast, the
            hashes of "others", the "settings", or its "own" loss or gradient.
        action: "warn" notes an alarm; "refuse" also keeps the client out of the round.
    """

    kind: ClassVar[str]
    cost: ClassVar[str]
    reads: ClassVar[Literal["weights", "earlier", "others", "settings", "own"]] = "weights"
    action: Literal["warn", "refuse"] = "warn"

    def __call__(self, seen: Seen) -> Finding:
        """Returns what it finds."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class OwnDetector(Detector):
    """A detector of what the client computes on its own batch. It has no limit by itself.

    Attributes:
        limit: Statistic above which it alarms; None: never.
    """

    reads: ClassVar = "own"
    limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


def flaw(cls: type) -> str | None:
    """Returns why a class is no detector, and what it lacks; None if it is one."""
    if reason := no_dataclass_of(Detector, cls, "frozen=True, kw_only=True"):
        return reason
    has_cost = isinstance(getattr(cls, "cost", None), str)
    return None if has_cost else "it does not say what it costs: give it a cost"


@cache
def kinds() -> Mapping[str, type[Detector]]:
    """Returns the detectors, fedleak's own and those of others, by kind."""
    return discover(sys.modules[__name__]).kinds


def named(kind: str, **settings: Any) -> Detector:
    """Returns a detector by its kind, for an app that has no experiment file.

    Raises:
        UnknownKindError: There is no such kind.
        TypeError: It has no such setting.
    """
    if kind not in kinds():
        raise UnknownKindError(unknown("detector", kind, kinds()))
    return kinds()[kind](**settings)


def look(detectors: Sequence[Detector], seen: Seen) -> list[Finding]:
    """Returns what each detector finds, in their order.

    Raises:
        FedleakError: A detector failed; the message names it.
    """
    findings = []
    for detector in detectors:
        try:
            findings.append(detector(seen))
        except Exception as error:  # a plugin may raise anything
            raise FedleakError(
                f"the detector {detector.kind} failed: {type(error).__name__}: {error}"
            ) from error
    return findings


def digest(parameters: Weights) -> str:
    """Returns the SHA-256 of a broadcast: names, types, shapes and numbers, in 64 hex digits."""
    hashed = hashlib.sha256()
    for name, value in sorted(parameters.items()):
        hashed.update(f"{len(name)} {name} {value.dtype.str} {value.shape} ".encode())
        hashed.update(np.ascontiguousarray(value).data)
    return hashed.hexdigest()


def compared(before: Broadcast, now: Broadcast) -> Iterator[tuple[str, Floats, Floats]]:
    """Yields by name the numbers of both models in the parameters that have the same shape."""
    for name, value in now.parameters.items():
        earlier = before.parameters.get(name)
        if earlier is not None and earlier.shape == value.shape and value.dtype.kind == "f":
            yield name, earlier.astype(np.float64), value.astype(np.float64)


def matrices(parameters: Weights, but: Sequence[str] = ()) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yields the matrices of a model by name; more axes are flattened behind the first.

    Args:
        parameters: The model.
        but: Parts of names; parameters with such a part in their name are left out.
    """
    for name, value in sorted(parameters.items()):
        if value.ndim >= 2 and value.dtype.kind == "f" and not any(part in name for part in but):
            yield name, value.reshape(len(value), -1)
