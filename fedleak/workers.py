"""Where attacks run: one process per device, apart from training and from the truth.

A worker is handed the place of a capture and the facts that were granted. An attack gets what was
in the capture and those facts; it cannot import what opens the vault or any other file of the run.
"""

import dataclasses
import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
import torch

from fedleak import models
from fedleak.attacks import Attack, Setting
from fedleak.config import NamedAttack
from fedleak.models import LanguageModel, ModelSpec
from fedleak.observation import Knowledge, Observation, ThreatModel
from fedleak.reconstruction import Reconstruction, Status
from fedleak.store import Key, Run
from fedleak.streams import stream

WATCH_SECONDS = 1.0


@dataclass(frozen=True)
class Job:
    """One attack on one capture.

    Attributes:
        run: The run directory.
        key: Which capture.
        attack: The attack and its name.
        threat: What the attacker was granted.
        knowledge: All that it knows, granted facts included.
        model: What `models.load` needs.
        seed: Of the experiment.
    """

    run: Path
    key: Key
    attack: NamedAttack
    threat: ThreatModel
    knowledge: Knowledge
    model: ModelSpec
    seed: int


def settings(attack: Attack) -> dict[str, Any]:
    """Returns an attack's kind and hyper-parameters."""
    return {"kind": attack.kind} | dataclasses.asdict(attack)  # type: ignore[call-overload,no-any-return]


def row(
    job: Job, answer: Reconstruction, seconds: float | None, device: str | None
) -> dict[str, Any]:
    """Returns the line of reconstructions.jsonl."""
    said = asdict(answer)
    return {
        "round": job.key.round,
        "client": job.key.client,
        "attack": job.attack.name,
        "settings": settings(job.attack.attack),
        "granted": sorted(job.threat.knows),
        "knows": sorted(job.knowledge.granted()),
        "seconds": seconds,
        "device": device,
        **said,
        **{name: _plain(said[name]) for name in ("evidence", "margins", "diagnostics")},
    }


def _plain(value: Any) -> Any:
    """Returns a value with null for each number that is not finite: JSON has no infinity."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def failure(error: BaseException) -> str:
    """Returns why a try of an attack failed, in one line."""
    if isinstance(error, BrokenProcessPool):
        return "the worker process died"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


class Worker:
    """A process on one device, with one job at a time.

    It has a pool to itself: whatever kills the process, at whatever moment, breaks nothing that
    others wait for, and the next job finds a new process.
    """

    def __init__(self, device: str, time_limit: float) -> None:
        self._device, self._time_limit = device, time_limit
        self.job: Job | None = None
        self._start()

    def submit(self, job: Job) -> None:
        """Takes a job."""
        self.job = job
        self._deadline = math.inf
        try:
            self._answer = self._pool.submit(work, job, self._device)
        except BrokenProcessPool:  # killed while it had nothing to do
            self._restart()
            self._answer = self._pool.submit(work, job, self._device)

    def result(self) -> dict[str, Any] | BaseException | None:
        """Returns the answer or why there is none, and is free again; None while it works."""
        if self._answer.done():
            self.job = None
            error = self._answer.exception()
            if isinstance(error, BrokenProcessPool):
                self._restart()
            return error or self._answer.result()
        if self._deadline == math.inf and self._pid.done():
            # Counted from here, so that importing torch is not held against an attack.
            self._deadline = time.monotonic() + self._time_limit
        if time.monotonic() > self._deadline:
            self.job = None
            self._restart()
            return TimeoutError(f"took longer than workers.time_limit = {self._time_limit:g} s")
        return None

    def stop(self) -> None:
        """Ends the process."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._pid.done() and self._pid.exception() is None:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(self._pid.result()).kill()

    def _restart(self) -> None:
        self.stop()
        self._start()

    def _start(self) -> None:
        self._pool = ProcessPoolExecutor(
            max_workers=1,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_prepare,
            initargs=(self._device, os.getpid()),
        )
        self._pid = self._pool.submit(os.getpid)


@contextmanager
def workers(on: Sequence[str], time_limit: float) -> Iterator[list[Worker]]:
    """Starts a worker per device, and ends them."""
    started = [Worker(device, time_limit) for device in on]
    try:
        yield started
    finally:
        for worker in started:
            worker.stop()


def devices(wanted: Sequence[str] | None) -> list[str]:
    """Returns the devices to attack on: those wanted, else every GPU, else the CPU."""
    if wanted is not None:
        return list(wanted)
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]


def work(job: Job, device: str) -> dict[str, Any]:
    """Runs one attack, in a worker process."""
    capture = Run(job.run).read_capture(job.key)
    model = _model_at(job.run, job.key.round, job.model, device)
    update = dataclasses.replace(
        capture.update,
        tensors={name: value.to(device) for name, value in capture.update.tensors.items()},
    )
    seen = Observation(job.key.round, job.key.client, update, job.knowledge)
    obstacle = job.attack.attack.obstacle(Setting.of(seen, model))
    if obstacle is not None:
        return row(job, Reconstruction.none(Status.INADMISSIBLE, obstacle), None, None)
    if not all(bool(t.isfinite().all()) for t in update.tensors.values()):
        reason = "not every number of the update is finite: training diverged, or a cast overflowed"
        return row(job, Reconstruction.none(Status.ABSTAINED, reason), None, None)
    rng = stream(job.seed, "attack", job.attack.name, *job.key)
    start = time.perf_counter()
    answer = job.attack.attack(seen, model, rng=rng)
    line = row(job, answer, round(time.perf_counter() - start, 4), _name(device))
    json.dumps(line, allow_nan=False)  # an answer that cannot be written is the attack's failure
    return line


@lru_cache(maxsize=1)
def _model(spec: ModelSpec, device: str) -> LanguageModel:
    model = models.load(spec, weights=False)
    model.module.to(device)
    return model


@lru_cache(maxsize=1)
def _model_at(run: Path, round: int, spec: ModelSpec, device: str) -> LanguageModel:
    """Returns the model at a round's broadcast; one model is in memory, whatever the round."""
    model = _model(spec, device)
    models.load_parameters_(model, Run(run).read_broadcast(round))
    return model


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _prepare(device: str, parent: int) -> None:
    """Prepares a worker: Ctrl-C is the parent's to handle, and no worker outlives the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # One thread each: results do not depend on what else the machine does.
    torch.set_num_threads(1)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
