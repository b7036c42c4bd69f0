"""Runs what a published table takes, and prints our figures beside the published ones.

    python experiments/reproduce.py experiments/lamp-table1.toml [--no-run] [--set KEY=VALUE]

The published figures of an experiment file are in the file of the same name in `paper/` beside it,
if there is one: `always` are settings that all lines are about, and `sweep` lists the sweeps that
fill the table, if it takes more than the one. They are run as `fedleak sweep` runs them, so the
same command goes on where it was stopped. Then the table is printed in Markdown, a line for each
attack of each cell. `--no-run` only prints what there is, also of a run that is not finished.

  answers      updates that the attack has answered, of those that the cell has when it is finished
  R-1 R-2 R-L  ROUGE as the papers score it, with special tokens, the mean over updates, with its
               95 % interval over clients (`fedleak.audit.metrics.intervals`)
  paper        the published figure, and where it lies: inside that interval, above it or below
  content      R-1, R-2 and R-L without special tokens
  chance       R-L of that, for texts drawn without looking at any update
"""

import argparse
import operator
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import typer

from fedleak.attacks.reconstruction import Status
from fedleak.audit import scoring
from fedleak.audit.metrics.intervals import Interval, clustered_mean
from fedleak.cli.mistakes import mended
from fedleak.cli.sweeps import sweep as run_sweep
from fedleak.config.experiment import Experiment
from fedleak.config.families import FAMILY
from fedleak.config.federation.schedule import expected_captures
from fedleak.report.markdown import lines
from fedleak.report.words import in_words, interval, number, short_key
from fedleak.running import sweep
from fedleak.running.sweep import Sweep
from fedleak.store.records import LEAKAGE, LeakageRow
from fedleak.store.run import Run
from fedleak.util.errors import ConfigError, FedleakError

METRICS = {"rouge1": "R-1", "rouge2": "R-2", "rougeL": "R-L"}


@dataclass(frozen=True)
class Published:
    """A line of a published table.

    Attributes:
        settings: What it is about: values by dotted key of the experiment, and the attack's name.
        scores: Its figures, by metric.
    """

    settings: Mapping[str, Any]
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Table:
    """A published table: the sweeps that fill it, with what is set in them, and its lines."""

    sweeps: tuple[tuple[Path, tuple[str, ...]], ...]
    lines: tuple[Published, ...]

    def scores(self, settings: Mapping[str, Any], attack: str) -> Mapping[str, float]:
        """Returns what was published for an attack in an experiment; nothing if it was not."""
        about = {**settings, "attack": attack}
        for line in self.lines:
            if all(_at(about, key) == value for key, value in line.settings.items()):
                return line.scores
        return {}


def read(path: Path) -> Table:
    """Returns the table of an experiment file.

    Raises:
        ConfigError: There is no such file.
    """
    if not path.is_file():
        raise ConfigError(f"experiment file {str(path)!r}: there is no such file")
    beside = path.parent / "paper" / path.name
    published = tomllib.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    sweeps = published.get("sweep", [{"file": path.name}])
    lines = [
        published.get("always", {}) | dict(zip(published["columns"], row, strict=True))
        for row in published.get("rows", [])
    ]
    return Table(
        tuple(
            (path.parent / sweep_table["file"], tuple(sweep_table.get("set", ())))
            for sweep_table in sweeps
        ),
        tuple(
            Published(
                {key: value for key, value in line.items() if key not in METRICS},
                {metric: line[metric] for metric in METRICS if metric in line},
            )
            for line in lines
        ),
    )


