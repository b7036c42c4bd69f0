"""The command line: `fedleak run | sweep | attack | score | purge | ...`."""

import itertools
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
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

from fedleak import __version__, logs
from fedleak.errors import ConfigError, FedleakError
from fedleak.sanitise import markup, printable

if TYPE_CHECKING:
    from fedleak.dispatch.progress import RunProgress, UnderWay

QUICKSTART = [
    Path(__file__).parents[1] / "experiments" / f"quickstart-{name}.toml"
    for name in ("llama", "gpt2")
]

app = typer.Typer(
    help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
console = Console(emoji=False)  # a text has what it has
_log = logging.getLogger(__name__)

LONGEST_ERROR = 500
"""Characters of an unexpected error that are shown."""

TURN_SECONDS = 3
"""How long one client's text is shown, of several that are attacked together."""

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; the value is TOML."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Move earlier results of this name aside.")]
Texts = Annotated[bool, typer.Option("--texts", help="Print private texts to a pipe or file, too.")]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")]


def say_version(wanted: bool) -> None:
    """Prints the version and ends."""
    if wanted:
        console.print(f"fedleak {__version__}", highlight=False)
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show on stderr what log.txt keeps: tracebacks, too.")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=say_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Takes what stands before the command."""
    if debug:
        context.with_resource(logs.debugging())


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
    from fedleak import pipeline
    from fedleak.audit import scoring
    from fedleak.config.loading import load
    from fedleak.federation import run_folder
    from fedleak.preparation import prepare
    from fedleak.report import tables

    with mended():
        experiments = [load(path, changes or ()) for path in files or QUICKSTART]
        runs = [prepare(each, run_folder(each.name), fresh=fresh) for each in experiments]
        for experiment, at in zip(experiments, runs, strict=True):
            remark(at.info().get("remarks", ()))
            if (note := pipeline.disk_note(at, experiment)) is not None:
                console.print(note, markup=False, highlight=False, soft_wrap=True)
            with progress() as show:
                scored = pipeline.carry_out(at, experiment, show)
            tables.print_run(at, scored, console, texts=texts)
        scoring.refuse_gaps(*runs)


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
    from fedleak import sweep as sweeps
    from fedleak.report import figures

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

        remark(each for plan in plans.values() for each in plan.remarks)
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
        sweeps.refuse_gaps(collected, failures)


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
    from fedleak import pipeline
    from fedleak.audit import scoring
    from fedleak.config.loading import load
    from fedleak.dispatch.dispatcher import attack_captures, drop_failures
    from fedleak.federation import stored
    from fedleak.preparation import refuse_purged
    from fedleak.report import tables
    from fedleak.store.run import Run

    with mended():
        at = Run(path)
        num_labels = at.info()["num_labels"]  # refuses a folder that is no run
        refuse_purged(at)
        stored(at)  # refuses one whose experiment is not what was run
        for change in changes or ():
            if change.split(".")[0].split("=")[0].strip() not in ("attack", "threat", "workers"):
                raise ConfigError(
                    f"--set {change!r}: only attack, threat and workers can change here"
                )
        experiment = load(path / "run.json", changes or ())
        pipeline.check_attacks(experiment, num_labels)
        with at.lock():
            if retry:
                drop_failures(at)
            with progress() as show:
                attack_captures(at, experiment, no_more=lambda: True, report=show)
            scored = scoring.score_run(at, [each.name for each in experiment.attacks])
        tables.print_run(at, scored, console, texts=texts)
        scoring.refuse_gaps(at)


@app.command()
def score(path: RunPath, texts: Texts = False) -> None:
    """Score the answers of a run again, and rebuild leakage.jsonl and summary.json."""
    from fedleak.audit import scoring
    from fedleak.report import tables
    from fedleak.store.run import Run

    with mended():
        at = Run(path)
        at.info()  # refuses a folder that is no run
        with at.lock():
            scored = scoring.score_run(at)
        tables.print_run(at, scored, console, texts=texts)
        scoring.refuse_gaps(at)


@app.command()
def purge(path: RunPath) -> None:
    """Delete the private data of a finished and scored run, and keep its figures.

    That is all that a private text can be read from: the clients' batches, what attacks read, the
    held-out texts, the captured updates and the models, whose differences are updates too. The
    scores, the ledger and the summary stay; nothing can be attacked afterwards.
    """
    from fedleak import purge as purging
    from fedleak.store.run import Run

    with mended():
        at = Run(path)
        at.info()  # refuses a folder that is no run
        with at.lock():
            done = purging.purge(at)
        for what in done.deleted:
            console.print(f"deleted: {markup(what)}", soft_wrap=True)
        for what in done.kept:
            console.print(f"kept:    {markup(what)}", soft_wrap=True)


@app.command("check-defense")
def check_defense(
    file: Annotated[Path, typer.Argument(help="An experiment file.")], changes: Set = None
) -> None:
    """Test whether each defense of an experiment does what it says, and print the figures.

    Nothing is trained and no private text is used. A run checks its defenses by itself, too.
    """
    from fedleak.audit.defense_checks import check
    from fedleak.config.loading import load

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
    from fedleak.plugins import discover

    def first_line(thing: object) -> str:
        return markup((thing.__doc__ or "").strip().partition("\n")[0])

    kinds = {
        "attacks": {kind: first_line(cls) for kind, cls in attacks.kinds().items()},
        "defenses": {kind: first_line(cls) for kind, cls in defenses.kinds().items()},
        "models": {f"builtin/{name}": about for name, about in builtin.BUILTIN.items()}
        | {"HUB ID or FOLDER": f"any model of the families {', '.join(sorted(models.families()))}"},
        "data": {f"builtin/{name}": about for name, about in data.BUILTIN.items()}
        | {name: known.about for name, known in data.HUB.items()}
        | {"HUB ID or FILE": "any hub data set; a csv, tsv, jsonl or parquet file"},
    }
    found = (discover(attacks), discover(defenses), discover(models, "model_type"))
    if broken := {name: reason for each in found for name, reason in each.broken.items()}:
        kinds["cannot be used"] = {name: markup(reason) for name, reason in broken.items()}
    table = Table(show_header=False, box=None, pad_edge=False)
    for heading, lines in kinds.items():
        table.add_row(f"[bold]{heading}[/]")
        for name, about in sorted(lines.items()):
            table.add_row(f"  {name}", about)
    console.print(table)


