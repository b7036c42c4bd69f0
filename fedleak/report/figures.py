"""Drawings of a sweep: each attack along the first swept key, and leakage against utility.

Where an attack has no answer there is a mark below zero and no line, which would claim what nobody
measured. Lines join neighbours on an axis to scale only: between two defenses there is nothing.
"""

import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import numpy as np

from fedleak.sanitise import printable
from fedleak.sweep import (
    NO_GUARANTEE,
    UTILITIES,
    privacy,
    said,
    short_key,
    utility,
    utility_measure,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = ("-", "-.", ":")
GREY = "0.55"
NO_UPDATE = "no update"
NO_ANSWER = "no answer"
NOWHERE = -4.0
"""ROUGE-L at which an attack without an answer is drawn: not 0, which it did not score."""
CARETDOWN = 7
REFERENCE = "central, undefended"

LOG_FROM = 20.0
"""Numbers that span more than this factor are drawn on a log scale."""

SHORT = 8
"""Characters that a label of the x axis may have and lie flat."""

APART = 0.5
"""The share of the room between two words that the points of all lines take, side by side."""

TOO_CLOSE = 0.04
"""Numbers nearer than this share of the axis are drawn evenly apart: their labels would overlap."""

FEW_CELLS = 8
"""Up to so many cells are labelled with their values."""

LABEL_DX, LABEL_DY = (8, -8), sorted(range(-144, 145, 9), key=abs)
"""Where a label may be from its point, in points; the first that is free is taken."""

MANY_TICKS_UP_TO = 100.0
"""A log axis that spans more than this factor has one tick a decade."""


@dataclass(frozen=True)
class Panel:
    """A figure of the summaries.

    Attributes:
        heading: Of the y axis.
        figure: Its key in a summary.
        control: The key of what is scored without any update, if that is measured.
        scale: What the axis shows of 1.
    """

    heading: str
    figure: str
    control: str | None
    scale: float


PANELS = (
    Panel("texts exact, %", "exact_match", None, 100),
    Panel("ROUGE-L", "rougeL", "guess_rougeL", 1),
    Panel("tokens found, %", "token_recall", "guess_token_recall", 100),
)


@dataclass(frozen=True)
class Line:
    """One attack at one combination of the further keys: its summary at each x, where there is one.

    Attributes:
        attack, others: What it is of.
        summaries: By the place of x on the first axis.
    """

    attack: str
    others: str
    summaries: Mapping[int, Mapping[str, Any]]

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

    def beside(self, number: int, of: int) -> list[float]:
        """Returns where one of several lines has its points, so that none hides another.

        That is the value itself where it is a number, and near it where it is a word.
        """
        shift = APART * (number - (of - 1) / 2) / of if self.scale == "even" else 0.0
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


def draw(collected: Mapping[str, Any], path: Path) -> None:
    """Draws a sweep.json: a panel per measured figure, a line per attack and combination.

    Args:
        collected: The content of a sweep.json.
        path: The svg file.
    """
    # Here, because it takes half a second and only a sweep needs it. No pyplot, so no display.
    from matplotlib.figure import Figure

    key, values = next(iter(collected["axes"].items()))
    lines = list(_lines(collected))
    panels = [
        panel
        for panel in PANELS
        if any(s[panel.figure] for line in lines for s in line.summaries.values())
    ]
    if not panels:
        path.unlink(missing_ok=True)
        return
    across = _across(values)
    labels = [line.label for line in lines]
    # The legend stands beside the panels, and needs room for its longest line.
    width = across.inches * len(panels) + 0.6 + 0.07 * max(map(len, labels))
    with _style(collected["name"]):
        drawing = Figure(figsize=(width, 4.2 if across.upright else 2.9), layout="constrained")
        for axes, panel in zip(
            drawing.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            _draw_panel(axes, panel, lines, across)
            across.prepare_(axes)
            axes.set_xlabel(printable(key))
            axes.set_ylabel(panel.heading)
            axes.set_ylim(-7, 104)
        _legend(drawing)
        drawing.savefig(path, metadata={"Date": None})


@dataclass(frozen=True)
class Point:
    """What one attack read in one cell, and at what price.

    Attributes:
        attack, label: What it is of; the label is the cell's values.
        leakage: ROUGE-L, with its interval; None if it has no answer.
        no_update: ROUGE-L of texts drawn without any update, if measured.
        utility: Of the trained model, if measured.
        epsilon: A number, or the word for no guarantee; None: not measured.
    """

    attack: str
    label: str
    leakage: Mapping[str, float] | None
    no_update: float | None
    utility: float | None
    epsilon: float | str | None

    @property
    def interval(self) -> Mapping[str, float]:
        """What is drawn of it: below the axis' zero where there is no answer."""
        return self.leakage or {"mean": NOWHERE, "low": NOWHERE, "high": NOWHERE}


def draw_tradeoff(collected: Mapping[str, Any], path: Path) -> None:
    """Draws leakage against utility and epsilon, if two cells have both leakage and utility.

    Args:
        collected: The content of a sweep.json.
        path: The svg file.
    """
    with _style(collected["name"]):
        drawing = tradeoff(collected)
        if drawing is None:
            path.unlink(missing_ok=True)
        else:
            drawing.savefig(path, metadata={"Date": None})


def tradeoff(collected: Mapping[str, Any]) -> "Figure | None":
    """Returns the drawing of the trade-off: in each panel a point per attack and cell.

    There is no panel for epsilon if no cell has a guarantee, and nothing at all of fewer than two
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
    drawing = Figure(figsize=(3.7 * panels + 1.9, 3.7), layout="constrained")
    first, *second = drawing.subplots(1, panels, squeeze=False, sharey=True)[0]
    first.set_ylabel("ROUGE-L")
    first.set_ylim(-7, 109)
    first.set_xlabel(UTILITIES[measure])
    values = [x for x, _ in by_utility]
    if measure == "perplexity" and max(values) > LOG_FROM * min(values):
        _prepare_log_(first, _log_ticks(min(values), max(values)))
    _scatter(first, attacks, by_utility)
    references = {utility(row, measure, "utility_reference") for row in collected["cells"]}
    for x in references - {None}:
        first.axvline(x, label=REFERENCE, color="black", linestyle=":", linewidth=1, zorder=0)
    by_epsilon = []
    for axes in second:
        none_at = _prepare_epsilons_(axes, epsilons, any(p.epsilon == NO_GUARANTEE for p in points))
        placed = ((none_at if p.epsilon == NO_GUARANTEE else p.epsilon, p) for p in points)
        by_epsilon = [(x, p) for x, p in placed if _on_log_axis(x)]
        _scatter(axes, attacks, by_epsilon)
    few = len({point.label for point in points}) <= FEW_CELLS
    keys = ", ".join(map(short_key, collected["axes"]))
    _legend(drawing, textwrap.fill(f"labels: {keys}", 3 * SHORT) if few else None)
    if few:
        drawing.draw_without_rendering()  # places the panels, and so the points
        for axes, spots in zip(drawing.axes, (by_utility, by_epsilon), strict=False):
            _label(axes, spots)
    return drawing


def _on_log_axis(epsilon: float | str | None) -> TypeGuard[float]:
    """Returns whether it is a number above 0; 0 is that of a client that was never asked."""
    return isinstance(epsilon, int | float) and epsilon > 0


def _points(collected: Mapping[str, Any], measure: str) -> Iterator[Point]:
    """Yields a point for each attack on texts in each cell; one that never answers has none."""
    on_texts = {
        attack
        for row in collected["cells"]
        for attack, of in row["attacks"].items()
        if of["rougeL"]
    }
    for row, label in zip(collected["cells"], _labels(collected["cells"]), strict=True):
        for attack, of in row["attacks"].items():
            if attack in on_texts:
                yield Point(
                    attack,
                    label,
                    of["rougeL"],
                    of["guess_rougeL"] and of["guess_rougeL"]["mean"],
                    utility(row, measure),
                    privacy(row, "epsilon"),
                )


def _labels(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns what tells each cell from the others, without settings that are the same in all."""
    found: dict[str, set[str]] = {}
    for row in cells:
        for key, value in _settings(list(row["values"].values())):
            found.setdefault(key, set()).add(said(value))

    def differing(value: Any) -> Any:
        if isinstance(value, list):
            return [differing(each) for each in value]
        if isinstance(value, dict):
            return {k: v for k, v in value.items() if k == "kind" or len(found[k]) > 1}
        return value

    full = [list(row["values"].values()) for row in cells]
    short = [differing(values) for values in full]
    labels = [", ".join(map(said, values)) for values in short]
    if len(set(labels)) < len(labels):
        labels = [", ".join(map(said, values)) for values in full]
    return [textwrap.fill(label, 3 * SHORT) for label in labels]


def _settings(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the keys and values of the tables in a value."""
    for each in value if isinstance(value, list) else []:
        yield from _settings(each)
    if isinstance(value, dict):
        yield from value.items()


def _scatter(axes: "Axes", attacks: Sequence[str], spots: Sequence[tuple[float, Point]]) -> None:
    """Draws the points of each attack with their intervals, at the x given for each."""
    for number, attack in enumerate(attacks):
        mine = [(x, point) for x, point in spots if point.attack == attack]
        name = printable(attack)
        of_attack = [(x, point.leakage) for x, point in mine if point.leakage is not None]
        silent = [x for x, point in mine if point.leakage is None]
        mean, low, high = (
            np.array([leakage[end] for _, leakage in of_attack]) for end in ("mean", "low", "high")
        )
        axes.errorbar(
            [x for x, _ in of_attack],
            mean,
            yerr=[np.maximum(mean - low, 0), np.maximum(high - mean, 0)],
            label=name,
            color=COLOURS[number % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            markerfacecolor="none",  # attacks that read the same stay visible
            linestyle="none",
            markersize=5,
            elinewidth=0.9,
            capsize=2.5,
        )
        if silent:
            axes.plot(
                silent,
                [NOWHERE] * len(silent),
                label=f"{name}: no answer",
                color=COLOURS[number % len(COLOURS)],
                marker=CARETDOWN,
                markersize=5,
                linestyle="none",
            )
    controls = [(x, point.no_update) for x, point in spots if point.no_update is not None]
    if controls:
        axes.plot(
            *zip(*controls, strict=True),
            label=NO_UPDATE,
            color=GREY,
            marker="x",
            markersize=4,
            linestyle="none",
            zorder=1,
        )


def _prepare_epsilons_(axes: "Axes", epsilons: Sequence[float], nones: bool) -> float:
    """Makes the x axis for epsilons, and returns where on it those stand that have none."""
    ticks = _log_ticks(min(epsilons), max(epsilons))
    margin = max(2.0, (ticks[-1] / ticks[0]) ** 0.2)
    none_at: float = ticks[-1] * margin
    _prepare_log_(axes, ticks, {none_at: NO_GUARANTEE} if nones else {})
    if nones:
        axes.axvline(ticks[-1] * margin**0.5, color=GREY, linewidth=0.6, zorder=0)
    axes.set_xlim(ticks[0] / margin**0.5, (none_at if nones else ticks[-1]) * margin**0.5)
    axes.set_xlabel("epsilon")
    return none_at


def _log_ticks(low: float, high: float) -> list[float]:
    """Returns round numbers, of which the first and the last enclose those on a log axis."""
    steps = (1, 2, 5) if high < MANY_TICKS_UP_TO * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 2)
    marks = [step * 10.0**power for power in powers for step in steps]
    first, last = max(t for t in marks if t <= low), min(t for t in marks if t >= high)
    return [mark for mark in marks if first <= mark <= last]


def _prepare_log_(
    axes: "Axes", ticks: Sequence[float], words: Mapping[float, str] | None = None
) -> None:
    """Makes a log x axis with these ticks, and with words at others."""
    words = words or {}
    axes.set_xscale("log")
    # Of many only every second has its number, which would overlap.
    named = [f"{tick:g}" if len(ticks) < 7 or i % 2 == 0 else "" for i, tick in enumerate(ticks)]
    axes.set_xticks([*ticks, *words], [*named, *words.values()])
    axes.minorticks_off()


def _label(axes: "Axes", spots: Sequence[tuple[float, Point]]) -> None:
    """Writes each cell's label beside its highest point, where it hides neither point nor label."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    highest: dict[str, tuple[float, float]] = {}
    taken = []
    for x, point in sorted(spots, key=lambda spot: spot[1].interval["mean"]):
        highest[point.label] = (x, point.interval["mean"])
        drawn = [[x, point.interval["low"]], [x, point.interval["high"]]]
        taken.append(Bbox(axes.transData.transform(drawn)).padded(4))
        if point.no_update is not None:
            [at] = axes.transData.transform([(x, point.no_update)])
            taken.append(Bbox([at, at]).padded(4))
    for label, at in sorted(highest.items(), key=lambda item: item[1], reverse=True):
        note = axes.annotate(
            label,
            at,
            (0, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            arrowprops={"arrowstyle": "-", "color": GREY, "linewidth": 0.5, "shrinkB": 3},
        )
        note.set_in_layout(False)  # the panels stay where the points are
        for dy, dx in itertools.product(LABEL_DY, LABEL_DX):
            note.set_position((dx, dy))
            note.set_horizontalalignment("left" if dx > 0 else "right")
            note.get_window_extent()  # moves it there; with the arrow, so that of the text follows
            box = Text.get_window_extent(note)
            inside = all(axes.bbox.contains(*corner) for corner in (box.min, box.max))
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
        else:
            note.remove()  # no room


def _style(name: str) -> AbstractContextManager[None]:
    """Returns a context in which matplotlib draws as all figures here are drawn."""
    import matplotlib

    return matplotlib.rc_context(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "text.parse_math": False,  # names may have a $
            "svg.fonttype": "none",  # text stays text
            "svg.hashsalt": name,  # the same sweep, the same file
        }
    )


def _legend(drawing: "Figure", title: str | None = None) -> None:
    """Puts one legend beside all panels."""
    labelled: dict[str, Any] = {}
    for axes in drawing.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            labelled.setdefault(label, handle)
    for last in (NO_ANSWER, NO_UPDATE, REFERENCE):
        if last in labelled:
            labelled[last] = labelled.pop(last)
    drawing.legend(
        labelled.values(),
        labelled.keys(),
        loc="outside right upper",
        frameon=False,
        title=title,
    )


def _lines(collected: Mapping[str, Any]) -> Iterator[Line]:
    (first, values), *further = collected["axes"].items()
    for combination in itertools.product(*(each for _, each in further)):
        others = dict(zip((key for key, _ in further), combination, strict=True))
        cells = {
            values.index(row["values"][first]): row["attacks"]
            for row in collected["cells"]
            if all(row["values"][key] == value for key, value in others.items())
        }
        words = ", ".join(f"{short_key(key)} {said(value)}" for key, value in others.items())
        for attack in sorted({name for attacks in cells.values() for name in attacks}):
            found = {x: attacks[attack] for x, attacks in cells.items() if attack in attacks}
            yield Line(attack, words, found)


def _draw_panel(axes: "Axes", panel: Panel, lines: Sequence[Line], across: Across) -> None:
    attacks = sorted({line.attack for line in lines})
    combinations = list(dict.fromkeys(line.others for line in lines))
    drawn = [line for line in lines if any(s[panel.figure] for s in line.summaries.values())]
    controls: dict[int, list[float]] = {}
    for place, line in enumerate(drawn):
        figures = {x: s[panel.figure] for x, s in line.summaries.items() if s[panel.figure]}
        on_x = across.beside(place, len(drawn))
        colour = COLOURS[attacks.index(line.attack) % len(COLOURS)]
        number = combinations.index(line.others)
        # NaN where there is no answer, so that no line runs through.
        mean, low, high = (
            panel.scale * np.array([figures.get(x, _NOTHING)[end] for x in across.order])
            for end in ("mean", "low", "high")
        )
        axes.errorbar(
            [on_x[x] for x in across.order],
            mean,
            # A mean of shares can lie outside of its interval by a rounding error.
            yerr=[np.maximum(mean - low, 0), np.maximum(high - mean, 0)],
            label=line.label,
            color=colour,
            marker=MARKERS[number % len(MARKERS)],
            linestyle="none" if across.scale == "even" else STYLES[number % len(STYLES)],
            markersize=4.5,
            linewidth=1.4,
            elinewidth=0.9,
            capsize=2.5,
        )
        silent = [x for x in across.order if x in line.summaries and x not in figures]
        if silent:
            axes.plot(
                [on_x[x] for x in silent],
                [NOWHERE] * len(silent),
                label=NO_ANSWER,
                color=colour,
                marker=CARETDOWN,
                markersize=5,
                linestyle="none",
            )
        for x in figures:
            if panel.control and (found := line.summaries[x][panel.control]):
                controls.setdefault(x, []).append(panel.scale * found["mean"])
    if controls:
        axes.plot(
            [across.places[x] for x in across.order],
            [float(np.mean(controls.get(x, math.nan))) for x in across.order],
            label=NO_UPDATE,
            color=GREY,
            marker="x",
            markersize=4,
            linestyle="none" if across.scale == "even" else "--",
            linewidth=1.2,
            zorder=1,
        )


_NOTHING = dict.fromkeys(("mean", "low", "high"), math.nan)


def _across(values: Sequence[Any]) -> Across:
    words = [textwrap.fill(said(v), 3 * SHORT, break_long_words=False) for v in values]
    evenly = Across(list(range(len(values))), words, "even")
    if any(isinstance(v, bool) or not isinstance(v, int | float) for v in values):
        return evenly
    log = min(values) > 0 and max(values) > LOG_FROM * min(values)
    on_axis = np.sort(np.log(values) if log else np.array(values, float))
    if (np.diff(on_axis) < TOO_CLOSE * np.ptp(on_axis)).any():
        return evenly
    return Across(values, words, "log" if log else "linear")
