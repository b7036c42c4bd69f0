"""Canaries as they enter steps of DP-SGD.

Shapes: K canaries, G dummies with a text, S numbers of a canary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedleak.training.batches import Records
from fedleak.training.privacy.canaries import Canaries
from fedleak.training.steps import Batch

DUMMIES = 2
"""How many dummies have a text in a step: each costs what an example costs."""


@dataclass(frozen=True)
class Planted:
    """Canaries as they enter steps of DP-SGD, each as the gradient of one more example.

    A few dummies go through the model with a text, and a canary replaces the gradient of each
    before norms are computed. The other canaries get, in turn, the clipping factors of these: a
    text for each canary would cost many times what the examples cost.

    Attributes:
        canaries: Their places and directions.
        coins_K: Which are in: nobody but the client knows.
        dummies: Texts, of which canary k has number k modulo G [G].
        norms: The norm of each dummy's canary before it is clipped [G].
        records: Canaries and examples as the sampler draws them.
        drawn_K: Which take part in the step, in or not; None: not drawn yet, or drawn in every
            local step.
    """

    canaries: Canaries
    coins_K: Tensor
    dummies: Batch
    norms: tuple[float, ...]
    records: Records
    drawn_K: Tensor | None = None

    def put_(self, gradients_G: Mapping[str, Tensor]) -> None:
        """Puts a canary in the place of each dummy's gradient, by parameter name [G, *shape]."""
        for dummy, norm in enumerate(self.norms):
            own = {name: gradient[dummy : dummy + 1] for name, gradient in gradients_G.items()}
            canary = dummy % self.canaries.count
            self.canaries.put_(own, [canary], [True] * (canary + 1), norm)

    def put_norms_(self, norms_G: Mapping[str, Tensor]) -> None:
        """Puts a canary's norm in the place of each dummy's, by parameter name [G]."""
        for dummy, norm in enumerate(self.norms):
            of_parameters = self.canaries.norms(dummy % self.canaries.count)
            for name, values_G in norms_G.items():
                values_G[dummy] = norm * of_parameters.get(name, 0.0)

    @property
    def in_step(self) -> Tensor:
        """Which take part in the step, in or not."""
        assert self.drawn_K is not None, "not drawn yet"
        return self.drawn_K

    def add_(self, sums: Mapping[str, Tensor], factors_G: Tensor) -> None:
        """Adds the canaries that are in and take part, each times the factor of its dummy."""
        sizes_G = factors_G.cpu() * torch.tensor(self.norms)
        dummy_K = [canary % len(self.norms) for canary in range(self.canaries.count)]
        sizes_K = sizes_G[dummy_K] * self.coins_K * self.in_step
        if sizes_K.any():
            self.canaries.add_(sums, self.canaries.directions() * sizes_K.numpy())
