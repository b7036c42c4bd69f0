"""What the gradient at one word's query says of its whole text, however long the text is.

Token i of a text S has, in every head of the first attention, with e_ij = exp(q_i . k_j / sqrt(K)),

    a_ij = e_ij / sum over S of e_ij        o_i = sum_j a_ij v_j

and the gradient at its query follows from the gradient do_i at o_i: it is a covariance over S,

    dq_i = sum_j a_ij (s_ij - mean of s_i) k_j / sqrt(K)        s_ij = do_i . v_j.

A word at a place has known q, k and v. For a word that occurs once in the batch, dq_i and do_i are
known as well: its row of the word embedding is the gradient d_i of the embeddings' sum, least
squares splits each attention gradient by words and places (`token_bag`), and d_i less what comes
through query, key and value is what comes from behind the attention (`FirstBlock.behind`). An
encoder's LayerNorm hides two numbers of d_i, so that do_i is known except for them. So each such
word gives D equations, in which only S and two numbers are unknown. `keyspan` lets the a_ij
(s_ij - mean) be any numbers and fails if a text is longer than a head is wide; here softmax fixes
them, and no length is too long. A right text leaves rounding, one wrong word percents of dq_i.

**Search.** Give each candidate j (a word at a place) a weight m_j, so that a_ij is proportional to
m_j e_ij: the text is an m of zeros, with a one at each place. The covariance C has the derivative

    dC/dm_j = a_ij / m_j ((s_ij - mean s_i) (k_j - mean k) / sqrt(K) - C)

so that a Gauss-Newton step is a least-squares problem with m >= 0 and a sum of one at each place.
D equations and m >= 0 often determine the text, or most of it (`relaxed`). The rest is exchanged
place by place: all words of the text that occur once add their equations, a change at one place
changes one term of each sum, and the residual is exact (`mended`).

Shapes: N words that occur once, J candidates, M members of a text, T places, H heads, K head size,
D hidden size, F facts (1 and the hidden numbers), X: D of all heads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

SOLVED = 1e-3
"""Residual below which a word's equations hold: a right text leaves 1e-6, and a wrong one 1e-2."""

_STEPS = 8
"""Gauss-Newton steps from even weights: a text that is read is there after five."""

_TOGETHER = 30.0
"""How much the sum of all places' weights counts, beside a residual that is as large as dq."""

_NEAR = 256
"""Exchanges that are tried exactly, of those that seem best by the derivative."""

_LEAST = 1e-3
"""What an exchange has to gain, in nats of the residuals' squares."""

_NOTHING = 1e-12
"""Weights that add up to less than this are zero."""


@dataclass(frozen=True)
class Candidates:
    """Words at places that may be in the batch.

    Attributes:
        ids_J: Words.
        place_J: Places.
        prior_J: How likely each is, between 0 and 1, before anything is solved.
        key_JHK, value_JHK: Their keys and values.
    """

    ids_J: Tensor
    place_J: Tensor
    prior_J: Tensor
    key_JHK: Tensor
    value_JHK: Tensor


@dataclass(frozen=True)
class Equations:
    """The equations of words that occur once, for their texts.

    Attributes:
        ids_N: These words.
        query_NHK: Their queries, over sqrt(K).
        dq_NHK: The gradients at their queries, times sqrt(K).
        do_NFHK: The gradients at their attention's output, then what a LayerNorm may add to them.
    """

    ids_N: Tensor
    query_NHK: Tensor
    dq_NHK: Tensor
    do_NFHK: Tensor

    def of(self, number: int, candidates: Candidates) -> "Equation":
        """Returns the equations of one word, among candidates."""
        score_JH = torch.einsum("hk,jhk->jh", self.query_NHK[number], candidates.key_JHK)
        return Equation(
            e_JH=(score_JH - score_JH.amax(0)).exp(),
            s_JFH=torch.einsum("fhk,jhk->jfh", self.do_NFHK[number], candidates.value_JHK),
            key_JHK=candidates.key_JHK,
            dq_HK=self.dq_NHK[number],
        )


class Covariance(NamedTuple):
    """Of keys and s under the attention of one word.

    Attributes:
        sum_H: The denominators of the softmax.
        key_HK, s_H: Means.
        value_HK: The covariance, with the hidden numbers that fit best.
        hidden_XF: What each hidden number adds to it.
        facts_F: 1 and the hidden numbers.
        residual: How far the covariance is from dq, as a share of dq.
    """

    sum_H: Tensor
    key_HK: Tensor
    s_H: Tensor
    value_HK: Tensor
    hidden_XF: Tensor
    facts_F: Tensor
    residual: float


