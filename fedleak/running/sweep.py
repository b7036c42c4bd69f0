"""A grid of runs, from one experiment file whose `[sweep]` maps dotted keys to lists of values.

    runs/<name>/
      <cell>/       a run directory per combination, such as federation.batch_size=4,seed=1
      sweep.json    the cells' values and the figures of their summary.json
      sweep.svg     the same, drawn
      tradeoff.svg  leakage against utility and epsilon
      frontier.svg  leakage, utility and epsilon along the strengths of each defense, if the sweep
                    has families of them (`fedleak.config.families`)

The cells are ordinary runs, and the work that is left of a sweep is what they lack. Several may run
at once, each in a process of its own.
"""

import copy
import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedleak.config import families, loading
from fedleak.config.experiment import Experiment
from fedleak.config.families import FAMILY, Setting
from fedleak.config.federation.lookup import run_folder
from fedleak.config.tables import WorkersTable
from fedleak.report.words import in_words
from fedleak.running import pipeline, preparation
from fedleak.running.dispatch.dispatcher import Crew
from fedleak.running.dispatch.progress import RunProgress
from fedleak.running.pipeline import Engine
from fedleak.running.preparation import Plan
from fedleak.running.workers.hiring import hire
from fedleak.running.workers.process import Worker, devices
from fedleak.store.run import Run
from fedleak.store.shards import Shard, locked
from fedleak.store.summaries import SUMMARY, SWEEP, CellSummary, SweepSummary
from fedleak.util import processes
from fedleak.util.errors import ConfigError, FedleakError, about
from fedleak.util.nested import digest, flat

_log = logging.getLogger(__name__)

LONGEST_WORD, LONGEST_NAME = 32, 200
"""Characters of one value, and of a cell's name: file systems take 255 bytes."""

DESIGNS = ("all", "one-at-a-time")
"""Which cells there are: of all combinations, or of those that differ from the first in one key."""

MOST_CELLS = 2_000
"""Runs of a sweep: at half a minute each they take a day, and all are planned before one starts."""


@dataclass(frozen=True)
class Cell:
    """One run of a sweep.

    Attributes:
        name: The name of its folder.
        values: Its value of each swept key, as in the file.
        experiment: The file's experiment with these values. It may have more attacks than the plan
            of its run; these further attacks start once the plan is done.
    """

    name: str
    values: Mapping[str, Any]
    experiment: Experiment


@dataclass(frozen=True)
class Sweep:
    """The swept keys with their values, and the cells; the last key changes first.

    Attributes:
        name: The name of its folder.
        axes: The values of each key, as in the file.
        cells: A cell for each combination of values that the design has.
        units: The unit of the strengths of a family of defenses, by its name.
        shard: The shard that has these cells; None: these are all cells.
    """

    name: str
    axes: Mapping[str, Sequence[Any]]
    cells: tuple[Cell, ...]
    units: Mapping[str, str] = field(default_factory=dict)
    shard: Shard | None = None

    @property
    def path(self) -> Path:
        """The folder of the sweep."""
        return run_folder(self.name)

    def lock(self) -> AbstractContextManager[None]:
        """Holds the folder, so that one process at a time runs the sweep, or each shard."""
        return Run(self.path).lock() if self.shard is None else locked(Run(self.path), self.shard)

    def part(self, shard: Shard) -> "Sweep":
        """Returns the sweep with the cells of one shard."""
        return replace(self, cells=tuple(shard.part(self.cells)), shard=shard)

    def run(self, cell: Cell) -> Run:
        """Returns the run directory of a cell."""
        return Run(self.path).inside(cell.name)


