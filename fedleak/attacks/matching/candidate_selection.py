"""Choosing among changes of one sentence: by gradient distance and by the prior.

Shapes: R rows, K guesses for each, B sequences, T tokens, F numbers at a place.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.matching.guesses import Guess, Objective
from fedleak.attacks.matching.optimizer import UNWATCHED, Recipe, Watch
from fedleak.models.prior import Prior

_FINALISTS = 8
"""Guesses that are scored again in full precision, where there is a lower one."""


class Best(NamedTuple):
    """The best of what was tried: the first of equals.

    Attributes:
        chosen_RX: What it is.
        apart_R: Its distance.
        likely_R: What the prior adds to that.
    """

    chosen_RX: Tensor
    apart_R: Tensor
    likely_R: Tensor


def best_of_sequence(
    objective: Objective,
    now: Guess,
    b: int,
    inputs: Callable[[Tensor], Guess],
    tried_RKT: Tensor,
    likely_RK: Tensor,
    watch: Watch = UNWATCHED,
) -> Best:
    """Returns the best of what was tried for sequence b, as far as time allows.

    Args:
        objective: Measures distances.
        now: The whole batch.
        b: Which sequence was changed.
        inputs: What was tried for it -> the model's inputs.
        tried_RKT: What was tried.
        likely_RK: What the prior adds to each distance.
        watch: Keeps the time.
    """

    def scores(judge: Objective) -> Callable[[Tensor], Tensor]:
        others = judge.other_sequences(now, b)
        return lambda tried_RKT: judge.scores_of_sequence(inputs(tried_RKT), b, others)

    return _best(objective, tried_RKT, likely_RK, scores, 1, watch)


def best_of_batch(
    objective: Objective, tried_RKBT: Tensor, likely_RK: Tensor, watch: Watch = UNWATCHED
) -> Best:
    """Returns the best of the token ids tried for a whole batch, as far as time allows."""

    def scores(judge: Objective) -> Callable[[Tensor], Tensor]:
        return lambda tried_RKBT: judge.scores(judge.space.exact(judge.rows, tried_RKBT))

    return _best(objective, tried_RKBT, likely_RK, scores, tried_RKBT.shape[2], watch)


def _best(
    objective: Objective,
    tried_RKX: Tensor,
    likely_RK: Tensor,
    scores: Callable[[Objective], Callable[[Tensor], Tensor]],
    sequences: int,
    watch: Watch,
) -> Best:
    """Returns the best by full precision; a rough objective, if there is one, ranks them first.

    What there is now is the first of those tried, so that it is among those that time allows.
    """
    row_R1 = torch.arange(len(tried_RKX), device=tried_RKX.device)[:, None]
    for judge in (objective.rough, objective):
        if judge is None:
            continue
        score, chunks = scores(judge), judge.chunks(tried_RKX.shape[1], sequences)
        apart_RK = torch.cat(
            [score(tried_RKX[:, chosen]) for chosen in watch.within(chunks, "changes")], 1
        )
        score_RK = apart_RK + likely_RK[:, : apart_RK.shape[1]]
        if judge is objective.rough:
            score_RK[:, 0] = -torch.inf  # what there is now is judged again in any case
        order_RK = score_RK.argsort(dim=1, stable=True)[:, :_FINALISTS]
        tried_RKX, likely_RK = tried_RKX[row_R1, order_RK], likely_RK[row_R1, order_RK]
        apart_RK = apart_RK[row_R1, order_RK]
    return Best(tried_RKX[:, 0], apart_RK[:, 0], likely_RK[:, 0])


def nll(
    prior: Prior | None,
    recipe: Recipe,
    objective: Objective,
    b: int,
    ids_RKT: Tensor,
    watch: Watch = UNWATCHED,
) -> Tensor:
    """Returns what the prior adds to the scores [R, K] of guesses of sequence b.

    If time is up when it returns, some are infinite, and no two can be compared.
    """
    rows, guesses, _ = ids_RKT.shape
    if prior is None or not recipe.lm_weight:
        return torch.zeros(rows, guesses, device=ids_RKT.device)
    mask_RKT = objective.rows.mask_RBT[:, None, b].expand(ids_RKT.shape)
    nll_N = prior.nll(ids_RKT.flatten(0, 1), mask_RKT.flatten(0, 1), stop=watch.stop("prior"))
    nll_RK = nll_N.view(rows, guesses)
    # The batch's mean, of which this is one sequence.
    sequences_R1 = (objective.rows.weights_RB > 0).sum(1, keepdim=True)
    return recipe.lm_weight * nll_RK / sequences_R1


def reordered(leaf_RBTF: Tensor, order_RBT: Tensor) -> Tensor:
    """Returns the leaf with the tokens of each sequence in another order."""
    index = order_RBT[..., None].expand(*order_RBT.shape, leaf_RBTF.shape[-1])
    return leaf_RBTF.gather(-2, index)


def orders_tensor(orders: Sequence[Sequence[int]], places: Sequence[int], length: int) -> Tensor:
    """Returns orders of some places as orders [K, T] of all."""
    order_KT = torch.arange(length).repeat(len(orders), 1)
    if places and orders:
        order_KT[:, places] = torch.tensor(places)[torch.tensor(orders)]
    return order_KT


def stacked(guesses_KX: Sequence[Tensor]) -> Tensor:
    """Returns [R, K, ...] of each row's guesses; a row with fewer repeats its first."""
    most = max(map(len, guesses_KX))
    return torch.stack(
        [torch.cat([one, one[:1].expand(most - len(one), *one.shape[1:])]) for one in guesses_KX]
    )
