"""What the server never receives: notes of clients on their updates, private batches among them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from fedleak.store.captures import Key, keys_in
from fedleak.store.folder import Folder, refusing_damage
from fedleak.util.finite import all_finite


@dataclass(frozen=True)
class Notes:
    """A JSON file of each update.

    Attributes:
        folder: The run's folder.
        name: The name of the folder in it.
    """

    folder: Folder
    name: str

    def path(self, key: Key) -> Path:
        """Returns where the note on an update is."""
        return self.folder.path / self._name(key)

    def write(self, key: Key, value: Mapping[str, Any]) -> None:
        """Writes what a client notes."""
        self.folder.write_json(self._name(key), value)

    def read_note(self, key: Key) -> dict[str, Any] | None:
        """Returns what a client noted; None: nothing.

        Raises:
            FedleakError: The file is damaged.
        """
        return self.folder.read_json(self._name(key)) if self.path(key).is_file() else None

    def all_keys(self) -> list[Key]:
        """Returns the keys of the updates that have a note, in order."""
        return keys_in(self.folder.path / self.name, ".json")

    def _name(self, key: Key) -> str:
        return f"{self.name}/{key}.json"


class Vault(Notes):
    """Private batches, and how audited copies of updates differ at the canaries' numbers."""

    def write_differences(self, key: Key, differences_SK: Tensor) -> None:
        """Writes by how much an audited copy of an update differs."""
        self.folder.write_tensors(self._differences(key), {"differences": differences_SK})

    def has_differences(self, key: Key) -> bool:
        """Returns whether the differences of an audited copy are here."""
        return self.folder.has(self._differences(key))

    def read_differences(self, key: Key) -> Tensor:
        """Reads by how much an audited copy differs.

        Raises:
            CaptureError: The file is damaged, missing, or of another experiment.
        """
        name = self._differences(key)
        with refusing_damage(str(self.folder.file(name)), ""):
            differences_SK = self.folder.read_tensors(name)["differences"]
            if not (differences_SK.is_floating_point() and all_finite(differences_SK)):
                raise ValueError("not all of it are finite numbers")
            return differences_SK

    def _differences(self, key: Key) -> str:
        return f"{self.name}/{key}.safetensors"
