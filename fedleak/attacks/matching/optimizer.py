"""The settings of gradient matching, Adam on many rows at once, and the loop of DLG, TAG and LAMP.

Every row is optimised as if it were alone: Adam works element by element, and the sum of the rows'
losses has each row's own gradient. A descent begins with the best of random starts (LAMP,
Balunovic et al. 2022, section 3.1), or with a guess where there is one.

Shapes: R rows, K guesses for each, B sequences, T tokens, F variables of a place, S chosen rows.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeVar

import torch
from torch import Tensor

from fedleak.attacks import clock as timing
from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.attacks.matching.objective import Objective
from fedleak.attacks.matching.reorderings import reordered

Part = TypeVar("Part")

Schedule = Callable[[int, int], float]
"""(step, steps) -> the factor of the step size."""

ROUGH = 0.8
"""The first steps, as a share of all, are in lower precision, if the objective has one."""


_READ_EVERY = 50
"""Steps between two readings of tokens that are shown: a reading searches the vocabulary."""

DiscreteStep = Callable[[Tensor], Tensor]
"""Variables [R, B, T, F] -> better ones, such as the same tokens in another order."""


def stepwise(decay: float, every: int) -> Schedule:
    """Returns a schedule that multiplies by `decay` every so many steps."""
    return lambda step, steps: decay ** (step // every)


def linear(to_zero_at: float) -> Schedule:
    """Returns a schedule that falls linearly to zero at a multiple of the steps."""
    return lambda step, steps: max(0.0, 1 - step / (to_zero_at * steps))


def cosine_to_zero(step: int, steps: int) -> float:
    """The schedule that falls to zero along half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def stretched(schedule: Schedule, usual: int) -> Schedule:
    """Returns a schedule made for `usual` steps, stretched to any number of steps."""
    return lambda step, steps: schedule(step * usual // steps, usual)


def constant(step: int, steps: int) -> float:
    """The schedule that keeps the step size."""
    return 1.0


@dataclass(frozen=True, kw_only=True)
class MatchingConfig:
    """The constants of gradient matching.

    Attributes:
        steps: Steps of Adam.
        step_size: Adam's learning rate.
        schedule: Factor of the step size at each step.
        lm_weight: Weight of the prior's mean negative log-likelihood in a discrete step.
        norm_weight: Weight of `Objective.norm_gap` in the loss.
        guesses: Random starts, and then as many orders of the best start; the best is kept.
        every: Steps from one discrete step to the next; 0 is never.
        discrete_at: Discrete steps come during the descent, after it, or not at all.
        burn_in: Share of the steps before the first discrete step of LAMP's algorithm.
        orders: Orders that a discrete step tries for each sequence.
        sweeps: How often, at most, a discrete step of ours goes over the sequences.
        clip: Largest norm of a row's gradient; None: no limit.
        weight_decay: AdamW's weight decay.
        epsilon: AdamW's epsilon.
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
        """Whether a discrete step of LAMP's algorithm follows this step."""
        due = self.every > 0 and step >= self.burn_in * self.steps and step % self.every == 1
        return due and self.discrete_at == "during"

    @property
    def rounds(self) -> int:
        """The number of discrete steps, as if they came during the descent."""
        during = replace(self, discrete_at="during")
        return sum(during.discrete(step) for step in range(1, self.steps + 1))

    def may_move(self, step: int) -> bool:
        """Whether words may change places at this step of our own search."""
        at_end = self.discrete_at == "at-end" and step == self.steps
        return (self.discrete_at == "during" and step > 0) or at_end

    def shortened(self, steps: int | None) -> "MatchingConfig":
        """Returns the same with another number of steps and its schedules stretched to it."""
        if steps is None:
            return self
        every = max(2, round(self.every * steps / self.steps)) if self.every else 0
        schedule = stretched(self.schedule, self.steps)
        return replace(self, steps=steps, every=every, schedule=schedule)

    def loss(self, objective: Objective, step: int) -> Callable[[Tensor], Tensor]:
        """Returns the loss of a step, variables -> [R]: in the last steps in full precision."""
        rough = objective.rough if step < ROUGH * self.steps else None
        judge = rough or objective
        if not self.norm_weight:
            return judge.loss
        return lambda variables_RBTF: (
            judge.loss(variables_RBTF) + self.norm_weight * judge.norm_gap(variables_RBTF)
        )


class Descent:
    """The variables [R, B, T, F], and Adam's memory of them.

    Attributes:
        steps_done: Steps so far.
        seconds: The time of the last step.
    """

    def __init__(self, variables_RBTF: Tensor, config: MatchingConfig) -> None:
        self._config, self.steps_done, self.seconds = config, 0, 0.0
        self._start(variables_RBTF)

    def _start(self, variables_RBTF: Tensor) -> None:
        config = self._config
        self.variables_RBTF = variables_RBTF.detach().clone().requires_grad_()
        self._adam = torch.optim.AdamW(
            [self.variables_RBTF],
            lr=config.step_size,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
        )

    def step(self, loss: Callable[[Tensor], Tensor]) -> Tensor:
        """Makes a step and returns the losses [R] before it."""
        begin, config = timing.now(), self._config
        for group in self._adam.param_groups:
            group["lr"] = config.step_size * config.schedule(self.steps_done, config.steps)
        with torch.enable_grad():
            loss_R = loss(self.variables_RBTF)
            (grad_RBTF,) = torch.autograd.grad(loss_R.sum(), self.variables_RBTF)
        if config.clip is not None:
            norm_R = grad_RBTF.flatten(1).norm(dim=1)
            grad_RBTF *= (config.clip / (norm_R + 1e-6)).clamp_max(1)[:, None, None, None]
        # A row whose loss is not a number stays where it is, and does not affect other rows.
        self.variables_RBTF.grad = grad_RBTF.nan_to_num_(0.0, 0.0, 0.0)
        self._adam.step()
        self.steps_done += 1
        self.seconds = timing.now() - begin
        return loss_R.detach()

    def now(self) -> Tensor:
        """Returns the variables, detached."""
        return self.variables_RBTF.detach()

    def take_(self, chosen_S: Tensor) -> None:
        """Keeps only some of the rows."""
        self.change_(lambda variables: variables[chosen_S], lambda mean: mean[chosen_S])

    def change_(
        self,
        change: Callable[[Tensor], Tensor],
        memory: Callable[[Tensor], Tensor] = lambda value: value,
    ) -> None:
        """Changes the variables, and Adam's means by `memory`: they have the same shape."""
        old = self._adam.state.get(self.variables_RBTF, {})
        self._start(change(self.now()))
        if old:
            self._adam.state[self.variables_RBTF] = {
                name: memory(value) if value.dim() else value for name, value in old.items()
            }


class Found(NamedTuple):
    """The best guess for a victim.

    Attributes:
        row_index: The row it comes from, which gives its shape.
        ids_BT: Its tokens.
        loss: The lowest among the victim's rows.
    """

    row_index: int
    ids_BT: Tensor
    loss: float


Look = Callable[[int, str, Sequence[Found]], None]
"""(steps done, phase under way, the best so far of each victim if that is new) -> None."""


def best_of_each(victim_R: Tensor, ids_RBT: Tensor, loss_R: Tensor) -> list[Found]:
    """Returns the tokens of the row with the lowest loss for each victim, in the victims' order."""
    guesses = []
    for victim in sorted(set(victim_R.tolist())):
        rows_S = (victim_R == victim).nonzero()[:, 0]
        row = int(rows_S[loss_R[rows_S].nan_to_num(torch.inf).argmin()])
        guesses.append(Found(row, ids_RBT[row], float(loss_R[row])))
    return guesses


class Watch(Clock):
    """The clock of a search, which also shows how far the search is.

    Every phase reads it between parts that take no longer than a step of the descent, so that a
    search ends within a few steps of its time, with the best so far.

    Args:
        clock: The time of the search.
        look: Called with every part of every phase.
    """

    def __init__(self, clock: Clock, look: Look = lambda step, phase, guesses: None) -> None:
        super().__init__(None)
        self._end, self._look, self._step = clock._end, look, 0

    def at(self, step: int, guesses: Sequence[Found] = ()) -> None:
        """Shows the number of steps done, and the best so far of each victim if it was read."""
        self._step = step
        self._look(step, "" if guesses else "descent", guesses)

    def within(self, parts: Iterable[Part], phase: str) -> Iterator[Part]:
        """Yields the first part, and the others while there is time; shows each."""
        every = list(parts)
        for number, part in enumerate(self.paced(every, least=1), 1):
            yield part
            self._look(self._step, f"{phase} {number}/{len(every)}", ())

    def stop(self, phase: str) -> Callable[[], bool]:
        """Returns a function to be called before each part, which returns whether time is up."""
        numbers = itertools.count(1)

        def time_up() -> bool:
            self._look(self._step, f"{phase} {next(numbers)}", ())
            return self.up()

        return time_up


UNWATCHED = Watch(UNLIMITED)
"""Has no limit and shows nothing."""


class Search(NamedTuple):
    """A search for the tokens of some victims.

    Attributes:
        objective: What is minimised.
        config: Its constants.
        rng: The random stream of each row.
        watch: Keeps the time.
    """

    objective: Objective
    config: MatchingConfig
    rng: Sequence[torch.Generator]
    watch: Watch = UNWATCHED


def initial(search: Search) -> Tensor:
    """Returns the best [R, B, T, F] of random starts, and then of as many random orders of it.

    Out of time, it is the best start so far.
    """
    objective, rng = search.objective, search.rng
    space, rows = objective.space, objective.rows
    start_RBTF = space.start(rows, rng)
    if search.config.guesses > 1:
        start_RBTF = _best_start(search, start_RBTF, lambda _: space.start(rows, rng), "starts")
        start_RBTF = _best_start(
            search, start_RBTF, lambda best: reordered(best, _shuffle(objective, rng)), "orders"
        )
    guessed_RB11 = (rows.begin_RBT >= 0).any(-1)[..., None, None]
    guess_RBTF = space.variables(rows.begin_RBT.clamp_min(0))
    return torch.where(guessed_RB11, guess_RBTF, space.scaled(start_RBTF))


def _best_start(
    search: Search, first_RBTF: Tensor, make: Callable[[Tensor], Tensor], phase: str
) -> Tensor:
    """Returns the best of a start and of others, which are made from it."""
    objective = search.objective
    judge, sequences = objective.rough or objective, objective.rows.mask_RBT.shape[1]
    best_RBTF, least_R = first_RBTF, torch.full_like(objective.normalizer_R, torch.inf)
    for chosen in search.watch.within(judge.chunks(search.config.guesses, sequences), phase):
        tried = [make(first_RBTF) if k else first_RBTF for k in range(chosen.start, chosen.stop)]
        tried_RKBTF = torch.stack(tried, 1)
        score_R, at_R = judge.scores(judge.space.guess(judge.rows, tried_RKBTF)).min(1)
        found_RBTF = tried_RKBTF[torch.arange(len(at_R), device=at_R.device), at_R]
        better_R = score_R < least_R
        best_RBTF = torch.where(better_R[:, None, None, None], found_RBTF, best_RBTF)
        least_R = torch.where(better_R, score_R, least_R)
    return best_RBTF


def _shuffle(objective: Objective, rng: Sequence[torch.Generator]) -> Tensor:
    """Returns a random order [R, B, T] of each sequence's content."""
    rows = objective.rows
    order_RBT = torch.arange(rows.length).repeat(*rows.mask_RBT.shape[:2], 1)
    for r, generator in enumerate(rng):
        for b in range(order_RBT.shape[1]):
            places = torch.tensor(rows.content(r, b), dtype=torch.long)
            order_RBT[r, b, places] = places[torch.randperm(len(places), generator=generator)]
    return order_RBT.to(rows.mask_RBT.device)


def match_gradients(search: Search, discrete_step: DiscreteStep | None = None) -> list[Found]:
    """Returns each victim's tokens, and the lowest loss on the way to them.

    Zhu et al. 2019, algorithm 1, for the observed gradient g*; the line marked with a star is
    added by Balunovic et al. 2022, algorithm 1::

        x <- normal noise                      (LAMP: the best of several starts)
        for step = 1 ... steps:
            g <- gradient of the model's loss for the embeddings x
            D <- distance(g, g*)               (LAMP: plus the norm regulariser)
            x <- x - step size * dD/dx         (here with Adam)
          * sometimes: x <- x with the tokens of each sentence in the best order tried
        return the x of the lowest D, read as tokens
    """
    objective, config, _, watch = search
    descent = Descent(initial(search), config)
    best_RBTF, best_R = descent.now().clone(), torch.full_like(objective.normalizer_R, torch.inf)

    def best() -> list[Found]:
        return best_of_each(objective.victim_R, objective.nearest_tokens(best_RBTF), best_R)

    for step in range(1, config.steps + 1):
        if watch.up(descent.seconds):
            break
        before_RBTF = descent.now().clone()
        loss_R = descent.step(config.loss(objective, step))
        better_R = loss_R <= best_R
        best_R[better_R], best_RBTF[better_R] = loss_R[better_R], before_RBTF[better_R]
        if discrete_step and config.discrete(step) and not watch.up():
            # Adam's memory stays where it was, as in the code of LAMP's authors.
            descent.change_(discrete_step)
        shown = step % _READ_EVERY == 0 or step == config.steps
        watch.at(step, best() if shown else ())
    for _ in range(config.rounds if config.discrete_at == "at-end" else 0):
        if discrete_step is None or watch.up():
            break
        best_RBTF = discrete_step(best_RBTF)
    return best()
