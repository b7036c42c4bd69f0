"""Lower bounds on epsilon: published and independent values, and how often they are wrong."""

import math

import numpy as np
import pytest
from planted import canary_row
from scipy.integrate import quad
from scipy.stats import binom, norm

from fedleak.audit.privacy import canaries
from fedleak.store.records import LedgerRow
from fedleak.store.run import EVERYONE
from fedleak.training.privacy import accounting
from fedleak.training.privacy.lower_bounds import (
    SHARES,
    Rule,
    epsilon_delta_bound,
    f_dp_bound,
    f_dp_mu,
    gaussian_bound,
    gaussian_delta,
    gaussian_epsilon,
    settled_rule,
)

pytestmark = pytest.mark.core

DELTA = 1e-5
NOISE = 1.0
TRUE = gaussian_epsilon(1 / NOISE, DELTA)


@pytest.mark.parametrize(
    ("m", "r", "v", "epsilon_delta", "f_dp"),
    [
        (1000, 100, 90, 1.626, 2.456),
        (1000, 100, 100, 3.465, 5.549),
        (1000, 200, 150, 0.820, 1.297),
        (200, 40, 40, 2.548, 4.534),
        (5000, 500, 400, 1.195, 1.683),
    ],
)
def test_one_run_bounds_are_those_of_two_other_implementations(m, r, v, epsilon_delta, f_dp):
    """Values of jax_privacy's auditing module, and of an independent program, to three digits."""
    assert epsilon_delta_bound(m, r, v, 0.05, DELTA) == pytest.approx(epsilon_delta, abs=6e-4)
    assert f_dp_bound(m, r, v, 0.05, DELTA) == pytest.approx(f_dp, abs=6e-4)


@pytest.mark.parametrize(
    ("sigma", "true", "medians"),
    [
        (0.5, 10.00, (8.76, 9.34, 9.70)),
        (1.0, 4.38, (3.37, 3.85, 4.12)),
        (2.0, 1.99, (1.08, 1.53, 1.77)),
        (4.0, 0.93, (0.16, 0.51, 0.72)),
    ],
)
def test_the_gaussian_bound_has_the_medians_of_simulations(sigma, true, medians):
    """Of 64, 256 and 1024 canaries that are in; the smallest rests on a few draws."""
    assert gaussian_epsilon(1 / sigma, DELTA) == pytest.approx(true, abs=0.006)
    for count, median in zip((64, 256, 1024), medians, strict=True):
        bound = gaussian_bound([1 / sigma] * count, 0.05, DELTA)
        assert bound == pytest.approx(median, rel=0.03, abs=0.03)


@pytest.mark.parametrize(("epsilon", "mu"), [(0.0, 0.5), (1.0, 0.5), (3.0, 2.0), (10.0, 2.0)])
def test_delta_is_the_hockey_stick_of_two_gaussians(epsilon, mu):
    excess = lambda x: max(0.0, norm.pdf(x, mu) - math.exp(epsilon) * norm.pdf(x))  # noqa: E731
    expected, _ = quad(excess, epsilon / mu - mu, epsilon / mu + 12, limit=200)
    assert gaussian_delta(epsilon, mu) == pytest.approx(expected, rel=1e-4)


def test_an_epsilon_of_nothing_is_zero_and_a_huge_one_is_finite():
    assert gaussian_epsilon(0.0, DELTA) == gaussian_epsilon(-1.0, DELTA) == 0.0
    assert gaussian_epsilon(1e-3, 0.5) == 0.0
    assert 2000 < gaussian_epsilon(64.0, DELTA) < 3000
    assert gaussian_bound([], 0.05, DELTA) == gaussian_bound([-5.0], 0.05, DELTA) == 0.0
    assert epsilon_delta_bound(10, 5, 0, 0.05, DELTA) == f_dp_bound(10, 5, 0, 0.05, DELTA) == 0.0


