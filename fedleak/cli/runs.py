"""The commands that make a run, attack and score it, and end it."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedleak.cli.display import console, progress, remark
from fedleak.cli.options import (
    AllowCommands,
    Files,
    Fresh,
    Retry,
    RunPath,
    Set,
    Texts,
    by_key,
    files_or_shipped,
)
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.sanitise import markup

if TYPE_CHECKING:
    from fedleak.config.experiment import Experiment


def run(
    files: Files = None,
    changes: Set = None,
    fresh: Fresh = False,
    allow_commands: AllowCommands = False,
    texts: Texts = False,
) -> None:
    """Train with Flower clients, capture what the server receives, attack it and score it.

    FILE is an experiment file. Without one, the two experiments of the quickstart run; with `--set
    preset=flowertune` a round in that setting. The run.json of a run is one, too; programs that it
    names need `--allow-commands` if it is somebody else's.

    Results go to runs/NAME. The same command again finishes what is left.
    """
    from fedleak.audit.gaps import refuse_gaps
    from fedleak.config.federation.lookup import run_folder
    from fedleak.config.loading import RUN_JSON, load
    from fedleak.report.terminal.run import print_run
    from fedleak.running import forecast, pipeline, preparation
    from fedleak.running.dispatch.dispatcher import Crew

    paths = files_or_shipped(files, changes or ())
    experiments = [load(path, changes or ()) for path in paths]
    for path, experiment in zip(paths, experiments, strict=True):
        preparation.refuse_data_on_nodes(experiment)
        if path.suffix == RUN_JSON and not allow_commands:
            refuse_stored_programs(path.parent, experiment, changes or ())
    plans = [preparation.plan(experiment) for experiment in experiments]
    runs = [
        preparation.open_run(plan, run_folder(plan.experiment.name), fresh=fresh) for plan in plans
    ]
    from fedleak.flower.engines import train  # takes seconds, so after what may be refused

    for plan, at in zip(plans, runs, strict=True):
        remark(at.info().get("remarks", ()))
        if (note := forecast.disk(plan.disk, at.path)) is not None:
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        with progress(console) as show:
            scored = pipeline.carry_out(at, plan.experiment, train, Crew(report=show))
        print_run(at, scored, console, texts=texts)
    refuse_gaps(*runs)


def refuse_stored_programs(path: Path, experiment: "Experiment", changes: Sequence[str]) -> None:
    """Refuses programs that somebody else's run names, unless the user's own changes name them.

    Args:
        path: The run directory.
        experiment: Its experiment, with the changes.
        changes: What the user sets, as KEY=VALUE.

    Raises:
        ConfigError: It names a command or a Ray cluster.
    """
    from fedleak.running.preparation import refuse_programs_of_others
    from fedleak.store.run import Run

    run = Run(path)
    if run.exists() and run.is_genuine("run.json"):
        return
    keys = by_key(changes).keys()
    address = keys & {"workers", "workers.ray", "workers.ray.address"}
    refuse_programs_of_others(
        path,
        () if "attack" in keys else experiment.attacks,
        None if address else experiment.workers,
    )


def attack(
    path: RunPath,
    changes: Set = None,
    shard: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Do one of N shares, such as 2/4, and do not score."),
    ] = None,
    retry: Retry = False,
    positive_control: Annotated[
        bool,
        typer.Option("--positive-control", help="Also attack undefended copies of some batches."),
    ] = False,
    allow_commands: AllowCommands = False,
    texts: Texts = False,
) -> None:
    """Attack the captures of a finished or interrupted run, also with other attacks.

    RUN is a run directory. To try another attack, for example:
    `--set 'attack=[{kind="dlg", name="dlg-long", steps=2000}]'`

    Only attack, threat and workers can be set. The captures stay as they are.

    With `--shard I/N` several machines share the work, each with another I. `fedleak score RUN`
    scores all of it, and says what is missing.

    A run of another machine, or one whose run.json was changed, may name programs: without
    `--allow-commands` they do not run. Those of `--set` do.

    With `--positive-control`, or a [gate] that limits what is read, undefended copies of some
    batches are attacked, too: an attack that cannot read them shows nothing by reading little.
    """
    from fedleak.audit.gaps import refuse_gaps
    from fedleak.config.federation.lookup import stored
    from fedleak.config.loading import load
    from fedleak.report.terminal.run import print_run
    from fedleak.running import pipeline
    from fedleak.running.dispatch.dispatcher import Crew
    from fedleak.running.preparation import prepare_attacks, refuse_purged
    from fedleak.store.run import Run
    from fedleak.store.shards import Shard

    part = None if shard is None else Shard.parse(shard)
    at = Run(path)
    refuse_purged(at)  # and a folder that is no run
    stored(at)  # refuses one whose experiment is not what was run
    for key, change in by_key(changes or ()).items():
        if key.split(".")[0] not in ("attack", "threat", "workers"):
            raise ConfigError(f"--set {change!r}: only attack, threat and workers can change here")
    experiment = load(path / "run.json", changes or ())
    if not allow_commands:
        refuse_stored_programs(path, experiment, changes or ())
    prepare_attacks(at, experiment)
    if part is not None:
        with progress(console) as show:
            done = pipeline.attack_shard(at, experiment, part, Crew(report=show), retry=retry)
        console.print(markup(done), soft_wrap=True)
        return
    with progress(console) as show:
        scored = pipeline.attack_again(
            at, experiment, Crew(report=show), retry=retry, control=positive_control
        )
    print_run(at, scored, console, texts=texts)
    refuse_gaps(at)


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
    from fedleak.report.terminal.run import print_run
    from fedleak.running.preparation import refuse_purged
    from fedleak.store.run import Run

    at = Run(path)
    at.info()  # refuses a folder that is no run
    with at.lock():
        if vault:
            refuse_purged(at)
            taken = take_vaults(at, vault)
            notes = f" and {len(taken.notes)} notes on defenses" if taken.notes else ""
            console.print(f"taken from vaults: {len(taken.truths)} private batches{notes}")
        scored = scoring.score_run(at)
    print_run(at, scored, console, texts=texts)
    refuse_gaps(at)


def purge(path: RunPath) -> None:
    """Delete the private data of a finished and scored run, and keep its scores.

    RUN is a run directory. Everything that a private text can be read from is deleted: the
    clients' batches, the texts that attacks read, the held-out texts, the captured updates, and
    the models, because the difference of two models is an update. The scores, the ledger and the
    summary stay. Nothing can be attacked afterwards.
    """
    from fedleak.running import purge as purging
    from fedleak.store.run import Run

    at = Run(path)
    at.info()  # refuses a folder that is no run
    with at.lock():
        done = purging.purge(at)
    for name in done.deleted:
        console.print(f"deleted: {markup(name)}", soft_wrap=True)
    for name in done.kept:
        console.print(f"kept:    {markup(name)}", soft_wrap=True)
    if done.left:
        raise FedleakError(
            f"{len(done.left)} files could not be deleted, such as {done.left[0]}: mend that, "
            f"and `fedleak purge {path}` goes on"
        )
