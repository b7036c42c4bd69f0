"""The command line: `fedleak run | sweep | attack | score | list`."""

import itertools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

# Nothing that is measured here is anyone else's business, and the progress bars are ours.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Table

from fedleak.errors import ConfigError, FedleakError

QUICKSTART = [
    Path(__file__).parents[1] / "experiments" / f"quickstart-{name}.toml"
    for name in ("bert", "gpt2")
]

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
console = Console()

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; the value is TOML."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Move earlier results of this name aside.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


@app.command()
def run(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Experiment files; none: the quickstart."),
    ] = None,
    changes: Set = None,
    fresh: Fresh = False,
) -> None:
    """Train with Flower clients, capture what the server receives, attack it and score it.

    Results go to runs/NAME. The same command again finishes what is left.
    """
    from fedleak import pipeline, report
    from fedleak.config import load
    from fedleak.federation import run_folder

    with mended():
        experiments = [load(path, changes or ()) for path in files or QUICKSTART]
        runs = [pipeline.prepare(each, run_folder(each.name), fresh=fresh) for each in experiments]
        for experiment, at in zip(experiments, runs, strict=True):
            with progress() as show:
                scored = pipeline.carry_out(at, experiment, show)
            report.print_run(at, scored, console)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="An experiment file with a [sweep].")],
    changes: Set = None,
    fresh: Fresh = False,
) -> None:
    """Run an experiment for every combination of the values below its [sweep].

    Each is a run in runs/NAME. sweep.json and sweep.svg beside them compare them. The same
    command again finishes what is left.
    """
    from fedleak import figures
    from fedleak import sweep as sweeps

    with mended():
        grid = sweeps.load(file, changes or ())
        plans = sweeps.prepare(grid, fresh=fresh)
        numbers = itertools.count(len(grid.cells) - len(plans) + 1)

        @contextmanager
        def watch(cell: str) -> Iterator[Callable[..., None]]:
            console.print(f"{next(numbers)} of {len(grid.cells)}: {escape(cell)}")
            with progress() as show:
                yield show

        with grid.lock():
            failures = sweeps.carry_out(grid, plans, watch)
            collected = sweeps.collect(grid)
            figures.draw(collected, grid.path / "sweep.svg")
        console.print(sweeps.table(collected))
        console.print(f"results: {grid.path}")
        if failures:
            reasons = "; ".join(f"cell {cell!r}: {reason}" for cell, reason in failures.items())
            raise FedleakError(
                f"{len(failures)} of {len(grid.cells)} cells failed ({reasons}): the same command "
                "tries them again"
            )


@app.command()
def attack(
    path: RunPath,
    changes: Set = None,
    retry: Annotated[bool, typer.Option("--retry", help="Try failed attacks again.")] = False,
) -> None:
    """Attack the captures of a finished or interrupted run, also with other attacks.

    For example: --set 'attack=[{kind="dlg", name="dlg-long", steps=2000}]'. Only [attack],
    [threat] and [workers] can be changed: the captures are what they are.
    """
    from fedleak import audit, pipeline, report
    from fedleak.config import load
    from fedleak.store import Run

    with mended():
        at = Run(path)
        at.info()  # refuses a folder that is no run
        for change in changes or ():
            if change.split(".")[0].split("=")[0].strip() not in ("attack", "threat", "workers"):
                raise ConfigError(
                    f"--set {change!r}: only attack, threat and workers can change here"
                )
        experiment = load(path / "run.json", changes or ())
        pipeline.check_attacks(experiment, at.info()["num_labels"])
        with at.lock():
            if retry:
                pipeline.drop_failures(at)
            with progress() as show:
                pipeline.attack_captures(at, experiment, no_more=lambda: True, report=show)
            scored = audit.score_run(at)
        report.print_run(at, scored, console)


@app.command()
def score(path: RunPath) -> None:
    """Score the answers of a run again, and rebuild leakage.jsonl and summary.json."""
    from fedleak import audit, report
    from fedleak.store import Run

    with mended():
        at = Run(path)
        at.info()  # refuses a folder that is no run
        with at.lock():
            scored = audit.score_run(at)
        report.print_run(at, scored, console)


@app.command("list")
def list_() -> None:
    """Name the attacks, defenses, models and data sets there are."""
    from fedleak import attacks, data, defenses, models
    from fedleak.models import builtin

    def first_line(thing: object) -> str:
        return (thing.__doc__ or "").strip().splitlines()[0]

    kinds = {
        "attacks": {kind: first_line(cls) for kind, cls in attacks.kinds().items()},
        "defenses": {kind: first_line(cls) for kind, cls in defenses.kinds().items()},
        "models": {f"builtin/{name}": about for name, about in builtin.BUILTIN.items()}
        | {"HUB ID or FOLDER": f"any model of the families {', '.join(sorted(models.families()))}"},
        "data": {f"builtin/{name}": about for name, about in data.BUILTIN.items()}
        | {name: known.about for name, known in data.HUB.items()}
        | {"HUB ID or FILE": "any hub data set; a csv, tsv, jsonl or parquet file"},
    }
    table = Table(show_header=False, box=None, pad_edge=False)
    for heading, lines in kinds.items():
        table.add_row(f"[bold]{heading}[/]")
        for name, about in sorted(lines.items()):
            table.add_row(f"  {name}", about)
    console.print(table)


@contextmanager
def mended() -> Iterator[None]:
    """Prints a mistake as one line; status 2 for a wrong experiment, 1 for a failed run."""
    try:
        yield
    except ConfigError as error:
        print(f"fedleak: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(2) from error
    except FedleakError as error:
        print(f"fedleak: {error}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        print("fedleak: stopped; the same command again finishes the rest", file=sys.stderr)  # noqa: T201
        raise typer.Exit(130) from error


@contextmanager
def progress() -> Iterator[Callable[..., None]]:
    """Shows two bars, for training and for attacks, and yields what moves them."""
    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("updates" if console.is_terminal else ""),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console) as bars:
        training, attacks = (
            bars.add_task("training", total=None),
            bars.add_task("attacks", total=None),
        )

        def show(at: object) -> None:
            from fedleak.pipeline import Progress

            assert isinstance(at, Progress)
            bars.update(training, completed=at.captures, total=at.captures_expected)
            bars.update(attacks, completed=at.answers, total=at.answers_expected)

        yield show
