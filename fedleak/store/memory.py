"""What a client keeps between rounds, and shows others, to notice what the server does.

FOLDER/client.json            the contract, hashes, and the largest norm so far
FOLDER/broadcast.safetensors  the last model without an alarm, with its round
BOARD/r3-CLIENT               the hash of what a client was sent in round 3
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors.numpy
from pydantic import JsonValue

from fedleak.detectors import Broadcast
from fedleak.store.files import naming, new_file, read_file, replace, tensor_file
from fedleak.store.lines import Document, Record


class Remembered(Record):
    """What a client knows of earlier rounds.

    Attributes:
        settings, shapes: The contract: what the server asked for, and sent, when the client joined.
        hashes: The hash of the last model that it was sent, by its round.
        longest: The largest L2 norm of its examples' gradients, or of its updates; None: there is
            none yet.
    """

    settings: dict[str, JsonValue]
    shapes: dict[str, tuple[int, ...]]
    hashes: dict[int, str] = {}
    longest: float | None = None


_CLIENT = Document("client.json", Remembered, "delete the folder, and the client begins anew")
_BROADCAST = "broadcast.safetensors"


@dataclass(frozen=True)
class Memory:
    """The folder of a client. Only its owner can open it and what is in it."""

    folder: Path

    def remembered(self) -> Remembered | None:
        """Returns what the client knows; None: it has just joined.

        Raises:
            FedleakError: The file is damaged.
        """
        path = self.folder / _CLIENT.name
        return _CLIENT.read(path) if path.is_file() else None

    def write(self, remembered: Remembered) -> None:
        """Writes what the client knows."""
        replace(self._place(_CLIENT.name), _CLIENT.written(remembered))

    def broadcast(self) -> Broadcast | None:
        """Returns the last model without an alarm; None: there was none."""
        path = self.folder / _BROADCAST
        if not path.is_file():
            return None
        with tensor_file(path, "numpy") as file:
            parameters = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            return Broadcast(int(file.metadata()["round"]), parameters)

    def write_broadcast(self, broadcast: Broadcast) -> None:
        """Keeps a model in place of the last one."""
        with new_file(self._place(_BROADCAST)) as temporary:
            about = {"round": str(broadcast.round)}
            safetensors.numpy.save_file(dict(broadcast.parameters), temporary, about)

    def _place(self, name: str) -> Path:
        """Returns where a file is to be written, in a folder that is made for it."""
        with naming(self.folder):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self.folder / name


@dataclass(frozen=True)
class Board:
    """A folder in which clients show each other hashes; the server cannot write to it.

    Attributes:
        folder: The folder that all clients share.
        client: The name of this client.
    """

    folder: Path
    client: str

    def compare(
        self, round: int, own_hash: str, rounds: Iterable[int]
    ) -> Mapping[int, Sequence[str]]:
        """Shows the hash of what this client was sent, and returns those of others, by round."""
        own = f"r{round}-{self.client}"
        with naming(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        replace(self.folder / own, own_hash.encode())
        files = {other: sorted(self.folder.glob(f"r{other}-*")) for other in rounds}
        return {
            other: [
                read_file(path, 64).decode("ascii", "replace") for path in paths if path.name != own
            ]
            for other, paths in files.items()
        }
