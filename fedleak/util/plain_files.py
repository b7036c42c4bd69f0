"""Opens plain files in real folders, and nothing that leads elsewhere or never ends.

A folder that somebody else made may hold a link to any file of the user's, a pipe that nobody
writes to, or a device. What the user names on the command line may be a link; what lies in a folder
that is named may not.
"""

import errno
import os
import stat
from pathlib import Path
from typing import IO

MOST_SETTINGS = 64 << 20
"""Bytes of a file of settings or results; more is a mistake, and /dev/zero never ends."""

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFLNK: "a link",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def opened(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Opens a plain file; a new one is for its owner alone. Serves as an `opener` of `open`, too.

    Raises:
        OSError: It cannot be opened, or it is no plain file.
    """
    return _opened(path, flags | os.O_NOFOLLOW)


def _opened(path: str | Path, flags: int) -> int:
    # To open a pipe may have an effect, or wait.
    refuse_other(path, linked=not flags & os.O_NOFOLLOW)
    handle = os.open(path, flags | os.O_NONBLOCK, 0o600)
    try:
        _check(os.fstat(handle), stat.S_IFREG, path)
    except OSError:
        os.close(handle)
        raise
    return handle


def content(path: Path, most: int = -1, *, linked: bool = False) -> bytes:
    """Returns what a plain file holds.

    Args:
        path: The file.
        most: Bytes that it may have; -1: any number.
        linked: Whether it may be a link, as what the user names.

    Raises:
        OSError: It cannot be read, is no plain file, or is larger.
    """
    with open(path, "rb", opener=_opened if linked else opened) as file:
        return _bounded(file, most)


def settings_text(path: Path) -> str:
    """Returns settings that the user names: UTF-8 from a file, a link or a pipe, as `<(command)`.

    Raises:
        OSError: It cannot be read, or has more than `MOST_SETTINGS` bytes, as a device may.
        UnicodeDecodeError: It is not UTF-8.
    """
    with open(path, "rb") as file:
        return _bounded(file, MOST_SETTINGS).decode("utf-8-sig")


def _bounded(file: IO[bytes], most: int) -> bytes:
    content = file.read(most + 1 if most >= 0 else -1)
    if 0 <= most < len(content):
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(file.name))
    return content


def refuse_other(path: str | Path, kind: int = stat.S_IFREG, *, linked: bool = False) -> None:
    """Refuses a path that leads to something other than a plain file; a free path is fine.

    Args:
        path: The path.
        kind: What it may lead to, as in `stat`: a file, or `stat.S_IFDIR`.
        linked: Whether it may be a link to such a thing.

    Raises:
        OSError: Something else is there.
    """
    try:
        there = os.stat(path) if linked else os.lstat(path)
    except FileNotFoundError:
        return
    _check(there, kind, path)


def _check(there: os.stat_result, kind: int, path: str | Path) -> None:
    if (actual_kind := stat.S_IFMT(there.st_mode)) != kind:
        wanted = "real folder" if kind == stat.S_IFDIR else "plain file"
        is_a = _KINDS.get(actual_kind, "something else")
        raise OSError(errno.EINVAL, f"it is {is_a}, and no {wanted}", str(path))
