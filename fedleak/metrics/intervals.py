"""How certain a figure is: 95 % intervals."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 2000


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def share(successes: int, trials: int) -> Interval:
    """Returns a share with its Wilson interval, which is not empty at 0 or 100 % either."""
    from scipy.stats import binomtest  # here, because it takes a second

    interval = binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    return Interval(successes / trials, float(interval.low), float(interval.high))


def clustered_mean(values: Sequence[float], clusters: Sequence[int], *, seed: int = 0) -> Interval:
    """Returns a mean with its bootstrap interval, drawing whole clusters.

    Values of one cluster (a client) are not independent, so clusters are drawn, not values
    (Cameron, Gelbach and Miller 2008). With one cluster, values are.
    """
    if len(set(clusters)) < 2:
        clusters = range(len(values))
    labels = sorted(set(clusters))
    array, of = np.asarray(values, float), np.asarray(clusters)
    sums = np.array([array[of == label].sum() for label in labels])
    sizes = np.array([(of == label).sum() for label in labels])
    draws = np.random.default_rng(seed).integers(len(labels), size=(RESAMPLES, len(labels)))
    means = sums[draws].sum(1) / sizes[draws].sum(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(array.mean()), float(low), float(high))
