"""Arrays are what Flower makes of tensors, and are read where they lie."""

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord

from fedleak.flower.arrays import taken_tensors, to_array

pytestmark = pytest.mark.core

TENSORS = [
    torch.randn(3, 4),
    torch.randn(3, 4).T,
    torch.randn(5).half(),
    torch.tensor(2.0),
    torch.zeros(0, 4),
    torch.arange(4, dtype=torch.int16),
]


def taken(array: Array) -> torch.Tensor:
    record = ArrayRecord({"a": array})
    (tensor,) = taken_tensors(record).values()
    assert not record
    return tensor


@pytest.mark.parametrize("tensor", TENSORS)
def test_what_either_writes_either_reads(tensor: torch.Tensor) -> None:
    own, theirs = to_array(tensor), Array(tensor)
    if tensor.is_contiguous():
        assert own == theirs
    for array in (own, theirs):
        assert torch.equal(taken(array), tensor)
        assert torch.equal(torch.from_numpy(array.numpy()), tensor)


def test_the_numbers_are_not_copied() -> None:
    array = to_array(torch.randn(1000))
    (tensor,) = taken_tensors(ArrayRecord({"a": array})).values()
    numbers = np.frombuffer(array.data, np.uint8)
    begin = numbers.ctypes.data
    assert begin <= tensor.data_ptr() < begin + len(numbers)


@pytest.mark.parametrize(
    "change",
    [
        lambda array: Array(array.dtype, array.shape, "pickle", array.data),
        lambda array: Array(array.dtype, array.shape, array.stype, array.data[:-1]),
        lambda array: Array(array.dtype, array.shape, array.stype, b"\x80\x04" + array.data),
        lambda array: Array(array.dtype, array.shape, array.stype, array.data[:20]),
        lambda array: Array(
            array.dtype, array.shape, array.stype, array.data.replace(b"<f4", b"|O8")
        ),
        lambda array: Array(
            array.dtype, array.shape, array.stype, array.data.replace(b"(3, 4)", b"(9, 9)")
        ),
    ],
)
def test_what_is_no_array_of_numbers_is_refused(change) -> None:
    with pytest.raises((TypeError, ValueError)):
        taken(change(to_array(torch.randn(3, 4))))
