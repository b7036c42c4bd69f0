"""The command line: `fedleak run | sweep | attack | score | report | ...`."""

import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
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

from fedleak import logs
from fedleak.cli.completion import experiment_files, run_directories
from fedleak.cli.display import prior_progress, progress
from fedleak.cli.mistakes import mended
from fedleak.errors import ConfigError, FedleakError
from fedleak.sanitise import markup, printable
from fedleak.versions import versions

QUICKSTART = [
    Path(__file__).parents[2] / "experiments" / f"quickstart-{name}.toml"
    for name in ("llama", "gpt2")
]

GATE_CLOSED = 3
"""Exit status of a gate: a limit is exceeded, or too little was measured to tell."""

app = typer.Typer(
    help="Measure what a federated-learning server can read out of its clients' updates.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
console = Console(emoji=False)  # a text has what it has

Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; the value is TOML."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Move earlier results of this name aside.")]
Texts = Annotated[bool, typer.Option("--texts", help="Print private texts to a pipe or file, too.")]

# The text of a command describes its arguments: Typer 0.20 with Click 8.5 shows no help of them,
# and Flower does not allow a later Typer.
RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", autocompletion=run_directories, hidden=True)
]
File = Annotated[Path, typer.Argument(metavar="FILE", autocompletion=experiment_files, hidden=True)]


def say_versions(wanted: bool) -> None:
    """Prints the versions of what results depend on, one in a line, and ends."""
    if wanted:
        for name, version in versions().items():
            console.print(f"{name} {version}", markup=False, highlight=False)
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show on stderr what log.txt keeps: tracebacks, too.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=say_versions,
            is_eager=True,
            help="Show the versions of fedleak, Python and the main packages.",
        ),
    ] = False,
) -> None:
    """Takes what stands before the command."""
    if debug:
        context.with_resource(logs.debugging())


@app.command()
def run(
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", autocompletion=experiment_files, hidden=True),
    ] = None,
    changes: Set = None,
    fresh: Fresh = False,
    texts: Texts = False,
) -> None:
    """Train with Flower clients, capture what the server receives, attack it and score it.

    FILE is an experiment file. Without one, the two experiments of the quickstart run.

    Results go to runs/NAME. The same command again finishes what is left.
    """
    from fedleak import pipeline
    from fedleak.audit.gaps import refuse_gaps
    from fedleak.config.loading import load
    from fedleak.federation.lookup import run_folder
    from fedleak.preparation import prepare, refuse_data_on_nodes
    from fedleak.report import tables

    with mended():
        experiments = [load(path, changes or ()) for path in files or QUICKSTART]
        for each in experiments:
            refuse_data_on_nodes(each)
        runs = [prepare(each, run_folder(each.name), fresh=fresh) for each in experiments]
        from server.engines import train  # takes seconds, so after what may be refused

        for experiment, at in zip(experiments, runs, strict=True):
            remark(at.info().get("remarks", ()))
            if (note := pipeline.disk_note(at, experiment)) is not None:
                console.print(note, markup=False, highlight=False, soft_wrap=True)
            with progress(console) as show:
                scored = pipeline.carry_out(at, experiment, train, show)
            tables.print_run(at, scored, console, texts=texts)
        refuse_gaps(*runs)


