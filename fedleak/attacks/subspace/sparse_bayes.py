"""Which of many known vectors few rows are mixes of, by sparse Bayesian learning.

The O rows of a gradient are mixes of the inputs of N tokens, G = C X. With N < O the rows span X,
and each input is tested by itself (`weighted_span`). An adapter has as many rows as its rank, and a
batch may have more tokens: then no input lies in the span of the rows. But inputs of the first
layer are known vectors, one of each token of the vocabulary, and few of them mix: of all X that
explain the rows, the one with the fewest vectors is sought. Two rows can be enough, as unknown are
N O shares, and known are D O numbers; no more than (D + O) / 2 vectors are told apart (Chen and Huo
2006).

Each vector a_i has shares in all rows, of variance y_i, and S = noise I + sum of y_i a_i a_i^T is
the covariance of a row's numbers. Evidence for y (Wipf and Rao 2007, M-SBL) is maximised by

    y_i <- sqrt( mean over rows of (y_i a_i^T S^-1 g)^2 / (a_i^T S^-1 a_i) )

which lowers its cost at each step (Wipf and Nagarajan 2010), and most y_i go to zero. Vectors enter
where evidence grows with them: where mean (a_i^T S^-1 g)^2 > a_i^T S^-1 a_i (Tipping and Faul
2003). The noise begins large and falls, so that strong vectors come first. Rows are made
orthonormal before, so that strong ones do not hide what weak ones show (Davies and Eldar 2012).
The search ends once the same vectors stay, and explain all rows but for their noise.

With learned positions an input is (token + position) / sigma + constant, so tokens are sought
beside all positions and the constant, and then a text's pairs of a token and a position.

Limits: the first layer only, fewer tokens and positions than columns, one step without dropout.
Pairs are told apart for one text: in a batch, three of two tokens at two places mix to the fourth.

Shapes: O rows, D columns, V vectors, M vectors that may mix, K directions that are in rows anyhow,
N vectors, R orthonormal rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.span import SPARE
from fedleak.attacks.subspace.weighted_span import MISFIT, LowRank
from fedleak.models import LanguageModel

_ROUNDS, _STEPS = 24, 20
"""Times that vectors enter, at most, and steps of learning after each."""

_ENTER = 200
"""Vectors that enter at once, at most."""

_BEGIN, _END = 1e-2, 1e-8
"""Variance of the noise of orthonormal rows, at first and at last."""

_NONE = 1e-4
"""A vector whose variance is below this share of the largest leaves."""

_POSITIONS = (32, 128)
"""Positions that texts may have."""

_AT_ONCE = 2**25
"""Numbers of vectors that are tested together."""


@dataclass(frozen=True)
class Support:
    """Vectors that explain rows.

    Attributes:
        index_M: Which, the strongest first.
        left: Chi^2 of what they leave, for each degree of freedom.
    """

    index_M: Tensor
    left: float


def sparse_support(
    matrix: LowRank, vector_VD: Tensor, known_KD: Tensor, clock: Clock
) -> Support | None:
    """Returns the few vectors that explain a matrix's rows; None if none do, or time is up.

    Args:
        matrix: The rows, each number with its own noise.
        vector_VD: Vectors of any length, of which few are mixed in the rows.
        known_KD: Directions that may be mixed in, too.
        clock: When time is up, the search ends.
    """
    if not matrix.value_OD.numel():
        return None
    # As in a fit, what did not come is known as little as a number of the order of 1.
    noise_D = (1 / (matrix.weight_OD + 1)).mean(0).sqrt()
    known_DK = torch.linalg.qr((known_KD.double() / noise_D).T)[0]

    def beside(x_ND: Tensor) -> Tensor:
        scaled_ND = x_ND.double() / noise_D
        rest_ND: Tensor = scaled_ND - (scaled_ND @ known_DK) @ known_DK.T
        return rest_ND

    x_VD = F.normalize(beside(vector_VD))
    _, size_R, rows_RD = torch.linalg.svd(beside(matrix.value_OD), full_matrices=False)
    floor = float((1 / size_R.square()).mean().clamp_min(_END))
    # More could be replaced by as many others.
    most = (x_VD.shape[1] - len(known_KD) + len(rows_RD)) // 2 - SPARE
    index_M, variance_M = torch.empty(0, dtype=torch.long, device=x_VD.device), size_R[:0]
    before = set[int]()
    for turn in range(_ROUNDS):
        if clock.up():
            return None
        noise = max(floor, _BEGIN * (_END / _BEGIN) ** (turn / _ROUNDS))
        entered_N = _entering(x_VD, index_M, variance_M, rows_RD, noise)
        begin = float(variance_M.median()) / 10 if len(variance_M) else 1 / len(x_VD)
        index_M = torch.cat([index_M, entered_N])
        if not len(index_M):
            return None
        variance_M = torch.cat([variance_M, variance_M.new_full((len(entered_N),), begin)])
        for _ in range(_STEPS):
            x_MD = x_VD[index_M]
            solved_DM = torch.cholesky_solve(x_MD.T, _factor(x_MD, variance_M, noise))
            strength_M = (x_MD.T * solved_DM).sum(0)
            share_MR = variance_M[:, None] * (solved_DM.T @ rows_RD.T)
            variance_M = (share_MR.square().mean(1) / strength_M).sqrt()
            stays_M = variance_M > _NONE * variance_M.max()
            index_M, variance_M = index_M[stays_M], variance_M[stays_M]
        same, before = before == {*index_M.tolist()}, {*index_M.tolist()}
        if same and len(index_M) <= most:
            left = matrix.left(torch.cat([known_KD, vector_VD[index_M]]))
            if left < MISFIT:
                return Support(index_M[variance_M.argsort(descending=True)], left)
    return None


def _entering(
    x_VD: Tensor, index_M: Tensor, variance_M: Tensor, rows_RD: Tensor, noise: float
) -> Tensor:
    """Returns which vectors enter: those with which the evidence grows most."""
    x_MD = x_VD[index_M]
    solved_DR = torch.cholesky_solve(rows_RD.T, _factor(x_MD, variance_M, noise))
    # Woodbury: M numbers of each vector in place of D.
    scaled_MD = variance_M.sqrt()[:, None] * x_MD
    inner_MM = scaled_MD @ scaled_MD.T
    inner_MM.diagonal().add_(noise)
    root_MD = torch.linalg.solve_triangular(torch.linalg.cholesky(inner_MM), scaled_MD, upper=False)
    grown = []
    for some_ND in torch.split(x_VD, max(1, _AT_ONCE // x_VD.shape[1])):
        strength_N = (1 - (some_ND @ root_MD.T).square().sum(1)).clamp_min(_END) / noise
        grown.append((some_ND @ solved_DR).square().mean(1) / strength_N)
    grown_V = torch.cat(grown)
    grown_V[index_M] = 0
    best = grown_V.topk(min(_ENTER, len(grown_V)))
    return best.indices[best.values > 1]


def _factor(x_MD: Tensor, variance_M: Tensor, noise: float) -> Tensor:
    """Returns the Cholesky factor [D, D] of the covariance of a row's numbers."""
    covariance_DD = (x_MD.T * variance_M) @ x_MD
    covariance_DD.diagonal().add_(noise)
    factor_DD: Tensor = torch.linalg.cholesky(covariance_DD)
    return factor_DD


