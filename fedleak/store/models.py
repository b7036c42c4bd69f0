"""The tensors of each round: its model, the model sent in its place, the optimiser's moments."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedleak.store.folder import Folder, refusing_damage
from fedleak.store.info import REMEDY


@dataclass(frozen=True)
class Models:
    """A file of tensors for each round.

    Attributes:
        folder: The run's folder.
        prefix: What stands before the round in the names of files.
    """

    folder: Folder
    prefix: str

    def write(self, round: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes what a round starts from."""
        self.folder.write_tensors(self.name(round), tensors)

    def read_model(self, round: int) -> dict[str, Tensor]:
        """Reads what a round starts from.

        Raises:
            CaptureError: The file is damaged, missing, or of another experiment.
        """
        name = self.name(round)
        with refusing_damage(f"model {self.folder.file(name)}", f": {REMEDY}"):
            return self.folder.read_tensors(name)

    def has(self, round: int) -> bool:
        """Returns whether a round has a file."""
        return self.folder.has(self.name(round))

    def rounds(self) -> list[int]:
        """Returns the rounds that have a file, in order."""
        files = self.folder.path.glob(f"models/{self.prefix}*.safetensors")
        numbers = (path.stem.removeprefix(self.prefix) for path in files)
        return sorted(int(number) for number in numbers if number.isdecimal())

    def delete(self, round: int) -> None:
        """Deletes what a round starts from."""
        self.folder.delete(self.name(round))

    def name(self, round: int) -> str:
        """Returns the name of a round's file in the run directory."""
        return f"models/{self.prefix}{round:04d}.safetensors"
