"""What each fact is worth, for the terminal and for reports."""

from collections.abc import Iterator
from typing import NamedTuple

from rich import box
from rich.table import Table

from fedleak.report.terminal.comparison_table import SAYS, SCALE, difference
from fedleak.report.words import ANY_ATTACK, interval
from fedleak.store.summaries import (
    AttackSummary,
    Difference,
    Direction,
    Estimate,
    Ladder,
    RunSummary,
    WorstCase,
)
from fedleak.util.sanitise import markup

FIGURES = {"exact": "exact_match", "rougeL": "rougeL", "token_recall": "token_recall"}
"""The figures of a difference, by their names in a summary."""

MARK = "*"
"""Marks a difference that both the interval and the sign test show."""


class Figure(NamedTuple):
    """A figure on a rung, and how much more it is than with nothing told."""

    name: str
    value: Estimate | None
    more: Difference | None


class Line(NamedTuple):
    """What an attack reads on a rung."""

    attack: str
    told: str
    figures: tuple[Figure, ...]


def lines(summary: RunSummary, ladder: Ladder) -> Iterator[Line]:
    """Yields a line per rung: of the best of all attacks, then of each attack that uses a fact."""
    names = {name for rung in ladder.rungs for name in rung.attacks}
    used = [
        name
        for name in sorted(names)
        if len({rung.attacks[name] for rung in ladder.rungs if name in rung.attacks}) > 1
    ]
    shown: list[str | None] = [None, *used] if len(names) > 1 else [*used]
    for attack in shown:
        told_last = None
        for rung in ladder.rungs:
            measured: WorstCase | AttackSummary | None = rung.worst_case
            if attack is not None:
                called = rung.attacks.get(attack)
                if called is None or called == told_last:  # it does not use this fact
                    continue
                measured, told_last = summary.attacks.get(called), called
            more = {worth.figure: worth for worth in rung.worth if worth.attack == attack}
            yield Line(
                attack or ANY_ATTACK,
                rung.told,
                tuple(
                    Figure(
                        figure,
                        None if measured is None else getattr(measured, name),
                        more.get(figure),
                    )
                    for figure, name in FIGURES.items()
                ),
            )


def table(summary: RunSummary, ladder: Ladder) -> Table:
    """Returns a line per attack and rung."""
    shown = Table(
        title="what each fact is worth to the server",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption=f"below a figure: how much more it is than told nothing more. {note(ladder)}",
        title_justify="left",
        caption_justify="left",
    )
    shown.add_column("attack", overflow="fold")
    shown.add_column("told", overflow="fold")
    for heading in SAYS.values():
        shown.add_column(heading, justify="right", no_wrap=True)
    last = None
    for line in lines(summary, ladder):
        if last not in (None, line.attack):
            shown.add_section()
        name = "" if last == line.attack else markup(line.attack)
        shown.add_row(name, line.told, *(_cell(figure) for figure in line.figures))
        last = line.attack
    return shown


def _cell(figure: Figure) -> str:
    below = "" if figure.more is None else f"\n{marked(figure.more)}".replace("[", r"\[")
    return interval(figure.value, SCALE[figure.name]) + below


def marked(change: Difference) -> str:
    """Returns a difference with its interval, and a mark if it counts as one."""
    return difference(change) + f" {MARK}" * (change.direction is not Direction.UNTOLD)


def note(ladder: Ladder) -> str:
    """Returns how the differences were made, in sentences."""
    tests = sum(len(rung.worth) for rung in ladder.rungs)
    return (
        "It is the mean over texts that have an answer on both rungs, with its 95 % interval by a "
        f"bootstrap over clients. {MARK}: the interval leaves out 0, and a sign test over clients "
        f"agrees (p at most 0.05, corrected for {tests} differences by {ladder.correction})."
    )


def left_out(ladder: Ladder) -> list[str]:
    """Returns why facts are on no rung, a fact in a line."""
    return [f"{fact} is on no rung: {reason}" for fact, reason in ladder.left_out.items()]