def load(path: Path, overrides: Sequence[str] = ()) -> Sweep:
    """Reads an experiment file with a `[sweep]`.

    Args:
        path: A TOML file.
        overrides: `dotted.key=value`, for every cell.

    Raises:
        ConfigError: Something about the file is not right; the message names the cell.
    """
    table = loading.read_tables(path, overrides)
    if "sweep" not in table or path.suffix == loading.RUN_JSON:
        raise ConfigError(
            f"experiment file {str(path)!r} has no [sweep]: use `fedleak run {path}`, or add one, "
            'such as "federation.batch_size" = [1, 2, 4]'
        )
    grid = table.pop("sweep")
    if not isinstance(grid, dict) or not grid.keys() - {"design"}:
        raise ConfigError(
            f"sweep = {grid!r}: list the values of a key, such as "
            '"federation.batch_size" = [1, 2, 4] below [sweep]'
        )
    design = grid.pop("design", "all")
    if design not in DESIGNS:
        raise ConfigError(f"sweep.design = {design!r}: choose from {', '.join(DESIGNS)}")
    defense_families = families.checked_families(grid.pop(FAMILY)) if FAMILY in grid else []
    settings = families.settings(defense_families)
    axes = dict(flat(grid))
    for key, values in axes.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"sweep.{key} = {values!r}: list the values to run, at least one")
    if "name" in axes:
        raise ConfigError("sweep.name: the name is that of the whole sweep: sweep other keys")
    if defense_families:
        axes[FAMILY] = [setting.value for setting in settings]
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key in axes:
            raise ConfigError(f"--set {override!r}: {key} is swept: set sweep.{key}, to a list")
    count = sum(len(values) - 1 for values in axes.values()) + 1
    count = math.prod(map(len, axes.values())) if design == "all" else count
    if count > MOST_CELLS:
        raise ConfigError(
            f"sweep: {' x '.join(str(len(values)) for values in axes.values())} values are "
            f"{count:,} cells, and a sweep has at most {MOST_CELLS:,}: list fewer values"
        )
    cells: dict[str, Cell] = {}
    for values in _combinations(axes, design):
        name = cell_name(values)
        if name in cells:
            raise ConfigError(f"sweep: two cells are called {name!r}: list each value once")
        with about(f"cell {name!r}"):
            tables = loading.expanded(_filled(table, values, settings))
            cells[name] = Cell(name, values, loading.parse(tables))
    return Sweep(
        name=next(iter(cells.values())).experiment.name,
        axes=axes,
        cells=tuple(cells.values()),
        units={family.name: family.unit for family in defense_families if family.unit is not None},
    )


def prepare(sweep: Sweep, *, fresh: bool = False) -> dict[str, Plan]:
    """Checks every cell before anything is written, and returns those that are not finished.

    Args:
        sweep: What to run.
        fresh: Move an earlier sweep of this name out of the way.

    Raises:
        ConfigError: A cell cannot work, or differs from the one that ran here.
    """
    if fresh and sweep.shard is not None:
        raise ConfigError(
            f"--fresh with --shard {sweep.shard} would move what other shards do: move the folder "
            f"{str(sweep.path)!r} yourself, before the first starts"
        )
    if not fresh and Run(sweep.path).exists():
        raise ConfigError(
            f"{str(sweep.path)!r} holds a single run: give the sweep another name, or --fresh to "
            "move the run aside"
        )
    plans = {}
    for cell in sweep.cells:
        with about(f"cell {cell.name!r}"):
            if fresh or not pipeline.finished(sweep.run(cell), cell.experiment):
                preparation.refuse_data_on_nodes(cell.experiment)
                plans[cell.name] = preparation.plan(cell.experiment)
    if fresh:
        preparation.move_aside(sweep.path)
    return plans


def carry_out(
    sweep: Sweep,
    plans: Mapping[str, Plan],
    train: Engine,
    watch: Callable[[str], AbstractContextManager[Callable[[RunProgress], None]]],
    keep: Callable[[Mapping[str, str]], object],
    *,
    retry: bool = False,
) -> dict[str, str]:
    """Runs the cells that are planned, one after the other.

    Args:
        sweep: The sweep.
        plans: By the name of the cell.
        train: The engine.
        watch: Called with a cell's name; yields a function that is called with the run's progress.
        keep: Writes the results so far; called after each cell with the failures so far.
        retry: Try failed attacks again.

    Returns:
        Why cells failed, by name. The others are done nevertheless.
    """
    failures: dict[str, str] = {}
    with ExitStack() as hired:
        hands: Sequence[Worker] = ()
        hired_as: WorkersTable | None = None
        for cell in [cell for cell in sweep.cells if cell.name in plans]:
            plan, table = plans[cell.name], cell.experiment.workers
            try:
                if table != hired_as:  # else they go on with what they have loaded
                    hired.close()
                    hands = hired.enter_context(hire(table))
                    hired_as = table
                run = _opened(plan, sweep.run(cell).path, _alike(sweep, cell, plan))
                with watch(cell.name) as report:
                    crew = Crew(hands, report)
                    if not pipeline.finished(run, plan.experiment):
                        pipeline.carry_out(run, plan.experiment, train, crew)
                    if cell.experiment != plan.experiment:
                        pipeline.attack_again(run, cell.experiment, crew, retry=retry)
            except Exception as error:  # noqa: BLE001 - the others can still be done
                failures[cell.name] = failure(cell.name, error)
                hired_as = None  # they may still be at work for this cell
            keep(failures)
    return failures


