"""All but the largest numbers of the update set to zero."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from fedleak.defenses import Claims, Defense
from fedleak.observation import ClientUpdate
from fedleak.training import LocalTraining


@dataclass(frozen=True)
class Prune(Defense):
    """Sets a fraction of the numbers to zero, those nearest to it. No privacy guarantee.

    The largest of the whole update stay, whatever tensor they are in (Zhu et al. 2019, section 5).
    """

    kind: ClassVar[str] = "prune"
    fraction: Annotated[float, Field(gt=0, lt=1)]

    def __call__(self, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        """Returns the update with the largest numbers alone."""
        sizes = torch.cat([value.abs().double().flatten() for value in update.tensors.values()])
        dropped = round(self.fraction * len(sizes))
        keep = torch.ones(len(sizes), dtype=torch.bool, device=sizes.device)
        keep[sizes.argsort(stable=True)[:dropped]] = False
        parts = torch.split(keep, [value.numel() for value in update.tensors.values()])
        pruned = {
            name: value.masked_fill(~part.view(value.shape), 0)
            for (name, value), part in zip(update.tensors.items(), parts, strict=True)
        }
        return replace(update, tensors=pruned)

    def claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns the fraction."""
        return Claims(zeros=self.fraction)
