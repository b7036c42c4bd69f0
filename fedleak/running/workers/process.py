"""Where attacks run: one process per device, apart from training and from the truth.

A worker gets the place of a capture and the granted facts. An attack gets the content of the
capture and those facts; it cannot import what opens the vault or any other file of the run.
Captures of one round go to an attack together if it takes several at once. Its answer is checked
here, and so is whether it changed the model, because the next attack uses the same model.
"""

import dataclasses
import importlib
import math
import multiprocessing
import os
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from fedleak import models
from fedleak.attacks import OnProgress, Progress, settings
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.config.components import NamedAttack
from fedleak.models import LanguageModel, ModelSpec, has_dropout, loading
from fedleak.running.workers import attempt
from fedleak.running.workers.answers import one_line
from fedleak.running.workers.model_state import changed, state
from fedleak.store.records import Answer
from fedleak.store.run import Key, Run
from fedleak.training.observation import Knowledge, Observation
from fedleak.util.errors import CaptureError
from fedleak.util.processes import end_with_parent, holding_ctrl_c, start_tracker
from fedleak.util.rng import stream

T = TypeVar("T")

NOTE_SECONDS = 1.0
"""The shortest time between two words of a worker on the progress of its attack."""

LONGEST_TRACE = 10_000
"""Characters of a traceback that are kept."""

_telling_end: Connection | None = None


@dataclass(frozen=True, kw_only=True)
class Task:
    """One attack on one update.

    Attributes:
        key: Which update.
        attack: The attack, its name, and what the attacker was granted.
        knowledge: All that the attacker knows, granted facts included.
    """

    key: Key
    attack: NamedAttack
    knowledge: Knowledge


@dataclass(frozen=True, kw_only=True)
class Job(Task):
    """One attack on one capture.

    Attributes:
        run: The run directory.
        model: What `models.load` needs.
        seed: Of the experiment.
    """

    run: Path
    model: ModelSpec
    seed: int


def answer_of(
    task: Task,
    reconstruction: Reconstruction,
    seconds: float | None = None,
    device: str | None = None,
    together: int | None = None,
) -> Answer:
    """Returns what is kept of an attack on one update.

    Args:
        task: What was to be attacked.
        reconstruction: What the attack returned.
        seconds, device: Of the attack alone, its share of the call; None if it was not called.
        together: How many observations shared the call.
    """
    return Answer(
        **task.key._asdict(),
        attack=task.attack.name,
        settings=settings(task.attack.attack),
        granted=tuple(sorted(task.attack.threat.knows)),
        knows=tuple(sorted(task.knowledge.granted())),
        seconds=seconds,
        device=device,
        together=together,
        **vars(reconstruction),
    )


def failure(error: BaseException) -> str:
    """Returns why a try of an attack failed, in one line."""
    if isinstance(error, BrokenProcessPool):
        return "the worker process died"
    return one_line(f"{type(error).__name__}: {error}")


def trace(error: BaseException) -> str:
    """Returns the end of an error's traceback, also of one from a worker process."""
    text = "".join(traceback.format_exception(error))[-LONGEST_TRACE:]
    return text.encode(errors="backslashreplace").decode()  # JSON is not read back with surrogates