def test_without_delta_the_one_run_bound_is_that_of_fair_coins_said_right_by_chance():
    """Pure epsilon: right guesses are at most binomial with probability e^eps / (1 + e^eps)."""
    bound = epsilon_delta_bound(100, 60, 50, 0.05, 1e-15)
    chance = math.exp(bound) / (1 + math.exp(bound))
    assert binom.sf(49, 60, chance) == pytest.approx(0.05, abs=1e-4)


@pytest.mark.parametrize(("m", "r", "v"), [(30, 12, 12), (8, 8, 8), (20, 9, 9)])
def test_the_mu_is_where_the_recursion_of_its_paper_begins_to_reject(m, r, v):
    """Mahloujifar et al. (2024), Algorithm 1, with each sum kept."""

    def excess(mu):
        rights, wrongs = [0.05 * v / m], [0.05 * (r - v) / m]
        for i in reversed(range(v)):
            wrongs.append(max(wrongs[-1], norm.cdf(norm.ppf(min(rights[-1], 1.0)) - mu)))
            rights.append(rights[-1] + i / (r - i) * (wrongs[-1] - wrongs[-2]))
        return rights[-1] + wrongs[-1] - r / m

    mu = f_dp_mu(m, r, v, 0.05)
    assert mu > 0.05
    assert (excess(mu * 0.999) < 0) != (excess(mu * 1.001) < 0)


def test_the_mu_of_two_right_guesses_solves_their_equation():
    """The recursion of the algorithm, written out for two canaries, both guessed right."""
    mu = f_dp_mu(2, 2, 2, 0.5)
    assert norm.ppf(0.5 + norm.cdf(-mu)) == pytest.approx(mu / 2, abs=2e-5)
    assert f_dp_mu(1, 1, 1, 0.05) == 0.0


def test_a_rule_guesses_the_largest_in_and_the_smallest_out():
    scores, coins = [3.0, 2.0, 1.0, 0.0, -1.0], [True, False, True, True, False]
    assert Rule(2, two_sided=True).right(scores, coins) == 2
    assert Rule(4, two_sided=True).right(scores, coins) == 2
    assert Rule(3, two_sided=False).right(scores, coins) == 2
    assert Rule(5, two_sided=False).right(scores, coins) == 3


@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 10.0, 64.0])
@pytest.mark.parametrize("m", [1, 2, 50, 5000])
def test_a_rule_can_always_be_settled(m, mu):
    for two_sided in (False, True):
        assert 1 <= settled_rule(m, mu, two_sided=two_sided).count <= m


@pytest.mark.parametrize("mu", [1.0, 3.0])
def test_a_rule_is_the_share_whose_guesses_are_right_with_the_largest_lower_end(mu):
    rng, many, m = np.random.default_rng(0), 50_000, 500
    coins = np.arange(many) % 2 == 0
    scores = rng.normal(size=many) + mu * coins
    for two_sided, shares in ((True, SHARES), (False, [share for share in SHARES if share <= 0.5])):
        lower = {}
        for share in shares:
            guesses, count = round(share * many), round(share * m)
            right = Rule(guesses, two_sided).right(scores, coins) / guesses
            spread = norm.ppf(0.95) * math.sqrt(right * (1 - right) / count)
            lower[count] = min(right - spread - 1 / count, 1 - 3 / count)
        rule = settled_rule(m, mu, two_sided=two_sided)
        assert rule == Rule(max(lower, key=lower.__getitem__), two_sided)


# --- how often they are wrong -------------------------------------------------------------------

AUDITS, CLIENTS, CANARIES, ROUNDS = 1000, 3, 64, 2


def one_round(rng, client, round, coins, mean):
    scores = rng.normal(size=len(coins)) + mean * np.array(coins)
    return canary_row(
        client,
        round,
        numbers=4096,
        inside=tuple(coins),
        scores=tuple(scores.tolist()),
        witnesses=tuple(rng.normal(size=8).tolist()),
    )


