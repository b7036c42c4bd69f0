"""Assigns answers to sequences: one to one, never the same answer twice."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

T = TypeVar("T")


def assign(
    answers: Sequence[T], truths: Sequence[T], score: Callable[[T, T], float]
) -> list[int | None]:
    """Returns for each truth the index of its answer, or None, with the largest total score."""
    chosen: list[int | None] = [None] * len(truths)
    if answers:
        from scipy.optimize import linear_sum_assignment  # here, because it takes a while

        table = np.array([[score(answer, truth) for answer in answers] for truth in truths])
        for truth, answer in zip(*linear_sum_assignment(table, maximize=True), strict=True):
            chosen[truth] = int(answer)
    return chosen
