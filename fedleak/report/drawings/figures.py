"""A drawing of a sweep: each attack along the first swept key.

Where an attack has no answer there is a mark below zero and no line, which would claim what nobody
measured. Lines join neighbours on an axis to scale only: between two defenses there is nothing.
"""

import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from pydantic import JsonValue

from fedleak.report.drawings import common as drawing
from fedleak.report.drawings.common import (
    CARETDOWN,
    COLOURS,
    LOG_FROM,
    MARKERS,
    MEASURES,
    NO_ANSWER,
    NO_UPDATE,
    NOWHERE,
    SHORT,
    STYLES,
    Measure,
    mark,
    mark_intervals,
)
from fedleak.report.words import in_words, short_key
from fedleak.store.summaries import AttackSummary, SweepSummary
from fedleak.util.sanitise import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

APART = 0.5
"""The share of the room between two words that the points of all lines take, side by side."""

TOO_CLOSE = 0.04
"""Numbers nearer than this share of the axis are drawn evenly apart: their labels would overlap."""


@dataclass(frozen=True)
class Line:
    """One attack at one combination of the further keys: its summary at each x, where there is one.

    Attributes:
        attack, others: The attack, and the values of the further keys.
        summaries: The attack's summaries, by the place of x on the first axis.
    """

    attack: str
    others: str
    summaries: Mapping[int, AttackSummary]

    @property
    def label(self) -> str:
        """What the legend says."""
        return ", ".join(filter(None, (printable(self.attack), self.others)))


@dataclass(frozen=True)
class Across:
    """The x axis: where each value of the first key is on it, and what is written there."""

    places: Sequence[float]
    words: Sequence[str]
    scale: Literal["linear", "log", "even"]

    @property
    def order(self) -> list[int]:
        """The values' numbers, from left to right."""
        return sorted(range(len(self.places)), key=lambda x: self.places[x])

    def beside(self, number: int, count: int) -> list[float]:
        """Returns the places of one of several lines, so that none hides another.

        A point stands at its value if that is a number, and near it if that is a word.
        """
        shift = APART * (number - (count - 1) / 2) / count if self.scale == "even" else 0.0
        return [place + shift for place in self.places]

    @property
    def upright(self) -> bool:
        """Whether the words are too long to lie flat beside each other."""
        return self.scale == "even" and max(map(len, self.words)) > SHORT

    @property
    def inches(self) -> float:
        """How wide a panel is, so that words that stand upright have room for their lines."""
        rows = sum(word.count("\n") + 1 for word in self.words) if self.upright else 0
        return max(2.9, 0.9 + 0.17 * rows)

    def prepare_(self, axes: "Axes") -> None:
        """Makes the x axis of a panel."""
        if self.scale == "log":
            axes.set_xscale("log")
        upright = {"rotation": 90, "multialignment": "right"} if self.upright else {}
        axes.set_xticks(self.places, self.words, minor=False, **upright)
        axes.minorticks_off()
        if self.scale == "even":
            axes.set_xlim(-0.5, len(self.places) - 0.5)


def draw(collected: SweepSummary, path: Path) -> None:
    """Draws a sweep: a panel per measured figure, a line per attack and combination.

    Args:
        collected: The sweep.
        path: The svg file.
    """
    drawing.save(collected.name, lambda: _sweep_figure(collected), path)


def _sweep_figure(collected: SweepSummary) -> "Figure | None":
    """Returns the drawing of a sweep; None if nothing was measured."""
    # Here, because it takes half a second and only a sweep needs it. No pyplot, so no display.
    from matplotlib.figure import Figure

    key, values = next(iter(collected.axes.items()))
    lines = list(_lines(collected))
    panels = [
        measure
        for measure in MEASURES
        if any(measure.value(s) for line in lines for s in line.summaries.values())
    ]
    if not panels:
        return None
    across = across_of(values)
    labels = [line.label for line in lines]
    # The legend stands beside the panels, and needs room for its longest line.
    width = across.inches * len(panels) + 0.6 + 0.07 * max(map(len, labels))
    figure = Figure(figsize=(width, 4.2 if across.upright else 2.9), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, panel, lines, across)
        across.prepare_(axes)
        axes.set_xlabel(printable(key))
        axes.set_ylabel(panel.heading)
        axes.set_ylim(-7, 104)
    drawing.legend(figure)
    return figure


def _lines(collected: SweepSummary) -> Iterator[Line]:
    (first, values), *further = collected.axes.items()
    for combination in itertools.product(*(axis_values for _, axis_values in further)):
        others = dict(zip((key for key, _ in further), combination, strict=True))
        cells = {
            values.index(cell.values[first]): cell.attacks
            for cell in collected.cells
            if all(cell.values[key] == value for key, value in others.items())
        }
        words = ", ".join(f"{short_key(key)} {in_words(value)}" for key, value in others.items())
        for attack in sorted({name for attacks in cells.values() for name in attacks}):
            summaries = {x: attacks[attack] for x, attacks in cells.items() if attack in attacks}
            yield Line(attack, words, summaries)


def _draw_panel(axes: "Axes", panel: Measure, lines: Sequence[Line], across: Across) -> None:
    attacks = sorted({line.attack for line in lines})
    combinations = list(dict.fromkeys(line.others for line in lines))
    drawn = [line for line in lines if any(panel.value(s) for s in line.summaries.values())]
    controls: dict[int, list[float]] = {}
    for place, line in enumerate(drawn):
        figures = {x: estimate for x, s in line.summaries.items() if (estimate := panel.value(s))}
        on_x = across.beside(place, len(drawn))
        colour = COLOURS[attacks.index(line.attack) % len(COLOURS)]
        number = combinations.index(line.others)
        mark_intervals(
            axes,
            [on_x[x] for x in across.order],
            [figures.get(x) for x in across.order],
            line.label,
            MARKERS[number % len(MARKERS)],
            colour=colour,
            scale=panel.scale,
            linestyle="none" if across.scale == "even" else STYLES[number % len(STYLES)],
            linewidth=1.4,
        )
        silent = [x for x in across.order if x in line.summaries and x not in figures]
        nowhere = [(on_x[x], NOWHERE) for x in silent]
        mark(axes, nowhere, NO_ANSWER, CARETDOWN, colour=colour, size=5)
        for x in figures:
            guess = panel.beside(line.summaries[x], panel.guess)
            if guess is not None:
                controls.setdefault(x, []).append(guess)
    if controls:
        means = [float(np.mean(controls.get(x, math.nan))) for x in across.order]
        mark(
            axes,
            [(across.places[x], mean) for x, mean in zip(across.order, means, strict=True)],
            NO_UPDATE,
            "x",
            linestyle="none" if across.scale == "even" else "--",
            linewidth=1.2,
            zorder=1,
        )


def across_of(values: Sequence[JsonValue]) -> Across:
    """Returns the x axis of these values: to scale if all are numbers that lie well apart."""
    words = [textwrap.fill(in_words(v), 3 * SHORT, break_long_words=False) for v in values]
    evenly = Across(list(range(len(values))), words, "even")
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values):
        return evenly
    log = min(numbers) > 0 and max(numbers) > LOG_FROM * min(numbers)
    on_axis = np.sort(np.log(numbers) if log else np.array(numbers, float))
    if (np.diff(on_axis) < TOO_CLOSE * np.ptp(on_axis)).any():
        return evenly
    return Across(numbers, words, "log" if log else "linear")
