"""Which of many known vectors few rows are mixes of, by sparse Bayesian learning.

The O rows of a gradient are mixes of the inputs of N tokens, G = C X. With N < O the rows span X,
and each input is tested by itself (`weighted_span`). An adapter has as many rows as its rank, and a
batch may have more tokens: then no input lies in the span of the rows. But inputs of the first
layer are known vectors, one of each token of the vocabulary, and few of them mix: of all X that
explain the rows, the one with the fewest vectors is sought. Two rows can be enough, as unknown are
N O shares, and known are D O numbers; no more than (D + O) / 2 vectors are told apart (Chen and Huo
2006).

Each number has noise of its own, as behind a step of Adam, where some numbers are known within a
thousandth and others not at all. Beside it each row has noise of an unknown variance z_o, as of
half precision, dropout, steps that were not of one gradient, or a defense. Vector x_i has shares of
variance y_i in all rows, and S_o = V_o + z_o Q + sum of y_i x_i x_i^T is the covariance of the
numbers of row o, with V_o the known variances. Q says how the unknown noise differs among columns:
not at all, or, where it is relative, as the inputs do there; the likelier one counts. The evidence
(Wipf and Rao 2007, M-SBL) is maximised by

    y_i <- sqrt( mean over rows of (y_i x_i^T S_o^-1 g_o)^2 / mean of x_i^T S_o^-1 x_i )
    z_o <- z_o chi^2 of what is left of row o / (its numbers - those that the shares take)

The first lowers its cost at each step (Wipf and Nagarajan 2010), and most y_i go to zero. Vectors
enter where evidence grows with them: where mean (x_i^T S_o^-1 g_o)^2 > mean x_i^T S_o^-1 x_i
(Tipping and Faul 2003). z_o begins large, so that strong vectors come first. The support with the
least -2 log likelihood, and what the best of the vocabulary would explain by chance for each
vector, counts. At last those vectors leave that explain no more than the best of as many decoys,
which are in no row: the vocabulary's with the signs of some columns changed (compare the knockoffs
of Barber and Candes 2015). So noise that is not Gaussian, or is taken for too small, names few
words.

Dropout changes an input alike in all rows, so what vectors leave of the rows is alike, too. Rows
that are made orthonormal have such noise apart (Davies and Eldar 2012), and show what strong rows
hide. So, unless what is known of the noise explains all that is left, the search goes on by such
rows, in which numbers that are hardly known are those of the mixes found so far, as long as the
cost falls, in which the likelihood is of what is left of all rows together.

With learned positions an input is (token + position) / sigma + constant, so tokens are sought
beside all positions and the constant. A token then has the sum of the shares of its places, which
are known: for one text that is its order. In a batch, several tokens share each position.

Where Adam made several steps, a number was divided by about its usual size. Signs of Gaussian
numbers point along them (Bussgang 1952), so multiplied by the size of inputs in its column it
counts as a gradient behind large noise.

Limits: the first layer only, fewer tokens and positions than columns. Words whose vectors hardly
differ are not told apart. Noise hides weak shares: then the answer has part of the tokens.

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
from fedleak.attacks.subspace.weighted_span import LowRank
from fedleak.models import LanguageModel

_PASSES, _ROUNDS, _STEPS = 4, 24, 10
"""Searches, at most; times that vectors enter in each, and steps of learning after each."""

_EXPLAINED = 1.25
"""Chi^2 of what vectors leave, for each degree of freedom and but for its own spread, or there is
noise beside what is known."""

_CROWD = 0.75
"""More vectors than this for each column end a search: as many as columns explain anything."""

_STALE, _LEAVE = 3, 16
"""Times in vain that end a search; of vectors that seem needless this part leaves at once."""

_ENTER, _FEW, _NEAR, _COMPARED = 64, 6, 1024, 512
"""Vectors that enter at once, at most, and as a part of the columns; those that are tested for it,
and of these the best."""

_FALL, _FALLS = 0.1, 0.7
"""What the noise falls to at once, at most, while vectors enter: as many as explain anything would
leave none, and then no vector would leave. It still falls if it falls to this part."""

_MARGIN = 1.2
"""What a vector explains at least, in units of the best decoy: the best of as many others would
exceed that by chance about once in 200, of Gaussian noise."""

_BEGIN, _LEAST, _MOST = 0.5, 1e-12, 4.0
"""Variance of the noise of a row that is not known, at first, at least and at most; rows have a
root mean square of 1."""

_TURNS, _CLOSER = 10, 1.0
"""Times that the noise of a fit is estimated; what a cost, or a square in units of noise, must fall
by."""

_NONE = 1e-6
"""A vector whose variance is below this share of the largest leaves."""

_FREE, _TINY = 1e4, 1e-9
"""Variance of the shares of known vectors; what is positive but for rounding."""

_USED = 9.0
"""Mean square of the shares of a position that is used, in units of their noise."""

_BEGUN = 64
"""Beginnings of the search for an order, at most."""

_ALIKE = 0.999
"""Cosine above which vectors hardly differ."""

_POSITIONS = (32, 128)
"""Positions that texts may have."""


@dataclass(frozen=True)
class _Rows:
    """Rows that are mixes of vectors, with noise that is known and noise that is not.

    Attributes:
        value_OD: The rows.
        variance_OD: The variance of each number's own noise.
        shape_D: That of the noise that is not known, in each column, with a mean of 1.
        known_KD: Vectors that may be mixed in anyhow.
        noise_O: The mean variance of the noise that is not known, in each row.
    """

    value_OD: Tensor
    variance_OD: Tensor
    shape_D: Tensor
    known_KD: Tensor
    noise_O: Tensor

    @classmethod
    def of(cls, matrix: LowRank, known_KD: Tensor, shape_D: Tensor) -> "_Rows":
        """Takes the rows of a matrix as they came."""
        variance_OD = 1 / matrix.weight_OD.clamp_min(_TINY)
        noise_O = variance_OD.new_full((len(variance_OD),), _BEGIN)
        return cls(matrix.value_OD, variance_OD, shape_D, known_KD, noise_O)

    @property
    def weights(self) -> Tensor:
        """One over the variance of each number."""
        return 1 / (self.variance_OD + self.noise_O[:, None] * self.shape_D)

    @property
    def came(self) -> Tensor:
        """Which numbers are known at all."""
        return self.variance_OD < 0.5 / _TINY

    def noisy(self, left_OD: Tensor, taken_O: Tensor) -> "_Rows":
        """Returns the rows with noise as vectors leave it, that took so many numbers of each."""
        free_O = (self.came.sum(1) - taken_O).clamp_min(1)
        square_O = (self.weights * left_OD.square()).sum(1)
        return replace(self, noise_O=(self.noise_O * square_O / free_O).clamp(_LEAST, _MOST))

    def learned(
        self, x_MD: Tensor, variance_M: Tensor, fall: float = 0.0
    ) -> tuple["_Rows", Tensor, Tensor]:
        """Returns the rows with their noise, which vectors stay, and the variance of their shares.

        Args:
            x_MD: The vectors.
            variance_M: Of their shares, at first.
            fall: The part of the noise that is left, at least.
        """
        rows, known, lowest_O = self, len(self.known_KD), fall * self.noise_O
        both_MD = torch.cat([self.known_KD, x_MD])
        left_M = torch.arange(len(both_MD), device=x_MD.device)
        for _ in range(_STEPS):
            share_OM, factor_OMM = _shares(*rows.equations(both_MD[left_M]), variance_M)
            spread_OM = torch.cholesky_inverse(factor_OMM).diagonal(dim1=1, dim2=2)[:, known:]
            # How much of each share the rows tell, and not its variance alone.
            told_OM = (1 - spread_OM / variance_M).clamp_min(_TINY)
            rows = rows.noisy(rows.value_OD - share_OM @ both_MD[left_M], told_OM.sum(1) + known)
            rows = replace(rows, noise_O=rows.noise_O.maximum(lowest_O))
            strength_M = told_OM.mean(0) / variance_M
            variance_M = (share_OM[:, known:].square().mean(0) / strength_M).sqrt()
            stays_M = variance_M > _NONE * variance_M.max()
            variance_M = variance_M[stays_M]
            left_M = left_M[torch.cat([stays_M.new_ones(known), stays_M])]
        return rows, left_M[known:] - known, variance_M

    def entering(self, x_VD: Tensor, index_M: Tensor, variance_M: Tensor) -> Tensor:
        """Returns which vectors enter: those with which the evidence grows most."""
        near_N, square_ON, strength_ON = self._near(x_VD, x_VD[index_M].double(), variance_M)
        grown_N, order_N = (square_ON.mean(0) / strength_ON.mean(0)).sort(descending=True)
        order_N = order_N[(grown_N > 1) & ~torch.isin(near_N[order_N], index_M)][:_COMPARED]
        # Of vectors that hardly differ all would enter, and leave no room for others.
        unit_ND = F.normalize(x_VD[near_N[order_N]])
        alike_N = (unit_ND @ unit_ND.T > _ALIKE).tril(-1).any(1)
        free = self.value_OD.shape[1] - len(self.known_KD)
        return near_N[order_N[~alike_N]][: min(_ENTER, free // _FEW)]

    def _near(
        self, x_VD: Tensor, x_MD: Tensor, variance_M: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns which vectors explain most beside M others.

        Beside them, squares [O, N] of their products with what is left, and the mean of these if
        nothing but noise were.
        """
        both_MD = torch.cat([self.known_KD, x_MD])
        share_OM, factor_OMM = _shares(*self.equations(both_MD), variance_M)
        weight_OD = self.weights
        left_OD = weight_OD * (self.value_OD - share_OM @ both_MD)
        square_V = (x_VD @ left_OD.to(x_VD).T).square().mean(1)
        # Vectors that hardly differ from those that entered say little beside them. Of a model
        # that met few words in training such are most, and they would leave no room for others.
        weight_D = weight_OD.mean(0)
        inner_MM = (weight_D * both_MD) @ both_MD.T
        factor_MM = torch.linalg.cholesky(inner_MM + _prior(len(both_MD), variance_M))
        hidden_MD = torch.linalg.solve_triangular(factor_MM, weight_D * both_MD, upper=False)
        strength_V = x_VD.square() @ weight_D.to(x_VD)
        strength_V -= (x_VD @ hidden_MD.to(x_VD).T).square().sum(1)
        grown_V = square_V / strength_V.clamp_min(_TINY)
        near_N = grown_V.topk(min(_NEAR, len(x_VD))).indices
        x_ND = x_VD[near_N].double()
        inner_OMN = (weight_OD[:, None] * both_MD) @ x_ND.T
        hidden_OMN = torch.linalg.solve_triangular(factor_OMM, inner_OMN, upper=False)
        strength_ON = (weight_OD @ x_ND.square().T - hidden_OMN.square().sum(1)).clamp_min(_TINY)
        return near_N, (left_OD @ x_ND.T).square(), strength_ON

    def fitted(self, x_MD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the free shares [O, M] of vectors, their variances [O, M], and what is left."""
        both_MD = torch.cat([self.known_KD, x_MD])
        share_OM, factor_OMM = _shares(*self.equations(both_MD), self.noise_O[:0])
        spread_OM = torch.cholesky_inverse(factor_OMM).diagonal(dim1=1, dim2=2)
        left_OD = self.value_OD - share_OM @ both_MD
        known = len(self.known_KD)
        return share_OM[:, known:], spread_OM[:, known:], left_OD

    def cost(self, left_OD: Tensor, count: int, tested: int) -> float:
        """Returns -2 log likelihood of what so many vectors leave, and what chance would gain."""
        weight_OD = self.weights
        square_OD = weight_OD * left_OD.square() - weight_OD.log()
        return float(square_OD[self.came].sum()) + count * _chance(len(left_OD), tested)

    def significant(self, x_VD: Tensor, index_M: Tensor) -> Tensor:
        """Returns which vectors explain more than any of as many decoys, that are in no row.

        Decoys have the signs of some columns changed. Those that explain least leave first.
        """
        rng = torch.Generator().manual_seed(0)
        sign_D = torch.randint(2, self.shape_D.shape, generator=rng).to(self.shape_D) * 2 - 1
        rows, before = self, 0
        while len(index_M) != before:
            before, x_MD = len(index_M), x_VD[index_M].double()
            changed = replace(
                rows, value_OD=rows.value_OD * sign_D, known_KD=rows.known_KD * sign_D
            )
            _, square_ON, strength_ON = changed._near(x_VD, x_MD * sign_D, rows.noise_O[:0])
            most = float((square_ON / strength_ON).sum(0).max())
            bound = max(_chance(len(rows.value_OD), len(x_VD)), _MARGIN * most)
            index_M = rows._above(bound, x_VD, index_M)
            if len(index_M) != before:
                rows, _ = rows.left_by(x_VD[index_M].double())
        return index_M

    def left_by(self, x_MD: Tensor) -> tuple["_Rows", Tensor]:
        """Returns the rows with noise as vectors leave it, and what they leave [O, D]."""
        rows, taken_O = self, torch.full_like(self.noise_O, len(self.known_KD) + len(x_MD))
        _, _, left_OD = rows.fitted(x_MD)
        for _ in range(_TURNS):
            rows = rows.noisy(left_OD, taken_O)
            _, _, left_OD = rows.fitted(x_MD)
        return rows, left_OD

    def _above(self, bound: float, x_VD: Tensor, index_M: Tensor) -> Tensor:
        """Returns which vectors each explain a chi^2 above a bound beside the others."""
        while len(index_M):
            share_OM, spread_OM, _ = self.fitted(x_VD[index_M].double())
            square_M = (share_OM.square() / spread_OM).sum(0)
            weak = int((square_M < bound).sum())
            if not weak:
                break
            # Of vectors that resemble each other each seems to be needless beside the others.
            strongest_M = square_M.argsort(descending=True)
            index_M = index_M[strongest_M[: len(index_M) - 1 - weak // _LEAVE]]
        return index_M

    def turned(self, x_MD: Tensor) -> "_Rows":
        """Returns rows that are orthonormal beside known vectors, columns weighed by their noise.

        Numbers that are hardly known are those of these vectors' mixes.
        """
        rows, stays_M, variance_M = self.learned(x_MD, x_MD.new_full((len(x_MD),), 1 / len(x_MD)))
        both_MD = torch.cat([self.known_KD, x_MD[stays_M]])
        share_OM, factor_OMM = _shares(*rows.equations(both_MD), variance_M)
        spread_OMD = torch.linalg.solve_triangular(
            factor_OMM, both_MD.expand(len(factor_OMM), -1, -1), upper=False
        )
        mixed_OD = spread_OMD.square().sum(1) + rows.noise_O[:, None] * rows.shape_D
        value_OD = self.value_OD.where(self.variance_OD < mixed_OD, share_OM @ both_MD)
        known = len(self.known_KD)
        rest_OD = (value_OD - share_OM[:, :known] @ self.known_KD) / self.shape_D.sqrt()
        square_O, axis_OO = torch.linalg.eigh(rest_OD @ rest_OD.T / rest_OD.shape[1])
        used_O = square_O > _NONE * square_O[-1]
        turned_RO = (axis_OO[:, used_O] / square_O[used_O].sqrt()).T
        return _Rows(
            turned_RO @ value_OD,
            turned_RO.square() @ self.variance_OD.minimum(mixed_OD),
            self.shape_D,
            self.known_KD,
            torch.full_like(square_O[used_O], _BEGIN),
        )

    def equations(self, x_MD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the normal equations of vectors' shares: inner products [O, M, M] and [O, M]."""
        inner_OMM = (self.weights[:, None] * x_MD) @ x_MD.T
        return inner_OMM, (self.weights * self.value_OD) @ x_MD.T


def _chance(rows: int, tested: int) -> float:
    """Returns the chi^2 that the best of so many vectors explains by chance.

    The bound is that of Laurent and Massart (2000).
    """
    nats = math.log(tested)
    return rows + 2 * math.sqrt(rows * nats) + 2 * nats


def _prior(count: int, variance_M: Tensor) -> Tensor:
    """Returns the precision of so many shares, the last of which have these variances."""
    free_K = variance_M.new_full((count - len(variance_M),), _FREE)
    return torch.diag(1 / torch.cat([free_K, variance_M]))


def _shares(inner_OMM: Tensor, right_OM: Tensor, variance_M: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the shares [O, M] of vectors, and the Cholesky factors of their precisions.

    Those before the ones whose variances are given are known vectors, and their shares are free.
    """
    factor_OMM = torch.linalg.cholesky(inner_OMM + _prior(right_OM.shape[1], variance_M))
    return torch.cholesky_solve(right_OM[..., None], factor_OMM)[..., 0], factor_OMM


@dataclass(frozen=True)
class Support:
    """Vectors that explain rows.

    Attributes:
        index_M: Which, the strongest first.
        noise: Root mean square of the noise that is not known, as a share of that of the rows; 0
            if there is none.
        rows: The rows, with that noise.
        cost: -2 log likelihood, and what as many vectors would explain by chance.
    """

    index_M: Tensor
    noise: float
    rows: _Rows
    cost: float

    @classmethod
    def of(cls, rows: _Rows, x_VD: Tensor, index_M: Tensor) -> "Support":
        """Takes vectors that explain rows as they came."""
        x_MD, known = x_VD[index_M].double(), len(rows.known_KD)
        _, _, left_OD = replace(rows, noise_O=torch.zeros_like(rows.noise_O)).fitted(x_MD)
        free = rows.came.sum() - len(left_OD) * (known + len(x_MD))
        square = (left_OD.square() / rows.variance_OD)[rows.came].sum()
        left = float(square / free.clamp_min(1))
        exact = left < _EXPLAINED + 3 * math.sqrt(2 / max(int(free), 1)) * left
        rows = replace(rows, noise_O=torch.full_like(rows.noise_O, _LEAST if exact else _BEGIN))
        if not exact:
            rows, left_OD = rows.left_by(x_MD)
        # The noise of dropout is alike in all rows.
        unit_OD = F.normalize((left_OD * rows.weights.sqrt()).masked_fill(~rows.came, 0))
        alike_OO = unit_OD @ unit_OD.T + _TINY * torch.eye(len(unit_OD)).to(unit_OD)
        cost = rows.cost(left_OD, len(x_MD), len(x_VD))
        left_over = max(x_VD.shape[1] - known - len(x_MD), 0)
        cost += left_over * float(torch.linalg.slogdet(alike_OO).logabsdet)
        noise = 0.0 if exact else float(rows.noise_O.mean().sqrt())
        return cls(index_M, noise, rows, cost)


def sparse_support(
    matrix: LowRank, vector_VD: Tensor, known_KD: Tensor, clock: Clock, *, divided: bool = False
) -> Support | None:
    """Returns the few vectors that explain a matrix's rows; None if none do.

    Args:
        matrix: The rows, each number with its own noise.
        vector_VD: Vectors of any length, of which few are mixed in the rows.
        known_KD: Directions that may be mixed in, too.
        clock: When time is up, the search ends with what it has.
        divided: Each number was divided by its usual size: what is not known is relative.
    """
    if not matrix.value_OD.numel():
        return None
    # Of whole vocabularies float32 is enough.
    x_VD, known_KD = _unit(vector_VD).float(), _unit(known_KD)
    size_D, best = x_VD.double().square().mean(0).clamp_min(_TINY), None
    evenly, relatively = (torch.ones_like(size_D), True), (size_D, False)
    for shape_D, patient in (relatively,) if divided else (evenly, relatively):
        came = _Rows.of(matrix, known_KD, shape_D)
        support = _explaining(came, x_VD, clock, patient=patient)
        if support is not None and (best is None or support.cost < best.cost):
            best = support
        if best is not None and not best.noise:
            break
    return best


def _explaining(came: _Rows, x_VD: Tensor, clock: Clock, *, patient: bool) -> Support | None:
    """Returns the few vectors that explain rows whose noise has one shape."""
    rows, best, index_M = came, None, torch.empty(0, dtype=torch.long, device=x_VD.device)
    for turn in range(_PASSES):
        index_M, rows = _search(rows, x_VD, index_M, clock, patient=patient and turn == 0)
        index_M = rows.significant(x_VD, index_M)
        if not len(index_M):  # Noise alone explains the rows.
            break
        support = Support.of(came, x_VD, index_M)
        if best is not None and support.cost > best.cost - _CLOSER:
            break
        best, rows = support, came.turned(x_VD[index_M].double())
        if not best.noise:
            break
    return best


def _search(
    rows: _Rows, x_VD: Tensor, index_M: Tensor, clock: Clock, *, patient: bool
) -> tuple[Tensor, _Rows]:
    """Returns the few vectors that explain rows, the strongest first, and the rows' noise.

    Args:
        rows: The rows.
        x_VD: All vectors.
        index_M: Those that are mixed in at first.
        clock: When time is up, those that explained most so far do.
        patient: Go on while the noise falls. Of few rows right vectors cost more than they explain
            until they explain all.
    """
    # More could be replaced by as many others.
    most = (x_VD.shape[1] - len(rows.known_KD) + len(rows.value_OD)) // 2 - SPARE
    variance_M = rows.noise_O.new_full((len(index_M),), 1 / max(len(index_M), 1))
    best, lowest, quiet, stale = (index_M[:0], rows), math.inf, math.inf, 0
    for _ in range(_ROUNDS):
        if clock.up():
            break
        entered_N = rows.entering(x_VD, index_M, variance_M)
        index_M = torch.cat([index_M, entered_N])
        if not len(index_M):
            break
        begin = variance_M.median() / 10 if len(variance_M) else rows.noise_O.new_tensor(1 / _ENTER)
        variance_M = torch.cat([variance_M, begin.expand(len(entered_N))])
        fall = _FALL if len(entered_N) else 0.0
        rows, stays_M, variance_M = rows.learned(x_VD[index_M].double(), variance_M, fall)
        index_M = index_M[stays_M]
        if len(index_M) > max(_CROWD * x_VD.shape[1], 2 * _ENTER):
            break
        noise = float(rows.noise_O.mean())
        stale = 0 if patient and noise < _FALLS * quiet else stale + 1
        quiet = min(quiet, noise)
        if len(index_M) <= most:
            _, _, left_OD = rows.fitted(x_VD[index_M].double())
            cost = rows.cost(left_OD, len(index_M), len(x_VD))
            if cost < lowest - _CLOSER:
                strongest_M = index_M[variance_M.argsort(descending=True)]
                best, lowest, stale = (strongest_M, rows), cost, 0
        if stale == _STALE or (lowest < math.inf and not len(entered_N)):
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
        noise: Root mean square of the noise that was not known, as a share of that of the rows.
        token_NO: The shares of each token at all its places.
        position_PO: Those of each position with all its tokens; P is 0 without learned positions.
        alike_A: Tokens whose vectors hardly differ from that of one of these.
        axis_MD: The directions of all that is mixed, those of the tokens at last.
        share_NO: The shares of each token as they are.
        error_O: The standard deviation of these shares in each row, by noise.
    """

    tokens_N: Tensor
    noise: float
    token_NO: Tensor
    position_PO: Tensor
    alike_A: Tensor
    axis_MD: Tensor
    share_NO: Tensor
    error_O: Tensor

    @property
    def used_positions(self) -> Tensor:
        """Which positions [P] have more than noise."""
        return _is_used(self.position_PO)

    @property
    def told_apart(self) -> tuple[int, ...]:
        """The tokens that no other could replace, in rising order."""
        return tuple(sorted({*self.tokens_N.tolist()} - {*self.alike_A.tolist()}))

    def only(self, stays_N: Tensor) -> "Bag":
        """Returns some of the tokens."""
        first_M = stays_N.new_ones(len(self.axis_MD) - len(stays_N))
        return replace(
            self,
            tokens_N=self.tokens_N[stays_N],
            token_NO=self.token_NO[stays_N],
            axis_MD=self.axis_MD[torch.cat([first_M, stays_N])],
            share_NO=self.share_NO[stays_N],
        )

    @property
    def candidates(self) -> tuple[int, ...]:
        """These tokens and all that could replace one, in rising order."""
        return tuple(sorted({*self.tokens_N.tolist(), *self.alike_A.tolist()}))


def sparse_tokens(
    model: LanguageModel, matrix: LowRank, clock: Clock, *, divided: bool = False
) -> Bag | None:
    """Returns the tokens of a batch from rows of the first layer; None if nothing few explains it.

    Args:
        model: The model.
        matrix: The rows.
        clock: When time is up, the search ends with what it has.
        divided: Each number was divided by its usual size, as Adam does.
    """
    token_VD, position_PD, constant_CD = model.family.token_table(model.module).directions()
    if divided:
        size_D = token_VD.double().square().mean(0).sqrt()
        matrix = LowRank.of(matrix.value_OD * size_D, size_D.square() / matrix.weight_OD)
    bag = None
    # Positions cost columns: those of long texts are taken only where short ones do not explain.
    for positions in sorted({min(most, len(position_PD)) for most in _POSITIONS}):
        known_KD = torch.cat([position_PD[:positions], constant_CD])
        if len(known_KD) + SPARE >= matrix.value_OD.shape[1]:
            continue
        support = sparse_support(matrix, token_VD, known_KD, clock, divided=divided)
        if support is None:
            continue
        tokens_N = support.index_M
        axis_MD = torch.cat([known_KD, token_VD[tokens_N]]).double()
        share_OM, spread_OM, _ = replace(support.rows, known_KD=axis_MD[:0]).fitted(axis_MD)
        error_O = spread_OM.mean(1).sqrt()
        share_MO = share_OM.T / error_O
        bag = Bag(
            tokens_N=tokens_N,
            noise=support.noise,
            token_NO=share_MO[len(known_KD) :],
            position_PO=share_MO[:positions],
            alike_A=_alike(token_VD, tokens_N),
            axis_MD=axis_MD,
            share_NO=share_OM.T[len(known_KD) :],
            error_O=error_O,
        )
        if not bag.noise or not _is_used(bag.position_PO[-1:]).any():
            break
    return bag


def _is_used(position_PO: Tensor) -> Tensor:
    """Returns which positions have more than noise."""
    used_P: Tensor = position_PO.square().mean(1) > _USED
    return used_P


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
    used_P = bag.used_positions
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
