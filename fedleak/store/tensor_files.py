"""Writes a file of tensors, in the format of safetensors, from where the tensors are in memory.

The seal is computed while the numbers are written, so that they are read once. For a model of
BERT's size `safetensors.torch.save_file` alone takes eight times the time of writing.
"""

import json
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedleak.store import seal

_TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
}

_PIECE = 2**20
"""Bytes that are sealed and written at a time."""

_ANY_SEAL = "0" * 64


def write(path: Path, tensors: Mapping[str, Tensor], table: Mapping[str, Any], place: str) -> None:
    """Writes a file of tensors, with a table beside them that is sealed where there is a key.

    Args:
        path: The file, which is overwritten.
        tensors: Contiguous, in main memory.
        table: Metadata of the tensors.
        place: Where the file belongs, for its seal.
    """
    starts: dict[str, int] = {}
    end = 0
    # The widest first, so that each is aligned.
    for name in sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)):
        starts[name] = end
        end += tensors[name].nbytes
    room = len(_header(tensors, starts, {**table, seal.FIELD: _ANY_SEAL}))
    with path.open("wb") as file:

        def written() -> Iterator[seal.Part]:
            names = iter(sorted(tensors))
            for part in seal.tensor_parts(tensors, json.dumps(table)):
                if isinstance(part, bytes):
                    yield part
                    continue
                file.seek(room + starts[next(names)])
                for begin in range(0, len(part), _PIECE):
                    file.write(part[begin : begin + _PIECE])
                    yield part[begin : begin + _PIECE]

        parts = written()
        mark = seal.seal(place, parts)
        deque(parts, maxlen=0)  # without a key, `seal` has not iterated over them
        file.seek(0)
        sealed = table if mark is None else {**table, seal.FIELD: mark}
        file.write(_header(tensors, starts, sealed, room))


def _header(
    tensors: Mapping[str, Tensor],
    starts: Mapping[str, int],
    table: Mapping[str, Any],
    room: int = 0,
) -> bytes:
    """Returns the header of the file: the length of a JSON text, and this text.

    Spaces fill it up to `room` bytes, and to a multiple of 8.
    """
    entries: dict[str, Any] = {"__metadata__": {"fedleak": json.dumps(table)}}
    for name, start in starts.items():
        tensor = tensors[name]
        entries[name] = {
            "dtype": _TYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, start + tensor.nbytes],
        }
    text = json.dumps(entries).encode()
    length = max(room - 8, -(-len(text) // 8) * 8)
    return struct.pack("<Q", length) + text.ljust(length)
