"""An outside program as an attack: in any language, in an environment of its own.

It gets an observation folder and writes an answer file; `exchange` has the format. It runs in a new
temporary folder, and its environment names nothing of the run. But it is a program of this user: no
import contract holds it, and it can read whatever the user can. `attacks.unchecked` says so.
"""

import os
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, ClassVar

import torch

from fedleak.attacks import AttackSetting
from fedleak.attacks.clock import Seconds
from fedleak.attacks.outside import keeper
from fedleak.attacks.outside.exchange import AnswerFileError, read_answer, write_observation
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.models import LanguageModel
from fedleak.training.observation import GRANTABLE, Observation
from fedleak.util.errors import ConfigError

PLACES = ("{observation}", "{answer}")
"""Placeholders for the two paths in a command."""

PASSED_ON = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH"),
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_HOME"),
    *("HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TORCH_HOME"),
)
"""Environment variables that every program gets; others may name the run, or hold secrets."""

_KEPT = 1_000
"""Bytes of its standard error that are kept, for the reason of a failure."""

_GRACE_SECONDS = 5.0
"""Seconds that `keeper` has to end a program."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """An outside program, which gets an observation folder and writes an answer file.

    Attributes:
        command: The program and its arguments, quoted as for a shell; no shell reads them.
            `{observation}` and `{answer}` stand for the paths of the folder and of the file. A file
            of the current folder may be named by its relative path.
        seconds: Time for one update, after which the program is ended and has failed.
        environment: Names of environment variables that the program gets, besides those for
            programs, languages, GPUs and model caches.
    """

    kind: ClassVar[str] = "command"
    uses: ClassVar[frozenset[str]] = GRANTABLE
    slow: ClassVar[bool] = True
    outside: ClassVar[bool] = True
    command: str
    seconds: Seconds = 600.0
    environment: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuses a command that could not answer."""
        try:
            words = shlex.split(self.command)
        except ValueError as error:
            reason = f"command = {self.command!r}: {error}: quote it as in a shell"
            raise ConfigError(reason) from error
        for place in PLACES:
            if not any(place in word for word in words):
                raise ConfigError(
                    f"command = {self.command!r} has no {place}: write where the path belongs, as "
                    "in 'python attack.py {observation} {answer}'"
                )

    def check_equipment(self) -> None:
        """Refuses a program that is not there, or a variable that is not set."""
        program = shlex.split(self.command)[0]
        if shutil.which(program) is None:
            raise ConfigError(
                f"command = {self.command!r}: there is no program {program!r}: install it, or give "
                "its path"
            )
        for name in self.environment:
            if name not in os.environ:
                raise ConfigError(f"environment: {name} is not set: set it, or leave it out")

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs a model that is saved as one; what it can work on only the program knows."""
        if any(".lora_" in name for name in setting.shared):
            return "is given whole models, and this one has adapters: leave model.lora out"
        return None

    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        """Returns what the program answers; a failure of any sort is a reason."""
        seed = int(torch.randint(2**31, (), generator=rng))
        with TemporaryDirectory(prefix="fedleak-outside-", ignore_cleanup_errors=True) as made:
            folder = Path(made)
            paths = (folder / "observation", folder / "answer.json")
            write_observation(paths[0], seen, model, seconds=self.seconds, seed=seed)
            failure = run(self._arguments(paths), folder, self._environment(), self.seconds)
            if failure is not None:
                return Reconstruction.none(Status.FAILED, f"outside program: {failure}")
            try:
                return read_answer(paths[1], model)
            except AnswerFileError as error:
                reason = f"the answer of the outside program is invalid: {error}"
                return Reconstruction.none(Status.FAILED, reason)

    def _arguments(self, paths: Sequence[Path]) -> list[str]:
        words = _from_here(shlex.split(self.command))
        for place, path in zip(PLACES, paths, strict=True):
            words = [word.replace(place, str(path)) for word in words]
        return words

    def _environment(self) -> dict[str, str]:
        names = (*PASSED_ON, *self.environment)
        passed = {name: os.environ[name] for name in names if name in os.environ}
        # One thread, as every attack has, unless the user says otherwise.
        return {"OMP_NUM_THREADS": "1"} | passed


def run(
    program: Sequence[str], folder: Path, environment: Mapping[str, str], seconds: float
) -> str | None:
    """Runs a program and ends all that it started; returns why it failed, or None.

    Args:
        program: With its arguments.
        folder: It runs in there. If this process is killed, the folder is removed too.
        environment: All that it gets.
        seconds: How long it may take.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", keeper.__file__, str(folder), *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stderr is not None
    printed = bytearray()
    reader = threading.Thread(target=_keep_end, args=(process.stderr, printed), daemon=True)
    reader.start()
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"took longer than seconds = {seconds:g}"
    finally:
        process.stdin.close()  # ends the program, if it has not ended
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:  # it still removes files
            process.kill()
            process.wait()
        # A process that left the group may still hold the other end.
        reader.join(_GRACE_SECONDS)
    if status == 0:
        return None
    lines = printed.decode(errors="replace").strip().splitlines() or ["nothing on standard error"]
    return f"exit status {status}: {lines[-1].strip()}"


def _keep_end(pipe: IO[bytes], printed: bytearray) -> None:
    """Reads all that is printed, so that nobody waits, and keeps the end."""
    with pipe:
        while part := os.read(pipe.fileno(), 65536):
            printed += part
            del printed[:-_KEPT]


def _from_here(words: Sequence[str]) -> list[str]:
    """Returns the words of a command, with the paths of files here made absolute.

    As in a shell, a program without a slash is one that is installed.
    """
    program, *arguments = words
    resolved = [os.path.abspath(word) if os.path.isfile(word) else word for word in arguments]
    return [os.path.abspath(program) if os.sep in program else program, *resolved]
