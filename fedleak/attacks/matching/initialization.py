"""Where a descent begins: the best of random starts (LAMP, Balunovic et al. 2022, section 3.1).

Sequences of which there is a guess begin there.

Shapes: R rows, K guesses for each, B sequences, T tokens, F variables of a place.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fedleak.attacks.matching.candidate_selection import reordered
from fedleak.attacks.matching.objective import Objective
from fedleak.attacks.matching.optimizer import UNWATCHED, MatchingConfig, Watch


def initial(
    objective: Objective,
    config: MatchingConfig,
    rng: Sequence[torch.Generator],
    watch: Watch = UNWATCHED,
) -> Tensor:
    """Returns the best [R, B, T, F] of random starts, and then of as many random orders of it.

    Out of time, it is the best start so far.
    """
    space, rows = objective.space, objective.rows
    start_RBTF = space.start(rows, rng)
    if config.guesses > 1:

        def drawn(_: Tensor) -> Tensor:
            return space.start(rows, rng)

        def shuffled(best_RBTF: Tensor) -> Tensor:
            return reordered(best_RBTF, _shuffle(objective, rng))

        for make, phase in ((drawn, "starts"), (shuffled, "orders")):
            start_RBTF = _best(objective, start_RBTF, make, config.guesses - 1, watch, phase)
    guessed_RB11 = (rows.begin_RBT >= 0).any(-1)[..., None, None]
    if not guessed_RB11.any():
        return space.scaled(start_RBTF)
    guess_RBTF = space.variables(rows, rows.begin_RBT.clamp_min(0))
    return torch.where(guessed_RB11, guess_RBTF, space.scaled(start_RBTF))


def _best(
    objective: Objective,
    first_RBTF: Tensor,
    make: Callable[[Tensor], Tensor],
    others: int,
    watch: Watch,
    phase: str,
) -> Tensor:
    """Returns the best of a start and of `others` more, which are made from it."""
    judge, sequences = objective.rough or objective, objective.rows.mask_RBT.shape[1]
    best_RBTF, least_R = first_RBTF, torch.full_like(objective.normalizer_R, torch.inf)
    for chosen in watch.within(judge.chunks(others + 1, sequences), phase):
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
