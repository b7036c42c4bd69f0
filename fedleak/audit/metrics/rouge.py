"""ROUGE F-scores from 0 to 100, as the rouge-score package has them without stemming.

Words are the package's: it lower-cases and keeps ASCII letters and digits only, so punctuation does
not count, and text in other scripts scores 0. The counts are made here, once for each text, and the
longest common subsequence takes an operation a word: a run has a hundred pairs of texts for each
score that it shows.
"""

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

PAIRS = 2**17
"""How many scores are remembered: controls meet the same held-out texts again and again."""


class Rouge(NamedTuple):
    """F-scores, 0 to 100."""

    rouge1: float
    rouge2: float
    rougeL: float


class _Words(NamedTuple):
    """The words of a text, how often each and each pair occurs, and the places of each as bits."""

    words: list[str]
    single: Counter[Any]
    pairs: Counter[Any]
    places: dict[str, int]


@lru_cache(maxsize=PAIRS)
def _words(text: str) -> _Words:
    from rouge_score.tokenize import tokenize

    words: list[str] = tokenize(text, None)
    places: dict[str, int] = {}
    for place, word in enumerate(words):
        places[word] = places.get(word, 0) | 1 << place
    return _Words(words, Counter(words), Counter(pairwise(words)), places)


@lru_cache(maxsize=PAIRS)
def rouge(answer: str, truth: str) -> Rouge:
    """Returns the ROUGE of an answer.

    >>> rouge("the cat sat", "the cat sat").rougeL
    100.0
    """
    own, true = _words(answer), _words(truth)
    return Rouge(
        _f_score(_common(own.single, true.single), len(own.words), len(true.words)),
        _f_score(_common(own.pairs, true.pairs), len(own.words) - 1, len(true.words) - 1),
        _f_score(_longest_common(own, true), len(own.words), len(true.words)),
    )


def _common(own: Counter[Any], true: Counter[Any]) -> int:
    """Returns how many of the words or pairs of one text are in the other."""
    return sum(min(own[word], true[word]) for word in own.keys() & true.keys())


def _longest_common(own: _Words, true: _Words) -> int:
    """Returns the length of the longest common subsequence (Hyyrö 2004, with bits for places)."""
    every = (1 << len(true.words)) - 1
    open_ = every
    for word in own.words:
        if word in true.places:  # without a match nothing changes
            matched = open_ & true.places[word]
            open_ = ((open_ + matched) | (open_ - matched)) & every
    return len(true.words) - open_.bit_count()


def _f_score(common: int, own: int, true: int) -> float:
    """Returns the harmonic mean of precision and recall, times 100."""
    if not common:
        return 0.0
    precision, recall = common / own, common / true
    return 100 * (2 * precision * recall / (precision + recall))


def mean(scores: list[Rouge]) -> Rouge:
    """Returns the mean of each score."""
    return Rouge(*(sum(column) / len(scores) for column in zip(*scores, strict=True)))
