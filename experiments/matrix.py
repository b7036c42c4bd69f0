"""Runs every attack by itself, and `auto`, in every setting, and writes what each read as a table.

    python experiments/matrix.py [OPTION]... [FILE]...

Without a file: the matrix-*.toml beside this one. They are run as `fedleak sweep` runs them, so the
same command goes on where it was stopped. Each changes one key at a time of its first cell; --full
runs every combination. The table is written into the page, docs/matrix.md, below its marker;
--no-run writes what there is, and says of cells that are not finished that they are missing;
with --keep they keep the line that the page has. The version of `auto` stands in each line.

An attack's figures are over all updates of a cell. One that it gives no answer to counts as nothing
read, because that is what the attacker has: an attack that answers only where it is sure must not
look better than one that always answers.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from fedleak.attacks.reconstruction import Status
from fedleak.audit.metrics.intervals import Interval, clustered_mean
from fedleak.cli.mistakes import mended
from fedleak.cli.sweeps import sweep as run_sweep
from fedleak.config.families import FAMILY
from fedleak.report.markdown import lines
from fedleak.report.marked_pages import above
from fedleak.report.words import in_words, interval, short_key
from fedleak.running import sweep
from fedleak.running.sweep import Cell, Sweep
from fedleak.store.records import LEAKAGE, LeakageRow

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "matrix.md"
MARKER = "<!-- Below this line everything is written by `python experiments/matrix.py`. -->\n"

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one attack read of all updates of a cell.

    Attributes:
        rows, answers: Updates, and those that it answered.
        exact: Share of the texts that it read word for word, from 0 to 1.
        rougeL: From 0 to 100.
        seconds: Of one update, the mean.
    """

    rows: int
    answers: int
    exact: Interval
    rougeL: Interval
    seconds: float


def reading(rows: Sequence[LeakageRow]) -> Reading | None:
    """Sums up one attack's rows; None if there are none that can be scored."""
    sizes = [row.batch_size for row in rows if row.batch_size is not None]
    if not rows or len(sizes) < len(rows):
        return None
    clients = [row.client for row in rows]
    seconds = [row.seconds or 0.0 for row in rows]
    return Reading(
        rows=len(rows),
        answers=sum(row.status == Status.RECOVERED for row in rows),
        exact=clustered_mean([row.exact_match or 0.0 for row in rows], clients, sizes, most=1.0),
        rougeL=clustered_mean([row.rougeL or 0.0 for row in rows], clients, most=100.0),
        seconds=sum(seconds) / len(seconds),
    )


def shortfall(summaries: Mapping[str, Reading]) -> str:
    """Returns where `auto` reads less than the best single attack, and whether it is certain.

    That is `below`, in bold, where the single attack's mean is above the upper end of the interval
    of `auto`; else it is within that interval.
    """
    singles = {name: summary for name, summary in summaries.items() if name != AUTO}
    if AUTO not in summaries or not singles:
        return "not measured"
    shortfalls = []
    for metric, heading, scale in (("exact", "exact", 100), ("rougeL", "ROUGE-L", 1)):
        ours = getattr(summaries[AUTO], metric)
        name, best = max(
            ((name, getattr(summary, metric)) for name, summary in singles.items()),
            key=lambda pair: pair[1].mean,
        )
        if best.mean > ours.mean:
            where = "**below**" if best.mean > ours.high else "within"
            shortfalls.append(f"{where}: {heading} {scale * best.mean:.0f} of {name}")
    return "<br>".join(shortfalls) or "-"


