"""What all drawings have in common: colours, marks, one legend, axes to a log scale."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedleak.store.files import new_file
from fedleak.store.summaries import AttackSummary, Estimate, WorstCase
from fedleak.util.sanitise import printable

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

MANY_TICKS_UP_TO = 100.0
"""A log axis that spans more than this factor has one tick a decade."""


@dataclass(frozen=True)
class Measure:
    """A figure of leakage that drawings have a panel or a line for.

    Attributes:
        heading: What an axis or a legend says.
        name: The figure's name in a summary.
        guess, control: Names of what is scored without any update, and on another one, if any is.
        scale: What an axis shows for a figure of 1.
    """

    heading: str
    name: str
    guess: str
    control: str
    scale: float

    def value(self, summary: AttackSummary | WorstCase) -> Estimate | None:
        """Returns the figure in a summary, if it was measured."""
        value: Estimate | None = getattr(summary, self.name)
        return value

    def beside(self, summary: AttackSummary | WorstCase, name: str) -> float | None:
        """Returns the mean of a control, by its name, as an axis shows it."""
        control: Estimate | None = getattr(summary, name) if name else None
        return None if control is None else self.scale * control.mean


MEASURES = (
    Measure("texts exact, %", "exact_match", "", "", 100),
    Measure("ROUGE-L", "rougeL", "guess_rougeL", "control_rougeL", 1),
    Measure("tokens found, %", "token_recall", "guess_token_recall", "control_token_recall", 100),
)


def style(name: str) -> AbstractContextManager[None]:
    """Returns a context in which matplotlib draws as all figures here are drawn."""
    import matplotlib

    return matplotlib.rc_context(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "text.parse_math": False,  # names may have a $
            "svg.fonttype": "none",  # text stays text
            "svg.hashsalt": printable(name),  # the same sweep, the same file
        }
    )


def save(name: str, figure_of: Callable[[], "Figure | None"], path: Path) -> None:
    """Writes a drawing in this style; where there is nothing to draw, it removes an earlier one.

    Args:
        name: The name of the sweep.
        figure_of: Makes the drawing, or says that there is none.
        path: The svg file.
    """
    with style(name):
        figure = figure_of()
        if figure is None:
            path.unlink(missing_ok=True)
        else:
            with new_file(path) as temporary:
                figure.savefig(temporary, format="svg", metadata={"Date": None})


LAST = (NO_ANSWER, NO_UPDATE, REFERENCE)
"""Labels at the end of a legend."""


def handles_by_label(drawing: "Figure") -> dict[str, Any]:
    """Returns a mark for each label in any panel, in the order of the panels."""
    handles: dict[str, Any] = {}
    for axes in drawing.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    return handles


def legend(drawing: "Figure", title: str | None = None, last: Sequence[str] = LAST) -> None:
    """Puts one legend beside all panels, with the labels of `last` at its end."""
    handles = handles_by_label(drawing)
    for label in last:
        if label in handles:
            handles[label] = handles.pop(label)
    drawing.legend(
        handles.values(),
        handles.keys(),
        loc="outside right upper",
        frameon=False,
        title=title,
    )


def log_ticks(low: float, high: float) -> list[float]:
    """Returns round numbers for a log axis, from `low` or just below to `high` or just above."""
    steps = (1, 2, 5) if high < MANY_TICKS_UP_TO * low else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 2)
    marks = [step * 10.0**power for power in powers for step in steps]
    first, last = max(t for t in marks if t <= low), min(t for t in marks if t >= high)
    return [mark for mark in marks if first <= mark <= last]


def prepare_log_(
    axes: "Axes", ticks: Sequence[float], words: Mapping[float, str] | None = None
) -> None:
    """Makes a log x axis with these ticks, and with words at further places."""
    words = words or {}
    axes.set_xscale("log")
    # With many ticks only every second has a number, so that they do not overlap.
    named = [f"{tick:g}" if len(ticks) < 7 or i % 2 == 0 else "" for i, tick in enumerate(ticks)]
    axes.set_xticks([*ticks, *words], [*named, *words.values()])
    axes.minorticks_off()


def error_bars(
    estimates: Sequence[Estimate | None], scale: float = 1
) -> tuple[NDArray[np.float64], list[NDArray[np.float64]]]:
    """Returns means, and how far their intervals reach below and above; NaN where there is none."""
    mean, low, high = (
        scale
        * np.array(
            [math.nan if estimate is None else getattr(estimate, end) for estimate in estimates]
        )
        for end in ("mean", "low", "high")
    )
    # A mean of shares can lie outside of its interval by a rounding error.
    return mean, [np.maximum(mean - low, 0), np.maximum(high - mean, 0)]


def mark(
    axes: "Axes",
    points: Sequence[tuple[float, float]],
    label: str,
    marker: str | int,
    *,
    colour: str = GREY,
    size: float = 4,
    **more: Any,
) -> None:
    """Marks points, which no line joins unless `more` says so; without points, nothing."""
    if points:
        looks: dict[str, Any] = {
            "color": colour,
            "marker": marker,
            "markersize": size,
            "linestyle": "none",
        }
        axes.plot(*zip(*points, strict=True), label=label, **looks | more)


def mark_intervals(
    axes: "Axes",
    places: Sequence[float],
    estimates: Sequence[Estimate | None],
    label: str,
    marker: str,
    *,
    colour: str,
    scale: float = 1,
    **more: Any,
) -> None:
    """Marks estimates with their intervals; where there is none, no line runs through."""
    mean, reach = error_bars(estimates, scale)
    looks: dict[str, Any] = {
        "linestyle": "none",
        "markersize": 4.5,
        "elinewidth": 0.9,
        "capsize": 2.5,
    }
    looks |= {"label": label, "color": colour, "marker": marker}
    axes.errorbar(places, mean, yerr=reach, **looks | more)
