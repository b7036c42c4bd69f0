"""Calls side by side, each in a process of its own that never outlives this one.

Nothing here is slow to import: a new process listens for the end of its parent before it loads
what its call needs, torch for one.
"""

import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import NamedTuple

from fedleak.util import logs

GRACE_SECONDS = 5.0
"""Seconds that a process gets to clean up once it is told to end."""

Call = Callable[[int], str | None]
"""Returns why it failed, or None.

It is passed the number of its place, below the number of calls at once: no two calls have the same
place at the same time.
"""


class _Running(NamedTuple):
    name: str
    place: int
    process: SpawnProcess
    answer: Connection


def side_by_side(
    calls: Mapping[str, Call],
    at_once: int,
    started: Callable[[str], None],
    ended: Callable[[str, str | None], None],
) -> None:
    """Makes calls in new processes, some at once, in their order.

    Whatever ends this function early, such as Ctrl-C, ends the calls by a KeyboardInterrupt. If
    this process is killed, the processes of the calls exit.

    Args:
        calls: The calls by name. They are pickled, so their functions have to be importable.
        at_once: How many, at most.
        started: Called with the name of each call as it starts.
        ended: Called with the name of each call as it ends, and why it failed, if it did.
    """
    start_tracker()
    waiting, free = deque(calls), deque(range(at_once))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and free:
                name = waiting.popleft()
                with holding_ctrl_c():  # and none is started that is not ended below
                    running.append(_start(name, calls[name], free.popleft()))
                started(name)
            wait([call.answer for call in running])
            for call in [call for call in running if call.answer.poll()]:
                failure = _failure(call)
                running.remove(call)
                free.append(call.place)
                ended(call.name, failure)
    finally:
        _end([call.process for call in running])


@contextmanager
def holding_ctrl_c() -> Iterator[None]:
    """Holds Ctrl-C back. A process that is started meanwhile ignores it from its first moment.

    On a terminal Ctrl-C reaches every process; only the first one handles it, and ends the others.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Ends this process when its parent does, whatever it is doing then."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_too() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_too, daemon=True).start()


def start_tracker() -> None:
    """Starts Python's resource tracker, without its warnings.

    Processes that are ended, by others or by `_make_call`, leave semaphores behind (tqdm makes
    some). The tracker frees them, and would warn of them at the end.
    """
    before = os.environ.get("PYTHONWARNINGS")
    quiet = "ignore:resource_tracker"
    os.environ["PYTHONWARNINGS"] = f"{before},{quiet}" if before else quiet
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


def _start(name: str, call: Call, place: int) -> _Running:
    context = multiprocessing.get_context("spawn")
    answer, sender = context.Pipe(duplex=False)
    # Pickled here, so that the process is under way before anything is imported for it.
    process = context.Process(target=_make_call, args=(pickle.dumps(call), place, sender))
    process.start()
    sender.close()  # the other copy is the process's, and is closed by its end
    return _Running(name, place, process, answer)


def _failure(call: _Running) -> str | None:
    """Waits for the end of a process that has answered or died; returns why its call failed."""
    try:
        failure: str | None = call.answer.recv()
    except (EOFError, OSError):
        call.process.join()
        return (
            f"its process ended with exit status {call.process.exitcode} and no answer: what it "
            "printed says why; -9 is mostly a lack of memory, so run fewer at once"
        )
    call.process.join()
    return failure


def _end(processes: Sequence[SpawnProcess]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()


def _make_call(call: bytes, place: int, answer: Connection) -> None:
    """Makes a call in this process, which was started for it."""
    end_with_parent()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
    status = 1
    try:
        answer.send(pickle.loads(call)(place))
        status = 0
    except KeyboardInterrupt:
        pass
    except Exception as error:  # noqa: BLE001 - whatever it is, it is why the call failed
        where = logs.noted(error)
        answer.send(f"{type(error).__name__}: {error}" + (f" ({where})" if where else ""))
    sys.stdout.flush()
    sys.stderr.flush()
    # Python would first wait for all that the call left behind, and for a pool whose process has
    # not started yet that can be for ever.
    os._exit(status)
