"""Killing a run at any moment loses nothing, and the same command finishes it."""

import json
import os
import random
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


def finish(folder: Path, kills: list[float], signals: list[int]) -> None:
    """Runs the command, killing it after each of `kills` seconds, and then to its end."""
    for seconds, number in zip(kills, signals, strict=True):
        process = subprocess.Popen(
            COMMAND, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(number)
            process.wait()
    done = subprocess.run(COMMAND, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def rows(folder: Path, name: str) -> list[dict[str, object]]:
    """Returns the rows of a file, in order, without what a clock wrote."""
    lines = (folder / "runs" / "killed" / name).read_text().splitlines()
    found = [json.loads(line) | {"seconds": None} for line in lines]
    return sorted(found, key=lambda row: (row["round"], row.get("client"), row.get("attack")))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "experiment.toml").write_text(EXPERIMENT)
    finish(folder, [], [])
    return folder


@pytest.mark.parametrize("seed", [0, 1])
def test_same_rows_after_kills_at_random_moments(
    tmp_path: Path, undisturbed: Path, seed: int
) -> None:
    chance = random.Random(seed)
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    kills = [chance.uniform(4, 14) for _ in range(3)]
    finish(tmp_path, kills, [signal.SIGKILL, signal.SIGKILL, signal.SIGINT])
    for name in ("reconstructions.jsonl", "leakage.jsonl", "utility.jsonl"):
        assert rows(tmp_path, name) == rows(undisturbed, name)


def test_a_killed_worker_is_replaced_and_workers_end_with_the_command(
    tmp_path: Path, undisturbed: Path, workers_of: Callable[[int], list[psutil.Process]]
) -> None:
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    process = subprocess.Popen(
        COMMAND, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    found: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while not found and time.monotonic() < deadline and process.poll() is None:
        found = workers_of(process.pid)
        time.sleep(0.05)
    assert found, "no worker process was started"
    time.sleep(4)
    found[0].kill()
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert rows(tmp_path, "leakage.jsonl") == rows(undisturbed, "leakage.jsonl")


def test_workers_do_not_outlive_a_killed_command(tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    process = subprocess.Popen(
        COMMAND, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    children: list[psutil.Process] = []
    deadline = time.monotonic() + 60
    while not children and time.monotonic() < deadline:
        time.sleep(0.2)
        children = psutil.Process(process.pid).children(recursive=True)
    time.sleep(3)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert children
    _, alive = psutil.wait_procs(children, timeout=15)
    assert not alive
