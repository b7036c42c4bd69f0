"""How files of a run are written and read: whole or not at all, and for their owner alone.

Files are written under a temporary name, synced and renamed. A line counts once its newline is on
disk. Lines that belong together are one write, in which all but the last end in a space: a torn
line or group does not count, and the next write cuts it.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import safetensors

from fedleak.errors import FedleakError

_MORE = " \n"
"""Ends a line that is followed by others of the same write; to JSON the space is nothing."""


def private(path: str, flags: int) -> int:
    """Opens a file that only its owner can open: the `opener` of `open`, for all of a run."""
    return os.open(path, flags, 0o600)


def replace(path: Path, content: bytes) -> None:
    """Writes a whole file; after a failure the old one is there as it was."""
    with new_file(path) as temporary:
        temporary.write_bytes(content)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields a temporary name that becomes the file's: whatever happens, all of it or nothing.

    The folder is synced too, so that the new name survives a power cut.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with naming(path):
        try:
            os.close(private(str(temporary), os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
            yield temporary
            _sync(temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def append_together(path: Path, lines: Sequence[str]) -> None:
    """Appends lines and syncs the file: whatever happens, all of them or none."""
    with naming(path), open(path, "ab+", opener=private) as file:
        _drop_torn_(file)
        file.write((_MORE.join(lines) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def complete_lines(path: Path) -> list[bytes]:
    """Returns the lines of a file that count; none if there is no file."""
    if not path.is_file():
        return []
    with naming(path, "read"):
        content = path.read_bytes()
    complete = _complete(content)
    lines, rest = content[:complete].split(b"\n")[:-1], content[complete:]
    # What a killed process wrote last does not count, but it begins as a line does.
    return [*lines, rest] if rest and not rest.startswith(b"{") else lines


@contextmanager
def naming(path: Path, what: str = "written") -> Iterator[None]:
    """Says of a failure of the disk which file it is about."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or one_line(error)
        raise FedleakError(
            f"{path} cannot be {what}: {reason}: mend that and give the same command again"
        ) from error


def one_line(error: Exception) -> str:
    """Returns what an error says, in one line."""
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return " ".join(str(error).split())


def parse_json(content: bytes) -> Any:
    """Reads JSON.

    Raises:
        ValueError: It is not JSON, or it has a number that is not finite.
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not a number")

    def finite(text: str) -> float:
        value = float(text)
        return value if math.isfinite(value) else refuse(text)

    try:
        return json.loads(content.decode(), parse_constant=refuse, parse_float=finite)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def plain(value: Any) -> Any:
    """Returns a value with null for each number that is not finite: JSON has no infinity."""
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _drop_torn_(file: IO[bytes]) -> None:
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
