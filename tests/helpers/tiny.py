"""What many tests begin with: an experiment of a second, a worker in this process, a command."""

import copy
import shutil
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import tomli_w
import typer
from click.testing import CliRunner, Result

from fedleak.cli import app
from fedleak.running.dispatch import dispatcher
from fedleak.running.workers.process import work_together
from fedleak.store.run import Run

TABLES: dict[str, Any] = {
    "name": "small",
    "model": {"name": "builtin/bert-tiny"},
    "data": {"name": "builtin/notes", "samples": 8, "held_out": 4},
    "attack": [],  # what is left out is the strongest that there is, and takes longer
    "federation": {"clients": 2, "rounds": 1, "batch_size": 1, "learning_rate": 0.1},
    # One at a time: an answer does not depend, in its last bits, on who else is attacked.
    "workers": {"devices": ["cpu"], "at_once": 1},
}

DLG = {"kind": "dlg", "steps": 2, "starts": 1, "shapes": 1}
"""A quick attack that matches gradients."""


def tables(changes: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns the tiny experiment with `changes` by dotted key; None leaves the key out."""
    made = copy.deepcopy(TABLES)
    for key, value in (changes or {}).items():
        *path, last = key.split(".")
        table = made
        for part in path:
            table = table.setdefault(part, {})
        if value is None:
            table.pop(last, None)
        else:
            table[last] = value
    return made


def toml(changes: Mapping[str, Any] | None = None) -> str:
    """Returns the experiment file of `tables`."""
    return tomli_w.dumps(tables(changes))


@cache
def _command() -> click.Command:
    """Returns the command line, which typer takes a twentieth of a second to make."""
    return typer.main.get_command(app)


def invoked(*arguments: str, **how: Any) -> Result:
    """Calls the command line in this process; `how` goes to click."""
    return CliRunner().invoke(_command(), list(arguments), **how)


def call(*arguments: str) -> tuple[int, str, str]:
    """Calls the command line in this process: its exit status, what it printed, its errors.

    The command line never ends in an exception: one is raised here.
    """
    done = invoked(*arguments)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


class Here:
    """A worker in this process."""

    def __init__(self) -> None:
        self.jobs: tuple[Any, ...] = ()

    @property
    def free(self) -> bool:
        """Returns whether it has no jobs."""
        return not self.jobs

    def submit(self, jobs: Iterable[Any]) -> None:
        """Takes jobs, which `result` does."""
        self.jobs = tuple(jobs)

    def result(self) -> Any:
        """Returns the answers, or the error, as a worker process does."""
        jobs, self.jobs = self.jobs, ()
        try:
            return work_together(jobs, "cpu")
        except Exception as error:  # noqa: BLE001
            return error

    def progress(self) -> dict[int, Any]:
        """Returns nothing: whoever asks waits in `result` until all is done."""
        return {}


def trained_here(folder: Path, experiment: dict[str, Any]) -> Path:
    """Runs an experiment called `a` in a folder, with a worker in this process.

    Returns:
        Its run directory.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(dispatcher, "hire", lambda *_: nullcontext([Here()]))
        Path("a.toml").write_text(toml(experiment | {"name": "a"}))
        assert call("run", "a.toml")[0] == 0
    return folder / "runs" / "a"


def two_copies(run: Path, folder: Path) -> tuple[Run, Run]:
    """Returns copies of a run, called `a` and `b`, by paths within the folder."""
    for name in ("a", "b"):
        shutil.copytree(run, folder / name)
    return Run(Path("a")), Run(Path("b"))
