"""The folder of a tap: what a Flower app of somebody else sent and received in training.

  runs/mine/
    messages.jsonl           a line per message: round, node, metrics and configs, names of files
    arrays/r0001-m00003-0.safetensors   one array record of a message, as it was on the wire
    problems.jsonl           what was not kept, and why

Equal arrays of several messages are one file. These files hold what clients sent, unchanged, so
nothing in them is to be trusted: `fedleak.tap.importing` checks it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import Field, JsonValue

from fedleak.store import files
from fedleak.store.lines import Lines, Record
from fedleak.util.errors import ConfigError, FedleakError

MOST_ROUNDS = 100_000
"""The most rounds of a tap; a message of a later round is damaged."""


class KeptArrays(Record):
    """An array record of a message.

    Attributes:
        record: Its name in the message.
        file: Where it is.
    """

    record: str
    file: str


class TappedMessage(Record):
    """One message.

    Attributes:
        way: "sent" to a node for training, "received" from it, or "evaluated": sent for evaluation,
            which shows the model after a round.
        round: The round of the strategy, from 1.
        node: Flower's number of the node.
        arrays: Its array records, in order.
        numbers: Its metrics and configs, by the name of the record.
    """

    way: Literal["sent", "received", "evaluated"]
    round: Annotated[int, Field(ge=0, le=MOST_ROUNDS)]
    node: int
    arrays: tuple[KeptArrays, ...]
    numbers: dict[str, dict[str, JsonValue]]


class Problem(Record):
    """What was not kept.

    Attributes:
        round, node: Of the message; None: the problem is about no single message.
        reason: Why.
    """

    round: int | None
    node: int | None
    reason: str


MESSAGES = Lines("messages.jsonl", TappedMessage)
PROBLEMS = Lines("problems.jsonl", Problem)


@dataclass(frozen=True)
class Tapped:
    """The folder of a tap. Only its owner can open it and what is in it."""

    path: Path

    def create(self) -> None:
        """Makes the folder."""
        with files.naming(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
            (self.path / "arrays").mkdir(mode=0o700, exist_ok=True)

    def used(self) -> bool:
        """Returns whether there is something in the folder."""
        return self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir()))

    def write_arrays(self, name: str, arrays: Mapping[str, NDArray[Any]]) -> str:
        """Writes an array record and returns the file's name."""
        file = f"arrays/{name}.safetensors"
        with files.new_file(self.path / file) as temporary:
            safetensors.numpy.save_file(dict(arrays), temporary)
        return file

    def append(self, message: TappedMessage) -> None:
        """Notes a message.

        Raises:
            ValueError: It could not be read back.
        """
        line = MESSAGES.written(message)
        MESSAGES.parse_line(line.encode())
        files.append_together(self.path / MESSAGES.name, [line])

    def complain(self, problem: Problem) -> None:
        """Notes what was not kept."""
        files.append_together(self.path / PROBLEMS.name, [PROBLEMS.written(problem)])

    def messages(self) -> tuple[list[TappedMessage], list[str]]:
        """Returns the messages in order, and what could not be read.

        Raises:
            ConfigError: There is no tap here.
        """
        if not (self.path / MESSAGES.name).is_file():
            raise ConfigError(
                f"{str(self.path)!r} is not the folder of a tap: it has no {MESSAGES.name}: name "
                'the folder that the ServerApp gave to `tap(grid, "FOLDER")`'
            )
        messages, damaged = MESSAGES.read(self.path / MESSAGES.name)
        return [message for message, _ in messages], [
            f"line {number} of {MESSAGES.name} is damaged ({reason})"
            for number, _, reason in damaged
        ]

    def problems(self) -> list[Problem]:
        """Returns what was not kept; a line that cannot be read is one problem more."""
        problems, damaged = PROBLEMS.read(self.path / PROBLEMS.name)
        unread = [Problem(round=None, node=None, reason=reason) for *_, reason in damaged]
        return [problem for problem, _ in problems] + unread

    def names(self, kept: KeptArrays) -> list[str]:
        """Returns the names in an array record.

        Raises:
            FedleakError: The file is missing or damaged.
        """
        with self.opened(kept) as file:
            return list(file.keys())

    @contextmanager
    def opened(self, kept: KeptArrays) -> Iterator[Any]:
        """Opens the file of a record, as `safetensors.safe_open` does.

        Raises:
            FedleakError: The file is missing or damaged.
        """
        path = files.inside(self.path, f"arrays/{Path(kept.file).name}")
        try:
            with files.tensor_file(path) as file:
                yield file
        except (OSError, safetensors.SafetensorError) as error:
            raise FedleakError(f"{path} cannot be read ({files.one_line(error)})") from error
