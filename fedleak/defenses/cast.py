"""The update in half precision."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from fedleak.defenses import Defense
from fedleak.training.observation import ClientUpdate


@dataclass(frozen=True)
class Cast(Defense):
    """Rounds every number of the update to 16 bits, to save bandwidth. No privacy guarantee.

    So it is sent (NumPy, and so Flower, lacks bfloat16: `training.to_wire`) and captured; the
    server sums in the model's precision. What is too large for float16 becomes infinite.

    Attributes:
        dtype: The precision that is sent.
    """

    kind: ClassVar[str] = "cast"
    dtype: Literal["float16", "bfloat16"]

    def __call__(self, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        """Returns the update in that precision."""
        dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16}[self.dtype]
        return update.changed(lambda value: value.to(dtype))
