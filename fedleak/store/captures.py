"""What the server received: a file of tensors for each update, with the server's knowledge."""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field
from torch import Tensor

from fedleak.store.files import new_file, parse_json, read_file, second_name
from fedleak.store.folder import DAMAGE, Folder, flat, refusing_damage, stored_table, stored_tensors
from fedleak.store.lines import Record, validated
from fedleak.store.zero_rows import shapes, with_zero_rows, without_zero_rows
from fedleak.training.observation import ClientUpdate, Knowledge, UpdateKind
from fedleak.util.errors import CaptureError, FedleakError
from fedleak.util.sanitise import printable

_KEY = re.compile(r"r(\d+)-(?:c(\d+)|all)")

_REMEDY = ": delete it, run the experiment again, then `fedleak attack --retry`"

_LONGEST = 100
"""Characters of a name that are repeated in an error."""

EVERYONE = -1
"""The client number of a capture that is the sum of its round's updates."""


class Key(NamedTuple):
    """One client's update in one round."""

    round: int
    client: int

    def __str__(self) -> str:
        client = "all" if self.client == EVERYONE else f"c{self.client:02d}"
        return f"r{self.round:04d}-{client}"


def keys_in(folder: Path, suffix: str) -> list[Key]:
    """Returns the keys in the names of a folder's files, in order."""
    matches = (_KEY.fullmatch(p.name.removesuffix(suffix)) for p in folder.glob(f"*{suffix}"))
    return sorted(Key(int(m[1]), EVERYONE if m[2] is None else int(m[2])) for m in matches if m)


@dataclass(frozen=True)
class Capture:
    """What the server received from one client, and what it knows of how the update was made."""

    key: Key
    update: ClientUpdate
    knowledge: Knowledge


class About(Record):
    """The metadata beside the tensors of a capture."""

    fingerprint: str | None
    kind: UpdateKind
    num_examples: Annotated[int, Field(ge=0)]
    knowledge: Knowledge
    rows: dict[str, Annotated[int, Field(ge=0)]] = {}


@dataclass(frozen=True)
class Captures:
    """The captures of a run, or the updates that are held until they are summed.

    Attributes:
        folder: The run's folder.
        name: The name of the folder in it.
    """

    folder: Folder
    name: str

    def write(self, capture: Capture) -> None:
        """Writes what the server received."""
        update = capture.update
        stored, heights = without_zero_rows(flat(update.tensors))
        self.folder.write_tensors(
            self._tensors(capture.key),
            stored,
            kind=update.kind,
            num_examples=update.num_examples,
            knowledge={k: v for k, v in asdict(capture.knowledge).items() if v is not None},
            **({"rows": heights} if heights else {}),
        )

    def read_capture(self, key: Key, parameters: Mapping[str, Tensor] | None = None) -> Capture:
        """Reads a capture.

        Args:
            key: Which capture.
            parameters: Those of the model, with or without values: an update has no others. None:
                they are not known here.

        Raises:
            CaptureError: The file is damaged, of another experiment or of another model.
        """
        path = self.folder.file(self._tensors(key))
        if self.is_closed(key) and not path.is_file():
            raise CaptureError(
                f"capture {path} was deleted once every attack had answered (audit.keep): nothing "
                "can attack it again; `fedleak run FILE --fresh` with audit.keep = 'all' keeps it"
            )
        with refusing_damage(f"capture {path}", _REMEDY):
            stored, table = stored_tensors(path)
            about = self._parsed(table.encode())
            if parameters is not None:
                _refuse_other_parameters(stored, shapes(stored, about.rows), parameters)
            update = with_zero_rows(stored, about.rows)
        return Capture(key, ClientUpdate(about.kind, update, about.num_examples), about.knowledge)

    def about(self, key: Key) -> About:
        """Reads the metadata of a capture, also if its tensors were deleted.

        Raises:
            CaptureError: The file is damaged, or of another experiment.
        """
        closed = self.is_closed(key)
        path = self.folder.file(self._note(key) if closed else self._tensors(key))
        with refusing_damage(f"capture {path}", _REMEDY, (*DAMAGE, FedleakError)):
            return self._parsed(read_file(path) if closed else stored_table(path).encode())

    def _parsed(self, content: bytes) -> About:
        parse_json(content)  # refuses numbers that are not finite
        about = validated(About, content)
        self.folder.refuse_foreign(about.fingerprint)
        return about

    def has(self, key: Key) -> bool:
        """Returns whether a capture is here, or was."""
        return self.folder.has(self._tensors(key)) or self.is_closed(key)

    def all_keys(self) -> list[Key]:
        """Returns the keys of the captures, in order; also of those that were deleted."""
        return sorted(self.stored() | self._noted())

    def stored(self) -> set[Key]:
        """Returns the keys of the captures whose tensors are here."""
        return set(keys_in(self.folder.path / self.name, ".safetensors"))

    def deleted(self) -> set[Key]:
        """Returns the keys of the captures whose tensors were deleted."""
        return self._noted() - self.stored()

    def waiting(self) -> int:
        """Returns how many captures wait for their attacks."""
        return len(self.stored() - self._noted())

    def close(self, key: Key, *, delete: bool) -> None:
        """Notes that every attack has answered for a capture, and deletes its tensors if `delete`.

        Their metadata stays.

        Raises:
            CaptureError: The file is damaged, or of another experiment.
        """
        if not self.is_closed(key):
            path = self.folder.file(self._tensors(key))
            with refusing_damage(f"capture {path}", _REMEDY):
                about = parse_json(stored_table(path).encode())
            self.folder.write_json(self._note(key), about)
        if delete:
            self.delete(key)

    def is_closed(self, key: Key) -> bool:
        """Returns whether `close` noted that every attack has answered for a capture."""
        return self.folder.has(self._note(key))

    def delete(self, key: Key) -> None:
        """Deletes the tensors of a capture."""
        self.folder.delete(self._tensors(key))

    def forget(self, round: int) -> None:
        """Deletes all captures of a round, and their metadata."""
        for key in self.all_keys():
            if key.round == round:
                self.delete(key)
                self.folder.delete(self._note(key))

    def admit(self, key: Key, held: "Captures") -> None:
        """Makes a held update a capture: the file has two names then."""
        source = held.folder.file(held._tensors(key))
        with new_file(self.folder.place(self._tensors(key))) as temporary:
            temporary.unlink()
            second_name(source, temporary)

    def drop(self) -> None:
        """Deletes all that is here."""
        shutil.rmtree(self.folder.path / self.name, ignore_errors=True)

    def _tensors(self, key: Key) -> str:
        return f"{self.name}/{key}.safetensors"

    def _note(self, key: Key) -> str:
        return f"{self.name}/{key}.json"

    def _noted(self) -> set[Key]:
        return set(keys_in(self.folder.path / self.name, ".json"))


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
