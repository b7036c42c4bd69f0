"""ROUGE F-scores from 0 to 100, by the rouge-score package without stemming.

That package lower-cases and keeps ASCII letters and digits only: punctuation does not count, and
text in other scripts scores 0.
"""

from functools import cache, lru_cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rouge_score.rouge_scorer import RougeScorer

PAIRS = 2**17
"""How many scores are remembered: controls meet the same held-out texts again and again."""


class Rouge(NamedTuple):
    """F-scores, 0 to 100."""

    rouge1: float
    rouge2: float
    rougeL: float


@cache
def _scorer() -> "RougeScorer":
    from rouge_score.rouge_scorer import RougeScorer  # here, because it takes a second

    return RougeScorer(list(Rouge._fields), use_stemmer=False)


@lru_cache(maxsize=PAIRS)
def rouge(answer: str, truth: str) -> Rouge:
    """Returns the ROUGE of an answer.

    >>> rouge("the cat sat", "the cat sat").rougeL
    100.0
    """
    scores = _scorer().score(truth, answer)
    return Rouge(*(100 * scores[name].fmeasure for name in Rouge._fields))


def mean(scores: list[Rouge]) -> Rouge:
    """Returns the mean of each score."""
    return Rouge(*(sum(column) / len(scores) for column in zip(*scores, strict=True)))
