"""Defenses that do what they say pass; broken ones, as published and imagined, do not."""

import dataclasses
import json
import math
import tomllib
from contextlib import nullcontext

import pytest
import torch
from flwr.app import Context, RecordDict
from means import mean_update
from planted import clipping_of_the_mean, long_texts_clipped_less, other_noise, other_sampler
from typer.testing import CliRunner

from fedleak import defenses
from fedleak.audit import defense_checks, scoring
from fedleak.audit.defense_checks import bench, sampling, sent_update
from fedleak.cli import app
from fedleak.config.federation.protection import Protection
from fedleak.config.loading import parse
from fedleak.defenses.adaptive_clipping import AdaptiveClipping
from fedleak.defenses.cast import Cast
from fedleak.defenses.central_dp import CentralDp
from fedleak.defenses.clip import Clip, clipped
from fedleak.defenses.dp_ftrl import DpFtrl
from fedleak.defenses.dp_sgd import DpSgd
from fedleak.defenses.freeze import Freeze
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.defenses.laplace_noise import LaplaceNoise
from fedleak.defenses.local_dp import LocalDp
from fedleak.defenses.mask import Mask
from fedleak.defenses.prune import Prune
from fedleak.defenses.quantize import Quantize
from fedleak.defenses.secure_sum import SecureSum
from fedleak.defenses.sign import Sign
from fedleak.flower.client.app import app as client_app
from fedleak.flower.engines import train
from fedleak.flower.inline import InlineGrid
from fedleak.flower.server.app import app as server_app
from fedleak.running import pipeline, preparation
from fedleak.running.dispatch import dispatcher
from fedleak.store.captures import Captures
from fedleak.store.run import Run
from fedleak.training import private_steps
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.privacy import lower_bounds
from fedleak.util.errors import ConfigError, FedleakError

SMALL = {"name": "smaller than builtin/bert-tiny: `folder`"}
TABLE = {
    "name": "checked",
    "seed": 3,
    "model": SMALL,
    "data": {"name": "builtin/notes", "samples": 12, "held_out": 2},
    "federation": {"clients": 2, "rounds": 2, "batch_size": 2, "learning_rate": 0.1},
    "workers": {"devices": ["cpu"]},
}
BERT = {"name": "builtin/bert-tiny"}
GPT2 = {"name": "builtin/gpt2-tiny", "task": "causal-lm"}

CAST = {"kind": "cast", "dtype": "bfloat16"}
CLIP = {"kind": "clip", "max_norm": 0.5}
DP_SGD = {"kind": "dp_sgd", "noise_multiplier": 1.0, "max_grad_norm": 0.5}
FREEZE = {"kind": "freeze", "parameters": ["t1"]}
GAUSS = {"kind": "gaussian_noise", "sigma": 1e-3}
RELATIVE = {"kind": "gaussian_noise", "relative": 0.3}
LAPLACE = {"kind": "laplace_noise", "scale": 1e-3}
LOCAL_DP = {"kind": "local_dp", "max_norm": 0.5, "noise_multiplier": 0.01}
MASK = {"kind": "mask", "fraction": 0.3}
PRUNE = {"kind": "prune", "fraction": 0.9}
QUANTIZE = {"kind": "quantize", "bits": 4}
SECURE_SUM = {"kind": "secure_sum"}
ROUNDED_SUM = SECURE_SUM | {"clipping": 2.0, "max_weight": 4.0}
CENTRAL_DP = {"kind": "central_dp", "max_norm": 0.5, "noise_multiplier": 0.1}
DP_FTRL = CENTRAL_DP | {"kind": "dp_ftrl"}
ADAPTIVE = CENTRAL_DP | {"kind": "adaptive_clipping"}
SIGN = {"kind": "sign"}
STOCHASTIC = {"kind": "quantize", "bits": 6, "stochastic": True}
ALL = [
    *(DP_SGD, FREEZE, GAUSS, RELATIVE, LAPLACE, CLIP, LOCAL_DP, MASK, PRUNE),
    *(QUANTIZE, STOCHASTIC, SIGN, CAST, SECURE_SUM),
]
DIFFERS = "the captured update differs from the raw one"


@pytest.fixture(scope="module", autouse=True)
def folder(saved):
    """Makes a model of one layer, of the built-in one's vocabulary: it costs a twentieth."""
    SMALL["name"] = saved("bert", layers=1)


def experiment_of(*defense, **tables):
    return parse(TABLE | {"defense": list(defense)} | tables)


