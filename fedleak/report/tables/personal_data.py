"""Personal data in the private texts, and what was read of it."""

from fedleak.report.table import Cell, Row, Table, Tone, cells, figures, words
from fedleak.report.words import NOT_MEASURED
from fedleak.store.summaries import KindRead, RunSummary

READ = (
    "Read: all tokens of the piece stand side by side in one text that an attack named. Other "
    "update: it stands in an attack's answer for another client's update, too."
)


def personal_data_tables(summary: RunSummary) -> list[Table]:
    """Returns a line for each kind: how many pieces all attacks together read, without the pieces.

    There is no table if the private texts have no personal data.
    """
    personal = summary.worst_case.personal if summary.worst_case else None
    rows: list[Row] = []
    notes = [summary.looked_for]
    if personal is None or not personal.kinds:
        of_attacks = [row.personal.unanswered for row in summary.attacks.values() if row.personal]
        if any(of_attacks):
            rows.append(["all kinds", f"{max(of_attacks):,}", *[NOT_MEASURED] * 2])
            notes.append("No attack named a text: how much was read is not known.")
    else:
        counts = dict(personal.kinds)
        if len(counts) > 1:
            fields = ("items", "read", "control")
            totals = {name: sum(getattr(row, name) for row in counts.values()) for name in fields}
            counts["all kinds"] = KindRead(**totals)
        for kind, row in counts.items():
            read = Cell(f"{row.read:,}", Tone.ALARM if row.read > row.control else Tone.PLAIN)
            control = NOT_MEASURED if personal.control is None else f"{row.control:,}"
            rows.append([kind, f"{row.items:,}", read, control])
        notes.append(READ)
        if personal.unanswered:
            notes.append(f"{personal.unanswered:,} more pieces are in texts that no attack named.")
    title = "personal data in private texts, and what was read of it"
    columns = [*words("personal data"), *figures("pieces", "read", "other update")]
    return [Table(title, columns, cells(rows), notes)] if rows else []
