"""Runs a suite: makes the updates of each setting once, then attacks them.

    runs/bench-<suite>-<version>/
      <setting>/    an ordinary run, trained without attacks; answers are added later
      bench.json    the result

So another attack costs only its own time: the updates are there. The work that is left is what the
folder lacks.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fedleak import attacks
from fedleak.attacks.reconstruction import Status
from fedleak.audit.estimates import Largest, largest_client
from fedleak.audit.summary import attack_summary
from fedleak.audit.worst_case import worst_case
from fedleak.config.checks import attack_settings
from fedleak.config.components import NamedAttack, build_attack
from fedleak.config.federation.lookup import captures_of
from fedleak.config.federation.workload import divide, outline, read_data
from fedleak.running import preparation
from fedleak.running import sweep as sweeps
from fedleak.running.bench import results
from fedleak.running.bench.results import Result
from fedleak.running.bench.suites import Setting, Suite
from fedleak.running.preparation import Plan
from fedleak.store.records import LEAKAGE, LeakageRow, text_counts
from fedleak.store.run import Run
from fedleak.store.summaries import SweepSummary
from fedleak.util.errors import ConfigError, unknown
from fedleak.util.nested import digest
from fedleak.util.plugins import discover
from fedleak.util.versions import versions

NEEDS_ASSETS = "needs models and data that are not part of fedleak: name their folder by --assets"
NOT_CHOSEN = "was not asked for (--setting)"

MOST_REASONS, LONGEST_REASON = 3, 200
"""Reasons that a cell keeps, and characters of one."""


@dataclass(frozen=True)
class Ready:
    """A setting that can be run here.

    Attributes:
        cell: Its experiment with the attacks that can work in it.
        plan: The plan of its run, whose only attacks are those that every run has.
        texts: The fingerprint of its clients' texts.
        left_out: Why other attacks cannot work, by name.
    """

    cell: sweeps.Cell
    plan: Plan
    texts: str
    left_out: Mapping[str, str]


@dataclass(frozen=True)
class Bench:
    """A suite that is to be run, with attacks.

    Attributes:
        suite: What is run.
        entries: The attacks, as results have them.
        ready: The settings that can be run here, by name.
        left_out: Why other settings cannot be run, by name.
    """

    suite: Suite
    entries: tuple[results.Entry, ...]
    ready: Mapping[str, Ready]
    left_out: Mapping[str, str]

    @property
    def sweep(self) -> sweeps.Sweep:
        """The settings that can be run here, as a sweep has them."""
        return sweeps.Sweep(
            name=f"bench-{self.suite.name}-{self.suite.version}",
            axes={"setting": [*self.ready]},
            cells=tuple(setting.cell for setting in self.ready.values()),
        )

    @property
    def plans(self) -> Mapping[str, Plan]:
        """The plans of the settings, by name."""
        return {name: setting.plan for name, setting in self.ready.items()}


def prepare(
    suite: Suite,
    tables: Sequence[Mapping[str, Any]],
    assets: Path | None = None,
    *,
    chosen: Collection[str] = (),
    fresh: bool = False,
) -> Bench:
    """Checks all that can be checked, before anything is run.

    Args:
        suite: What to run.
        tables: The attacks, as in an experiment file.
        assets: A folder of models and data.
        chosen: Names of the settings to run; none: all.
        fresh: Move earlier runs of the suite out of the way.

    Raises:
        ConfigError: An attack cannot be run anywhere, or the suite is not right.
    """
    listed = {table.get("kind") for table in tables}
    tables = [*({"kind": kind} for kind in attacks.always_on() if kind not in listed), *tables]
    named = [build_attack(i, dict(table)) for i, table in enumerate(tables)]
    for named_attack in named:
        named_attack.check_equipment()
    ready: dict[str, Ready] = {}
    left_out: dict[str, str] = {}
    names = [setting.name for setting in suite.settings]
    if strange := [name for name in chosen if name not in names]:
        raise ConfigError(f"--setting: {unknown('setting', strange[0], names)}")
    for setting in suite.settings:
        if chosen and setting.name not in chosen:
            left_out[setting.name] = NOT_CHOSEN
            continue
        if setting.needs_assets and assets is None:
            left_out[setting.name] = NEEDS_ASSETS
            continue
        experiment = setting.with_attacks([], assets)
        try:
            plan = preparation.plan(experiment)
        except ConfigError as error:  # no such model or data here
            left_out[setting.name] = str(error)
            continue
        ready[setting.name] = _ready(setting, plan, named, tables, assets)
    entries = tuple(_entry(*pair) for pair in zip(named, tables, strict=True))
    bench = Bench(suite, entries, ready, left_out)
    if fresh:
        preparation.move_aside(bench.sweep.path)
    for ready_setting in ready.values():
        if (run := bench.sweep.run(ready_setting.cell)).exists():
            preparation.refuse_another(run, ready_setting.plan.experiment)
    return bench


def collect(bench: Bench, failures: Mapping[str, str]) -> Result:
    """Writes bench.json from the runs' own files, and returns its content."""
    settings = tuple(_result(bench, setting, failures) for setting in bench.suite.settings)
    missing = [
        f"setting {name!r} was left out: {reason}"
        for name, reason in bench.left_out.items()
        if reason not in (NEEDS_ASSETS, NOT_CHOSEN)
    ]
    missing += [f"setting {name!r}: {why}" for name, why in failures.items()]
    for setting in settings:
        for cell in setting.cells:
            failed = 0 if cell.figures is None else cell.figures.status.get(Status.FAILED, 0)
            if failed:
                why = next(iter(cell.reasons), "")
                missing.append(
                    f"{cell.attack} failed on {failed} of {setting.updates} updates of "
                    f"{setting.name!r} ({why}): --retry tries them again"
                )
            elif cell.figures is not None and cell.figures.rows < setting.updates:
                missing.append(f"{cell.attack} has not answered all of {setting.name!r}")
    runs = [bench.sweep.run(cell) for cell in bench.sweep.cells]
    rows = [row for run in runs if run.exists() for row in run.salvage(LEAKAGE)]
    devices = {row.device for row in rows if row.device is not None}
    result = Result(
        suite=bench.suite.name,
        version=bench.suite.version,
        fingerprint=bench.suite.fingerprint,
        versions=versions(),
        machine=results.this_machine(sorted(devices)),
        attacks=bench.entries,
        settings=settings,
        missing=tuple(missing),
    )
    Run(bench.sweep.path).write(results.RESULT, result)
    return result


