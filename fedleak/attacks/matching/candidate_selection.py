"""Choosing among changes of one sentence: by gradient distance and by the prior.

Shapes: R rows, K guesses for each, B sequences, T tokens, F variables of a place, X what is tried.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.matching.objective import Objective
from fedleak.attacks.matching.optimizer import Search
from fedleak.attacks.matching.parametrization import Guess

_FINALISTS = 8
"""The best so many guesses of lower precision are scored again in full precision."""


class Best(NamedTuple):
    """The best of several candidates; among equals it is the first.

    Attributes:
        chosen_RX: The candidate.
        apart_R: Its distance.
        lm_penalty_R: Its weighted negative log-likelihood under the prior.
    """

    chosen_RX: Tensor
    apart_R: Tensor
    lm_penalty_R: Tensor


def best_of_sequence(
    search: Search,
    now: Guess,
    b: int,
    inputs: Callable[[Tensor], Guess],
    tried_RKT: Tensor,
    lm_penalty_RK: Tensor,
) -> Best:
    """Returns the best candidate for sequence b, as far as time allows.

    Args:
        search: Measures distances, and keeps the time.
        now: The whole batch.
        b: The sequence that the candidates are for.
        inputs: Candidates -> inputs of the model.
        tried_RKT: The candidates.
        lm_penalty_RK: The prior's penalty, added to each distance.
    """

    def scores(judge: Objective) -> Callable[[Tensor], Tensor]:
        others = judge.other_sequences(now, b)
        return lambda tried_RKT: judge.scores_of_sequence(inputs(tried_RKT), b, others)

    return _best(search, tried_RKT, lm_penalty_RK, scores, 1)


def best_of_batch(search: Search, tried_RKBT: Tensor, lm_penalty_RK: Tensor) -> Best:
    """Returns the best of candidates for a whole batch, as far as time allows."""
    sequences = tried_RKBT.shape[2]
    return _best(search, tried_RKBT, lm_penalty_RK, lambda judge: judge.scores_of_tokens, sequences)


def _best(
    search: Search,
    tried_RKX: Tensor,
    lm_penalty_RK: Tensor,
    scores: Callable[[Objective], Callable[[Tensor], Tensor]],
    sequences: int,
) -> Best:
    """Returns the best by full precision; a rough objective, if there is one, ranks them first.

    The first candidate is the present state, so that it is looked at even if time is up.
    """
    objective = search.objective
    row_R1 = torch.arange(len(tried_RKX), device=tried_RKX.device)[:, None]
    for judge in filter(None, (objective.rough, objective)):
        score, chunks = scores(judge), judge.chunks(tried_RKX.shape[1], sequences)
        apart_RK = torch.cat(
            [score(tried_RKX[:, chosen]) for chosen in search.watch.within(chunks, "changes")], 1
        )
        score_RK = apart_RK + lm_penalty_RK[:, : apart_RK.shape[1]]
        if judge is objective.rough:
            score_RK[:, 0] = -torch.inf  # the present state is judged again in any case
        order_RK = score_RK.argsort(dim=1, stable=True)[:, :_FINALISTS]
        tried_RKX, lm_penalty_RK = tried_RKX[row_R1, order_RK], lm_penalty_RK[row_R1, order_RK]
        apart_RK = apart_RK[row_R1, order_RK]
    return Best(tried_RKX[:, 0], apart_RK[:, 0], lm_penalty_RK[:, 0])


def lm_penalty(search: Search, b: int, ids_RKT: Tensor) -> Tensor:
    """Returns the weighted negative log-likelihood [R, K] of guesses of sequence b.

    It is divided by the sequences of the row: a batch counts by its mean. Without a prior it is
    zero. If time is up when it returns, some values are infinite, and none may be compared.
    """
    objective, weight = search.objective, search.config.lm_weight
    if objective.prior is None or not weight:
        return torch.zeros(ids_RKT.shape[:2], device=ids_RKT.device)
    mask_RKT = objective.rows.mask_RBT[:, None, b].expand(ids_RKT.shape)
    stop = search.watch.stop("prior")
    nll_N = objective.prior.nll(ids_RKT.flatten(0, 1), mask_RKT.flatten(0, 1), stop=stop)
    sequences_R1 = (objective.rows.weights_RB > 0).sum(1, keepdim=True)
    return weight * nll_N.view(ids_RKT.shape[:2]) / sequences_R1


def stacked(guesses_KX: Sequence[Tensor]) -> Tensor:
    """Returns the guesses [R, K, ...] of all rows; a row with fewer guesses repeats its first."""
    most = max(map(len, guesses_KX))
    return torch.stack(
        [torch.cat([row, row[:1].expand(most - len(row), *row.shape[1:])]) for row in guesses_KX]
    )