@dataclass(frozen=True)
class Equation:
    """dq = the covariance of keys and s under attention, D numbers of one word.

    Attributes:
        e_JH: Numerators of the softmax, up to a factor for each head.
        s_JFH: do . v.
        key_JHK: Keys.
        dq_HK: What the covariance has to be.
    """

    e_JH: Tensor
    s_JFH: Tensor
    key_JHK: Tensor
    dq_HK: Tensor

    def covariance(self, index_M: Tensor, weight_M: Tensor | None = None) -> Covariance:
        """Returns the covariance over some candidates, of weight 1 by default."""
        e_MH, s_MFH, key_MHK = self.e_JH[index_M], self.s_JFH[index_M], self.key_JHK[index_M]
        if weight_M is not None:
            e_MH = e_MH * weight_M[:, None]
        sum_H = e_MH.sum(0).clamp_min(_NOTHING)
        a_MH = e_MH / sum_H
        key_HK = torch.einsum("mh,mhk->hk", a_MH, key_MHK)
        s_FH = torch.einsum("mh,mfh->fh", a_MH, s_MFH)
        value_FHK = torch.einsum("mfh,mhk->fhk", a_MH[:, None] * s_MFH, key_MHK)
        value_FHK = value_FHK - s_FH[..., None] * key_HK
        hidden_XF = value_FHK[1:].flatten(1).T
        target_X = (self.dq_HK - value_FHK[0]).flatten()
        hidden_F = torch.linalg.lstsq(hidden_XF, target_X[:, None]).solution[:, 0]
        facts_F = torch.cat([hidden_F.new_ones(1), hidden_F])
        left = (target_X - hidden_XF @ hidden_F).norm() / self.dq_HK.norm()
        return Covariance(
            sum_H=sum_H,
            key_HK=key_HK,
            s_H=facts_F @ s_FH,
            value_HK=torch.einsum("f,fhk->hk", facts_F, value_FHK),
            hidden_XF=hidden_XF,
            facts_F=facts_F,
            residual=float(left),
        )

    def derivative(self, now: Covariance) -> tuple[Tensor, Tensor]:
        """Returns the candidates' factors [J, H] in the derivative, and their s less its mean."""
        s_JH = torch.einsum("f,jfh->jh", now.facts_F, self.s_JFH) - now.s_H
        return self.e_JH / now.sum_H, s_JH

    def exchanged(self, now: Covariance, out_L: Tensor, in_L: Tensor) -> Tensor:
        """Returns the squared residuals [L] after one member is replaced by a candidate.

        Args:
            now: The covariance of the members.
            out_L: Members.
            in_L: Candidates in their place.
        """
        e_JH, s_JH = self.derivative(now)

        def terms(index_L: Tensor) -> tuple[Tensor, ...]:
            e_LH, s_LH = e_JH[index_L], s_JH[index_L]
            key_LHK = e_LH[..., None] * (self.key_JHK[index_L] - now.key_HK)
            return e_LH, e_LH * s_LH, key_LHK, s_LH[..., None] * key_LHK

        pairs = zip(terms(in_L), terms(out_L), strict=True)
        e_LH, s_LH, key_LHK, both_LHK = (new - old for new, old in pairs)
        sum_LH = 1 + e_LH
        both_LHK = (now.value_HK + both_LHK) / sum_LH[..., None]
        value_LHK = both_LHK - (s_LH / sum_LH.square())[..., None] * key_LHK
        left_L = (self.dq_HK - value_LHK).square().sum((1, 2))
        return left_L / self.dq_HK.square().sum()


