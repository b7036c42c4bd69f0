"""How a client trains, as values."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch

from fedleak.training.observation import UpdateKind
from fedleak.training.recipe import Recipe, Schedule
from fedleak.util.rng import stream

OnFigures = Callable[[Mapping[str, Any]], None]
"""Receives figures about the training, which the client keeps to itself; with private local steps,
`drawn` has the records of each step."""


@dataclass(frozen=True)
class PrivateSteps:
    """DP-SGD's part of a step (Abadi et al. 2016, algorithm 1).

    Attributes:
        noise_multiplier: Standard deviation of the noise on the sum, in clipping norms.
        max_grad_norm: The L2 norm that an example's gradient is clipped to.
        sampling: "poisson" draws each example by itself; "fixed" takes the usual batches.
    """

    noise_multiplier: float
    max_grad_norm: float
    sampling: Literal["poisson", "fixed"]


class ServerOptimiser(NamedTuple):
    """How the server moves the global model along the mean of its clients' updates.

    Attributes:
        kind: "sgd" steps against a mean gradient, or takes a mean difference as it is; "adam" is
            FedAdam (Reddi et al. 2021).
        learning_rate: Of the step; a mean difference taken as it is needs none.
    """

    kind: Literal["sgd", "adam"]
    learning_rate: float


PLAIN, CONSTANT = Recipe(), Schedule()


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How a client trains.

    Attributes:
        kind: GRADIENT sends the gradient of one batch; DELTA trains and sends the difference.
        batch_size: Examples in a step.
        epochs: Passes over the client's data in a round, for DELTA.
        learning_rate: The learning rate of the steps; with a schedule, the first one.
        dropout: Train with the model's dropout, and that of adapters.
        frozen: Parameters that are not trained: parts and patterns, as in
            `fedleak.models.parameter_selection`.
        private: Each step is one of DP-SGD; None: plain.
        recipe: How a client steps, for DELTA.
        schedule: How the learning rate falls, for DELTA.
        max_steps: The most steps of a round, for DELTA; None: all that the epochs have.
    """

    kind: UpdateKind
    batch_size: int
    epochs: int
    learning_rate: float
    dropout: bool
    frozen: tuple[str, ...] = ()
    private: PrivateSteps | None = None
    recipe: Recipe = PLAIN
    schedule: Schedule = CONSTANT
    max_steps: int | None = None

    def steps(self, num_examples: int) -> int:
        """Returns the number of steps over `num_examples` examples."""
        if self.kind == UpdateKind.GRADIENT:
            return 1
        steps = self.epochs * -(-num_examples // self.batch_size)
        return steps if self.max_steps is None else min(steps, self.max_steps)

    def in_round(self, round: int, num_examples: int) -> "LocalTraining":
        """Returns how a client trains in a round on so many examples.

        The learning rate is then the mean over the steps, and the recipe has that of each step if
        they differ.
        """
        if self.schedule.shape == "constant" or self.kind == UpdateKind.GRADIENT:
            return self
        steps = max(1, self.steps(num_examples))
        mean, recipe = self.schedule.in_round(self.learning_rate, steps, round, self.recipe)
        return replace(self, learning_rate=mean, recipe=recipe, schedule=CONSTANT)

    @property
    def poisson(self) -> bool:
        """Whether each step draws each example by itself."""
        return self.private is not None and self.private.sampling == "poisson"

    def batches(self, num_examples: int, seed: int) -> Iterator[list[int]]:
        """Yields the examples of each step, by number: Poisson draws, or passes in random orders.

        Args:
            num_examples: Examples that the client has.
            seed: Of the draws or orders.
        """
        size = min(self.batch_size, num_examples)
        if self.poisson:
            draws = stream(seed, "poisson")
            for _ in range(self.steps(num_examples)):
                drawn_N = torch.rand(num_examples, generator=draws) < size / num_examples
                yield drawn_N.nonzero()[:, 0].tolist()
            return
        order = stream(seed, "order")

        def passes() -> Iterator[list[int]]:
            for _ in range(self.epochs):
                order_N = torch.randperm(num_examples, generator=order).tolist()
                yield from (order_N[start : start + size] for start in range(0, len(order_N), size))

        yield from islice(passes(), self.max_steps)
