import json
import math
from dataclasses import asdict, replace

import numpy as np
import pytest
from cases import some
from opacus.accountants import RDPAccountant
from pydantic import TypeAdapter
from scipy.optimize import brentq
from scipy.stats import binom, norm
from tiny import tables

from fedleak.config.federation import schedule
from fedleak.config.federation.protection import protection
from fedleak.config.federation.schedule import clients_of_round, rounds_of_clients
from fedleak.config.loading import parse
from fedleak.defenses import Budget
from fedleak.defenses.dp_sgd import DpSgd
from fedleak.defenses.local_dp import LocalDp
from fedleak.training.batches import round_clients
from fedleak.training.observation import UpdateKind
from fedleak.training.privacy import accounting
from fedleak.training.privacy.accounting import Event, compose
from fedleak.training.settings import LocalTraining
from fedleak.util.errors import ConfigError

STEP = Event(
    noise_multiplier=1.0,
    sampling_rate=0.05,
    steps=1,
    unit="example",
    neighbouring="zero out one",
    sampling="Poisson",
)
WHOLE = Event(
    noise_multiplier=4.0,
    sampling_rate=1.0,
    steps=1,
    unit="client",
    neighbouring="replace one, given n",
)
DELTA = 1e-5
FEDSGD = LocalTraining(
    kind=UpdateKind.GRADIENT, batch_size=4, epochs=1, learning_rate=0.1, dropout=False
)
FEDAVG = LocalTraining(
    kind=UpdateKind.DELTA, batch_size=4, epochs=2, learning_rate=0.1, dropout=False
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Optimal order"),
    pytest.mark.filterwarnings("ignore:divide by zero"),
]


def epsilon(events, delta=DELTA, accountant="rdp"):
    (spent,) = compose(events, delta, accountant)
    assert spent.delta == delta
    return spent.epsilon


def exact(noise, uses, delta=DELTA):
    """Balle & Wang 2018, theorem 8: the least epsilon of so many Gaussian uses on all the data."""
    spread = noise / math.sqrt(uses)

    def excess(eps):
        # The second term in logarithms: e^eps alone overflows.
        second = math.exp(eps + norm.logcdf(-1 / (2 * spread) - eps * spread))
        return norm.cdf(1 / (2 * spread) - eps * spread) - second - delta

    return brentq(excess, 0, 1e4)


# --- epsilon --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("noise", "expected"),
    [
        (0.01, 2.151e8),
        (0.1, 574.52),
        (0.3, 9.375),
        (0.5, 1.8687),
    ],
)
def test_the_published_setting_costs_what_rdp_says(noise, expected):
    events = [replace(STEP, noise_multiplier=noise, sampling_rate=1 / 67349)] * 40_000
    assert epsilon(events, 2.349e-5) == pytest.approx(expected, rel=2e-4)


def test_rounds_are_composed_as_one_accountant_with_all_steps_would():
    rounds = [replace(STEP, steps=3)] * 40
    accountant = RDPAccountant()
    for _ in range(120):
        accountant.step(noise_multiplier=1.0, sample_rate=0.05)
    together = epsilon(rounds)
    assert together == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-12)
    assert together == epsilon([replace(STEP, steps=120)])
    # Not the sum of what each would be alone, nor that of the last round.
    assert epsilon(rounds[:1]) < together < 40 * epsilon(rounds[:1])


def test_every_round_adds_to_what_was_spent():
    spent = [epsilon([STEP] * rounds) for rounds in (1, 2, 3, 5, 10, 50)]
    assert spent == sorted(set(spent))


def test_uses_of_different_noise_are_composed_whatever_their_order():
    events = [STEP, replace(STEP, noise_multiplier=2.0), replace(STEP, sampling_rate=0.5), STEP]
    accountant = RDPAccountant()
    accountant.history = [(1.0, 0.05, 2), (2.0, 0.05, 1), (1.0, 0.5, 1)]
    assert epsilon(events) == epsilon(events[::-1])
    assert epsilon(events) == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-12)


