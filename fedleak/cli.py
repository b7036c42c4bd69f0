"""The command line: `fedleak run | sweep | attack | score | check-defense | train-prior | list`."""

import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

# Nothing that is measured here is anyone else's business, and the progress bars are ours.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import typer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text

from fedleak.errors import ConfigError, FedleakError
from fedleak.sanitise import markup, printable

if TYPE_CHECKING:
    from fedleak.pipeline import UnderWay

QUICKSTART = [
    Path(__file__).parents[1] / "experiments" / f"quickstart-{name}.toml"
    for name in ("llama", "gpt2")
]

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
console = Console(emoji=False)  # a text has what it has

TURN_SECONDS = 3
"""How long one client's text is shown, of several that are attacked together."""

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; the value is TOML."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Move earlier results of this name aside.")]
Texts = Annotated[bool, typer.Option("--texts", help="Print private texts to a pipe or file, too.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


@app.command()
def run(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Experiment files; none: the quickstart."),
    ] = None,
    changes: Set = None,
    fresh: Fresh = False,
    texts: Texts = False,
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
            report.print_run(at, scored, console, texts=texts)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="An experiment file with a sweep table.")],
    changes: Set = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Runs at once; left out: one per GPU, else one per two cores.", metavar="N"
        ),
    ] = None,
    fresh: Fresh = False,
) -> None:
    """Run an experiment for every combination of the values in its sweep table.

    Each is a run in runs/NAME. sweep.json, sweep.svg and tradeoff.svg beside them compare them.
    The same command again finishes what is left.
    """
    from fedleak import figures
    from fedleak import sweep as sweeps

    with mended():
        grid = sweeps.load(file, changes or ())
        plans = sweeps.prepare(grid, fresh=fresh)
        total, at_once = len(grid.cells), sweeps.jobs(plans, jobs)
        numbers = dict(zip(plans, itertools.count(total - len(plans) + 1), strict=False))

        def tell(cell: str, what: str) -> None:
            console.print(f"{numbers[cell]} of {total} {what}: {markup(cell)}")

        @contextmanager
        def watch(cell: str) -> Iterator[Callable[..., None]]:
            console.print(f"{numbers[cell]} of {total}: {markup(cell)}")
            with progress() as show:
                yield show

        with grid.lock():
            if at_once == 1:
                failures = sweeps.carry_out(grid, plans, watch)
            else:
                failures = sweeps.carry_out_at_once(grid, plans, at_once, tell)
            collected = sweeps.collect(grid)
            figures.draw(collected, grid.path / "sweep.svg")
            figures.draw_tradeoff(collected, grid.path / "tradeoff.svg")
        console.print(sweeps.table(collected))
        console.print(f"results: {markup(grid.path)}")
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
    texts: Texts = False,
) -> None:
    """Attack the captures of a finished or interrupted run, also with other attacks.

    For example: --set 'attack=[{kind="dlg", name="dlg-long", steps=2000}]'.
    Only attacks, threat and workers can be changed: captures are what they are.
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
        report.print_run(at, scored, console, texts=texts)


@app.command()
def score(path: RunPath, texts: Texts = False) -> None:
    """Score the answers of a run again, and rebuild leakage.jsonl and summary.json."""
    from fedleak import audit, report
    from fedleak.store import Run

    with mended():
        at = Run(path)
        at.info()  # refuses a folder that is no run
        with at.lock():
            scored = audit.score_run(at)
        report.print_run(at, scored, console, texts=texts)


@app.command("check-defense")
def check_defense(
    file: Annotated[Path, typer.Argument(help="An experiment file.")], changes: Set = None
) -> None:
    """Test whether each defense of an experiment does what it says, and print the figures.

    Nothing is trained and no private text is used. A run checks its defenses by itself, too.
    """
    from fedleak.check import check
    from fedleak.config import load

    with mended():
        experiment = load(file, changes or ())
        if not experiment.defense:
            raise ConfigError(f"{str(file)!r} has no [[defense]]: there is nothing to check")
        findings = check(experiment)
        for defense, of_defense in itertools.groupby(findings, lambda one: one.defense):
            console.print(f"[bold]{markup(defense)}[/]")
            for one in of_defense:
                mark = "[green]holds[/]" if one.holds else "[red]FAILS[/]"
                console.print(f"  {mark}  {markup(one.claim)}: [dim]{markup(one.found)}[/]")
        broken = {one.defense for one in findings if not one.holds}
        if broken:
            raise FedleakError(f"{', '.join(sorted(broken))}: does not do what it says")


@app.command("train-prior")
def train_prior(
    text: Annotated[Path, typer.Option(help="A text file; a line is a paragraph.")],
    tokenizer: Annotated[
        str, typer.Option(metavar="MODEL", help="The model whose vocabulary the prior gets.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to make.")] = Path("prior"),
    layers: Annotated[int, typer.Option(help="Transformer blocks.")] = 4,
    width: Annotated[int, typer.Option(help="Hidden size.")] = 256,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 4,
    epochs: Annotated[int, typer.Option(help="Passes over the text.")] = 1,
    steps: Annotated[
        int | None, typer.Option(help="Batches to train on, in place of --epochs.")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sentences in a batch.")] = 32,
    learning_rate: Annotated[float, typer.Option(help="The highest.")] = 1e-3,
    max_length: Annotated[int, typer.Option(help="Tokens; longer sentences are cut.")] = 64,
    seed: Annotated[int, typer.Option(help="Decides all that is random.")] = 0,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda:0; left out: a GPU if there is one.")
    ] = None,
) -> None:
    """Train a small GPT-2 on a text, as a language-model prior for attacks."""
    from fedleak.models import prior_training

    with mended():
        try:
            recipe = prior_training.Recipe(
                layers, width, heads, epochs, steps, batch_size, learning_rate, max_length, seed
            )
            on = prior_training.device(device)
            with prior_training.new_folder(out) as folder:
                corpus = prior_training.read(text, tokenizer, recipe)
                with prior_progress() as show:
                    trained = prior_training.train(corpus, recipe, on, show)
                prior_training.save(trained.prior, folder)
        except KeyboardInterrupt as error:
            print("fedleak: stopped; nothing was kept", file=sys.stderr)  # noqa: T201
            raise typer.Exit(130) from error
    console.print(
        f"{trained.nll:.2f} nats per token on {len(corpus.held_out):,} of "
        f"{len(corpus.training) + len(corpus.held_out):,} sentences, which were held back"
    )
    console.print(f"prior: {markup(out)}", soft_wrap=True)


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
        print(f"fedleak: {printable(str(error))}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(2) from error
    except FedleakError as error:
        print(f"fedleak: {printable(str(error))}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        print("fedleak: stopped; the same command again finishes the rest", file=sys.stderr)  # noqa: T201
        raise typer.Exit(130) from error


class Bars(RichProgress):
    """Bars with lines below them."""

    lines: Sequence[Text] = ()

    def get_renderables(self) -> Iterator[RenderableType]:
        """Returns what is shown."""
        yield from super().get_renderables()
        yield from self.lines


def line(doing: "UnderWay", now: float) -> Text:
    """Returns what a worker is doing, in one line; of several clients, one at a time.

    A `Text`, so that no markup in what was read is interpreted.
    """
    if doing.progress:
        turns = sorted(doing.progress.items())
        client, at = turns[int(now / TURN_SECONDS) % len(turns)]
        said = f"client {client}: {at.step}/{at.steps}, loss {at.loss:.3g}, {at.text}"
    else:
        word = "client" if len(doing.clients) == 1 else "clients"
        said = f"{word} {', '.join(map(str, doing.clients))}"
    shown = printable(f"{doing.attack:>9} round {doing.round}, {said}")
    return Text(shown, style="dim", no_wrap=True, overflow="ellipsis")


@contextmanager
def progress() -> Iterator[Callable[..., None]]:
    """Shows two bars, for training and for attacks, and yields what moves them.

    On a terminal there is a line for each busy worker below.
    """
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
            if console.file.isatty():  # what is read is private: never for a log
                bars.lines = [line(doing, time.monotonic()) for doing in at.under_way]

        try:
            yield show
        finally:
            bars.lines = ()


@contextmanager
def prior_progress() -> Iterator[Callable[..., None]]:
    """Shows a bar for the training of a prior, and yields what moves it."""
    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, {task.fields[loss]:.2f} nats per token"),
        TimeElapsedColumn(),
    )
    with RichProgress(*columns, console=console) as bars:
        training = bars.add_task("training", total=None, loss=math.nan)

        def show(at: object) -> None:
            from fedleak.models.prior_training import Progress

            assert isinstance(at, Progress)
            bars.update(training, completed=at.step, total=at.steps, loss=at.loss)

        yield show
