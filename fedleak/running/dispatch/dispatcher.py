"""Hands captures to attack workers as they come, and records the answers."""

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from fedleak.attacks import is_slow
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.audit.answered import answered
from fedleak.audit.grants import knowledge
from fedleak.audit.kept_texts import read_candidates
from fedleak.config.experiment import Experiment
from fedleak.config.federation.schedule import captures_made, expected_captures
from fedleak.running.dispatch.agenda import Agenda, Arrivals, Work, groups, part_of
from fedleak.running.dispatch.progress import Finished, Pace, RunProgress, UnderWay
from fedleak.running.dispatch.retention import Retention
from fedleak.running.preparation import refuse_purged
from fedleak.running.workers import process
from fedleak.running.workers.hiring import hire
from fedleak.running.workers.process import Job, Task, Worker
from fedleak.store import records, shards
from fedleak.store.records import ATTEMPTS, Answer, Attempt
from fedleak.store.run import Key, Run
from fedleak.store.shards import Shard
from fedleak.training.observation import Knowledge
from fedleak.util.errors import CaptureError, ConfigError

_log = logging.getLogger(__name__)

TRIES = 3
"""How often an attack that crashes is tried on one capture."""


POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Crew:
    """The workers that attack the captures of a run, who gets its progress, and when to stop.

    Attributes:
        workers: Workers to borrow; None: new ones for this run, as the experiment asks for.
        report: Called with the progress of the run.
        enough: Called now and then; returns whether to stop before all is done.
    """

    workers: Sequence[Worker] | None = None
    report: Callable[[RunProgress], None] = lambda progress: None
    enough: Callable[[], bool] = lambda: False


ALONE = Crew()
"""New workers that report to nobody and stop when all is done."""


def attack_captures(
    run: Run,
    experiment: Experiment,
    crew: Crew = ALONE,
    *,
    no_more: Callable[[], bool],
    shard: Shard | None = None,
) -> None:
    """Attacks every capture that has no answer yet, until `no_more` come and all have one.

    The work that is left is always what the directory lacks, so this can be killed at any time.
    An attack that takes captures together gets the same groups again, however often that happens.
    Quick attacks go first: a slow one starts only while another worker is left for quick ones, or
    once all quick ones have answered. Once it is `enough`, tries that are under way are given up.
    If this function fails, borrowed workers may still be busy. A shard does only its own part, and
    the caller holds only the shard.

    Raises:
        ConfigError: An attack of this name already ran here with other settings.
    """
    refuse_purged(run)
    dispatcher = Dispatcher(run, experiment, shard)
    hired: AbstractContextManager[Sequence[Worker]] = (
        hire(experiment.workers) if crew.workers is None else nullcontext(crew.workers)
    )
    with hired as all_workers:
        while not crew.enough():
            # Called before looking, so that no capture comes between the two unnoticed.
            dispatcher.look_for_captures(last_look=no_more())
            dispatcher.hand_out(all_workers)
            freed = dispatcher.collect(all_workers)
            crew.report(dispatcher.progress(all_workers))
            if dispatcher.done(all_workers):
                return
            if not freed:  # else one may get more at once
                process.wait_for_any(all_workers, POLL_SECONDS)
        for worker in all_workers:
            if worker.jobs:
                worker.give_up()