def asked(bench: Bench) -> SweepSummary:
    """Returns the sweep's figures of the requested attacks only; others may have run, too."""
    collected, names = sweeps.collect(bench.sweep), {entry.name for entry in bench.entries}
    cells = []
    for cell in collected.cells:
        requested = {name: figures for name, figures in cell.attacks.items() if name in names}
        cells.append(cell.model_copy(update={"attacks": requested}))
    return collected.model_copy(update={"cells": tuple(cells)})


def obstacles(result: Result) -> dict[tuple[str, str], list[str]]:
    """Returns, by attack and reason, the settings in which an attack cannot work."""
    blocked_settings: dict[tuple[str, str], list[str]] = defaultdict(list)
    for setting in result.settings:
        for cell in setting.cells:
            if cell.left_out is not None:
                blocked_settings[cell.attack, cell.left_out].append(setting.name)
    return blocked_settings


def _ready(
    setting: Setting,
    plan: Plan,
    named: Sequence[NamedAttack],
    tables: Sequence[Mapping[str, Any]],
    assets: Path | None,
) -> Ready:
    """Finds out which attacks can work in a setting."""
    experiment = plan.experiment
    model = outline(experiment, plan.num_labels)
    seen = attack_settings(experiment, model)
    left_out: dict[str, str] = {}
    work = []
    for named_attack, table in zip(named, tables, strict=True):
        obstacles = [named_attack.attack.obstacle(attack_setting) for attack_setting in seen]
        # If it works on some clients only, the others' updates are inadmissible.
        if all(obstacles):
            left_out[named_attack.name] = str(obstacles[0])
        else:
            work.append(table)
    parts = divide(experiment, read_data(experiment), model)
    texts = digest([parts.sequences, parts.labels, parts.parts])[:16]
    cell = sweeps.Cell(setting.name, {"setting": setting.name}, setting.with_attacks(work, assets))
    return Ready(cell, plan, texts, left_out)


def _result(bench: Bench, setting: Setting, failures: Mapping[str, str]) -> results.SettingResult:
    """Returns the results of a setting, as far as there are any."""
    of_setting = partial(
        results.SettingResult,
        name=setting.name,
        about=setting.about,
        fingerprint=setting.fingerprint,
    )
    ready = None if setting.name in failures else bench.ready.get(setting.name)
    if ready is None or not (run := bench.sweep.run(ready.cell)).exists():
        left_out = {**bench.left_out, **failures}.get(setting.name, "not run yet")
        return of_setting(left_out=left_out)
    experiment = ready.cell.experiment
    names = [named_attack.name for named_attack in experiment.attacks]
    rows = [row for row in run.salvage(LEAKAGE) if row.attack in names]
    largest = largest_client(run, experiment)
    best = worst_case(rows, {}, largest)
    together = results.Together.model_validate(best, from_attributes=True) if best else None
    return of_setting(
        model=run.info()["model_fingerprint"],
        texts=ready.texts,
        updates=len(captures_of(run, experiment)),
        sequences=sum(text_counts(rows).values()),
        cells=tuple(_cell(entry.name, ready, rows, largest) for entry in bench.entries),
        together=together,
    )


def _cell(attack: str, ready: Ready, rows: Sequence[LeakageRow], largest: Largest) -> results.Cell:
    """Returns what one attack read in a setting, or why it cannot work there."""
    if attack in ready.left_out:
        return results.Cell(attack=attack, left_out=ready.left_out[attack])
    own = [row for row in rows if row.attack == attack]
    why = Counter(row.reason[:LONGEST_REASON] for row in own if row.status != Status.RECOVERED)
    return results.Cell(
        attack=attack,
        figures=attack_summary(own, largest),
        reasons=dict(why.most_common(MOST_REASONS)),
    )


def _entry(named_attack: NamedAttack, table: Mapping[str, Any]) -> results.Entry:
    kind = named_attack.attack.kind
    settings = {key: value for key, value in table.items() if key != "name"}
    return results.Entry(
        name=named_attack.name,
        settings=settings,
        origin=discover(attacks).origins[kind],
        outside=bool(attacks.unchecked([kind])),
    )
