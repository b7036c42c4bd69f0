"""A drawing of the families of a sweep: what leaks along the strengths of each, and what it costs.

A family has two panels: above, the worst case over all attacks, for exact texts, ROUGE-L and
tokens; below, the utility of the trained model. Its strengths stand in the file's order, from weak
to strong, and the undefended cell left of them. Epsilon is below a strength that has one.
"""

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import JsonValue

from fedleak.config.families import FAMILY, UNDEFENDED
from fedleak.report.drawings import common as drawing
from fedleak.report.drawings.common import (
    CARETDOWN,
    COLOURS,
    GREY,
    LOG_FROM,
    MARKERS,
    MEASURES,
    NO_ANSWER,
    NOWHERE,
    Measure,
    mark,
    mark_intervals,
)
from fedleak.report.tables.sweep import UTILITIES, utility, utility_measure
from fedleak.report.words import in_words
from fedleak.store.summaries import CellSummary, SweepSummary
from fedleak.util.sanitise import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 4
"""Families side by side."""

SOME_UNATTACKED = "some texts: no attack answers"


LINES, CONTROL_MARKERS = ("-", "--", ":"), ("", "x", "+")
"""By measure; marks and lines differ, so that it can be read in black and white."""


@dataclass(frozen=True)
class Family:
    """A family of defenses: the cell of each of its strengths, in the file's order."""

    name: str
    unit: str | None
    strengths: Sequence[JsonValue]
    cells: Sequence[CellSummary]

    @property
    def to_scale(self) -> bool:
        """Whether the strengths are numbers, so that there is something between two of them."""
        return all(isinstance(strength, int | float) for strength in self.strengths)


def draw_frontier(collected: SweepSummary, path: Path) -> None:
    """Draws the families of a sweep; without families, or a finished cell, nothing.

    Args:
        collected: The sweep.
        path: The svg file.
    """
    drawing.save(collected.name, lambda: frontier(collected), path)


def frontier(collected: SweepSummary) -> "Figure | None":
    """Returns the drawing of the families, at the first value of each further key."""
    from matplotlib.figure import Figure

    cells = dict(_cells(collected))
    undefended = cells.get((UNDEFENDED, None))
    families = [f for f in _families(cells, collected.units) if f.name != UNDEFENDED]
    if not any(cell.worst_case for family in families for cell in family.cells):
        return None
    measure = utility_measure(collected.model_copy(update={"cells": tuple(cells.values())}))
    columns, bands = min(COLUMNS, len(families)), math.ceil(len(families) / COLUMNS)
    parts = 1 if measure is None else 2
    figure = Figure(
        figsize=(2.7 * columns + 2.6, (2.7 if measure is None else 3.9) * bands),
        layout="constrained",
    )
    grid = figure.subplots(
        bands * parts,
        columns,
        squeeze=False,
        height_ratios=([2.0, 1.0][:parts]) * bands,
    )
    for number in range(bands * columns):
        band, column = divmod(number, columns)
        panels = [grid[band * parts + part][column] for part in range(parts)]
        if number >= len(families):
            for axes in panels:
                axes.set_axis_off()
            continue
        _draw_family(panels, families[number], undefended, measure)
        if column == 0:
            headings = ["worst case over attacks", "" if measure is None else UTILITIES[measure]]
            for axes, heading in zip(panels, headings, strict=False):
                axes.set_ylabel(heading)
    if measure is not None:
        utilities = [utility(cell, measure) for cell in cells.values()]
        _share_scale_(grid[1::2].flat, [score for score in utilities if score is not None], measure)
    controls = [_control(measured) for measured in MEASURES]
    of_utility = [] if measure is None else [_trained(measure), _untouched(measure)]
    drawing.legend(figure, last=(SOME_UNATTACKED, NO_ANSWER, *controls, *of_utility))
    return figure


def _control(measure: Measure) -> str:
    return f"another client's update: {measure.heading}"


def _trained(measure: str) -> str:
    better = " (lower is better)" if measure == "perplexity" else ""
    return f"{UTILITIES[measure]} of the trained model{better}"


def _untouched(measure: str) -> str:
    return f"{UTILITIES[measure]} without a defense"


def _cells(collected: SweepSummary) -> Iterator[tuple[tuple[str, Any], CellSummary]]:
    """Yields the cells of families, each under its family and its strength."""
    base = {key: values[0] for key, values in collected.axes.items() if key != FAMILY}
    for cell in collected.cells:
        value = cell.values.get(FAMILY)
        if isinstance(value, dict) and all(cell.values[key] == base[key] for key in base):
            yield (str(value.get("kind")), _hashable(value.get("strength"))), cell


def _hashable(value: JsonValue) -> Any:
    return in_words(value) if isinstance(value, list | dict) else value


def _families(
    cells: Mapping[tuple[str, Any], CellSummary], units: Mapping[str, str]
) -> Iterator[Family]:
    for name in dict.fromkeys(name for name, _ in cells):
        mine = {strength: cell for (family, strength), cell in cells.items() if family == name}
        yield Family(name, units.get(name), list(mine), list(mine.values()))


