"""The run directory: the only thing that training, attacks and scoring share.

    runs/<name>/
      run.json                         the resolved experiment, versions, fingerprint, status
      captures/r0001-c03.safetensors   what the server received, with what it knows as metadata
      models/r0001.safetensors         the broadcast of a round; the last one is the trained model
      vault/r0001-c03.json             the private batch, written by the client, mode 0600
      defended/r0001-c03.json          what the client's defenses did, in its own figures, mode 0600
      reconstructions.jsonl            a line per attack and capture, as each finishes
      attempts.jsonl                   a line per try of an attack that crashed
      log.txt                          what each command did, and where errors arose, mode 0600
      leakage.jsonl privacy.jsonl defenses.jsonl utility.jsonl summary.json held_out.json flower.log

Of rounds that are not attacked neither captures nor models stay, but for the first and last model.
Under secure aggregation a capture is r0001-all: the round's sum. Until all have come, the updates
that it is of are below `held`, which stands for the protocol and is read by no attack.

Work that is left is what the directory lacks, so there is no queue that a crash could corrupt.
Files are written under a temporary name, synced and renamed. A line counts once its newline is
on disk. Lines that belong together are one write, in which all but the last end in a space: what
was torn, a line or such a group, does not count and is cut by the next write.
"""

import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
from filelock import FileLock, Timeout
from torch import Tensor

from fedleak.errors import CaptureError, FedleakError
from fedleak.logs import logged
from fedleak.observation import ClientUpdate, Knowledge, UpdateKind

SCHEMA_VERSION = 1
_MORE = " \n"
"""Ends a line that is followed by others of the same write; to JSON the space is nothing."""
_KEY = re.compile(r"r(\d+)-(?:c(\d+)|all)")

EVERYONE = -1
"""The client of a capture that is the sum over all of its round."""


class Key(NamedTuple):
    """One client's update in one round."""

    round: int
    client: int

    def __str__(self) -> str:
        of = "all" if self.client == EVERYONE else f"c{self.client:02d}"
        return f"r{self.round:04d}-{of}"


@dataclass(frozen=True)
class Capture:
    """What the server received from one client, and what it knows of how that was made."""

    key: Key
    update: ClientUpdate
    knowledge: Knowledge


