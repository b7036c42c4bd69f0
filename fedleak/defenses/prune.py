"""All but the largest numbers of the update set to zero."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from fedleak.defenses import Claims, Defense
from fedleak.training.observation import ClientUpdate
from fedleak.training.settings import LocalTraining


@dataclass(frozen=True)
class Prune(Defense):
    """Sets a fraction of the numbers to zero, those nearest to it. No privacy guarantee.

    The largest of the whole update stay, whatever tensor they are in (Zhu et al. 2019, section 5).

    Attributes:
        fraction: Share of the numbers that are set to zero.
    """

    kind: ClassVar[str] = "prune"
    fraction: Annotated[float, Field(gt=0, lt=1)]

    def __call__(self, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        """Returns the update with the largest numbers alone."""
        dropped = round(self.fraction * sum(tensor.numel() for tensor in update.tensors.values()))
        if not dropped:
            return update
        sizes = torch.cat([value.abs().flatten() for value in update.tensors.values()])
        sizes[sizes.isnan()] = torch.inf  # what is no number is not near to zero
        last = sizes.kthvalue(dropped).values
        drop = sizes < last
        # Among equal numbers, the first ones.
        drop[(sizes == last).nonzero()[: dropped - int(drop.sum()), 0]] = True
        parts = torch.split(drop, [value.numel() for value in update.tensors.values()])
        pruned = {
            name: value.masked_fill(part.view(value.shape), 0)
            for (name, value), part in zip(update.tensors.items(), parts, strict=True)
        }
        return replace(update, tensors=pruned)

    def update_claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns the fraction."""
        return Claims(zeros=self.fraction)
