"""Whether a number of the model moved further than Adam can move it."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedleak.detectors import ROUNDING, Detector, Finding, Seen, compared


@dataclass(frozen=True, kw_only=True)
class AdamBound(Detector):
    """Compares the farthest move of a single number with what Adam's steps allow.

    It applies where every number moves by steps of Adam or AdamW alone: the server's own on the
    mean update, or those of clients whose weights the server averages, as FedAvg does. It does not
    where clients step with plain SGD, add noise after Adam, or keep weights in bfloat16. The bound
    holds for any gradients, so there is no false alarm
    (`fedleak.detectors.movement.longest_step`).
    """

    kind: ClassVar[str] = "adam_bound"
    cost: ClassVar[str] = "one pass over the weights; a copy of the model on disk"
    reads: ClassVar = "earlier"

    def __call__(self, seen: Seen) -> Finding:
        """Returns the largest move of a number, in what Adam allows."""
        before, movement = seen.before, seen.movement
        if before is None:
            return Finding("the client has kept no earlier model, and has no public checkpoint")
        if movement is None or movement.optimiser != "adam":
            return Finding("the model does not move by Adam, so the bound does not apply")
        rounds = seen.now.round - before.round
        if rounds < 0:
            return Finding(f"the server went back from round {before.round}", math.inf, 1.0)
        bound = movement.by_adam(before.round, seen.now.round)
        decay = movement.rate * rounds * movement.steps * movement.weight_decay
        largest, farthest = 0.0, "no number"
        for name, earlier, value in compared(before, seen.now):
            moved = np.abs(value - earlier)
            sizes = np.abs(earlier) + bound
            allowed = bound + (decay + rounds * movement.steps * ROUNDING) * sizes
            with np.errstate(divide="ignore", invalid="ignore"):
                share = np.where(moved == 0, 0.0, moved / allowed)
            # NaN counts as the farthest move.
            share = np.nan_to_num(share, nan=np.inf, posinf=np.inf)
            if share.size and float(share.max()) > largest:
                largest, farthest = float(share.max()), f"a number of {name!r}"
        return Finding(
            f"{farthest} moved {largest:.3g} times as far as {rounds} rounds of Adam allow",
            largest,
            1.0,
        )