def sparse_tokens(model: LanguageModel, matrix: LowRank, clock: Clock) -> Support | None:
    """Returns the tokens of a batch from rows of the first layer; None if nothing few explains it.

    Args:
        model: With learned positions.
        matrix: The rows.
        clock: When time is up, the search ends.
    """
    token_VD, position_PD, constant_CD = model.family.token_table(model.module).directions()
    # Positions cost columns: those of long texts are taken only where short ones do not explain.
    for positions in _POSITIONS:
        known_KD = torch.cat([position_PD[:positions], constant_CD])
        if len(known_KD) + SPARE < matrix.value_OD.shape[1]:
            support = sparse_support(matrix, token_VD, known_KD, clock)
            if support is not None:
                return support
    return None


def placed_text(
    model: LanguageModel, matrix: LowRank, tokens_N: Tensor, clock: Clock
) -> Ids | None:
    """Returns the text that a batch of one text has; None if its tokens have no order.

    Args:
        model: With learned positions.
        matrix: Rows of the first layer.
        tokens_N: Of the text, each once.
        clock: When time is up, the search ends.
    """
    table = model.family.token_table(model.module)
    most = min(model.max_length, matrix.value_OD.shape[1] - SPARE)
    pairs_2A = torch.cartesian_prod(tokens_N, torch.arange(most, device=tokens_N.device)).T
    tokens_A, position_A = pairs_2A
    support = sparse_support(matrix, table(tokens_A, position_A), table.token_VD[:0], clock)
    if support is None:
        return None
    at_position = dict[int, int]()
    for index in support.index_M.tolist():  # The strongest first.
        at_position.setdefault(int(position_A[index]), int(tokens_A[index]))
    end = model.tokenizer.sep_token_id
    ends = [position for position, token in sorted(at_position.items()) if token == end]
    if not ends or any(position not in at_position for position in range(ends[0])):
        return None
    return tuple(at_position[position] for position in range(ends[0] + 1))
