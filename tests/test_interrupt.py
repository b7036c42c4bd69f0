"""Killing a run while it trains or attacks loses nothing; the same command finishes it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

EXPERIMENT = """
name = "killed"
seed = 3
[model]
name = "builtin/gpt2-tiny"
task = "causal-lm"
[data]
name = "builtin/notes"
samples = 24
held_out = 4
[federation]
clients = 2
rounds = 3
batch_size = 1
learning_rate = 0.1
[[attack]]
kind = "dager"
"""

COMMAND = [sys.executable, "-c", "from fedleak.cli import app; app()", "run", "experiment.toml"]


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
    """Runs the command until it has made one more of what is counted, and kills it then."""
    before, process = count(folder), start(folder)
    wait_until(lambda: count(folder) > before, process)
    process.send_signal(number)
    process.wait()
    assert process.returncode == (130 if number == signal.SIGINT else -number)


def finish(folder: Path) -> None:
    """Runs the command to its end."""
    done = subprocess.run(
        COMMAND, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def rows(folder: Path, name: str) -> list[dict[str, object]]:
    """Returns the rows of a file, in order, without what a clock wrote."""
    lines = (folder / RUN / name).read_text().splitlines()
    found = [json.loads(line) | {"seconds": None} for line in lines]
    return sorted(found, key=lambda row: (row["round"], row.get("client"), row.get("attack")))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "experiment.toml").write_text(EXPERIMENT)
    finish(folder)
    return folder


@pytest.mark.parametrize(
    "moments",
    [
        [(captures, signal.SIGKILL), (answers, signal.SIGKILL), (answers, signal.SIGINT)],
        pytest.param(
            [(captures, signal.SIGINT), (captures, signal.SIGKILL), (answers, signal.SIGKILL)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["attacking", "training"],
)
def test_same_rows_after_kills_while_it_trains_and_attacks(
    tmp_path: Path, undisturbed: Path, moments: list[tuple[Callable[[Path], int], int]]
) -> None:
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    for count, number in moments:
        kill_once_there_is_more(tmp_path, count, number)
    finish(tmp_path)
    for name in ("reconstructions.jsonl", "leakage.jsonl", "utility.jsonl"):
        assert rows(tmp_path, name) == rows(undisturbed, name)


def test_a_killed_worker_is_replaced_and_workers_end_with_the_command(
    tmp_path: Path, undisturbed: Path, workers_of: Callable[[int], list[psutil.Process]]
) -> None:
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    process = start(tmp_path)
    wait_until(lambda: workers_of(process.pid) and answers(tmp_path), process)
    killed = workers_of(process.pid)[0]
    killed.kill()
    wait_until(lambda: [one for one in workers_of(process.pid) if one.pid != killed.pid], process)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert rows(tmp_path, "leakage.jsonl") == rows(undisturbed, "leakage.jsonl")


def test_workers_do_not_outlive_a_killed_command(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    process = start(tmp_path)
    wait_until(lambda: answers(tmp_path), process)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert children
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
