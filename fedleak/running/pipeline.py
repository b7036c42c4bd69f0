"""From an experiment to scores: train, attack captures as they come, score them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from fedleak.attacks.reconstruction import Status
from fedleak.audit import central_baseline, defense_checks, positive_control, scoring
from fedleak.audit.answer_scores import Scored
from fedleak.audit.answered import answered
from fedleak.audit.defense_checks import Finding
from fedleak.audit.privacy import published
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import absent, captures_of, examples
from fedleak.config.federation.schedule import expected_captures
from fedleak.running.dispatch.agenda import groups, part_of
from fedleak.running.dispatch.dispatcher import ALONE, Crew, attack_captures, attacking
from fedleak.running.dispatch.progress import RunProgress
from fedleak.running.dispatch.retention import Retention
from fedleak.running.preparation import refuse_another
from fedleak.running.workers.process import failure, trace
from fedleak.store import shards
from fedleak.store.records import PUBLISHED
from fedleak.store.run import Run
from fedleak.store.shards import Shard
from fedleak.store.summaries import SUMMARY
from fedleak.util.errors import FedleakError, StoppedError

Engine = Callable[[Run, Experiment, Callable[[], bool]], None]
"""Trains an experiment in its run directory; the function, called now and then, ends it early."""


def finished(run: Run, experiment: Experiment) -> bool:
    """Returns whether an experiment is trained, attacked and scored here.

    Raises:
        ConfigError: Another experiment ran here.
    """
    if not run.exists():
        return False
    refuse_another(run, experiment)
    if run.info().get("purged"):
        return True
    names = [named_attack.name for named_attack in experiment.attacks]
    wanted = {(key, name) for key in captures_of(run, experiment) for name in names}
    try:
        summary = run.read_document(SUMMARY)
        answers = shards.read_answers(run)
    except FedleakError:  # missing or damaged: running mends what it can
        return False
    # `fedleak score` during the run writes scores of a part of it.
    done = summary.status == run.info()["status"] == "finished"
    if wants_control(experiment) and summary.positive_control is None:
        return False
    if published.unaudited(experiment, run.readable(PUBLISHED)):
        return False
    return done and wanted <= answered(answers, experiment)


def carry_out(
    run: Run,
    experiment: Experiment,
    train: Engine,
    crew: Crew = ALONE,
    *,
    control: bool = False,
    findings: Sequence[Finding] | None = None,
) -> list[Scored]:
    """Trains, attacks and scores what the run directory lacks.

    Args:
        run: The run directory.
        experiment: What was prepared there.
        train: The engine, which this package does not import: `fedleak.flower.engines.train`.
        crew: Attacks the captures; the answers that it gets before it stops are scored.
        control: Attack undefended copies, too; if limits need them, they are always attacked.
        findings: Findings of the check of the defenses; None: the check is made first.
    """
    with run.lock():
        around = under_way(run, experiment, crew, control=control, findings=findings)
        with suppress(StoppedError), around as stop:
            train(run, experiment, stop)
        return scoring.score_run(run)


@contextmanager
def under_way(
    run: Run,
    experiment: Experiment,
    crew: Crew = ALONE,
    *,
    control: bool = False,
    findings: Sequence[Finding] | None = None,
) -> Iterator[Callable[[], bool]]:
    """Does all that is around training: checks of defenses, attacks, the central reference.

    Yields:
        A function that returns whether training has to stop, as that of `attacking` does.

    Raises:
        FedleakError: A defense does not do what it says.
    """
    with noting_status(run):
        defense_checks.refuse_broken(run, experiment, findings)
        with attacking(run, experiment, crew) as stop:
            yield stop
        if control or wants_control(experiment):
            attack_copies(run, experiment, crew)
        if crew.enough():
            return
        published.audit_models(run, experiment)
        if _wants_reference(run, experiment):
            baseline = central_baseline.central(experiment, run)
            run.write_json("reference.json", baseline.model_dump())


def wants_control(experiment: Experiment) -> bool:
    """Whether a run needs a positive control: its `[gate]` limits what attacks read."""
    return experiment.gate.limits_leaks and not positive_control.is_undefended(experiment)


def attack_copies(run: Run, experiment: Experiment, crew: Crew) -> None:
    """Makes the undefended copies of a run and attacks them, as far as that is not done yet.

    Nothing is done if no batch is here, as on a server whose nodes keep their vaults. The caller
    holds the lock of the run.

    Args:
        run: The run directory.
        experiment: What was prepared there, with the attacks to be tried.
        crew: Attacks the copies.
    """
    if (copies := positive_control.make_copies(run, experiment)) is not None:
        control = positive_control.control_of(run)
        telling = replace(crew, report=lambda progress: crew.report(_of_copies(progress)))
        with control.lock():
            attack_captures(control, copies, telling, no_more=lambda: True)
        if not crew.enough():
            control.update_info(status="finished")


def _of_copies(progress: RunProgress) -> RunProgress:
    """Marks each attack as one on a copy: the update itself has the same round and client."""
    under_way = (doing._replace(attack=f"copy: {doing.attack}") for doing in progress.under_way)
    finished = (done._replace(attack=f"copy: {done.attack}") for done in progress.finished)
    return progress._replace(under_way=tuple(under_way), finished=tuple(finished))


def attack_again(
    run: Run,
    experiment: Experiment,
    crew: Crew = ALONE,
    *,
    retry: bool = False,
    control: bool = False,
) -> list[Scored]:
    """Attacks the captures that are here, also with other attacks, and scores what those read.

    Args:
        run: The run directory.
        experiment: What was prepared there, with the attacks to be tried.
        crew: Attacks the captures; the answers that it gets before it stops are scored.
        retry: Try again what failed.
        control: Attack undefended copies, too; if limits need them, they are always attacked.
    """
    with run.lock():
        if retry:
            shards.drop_failures(run)
            shards.drop_failures(positive_control.control_of(run))
        attack_captures(run, experiment, crew, no_more=lambda: True)
        if control or wants_control(experiment):
            attack_copies(run, experiment, crew)
        return scoring.score_run(run, [named_attack.name for named_attack in experiment.attacks])


@contextmanager
def noting_status(run: Run) -> Iterator[None]:
    """Notes in run.json that the run is going on, how it ended, and why if it failed."""
    run.update_info(status="running", failure=None)
    try:
        yield
    except (KeyboardInterrupt, StoppedError):
        run.update_info(status="interrupted")
        raise
    except BaseException as error:
        with suppress(OSError, FedleakError):  # a full disk must not hide the first error
            why = {"reason": failure(error), "traceback": trace(error)}
            run.update_info(status="failed", failure=why)
        raise
    run.update_info(status="finished")


def attack_shard(
    run: Run, experiment: Experiment, shard: Shard, crew: Crew = ALONE, *, retry: bool = False
) -> str:
    """Does one share of a run's attacks, beside others on other machines; nothing is scored.

    Args:
        run: The run directory.
        experiment: What was prepared there.
        shard: Which share.
        crew: Attacks the captures.
        retry: Try again what failed.

    Returns:
        A line for the user, once the share is complete.

    Raises:
        FedleakError: Answers failed or captures are missing, so that it is not complete.
    """
    names = tuple(named_attack.name for named_attack in experiment.attacks)
    document = shards.share(shard)
    with shards.locked(run, shard):
        run.write(document, shards.Share(attacks=names, complete=False))
        if retry:
            shards.drop_failures(run, shard)
        attack_captures(run, experiment, crew, no_more=lambda: True, shard=shard)
        expected = expected_captures(experiment)
        work = part_of(groups(experiment.attacks, expected, experiment.workers.at_once), shard)
        gone = absent(run)
        wanted = {(key, task.attack.name) for task in work for key in task.keys if key not in gone}
        given = shards.answers_for(run, shard)
        status = {answer.id: answer.status for answer in given if answer.id in wanted}
        failed = sum(outcome == Status.FAILED for outcome in status.values())
        run.write(document, shards.Share(attacks=names, complete=len(status) == len(wanted)))
        # The last shard sees the answers of all.
        Retention(run, experiment).answered(shards.readable_answers(run))
        deleted = {key for key, _ in wanted - status.keys()} & run.captures.deleted()
    summary = f"shard {shard}: {len(status)} of {len(wanted)} answers are there"
    if deleted:
        raise FedleakError(f"{summary}: {len(deleted)} captures were deleted (audit.keep)")
    if len(status) < len(wanted):
        raise FedleakError(f"{summary}: the captures of the others are not: train them first")
    if failed:
        raise FedleakError(f"{summary}, and {failed} of them failed: --retry tries them again")
    return f"{summary}; once all {shard.count} are complete: fedleak score {run.path}"


def _wants_reference(run: Run, experiment: Experiment) -> bool:
    """Whether a centrally trained model is asked for, can be judged, and is not there yet."""
    judged = examples(run).held_out > 0
    return experiment.utility.reference and judged and not (run.path / "reference.json").is_file()
