"""From an experiment to scores: prepare a run, attack its captures as they come, score them."""

import importlib
import json
import logging
import shlex
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedleak import attacks, forecast, logs, models
from fedleak.attacks import is_slow
from fedleak.audit import central_baseline, defense_checks, scoring
from fedleak.audit.scoring import Scored
from fedleak.config.experiment import Experiment, NamedAttack, difference
from fedleak.dispatch.agenda import Agenda, Arrivals, Work
from fedleak.errors import CaptureError, ConfigError, FedleakError
from fedleak.federation import (
    Workload,
    captures_made,
    divide,
    expected_captures,
    outline,
    protection,
    read_data,
    stored,
    unknown_share,
)
from fedleak.observation import Knowledge
from fedleak.reconstruction import Reconstruction, Status
from fedleak.store import records
from fedleak.store.run import Key, Run
from fedleak.versions import versions
from fedleak.workers.process import (
    Job,
    Worker,
    devices,
    failure,
    row,
    settings,
    trace,
    wait_for_any,
    workers,
)

_log = logging.getLogger(__name__)

TRIES = 3
"""How often an attack that crashes is tried on one capture."""

POLL_SECONDS = 0.05


class UnderWay(NamedTuple):
    """What a worker is doing.

    Attributes:
        attack: Its name.
        round, clients: The captures it is attacking.
        progress: How far it is with a client, as far as the attack has said.
    """

    attack: str
    round: int
    clients: tuple[int, ...]
    progress: Mapping[int, attacks.Progress]


class Finished(NamedTuple):
    """An answer that has just come; its attack's own seconds, None where it was not called."""

    attack: str
    key: Key
    status: str
    seconds: float | None


class Progress(NamedTuple):
    """How far a run is, and what its busy workers are doing.

    Attributes:
        captures, captures_expected, answers, answers_expected: So many of so many.
        under_way: What each busy worker does.
        finished: The answers since the last time.
        rounds, rounds_expected: Rounds of training that are complete, of so many.
        seconds_left: What the attacks that are left will take, as far as that can be told.
        seconds_most: What those of them that have a time limit of their own take at most.
    """

    captures: int
    captures_expected: int
    answers: int
    answers_expected: int
    under_way: tuple[UnderWay, ...] = ()
    finished: tuple[Finished, ...] = ()
    rounds: int = 0
    rounds_expected: int = 0
    seconds_left: float | None = None
    seconds_most: float = 0.0


@dataclass(frozen=True)
class Plan:
    """An experiment that can work, and what its run directory starts with."""

    experiment: Experiment
    num_labels: int
    held_out: Mapping[str, Any]
    remarks: tuple[str, ...] = ()
    """What may not be meant, for the user to read."""
    disk: int = 0
    """Bytes of all captures and models."""


def prepare(experiment: Experiment, path: Path, *, fresh: bool = False) -> Run:
    """Checks the experiment, and opens its run directory or makes it.

    Args:
        experiment: What to run.
        path: The run directory.
        fresh: Move what is there out of the way.

    Raises:
        ConfigError: The experiment cannot work, or differs from the one that ran here.
    """
    return open_run(plan(experiment), path, fresh=fresh)


def plan(experiment: Experiment) -> Plan:
    """Reads the data and looks at the model, and writes nothing.

    Raises:
        ConfigError: The experiment cannot work.
    """
    split = read_data(experiment)
    num_labels = len(split.train.label_names)
    model = outline(experiment, num_labels)
    experiment.check_defenses(model)
    experiment.check_attacks(model)
    workload = divide(experiment, split, model)
    unknown = unknown_share(workload, model)
    for client, part in enumerate(workload.parts):
        protection(experiment, client, len(part))  # refuses an epsilon out of reach
    models.check_weights(experiment.model_spec(num_labels))
    held_out = {"sequences": workload.held_out, "labels": workload.held_out_labels}
    return Plan(
        experiment,
        num_labels,
        held_out,
        _remarks(experiment, split.dropped, unknown, workload),
        forecast.bytes_kept(experiment, model),
    )


def _remarks(
    experiment: Experiment, dropped: int, unknown: float, workload: Workload
) -> tuple[str, ...]:
    """Returns what is no mistake, but may not be meant."""
    batch, parts = experiment.federation.batch_size, workload.parts
    small = [len(part) for part in parts if len(part) < batch]
    found = {
        f"{dropped} rows without text were dropped": dropped,
        f"{unknown:.0%} of the tokens are unknown words, which no attack can read": unknown > 0.05,
        f"federation.batch_size = {batch} is more than {len(small)} of {len(parts)} clients have: "
        f"their batches are all that they have, {min(small, default=0)} examples or more": small,
    }
    return tuple(remark for remark, holds in found.items() if holds)


