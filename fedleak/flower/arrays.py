"""Converts tensors to Flower's arrays and back; the message is the only copy.

Flower's own way through `numpy.save` and `numpy.load` makes two more copies of each tensor: for an
update of BERT's size this takes a second of every client's round.
"""

import io
import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from flwr.app import Array, ArrayRecord
from numpy.lib import format as npy
from torch import Tensor

_STYPE = "numpy.ndarray"
"""What Flower calls the bytes of `numpy.save`."""


def to_array(tensor: Tensor) -> Array:
    """Returns a tensor, of a type that NumPy has, as the array that Flower makes of it."""
    values = tensor.detach().cpu().contiguous().numpy()
    header = io.BytesIO()
    npy.write_array_header_1_0(header, npy.header_data_from_array_1_0(values))
    content = b"".join((header.getvalue(), values.data))
    return Array(str(values.dtype), values.shape, _STYPE, content)


def to_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Returns a record of tensors, each converted by `to_array`."""
    return ArrayRecord({name: to_array(value) for name, value in tensors.items()})


def taken_tensors(record: ArrayRecord) -> dict[str, Tensor]:
    """Takes the arrays out of a record, as tensors in the memory of the message.

    Nobody may write to them, because the bytes of a message must not change.

    Raises:
        Any error of NumPy or torch: An array is not valid.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: torch.from_numpy(_values(record.pop(name))) for name in list(record)}


def _values(array: Array) -> npt.NDArray[Any]:
    """Returns the numbers of an array, without a copy if torch can use their layout."""
    if array.stype == _STYPE:
        content = io.BytesIO(array.data)  # which shares the bytes
        if npy.read_magic(content) == (1, 0):
            shape, transposed, dtype = npy.read_array_header_1_0(content)
            if math.prod(shape) and not transposed and not dtype.hasobject:
                values = np.frombuffer(array.data, dtype, math.prod(shape), content.tell())
                return values.reshape(shape)
    return array.numpy()
