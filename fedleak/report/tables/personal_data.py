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

    There is no table where the private texts have none.
    """
    personal = summary.worst_case.personal if summary.worst_case else None
    title = "personal data in private texts, and what was read of it"
    columns = [*words("personal data"), *figures("pieces", "read", "other update")]
    if personal is None or not personal.kinds:
        of_attacks = [row.personal.unanswered for row in summary.attacks.values() if row.personal]
        rows = [plain("all kinds", f"{max(of_attacks, default=0):,}", *[NOT_MEASURED] * 2)]
        notes = [summary.looked_for, "No attack named a text: how much was read is not known."]
        return [Table(title, columns, rows, notes)] if any(of_attacks) else []
    counts = [(kind, row.items, row.read, row.control) for kind, row in personal.kinds.items()]
    if len(counts) > 1:
        totals = [sum(numbers) for numbers in zip(*(row[1:] for row in counts), strict=True)]
        counts.append(("all kinds", totals[0], totals[1], totals[2]))
    notes = [summary.looked_for, READ]
    if personal.unanswered:
        notes.append(f"{personal.unanswered:,} more pieces are in texts that no attack named.")
    return [
        Table(
            title,
            columns,
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
