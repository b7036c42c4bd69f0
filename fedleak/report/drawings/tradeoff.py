"""A drawing of leakage against utility and epsilon: a point per attack and cell of a sweep."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from pydantic import JsonValue

from fedleak.report.drawings import common as drawing
from fedleak.report.drawings.common import (
    CARETDOWN,
    COLOURS,
    GREY,
    LOG_FROM,
    MARKERS,
    NO_ANSWER,
    NO_UPDATE,
    NOWHERE,
    REFERENCE,
    SHORT,
    log_ticks,
    mark,
    mark_intervals,
    prepare_log_,
)
from fedleak.report.tables.sweep import UTILITIES, utility, utility_measure
from fedleak.report.words import in_words, short_key
from fedleak.store.summaries import CellSummary, Estimate, SweepSummary
from fedleak.training.privacy import NONE
from fedleak.util.sanitise import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FEW_CELLS = 8
"""Up to so many cells are numbered, and the legend says which is which."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """What one attack read in one cell, and at what price.

    Attributes:
        attack, label: The attack, and the values of the cell.
        leakage: ROUGE-L, with its interval; None if it has no answer.
        no_update: ROUGE-L of texts drawn without any update, if measured.
        utility: The utility of the trained model, if measured.
        epsilon: A number, or the word for no guarantee; None: not measured.
    """

    attack: str
    label: str
    leakage: Estimate | None
    no_update: float | None
    utility: float | None
    epsilon: float | str | None

    @property
    def shown(self) -> Estimate:
        """What is drawn: below the axis' zero where there is no answer."""
        return self.leakage or Estimate(mean=NOWHERE, low=NOWHERE, high=NOWHERE)


def draw_tradeoff(collected: SweepSummary, path: Path) -> None:
    """Draws leakage against utility and epsilon, if two cells have both leakage and utility.

    Args:
        collected: The sweep.
        path: The svg file.
    """
    drawing.save(collected.name, lambda: tradeoff(collected), path)


def tradeoff(collected: SweepSummary) -> "Figure | None":
    """Returns the drawing of the trade-off: in each panel a point per attack and cell.

    There is no panel for epsilon if no cell has a guarantee, and no drawing for fewer than two
    cells.
    """
    from matplotlib.figure import Figure

    measure = utility_measure(collected)
    points = [] if measure is None else list(_points(collected, measure))
    by_utility = [(p.utility, p) for p in points if p.utility is not None]
    if measure is None or len({point.label for _, point in by_utility}) < 2:
        return None
    epsilons = [p.epsilon for p in points if _on_log_axis(p.epsilon)]
    panels = 2 if epsilons else 1
    attacks = sorted({point.attack for point in points})
    figure = Figure(figsize=(3.7 * panels + 1.9, 3.7), layout="constrained")
    first, *second = figure.subplots(1, panels, squeeze=False, sharey=True)[0]
    first.set_ylabel("ROUGE-L")
    first.set_ylim(-7, 109)
    first.set_xlabel(UTILITIES[measure])
    values = [x for x, _ in by_utility]
    if measure == "perplexity" and max(values) > LOG_FROM * min(values):
        prepare_log_(first, log_ticks(min(values), max(values)))
    _scatter(first, attacks, by_utility)
    baselines = [cell.utility_reference for cell in collected.cells]
    references = {baseline.figures.get(measure) for baseline in baselines if baseline is not None}
    for x in references - {None}:
        first.axvline(x, label=REFERENCE, color="black", linestyle=":", linewidth=1, zorder=0)
    by_epsilon = []
    for axes in second:
        none_at = _prepare_epsilons_(axes, epsilons, any(p.epsilon == NONE for p in points))
        placed = ((none_at if p.epsilon == NONE else p.epsilon, p) for p in points)
        by_epsilon = [(x, p) for x, p in placed if _on_log_axis(x)]
        _scatter(axes, attacks, by_epsilon)
    cells = list(dict.fromkeys(point.label for point in points))
    if len(cells) > FEW_CELLS:
        drawing.legend(figure)
        return figure
    for axes, spots in zip(figure.axes, (by_utility, by_epsilon), strict=False):
        _number(axes, spots, cells)
    keys = ", ".join(map(short_key, collected.axes))
    named = [f"{number}: {label}" for number, label in enumerate(cells, 1)]
    drawing.legend(figure, "\n".join([textwrap.fill(f"cells by {keys}", 3 * SHORT), *named]))
    return figure


