"""ROUGE F-scores from 0 to 100, as the rouge-score package computes them without stemming.

The package splits texts into words: it lower-cases and keeps ASCII letters and digits only, so
punctuation does not count, and text in other scripts scores 0. This module counts words once for
each text, and finds the longest common subsequence with one operation a word: a run has a hundred
pairs of texts for each score that it shows.
"""

from collections import Counter
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

PAIRS = 2**17
"""How many scores are cached: controls score the same held-out texts many times."""


class Rouge(NamedTuple):
    """F-scores, 0 to 100."""

    rouge1: float
    rouge2: float
    rougeL: float


class _Words(NamedTuple):
    """The words of a text, counts of words and of pairs, and the places of each word as bits."""

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
