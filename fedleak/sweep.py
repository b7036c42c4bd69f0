"""A grid of runs, from one experiment file whose `[sweep]` maps dotted keys to lists of values.

    runs/<name>/
      <cell>/       a run directory per combination, such as federation.batch_size=4,seed=1
      sweep.json    the cells' values and the figures of their summary.json
      sweep.svg     the same, drawn
      tradeoff.svg  leakage against utility and epsilon

The cells are ordinary runs, and what is left of a sweep is what they lack. Several may run at
once, each in a process of its own.
"""

import copy
import hashlib
import itertools
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from fedleak import pipeline, preparation, processes
from fedleak.config import loading
from fedleak.config.experiment import Experiment
from fedleak.config.tables import WorkersTable
from fedleak.dispatch.progress import RunProgress
from fedleak.errors import ConfigError, FedleakError
from fedleak.federation.lookup import run_folder
from fedleak.pipeline import Engine
from fedleak.preparation import Plan
from fedleak.reconstruction import Status
from fedleak.report.tables import INTERVALS, NOT_MEASURED, decimal, interval, number, warnings
from fedleak.sanitise import markup, printable
from fedleak.store.run import SCHEMA_VERSION, Run
from fedleak.workers.process import Worker, devices, workers

_log = logging.getLogger(__name__)

LONGEST_WORD, LONGEST_NAME = 32, 200
"""Characters of one value, and of a cell's name: file systems take 255 bytes."""

MOST_CELLS = 2_000
"""Runs of a sweep: at half a minute each they take a day, and each is planned before the first."""

UTILITIES = {"mcc": "MCC", "perplexity": "perplexity"}
"""The figure that stands for a model's use, of classifiers and of causal models; and its name."""

NO_GUARANTEE = "none"
"""What stands for an epsilon if a client has none."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        name: The name of its folder.
        values: Its value of each swept key, as in the file.
        experiment: The file's experiment with these values.
    """

    name: str
    values: Mapping[str, Any]
    experiment: Experiment


@dataclass(frozen=True)
class Sweep:
    """The swept keys with their values, and a cell per combination; the last key changes first."""

    name: str
    axes: Mapping[str, Sequence[Any]]
    cells: tuple[Cell, ...]

    @property
    def path(self) -> Path:
        """The folder of the sweep."""
        return run_folder(self.name)

    def lock(self) -> AbstractContextManager[None]:
        """Holds the folder, so that one process at a time runs the sweep."""
        return Run(self.path).lock()

    def run(self, cell: Cell) -> Run:
        """Returns the run directory of a cell."""
        return Run(self.path / cell.name)