def main() -> int:
    """Runs a table's sweeps and prints it; returns the exit status of `fedleak sweep`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("file", type=Path, help="an experiment file with a [sweep]")
    parser.add_argument("--no-run", action="store_true", help="only print what there is")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a setting of every sweep; the value is TOML",
    )
    args = parser.parse_args()
    try:
        with mended():
            table = read(args.file)
            sweeps = [(path, [*args.set, *own]) for path, own in table.sweeps]
            grids = [sweep.load(path, changes) for path, changes in sweeps]
            if any(FAMILY in grid.axes for grid in grids):
                raise ConfigError(
                    f"{str(args.file)!r} has families, which no published table has: use `fedleak "
                    f"sweep {args.file}`"
                )
            try:
                for path, changes in () if args.no_run else sweeps:
                    run_sweep(path, changes)
            finally:
                print("\n".join(markdown(table, grids)))
    except typer.Exit as stopped:
        return stopped.exit_code
    return 0


def markdown(table: Table, grids: Sequence[Sweep]) -> Iterator[str]:
    """Yields the lines of what there is of a table, and then how many cells are not finished."""
    axes = [_axis(key, values) for key, values in grids[0].axes.items()]
    paper = ["paper"] if table.lines else []
    metrics = [heading for name in METRICS.values() for heading in (name, *paper)]
    keys = [short_key(key.removesuffix(".name")) for key in axes]
    heading = [*keys, "attack", "answers", *metrics, "content", "chance"]
    cells = []
    runs = [grid.run(cell) for grid in grids for cell in grid.cells]
    begun = [run for run in runs if run.exists()]
    for run in begun:
        rows, settings = scored(run), run.info()["experiment"]
        expected = len(expected_captures(Experiment.model_validate(settings)))
        about = [_word(_at(settings, key)) for key in axes]
        for attack in [spec.get("name", spec["kind"]) for spec in settings["attack"]]:
            of_attack = [row for row in rows if row.attack == attack]
            if of_attack:
                published = table.scores(settings, attack)
                figures = _figures(of_attack, expected, published, bool(paper))
                cells.append([*about, attack, *figures])
    yield from lines(heading, cells)
    left = len(runs) - sum(run.info()["status"] == "finished" for run in begun)
    if left:
        yield f"\nnot finished: {left} of {len(runs)} cells"


def scored(run: Run) -> list[LeakageRow]:
    """Returns the scores of a run; what there is of one that is not finished is scored first."""
    if run.info()["status"] != "finished":
        with suppress(FedleakError), run.lock():  # one that is going on is scored when it ends
            scoring.score_run(run)
    return run.rows(LEAKAGE)


def mean(rows: Sequence[LeakageRow], field: str) -> Interval | None:
    """Returns the mean of what was measured, with its interval."""
    pairs = [(getattr(row, field), row.client) for row in rows if getattr(row, field) is not None]
    return clustered_mean(*zip(*pairs, strict=True), most=100.0) if pairs else None


def _figures(
    rows: Sequence[LeakageRow],
    expected: int,
    published: Mapping[str, float],
    compared: bool,
) -> Iterator[str]:
    """Yields the columns of one attack in one cell."""
    yield f"{sum(row.status == Status.RECOVERED for row in rows)} of {expected}"
    for metric in METRICS:
        ours = mean(rows, f"paper_{metric}")
        yield interval(ours, places=1)
        if compared:
            yield _place(published.get(metric), ours)
    yield " / ".join(_mean(rows, metric) for metric in METRICS)
    yield _mean(rows, "guess_rougeL")


def _place(published: float | None, ours: Interval | None) -> str:
    """Returns a published figure, and where it lies of our interval."""
    if published is None or ours is None:
        return number(published, 1)
    above, below = published > ours.high, published < ours.low
    return f"{published:.1f} {'above' if above else 'below' if below else 'inside'}"


def _mean(rows: Sequence[LeakageRow], field: str) -> str:
    value = mean(rows, field)
    return number(value and value.mean, 1)


def _axis(key: str, values: Sequence[Any]) -> str:
    """Returns a swept key; of swept tables, the first of their keys whose values differ."""
    first = values[0]
    if not isinstance(first, dict):
        return key
    different = (
        inner for inner in first if any(first[inner] != table.get(inner) for table in values)
    )
    return f"{key}.{next(different, next(iter(first)))}"


def _at(settings: Mapping[str, Any], key: str) -> Any:
    """Returns the value of a dotted key."""
    return reduce(operator.getitem, key.split("."), settings)


def _word(value: Any) -> str:
    """Returns a value in few words; of a path the last two names."""
    return "/".join(in_words(value).split("/")[-2:])


if __name__ == "__main__":
    sys.exit(main())
