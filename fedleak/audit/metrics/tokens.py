"""How much of a bag of tokens was found, whatever the order."""

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple


class Overlap(NamedTuple):
    """Shares from 0 to 1; None where there is nothing to have a share of."""

    recall: float | None
    precision: float | None


def overlap(answer: Iterable[int], truth: Iterable[int]) -> Overlap:
    """Returns the overlap of two multisets.

    >>> overlap([1, 1, 2], [1, 2, 3, 4])
    Overlap(recall=0.5, precision=0.6666666666666666)
    """
    claimed, real = Counter(answer), Counter(truth)
    common = (claimed & real).total()
    return Overlap(
        common / real.total() if real else None, common / claimed.total() if claimed else None
    )