def open_run(plan: Plan, path: Path, *, fresh: bool = False) -> Run:
    """Opens the run directory of an experiment, or makes it.

    Raises:
        ConfigError: Another experiment ran here, there are files that belong to none, or what the
            run keeps does not fit on the disk.
    """
    run = Run(path)
    forecast.refuse_full_disk(plan.disk, path, anew=fresh)
    if fresh and path.is_dir():
        with run.lock():
            run.move_aside()
    if run.exists():
        _refuse_another(run, plan.experiment)
        refuse_purged(run)
        _make_held_out(run, plan)
        return run
    if (path / "sweep.json").exists():
        raise ConfigError(
            f"{str(path)!r} holds a sweep: give this run another name, or --fresh to move the "
            "sweep aside"
        )
    # A run that was killed before its run.json was written has left no more than a log.
    if there := sorted({each.name for each in path.glob("[!.]*")} - {logs.LOG}):
        # Captures and answers of nobody knows what must not pass for this experiment's.
        more = f" and {len(there) - 3} more" if len(there) > 3 else ""
        raise ConfigError(
            f"{str(path)!r} is not empty ({', '.join(there[:3])}{more}) and has no run.json: give "
            "this run another name, delete the folder, or --fresh to move it aside"
        )
    run.create(
        experiment=plan.experiment.model_dump(mode="json"),
        fingerprint=plan.experiment.fingerprint,
        status="new",
        num_labels=plan.num_labels,
        versions=versions(),
        git_commit=_git_commit(),
        model_fingerprint=None,
        remarks=list(plan.remarks),
    )
    _make_held_out(run, plan)
    return run


def refuse_purged(run: Run) -> None:
    """Refuses to go on with a run whose private data was deleted.

    Raises:
        ConfigError: `fedleak purge` was here.
    """
    if date := run.info().get("purged"):
        raise ConfigError(
            f"{str(run.path)!r} was purged on {date}: its captures, models and private texts are "
            f"deleted, so nothing can be trained or attacked there: `fedleak score {run.path}` "
            "shows its figures; --fresh, or another name, runs the experiment anew"
        )


def finished(run: Run, experiment: Experiment) -> bool:
    """Returns whether an experiment is trained, attacked and scored here.

    Raises:
        ConfigError: Another experiment ran here.
    """
    if not run.exists():
        return False
    _refuse_another(run, experiment)
    if run.info().get("purged"):
        return True
    wanted = {
        (key, each.name) for key in expected_captures(experiment) for each in experiment.attacks
    }
    try:
        summary = run.read_json("summary.json")
        lines = run.rows("reconstructions.jsonl", records.answer(run.fingerprint()))
    except FedleakError:  # missing or damaged: running mends what it can
        return False
    # Scores from before the end of the run, by `fedleak score`, are not those of all of it.
    scored = isinstance(summary, dict) and summary.get("status") == "finished"
    done = scored and run.info()["status"] == "finished"
    return done and wanted <= _answered(lines, experiment)


def carry_out(
    run: Run,
    experiment: Experiment,
    report: Callable[[Progress], None] = lambda progress: None,
    on: Sequence[Worker] | None = None,
) -> list[Scored]:
    """Trains, attacks and scores, or what of it the run directory lacks.

    Args:
        run: The run directory.
        experiment: What was prepared there.
        report: Is told how far the run is.
        on: Workers for the attacks; None: as many as the experiment asks for, for this run only.
    """
    # By its name, because the library does not know Flower.
    engine = importlib.import_module(f"server.{experiment.federation.engine}")
    with run.lock():
        with under_way(run, experiment, report, on) as stop:
            engine.train(run, experiment, stop)
        return scoring.score_run(run)


@contextmanager
def under_way(
    run: Run,
    experiment: Experiment,
    report: Callable[[Progress], None] = lambda progress: None,
    on: Sequence[Worker] | None = None,
) -> Iterator[Callable[[], bool]]:
    """Does all that is around training: checks of defenses, attacks, the central reference.

    Yields:
        Whether training is to stop, as `attacking` does.

    Raises:
        FedleakError: A defense does not do what it says.
    """
    with noting_status(run):
        defense_checks.refuse_broken(run, experiment)
        with attacking(run, experiment, report, on) as stop:
            yield stop
        if _wants_reference(run, experiment):
            run.write_json("reference.json", central_baseline.central(experiment, run))


