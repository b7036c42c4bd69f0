"""Whether all numbers of a tensor are finite."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedleak.util.finite import all_finite

WHOLE = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@given(
    size=st.integers(0, 70),
    odd=st.dictionaries(st.integers(0, 69), st.sampled_from(["nan", "inf", "-inf", "1", "0"])),
    dtype=st.sampled_from(WHOLE),
    turned=st.booleans(),
)
def test_it_says_what_isfinite_says_of_all(size, odd, dtype, turned):
    tensor = torch.ones(size, 2, dtype=dtype)
    for place, number in odd.items():
        if place < size:
            tensor[place, place % 2] = float(number)
    tensor = tensor.T if turned else tensor
    assert all_finite(tensor) is bool(tensor.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_eight_bits_can_be_asked_too(dtype):
    assert all_finite(torch.ones(3).to(dtype))
    assert not all_finite(torch.tensor([1.0, float("nan")]).to(dtype))