@app.command()
def sweep(
    file: File,
    changes: Set = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Runs at once; left out: one per GPU, else one per two cores.", metavar="N"
        ),
    ] = None,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Run one of N shares of the cells, such as 2/4."),
    ] = None,
    fresh: Fresh = False,
) -> None:
    """Run an experiment for every combination of the values in its sweep table.

    FILE is an experiment file with a sweep table. Each combination is a run in runs/NAME. The
    files sweep.json, sweep.svg and tradeoff.svg, in the same folder, compare the runs; if the
    sweep has families of defenses, frontier.svg draws what leaks at each strength, and its cost.

    The same command again finishes what is left. With `--shard I/N` several machines share the
    cells, each with another I; the command without it compares them afterwards.
    """
    from fedleak import sweep as sweeps
    from fedleak.report import figures, frontier, sweep_table, tradeoff
    from fedleak.store.shards import Shard

    with mended():
        part = None if shard is None else Shard.parse(shard)
        grid = sweeps.load(file, changes or ())
        if part is not None:
            grid = grid.part(part)
        plans = sweeps.prepare(grid, fresh=fresh)
        from server.engines import train  # as for `run`

        total, at_once = len(grid.cells), sweeps.jobs(plans, jobs)
        numbers = dict(zip(plans, itertools.count(total - len(plans) + 1), strict=False))

        def tell(cell: str, what: str) -> None:
            console.print(f"{numbers[cell]} of {total} {what}: {markup(cell)}")

        @contextmanager
        def watch(cell: str) -> Iterator[Callable[..., None]]:
            console.print(f"{numbers[cell]} of {total}: {markup(cell)}")
            with progress(console) as show:
                yield show

        remark(each for plan in plans.values() for each in plan.remarks)
        with grid.lock():
            if at_once == 1:
                failures = sweeps.carry_out(grid, plans, train, watch)
            else:
                failures = sweeps.carry_out_at_once(grid, plans, train, at_once, tell)
            collected = sweeps.collect(grid)
            if part is not None:
                sweeps.refuse_gaps(collected, failures)
                console.print(f"shard {part}: {total} cells are complete")
                return
            figures.draw(collected, grid.path / "sweep.svg")
            tradeoff.draw_tradeoff(collected, grid.path / "tradeoff.svg")
            frontier.draw_frontier(collected, grid.path / "frontier.svg")
        console.print(sweep_table.table(collected, console.width))
        console.print(f"results: {markup(grid.path)}")
        sweeps.refuse_gaps(collected, failures)


@app.command()
def attack(
    path: RunPath,
    changes: Set = None,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Do one of N shares, such as 2/4, and do not score."),
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Try failed attacks again.")] = False,
    texts: Texts = False,
) -> None:
    """Attack the captures of a finished or interrupted run, also with other attacks.

    RUN is a run directory. To try another attack, for example:
    `--set 'attack=[{kind="dlg", name="dlg-long", steps=2000}]'`

    Only attack, threat and workers can be set. The captures stay as they are.

    With `--shard I/N` several machines share the work, each with another I. `fedleak score RUN`
    scores all of it, and says what is missing.
    """
    from fedleak import pipeline
    from fedleak.audit import scoring
    from fedleak.audit.gaps import refuse_gaps
    from fedleak.config.loading import load
    from fedleak.dispatch.dispatcher import attack_captures
    from fedleak.federation.lookup import stored
    from fedleak.preparation import (
        ask_again,
        refuse_other_sight,
        refuse_purged,
        refuse_unstored,
    )
    from fedleak.report import tables
    from fedleak.store.run import Run
    from fedleak.store.shards import Shard, drop_failures

    with mended():
        part = None if shard is None else Shard.parse(shard)
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
        refuse_other_sight(at, experiment)
        pipeline.check_attacks(experiment, num_labels)
        refuse_unstored(at, experiment)
        ask_again(at, experiment)
        if part is not None:
            with progress(console) as show:
                done = pipeline.attack_shard(at, experiment, part, retry=retry, report=show)
            console.print(markup(done), soft_wrap=True)
            return
        with at.lock():
            if retry:
                drop_failures(at)
            with progress(console) as show:
                attack_captures(at, experiment, no_more=lambda: True, report=show)
            scored = scoring.score_run(at, [each.name for each in experiment.attacks])
        tables.print_run(at, scored, console, texts=texts)
        refuse_gaps(at)


