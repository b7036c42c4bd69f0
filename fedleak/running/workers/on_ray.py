"""Attacks on a Ray cluster that exists already: an actor stands for a worker process.

Actors, not tasks: Ray ends the process of a GPU task after each call, and torch would be imported
again. An actor that takes too long is killed: cancelling has no effect on what runs in C.

A run directory that the nodes do not see travels through Ray's object store, each model once per
round. An actor keeps what it was sent in a folder that only its owner can open, and removes it when
it has to end. The next actor on a node removes what a killed one has left there.
"""

import hashlib
import logging
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from fedleak.attacks import Progress
from fedleak.config.tables import RayTable
from fedleak.running.workers.process import NOTE_SECONDS, Job, Worker, prepare, work_together
from fedleak.store.records import Answer
from fedleak.store.run import Run
from fedleak.util.errors import CaptureError, ConfigError, FedleakError
from fedleak.util.versions import VERSION

REACH_SECONDS, ATTACH_SECONDS = 5.0, 60.0
"""How long the cluster may take to accept a connection, and to let this process join."""

START_SECONDS = 300.0
"""How long all workers may be away before the command gives up: a node may come back."""

FREE_SECONDS = 20.0
"""How long the cluster may take to have room: an earlier command leaves it a little later."""

STARTS = 3
"""How many times in a row a worker may fail to start."""

LEAVE_SECONDS = 3.0
"""How long a worker may take to remove what it was sent."""

MODELS_KEPT = 2
"""Models in the object store: workers are in one round, or between two."""

_BESIDE = "beside"
"""Calls of this group are answered while an attack is going on."""

_PREFIX = "fedleak-ray-"


