"""How far the model is from the last one that this client saw."""

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from fedleak.detectors import ROUNDING, Broadcast, Detector, Finding, Seen, compared


@dataclass(frozen=True, kw_only=True)
class Jump(Detector):
    """Compares the distance to the last broadcast with what honest updates can do.

    In round 1 the public checkpoint takes the place of that broadcast, and every difference is an
    alarm. Where clients clip their updates, or the model moves by Adam, the limit is a bound that
    no honest round exceeds. Else a mean gradient is no longer than the longest gradient of a single
    example, and that is taken to be at most `factor` times as long as the longest of this client's
    own examples so far. The factor is a convention, not a bound, and there is no limit before the
    client has taken part in a round, or where noise has no known scale. The server says which round
    it is, so one that skips numbers is allowed more.

    Attributes:
        factor: How many times longer the gradient of another's example may be than those of this
            client's own.
    """

    kind: ClassVar[str] = "jump"
    cost: ClassVar[str] = (
        "one pass over the weights; a copy of the model on disk; without clipping or Adam, a "
        "forward and a backward pass for each example of a batch"
    )
    reads: ClassVar = "earlier"
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 10.0

    def __call__(self, seen: Seen) -> Finding:
        """Returns the L2 distance to the last broadcast that the client kept."""
        before = seen.before
        if before is None:
            return Finding("the client has kept no earlier model, and has no public checkpoint")
        rounds = seen.now.round - before.round
        squares, length, numbers = _moved(before, seen.now)
        distance, movement = math.sqrt(squares), seen.movement
        about = f"the model is {distance:.3g} away from that of round {before.round}"
        rounding = rounds * ROUNDING * length
        if rounds < 0:
            return Finding(f"the server went back from round {before.round}", math.inf, 0.0)
        if rounds == 0:
            return Finding(
                f"{about}, or from the public checkpoint, and must equal it", distance, 0.0
            )
        if movement is None:
            return Finding(f"{about}; nobody told this client how the model moves", distance)
        decay = movement.rate * rounds * movement.steps * movement.weight_decay * length
        if movement.optimiser == "adam":
            limit = movement.by_adam(before.round, seen.now.round) * math.sqrt(numbers) + decay
            return Finding(
                f"{about}, and Adam moves it by {limit:.3g} at most", distance, limit + rounding
            )
        noise, round_moves = movement.noise_norm(numbers), movement.most
        if round_moves is None and seen.longest is not None:
            round_moves = self.factor * seen.longest * movement.rate * movement.steps
        if round_moves is None or noise is None:
            return Finding(f"{about}, and this client has nothing to compare that with", distance)
        limit = rounds * (round_moves + noise) + decay
        return Finding(
            f"{about}, and {rounds} rounds of honest updates move it by {limit:.3g} at most",
            distance,
            limit + rounding,
        )


def _moved(before: Broadcast, now: Broadcast) -> tuple[float, float, int]:
    """Returns the squared distance, the length of the model before, and how many numbers it has.

    Only parameters of the same shape in both count; the others are for the detector of shapes.
    """
    squares = length = 0.0
    numbers = 0
    for _, earlier, value in compared(before, now):
        difference, flat = (value - earlier).ravel(), earlier.ravel()
        squares += float(difference @ difference)
        length += float(flat @ flat)
        numbers += value.size
    return squares, math.sqrt(length), numbers