@app.command("attack-update")
def attack_update(
    file: Annotated[Path, typer.Argument(metavar="FILE", hidden=True)],
    model: Annotated[
        str, typer.Option(metavar="MODEL", help="A folder or hub id with all weights it had.")
    ],
    examples: Annotated[
        int | None,
        typer.Option(metavar="N", help="Texts that it is of; left out: as many as in --texts."),
    ] = None,
    kind: Annotated[
        str, typer.Option(help="What FILE holds: gradient, delta or weights.")
    ] = "gradient",
    lr: Annotated[
        float | None, typer.Option(help="Learning rate of the client, for delta and weights.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Local steps of the client.")] = 1,
    optimiser: Annotated[
        str, typer.Option(help="Of the client: sgd, adam, adamw or other.")
    ] = "sgd",
    weight_decay: Annotated[float, typer.Option(help="Of the client's optimiser.")] = 0.0,
    dropout: Annotated[bool, typer.Option("--dropout", help="The client had dropout on.")] = False,
    task: Annotated[
        str | None,
        typer.Option(help="sequence-classification or causal-lm; left out: as MODEL was saved."),
    ] = None,
    loss: Annotated[
        str, typer.Option(help="Of a classifier: cross-entropy or squared.")
    ] = "cross-entropy",
    attack_: Annotated[
        str, typer.Option("--attack", help="A kind of attack, as fedleak list names it.")
    ] = "auto",
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of the attack, in TOML."),
    ] = None,
    knows: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FACT=VALUE",
            help="A fact that the attacker is granted: batch_size, labels, lengths, noise_scale.",
        ),
    ] = None,
    texts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The private texts, one a line: scores the answer."),
    ] = None,
    held_out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Texts like them, one a line: what chance scores."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides all that is random.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write all of it as JSON.")
    ] = None,
) -> None:
    """Attack one update of your own training, and print what could be read of its texts.

    FILE is a file of the update, by parameter name: .safetensors, or what torch.save wrote (.pt,
    .pth, .bin), of which nothing is run.

    The texts that it reads are private, and they are printed to a pipe or file, too.
    """
    import torch

    import fedleak
    from fedleak.cli import own_update
    from fedleak.update_files import read_update

    with mended():
        private = own_update.text_lines("--texts", texts)
        others = own_update.text_lines("--held-out", held_out)
        if examples is None and private is None:
            raise ConfigError("--examples is missing: give the number of texts that FILE is of")
        if None not in (examples, private) and examples != len(private or ()):
            raise ConfigError(
                f"--examples {examples}, but --texts has {len(private or ())}: give all texts that "
                "FILE is of, and leave --examples out"
            )
        torch.set_num_threads(1)  # as in a worker: sums have one order, so results are repeatable
        with own_update.working(console) as tell:
            result = fedleak.attack(
                read_update(file),
                model,
                num_examples=len(private or ()) if examples is None else examples,
                kind=attack_,
                settings=own_update.values("--set", changes or ()),
                sent=kind,  # type: ignore[arg-type]  # what else it may be is refused there
                task=task,
                loss=loss,
                learning_rate=lr,
                local_steps=steps,
                optimiser=optimiser,  # type: ignore[arg-type]
                weight_decay=weight_decay,
                dropout=dropout,
                knows=own_update.values("--knows", knows or ()),  # type: ignore[arg-type]
                seed=seed,
                on_progress=tell,
            )
        scored = None
        if private is not None:
            scored = fedleak.score(result, private, held_out=others, seed=seed)
        own_update.show(result, scored, console, chance="builtin/notes" if others is None else "")
        if out is not None:
            own_update.write(result, scored, out)
            console.print(f"results: {markup(out)}", soft_wrap=True)
        own_update.refuse_failure(result)