class Worker(ABC):
    """Runs one try at a time, on this machine or another.

    If a try crashes or takes too long, only that try is lost: the next one gets a new process.

    Args:
        time_limit: Seconds of each capture.

    Attributes:
        jobs: The jobs of its try: one, or several of one attack and round; empty without a try.
        answer: The future of the try's answers.
    """

    _ready: Future[Any]

    def __init__(self, time_limit: float) -> None:
        self._time_limit, self._deadline = time_limit, math.inf
        self.jobs: tuple[Job, ...] = ()
        self.answer: Future[list[Answer]] = Future()
        self._start()

    @property
    @abstractmethod
    def free(self) -> bool:
        """Whether it can take jobs now."""

    @abstractmethod
    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes jobs of one attack and round."""

    def result(self) -> list[Answer] | BaseException | None:
        """Returns an answer per job, or why there is none; None while it works."""
        if self.answer.done():
            self._finish()
            error = self.answer.exception()
            if error is None:
                return self.answer.result()
            cause = self._cause(error)
            if isinstance(cause, BrokenProcessPool):
                self._restart()
            return cause
        if self._deadline == math.inf and self._ready.done():
            # Counted from here, so that importing torch takes no time of an attack.
            self._deadline = time.monotonic() + self._time_limit * len(self.jobs)
        if time.monotonic() <= self._deadline:
            return None
        per_capture = f" for each of {len(self.jobs)} captures" if len(self.jobs) > 1 else ""
        self.give_up()
        return TimeoutError(
            f"took longer than workers.time_limit = {self._time_limit:g} s{per_capture}"
        )

    def give_up(self) -> None:
        """Ends the current try without an answer; then the worker is free again."""
        self._restart()
        self._finish()

    @abstractmethod
    def progress(self) -> Mapping[int, Progress]:
        """Returns how far its attack is with each client, as far as the attack has said."""

    @abstractmethod
    def stop(self) -> None:
        """Ends what runs the attack, whatever it is doing."""

    @abstractmethod
    def _start(self) -> None:
        """Starts what runs attacks, which is `_ready` for them some time later."""

    def _restart(self) -> None:
        self.stop()
        self._start()

    def _finish(self) -> None:
        self.jobs, self._deadline = (), math.inf

    def _cause(self, error: BaseException) -> BaseException:
        """Returns why a try failed; a `BrokenProcessPool` if its process has died."""
        return error


class LocalWorker(Worker):
    """A process on one device, with one try at a time.

    It has a pool to itself: if the process is killed, at whatever moment, nothing breaks that other
    workers wait for, and the next try gets a new process. For the same reason the process tells how
    far it is through a pipe of its own.
    """

    _progress: dict[int, Progress]

    def __init__(self, device: str, time_limit: float) -> None:
        self._device = device
        super().__init__(time_limit)

    @property
    def free(self) -> bool:
        """Whether it can take jobs now."""
        return not self.jobs

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes jobs of one attack and round."""
        self.jobs = tuple(jobs)
        try:
            self.answer = self._pool.submit(_work_and_tell, self.jobs, self._device)
        except BrokenProcessPool:  # killed while it had nothing to do
            self._restart()
            self.answer = self._asked(_work_and_tell, self.jobs, self._device)

    def result(self) -> list[Answer] | BaseException | None:
        """Returns an answer per job, or why there is none; None while it works."""
        self.progress()  # whoever looks at no progress leaves room in the pipe, too
        return super().result()

    def progress(self) -> dict[int, Progress]:
        """Returns how far its attack is with each client, as far as the attack has said."""
        with suppress(EOFError, OSError):  # its process was killed, maybe in the middle of a word
            while self._told.poll():
                self._progress = self._told.recv()
        return self._progress

    def stop(self) -> None:
        """Ends the process, whatever it is doing."""
        with suppress(BrokenProcessPool, psutil.NoSuchProcess):
            process = psutil.Process(self._pid.result())
            if process.ppid() == os.getpid():  # if it died, its number may be another's by now
                process.kill()
        # A thread of the pool that is still ending would fail at the end of this program.
        self._pool.shutdown(cancel_futures=True)

    def _finish(self) -> None:
        super()._finish()
        self.progress()
        self._progress = {}

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._told, telling_end = context.Pipe(duplex=False)
        self._progress = {}
        self._pool = ProcessPoolExecutor(1, context, initializer=_begin, initargs=(telling_end,))
        # Asked before anything slow is imported there, so that it can be ended at any time: a pool
        # that is only told to shut down first completes the attack, and Python waits for that.
        with holding_ctrl_c():  # the process starts here
            self._pid = self._pool.submit(os.getpid)
        telling_end.close()  # the other copy is the process's, and is closed by its end
        self._ready = self._asked(prepare, self._device)

    def _asked(self, call: Callable[..., T], *arguments: object) -> Future[T]:
        """Hands the process a call; one that has died already fails it."""
        try:
            return self._pool.submit(call, *arguments)
        except BrokenProcessPool as error:
            failed: Future[T] = Future()
            failed.set_exception(error)
            return failed


@contextmanager
def workers(on: Sequence[str], time_limit: float) -> Iterator[list[LocalWorker]]:
    """Starts a worker per device, and ends them."""
    start_tracker()
    started = [LocalWorker(device, time_limit) for device in on]
    try:
        yield started
    finally:
        for worker in started:
            worker.stop()


def wait_for_any(on: Sequence[Worker], seconds: float) -> None:
    """Waits until a busy worker has an answer, but not longer than that."""
    if busy := [worker.answer for worker in on if worker.jobs]:
        wait(busy, seconds, FIRST_COMPLETED)
    else:
        time.sleep(seconds)


def devices(wanted: Sequence[str] | None) -> list[str]:
    """Returns the devices to attack on: those wanted, else every GPU, else the CPU."""
    if wanted is not None:
        return list(wanted)
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]