def _on_log_axis(epsilon: float | str | None) -> TypeGuard[float]:
    """Returns whether an epsilon is above 0; a client that was never asked has an epsilon of 0."""
    return isinstance(epsilon, int | float) and epsilon > 0


def _points(collected: SweepSummary, measure: str) -> Iterator[Point]:
    """Yields a point for each attack on texts in each cell, unless the attack never answers."""
    on_texts = {
        attack
        for cell in collected.cells
        for attack, summary in cell.attacks.items()
        if summary.rougeL
    }
    for cell, label in zip(collected.cells, labels(collected.cells), strict=True):
        for attack, summary in cell.attacks.items():
            if attack in on_texts:
                yield Point(
                    attack=attack,
                    label=label,
                    leakage=summary.rougeL,
                    no_update=summary.guess_rougeL.mean if summary.guess_rougeL else None,
                    utility=utility(cell, measure),
                    epsilon=cell.privacy.epsilon if cell.privacy else None,
                )


def labels(cells: Sequence[CellSummary]) -> list[str]:
    """Returns what tells each cell from the others, without settings that are the same in all."""
    values_by_key: dict[str, set[str]] = {}
    for cell in cells:
        for key, value in _settings(list(cell.values.values())):
            values_by_key.setdefault(key, set()).add(in_words(value))

    def differing(value: JsonValue) -> JsonValue:
        if isinstance(value, list):
            return [differing(element) for element in value]
        if isinstance(value, dict):
            return {k: v for k, v in value.items() if k == "kind" or len(values_by_key[k]) > 1}
        return value

    full = [list(cell.values.values()) for cell in cells]
    short = [", ".join(in_words(differing(value)) for value in values) for values in full]
    if len(set(short)) < len(short):
        short = [", ".join(map(in_words, values)) for values in full]
    return [textwrap.fill(label, 3 * SHORT) for label in short]


def _settings(value: JsonValue) -> Iterator[tuple[str, JsonValue]]:
    """Yields the keys and values of the tables in a value."""
    for element in value if isinstance(value, list) else []:
        yield from _settings(element)
    if isinstance(value, dict):
        yield from value.items()


def _scatter(axes: "Axes", attacks: Sequence[str], spots: Sequence[tuple[float, Point]]) -> None:
    """Draws the points of each attack with their intervals, at the x given for each."""
    for number, attack in enumerate(attacks):
        mine = [(x, point) for x, point in spots if point.attack == attack]
        name = printable(attack)
        colour = COLOURS[number % len(COLOURS)]
        mark_intervals(
            axes,
            [x for x, point in mine if point.leakage is not None],
            [point.leakage for _, point in mine if point.leakage is not None],
            name,
            MARKERS[number % len(MARKERS)],
            colour=colour,
            markerfacecolor="none",  # attacks that read the same stay visible
            markersize=5,
        )
        silent = [(x, NOWHERE) for x, point in mine if point.leakage is None]
        mark(axes, silent, f"{name}: {NO_ANSWER}", CARETDOWN, colour=colour, size=5)
    controls = [(x, point.no_update) for x, point in spots if point.no_update is not None]
    mark(axes, controls, NO_UPDATE, "x", zorder=1)


def _prepare_epsilons_(axes: "Axes", epsilons: Sequence[float], nones: bool) -> float:
    """Makes the x axis for epsilons, and returns the place of points without an epsilon."""
    ticks = log_ticks(min(epsilons), max(epsilons))
    margin = max(2.0, (ticks[-1] / ticks[0]) ** 0.2)
    none_at: float = ticks[-1] * margin
    prepare_log_(axes, ticks, {none_at: NONE} if nones else {})
    if nones:
        axes.axvline(ticks[-1] * margin**0.5, color=GREY, linewidth=0.6, zorder=0)
    axes.set_xlim(ticks[0] / margin**0.5, (none_at if nones else ticks[-1]) * margin**0.5)
    axes.set_xlabel("epsilon")
    return none_at


def _number(axes: "Axes", spots: Sequence[tuple[float, Point]], cells: Sequence[str]) -> None:
    """Writes the number of each cell beside its highest point."""
    for number, label in enumerate(cells, 1):
        if own := [(point.shown.mean, x) for x, point in spots if point.label == label]:
            height, x = max(own)
            axes.annotate(str(number), (x, height), (4, 4), textcoords="offset points", fontsize=7)
