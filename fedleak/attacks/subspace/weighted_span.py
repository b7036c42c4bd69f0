"""The row space of a matrix whose numbers each have noise of their own, as behind a step of Adam.

A layer's gradient is G = U V: its rows are mixes of the inputs of R tokens, which the R rows of V
span. Behind a first step of Adam the variance of a number grows with the fourth power of its size,
and large numbers are not known at all (`adam_step`). So U and V are fitted by weighted least
squares, the one and the other in turn (Gabriel and Zamir 1979). The rank is the one with the least
chi^2 + 2 unknowns (Akaike 1974), where unknowns = R (O + D - R).

Each column V_d then has its own covariance C_d = (U^T W_d U)^-1, with W_d the weights of column d.
A vector x is in the span if there is a c with x_d = c V_d but for noise, whose variance is c C_d c:

    excess^2 = min over c of sum_d (x_d - c V_d)^2 / (c C_d c) / (D - R)

For the input of a token of the batch that is about 1, and for others it is the larger the better V
is known. So columns of large numbers, of which only signs came, do not hide what others show.

Limits: fewer tokens than rows; an adapter has as many rows as its rank. Else the rows themselves
are axes, each number with its own noise, and vectors that are known stand beside them without any.

Shapes: O rows, D columns, R rank, N vectors.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks.clock import Clock
from fedleak.attacks.subspace.span import ACTIVATION_ROUNDING

_DRIFT = 1e-3
"""Noise of a number beside its own, as a share of the root mean square of its row."""

_FASTER = 16
"""Far from a fit the rank grows by this part of itself at a time, and else by one."""

_MISFIT = 2.0
"""A fit has a chi^2 below this, for each degree of freedom."""

_CLOSER, _CLOSEST, _GAIN = 1e-2, 0.0, 1.0
"""Changes of chi^2, as a share of it, that end a fit: while the rank grows, and at last; and the
change that says nothing."""

_ROUNDS = 200
"""Rounds of a fit, at most."""

_FAR = 6.0
"""Excess from which on its first estimate is enough."""

_TIMES = 2
"""Times that the noise of a vector is estimated."""

_NUMBERS = 2**24
"""Numbers that are in memory at once."""


@dataclass(frozen=True, kw_only=True)
class WeightedSpan:
    """The span of the rows of a matrix, as well as noise lets it be known.

    Attributes:
        axis_RD: What spans it, float64.
        covariance_DRR: Of the numbers of each column of the axes.
    """

    axis_RD: Tensor
    covariance_DRR: Tensor

    def beside(self, known_KD: Tensor) -> "WeightedSpan":
        """Returns the span of these axes and of some vectors that are known exactly."""
        covariance_DRR = F.pad(self.covariance_DRR, (0, len(known_KD)) * 2)
        axis_RD = torch.cat([self.axis_RD, known_KD])
        return WeightedSpan(axis_RD=axis_RD, covariance_DRR=covariance_DRR)

    def excess(self, x_ND: Tensor) -> Tensor:
        """Returns [N]: the residual of each vector, of length 1, in units of its noise."""
        noise_N, excess_N = self._estimated(x_ND)
        near_M = (excess_N < _FAR).nonzero()[:, 0]
        for some_M in torch.split(near_M, max(1, _NUMBERS // max(1, self.axis_RD.numel()))):
            excess_N[some_M] = self._near(x_ND[some_M], noise_N[some_M])
        return excess_N

    def estimate(self, x_ND: Tensor) -> Tensor:
        """Returns [N]: about the excess, as if columns differed by the size of their noise only."""
        return self._estimated(x_ND)[1]

    def _estimated(self, x_ND: Tensor) -> tuple[Tensor, Tensor]:
        """Returns about the noise [N] of vectors, in units of a column's, and their excess [N]."""
        size_D, rounding = self._noise, ACTIVATION_ROUNDING**2 / x_ND.shape[1]
        mean_RR = (self.covariance_DRR / size_D[:, None, None]).mean(0)
        weighted_RD = self.axis_RD / size_D
        right_NR = x_ND @ weighted_RD.T
        part_NR = right_NR @ torch.linalg.inv(weighted_RD @ self.axis_RD.T)
        noise_N = ((part_NR @ mean_RR) * part_NR).sum(1) + rounding / size_D.mean()
        # No table [N, D] is made: this is asked of whole vocabularies.
        square_N = x_ND.square() @ (1 / size_D) - (right_NR * part_NR).sum(1)
        freedom = x_ND.shape[1] - len(self.axis_RD)
        return noise_N, (square_N.clamp_min(0) / noise_N / freedom).sqrt()

    def _near(self, x_ND: Tensor, noise_N: Tensor) -> Tensor:
        """Returns the excess [N] of vectors whose noise is about so large."""
        variance_ND, part_NR = noise_N[:, None] * self._noise, x_ND[:, :0]
        for _ in range(_TIMES):
            weighted_NRD = self.axis_RD / variance_ND[:, None]
            right_NR1 = weighted_NRD @ x_ND[..., None]
            part_NR = torch.linalg.solve(weighted_NRD @ self.axis_RD.T, right_NR1)[..., 0]
            square_NRR = part_NR[:, :, None] * part_NR[:, None]
            variance_ND = square_NRR.flatten(1) @ self.covariance_DRR.flatten(1).T
            variance_ND += ACTIVATION_ROUNDING**2 / x_ND.shape[1]
        left_ND = x_ND - part_NR @ self.axis_RD
        square_N: Tensor = (left_ND.square() / variance_ND).sum(1)
        return (square_N / (x_ND.shape[1] - len(self.axis_RD))).sqrt()

    @property
    def _noise(self) -> Tensor:
        """The noise of each column of the axes together."""
        return self.covariance_DRR.diagonal(dim1=1, dim2=2).sum(1)