def attack_captures(
    run: Run,
    experiment: Experiment,
    *,
    no_more: Callable[[], bool],
    stop: Callable[[], bool] = lambda: False,
    report: Callable[[Progress], None] = lambda progress: None,
    on: Sequence[Worker] | None = None,
) -> None:
    """Attacks every capture that has no answer yet, until `no_more` come and all have one.

    The work that is left is always what the directory lacks, so this can be killed at any time.
    An attack that takes captures together gets the same ones together however often that happens.
    Quick attacks go first: a slow one starts only while another worker is left for quick ones, or
    once all quick ones have answered. Workers that are lent (`on`) may still be busy if it was
    stopped or failed.

    Raises:
        ConfigError: An attack of this name already ran here with other settings.
    """
    refuse_purged(run)
    lines = run.salvage("reconstructions.jsonl", records.answer(run.fingerprint()))
    answered = _answered(lines, experiment)
    tries = Counter(
        (Key(line["round"], line["client"]), line["attack"])
        for line in run.salvage("attempts.jsonl", records.ATTEMPT)
    )
    made, expected = captures_made(experiment), expected_captures(experiment)
    per_round = len(made) // experiment.federation.rounds
    wanted = len(expected) * len(experiment.attacks)
    agenda = Agenda(experiment.attacks, expected, answered, set(tries))
    arrivals = Arrivals(run, expected, experiment.attacked)
    pace = Pace(experiment.attacks, len(expected), answered)
    finished: list[Finished] = []
    model = experiment.model_spec(run.info()["num_labels"])
    threat = experiment.threat_model
    hired: AbstractContextManager[Sequence[Worker]] = (
        workers(devices(experiment.workers.devices), experiment.workers.time_limit)
        if on is None
        else nullcontext(on)
    )

    def record(lines: Sequence[dict[str, Any]]) -> None:
        run.append_answers(lines)
        for line in lines:
            key, name = Key(line["round"], line["client"]), line["attack"]
            answered.add((key, name))
            agenda.answered(key, name)
            finished.append(Finished(name, key, line["status"], line["seconds"]))
            pace.answered(name, line["seconds"] or 0.0)
            _log.info("%s on %s: %s in %s s", name, key, line["status"], line["seconds"])

    def look_at(jobs: Sequence[Job], found: list[dict[str, Any]] | BaseException) -> None:
        """Records answers, or a try that failed."""
        if not isinstance(found, BaseException):
            return record(found)
        reason, traceback = failure(found), trace(found)
        attack, keys = jobs[0].attack, [job.key for job in jobs]
        _log.warning("%s failed on %s: %s", attack.name, ", ".join(map(str, keys)), traceback)
        tries.update((key, attack.name) for key in keys)
        run.append_all(
            "attempts.jsonl",
            [
                {**key._asdict(), "attack": attack.name, "reason": reason, "traceback": traceback}
                for key in keys
            ],
        )
        enough = 1 if isinstance(found, CaptureError) else TRIES
        for job in jobs:
            if tries[job.key, attack.name] < enough:
                agenda.again(attack, job.key)
        record([_failed(j, reason) for j in jobs if tries[j.key, attack.name] >= enough])

    def hand_out(work: Work, worker: Worker) -> None:
        """Gives captures to a worker, without those that are damaged."""
        jobs = []
        for key in work.keys:
            job = Job(run.path, key, work.attack, threat, Knowledge(), model, experiment.seed)
            try:
                jobs.append(replace(job, knowledge=scoring.knowledge(run, key, threat)))
            except CaptureError as error:
                record([_failed(job, str(error))])
        if jobs:
            worker.submit(jobs)

    with hired as all_workers:
        closed = False
        while not stop():
            last_look = no_more()  # asked before looking, so that nothing slips in between
            for key in arrivals.new(everywhere=last_look and not closed):
                agenda.arrived(key)
            if last_look and not closed:
                agenda.close()
                closed = True
            for worker in all_workers:
                while not worker.jobs and (
                    work := agenda.take(slow=_slow_may(all_workers, agenda))
                ):
                    hand_out(work, worker)
            for worker in all_workers:
                if (jobs := worker.jobs) and (found := worker.result()) is not None:
                    look_at(jobs, found)
            under_way = tuple(_under_way(worker) for worker in all_workers if worker.jobs)
            round = arrivals.round()
            done = arrivals.here + arrivals.rounds_forgotten * per_round
            report(
                Progress(
                    done,
                    len(made),
                    len(answered),
                    wanted,
                    under_way,
                    tuple(finished),
                    round - 1,
                    experiment.federation.rounds,
                    pace.seconds_left(len(all_workers)),
                    pace.seconds_most(len(all_workers)),
                )
            )
            finished.clear()
            if closed and not under_way and not agenda.ready:
                return
            wait_for_any(all_workers, POLL_SECONDS)