def broken(findings):
    return [(finding.defense, finding.claim) for finding in findings if not finding.holds]


# --- what is right ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "algorithm"),
    [
        (SMALL, "fedsgd"),
        pytest.param(BERT, "fedsgd", marks=pytest.mark.slow),
        pytest.param(GPT2, "fedavg", marks=pytest.mark.slow),
        pytest.param(BERT, "fedavg", marks=pytest.mark.slow),
        pytest.param(GPT2, "fedsgd", marks=pytest.mark.slow),
        pytest.param({"name": "builtin/llama-tiny"}, "fedsgd", marks=pytest.mark.slow),
    ],
)
def test_every_defense_does_what_it_says(model, algorithm):
    assert {
        table["kind"] for table in [*ALL, ADAPTIVE, CENTRAL_DP, DP_FTRL]
    } == defenses.kinds().keys()
    federation = TABLE["federation"] | {"algorithm": algorithm, "local_epochs": 2}
    findings = defense_checks.check(experiment_of(*ALL, model=model, federation=federation))
    assert not broken(findings), [finding for finding in findings if not finding.holds]
    claims = {
        number: [f.claim for f in findings if f.defense == f"defense[{number}] ({table['kind']})"]
        for number, table in enumerate(ALL)
    }
    for number, table in enumerate(ALL):
        first, *others = claims[number]
        if table is SECURE_SUM:
            assert "neither of two" in first
        else:
            assert first == DIFFERS
        noisy = ("gaussian_noise", "laplace_noise")
        number = {"dp_sgd": 8, "local_dp": 6, "cast": 0, **dict.fromkeys(noisy, 2)}
        assert len(others) == number.get(table["kind"], 1)
    assert [f.claim for f in findings if f.defense == "the update"] == [
        "what is shared and trained is sent, and nothing else",
        "the global weights move, and stay finite",
    ]


@pytest.mark.parametrize(
    ("algorithm", "table"),
    [
        ("fedsgd", CENTRAL_DP),
        ("fedavg", CENTRAL_DP),
        ("fedsgd", DP_FTRL),
        ("fedsgd", ADAPTIVE),
    ],
)
def test_a_server_that_is_trusted_with_the_noise_is_checked(algorithm, table):
    federation = TABLE["federation"] | {"algorithm": algorithm}
    findings = defense_checks.check(experiment_of(table, federation=federation))
    assert not broken(findings), [finding for finding in findings if not finding.holds]
    first, *others = [finding.claim for finding in findings if table["kind"] in finding.defense]
    if table is DP_FTRL:  # of six rounds together, too
        assert others[3:5] == others[1:3]
        del others[3:5]
    if table is ADAPTIVE:
        assert others.pop(3).startswith("the logarithm of the next clipping norm has noise")
    assert "neither of two" in first
    assert [claim.split(" by ")[0].split(" than ")[0] for claim in others] == [
        "a loud client moves the sum of updates",
        # 0.1 * 0.5 over two clients, and more where a count has noise of 0.1, too.
        f"the noise has standard deviation {0.02887 if table is ADAPTIVE else 0.025}",
        "the noise is normal, and independent from number to number",
        "the ledger counts no more noise",
        "two runs of one round spend what one run of two does, and more",
        "a step without sampling spends no more",
    ]


def test_adapters_and_shared_parts_are_checked_as_they_are_sent():
    model = SMALL | {"lora": {"rank": 4}}
    freeze = {"kind": "freeze", "parameters": ["classifier"]}
    share = {"share": ["layer.0.", "classifier"]}
    findings = defense_checks.check(experiment_of(DP_SGD, freeze, CLIP, model=model, update=share))
    assert not broken(findings), [finding for finding in findings if not finding.holds]


def test_random_words_without_a_response_check_a_loss_on_responses():
    model = {"name": "builtin/gpt2-tiny", "task": "causal-lm", "response_template": "A:"}
    data = TABLE["data"] | {"text": "Q: {instruction}\nA: {response}"}
    assert not broken(defense_checks.check(experiment_of(CLIP, model=model, data=data)))


def test_the_check_leaves_no_trace_and_says_the_same_again():
    experiment = experiment_of(MASK, GAUSS)
    state = torch.get_rng_state()
    torch.set_num_threads(2)
    first = defense_checks.check(experiment)
    assert torch.get_num_threads() == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert defense_checks.check(experiment) == first


# --- what is broken -----------------------------------------------------------------------------


