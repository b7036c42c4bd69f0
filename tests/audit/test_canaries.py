"""Canaries end to end: what they score, the bounds they give, and the mistakes that they betray."""

import dataclasses
import math
import statistics
from contextlib import contextmanager

import pytest
import tomli_w
import torch
from planted import canary_row, clipping_of_the_mean, long_texts_clipped_less
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from scipy.stats import binom, kstest, norm
from tiny import call, tables

from fedleak.audit import defense_checks, scoring
from fedleak.audit.privacy import canaries, ledger
from fedleak.config.loading import parse
from fedleak.defenses.dp_sgd import DpSgd
from fedleak.defenses.local_dp import LocalDp
from fedleak.flower.client import context as client_context
from fedleak.flower.engines import train
from fedleak.running import preparation
from fedleak.store.records import CANARIES, LedgerRow
from fedleak.store.run import EVERYONE, Key, Run
from fedleak.store.summaries import SUMMARY
from fedleak.training import private_steps
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.privacy import accounting
from fedleak.training.settings import LocalTraining
from fedleak.training.truth import GroundTruth
from fedleak.util.errors import ConfigError
from fedleak.util.rng import stream

MODEL = {"name": "smaller than builtin/bert-tiny: `folder`"}
DP_SGD = {"kind": "dp_sgd", "noise_multiplier": 1.0, "max_grad_norm": 0.5, "sampling": "fixed"}
POISSON = DP_SGD | {"sampling": "poisson"}
LOCAL_DP = {"kind": "local_dp", "max_norm": 0.5, "noise_multiplier": 0.5}
SECURE_SUM = {"kind": "secure_sum"}
FEDAVG = {"algorithm": "fedavg", "local_epochs": 2}


