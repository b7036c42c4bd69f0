"""The run directory: the only thing that training, attacks and scoring share.

    runs/<name>/
      run.json                         the resolved experiment, its fingerprint, versions, status
      captures/r0001-c03.safetensors   what the server received, with its knowledge as metadata
      captures/r0001-c03.json          the same metadata, once every attack has answered
      models/r0001.safetensors         the broadcast of a round; the last one is the trained model
      models/sent-r0001.safetensors    what a malicious server sent in its place, to its target
      models/moments-r0002.safetensors the moments of the server's Adam before that round
      vault/r0001-c03.json             the private batch, written by the client
      vault/r0001-c03.safetensors      how its audited copy differs at the canaries' numbers
      defended/r0001-c03.json          what the client's defenses did, in its own figures
      detected/r0001-c03.json          what the client's detectors found in what it was sent
      published/r1-c3                  the hash of what it was sent, which clients show each other
      kept/c03/                        the contract of a client, and the last model it trusts
      reconstructions.jsonl            a line per attack and capture, as each finishes
      attempts.jsonl                   a line per try of an attack that crashed
      leakage.jsonl privacy.jsonl defenses.jsonl utility.jsonl summary.json held_out.json
      detections.jsonl                 what clients' detectors found
      candidates/                      texts of files that attacks on membership are asked about
      membership.jsonl                 how these attacks score each text of a list
      secrets.jsonl                    what each published model says of planted secrets
      canaries.jsonl                   what the audit's canaries score in each update
      damaged.jsonl                    lines of the others that could not be read, and why
      shard-2of4/                      answers of one of several machines: `store.shards`
      log.txt flower.log

A capture stores a matrix without its rows of zeros if that takes less room (`zero_rows`).
Only the owner can open the folder (0700) and any file in it (0600), from the moment it is made.
Captures, models and answers carry the fingerprint of their experiment, and are not read in a run of
another one. Files that figures depend on carry a seal, too (`seal`, `provenance`).
Captures and models of rounds that are not attacked are deleted, except the first and last model.
Under secure aggregation a capture is r0001-all: the round's sum. Until all updates have come, they
are below `held`, which stands for the protocol and which no attack reads. Without secure
aggregation an update is below `held` while the server waits for updates that are summed before it.

Work that is left is what the directory lacks, so there is no queue that a crash could corrupt.
"""

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from fedleak.store import files, seal
from fedleak.store.captures import EVERYONE, Capture, Captures, Key
from fedleak.store.folder import Folder
from fedleak.store.lines import SCHEMA_VERSION, Lines, Record
from fedleak.store.models import Models
from fedleak.store.vault import Notes, Vault
from fedleak.util.errors import FedleakError
from fedleak.util.logs import logged
from fedleak.util.plain_files import opened

__all__ = ["DAMAGED", "EVERYONE", "Capture", "Damaged", "Key", "Run"]

T = TypeVar("T")


class Damaged(Record):
    """A line of another file that could not be read, and why: a line of damaged.jsonl."""

    file: str
    line: int
    reason: str
    content: str = ""


DAMAGED = Lines("damaged.jsonl", Damaged)


class _InUseError(FedleakError):
    """Another process has a run directory."""


