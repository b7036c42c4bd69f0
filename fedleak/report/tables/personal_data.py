"""Personal data in the private texts, and what was read of it."""

from fedleak.report.table import Cell, Table, Tone, figures, plain, words
from fedleak.report.words import NOT_MEASURED
from fedleak.store.summaries import RunSummary

READ = (
    "Read: all tokens of the piece stand side by side in one text that an attack named. Other "
    "update: it stands in an attack's answer for another client's update, too."
)


def personal_data_tables(summary: RunSummary) -> list[Table]:
    """Returns a line for each kind: how many pieces all attacks together read; none is shown.

    There is no table where the private texts have none, or where no attack named a text.
    """
    personal = summary.worst_case.personal if summary.worst_case else None
    if personal is None or not personal.kinds:
        return []
    counts = [(kind, row.items, row.read, row.control) for kind, row in personal.kinds.items()]
    if len(counts) > 1:
        totals = [sum(numbers) for numbers in zip(*(row[1:] for row in counts), strict=True)]
        counts.append(("all kinds", totals[0], totals[1], totals[2]))
    notes = [summary.looked_for, READ]
    if personal.unanswered:
        notes.append(f"{personal.unanswered:,} more pieces are in texts that no attack named.")
    return [
        Table(
            "personal data in private texts, and what was read of it",
            [*words("personal data"), *figures("pieces", "read", "other update")],
            [
                [
                    *plain(kind, f"{items:,}"),
                    Cell(f"{read:,}", Tone.ALARM if read > control else Tone.PLAIN),
                    Cell(NOT_MEASURED if personal.control is None else f"{control:,}"),
                ]
                for kind, items, read, control in counts
            ],
            notes,
        )
    ]