@pytest.mark.parametrize(("noise", "uses"), [(1.0, 1), (4.0, 1), (4.0, 30), (30.0, 1000)])
def test_without_sampling_rdp_is_the_closed_form_and_above_the_truth(noise, uses):
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    # Mironov 2017, corollary 3; Balle et al. 2020, theorem 21.
    by_order = [
        a * uses / (2 * noise**2)
        - (math.log(DELTA) + math.log(a)) / (a - 1)
        + math.log((a - 1) / a)
        for a in orders
    ]
    spent = epsilon([replace(WHOLE, noise_multiplier=noise, steps=uses)])
    assert spent == pytest.approx(min(by_order), rel=1e-9)
    assert exact(noise, uses) <= spent <= 1.5 * exact(noise, uses) + 0.2


@pytest.mark.parametrize(("noise", "uses"), [(1.0, 1), (4.0, 30)])
def test_without_sampling_prv_is_the_truth_but_for_its_tolerance(noise, uses):
    spent = epsilon([replace(WHOLE, noise_multiplier=noise, steps=uses)], accountant="prv")
    truth = exact(noise, uses)
    assert truth <= spent <= truth + 0.03


@pytest.mark.parametrize(
    ("noise", "rate", "steps"),
    some([(0.7, 0.01, 200), (1.0, 0.1, 50), (2.0, 0.5, 10), (4.0, 1.0, 5)], every=3),
)
def test_prv_is_not_above_rdp(noise, rate, steps):
    event = replace(STEP, noise_multiplier=noise, sampling_rate=rate, steps=steps)
    assert epsilon([event], accountant="prv") <= epsilon([event])


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_no_epsilon_is_negative(accountant):
    event = replace(WHOLE, noise_multiplier=20.0)
    assert epsilon([event], delta=0.5, accountant=accountant) == 0


def test_an_epsilon_too_large_for_prv_is_that_of_rdp():
    event = replace(WHOLE, noise_multiplier=0.01)
    assert epsilon([event], accountant="prv") == epsilon([event]) > accounting.PRV_MOST


def test_less_noise_more_of_the_data_and_a_smaller_delta_cost_more():
    base = epsilon([STEP])
    assert epsilon([replace(STEP, noise_multiplier=0.8)]) > base
    assert epsilon([replace(STEP, sampling_rate=0.1)]) > base
    assert epsilon([STEP], delta=1e-7) > base


# --- units, and examples that are in one batch only -----------------------------------------


def test_events_on_different_examples_count_once():
    fixed = Event(
        noise_multiplier=2.0,
        sampling_rate=1.0,
        steps=1,
        unit="example",
        neighbouring="zero out one",
    )
    first_pass = [replace(fixed, disjoint=0)] * 5
    assert epsilon(first_pass) == epsilon(first_pass[:1]) == epsilon([fixed])
    both = [*first_pass, *[replace(fixed, disjoint=1)] * 2]
    assert epsilon(both) == epsilon([fixed] * 2)
    # Unmarked ones count each, beside them.
    assert epsilon([*both, fixed, fixed]) == epsilon([fixed] * 4)
    (spent,) = compose(both, DELTA, "rdp")
    assert spent.events == tuple(both)


def test_marks_of_examples_and_of_clients_are_apart():
    marked = [replace(WHOLE, disjoint=0), replace(STEP, disjoint=0)]
    alone = [epsilon([event]) for event in marked]
    assert [spent.epsilon for spent in compose(marked, DELTA, "rdp")] == alone


def test_all_examples_of_a_client_spend_what_their_sum_does():
    """Without sampling the client's examples are one vector, as long as all of them."""
    step = replace(STEP, noise_multiplier=8.0, sampling_rate=1.0, sampling="none")
    (whole,) = accounting.of_all_examples([replace(step, disjoint=3)], 12, 4)
    assert (whole.noise_multiplier, whole.steps, whole.unit) == (2.0, 1, "client")
    (local,) = accounting.of_all_examples([replace(step, steps=2)], 10, 4)
    assert (local.noise_multiplier, local.steps) == (2.0, 6), "three batches in each of two epochs"


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_all_sampled_examples_of_a_client_spend_no_less_than_the_exact_mixture(rate):
    """The privacy loss of a binomial number of examples, by sums over a fine grid."""
    held, noise, delta = 3, 3.0, 1e-5
    sampled = replace(STEP, noise_multiplier=noise, sampling_rate=rate)
    (spent,) = compose(accounting.of_all_examples([sampled], held, 2), delta, "prv")
    x = np.linspace(-20, 20, 400_001) * noise
    density = sum(binom.pmf(k, held, rate) * norm.pdf(x, k, noise) for k in range(held + 1))

    def delta_of(epsilon):
        excess = density - math.exp(epsilon) * norm.pdf(x, 0, noise)
        other = norm.pdf(x, 0, noise) - math.exp(epsilon) * density
        return max(np.clip(side, 0, None).sum() for side in (excess, other)) * (x[1] - x[0])

    exact = brentq(lambda epsilon: delta_of(epsilon) - delta, 0, 20)
    assert 0 < exact <= spent.epsilon + 1e-3