class Run(Folder):
    """A run directory."""

    def inside(self, name: str) -> "Run":
        """Returns a run directory in this one.

        Raises:
            FedleakError: It is a link.
        """
        files.real_folder(self.path / name)
        return Run(self.path / name)

    @property
    def captures(self) -> Captures:
        """What the server received."""
        return Captures(self, "captures")

    @property
    def held(self) -> Captures:
        """Updates that the server does not see until all updates of the round are combined."""
        return Captures(self, "held")

    @property
    def models(self) -> Models:
        """The model that each round starts from."""
        return Models(self, "r")

    @property
    def sent_models(self) -> Models:
        """What a malicious server sent in place of the model that a round starts from."""
        return Models(self, "sent-r")

    def model_sent(self, round: int) -> Models:
        """Returns where the model is at which the captures of a round were computed."""
        return self.sent_models if self.sent_models.has(round) else self.models

    @property
    def moments(self) -> Models:
        """The moments of the server's optimiser before each round but the first."""
        return Models(self, "moments-r")

    @property
    def vault(self) -> Vault:
        """The private batches."""
        return Vault(self, "vault")

    @property
    def defended(self) -> Notes:
        """What clients' defenses did, in their own figures."""
        return Notes(self, "defended")

    @property
    def detected(self) -> Notes:
        """What clients' detectors found."""
        return Notes(self, "detected")

    def create(self, **values: Any) -> None:
        """Makes run.json, in a folder that only its owner can open.

        Args:
            values: At least `experiment`, its `fingerprint`, `status` and `num_labels`.
        """
        with files.naming(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
        self.write_json("run.json", {"schema_version": SCHEMA_VERSION, **values})

    def update_info(self, **values: Any) -> None:
        """Writes these keys of run.json and keeps the others.

        A run.json that somebody else wrote or changed gets no seal.
        """
        write = self.write_json if self.is_genuine("run.json") else self.write_unsealed
        write("run.json", {**self.info(), **values})

    def forget(self, round: int, *, model: bool = True) -> None:
        """Deletes the captures of a round, and the model that it started from, except in round 1.

        A central baseline starts from the model of round 1.

        Args:
            round: The round.
            model: Delete its model, too; otherwise it stays.
        """
        self.captures.forget(round)
        if round > 1:
            if model:
                self.models.delete(round)
            self.moments.delete(round)
        self.sent_models.delete(round)

    # --- locks -----------------------------------------------------------------------------

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the directory: one process at a time may train, attack and score here.

        The run's log keeps what this process logs.

        Raises:
            FedleakError: Another process has it.
        """
        with self._held(fcntl.LOCK_EX), logged(self.path):
            yield

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Holds the directory together with other processes; none can have its `lock` meanwhile.

        Raises:
            FedleakError: Another process has the lock.
        """
        with self._held(fcntl.LOCK_SH):
            yield

    def in_use(self) -> bool:
        """Returns whether somebody holds the directory now."""
        try:
            with self._held(fcntl.LOCK_EX):
                return False
        except _InUseError:
            return True

    @contextmanager
    def _held(self, operation: int) -> Iterator[None]:
        path = self.place(".lock")
        with files.naming(path):
            file = os.fdopen(opened(path, os.O_RDWR | os.O_CREAT), "rb+")
        with file:
            with files.naming(path):
                try:
                    fcntl.flock(file, operation | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise _InUseError(
                        f"{str(self.path)!r} is in use by another fedleak process"
                    ) from error
            try:
                yield
            finally:  # a process that was forked may have it open, too
                fcntl.flock(file, fcntl.LOCK_UN)

    # --- rows -------------------------------------------------------------------------------

    def append(self, lines: Lines[T], *values: T) -> None:
        """Appends values to a JSONL file and syncs it: whatever happens, all of them or none."""
        if values:
            place = self.sealed_place(Path(lines.name).name) if lines.sealed else None
            written = [lines.written(value, place) for value in values]
            files.append_together(self.place(lines.name), written)

    def rows(self, lines: Lines[T]) -> list[T]:
        """Returns the values of a JSONL file; none if there is no file.

        Raises:
            FedleakError: A line cannot be read.
        """
        rows, damaged = lines.read(self.file(lines.name))
        if damaged:
            number, _, reason = damaged[0]
            raise FedleakError(
                f"{self.path / lines.name}, line {number}, is damaged ({reason}): "
                f"`fedleak score {self.path}` puts it into damaged.jsonl and keeps the others"
            )
        return [row for row, _ in rows]

    def readable(self, lines: Lines[T]) -> list[T]:
        """Returns the lines that can be read, as `rows` does, and leaves the others where they are.

        Unlike `salvage` it needs no lock.
        """
        return [row for row, _ in lines.read(self.file(lines.name))[0]]

    def salvage(self, lines: Lines[T]) -> list[T]:
        """Returns the lines that can be read, as `rows` does, and moves others to damaged.jsonl.

        The caller holds the lock.
        """
        rows, damaged = lines.read(self.file(lines.name))
        if damaged:
            put_aside = [
                Damaged(file=lines.name, line=n, reason=reason, content=line.decode("latin-1"))
                for n, line, reason in damaged
            ]
            self.append(DAMAGED, *put_aside)
            self._write_lines(lines, [line for _, line in rows])
        return [row for row, _ in rows]

    def keep(self, lines: Lines[T], is_kept: Callable[[T], bool]) -> None:
        """Deletes lines of a JSONL file; those that are kept stay as they stand."""
        rows, _ = lines.read(self.file(lines.name))
        self._write_lines(lines, [line for row, line in rows if is_kept(row)])

    def _write_lines(self, lines: Lines[T], kept: Iterable[bytes]) -> None:
        content = b"".join(line.rstrip() + b"\n" for line in kept)
        files.replace(self.place(lines.name), content)

    def damaged(self) -> list[Damaged]:
        """Returns the lines that were put aside; for a damaged one among them, what is wrong."""
        rows, damaged = DAMAGED.read(self.file(DAMAGED.name))
        return [row for row, _ in rows] + [
            Damaged(file=DAMAGED.name, line=number, reason=reason) for number, _, reason in damaged
        ]

    def write_rows(self, lines: Lines[T], values: Iterable[T]) -> None:
        """Writes a whole JSONL file at once."""
        text = "".join(lines.written(value) + "\n" for value in values)
        files.replace(self.place(lines.name), text.encode())

    def changed_lines(self, lines: Lines[T]) -> list[int]:
        """Returns the numbers of lines that fedleak did not write here, or that were changed."""
        place = self.sealed_place(Path(lines.name).name)
        return [
            number
            for number, line in enumerate(files.complete_lines(self.file(lines.name)), 1)
            if not seal.is_genuine(place, line)
        ]
