"""Seals tell whether fedleak wrote a file on this machine, and whether it is still as it was.

A verdict is no better than the files that it rests on, and a run directory may come from anybody.
A seal is an HMAC (RFC 2104) with SHA-256 over the content of a file and its place in the run. Its
key lies outside every run, and only this user can read it. So a seal shows that somebody else
changed, moved or made a file. It does not show what this user changed.

Machines that share the work on a run share a key: `FEDLEAK_SEAL_KEY` names its file.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any

from platformdirs import user_state_path

from fedleak.store.files import parse_json
from fedleak.util.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

KEY_FILE = "FEDLEAK_SEAL_KEY"
"""The environment variable that names the file of the key; unset: a file of this user."""

KEY_BYTES = 32

FIELD = "seal"
"""The field of a JSON object, or of the metadata of tensors, that holds the seal."""

Part = bytes | memoryview


def seal(place: str, parts: Iterable[Part]) -> str | None:
    """Returns the seal of a content; None if this machine has no key and cannot make one.

    Args:
        place: Where the content belongs: the same content has another seal in another place.
        parts: The content.

    Raises:
        ConfigError: `FEDLEAK_SEAL_KEY` names no key.
    """
    key = _key(os.environ.get(KEY_FILE, ""))
    if key is None:
        return None
    mac = hmac.new(key, place.encode() + b"\0", "sha256")
    for part in parts:
        mac.update(part)
    return mac.hexdigest()


def sealed(place: str, table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a JSON object with its seal, if there is a key.

    Raises:
        ValueError: JSON cannot hold it.
    """
    content = without(dict(table))
    # As it is read back: JSON has lists for tuples, and texts for keys that are numbers.
    canonical = json.dumps(json.loads(json.dumps(content, allow_nan=False)), sort_keys=True)
    mark = seal(place, [canonical.encode()])
    return content if mark is None else {**content, FIELD: mark}


def is_genuine(place: str, content: bytes) -> bool:
    """Returns whether this is a JSON object with the seal that this machine gives it."""
    try:
        table = parse_json(content)
    except ValueError:
        return False
    if not isinstance(table, dict):
        return False
    mark = sealed(place, table).get(FIELD)
    return mark is not None and mark == table.get(FIELD)


def without(value: Any) -> Any:
    """Returns a JSON value without its seal."""
    if not isinstance(value, dict):
        return value
    return {name: field for name, field in value.items() if name != FIELD}


def tensor_parts(tensors: Mapping[str, Tensor], metadata: str) -> Iterator[Part]:
    """Yields what the seal of a file of tensors covers: names, types, shapes and values.

    Args:
        tensors: Contiguous, in main memory.
        metadata: The text beside them.
    """
    import torch  # here, because the tap seals no tensors and works where there is no torch

    yield metadata.encode()
    for name in sorted(tensors):
        tensor = tensors[name]
        yield f"\0{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode()
        yield tensor.reshape(-1).view(torch.uint8).numpy().data


@cache
def _key(named: str) -> bytes | None:
    """Returns the key in the named file, or this user's own, which is made if there is none."""
    if named:
        try:
            return _key_of_file(Path(named))
        except OSError as error:
            raise ConfigError(
                f"{KEY_FILE} = {named!r} cannot be read ({error.strerror}): name a file of at "
                f"least {KEY_BYTES} random bytes"
            ) from error
    own = user_state_path("fedleak") / "seal.key"
    try:
        own.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_key(own)
        return _key_of_file(own)
    except OSError:  # no home, or one that cannot be written: nothing is sealed, and a gate says so
        return None


def _key_of_file(path: Path) -> bytes:
    key = path.read_bytes()
    if len(key) < KEY_BYTES:
        raise ConfigError(
            f"the key {str(path)!r} holds {len(key)} bytes: it needs {KEY_BYTES} random ones"
        )
    return key


def _make_key(path: Path) -> None:
    """Makes a key if there is none; if several processes make one, the first wins."""
    if path.exists():
        return
    with NamedTemporaryFile(dir=path.parent) as temporary, suppress(FileExistsError):
        temporary.write(secrets.token_bytes(KEY_BYTES))
        temporary.flush()
        os.link(temporary.name, path)
