"""A limit on the length of the update."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedleak.defenses import Claims, Defense
from fedleak.training.observation import ClientUpdate
from fedleak.training.privacy.accounting import Positive
from fedleak.training.settings import LocalTraining


@dataclass(frozen=True)
class Clip(Defense):
    """Scales the whole update down to an L2 norm, if it is longer. No privacy guarantee.

    The whole update is clipped and not each example's gradient: one example may still turn it
    around. Attacks that look at directions do not notice.

    Attributes:
        max_norm: The largest L2 norm of an update.
    """

    kind: ClassVar[str] = "clip"
    max_norm: Positive

    def __call__(self, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        """Returns the update, no longer than that."""
        return clipped(update, self.max_norm)

    def update_claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns the norm."""
        return Claims(max_norm=self.max_norm)


def clipped(update: ClientUpdate, max_norm: float) -> ClientUpdate:
    """Returns the update scaled down to an L2 norm; what is not finite in it is left out."""
    finite = update.changed(lambda value: value.nan_to_num(0.0, 0.0, 0.0))
    factor = min(1.0, max_norm / max(norm_of(finite), 1e-300))
    return finite.changed(lambda value: value * factor)


def norm_of(update: ClientUpdate) -> float:
    """Returns the L2 norm of all numbers."""
    return float(torch.stack([value.double().norm() for value in update.tensors.values()]).norm())
