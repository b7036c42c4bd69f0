"""ROUGE F-scores from 0 to 100, bit for bit those of the rouge-score package without stemming.

That package lower-cases and keeps ASCII letters and digits only: punctuation does not count, and
text in other scripts scores 0. Its tokens and its F-score are used here. What it counts anew for
every pair, and its table of common subsequences, which takes a time of length squared, are not:
batches are compared all with all.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

from rouge_score import scoring, tokenizers

TEXTS, PAIRS = 2**14, 2**17
"""How many texts, and scores of pairs, are remembered: all those of the batches of a run."""


class Rouge(NamedTuple):
    """F-scores, 0 to 100."""

    rouge1: float
    rouge2: float
    rougeL: float


@lru_cache(maxsize=PAIRS)
def rouge(answer: str, truth: str) -> Rouge:
    """Returns the ROUGE of an answer.

    >>> rouge("the cat sat", "the cat sat").rougeL
    100.0
    """
    a, b = _words(answer), _words(truth)
    return Rouge(
        _score((a.words & b.words).total(), a.words.total(), b.words.total()),
        _score((a.pairs & b.pairs).total(), a.pairs.total(), b.pairs.total()),
        _score(_longest(a, b), len(a.tokens), len(b.tokens)),
    )


def mean(scores: list[Rouge]) -> Rouge:
    """Returns the mean of each score."""
    return Rouge(*(sum(column) / len(scores) for column in zip(*scores, strict=True)))


@dataclass(frozen=True)
class _Words:
    """A text's tokens.

    Attributes:
        tokens: In their order.
        words, pairs: How often each token occurs, and each two in a row.
        places: For each token a bit per place where it stands.
    """

    tokens: list[str]
    words: Counter[str]
    pairs: Counter[tuple[str, str]]
    places: dict[str, int]


@lru_cache(maxsize=TEXTS)
def _words(text: str) -> _Words:
    tokens = _tokenizer().tokenize(text)
    places: dict[str, int] = {}
    for place, token in enumerate(tokens):
        places[token] = places.get(token, 0) | 1 << place
    return _Words(tokens, Counter(tokens), Counter(pairwise(tokens)), places)


@cache
def _tokenizer() -> tokenizers.DefaultTokenizer:
    return tokenizers.DefaultTokenizer(use_stemmer=False)


def _score(common: int, of_answer: int, of_truth: int) -> float:
    precision, recall = common / max(of_answer, 1), common / max(of_truth, 1)
    return 100 * float(scoring.fmeasure(precision, recall))


def _longest(a: _Words, b: _Words) -> int:
    """Returns the length of the longest common subsequence.

    The rows of the usual table differ by 0 or 1 from place to place, so a row is one number, and
    the next one is a sum (Hyyrö 2004): its zeros count what is common so far.
    """
    every = row = (1 << len(a.tokens)) - 1
    for token in b.tokens:
        matched = row & a.places.get(token, 0)
        row = ((row + matched) | (row - matched)) & every
    return len(a.tokens) - row.bit_count()
