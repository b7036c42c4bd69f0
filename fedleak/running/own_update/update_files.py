"""Reads an update that somebody saved, and runs nothing that is in the file.

A file may be hostile. safetensors holds tensors and nothing else. What torch.save writes is a
pickle, which is read by torch's own reader of plain tensors (`weights_only=True`): it refuses
everything that would run code.
"""

import pickle
import warnings
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import torch

from fedleak.util.errors import ConfigError
from fedleak.util.sanitise import printable

_LONGEST = 200
"""Characters of a library's error that are repeated."""


def read_update(path: Path) -> Mapping[str, Any] | Sequence[Any]:
    """Returns the tensors of a file by name, or in their order if it has no names.

    Shapes and numbers are as the file claims: the caller checks them.

    Args:
        path: Ends in .safetensors, or in .pt, .pth or .bin for what torch.save wrote.

    Raises:
        ConfigError: The file cannot be read, or does not hold tensors only.
    """
    read = READERS.get(path.suffix.lower())
    if read is None:
        raise ConfigError(
            f"update file {str(path)!r}: end it in {', '.join(READERS)}: safetensors.torch."
            "save_file or torch.save write such a file"
        )
    if not path.is_file():
        raise ConfigError(f"update file {str(path)!r}: there is no such file")
    update = read(path)
    if not len(update):
        raise ConfigError(f"update file {str(path)!r} is empty: save the tensors of the update")
    return update


def _safetensors(path: Path) -> Mapping[str, Any]:
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, TypeError, safetensors.SafetensorError) as error:
        raise _unreadable(path, error) from error


def _torch(path: Path) -> Mapping[str, Any] | Sequence[Any]:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                if any(member.compress_type != zipfile.ZIP_STORED for member in archive.infolist()):
                    raise ValueError("it is compressed, which torch.save never does")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the format of a file that is refused below
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ConfigError(
            f"update file {str(path)!r} holds more than tensors, and nothing else is loaded "
            f"({_named_global(error)}): save a dict of tensors, such as model.state_dict()"
        ) from error
    except Exception as error:  # torch may raise anything on such bytes
        raise _unreadable(path, error) from error
    if isinstance(loaded, Mapping | list | tuple):
        return loaded
    raise ConfigError(
        f"update file {str(path)!r} holds {printable(type(loaded).__name__)}: save a dict of "
        "tensors, such as model.state_dict()"
    )


def _named_global(error: Exception) -> str:
    """Returns what the reader of pickles refused, in a few words."""
    for line in str(error).splitlines():
        if "GLOBAL" in line or "Unsupported" in line:
            return printable(line.strip())[:_LONGEST]
    return "it is no pickle of tensors"


def _unreadable(path: Path, error: Exception) -> ConfigError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return ConfigError(
        f"update file {str(path)!r} cannot be read ({printable(reason)[:_LONGEST]}): save it again"
    )


READERS: Mapping[str, Callable[[Path], Mapping[str, Any] | Sequence[Any]]] = {
    ".safetensors": _safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin"), _torch),
}
