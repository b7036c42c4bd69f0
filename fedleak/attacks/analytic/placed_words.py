"""Which word stands where in a batch, from the noisy rows of both embeddings: sparse Bayesian.

Let d_vq be the sum, over the texts of a batch, of the gradients at place q where word v stands. The
word embedding's row of v is W_v = sum over q of d_vq + noise, the position row of q is P_q = sum
over v of d_vq + noise. Few pairs (v, q) are in a batch. Finding them is a sparse regression: its
dictionary has a column h_vq for each pair, with ones at the rows of v and q, and its D measurements
share their support. With d_vq ~ N(0, t_vq I) the rows Y = [W; P] have the covariance
C = noise + sum of t_vq h h^T in each dimension, and the t that make them likeliest are zero for
most pairs (sparse Bayesian learning: Tipping 2001; of many measurements: Wipf and Rao 2007).

They are found pair by pair (Tipping and Faul 2003). For C without a pair, let s = h^T C^-1 h and
q = |h^T C^-1 Y|^2 / D. If q > s, the likelihood is greatest at t = (q - s) / s^2, and the pair then
adds D/2 (q/s - 1 - log(q/s)) nats. The best pair is entered, estimated again or taken out, until
none adds `_ENTERS`. Both follow from the posterior of the few dozen d in C, with covariance Sigma
and mean mu: C^-1 = I - H Sigma H^T, and for a pair in C itself s = 1/Sigma_ii - 1/t_i and
q = |mu_i|^2 / (Sigma_ii^2 D).

Nothing is granted, and the gradients of other words are no noise: the part of a row that they
explain is taken out of it. Limits: a word with a small gradient has a small d; two texts with the
same word at the same place give one pair.

Shapes: V words, T places, D hidden size, K pairs so far.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

_ENTERS = 12.0
"""Nats that a pair must add: more than the logarithm of how many pairs there are."""

_CHANGES = 0.5
"""Nats that another estimate, or taking a pair out, must add."""

_WORDS = 96
"""Words that are tried for each place: those that explain most of its row by themselves."""

_MOST = 512
"""Steps, at most."""

_ROUNDING = 1e-9
"""What is not lost to rounding of a double, of quantities near 1."""

_RANGE = 1e4
"""The largest row by the noise, by their root mean squares, at most: what float64 can resolve."""

Pair = tuple[int, int]


class PlacedWords(NamedTuple):
    """Pairs of a word and a place.

    Attributes:
        variance: Of the gradient of each pair that is in the batch, in units of the noise's.
        gain_VT: Nats that each pair in the batch adds to the likelihood of the rows, or that
            another pair would add.
    """

    variance: dict[Pair, float]
    gain_VT: Tensor

    def at(self, place: int) -> list[int]:
        """Returns the words at a place, in rising order."""
        return sorted(word for word, other in self.variance if other == place)


def placed_words(word_VD: Tensor, place_TD: Tensor, never: Collection[int]) -> PlacedWords:
    """Returns which word stands where.

    Args:
        word_VD: Rows of words, in units of the noise.
        place_TD: Rows of places, likewise.
        never: Words that stand nowhere.
    """
    largest = max(float(rows.square().mean(1).max()) for rows in (word_VD, place_TD))
    unit = max(1.0, math.sqrt(largest) / _RANGE)
    word_VD, place_TD = word_VD.double() / unit, place_TD.double() / unit
    alone_VT = _Rows(word_VD, place_TD, {}).gains(never)
    words = torch.unique(alone_VT.topk(min(_WORDS, len(word_VD)), dim=0).indices)
    few = [i for i, word in enumerate(words.tolist()) if word in never]
    variance: dict[Pair, float] = {}
    for _ in range(_MOST):
        step = _Rows(word_VD[words], place_TD, variance).best_step(few)
        if step is None:
            break
        pair, value = step
        variance.pop(pair, None)
        if value > 0:
            variance[pair] = value
    own = {(int(words[word]), place): value for (word, place), value in variance.items()}
    gain_VT = _Rows(word_VD, place_TD, own).gains(never)
    return PlacedWords({pair: value * unit**2 for pair, value in own.items()}, gain_VT)


class _Rows:
    """The rows under the pairs so far, and what each pair would change.

    Args:
        word_VD, place_TD: Rows, in units of the noise.
        variance: Of the pairs so far.
    """

    def __init__(self, word_VD: Tensor, place_TD: Tensor, variance: dict[Pair, float]) -> None:
        (words, self._width), places = word_VD.shape, len(place_TD)
        self._variance, pairs, device = variance, range(len(variance)), word_VD.device
        word_K = torch.tensor([word for word, _ in variance], dtype=torch.long, device=device)
        place_K = torch.tensor([place for _, place in variance], dtype=torch.long, device=device)
        precision_K = 1 / torch.tensor([*variance.values()], dtype=torch.float64).to(device)
        has_word_VK = word_VD.new_zeros(words, len(pairs))
        has_place_TK = place_TD.new_zeros(places, len(pairs))
        has_word_VK[word_K, pairs] = 1
        has_place_TK[place_K, pairs] = 1
        same_KK = has_word_VK.T @ has_word_VK + has_place_TK.T @ has_place_TK
        # The posterior covariance of the pairs' gradients in each dimension, and their mean.
        covariance_KK = torch.linalg.inv(same_KK + precision_K.diag())
        mean_KD = covariance_KK @ (word_VD[word_K] + place_TD[place_K])
        # C^-1 Y is the rows minus the means.
        left_VD = word_VD.index_add(0, word_K, mean_KD, alpha=-1)
        left_TD = place_TD.index_add(0, place_K, mean_KD, alpha=-1)
        word_VK, place_TK = has_word_VK @ covariance_KK, has_place_TK @ covariance_KK
        explained_VT = 2 * word_VK @ has_place_TK.T + (place_TK * has_place_TK).sum(1)
        explained_VT += (word_VK * has_word_VK).sum(1, keepdim=True)
        self._sparsity_VT = (2 - explained_VT).clamp_min(_ROUNDING)
        square_VT = left_VD.square().sum(1)[:, None] + left_TD.square().sum(1)
        self._quality_VT = (square_VT + 2 * left_VD @ left_TD.T) / self._width
        # For each pair so far, the covariance without the pair itself counts.
        variance_K = covariance_KK.diagonal()
        self._sparsity_VT[word_K, place_K] = (1 / variance_K - precision_K).clamp_min(_ROUNDING)
        quality_K = (mean_KD / variance_K[:, None]).square().sum(1) / self._width
        self._quality_VT[word_K, place_K] = quality_K

    def gains(self, never: Collection[int]) -> Tensor:
        """Returns the nats [V, T] that each pair adds to the likelihood at its best variance."""
        ratio_VT = (self._quality_VT / self._sparsity_VT).clamp_min(1)
        gain_VT: Tensor = self._width / 2 * (ratio_VT - 1 - ratio_VT.log())
        gain_VT[[*never]] = 0
        return gain_VT

    def best_step(self, never: Collection[int]) -> tuple[Pair, float] | None:
        """Returns the pair and its new variance that add most; None if none adds enough."""
        gain_VT = self.gains(never)
        more_VT = gain_VT - _ENTERS
        for (word, place), value in self._variance.items():
            s, q = float(self._sparsity_VT[word, place]), float(self._quality_VT[word, place])
            now = self._width / 2 * (q * value / (1 + value * s) - math.log1p(value * s))
            more_VT[word, place] = gain_VT[word, place] - now - _CHANGES
        best = int(more_VT.argmax())
        word, place = divmod(best, more_VT.shape[1])
        if more_VT[word, place] <= 0:
            return None
        s, q = float(self._sparsity_VT[word, place]), float(self._quality_VT[word, place])
        return (word, place), max((q - s) / s**2, 0.0)