def _draw_family(
    panels: "Sequence[Axes]",
    family: Family,
    undefended: CellSummary | None,
    measure: str | None,
) -> None:
    """Draws the leaks of a family and, in the second panel if there is one, the utility."""
    _draw_leaks(panels[0], family, undefended)
    if measure is not None:
        _draw_utility(panels[1], family, undefended, measure)
        panels[0].tick_params(labelbottom=False)
    _prepare_(panels, family, undefended is not None)


def _draw_leaks(axes: "Axes", family: Family, undefended: CellSummary | None) -> None:
    for number in range(len(MEASURES)):
        shift = 0.14 * (number - 1)  # so that none hides another
        groups = [([shift + x for x in range(len(family.cells))], family.cells)]
        if undefended is not None:
            groups.append(([shift - 1], [undefended]))
        for places, cells in groups:
            _draw_leak(axes, number, places, cells, joined=family.to_scale)
    axes.set_ylim(-7, 106)


def _draw_leak(
    axes: "Axes",
    number: int,
    places: Sequence[float],
    cells: Sequence[CellSummary],
    *,
    joined: bool,
) -> None:
    """Draws the measure of this number; NaN where it has none, so that no line runs through."""
    measure, colour = MEASURES[number], COLOURS[number]
    worst_cases = [cell.worst_case for cell in cells]
    estimates = [None if worst is None else measure.value(worst) for worst in worst_cases]
    mark_intervals(
        axes,
        places,
        estimates,
        measure.heading,
        MARKERS[number],
        colour=colour,
        scale=measure.scale,
        linestyle=LINES[number] if joined else "none",
        linewidth=1.3,
        elinewidth=0.8,
        capsize=2,
    )
    partly, silent, controls = [], [], []
    for x, cell, worst, estimate in zip(places, cells, worst_cases, estimates, strict=True):
        if worst is not None and worst.unattacked and estimate is not None:
            partly.append((x, measure.scale * estimate.mean))
        if estimate is None and cell.status == "finished" and cell.attacks:
            silent.append((x, NOWHERE))
        control = None if worst is None else measure.beside(worst, measure.control)
        if control is not None:
            controls.append((x, control))
    if number == 0:
        hollow: dict[str, Any] = {"markerfacecolor": "none", "zorder": 1}
        mark(axes, partly, SOME_UNATTACKED, "o", colour=colour, size=9, **hollow)
    mark(axes, silent, NO_ANSWER, CARETDOWN, colour=colour, size=5, zorder=1)
    mark(axes, controls, _control(measure), CONTROL_MARKERS[number], zorder=1)


def _draw_utility(
    axes: "Axes", family: Family, undefended: CellSummary | None, measure: str
) -> None:
    figures = [utility(cell, measure) for cell in family.cells]
    axes.plot(
        range(len(figures)),
        [math.nan if score is None else score for score in figures],
        label=_trained(measure),
        color="black",
        marker="D",
        markersize=4,
        linewidth=1.2,
        linestyle="-" if family.to_scale else "none",
    )
    without = None if undefended is None else utility(undefended, measure)
    if without is not None:
        axes.plot([-1], [without], color="black", marker="D", markersize=4)
        axes.axhline(
            without,
            label=_untouched(measure),
            color="black",
            linestyle=(0, (1, 3)),
            linewidth=1,
            zorder=0,
        )


def _prepare_(panels: "Sequence[Axes]", family: Family, undefended: bool) -> None:
    """Makes the title and the x axes of a family."""
    epsilons = [_epsilon(cell) for cell in family.cells]
    words = [
        "\n".join([textwrap.fill("on" if strength is None else in_words(strength), 12), *epsilon])
        for strength, epsilon in zip(family.strengths, epsilons, strict=True)
    ]
    places = list(range(len(words)))
    for axes in panels:
        axes.set_xticks(
            [*([-1] if undefended else []), *places],
            [*([UNDEFENDED] if undefended else []), *words],
            fontsize=7,
        )
        axes.set_xlim(-1.5 if undefended else -0.5, len(words) - 0.5)
        if undefended:
            axes.axvline(-0.5, color=GREY, linewidth=0.6, zorder=0)
    panels[0].set_title(printable(family.name), fontsize=9)
    unit = [printable(family.unit)] if family.unit is not None else []
    below = ["(below: epsilon)"] if any(epsilons) else []
    panels[-1].set_xlabel(textwrap.fill(" ".join([*unit, *below]), 40), fontsize=7)


def _epsilon(cell: CellSummary) -> list[str]:
    """Returns the epsilon in few digits; nothing where nothing is guaranteed, or not finished."""
    epsilon = None if cell.privacy is None else cell.privacy.epsilon
    if not isinstance(epsilon, int | float):
        return []
    return [f"{epsilon:.0f}" if 10 <= epsilon < 1000 else f"{epsilon:.2g}".replace("e+0", "e")]


def _share_scale_(panels: "Iterable[Axes]", values: Sequence[float], measure: str) -> None:
    """Gives all panels of the utility one scale."""
    low, high = min(values), max(values)
    margin = 0.1 * (high - low) or 0.1
    for axes in panels:
        if measure == "perplexity" and low > 0 and high > LOG_FROM * low:
            axes.set_yscale("log")
            ticks = drawing.log_ticks(low, high)
            axes.set_yticks(ticks, [f"{tick:,g}" for tick in ticks])
            axes.minorticks_off()
            axes.set_ylim(low / 1.5, high * 1.5)
        else:
            axes.set_ylim(low - margin, high + margin)