class Dispatcher:
    """Knows what is left to attack, and records what comes of it.

    Args:
        run: The run directory.
        experiment: What was prepared there.
        shard: The shard whose part is done; None: all of the work is.

    Raises:
        ConfigError: An attack of this name already ran here with other settings.
    """

    def __init__(self, run: Run, experiment: Experiment, shard: Shard | None = None) -> None:
        self._run, self._experiment = run, experiment
        model = experiment.model_spec(run.info()["num_labels"])
        self._job = partial(Job, run=run.path, model=model, seed=experiment.seed)
        self._answers, self._attempts = records.answers(run.fingerprint()), ATTEMPTS
        if shard is None:
            given, tries = shards.salvage_answers(run), run.salvage(ATTEMPTS)
        else:  # what others are writing is left as it is
            given = shards.answers_for(run, shard)
            self._answers, self._attempts = shard.lines(self._answers), shard.lines(ATTEMPTS)
            tries = run.readable(self._attempts)
        self._tries = Counter(attempt.id for attempt in tries)
        asking = (named.name for named in experiment.attacks if named.candidates is not None)
        self._candidates = {name: read_candidates(run, name) for name in asking}
        expected = expected_captures(experiment)
        work = part_of(groups(experiment.attacks, expected, experiment.workers.at_once), shard)
        wanted = {(key, task.attack.name) for task in work for key in task.keys}
        self._answered = answered(given, experiment) & wanted
        self._retention = Retention(run, experiment)
        self._retention.answered(given)
        gone = self._refuse_deleted(wanted)
        self._made, self._wanted = captures_made(experiment), len(wanted - gone)
        self._agenda = Agenda(work, self._answered | gone, set(self._tries))
        self._arrivals = Arrivals(run, expected)
        captured = set(expected)
        self._forgotten = Counter(key.round for key in self._made if key not in captured)
        self._pace = Pace(experiment.attacks, wanted - self._answered - gone)
        self._finished: list[Finished] = []
        self._round, self._summed, self._closed = 1, 0, False

    def _refuse_deleted(self, wanted: Set[tuple[Key, str]]) -> set[tuple[Key, str]]:
        """Returns what cannot be answered any more: the capture is deleted, the attack is new.

        Raises:
            ConfigError: There is nothing else to attack.
        """
        deleted = self._run.captures.deleted()
        gone = {(key, name) for key, name in wanted - self._answered if key in deleted}
        if gone and wanted == self._answered | gone:
            raise ConfigError(
                f"{str(self._run.path)!r} has no update any more that "
                f"{', '.join(sorted({name for _, name in gone}))} could attack: "
                f"{len({key for key, _ in gone})} of {len({key for key, _ in wanted})} captures "
                "were deleted once the attacks of the run had answered (audit.keep): `fedleak run "
                "FILE --fresh` with audit.keep = 'all' keeps them"
            )
        return gone

    def look_for_captures(self, *, last_look: bool) -> None:
        """Notes the captures that have come; after the last look it waits for no others."""
        last_look &= not self._closed
        # Read before looking for captures, so that a complete round has all of them.
        before, self._round = self._round, self._arrivals.round()
        self._summed += sum(self._forgotten[round] for round in range(before, self._round))
        if self._round > before or last_look:
            for key in self._arrivals.absent():
                self._agenda.absent(key)
                self._wanted -= len(self._experiment.attacks)
        for key in self._arrivals.new(everywhere=last_look):
            self._agenda.arrived(key)
            self._retention.arrived(key)
        if last_look:
            self._agenda.close()
            self._closed = True

    def hand_out(self, all_workers: Sequence[Worker]) -> None:
        """Gives every free worker something to do, as far as there is something."""
        # If training waits for attacks, quick ones that are still to come wait for slow ones.
        bounded = self._experiment.audit.waiting is not None
        for worker in all_workers:
            while worker.free and (
                work := self._agenda.take(slow=bounded or slow_may(all_workers, self._agenda))
            ):
                if jobs := self._jobs(work):
                    worker.submit(jobs)

    def collect(self, all_workers: Sequence[Worker]) -> bool:
        """Records answers that have come, and tries that failed; returns whether that freed one."""
        freed = False
        for worker in all_workers:
            if (jobs := worker.jobs) and (outcome := worker.result()) is not None:
                if isinstance(outcome, BaseException):
                    self._record_failure(jobs, outcome)
                else:
                    self._record(outcome)
                freed = True
        return freed

    def done(self, all_workers: Sequence[Worker]) -> bool:
        """Returns whether all is attacked and no more captures come."""
        busy = any(worker.jobs for worker in all_workers)
        return self._closed and not busy and not self._agenda.ready

    def progress(self, all_workers: Sequence[Worker]) -> RunProgress:
        """Returns how far the run is, with the answers since the last time."""
        finished, self._finished = tuple(self._finished), []
        return RunProgress(
            captures=self._arrivals.here + self._summed,
            captures_expected=len(self._made),
            answers=len(self._answered),
            answers_expected=self._wanted,
            under_way=tuple(_under_way(worker) for worker in all_workers if worker.jobs),
            finished=finished,
            rounds=self._round - 1,
            rounds_expected=self._experiment.federation.rounds,
            seconds_left=self._pace.seconds_left(len(all_workers)),
            seconds_most=self._pace.seconds_most(len(all_workers)),
        )

    def _jobs(self, work: Work) -> list[Job]:
        """Returns the jobs for captures; a damaged capture fails at once."""
        jobs = []
        for key in work.keys:
            try:
                listed = self._candidates.get(work.attack.name)
                known = knowledge(self._run, key, work.attack.threat, listed)
            except CaptureError as error:
                task = Task(key=key, attack=work.attack, knowledge=Knowledge())
                self._record([_failed(task, str(error))])
                continue
            jobs.append(self._job(key=key, attack=work.attack, knowledge=known))
        return jobs

    def _record(self, answers: Sequence[Answer]) -> None:
        self._run.append(self._answers, *answers)
        for answer in answers:
            key, name = answer.id
            self._answered.add(answer.id)
            self._agenda.answered(key, name)
            self._finished.append(Finished(name, key, answer.status, answer.seconds))
            self._pace.answered(name, answer.seconds or 0.0)
            _log.info("%s on %s: %s in %s s", name, key, answer.status, answer.seconds)
        self._retention.answered(answers)

    def _record_failure(self, jobs: Sequence[Job], error: BaseException) -> None:
        """Records a try that failed; captures that were tried often enough fail for good."""
        reason, traceback = process.failure(error), process.trace(error)
        attack, keys = jobs[0].attack, [job.key for job in jobs]
        _log.warning("%s failed on %s: %s", attack.name, ", ".join(map(str, keys)), traceback)
        self._tries.update((key, attack.name) for key in keys)
        failed_try = partial(Attempt, attack=attack.name, reason=reason, traceback=traceback)
        self._run.append(self._attempts, *(failed_try(**key._asdict()) for key in keys))
        enough = 1 if isinstance(error, CaptureError) else TRIES
        for job in jobs:
            if self._tries[job.key, attack.name] < enough:
                self._agenda.again(attack, job.key)
        given_up = [job for job in jobs if self._tries[job.key, attack.name] >= enough]
        self._record([_failed(job, reason) for job in given_up])


