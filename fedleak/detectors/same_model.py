"""Whether all clients of a round were sent the same model."""

from dataclasses import dataclass
from typing import ClassVar

from fedleak.detectors import Detector, Finding, Seen


@dataclass(frozen=True, kw_only=True)
class SameModel(Detector):
    """Compares the hash of the broadcast with those that other clients published.

    Any difference is an alarm: an honest server sends every client the same model, so there is no
    false one. It needs a place for the hashes that the server cannot write to. A client sees what
    was published before it asks, so the first of a round learns of a difference in its next round.
    """

    kind: ClassVar[str] = "same_model"
    cost: ClassVar[str] = "one pass over the weights; 64 characters published"
    reads: ClassVar = "others"

    def __call__(self, seen: Seen) -> Finding:
        """Returns how many others were sent another model, in this round or the last one."""
        compared, others = 0, dict.fromkeys(seen.hashes, 0)
        for round, own in seen.hashes.items():
            of_round = seen.published.get(round, ())
            compared += len(of_round)
            others[round] = sum(other != own for other in of_round)
        if not compared:
            return Finding("no other client has published the hash of its model yet")
        unequal = ", ".join(f"{count} in round {round}" for round, count in others.items() if count)
        return Finding(
            f"of {compared} published hashes, {unequal or 'none'} are of another model than this "
            "client's",
            float(sum(others.values())),
            0.0,
        )