def half_the_noise(patch):
    original = GaussianNoise.__call__

    def call(self, update, *, rng):
        return original(dataclasses.replace(self, sigma=self.sigma / 2), update, rng=rng)

    patch.setattr(GaussianNoise, "__call__", call)


def noise_relative_to_the_largest_tensor(patch):
    original = GaussianNoise.__call__

    def call(self, update, *, rng):
        largest = max(update.tensors.values(), key=lambda value: value.numel())
        sigma = self.relative * float(largest.square().mean().sqrt())
        return original(GaussianNoise(sigma=sigma), update, rng=rng)

    patch.setattr(GaussianNoise, "__call__", call)


def a_tenth_more_noise(patch):
    original = GaussianNoise.__call__

    def call(self, update, *, rng):
        return original(dataclasses.replace(self, sigma=1.1 * self.sigma), update, rng=rng)

    patch.setattr(GaussianNoise, "__call__", call)


def noise_that_is_not_sent(patch):
    original = GaussianNoise.__call__

    def call(self, update, *, rng):
        original(self, update, rng=rng)  # measured here, and forgotten
        return update

    patch.setattr(GaussianNoise, "__call__", call)


def noise_on_weights_alone(patch):
    original = GaussianNoise.__call__

    def call(self, update, *, rng):
        noisy = original(self, update, rng=rng).tensors
        kept = {n: noisy[n] if v.dim() > 1 else v for n, v in update.tensors.items()}
        largest = max(kept, key=lambda name: kept[name].numel())
        return dataclasses.replace(update, tensors=kept | {largest: update.tensors[largest]})

    patch.setattr(GaussianNoise, "__call__", call)


def scale_taken_for_the_deviation(patch):
    original = LaplaceNoise.__call__

    def call(self, update, *, rng):
        narrow = dataclasses.replace(self, scale=self.scale / math.sqrt(2))
        return original(narrow, update, rng=rng)

    patch.setattr(LaplaceNoise, "__call__", call)


def a_mask_of_too_few(patch):
    original = Mask.__call__

    def call(self, update, *, rng):
        return original(dataclasses.replace(self, fraction=0.9 * self.fraction), update, rng=rng)

    patch.setattr(Mask, "__call__", call)


def a_mask_that_scales(patch):
    original = Mask.__call__

    def call(self, update, *, rng):
        masked = original(self, update, rng=rng).tensors
        scaled = {name: value / (1 - self.fraction) for name, value in masked.items()}
        return dataclasses.replace(update, tensors=scaled)

    patch.setattr(Mask, "__call__", call)


def pruning_of_any(patch):
    """As many numbers as should be zero, but not the smallest."""

    def call(self, update, *, rng):
        return Mask(fraction=0.95)(update, rng=rng)

    patch.setattr(Prune, "__call__", call)


def pruning_that_scales(patch):
    original = Prune.__call__

    def call(self, update, *, rng):
        pruned = original(self, update, rng=rng).tensors
        return dataclasses.replace(update, tensors={n: 1.01 * v for n, v in pruned.items()})

    patch.setattr(Prune, "__call__", call)


def pruning_of_too_few(patch):
    original = Prune.__call__

    def call(self, update, *, rng):
        return original(dataclasses.replace(self, fraction=self.fraction - 0.05), update, rng=rng)

    patch.setattr(Prune, "__call__", call)


def clipping_of_nothing(patch):
    patch.setattr(Clip, "__call__", lambda self, update, *, rng: update)


def clipping_at_a_hundredth_more(patch):
    def call(self, update, *, rng):
        return clipped(update, 1.01 * self.max_norm)

    patch.setattr(Clip, "__call__", call)


def clipping_of_each_tensor(patch):
    def call(self, update, *, rng):
        short = {
            name: value * min(1.0, self.max_norm / max(float(value.norm()), 1e-30))
            for name, value in update.tensors.items()
        }
        return dataclasses.replace(update, tensors=short)

    patch.setattr(Clip, "__call__", call)


def noise_in_norms_and_not_in_sensitivities(patch):
    original = LocalDp.__call__

    def call(self, update, *, rng):
        less = dataclasses.replace(self, noise_multiplier=self.noise_multiplier / 2)
        return original(less, update, rng=rng)

    patch.setattr(LocalDp, "__call__", call)


def noise_without_clipping(patch):
    patch.setattr("fedleak.defenses.local_dp.clipped", lambda update, max_norm: update)


def an_event_that_a_file_changes(patch):
    patch.setattr(
        "fedleak.audit.defense_checks.privacy.asdict",
        lambda event: dataclasses.asdict(event) | {"noise_multiplier": 1.0},
    )


