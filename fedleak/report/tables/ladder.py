"""What each fact is worth."""

from collections.abc import Iterator

from fedleak.report.table import Cell, Row, Table, cells, figures, words
from fedleak.report.tables.attacks import shown
from fedleak.report.tables.comparison import SHOWN, difference
from fedleak.report.words import ANY_ATTACK
from fedleak.store.summaries import (
    AttackSummary,
    Difference,
    Direction,
    Ladder,
    RunSummary,
    WorstCase,
)

FIGURES = {"exact": "exact_match", "rougeL": "rougeL", "token_recall": "token_recall"}
"""The figures of a difference, by their names in a summary."""

MARK = "*"
"""Marks a difference that both the interval and the sign test show."""


def ladder_table(summary: RunSummary, ladder: Ladder) -> Table:
    """Returns a line per rung: for all attacks together, then for each attack that uses a fact."""
    names = sorted({name for rung in ladder.rungs for name in rung.attacks})
    used = [
        name
        for name in names
        if len({rung.attacks[name] for rung in ladder.rungs if name in rung.attacks}) > 1
    ]
    attacks: list[str | None] = [None, *used] if len(names) > 1 else [*used]
    tests = sum(len(rung.worth) for rung in ladder.rungs)
    return Table(
        "what each fact is worth to the server",
        [*words("attack", "told"), *figures(*(SHOWN[name].heading for name in FIGURES))],
        cells(row for attack in attacks for row in _rows(summary, ladder, attack)),
        [
            "Below a figure: how much more it is than told nothing more. It is the mean over texts "
            "that have an answer on both rungs, with its 95 % interval for other clients like "
            f"these. {MARK}: chance would rarely make so much of these clients (sign-flip test, p "
            f"at most 0.05, corrected for {tests} differences by {ladder.correction}).",
            *(f"{fact} is on no rung: {reason}." for fact, reason in ladder.left_out.items()),
        ],
        groups=1,
    )


def _rows(summary: RunSummary, ladder: Ladder, attack: str | None) -> Iterator[Row]:
    """Yields a row per rung on which an attack, or all of them, is told something else."""
    told_last = None
    for rung in ladder.rungs:
        measured: WorstCase | AttackSummary | None = rung.worst_case
        if attack is not None:
            rung_name = rung.attacks.get(attack)
            if rung_name is None or rung_name == told_last:  # it does not use this fact
                continue
            measured, told_last = summary.attacks.get(rung_name), rung_name
        more = {worth.figure: worth for worth in rung.worth if worth.attack == attack}
        read = [
            Cell(shown(measured, name), below=[_marked(more[figure])] if figure in more else [])
            for figure, name in FIGURES.items()
        ]
        yield [attack or ANY_ATTACK, rung.granted_in_words.replace("_", " "), *read]


def _marked(change: Difference) -> str:
    """Returns a difference with its interval, and a mark if the interval and the test show it."""
    return difference(change) + f" {MARK}" * (change.direction is not Direction.UNTOLD)