def load(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Reads an experiment file with a `[sweep]`.

    Args:
        path: A TOML file.
        overrides: `dotted.key=value`, for every cell.

    Raises:
        ConfigError: Anything about the file that is not right, with the cell that it is in.
    """
    table = loading.read(path, overrides)
    if "sweep" not in table:
        raise ConfigError(
            f"experiment file {str(path)!r} has no [sweep]: use `fedleak run {path}`, or add one, "
            'such as "federation.batch_size" = [1, 2, 4]'
        )
    axes = _axes(table.pop("sweep"))
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in axes:
            raise ConfigError(f"--set {override!r}: {key} is swept: set sweep.{key}, to a list")
    if (count := math.prod(map(len, axes.values()))) > MOST_CELLS:
        raise ConfigError(
            f"sweep: {' x '.join(str(len(values)) for values in axes.values())} values are "
            f"{count:,} cells, and a sweep has at most {MOST_CELLS:,}: list fewer values"
        )
    cells: dict[str, Cell] = {}
    for combination in itertools.product(*axes.values()):
        values = dict(zip(axes, combination, strict=True))
        name = cell_name(values)
        if name in cells:
            raise ConfigError(f"sweep: two cells are called {name!r}: list each value once")
        with _naming(name):
            cells[name] = Cell(name, values, loading.parse(_filled(table, values)))
    return Sweep(next(iter(cells.values())).experiment.name, axes, tuple(cells.values()))


def prepare(sweep: Sweep, *, fresh: bool = False) -> dict[str, Plan]:
    """Checks every cell before anything is written, and returns those that are not finished.

    Args:
        sweep: What to run.
        fresh: Move an earlier sweep of this name out of the way.

    Raises:
        ConfigError: A cell cannot work, or differs from the one that ran here.
    """
    if not fresh and Run(sweep.path).exists():
        raise ConfigError(
            f"{str(sweep.path)!r} holds a single run: give the sweep another name, or --fresh to "
            "move the run aside"
        )
    plans = {}
    for cell in sweep.cells:
        with _naming(cell.name):
            if fresh or not pipeline.finished(sweep.run(cell), cell.experiment):
                plans[cell.name] = preparation.plan(cell.experiment)
    if fresh and sweep.path.exists():
        folder = Run(sweep.path)
        with folder.lock():
            folder.move_aside()
    return plans


def carry_out(
    sweep: Sweep,
    plans: Mapping[str, Plan],
    train: Engine,
    watch: Callable[[str], AbstractContextManager[Callable[[RunProgress], None]]],
) -> dict[str, str]:
    """Runs the cells that are planned, one after the other, and keeps sweep.json up to date.

    Args:
        sweep: The sweep.
        plans: By the name of the cell.
        train: The engine.
        watch: Called with a cell's name; what it yields is told how far that run is.

    Returns:
        Why cells failed, by name. The others are done nevertheless.
    """
    failures = {}
    with ExitStack() as hired:
        hands: list[Worker] = []
        hired_as: WorkersTable | None = None
        for cell in sweep.cells:
            if cell.name not in plans:
                continue
            collect(sweep)
            table = cell.experiment.workers
            try:
                if table != hired_as:  # else they go on with what they have loaded
                    hired.close()
                    hands = hired.enter_context(workers(devices(table.devices), table.time_limit))
                    hired_as = table
                run = preparation.open_run(plans[cell.name], sweep.run(cell).path)
                with watch(cell.name) as report:
                    pipeline.carry_out(run, cell.experiment, train, report, hands)
            except Exception as error:  # noqa: BLE001 - the others can still be done
                failures[cell.name] = _failure(cell.name, error)
                hired_as = None  # they may still be at work for this cell
    return failures


def jobs(plans: Mapping[str, Plan], wanted: int | None = None) -> int:
    """Returns how many cells to run at once: those wanted, else one per GPU, else per two cores.

    Only GPUs that the cells may use count. A cell on the CPU trains in one process and attacks in
    another.
    """
    tables = {tuple(devices(plan.experiment.workers.devices)) for plan in plans.values()}
    gpus = {each for table in tables for each in table if each.startswith("cuda")}
    most = wanted or len(gpus) or (os.cpu_count() or 1) // 2
    return max(1, min(most, len(plans)))


def carry_out_at_once(
    sweep: Sweep,
    plans: Mapping[str, Plan],
    train: Engine,
    jobs: int,
    tell: Callable[[str, str], None],
) -> dict[str, str]:
    """Runs the cells that are planned, several at once, and keeps sweep.json up to date.

    Args:
        sweep: The sweep.
        plans: By the name of the cell.
        train: The engine; it is pickled, so it has to be importable.
        jobs: How many at once; they divide the devices for the attacks among themselves.
        tell: Is told the name of a cell and that it has started, finished or failed.

    Returns:
        Why cells failed, by name. The others are done nevertheless.
    """
    failures = {}

    def ended(cell: str, failure: str | None) -> None:
        if failure is not None:
            failures[cell] = failure
        collect(sweep)
        tell(cell, "finished" if failure is None else "failed")

    collect(sweep)
    calls = {
        name: partial(_carry_out_alone, plan, sweep.path / name, train, jobs)
        for name, plan in plans.items()
    }
    processes.side_by_side(calls, jobs, lambda cell: tell(cell, "started"), ended)
    return {cell: failures[cell] for cell in plans if cell in failures}


def share(on: Sequence[str], jobs: int, place: int) -> list[str]:
    """Returns the devices of one of several jobs; it shares them if there are more jobs."""
    return list(on[place::jobs] or on[place % len(on) :][:1])


def collect(sweep: Sweep) -> dict[str, Any]:
    """Writes sweep.json from the cells' own files, and returns its content."""
    collected = {
        "schema_version": SCHEMA_VERSION,
        "name": sweep.name,
        "axes": dict(sweep.axes),
        "cells": [_row(cell, sweep.run(cell)) for cell in sweep.cells],
    }
    Run(sweep.path).write_json("sweep.json", collected)
    return collected


def refuse_gaps(collected: Mapping[str, Any], failures: Mapping[str, str]) -> None:
    """Refuses to call a sweep complete of which something is missing.

    Args:
        collected: The content of sweep.json.
        failures: Why cells failed, by name.

    Raises:
        FedleakError: Cells failed, or have no score where they should have one.
    """
    cells = collected["cells"]
    gaps = {row["cell"]: "; ".join(row["missing"]) for row in cells if row["missing"]}
    said = []
    for what, found, then in (
        ("failed", failures, "the same command tries them again"),
        ("are not complete", gaps, "their own commands, which are named, complete them"),
    ):
        if found:
            reasons = "; ".join(f"cell {cell!r}: {reason}" for cell, reason in found.items())
            said.append(f"{len(found)} of {len(cells)} cells {what} ({reasons}): {then}")
    if said:
        raise FedleakError(". ".join(said))


def table(collected: Mapping[str, Any]) -> Table:
    """Returns a line per cell and attack of a sweep.json."""
    axes: Mapping[str, Sequence[Any]] = collected["axes"]
    summaries = [of for row in collected["cells"] for of in row["attacks"].values()]
    notes = [*map(markup, warnings(summaries)), INTERVALS]
    if any(_answers(of) < of["rows"] for of in summaries):
        notes.append("answers that are missing: `fedleak score` of the cell's folder says why")
    of_cells = _cell_columns(collected)
    shown = Table(
        title=f"{markup(collected['name'])}: mean and 95 % interval over clients",
        box=box.SIMPLE_HEAD,
        padding=(0, 0 if of_cells else 1, 0, 0),
        caption="\n".join(notes),
        title_justify="left",
        caption_justify="left",
    )
    for key in axes:
        shown.add_column(markup(short_key(key)).replace(" ", "\n"), overflow="fold")
    for heading in of_cells:
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("attack", overflow="fold")
    for heading in ("texts\nexact, %", "ROUGE-L"):
        shown.add_column(heading, justify="right", no_wrap=not of_cells, min_width=8)
    for heading in ("no\nupdate", "tokens\nfound,\n%", "seconds"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in collected["cells"]:
        values = [markup(said(row["values"][key])) for key in axes]
        values += [show(row) for show in of_cells.values()]
        if not row["attacks"]:
            shown.add_row(*values, f"[yellow]{markup(row['status'])}[/]")
        for i, (name, of) in enumerate(row["attacks"].items()):
            shown.add_row(
                *(values if i == 0 else [""] * len(values)),
                _attack(name, of),
                _unbroken(interval(of["exact_match"], 100)),
                _unbroken(interval(of["rougeL"])),
                _mean(of["guess_rougeL"]),
                _mean(of["token_recall"], 100),
                f"{of['seconds']:.1f}",
            )
        shown.add_section()
    return shown


def cell_name(values: Mapping[str, Any]) -> str:
    """Returns a folder name that depends on the values only, not on their place in the lists."""
    name = ",".join(f"{key}={_word(value)}" for key, value in values.items())
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}-{_digest(values)}"


def said(value: Any) -> str:
    """Returns a value of the file in few words, for people."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(said, value)) or "none"
    if isinstance(value, dict):
        settings = (
            f"{printable(key)}={said(each)}" for key, each in value.items() if key != "kind"
        )
        return " ".join([*([said(value["kind"])] if "kind" in value else []), *settings])
    return printable(str(value))


def short_key(key: str) -> str:
    """Returns what a dotted key is called where there is little room."""
    return printable(key.rpartition(".")[2].replace("_", " "))


def utility(row: Mapping[str, Any], measure: str, of: str = "utility") -> float | None:
    """Returns the utility of a cell of sweep.json, or of another model, if it was measured."""
    value: float | None = (row.get(of) or {}).get(measure)
    return value


def utility_measure(collected: Mapping[str, Any]) -> str | None:
    """Returns which figure stands for the utility of a sweep.json's cells; None if none does."""
    for measure in UTILITIES:
        if any(utility(row, measure) is not None for row in collected["cells"]):
            return measure
    return None


def privacy(row: Mapping[str, Any], key: str) -> Any:
    """Returns what a cell of sweep.json says of its privacy; None if it was not measured."""
    return (row.get("privacy") or {}).get(key)


def _carry_out_alone(plan: Plan, path: Path, train: Engine, jobs: int, place: int) -> str | None:
    """Runs a cell in this process, with workers of its own; returns why it failed, if it did."""
    table = plan.experiment.workers
    try:
        run = preparation.open_run(plan, path)
        with workers(share(devices(table.devices), jobs, place), table.time_limit) as hands:
            pipeline.carry_out(run, plan.experiment, train, on=hands)
    except Exception as error:  # noqa: BLE001 - the others can still be done
        return _failure(path.name, error)
    return None


def _failure(cell: str, error: Exception) -> str:
    """Returns why a cell failed; where that is not the user's to mend, the log has the rest."""
    if isinstance(error, FedleakError):
        return str(error)
    _log.error("cell %s failed", cell, exc_info=error)
    return f"{type(error).__name__}: {error}"


def _axes(found: Any, inside: str = "sweep") -> dict[str, list[Any]]:
    """Checks `[sweep]` and returns the values of each dotted key, quoted there or not."""
    if not isinstance(found, dict) or not found:
        raise ConfigError(
            f"{inside} = {found!r}: list the values of a key, such as "
            '"federation.batch_size" = [1, 2, 4] below [sweep]'
        )
    axes: dict[str, list[Any]] = {}
    for key, value in found.items():
        if isinstance(value, dict):
            deeper = _axes(value, f"{inside}.{key}")
            axes |= {f"{key}.{rest}": values for rest, values in deeper.items()}
        elif not isinstance(value, list) or not value:
            raise ConfigError(f"{inside}.{key} = {value!r}: list the values to run, at least one")
        elif (inside, key) == ("sweep", "name"):
            raise ConfigError("sweep.name: the name is that of the whole sweep: sweep other keys")
        else:
            axes[key] = value
    return axes


def _filled(base: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tables of a cell."""
    tables = copy.deepcopy(dict(base))
    for key, value in values.items():
        loading.set_(tables, key, value, f"sweep.{key}")
    return tables


@contextmanager
def _naming(cell: str) -> Iterator[None]:
    """Says of a refusal which cell it is about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"cell {cell!r}: {error}") from error


def _word(value: Any) -> str:
    """Returns a value as a part of a folder name: itself, or what is safe of it and a hash."""
    if value == []:
        return "none"
    text = said(value)
    safe = re.sub(r"[^A-Za-z0-9._+-]+", "-", text)[:LONGEST_WORD]
    if safe == text and not isinstance(value, list | dict):
        return safe
    return f"{safe.strip('-')}-{_digest(value)}"


def _digest(value: Any) -> str:
    canonical = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:6]


