"""What all files of a run share: their place, the mark of their experiment, and their seals."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import safetensors
from safetensors.torch import save_file
from torch import Tensor

from fedleak.store import files, seal
from fedleak.store.info import INFO, Info
from fedleak.store.lines import Document
from fedleak.util.errors import CaptureError, ConfigError, FedleakError

T = TypeVar("T")

DAMAGE = (OSError, KeyError, ValueError, TypeError, RuntimeError, safetensors.SafetensorError)
"""The errors that reading a damaged file can raise."""


@contextmanager
def refusing_damage(
    file: str, remedy: str, errors: tuple[type[Exception], ...] = DAMAGE
) -> Iterator[None]:
    """Names a damaged file, and says what to do.

    Raises:
        CaptureError: Reading it raised one of the errors.
    """
    try:
        yield
    except errors as error:
        raise CaptureError(f"{file} is damaged ({files.one_line(error)}){remedy}") from error


@dataclass(frozen=True)
class Folder:
    """The folder of a run.

    It may be somebody else's: below it no link is followed, and only plain files are opened.
    """

    path: Path

    def has(self, name: str) -> bool:
        """Returns whether a file is here."""
        return (self.path / name).is_file()

    def file(self, name: str) -> Path:
        """Returns where a file is, in folders that are no links."""
        return files.inside(self.path, name)

    def place(self, name: str) -> Path:
        """Returns where a file is to be written, in folders that only their owner can open."""
        path = self.file(name)
        with files.naming(path):
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.parent.mkdir(mode=0o700, exist_ok=True)
        return path

    def delete(self, name: str) -> None:
        """Deletes a file, if it is here."""
        self.file(name).unlink(missing_ok=True)

    # --- run.json ---------------------------------------------------------------------------

    def exists(self) -> bool:
        """Returns whether something was run here."""
        return self.has("run.json")

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
        return cast(Info, seal.without(self.read_document(INFO)))

    def fingerprint(self) -> str | None:
        """Returns the fingerprint of this run's experiment; None before there is a run.json."""
        return self.info()["fingerprint"] if self.exists() else None

    def refuse_foreign(self, fingerprint: str | None) -> None:
        """Refuses the fingerprint of another experiment.

        Raises:
            ValueError: It is another one.
        """
        if fingerprint != (own := self.fingerprint()):
            raise ValueError(f"it is of another experiment, {fingerprint}; this one is {own}")

    # --- JSON -------------------------------------------------------------------------------

    def write(self, document: Document[T], value: T) -> None:
        """Writes a whole JSON file."""
        files.replace(self.place(document.name), document.written(value))

    def read_document(self, document: Document[T]) -> T:
        """Reads a JSON file.

        Raises:
            FedleakError: It is missing, damaged, or of another version of fedleak.
        """
        return document.read(self.file(document.name))

    def write_json(self, name: str, value: Any) -> None:
        """Writes a whole JSON file; a table gets a seal."""
        if isinstance(value, Mapping):
            value = seal.sealed(self.sealed_place(name), value)
        self.write_unsealed(name, value)

    def write_unsealed(self, name: str, value: Any) -> None:
        """Writes a whole JSON file, without a seal."""
        content = json.dumps(value, indent=1, allow_nan=False) + "\n"
        files.replace(self.place(name), content.encode())

    def read_json(self, name: str) -> Any:
        """Reads a JSON file, without its seal.

        Raises:
            FedleakError: It is missing or damaged.
        """
        path = self.file(name)
        content = files.read_file(path)
        try:
            return seal.without(files.parse_json(content))
        except ValueError as error:  # not UTF-8, or not JSON
            raise FedleakError(f"{path} is damaged ({files.one_line(error)})") from error

    # --- tensors ----------------------------------------------------------------------------

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor], **about: Any) -> None:
        """Writes tensors, and beside them a table: `about`, and the experiment's fingerprint."""
        flat_tensors, table = flat(tensors), {"fingerprint": self.fingerprint(), **about}
        parts = seal.tensor_parts(flat_tensors, json.dumps(table))
        if (mark := seal.seal(self.sealed_place(name), parts)) is not None:
            table[seal.FIELD] = mark
        with files.new_file(self.place(name)) as temporary:
            save_file(flat_tensors, temporary, {"fedleak": json.dumps(table)})

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """Reads tensors.

        Raises:
            One of `DAMAGE`: The file is damaged, missing, or of another experiment.
        """
        tensors, table = stored_tensors(self.file(name))
        self.refuse_foreign(json.loads(table)["fingerprint"])
        return tensors

    # --- seals ------------------------------------------------------------------------------

    def sealed_place(self, name: str) -> str:
        """Returns the place that a file's seal covers: a held update has its capture's place."""
        if name == "run.json":
            return name
        return f"{self.fingerprint()}/{name.replace('held/', 'captures/')}"

    def is_genuine(self, name: str) -> bool:
        """Returns whether fedleak wrote a file on this machine and nobody changed it since.

        Args:
            name: The name of a JSON object or a file of tensors.
        """
        try:
            path, place = self.file(name), self.sealed_place(name)
            if path.suffix == ".json":
                return seal.is_genuine(place, files.read_file(path))
            tensors, content = stored_tensors(path)
            table = json.loads(content)
            parts = seal.tensor_parts(tensors, json.dumps(seal.without(table)))
            mark = seal.seal(place, parts)
        except (*DAMAGE, FedleakError):
            return False
        return mark is not None and mark == table.get(seal.FIELD)


def flat(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors in a form that can be written; copies only those that are not in it.

    They are contiguous, in main memory, and no two of them share memory.
    """
    written: dict[str, Tensor] = {}
    owners: dict[int, str] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        owner = owners.setdefault(plain.untyped_storage().data_ptr(), name)
        written[name] = plain if owner == name else plain.clone()
    return written


def stored_tensors(path: Path) -> tuple[dict[str, Tensor], str]:
    """Reads the tensors of a file, and the table beside them, unchecked."""
    with files.tensor_file(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors, (file.metadata() or {})["fedleak"]


def stored_table(path: Path) -> str:
    """Reads the table beside the tensors of a file, unchecked."""
    with files.tensor_file(path) as file:
        table: str = (file.metadata() or {})["fedleak"]
        return table
