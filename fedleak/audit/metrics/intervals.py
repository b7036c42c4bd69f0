"""How certain a figure is: 95 % intervals.

Texts of one client are not independent, neither within a batch nor over rounds. Clients are
independent, so a client is a cluster, and the estimand of `clustered_mean` is the mean over texts
(or updates) of *other clients like these*, none of whom has more of them than the largest client
that is known. Many texts with the same result show little if all are of one client. `wilson` is for
independent trials, such as the held-out texts that a model is scored on.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FEWEST_DRAWS, MOST_DRAWS, NUMBERS = 1_000, 10_000, 4_000_000
"""Random weightings of the clusters for the quantiles at both ends; fewer for many clusters."""

MISS = 0.025
"""How often each end of an interval may miss."""

SIGNS = 9_999
"""Random signs of a sign-flip test."""

SEED = 0


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def wilson(successes: int, trials: int) -> Interval:
    """Returns a share of *independent* trials with its Wilson interval."""
    share, z = successes / trials, NormalDist().inv_cdf(1 - MISS)
    shrunk = z * z / trials
    middle = (share + shrunk / 2) / (1 + shrunk)
    half = math.sqrt(shrunk * share * (1 - share) + shrunk**2 / 4) / (1 + shrunk)
    low = middle - half if successes else 0.0
    return Interval(share, low, middle + half if successes < trials else 1.0)


def clustered_mean(
    values: Sequence[float],
    clusters: Sequence[int],
    weights: Sequence[float] | None = None,
    *,
    most: float,
    least: float = 0.0,
    largest: float = 0.0,
    miss: float = MISS,
) -> Interval:
    """Returns a mean of bounded values with an interval that holds at the bounds too.

    The interval is Gaffke's (2005; see Phan, Thomas and Learned-Miller, ICML 2021): the clusters
    are weighted at random, with one more that is unseen and has the value `least` for the lower end
    and `most` for the upper one. So its width is never zero. If clusters of one size are all or
    nothing, it is Clopper and Pearson's (1934) and holds exactly; else it is narrower, the more
    alike they are, and that it holds is a conjecture to which no exception is known.

    If sizes differ, the interval is all means for which a test does not reject that the sum of
    (value - mean) times weight has expectation 0. Such a sum is bounded only if the size of a
    cluster is, so the interval is for clusters that are no larger than the largest that is known.

    Args:
        values: From `least` to `most`; at least one.
        clusters: The cluster of each value.
        weights: How much each value counts, such as the number of texts in its mean; None: all
            alike.
        most, least: The largest and the smallest value there can be.
        largest: The most that any cluster can count, seen or not; if it is less than the largest
            cluster here, that one is taken.
        miss: How often each end may miss.
    """
    counted = np.ones(len(values)) if weights is None else np.asarray(weights, float)
    indices = np.unique(np.asarray(clusters), return_inverse=True)[1]
    sizes = np.bincount(indices, counted)
    sums = np.bincount(indices, counted * np.asarray(values, float))
    mean = float(sums.sum() / sizes.sum())
    unseen = max(largest, sizes.max())
    sizes = np.append(sizes, unseen)
    lowest, highest = np.append(sums, least * unseen), np.append(sums, most * unseen)
    draws = _weightings(len(sizes))
    low = np.quantile(draws @ lowest / (draws @ sizes), miss)
    high = np.quantile(draws @ highest / (draws @ sizes), 1 - miss)
    # Rounding must not put the mean, or a bound, outside.
    return Interval(mean, max(min(float(low), mean), least), min(max(float(high), mean), most))


@lru_cache(maxsize=4)
def _weightings(clusters: int) -> NDArray[np.float64]:
    """Returns random weights of clusters, proportional to Dirichlet weights, one draw in each row.

    All figures with as many clusters share them: drawing them takes longer than the figure.
    """
    count = min(MOST_DRAWS, max(FEWEST_DRAWS, NUMBERS // clusters))
    draws = np.random.default_rng(SEED).standard_exponential((count, clusters))
    draws.flags.writeable = False
    return draws


def ranks_of_quantile(share: float, count: int, miss: float) -> tuple[int | None, int | None]:
    """Returns two ranks, from the largest, that bound an upper quantile of independent values.

    The rank of a value is how many others exceed it. The share of the distribution above the value
    of the first rank is at most `share`, above that of the second at least `share`, each but for a
    chance of `miss` (order statistics; David and Nagaraja 2003, section 7.1). None: so few values
    do not bound it.

    Args:
        share: The share of the distribution that is above the quantile.
        count: Values that there are.
        miss: How often each may be wrong.
    """
    from scipy.stats import binom

    # The share above the value of rank k exceeds `share` with the chance of k or fewer.
    below = int(binom.ppf(miss, count, share))
    first = below if binom.cdf(below, count, share) <= miss else below - 1
    second = int(binom.ppf(1 - miss, count, share))
    return first if first >= 0 else None, second if second < count else None


def sign_flip_test(differences: Sequence[float]) -> float:
    """Returns the p for a mean of differences, if each is as likely as its negative.

    That is so if two treatments of a client do the same: then it does not matter which is called
    the first. For up to 13 differences all signs are tried, so p is exact (Fisher 1935); for more,
    signs are random, and p holds too. A single difference shows nothing: both signs are as far off.
    """
    from scipy.stats import permutation_test

    if len(differences) < 2 or not any(differences):
        return 1.0
    p = permutation_test(
        (np.asarray(differences, float),),
        np.mean,
        permutation_type="samples",
        vectorized=True,
        n_resamples=SIGNS,
        rng=np.random.default_rng(SEED),
    ).pvalue
    return float(p)


def sign_test(differences: Sequence[float]) -> float:
    """Returns the p for independent differences being as likely above 0 as below it.

    If each difference is between two yes-or-no outcomes, this is McNemar's exact test.
    """
    from scipy.stats import binomtest

    above, below = (sum(sign * difference > 0 for difference in differences) for sign in (1, -1))
    return float(binomtest(above, above + below).pvalue) if above + below else 1.0
