"""How a client steps along its gradients: an optimiser of torch, and what goes with it."""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

Optimiser = Literal["sgd", "adam", "adamw", "other"]
"""What a client steps with: one of `torch.optim`, or any other one."""

Precision = Literal["float32", "bfloat16-mixed", "bfloat16"]
"""What a client computes in: `bfloat16-mixed` is torch's autocast, with weights in float32."""

Shape = Literal["constant", "linear", "cosine"]
"""How a learning rate falls."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a client steps; by default by plain SGD in float32.

    Attributes:
        optimiser: Of `torch.optim`, with torch's defaults for what is not here.
        momentum: Of SGD.
        weight_decay: "adamw" takes it from the weights, the others add it to the gradient.
        max_grad_norm: L2 norm that the gradient of a step is clipped to; None: not clipped.
        accumulate: Passes over the model that make a step; their gradients are those of one pass.
        precision: Of the weights and of what is computed with them.
        rates: Learning rate of each step of a round; empty: the same in all.
    """

    optimiser: Optimiser = "sgd"
    momentum: float = 0.0
    weight_decay: float = 0.0
    max_grad_norm: float | None = None
    accumulate: int = 1
    precision: Precision = "float32"
    rates: tuple[float, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether a step is a rate times the gradient as it is."""
        alike = Recipe(accumulate=self.accumulate, precision=self.precision, rates=self.rates)
        return self == alike

    @property
    def adds_up(self) -> bool:
        """Whether a first step goes along the gradient, times one factor, but for weight decay."""
        apart = not (self.weight_decay and self.momentum)
        return self.optimiser == "sgd" and apart and self.precision == "float32"

    def made(self, parameters: Iterable[nn.Parameter], rate: float) -> torch.optim.Optimizer:
        """Returns the optimiser, new.

        Raises:
            ValueError: The optimiser is not known.
        """
        classes: dict[str, Any] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
        if self.optimiser not in classes:
            raise ValueError("an optimiser that is not known cannot be made")
        own = {"momentum": self.momentum} if self.optimiser == "sgd" else {}
        made: Optimizer = classes[self.optimiser](
            parameters, lr=rate, weight_decay=self.weight_decay, **own
        )
        return made

    def without_decay(self, delta: Tensor, before: Tensor, rate: float, steps: int) -> Tensor:
        """Returns a delta of a parameter minus the effect of weight decay alone.

        The decay is computed step by step, as PyTorch does it, so that an unused row of an
        embedding is exactly zero in the result. The decay of Adam, and of SGD with momentum, cannot
        be separated, so it stays. A parameter that did not change at all was not trained, so it did
        not decay either.

        Args:
            delta: Weights after training minus the weights before.
            before: The weights before.
            rate: Learning rate of all steps, if `rates` is empty.
            steps: How many there were.
        """
        decays = self.optimiser == "adamw" or (self.optimiser == "sgd" and not self.momentum)
        if not (self.weight_decay and decays and bool(delta.any())):
            return delta
        after = before.clone()
        for step_rate in self.rates or (rate,) * steps:
            if self.optimiser == "adamw":
                after.mul_(1 - step_rate * self.weight_decay)
            else:
                after.add_(after * self.weight_decay, alpha=-step_rate)
        return delta - (after - before).to(delta.dtype)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the learning rate falls from its first value.

    Attributes:
        shape: Along a line or half a cosine.
        final: Where it ends.
        rounds: Rounds that it takes, with one rate for all steps of a round, as Flower's
            FlowerTune has it; None: it falls over the steps of each round.
    """

    shape: Shape = "constant"
    final: float = 0.0
    rounds: int | None = None

    def in_round(
        self, first: float, steps: int, round: int, recipe: Recipe
    ) -> tuple[float, Recipe]:
        """Returns the mean learning rate of a round, counted from 1, and how a client steps in it.

        The recipe has the rate of each step if they differ.
        """
        if self.rounds is not None:
            return self._at(first, min(1.0, round / self.rounds)), recipe
        rates = tuple(self._at(first, step / steps) for step in range(steps))
        if len(set(rates)) == 1:
            return rates[0], recipe
        return sum(rates) / steps, replace(recipe, rates=rates)

    def _at(self, first: float, done: float) -> float:
        left = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}
        return self.final + (first - self.final) * left[self.shape]


def in_weights_of(module: nn.Module, precision: Precision) -> AbstractContextManager[None]:
    """Rounds the weights of a module to a precision, within the block; then they are as they were.

    Within the block the weights are copies, so trained weights must be read there. Under "bfloat16"
    weights that are not trained are rounded, too; under other precisions nothing is done.
    """
    if precision != "bfloat16":
        return nullcontext()
    return copied_parameters(module.parameters(), torch.bfloat16)


@contextmanager
def copied_parameters(
    parameters: Iterable[nn.Parameter], dtype: torch.dtype | None = None
) -> Iterator[None]:
    """Puts copies in the place of the values of parameters, within the block.

    Args:
        parameters: Of a module.
        dtype: Of the copies; None: that of each parameter.
    """
    originals = [(parameter, parameter.data) for parameter in parameters]
    try:
        for parameter, value in originals:
            parameter.data = value.to(dtype or value.dtype, copy=True)
        yield
    finally:
        for parameter, value in originals:
            parameter.data = value
