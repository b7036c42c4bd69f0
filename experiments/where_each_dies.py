"""Draws where reading, membership and canaries end along one axis of noise, and writes the page.

    python experiments/where_each_dies.py [FILE] [--no-run] [--out PAGE]

It runs where-each-dies.toml, or another sweep with such families, as `fedleak sweep` does, so the
same command goes on where it was stopped. The figures are written below the marker of the page,
docs/where-each-dies.md, and beside it what docs/curves.py draws of them; --no-run writes what there
is. Cells that are not finished are left out, and counted.
"""

import argparse
import runpy
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import typer

from fedleak.cli.mistakes import mended
from fedleak.cli.sweeps import sweep as run_sweep
from fedleak.config.families import FAMILY, UNDEFENDED
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
CURVES = HERE.parent / "docs" / "curves.py"
MARKER = (
    "<!-- Below this line everything is written by `python experiments/where_each_dies.py`. -->\n"
)

SCORE = "residual"
"""Of the scores of membership the one that is drawn: named here, not chosen by its figures."""

NOT_RUN = ["-"]
"""Stands for each figure that was not measured."""

ATTACKS, CANARIES = "attacks", "canaries"
"""Names of the families: the strengths of both are noise multipliers."""

Cells = Mapping[float, CellSummary]
"""Finished cells of a family by their noise multiplier, in its order."""


def main() -> int:
    """Runs the sweep and writes page and drawing; returns the exit status of `fedleak sweep`."""
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
            page = "\n".join([written_above, *markdown(attacks, canaries, missing), ""])
            args.out.write_text(page, encoding="utf-8")
            picture = args.out.with_suffix(".svg")
            curves = runpy.run_path(str(CURVES))
            curves["write"](curves["where_each_dies"](page), picture)
            print(f"drawing: {picture}\npage: {args.out}")
    except typer.Exit as stopped:
        return stopped.exit_code
    return 0


def finished(collected: SweepSummary, family: str) -> Cells:
    """Returns the cells of a family that were measured; the one without a defense is of each."""
    cells = {}
    for cell in collected.cells:
        setting = cell.values[FAMILY]
        if cell.status == "finished" and isinstance(setting, dict):
            if setting["kind"] == family:
                cells[float(str(setting["strength"]))] = cell
            elif setting["kind"] == UNDEFENDED and family == ATTACKS:
                cells[0.0] = cell
    return dict(sorted(cells.items()))


def who_was_in(cell: CellSummary) -> MembershipFigures | None:
    """Returns the figures of the score that is drawn."""
    figures = () if cell.membership is None else cell.membership.figures
    return next((row for row in figures if row.score == SCORE), None)


def together(cell: CellSummary) -> CanaryBound | None:
    """Returns the bounds of all clients' canaries together."""
    bounds = () if cell.canary is None else cell.canary.bounds
    return next((bound for bound in bounds if bound.client == EVERYONE), None)


def markdown(attacks: Cells, canaries: Cells, missing: int) -> Iterator[str]:
    """Yields the figures, which are drawn from this table."""
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
    read, membership = ["no answer", "no answer"], ["-", "-"]
    worst, figures = cell.worst_case, who_was_in(cell)
    if worst is not None and worst.exact_match is not None and worst.rougeL is not None:
        control = worst.control_rougeL
        other = "" if control is None else f" ({control.mean:.0f})"
        read = [interval(worst.exact_match, 100), interval(worst.rougeL, 1) + other]
    if figures is not None:
        membership = [interval(figures.auc, places=2), _bound(figures.epsilon)]
    return [*read, *membership]


def _audited(cell: CellSummary) -> list[str]:
    bound = together(cell)
    if bound is None:
        return NOT_RUN * 4
    accounted = bound.epsilon if isinstance(bound.epsilon, str) else f"{bound.epsilon:.3g}"
    return [accounted, _bound(bound.gaussian), _bound(bound.f_dp), _bound(bound.epsilon_delta)]


def _bound(epsilon: float | None) -> str:
    if epsilon is None:
        return "-"
    return f"{epsilon:.3g}" if epsilon > 0 else "nothing seen"


if __name__ == "__main__":
    sys.exit(main())
