"""Killing a run while it trains or attacks loses nothing; the same command finishes it."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import psutil
import pytest
from tiny import call, toml

ROUNDS = 4
ALL = 2 * ROUNDS  # captures of two clients
CHANGES = {
    "name": "killed",
    "seed": 3,
    "data.samples": 2 * ROUNDS,
    "federation.rounds": ROUNDS,
    "attack": [{"kind": "dager"}],
}
SLOWED = """
import time
from fedleak.__main__ import main
from fedleak.running.dispatch.dispatcher import Dispatcher

record = Dispatcher._record

def slowly(dispatcher, answers):
    record(dispatcher, answers)
    time.sleep(0.5)

Dispatcher._record = slowly
main()
"""
"""The command, with a pause after each answer: however slow this test is, work is left undone."""
COMMAND = [sys.executable, "-c", SLOWED, "run", "experiment.toml"]
WITHIN_SECONDS = 120.0
RUN = Path("runs", "killed")


def captures(folder: Path) -> int:
    """Returns how many captures a run has."""
    return len(list((folder / RUN / "captures").glob("r*.safetensors")))


def answers(folder: Path) -> int:
    """Returns how many answers a run has."""
    path = folder / RUN / "reconstructions.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Starts the command."""
    return subprocess.Popen(COMMAND, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def wait_until(condition: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    """Waits for a state of a command that is running, and fails if it ends before that."""
    deadline = time.monotonic() + WITHIN_SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never came that far"
        time.sleep(0.01)


def kill_once_there_is_more(folder: Path, count: Callable[[Path], int], number: int) -> None:
    """Runs the command until it has made one more of what is counted, and kills it then.

    Its worker processes end with it, and work is left undone.
    """
    before, process = count(folder), start(folder)
    wait_until(lambda: count(folder) > before, process)
    begun = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert begun
    _, alive = psutil.wait_procs(begun, timeout=15)
    assert not alive
    assert before < count(folder)
    # Two attacks for each capture: probes come first.
    assert captures(folder) < ALL or answers(folder) < 2 * ALL, "the kill came too late"


def finish(folder: Path) -> None:
    """Runs the command to its end, in this process: that it starts is known."""
    with chdir(folder):
        status, _, errors = call("run", "experiment.toml")
    assert status == 0, errors
    assert (captures(folder), answers(folder)) == (ALL, 2 * ALL)


def rows(folder: Path, name: str) -> list[dict[str, object]]:
    """Returns the rows of a file, in order, without what a clock wrote."""
    lines = (folder / RUN / name).read_text().splitlines()
    file_rows = [json.loads(line) | {"seconds": None, "seal": None} for line in lines]
    return sorted(file_rows, key=lambda row: (row["round"], row.get("client"), row.get("attack")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "experiment.toml").write_text(toml(CHANGES))
    return tmp_path


@pytest.fixture
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, in_process: None
) -> Path:
    """A folder with a run that nobody disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "experiment.toml").write_text(toml(CHANGES))
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        status, _, errors = call("run", "experiment.toml")
    assert status == 0, errors
    return folder


@pytest.mark.parametrize(
    "moments",
    [
        [(answers, signal.SIGKILL)],
        pytest.param(
            [(captures, signal.SIGKILL), (answers, signal.SIGKILL), (answers, signal.SIGINT)],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [(captures, signal.SIGINT), (captures, signal.SIGKILL), (answers, signal.SIGKILL)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["once", "attacking", "training"],
)
def test_same_rows_after_kills_while_it_trains_and_attacks(
    folder: Path, undisturbed: Path, moments: list[tuple[Callable[[Path], int], int]]
) -> None:
    for count, number in moments:
        kill_once_there_is_more(folder, count, number)
    finish(folder)
    for name in ("reconstructions.jsonl", "leakage.jsonl", "utility.jsonl"):
        assert rows(folder, name) == rows(undisturbed, name)


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_workers_end_with_the_command(
    folder: Path, undisturbed: Path, workers_of: Callable[[int], list[psutil.Process]]
) -> None:
    process = start(folder)
    wait_until(lambda: workers_of(process.pid) and answers(folder), process)
    killed = workers_of(process.pid)[0]
    killed.kill()
    wait_until(
        lambda: [worker for worker in workers_of(process.pid) if worker.pid != killed.pid], process
    )
    assert answers(folder) < 2 * ALL
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert rows(folder, "leakage.jsonl") == rows(undisturbed, "leakage.jsonl")
