"""Holds answers against private texts: one to one, and as sets of tokens, whatever their order."""

from collections.abc import Callable, Set
from typing import NamedTuple

import numpy as np


def assign(answers: int, truths: int, score: Callable[[int, int], float]) -> list[int | None]:
    """Returns for each truth the number of its answer, or None, with the largest total score.

    No answer is for two truths.

    Args:
        answers, truths: How many there are.
        score: Of an answer for a truth, by their numbers.
    """
    chosen: list[int | None] = [None] * truths
    if answers:
        from scipy.optimize import linear_sum_assignment  # here, because it takes a while

        table = np.array([[score(a, t) for a in range(answers)] for t in range(truths)])
        for truth, answer in zip(*linear_sum_assignment(table, maximize=True), strict=True):
            chosen[truth] = int(answer)
    return chosen


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
