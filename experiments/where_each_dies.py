"""Draws where reading, membership and canaries end along one axis of noise, and writes the page.

    python experiments/where_each_dies.py [FILE] [--no-run] [--out PAGE]

It runs where-each-dies.toml, or another sweep with such families, as `fedleak sweep` does, so the
same command goes on where it was stopped. The drawing is written beside the page,
docs/where-each-dies.md, and the figures below its marker; --no-run writes what there is. Cells that
are not finished are left out, and counted.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from fedleak.cli.mistakes import mended
from fedleak.cli.sweeps import sweep as run_sweep
from fedleak.config.families import FAMILY, UNDEFENDED
from fedleak.report.drawings import common as drawing
from fedleak.report.drawings.common import COLOURS, GREY
from fedleak.report.marked_pages import above
from fedleak.report.words import interval
from fedleak.running import sweep
from fedleak.store.run import EVERYONE
from fedleak.store.summaries import (
    CanaryBound,
    CellSummary,
    Estimate,
    MembershipFigures,
    SweepSummary,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
FILE = HERE / "where-each-dies.toml"
PAGE = HERE.parent / "docs" / "where-each-dies.md"
MARKER = (
    "<!-- Below this line everything is written by `python experiments/where_each_dies.py`. -->\n"
)

SCORE = "residual"
"""Of the scores of membership the one that is drawn: named here, not chosen by its figures."""

LEAST = 0.01
"""Epsilon at which a bound of 0 is drawn: a log axis has no 0."""

NOT_RUN = ["-"]
"""Stands for each figure that was not measured."""

ATTACKS, CANARIES = "attacks", "canaries"
"""Names of the families: the strengths of both are noise multipliers."""

NO_NOISE = 1e-7
"""Where the cell without a defense is drawn: a log axis has no 0."""

Cells = Mapping[float, CellSummary]
"""Finished cells of a family by their noise multiplier, in its order."""


def main() -> int:
    """Runs the sweep and writes drawing and page; returns the exit status of `fedleak sweep`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", nargs="?", type=Path, default=FILE, help="an experiment file")
    parser.add_argument("--no-run", action="store_true", help="only write what there is")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page", metavar="PAGE")
    args = parser.parse_args()
    try:
        with mended():
            grid, written_above = sweep.load(args.file), above(args.out, MARKER)
            if not args.no_run:
                run_sweep(args.file, [], jobs=1)
            collected = sweep.collect(grid)
            attacks, canaries = (finished(collected, name) for name in (ATTACKS, CANARIES))
            missing = sum(cell.status != "finished" for cell in collected.cells)
            picture = args.out.with_suffix(".svg")
            drawing.save(
                collected.name,
                lambda: figure(attacks, canaries) if attacks and canaries else None,
                picture,
            )
            page = "\n".join([written_above, *markdown(attacks, canaries, missing), ""])
            args.out.write_text(page, encoding="utf-8")
            print(f"drawing: {picture}\npage: {args.out}")
    except typer.Exit as stopped:
        return stopped.exit_code
    return 0


def finished(collected: SweepSummary, family: str) -> Cells:
    """Returns the cells of a family that were measured; the one without a defense is of each."""
    found = {}
    for cell in collected.cells:
        of = cell.values[FAMILY]
        if cell.status == "finished" and isinstance(of, dict):
            if of["kind"] == family:
                found[float(str(of["strength"]))] = cell
            elif of["kind"] == UNDEFENDED and family == ATTACKS:
                found[0.0] = cell
    return dict(sorted(found.items()))


def who_was_in(cell: CellSummary) -> MembershipFigures | None:
    """Returns the figures of the score that is drawn."""
    figures = () if cell.membership is None else cell.membership.figures
    return next((each for each in figures if each.score == SCORE), None)


def together(cell: CellSummary) -> CanaryBound | None:
    """Returns the bounds of all clients' canaries together."""
    bounds = () if cell.canary is None else cell.canary.bounds
    return next((each for each in bounds if each.client == EVERYONE), None)