def spent(client, epsilon):
    return LedgerRow(
        round=ROUNDS,
        client=client,
        epsilon=epsilon,
        delta=DELTA,
        accountant="rdp",
        unit="example",
        neighbouring="zero out one",
        sampling="none",
        sampling_rate=1.0,
        steps=ROUNDS,
        noise_multiplier=NOISE,
    )


class Settings:
    """What the summary asks of an experiment."""

    class privacy:  # noqa: N801
        delta = DELTA

    sees = "updates"


def audits(mean, epsilon, seed):
    """Summaries of many simulated audits of the Gaussian mechanism."""
    rng = np.random.default_rng(seed)
    ledger = [spent(client, epsilon) for client in range(CLIENTS)]
    for _ in range(AUDITS):
        rows = []
        for client in range(CLIENTS):
            coins = (rng.random(CANARIES) < 0.5).tolist()
            rows += [one_round(rng, client, t + 1, coins, mean) for t in range(ROUNDS)]
        yield canaries.summarised(Settings, rows, ledger)


def test_a_bound_exceeds_the_truth_no_more_often_than_it_says():
    """In any of its rows, at 95 % confidence; and the alarm is silent where the ledger is right."""
    true = gaussian_epsilon(math.sqrt(ROUNDS) / NOISE, DELTA)
    wrong = dict.fromkeys(("gaussian", "f_dp", "epsilon_delta"), 0)
    alarms = 0
    for summary in audits(1 / NOISE, true, seed=1):
        assert [row.client for row in summary.bounds] == [EVERYONE, 0, 1, 2]
        alarms += bool(summary.alarms)
        for kind in wrong:
            wrong[kind] += any(getattr(row, kind) > true for row in summary.bounds)
    # Once in ten thousand more than so many, if they are wrong as often as they may.
    most = binom.isf(1e-4, AUDITS, 1 - canaries.CONFIDENCE)
    assert all(count <= most for count in wrong.values()), wrong
    assert wrong["gaussian"] > 20, "it is no bound that is never wrong"
    assert alarms <= binom.isf(1e-4, AUDITS, canaries.ALARM)


def test_an_alarm_comes_where_the_noise_is_half_of_what_is_said():
    accounted = gaussian_epsilon(math.sqrt(ROUNDS) / NOISE, DELTA)
    summaries = [summary for summary, _ in zip(audits(2 / NOISE, accounted, seed=2), range(20))]  # noqa: B905
    assert all(summary.alarms for summary in summaries)


def test_a_bound_is_compared_with_the_smaller_epsilon_of_two_accountants():
    """Of one step that samples 1 %: that of Rényi divergences is more than four times as large."""
    use = accounting.Use(1.0, 0.01, 1)
    by_rdp, by_prv = (accounting.epsilon((use,), DELTA, name) for name in ("rdp", "prv"))
    assert by_rdp > 4 * by_prv
    rng = np.random.default_rng(0)
    coins = (rng.random(CANARIES) < 0.5).tolist()
    ledger = spent(0, by_rdp).model_copy(update={"uses": (use,)})
    (tally,) = canaries.tallies([one_round(rng, 0, ROUNDS, coins, 0.0)], [ledger])
    assert (tally.epsilon, tally.least_epsilon) == (by_rdp, by_prv)
    (old,) = canaries.tallies([one_round(rng, 0, ROUNDS, coins, 0.0)], [spent(0, by_rdp)])
    assert old.least_epsilon == by_rdp


def test_clients_that_guarantee_nothing_have_bounds_and_no_alarm():
    rng = np.random.default_rng(0)
    coins = (rng.random(CANARIES) < 0.5).tolist()
    rows = [one_round(rng, 0, 1, coins, 30.0)]
    (only,) = canaries.summarised(Settings, rows, []).bounds
    assert (only.client, only.epsilon) == (0, accounting.NONE)
    assert only.gaussian > 300