def main() -> int:
    """Runs the sweeps and writes the table; returns the exit status of `fedleak sweep`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="experiment files with a [sweep]")
    parser.add_argument("--full", action="store_true", help="run every combination")
    parser.add_argument("--no-run", action="store_true", help="only write what there is")
    parser.add_argument(
        "--keep", action="store_true", help="keep the page's lines of cells that are not finished"
    )
    parser.add_argument("--out", type=Path, default=PAGE, help="the page", metavar="PAGE")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting of every sweep; the value is TOML",
    )
    args = parser.parse_args()
    changes = [*args.set, *(["sweep.design=all"] if args.full else [])]
    try:
        with mended():
            files = args.files or sorted(HERE.glob("matrix-*.toml"))
            grids = [sweep.load(path, changes) for path in files]
            written_above = above(args.out, MARKER)
            earlier = args.out.read_text(encoding="utf-8") if args.keep else ""
            try:
                for path in () if args.no_run else files:
                    run_sweep(path, changes, jobs=1)  # attacks share no core: seconds compare
            finally:
                table = "\n".join([written_above, *markdown(grids, earlier), ""])
                args.out.write_text(table, encoding="utf-8")
                print(f"table: {args.out}")
    except typer.Exit as stopped:
        return stopped.exit_code
    return 0


def markdown(grids: Sequence[Sweep], earlier: str = "") -> Iterator[str]:
    """Yields the lines of the table, and a summary.

    Args:
        grids: The sweeps.
        earlier: A page; cells that are not finished keep its lines.
    """
    keys = list(dict.fromkeys(key for grid in grids for key in grid.axes))
    attacks = list(
        dict.fromkeys(
            attack.name
            for grid in grids
            for cell in grid.cells
            for attack in cell.experiment.attacks
        )
    )
    attacks = sorted((name for name in attacks if name != "probes"), key=lambda name: name != AUTO)
    about_cells = ["model", *map(short_key, keys)]
    heading = [*about_cells, *attacks, f"version of {AUTO}", f"best single attack above {AUTO}"]
    kept = _rows_of(earlier, heading, len(about_cells))
    rows, missing = [], 0
    for grid in grids:
        for cell in grid.cells:
            about = [_model(cell), *(_word(key, cell.values.get(key)) for key in keys)]
            run = grid.run(cell)
            if not run.exists() or run.info()["status"] != "finished":
                missing += tuple(about) not in kept
                not_run = [*about, *["not run"] * (len(heading) - len(about))]
                rows.append(kept.get(tuple(about), not_run))
                continue
            scored = run.rows(LEAKAGE)
            tried = {name: reading([r for r in scored if r.attack == name]) for name in attacks}
            summaries = {name: summary for name, summary in tried.items() if summary is not None}
            figures = [_figures(summaries.get(name)) for name in attacks]
            versions = {r.diagnostics.get("version", "-") for r in scored if r.attack == AUTO}
            version = ", ".join(sorted(map(str, versions))) or "-"
            rows.append([*about, *figures, version, shortfall(summaries)])
    yield ""
    yield from _in_all(rows, missing)
    yield ""
    yield from lines(heading, rows)


def _rows_of(page: str, heading: Sequence[str], about: int) -> dict[tuple[str, ...], list[str]]:
    """Returns the rows of a page's table by their first cells; none if its heading is another."""
    table = [
        line.removeprefix("| ").removesuffix(" |").split(" | ")
        for line in page.partition(MARKER)[2].splitlines()
        if line.startswith("| ")
    ]
    if not table or table[0] != [*heading]:
        return {}
    return {tuple(row[:about]): row for row in table[2:]}


def _in_all(rows: Sequence[Sequence[str]], missing: int) -> Iterator[str]:
    below = sum("**below**" in row[-1] for row in rows)
    within = sum("within" in row[-1] and "**below**" not in row[-1] for row in rows)
    done = len(rows) - missing
    yield (
        f"{done} of {len(rows)} cells were run. In {below} of them a single attack is above the "
        f"upper end of the interval of `{AUTO}`, in {within} more above its mean only, and in "
        f"{done - below - within} nowhere."
    )


def _figures(summary: Reading | None) -> str:
    """Returns the figures of an attack in one cell of the table."""
    if summary is None:
        return "cannot"
    seconds = f"{summary.seconds:.1f} s"
    if not summary.answers:
        return f"no answer<br>{seconds}"
    some = (
        f" ({summary.answers} of {summary.rows} answered)" if summary.answers < summary.rows else ""
    )
    return f"{interval(summary.exact, 100)}<br>{interval(summary.rougeL)}<br>{seconds}{some}"


def _model(cell: Cell) -> str:
    return cell.experiment.model.name.rpartition("/")[2]


def _word(key: str, value: Any) -> str:
    """Returns a cell's value of a key; of a family its name and its strength."""
    if key == FAMILY and isinstance(value, dict):
        return " ".join(in_words(value[part]) for part in ("kind", "strength") if part in value)
    return in_words(value)


if __name__ == "__main__":
    sys.exit(main())