@app.command()
def score(
    path: RunPath,
    vault: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FOLDER",
            help="Take the private batches from the vault of a node; it can be repeated.",
        ),
    ] = None,
    texts: Texts = False,
) -> None:
    """Score the answers of a run again, and rebuild leakage.jsonl and summary.json.

    RUN is a run directory. Where each node of a federation keeps what it trained on, answers are
    unscored until the owners of nodes hand their vaults over: `--vault node-0 --vault node-1`.
    """
    from fedleak.audit import scoring
    from fedleak.audit.gaps import refuse_gaps
    from fedleak.audit.handover import take_vaults
    from fedleak.preparation import refuse_purged
    from fedleak.report import tables
    from fedleak.store.run import Run

    with mended():
        at = Run(path)
        at.info()  # refuses a folder that is no run
        with at.lock():
            if vault:
                refuse_purged(at)
                taken = take_vaults(at, vault)
                notes = f" and {len(taken.notes)} notes on defenses" if taken.notes else ""
                console.print(f"taken from vaults: {len(taken.truths)} private batches{notes}")
            scored = scoring.score_run(at)
        tables.print_run(at, scored, console, texts=texts)
        refuse_gaps(at)


@app.command()
def watch(
    superlink: Annotated[str, typer.Argument(metavar="SUPERLINK", hidden=True)],
    run_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Of the run; left out: the newest.")
    ] = None,
    patience: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="The SuperLink may be silent so long.")
    ] = 60.0,
) -> None:
    """Follow a run of `flwr run` to its true end, which the exit status of `flwr run` hides.

    SUPERLINK is a connection in Flower's configuration, by its name. The exit status is 0 if the
    run was completed, and else 1, with the reason in the last line.
    """
    from fedleak import flower_runs

    with mended():

        def tell(at: flower_runs.FlowerRun) -> None:
            console.print(f"run {markup(at.number)}: {markup(at.status)}", soft_wrap=True)

        ended = flower_runs.follow(superlink, run_id, tell, patience)
        if ended.status != flower_runs.COMPLETED:
            reason = f": {ended.details}" if ended.details else ""
            raise FedleakError(f"run {ended.number} ended as {ended.status}{reason}")


