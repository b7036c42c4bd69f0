"""Stores a matrix without its rows of zeros, and restores it bit for bit.

A token that is in no text of a batch has a row of zeros in the gradient of the word embedding, and
so most rows of the largest matrix are zero.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

_INDICES = ":rows"
"""Ends the name of the indices of the stored rows; no parameter has such a name."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def without_zero_rows(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Returns tensors to store, and the full height of each matrix that is stored without rows.

    A row is left out if all its bits are zero, so minus zero stays. Rows are left out only if the
    matrix takes less room without them.
    """
    stored: dict[str, Tensor] = {}
    heights: dict[str, int] = {}
    for name, tensor in tensors.items():
        rows = _rows_that_count(tensor)
        if rows is None:
            stored[name] = tensor
        else:
            stored[name], stored[name + _INDICES] = tensor[rows], rows.int()
            heights[name] = len(tensor)
    return stored, heights


def shapes(stored: Mapping[str, Tensor], heights: Mapping[str, int]) -> dict[str, list[int]]:
    """Returns the shapes of the tensors that `with_zero_rows` would make, and makes none.

    Raises:
        ValueError: A matrix is not there.
    """
    if gone := [name for name in heights if name not in stored]:
        raise ValueError(f"there are no rows of {gone[0]!r}")
    indices = {name + _INDICES for name in heights}
    return {
        name: [heights.get(name, length) if i == 0 else length for i, length in enumerate(t.shape)]
        for name, t in stored.items()
        if name not in indices
    }


def with_zero_rows(stored: Mapping[str, Tensor], heights: Mapping[str, int]) -> dict[str, Tensor]:
    """Returns the tensors that `without_zero_rows` was given.

    Raises:
        ValueError: The indices do not fit.
        KeyError: There are no indices.
    """
    indices = {name + _INDICES for name in heights}
    tensors = {name: tensor for name, tensor in stored.items() if name not in indices}
    for name, height in heights.items():
        rows, values = stored[name + _INDICES].long(), stored[name]
        inside = not rows.numel() or (int(rows.min()) >= 0 and int(rows.max()) < height)
        if rows.shape != values.shape[:1] or not inside:
            raise ValueError(f"the rows of {name} do not fit")
        tensors[name] = values.new_zeros((height, *values.shape[1:]))
        tensors[name][rows] = values
    return tensors


def _rows_that_count(tensor: Tensor) -> Tensor | None:
    """Returns the indices of the rows to store; None: all."""
    if tensor.dim() != 2 or not tensor.numel():
        return None
    bits = tensor.view(_BITS[tensor.element_size()])
    room = tensor.shape[1] * tensor.element_size()
    most = (len(tensor) * room - 1) // (room + torch.int32.itemsize)
    # For most matrices, one column shows that no row can be left out.
    if int(bits[:, 0].count_nonzero()) > most:
        return None
    rows = bits.any(1).nonzero()[:, 0]
    return rows if len(rows) <= most else None