def remark(found: Iterable[str]) -> None:
    """Prints what may not be meant, each once."""
    for each in dict.fromkeys(found):
        console.print(f"[yellow]note:[/] {markup(each)}")


@contextmanager
def mended() -> Iterator[None]:
    """Prints a mistake as one line; status 2 for a wrong experiment, 1 for a failed run."""
    try:
        with _kept_traceback():
            yield
    except ConfigError as error:
        print(f"fedleak: {printable(str(error))}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(2) from error
    except BrokenPipeError:  # nobody reads on, which is for typer
        raise
    except FedleakError as error:
        print(f"fedleak: {printable(str(error))}", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1) from error
    except KeyboardInterrupt as error:
        print("fedleak: stopped; the same command again finishes the rest", file=sys.stderr)  # noqa: T201
        raise typer.Exit(130) from error
    except (typer.Exit, typer.BadParameter):
        raise
    except Exception as error:
        where = logs.noted(error) or "no run directory was in use"
        shown = printable(f"{type(error).__name__}: {error}")[:LONGEST_ERROR]
        print(  # noqa: T201
            f"fedleak: unexpected error: {shown} ({printable(where)}; `fedleak --debug "
            "COMMAND ...` shows it)",
            file=sys.stderr,
        )
        raise typer.Exit(1) from error


@contextmanager
def _kept_traceback() -> Iterator[None]:
    """Notes the traceback of an error that no log of a run has, for `--debug`."""
    try:
        yield
    except Exception as error:
        if not logs.noted(error):
            _log.info("ended by an error", exc_info=error)
        raise


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
        said = f"client {client}: {at.step}/{at.steps} {at.phase}".rstrip()
        if not math.isnan(at.loss):
            said += f", loss {at.loss:.3g}, {at.text}"
    else:
        said = _clients(doing.clients)
    shown = printable(f"{doing.attack:>9} round {doing.round}, {said}")
    return Text(shown, style="dim", no_wrap=True, overflow="ellipsis")


def _clients(clients: Sequence[int]) -> str:
    """Returns which clients captures are of; of a sum there is no one client."""
    if min(clients) < 0:
        return "all clients"
    return f"{'client' if len(clients) == 1 else 'clients'} {', '.join(map(str, clients))}"


@contextmanager
def progress() -> Iterator[Callable[..., None]]:
    """Shows how training and attacks are getting on, and yields what is told of it.

    On a terminal that is two bars and a line for each busy worker below, else a line for each
    round and answer, in which no private text is.
    """
    from fedleak.forecast import duration

    if not console.is_terminal:
        yield Lines()
        return
    columns = (
        TextColumn("{task.description:>9}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("updates"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    limits = Lines(answers=False)
    with Bars(*columns, console=console) as bars:
        training, attacks = (
            bars.add_task("training", total=None, left=""),
            bars.add_task("attacks", total=None, left=""),
        )

        def show(at: "RunProgress") -> None:
            limits(at)
            known = at.seconds_left is not None and at.answers < at.answers_expected
            left = f"about {duration(at.seconds_left or 0)} left" if known else ""
            bars.update(training, completed=at.captures, total=at.captures_expected)
            bars.update(attacks, completed=at.answers, total=at.answers_expected, left=left)
            if console.file.isatty():  # what is read is private: never for a log
                bars.lines = [line(doing, time.monotonic()) for doing in at.under_way]

        try:
            yield show
        finally:
            bars.lines = ()


class Lines:
    """Prints a line for each round and answer, and one about time if it is long.

    Args:
        answers: Or only the one about time.
    """

    def __init__(self, *, answers: bool = True) -> None:
        self._answers = answers
        self._rounds: int | None = None

    def __call__(self, at: "RunProgress") -> None:
        """Prints what is new."""
        from fedleak.forecast import WORTH_SAYING_SECONDS, duration

        first = self._rounds is None
        if first and at.seconds_most >= WORTH_SAYING_SECONDS:
            self._print(f"attacks with a time limit take at most {duration(at.seconds_most)}")
        before, self._rounds = (at.rounds if self._rounds is None else self._rounds), at.rounds
        if not self._answers:
            return
        if at.rounds > before:
            updates = f"{at.captures} of {at.captures_expected} updates"
            self._print(f"training: round {at.rounds} of {at.rounds_expected}, {updates}")
        about = "" if at.seconds_left is None else f", about {duration(at.seconds_left)}"
        left = at.answers_expected - at.answers + len(at.finished)
        for one in at.finished:
            left -= 1
            took = "" if one.seconds is None else f" in {one.seconds:.1f} s"
            key = f"round {one.key.round} {_clients((one.key.client,))}"
            self._print(f"{one.attack} {key}: {one.status}{took}; {left} left{about}")

    def _print(self, text: str) -> None:
        console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


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
