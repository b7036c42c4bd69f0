"""Tests Poisson sampling: does a coin of its own decide for each record and step?

Shapes: T steps, R records.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MOST_DRAWS, MOST_PAIRED = 2**24, 256
"""The most draws (steps times records) that are looked at; and how many first steps, and first
records, are compared in all pairs."""


class Drawn(NamedTuple):
    """A count of draws that is least likely under Poisson sampling.

    Attributes:
        taken, draws: `taken` of `draws` draws took a record.
        of: Which draws they are.
        rate: The share of them that should have.
        p: Probability of so unlikely a count, corrected for all counts that were looked at.
    """

    taken: int
    draws: int
    of: str
    rate: float
    p: float

    def __str__(self) -> str:
        """Returns it in words."""
        return (
            f"{self.taken:,} of {self.draws:,} {self.of}, where a share of {self.rate:.3g} is "
            "announced"
        )


def least_likely(steps: Sequence[Sequence[int]], records: int, rate: float) -> Drawn:
    """Returns the count that is least likely if each step takes each record by a fair chance.

    Counts are of all draws, of each record, of each step, of any two steps (the same batch again)
    and of any two records (taken together); and of steps and records that are just as usual, which
    are all where batches of a fixed size are taken from a shuffled pass. Each is binomial.

    Args:
        steps: The records that each took.
        records: R.
        rate: Probability with which a step takes a record, as is announced.
    """
    from scipy.stats import binom  # here, because it takes half a second

    drawn_TR = np.zeros((min(len(steps), max(1, MOST_DRAWS // records)), records), dtype=bool)
    for taken_R, step in zip(drawn_TR, steps, strict=False):
        taken_R[list(step)] = True
    usual_R, usual_T = round(rate * records), round(rate * len(drawn_TR))
    twice = sum(len(step) - len(set(step)) for step in steps)
    counted = [
        (np.array([twice]), drawn_TR.size, "draws took a record once more in a step", 0.0),
        (drawn_TR.sum(keepdims=True).ravel(), drawn_TR.size, "draws took a record", rate),
        (drawn_TR.sum(0), len(drawn_TR), "steps took one record", rate),
        (drawn_TR.sum(1), records, "records were in one step", rate),
        (
            np.array([(drawn_TR.sum(1) == usual_R).sum()]),
            len(drawn_TR),
            f"steps took {usual_R} records, neither more nor less",
            float(binom.pmf(usual_R, records, rate)),
        ),
        (
            np.array([(drawn_TR.sum(0) == usual_T).sum()]),
            records,
            f"records were in {usual_T} steps, neither more nor less",
            float(binom.pmf(usual_T, len(drawn_TR), rate)),
        ),
        (_together(drawn_TR), records, "records were in both of two steps", rate**2),
        (_together(drawn_TR.T), len(drawn_TR), "steps took both of two records", rate**2),
    ]
    tested = []
    for counts, draws, kind, share in counted:
        if len(counts):
            tails = np.minimum(binom.cdf(counts, draws, share), binom.sf(counts - 1, draws, share))
            worst, corrected = int(tails.argmin()), 2 * len(counts) * len(counted)
            p = min(1.0, corrected * float(tails[worst]))
            tested.append(Drawn(int(counts[worst]), draws, kind, share, p))
    return min(tested, key=lambda drawn: drawn.p)


def _together(drawn_NM: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Returns in how many columns both of two rows are drawn, for any two of the first rows."""
    first_NM = drawn_NM[:MOST_PAIRED].astype(np.float32)
    return (first_NM @ first_NM.T)[np.triu_indices(len(first_NM), 1)]
