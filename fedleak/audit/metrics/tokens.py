"""How much of a set of tokens was found, whatever the order."""

from collections.abc import Set
from typing import NamedTuple


class Overlap(NamedTuple):
    """Shares from 0 to 1; None: there are no tokens to have a share of."""

    recall: float | None
    precision: float | None


def overlap(answer: Set[int], truth: Set[int]) -> Overlap:
    """Returns the overlap of two sets.

    >>> overlap({1, 2, 5}, {1, 2, 3, 4})
    Overlap(recall=0.5, precision=0.6666666666666666)
    """
    common = len(answer & truth)
    return Overlap(common / len(truth) if truth else None, common / len(answer) if answer else None)