def jobs(plans: Mapping[str, Plan], wanted: int | None = None) -> int:
    """Returns how many cells to run at once: those wanted, else one per GPU, else per two cores.

    Only GPUs that the cells may use count. A cell on the CPU trains in one process and attacks in
    another. On a Ray cluster each cell has all workers to itself.

    Raises:
        ConfigError: Several at once on a Ray cluster.
    """
    if any(plan.experiment.workers.engine == "ray" for plan in plans.values()):
        if (wanted or 1) > 1:
            raise ConfigError(
                f"--jobs {wanted}: cells that attack on a Ray cluster run one after the other, "
                "each with all of its workers: leave --jobs out"
            )
        return 1
    tables = {tuple(devices(plan.experiment.workers.devices)) for plan in plans.values()}
    gpus = {device for table in tables for device in table if device.startswith("cuda")}
    most = wanted or len(gpus) or (os.cpu_count() or 1) // 2
    return max(1, min(most, len(plans)))


def carry_out_at_once(
    sweep: Sweep,
    plans: Mapping[str, Plan],
    train: Engine,
    jobs: int,
    tell: Callable[[str, str], None],
    keep: Callable[[Mapping[str, str]], object],
) -> dict[str, str]:
    """Runs the cells that are planned, several at once.

    Args:
        sweep: The sweep.
        plans: By the name of the cell.
        train: The engine; it is pickled, so it has to be importable.
        jobs: How many at once; they divide the devices for the attacks among themselves.
        tell: Called with the name of a cell and that it has started, finished or failed.
        keep: Writes the results so far; called after each cell with the failures so far.

    Returns:
        Why cells failed, by name. The others are done nevertheless.
    """
    failures: dict[str, str] = {}

    def ended(cell: str, failure: str | None) -> None:
        if failure is not None:
            failures[cell] = failure
        keep(failures)
        tell(cell, "finished" if failure is None else "failed")

    calls = {}
    for cell in [cell for cell in sweep.cells if cell.name in plans]:
        plan, path = plans[cell.name], sweep.run(cell).path
        alike = _alike(sweep, cell, plan)
        calls[cell.name] = partial(_carry_out_alone, plan, path, alike, train, jobs)
    processes.side_by_side(calls, jobs, lambda cell: tell(cell, "started"), ended)
    return {cell: failures[cell] for cell in plans if cell in failures}


def devices_of_job(on: Sequence[str], jobs: int, place: int) -> list[str]:
    """Returns the devices of one of several jobs; jobs share a device if there are more jobs."""
    return list(on[place::jobs] or on[place % len(on) :][:1])


def collect(sweep: Sweep) -> SweepSummary:
    """Writes sweep.json from the cells' own files, and returns its content.

    A shard writes nothing, as it has only some of the cells.
    """
    collected = SweepSummary(
        name=sweep.name,
        axes={key: list(values) for key, values in sweep.axes.items()},
        units=dict(sweep.units),
        cells=tuple(_summary(cell, sweep.run(cell)) for cell in sweep.cells),
    )
    if sweep.shard is None:
        Run(sweep.path).write(SWEEP, collected)
    return collected


def refuse_gaps(collected: SweepSummary, failures: Mapping[str, str]) -> None:
    """Refuses to call a sweep complete while something is missing.

    Args:
        collected: The content of sweep.json.
        failures: Why cells failed, by name.

    Raises:
        FedleakError: Cells failed, were not run, have no score where they should have one, or have
            canaries that contradict the ledger.
    """
    cells = collected.cells
    gaps = {cell.cell: "; ".join(cell.missing) for cell in cells if cell.missing}
    alarms = {
        cell.cell: "; ".join(cell.canary.alarms)
        for cell in cells
        if cell.canary is not None and cell.canary.alarms
    }
    others = (cell for cell in cells if cell.cell not in failures)
    unfinished = {cell.cell: cell.status for cell in others if cell.status != "finished"}
    refusals = []
    for problem, affected, remedy in (
        ("failed", failures, "the same command tries them again"),
        ("are not finished", unfinished, "`fedleak sweep` with the experiment's file runs them"),
        ("are not complete", gaps, "their own commands, which are named, complete them"),
        ("contradict their ledger", alarms, "look for the mistake in their defenses"),
    ):
        if affected:
            reasons = "; ".join(f"cell {cell!r}: {reason}" for cell, reason in affected.items())
            refusals.append(
                f"{len(affected)} of {len(cells)} cells {problem} ({reasons}): {remedy}"
            )
    if refusals:
        raise FedleakError(". ".join(refusals))


