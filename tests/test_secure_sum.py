"""Rounding as Flower's SecAgg+ does it, and the sum of what was rounded."""

import math

import numpy as np
import pytest
import torch
from flwr.common.secure_aggregation import quantization
from flwr.common.secure_aggregation.ndarrays_arithmetic import parameters_multiply
from means import mean_update

from fedleak.audit import defense_checks
from fedleak.config.checks import check_defenses
from fedleak.config.loading import parse
from fedleak.defenses.secure_sum import SecureSum
from fedleak.models import loading
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.util.errors import ConfigError
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

FLOWERS = SecureSum(clipping=8.0, max_weight=1000.0)
FINE = SecureSum(clipping=0.02, max_weight=8.0)
COARSE = SecureSum(clipping=0.004, max_weight=3.0, levels=3000)
TABLE = {
    "name": "summed",
    "model": {"name": "builtin/bert-tiny"},
    "data": {"name": "builtin/notes", "samples": 12, "held_out": 2},
    "federation": {"clients": 3, "rounds": 1, "batch_size": 2},
}


def update_of(seed, num_examples=2, scale=3e-3, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    tensors = {
        "a": scale * torch.randn(40, 30, generator=rng, dtype=dtype),
        "b": scale * torch.randn(7, generator=rng, dtype=dtype),
        "zero": torch.zeros(5, dtype=dtype),
    }
    return ClientUpdate(UpdateKind.GRADIENT, tensors, num_examples)


def rounded(defense, update, *name):
    return defense(update, rng=stream(0, *name))


def of_flower(defense, update, monkeypatch, *name):
    """What Flower's client sends and its server reads, with the draws of the stream."""
    rng = stream(0, *name)
    draws = lambda *shape: torch.rand(shape, generator=rng, dtype=torch.float64).numpy()  # noqa: E731
    monkeypatch.setattr(np.random, "rand", draws)
    levels = defense.levels
    weight = round(update.num_examples / defense.max_weight * levels)
    arrays = parameters_multiply([v.numpy() for v in update.tensors.values()], weight / levels)
    whole = quantization.quantize(arrays, defense.clipping, levels)
    back = quantization.dequantize(whole, defense.clipping, levels)
    return [torch.from_numpy(array / (weight / levels)) for array in back], whole


@pytest.mark.parametrize("defense", [FLOWERS, FINE, COARSE])
def test_rounding_is_that_of_flower_s_own_functions(defense, monkeypatch):
    update = update_of(0)
    expected, whole = of_flower(defense, update, monkeypatch, "same")
    rounded_update = rounded(defense, update, "same")
    for value, like in zip(rounded_update.tensors.values(), expected, strict=True):
        torch.testing.assert_close(value, like, rtol=1e-12, atol=1e-15)
    steps = torch.cat([torch.from_numpy(levels).flatten() for levels in whole])
    if defense is COARSE:  # where something is cut off, too
        assert int(steps.min()) == 0
        assert int(steps.max()) == defense.levels


def test_rounding_is_right_on_average_and_off_by_less_than_a_step():
    update = update_of(1)
    step = COARSE.update_claims(None, 2).step
    assert step == pytest.approx(2 * 0.004 / 3000 * 3 / 2)
    largest = COARSE.update_claims(None, 2).largest_number
    inside = update.tensors["a"].clamp(-largest, largest)
    draws = torch.stack([rounded(COARSE, update, n).tensors["a"] for n in range(400)])
    assert float((draws - inside).abs().max()) < step * (1 + 1e-9)
    # A step up or down has a variance of at most a quarter of its square.
    off = (draws.mean(0) - inside) / (step / 2 / math.sqrt(400))
    assert float(off.abs().max()) < 6
    assert float(off.square().mean()) < 1
    cut = update.tensors["a"].abs() > largest
    assert cut.any()
    assert float((draws[0][cut].abs() - largest).abs().max()) < 1e-12


def test_a_number_on_a_step_stays_there():
    once = rounded(FINE, update_of(2, dtype=torch.float32))
    exact = FINE.on_grid(once)
    for name, value in exact.tensors.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(value.float(), once.tensors[name], rtol=1e-6, atol=1e-12)
    again = rounded(FINE, exact, "other")
    for name, value in again.tensors.items():
        torch.testing.assert_close(value, exact.tensors[name], rtol=1e-9, atol=1e-12)
    assert not again.tensors["zero"].any()


def test_sixteen_bits_leave_as_thirty_two():
    rounded_update = rounded(FINE, update_of(3, dtype=torch.bfloat16))
    assert {value.dtype for value in rounded_update.tensors.values()} == {torch.float32}


def test_the_sum_is_weighted_by_whole_levels():
    updates = [rounded(FINE, update_of(n, n + 1), n) for n in range(3)]
    weights = [round((n + 1) / 8 * 2**22) for n in range(3)]
    combined = FINE.combined(iter(updates), rng=stream(0))
    assert combined.num_examples == 6
    for name, value in combined.tensors.items():
        total = sum(w * update.tensors[name] for w, update in zip(weights, updates, strict=True))
        torch.testing.assert_close(value.double(), total / sum(weights), rtol=1e-5, atol=1e-9)
    plain = mean_update(updates)
    for name, value in combined.tensors.items():
        torch.testing.assert_close(value, plain.tensors[name], rtol=1e-5, atol=1e-8)


def test_without_clipping_nothing_is_rounded():
    update = update_of(4)
    assert rounded(SecureSum(), update) is update


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"clipping": 1.0}, "clipping and max_weight belong together"),
        ({"max_weight": 8}, "clipping and max_weight belong together"),
        ({"protocol": "secagg+"}, "give clipping and max_weight"),
        ({"clipping": 1.0, "max_weight": 8, "levels": 4000}, "fewer than 1,000 for each"),
        ({"clipping": 1.0, "max_weight": 1, "levels": 4001}, "levels"),
        ({"clipping": 0.0, "max_weight": 8}, "clipping"),
        ({"clipping": 1.0, "max_weight": 8, "protocol": "secagg"}, "protocol"),
        ({"threshold": 0.0}, "threshold"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        parse(TABLE | {"defense": [{"kind": "secure_sum", **settings}]})


@pytest.mark.parametrize(
    ("settings", "federation", "more", "words"),
    [
        ({"max_weight": 1.0}, {}, [], "2 examples in a round, and max_weight = 1: raise"),
        ({"protocol": "secagg+"}, {"clients_per_round": 1}, [], "two updates or more"),
        ({"protocol": "secagg+", "levels": 2**30}, {"clients": 4}, [], "beyond the 2"),
        (
            {"protocol": "secagg+"},
            {},
            [{"kind": "freeze", "parameters": ["t2"], "clients": [1]}],
            "freeze the same for all",
        ),
    ],
)
def test_rounds_that_cannot_be_summed_are_refused(settings, federation, more, words):
    sums = {"kind": "secure_sum", "clipping": 0.1, "max_weight": 4.0} | settings
    table = TABLE | {"federation": TABLE["federation"] | federation, "defense": [sums, *more]}
    experiment = parse(table)
    model = loading.outline(experiment.model_spec(2))
    with pytest.raises(ConfigError, match=words):
        check_defenses(experiment, model)


def test_a_client_with_too_many_examples_is_refused():
    with pytest.raises(ConfigError, match="has 9 examples in a round, and max_weight = 8"):
        rounded(FINE, update_of(0, 9))


def test_it_is_applied_last_wherever_it_stands():
    sums = {"kind": "secure_sum", "clipping": 0.1, "max_weight": 4.0}
    experiment = parse(TABLE | {"defense": [sums, {"kind": "mask", "fraction": 0.5}]})
    assert list(experiment.defenses_of(0)) == [1, 0]


# --- the check ------------------------------------------------------------------------------


def findings_of(**settings):
    findings = defense_checks.check(
        parse(TABLE | {"defense": [{"kind": "secure_sum", **settings}]})
    )
    return [finding for finding in findings if "secure_sum" in finding.defense]


def test_the_check_says_what_rounding_does_apart_from_summing():
    def error_of(finding):
        return float(finding.figures.split("the error is ")[1].split()[0])

    fine, *summing = findings_of(clipping=2.0, max_weight=4.0)
    assert "cut off at 2 and moves by less than a step of 9.54e-07" in fine.claim
    # With Flower's own clipping and weight the step is a thousand times as long.
    coarse, *others = findings_of(clipping=8.0, max_weight=1000.0)
    assert "a step of 0.000954" in coarse.claim
    assert all(finding.holds for finding in (fine, coarse, *summing, *others))
    assert error_of(fine) < 1e-3 < 1e-2 < error_of(coarse)
    assert len(summing) == 2


def test_rounding_that_is_not_the_one_claimed_is_found(monkeypatch):
    exact = SecureSum._in_steps
    monkeypatch.setattr(SecureSum, "_in_steps", lambda self, v, n: exact(self, v, n) + 1.5)
    (rounding, *_) = findings_of(clipping=0.1, max_weight=4.0)
    assert not rounding.holds
