"""What leaves a client: the selected parameters, in numbers that the wire can hold."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedleak.models.parameter_selection import matching
from fedleak.training.observation import ClientUpdate


def partial_update(update: ClientUpdate, patterns: Sequence[str]) -> ClientUpdate:
    """Returns the update with only the parameters that match; a whole name is a pattern too."""
    kept = matching(update.tensors, patterns)
    return replace(update, tensors={name: update.tensors[name] for name in kept})


def to_wire(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors that NumPy, and so Flower, can hold: bfloat16 as int16 of the same bits."""
    return {
        name: value.view(torch.int16) if value.dtype == torch.bfloat16 else value
        for name, value in tensors.items()
    }


def from_wire(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Undoes `to_wire`: no update holds whole numbers, so what looks like int16 is bfloat16."""
    return {
        name: value.view(torch.bfloat16) if value.dtype == torch.int16 else value
        for name, value in tensors.items()
    }