def relaxed(equation: Equation, candidates: Candidates, own: int) -> Tensor:
    """Returns the weight [J] of each candidate in the text of one word.

    Args:
        equation: Of the word.
        candidates: Words at places.
        own: The index of the word itself: nothing else stands at its place.
    """
    from scipy.optimize import nnls  # here, because it takes a while

    visible_J = equation.e_JH.any(1) & (candidates.place_J != candidates.place_J[own])
    visible_J[own] = True
    index_M = visible_J.nonzero()[:, 0]
    place_M, weight_M = candidates.place_J[index_M], candidates.prior_J[index_M]
    places = int(place_M.max()) + 1
    at_TM = F.one_hot(place_M, places).T.double()
    weight_M = weight_M / (at_TM @ weight_M)[place_M]
    share = _TOGETHER / places**0.5
    # A text may have an end before some places, so their weights may be missing.
    ones_TY = share * torch.cat([at_TM, torch.eye(places, dtype=torch.float64)], 1)
    for _ in range(_STEPS):
        now = equation.covariance(index_M, weight_M)
        if now.residual < SOLVED:
            break
        factor_MH, s_MH = (value[index_M] for value in equation.derivative(now))
        column_MHK = s_MH[..., None] * (equation.key_JHK[index_M] - now.key_HK) - now.value_HK
        system_XM = (factor_MH[..., None] * column_MHK).flatten(1).T
        target_X = (equation.dq_HK - now.value_HK).flatten()
        # The hidden numbers are free in each step.
        hidden_XF = torch.linalg.qr(now.hidden_XF)[0]
        system_XM = system_XM - hidden_XF @ (hidden_XF.T @ system_XM)
        target_X = target_X - hidden_XF @ (hidden_XF.T @ target_X)
        size = equation.dq_HK.norm()
        system_YZ = torch.cat([F.pad(system_XM / size, (0, places)), ones_TY])
        target_Y = torch.cat([target_X / size, target_X.new_full((places,), share)])
        try:
            solution_Z, _ = nnls(system_YZ.numpy(), target_Y.numpy(), maxiter=10 * len(target_Y))
        except RuntimeError:  # it goes in circles: the weights so far are what there is
            break
        weight_M = torch.from_numpy(solution_Z)[: len(index_M)]
    return torch.zeros_like(candidates.prior_J).index_put_((index_M,), weight_M)


def best_of(weight_J: Tensor, place_J: Tensor) -> Tensor:
    """Returns the candidate of the largest weight at each place [T]; each place has one."""
    order_J = weight_J.argsort(stable=True)
    best_T = order_J.new_zeros(int(place_J.max()) + 1)
    # The last candidate at a place, with the largest weight, stays.
    for j, place in zip(order_J.tolist(), place_J[order_J].tolist(), strict=True):
        best_T[place] = j
    return best_T


def mended(
    equations: Sequence[Equation], candidates: Candidates, members_T: Tensor, open_J: Tensor
) -> Tensor:
    """Returns the members of a text after exchanges at single places, until none gains.

    Exchanges lower the sum of the logarithms of squared residuals, so that a word of another text,
    or of two texts, does not count much.

    Args:
        equations: Of the text's words that occur once.
        candidates: Words at places.
        members_T: One for each place from 0 on.
        open_J: Which candidates may take part in an exchange.
    """
    place_J = candidates.place_J.clamp_max(len(members_T) - 1)
    open_J = open_J & (candidates.place_J < len(members_T))
    for _ in range(2 * len(members_T)):
        covariances = [equation.covariance(members_T) for equation in equations]
        hope_J = torch.zeros_like(candidates.prior_J)
        for equation, now in zip(equations, covariances, strict=True):
            rest_HK = equation.dq_HK - now.value_HK
            factor_JH, s_JH = equation.derivative(now)
            key_JH = torch.einsum("jhk,hk->jh", equation.key_JHK, rest_HK)
            key_JH = key_JH - (now.key_HK * rest_HK).sum(1)
            slope_JH = factor_JH * (s_JH * key_JH - (now.value_HK * rest_HK).sum(1))
            slope_J = slope_JH.sum(1)
            gain_J = slope_J - slope_J[members_T][place_J]
            hope_J += gain_J / (rest_HK.norm() + SOLVED * equation.dq_HK.norm()) ** 2
        hope_J[~open_J] = -math.inf
        hope_J[members_T] = -math.inf
        in_L = hope_J.topk(min(_NEAR, len(hope_J))).indices
        in_L = in_L[hope_J[in_L].isfinite()]
        if not len(in_L):
            break
        loss_L, before = torch.zeros(len(in_L), dtype=torch.float64), 0.0
        for equation, now in zip(equations, covariances, strict=True):
            square_L = equation.exchanged(now, members_T[place_J[in_L]], in_L)
            loss_L += (square_L + SOLVED**2).log()
            before += math.log(now.residual**2 + SOLVED**2)
        best = int(loss_L.argmin())
        if float(loss_L[best]) > before - _LEAST:
            break
        members_T = members_T.clone()
        members_T[place_J[in_L[best]]] = in_L[best]
    return members_T


def loss(equations: Sequence[Equation], members_T: Tensor) -> float:
    """Returns the value that exchanges lower."""
    residuals = (equation.covariance(members_T).residual for equation in equations)
    return sum(math.log(residual**2 + SOLVED**2) for residual in residuals)