@pytest.fixture(scope="module", autouse=True)
def folder(saved):
    """Makes a model of one layer, of the built-in one's vocabulary: it costs a twentieth."""
    MODEL["name"] = saved("bert", layers=1)


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Leaves out the check before a run, which finds some of the mistakes first, and old caches."""
    client_context._protection.cache_clear()
    monkeypatch.setattr(defense_checks, "refuse_broken", lambda *_: None)


def experiment_of(*defense, federation=(), count=64, samples=8, **changes):
    return parse(
        tables(
            {
                "model": MODEL,
                "data": {"name": "builtin/notes", "samples": samples, "held_out": 4},
                "federation": {"clients": 2, "rounds": 2, "batch_size": 2, "learning_rate": 0.1}
                | dict(federation),
                "canary": {"count": count},
                "defense": list(defense),
                "utility": {"rounds": []},
                "attack": [],
            }
            | changes
        )
    )


def audited(path, experiment):
    """Trains and scores, without attacks."""
    run = preparation.prepare(experiment, path / "run")
    train(run, experiment, lambda: False)
    scoring.score_run(run)
    return run


def bounds(run):
    return run.read_document(SUMMARY).canary


def split(run):
    """Scores of canaries that are in, and of those that are out."""
    rows = run.rows(CANARIES)
    pairs = [pair for row in rows for pair in zip(row.scores, row.inside, strict=True)]
    return [z for z, inside in pairs if inside], [z for z, inside in pairs if not inside]


# --- what is right ------------------------------------------------------------------------------


def test_all_alarms_together_are_as_seldom_as_they_say(monkeypatch):
    shares = []
    monkeypatch.setattr(canaries, "_contradiction", lambda cell, alpha, delta: shares.append(alpha))
    canaries.summarised(experiment_of(DP_SGD), [canary_row(client) for client in range(3)], [])
    kinds = 3  # of bounds, each of which may be wrong in each cell
    assert len(shares) == 4  # three clients, and all together
    assert kinds * sum(shares) == pytest.approx(canaries.ALARM * kinds / (kinds + 2))


def test_clients_and_examples_share_the_error_of_all_alarms(monkeypatch):
    shares = []
    monkeypatch.setattr(canaries, "_contradiction", lambda cell, alpha, delta: shares.append(alpha))
    rows = [canary_row(0), canary_row(1), canary_row(2, whole=True)]
    canaries.summarised(experiment_of(DP_SGD), rows, [])
    all_together = canaries.ALARM / canaries.TESTS
    assert shares == pytest.approx([all_together / 2] + [all_together / 6] * 3)


def test_a_sampled_canary_is_as_likely_as_all_the_steps_it_may_be_in():
    rate, steps, noise, numbers = 0.3, 5, 2.0, 100
    row = canary_row(0).model_copy(
        update={"rate": rate, "steps": steps, "uses": steps, "numbers": numbers}
    )
    spent = LedgerRow.nothing_guaranteed(Key(1, 0)).model_copy(
        update={"epsilon": 1.0, "noise_multiplier": noise}
    )
    expected = []
    for score in row.scores:
        ratio = 0.0
        for n in range(steps + 1):
            mean = n / (math.sqrt(steps) * noise)
            mean /= math.sqrt(1 + mean**2 / numbers)
            ratio += binom.pmf(n, steps, rate) * norm.pdf(score, mean) / norm.pdf(score)
        expected.append(math.log(ratio))
    assert canaries.Tally(0, (row,), spent).scores == pytest.approx(expected, rel=1e-9)


def test_witnesses_that_agree_by_chance_are_no_alarm():
    spent = LedgerRow.nothing_guaranteed(Key(1, 0)).model_copy(update={"epsilon": 1.0})
    first = torch.zeros(16)
    first[0] = 4.0

    def alarms(deviations):
        second = torch.zeros(16)
        second[0] = deviations
        rows = [
            canary_row(0, witnesses=tuple(first.tolist())),
            canary_row(0, 2, witnesses=tuple(second.tolist())),
        ]
        return canaries._reused_noise([canaries.Tally(0, tuple(rows), spent)], sums=False)

    assert not alarms(3.4)  # p = 0.0007: between the alarms of all tests, and the share of this one
    assert alarms(3.8)  # p = 0.00014


def test_the_share_of_noise_is_that_of_squares():
    update = ClientUpdate(UpdateKind.GRADIENT, {"a": torch.full((4,), 2.0)}, 1)
    truth = GroundTruth(round=1, client=0, sequences=(), labels=(), batch_size=1, noise_scale=0.5)
    assert canaries._noise_share(update, truth) == pytest.approx(4 * 0.5**2 / (4 * 2.0**2))


def test_scores_are_what_the_noise_makes_them_and_bounds_stay_below_the_ledger(tmp_path):
    run = audited(tmp_path, experiment_of(DP_SGD, count=128))
    inside, outside = split(run)
    assert len(inside) + len(outside) == 4 * 128
    assert abs(sum(inside) / len(inside) - 1) < 4 / math.sqrt(len(inside))
    assert kstest(outside, "norm").pvalue > 0.01
    assert kstest([z - 1 for z in inside], "norm").pvalue > 0.01
    summary = bounds(run)
    assert not summary.alarms
    assert [row.client for row in summary.bounds] == [EVERYONE, 0, 1]
    for row in summary.bounds:
        assert 0 < row.gaussian < row.epsilon
        assert 0 < row.epsilon_delta < row.f_dp < row.epsilon
        assert not row.in_copies
    # Two rounds of a pass: a canary takes part in one, as an example does.
    assert [row.slot for row in run.rows(CANARIES)] == [0, 0, 1, 1]
    assert summary.bounds[0].canaries == 4 * 128


@pytest.mark.parametrize(
    ("federation", "mean"), [({}, 2.0), (FEDAVG, 2 * math.sqrt(2 / 2))], ids=["fedsgd", "fedavg"]
)
def test_a_canary_takes_part_as_an_example_does(tmp_path, federation, mean):
    """Of FedAvg it is in one of two batches of both epochs: 2 of 4 noisy steps."""
    noise = DP_SGD | {"noise_multiplier": 0.5}
    run = audited(tmp_path, experiment_of(noise, federation={"rounds": 1} | federation))
    inside, outside = split(run)
    assert abs(sum(inside) / len(inside) - mean) < 4 / math.sqrt(len(inside))
    assert abs(sum(outside) / len(outside)) < 4 / math.sqrt(len(outside))


def test_sampled_canaries_take_part_now_and_then_and_have_no_gaussian_estimate(tmp_path):
    noise = POISSON | {"noise_multiplier": 0.02}
    run = audited(tmp_path, experiment_of(noise, count=128))
    inside, outside = split(run)
    taking_part = [z for z in inside if z > 10]
    assert abs(len(taking_part) / len(inside) - 0.5) < 4 * math.sqrt(0.25 / len(inside))
    assert max(outside) < 6
    bound = bounds(run).bounds[0]
    assert bound.gaussian is None
    assert 0 < bound.epsilon_delta < bound.f_dp


def test_what_guarantees_nothing_is_audited_in_a_copy(tmp_path):
    """The updates, and so the global model, are what they are without canaries."""
    noise = {"kind": "gaussian_noise", "sigma": 0.25}
    with_canaries = audited(tmp_path / "a", experiment_of(noise))
    without = audited(tmp_path / "b", experiment_of(noise, canary=None))
    for key in without.captures.all_keys():
        audited_capture, plain_capture = (
            with_canaries.captures.read_capture(key),
            without.captures.read_capture(key),
        )
        for name, value in audited_capture.update.tensors.items():
            assert torch.equal(value, plain_capture.update.tensors[name])
    inside, outside = split(with_canaries)
    # Norm 1 in a mean of two: half of it beside noise of a quarter.
    assert abs(sum(inside) / len(inside) - 2) < 4 / math.sqrt(len(inside))
    assert kstest(outside, "norm").pvalue > 0.01
    summary = bounds(with_canaries)
    assert summary.bounds[0].in_copies
    assert summary.bounds[0].epsilon == accounting.NONE
    assert not summary.alarms


@pytest.mark.parametrize(
    "others", [[], pytest.param([{"kind": "mask", "fraction": 0.5}], marks=pytest.mark.slow)]
)
def test_a_whole_update_is_a_canary_where_all_of_a_client_is_protected(tmp_path, others):
    run = audited(
        tmp_path,
        experiment_of(LOCAL_DP, *others, count=16, federation={"clients": 4, "rounds": 1}),
    )
    summary = bounds(run)
    together, alone = summary.bounds[0], summary.bounds[1:]
    assert (together.canaries, together.unit, together.in_copies) == (64, "client", True)
    assert {row.canaries for row in alone} == {16}
    signed = [
        z if plus else -z
        for row in run.rows(CANARIES)
        for z, plus in zip(row.scores, row.inside, strict=True)
    ]
    # The norm C beside noise of 2 C sigma; half of it where a mask leaves half of the numbers.
    mean = (1 / (2 * 0.5)) * math.sqrt(0.5 if others else 1.0)
    assert abs(sum(signed) / 64 - mean) < 4 / math.sqrt(64)
    # Each copy has fresh noise: with the same, all scores would be off by the same amount.
    assert 0.6 < statistics.stdev(signed) < 1.4
    assert not summary.alarms
    assert all(row.gaussian <= row.epsilon for row in summary.bounds)


@pytest.mark.parametrize("defense", [[DP_SGD, SECURE_SUM], [SECURE_SUM]], ids=["noise", "plain"])
def test_canaries_are_seen_in_a_sum_of_clients(tmp_path, defense):
    run = audited(tmp_path, experiment_of(*defense))
    assert run.captures.all_keys() == [Key(1, EVERYONE), Key(2, EVERYONE)]
    inside, outside = split(run)
    assert kstest(outside, "norm").pvalue > 0.01
    if DP_SGD in defense:  # the noise of two clients
        assert abs(sum(inside) / len(inside) - 1 / math.sqrt(2)) < 4 / math.sqrt(len(inside))
    else:
        # The other client's gradient is in the way.
        assert sum(inside) / len(inside) > 10
    assert not bounds(run).alarms


def test_canaries_are_where_something_is_sent(tmp_path):
    run = audited(
        tmp_path,
        experiment_of(
            DP_SGD | {"noise_multiplier": 0.1},
            {"kind": "freeze", "parameters": ["attention"], "clients": [1]},
            {"kind": "prune", "fraction": 0.5},
            update={"share": ["layer.", "classifier"]},
            count=16,
        ),
    )
    inside, outside = split(run)
    assert min(inside) > 4
    assert abs(max(outside)) < 5
    assert not bounds(run).alarms


@pytest.mark.slow
def test_only_the_clients_that_are_named_take_in_canaries(tmp_path):
    run = audited(tmp_path, experiment_of(DP_SGD, canary={"count": 8, "clients": [1]}))
    assert {row.client for row in run.rows(CANARIES)} == {1}
    assert [row.client for row in bounds(run).bounds] == [1]


@pytest.mark.slow
def test_the_seed_moves_the_canaries_and_not_the_coins(tmp_path):
    run = audited(tmp_path / "a", experiment_of(DP_SGD, canary={"count": 8}))
    reseeded_run = audited(tmp_path / "b", experiment_of(DP_SGD, canary={"count": 8, "seed": 5}))
    first, second = run.rows(CANARIES)[0], reseeded_run.rows(CANARIES)[0]
    assert first.inside == second.inside
    assert first.scores != second.scores


def test_scores_outlive_captures_and_coins(tmp_path):
    run = audited(tmp_path, experiment_of(DP_SGD, count=8))
    before, summary = run.rows(CANARIES), bounds(run)
    for folder in ("captures", "vault"):
        for file in (run.path / folder).glob("r0001*"):
            file.unlink()
    scoring.score_run(run)
    assert run.rows(CANARIES) == before
    assert bounds(run) == summary


def test_a_damaged_copy_is_said(tmp_path):
    run = audited(tmp_path, experiment_of(count=8))
    (run.path / "vault" / "r0001-c00.safetensors").write_bytes(b"nothing")
    (run.path / "vault" / "r0001-c01.safetensors").unlink()
    (run.path / "canaries.jsonl").unlink()
    scoring.score_run(run)
    (missing,) = [
        message for message in run.read_document(SUMMARY).missing if "canaries" in message
    ]
    assert "r0001-c00 cannot be scored" in missing
    (note,) = [message for message in run.read_document(SUMMARY).notes if "canaries" in message]
    assert note == "the audited copy of r0001-c01 is not here: its canaries have no score"
    assert len(run.rows(CANARIES)) == 2


def test_a_capture_of_no_number_is_named_and_the_others_are_scored(tmp_path):
    run = audited(tmp_path, experiment_of(count=8))
    file = run.path / "captures" / "r0001-c00.safetensors"
    with safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(file)
    next(iter(tensors.values())).fill_(torch.nan)
    save_file(tensors, file, metadata)
    (run.path / "canaries.jsonl").unlink()
    scoring.score_run(run)
    (missing,) = [line for line in run.read_document(SUMMARY).missing if "canaries" in line]
    assert missing.endswith("not every number of r0001-c00 is finite")
    assert len(run.rows(CANARIES)) == 3


@pytest.mark.parametrize(
    ("canary", "message"),
    [
        ({"count": 100_000}, "canary.count = 100000: client 0 sends "),
        ({"clients": [2]}, "canary.clients has 2, but federation.clients = 2: choose from 0 to 1"),
    ],
)
def test_canaries_that_cannot_be_are_refused(tmp_path, canary, message):
    with pytest.raises(ConfigError, match=message):
        preparation.prepare(experiment_of(canary=canary), tmp_path / "run")


# --- what is broken -----------------------------------------------------------------------------


def no_clipping(patch):
    patch.setattr(private_steps, "clipping_factors", lambda norms, most: torch.ones_like(norms))


def norms_without_the_embedding(patch):
    original = private_steps.per_example

    @contextmanager
    def per_example(model, *rest):
        with original(model, *rest) as hooks:
            take = hooks.get_norm_sample

            def get_norm_sample():
                model.module.get_input_embeddings().weight._norm_sample.zero_()
                return take()

            hooks.get_norm_sample = get_norm_sample
            yield hooks

    patch.setattr(private_steps, "per_example", per_example)


def other_noise(factor):
    def plant(patch):
        original = DpSgd.training

        def training(self, local):
            local_training = original(self, local)
            less = local_training.private.noise_multiplier * factor
            return dataclasses.replace(
                local_training,
                private=dataclasses.replace(local_training.private, noise_multiplier=less),
            )

        patch.setattr(DpSgd, "training", training)

    return plant


def the_same_noise(patch):
    patch.setattr(
        private_steps,
        "stream",
        lambda seed, name: stream(1 if name == "private" else seed, name),
    )


def a_ledger_that_begins_anew(patch):
    original = accounting.compose
    patch.setattr(ledger.accounting, "compose", lambda events, *rest: original(events[-1:], *rest))


def noise_for_another_neighbour(patch):
    """Of one update more or less, where any two updates are neighbours."""
    original = LocalDp.__call__

    def call(self, update, *, rng):
        less = dataclasses.replace(self, noise_multiplier=self.noise_multiplier / 2)
        return original(less, update, rng=rng)

    patch.setattr(LocalDp, "__call__", call)


def batches_in_place_of_sampling(patch):
    original = DpSgd.training

    def training(self, local):
        return original(dataclasses.replace(self, sampling="fixed"), local)

    patch.setattr(DpSgd, "training", training)


def local_steps_that_take_all(patch):
    def batches(training, records, seed):
        yield from [list(range(records))] * training.steps(records)

    patch.setattr(LocalTraining, "batches", batches)


QUIET = LOCAL_DP | {"noise_multiplier": 0.125}
EIGHT = {"clients": 8, "rounds": 1, "batch_size": 1}
WHOLE_BATCHES = {"batch_size": 4, "rounds": 4}
"""A client's batch is all that it has, so every example is in every round."""

