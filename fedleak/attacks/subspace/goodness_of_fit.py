"""Whether texts leave nothing of a blurred gradient but what blurred it.

A proof compares numbers (`certificate`). Noise changes all of them, rounding and signs leave only
an interval of each. What a right text leaves is then known in another way.

- **Noise** is independent from number to number, whatever its size and shape. What a wrong text
  leaves is not: a gradient of a weight is a sum of few products d x^T. Let R [O, I] be what a text
  leaves of it, and r_ij r_ik r_lj r_lk the product of the corners of a rectangle. For independent
  numbers of mean zero its mean is zero, for d x^T it is d_i^2 d_l^2 x_j^2 x_k^2. The sum over all
  rectangles, in standard deviations, is the excess, a mean over weights. Tests of sphericity
  (John 1971; Ledoit and Wolf 2002) ask the same, and need Gaussian numbers of one size. Nothing is
  granted: no scale of the noise, and none of the update.
- **Rounding and signs** give bounds of each number (`coarseness`). A right text's gradient is
  inside all of them. The excess is how many numbers are outside, beyond their own rounding.

A text fits if its excess is below 3, and if that of each text is above twice as much of which one
word is left out, or replaced by the word nearest to it: else the blur may hide other words, too.
Without a word the layers alone must tell, because a text's rows of the word embedding say nothing
of words that it never had. That proves nothing: texts that are further away were not tried.

Shapes: O outputs and I inputs of a weight; X: any axes.
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import Tensor

from fedleak.attacks.certificate import (
    PRECISION,
    as_gradient,
    is_linear,
    mean_gradient,
    nearest_words,
)
from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.coarseness import EXACT, Coarseness, coarseness
from fedleak.attacks.subspace.pooled_span import SIGMAS
from fedleak.models import LanguageModel
from fedleak.training.observation import Observation

_FAR = 2 * SIGMAS + 4.0
"""Excess above which no other tensor matters: it would have to be below chance by 4 deviations."""


def leaves_only_blur(
    model: LanguageModel, seen: Observation, clock: Clock, texts: Sequence[Ids]
) -> bool:
    """Whether a batch of a decoder leaves nothing of its gradient but blur, and no other would.

    False if the update is no single gradient, or if time is up before that is known.

    Args:
        model: At the broadcast weights.
        seen: The update.
        clock: Looked at before each gradient.
        texts: As the client trained on them, with their last targets.
    """
    words = sorted({token for ids in texts for token in ids} - model.special_ids())
    word, layers = model.family.word_embedding, model.family.layers
    sent = {name: value for name, value in as_gradient(seen).items() if value.dim() == 2}
    matrices = [name for name in sent if name.startswith(layers)]
    if not is_linear(seen) or len(texts) != seen.update.num_examples or not words or not matrices:
        return False
    coarse = coarseness(seen, matrices)
    observed = {name: value for name, value in sent.items() if name in (word, *matrices)}
    nearest = dict(zip(words, nearest_words(model, words)[0].tolist(), strict=True))
    # Words that a model did not meet in training differ in their own rows alone.
    rows = sorted({*nearest, *nearest.values()})

    def excess(batch: Sequence[Ids], names: Sequence[str] = (*observed,)) -> float:
        own = mean_gradient(model, [(ids, 0) for ids in batch], names, clock)
        if own is None:
            return math.nan
        pairs = {name: (observed[name], part) for name, part in zip(names, own, strict=True)}
        if coarse is not EXACT:
            return float(sum(_outside(*pair, coarse) for pair in pairs.values()))
        if word in pairs:
            sent_VD, own_VD = pairs[word]
            pairs[word] = sent_VD[rows], own_VD[rows]
        return _dependence([*pairs.values()])

    return (
        excess(texts) < SIGMAS
        and all(excess(batch, matrices) > 2 * SIGMAS for batch in _shorter(texts, nearest))
        and all(excess(batch) > 2 * SIGMAS for batch in _neighbours(texts, nearest))
    )


def _dependence(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Returns how much less independent than noise is what gradients leave of others.

    It looks no further where the other pairs cannot make that much less.
    """
    along = sum(float((sent_OI * own_OI).sum()) for sent_OI, own_OI in pairs)
    square = sum(float(own_OI.square().sum()) for _, own_OI in pairs)
    scale = max(along, 0.0) / square if square else 0.0
    total = 0.0
    for sent_OI, own_OI in pairs:
        total += rectangles(sent_OI - scale * own_OI)
        if total > _FAR * math.sqrt(len(pairs)):
            break
    return total / math.sqrt(len(pairs))


def rectangles(left_OI: Tensor) -> float:
    """Returns the sum over all rectangles of a matrix, in standard deviations.

    For independent numbers of mean zero it is about normal, with any variances. It is 0 if there
    are no rectangles without a zero.
    """
    if not left_OI.any():
        return 0.0
    unit_OI = left_OI / left_OI.square().mean().sqrt()
    # Rectangles are the same in the transpose, and products of short rows are cheaper.
    unit_OI = unit_OI if unit_OI.shape[0] >= unit_OI.shape[1] else unit_OI.T
    variance = 4 * _sum_of_rectangles(unit_OI.square())
    return 0.0 if variance <= 0 else _sum_of_rectangles(unit_OI) / math.sqrt(variance)


def _sum_of_rectangles(x_OI: Tensor) -> float:
    """Returns the sum of x_ij x_ik x_lj x_lk over all i != l and j != k."""
    squares_OI = x_OI.square()
    products_II = (x_OI.T @ x_OI).square() - squares_OI.T @ squares_OI
    return float(products_II.double().sum() - products_II.diagonal().double().sum())


def _outside(observed_X: Tensor, own_X: Tensor, coarse: Coarseness) -> int:
    """Returns how many numbers of a gradient are outside their bounds, beyond rounding."""
    low_X, high_X = coarse.bounds(observed_X)
    room = PRECISION * float(own_X.square().mean().sqrt())
    return int(((own_X < low_X - room) | (own_X > high_X + room)).sum())


def _shorter(texts: Sequence[Ids], words: Collection[int]) -> Iterator[list[Ids]]:
    """Yields batches of which one word is left out."""
    for number, ids in enumerate(texts):
        for place, word in enumerate(ids):
            if word in words and len(ids) > 2:  # Else it has no target.
                yield [*texts[:number], ids[:place] + ids[place + 1 :], *texts[number + 1 :]]


def _neighbours(texts: Sequence[Ids], nearest: Mapping[int, int]) -> Iterator[list[Ids]]:
    """Yields batches of which one word is replaced by the word nearest to it."""
    for number, ids in enumerate(texts):
        for place, word in enumerate(ids):
            if word in nearest:
                other = (*ids[:place], nearest[word], *ids[place + 1 :])
                yield [*texts[:number], other, *texts[number + 1 :]]
