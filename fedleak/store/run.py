"""The run directory: the only thing that training, attacks and scoring share.

    runs/<name>/
      run.json                         the resolved experiment, its fingerprint, versions, status
      captures/r0001-c03.safetensors   what the server received, with what it knows as metadata
      captures/r0001-c03.json          that metadata, once the capture is answered and may go
      models/r0001.safetensors         the broadcast of a round; the last one is the trained model
      models/moments-r0002.safetensors what the server's Adam goes on from in that round
      vault/r0001-c03.json             the private batch, written by the client
      vault/r0001-c03.safetensors      what an audited copy of its update has of canaries
      defended/r0001-c03.json          what the client's defenses did, in its own figures
      reconstructions.jsonl            a line per attack and capture, as each finishes
      attempts.jsonl                   a line per try of an attack that crashed
      leakage.jsonl privacy.jsonl defenses.jsonl utility.jsonl summary.json held_out.json
      candidates/                      texts of files that attacks on membership are asked about
      membership.jsonl                 what these attacks say of each text of a list
      canaries.jsonl                   what the audit's canaries score in each update
      damaged.jsonl                    lines of the others that could not be read, and why
      shard-2of4/                      answers of one of several machines: `store.shards`
      log.txt flower.log

Of a matrix of a capture the rows of zeros are left out where that takes less room (`zero_rows`).
Only the owner can open the folder (0700) and any file in it (0600), from the moment it is made.
Captures, models and answers carry the fingerprint of their experiment, and are not read in a run of
another one. What figures rest on carries a seal, too (`seal`, `provenance`).
Of rounds that are not attacked neither captures nor models stay, but for the first and last model.
Under secure aggregation a capture is r0001-all: the round's sum. Until all have come, the updates
are below `held`, which stands for the protocol and is read by no attack. Without secure aggregation
an update is there while the server waits for those that are summed before it.

Work that is left is what the directory lacks, so there is no queue that a crash could corrupt.

The file is long because `Run` is the one place that knows where each file is.
"""

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar, cast

import safetensors
import safetensors.torch
from pydantic import Field
from torch import Tensor

from fedleak.store import seal
from fedleak.store.files import (
    append_together,
    complete_lines,
    inside,
    naming,
    new_file,
    one_line,
    parse_json,
    plain,
    read,
    real_folder,
    replace,
    tensor_file,
)
from fedleak.store.info import INFO, REMEDY, Info
from fedleak.store.lines import (
    SCHEMA_VERSION,
    Document,
    Lines,
    Record,
    validated,
)
from fedleak.store.zero_rows import shapes, with_zero_rows, without_zero_rows
from fedleak.training.observation import ClientUpdate, Knowledge, UpdateKind
from fedleak.util.errors import CaptureError, ConfigError, FedleakError
from fedleak.util.finite import all_finite
from fedleak.util.logs import logged
from fedleak.util.plain_files import opened
from fedleak.util.sanitise import printable

T = TypeVar("T")

_KEY = re.compile(r"r(\d+)-(?:c(\d+)|all)")

_LONGEST = 100
"""Characters of a name that are repeated in an error."""

EVERYONE = -1
"""The client of a capture that is the sum over all of its round."""


class Key(NamedTuple):
    """One client's update in one round."""

    round: int
    client: int

    def __str__(self) -> str:
        client = "all" if self.client == EVERYONE else f"c{self.client:02d}"
        return f"r{self.round:04d}-{client}"


class _Beside(Record):
    """What stands beside the tensors of a capture."""

    fingerprint: str | None
    kind: UpdateKind
    num_examples: Annotated[int, Field(ge=0)]
    knowledge: Knowledge
    rows: dict[str, Annotated[int, Field(ge=0)]] = {}


@dataclass(frozen=True)
class Capture:
    """What the server received from one client, and what it knows of how that was made."""

    key: Key
    update: ClientUpdate
    knowledge: Knowledge


class Damaged(Record):
    """A line of another file that could not be read, and why: a line of damaged.jsonl."""

    file: str
    line: int
    reason: str
    content: str = ""


DAMAGED = Lines("damaged.jsonl", Damaged)


class _InUseError(FedleakError):
    """Another process has a run directory."""