LOCAL_STEPS = {"algorithm": "fedavg", "local_epochs": 1, "learning_rate": 0.1, "rounds": 1}

SAMPLED = (batches_in_place_of_sampling, local_steps_that_take_all)

MISTAKES = [
    (no_clipping, DP_SGD, {}, 64),
    (clipping_of_the_mean, DP_SGD, WHOLE_BATCHES, 8),
    (long_texts_clipped_less, DP_SGD, {}, 64),
    (norms_without_the_embedding, DP_SGD, {}, 64),
    (other_noise(1e-3), DP_SGD, {}, 16),
    (other_noise(1 / 2), DP_SGD, {}, 64),
    (the_same_noise, DP_SGD, {}, 8),
    (a_ledger_that_begins_anew, DP_SGD, WHOLE_BATCHES, 128),
    (noise_for_another_neighbour, QUIET, EIGHT, 1),
    (batches_in_place_of_sampling, POISSON, {}, 128),
    (local_steps_that_take_all, POISSON, LOCAL_STEPS, 128),
]
NAMES = [
    "no clipping",
    "clipping of the mean",
    "long texts clipped less",
    "norms without the embedding",
    "no noise",
    "noise divided by the batch twice",
    "the same noise in all updates",
    "a ledger that begins anew",
    "the noise of another neighbouring relation",
    "fixed batches announced as Poisson",
    "local steps that take all",
]


