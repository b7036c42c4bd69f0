"""Lower bounds on epsilon, from an audit that planted canaries and guessed who was in.

A canary is in or out by a fair coin that the auditor does not see, and every canary has a score.
What each bound assumes:

- `gaussian_bound`: that a score is N(0, 1) for a canary that is out and N(mu, 1) for one that is
  in. This holds if Gaussian noise is added and no canary is sampled.
- `f_dp_bound` (Mahloujifar, Melis, Chaudhuri 2025, "Auditing f-differential privacy in one run",
  algorithm 3): that the mechanism's trade-off curve is that of a Gaussian mechanism.
- `epsilon_delta_bound` (Steinke, Nasr, Jagielski 2023, "Privacy auditing with one (1) training
  run", theorem 5.2): nothing about the mechanism.

The last two hold for any dependence between the scores of different canaries. All need coins that
are fair and independent, and guesses that were settled before the coins were seen.

Everything is a plain number: m canaries, r guesses, v of them right. SciPy is imported where it is
used, because that takes a while.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
"""Shares of the canaries that a guesser may guess on."""

UNBOUNDED_MU = 10.0
"""How far apart scores are expected to be where no noise is announced."""

LARGEST_MU, SMALLEST_MU = 500.0, 1e-4
"""Ends of the search for mu. Scores stay far below the first: they grow with the square root of the
numbers that a canary is spread over. The epsilon of the second is negligible."""


def gaussian_delta(epsilon: float, mu: float) -> float:
    """Returns the delta at an epsilon of a mu-GDP mechanism (Dong et al. 2022, corollary 1)."""
    from scipy.special import log_ndtr, ndtr

    other = math.exp(epsilon + log_ndtr(-epsilon / mu - mu / 2))
    return float(ndtr(-epsilon / mu + mu / 2)) - other


@cache
def gaussian_epsilon(mu: float, delta: float) -> float:
    """Returns the epsilon at a delta of a mu-GDP mechanism; 0 where mu is 0 or less."""
    if mu < SMALLEST_MU or gaussian_delta(0.0, mu) <= delta:
        return 0.0
    return _last_above(lambda epsilon: gaussian_delta(epsilon, mu) - delta)


def gaussian_bound(
    inside: Sequence[float], alpha: float, delta: float, *, per_score: float = 1.0
) -> float:
    """Returns a lower bound on epsilon with confidence 1 - alpha; 0 where nothing was seen.

    Args:
        inside: The scores of the canaries that are in, of mean `mu / per_score` and variance 1.
        alpha: How often it may be wrong.
        delta: Of the statement.
        per_score: 1; or 2 where a canary is plus or minus a direction, and scores have its sign.
    """
    from scipy.special import ndtri

    if not inside:
        return 0.0
    mean = math.fsum(inside) / len(inside)
    mu = max(0.0, per_score * (mean + float(ndtri(alpha)) / math.sqrt(len(inside))))
    return gaussian_epsilon(mu, delta)


@cache
def epsilon_delta_bound(m: int, r: int, v: int, alpha: float, delta: float) -> float:
    """Returns a lower bound on epsilon with confidence 1 - alpha; 0 where nothing was seen."""
    if not v or _epsilon_delta_p(m, r, v, 0.0, delta) >= alpha:
        return 0.0
    return _last_above(lambda epsilon: alpha - _epsilon_delta_p(m, r, v, epsilon, delta))


def _epsilon_delta_p(m: int, r: int, v: int, epsilon: float, delta: float) -> float:
    """Returns the largest probability of so many right guesses under (epsilon, delta)-DP."""
    from scipy.special import expit
    from scipy.stats import binom

    right = float(expit(epsilon))
    beta = float(binom.sf(v - 1, r, right))
    i = np.arange(1, v + 1)
    slack = float(((binom.sf(v - i - 1, r, right) - beta) / i).max())
    return min(1.0, beta + 2 * m * delta * max(0.0, slack))


@cache
def f_dp_mu(m: int, r: int, v: int, alpha: float) -> float:
    """Returns the largest mu that so many right guesses reject with confidence 1 - alpha."""
    if not v or not _rejects(m, r, v, SMALLEST_MU, alpha):
        return 0.0
    if _rejects(m, r, v, LARGEST_MU, alpha):
        return LARGEST_MU
    low, high = SMALLEST_MU, LARGEST_MU
    while high - low > 1e-5 * (1 + low):
        middle = (low + high) / 2
        low, high = (middle, high) if _rejects(m, r, v, middle, alpha) else (low, middle)
    return low


def _rejects(m: int, r: int, v: int, mu: float, alpha: float) -> bool:
    """Whether a mu-GDP mechanism gives so many right guesses less often than alpha."""
    from scipy.special import ndtr, ndtri

    right, wrong = alpha * v / m, alpha * (r - v) / m
    for i in range(v - 1, -1, -1):
        raised = max(wrong, float(ndtr(ndtri(min(right, 1.0)) - mu)))
        right += i / (r - i) * (raised - wrong)
        wrong = raised
        if right + wrong > r / m:
            return True
    return right + wrong > r / m


def f_dp_bound(m: int, r: int, v: int, alpha: float, delta: float) -> float:
    """Returns the epsilon of `f_dp_mu`."""
    return gaussian_epsilon(f_dp_mu(m, r, v, alpha), delta)


def _last_above(f: Callable[[float], float]) -> float:
    """Returns where a falling function that is above 0 at 0 crosses it, from below."""
    from scipy.optimize import brentq

    high = 1.0
    while f(high) > 0 and high < 1e6:
        high *= 2
    if f(high) > 0:
        return high
    return float(brentq(f, 0.0, high, xtol=1e-6))


@dataclass(frozen=True)
class Rule:
    """How an auditor guesses, settled before there is a score.

    Attributes:
        count: How many canaries it commits itself on.
        two_sided: Half of its guesses are "out", for the smallest scores.
    """

    count: int
    two_sided: bool

    def right(self, scores: Sequence[float], coins: Sequence[bool]) -> int:
        """Returns how many guesses are right."""
        order = np.argsort(-np.asarray(scores), kind="stable")
        inside = np.asarray(coins, dtype=bool)[order]
        out = self.count // 2 if self.two_sided else 0
        said_in = self.count - out
        return int(inside[:said_in].sum()) + int((~inside[len(inside) - out :]).sum())


@cache
def settled_rule(m: int, mu: float, *, two_sided: bool) -> Rule:
    """Returns the rule that says most, if scores are N(0, 1) and N(mu, 1).

    It may depend on anything but scores and coins: `mu` is what is announced. A wrong `mu` costs
    power, never validity.
    """
    from scipy.optimize import brentq
    from scipy.special import ndtr

    def worth(share: float) -> float:
        count = max(1, round(share * m))
        tail = share / 2 if two_sided else share
        # The threshold above which this share of the scores is, half of them in and half out.
        cut = brentq(lambda t: (ndtr(-t) + ndtr(mu - t)) / 2 - tail, -40.0, mu + 40.0)
        right = min(1.0, float(ndtr(mu - cut)) / (2 * tail))
        low = right - 1.645 * math.sqrt(right * (1 - right) / count) - 1 / count
        return min(low, 1 - 3 / count)

    usable = [share for share in SHARES if two_sided or share <= 0.5]
    return Rule(max(1, round(max(usable, key=worth) * m)), two_sided)


@dataclass(frozen=True)
class Bounds:
    """Lower bounds on epsilon. Each holds by itself with the confidence that was asked for.

    Attributes:
        gaussian: Assumes Gaussian noise; None where canaries are sampled.
        f_dp: Assumes the trade-off curve of a Gaussian mechanism.
        epsilon_delta: Assumes nothing.
    """

    gaussian: float | None
    f_dp: float
    epsilon_delta: float

    @property
    def largest(self) -> float:
        """The largest of them; it is wrong up to three times as often as each."""
        return max(self.gaussian or 0.0, self.f_dp, self.epsilon_delta)


def lower_bounds(
    scores: Sequence[float],
    coins: Sequence[bool],
    alpha: float,
    delta: float,
    *,
    mu: float,
    sampled: bool,
    signed: bool,
) -> Bounds:
    """Returns all bounds, each wrong with a probability of at most alpha.

    Args:
        scores: One for each canary; of variance 1 unless they are log likelihood ratios.
        coins: Whether each is in; or, where it is signed, whether its sign is plus.
        alpha: How often each bound may be wrong.
        delta: Of the statement.
        mu: How far apart the scores of those in and out should be, as is announced.
        sampled: Whether scores are log likelihood ratios of canaries that are sampled.
        signed: Whether a canary that is not in is the opposite, and not nothing.
    """
    rule = settled_rule(len(coins), mu, two_sided=not sampled)
    right = rule.right(scores, coins)
    gaussian = None
    if not sampled:
        pairs = zip(scores, coins, strict=True)
        inside = [score if coin else -score for score, coin in pairs if coin or signed]
        gaussian = gaussian_bound(inside, alpha, delta, per_score=2.0 if signed else 1.0)
    return Bounds(
        gaussian=gaussian,
        f_dp=f_dp_bound(len(coins), rule.count, right, alpha, delta),
        epsilon_delta=epsilon_delta_bound(len(coins), rule.count, right, alpha, delta),
    )
