"""Whole texts, each compared with its tag.

A tag is the mean of K projections over a text: whoever has a text can compute it, and a text with a
word changed has another one. So the tag is a checksum. The comparison is as exact as the noise lets
the tag be known, and a fit counts the more the less probable it is. For a text of n words, let M be
the second moment [K, K] of what one changed word does to the tag, over all words at all places.
Were that Gaussian, the tags of texts with j changed words would have at most the density
`(2 pi)^(-K/2) det(j M)^(-1/2)` near the right one, and `C(n, j) V^j` such texts would put at most
that times the volume of the ball of radius r into the ball. `chance` is the sum of this for up to
three words: how many wrong texts, near the right one, are expected to fit. A text is certified if
that is below `CERTAIN`. Farther texts are not counted. With all words changed there are always some
that fit, but these were not read out of bins.

A fit also gives words that no bin showed: for two missing words, the tag leaves one pair.

Shapes: V words, T places, S texts, K numbers of a tag, G words at a gap.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.imprinted.tags import EXACT, SIGMAS, Tags

CERTAIN = 1e-6
"""Wrong texts that may be expected to fit if a text is certified."""

_CHANGES = 3
"""Words that a wrong text differs in, at most."""

_GAPS = 2
"""Words that are found by the tag alone, at most."""


class Text(NamedTuple):
    """A text as far as it is read.

    Attributes:
        words: Of each place, as indices; None: not read.
        misfit: How far its tag is from the one that was read, in units of how far a right text's
            may be; None: words are missing.
        chance: How many wrong texts would be expected to fit as well; 1 or more: it says nothing.
    """

    words: tuple[int | None, ...]
    misfit: float | None
    chance: float

    @property
    def certified(self) -> bool:
        """Whether the tag proves it."""
        return self.misfit is not None and self.misfit <= 1 and self.chance <= CERTAIN

    def doubt(self) -> float:
        """Returns a number that is lower the surer the text is: below 1 if it is certified."""
        if self.misfit is None:
            return 2 + sum(word is None for word in self.words) / len(self.words)
        return self.misfit / 2 if self.certified else 1 + self.misfit / 2


@dataclass(frozen=True)
class Checksum:
    """How the words of a text make its tag.

    Attributes:
        part_VTK: What each word at each place adds, before the sum is divided by the length.
        spread: How far tags are apart.
    """

    part_VTK: Tensor
    spread: float

    def tag(self, words: Sequence[int]) -> Tensor:
        """Returns the tag [K] of a text of words, as indices."""
        return self.part_VTK[list(words), torch.arange(len(words))].mean(0)

    def radius(self, error: float) -> float:
        """Returns how far the tag of a right text may be from one of this error."""
        size = self.part_VTK.shape[2]
        return math.sqrt(size) * (SIGMAS * error + EXACT * self.spread)

    def chance(self, words: Sequence[int], radius: float) -> float:
        """Returns how many texts with few words changed are expected within a radius."""
        vocabulary, _, size = self.part_VTK.shape
        length = len(words)
        own_TK = self.part_VTK[list(words), torch.arange(length)]
        change_XK = ((self.part_VTK[:, :length] - own_TK) / length).reshape(-1, size).double()
        moment_KK = change_XK.T @ change_XK / len(change_XK)
        total = 0.0
        for changes in range(1, min(_CHANGES, length) + 1):
            log_texts = math.log(math.comb(length, changes)) + changes * math.log(vocabulary)
            total += expected(log_texts, moment_KK, changes, radius)
        return total


def expected(log_texts: float, moment_KK: Tensor, changes: int, radius: float) -> float:
    """Returns how many of so many wrong texts are expected in a ball.

    Args:
        log_texts: The logarithm of their number.
        moment_KK: The second moment of what one changed word does.
        changes: Words that are changed.
        radius: Of the ball.
    """
    size = len(moment_KK)
    ball = size / 2 * math.log(math.pi) - math.lgamma(size / 2 + 1) + size * math.log(radius)
    density = -size / 2 * math.log(2 * math.pi) - 0.5 * float(torch.logdet(moment_KK))
    if not math.isfinite(density):
        return math.inf  # the tags of such words have fewer numbers than they seem to
    return math.exp(min(log_texts + ball + density - size / 2 * math.log(changes), 700.0))


@torch.no_grad()
def read_texts(
    word_ST: Tensor, checksum: Checksum, tags: Tags, opening: int | None, closing: int | None
) -> list[Text]:
    """Returns the texts that slots and tags hold, the certified ones with words that bins lack.

    Args:
        word_ST: The word, as an index, at a place of a text; -1: not read.
        checksum: What their tags should be.
        tags: What their tags are.
        opening, closing: The words that begin and end every text, as indices; None: any may.
    """
    texts = []
    for words_T, tag_K, error in zip(
        word_ST.tolist(), tags.tag_SK, tags.error_S.tolist(), strict=True
    ):
        if {-1, opening, closing}.issuperset(words_T):
            continue  # nothing but marks: no text, or none that says anything
        radius = checksum.radius(error)
        readings = list(_lengths(words_T, closing))
        fits = (_fitting(words, tag_K, checksum, radius) for words in readings)
        texts.append(next(filter(None, fits), Text(readings[0], None, math.inf)))
    return texts


def _lengths(words_T: list[int], closing: int | None) -> Iterator[tuple[int | None, ...]]:
    """Yields what a text may be: to its end if that was read, else a little longer.

    After the text to its end, yields it with each word as a gap: its bin may have been mistaken.
    """
    if closing in words_T:
        words_T = words_T[: words_T.index(closing) + 1]
    end = max(place for place, word in enumerate(words_T) if word >= 0) + 1
    words = tuple(None if word < 0 else word for word in words_T[:end])
    if closing is None or words[-1] == closing:
        yield words
        for place in range(end - 1):
            yield (*words[:place], None, *words[place + 1 :])
        return
    for more in range(_GAPS):
        if end + more < len(words_T):
            yield (*words, *[None] * more, closing)


def _fitting(
    words: tuple[int | None, ...], tag_K: Tensor, checksum: Checksum, radius: float
) -> Text | None:
    """Returns the text with its gaps filled, if there is exactly one that fits; else None."""
    from scipy.spatial import KDTree  # here, because it takes a while

    gaps = [place for place, word in enumerate(words) if word is None]
    if len(gaps) > _GAPS:
        return None
    length = len(words)
    known = [(word, place) for place, word in enumerate(words) if word is not None]
    rest_K = length * tag_K
    for word, place in known:
        rest_K = rest_K - checksum.part_VTK[word, place]
    reach = length * radius
    filled = [dict[int, int]()]
    if len(gaps) == 1:
        apart_V = (checksum.part_VTK[:, gaps[0]] - rest_K).norm(dim=1)
        filled = [{gaps[0]: int(word)} for word in (apart_V <= reach).nonzero()[:, 0]]
    elif gaps:
        first, second = gaps
        near = KDTree(checksum.part_VTK[:, second].numpy()).query_ball_point(
            (rest_K - checksum.part_VTK[:, first]).numpy(), reach
        )
        filled = [{first: v, second: w} for v, others in enumerate(near) for w in others]
    if len(filled) != 1:
        return None
    ids = [filled[0][place] if word is None else word for place, word in enumerate(words)]
    misfit = float((checksum.tag(ids) - tag_K).norm()) / radius
    if misfit > 1:
        return None
    return Text(tuple(ids), misfit, checksum.chance(ids, radius))
