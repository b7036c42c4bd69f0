"""Which word stands where in a batch, from the noisy rows of both embeddings: sparse Bayesian.

Let d_vq be the sum, over the texts of a batch, of the gradients at place q where word v stands. The
word embedding's row of v is W_v = sum over q of d_vq + noise, the position row of q is P_q = sum
over v of d_vq + noise. Few pairs (v, q) are in a batch, and which ones is a sparse regression whose
dictionary has a column h_vq for each pair, with ones at the rows of v and q, and whose D
measurements share their support. With d_vq ~ N(0, t_vq I) the rows Y = [W; P] have the covariance
C = noise + sum of t_vq h h^T in each dimension, and the t that make them likeliest are zero for
most pairs (sparse Bayesian learning: Tipping 2001; of many measurements: Wipf and Rao 2007).

They are found pair by pair (Tipping and Faul 2003). Of C without a pair, with s = h^T C^-1 h and
q = |h^T C^-1 Y|^2 / D, the likelihood is greatest at t = (q - s) / s^2, where q > s, and the pair
then adds D/2 (q/s - 1 - log(q/s)) nats. The best pair is entered, estimated again or taken out,
until none adds `_ENTERS`. C has a row for each place and each word that has a pair, a few dozen.

Nothing is granted, and the others' gradients are no noise: what other words explain of a row is
taken out of it. Limits: a word with a small gradient has a small d; of two texts with the same word
at the same place it sees one pair.

Shapes: V words, T places, D hidden size, M words that have a pair, R = M + T rows.
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
"""Words that are looked at for each place: those that explain most of its row by themselves."""

_MOST = 512
"""Steps, at most."""

Pair = tuple[int, int]


class PlacedWords(NamedTuple):
    """Pairs of a word and a place.

    Attributes:
        variance: Of the gradient of each pair that is in the batch, in units of the noise's.
        gain_VT: Nats that each other pair would add to the likelihood of the rows, and those that
            the pairs in the batch do.
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
    # Double: of a strong pair 1 - t s is small.
    word_VD, place_TD = word_VD.double(), place_TD.double()
    alone_VT = _Rows(word_VD, place_TD, {}).gains(never)
    words = torch.unique(alone_VT.topk(min(_WORDS, len(word_VD)), dim=0).indices)
    index = {int(word): i for i, word in enumerate(words)}
    few = [index[word] for word in never if word in index]
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
    return PlacedWords(own, _Rows(word_VD, place_TD, own).gains(never))


class _Rows:
    """The rows under the pairs so far, and what each pair would change.

    Args:
        word_VD, place_TD: Rows, in units of the noise.
        variance: Of the pairs so far.
    """

    def __init__(self, word_VD: Tensor, place_TD: Tensor, variance: dict[Pair, float]) -> None:
        self._variance, (places, self._width) = variance, place_TD.shape
        words = sorted({word for word, _ in variance})
        row, used = {word: i for i, word in enumerate(words)}, len(words)
        covariance_RR = torch.eye(used + places, dtype=torch.float64)
        for (word, place), value in variance.items():
            both = torch.tensor([row[word], used + place])
            covariance_RR[both[:, None], both] += value
        inverse_RR = torch.linalg.inv(covariance_RR)
        inverse_RR = inverse_RR.to(word_VD)
        white_RD = inverse_RR @ torch.cat([word_VD[words], place_TD])
        at_place_T = inverse_RR.diagonal()[used:]
        word_white_VD = word_VD
        sparsity_VT = (1 + at_place_T).repeat(len(word_VD), 1)
        if words:
            word_white_VD = word_VD.clone()
            word_white_VD[words] = white_RD[:used]
            sparsity_VT[words] = at_place_T + 2 * inverse_RR[:used, used:]
            sparsity_VT[words] += inverse_RR.diagonal()[:used, None]
        square_VT = word_white_VD.square().sum(1)[:, None] + white_RD[used:].square().sum(1)
        quality_VT = (square_VT + 2 * word_white_VD @ white_RD[used:].T) / self._width
        for (word, place), value in variance.items():
            # Of the covariance without the pair itself.
            left = 1 - value * sparsity_VT[word, place]
            sparsity_VT[word, place] /= left
            quality_VT[word, place] /= left**2
        self._sparsity_VT, self._quality_VT = sparsity_VT, quality_VT

    def gains(self, never: Collection[int]) -> Tensor:
        """Returns the nats [V, T] that each pair adds to the likelihood at its best variance."""
        ratio_VT = (self._quality_VT / self._sparsity_VT).clamp_min(1)
        gain_VT: Tensor = self._width / 2 * (ratio_VT - 1 - ratio_VT.log())
        gain_VT[[*never]] = 0
        return gain_VT

    def best_step(self, never: Collection[int]) -> tuple[Pair, float] | None:
        """Returns the pair whose new variance adds most, and that; None if none adds enough."""
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
