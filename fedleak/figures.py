"""Drawings of a sweep: how well each attack does along the first swept key."""

import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedleak.sweep import said, short_key

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
STYLES = ("-", "-.", ":")
GREY = "0.55"
NO_UPDATE = "no update"

LOG_FROM = 20.0
"""Numbers that span more than this factor are drawn on a log scale."""

SHORT = 8
"""Characters that a label of the x axis may have and lie flat."""

TOO_CLOSE = 0.04
"""Numbers nearer than this share of the axis are drawn evenly apart: their labels would overlap."""


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
        return ", ".join(filter(None, (self.attack, self.others)))


@dataclass(frozen=True)
class Across:
    """The x axis: where each value of the first key is on it, and what is written there."""

    places: Sequence[float]
    words: Sequence[str]
    scale: Literal["linear", "log", "even"]

    @property
    def tilted(self) -> bool:
        """Whether the words are too long to lie flat."""
        return self.scale == "even" and max(map(len, self.words)) > SHORT

    def prepare_(self, axes: "Axes") -> None:
        """Makes the x axis of a panel."""
        if self.scale == "log":
            axes.set_xscale("log")
        tilt = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if self.tilted else {}
        axes.set_xticks(self.places, self.words, minor=False, **tilt)
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
    import matplotlib
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
    width = 2.9 * len(panels) + 0.6 + 0.07 * max(map(len, labels))
    with matplotlib.rc_context(
        {
            "font.size": 9,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "text.parse_math": False,  # names may have a $
            "svg.fonttype": "none",  # text stays text
            "svg.hashsalt": collected["name"],  # the same sweep, the same file
        }
    ):
        drawing = Figure(figsize=(width, 3.8 if across.tilted else 2.9), layout="constrained")
        for axes, panel in zip(
            drawing.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
        ):
            _draw_panel(axes, panel, lines, across.places)
            across.prepare_(axes)
            axes.set_xlabel(key)
            axes.set_ylabel(panel.heading)
            axes.set_ylim(-4, 104)
        labelled: dict[str, Any] = {}
        for axes in drawing.axes:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                labelled.setdefault(label, handle)
        if NO_UPDATE in labelled:
            labelled[NO_UPDATE] = labelled.pop(NO_UPDATE)  # last
        drawing.legend(labelled.values(), labelled.keys(), loc="outside right upper", frameon=False)
        drawing.savefig(path, metadata={"Date": None})


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


def _draw_panel(axes: "Axes", panel: Panel, lines: Sequence[Line], places: Sequence[float]) -> None:
    attacks = sorted({line.attack for line in lines})
    combinations = list(dict.fromkeys(line.others for line in lines))
    controls: dict[int, list[float]] = {}
    for line in lines:
        found = {x: s for x, s in sorted(line.summaries.items()) if s[panel.figure]}
        if not found:
            continue
        points = [s[panel.figure] for s in found.values()]
        mean, low, high = (
            panel.scale * np.array([point[end] for point in points])
            for end in ("mean", "low", "high")
        )
        number = combinations.index(line.others)
        axes.errorbar(
            [places[x] for x in found],
            mean,
            # A mean of shares can lie outside of its interval by a rounding error.
            yerr=[np.maximum(mean - low, 0), np.maximum(high - mean, 0)],
            label=line.label,
            color=COLOURS[attacks.index(line.attack) % len(COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            linestyle=STYLES[number % len(STYLES)],
            markersize=4.5,
            linewidth=1.4,
            elinewidth=0.9,
            capsize=2.5,
        )
        for x, summary in found.items():
            if panel.control and summary[panel.control]:
                controls.setdefault(x, []).append(panel.scale * summary[panel.control]["mean"])
    if controls:
        axes.plot(
            [places[x] for x in sorted(controls)],
            [float(np.mean(controls[x])) for x in sorted(controls)],
            label=NO_UPDATE,
            color=GREY,
            linestyle="--",
            linewidth=1.2,
            zorder=1,
        )


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
