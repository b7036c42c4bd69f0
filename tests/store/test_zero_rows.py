"""Rows of zeros are left out of a capture and come back, to the bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedleak.store.zero_rows import with_zero_rows, without_zero_rows

pytestmark = pytest.mark.core

TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.5, -2.0]), min_size=1, max_size=12),
    st.integers(0, 9),
    st.sampled_from(TYPES),
)
def test_any_matrix_comes_back_to_the_bit_and_takes_no_more_room(column, width, dtype):
    matrix = torch.zeros(len(column), width, dtype=dtype)
    if width:
        matrix[:, width // 2] = torch.tensor(column, dtype=dtype)
    tensors = {"a": matrix, "b": matrix[0].clone(), "c": torch.tensor(1.0)}
    stored, heights = without_zero_rows(tensors)
    back = with_zero_rows(stored, heights)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (back[name].shape, back[name].dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(bits(back[name].reshape(-1)), bits(tensor.reshape(-1)))
    size = sum(t.numel() * t.element_size() for t in stored.values())
    assert size <= sum(t.numel() * t.element_size() for t in tensors.values())
    if heights:
        assert size < sum(t.numel() * t.element_size() for t in tensors.values())


def test_only_rows_that_hold_something_are_stored():
    matrix = torch.zeros(1000, 64)
    matrix[[3, 700], 5] = torch.tensor([1.0, -0.0])
    stored, heights = without_zero_rows({"table": matrix, "dense": torch.ones(9, 9)})
    assert heights == {"table": 1000}
    assert stored["table"].shape == (2, 64)
    assert stored["table:rows"].tolist() == [3, 700]
    assert stored["dense"].shape == (9, 9)


@pytest.mark.parametrize("rows", [[0, 4], [-1, 0], [0], [0, 1, 2]])
def test_indices_that_do_not_fit_are_refused(rows):
    stored = {"table": torch.ones(2, 3), "table:rows": torch.tensor(rows, dtype=torch.int32)}
    with pytest.raises(ValueError, match="the rows of table do not fit"):
        with_zero_rows(stored, {"table": 4})
