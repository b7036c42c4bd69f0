"""The update, times one half."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedleak.defenses import Defense
from fedleak.training.observation import ClientUpdate


@dataclass(frozen=True)
class Halve(Defense):
    """Sends one half of the update. No privacy guarantee."""

    kind: ClassVar[str] = "acme_halve"

    def __call__(self, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        return replace(update, tensors={name: t / 2 for name, t in update.tensors.items()})
