"""Personal data in the private texts, and what was read of it."""

from collections.abc import Mapping

from fedleak.report.table import Cell, Table, Tone, figures, plain, words
from fedleak.report.words import ANY_ATTACK, NOT_MEASURED
from fedleak.store.summaries import KindRead, PersonalData, RunSummary

TOGETHER = "all kinds"

READ = (
    "Read: all tokens of the piece stand side by side in one text that the attack named. Other "
    "update: the piece stands in the attack's answer for another client's update, too, so that "
    "it says nothing about this one."
)


def personal_data_tables(summary: RunSummary) -> list[Table]:
    """Returns a line for each kind, with how many pieces of it each attack read.

    No piece itself is in it. There is no table of a run whose private texts have none, or that no
    attack named a text of.
    """
    by_attack = {
        name: attack.personal
        for name, attack in summary.attacks.items()
        if attack.personal is not None and attack.personal.kinds
    }
    if summary.worst_case is not None and len(by_attack) > 1:
        assert summary.worst_case.personal is not None  # an attack has some
        by_attack[ANY_ATTACK] = summary.worst_case.personal
    kinds = sorted({kind for personal in by_attack.values() for kind in personal.kinds})
    if not kinds:
        return []
    rows = [[Cell(kind), *_cells(by_attack, kind)] for kind in kinds]
    if len(kinds) > 1:
        rows.append([Cell(TOGETHER), *_cells(by_attack, None)])
    headings = [heading for name in by_attack for heading in (name, "other update")]
    notes = [summary.looked_for, READ]
    if unanswered := max(personal.unanswered for personal in by_attack.values()):
        notes.append(f"Up to {unanswered:,} more pieces are in texts that an attack did not name.")
    return [
        Table(
            "personal data in private texts: pieces read, of those that there are",
            [*words("personal data"), *figures(*headings)],
            rows,
            notes,
            kept=1,
        )
    ]


def _cells(by_attack: Mapping[str, PersonalData], kind: str | None) -> list[Cell]:
    """Returns how many pieces of a kind, or of all, each attack read, and its control."""
    cells = []
    for personal in by_attack.values():
        chosen: list[KindRead] = [
            of_kind for name, of_kind in personal.kinds.items() if kind in (None, name)
        ]
        items, read, control = (
            sum(getattr(of_kind, name) for of_kind in chosen)
            for name in ("items", "read", "control")
        )
        cells.append(Cell(f"{read}/{items}", Tone.ALARM if read > control else Tone.PLAIN))
        cells += plain(NOT_MEASURED if personal.control is None else f"{control}/{items}")
    return cells
