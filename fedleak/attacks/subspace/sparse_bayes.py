"""Which of many known vectors few rows are mixes of, by sparse Bayesian learning.

The O rows of a gradient are mixes of the inputs of N tokens, G = C X. With N < O the rows span X,
and each input is tested by itself (`weighted_span`). An adapter has as many rows as its rank, and a
batch may have more tokens: then no input lies in the span of the rows. But inputs of the first
layer are known vectors, one of each token of the vocabulary, and few of them mix: of all X that
explain the rows, the one with the fewest vectors is sought. Two rows can be enough, as unknown are
N O shares, and known are D O numbers; no more than (D + O) / 2 vectors are told apart (Chen and Huo
2006).

Each number has noise of its own, as behind a step of Adam, where some numbers are known within a
thousandth and others not at all. Vector x_i has shares of variance y_i in all rows, and S_o =
W_o^-1 + sum of y_i x_i x_i^T is the covariance of the numbers of row o, with W_o their weights.
The evidence for y (Wipf and Rao 2007, M-SBL) is maximised by

    y_i <- sqrt( mean over rows of (y_i x_i^T S_o^-1 g_o)^2 / mean of x_i^T S_o^-1 x_i )

which lowers its cost at each step (Wipf and Nagarajan 2010), and most y_i go to zero. Vectors enter
where evidence grows with them: where mean (x_i^T S_o^-1 g_o)^2 > mean x_i^T S_o^-1 x_i (Tipping and
Faul 2003). Noise is added that begins large and falls, so that strong vectors come first. Once
vectors explain the rows, those leave that explain no more than the best of the vocabulary would by
chance.

Strong rows hide what weak ones show, and of rows whose noise is alike this is mended by making them
orthonormal (Davies and Eldar 2012). So the search begins again by rows in which numbers that are
hardly known are those of the mixes found so far, as long as fewer vectors, or closer ones, explain
the rows as they came.

With learned positions an input is (token + position) / sigma + constant, so tokens are sought
beside all positions and the constant. A token then has the sum of the shares of its places, which
are known: for one text that is its order. In a batch, several tokens share each position.

Limits: the first layer only, no dropout, fewer tokens and positions than columns. Words whose
vectors hardly differ, as those that a model did not meet in training, are not told apart.

Shapes: O rows, D columns, V vectors, M vectors that may mix, K directions that are in rows anyhow,
N vectors or tokens, P positions, T places of a text, A tokens that resemble others, R orthonormal
rows.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.span import SPARE
from fedleak.attacks.subspace.weighted_span import MISFIT, LowRank
from fedleak.models import LanguageModel

_PASSES, _ROUNDS, _STEPS = 4, 24, 10
"""Searches, at most; times that vectors enter in each, and steps of learning after each."""

_EXPLAINED = 1.25
"""Chi^2 of what vectors leave, for each degree of freedom and but for its own spread, or they are
not those of the rows."""

_CROWD = 1.25
"""More vectors than this for each column explain anything."""

_STALE, _LEAVE = 3, 16
"""Times in vain that end a search; of vectors that seem needless this part leaves at once."""

_ENTER, _NEAR, _COMPARED = 64, 1024, 512
"""Vectors that enter at once, at most, those that are tested for it, and of these the best."""

_BEGIN, _END = 1e-1, 1e-8
"""Variance of the noise that is added, at first and at last; rows have a root mean square of 1."""

_NONE = 1e-6
"""A vector whose variance is below this share of the largest leaves."""

_FREE, _TINY = 1e4, 1e-9
"""Variance of the shares of known vectors; what is positive but for rounding."""

_USED, _CLOSER = 9.0, 1.0
"""Mean square of the shares of a position that is used, and the square that a change of words must
gain, in units of their noise."""

_BEGUN = 64
"""Beginnings of the search for an order, at most."""

_ALIKE = 0.999
"""Cosine above which vectors hardly differ."""

_POSITIONS = (32, 128)
"""Positions that texts may have."""


@dataclass(frozen=True)
class Support:
    """Vectors that explain rows.

    Attributes:
        index_M: Which, the strongest first.
        left: Chi^2 of what they leave, for each degree of freedom.
        square: Chi^2 of what they leave.
        cost: Chi^2 + 2 unknowns (Akaike 1974).
    """

    index_M: Tensor
    left: float
    square: float
    cost: float

    @classmethod
    def of(cls, matrix: LowRank, known_KD: Tensor, x_VD: Tensor, index_M: Tensor) -> "Support":
        """Takes vectors that stand beside known ones."""
        left, square = matrix.left(torch.cat([known_KD, x_VD[index_M]]))
        return cls(index_M, left, square, square + 2 * len(matrix.value_OD) * len(index_M))

    @property
    def explains(self) -> bool:
        """Whether what is left may be noise."""
        spread = math.sqrt(2 * self.left / self.square) if self.square else 0.0
        return self.left < _EXPLAINED + 3 * spread


@dataclass(frozen=True)
class _Rows:
    """Rows that are mixes of vectors.

    Attributes:
        value_OD: The rows.
        weight_OD: One over the variance of each number.
        known_KD: Vectors that may be mixed in anyhow.
    """

    value_OD: Tensor
    weight_OD: Tensor
    known_KD: Tensor

    @classmethod
    def of(cls, matrix: LowRank, known_KD: Tensor) -> "_Rows":
        """Takes the rows of a matrix as they came."""
        return cls(matrix.value_OD, matrix.weight_OD.clamp_min(_TINY), known_KD)

    def noisier(self, noise: float) -> "_Rows":
        """Returns the rows as if noise of this variance were added."""
        return replace(self, weight_OD=self.weight_OD / (1 + noise * self.weight_OD))

    def learned(self, x_MD: Tensor, variance_M: Tensor) -> tuple[Tensor, Tensor]:
        """Returns which vectors stay, and the variance of their shares."""
        known = len(self.known_KD)
        both_MD = torch.cat([self.known_KD, x_MD])
        inner_OMM, right_OM = self._equations(both_MD)
        left_M = torch.arange(len(both_MD), device=x_MD.device)
        for _ in range(_STEPS):
            share_OM, factor_OMM = _shares(inner_OMM, right_OM, variance_M)
            spread_OM = torch.cholesky_inverse(factor_OMM).diagonal(dim1=1, dim2=2)[:, known:]
            strength_M = (1 - spread_OM / variance_M).clamp_min(_TINY).mean(0) / variance_M
            variance_M = (share_OM[:, known:].square().mean(0) / strength_M).sqrt()
            stays_M = variance_M > _NONE * variance_M.max()
            variance_M = variance_M[stays_M]
            stays_M = torch.cat([stays_M.new_ones(known), stays_M])
            left_M, right_OM = left_M[stays_M], right_OM[:, stays_M]
            inner_OMM = inner_OMM[:, stays_M][:, :, stays_M]
        return left_M[known:] - known, variance_M

    def entering(self, x_VD: Tensor, index_M: Tensor, variance_M: Tensor) -> Tensor:
        """Returns which vectors enter: those with which the evidence grows most."""
        both_MD = torch.cat([self.known_KD, x_VD[index_M]])
        share_OM, factor_OMM = _shares(*self._equations(both_MD), variance_M)
        left_OD = self.weight_OD * (self.value_OD - share_OM @ both_MD)
        square_V = (x_VD @ left_OD.T).square().mean(1)
        square_V[index_M] = 0
        strength_V = x_VD.square() @ self.weight_OD.mean(0)
        near_N = (square_V / strength_V).topk(min(_NEAR, len(x_VD))).indices
        inner_OMN = (self.weight_OD[:, None] * both_MD) @ x_VD[near_N].T
        hidden_OMN = torch.linalg.solve_triangular(factor_OMM, inner_OMN, upper=False)
        strength_N = (strength_V[near_N] - hidden_OMN.square().sum(1).mean(0)).clamp_min(_TINY)
        grown_N, order_N = (square_V[near_N] / strength_N).sort(descending=True)
        near_N = near_N[order_N[grown_N > 1]][:_COMPARED]
        # Of vectors that hardly differ all would enter, and leave no room for others.
        alike_NN = F.normalize(x_VD[near_N]) @ F.normalize(x_VD[near_N]).T > _ALIKE
        return near_N[~alike_NN.tril(-1).any(1)][:_ENTER]

    def free_shares(self) -> tuple[Tensor, Tensor]:
        """Returns the shares [O, K] of known vectors alone, and their variances [O, K]."""
        share_OK, factor_OKK = _shares(*self._equations(self.known_KD), self.value_OD[0, :0])
        return share_OK, torch.cholesky_inverse(factor_OKK).diagonal(dim1=1, dim2=2)

    def significant(self, x_MD: Tensor, tested: int) -> Tensor:
        """Returns which of some vectors explain more than the best of so many by chance.

        Those that explain least leave first. The bound is that of Laurent and Massart (2000).
        """
        stays_M, rows = torch.arange(len(x_MD), device=x_MD.device), len(self.value_OD)
        nats = math.log(tested)
        bound = rows + 2 * math.sqrt(rows * nats) + 2 * nats
        while len(stays_M):
            both_KD = torch.cat([self.known_KD, x_MD[stays_M]])
            share_OK, spread_OK = replace(self, known_KD=both_KD).free_shares()
            square_M = (share_OK.square() / spread_OK).sum(0)[len(self.known_KD) :]
            weak = int((square_M < bound).sum())
            if not weak:
                break
            # Of vectors that resemble each other each seems to be needless beside the others.
            strongest_M = square_M.argsort(descending=True)
            stays_M = stays_M[strongest_M[: len(stays_M) - 1 - weak // _LEAVE]]
        return stays_M

    def completed(self, x_MD: Tensor) -> "_Rows":
        """Returns rows whose numbers that are hardly known are those of these vectors' mixes.

        They are made orthonormal beside known vectors.
        """
        stays_M, variance_M = self.learned(x_MD, x_MD.new_full((len(x_MD),), 1 / len(x_MD)))
        both_MD = torch.cat([self.known_KD, x_MD[stays_M]])
        share_OM, factor_OMM = _shares(*self._equations(both_MD), variance_M)
        spread_OMD = torch.linalg.solve_triangular(
            factor_OMM, both_MD.expand(len(factor_OMM), -1, -1), upper=False
        )
        own_OD, mixed_OD = 1 / self.weight_OD, spread_OMD.square().sum(1)
        value_OD = self.value_OD.where(own_OD < mixed_OD, share_OM @ both_MD)
        known = len(self.known_KD)
        rest_OD = value_OD - share_OM[:, :known] @ self.known_KD
        square_O, axis_OO = torch.linalg.eigh(rest_OD @ rest_OD.T / rest_OD.shape[1])
        used_O = square_O > _NONE * square_O[-1]
        turned_RO = (axis_OO[:, used_O] / square_O[used_O].sqrt()).T
        variance_RD = turned_RO.square() @ own_OD.minimum(mixed_OD)
        return _Rows(turned_RO @ value_OD, 1 / variance_RD, self.known_KD)

    def _equations(self, x_MD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the normal equations of vectors' shares: inner products [O, M, M] and [O, M]."""
        inner_OMM = (self.weight_OD[:, None] * x_MD) @ x_MD.T
        return inner_OMM, (self.weight_OD * self.value_OD) @ x_MD.T