def cell_name(values: Mapping[str, Any]) -> str:
    """Returns a folder name that depends on the values only, not on their place in the lists."""
    name = ",".join(f"{key}={_word(value)}" for key, value in values.items())
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}-{digest(values)[:6]}"


def _alike(sweep: Sweep, cell: Cell, plan: Plan) -> list[Run]:
    """Returns the runs of the other cells that train what a cell trains."""
    return [
        sweep.run(other)
        for other in sweep.cells
        if other.name != cell.name and preparation.trains_alike(other.experiment, plan.experiment)
    ]


def _opened(plan: Plan, path: Path, alike: Sequence[Run]) -> Run:
    """Opens the run of a cell; a new one is made from a finished run that trains alike."""
    for other in alike if not path.exists() else ():
        finished = other.exists() and other.info()["status"] == "finished"
        if finished and not other.info().get("purged"):
            return preparation.open_trained(plan, path, other)
    return preparation.open_run(plan, path)


def _carry_out_alone(
    plan: Plan, path: Path, alike: Sequence[Run], train: Engine, jobs: int, place: int
) -> str | None:
    """Runs a cell in this process, with workers of its own; returns why it failed, if it did."""
    table = plan.experiment.workers
    own = table.model_copy(update={"devices": devices_of_job(devices(table.devices), jobs, place)})
    try:
        run = _opened(plan, path, alike)
        with hire(own) as hands:
            pipeline.carry_out(run, plan.experiment, train, Crew(hands))
    except Exception as error:  # noqa: BLE001 - the others can still be done
        return failure(path.name, error)
    return None


def failure(cell: str, error: Exception) -> str:
    """Returns why a cell failed; if it is no `FedleakError`, the log has the traceback."""
    if isinstance(error, FedleakError):
        return str(error)
    _log.error("cell %s failed", cell, exc_info=error)
    return f"{type(error).__name__}: {error}"


def _combinations(axes: Mapping[str, Sequence[Any]], design: str) -> Iterator[dict[str, Any]]:
    """Yields the value of each key, for each cell."""
    if design == "all":
        for combination in itertools.product(*axes.values()):
            yield dict(zip(axes, combination, strict=True))
    else:
        base = {key: values[0] for key, values in axes.items()}
        yield base
        for key, values in axes.items():
            yield from (base | {key: value} for value in values[1:])


def _filled(
    base: Mapping[str, Any], values: Mapping[str, Any], settings: Sequence[Setting]
) -> dict[str, Any]:
    """Returns the tables of a cell."""
    tables = copy.deepcopy(dict(base))
    for key, value in values.items():
        if key == FAMILY:
            _apply_(tables, next(setting for setting in settings if setting.value == value))
        else:
            loading.set_(tables, key, copy.deepcopy(value), f"sweep.{key}")
    return tables


def _apply_(tables: dict[str, Any], setting: Setting) -> None:
    """Sets what a setting of a family changes, and leaves out the attacks that it excludes."""
    for key, value in setting.changes.items():
        loading.set_(tables, key, copy.deepcopy(value), f"sweep.{FAMILY}")
    if not setting.without:
        return
    attacks = [(table.get("name", table.get("kind")), table) for table in tables.get("attack", [])]
    names = {name for name, _ in attacks}
    if unknown := [name for name in setting.without if name not in names]:
        raise ConfigError(f"sweep.{FAMILY}: without {unknown[0]!r}, which is no attack of the file")
    tables["attack"] = [table for name, table in attacks if name not in setting.without]


def _word(value: Any) -> str:
    """Returns a value as a part of a folder name: itself, or its safe characters and a hash."""
    if value == []:
        return "none"
    text = in_words(value)
    safe = re.sub(r"[^A-Za-z0-9._+-]+", "-", text)[:LONGEST_WORD]
    if safe == text and not isinstance(value, list | dict):
        return safe
    return f"{safe.strip('-')}-{digest(value)[:6]}"


def _summary(cell: Cell, run: Run) -> CellSummary:
    """Returns what sweep.json says of a cell; no figures before it is finished."""
    status = run.info()["status"] if run.exists() else "new"
    cell_summary = CellSummary(cell=cell.name, values=dict(cell.values), status=status)
    with suppress(FedleakError):  # missing, or damaged: then the cell is run again
        summary = run.read_document(SUMMARY)
        if summary.status == "finished":
            names = CellSummary.model_fields.keys() - {"cell", "values", "status"}
            return cell_summary.model_copy(update={name: getattr(summary, name) for name in names})
    return cell_summary
