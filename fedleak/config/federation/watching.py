"""How one client runs its detectors in each round, and what it keeps for later rounds.

Nothing here needs torch, so that a client of another app can use it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedleak.detectors import (
    Broadcast,
    Detector,
    Finding,
    Movement,
    Own,
    Seen,
    Weights,
    digest,
    look,
)
from fedleak.store.memory import Board, Memory, Remembered


@dataclass(frozen=True)
class Watched:
    """What a client noticed in a round.

    Attributes:
        hash: The hash of the model that it was sent.
        findings: Each detector with its finding.
    """

    hash: str
    findings: Sequence[tuple[Detector, Finding]]

    @property
    def alarms(self) -> Sequence[tuple[Detector, Finding]]:
        """The detectors that alarm, with their findings."""
        return [(detector, finding) for detector, finding in self.findings if finding.alarm]

    @property
    def refuses(self) -> bool:
        """Whether the client stays out of the round."""
        return any(detector.action == "refuse" for detector, _ in self.alarms)

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the findings as plain values; a statistic that is no number is left out."""
        return [
            {
                "detector": detector.kind,
                "action": detector.action,
                "alarm": finding.alarm,
                **vars(finding),
            }
            for detector, finding in self.findings
        ]


def watch(
    memory: Memory,
    detectors: Sequence[Detector],
    now: Broadcast,
    *,
    settings: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    movement: Movement | None = None,
    checkpoint: Callable[[], Weights] | None = None,
    own: Own | None = None,
    board: Board | None = None,
) -> Watched:
    """Looks at a broadcast before anything is trained on it, and remembers it if nothing alarms.

    Args:
        memory: The client's memory.
        detectors: The detectors that it uses.
        now: The broadcast.
        settings: What the server asks for.
        shapes: Shapes of the parameters that it was promised; None: those of its first broadcast.
        movement, own: As in `Seen`.
        checkpoint: Loads the public model of round 1; None: the client has none.
        board: Where hashes are compared; None: nowhere.

    Raises:
        FedleakError: A detector failed, or the client's memory is damaged.
    """
    here = {name: tuple(value.shape) for name, value in now.parameters.items()}
    known = memory.remembered() or Remembered(settings=dict(settings), shapes=here)
    compares = any(detector.reads == "earlier" for detector in detectors)
    before = memory.broadcast() if compares else None
    if compares and before is None and checkpoint is not None:
        before = Broadcast(1, checkpoint())
    own_hash = digest(now.parameters)
    hashes = {**known.hashes, now.round: own_hash}
    asks = any(detector.reads == "others" for detector in detectors)
    seen = Seen(
        now=now,
        before=before,
        shapes=known.shapes if shapes is None else shapes,
        settings=settings,
        contract=known.settings,
        movement=movement,
        longest=known.longest,
        hashes=hashes,
        published=board.compare(now.round, own_hash, hashes) if asks and board else {},
        own=own,
    )
    watched = Watched(own_hash, list(zip(detectors, look(detectors, seen), strict=True)))
    longest = known.longest
    if compares and not watched.alarms:
        memory.write_broadcast(now)
        if own is not None and movement is not None and movement.by_examples:
            longest = max(own.longest(), longest or 0.0)
    update = {"hashes": {now.round: own_hash}, "longest": longest}
    memory.write(known.model_copy(update=update))
    return watched


def remember_sent(memory: Memory, norm: float) -> None:
    """Remembers the L2 norm of an update that was sent in a round without an alarm."""
    if (known := memory.remembered()) is not None:
        memory.write(known.model_copy(update={"longest": max(norm, known.longest or 0.0)}))
