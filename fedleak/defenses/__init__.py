"""What a client does to its update before it leaves: one file per defense.

A defense is a frozen dataclass of its settings with a `kind`, called as
`defense(update, rng=generator)`. It returns a new update and never changes the one it got. Its
fields carry their bounds as `Annotated[float, Field(gt=0)]`; the first line of its docstring is
what `fedleak list` prints.
"""

import sys
from collections.abc import Mapping
from functools import cache
from typing import ClassVar, Protocol

import torch

from fedleak.observation import ClientUpdate
from fedleak.plugins import discover


class Defense(Protocol):
    """What every defense has."""

    kind: ClassVar[str]

    @property
    def noise_scale(self) -> float | None:
        """Standard deviation of the noise it adds to each number; None without noise."""
        ...

    def __call__(self, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        """Returns the defended update."""
        ...


@cache
def kinds() -> Mapping[str, type[Defense]]:
    """Returns the defenses in this package by kind."""
    return discover(sys.modules[__name__])
