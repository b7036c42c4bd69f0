"""Charts for Vega-Lite: rows of figures, and how each is drawn.

Vega places axes, ticks and legends. Text from others is only in values and titles, never in an
expression or in the name of a field.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from fedleak.report.tables.attacks import FIGURES
from fedleak.store.files import replace
from fedleak.store.summaries import AttackSummary, Estimate, WorstCase
from fedleak.util.sanitise import printable

Chart = dict[str, Any]
"""A specification of Vega-Lite, or a part of one."""

Row = dict[str, Any]
"""A figure at `x`, with `y` and, if it has an interval, `low` and `high`; its `series`; and its
`shift`, if several figures share one word of the x axis."""

INK, EMPTY = "#1d2733", "#eceff3"
GREY = "#8c8c8c"
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", INK)
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-right", "wedge", "arrow")
DASHES = ((), (6, 2, 1, 2), (2, 2))
DARK = {INK: "#e6e9ee", EMPTY: "#2a323d", COLOURS[0]: "#6cb8ff", COLOURS[1]: "#ff9a4d"}
"""The colours of a dark page in place of those of a light one; other colours suit both."""

NO_UPDATE, NO_ANSWER, REFERENCE = "no update", "no answer", "central, undefended"
NOWHERE = -4.0
"""ROUGE-L at which an attack without an answer is drawn: not 0, which it did not score."""

LOG_FROM = 20.0
"""Numbers that span more than this factor are drawn on a log scale."""

RING = "M1.9,0A1.9,1.9,0,1,1,-1.9,0A1.9,1.9,0,1,1,1.9,0"
"""The shape of a mark around another one."""

FLAT = 13
"""The most characters of a line of a word that is horizontal below an axis."""

_LINES = r"split(datum.label, '\n')"
_AXIS = {"grid": False, "labelOverlap": "greedy", "labelLimit": 0}
_AXIS |= {f"{part}Color": INK for part in ("domain", "tick", "label", "title")}
_CONFIG: Chart = {
    "aria": False,  # a page says it in words
    "view": {"stroke": None, "step": 60},
    "text": {"color": INK},
    "point": {"size": 45, "opacity": 1, "strokeWidth": 1.5},
    "axis": {**_AXIS, "titleFontWeight": "normal"},
    "title": {"color": INK, "fontWeight": "normal", "fontSize": 12, "anchor": "start"},
}
_TEXT = {"type": "text", "align": "left", "baseline": "middle", "dx": 5}
_LEGEND = {"symbolSize": 45, "symbolFillColor": "transparent", "labelLimit": 0, "titleLimit": 0}
_LEGEND |= {"titleFontWeight": "normal", "labelColor": INK, "titleColor": INK}


@dataclass(frozen=True)
class Measure:
    """A figure of leakage that drawings have a panel or a line for.

    Attributes:
        name: The figure's name in a summary.
        heading: The text of an axis or a legend.
        scale: What an axis shows for a figure of 1.
    """

    name: str
    heading: str
    scale: float

    def value(self, summary: AttackSummary | WorstCase | None) -> Estimate | None:
        """Returns the figure in a summary, if it was measured."""
        value: Estimate | None = getattr(summary, self.name, None)
        return value

    def beside(self, summary: AttackSummary | WorstCase | None, kind: str) -> float | None:
        """Returns the mean of a `control` or a `guess`, as an axis shows it, if there is one."""
        control: Estimate | None = getattr(summary, f"{kind}_{self.name}", None)
        return None if control is None else self.scale * control.mean


MEASURES = [Measure(name, *FIGURES[name]) for name in ("exact_match", "rougeL", "token_recall")]


class Series(NamedTuple):
    """The look of rows that belong together, and their name in the legend."""

    name: str
    colour: str = GREY
    shape: str = "cross"
    dash: Sequence[int] = ()

    @classmethod
    def numbered(cls, name: str, colour: int, look: int) -> "Series":
        """Returns a series with a colour and, for black and white, a shape and dashes by number."""
        shape, dash = SHAPES[look % len(SHAPES)], DASHES[look % len(DASHES)]
        return cls(name, COLOURS[colour % len(COLOURS)], shape, dash)


def silent(name: str) -> str:
    """Returns the legend's name for the places where a series has no answer."""
    return f"{name}: {NO_ANSWER}"


def present(series: Iterable[Series], *rows: Iterable[Row]) -> list[Series]:
    """Returns the series that have rows, and the series that mark their missing answers."""
    names = {row["series"] for row in chain(*rows) if row.get("y", 0) is not None}
    both = ((s, Series(silent(s.name), s.colour, "triangle-down")) for s in series)
    return [kind for kind in chain(*both) if kind.name in names]


def span(estimate: Estimate | None, scale: float = 1) -> Row:
    """Returns the figures of a row; without an estimate each is None, and lines end there."""
    if estimate is None:
        return {"y": None, "low": None, "high": None}
    return {"y": scale * estimate.mean, "low": scale * estimate.low, "high": scale * estimate.high}


def numbers(heading: str, ends: Sequence[float] = (), *, log: bool = False, **axis: Any) -> Chart:
    """Returns an axis to scale.

    Args:
        heading: What it shows.
        ends: Where it begins and ends; empty: Vega chooses.
        log: Draw it on a log scale.
        axis: Properties of the axis.
    """
    if not log:  # Vega rounds a tick that stands alone
        axis = {"format": ".6~g", **axis}
    scale: Chart = {"zero": False, "type": "log" if log else "linear"}
    if ends:
        scale["domain"] = [*ends]
    return {"type": "quantitative", "title": printable(heading), "scale": scale, "axis": axis}


