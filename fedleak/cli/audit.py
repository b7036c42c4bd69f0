"""The command that goes from an experiment, a tap or a run to a decision."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedleak.cli.completion import experiment_files
from fedleak.cli.display import console, progress, remark
from fedleak.cli.flower import import_tapped
from fedleak.cli.mistakes import end
from fedleak.cli.options import AllowCommands, Fresh, Set
from fedleak.cli.questions import ask
from fedleak.cli.results import GATE_CLOSED
from fedleak.cli.runs import refuse_stored_programs
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.sanitise import markup, printable

if TYPE_CHECKING:
    from fedleak.config.experiment import Experiment
    from fedleak.running.audit.begin import Opened
    from fedleak.running.pipeline import Engine
    from fedleak.running.workers.process import Worker
    from fedleak.store.run import Run


def audit(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", autocompletion=experiment_files, hidden=True)
    ] = None,
    minutes: Annotated[
        float, typer.Option(min=1, help="That all of it takes at most: 10 or 60, for example.")
    ] = 10,
    changes: Set = None,
    fresh: Fresh = False,
    allow_commands: AllowCommands = False,
    defend: Annotated[
        bool,
        typer.Option(
            "--defend",
            help="Half of the time is for the search for a defense that keeps within [gate].",
        ),
    ] = False,
) -> None:
    """Find out what a setting leaks, with a plan that fits into the time, on one page.

    FILE is an experiment file, the folder of a tap, or a run directory. Without one, or with a
    file of texts (csv, tsv, jsonl or parquet), a few questions in a terminal make an experiment
    file.

    The plan is printed first: attacks on a first and a later round, membership, canaries where
    there is noise, undefended copies as a control, and what does not fit. The page says what leaks,
    what is guaranteed, what the model is worth, what was not seen and what to do next. It is
    report.html and audit.json in the run directory, too.

    The exit status is 3 if a limit of [gate] is broken. The same command again goes on with an
    audit that was stopped.
    """
    from fedleak.audit.gaps import refuse_gaps
    from fedleak.audit.gate.limits import LEAKS
    from fedleak.config.experiment import Experiment
    from fedleak.config.federation.lookup import stored
    from fedleak.data.files import TableFile
    from fedleak.report.tables.audit import plan_table
    from fedleak.report.terminal.audit import print_audit
    from fedleak.report.terminal.table import print_table
    from fedleak.running.reports import NAME
    from fedleak.running.workers.hiring import hire
    from fedleak.store.audits import AUDIT

    if file is None or TableFile(path=file).known:
        if not sys.stdin.isatty():
            given = "FILE is missing" if file is None else f"{str(file)!r} is no experiment file"
            raise ConfigError(f"{given}: questions are asked in a terminal only")
        file, minutes = ask(minutes, file)
    source, left_out = _source(file, changes or (), fresh=fresh, allow_commands=allow_commands)
    console.print(f"an audit of at most {minutes:g} min")
    from fedleak.flower.engines import train  # takes seconds, so after what may be refused
    from fedleak.running.audit.begin import open_experiment, open_run, workers_for
    from fedleak.running.audit.defenses import refuse_without_limits
    from fedleak.running.audit.plan import Time

    experiment = source if isinstance(source, Experiment) else stored(source)
    time = Time(minutes, share=0.5 if defend else 1.0)
    if defend:
        refuse_without_limits(experiment)
    with hire(workers_for(experiment)) as on:
        with progress(console) as show:
            if isinstance(source, Experiment):
                opened = open_experiment(source, time, train, on, show, tell, fresh=fresh)
            else:
                opened = open_run(source, time, on, show, tell)
        remark([*opened.run.info().get("remarks", ()), *left_out])
        print_table(console, plan_table(opened.audit))
        with progress(console) as show:
            scored = opened.carry_out(train, show, on)
        finished, verdict = opened.finish(scored)
        print_audit(finished, verdict, console)
        console.print(f"page: {markup(opened.run.path / NAME)}", soft_wrap=True)
        console.print(f"json: {markup(opened.run.path / AUDIT.name)}", soft_wrap=True)
        if defend and any(
            check.outcome == "exceeded" and check.name in LEAKS for check in finished.checks
        ):
            _defend(opened, train, on)
        elif defend:
            tell("no limit on what is read is exceeded, so no defense is tried")
    if closed := [check.name for check in finished.checks if check.outcome != "within"]:
        end(f"the gate is closed, because of: {', '.join(closed)}", GATE_CLOSED)
    if left_out:
        raise FedleakError("; ".join(left_out))
    refuse_gaps(opened.run)


def _defend(opened: "Opened", train: "Engine", on: "Sequence[Worker]") -> None:
    """Tries defenses on the setting of an audit, and prints the cheapest within its limits."""
    from fedleak.report.tables.advice import advice_table
    from fedleak.report.terminal.table import print_table
    from fedleak.running.audit.search import ENDING, advise
    from fedleak.running.reports import report_run

    @contextmanager
    def watch(name: str) -> Iterator[Callable[..., None]]:
        tell(f"trying: {name}")
        with progress(console) as show:
            yield show

    advice = advise(opened, train, on, watch, tell)
    print_table(console, advice_table(advice))
    for why in dict.fromkeys(tried.why for tried in advice.tried if tried.why):
        names = ", ".join(tried.name for tried in advice.tried if tried.why == why)
        tell(f"{names}: {printable(why)}")
    tell(f"their runs: {opened.run.path}{ENDING}")
    report_run(opened.run)  # which shows it, too


def tell(line: str) -> None:
    """Prints a line about what begins."""
    console.print(line, markup=False, highlight=False)


def _source(
    path: Path, changes: Sequence[str], *, fresh: bool, allow_commands: bool
) -> "tuple[Experiment | Run, Sequence[str]]":
    """Returns what is audited: an experiment, or a run; and what an import left out.

    Raises:
        ConfigError: It is neither, or a run of somebody else that names programs.
    """
    from fedleak.config.loading import load
    from fedleak.running.own_update.update_files import READERS
    from fedleak.store.run import Run
    from fedleak.tap.folder import MESSAGES

    if path.suffix in READERS:
        raise ConfigError(
            f"{str(path)!r} is one update and no experiment: `fedleak attack-update` reads it"
        )
    if not path.is_dir():
        return load(path, changes), ()
    if changes or fresh:
        raise ConfigError("--set and --fresh are for experiment files, and this is a folder")
    run, left_out = Run(path), list[str]()
    if (path / MESSAGES.name).exists():
        imported = import_tapped(path, None, None, allow_commands=allow_commands)
        run, left_out = imported.run, list(imported.left_out)
    run.info()  # refuses a folder that is no run
    if not allow_commands:
        refuse_stored_programs(run.path, load(run.path / "run.json"), ())
    return run, left_out