def _slow_may(all_workers: Sequence[Worker], agenda: Agenda) -> bool:
    """Returns whether a worker may take a slow attack: not the last one that quick ones have."""
    slow = sum(is_slow(worker.jobs[0].attack.attack) for worker in all_workers if worker.jobs)
    return slow < len(all_workers) - 1 or not agenda.quick_left


class Pace:
    """How long attacks take, for an estimate of the time that is left.

    Args:
        named: The attacks.
        each: How many answers each is to give.
        answered: Those that they have given before: captures and names.
    """

    def __init__(
        self, named: Sequence[NamedAttack], each: int, answered: Set[tuple[Key, str]]
    ) -> None:
        self._limits: dict[str, object] = {
            one.name: getattr(one.attack, "seconds", None) for one in named
        }
        self._left = Counter({one.name: each for one in named})
        self._left.subtract(name for _, name in answered)
        self._took: Counter[str] = Counter()
        self._count: Counter[str] = Counter()

    def answered(self, name: str, seconds: float) -> None:
        """Notes an answer."""
        self._left[name] -= 1
        self._count[name] += 1
        self._took[name] += seconds  # type: ignore[assignment]

    def seconds_left(self, num_workers: int) -> float | None:
        """Returns the estimate; None where an attack that is left has not answered once."""
        left = {name: count for name, count in self._left.items() if count > 0}
        if not left.keys() <= self._count.keys():
            return None
        each = (count * self._took[name] / self._count[name] for name, count in left.items())
        return sum(each) / max(1, num_workers)

    def seconds_most(self, num_workers: int) -> float:
        """Returns what attacks that are left take at most, of those that have a time limit."""
        limits = {n: limit for n, limit in self._limits.items() if isinstance(limit, int | float)}
        return sum(self._left[name] * limit for name, limit in limits.items()) / max(1, num_workers)


@contextmanager
def attacking(
    run: Run,
    experiment: Experiment,
    report: Callable[[Progress], None] = lambda progress: None,
    on: Sequence[Worker] | None = None,
) -> Iterator[Callable[[], bool]]:
    """Attacks while the body trains, and until all is attacked; gives up if the body fails.

    Yields:
        What the body asks now and then: whether attacking has failed, so that there is no use in
        going on. Its error is then raised in place of the body's.
    """
    trained, stopped, ended = threading.Event(), threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def dispatch() -> None:
        try:
            attack_captures(
                run, experiment, no_more=trained.is_set, stop=stopped.is_set, report=report, on=on
            )
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            errors.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=dispatch, name="attacks")
    try:
        thread.start()
        try:
            yield lambda: bool(errors)
        except Exception as error:
            if not errors:
                raise
            _log.info("training ended: %s", error)
        trained.set()
        # Not `join`: when Ctrl-C interrupts that, Python takes the thread for one that has ended.
        while not ended.is_set():
            time.sleep(POLL_SECONDS)
    finally:
        stopped.set()
        if thread.is_alive():
            thread.join()
    if errors:
        raise errors[0]


@contextmanager
def noting_status(run: Run) -> Iterator[None]:
    """Notes in run.json that the run is going on, how it ended, and why if it failed."""
    run.update_info(status="running", failure=None)
    try:
        yield
    except KeyboardInterrupt:
        run.update_info(status="interrupted")
        raise
    except BaseException as error:
        with suppress(OSError, FedleakError):  # a full disk must not hide what came first
            why = {"reason": failure(error), "traceback": trace(error)}
            run.update_info(status="failed", failure=why)
        raise
    run.update_info(status="finished")


