"""Where attacks run: one process per device, apart from training and from the truth.

A worker is handed the place of a capture and the facts that were granted; it can open neither the
vault nor the data. Pebble keeps the pool: it ends a try that outlives its time limit and replaces
a process that died.
"""

import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from pebble import ProcessExpired, ProcessPool

from fedleak import models
from fedleak.attacks import Attack, Setting
from fedleak.config import NamedAttack
from fedleak.models import LanguageModel
from fedleak.observation import Knowledge, Observation
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
        knowledge: All that the attacker knows, granted facts included.
        model: Name, task and number of labels, for `models.load`.
        seed: Of the experiment.
    """

    run: Path
    key: Key
    attack: NamedAttack
    knowledge: Knowledge
    model: tuple[str, str, int]
    seed: int


def settings(attack: Attack) -> dict[str, Any]:
    """Returns an attack's kind and hyper-parameters."""
    return {"kind": attack.kind} | dataclasses.asdict(attack)  # type: ignore[call-overload,no-any-return]


def row(
    job: Job, answer: Reconstruction, seconds: float | None, device: str | None
) -> dict[str, Any]:
    """Returns the line of reconstructions.jsonl."""
    return {
        "round": job.key.round,
        "client": job.key.client,
        "attack": job.attack.name,
        "settings": settings(job.attack.attack),
        "knows": sorted(job.knowledge.granted()),
        "seconds": seconds,
        "device": device,
        **asdict(answer),
    }


def failure(error: BaseException) -> str:
    """Returns why a try of an attack failed, in one line."""
    if isinstance(error, TimeoutError):
        return "outlived workers.time_limit"
    if isinstance(error, ProcessExpired):
        return f"the worker process died (exit code {error.exitcode})"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]


class Workers:
    """A worker process per device."""

    def __init__(self, devices: Sequence[str], time_limit: float) -> None:
        self._time_limit = time_limit
        context = multiprocessing.get_context("spawn")
        self._pools = {
            device: ProcessPool(
                max_workers=1, initializer=_start, initargs=(device, os.getpid()), context=context
            )
            for device in devices
        }
        self._running: dict[str, tuple[Job, Future[dict[str, Any]]]] = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pool in self._pools.values():
            pool.stop()
        for pool in self._pools.values():
            pool.join()

    def running(self) -> list[Job]:
        """Returns the jobs that workers have."""
        return [job for job, _ in self._running.values()]

    def idle(self) -> list[str]:
        """Returns the devices without a job."""
        return [device for device in self._pools if device not in self._running]

    def submit(self, job: Job) -> None:
        """Gives a job to an idle worker."""
        device = self.idle()[0]
        future = self._pools[device].schedule(work, (job, device), timeout=self._time_limit)
        self._running[device] = job, future

    def finished(self) -> list[tuple[Job, Future[dict[str, Any]]]]:
        """Returns the jobs that ended since the last call."""
        done = [device for device, (_, future) in self._running.items() if future.done()]
        return [self._running.pop(device) for device in done]


def devices(wanted: Sequence[str] | None) -> list[str]:
    """Returns the devices to attack on: those wanted, else every GPU, else the CPU."""
    if wanted is not None:
        return list(wanted)
    return [f"cuda:{i}" for i in range(torch.cuda.device_count())] or ["cpu"]


def work(job: Job, device: str) -> dict[str, Any]:
    """Runs one attack, in a worker process."""
    capture = Run(job.run).read_capture(job.key)
    model = _model_at(job.run, job.key.round, *job.model, device)
    update = dataclasses.replace(
        capture.update,
        tensors={name: value.to(device) for name, value in capture.update.tensors.items()},
    )
    seen = Observation(job.key.round, job.key.client, update, job.knowledge)
    obstacle = job.attack.attack.obstacle(Setting.of(seen, model))
    if obstacle is not None:
        return row(job, Reconstruction.none(Status.INADMISSIBLE, obstacle), None, None)
    rng = stream(job.seed, "attack", job.attack.name, *job.key)
    start = time.perf_counter()
    answer = job.attack.attack(seen, model, rng=rng)
    return row(job, answer, round(time.perf_counter() - start, 4), _name(device))


@lru_cache(maxsize=1)
def _model(name: str, task: str, num_labels: int, device: str) -> LanguageModel:
    model = models.load(name, task, num_labels, seed=0, weights=False)
    model.module.to(device)
    return model


@lru_cache(maxsize=1)
def _model_at(
    run: Path, round: int, name: str, task: str, num_labels: int, device: str
) -> LanguageModel:
    """Returns the model at a round's broadcast; one model is in memory, whatever the round."""
    model = _model(name, task, num_labels, device)
    models.load_parameters_(model, Run(run).read_broadcast(round))
    return model


def _name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _start(device: str, parent: int) -> None:
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