def slow_may(all_workers: Sequence[Worker], agenda: Agenda) -> bool:
    """Returns whether a worker may take a slow attack: the last one stays for quick attacks."""
    slow = sum(is_slow(worker.jobs[0].attack.attack) for worker in all_workers if worker.jobs)
    return slow < len(all_workers) - 1 or not agenda.quick_left


@contextmanager
def attacking(run: Run, experiment: Experiment, crew: Crew = ALONE) -> Iterator[Callable[[], bool]]:
    """Attacks while the body trains, and until all is attacked; gives up if the body fails.

    Yields:
        A function that the body calls now and then. It returns whether to stop, because it is
        enough or because attacking failed. The error of the attacks is then raised in place of
        the body's.
    """
    trained, stopped, ended = threading.Event(), threading.Event(), threading.Event()
    errors: list[BaseException] = []
    until = replace(crew, enough=lambda: stopped.is_set() or crew.enough())

    def dispatch() -> None:
        try:
            attack_captures(run, experiment, until, no_more=trained.is_set)
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            errors.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=dispatch, name="attacks")
    try:
        thread.start()
        try:
            yield lambda: bool(errors) or crew.enough()
        except Exception as error:
            if not errors:
                raise
            _log.info("training ended: %s", error)
        trained.set()
        # Not `join`: when Ctrl-C interrupts that, Python takes the thread for one that has ended.
        while not ended.wait(POLL_SECONDS):
            pass
    finally:
        stopped.set()
        if thread.is_alive():
            thread.join()
    if errors:
        raise errors[0]


def _under_way(worker: Worker) -> UnderWay:
    """Returns what a busy worker is doing."""
    first = worker.jobs[0]
    clients = tuple(job.key.client for job in worker.jobs)
    return UnderWay(first.attack.name, first.key.round, clients, worker.progress())


def _failed(task: Task, reason: str) -> Answer:
    """Returns the answer of an attack that failed for good."""
    return process.answer_of(task, Reconstruction.none(Status.FAILED, reason))
