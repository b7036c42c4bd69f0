"""An audit of anybody's training: NumPy and torch, Opacus, and bounds from scores and coins."""

import math
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedleak.training import privacy
from fedleak.training.privacy import accounting
from fedleak.training.privacy.accounting import Use
from fedleak.training.privacy.lower_bounds import gaussian_epsilon
from fedleak.util.errors import ConfigError

pytestmark = pytest.mark.core

DELTA = 1e-5


def test_nothing_heavy_is_imported():
    heavy = "torch", "scipy", "flwr", "jax", "transformers", "opacus"
    code = f"import sys, fedleak.training.privacy; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_arrays_and_tensors_have_the_same_canaries():
    arrays = {"a": np.zeros((30, 40), np.float32), "b": np.zeros(2000, np.float32)}
    tensors = {name: torch.zeros(value.shape) for name, value in arrays.items()}
    canaries = privacy.directions(arrays, 4, seed=3, step=2)
    assert canaries == privacy.directions(tensors, 4, seed=3, step=2)
    assert canaries != privacy.directions(tensors, 4, seed=3, step=3)
    for update in (arrays, tensors):
        canaries.add_(update, canaries.directions() * [1, 0, 2, 0])
        assert canaries.score(update)[[0, 2]] == pytest.approx([math.sqrt(canaries.numbers)] * 2)
    for name, value in arrays.items():
        assert np.array_equal(value, tensors[name].numpy())


@pytest.mark.parametrize("transposed", [False, True])
def test_a_canary_takes_the_place_of_the_gradient_of_its_dummy(transposed):
    gradients = torch.randn(3, 40, 30) if not transposed else torch.randn(3, 30, 40).mT
    kept = gradients[1].clone()
    canaries = privacy.directions({"a": gradients[0]}, 2, seed=0)
    canaries.put_({"a": gradients}, [1, -1, 0], [True, False], norm=3.0)
    expected = torch.zeros(40, 30)
    canaries.add_({"a": expected}, canaries.directions() * [3.0, 0.0])
    assert torch.equal(gradients[1], kept)
    assert torch.equal(gradients[2], expected)
    assert float(expected.norm()) == pytest.approx(3.0)
    assert not gradients[0].any(), "its canary is out"


def test_dummies_stand_behind_the_examples():
    records = privacy.WithDummies(["a", "b", "c"], 5)
    assert list(records) == [
        *(("a", -1), ("b", -1), ("c", -1)),
        *(("a", 0), ("b", 1), ("c", 2), ("a", 3), ("b", 4)),
    ]
    assert len(records) == 8


def test_coins_are_fair_and_fresh():
    assert abs(privacy.flip(10_000).mean() - 0.5) < 5 * 0.5 / math.sqrt(10_000)
    assert not np.array_equal(privacy.flip(64), privacy.flip(64))


STEPS, NORM = 6, 0.5


def audited(noise, *, rate=0.0, count=128, seed=0, change=lambda optimizer: None, takes_all=False):
    """Trains with Opacus, which announces noise of 1, and returns what the audit finds."""
    torch.manual_seed(seed)
    audit = privacy.Audit(count, 10 * NORM, seed, np.random.default_rng(seed).random(count) < 0.5)
    records = audit.records(TensorDataset(torch.randn(64, 200), torch.randn(64, 200)))
    size = round(rate * len(records)) or len(records)
    model = nn.Linear(200, 200)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(records, batch_size=len(records) if takes_all else size),
            noise_multiplier=noise,
            max_grad_norm=NORM,
            poisson_sampling=rate > 0 and not takes_all,
        )
        change(optimizer)
        batches = (batch for _ in range(STEPS) for batch in loader)
        for _, ((x, y), canary) in zip(range(STEPS), batches, strict=False):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            parameters = dict(model.named_parameters())
            audit.put_({name: p.grad_sample for name, p in parameters.items()}, canary)
            optimizer.step()
            audit.score({name: p.grad for name, p in parameters.items()})
    rate = 1 / len(loader) if rate else 1.0
    steps = (Use(1.0, 0.25 if takes_all else rate, STEPS),)
    return audit.findings(
        epsilon=accounting.epsilon(steps, DELTA, "rdp"),
        delta=DELTA,
        noise_multiplier=1.0,
        sampling_rate=0.25 if takes_all else rate,
    )


