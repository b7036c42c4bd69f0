"""How many rows and starts a search can afford: a step of all must be a small part of its time.

A step of a row with sixteen texts takes seconds. So one small step is made first, and from its time
follows how many shapes and starts are optimised side by side.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fedleak.attacks.clock import Clock
from fedleak.attacks.matching.batch_structure import Shape
from fedleak.attacks.matching.objective import Objective
from fedleak.attacks.matching.optimizer import Descent, MatchingConfig
from fedleak.attacks.matching.victims import Victim

ANSWER = 1.5
"""What comes after a search takes as long as so many steps of a row: its answer and its proof."""

_STEPS = 20
"""Steps that the time has to hold: with fewer, one row alone gets further than many."""

_LEAST = ANSWER + 2
"""Steps of one row that a search takes at least: a start, a look at it, a step, the answer."""

_STARTS = 0.25
"""Share of the time that random starts may take; scoring one takes half a step."""

_TOKENS = 64
"""Tokens of the small step, at most."""


def seconds_of_step(
    victim: Victim, make: Callable[..., Objective], config: MatchingConfig
) -> float:
    """Returns the seconds that a step of a victim's largest row takes now, from a smaller one.

    Args:
        victim: The victim.
        make: Makes the objective of victims for rows (`joint_objective`).
        config: How the search steps.
    """
    tokens = max(len(shape.lengths) * max(shape.lengths) for shape in victim.shapes.each)
    small = Shape((min(tokens, _TOKENS),), victim.shapes.each[0].labels[:1])
    objective = make([victim], of_row=[(0, small)], prior=None)
    with objective.ready():
        start_RBTF = objective.space.random(objective.rows, [torch.Generator().manual_seed(0)])
        descent = Descent(start_RBTF, config)
        descent.step(config.loss(objective, 0))
    return descent.seconds * max(1.0, tokens / _TOKENS)


def rows_in_time(victims: Sequence[Victim], starts: int, step: float, clock: Clock) -> list[int]:
    """Returns the rows of which the time left holds some steps; none, if it does not hold one.

    Args:
        victims: Each has a row for each start of each of its shapes, in this order.
        starts: Of each shape.
        step: Seconds of a step of one row.
        clock: The time of all of them.
    """
    left = clock.left() / len(victims)  # infinite without a limit
    if left < _LEAST * step:
        return []
    rows: list[int] = []
    first = 0
    for victim in victims:
        shapes = len(victim.shapes.each)
        most = int(max(1.0, min(left / (_STEPS * step or 1e-9), shapes * starts)))
        if most >= shapes:
            chosen, of_each = [*range(shapes)], most // shapes
        else:
            # The likeliest lengths come first; lengths that are only tried should be unlike.
            spread = 1 if victim.shapes.told else shapes / most
            chosen, of_each = [int(i * spread) for i in range(most)], 1
        rows += [first + shape * starts + start for shape in chosen for start in range(of_each)]
        first += shapes * starts
    return rows


def starts_in_time(config: MatchingConfig, step: float, clock: Clock) -> MatchingConfig:
    """Returns the constants of a search with no more random starts than a part of its time holds.

    Args:
        config: As it is without a limit.
        step: Seconds of a step of all rows.
        clock: The time of the search.
    """
    most = max(1.0, min(_STARTS * clock.left() / (step or 1e-9), config.guesses))
    return replace(config, guesses=int(most))