@app.command()
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", autocompletion=run_directories, hidden=True),
    ],
    open_: Annotated[bool, typer.Option("--open", help="Open the report in a browser.")] = False,
    redact: Annotated[
        bool, typer.Option("--redact", help="Leave private texts out: rates and shapes only.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="The file to write; left out: report.html in the folder.", metavar="FILE"
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML file about a run or a sweep, for a browser.

    RUN is a run directory or the folder of a sweep; each gets a file of its own. Runs are scored
    again. The report of a sweep links to the reports of its cells, which are written too.

    A report holds private texts: only its owner can open it. `--redact` leaves them out.
    """
    import webbrowser

    from fedleak import reports
    from fedleak.audit.gaps import refuse_gaps
    from fedleak.store.run import Run

    with mended():
        if out is not None and len(paths) > 1:
            raise ConfigError(
                f"--out {str(out)!r} is one file, and {len(paths)} folders are named: give one"
            )
        if out is not None and out.is_dir():
            raise ConfigError(f"--out {str(out)!r} is a folder: name a file, such as report.html")

        def tell(written: Path) -> None:
            console.print(f"report: {markup(written)}", soft_wrap=True)

        single = []
        for path in paths:
            if reports.is_sweep(path):
                written = reports.report_sweep(path, out, redact=redact, tell=tell)
            else:
                single.append(Run(path))
                written = reports.report_run(single[-1], out, redact=redact)
            tell(written)
            if open_ and not webbrowser.open(written.absolute().as_uri()):
                console.print("[yellow]note:[/] no browser was found: open the file yourself")
        refuse_gaps(*single)


@app.command()
def gate(
    path: RunPath,
    most: Annotated[
        list[str] | None,
        typer.Option(
            "--max",
            metavar="NAME=NUMBER",
            help="A limit: exact, rougeL, token_recall or epsilon; over that of [gate].",
        ),
    ] = None,
    may_abstain: Annotated[
        list[str] | None,
        typer.Option(metavar="ATTACK", help="An attack that may abstain; it can be repeated."),
    ] = None,
    require: Annotated[
        list[str] | None,
        typer.Option(metavar="WHAT", help="What has to be measured, too: canary."),
    ] = None,
    junit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the checks as JUnit XML.")
    ] = None,
) -> None:
    """Compare the worst case of a scored run with limits, and exit with status 3 if one is broken.

    RUN is a run directory. Limits are those of [gate] in its experiment, and of --max. The upper
    end of the interval is what is compared. The status is 3, too, if too little was measured to
    tell: few texts or clients, or attacks that failed, abstained or ran out of time.
    """
    from fedleak.audit.gate import judge
    from fedleak.config.loading import limited
    from fedleak.federation.lookup import stored
    from fedleak.report import ci
    from fedleak.store.run import Run

    with mended():
        at = Run(path)
        checks = judge(at, limited(stored(at).gate, most or (), may_abstain or (), require or ()))
        marks = {"within": "[green]within[/]", "exceeded": "[red]EXCEEDED[/]"}
        for one in checks:
            mark = marks.get(one.outcome, "[yellow]NOT TOLD[/]")
            console.print(f"{mark}  {markup(one.name)}: {markup(one.said)}", soft_wrap=True)
        if junit is not None:
            ci.write_junit(path.name, checks, junit)
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for line in ci.annotations(path.name, checks):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
        closed = [one.name for one in checks if not one.passed]
        if closed:
            names = printable(", ".join(closed))
            print(f"fedleak: the gate is closed, because of: {names}", file=sys.stderr)  # noqa: T201
            raise typer.Exit(GATE_CLOSED)
        console.print("the gate is open: these attacks read no more than the limits allow")


@app.command()
def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", autocompletion=run_directories, hidden=True),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON in place of tables.")] = False,
) -> None:
    """Compare runs with the first one, text by text: does the server read more after a change?

    RUN is a run directory, two or more. Only the same texts of the same client and round are
    compared, and what has no partner is said.
    """
    from fedleak.audit.comparison import compare as pair
    from fedleak.report import comparison_table
    from fedleak.store.run import Run

    with mended():
        if len(runs) < 2:
            raise ConfigError("one run has nothing to be compared with: name two or more")
        found = pair(Run(runs[0]), [Run(each) for each in runs[1:]])
        if as_json:
            shown = [
                one.model_dump(mode="json")
                | {
                    "differences": [
                        {**each.model_dump(mode="json"), "direction": each.direction}
                        for each in one.differences
                    ]
                }
                for one in found
            ]
            console.print_json(data=shown)
            return
        for one in found:
            console.print(comparison_table.table(one))
            for reason, count in one.unpaired.items():
                console.print(f"not compared: {count} texts: {markup(reason)}", soft_wrap=True)


@app.command()
def export(
    path: RunPath,
    to: Annotated[
        str,
        typer.Option(
            metavar="TO",
            help="A csv or parquet file, mlflow[:PLACE] or tensorboard[:FOLDER].",
        ),
    ],
    texts: Annotated[
        bool, typer.Option("--texts", help="Also write the private texts, and what was read.")
    ] = False,
) -> None:
    """Write the scores of a run for other programs.

    RUN is a run directory. A csv or parquet file has a row per update and attack, and only the
    owner can open it.

    MLflow gets settings, figures by round and the report, without private texts. PLACE is a
    tracking server, a database or a folder; left out, what MLflow is set to. TensorBoard gets
    figures and settings.
    """
    from fedleak.store.run import Run

    tracker, _, place = to.partition(":")
    with mended():
        if tracker == "mlflow":
            from fedleak.tracking.to_mlflow import export_to_mlflow

            found = export_to_mlflow(Run(path), place or None, texts=texts)
            console.print(f"MLflow has it as run {markup(found)}", soft_wrap=True)
        elif tracker == "tensorboard":
            from fedleak.tracking.to_tensorboard import export_to_tensorboard

            if texts:
                raise ConfigError("TensorBoard gets figures and no texts: leave out --texts")
            folder = export_to_tensorboard(Run(path), place or None)
            console.print(f"for TensorBoard: {markup(folder)}", soft_wrap=True)
        else:
            from fedleak.export import export as write

            count = write(Run(path), Path(to), texts=texts)
            private = ", with private texts" if texts else ""
            console.print(f"{count} rows{private}: {markup(to)}", soft_wrap=True)


@app.command("import")
def import_(
    tapped: Annotated[Path, typer.Argument(metavar="TAPPED", hidden=True)],
    about: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Left out: about.toml in TAPPED."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="The run to make; left out: TAPPED-run."),
    ] = None,
) -> None:
    """Make a run of what a tap kept of your own Flower app.

    TAPPED is a folder that the app's ServerApp gave to `tap(grid, "FOLDER")`. The file says what
    the messages do not: model, learning rate, batch size. `fedleak attack RUN` attacks the run.

    The same command again adds what is not there yet, such as the truth.
    """
    from fedleak.config.about import load_about
    from fedleak.importing import import_run
    from fedleak.store.tapped import Tapped

    with mended():
        said = load_about(about or tapped / "about.toml")
        path = tapped.absolute()
        found = import_run(Tapped(tapped), said, out or path.with_name(f"{path.name}-run"))
        console.print(
            f"{found.updates} updates of {found.clients} clients in {found.rounds} rounds, "
            f"{found.truths} with the truth: {markup(found.run.path)}",
            soft_wrap=True,
        )
        remark(found.remarks)
        found.refuse_gaps()


@app.command()
def bench(
    suite: Annotated[str, typer.Argument(metavar="[SUITE]", hidden=True)] = "quick",
    attacks: Annotated[
        list[str] | None,
        typer.Option("--attack", metavar="KIND", help="Run this attack, too; repeatable."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--attacks", metavar="FILE", help="Run the attacks of a TOML file, too."),
    ] = None,
    command: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="Run an outside program as an attack, too."),
    ] = None,
    only: Annotated[
        bool, typer.Option("--only", help="Leave out the attacks of the suite.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--setting", metavar="NAME", help="Run this setting alone; repeatable."),
    ] = None,
    assets: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            envvar="FEDLEAK_ASSETS",
            help="Models and data that are not part of fedleak.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the result there.")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Try failed attacks again.")] = False,
    fresh: Fresh = False,
) -> None:
    """Compare attacks on a fixed suite of settings, all scored alike.

    SUITE is a name, quick (CPU minutes) or full (GPU hours), or a file. To enter an attack, name
    its kind, or give a command: `--command 'python mine.py {observation} {answer}'`

    Updates are made once and kept in runs/bench-SUITE-VERSION: another attack takes no more than
    its own time. The result is bench.json in there. The same command again finishes what is left.
    """
    from fedleak.bench import results, running, suites
    from fedleak.report import sweep_table

    with mended():
        what = suites.load(suite)
        tables = suites.entered(what, attacks or (), file, command, only=only)
        if out is not None and not out.parent.is_dir():
            raise ConfigError(f"--out {str(out)!r}: there is no such folder: make it")
        entered = running.prepare(what, tables, assets, chosen=settings or (), fresh=fresh)
        from server.engines import train  # as for `run`

        remark(
            f"setting {name} is left out: {why}"
            for name, why in entered.left_out.items()
            if why != running.NOT_CHOSEN
        )
        numbers = {name: i for i, name in enumerate(entered.ready, 1)}

        @contextmanager
        def watch(name: str) -> Iterator[Callable[..., None]]:
            console.print(f"{numbers[name]} of {len(numbers)}: {markup(name)}")
            with progress(console) as show:
                yield show

        result = running.carry_out(entered, train, watch, retry=retry)
        console.print(sweep_table.table(running.as_sweep(result), console.width))
        for (name, why), where in running.obstacles(result).items():
            console.print(f"{markup(name)} cannot work in {', '.join(where)}: {markup(why)}")
        if out is not None:
            out.write_bytes(results.RESULT.written(result))
        console.print(f"result: {markup(out or entered.path / results.RESULT.name)}")
        if result.missing:
            raise FedleakError("; ".join(result.missing))


@app.command("bench-table")
def bench_table(
    paths: Annotated[list[Path], typer.Argument(metavar="RESULT...", hidden=True)],
    page: Annotated[
        Path | None,
        typer.Option(
            "--into", metavar="FILE", help="Write the tables below the marker of a Markdown file."
        ),
    ] = None,
) -> None:
    """Make tables in Markdown of results of one suite and version.

    RESULT is a bench.json; there may be several. Results of other versions, weights or texts are
    refused.
    """
    from fedleak.bench import markdown

    with mended():
        tables = markdown.markdown(markdown.read(paths))
        if page is None:
            print(tables)  # noqa: T201 - Markdown as it is, however wide
            return
        if not page.is_file():
            raise ConfigError(f"--into {str(page)!r}: there is no such file: make it")
        page.write_text(markdown.into(page.read_text(encoding="utf-8"), tables), encoding="utf-8")
        console.print(f"tables: {markup(page)}", soft_wrap=True)


@app.command()
def purge(path: RunPath) -> None:
    """Delete the private data of a finished and scored run, and keep its scores.

    RUN is a run directory. Everything that a private text can be read from is deleted: the
    clients' batches, the texts that attacks read, the held-out texts, the captured updates, and
    the models, because the difference of two models is an update. The scores, the ledger and the
    summary stay. Nothing can be attacked afterwards.
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


@app.command()
def explain(file: File, changes: Set = None) -> None:
    """Show what an experiment lets the server see, and which attacks can read it.

    FILE is an experiment file. Nothing is trained and nothing is written.
    """
    from fedleak.config.loading import load
    from fedleak.explanation import explain as explained
    from fedleak.report import explanation

    with mended():
        experiment = load(file, changes or ())
        explanation.show(experiment, explained(experiment), console)


@app.command("check-defense")
def check_defense(file: File, changes: Set = None) -> None:
    """Test whether each defense of an experiment does what it says, and print the figures.

    FILE is an experiment file; or the name of a defense, as `fedleak list` has it, which is then
    tested on a small built-in model. Nothing is trained and no private text is used. Where a
    defense guarantees an epsilon, canaries in a few updates test that its noise and its clipping
    are what the ledger counts. `fedleak run` does the same test before it trains.
    """
    from fedleak import defenses
    from fedleak.audit.defense_checks import check
    from fedleak.config.loading import load, with_defense

    with mended():
        by_name = str(file) in defenses.kinds() and not file.exists()
        experiment = (
            with_defense(str(file), changes or ()) if by_name else load(file, changes or ())
        )
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
            plan = prior_training.PriorConfig(
                layers=layers,
                width=width,
                heads=heads,
                epochs=epochs,
                steps=steps,
                batch_size=batch_size,
                learning_rate=learning_rate,
                max_length=max_length,
                seed=seed,
            )
            on = prior_training.device(device)
            with prior_training.new_folder(out) as folder:
                corpus = prior_training.read(text, tokenizer, plan)
                with prior_progress(console) as show:
                    trained = prior_training.train(corpus, plan, on, show)
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
    """Name the attacks, defenses, models and data sets, and where each comes from."""
    from fedleak.cli import catalogue

    with mended():
        catalogue.show(console)


def remark(found: Iterable[str]) -> None:
    """Prints what may not be meant, each once."""
    for each in dict.fromkeys(found):
        console.print(f"[yellow]note:[/] {markup(each)}")