def test_units_are_apart_and_in_order():
    spent = compose([WHOLE, STEP, WHOLE, STEP, STEP], DELTA, "rdp")
    assert [spending.of.unit for spending in spent] == ["client", "example"]
    assert [spending.of for spending in spent] == [WHOLE, STEP]
    assert [len(spending.events) for spending in spent] == [2, 3]
    assert [spending.epsilon for spending in spent] == [epsilon([WHOLE] * 2), epsilon([STEP] * 3)]


def test_without_events_there_is_no_epsilon():
    assert compose([], DELTA, "rdp") == []


@pytest.mark.parametrize("event", [STEP, WHOLE, replace(STEP, disjoint=3), replace(STEP, steps=7)])
def test_an_event_comes_back_from_a_file(event):
    assert TypeAdapter(Event).validate_python(json.loads(json.dumps(asdict(event)))) == event


# --- the noise for an epsilon ---------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.parametrize("target", [0.5, 3.0, 50.0])
def test_noise_for_an_epsilon_spends_it_and_no_more(target, accountant):
    planned = [replace(WHOLE, noise_multiplier=math.nan)] * 10
    noise = accounting.noise_multiplier(target, planned, DELTA, accountant)
    spent = epsilon([replace(WHOLE, noise_multiplier=noise)] * 10, accountant=accountant)
    assert 0.99 * target <= spent <= target


@pytest.mark.parametrize("local", [FEDSGD, FEDAVG])
@pytest.mark.parametrize("sampling", ["poisson", "fixed"])
def test_dp_sgd_solved_for_an_epsilon_spends_it_over_its_rounds(local, sampling):
    unsolved = DpSgd(epsilon=3.0, max_grad_norm=0.7, sampling=sampling)
    rounds = [2, 3, 5, 8, 9, 14]
    solved = unsolved.solved(
        local, Budget(delta=DELTA, accountant="rdp", num_examples=18, rounds=rounds)
    )
    assert (solved.epsilon, solved.max_grad_norm, solved.sampling) == (None, 0.7, sampling)
    events = [solved.event(local, 18, round) for round in rounds]
    assert 0.99 * 3 <= epsilon(events) <= 3
    assert epsilon(events[:-3]) < epsilon(events)
    given = DpSgd(noise_multiplier=1.5)
    assert (
        given.solved(local, Budget(delta=DELTA, accountant="rdp", num_examples=18, rounds=rounds))
        is given
    )


def test_local_dp_solved_for_an_epsilon_spends_it_over_its_rounds():
    solved = LocalDp(max_norm=2.0, epsilon=3.0).solved(
        FEDAVG, Budget(delta=DELTA, accountant="rdp", num_examples=18, rounds=[1, 4, 6])
    )
    assert (solved.epsilon, solved.max_norm) == (None, 2.0)
    events = [solved.event(FEDAVG, 18, round) for round in (1, 4, 6)]
    assert 0.99 * 3 <= epsilon(events) <= 3
    assert epsilon(events[:2]) < 0.99 * 3


def test_an_epsilon_out_of_reach_is_refused_with_the_reason():
    with pytest.raises(ConfigError, match=r"epsilon = 0\.01 cannot .* delta = 1e-05 over 20 steps"):
        accounting.noise_multiplier(0.01, [replace(WHOLE, steps=2)] * 10, DELTA, "rdp")


def test_an_epsilon_that_prv_reaches_is_refused_with_that_hint():
    with pytest.raises(ConfigError, match="prv"):
        accounting.noise_multiplier(0.1, [WHOLE], DELTA, "rdp")


# --- of an experiment's clients -------------------------------------------------------------


def experiment_of(*defense, **federation):
    return parse(
        {
            "name": "spent",
            "seed": 5,
            "model": {"name": "builtin/bert-tiny"},
            "data": {"name": "builtin/notes", "samples": 12, "held_out": 2},
            "federation": {"clients": 3, "clients_per_round": 2, "rounds": 7} | federation,
            "defense": list(defense),
        }
    )


