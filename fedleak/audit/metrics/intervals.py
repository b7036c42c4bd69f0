"""How certain a figure is: 95 % intervals.

Texts of one client are not independent, neither within a batch nor over rounds. Clients are, so a
client is a cluster, and the estimand of `clustered_mean` is the mean over texts (or updates) of
*other clients like these*. Texts that all go one way say little if
they are of one client, however many they are. `wilson` is for what is independent, such as the
held-out texts that a model is scored on.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

FEWEST_DRAWS, MOST_DRAWS, NUMBERS = 1_000, 10_000, 4_000_000
"""Random weightings of the clusters for the quantiles at both ends; fewer for many clusters."""

SEED = 0


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """Returns a share of *independent* trials with its Wilson interval."""
    from scipy.stats import binomtest  # it takes half a second to import

    interval = binomtest(successes, trials).proportion_ci(0.95, method="wilson")
    return Interval(successes / trials, float(interval.low), float(interval.high))


def clustered_mean(
    values: Sequence[float],
    clusters: Sequence[int],
    weights: Sequence[float] | None = None,
    *,
    most: float,
) -> Interval:
    """Returns a mean of bounded values with an interval that holds at the bounds too.

    It is Gaffke's (2005; see Phan, Thomas and Learned-Miller, ICML 2021): the clusters are weighted
    at random, beside one more that nobody has seen, which is 0 for the lower end and `most` for the
    upper one. So it is never of zero width. Where clusters of one size are all or nothing, it is
    Clopper and Pearson's (1934) and holds exactly; else it is narrower, the more alike they are,
    and that it holds is a conjecture to which no exception is known.

    Args:
        values: From 0 to `most`; at least one.
        clusters: The cluster of each value.
        weights: How much each value counts, such as how many texts it is the mean of; None: all
            alike.
        most: The largest value there can be.
    """
    counted = np.ones(len(values)) if weights is None else np.asarray(weights, float)
    indices = np.unique(np.asarray(clusters), return_inverse=True)[1]
    sizes = np.bincount(indices, counted)
    sums = np.bincount(indices, counted * np.asarray(values, float))
    mean = float(sums.sum() / sizes.sum())
    # In the place of the unseen cluster: as large as the largest, so that none could weigh more.
    sizes, lowest, highest = (
        np.append(known, unseen)
        for known, unseen in ((sizes, sizes.max()), (sums, 0.0), (sums, most * sizes.max()))
    )
    count = min(MOST_DRAWS, max(FEWEST_DRAWS, NUMBERS // len(sizes)))
    # In proportion to Dirichlet's.
    draws = np.random.default_rng(SEED).standard_exponential((count, len(sizes)))
    low = np.quantile(draws @ lowest / (draws @ sizes), 0.025)
    high = np.quantile(draws @ highest / (draws @ sizes), 0.975)
    # Rounding must not put the mean, or a bound, outside.
    return Interval(mean, min(float(low), mean), min(max(float(high), mean), most))


def bootstrapped(clusters: Sequence[Sequence[float]]) -> Interval:
    """Returns the mean of all values, with an interval by a bootstrap over clusters.

    Where all clusters are alike its width is zero, however few they are: see `sign_test`.

    Args:
        clusters: The values of each; at least two clusters.
    """
    from scipy.stats import bootstrap

    sums, sizes = (
        np.array([measure(values) for values in clusters], float) for measure in (sum, len)
    )
    interval = bootstrap(
        (sums, sizes),
        lambda s, n, axis: s.sum(axis) / n.sum(axis),
        paired=True,
        vectorized=True,
        method="percentile",
        n_resamples=FEWEST_DRAWS,
        rng=np.random.default_rng(SEED),
    ).confidence_interval
    return Interval(float(sums.sum() / sizes.sum()), float(interval.low), float(interval.high))


def sign_test(differences: Sequence[float]) -> float:
    """Returns the p for independent differences being as likely above 0 as below it.

    Where each difference is between two yes-or-no outcomes, it is McNemar's exact test.
    """
    from scipy.stats import binomtest

    above, below = (sum(sign * difference > 0 for difference in differences) for sign in (1, -1))
    return float(binomtest(above, above + below).pvalue) if above + below else 1.0
