"""What clients' detectors found: detections.jsonl, and who warned or refused in which round."""

from collections.abc import Iterable, Sequence

from pydantic import BaseModel

from fedleak.audit.gaps import Gaps, read_notes
from fedleak.store.records import DetectionRow, DetectorFinding
from fedleak.store.run import Run
from fedleak.store.summaries import Detections, DetectorSummary
from fedleak.util.lists import grouped


class DetectionNote(BaseModel):
    """A file in which a client noted what its detectors found in a round.

    Attributes:
        hash: The hash of the model that the client was sent.
        refused: Whether the client stayed out of the round.
        findings: What each detector found.
    """

    hash: str
    refused: bool
    findings: list[DetectorFinding]


def detection_rows(run: Run, gaps: Gaps, before: Iterable[DetectionRow]) -> list[DetectionRow]:
    """Returns the rows of detections.jsonl; earlier rows stay if the client's note is gone."""
    notes = read_notes(run.detected, DetectionNote, gaps)
    rows = [
        DetectionRow(**key._asdict(), hash=note.hash, refused=note.refused, **finding.model_dump())
        for key, note in notes.items()
        if note is not None
        for finding in note.findings
    ]
    kept = [row for row in before if notes.get(row.key) is None]
    return sorted(rows + kept, key=lambda row: (row.key, row.place))


def summarised(rows: Sequence[DetectionRow]) -> Detections | None:
    """Returns which clients warned and which refused, in which rounds; None: nobody looked."""
    if not rows:
        return None
    by_detector = grouped(rows, lambda row: (row.place, row.detector, row.action))
    by_round = sorted(grouped(rows, lambda row: row.round).items())
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
        unequal=tuple(round for round, sent in by_round if len({row.hash for row in sent}) > 1),
    )


def _by_round(rows: Iterable[DetectionRow]) -> dict[int, tuple[int, ...]]:
    """Returns the clients of rows by their round."""
    by_round = sorted(grouped(rows, lambda row: row.round).items())
    return {round: tuple(sorted({row.client for row in own})) for round, own in by_round}