def without_clipping(optimizer):
    def clip_and_accumulate():
        for p in optimizer.params:
            p.summed_grad = p.grad_sample.sum(0)

    optimizer.clip_and_accumulate = clip_and_accumulate


def test_opacus_does_what_it_says():
    findings = audited(1.0)
    assert not findings.alarms
    spent = gaussian_epsilon(math.sqrt(STEPS), DELTA)
    assert 0.6 * spent < findings.training.gaussian < spent
    assert 0 < findings.training.epsilon_delta < findings.training.f_dp < spent
    assert 0.6 * gaussian_epsilon(1.0, DELTA) < findings.step < gaussian_epsilon(1.0, DELTA)
    assert findings.draws == STEPS * 128


def test_opacus_samples_as_it_says():
    findings = audited(1.0, rate=0.25)
    assert not findings.alarms
    assert findings.training.gaussian is None
    assert findings.expected_draws == STEPS * 128 / 4
    assert 0 < findings.step < gaussian_epsilon(1.0, DELTA)
    assert "128 canaries in 6 steps, drawn" in str(findings)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"noise": 0.5}, "the training has an epsilon of at least"),
        ({"noise": 0.5, "rate": 0.25}, "a step without sampling has an epsilon of at least"),
        ({"noise": 1.0, "change": without_clipping}, "a step without sampling has an epsilon"),
        (
            {"noise": 1.0, "rate": 0.25, "takes_all": True},
            "draws took a record, where a share of 0.25 is announced",
        ),
    ],
    ids=["half the noise", "half the noise, sampled", "no clipping", "a sampler that takes all"],
)
def test_a_mistake_contradicts_what_opacus_announces(broken, message):
    findings = audited(**broken)
    assert any(message in alarm for alarm in findings.alarms)
    assert f"CONTRADICTED: {findings.alarms[0]}" in str(findings)


def test_an_honest_training_is_seldom_accused():
    """Of 100 trainings of noise alone none is: 0.1 are expected."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        audit = privacy.Audit(16, 5.0, seed, rng.random(16) < 0.5)
        for _ in range(4):
            drawn = np.flatnonzero(rng.random(16) < 0.5)
            gradients = {"a": np.empty((len(drawn), 4096), np.float32)}
            audit.put_(gradients, drawn)
            audit.score({"a": gradients["a"].sum(0) / 5.0 + rng.standard_normal(4096)})
        epsilon = accounting.epsilon((Use(1.0, 0.5, 4),), DELTA, "rdp")
        findings = audit.findings(
            epsilon=epsilon, delta=DELTA, noise_multiplier=1.0, sampling_rate=0.5
        )
        assert not findings.alarms


def test_a_signed_canary_is_twice_as_far_from_its_opposite():
    rng = np.random.default_rng(0)
    coins = rng.random(4000) < 0.5
    scores = rng.standard_normal((3, 4000)) + np.where(coins, 0.5, -0.5)
    shown = privacy.bounds(scores, coins, delta=DELTA, noise_multiplier=1.0, signed=True)
    assert shown.gaussian == pytest.approx(gaussian_epsilon(math.sqrt(3), DELTA), rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scores": np.zeros((2, 3))}, r"scores of shape \(2, 3\) for 4 coins"),
        ({"scores": np.full(4, np.nan)}, "scores: not every number is finite"),
        ({"delta": 0.0}, "delta = 0, confidence = 0.95"),
        ({"sampling_rate": 1.5}, "sampling_rate = 1.5"),
        ({"noise_multiplier": 0.0}, "noise_multiplier = 0: give a number above 0"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        privacy.bounds(**{"scores": np.zeros(4), "coins": [True] * 4, "delta": DELTA} | arguments)


@pytest.mark.parametrize(("size", "message"), [(100, "has no room"), (600, "has room for 2")])
def test_an_update_has_room_for_so_many(size, message):
    with pytest.raises(ConfigError, match=message):
        privacy.directions({"a": np.zeros(size)}, 3, seed=0)