def clipping_of_examples_at_half_more(patch):
    training = DpSgd.training

    def looser(self, local):
        loose = dataclasses.replace(self, max_grad_norm=1.5 * self.max_grad_norm)
        steps = dataclasses.replace(
            training(loose, local).private,
            noise_multiplier=self.noise_multiplier / 1.5,  # so that the noise is what it should be
        )
        return dataclasses.replace(local, private=steps)

    patch.setattr(DpSgd, "training", looser)


def private_without_noise(patch):
    def training(self, local):
        steps = private_steps.PrivateSteps(1e-9, self.max_grad_norm, self.sampling)
        return dataclasses.replace(local, private=steps)

    patch.setattr(DpSgd, "training", training)


def plain_training(patch):
    patch.setattr(DpSgd, "training", lambda self, local: local)


def freezing_of_nothing(patch):
    patch.setattr(Freeze, "training", lambda self, local: local)


def one_bit_too_many(patch):
    original = Quantize.__call__

    def call(self, update, *, rng):
        return original(dataclasses.replace(self, bits=self.bits + 1), update, rng=rng)

    patch.setattr(Quantize, "__call__", call)


def sizes_beside_signs(patch):
    def call(self, update, *, rng):
        sent = {name: value.sign() * value.abs().sqrt() for name, value in update.tensors.items()}
        return dataclasses.replace(update, tensors=sent)

    patch.setattr(Sign, "__call__", call)


def no_cast(patch):
    patch.setattr(Cast, "__call__", lambda self, update, *, rng: update)


def a_sum_that_is_the_last(patch):
    def combined(self, updates, *, rng):
        *_, last = updates
        return last

    patch.setattr(SecureSum, "combined", combined)


def a_sum_that_is_the_first(patch):
    patch.setattr(SecureSum, "combined", lambda self, updates, *, rng: next(iter(updates)))


