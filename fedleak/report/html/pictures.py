"""Pictures of a report: matplotlib's SVG, whose colours follow the page."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedleak.report.drawings import common as drawing
from fedleak.report.drawings.common import COLOURS, GREY, MEASURES, NO_UPDATE, error_bars, mark
from fedleak.report.html.page import Picture
from fedleak.report.tables.leakage import ReadShare, client_name
from fedleak.report.words import interval, listed
from fedleak.store.records import LedgerRow, Utility
from fedleak.store.run import Key
from fedleak.store.summaries import AttackSummary, MembershipFigures, MembershipSummary
from fedleak.util.sanitise import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

WIDTH = 5.0
"""Inches: two lie side by side on a desk's screen, and one is legible on a phone's."""

NUMBERED_UP_TO = 130
"""Cells of a heat map that have their number and are shapes; of more they would overlap, and they
are the dots of one image."""

OTHER_UPDATE = "other update"

INK, EMPTY, LINE, MARK = "#1d2733", "#eceff3", COLOURS[0], COLOURS[1]
DARK = {INK: "#e6e9ee", EMPTY: "#2a323d", LINE: COLOURS[5], MARK: COLOURS[4]}
"""What stands on a dark page for the colours of a light one; other colours suit both."""

INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
"""Settings of matplotlib for what is drawn in ink."""

SHADES = ("#d5dbe2", "#e58a6d", "#b3261e")
"""Colours for nothing read, half and all."""


Draw = Callable[["Figure"], float]
"""Draws in a figure, and returns its height in inches."""


def _drawing(name: str, draw: Draw) -> bytes:
    """Returns a drawing as SVG; the name decides the ids in it."""
    import matplotlib
    from matplotlib.figure import Figure

    inks: dict[Any, str] = dict.fromkeys(INKED, INK)
    with drawing.style(name), matplotlib.rc_context(inks):
        figure = Figure(figsize=(WIDTH, 2), layout="constrained")
        figure.set_figheight(draw(figure))
        figure.draw_without_rendering()  # ticks depend on the size, and the layout on the ticks
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    return _for_light_and_dark(written.getvalue()).encode()


def _for_light_and_dark(svg: str) -> str:
    """Returns a drawing whose colours follow the colour scheme of the page."""
    light, dark = "", ""
    for number, (colour, on_dark) in enumerate(DARK.items()):
        svg = svg.replace(colour.lower(), f"var(--c{number})")
        light += f"--c{number}: {colour};"
        dark += f"--c{number}: {on_dark};"
    rules = f":root {{{light}}} @media (prefers-color-scheme: dark) {{:root {{{dark}}}}}"
    return svg.replace("<defs>", f"<style>{rules}</style><defs>", 1)


def leakage(name: str, read: Mapping[Key, ReadShare]) -> list[Picture]:
    """Returns heat maps of rounds x clients: texts read word for word, and tokens found."""
    kinds: list[tuple[str, Callable[[ReadShare], float | None]]] = [
        ("texts read word for word", lambda share: share.exact),
        ("tokens found", lambda share: share.tokens),
    ]
    pictures = []
    for measure, figure_of in kinds:
        values = {
            key: value for key, share in read.items() if (value := figure_of(share)) is not None
        }
        if not values:
            continue
        mean = sum(values.values()) / len(values)
        words = (
            f"Share of {measure} by the best attack on each text, for {len(read):,} updates: from "
            f"{100 * min(values.values()):.0f} to {100 * max(values.values()):.0f} %, on average "
            f"{100 * mean:.0f} %; {len(read) - len(values):,} have no answer. The table below has "
            "each figure."
        )
        pictures.append(
            Picture(
                f"{measure[0].upper()}{measure[1:]}, % of each update",
                words,
                _heat_map(name, read, values),
            )
        )
    return pictures


def _heat_map(name: str, read: Mapping[Key, ReadShare], values: Mapping[Key, float]) -> bytes:
    rounds = sorted({key.round for key in read})
    clients = sorted({key.client for key in read})
    # The longer side lies, so that one round of many clients is a row and not a tower.
    lying = len(clients) > len(rounds)
    grid = np.full((len(rounds), len(clients)), math.nan)
    for key, value in values.items():
        grid[rounds.index(key.round), clients.index(key.client)] = 100 * value
    down, across = (rounds, clients) if lying else (clients, rounds)
    shown = grid if lying else grid.T
    labels = {True: list(map(str, rounds)), False: list(map(client_name, clients))}

    def draw(figure: "Figure") -> float:
        from matplotlib.colors import LinearSegmentedColormap

        axes = figure.subplots()
        colours = LinearSegmentedColormap.from_list("read", SHADES)
        axes.set_facecolor(EMPTY)
        values_of_cells = np.ma.masked_invalid(shown)
        looks: dict[str, Any] = {"cmap": colours, "vmin": 0, "vmax": 100}
        mesh: ScalarMappable
        if shown.size <= NUMBERED_UP_TO:
            mesh = axes.pcolormesh(values_of_cells, edgecolors=EMPTY, linewidth=0.8, **looks)
        else:
            extent = (0, len(across), 0, len(down))
            looks |= {"extent": extent, "origin": "lower", "aspect": "auto"}
            mesh = axes.imshow(values_of_cells, interpolation="none", **looks)
        axes.invert_yaxis()
        _ticks(axes, labels[not lying], len(across), "x", 12)
        _ticks(axes, labels[lying], len(down), "y", 24)
        axes.set_xlabel("client" if lying else "round")
        axes.set_ylabel("round" if lying else "client")
        axes.tick_params(length=0)
        for spine in axes.spines.values():
            spine.set_visible(False)
        if shown.size <= NUMBERED_UP_TO and len(across) <= 16:
            for (y, x), value in np.ndenumerate(shown):
                red, green, blue, _ = colours(0.0 if math.isnan(value) else value / 100)
                bright = 0.3 * red + 0.59 * green + 0.11 * blue > 0.5
                ink = INK if math.isnan(value) else ("#111" if bright else "#fff")
                axes.text(
                    x + 0.5,
                    y + 0.5,
                    "-" if math.isnan(value) else f"{value:.0f}",
                    ha="center",
                    va="center",
                    color=ink,
                    fontsize=8,
                )
        bar = figure.colorbar(
            mesh, ax=axes, location="bottom", aspect=50, shrink=0.5, pad=0.02, ticks=[0, 50, 100]
        )
        bar.outline.set_visible(False)
        bar.set_label("% read; empty: no answer", fontsize=8)
        bar.ax.tick_params(labelsize=8, length=0)
        return 1.35 + min(6.0, max(0.45, 0.28 * len(down)))

    return _drawing(f"{name}-{len(values)}", draw)


def _ticks(axes: "Axes", labels: Sequence[str], count: int, axis: str, most: int) -> None:
    step = max(1, math.ceil(count / most))
    places = range(0, count, step)
    if axis == "x":
        axes.set_xticks([p + 0.5 for p in places], [labels[p] for p in places])
    else:
        axes.set_yticks([p + 0.5 for p in places], [labels[p] for p in places])


def training(
    name: str, utility: Sequence[Utility], ledger: Sequence[LedgerRow], attacked: Sequence[int]
) -> list[Picture]:
    """Returns utility and epsilon by round, as far as they were measured.

    Args:
        name: The name of the run.
        utility: Scores of the model, by round.
        ledger: The ledger of all clients.
        attacked: Rounds that are marked.
    """
    pictures = []
    by_measure = {
        name: [(row.round, v) for row in utility if (v := row.figures.get(name)) is not None]
        for name in ("accuracy", "perplexity", "mcc", "loss")
    }
    if measure := next((name for name, points in by_measure.items() if points), None):
        points = by_measure[measure]
        words = (
            f"{measure} of the model on held-out texts: {points[0][1]:.3g} at round "
            f"{points[0][0]}, {points[-1][1]:.3g} at round {points[-1][0]}."
        )
        pictures.append(
            Picture(
                f"Utility: {measure} by round",
                words,
                _lines(name, measure, points, None, attacked),
            )
        )
    spent: dict[int, list[float]] = {}
    for row in ledger:
        if isinstance(row.epsilon, float):
            spent.setdefault(row.round, []).append(row.epsilon)
    if spent:
        highest = [(round, max(values)) for round, values in sorted(spent.items())]
        lowest = [(round, min(values)) for round, values in sorted(spent.items())]
        words = (
            f"Epsilon that clients have spent: at most {highest[0][1]:.3g} by round "
            f"{highest[0][0]} and "
            f"{highest[-1][1]:.3g} by round {highest[-1][0]}."
        )
        pictures.append(
            Picture(
                "Epsilon spent by round, of the client with the most and the least",
                words,
                _lines(name, "epsilon", highest, lowest, attacked),
            )
        )
    return pictures


def _lines(
    name: str,
    label: str,
    points: Sequence[tuple[int, float]],
    beside: Sequence[tuple[int, float]] | None,
    attacked: Sequence[int],
) -> bytes:
    def draw(figure: "Figure") -> float:
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        marker = "o" if len(points) <= 40 else None
        for number, line in enumerate(filter(None, (points, beside))):
            axes.plot(
                [r for r, _ in line],
                [value for _, value in line],
                color=LINE,
                linestyle="-" if number == 0 else ":",
                marker=marker,
                markersize=4,
            )
        if len(attacked) <= 20:
            for round in attacked:
                axes.axvline(round, color=GREY, linewidth=0.8, linestyle=":", zorder=0)
            axes.set_xlabel("round (dotted: attacked)")
        else:
            axes.set_xlabel("round")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        return 2.0

    return _drawing(f"{name}-{label}", draw)


def attacks(name: str, summaries: Mapping[str, AttackSummary]) -> list[Picture]:
    """Returns attacks side by side: three figures with intervals, and both controls."""
    if not any(summary.answers for summary in summaries.values()):
        return []
    names = list(summaries)[::-1]

    def draw(figure: "Figure") -> float:
        grid = figure.subplots(len(MEASURES), 1, squeeze=False).ravel()
        places = range(len(names))
        for axes, measure in zip(grid, MEASURES, strict=True):
            shown = [summaries[attack] for attack in names]
            means, reach = error_bars([measure.value(row) for row in shown], measure.scale)
            axes.errorbar(
                means,
                places,
                xerr=reach,
                linestyle="none",
                marker="o",
                markersize=6,
                color=MARK,
                elinewidth=1.6,
                capsize=3,
                label="attack, with its 95 % interval",
            )
            looks = (measure.control, "|", OTHER_UPDATE, 8), (measure.guess, "x", NO_UPDATE, 5)
            for control_name, marker, label, size in looks:
                controls = [
                    (control, place)
                    for place, row in zip(places, shown, strict=True)
                    if measure.value(row)
                    and (control := measure.beside(row, control_name)) is not None
                ]
                mark(axes, controls, label, marker, size=size, markeredgewidth=1.6, zorder=1)
            for place, row in zip(places, shown, strict=True):
                if measure.value(row) is None:
                    axes.text(1, place, "not measured", va="center", color=GREY, fontsize=8)
            axes.set_xlim(-4, 104)
            axes.set_ylim(-0.6, len(names) - 0.4)
            axes.set_yticks(places, [_short(attack) for attack in names])
            axes.set_title(measure.heading, fontsize=9, loc="left")
            axes.grid(axis="x", color=EMPTY, linewidth=0.8)
            axes.set_axisbelow(True)
        handles = drawing.handles_by_label(figure)
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="outside lower left",
            frameon=False,
            fontsize=8,
        )
        return len(MEASURES) * (0.75 + 0.3 * len(names)) + 0.6

    words = "; ".join(f"{name}: {_in_words(row)}" for name, row in summaries.items())
    return [
        Picture(
            "Each attack with its interval, and its controls",
            words,
            _drawing(f"{name}-attacks", draw),
        )
    ]


def _in_words(summary: AttackSummary) -> str:
    measured = [
        f"{measure.heading} {interval(measure.value(summary), measure.scale)}"
        for measure in MEASURES
        if measure.value(summary) is not None
    ]
    return listed(measured or ["no answer"])


def membership(name: str, summary: MembershipSummary | None) -> list[Picture]:
    """Returns the ROC curves of attacks on membership, a picture for each attack."""
    pictures = []
    figures = () if summary is None else summary.figures
    for attack in dict.fromkeys(row.attack for row in figures):
        curves = [row for row in figures if row.attack == attack and row.roc]
        if not curves:
            continue
        words = "Areas under the curves: " + "; ".join(
            f"{row.score} {'-' if row.auc is None else f'{row.auc.mean:.2f}'}" for row in curves
        )
        pictures.append(
            Picture(
                f"{printable(attack)}: the share of texts that were in and are found, against the "
                "share of others that are accused, over all rounds; shaded: 95 % interval at each "
                "threshold",
                f"{words}. The table below has the intervals.",
                _drawing(f"{name}-{attack}-roc", _roc(curves)),
            )
        )
    return pictures


def _roc(curves: Sequence[MembershipFigures]) -> Draw:
    """Returns the function that draws a panel for each score."""

    def draw(figure: "Figure") -> float:
        bands = math.ceil(len(curves) / 3)
        grid = figure.subplots(bands, 3, squeeze=False, sharex=True, sharey=True)
        for axes in grid.flat[len(curves) :]:
            axes.set_axis_off()
        for axes, row in zip(grid.flat, curves, strict=False):
            accused = [100 * point.accused for point in row.roc]
            mean, (below, above) = error_bars([point.found for point in row.roc], 100)
            axes.plot([0, 100], [0, 100], color=GREY, linewidth=0.8, linestyle=":")
            axes.fill_between(
                accused, mean - below, mean + above, color=LINE, alpha=0.25, linewidth=0
            )
            axes.plot(accused, mean, color=LINE, linewidth=1.6)
            axes.set_title(_short(row.score), fontsize=9, loc="left")
            axes.set_xlim(0, 100)
            axes.set_ylim(-2, 102)
            axes.set_xticks([0, 50, 100])
            axes.set_yticks([0, 50, 100])
            axes.set_aspect("equal")
        figure.supxlabel("accused of the others, %", fontsize=9)
        figure.supylabel("found, %", fontsize=9)
        return 1.9 * bands + 0.3

    return draw


def _short(name: str) -> str:
    shown = printable(name)
    return shown if len(shown) <= 18 else f"{shown[:17]}…"