@dataclass(frozen=True)
class Run:
    """A run directory."""

    path: Path

    # --- run.json ---------------------------------------------------------------------------

    def exists(self) -> bool:
        """Returns whether something was run here."""
        return (self.path / "run.json").is_file()

    def info(self) -> dict[str, Any]:
        """Returns the content of run.json.

        Raises:
            FedleakError: There is no run here.
        """
        try:
            value: dict[str, Any] = json.loads((self.path / "run.json").read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise FedleakError(f"{str(self.path)!r} is not a run directory: {error}") from error
        return value

    def update_info(self, **values: Any) -> None:
        """Writes these keys of run.json and keeps the others."""
        old = self.info() if self.exists() else {"schema_version": SCHEMA_VERSION}
        self.write_json("run.json", old | values)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the directory: one process at a time may train, attack and score here.

        What it does stands in the log.

        Raises:
            FedleakError: Another process has it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise FedleakError(
                f"{str(self.path)!r} is in use by another fedleak process"
            ) from error
        try:
            with logged(self.path):
                yield
        finally:
            lock.release()

    # --- captures and models ----------------------------------------------------------------

    def write_capture(self, capture: Capture) -> None:
        """Writes what the server received."""
        update = capture.update
        about = {
            "kind": update.kind,
            "num_examples": update.num_examples,
            "knowledge": {k: v for k, v in asdict(capture.knowledge).items() if v is not None},
        }
        _write_tensors(self._capture(capture.key), update.tensors, {"fedleak": json.dumps(about)})

    def read_capture(self, key: Key) -> Capture:
        """Reads a capture.

        Raises:
            CaptureError: The file is damaged.
        """
        path = self._capture(key)
        try:
            tensors, metadata = _read_tensors(path)
            kind, num_examples, knowledge = _about(metadata)
        except _DAMAGE as error:
            raise _damaged(path, error) from error
        return Capture(key, ClientUpdate(kind, tensors, num_examples), knowledge)

    def read_knowledge(self, key: Key) -> Knowledge:
        """Reads what the server knows of a capture, without its tensors.

        Raises:
            CaptureError: The file is damaged.
        """
        path = self._capture(key)
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                return _about(file.metadata())[2]
        except _DAMAGE as error:
            raise _damaged(path, error) from error

    def _capture(self, key: Key) -> Path:
        return self.path / "captures" / f"{key}.safetensors"

    def has_capture(self, key: Key) -> bool:
        """Returns whether a capture is here."""
        return self._capture(key).is_file()

    def captures(self) -> list[Key]:
        """Returns the keys of the captures, in order."""
        return _keys(self.path / "captures", ".safetensors")

    def hold(self, capture: Capture) -> None:
        """Keeps an update out of the server's sight, until the round's sum is made."""
        Run(self.path / "held").write_capture(capture)

    def held(self, key: Key) -> Capture:
        """Reads an update that is held.

        Raises:
            CaptureError: The file is damaged.
        """
        return Run(self.path / "held").read_capture(key)

    def release(self) -> None:
        """Deletes what is held."""
        shutil.rmtree(self.path / "held", ignore_errors=True)

    def write_broadcast(self, round: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes the model that a round starts from."""
        _write_tensors(self.path / "models" / f"r{round:04d}.safetensors", tensors, {})

    def read_broadcast(self, round: int) -> dict[str, Tensor]:
        """Reads the model that a round starts from.

        Raises:
            CaptureError: The file is damaged or missing.
        """
        path = self.path / "models" / f"r{round:04d}.safetensors"
        try:
            return _read_tensors(path)[0]
        except _DAMAGE as error:
            raise CaptureError(f"model {path} is damaged ({error}): run with --fresh") from error

    def forget(self, round: int) -> None:
        """Deletes the captures of a round, and the model that it started from, but for the first.

        That is what a central reference starts from.
        """
        for key in self.captures():
            if key.round == round:
                self._capture(key).unlink(missing_ok=True)
        if round > 1:
            (self.path / "models" / f"r{round:04d}.safetensors").unlink(missing_ok=True)

    def has_broadcast(self, round: int) -> bool:
        """Returns whether the model that a round starts from is here."""
        return (self.path / "models" / f"r{round:04d}.safetensors").is_file()

    def broadcasts(self) -> list[int]:
        """Returns the rounds whose starting model is here, in order."""
        stems = (p.stem for p in (self.path / "models").glob("r*.safetensors"))
        return sorted(int(stem[1:]) for stem in stems)

    # --- the vault --------------------------------------------------------------------------

    def write_truth(self, key: Key, value: Mapping[str, Any]) -> None:
        """Writes a private batch, readable by its owner alone."""
        self.write_json(f"vault/{key}.json", value, mode=0o600)

    def read_truth(self, key: Key) -> dict[str, Any] | None:
        """Returns a private batch; None if the client wrote none."""
        path = self.path / "vault" / f"{key}.json"
        if not path.is_file():
            return None
        value: dict[str, Any] = json.loads(path.read_text())
        return value

    def truths(self) -> list[Key]:
        """Returns the keys of the private batches, in order."""
        return _keys(self.path / "vault", ".json")

    def write_defended(self, key: Key, value: Mapping[str, Any]) -> None:
        """Writes what a client's defenses did: its own figures, so readable by its owner alone."""
        self.write_json(f"defended/{key}.json", plain(value), mode=0o600)

    def defended(self) -> dict[Key, dict[str, Any]]:
        """Returns what clients' defenses did, in the order of rounds and clients."""
        folder = self.path / "defended"
        return {
            key: json.loads((folder / f"{key}.json").read_text()) for key in _keys(folder, ".json")
        }

    # --- rows -------------------------------------------------------------------------------

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Appends one line to a JSONL file and syncs it."""
        self.append_all(name, [row])

    def append_all(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Appends lines to a JSONL file and syncs it: whatever happens, all of them or none."""
        lines = [json.dumps(row, allow_nan=False) for row in rows]
        if not lines:
            return
        with (self.path / name).open("ab+") as file:
            _drop_torn_(file)
            file.write((_MORE.join(lines) + "\n").encode())
            file.flush()
            os.fsync(file.fileno())

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Returns the complete lines of a JSONL file; none if there is no file."""
        path = self.path / name
        if not path.is_file():
            return []
        content = path.read_bytes()
        return [json.loads(line) for line in content[: _complete(content)].splitlines()]

    def write_rows(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes a whole JSONL file at once."""
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        _replace(self.path / name, text.encode())

    def write_json(self, name: str, value: Any, mode: int = 0o644) -> None:
        """Writes a JSON file at once."""
        _replace(
            self.path / name, (json.dumps(value, indent=1, allow_nan=False) + "\n").encode(), mode
        )

    def read_json(self, name: str) -> Any:
        """Reads a JSON file."""
        return json.loads((self.path / name).read_text())

    def move_aside(self) -> Path:
        """Moves the directory out of the way and returns where it is now."""
        aside = self.path.with_name(f"{self.path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        while aside.exists():
            aside = aside.with_name(aside.name + "x")
        self.path.rename(aside)
        return aside


def plain(value: Any) -> Any:
    """Returns a value with null for each number that is not finite: JSON has no infinity."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_DAMAGE = (OSError, KeyError, ValueError, TypeError, safetensors.SafetensorError)
"""What reading a damaged file raises."""


def _damaged(path: Path, error: Exception) -> CaptureError:
    return CaptureError(
        f"capture {path} is damaged ({' '.join(str(error).split())}): delete it, run the "
        "experiment again, then `fedleak attack --retry`"
    )


def _about(metadata: Mapping[str, str] | None) -> tuple[UpdateKind, int, Knowledge]:
    """Reads what stands beside the tensors of a capture."""
    about = json.loads((metadata or {})["fedleak"])
    return UpdateKind(about["kind"]), about["num_examples"], Knowledge(**about["knowledge"])


def _keys(folder: Path, suffix: str) -> list[Key]:
    found = (_KEY.fullmatch(p.name.removesuffix(suffix)) for p in folder.glob(f"*{suffix}"))
    return sorted(Key(int(m[1]), EVERYONE if m[2] is None else int(m[2])) for m in found if m)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    safetensors.torch.save_file(flat, temporary, metadata)
    with temporary.open("rb+") as file:
        os.fsync(file.fileno())
    _rename(temporary, path)


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safetensors.safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _replace(path: Path, content: bytes, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    _rename(temporary, path)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}")


def _rename(temporary: Path, path: Path) -> None:
    """Renames, and syncs the folder, so that the new name survives a power cut too."""
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _drop_torn_(file: Any) -> None:
    """Cuts what a killed process left after the last complete write."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - len(_MORE), 0))
    end = file.read()
    if _complete(end) == len(end):
        return
    file.seek(0)
    file.truncate(_complete(file.read()))


def _complete(content: bytes) -> int:
    """Returns where the last write ends of which nothing is missing."""
    end = len(content)
    while (end := content.rfind(b"\n", 0, end) + 1) and content[:end].endswith(_MORE.encode()):
        end -= 1
    return end
