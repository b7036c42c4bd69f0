"""Adam on the guesses of many rows at once, and what gradient matching is set to do.

Every row is optimised as if it were alone: Adam works element by element, and the sum of the rows'
losses has each row's own gradient.

Shapes: R rows, K guesses for each, B sequences, T tokens, F numbers at a place.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedleak.attacks.clock import Clock
from fedleak.attacks.matching.gradient_distance import Cosine, Distance, SquaredAndAbsolute, squared
from fedleak.attacks.matching.guesses import Objective

Part = TypeVar("Part")

Loss = Literal["cos", "l2l1", "l2"]
"""What an attack measures gradients by."""

Schedule = Callable[[int, int], float]
"""(step, steps) -> the factor of the step size."""

L1_WEIGHT = 0.01

ROUGH = 0.8
"""Share of the steps that are made in lower precision, where there is one."""


def distance_of(loss: Loss, weights: Mapping[str, float] | None = None) -> Distance:
    """Returns the distance of that name; `weights` of tensors are for a cosine."""
    distances: Mapping[Loss, Distance] = {
        "cos": Cosine(weights or {}),
        "l2l1": SquaredAndAbsolute(L1_WEIGHT),
        "l2": squared,
    }
    return distances[loss]


def stepwise(decay: float, every: int) -> Schedule:
    """Returns a schedule that multiplies by `decay` after so many steps."""
    return lambda step, steps: decay ** (step // every)


def linear(to_zero_at: float) -> Schedule:
    """Returns a schedule that falls to zero after so many times the steps."""
    return lambda step, steps: max(0.0, 1 - step / (to_zero_at * steps))


def cosine_to_zero(step: int, steps: int) -> float:
    """The schedule that falls to zero as half a cosine does."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def stretched(schedule: Schedule, usual: int) -> Schedule:
    """Returns a schedule for so many steps that ends alike with any other number."""
    return lambda step, steps: schedule(step * usual // steps, usual)


def constant(step: int, steps: int) -> float:
    """The schedule that changes nothing."""
    return 1.0


@dataclass(frozen=True)
class Recipe:
    """How guesses are optimised.

    Attributes:
        steps: Of Adam.
        step_size: Its learning rate.
        schedule: How that falls.
        lm_weight: Of the prior's mean negative log-likelihood in a discrete step.
        norm_weight: Of the squared difference of the mean embedding's norm to that of the table.
        guesses: Random starts, and then as many orders of the best, of which the best is kept.
        every: Steps from one discrete step to the next; 0 is never.
        discrete_at: Whether they are made during the descent, after it, or not at all.
        burn_in: Share of the steps before the first discrete step of LAMP's algorithm.
        orders: Orders that a discrete step tries for each sequence.
        sweeps: How often a discrete step goes over the sequences, while that helps.
        clip: Largest norm of a row's gradient.
        weight_decay: Of AdamW.
        epsilon: Adam's.
    """

    steps: int
    step_size: float
    schedule: Schedule
    lm_weight: float = 0.0
    norm_weight: float = 0.0
    guesses: int = 1
    every: int = 0
    discrete_at: Literal["during", "at-end", "never"] = "during"
    burn_in: float = 0.1
    orders: int = 200
    sweeps: int = 1
    clip: float | None = None
    weight_decay: float = 0.0
    epsilon: float = 1e-8

    def discrete(self, step: int) -> bool:
        """Whether a discrete step follows this one."""
        due = self.every > 0 and step >= self.burn_in * self.steps and step % self.every == 1
        return due and self.discrete_at == "during"

    @property
    def rounds(self) -> int:
        """Discrete steps, if they are made during the descent."""
        during = replace(self, discrete_at="during")
        return sum(during.discrete(step) for step in range(1, self.steps + 1))

    def may_move(self, step: int) -> bool:
        """Whether words may change places in this step of ours."""
        at_end = self.discrete_at == "at-end" and step == self.steps
        return (self.discrete_at == "during" and step > 0) or at_end

    def shortened(self, steps: int | None) -> "Recipe":
        """Returns the recipe with another number of steps, all of its schedule alike."""
        if steps is None:
            return self
        every = max(2, round(self.every * steps / self.steps)) if self.every else 0
        schedule = stretched(self.schedule, self.steps)
        return replace(self, steps=steps, every=every, schedule=schedule)

    def loss(self, objective: Objective, step: int) -> Callable[[Tensor], Tensor]:
        """Returns what this step goes down: the last steps always in full precision."""
        rough = objective.rough if step < ROUGH * self.steps else None
        judge = rough or objective
        if not self.norm_weight:
            return judge.loss
        return lambda leaf_RBTF: (
            judge.loss(leaf_RBTF) + self.norm_weight * judge.norm_gap(leaf_RBTF)
        )


class Descent:
    """The numbers that are optimised, [R, B, T, F], and Adam's memory of them."""

    def __init__(self, leaf_RBTF: Tensor, recipe: Recipe) -> None:
        self._recipe, self.steps_done = recipe, 0
        self._start(leaf_RBTF)

    def _start(self, leaf_RBTF: Tensor) -> None:
        recipe = self._recipe
        self.leaf_RBTF = leaf_RBTF.detach().clone().requires_grad_()
        self._adam = torch.optim.AdamW(
            [self.leaf_RBTF],
            lr=recipe.step_size,
            eps=recipe.epsilon,
            weight_decay=recipe.weight_decay,
        )

    def step(self, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """Makes a step down and returns the losses [R] before it."""
        recipe = self._recipe
        for group in self._adam.param_groups:
            group["lr"] = recipe.step_size * recipe.schedule(self.steps_done, recipe.steps)
        with torch.enable_grad():
            loss_R = loss(self.leaf_RBTF)
            (slope_RBTF,) = torch.autograd.grad(loss_R.sum(), self.leaf_RBTF)
        if recipe.clip is not None:
            norm_R = slope_RBTF.flatten(1).norm(dim=1)
            slope_RBTF *= (recipe.clip / (norm_R + 1e-6)).clamp_max(1)[:, None, None, None]
        # A row whose loss is not a number stays where it is, and takes no other with it.
        self.leaf_RBTF.grad = slope_RBTF.nan_to_num_(0.0, 0.0, 0.0)
        self._adam.step()
        self.steps_done += 1
        return loss_R.detach()

    def now(self) -> Tensor:
        """Returns the numbers, detached."""
        return self.leaf_RBTF.detach()

    def take_(self, chosen_S: Tensor) -> None:
        """Goes on with some of the rows only."""
        self.change_(lambda leaf: leaf[chosen_S], lambda mean: mean[chosen_S])

    def change_(
        self,
        change: Callable[[Tensor], Tensor],
        memory: Callable[[Tensor], Tensor] = lambda value: value,
    ) -> None:
        """Changes the numbers [R, ...], and Adam's memory of them: its means have their shape."""
        old = self._adam.state.get(self.leaf_RBTF, {})
        self._start(change(self.now()))
        if old:
            self._adam.state[self.leaf_RBTF] = {
                name: memory(value) if value.dim() else value for name, value in old.items()
            }


class Found(NamedTuple):
    """The best guess for a victim.

    Attributes:
        row: Of the shape that it has.
        ids_BT: Its tokens.
        loss: What it was chosen by.
    """

    row: int
    ids_BT: Tensor
    loss: float


Look = Callable[[int, str, Sequence[Found]], None]
"""Is shown the steps done, what is under way, and the best so far of each victim if that is new."""


def best_of_each(victim_R: Tensor, ids_RBT: Tensor, loss_R: Tensor) -> list[Found]:
    """Returns the row of the lowest loss for each victim, in the victims' order."""
    found = []
    for victim in sorted(set(victim_R.tolist())):
        rows_S = (victim_R == victim).nonzero()[:, 0]
        row = int(rows_S[loss_R[rows_S].nan_to_num(torch.inf).argmin()])
        found.append(Found(row, ids_RBT[row], float(loss_R[row])))
    return found


class Watch:
    """Keeps the time of a search, and shows how far it is.

    Every phase asks it between parts that take no longer than a step of the descent, so that a
    search ends within a few steps of its time, with the best so far.

    Args:
        seconds: From now on; None: no limit.
        look: Is shown every part of every phase.
    """

    def __init__(
        self, seconds: float | None = None, look: Look = lambda step, phase, found: None
    ) -> None:
        self._clock = Clock(seconds)
        self._look, self._step = look, 0

    def up(self) -> bool:
        """Whether time is up. Once it is, it stays so."""
        return self._clock.up()

    def at(self, step: int, found: Sequence[Found] = ()) -> None:
        """Shows that so many steps are done, and the best so far of each victim if it was read."""
        self._step = step
        self._look(step, "" if found else "descent", found)

    def within(self, parts: Iterable[Part], phase: str) -> Iterator[Part]:
        """Yields the first part in any case, and the others while there is time; shows each."""
        every = list(parts)
        for number, part in enumerate(every, 1):
            if number > 1 and self.up():
                return
            yield part
            self._look(self._step, f"{phase} {number}/{len(every)}", ())

    def stop(self, phase: str) -> Callable[[], bool]:
        """Returns what a phase of another module asks before each part: whether time is up."""
        numbers = itertools.count(1)

        def asked() -> bool:
            self._look(self._step, f"{phase} {next(numbers)}", ())
            return self.up()

        return asked


UNWATCHED = Watch()
"""Has no limit and shows nothing."""