def _row(cell: Cell, run: Run) -> dict[str, Any]:
    """Returns what sweep.json says of a cell; no figures before it is finished."""
    summary: Any = None
    with suppress(FedleakError):  # missing, or damaged: then the cell is run again
        summary = run.read_json("summary.json")
    if not isinstance(summary, dict) or summary.get("status") != "finished":
        summary = {}
    return {
        "cell": cell.name,
        "values": dict(cell.values),
        "status": run.info()["status"] if run.exists() else "new",
        "missing": summary.get("missing", []),
        "attacks": summary.get("attacks", {}),
        **{key: summary.get(key) for key in ("utility", "utility_reference", "privacy")},
    }


def _cell_columns(
    collected: Mapping[str, Any],
) -> dict[str, Callable[[Mapping[str, Any]], str]]:
    """Returns the table's columns that are about whole cells, as far as one has such a figure."""
    cells, measure = collected["cells"], utility_measure(collected)
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {}
    if measure is not None:
        heading, places = ("MCC", 2) if measure == "mcc" else ("perplex-\nity", 1)
        columns[heading] = lambda row: decimal(utility(row, measure), places)
    epsilons = {privacy(row, "epsilon") for row in cells}
    multipliers = {privacy(row, "noise_multiplier") for row in cells}
    if epsilons - {None, NO_GUARANTEE} or multipliers - {None}:
        columns["epsilon"] = lambda row: _digits(privacy(row, "epsilon"))
        columns["noise\nmulti-\nplier"] = lambda row: _digits(privacy(row, "noise_multiplier"))
    return columns


def _unbroken(interval: str) -> str:
    """Returns `mean [low,high]`, which breaks before its bracket only, where room is short."""
    return interval.replace(", ", ",")


def _digits(value: float | str | None) -> str:
    """Returns three significant digits, or a word."""
    if value is None:
        return NOT_MEASURED
    return markup(value) if isinstance(value, str) else f"{value:.3g}"


def _attack(name: str, of: Mapping[str, Any]) -> str:
    """Returns an attack's name, with a mark for few texts, and its answers if some are missing."""
    text = markup(name) + (" *" if of["warning"] else "")
    if _answers(of) == of["rows"]:
        return text
    return f"{text} [yellow]{_answers(of)} of {of['rows']}[/]"


def _answers(of: Mapping[str, Any]) -> int:
    answers: int = of["status"].get(Status.RECOVERED, 0)
    return answers


def _mean(value: Mapping[str, float] | None, scale: float = 1) -> str:
    return number(None if value is None else scale * value["mean"])
