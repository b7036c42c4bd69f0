"""Writes down the messages of training. An error here reaches the app only as a line on stderr."""

import base64
import hashlib
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict
from numpy.typing import NDArray

from fedleak.store.files import plain
from fedleak.tap.folder import KeptArrays, Problem, Tapped, TappedMessage
from fedleak.util.nested import mapped
from fedleak.util.sanitise import printable

MOST_TIMES = 4
"""How many times as large as what was sent a reply may be; masked vectors are twice as large."""

MOST_BESIDE = 1 << 20
"""Bytes that a reply may have beyond that, and characters that its metrics and configs may have."""

LONGEST_BYTES = 4096
"""Bytes in a config that are kept; of more, such as masked vectors, only the number is kept."""

LARGEST_NUMBER = 8
"""Bytes of a number of an array; NumPy also has longer ones, which no file of tensors holds."""

_LONGEST = 400


def recorder(folder: str | os.PathLike[str]) -> "Recorder | None":
    """Returns a recorder with a folder of its own; None, and a line on stderr, if it gets none."""
    try:
        numbers = itertools.count(2)
        free = tapped = Tapped(Path(folder).absolute())
        while free.used():
            free = Tapped(tapped.path.with_name(f"{tapped.path.name}-{next(numbers)}"))
        free.create()
    except Exception as error:  # noqa: BLE001 - the app trains without a tap, too
        say(f"NOTHING IS KEPT: {error}")
        return None
    if free != tapped:
        say(f"{tapped.path} holds an earlier tap, so this one goes to {free.path}")
    say(f"every update is kept in {free.path}: private texts can be read from it, so protect it")
    return Recorder(free)


