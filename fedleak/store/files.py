"""How files of a run are written and read: whole or not at all, and for their owner alone.

A run may be somebody else's, so only plain files in its folder are opened.
Files are written under a temporary name, synced and renamed. A line counts once its newline is on
disk. Lines that belong together are one write, in which all but the last end in a space: a torn
line or group does not count, and the next write cuts it.
"""

import json
import math
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NoReturn

import safetensors

from fedleak.util.errors import FedleakError
from fedleak.util.nested import mapped
from fedleak.util.plain_files import content, opened, refuse_other

_MORE = " \n"
"""Ends a line if others of the same write follow; JSON ignores the space."""


HALF_WRITTEN = ".part"
"""Ends the temporary, hidden name of a file until all of the file is written."""


def inside(folder: Path, name: str) -> Path:
    """Returns where a file of a folder is.

    Args:
        folder: The folder that the user named: it may be a link.
        name: A file in it, or in a folder below it, which may not be a link.

    Raises:
        FedleakError: A folder below it is a link, or no folder.
    """
    at = folder
    for part in Path(name).parts[:-1]:
        real_folder(at := at / part)
    return folder / name


def real_folder(path: Path) -> None:
    """Refuses the path of a folder if a link or a file is there.

    Raises:
        FedleakError: There is one.
    """
    with naming(path, "used"):
        refuse_other(path, stat.S_IFDIR)


def replace(path: Path, content: bytes) -> None:
    """Writes a whole file; after a failure the old one is there as it was.

    Raises:
        FedleakError: It cannot be written, or something else than a plain file has its name.
    """
    with new_file(path) as temporary:
        temporary.write_bytes(content)


def publish(path: Path, content: bytes) -> None:
    """Writes a file without private texts; the umask says who may read it.

    Raises:
        FedleakError: It cannot be written, or something else than a plain file has its name.
    """
    with naming(path):
        refuse_other(path)
        path.write_bytes(content)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path that becomes the file at the end; after an error nothing changes.

    A link, a pipe or a device is not replaced. The folder is synced too, so that the new name
    survives a power cut.
    """
    with naming(path):
        refuse_other(path)
        # Nobody can guess this name, so nothing is there.
        handle, name = tempfile.mkstemp(HALF_WRITTEN, f".{path.name}.", path.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            yield temporary
            _sync(temporary)
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync(path.parent)


def second_name(source: Path | str, other: Path | str) -> None:
    """Gives a second name to a file that nothing writes into; copies it if that is impossible."""
    try:
        os.link(source, other, follow_symlinks=False)
    except OSError:  # not every file system can
        shutil.copyfile(source, other, follow_symlinks=False)


def append_together(path: Path, lines: Sequence[str]) -> None:
    """Appends lines and syncs the file: whatever happens, all of them or none."""
    with naming(path), open(path, "ab+", opener=opened) as file:
        _drop_torn_(file)
        file.write((_MORE.join(lines) + "\n").encode())
        file.flush()
        os.fsync(file.fileno())


def read_file(path: Path, most: int = -1) -> bytes:
    """Returns the content of a plain file, of at most `most` bytes.

    Raises:
        FedleakError: It cannot be read, is no plain file, or is larger.
    """
    with naming(path, "read"):
        return content(path, most)


@contextmanager
def tensor_file(path: Path, framework: str = "pt") -> Iterator[Any]:
    """Opens a plain file of tensors, as `safetensors.safe_open` does.

    Raises:
        OSError, SafetensorError: It cannot be opened, is no plain file, or holds no tensors.
    """
    handle = opened(path)
    try:
        # The file that was opened and checked, even if another has its name by now.
        with safetensors.safe_open(f"/dev/fd/{handle}", framework=framework) as file:
            yield file
    finally:
        os.close(handle)


def complete_lines(path: Path) -> list[bytes]:
    """Returns the lines of a file that count; none if there is no file."""
    if not os.path.lexists(path):
        return []
    written = read_file(path)
    complete = _complete(written)
    lines, rest = written[:complete].split(b"\n")[:-1], written[complete:]
    # A torn line of a killed process begins as lines do and does not count; any other rest does.
    return [*lines, rest] if rest and not rest.startswith(b"{") else lines


@contextmanager
def naming(path: Path, verb: str = "written") -> Iterator[None]:
    """Names the file in the error if reading or writing fails."""
    try:
        yield
    except (OSError, safetensors.SafetensorError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or one_line(error)
        raise FedleakError(
            f"{path} cannot be {verb}: {reason}: mend that and give the same command again"
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

    def finite(leaf: Any) -> Any:
        return None if isinstance(leaf, float) and not math.isfinite(leaf) else leaf

    return mapped(value, finite)


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
    """Returns where the last complete write ends."""
    end = len(content)
    while (end := content.rfind(b"\n", 0, end) + 1) and content[:end].endswith(_MORE.encode()):
        end -= 1
    return end
