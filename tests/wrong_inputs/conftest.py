"""The command line, called in this process on what is wrong somewhere."""

import re
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tiny import invoked, toml

BASE = {"name": "b", "seed": 1, "attack": [{"kind": "keyspan", "beam": 4}]}


@dataclass(frozen=True)
class Outcome:
    """What a command left behind.

    Attributes:
        status: Its exit status.
        out, err: What it printed.
        crash: The traceback of what nobody handled; empty if there was none.
    """

    status: int
    out: str
    err: str
    crash: str


def call(*arguments: str) -> Outcome:
    """Calls a command."""
    done = invoked(*arguments)
    crash = ""
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        crash = "".join(traceback.format_exception(done.exception))
    return Outcome(done.exit_code, done.stdout, done.stderr, crash)


def written(changes: Mapping[str, Any]) -> str:
    """Returns an experiment file that is right but for `changes`, by dotted key; None: left out."""
    return toml(BASE | dict(changes))


def check(outcome: Outcome, *says: str, status: int = 2) -> None:
    """Asserts that a command ended with a line that a user can act on, and without a traceback."""
    assert not outcome.crash, outcome.crash
    assert outcome.status == status, outcome.err or outcome.out
    lines = outcome.err.splitlines()
    assert lines, "nothing was said"
    assert lines[-1].startswith("fedleak: "), outcome.err
    assert len(lines) <= 5, outcome.err
    for part in says:
        assert part in outcome.err, f"{part!r} is not in: {outcome.err}"
    # What, got what, do what: never a bare statement.
    assert re.search(r"[:;(]", outcome.err.removeprefix("fedleak: ")), outcome.err


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def fedleak() -> Callable[..., Outcome]:
    """Calls a command."""
    return call


@pytest.fixture(scope="session")
def experiment() -> Callable[..., str]:
    """Writes an experiment file that is right but for what is changed."""
    return written


@pytest.fixture(scope="session")
def refused() -> Callable[..., None]:
    """Asserts that a command refused."""
    return check


@pytest.fixture
def run() -> Callable[..., Outcome]:
    """Runs an experiment that is right but for what is changed."""

    def run_it(changes: Mapping[str, Any], *arguments: str) -> Outcome:
        Path("e.toml").write_text(written(changes))
        return call("run", "e.toml", *arguments)

    return run_it