def _shares(inner_OMM: Tensor, right_OM: Tensor, variance_M: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the shares [O, M] of vectors, and the Cholesky factors of their precisions.

    Those before the ones whose variances are given are known vectors, and their shares are free.
    """
    free_K = variance_M.new_full((right_OM.shape[1] - len(variance_M),), _FREE)
    precision_OMM = inner_OMM + torch.diag(1 / torch.cat([free_K, variance_M]))
    factor_OMM = torch.linalg.cholesky(precision_OMM)
    return torch.cholesky_solve(right_OM[..., None], factor_OMM)[..., 0], factor_OMM


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
    x_VD, known_KD = _unit(vector_VD), _unit(known_KD)
    came = _Rows.of(matrix, known_KD)
    rows, best = came, None
    for _ in range(_PASSES):
        support = _support(matrix, rows, x_VD, clock)
        if support is None:
            break
        index_M = support.index_M[came.significant(x_VD[support.index_M], len(x_VD))]
        if not len(index_M):  # Noise alone explains the rows.
            break
        support = Support.of(matrix, known_KD, x_VD, index_M)
        if best is not None and support.cost >= best.cost:
            break
        same = best is not None and {*support.index_M.tolist()} == {*best.index_M.tolist()}
        best, rows = support, came.completed(x_VD[support.index_M])
        if same:
            break
    return best if best is not None and best.explains else None


def _support(matrix: LowRank, rows: _Rows, x_VD: Tensor, clock: Clock) -> Support | None:
    """Returns the few vectors that explain a matrix, as these rows of it show them."""
    # More could be replaced by as many others.
    most = (x_VD.shape[1] - len(rows.known_KD) + len(matrix.value_OD)) // 2 - SPARE
    index_M, variance_M = torch.empty(0, dtype=torch.long, device=x_VD.device), x_VD[:0, 0]
    best, stale = None, 0
    for turn in range(_ROUNDS):
        if clock.up():
            return None
        noisier = rows.noisier(_BEGIN * (_END / _BEGIN) ** (turn / _ROUNDS))
        entered_N = noisier.entering(x_VD, index_M, variance_M)
        index_M = torch.cat([index_M, entered_N])
        if not len(index_M):
            return None
        begin = variance_M.median() / 10 if len(variance_M) else x_VD.new_tensor(1 / _ENTER)
        variance_M = torch.cat([variance_M, begin.expand(len(entered_N))])
        stays_M, variance_M = noisier.learned(x_VD[index_M], variance_M)
        index_M = index_M[stays_M]
        if len(index_M) > max(_CROWD * x_VD.shape[1], 2 * _ENTER):
            break
        if len(index_M) <= most:
            strongest_M = index_M[variance_M.argsort(descending=True)]
            support, stale = Support.of(matrix, rows.known_KD, x_VD, strongest_M), stale + 1
            if support.left < MISFIT and (best is None or support.cost < best.cost):
                best, stale = support, 0
        if best is not None and (stale == _STALE or not len(entered_N)):
            break
    return best


def _unit(x_ND: Tensor) -> Tensor:
    """Returns vectors whose numbers have a root mean square of 1."""
    unit_ND: Tensor = F.normalize(x_ND.double()) * math.sqrt(x_ND.shape[1])
    return unit_ND


@dataclass(frozen=True)
class Bag:
    """The tokens of a batch, and their shares in rows of the first layer, in units of their noise.

    Attributes:
        tokens_N: The tokens, the strongest first.
        left: Chi^2 of what they leave of the rows, for each degree of freedom.
        token_NO: The shares of each token at all its places.
        position_PO: Those of each position with all its tokens; P is 0 without learned positions.
        alike_A: Tokens whose vectors hardly differ from that of one of these.
        axis_MD: The directions of all that is mixed, those of the tokens at last.
        share_NO: The shares of each token as they are.
    """

    tokens_N: Tensor
    left: float
    token_NO: Tensor
    position_PO: Tensor
    alike_A: Tensor
    axis_MD: Tensor
    share_NO: Tensor

    @property
    def told_apart(self) -> tuple[int, ...]:
        """The tokens that no other could replace, in rising order."""
        return tuple(sorted({*self.tokens_N.tolist()} - {*self.alike_A.tolist()}))

    @property
    def candidates(self) -> tuple[int, ...]:
        """These tokens and all that could replace one, in rising order."""
        return tuple(sorted({*self.tokens_N.tolist(), *self.alike_A.tolist()}))


def sparse_tokens(model: LanguageModel, matrix: LowRank, clock: Clock) -> Bag | None:
    """Returns the tokens of a batch from rows of the first layer; None if nothing few explains it.

    Args:
        model: The model.
        matrix: The rows.
        clock: When time is up, the search ends.
    """
    token_VD, position_PD, constant_CD = model.family.token_table(model.module).directions()
    # Positions cost columns: those of long texts are taken only where short ones do not explain.
    for positions in sorted({min(most, len(position_PD)) for most in _POSITIONS}):
        known_KD = torch.cat([position_PD[:positions], constant_CD])
        if len(known_KD) + SPARE >= matrix.value_OD.shape[1]:
            continue
        support = sparse_support(matrix, token_VD, known_KD, clock)
        if support is not None:
            tokens_N = support.index_M
            axis_MD = torch.cat([known_KD, token_VD[tokens_N]]).double()
            share_OM, spread_OM = _Rows.of(matrix, axis_MD).free_shares()
            share_MO = (share_OM / spread_OM.mean(1, keepdim=True).sqrt()).T
            return Bag(
                tokens_N=tokens_N,
                left=support.left,
                token_NO=share_MO[len(known_KD) :],
                position_PO=share_MO[:positions],
                alike_A=_alike(token_VD, tokens_N),
                axis_MD=axis_MD,
                share_NO=share_OM.T[len(known_KD) :],
            )
    return None


def _alike(token_VD: Tensor, tokens_N: Tensor) -> Tensor:
    """Returns the tokens whose vectors hardly differ from another one's, which is one of these."""
    unit_VD = F.normalize(token_VD)
    alike_NV = unit_VD[tokens_N] @ unit_VD.T > _ALIKE
    alike_NV = alike_NV[alike_NV.sum(1) > 1]
    return alike_NV.any(0).nonzero()[:, 0]


def placed_text(bag: Bag) -> Ids | None:
    """Returns the text of a batch of one text; None without learned positions.

    The shares of a token are the sum of those of its places. Where sums do not agree, places are
    given other tokens, again and again from another beginning, and the best order counts.

    Args:
        bag: The tokens of the text.
    """
    used_P = bag.position_PO.square().mean(1) > _USED
    if not used_P.any():
        return None
    place_TO, token_NO = bag.position_PO[: int(used_P.nonzero()[-1]) + 1], bag.token_NO
    rng = torch.Generator(place_TO.device).manual_seed(0)
    index_T, smallest = torch.cdist(place_TO, token_NO).argmin(1), math.inf
    best_T = index_T
    for _ in range(_BEGUN):
        index_T, left_NO = _closer(place_TO, token_NO, index_T)
        square = float(left_NO.square().sum())
        best_T, smallest = (index_T, square) if square < smallest else (best_T, smallest)
        wrong_N = (left_NO.square().mean(1) > _USED).nonzero()[:, 0]
        again_T = torch.isin(index_T, wrong_N)
        if not again_T.any():
            break
        drawn = torch.randint(len(wrong_N), (int(again_T.sum()),), generator=rng)
        index_T = index_T.masked_scatter(again_T, wrong_N[drawn])
    return tuple(bag.tokens_N[best_T].tolist())


def _closer(place_TO: Tensor, token_NO: Tensor, index_T: Tensor) -> tuple[Tensor, Tensor]:
    """Returns which token each place has, and what is left of tokens' shares.

    One place is given another token, or two exchange theirs, as long as less is left.
    """
    index_T = index_T.clone()
    while True:
        left_NO = token_NO.index_add(0, index_T, place_TO, alpha=-1)
        left_TO = left_NO[index_T]
        other_TN = (place_TO * (left_TO + place_TO)).sum(1, keepdim=True) - place_TO @ left_NO.T
        between_TTO = place_TO[:, None] - place_TO
        exchanged_TT = (between_TTO * (between_TTO + left_TO[:, None] - left_TO)).sum(2)
        change, best = torch.cat([other_TN, exchanged_TT], 1).flatten().min(0)
        if change > -_CLOSER:
            return index_T, left_NO
        place, column = divmod(int(best), other_TN.shape[1] + len(place_TO))
        if column < other_TN.shape[1]:
            index_T[place] = column
        else:
            pair = [place, column - other_TN.shape[1]]
            index_T[pair] = index_T[pair[::-1]]
