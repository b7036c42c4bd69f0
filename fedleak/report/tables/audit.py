"""What an audit planned, how long that took, and what the gate says, as tables."""

from fedleak.report.table import Cell, Row, Table, Tone, cells, figures, words
from fedleak.report.words import number
from fedleak.store.audits import Audit

TONES = {"exceeded": Tone.ALARM, "untold": Tone.GAP}


def plan_table(audit: Audit) -> Table:
    """Returns the parts of an audit, how long each was to take, and how long all of it took."""
    rows = [[part.what, number(part.seconds)] for part in audit.parts]
    rows.append(["all of it", number(audit.estimate)])
    if audit.seconds is not None:
        rows.append(["it took", number(audit.seconds)])
    notes = [f"not part of it: {reason}" for reason in audit.left_out] + stopped(audit)
    title = f"The plan of the audit, for {audit.minutes:g} minute{'s' * (audit.minutes != 1)}"
    return Table(title, [*words("part"), *figures("seconds, about")], cells(rows), notes)


def stopped(audit: Audit) -> list[str]:
    """Returns a sentence for each way in which an audit was stopped."""
    notes = []
    if audit.cut:
        notes.append(
            "Its time was up before all of it was done: what is missing was not attacked. The same "
            "command goes on, with as many minutes again."
        )
    if audit.interrupted:
        notes.append("It was stopped and went on, so how long it took is not known.")
    return notes


def gate_tables(audit: Audit) -> list[Table]:
    """Returns the checks of the gate, if the experiment has limits."""
    if not audit.checks:
        return []
    rows: list[Row] = [
        [Cell(check.outcome, TONES.get(check.outcome, Tone.PLAIN)), check.name, check.sentence]
        for check in audit.checks
    ]
    return [Table("The gate", words("outcome", "check", "found"), cells(rows))]
