"""Which clients noticed something, which refused a round, and when."""

from fedleak.report.table import Cell, Row, Table, Tone, cells, figures, words
from fedleak.store.summaries import Detections, DetectorSummary
from fedleak.util.lists import in_rounds

MOST_ROUNDS = 8
"""Rounds that are named at most."""


def detections_table(summary: Detections) -> Table:
    """Returns a line for each detector."""
    notes = [
        "Looks: rounds of a client in which the detector had something to look at. Alarms: those "
        "of them in which it alarmed."
    ]
    if any(not detector.has_limit for detector in summary.detectors):
        notes.append("No limit: the detector measured, and nothing it finds is an alarm.")
    if summary.refused:
        notes.append(f"Refused, and took no part: {in_rounds(summary.refused, MOST_ROUNDS)}.")
    if summary.unequal:
        notes.append(
            "Clients were sent different models, by the hashes that they noted: round "
            f"{', '.join(map(str, summary.unequal[:MOST_ROUNDS]))}."
        )
    return Table(
        "what clients noticed of the server",
        [*words("detector", "action"), *figures("looks", "alarms"), *words("clients that alarmed")],
        cells(map(_row, summary.detectors)),
        notes,
    )


def _row(detector: DetectorSummary) -> Row:
    count = sum(map(len, detector.alarms.values()))
    alarms = Cell(str(count), Tone.ALARM if count else Tone.PLAIN)
    return [
        detector.detector,
        detector.action,
        str(detector.looked),
        alarms if detector.has_limit else "no limit",
        in_rounds(detector.alarms, MOST_ROUNDS),
    ]