def work_together(
    jobs: Sequence[Job], device: str, report: OnProgress = lambda client, progress: None
) -> list[Answer]:
    """Runs one attack on captures of one round, in a worker process; returns an answer for each.

    Args:
        jobs: Several only for an attack that takes them at once.
        device: The device to attack on.
        report: Called with the number of a client, not its place among the jobs, and the progress.

    Raises:
        CaptureError: The model of the round is damaged. A damaged capture is a failed answer.
    """
    first = jobs[0]
    model, before = _model_at(first.run, first.key.round, first.model, device)
    looked = [(job, _look(job, model, device)) for job in jobs]
    answers = {job.key: answer_of(job, s) for job, s in looked if isinstance(s, Reconstruction)}
    attacked = [(job, seen) for job, seen in looked if isinstance(seen, Observation)]
    if attacked:
        start = time.perf_counter()
        seen = [observation for _, observation in attacked]
        # One name on all rungs of the ladder, so that the facts make the difference, not the draw.
        attack, name = first.attack.attack, first.attack.listed_as
        rngs = [stream(first.seed, "attack", name, o.round, o.client) for o in seen]
        try:
            returned = attempt.call(
                attack, seen, model, rngs=rngs, report=lambda i, at: report(seen[i].client, at)
            )
            seconds = round((time.perf_counter() - start) / len(attacked), 4)
        finally:
            spoiled = changed(model, before)
            if spoiled:  # the next attack gets a new one
                _model_at.cache_clear()
                _model.cache_clear()
        checked = attempt.answers(attack, returned, seen, model, spoiled)
        for (job, _), answer in zip(attacked, checked, strict=True):
            answers[job.key] = answer_of(job, answer, seconds, device_name(device), len(attacked))
    return [answers[job.key] for job in jobs]


def _look(job: Job, model: LanguageModel, device: str) -> Observation | Reconstruction:
    """Returns the observation to attack, or the answer if it cannot be attacked."""
    try:
        parameters = dict(model.module.named_parameters())
        update = Run(job.run).captures.read_capture(job.key, parameters).update
    except CaptureError as error:
        return Reconstruction.none(Status.FAILED, str(error))
    tensors = {name: value.to(device) for name, value in update.tensors.items()}
    # With Poisson sampling clients report the expected size; the lengths show the true size.
    lengths = job.knowledge.lengths
    if lengths == ():
        return Reconstruction.none(Status.ABSTAINED, "the batch is empty: sampling drew nobody")
    if not update.num_examples:
        reason = "the client dropped out of the sum, so nothing of it is there"
        return Reconstruction.none(Status.ABSTAINED, reason)
    examples = update.num_examples if lengths is None else len(lengths)
    update = dataclasses.replace(update, tensors=tensors, num_examples=examples)
    known = job.knowledge
    if known.dropout and not has_dropout(model.module):  # so its gradients can be recomputed
        known = dataclasses.replace(known, dropout=False)
    seen = Observation(**job.key._asdict(), update=update, knowledge=known)
    return attempt.unfit(job.attack.attack, seen, model) or seen


def _begin(telling_end: Connection) -> None:
    """Begins a worker process, which tells its parent through this end of a pipe how far it is."""
    global _telling_end
    _telling_end = telling_end
    end_with_parent()


def _work_and_tell(jobs: Sequence[Job], device: str) -> list[Answer]:
    """Runs one attack, and tells the parent of the progress."""
    assert _telling_end is not None
    return work_together(jobs, device, telling(_telling_end.send))


def telling(send: Callable[[dict[int, Progress]], None]) -> OnProgress:
    """Returns a callback that sends the progress by client, at most once in `NOTE_SECONDS`."""
    latest: dict[int, Progress] = {}
    sent = -math.inf

    def report(client: int, progress: Progress) -> None:
        nonlocal sent
        latest[client] = progress
        now = time.monotonic()
        if now - sent >= NOTE_SECONDS:
            sent = now
            send(latest)

    return report


@lru_cache(maxsize=1)
def _model(spec: ModelSpec, device: str) -> LanguageModel:
    model = loading.load(spec, weights=False)
    model.module.to(device)
    return model


@lru_cache(maxsize=1)
def _model_at(
    run: Path, round: int, spec: ModelSpec, device: str
) -> tuple[LanguageModel, Mapping[str, object]]:
    """Returns the model with the weights that the target of a round was sent, and its state.

    One model is in memory, whatever the round.
    """
    model = _model(spec, device)
    models.load_parameters_(model, Run(run).model_sent(round).read_model(round))
    return model, state(model)


def device_name(device: str) -> str:
    """Returns what a device is called."""
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def prepare(device: str) -> None:
    """Prepares a worker for attacks."""
    # One thread each: results do not depend on what else the machine does.
    torch.set_num_threads(1)
    # Imports that take seconds take no time of the first attack either.
    for slow in ("scipy.optimize", "transformers.modeling_utils", "transformers.models.auto"):
        importlib.import_module(slow)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
