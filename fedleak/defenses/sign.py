"""Nothing of the update but its signs."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedleak.defenses import Claims, Defense
from fedleak.training.observation import ClientUpdate
from fedleak.training.settings import LocalTraining


@dataclass(frozen=True)
class Sign(Defense):
    """Sends the signs of each tensor, times its mean size. No privacy guarantee.

    Karimireddy et al. 2019, "Error Feedback Fixes SignSGD": so the update keeps its scale. A number
    that is zero stays zero, and with it what unused embedding rows say.
    """

    kind: ClassVar[str] = "sign"

    def __call__(self, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        """Returns the update's signs, scaled."""
        return update.changed(lambda value: value.sign() * value.abs().mean())

    def update_claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns three levels: minus, zero and plus."""
        return Claims(levels=3)
