"""What clients' detectors found: detections.jsonl, and who warned or refused in which round."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from pydantic import BaseModel, ConfigDict, ValidationError

from fedleak.audit.gaps import Gaps
from fedleak.store.records import Action, DetectionRow
from fedleak.store.run import Key, Run
from fedleak.store.summaries import Detections, DetectorSummary
from fedleak.util.errors import FedleakError


class _Finding(BaseModel):
    model_config = ConfigDict(allow_inf_nan=False)

    place: int
    detector: str
    action: Action
    statistic: float | None
    limit: float | None
    alarm: bool
    sentence: str


class DetectionNote(BaseModel):
    """A file in which a client noted what its detectors found in a round.

    Attributes:
        hash: Of the model that it was sent.
        refused: Whether it stayed out of the round.
        findings: Of each detector.
    """

    hash: str
    refused: bool
    findings: list[_Finding]


def detection_rows(run: Run, gaps: Gaps, before: Iterable[DetectionRow]) -> list[DetectionRow]:
    """Returns the rows of detections.jsonl; those of a client whose note is gone stay."""
    notes: dict[Key, DetectionNote] = {}
    for key in run.detected.all_keys():
        try:
            notes[key] = DetectionNote.model_validate(run.detected.read_note(key))
        except (FedleakError, ValidationError):
            gaps.missing.append(
                f"{run.detected.path(key)} is damaged: what was counted with it stays, and only "
                "`fedleak run FILE --fresh` writes such a file again"
            )
    rows = [
        DetectionRow(
            round=key.round,
            client=key.client,
            hash=note.hash,
            refused=note.refused,
            **finding.model_dump(),
        )
        for key, note in notes.items()
        for finding in note.findings
    ]
    kept = [row for row in before if row.key not in notes]
    return sorted(rows + kept, key=lambda row: (row.key, row.place))


def summarised(rows: Sequence[DetectionRow]) -> Detections | None:
    """Returns which clients warned and which refused, in which rounds; None: nobody looked."""
    if not rows:
        return None
    by_detector: dict[tuple[int, str, Action], list[DetectionRow]] = defaultdict(list)
    hashes: dict[int, set[str]] = defaultdict(set)
    for row in rows:
        by_detector[row.place, row.detector, row.action].append(row)
        hashes[row.round].add(row.hash)
    return Detections(
        detectors=tuple(
            DetectorSummary(
                place=place,
                detector=detector,
                action=action,
                looked=sum(row.statistic is not None or row.alarm for row in of_detector),
                has_limit=any(row.limit is not None for row in of_detector),
                alarms=_by_round(row for row in of_detector if row.alarm),
            )
            for (place, detector, action), of_detector in sorted(by_detector.items())
        ),
        refused=_by_round(row for row in rows if row.refused),
        unequal=tuple(round for round, of_round in sorted(hashes.items()) if len(of_round) > 1),
    )


def _by_round(rows: Iterable[DetectionRow]) -> dict[int, tuple[int, ...]]:
    """Returns the clients of rows by their round."""
    clients: dict[int, set[int]] = defaultdict(set)
    for row in rows:
        clients[row.round].add(row.client)
    return {round: tuple(sorted(of_round)) for round, of_round in sorted(clients.items())}