def drop_failures(run: Run) -> int:
    """Forgets failed answers, so that they are tried again; returns how many."""
    lines = run.salvage("reconstructions.jsonl", records.answer(run.fingerprint()))
    kept = [line for line in lines if line["status"] != Status.FAILED]
    failed = {
        (line["round"], line["client"], line["attack"])
        for line in lines
        if line["status"] == Status.FAILED
    }
    tries = run.salvage("attempts.jsonl", records.ATTEMPT)
    run.write_rows(
        "attempts.jsonl",
        [t for t in tries if (t["round"], t["client"], t["attack"]) not in failed],
    )
    run.write_rows("reconstructions.jsonl", kept)
    return len(failed)


def disk_note(run: Run, experiment: Experiment) -> str | None:
    """Returns how much disk a run takes, in a line; None if that is not worth a word."""
    model = outline(experiment, run.info()["num_labels"])
    return forecast.disk(forecast.bytes_kept(experiment, model), run.path)


def check_attacks(experiment: Experiment, num_labels: int) -> None:
    """Refuses attacks that cannot work in this experiment, before anything starts.

    Raises:
        ConfigError: The first of them.
    """
    experiment.check_attacks(outline(experiment, num_labels))


def _wants_reference(run: Run, experiment: Experiment) -> bool:
    """Whether a centrally trained model is asked for, can be judged, and is not there yet."""
    judged = experiment.data.held_out > 0
    return experiment.utility.reference and judged and not (run.path / "reference.json").is_file()


def _under_way(worker: Worker) -> UnderWay:
    """Returns what a busy worker is doing."""
    first = worker.jobs[0]
    clients = tuple(job.key.client for job in worker.jobs)
    return UnderWay(first.attack.name, first.key.round, clients, worker.progress())


def _failed(job: Job, reason: str) -> dict[str, Any]:
    """Returns the line of an attack that failed for good."""
    return row(job, Reconstruction.none(Status.FAILED, reason))


def _answered(lines: Iterable[Mapping[str, Any]], experiment: Experiment) -> set[tuple[Key, str]]:
    """Returns what this experiment's attacks have answered already."""
    known = {each.name: each for each in experiment.attacks}
    answered = set()
    for line in lines:
        each = known.get(line["attack"])
        if each is None:
            continue
        changed = difference(line["settings"], settings(each.attack))
        # An attack that uses none of the facts answers alike, whatever is granted.
        before, now = (
            each.attack.uses & set(g) for g in (line["granted"], experiment.threat.knows)
        )
        changed += difference(sorted(before), sorted(now), "threat.knows.")
        if changed:
            raise ConfigError(
                f"attack {each.name!r} already ran here with other settings "
                f"({'; '.join(changed)}): give this one another name = ..."
            )
        answered.add((Key(line["round"], line["client"]), each.name))
    return answered


def _refuse_another(run: Run, experiment: Experiment) -> None:
    """Refuses to go on with a run directory in which another experiment ran."""
    # Workers cannot change its results.
    old, new = (
        each.model_dump(mode="json", exclude={"workers"}) for each in (stored(run), experiment)
    )
    changed = difference(old, new)
    if not changed:
        return
    told, keys = "; ".join(changed[:4]), [line.partition(":")[0] for line in changed]
    if {*keys} <= {"attack", "threat.knows"}:
        wanted = {"attack": new["attack"], "threat.knows": new["threat"]["knows"]}
        sets = " ".join(f"--set {shlex.quote(f'{key}={_toml(wanted[key])}')}" for key in keys)
        raise ConfigError(
            f"{str(run.path)!r} was attacked otherwise ({told}): `fedleak attack "
            f"{shlex.quote(str(run.path))} {sets}` attacks its captures so, without training "
            "again; an attack that has answered with other settings needs another name = ..."
        )
    raise ConfigError(
        f"{str(run.path)!r} holds another experiment ({told}): give this one another name, or "
        "--fresh to move the old run aside"
    )


def _toml(value: Any) -> str:
    """Returns a value of an experiment file as it is written after `--set key=`."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def _make_held_out(run: Run, plan: Plan) -> None:
    """Writes the held-out texts, unless they are there."""
    with suppress(FedleakError):
        found = run.read_json("held_out.json")
        if isinstance(found, dict) and found.keys() >= plan.held_out.keys():
            return
    run.write_json("held_out.json", plan.held_out)


def _git_commit() -> str | None:
    """Returns the commit of this checkout, with a mark if files differ; None if it is none."""
    command: Sequence[str] = (
        "git",
        "describe",
        "--always",
        "--dirty",
        "--abbrev=40",
        "--exclude=*",
    )
    try:
        done = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