class Recorder:
    """Keeps messages in a folder, one in memory at a time."""

    def __init__(self, tapped: Tapped) -> None:
        self._tapped = tapped
        self._numbers = itertools.count(1)  # of messages with arrays
        self._exchanges = 0
        self._files: dict[bytes, str] = {}  # what was sent, by its digest
        self._most = MOST_BESIDE

    def send(self, messages: Sequence[Message]) -> list[int | None]:
        """Keeps what goes out; returns the round of each message whose reply is to be kept."""
        rounds: list[int | None] = [None] * len(messages)
        with self._noting(None, None):
            kinds = [message.metadata.message_type.split(".")[0] for message in messages]
            self._exchanges += "train" in kinds
            same: dict[int, str] = {}  # one record may be in all messages
            for i, (message, kind) in enumerate(zip(messages, kinds, strict=True)):
                if kind not in ("train", "evaluate") or not message.has_content():
                    continue
                round = round_of(message) or self._exchanges
                rounds[i] = round if kind == "train" else None
                node = message.metadata.dst_node_id
                with self._noting(round, node):
                    way = "sent" if kind == "train" else "evaluated"
                    arrays = [
                        KeptArrays(record=name, file=self._once(record, round, same))
                        for name, record in message.content.array_records.items()
                    ]
                    self._note(way, round, node, arrays, message.content)
        return rounds

    def receive(self, reply: Message, round: int) -> None:
        """Keeps what came in."""
        node = reply.metadata.src_node_id
        with self._noting(round, node):
            if reply.has_error():
                raise ValueError(f"the client failed: {reply.error.reason}")
            content = reply.content
            size = sum(map(_size, content.array_records.values()))
            if size > self._most:
                raise ValueError(
                    f"it has {size:,} bytes, more than {MOST_TIMES} times what was sent"
                )
            numbers = next(self._numbers)
            arrays = []
            for i, (name, record) in enumerate(content.array_records.items()):
                file = f"r{round:04d}-m{numbers:05d}-{i}"
                kept = self._tapped.write_arrays(file, decoded(record))
                arrays.append(KeptArrays(record=name, file=kept))
            self._note("received", round, node, arrays, content)

    def _once(self, record: ArrayRecord, round: int, same: dict[int, str]) -> str:
        """Returns the file of an array record that was sent; it is written once."""
        if id(record) not in same:
            digest = _digest(record)
            if digest not in self._files:
                name = f"r{round:04d}-m{next(self._numbers):05d}-0"
                self._files[digest] = self._tapped.write_arrays(name, decoded(record))
                self._most = max(self._most, MOST_TIMES * _size(record) + MOST_BESIDE)
            same[id(record)] = self._files[digest]
        return same[id(record)]

    def _note(
        self, way: Any, round: int, node: int, arrays: Sequence[KeptArrays], content: RecordDict
    ) -> None:
        numbers, kept = plain_numbers(content), tuple(arrays)
        message = TappedMessage(way=way, round=round, node=node, arrays=kept, numbers=numbers)
        self._tapped.append(message)

    @contextmanager
    def _noting(self, round: int | None, node: int | None) -> Iterator[None]:
        """Reports an error, and goes on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - no mistake of the tap's may end the training
            reason = printable(f"{error}" or type(error).__name__)[:_LONGEST]
            place = "" if round is None else f"round {round}, node {node}: "
            say(f"NOT KEPT: {place}{reason}")
            try:
                self._tapped.complain(Problem(round=round, node=node, reason=reason))
            except Exception as worse:  # noqa: BLE001 - the disk may be full
                say(f"{worse}")


def say(message: str, who: str = "tap") -> None:
    """Prints a line of the tap or the guard on stderr."""
    print(f"fedleak {who}: {printable(message)}", file=sys.stderr, flush=True)  # noqa: T201


def round_of(message: Message) -> int | None:
    """Returns the round that a strategy states in a config or, as workflows do, as the group."""
    for config in message.content.config_records.values():
        stated = config.get("server-round")
        if type(stated) is int and stated >= 1:
            return stated
    group = message.metadata.group_id
    return int(group) if group.isascii() and group.isdecimal() else None


def _size(record: ArrayRecord) -> int:
    return sum(len(name) + len(array.data) for name, array in record.items())


def _digest(record: ArrayRecord) -> bytes:
    digest = hashlib.blake2b()
    for name, array in record.items():
        digest.update(f"{len(name)} {name} {len(array.data)} ".encode())
        digest.update(array.data)
    return digest.digest()


def decoded(record: ArrayRecord) -> dict[str, NDArray[Any]]:
    """Decodes an array record, executing nothing in it.

    Raises:
        ValueError: It holds something else than numbers.
    """
    arrays = {}
    for name, encoded in record.items():
        if name.startswith("__"):
            raise ValueError(f"an array is called {name!r}, as none of a model is")
        try:
            array = encoded.numpy()
            if not isinstance(array, np.ndarray):
                raise TypeError("it is an archive of arrays")
            if array.dtype.kind not in "biuf" or array.dtype.itemsize > LARGEST_NUMBER:
                raise TypeError(f"it holds {array.dtype}, and no numbers that a model has")
            # safetensors writes the bytes as they are: in the order of C, the smallest byte first.
            little = array.dtype.newbyteorder("<")
            arrays[name] = np.require(array, dtype=little, requirements=["C"])
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"the array {name!r} cannot be read ({reason})") from error
    return arrays


def plain_numbers(content: RecordDict) -> dict[str, dict[str, Any]]:
    """Returns metrics and configs as JSON can hold them.

    Raises:
        ValueError: They are too long.
    """
    numbers: dict[str, dict[str, Any]] = {}
    records = itertools.chain(content.metric_records.items(), content.config_records.items())
    for name, record in records:
        numbers.setdefault(name, {}).update(plain(mapped(record, _few_bytes)))
    if (size := len(repr(numbers))) > MOST_BESIDE:
        raise ValueError(f"its metrics and configs have {size:,} characters")
    return numbers


def _few_bytes(value: Any) -> Any:
    """Returns few bytes as base64, of more bytes the number, and anything else as it is.

    Secure aggregation sends masked vectors as bytes in a config, which reveal nothing.
    """
    if not isinstance(value, bytes):
        return value
    few = len(value) <= LONGEST_BYTES
    return {"base64": base64.b64encode(value).decode()} if few else {"bytes": len(value)}