@dataclass(frozen=True, kw_only=True)
class LowRank:
    """A matrix, and what spans its rows, by weighted least squares.

    Attributes:
        value_OD: The matrix, its rows scaled to a root mean square of 1; guesses of what is
            missing.
        weight_OD: One over the variance of each number; zeros for what is missing.
        axis_RD: What spans its rows, orthonormal.
        size_U: The root mean square that each row had; zero of those that are left out, because
            nothing came of them.
        square: Chi^2 of what that leaves.
    """

    value_OD: Tensor
    weight_OD: Tensor
    axis_RD: Tensor
    size_U: Tensor
    square: float = math.inf

    @classmethod
    def of(cls, value_OD: Tensor, variance_OD: Tensor) -> "LowRank":
        """Takes a matrix with the variance of each number, infinite for what is missing."""
        came_OD = variance_OD.isfinite()
        used_O = (came_OD & (value_OD != 0)).any(1)
        came_OD, variance_OD = came_OD[used_O], variance_OD[used_O].double()
        value_OD = value_OD[used_O].double()
        square_OD = value_OD.square().masked_fill(~came_OD, 0)
        size_O1 = square_OD.sum(1, keepdim=True) / came_OD.sum(1, keepdim=True)
        weight_OD = came_OD / (variance_OD / size_O1 + _DRIFT**2)
        size_U = size_O1.new_zeros(len(used_O)).masked_scatter(used_O, size_O1.sqrt())
        value_OD = value_OD / size_O1.sqrt()
        return cls(value_OD=value_OD, weight_OD=weight_OD, axis_RD=value_OD[:0], size_U=size_U)

    @property
    def rank(self) -> int:
        """Dimensions of the span."""
        return len(self.axis_RD)

    @property
    def most(self) -> int:
        """Dimensions of a span that says anything, at most."""
        return min(self.value_OD.shape) - 1

    def fitted(self, rank: int, clock: Clock) -> "LowRank | None":
        """Returns the fit of the likeliest rank, at least so much; None if none fits in time."""
        fit, best, criterion = self, None, math.inf
        rows, width = self.value_OD.shape
        while max(rank, 1) <= self.most and not clock.up():
            fit = fit.wider(max(rank, 1) - fit.rank, _CLOSER)
            unknowns = fit.rank * (rows + width - fit.rank)
            free = max(int(self.weight_OD.count_nonzero()) - unknowns, 1)
            fits = fit.square < _MISFIT * free
            if fits and fit.square + 2 * unknowns > criterion:
                break
            if fits:
                best, criterion = fit, fit.square + 2 * unknowns
            rank = fit.rank + (1 if fits else 1 + fit.rank // _FASTER)
        return best

    def wider(self, count: int, change: float = _CLOSEST) -> "LowRank":
        """Returns the fit of a rank that is larger by so much."""
        rest_OD = self.value_OD
        if self.rank:
            rest_OD = rest_OD - self._parts(self.axis_RD) @ self.axis_RD
        added_RD = torch.linalg.svd(rest_OD, full_matrices=False)[2][:count]
        axis_RD, square = torch.cat([self.axis_RD, added_RD]), math.inf
        before_RD, pace = axis_RD, 0
        for _ in range(_ROUNDS):
            # Accelerated (Nesterov 1983), and begun again where that leads astray.
            ahead_RD = axis_RD + pace / (pace + 3) * (axis_RD - before_RD)
            part_OR = self._parts(ahead_RD)
            closer_RD = _solved(self.value_OD.T, self.weight_OD.T, part_OR.T).T
            left_OD = self.value_OD - part_OR @ closer_RD
            lower = float((self.weight_OD * left_OD.square()).sum())
            if lower > square and pace:
                pace = 0
                continue
            before_RD, axis_RD, gained, square = axis_RD, closer_RD, square - lower, lower
            pace += 1
            if gained < change * square + _GAIN:
                break
        axis_RD = torch.linalg.qr(axis_RD.T)[0].T
        return replace(self, axis_RD=axis_RD, square=square)

    def left(self, axis_RD: Tensor) -> tuple[float, float]:
        """Returns chi^2 of what axes leave of the matrix, for each degree of freedom and in all."""
        axis_RD = F.normalize(axis_RD.double())
        left_OD = self.value_OD - self._parts(axis_RD) @ axis_RD
        free = int(self.weight_OD.count_nonzero()) - len(left_OD) * len(axis_RD)
        square = float((self.weight_OD * left_OD.square()).sum())
        return square / max(free, 1), square

    def rows(self) -> WeightedSpan:
        """Returns the span of the rows as they came, each number with its own noise."""
        # As in a fit, what did not come is known as little as a number of the order of 1.
        variance_DO = 1 / (self.weight_OD.T + 1)
        return WeightedSpan(axis_RD=self.value_OD, covariance_DRR=torch.diag_embed(variance_DO))

    def span(self) -> WeightedSpan:
        """Returns the span of the rows."""
        equations_DRR = _equations(self.weight_OD.T, self._parts(self.axis_RD).T)
        return WeightedSpan(axis_RD=self.axis_RD, covariance_DRR=torch.linalg.inv(equations_DRR))

    def _parts(self, axis_RD: Tensor) -> Tensor:
        """Returns the parts [O, R] of the axes in each row."""
        return _solved(self.value_OD, self.weight_OD, axis_RD)


def _solved(value_OD: Tensor, weight_OD: Tensor, axis_RD: Tensor) -> Tensor:
    """Returns the parts [O, R] of axes in each row, by weighted least squares."""
    right_OR = (weight_OD * value_OD) @ axis_RD.T
    parts_OR: Tensor = torch.linalg.solve(_equations(weight_OD, axis_RD), right_OR)
    return parts_OR


def _equations(weight_OD: Tensor, axis_RD: Tensor) -> Tensor:
    """Returns the normal equations [O, R, R] of each row."""
    equations_ORR = (weight_OD[:, None] * axis_RD) @ axis_RD.T
    # Parts and axes are of the order of 1: as little as this is known of what did not come.
    equations_ORR.diagonal(dim1=1, dim2=2).add_(1)
    return equations_ORR