def words(heading: str = "", places: Sequence[str] = (), **axis: Any) -> Chart:
    """Returns an axis with a place for each word; long words are upright.

    Args:
        heading: What it shows.
        places: The words in their order; a line end in one is a line end.
        axis: Properties of the axis.
    """
    longest = max((len(line) for word in places for line in word.split("\n")), default=0)
    angle, title = -90 if longest > FLAT else 0, printable(heading)
    axis = {"labelOverlap": False, "labelAngle": angle, "labelExpr": _LINES, **axis}
    scale = {"domain": list(map(_shown, places))} if places else {}
    return {"type": "nominal", "title": title, "sort": None, "scale": scale, "axis": axis}


PER_CENT = numbers("", [-7, 105], values=[0, 20, 40, 60, 80, 100])
"""An axis from 0 to 100, with room for the marks of missing answers."""


def panel(
    x: Chart,
    y: Chart,
    series: Sequence[Series],
    *,
    points: Iterable[Row] = (),
    lines: Iterable[Row] = (),
    bands: Iterable[Row] = (),
    texts: Iterable[Row] = (),
    across: Iterable[Row] = (),
    down: Iterable[Row] = (),
    lying: bool = False,
    legend: Sequence[str] | None = None,
    **view: Any,
) -> Chart:
    """Returns one panel of a chart.

    Args:
        x, y: The axes.
        series: What is drawn, in the order of the legend.
        points: Marks, with their intervals.
        lines: Points that lines join; a line ends if `y` is missing.
        bands: Areas from `low` to `high`.
        texts: Words at a place, in the field `text`.
        across, down: Lines at a `y`, and at an `x`.
        lying: Swap the axes, so that x goes down.
        legend: The lines of the legend's title.
        view: Further properties, such as title and size.
    """
    first, second = ("y", "x") if lying else ("x", "y")
    names = [printable(kind.name) for kind in series]
    key = {"title": legend, "symbolType": None} if legend else {"title": None}
    looks: Chart = {}
    for channel, look in {"color": "colour", "shape": "shape", "strokeDash": "dash"}.items():
        scale = {"domain": names, "range": [getattr(kind, look) for kind in series]}
        looks[channel] = {"field": "series", "type": "nominal", "scale": scale, "legend": key}
    fields = {
        first: {"field": "x", **x},
        second: {"field": "y", **y},
        f"{second}2": {"field": "high"},
        f"{first}Offset": {"field": "shift", "type": "quantitative"}
        | {"scale": {"domain": [-0.5, 0.5]}},
        "text": {"field": "text"},
        **looks,
    }
    place, interval = (first, f"{first}Offset"), (second, f"{second}2")
    low = {second: {**fields[second], "field": "low"}}
    layers: Iterable[tuple[Iterable[Row], Chart, Sequence[str], Chart]] = (
        (bands, {"type": "area", "opacity": 0.25}, (first, *interval, "color"), low),
        (across, {"type": "rule"}, (second, "color", "strokeDash"), {}),
        (down, {"type": "rule"}, (first, "color", "strokeDash"), {}),
        (lines, {"type": "line"}, (*place, second, "color", "strokeDash"), {}),
        (points, {"type": "rule"}, (*place, *interval, "color"), low),
        (points, {"type": "point"}, (*place, second, "color", "shape"), {}),
        (texts, _TEXT | ({} if lying else {"dy": -7}), (first, second, "text"), {}),
    )
    drawn = []
    for rows, mark, channels, others in layers:
        if values := [{"shift": 0} | {k: _shown(v) for k, v in row.items()} for row in rows]:
            encoding = {name: fields[name] for name in channels} | others
            drawn.append({"data": {"values": values}, "mark": mark, "encoding": encoding})
    return {"layer": drawn, **view}


def _shown(value: Any) -> Any:
    """Makes a text printable, except for its line ends."""
    return "\n".join(map(printable, value.split("\n"))) if isinstance(value, str) else value


def grid(panels: Sequence[Chart], columns: int = 0) -> Chart:
    """Returns panels side by side, `columns` in a row or all, with one legend."""
    return {"concat": [*panels], "columns": columns or len(panels), **TOGETHER}


TOGETHER = {"resolve": {"scale": {"color": "shared", "shape": "shared", "strokeDash": "shared"}}}


def svg(chart: Chart, *, on_page: bool = False, **legend: Any) -> bytes:
    """Returns a drawing as SVG, on white, or for a page whose colour scheme it follows."""
    from vl_convert import vegalite_to_svg  # a second, which only drawings need

    config = {**_CONFIG, "background": None if on_page else "#ffffff"}
    config["legend"] = {**_LEGEND, **legend}
    written = vegalite_to_svg({**chart, "config": config}, allowed_base_urls=[])
    return (_for_light_and_dark(written) if on_page else written).encode()


def _for_light_and_dark(written: str) -> str:
    """Returns a drawing whose colours are those of a light or of a dark page."""
    light, dark = "", ""
    for number, (colour, on_dark) in enumerate(DARK.items()):
        written = written.replace(colour, f"var(--c{number})")
        light += f"--c{number}: {colour};"
        dark += f"--c{number}: {on_dark};"
    rules = f":root {{{light}}} @media (prefers-color-scheme: dark) {{:root {{{dark}}}}}"
    return written.replace(">", f"><style>{rules}</style>", 1)


def write(chart: Chart | None, path: Path) -> None:
    """Writes a drawing; where there is nothing to draw, it removes an earlier one."""
    if chart is None:
        path.unlink(missing_ok=True)
    else:
        replace(path, svg(chart))