class Hand:
    """What runs on the cluster: it attacks, and says meanwhile how far it is."""

    def __init__(self) -> None:
        self._progress: dict[int, Progress] = {}
        self._folder: Path | None = None

    def prepare(self, device: str) -> str:
        """Prepares for attacks; returns the version of fedleak that is installed there."""
        _remove_left()
        prepare(device)
        return VERSION

    def work(self, jobs: Sequence[Job], device: str, files: Mapping[str, Any]) -> list[Answer]:
        """Runs one attack on captures of one round.

        Args:
            jobs: As in `work_together`.
            device: The device to attack on.
            files: The contents of files of the run, in the object store, by name; none if this node
                sees the run directory.

        Raises:
            FedleakError: This node does not see the run directory.
        """
        torch.set_num_threads(1)  # it holds for the thread that calls
        self._progress = {}
        if files:
            place = self._place(jobs[0].run)
            self._write(place, files)
            jobs = [replace(job, run=place) for job in jobs]
        elif not Run(jobs[0].run).exists():
            raise FedleakError(
                f"node {socket.gethostname()} of the Ray cluster does not see {jobs[0].run}: put "
                "the run on a file system that all nodes share, or set workers.ray.shared = false"
            )
        return work_together(jobs, device, self._progress.__setitem__)

    def progress(self) -> dict[int, Progress]:
        """Returns how far the attack is, by client."""
        return dict(self._progress)

    def leave(self) -> None:
        """Removes what this actor was sent."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _place(self, run: Path) -> Path:
        """Returns where this actor keeps what it needs of a run, and deletes files of others."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        place = self._folder / hashlib.sha256(os.fsencode(run)).hexdigest()[:16]
        if not place.exists():
            for other in self._folder.iterdir():
                shutil.rmtree(other)
        return place

    def _write(self, place: Path, files: Mapping[str, Any]) -> None:
        """Writes files, and removes captures and models that are not among them."""
        import ray

        for folder in ("captures", "models"):
            (place / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in (place / folder).iterdir():
                if f"{folder}/{path.name}" not in files:
                    path.unlink()
        for name, content in files.items():
            path = place / name
            if name.startswith("models/") and path.exists():
                continue
            temporary = path.with_name("new")
            temporary.write_bytes(ray.get(content).data)
            temporary.replace(path)


class Shipping:
    """Puts files of a run into the object store."""

    def __init__(self) -> None:
        self._put_model = lru_cache(MODELS_KEPT)(_put)  # the store frees a model after its last use

    def files(self, jobs: Sequence[Job]) -> dict[str, Any]:
        """Returns references to all that jobs of one round need, by name in the run directory."""
        run, round = jobs[0].run, jobs[0].key.round
        model = Run(run).model_sent(round).name(round)
        names = ["run.json", *(f"captures/{job.key}.safetensors" for job in jobs)]
        return {name: _put(run / name) for name in names} | {model: self._put_model(run / model)}


class RayWorker(Worker):
    """An actor with one try at a time, as a worker process is."""

    _said: Mapping[int, Progress]
    _asked: Future[dict[int, Progress]] | None
    _next_ask: float

    def __init__(
        self, *, gpus: float, time_limit: float, shipping: Shipping | None, crew: "list[RayWorker]"
    ) -> None:
        self._gpus, self._shipping, self._crew = gpus, shipping, crew
        self._device = "cuda:0" if gpus else "cpu"  # an actor sees no other GPU
        self._failed_starts = 0
        super().__init__(time_limit)

    @property
    def here(self) -> bool:
        """Whether its actor has started. Whether it still lives shows when it is given work."""
        return self._ready.done() and self._ready.exception() is None

    @property
    def free(self) -> bool:
        """Whether it can take jobs now: it has none, and its actor has found a place.

        Raises:
            FedleakError: It cannot start, or no worker has been there for long.
        """
        if self.jobs:
            return False
        if not self._ready.done():
            if time.monotonic() > self._away_until and not any(
                worker.here for worker in self._crew
            ):
                raise FedleakError(
                    f"no worker of the Ray cluster has started for {START_SECONDS:g} s: look at "
                    "`ray status`; the same command finishes the rest"
                )
            return False
        error = self._ready.exception()
        if error is None:
            if (there := self._ready.result()) != VERSION:
                raise FedleakError(
                    f"fedleak on the Ray cluster is {there}, and here it is {VERSION}: install the "
                    "same on every node"
                )
            self._failed_starts = 0
            return True
        self._failed_starts += 1
        if self._failed_starts >= STARTS:
            last = str(_cause(error)).strip().splitlines()[-1:]
            raise FedleakError(
                f"a worker cannot start on the Ray cluster ({' '.join(last)}): every node needs "
                f"Python and packages as here, with fedleak {VERSION}"
            ) from error
        self._restart()
        return False

    def submit(self, jobs: Sequence[Job]) -> None:
        """Takes jobs of one attack and round."""
        self.jobs = tuple(replace(job, run=job.run.absolute()) for job in jobs)
        self._forget_progress()
        files = {} if self._shipping is None else self._shipping.files(self.jobs)
        self.answer = self._actor.work.remote(list(self.jobs), self._device, files).future()

    def progress(self) -> Mapping[int, Progress]:
        """Returns how far its attack is with each client, as of a second ago."""
        now = time.monotonic()
        if self._asked is not None and self._asked.done():
            with suppress(Exception):  # it has died, which `result` reports
                self._said = self._asked.result()
            self._asked = None
        if self._asked is None and now >= self._next_ask:
            self._next_ask = now + NOTE_SECONDS
            self._asked = self._beside("progress").future()
        return self._said

    def stop(self) -> None:
        """Ends the actor, whatever it is doing."""
        import ray

        with suppress(Exception):  # it may be gone already, and the cluster too
            if self._shipping is not None and self.here:
                ray.get(self._beside("leave"), timeout=LEAVE_SECONDS)
        with suppress(Exception):
            ray.kill(self._actor)

    def _beside(self, method: str) -> Any:
        return getattr(self._actor, method).options(concurrency_group=_BESIDE).remote()

    def _cause(self, error: BaseException) -> BaseException:
        """Returns what was raised on the cluster.

        Raises:
            FedleakError: Its node does not see the run directory.
        """
        import ray

        if isinstance(error, ray.exceptions.RayActorError):
            died = BrokenProcessPool(str(error))
            died.__cause__ = error
            return died
        cause = _cause(error)
        if isinstance(cause, FedleakError) and not isinstance(cause, CaptureError):
            raise cause
        return cause

    def _start(self) -> None:
        import ray

        actor = ray.remote(
            num_cpus=0 if self._gpus else 1,
            num_gpus=self._gpus,
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={_BESIDE: 1},
        )(Hand)
        self._actor = actor.remote()
        self._ready: Future[str] = self._actor.prepare.remote(self._device).future()
        self._away_until = time.monotonic() + START_SECONDS
        self._forget_progress()

    def _forget_progress(self) -> None:
        self._said, self._asked, self._next_ask = {}, None, 0.0


@contextmanager
def ray_workers(table: RayTable, time_limit: float) -> Iterator[list[RayWorker]]:
    """Joins a Ray cluster, starts workers on it, and ends them.

    Raises:
        ConfigError: Ray is not installed.
        FedleakError: There is no cluster at the address, or it has no room.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(
            "workers.engine = \"ray\" needs Ray: pip install 'fedleak[ray]'"
        ) from error
    _join(table.address)
    with ExitStack() as at_end:
        at_end.callback(ray.shutdown)
        slots, gpus = _room(table)
        crew: list[RayWorker] = []
        shipping = None if table.shared else Shipping()
        for _ in range(slots):
            worker = RayWorker(gpus=gpus, time_limit=time_limit, shipping=shipping, crew=crew)
            crew.append(worker)
            at_end.callback(worker.stop)
        yield crew


def _join(address: str) -> None:
    """Connects this process to a cluster, within a time limit: Ray itself tries for minutes."""
    import ray

    if ray.is_initialized():
        raise FedleakError(
            "this process is part of a Ray cluster already, as `flwr run` makes it in a "
            "simulation: train first, and then `fedleak attack RUN`"
        )
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=REACH_SECONDS).close()
    except OSError as error:
        raise FedleakError(
            f"no Ray cluster answers at workers.ray.address = {address!r} "
            f"({error.strerror or error}): start one with `ray start --head`, or mend the address"
        ) from error
    # Ray's own remarks: on a signal that is not taken in a thread, and on a change to come.
    logging.getLogger("ray").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    errors: list[BaseException] = []

    def attach() -> None:
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level="ERROR",
                configure_logging=False,
            )
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=attach, name="ray", daemon=True)
    thread.start()
    thread.join(ATTACH_SECONDS)
    why = " ".join(str(errors[0]).split())[:300] if errors else f"no answer in {ATTACH_SECONDS:g} s"
    if errors or thread.is_alive():
        raise FedleakError(
            f"the Ray cluster at workers.ray.address = {address!r} cannot be joined ({why}): this "
            "command has to run on a node of it, with the same Ray and Python"
        ) from (errors[0] if errors else None)


def _room(table: RayTable) -> tuple[int, float]:
    """Returns how many workers to start, and how many GPUs each takes."""
    import ray

    gpus = table.gpus
    if gpus is None:
        gpus = 1.0 if ray.cluster_resources().get("GPU") else 0.0
    kind, per_worker = ("GPU", gpus) if gpus else ("CPU", 1.0)
    deadline = time.monotonic() + FREE_SECONDS
    while True:
        free = ray.available_resources().get(kind, 0.0)
        slots = table.slots or int(free / per_worker)
        if slots and slots * per_worker <= free:
            return slots, gpus
        if time.monotonic() > deadline:
            raise FedleakError(
                f"the Ray cluster at {table.address!r} has {free:g} {kind}s free, and "
                f"{max(slots, 1)} workers need {max(slots, 1) * per_worker:g}: wait, or lower "
                "workers.ray.slots or workers.ray.gpus"
            )
        time.sleep(0.5)


def _cause(error: BaseException) -> BaseException:
    """Returns what was raised on the cluster, with its traceback there as a note."""
    cause = getattr(error, "cause", None)
    if not isinstance(cause, BaseException):
        return error
    cause.add_note(str(getattr(error, "traceback_str", "")))
    return cause


def _put(path: Path) -> Any:
    import ray

    try:
        return ray.put(np.memmap(path, np.uint8, "r"))
    except (OSError, ValueError) as error:  # missing, or empty
        raise CaptureError(f"{path} cannot be sent to the Ray cluster: {error}") from error


def _remove_left() -> None:
    """Removes what killed actors of this user have left on this node."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError, ValueError):
            pid = int(path.name.removeprefix(_PREFIX).partition("-")[0])
            if path.stat().st_uid == os.getuid() and not psutil.pid_exists(pid):
                shutil.rmtree(path, ignore_errors=True)
