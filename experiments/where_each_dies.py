"""Draws where reading, membership and canaries end along one axis of noise, and writes the page.

    python experiments/where_each_dies.py [FILE] [--no-run] [--out PAGE]

It runs where-each-dies.toml, or another sweep with such families, as `fedleak sweep` does, so the
same command goes on where it was stopped. The drawing is written beside the page,
docs/where-each-dies.md, and the figures below its marker; --no-run writes what there is. Cells that
are not finished are left out, and counted.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import typer

from fedleak.cli.mistakes import mended
from fedleak.cli.sweeps import sweep as run_sweep
from fedleak.config.families import FAMILY, UNDEFENDED
from fedleak.report.drawings.chart import (
    COLOURS,
    INK,
    MEASURES,
    NO_ANSWER,
    NOWHERE,
    PER_CENT,
    TOGETHER,
    Chart,
    Row,
    Series,
    numbers,
    panel,
    present,
    span,
    write,
)
from fedleak.report.markdown import lines
from fedleak.report.marked_pages import above
from fedleak.report.words import interval
from fedleak.running import sweep
from fedleak.store.run import EVERYONE
from fedleak.store.summaries import (
    CanaryBound,
    CellSummary,
    MembershipFigures,
    SweepSummary,
)

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

BOUNDS: Mapping[str, Callable[[CanaryBound], float | None]] = {
    "canaries: at least, if the noise is Gaussian": lambda bound: bound.gaussian,
    "canaries: at least, f-DP": lambda bound: bound.f_dp,
    "canaries: at least, assuming nothing": lambda bound: bound.epsilon_delta,
}
"""Kinds of lower bounds, by what the drawing calls them."""

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
            write(figure(attacks, canaries) if attacks and canaries else None, picture)
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


def figure(attacks: Cells, canaries: Cells) -> Chart:
    """Returns three panels above each other, with one axis of noise."""
    worst = {sigma or NO_NOISE: cell.worst_case for sigma, cell in attacks.items()}
    told = {sigma or NO_NOISE: who_was_in(cell) for sigma, cell in attacks.items()}
    exact, rouge, _ = MEASURES
    control = "ROUGE-L with another client's update"
    read = [
        {"x": sigma, "series": measure.heading, **span(measure.value(case), measure.scale)}
        for sigma, case in worst.items()
        for measure in (exact, rouge)
    ]
    beside = [
        {"x": sigma, "y": rouge.beside(case, rouge.control), "series": control}
        for sigma, case in worst.items()
    ]
    nothing = [
        {"x": sigma, "y": NOWHERE, "series": NO_ANSWER}
        for sigma, case in worst.items()
        if exact.value(case) is None
    ]
    score = f"AUC of the score {SCORE}"
    areas = [
        {"x": sigma, "series": score, **span(None if figures is None else figures.auc)}
        for sigma, figures in told.items()
    ]
    chance = [{"y": 0.5, "series": "chance"}]
    series = [
        Series.numbered(exact.heading, 0, 0),
        Series.numbered(rouge.heading, 1, 1),
        Series(control),
        Series(NO_ANSWER, shape="triangle-down"),
        Series.numbered(score, 2, 2),
        Series("chance", shape="stroke", dash=(2, 2)),
        Series("accounted: at most", INK, "stroke"),
        *(Series.numbered(name, 3 + i, 3 + i) for i, name in enumerate(BOUNDS)),
        *(Series(f"{name}: nothing seen", COLOURS[3 + i]) for i, name in enumerate(BOUNDS)),
    ]
    bounds = [row for sigma, cell in canaries.items() for row in _bounds(sigma, together(cell))]
    shown = present(series, read, beside, nothing, areas, chance, bounds)
    of_lines = {"accounted: at most", *BOUNDS}
    ends = [NO_NOISE, max(*attacks, *canaries)]
    name = "noise multiplier of DP-SGD (leftmost: no defense)"
    x = numbers(name, ends, log=True, format="~g")
    y = numbers("epsilon, at delta 1e-5", log=True, format="~e")
    below: Chart = {"width": 420}
    return {
        "vconcat": [
            panel(
                x,
                PER_CENT | {"title": "what was read, worst case over attacks"},
                shown,
                points=[*read, *beside, *nothing],
                lines=read,
                **below,
            ),
            panel(
                x,
                numbers("who was in", [0, 1.05]),
                shown,
                points=areas,
                lines=areas,
                across=chance,
                **below,
            ),
            panel(
                x,
                y,
                shown,
                points=bounds,
                lines=[row for row in bounds if row["series"] in of_lines],
                **below,
            ),
        ],
        **TOGETHER,
    }


def _bounds(sigma: float, bound: CanaryBound | None) -> Iterator[Row]:
    """Yields what is accounted, and below it what is bounded; a bound of 0 near the bottom."""
    # Batches are fixed, so canaries are not sampled, and every kind of bound is a number.
    if bound is None:
        return
    yield {"x": sigma, "y": float(bound.epsilon), "series": "accounted: at most"}
    for name, of in BOUNDS.items():
        value = of(bound) or 0.0
        yield {"x": sigma, "y": value or None, "series": name}
        if not value:
            yield {"x": sigma, "y": LEAST, "series": f"{name}: nothing seen"}


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
    rows = []
    for sigma in sorted({*attacks, *canaries}):
        attacked, audited = attacks.get(sigma), canaries.get(sigma)
        rows.append(
            [
                f"{sigma:g}" if sigma else UNDEFENDED,
                *(NOT_RUN * 4 if attacked is None else _attacked(attacked)),
                *(NOT_RUN * 4 if audited is None else _audited(audited)),
            ]
        )
    yield from lines(heading, rows)


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


if __name__ == "__main__":
    sys.exit(main())