@dataclass(frozen=True)
class Run:
    """A run directory.

    It may be somebody else's: below it no link is followed, and only plain files are opened.
    """

    path: Path

    def inside(self, name: str) -> "Run":
        """Returns a run directory in this one.

        Raises:
            FedleakError: It is a link.
        """
        real_folder(self.path / name)
        return Run(self.path / name)

    # --- run.json ---------------------------------------------------------------------------

    def exists(self) -> bool:
        """Returns whether something was run here."""
        return (self.path / "run.json").is_file()

    def info(self) -> Info:
        """Returns the content of run.json.

        Raises:
            ConfigError: There is no run here.
            FedleakError: It is damaged, or of another version of fedleak.
        """
        if not self.exists():
            raise ConfigError(
                f"{str(self.path)!r} is not a run directory: it has no run.json: name the folder "
                "of a run, such as runs/NAME"
            )
        # The seal covers the content, and is no part of it.
        return cast(Info, seal.without(self.read(INFO)))

    def fingerprint(self) -> str | None:
        """Returns the mark of what belongs to this run; None before it has a run.json."""
        return self.info()["fingerprint"] if self.exists() else None

    def create(self, **values: Any) -> None:
        """Makes run.json, in a folder that only its owner can open.

        Args:
            values: At least `experiment`, its `fingerprint`, `status` and `num_labels`.
        """
        with naming(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
        self.write_json("run.json", {"schema_version": SCHEMA_VERSION, **values})

    def update_info(self, **values: Any) -> None:
        """Writes these keys of run.json and keeps the others.

        A run.json that somebody else wrote or changed gets no seal.
        """
        if self.made_here():
            self.write_json("run.json", {**self.info(), **values})
        else:
            self._write_plain_json("run.json", {**self.info(), **values})

    def made_here(self) -> bool:
        """Returns whether fedleak wrote run.json on this machine, and it is as it was."""
        return self.is_genuine("run.json")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the directory: one process at a time may train, attack and score here.

        What it does stands in the log.

        Raises:
            FedleakError: Another process has it.
        """
        with self._held(fcntl.LOCK_EX), logged(self.path):
            yield

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Holds the directory together with others that share it; nobody has its `lock` meanwhile.

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
        path = self._place(".lock")
        with naming(path):
            file = opened(path, os.O_RDWR | os.O_CREAT)
        try:
            with naming(path), self._refusing_others():
                fcntl.flock(file, operation | fcntl.LOCK_NB)
            try:
                yield
            finally:  # a process that was forked may have it open, too
                fcntl.flock(file, fcntl.LOCK_UN)
        finally:
            os.close(file)

    @contextmanager
    def _refusing_others(self) -> Iterator[None]:
        """Says that another process has the lock."""
        try:
            yield
        except BlockingIOError as error:
            raise _InUseError(f"{str(self.path)!r} is in use by another fedleak process") from error

    # --- captures and models ----------------------------------------------------------------

    def write_capture(self, capture: Capture) -> None:
        """Writes what the server received."""
        self._write_capture(_captured(capture.key), capture)

    def read_capture(self, key: Key, parameters: Mapping[str, Tensor] | None = None) -> Capture:
        """Reads a capture.

        Args:
            key: Which.
            parameters: Of the model, with or without values: an update has no others. None: they
                are not known here.

        Raises:
            CaptureError: The file is damaged, of another experiment or of another model.
        """
        return self._read_capture(_captured(key), key, parameters)

    def read_knowledge(self, key: Key) -> Knowledge:
        """Reads what the server knows of a capture, without its tensors.

        Raises:
            CaptureError: The file is damaged, or of another experiment.
        """
        return self._read_beside(key).knowledge

    def num_examples(self, key: Key) -> int:
        """Reads how many examples a capture was computed from, without its tensors.

        Raises:
            CaptureError: The file is damaged, or of another experiment.
        """
        return self._read_beside(key).num_examples

    def has_capture(self, key: Key) -> bool:
        """Returns whether a capture is here, or was."""
        return (self.path / _captured(key)).is_file() or self.is_closed(key)

    def captures(self) -> list[Key]:
        """Returns the keys of the captures, in order; also of those that were deleted."""
        folder = self.path / "captures"
        return sorted({*_keys(folder, ".safetensors"), *_keys(folder, ".json")})

    def close(self, key: Key, *, delete: bool) -> None:
        """Notes that every attack has answered for a capture, and may delete its tensors.

        What stood beside them stays.

        Raises:
            CaptureError: The file is damaged, or of another experiment.
        """
        if not self.is_closed(key):
            path = self._file(_captured(key))
            try:
                about = parse_json(_read_metadata(path))
            except _DAMAGE as error:
                raise _damaged(path, error) from error
            self.write_json(_closed(key), about)
        if delete:
            self._delete(_captured(key))

    def is_closed(self, key: Key) -> bool:
        """Returns whether `close` noted that every attack has answered for a capture."""
        return (self.path / _closed(key)).is_file()

    def deleted(self) -> set[Key]:
        """Returns the keys of the captures whose tensors were deleted."""
        folder = self.path / "captures"
        return {*_keys(folder, ".json")} - {*_keys(folder, ".safetensors")}

    def waiting(self) -> int:
        """Returns how many captures wait for their attacks."""
        folder = self.path / "captures"
        return len({*_keys(folder, ".safetensors")} - {*_keys(folder, ".json")})

    def hold(self, capture: Capture) -> None:
        """Keeps an update out of the server's sight, until all of the round are combined."""
        self._write_capture(_held(capture.key), capture)

    def held(self, key: Key) -> Capture:
        """Reads an update that is held.

        Raises:
            CaptureError: The file is damaged, or of another experiment.
        """
        return self._read_capture(_held(key), key)

    def admit(self, key: Key) -> None:
        """Makes a held update a capture: the file has two names then."""
        held, name = self._file(_held(key)), _captured(key)
        with new_file(self._place(name)) as temporary:
            temporary.unlink()
            try:
                os.link(held, temporary, follow_symlinks=False)
            except OSError:  # not every file system can
                shutil.copyfile(held, temporary, follow_symlinks=False)

    def release(self, key: Key) -> None:
        """Deletes an update that is held."""
        self._delete(_held(key))

    def drop_held(self) -> None:
        """Deletes what is held."""
        shutil.rmtree(self.path / "held", ignore_errors=True)

    def write_broadcast(self, round: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes the model that a round starts from."""
        self._write_tensors(_model(round), tensors, {})

    def read_broadcast(self, round: int) -> dict[str, Tensor]:
        """Reads the model that a round starts from.

        Raises:
            CaptureError: The file is damaged, missing, or of another experiment.
        """
        return self._read_model_file(_model(round))

    def write_moments(self, round: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes what the server's optimiser goes on from in a round, beside the model."""
        self._write_tensors(_moments(round), tensors, {})

    def read_moments(self, round: int) -> dict[str, Tensor]:
        """Reads what the server's optimiser goes on from in a round; nothing in the first.

        Raises:
            CaptureError: The file is damaged, missing, or of another experiment.
        """
        return {} if round == 1 else self._read_model_file(_moments(round))

    def _read_model_file(self, name: str) -> dict[str, Tensor]:
        path = self._file(name)
        try:
            tensors, metadata = _read_tensors(path)
            self._refuse_foreign(json.loads(metadata["fedleak"])["fingerprint"])
        except _DAMAGE as error:
            raise CaptureError(f"model {path} is damaged ({one_line(error)}): {REMEDY}") from error
        return tensors

    def forget(self, round: int) -> None:
        """Deletes the captures of a round, and the model that it started from, but for the first.

        That is what a central reference starts from.
        """
        for key in self.captures():
            if key.round == round:
                self._delete(_captured(key))
                self._delete(_closed(key))
        if round > 1:
            self._delete(_model(round))
            self._delete(_moments(round))

    def _delete(self, name: str) -> None:
        self._file(name).unlink(missing_ok=True)

    def has_broadcast(self, round: int) -> bool:
        """Returns whether the model that a round starts from is here."""
        return (self.path / _model(round)).is_file()

    def broadcasts(self) -> list[int]:
        """Returns the rounds whose starting model is here, in order."""
        return self._rounds("models/r")

    def moments(self) -> list[int]:
        """Returns the rounds whose moments are here, in order."""
        return self._rounds("models/moments-r")

    def _rounds(self, before: str) -> list[int]:
        """Returns the rounds in the names of files that begin so."""
        start = len(Path(before).name)
        numbers = (path.stem[start:] for path in self.path.glob(f"{before}*.safetensors"))
        return sorted(int(number) for number in numbers if number.isdecimal())

    def _write_capture(self, name: str, capture: Capture) -> None:
        update = capture.update
        about = {
            "kind": update.kind,
            "num_examples": update.num_examples,
            "knowledge": {k: v for k, v in asdict(capture.knowledge).items() if v is not None},
        }
        stored, heights = without_zero_rows(_flat(update.tensors))
        self._write_tensors(name, stored, about | ({"rows": heights} if heights else {}))

    def _read_capture(
        self, name: str, key: Key, parameters: Mapping[str, Tensor] | None = None
    ) -> Capture:
        path = self._file(name)
        if self.is_closed(key) and not path.is_file():
            raise CaptureError(
                f"capture {path} was deleted once every attack had answered (audit.keep): nothing "
                "can attack it again; `fedleak run FILE --fresh` with audit.keep = 'all' keeps it"
            )
        try:
            stored, metadata = _read_tensors(path)
            beside = self._parse_beside(metadata["fedleak"].encode())
            if parameters is not None:
                _refuse_other_parameters(stored, shapes(stored, beside.rows), parameters)
            update = with_zero_rows(stored, beside.rows)
        except _DAMAGE as error:
            raise _damaged(path, error) from error
        return Capture(
            key, ClientUpdate(beside.kind, update, beside.num_examples), beside.knowledge
        )

    def _read_beside(self, key: Key) -> _Beside:
        closed = self.is_closed(key)
        path = self._file(_closed(key) if closed else _captured(key))
        try:
            return self._parse_beside(read(path) if closed else _read_metadata(path))
        except (*_DAMAGE, FedleakError) as error:
            raise _damaged(path, error) from error

    def _parse_beside(self, content: bytes) -> _Beside:
        """Reads what stands beside the tensors of a capture."""
        parse_json(content)  # refuses numbers that are not finite
        beside = validated(_Beside, content)
        self._refuse_foreign(beside.fingerprint)
        return beside

    def _refuse_foreign(self, fingerprint: str | None) -> None:
        """Refuses what carries another experiment's mark."""
        if fingerprint != (own := self.fingerprint()):
            raise ValueError(f"it is of another experiment, {fingerprint}; this one is {own}")

    def _write_tensors(
        self, name: str, tensors: Mapping[str, Tensor], about: Mapping[str, Any]
    ) -> None:
        """Writes tensors, and beside them a table with this experiment's mark."""
        table, flat = {"fingerprint": self.fingerprint(), **about}, _flat(tensors)
        mark = seal.seal(self._sealed_place(name), seal.tensor_parts(flat, json.dumps(table)))
        if mark is not None:
            table[seal.FIELD] = mark
        with new_file(self._place(name)) as temporary:
            # One entry: several would stand in another order each time.
            safetensors.torch.save_file(flat, temporary, {"fedleak": json.dumps(table)})

    def _sealed_place(self, name: str) -> str:
        """Returns where a file belongs, for its seal: a held update has its capture's place."""
        if name == "run.json":
            return name
        return f"{self.fingerprint()}/{name.replace('held/', 'captures/')}"

    def is_genuine(self, name: str) -> bool:
        """Returns whether fedleak wrote a file on this machine, and it is as it was.

        Args:
            name: Of a JSON object or a file of tensors.
        """
        try:
            path, place = self._file(name), self._sealed_place(name)
            if path.suffix == ".json":
                table = parse_json(read(path))
                return isinstance(table, dict) and seal.is_genuine(place, table)
            tensors, metadata = _read_tensors(path)
            table = json.loads(metadata["fedleak"])
            parts = seal.tensor_parts(tensors, json.dumps(seal.without(table)))
            mark = seal.seal(place, parts)
        except (*_DAMAGE, FedleakError):
            return False
        return mark is not None and mark == table.get(seal.FIELD)

    def changed_lines(self, lines: Lines[T]) -> list[int]:
        """Returns the numbers of the lines that fedleak did not write here as they stand."""
        place = self._sealed_place(Path(lines.name).name)
        return [
            number
            for number, line in enumerate(complete_lines(self._file(lines.name)), 1)
            if not _is_genuine_line(place, line)
        ]

    # --- the vault --------------------------------------------------------------------------

    def write_truth(self, key: Key, value: Mapping[str, Any]) -> None:
        """Writes a private batch."""
        self.write_json(f"vault/{key}.json", value)

    def read_truth(self, key: Key) -> dict[str, Any] | None:
        """Returns a private batch; None if the client wrote none.

        Raises:
            FedleakError: The file is damaged.
        """
        name = f"vault/{key}.json"
        return self.read_json(name) if (self.path / name).is_file() else None

    def write_audited(self, key: Key, differences_SK: Tensor) -> None:
        """Writes by how much an audited copy of an update differs, at the canaries' numbers."""
        self._write_tensors(f"vault/{key}.safetensors", {"differences": differences_SK}, {})

    def has_audited(self, key: Key) -> bool:
        """Returns whether an audited copy of an update is here."""
        return (self.path / "vault" / f"{key}.safetensors").is_file()

    def read_audited(self, key: Key) -> Tensor:
        """Reads by how much an audited copy differs.

        Raises:
            CaptureError: The file is damaged, missing, or of another experiment.
        """
        path = self._file(f"vault/{key}.safetensors")
        try:
            tensors, metadata = _read_tensors(path)
            self._refuse_foreign(json.loads(metadata["fedleak"])["fingerprint"])
            differences_SK = tensors["differences"]
            if not (differences_SK.is_floating_point() and all_finite(differences_SK)):
                raise ValueError("not all of it are finite numbers")
            return differences_SK
        except _DAMAGE as error:
            raise CaptureError(f"{path} is damaged ({one_line(error)})") from error

    def truths(self) -> list[Key]:
        """Returns the keys of the private batches, in order."""
        return _keys(self.path / "vault", ".json")

    def write_defended(self, key: Key, value: Mapping[str, Any]) -> None:
        """Writes what a client's defenses did: its own figures."""
        self.write_json(f"defended/{key}.json", plain(value))

    def defended(self) -> dict[Key, Any]:
        """Returns what clients' defenses did, in the order of rounds and clients.

        None stands for a file that cannot be read.
        """
        notes: dict[Key, Any] = {}
        for key in _keys(self.path / "defended", ".json"):
            notes[key] = None
            with suppress(FedleakError):
                notes[key] = self.read_json(f"defended/{key}.json")
        return notes

    # --- rows -------------------------------------------------------------------------------

    def append(self, lines: Lines[T], *values: T) -> None:
        """Appends values to a JSONL file and syncs it: whatever happens, all of them or none."""
        if values:
            place = self._sealed_place(Path(lines.name).name) if lines.sealed else None
            written = [lines.written(value, place) for value in values]
            append_together(self._place(lines.name), written)

    def rows(self, lines: Lines[T]) -> list[T]:
        """Returns the values of a JSONL file; none if there is no file.

        Raises:
            FedleakError: A line that cannot be read.
        """
        rows, damaged = self._parsed(lines)
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
        return [row for row, _ in self._parsed(lines)[0]]

    def salvage(self, lines: Lines[T]) -> list[T]:
        """Returns the lines that can be read, as `rows` does, and moves others to damaged.jsonl.

        Whoever calls it holds the lock.
        """
        rows, damaged = self._parsed(lines)
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
        self._write_lines(lines, [line for row, line in self._parsed(lines)[0] if is_kept(row)])

    def _write_lines(self, lines: Lines[T], kept: Iterable[bytes]) -> None:
        content = b"".join(line.rstrip() + b"\n" for line in kept)
        replace(self._place(lines.name), content)

    def damaged(self) -> list[Damaged]:
        """Returns the lines that were put aside; for one that is itself damaged, what is wrong."""
        rows, damaged = self._parsed(DAMAGED)
        return [row for row, _ in rows] + [
            Damaged(file=DAMAGED.name, line=number, reason=reason) for number, _, reason in damaged
        ]

    def _parsed(
        self, lines: Lines[T]
    ) -> tuple[list[tuple[T, bytes]], list[tuple[int, bytes, str]]]:
        """Returns values with their lines, and damaged lines with number and what is wrong."""
        rows: list[tuple[T, bytes]] = []
        damaged: list[tuple[int, bytes, str]] = []
        for number, line in enumerate(complete_lines(self._file(lines.name)), 1):
            try:
                rows.append((lines.read(line), line))
            except ValueError as error:
                damaged.append((number, line, one_line(error)))
        return rows, damaged

    def write_rows(self, lines: Lines[T], values: Iterable[T]) -> None:
        """Writes a whole JSONL file at once."""
        text = "".join(lines.written(value) + "\n" for value in values)
        replace(self._place(lines.name), text.encode())

    def write(self, document: Document[T], value: T) -> None:
        """Writes a JSON file at once."""
        replace(self._place(document.name), document.written(value))

    def read(self, document: Document[T]) -> T:
        """Reads a JSON file.

        Raises:
            FedleakError: It is missing, damaged, or of another version of fedleak.
        """
        path = self._file(document.name)
        content = read(path)
        try:
            return document.read(content)
        except ValueError as error:
            reason = one_line(error)
            raise FedleakError(f"{path} cannot be read ({reason}): {document.remedy}") from error

    def write_json(self, name: str, value: Any) -> None:
        """Writes a JSON file at once; a table gets a seal."""
        table = isinstance(value, Mapping)
        self._write_plain_json(
            name, seal.sealed(self._sealed_place(name), value) if table else value
        )

    def _write_plain_json(self, name: str, value: Any) -> None:
        content = json.dumps(value, indent=1, allow_nan=False) + "\n"
        replace(self._place(name), content.encode())

    def read_json(self, name: str) -> Any:
        """Reads a JSON file, without its seal.

        Raises:
            FedleakError: It is missing or damaged.
        """
        path = self._file(name)
        content = read(path)
        try:
            return seal.without(parse_json(content))
        except ValueError as error:  # not UTF-8, or not JSON
            raise FedleakError(f"{path} is damaged ({one_line(error)})") from error

    def _file(self, name: str) -> Path:
        """Returns where a file is, in folders that are no links."""
        return inside(self.path, name)

    def _place(self, name: str) -> Path:
        """Returns where a file is to be written, in folders that only their owner can open."""
        path = self._file(name)
        with naming(path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
        return path

    def move_aside(self) -> Path:
        """Moves the directory out of the way and returns where it is now."""
        aside = self.path.with_name(f"{self.path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
        while aside.exists():
            aside = aside.with_name(aside.name + "x")
        with naming(self.path, "moved"):
            self.path.rename(aside)
        return aside


_DAMAGE = (OSError, KeyError, ValueError, TypeError, RuntimeError, safetensors.SafetensorError)
"""What reading a damaged file raises."""


def _damaged(path: Path, error: Exception) -> CaptureError:
    return CaptureError(
        f"capture {path} is damaged ({one_line(error)}): delete it, run the experiment again, then "
        "`fedleak attack --retry`"
    )


def _model(round: int) -> str:
    return f"models/r{round:04d}.safetensors"


def _moments(round: int) -> str:
    return f"models/moments-r{round:04d}.safetensors"


def _captured(key: Key) -> str:
    return f"captures/{key}.safetensors"


def _closed(key: Key) -> str:
    return f"captures/{key}.json"


def _held(key: Key) -> str:
    return f"held/{key}.safetensors"


def _keys(folder: Path, suffix: str) -> list[Key]:
    matches = (_KEY.fullmatch(p.name.removesuffix(suffix)) for p in folder.glob(f"*{suffix}"))
    return sorted(Key(int(m[1]), EVERYONE if m[2] is None else int(m[2])) for m in matches if m)


def _flat(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors as they can be written; those that can be already are not copied."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _is_genuine_line(place: str, line: bytes) -> bool:
    try:
        table = parse_json(line)
    except ValueError:
        return False
    return isinstance(table, dict) and seal.is_genuine(place, table)


def _refuse_other_parameters(
    stored: Mapping[str, Tensor],
    shapes: Mapping[str, Sequence[int]],
    parameters: Mapping[str, Tensor],
) -> None:
    """Refuses tensors that are no parameters of a model."""
    for name, shape in shapes.items():
        if name not in parameters:
            raise ValueError(f"{printable(name)[:_LONGEST]!r} is no parameter of the model")
        if tuple(shape) != (wanted := tuple(parameters[name].shape)):
            raise ValueError(f"{name} has the shape {tuple(shape)}, and the model's {wanted}")
        if not stored[name].is_floating_point():
            raise ValueError(f"{name} is of {stored[name].dtype}")


def _read_metadata(path: Path) -> bytes:
    """Reads the table beside the tensors of a file, whatever it says."""
    with tensor_file(path) as file:
        text: str = (file.metadata() or {})["fedleak"]
    return text.encode()


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with tensor_file(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