@pytest.mark.parametrize("kind", ["dp_sgd", "local_dp"])
def test_every_client_spends_its_epsilon_over_the_rounds_in_which_it_takes_part(kind):
    table = {"kind": kind, "epsilon": 5.0} | ({"max_norm": 1.0} if kind == "local_dp" else {})
    experiment = experiment_of(table, batch_size=50)  # all of the data: that is quick to compose
    taking_part = {
        client: [r for r in range(1, 8) if client in clients_of_round(experiment, r)]
        for client in range(3)
    }
    assert len({len(rounds) for rounds in taking_part.values()}) > 1, "another seed"
    for client, rounds in taking_part.items():
        of_client = protection(experiment, client, 10 + client)
        events = [event for round in rounds for event in of_client.events(round)]
        assert len(events) == len(rounds)
        assert 0.99 * 5 <= epsilon(events, accountant="prv") <= 5


def test_a_client_that_never_takes_part_needs_noise_all_the_same():
    local_dp = {"kind": "local_dp", "epsilon": 5.0, "max_norm": 1.0}
    experiment = experiment_of(local_dp, clients=8, clients_per_round=1, rounds=6)
    noise: dict[int, set[float]] = {}
    for client, rounds in enumerate(rounds_of_clients(experiment)):
        defense = protection(experiment, client, 9).defenses[0]
        noise.setdefault(len(rounds), set()).add(defense.noise_multiplier)
    assert {0, 1, 2} <= noise.keys(), "another seed"
    assert noise[0] == noise[1]
    assert 0 < min(noise[1]) < min(noise[2])


def test_planning_draws_the_clients_of_a_round_once(monkeypatch):
    """Not once for every client: a hundred thousand rounds are planned in a second."""
    drawn = []

    def draw(clients, per_round, *, seed, round, cyclic):
        drawn.append(round)
        return round_clients(clients, per_round, seed=seed, round=round, cyclic=cyclic)

    monkeypatch.setattr(schedule, "round_clients", draw)
    experiment = experiment_of(clients=6, clients_per_round=2, rounds=9)
    for client in range(6):
        protection(experiment, client, 9)
    assert drawn == list(range(1, 10))
    by_round = {r: clients_of_round(experiment, r) for r in range(1, 10)}
    by_client = rounds_of_clients(experiment)
    assert [[r for r in by_round if c in by_round[r]] for c in range(6)] == [*map(list, by_client)]


def test_a_client_trains_in_batches_of_what_it_has():
    dp = {"kind": "dp_sgd", "noise_multiplier": 1.0}
    of_client = protection(experiment_of(dp, batch_size=50), 0, 9)
    assert of_client.local.batch_size == 9
    (event,) = of_client.events(1)
    assert event.sampling_rate == 1


def test_all_noise_together_has_the_root_of_the_sum_of_squares():
    defense = [
        {"kind": "gaussian_noise", "sigma": 0.3},
        {"kind": "sign"},
        {"kind": "gaussian_noise", "sigma": 0.4},
        {"kind": "gaussian_noise", "sigma": 9.0, "clients": [1]},
    ]
    assert protection(experiment_of(*defense), 0, 9).noise_scale() == pytest.approx(0.5)
    assert protection(experiment_of({"kind": "sign"}), 0, 9).noise_scale() is None


def test_the_scale_of_relative_noise_is_not_granted():
    relative = {"kind": "gaussian_noise", "relative": 0.3}
    for defense in ([relative], [{"kind": "gaussian_noise", "sigma": 0.3}, relative]):
        assert protection(experiment_of(*defense), 0, 9).noise_scale() is None
        granted = {**tables(), "defense": defense, "threat": {"knows": ["noise_scale"]}}
        with pytest.raises(ConfigError, match=r"threat[.]knows has noise_scale.* a sigma"):
            protection(parse(granted), 0, 9)


def test_of_two_dp_sgd_the_one_that_trains_is_counted_or_both_are_refused():
    first, last = ({"kind": "dp_sgd", "noise_multiplier": noise} for noise in (1.0, 2.0))
    try:
        both = protection(experiment_of(first, last), 0, 9)
    except ConfigError:
        return
    alone = protection(experiment_of(last), 0, 9)
    assert both.local == alone.local
    assert both.noise_scale() == alone.noise_scale()
    assert both.events(1) == alone.events(1)