def rounding_to_every_sixteenth_step(patch):
    original = SecureSum.__call__

    def call(self, update, *, rng):
        coarse = dataclasses.replace(self, levels=self.levels // 16)
        return original(coarse, update, rng=rng)

    patch.setattr(SecureSum, "__call__", call)


def a_mean_of_raw_updates(patch):
    patch.setattr("fedleak.defenses.central_dp.clipped", lambda update, norm: update)


def clipping_of_clients_at_a_half_more(patch):
    original = clipped

    def looser(update, max_norm):
        return original(update, 1.5 * max_norm)

    patch.setattr("fedleak.defenses.central_dp.clipped", looser)


def noise_that_the_server_leaves_out(patch):
    def combined(self, updates, *, rng):
        return original(dataclasses.replace(self, noise_multiplier=1e-9), updates, rng=rng)

    original = CentralDp.combined
    patch.setattr(CentralDp, "combined", combined)


def clients_that_are_weighed_by_their_examples(patch):
    original = CentralDp.combined

    def combined(self, updates, *, rng):
        short = [clipped(update, self.max_norm) for update in updates]
        return original(self, [mean_update(short)] * len(short), rng=rng)

    patch.setattr(CentralDp, "combined", combined)


def noise_that_forgets_earlier_rounds(patch):
    patch.setattr(DpFtrl, "corrected", lambda self, update, *_: update)


def a_count_with_the_same_noise_in_each_round(patch):
    original = AdaptiveClipping.after

    def after(self, updates, *, rng):
        return original(self, updates, rng=torch.Generator().manual_seed(0))

    patch.setattr(AdaptiveClipping, "after", after)


def a_count_that_spends_nothing(patch):
    def combined(self, updates, *, rng):
        alone = CentralDp(max_norm=self.max_norm, noise_multiplier=self.noise_multiplier)
        return alone.combined(updates, rng=rng)

    patch.setattr(AdaptiveClipping, "combined", combined)


def a_ledger_of_more_noise(patch):
    original = DpSgd.event

    def event(self, *about):
        counted = original(self, *about)
        return dataclasses.replace(counted, noise_multiplier=1.3 * counted.noise_multiplier)

    patch.setattr(DpSgd, "event", event)


def a_ledger_of_clients_that_are_not_sampled(patch):
    original = LocalDp.event

    def event(self, *about):
        return dataclasses.replace(original(self, *about), sampling_rate=0.5, sampling="Poisson")

    patch.setattr(LocalDp, "event", event)


def drawn(shapes, rng):
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def a_seed_for_each_tensor(shapes, rng):
    seed = int(torch.randint(2**31, (), generator=rng))
    return {
        name: drawn({0: shape}, torch.Generator().manual_seed(seed))[0]
        for name, shape in shapes.items()
    }


def the_first_half_again(shapes, rng):
    noises = drawn(shapes, rng)
    for value in noises.values():
        half = value.numel() // 2
        value.view(-1)[half : 2 * half] = value.reshape(-1)[:half]
    return noises


def nothing_on_the_smallest_tensor(shapes, rng):
    noises = drawn(shapes, rng)
    noises[min(noises, key=lambda name: noises[name].numel())].zero_()
    return noises


def two_points(shapes, rng):
    return {name: noise.sign() for name, noise in drawn(shapes, rng).items()}


def a_uniform_range(shapes, rng):
    return {
        name: math.sqrt(12) * (torch.rand(shape, generator=rng) - 0.5)
        for name, shape in shapes.items()
    }


def sums_of_a_few(shapes, rng):
    noises = drawn(shapes, rng)
    for name, shape in shapes.items():
        if len(shape) == 2:
            parts = drawn({0: (shape[0], 8), 1: (8, shape[1])}, rng)
            noises[name] = parts[0] @ parts[1] / math.sqrt(8)
    return noises


def clipping_beyond_twice_the_norm(patch):
    patch.setattr(
        private_steps,
        "clipping_factors",
        lambda norms, most: torch.where(norms > 2 * most, most / norms, 1.0),
    )


def a_loss_over_the_batch_s_tokens(patch):
    original = private_steps.example_losses

    def example_losses(model, ids, mask, labels):
        return original(model, ids, mask, labels) * 8 / mask.sum()

    patch.setattr(private_steps, "example_losses", example_losses)


def a_sampler_that_takes_all(patch):
    other_sampler(patch, lambda held, *_, **__: list(range(held)))


def a_sampler_that_takes_some_twice_as_often(patch):
    original = sampling.round_batch

    def round_batch(held, local, **which):
        rest = original(held, local, **which | {"seed": which["seed"] + 1})
        return sorted({*original(held, local, **which), *(i for i in rest if i == 0)})

    other_sampler(patch, round_batch)


NOISE = "the noise has standard deviation"
INDEPENDENT = "the noise is normal, and independent from number to number"
BOUNDED = "no example of a batch moves the update by more than"
DRAWN = "each example is in a step with a probability of"
MASKED = "% of the numbers are set to zero"
ZEROS = "% of the numbers are zero"
STEP = "a step without sampling spends no more than"
COUNTED = "the ledger counts no more noise than there is"
BROKEN = [
    (RELATIVE, noise_relative_to_the_largest_tensor, [NOISE]),
    (GAUSS, half_the_noise, [NOISE]),
    (GAUSS, a_tenth_more_noise, [NOISE]),
    (GAUSS, noise_that_is_not_sent, [DIFFERS, NOISE]),
    (GAUSS, noise_on_weights_alone, [NOISE]),
    *(
        (table, other_noise(noise), [INDEPENDENT])
        for noise, table in [
            (a_seed_for_each_tensor, GAUSS),
            (a_seed_for_each_tensor, LOCAL_DP),
            (the_first_half_again, GAUSS),
            (nothing_on_the_smallest_tensor, GAUSS),
            (two_points, GAUSS),
            (a_uniform_range, LOCAL_DP),
        ]
    ),
    (GAUSS, other_noise(sums_of_a_few), [NOISE]),
    (DP_SGD, long_texts_clipped_less, [BOUNDED]),
    (DP_SGD, clipping_beyond_twice_the_norm, [BOUNDED]),
    (DP_SGD, a_loss_over_the_batch_s_tokens, [BOUNDED]),
    (DP_SGD, a_sampler_that_takes_all, [DRAWN]),
    (DP_SGD, a_sampler_that_takes_some_twice_as_often, [DRAWN]),
    (LAPLACE, scale_taken_for_the_deviation, [NOISE]),
    (MASK, a_mask_of_too_few, [MASKED]),
    (MASK, a_mask_that_scales, [MASKED]),
    (PRUNE, pruning_of_too_few, [ZEROS]),
    (PRUNE, pruning_of_any, [ZEROS]),
    (PRUNE, pruning_that_scales, [ZEROS]),
    (CLIP, clipping_of_nothing, [DIFFERS, "the update is no longer than 0.5"]),
    (CLIP, clipping_at_a_hundredth_more, ["the update is no longer than 0.5"]),
    (CLIP, clipping_of_each_tensor, ["the update is no longer than 0.5"]),
    (LOCAL_DP, noise_in_norms_and_not_in_sensitivities, [NOISE, STEP]),
    (LOCAL_DP, noise_without_clipping, ["the update is no longer than 0.5", STEP]),
    (LOCAL_DP, an_event_that_a_file_changes, ["two runs of one round spend"]),
    (DP_SGD, clipping_of_the_mean, ["a loud example moves the update by no more than 0.25", STEP]),
    (DP_SGD, clipping_of_examples_at_half_more, ["a loud example moves the update by", STEP]),
    (DP_SGD, private_without_noise, [NOISE, STEP]),
    (DP_SGD, plain_training, [DIFFERS, "a loud example moves", NOISE, DRAWN, STEP]),
    (FREEZE, freezing_of_nothing, [DIFFERS, "tensors are not sent"]),
    (QUANTIZE, one_bit_too_many, ["no more than 15 numbers a tensor"]),
    (SIGN, sizes_beside_signs, ["no more than 3 numbers a tensor"]),
    (CAST, no_cast, [DIFFERS]),
    (SECURE_SUM, a_sum_that_is_the_last, ["neither of two", "weighted mean"]),
    (SECURE_SUM, a_sum_that_is_the_first, ["neither of two", "weighted mean"]),
    (ROUNDED_SUM, rounding_to_every_sixteenth_step, ["moves by less than a step"]),
    (CENTRAL_DP, a_mean_of_raw_updates, ["a loud client moves the sum", STEP]),
    (CENTRAL_DP, clipping_of_clients_at_a_half_more, ["a loud client moves the sum", STEP]),
    (CENTRAL_DP, noise_that_the_server_leaves_out, [NOISE, STEP]),
    (CENTRAL_DP, clients_that_are_weighed_by_their_examples, ["a loud client moves the sum"]),
    (DP_FTRL, noise_that_forgets_earlier_rounds, [NOISE]),
    (ADAPTIVE, a_count_with_the_same_noise_in_each_round, ["the next clipping norm has noise"]),
    (ADAPTIVE, a_count_that_spends_nothing, [NOISE]),
    (DP_SGD, a_ledger_of_more_noise, [COUNTED]),
    (LOCAL_DP, a_ledger_of_clients_that_are_not_sampled, [COUNTED]),
]

RARELY = (
    # Of each, another case above breaks the same claims of the same defense.
    *(a_sampler_that_takes_all, private_without_noise, a_sum_that_is_the_first),
    *(clipping_of_clients_at_a_half_more, long_texts_clipped_less, clipping_of_the_mean),
)


@pytest.mark.parametrize(
    ("table", "break_it", "claims"),
    [pytest.param(*case, marks=pytest.mark.slow) if case[1] in RARELY else case for case in BROKEN],
)
def test_a_broken_defense_fails_where_it_is_broken(monkeypatch, table, break_it, claims):
    break_it(monkeypatch)
    failures = broken(defense_checks.check(experiment_of(table)))
    assert {name for name, _ in failures} == {f"defense[0] ({table['kind']})"}
    assert len(failures) == len(claims)
    for (_, claim), expected in zip(failures, claims, strict=True):
        assert expected in claim


def test_one_broken_defense_of_several_is_named_by_its_place(monkeypatch):
    a_mask_that_scales(monkeypatch)
    failures = broken(defense_checks.check(experiment_of(CLIP, GAUSS | {"clients": [1]}, MASK)))
    assert [name for name, _ in failures] == ["defense[2] (mask)"]


def test_a_parameter_that_a_client_leaves_out_is_missed(monkeypatch):
    original = bench.local_update_

    def without_one(*args, **kwargs):
        update = original(*args, **kwargs)
        rest = {n: v for n, v in update.tensors.items() if n != "classifier.bias"}
        return dataclasses.replace(update, tensors=rest)

    monkeypatch.setattr(bench, "local_update_", without_one)
    assert ("the update", "what is shared and trained is sent, and nothing else") in broken(
        defense_checks.check(experiment_of(MASK))
    )


@pytest.mark.parametrize(
    "aggregate",
    [
        pytest.param(lambda before, *_: (before, {}), id="nothing moves"),
        pytest.param(
            lambda before, *_: ({n: v + math.inf for n, v in before.items()}, {}), id="not finite"
        ),
    ],
)
def test_a_server_that_does_nothing_with_an_update_or_breaks_is_noticed(monkeypatch, aggregate):
    monkeypatch.setattr(defense_checks, "aggregate", aggregate)
    findings = defense_checks.check(experiment_of(MASK))
    assert broken(findings) == [("the update", "the global weights move, and stay finite")]


@pytest.mark.parametrize(("table", "apart"), [(LOCAL_DP, 2.0), (DP_SGD, 1.0)])
def test_canaries_are_as_far_apart_as_the_neighbours_of_the_event(monkeypatch, table, apart):
    distances, original = [], lower_bounds.gaussian_bound

    def watched(*scores, per_score):
        distances.append(per_score)
        return original(*scores, per_score=per_score)

    monkeypatch.setattr(lower_bounds, "gaussian_bound", watched)
    assert not broken(defense_checks.check(experiment_of(table)))
    assert distances == [apart]


# --- a run with a broken defense ----------------------------------------------------------------


def never(*args, **kwargs):
    raise AssertionError("trained or attacked")


@pytest.mark.parametrize(
    ("table", "break_it"),
    [
        (GAUSS, half_the_noise),
        (DP_SGD, clipping_of_the_mean),
        (FREEZE, freezing_of_nothing),
        (MASK, a_mask_that_scales),
    ],
)
def test_a_run_with_a_broken_defense_trains_nothing(tmp_path, monkeypatch, table, break_it):
    break_it(monkeypatch)
    experiment = experiment_of(CLIP, table)
    run = preparation.prepare(experiment, tmp_path / "run")
    with monkeypatch.context() as patch:
        patch.setattr("fedleak.flower.client.app.local_update_", never)
        patch.setattr(dispatcher, "attacking", never)
        with pytest.raises(FedleakError) as caught:
            pipeline.carry_out(run, experiment, train)
    message = str(caught.value)
    assert "nothing was trained" in message
    assert f"defense[1] ({table['kind']}): " in message
    assert "defense[0]" not in message
    assert "\n" not in message
    assert str(run.path / "checks.json") in message
    noted = run.read_json("checks.json")
    assert {finding["defense"] for finding in noted if not finding["holds"]} >= {
        f"defense[1] ({table['kind']})"
    }
    assert {"defense", "claim", "holds", "found"} == noted[0].keys()
    assert (run.captures.all_keys(), run.vault.all_keys(), run.models.rounds()) == ([], [], [])
    assert run.info()["status"] == "failed"
    assert not (run.path / "leakage.jsonl").exists()


def test_what_was_trained_already_is_not_checked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(defense_checks, "check", never)
    run = Run(tmp_path)
    monkeypatch.setattr(Captures, "all_keys", lambda self: ["r0001-c00"])
    defense_checks.refuse_broken(run, experiment_of(MASK))
    monkeypatch.setattr(Captures, "all_keys", lambda self: [])
    defense_checks.refuse_broken(run, experiment_of())
    assert not list(tmp_path.iterdir())


def test_flwr_run_refuses_a_broken_defense_too(tmp_path, monkeypatch):
    a_mask_that_scales(monkeypatch)
    file = tmp_path / "run.json"
    table = experiment_of(MASK, data=TABLE["data"] | {"samples": 4}).model_dump(mode="json")
    file.write_text(json.dumps({"experiment": table}))
    config = {
        "experiment": str(file),
        "run-dir": str(tmp_path / "run"),
        "attack": True,
        "nodes-within": 0,
        "answers-within": 9,
    }
    monkeypatch.setattr(dispatcher, "attacking", lambda run, experiment: nullcontext())
    monkeypatch.setattr(scoring, "score_run", lambda run: [])
    grid = InlineGrid(client_app, 2, config)
    with pytest.raises(FedleakError, match="fails its check"):
        server_app(grid, Context(1, 1, {}, RecordDict(), config))


# --- fedleak check-defense ----------------------------------------------------------------------

FILE = """
name = "small"
model = {name = "${SMALL}"}
data = {name = "builtin/notes", samples = 8, held_out = 2}
federation = {clients = 2, batch_size = 2}
"""


def call(*changes):
    arguments = [part for change in changes for part in ("--set", change)]
    done = CliRunner().invoke(app, ["check-defense", "small.toml", *arguments])
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def here(tmp_path, monkeypatch):
    (tmp_path / "small.toml").write_text(FILE)
    monkeypatch.setenv("SMALL", SMALL["name"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_prints_figures_and_writes_nothing(here):
    status, text, errors = call('defense=[{kind="mask", fraction=0.3}, {kind="sign"}]')
    assert (status, errors) == (0, "")
    assert text.index("defense[0] (mask)") < text.index("defense[1] (sign)")
    assert text.index("defense[1] (sign)") < text.index("the update")
    assert text.count("holds") == 6
    assert "FAILS" not in text
    assert [path.name for path in here.iterdir()] == ["small.toml"]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ('{kind="dp_sgd", noise_multiplier=1.0, sampling="fixed"}', "canaries"),
        pytest.param(
            '{kind="local_dp", max_norm=1.0, noise_multiplier=1.0}',
            "canaries",
            marks=pytest.mark.slow,
        ),
        pytest.param(None, "the update", marks=pytest.mark.slow),
    ],
    ids=["dp_sgd", "local_dp", "sign"],
)
def test_a_defense_is_checked_by_its_name(here, table, says):
    kind = "sign" if table is None else tomllib.loads(f"x = {table}")["x"]["kind"]
    changes = ["--set", f"model.name={SMALL['name']}"]
    changes += [] if table is None else ["--set", f"defense=[{table}]"]
    done = CliRunner().invoke(app, ["check-defense", kind, *changes])
    assert (done.exit_code, done.stderr) == (0, "")
    assert f"defense[0] ({kind})" in done.stdout
    assert says in done.stdout


def test_a_defense_by_name_says_which_setting_it_needs(here):
    done = CliRunner().invoke(app, ["check-defense", "cast"])
    assert done.exit_code == 2
    assert "the defense cast needs settings (defense[0].dtype" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_command_fails_on_a_broken_defense(here, monkeypatch):
    a_mask_that_scales(monkeypatch)
    status, text, errors = call('defense=[{kind="sign"}, {kind="mask", fraction=0.3}]')
    assert status == 1
    assert text.count("FAILS") == 1
    assert errors == "fedleak: defense[1] (mask): does not do what it says\n"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("seed=1", "has no [[defense]]: there is nothing to check"),
        ('defense=[{kind="musk"}]', "did you mean 'mask'"),
        ('defense=[{kind="mask", fraction=2.0}]', "defense[0].fraction = 2.0"),
        ('defense=[{kind="freeze", parameters=["poller"]}]', "defense[0] (freeze)"),
    ],
)
def test_the_command_refuses_a_wrong_experiment(here, change, says):
    status, text, errors = call(change)
    assert (status, text) == (2, "")
    assert says in errors
    assert errors.count("\n") == 1