def showing(plant, defense, federation, count):
    """A run that shows a mistake."""
    samples = 64 if plant in SAMPLED else 4 * federation.get("clients", 2)
    return experiment_of(defense, federation=federation, count=count, samples=samples)


RARELY = ("clipping of the mean", "no noise")
"""The check of defenses finds the first, and the command is tried on the second."""


@pytest.mark.parametrize(
    ("plant", "defense", "federation", "count"),
    [
        pytest.param(*case, id=name, marks=[pytest.mark.slow] if name in RARELY else [])
        for name, case in zip(NAMES, MISTAKES, strict=True)
    ],
)
def test_a_mistake_contradicts_the_ledger(monkeypatch, tmp_path, plant, defense, federation, count):
    experiment = showing(plant, defense, federation, count)
    with monkeypatch.context() as patch:
        plant(patch)
        alarms = bounds(audited(tmp_path, experiment)).alarms
    assert alarms, bounds(Run(tmp_path / "run"))
    expected = "have the same noise" if plant is the_same_noise else "and the ledger says"
    assert any(expected in alarm for alarm in alarms)
    assert all("the mechanism does not do what the ledger says" in alarm for alarm in alarms)


@pytest.mark.parametrize(
    ("defense", "federation", "count"),
    [
        (DP_SGD, WHOLE_BATCHES, 128),
        (QUIET, EIGHT, 1),
        (POISSON, {}, 128),
    ],
)
@pytest.mark.slow
def test_without_the_mistake_there_is_no_alarm(tmp_path, defense, federation, count):
    samples = 4 * federation.get("clients", 2)
    experiment = experiment_of(defense, federation=federation, count=count, samples=samples)
    summary = bounds(audited(tmp_path, experiment))
    assert not summary.alarms


def test_an_alarm_ends_the_command_with_status_1(monkeypatch, tmp_path, in_process):
    monkeypatch.chdir(tmp_path)
    experiment = experiment_of(DP_SGD, count=16, name="wrong", federation={"rounds": 1})
    settings = experiment.model_dump(mode="json", exclude_none=True)
    (tmp_path / "wrong.toml").write_text(tomli_w.dumps(settings))
    other_noise(1e-3)(monkeypatch)
    for command in (["run", "wrong.toml"], ["score", "runs/wrong"]):
        status, text, errors = call(*command)
        assert status == 1
        assert "the mechanism does not do what the ledger says" in errors
        assert "accounted" in text
    status, _, _ = call("report", "runs/wrong")
    assert status == 1
    assert "Contradicted:" in (tmp_path / "runs" / "wrong" / "report.html").read_text()
    status, text, _ = call("gate", "runs/wrong", "--set", 'gate.require=["canary"]')
    assert status == 3
    assert "EXCEEDED  canaries of clients: canaries of 2 clients together show" in text