def figure(attacks: Cells, canaries: Cells) -> "Figure":
    """Returns three panels above each other, with one axis of noise."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(7.6, 7.2), layout="constrained")
    reading, membership, epsilon = made.subplots(3, 1, sharex=True, height_ratios=[1, 1, 1.3])
    noise = [sigma or NO_NOISE for sigma in attacks]
    worst = [cell.worst_case for cell in attacks.values()]
    exact, rouge, control = (
        [None if of is None else getattr(of, name) for of in worst]
        for name in ("exact_match", "rougeL", "control_rougeL")
    )
    _curve(reading, noise, exact, 100, 0, "texts read exactly, %")
    _curve(reading, noise, rouge, 1, 1, "ROUGE-L")
    means = [math.nan if of is None else of.mean for of in control]
    reading.plot(noise, means, "x", color=GREY, label="ROUGE-L with another\nclient's update")
    silent = [sigma for sigma, of in zip(noise, exact, strict=True) if of is None]
    reading.plot(silent, [0] * len(silent), "v", color=GREY, label="no answer")
    reading.set_ylim(-5, 105)
    reading.set_ylabel("what was read,\nworst case over attacks")
    areas = [None if of is None else of.auc for of in map(who_was_in, attacks.values())]
    _curve(membership, noise, areas, 1, 2, f"AUC of the score\n{SCORE}")
    membership.axhline(0.5, color=GREY, linestyle=":", linewidth=1, label="chance")
    membership.set_ylim(0.0, 1.05)
    membership.set_ylabel("who was in")
    _draw_epsilon(epsilon, list(canaries), [together(cell) for cell in canaries.values()])
    epsilon.set_xlabel("noise multiplier of DP-SGD")
    ticks = [10.0**power for power in range(-6, 2)]
    drawing.prepare_log_(epsilon, ticks, {NO_NOISE: UNDEFENDED})
    for axes in (reading, membership, epsilon):
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return made


def _curve(
    axes: "Axes",
    noise: Sequence[float],
    found: Sequence[Estimate | None],
    scale: float,
    style: int,
    label: str,
) -> None:
    """Draws means with their 95 % intervals."""
    mean, reach = drawing.error_bars(found, scale)
    axes.errorbar(
        noise,
        mean,
        yerr=reach,
        label=label,
        color=COLOURS[style],
        marker=drawing.MARKERS[style],
        linestyle=drawing.STYLES[style % len(drawing.STYLES)],
        markersize=5,
        linewidth=1.3,
        elinewidth=0.9,
        capsize=2.5,
    )


def _draw_epsilon(
    axes: "Axes", noise: Sequence[float], bounds: Sequence[CanaryBound | None]
) -> None:
    """Draws what is accounted, and below it what is bounded; 0 as an empty mark at the bottom."""
    # Batches are fixed, so canaries are not sampled, and every kind of bound is a number.
    lines: Sequence[tuple[str, Callable[[CanaryBound], float | None], int]]
    accounted = [math.nan if of is None else float(of.epsilon) for of in bounds]
    axes.plot(noise, accounted, color="black", marker="_", label="accounted: at most")
    lines = (
        ("canaries: at least,\nif the noise is Gaussian", lambda of: of.gaussian, 3),
        ("canaries: at least, f-DP", lambda of: of.f_dp, 4),
        ("canaries: at least,\nassuming nothing", lambda of: of.epsilon_delta, 5),
    )
    for label, bound, style in lines:
        values = [math.nan if of is None else bound(of) or 0.0 for of in bounds]
        colour, marker = COLOURS[style], drawing.MARKERS[style]
        seen = [value if value > 0 else math.nan for value in values]
        axes.plot(noise, seen, color=colour, marker=marker, markersize=5, label=label)
        nothing = [LEAST if value == 0 else math.nan for value in values]
        axes.plot(noise, nothing, color=colour, marker=marker, markerfacecolor="none", linestyle="")
    axes.set_yscale("log")
    axes.set_ylim(LEAST / 2, None)
    powers = range(-2, 13, 2)
    axes.set_yticks([10.0**power for power in powers], [f"{10.0**power:g}" for power in powers])
    axes.set_ylabel("epsilon, at delta 1e-5\n(empty, at the bottom: nothing seen)")


def markdown(attacks: Cells, canaries: Cells, missing: int) -> Iterator[str]:
    """Yields the figures that are drawn."""
    yield ""
    if missing:
        yield f"{missing} cells were not run."
        yield ""
    heading = [
        "noise multiplier",
        "texts exact, %",
        "ROUGE-L (another client's update)",
        "membership: AUC",
        "membership: epsilon at least",
        "accounted epsilon",
        "canaries: if Gaussian",
        "f-DP",
        "assumes nothing",
    ]
    yield _line(heading)
    yield _line(["---"] * len(heading))
    for sigma in sorted({*attacks, *canaries}):
        attacked, audited = attacks.get(sigma), canaries.get(sigma)
        yield _line(
            [
                f"{sigma:g}" if sigma else UNDEFENDED,
                *(NOT_RUN * 4 if attacked is None else _attacked(attacked)),
                *(NOT_RUN * 4 if audited is None else _audited(audited)),
            ]
        )


def _attacked(cell: CellSummary) -> list[str]:
    read, told = ["no answer", "no answer"], ["-", "-"]
    worst, found = cell.worst_case, who_was_in(cell)
    if worst is not None and worst.exact_match is not None and worst.rougeL is not None:
        control = worst.control_rougeL
        other = "" if control is None else f" ({control.mean:.0f})"
        read = [interval(worst.exact_match, 100), interval(worst.rougeL, 1) + other]
    if found is not None:
        told = [interval(found.auc, places=2), _bound(found.epsilon)]
    return [*read, *told]


def _audited(cell: CellSummary) -> list[str]:
    found = together(cell)
    if found is None:
        return NOT_RUN * 4
    accounted = found.epsilon if isinstance(found.epsilon, str) else f"{found.epsilon:.3g}"
    return [accounted, _bound(found.gaussian), _bound(found.f_dp), _bound(found.epsilon_delta)]


def _bound(epsilon: float | None) -> str:
    if epsilon is None:
        return "-"
    return f"{epsilon:.3g}" if epsilon > 0 else "nothing seen"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