# --- what the check gets wrong ------------------------------------------------------------------


def test_a_defense_that_no_client_uses_is_refused():
    with pytest.raises(ConfigError, match=r"defense\[0\]\.clients = \[\]: list clients from 0"):
        experiment_of(GAUSS | {"clients": []})


@pytest.mark.parametrize(
    "table",
    [
        # More of bert-tiny's numbers are rows of words that are not in the batch.
        pytest.param(PRUNE | {"fraction": 0.1}, id="prune"),
        pytest.param(CLIP | {"max_norm": 1e6}, id="clip"),
    ],
)
def test_a_mild_defense_is_not_a_broken_one(table):
    assert not broken(defense_checks.check(experiment_of(table)))


def test_much_noise_is_not_a_long_update():
    assert not broken(defense_checks.check(experiment_of(DP_SGD | {"noise_multiplier": 20_000.0})))


@pytest.mark.parametrize("how", ["no event", "same mark"])
def test_a_budget_that_begins_anew_in_every_round_is_noticed(monkeypatch, how):
    original = LocalDp.event

    def event(self, local, num_examples, round):
        if how == "same mark":
            return dataclasses.replace(original(self, local, num_examples, round), disjoint=0)
        return original(self, local, num_examples, round) if round == 1 else None

    monkeypatch.setattr(LocalDp, "event", event)
    assert broken(defense_checks.check(experiment_of(LOCAL_DP)))


def test_noise_that_is_not_there_is_short_to_say():
    update = ClientUpdate(UpdateKind.GRADIENT, {"a": torch.zeros(9)}, 1)
    ((_, holds, figures),) = sent_update.noise_tests(update, update, 0.5)
    assert not holds
    assert figures == "0 on 9 numbers, -inf deviations off"


def test_noise_that_is_added_to_a_copy_on_the_way_out_is_noticed(monkeypatch):
    original = Protection.defend

    def defend(self, update, rng):
        return update, original(self, update, rng)[1]

    monkeypatch.setattr(Protection, "defend", defend)
    assert broken(defense_checks.check(experiment_of(GAUSS)))


def test_the_kinds_that_are_broken_here_are_all_there_are():
    assert {table["kind"] for table, *_ in BROKEN} == defenses.kinds().keys()
