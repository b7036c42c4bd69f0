import dataclasses
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from scipy.stats import binom, chi2, gamma, kstest
from torch import nn

from fedleak import defenses
from fedleak.config.federation.protection import Protection
from fedleak.config.loading import parse
from fedleak.defenses import Claims, measured
from fedleak.defenses.adaptive_clipping import AdaptiveClipping
from fedleak.defenses.cast import Cast
from fedleak.defenses.central_dp import CentralDp
from fedleak.defenses.clip import Clip
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
from fedleak.models.lora import Lora, adapt_
from fedleak.running import preparation
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.privacy.accounting import Event
from fedleak.training.settings import LocalTraining, PrivateSteps
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

MADE = {
    "cast": Cast(dtype="bfloat16"),
    "central_dp": CentralDp(max_norm=3.0, noise_multiplier=0.5),
    "clip": Clip(max_norm=3.0),
    "adaptive_clipping": AdaptiveClipping(max_norm=3.0, noise_multiplier=0.5),
    "dp_ftrl": DpFtrl(max_norm=3.0, noise_multiplier=0.5),
    "dp_sgd": DpSgd(noise_multiplier=2.0, max_grad_norm=0.5),
    "freeze": Freeze(parameters=("embeddings", "layer.1.")),
    "gaussian_noise": GaussianNoise(sigma=0.5),
    "laplace_noise": LaplaceNoise(scale=0.5),
    "local_dp": LocalDp(max_norm=3.0, noise_multiplier=0.25),
    "mask": Mask(fraction=0.3),
    "prune": Prune(fraction=0.3),
    "quantize": Quantize(bits=4, stochastic=True),
    "secure_sum": SecureSum(),
    "sign": Sign(),
}
OF_TRAINING = {"adaptive_clipping", "central_dp", "dp_ftrl", "dp_sgd", "freeze", "secure_sum"}
"""What they do is done before there is an update, or after it was sent."""
OF_UPDATE = sorted(MADE.keys() - OF_TRAINING)
WITHOUT_CHANCE = {"cast", "clip", "prune", "sign"} | OF_TRAINING
FEDSGD = LocalTraining(
    kind=UpdateKind.GRADIENT, batch_size=4, epochs=1, learning_rate=0.1, dropout=False
)
FEDAVG = LocalTraining(
    kind=UpdateKind.DELTA, batch_size=4, epochs=3, learning_rate=0.1, dropout=False
)
BAD = [
    ("cast", {}),
    ("cast", {"dtype": "float32"}),
    ("cast", {"dtype": "half"}),
    *(
        (kind, {setting: value})
        for kind, setting in [
            ("gaussian_noise", "sigma"),
            ("gaussian_noise", "relative"),
            ("laplace_noise", "scale"),
            ("clip", "max_norm"),
            ("dp_sgd", "noise_multiplier"),
            ("dp_sgd", "epsilon"),
            ("mask", "fraction"),
            ("prune", "fraction"),
        ]
        for value in (0.0, -1.0, math.nan, math.inf, "most")
    ),
    *((kind, {}) for kind in ("laplace_noise", "clip", "mask", "prune")),
    *((kind, {"fraction": value}) for kind in ("mask", "prune") for value in (1.0, 1.2)),
    ("quantize", {}),
    ("quantize", {"bits": 1}),
    ("quantize", {"bits": 17}),
    ("quantize", {"bits": 2.5}),
    ("freeze", {}),
    ("freeze", {"parameters": []}),
    ("dp_sgd", {"noise_multiplier": 1.0, "max_grad_norm": 0.0}),
    ("dp_sgd", {"noise_multiplier": 1.0, "max_grad_norm": math.inf}),
    ("dp_sgd", {"noise_multiplier": 1.0, "sampling": "shuffled"}),
    ("local_dp", {"noise_multiplier": 1.0}),
    ("local_dp", {"noise_multiplier": 1.0, "max_norm": 0.0}),
    ("local_dp", {"noise_multiplier": 0.0, "max_norm": 1.0}),
    ("local_dp", {"epsilon": math.nan, "max_norm": 1.0}),
]


def update_of(seed=0):
    rng = torch.Generator().manual_seed(seed)
    tensors = {
        "a": torch.randn(300, 200, generator=rng),
        "b": torch.randn(7, generator=rng),
        "c": torch.randn(2, 3, 4, generator=rng).double(),
        "scalar": torch.tensor(1.5),
    }
    return ClientUpdate(UpdateKind.DELTA, tensors, 9)


def of(*values, dtype=torch.float64):
    """An update of one tensor for each list of numbers."""
    tensors = {str(i): torch.tensor(numbers, dtype=dtype) for i, numbers in enumerate(values)}
    return ClientUpdate(UpdateKind.GRADIENT, tensors, 1)


def flat(update):
    return torch.cat([value.double().flatten() for value in update.tensors.values()])


def done(defense, update, *name):
    return defense(update, rng=stream(0, "d", *name))


# --- what all have in common ----------------------------------------------------------------


def test_every_defense_is_in_this_file():
    assert MADE.keys() == defenses.kinds().keys()
    assert all(type(MADE[kind]) is cls for kind, cls in defenses.kinds().items())


@pytest.mark.parametrize("kind", OF_UPDATE)
def test_a_defense_is_a_pure_function_of_update_and_stream(kind):
    defense, update = MADE[kind], update_of()
    state = torch.get_rng_state()
    defended, same, other = (done(defense, update, n) for n in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state), "draws from the global stream"
    assert (defended.kind, defended.num_examples) == (update.kind, update.num_examples)
    assert list(defended.tensors) == list(update.tensors)
    for name, before in update_of().tensors.items():
        assert torch.equal(update.tensors[name], before)
        assert torch.equal(defended.tensors[name], same.tensors[name])
        dtype = torch.bfloat16 if kind == "cast" else before.dtype
        assert (defended.tensors[name].shape, defended.tensors[name].dtype) == (before.shape, dtype)
        # Written to by nobody who holds the one before.
        assert defended.tensors[name].data_ptr() != update.tensors[name].data_ptr()
    assert not torch.equal(defended.tensors["a"], update.tensors["a"])
    assert torch.equal(defended.tensors["a"], other.tensors["a"]) == (kind in WITHOUT_CHANCE)


@pytest.mark.parametrize("kind", sorted(OF_TRAINING))
def test_a_defense_that_is_about_training_leaves_the_update_as_it_is(kind):
    update, rng = update_of(), stream(0, "d")
    state = rng.get_state()
    assert MADE[kind](update, rng=rng) is update
    assert torch.equal(rng.get_state(), state)


def test_only_those_about_training_change_how_a_client_trains():
    for local in (FEDSGD, FEDAVG):
        for kind, defense in MADE.items():
            trained = defense.training(local)
            if kind == "dp_sgd":
                private = PrivateSteps(2.0, 0.5, "poisson")
                assert trained == dataclasses.replace(local, private=private)
            elif kind == "freeze":
                frozen = ("embeddings", "layer.1.")
                assert trained == dataclasses.replace(local, frozen=frozen)
            else:
                assert trained == local
    both = Freeze(parameters=("q1",)).training(MADE["freeze"].training(FEDSGD))
    assert both.frozen == ("embeddings", "layer.1.", "q1")


@pytest.mark.parametrize("kind", MADE)
def test_a_defense_is_a_frozen_value_that_says_what_it_does(kind):
    defense = MADE[kind]
    with pytest.raises(dataclasses.FrozenInstanceError):
        defense.kind = "another"
    for field in dataclasses.fields(defense):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(defense, field.name, 0.1)
    assert TypeAdapter(type(defense)).validate_python(dataclasses.asdict(defense)) == defense
    assert type(defense).__doc__.splitlines()[0].endswith(".")


@pytest.mark.parametrize("kind", OF_UPDATE)
def test_a_defense_works_on_what_was_cast_and_keeps_its_precision(kind):
    for dtype in (torch.float16, torch.bfloat16):
        update = update_of()
        half = dataclasses.replace(
            update, tensors={name: value.to(dtype) for name, value in update.tensors.items()}
        )
        tensors = done(MADE[kind], half).tensors
        expected = torch.bfloat16 if kind == "cast" else dtype
        assert {value.dtype for value in tensors.values()} == {expected}
        assert all(value.isfinite().all() for value in tensors.values())
        # What it does to the same numbers in double precision, but for rounding.
        if kind not in ("mask", "gaussian_noise", "local_dp", "quantize"):
            exact = dataclasses.replace(
                half, tensors={name: value.double() for name, value in half.tensors.items()}
            )
            wide = done(MADE[kind], exact).tensors
            for name, value in tensors.items():
                torch.testing.assert_close(
                    value.double(), wide[name].double(), rtol=1e-2, atol=2e-2
                )


@pytest.mark.parametrize("kind", OF_UPDATE)
def test_an_update_of_zeros_survives(kind):
    defended = done(MADE[kind], of([0.0, 0.0, 0.0], [0.0], dtype=torch.float32))
    assert all(bool(value.isfinite().all()) for value in defended.tensors.values())
    if "noise" not in kind and kind != "local_dp":
        assert not any(bool(value.any()) for value in defended.tensors.values())


# --- what they claim ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("defense", "claims"),
    [
        (Cast(dtype="float16"), Claims()),
        (SecureSum(), Claims(mean_of_clients=True)),
        (GaussianNoise(sigma=0.25), Claims(noise_scale=0.25)),
        (GaussianNoise(relative=0.25), Claims(relative_noise=0.25)),
        (
            LaplaceNoise(scale=0.25),
            Claims(noise_scale=0.25 * math.sqrt(2), laplace=True),
        ),
        (Clip(max_norm=3.0), Claims(max_norm=3.0)),
        (LocalDp(max_norm=3.0, noise_multiplier=0.5), Claims(noise_scale=3.0, max_norm=3.0)),
        (Mask(fraction=0.5), Claims(masked=0.5)),
        (Prune(fraction=0.9), Claims(zeros=0.9)),
        (Quantize(bits=8), Claims(levels=255)),
        (Quantize(bits=2), Claims(levels=3)),
        (Sign(), Claims(levels=3)),
        (Freeze(parameters=("q1",)), Claims(absent=("q1",))),
    ],
)
def test_a_defense_claims_what_its_settings_say_however_one_trains(defense, claims):
    assert defense.update_claims(FEDSGD, 9) == defense.update_claims(FEDAVG, 2) == claims
    assert defense.noisy == ({claims.noise_scale, claims.relative_noise} != {None})


def test_dp_sgd_claims_noise_and_how_far_an_example_moves_the_update():
    made = DpSgd(noise_multiplier=2.0, max_grad_norm=0.5)
    assert made.update_claims(FEDSGD, 100) == Claims(noise_scale=2 * 0.5 / 4, example_norm=0.5 / 4)
    # A client with fewer examples than a batch divides by those.
    assert made.noisy
    assert made.update_claims(FEDSGD, 2) == Claims(noise_scale=2 * 0.5 / 2, example_norm=0.5 / 2)
    # Three epochs of ceil(10 / 4) steps, each with noise of its own.
    claims = made.update_claims(FEDAVG, 10)
    assert claims.example_norm is None
    assert claims.noise_scale == pytest.approx(0.1 * math.sqrt(9) * 2 * 0.5 / 4)


POISSON = {"unit": "example", "neighbouring": "zero out one", "sampling": "Poisson"}


@pytest.mark.parametrize(
    ("defense", "local", "num_examples", "round", "event"),
    [
        (
            MADE["dp_sgd"],
            FEDSGD,
            20,
            7,
            Event(noise_multiplier=2.0, sampling_rate=4 / 20, steps=1, **POISSON),
        ),
        (
            MADE["dp_sgd"],
            FEDSGD,
            3,
            7,
            Event(noise_multiplier=2.0, sampling_rate=1.0, steps=1, **POISSON),
        ),
        (
            MADE["dp_sgd"],
            FEDAVG,
            18,
            7,
            Event(noise_multiplier=2.0, sampling_rate=4 / 18, steps=3 * 5, **POISSON),
        ),
        (
            DpSgd(noise_multiplier=2.0, sampling="fixed"),
            FEDAVG,
            18,
            7,
            Event(
                noise_multiplier=2.0,
                sampling_rate=1.0,
                steps=3,
                unit="example",
                neighbouring="zero out one",
            ),
        ),
        *(
            # Of 18 examples four batches of 4, then a new pass.
            (
                DpSgd(noise_multiplier=2.0, sampling="fixed"),
                FEDSGD,
                18,
                round,
                Event(
                    noise_multiplier=2.0,
                    sampling_rate=1.0,
                    steps=1,
                    unit="example",
                    neighbouring="zero out one",
                    disjoint=sweep,
                ),
            )
            for round, sweep in [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)]
        ),
        (
            MADE["local_dp"],
            FEDAVG,
            18,
            7,
            Event(
                noise_multiplier=0.25,
                sampling_rate=1.0,
                steps=1,
                unit="client",
                neighbouring="replace one, given n",
            ),
        ),
    ],
)
def test_a_round_adds_its_event_to_the_ledger(defense, local, num_examples, round, event):
    assert defense.event(local, num_examples, round) == event


def test_a_defense_that_fails_is_named_with_what_it_raised():
    class Oops(defenses.Defense):
        kind = "oops"

        def __call__(self, update, *, rng):
            raise KeyError("oops")

    local = LocalTraining(
        kind=UpdateKind.GRADIENT, batch_size=1, epochs=1, learning_rate=0.1, dropout=False
    )
    client = Protection(local, {2: Oops()}, num_examples=1)
    with pytest.raises(
        FedleakError, match=r"^defense\[2\] \(oops\) failed on .*: KeyError: 'oops'$"
    ):
        client.defend(ClientUpdate(UpdateKind.GRADIENT, {}, 1), lambda number: None)


def test_heuristics_guarantee_nothing():
    for kind in MADE.keys() - {"adaptive_clipping", "central_dp", "dp_ftrl", "dp_sgd", "local_dp"}:
        assert MADE[kind].event(FEDSGD, 9, 1) is None


def test_what_was_done_to_an_update_is_measured():
    before, after = of([3.0, 0.0, 1.0], [2.0, -4.0]), of([0.0, 0.0, 5.0], [2.0, 0.0])
    assert measured(before, after) == {
        "norm_before": pytest.approx(math.sqrt(9 + 1 + 4 + 16)),
        "norm_after": pytest.approx(math.sqrt(25 + 4)),
        "change_norm": pytest.approx(math.sqrt(9 + 16 + 16)),
        "zeroed": 2 / 5,
    }


def test_what_was_done_is_measured_as_on_whole_copies():
    generator = torch.Generator().manual_seed(2)
    before = ClientUpdate(
        UpdateKind.GRADIENT,
        {str(i): torch.randn(30_000, i, generator=generator) * 10.0**-i for i in range(1, 6)},
        1,
    )
    after = done(Prune(fraction=0.4), before)
    whole, other = flat(before).double(), flat(after).double()
    assert measured(before, after) == {
        "norm_before": pytest.approx(float(whole.norm()), rel=1e-12),
        "norm_after": pytest.approx(float(other.norm()), rel=1e-12),
        "change_norm": pytest.approx(float((other - whole).norm()), rel=1e-12),
        "zeroed": 0.4,
    }


# --- each by itself -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "largest", "bits"), [("float16", 65504.0, 11), ("bfloat16", 3.3895e38, 8)]
)
def test_a_cast_is_to_the_nearest_number_of_so_many_bits(dtype, largest, bits):
    numbers = [1.0, 1 / 3, -2 / 3, 1000.1, 3.1e-4, 0.0, largest]
    values = torch.tensor([*numbers, 2 * largest, -2 * largest])
    update = ClientUpdate(UpdateKind.GRADIENT, {"a": values}, 1)
    cast = done(Cast(dtype=dtype), update).tensors["a"]
    assert cast.element_size() == 2
    *within, above, below = cast.double().tolist()
    for cast_number, number in zip(within, values.double().tolist(), strict=False):
        mantissa, exponent = math.frexp(number)
        rounded = math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)
        assert cast_number == rounded
    assert (above, below) == (math.inf, -math.inf)


def test_relative_noise_is_that_of_the_root_mean_square_of_all_numbers():
    update = update_of()
    numbers = flat(update)
    rms = math.sqrt(sum(x * x for x in numbers.tolist()) / len(numbers))
    relative, absolute = GaussianNoise(relative=3.0), GaussianNoise(sigma=3.0 * rms)
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-4)  # float32
    close(flat(done(relative, update)), flat(done(absolute, update)))
    louder = dataclasses.replace(update, tensors={n: 7 * v for n, v in update.tensors.items()})
    close(flat(done(relative, louder)), 7 * flat(done(relative, update)))


@pytest.mark.parametrize("sigma", [1e-3, 0.5, 20.0])
def test_noise_is_normal_with_its_variance(sigma):
    update = update_of()
    noisy = done(GaussianNoise(sigma=sigma), update)
    noise = (noisy.tensors["a"].double() - update.tensors["a"].double()).flatten() / sigma
    low, high = chi2.ppf([1e-4, 1 - 1e-4], len(noise))
    assert low < float(noise.square().sum()) < high
    assert kstest(noise.numpy(), "norm").pvalue > 1e-4


@pytest.mark.parametrize("scale", [1e-3, 0.5, 20.0])
def test_laplace_noise_is_laplace_with_its_scale(scale):
    update = update_of()
    noisy = done(LaplaceNoise(scale=scale), update)
    noise = (noisy.tensors["a"].double() - update.tensors["a"].double()).flatten() / scale
    assert kstest(noise.numpy(), "laplace").pvalue > 1e-4
    # The sizes of n Laplace numbers add up to a gamma number.
    low, high = gamma.ppf([1e-4, 1 - 1e-4], len(noise))
    assert low < float(noise.abs().sum()) < high
    assert float(noise.var()) == pytest.approx(2, rel=0.1)


@pytest.mark.parametrize("kind", ["gaussian_noise", "laplace_noise", "local_dp"])
def test_the_noise_of_two_tensors_is_not_the_same(kind):
    zeros = of([0.0] * 4000, [0.0] * 4000)
    first, second = done(MADE[kind], zeros).tensors.values()
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.08


@given(
    st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5), min_size=1, max_size=4),
    st.floats(1e-3, 1e4),
)
def test_clipping_scales_the_whole_update_to_the_norm_if_it_is_longer(values, max_norm):
    update = of(*values)
    norm = math.sqrt(math.fsum(x * x for tensor_values in values for x in tensor_values))
    clipped = flat(done(Clip(max_norm=max_norm), update))
    if norm <= max_norm:
        assert torch.equal(clipped, flat(update))
    else:
        assert float(clipped.norm()) == pytest.approx(max_norm, rel=1e-9)
        # One factor for all: the direction is kept.
        torch.testing.assert_close(clipped, flat(update) * (max_norm / norm), rtol=1e-9, atol=1e-12)


def test_local_dp_is_clipped_and_its_noise_is_in_twice_the_norm():
    defense, update = LocalDp(max_norm=0.3, noise_multiplier=0.7), update_of()
    nothing = dataclasses.replace(
        update, tensors={name: torch.zeros_like(v) for name, v in update.tensors.items()}
    )
    noise, noisy = (flat(done(defense, undefended)) for undefended in (nothing, update))
    # The same stream gives the same noise, whatever it is added to.
    assert float((noisy - noise).norm()) == pytest.approx(0.3, rel=1e-3)
    original = flat(update)
    cosine = float((noisy - noise) @ original / (noisy - noise).norm() / original.norm())
    assert cosine == pytest.approx(1, abs=1e-4)
    z = noise / (2 * 0.3 * 0.7)
    low, high = chi2.ppf([1e-4, 1 - 1e-4], len(z))
    assert low < float(z.square().sum()) < high
    assert kstest(z.numpy(), "norm").pvalue > 1e-4


def test_two_updates_far_apart_are_no_further_than_twice_the_norm_after_local_dp():
    defense, update = LocalDp(max_norm=0.3, noise_multiplier=0.7), update_of()
    opposite = dataclasses.replace(
        update, tensors={name: -50 * value for name, value in update.tensors.items()}
    )
    apart = flat(done(defense, update)) - flat(done(defense, opposite))
    assert float(apart.norm()) == pytest.approx(2 * 0.3, rel=1e-3)


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.99])
def test_a_mask_drops_its_fraction_and_keeps_the_rest_as_it_was(fraction):
    update = update_of()
    before = update.tensors["a"]
    after = done(Mask(fraction=fraction), update).tensors["a"]
    dropped = after == 0
    low, high = binom.ppf([1e-4, 1 - 1e-4], before.numel(), fraction)
    assert low <= int(dropped.sum()) <= high
    assert torch.equal(after[~dropped], before[~dropped])
    # By chance, not by size.
    assert kstest(before[dropped].numpy(), before.flatten().numpy()).pvalue > 1e-4


@given(st.data(), st.floats(0.01, 0.99))
def test_pruning_keeps_exactly_the_largest_of_the_whole_update(data, fraction):
    sizes = data.draw(st.lists(st.integers(1, 10**6), min_size=1, max_size=30, unique=True))
    signed = [size * data.draw(st.sampled_from([-1.0, 1.0])) for size in sizes]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(sizes)), max_size=3)) - {len(sizes)})
    pieces = [signed[a:b] for a, b in zip([0, *cuts], [*cuts, len(sizes)], strict=True)]
    pruned = flat(done(Prune(fraction=fraction), of(*pieces))).tolist()
    kept = set(sorted(sizes, reverse=True)[: len(sizes) - round(fraction * len(sizes))])
    assert pruned == [x if abs(x) in kept else 0.0 for x in signed]


@given(
    st.lists(st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, math.inf, math.nan]), min_size=1)),
    st.floats(0.01, 0.99),
)
def test_pruning_is_what_sorting_all_gives_also_of_equal_numbers(pieces, fraction):
    update = of(*pieces, [1.0])
    values = flat(update)
    order = sorted(
        range(len(values)),
        key=lambda i: math.inf if values[i].isnan() else float(values[i].abs()),
    )
    expected = values.clone()
    expected[order[: round(fraction * len(values))]] = 0.0
    pruned = flat(done(Prune(fraction=fraction), update))
    assert torch.equal(pruned.nan_to_num(nan=7.0), expected.nan_to_num(nan=7.0))


def test_of_numbers_of_one_size_pruning_drops_its_fraction_all_the_same():
    pruned = flat(done(Prune(fraction=0.3), of([1.0, -1.0] * 20, [1.0] * 60)))
    assert int((pruned == 0).sum()) == 30


def test_signs_are_scaled_by_the_mean_size_of_their_tensor():
    signs = done(Sign(), of([3.0, -1.0, 0.0, -4.0], [-0.5]))
    assert signs.tensors["0"].tolist() == [2.0, -2.0, 0.0, -2.0]
    assert signs.tensors["1"].tolist() == [-0.5]


@given(
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=12),
    st.integers(2, 16),
    st.booleans(),
)
def test_quantizing_rounds_to_a_grid_about_zero(values, bits, stochastic):
    quantized = flat(done(Quantize(bits=bits, stochastic=stochastic), of(values))).tolist()
    largest = max(map(abs, values))
    most = 2 ** (bits - 1) - 1
    step = largest / most
    assert len(set(quantized)) <= 2**bits - 1
    for before, after in zip(values, quantized, strict=True):
        assert abs(after - before) <= step * (1.0 if stochastic else 0.5) * (1 + 1e-6)
        assert abs(after) <= largest * (1 + 1e-9)
        if step > 0:
            assert after / step == pytest.approx(round(after / step), abs=1e-6)
        if before == 0:
            assert after == 0
        if abs(before) == largest:
            assert after == pytest.approx(before, rel=1e-9)


def test_each_tensor_has_a_grid_of_its_own():
    quantized = done(Quantize(bits=2), of([100.0, 20.0], [1.0, 0.7, -0.2], [0.0, 0.0]))
    assert [value.tolist() for value in quantized.tensors.values()] == [
        [100.0, 0.0],
        [1.0, 1.0, 0.0],
        [0.0, 0.0],
    ]


def test_stochastic_rounding_is_right_on_average():
    numbers, draws = torch.tensor([1.0, 0.01, -0.3, 0.77, -0.999, 0.0, 0.5]), 20_000
    update = of(numbers.repeat(draws).tolist())
    quantized = flat(done(Quantize(bits=3, stochastic=True), update)).view(draws, -1)
    step = 1 / 3
    up = (numbers.double() / step) % 1
    deviation = step * (up * (1 - up) / draws).sqrt()
    off = (quantized.mean(0) - numbers.double()).abs()
    assert bool((off <= 5 * deviation + 1e-7).all())
    assert int((quantized.std(0) > 0).sum()) == 5, "1 and 0 are on the grid, the others are not"


# --- updates that are not finite ------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mask", "prune"])
def test_what_is_dropped_is_zero_also_where_a_cast_has_overflowed(kind):
    update = of([70000.0] * 50 + [1.0] * 50, dtype=torch.float32)
    cast = done(Cast(dtype="float16"), update)
    remaining = done(dataclasses.replace(MADE[kind], fraction=0.6), cast).tensors["0"]
    assert not remaining.isnan().any()
    assert (remaining == 0).any()


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_local_dp_bounds_whatever_the_client_computed(value):
    noisy = flat(done(LocalDp(max_norm=1.0, noise_multiplier=1.0), of([value, 1.0, 2.0])))
    noise = flat(done(LocalDp(max_norm=1.0, noise_multiplier=1.0), of([0.0, 0.0, 0.0])))
    assert float((noisy - noise).norm()) <= 1 + 1e-9


# --- settings that are refused --------------------------------------------------------------


@pytest.mark.parametrize(("kind", "settings"), BAD)
def test_settings_out_of_bounds_are_refused(kind, settings):
    with pytest.raises(ValidationError):
        TypeAdapter(defenses.kinds()[kind]).validate_python(settings)


@pytest.mark.parametrize("cls", [CentralDp, DpSgd, LocalDp])
@pytest.mark.parametrize("settings", [{}, {"noise_multiplier": 1.0, "epsilon": 1.0}])
def test_noise_is_given_in_exactly_one_way(cls, settings):
    settings = settings | ({"max_norm": 1.0} if cls is not DpSgd else {})
    with pytest.raises(ConfigError, match="give either noise_multiplier or epsilon"):
        cls(**settings)


@pytest.mark.parametrize("settings", [{}, {"sigma": 1.0, "relative": 1.0}])
def test_a_noises_size_is_given_in_exactly_one_way(settings):
    with pytest.raises(ConfigError, match="give either sigma or relative"):
        GaussianNoise(**settings)


TABLE = {
    "name": "refused",
    "model": {"name": "builtin/bert-tiny"},
    "data": {"name": "builtin/notes", "samples": 12, "held_out": 2},
    "federation": {"clients": 2, "batch_size": 2},
}


@pytest.mark.parametrize(
    ("defense", "says"),
    [
        ({"kind": "gaussian_noise", "sigma": -1.0}, r"defense\[1\]\.sigma = -1"),
        ({"kind": "gaussian_noise", "sigma": math.nan}, r"defense\[1\]\.sigma"),
        ({"kind": "laplace_noise", "scale": math.inf}, r"defense\[1\]\.scale"),
        ({"kind": "clip", "max_norm": 0}, r"defense\[1\]\.max_norm = 0"),
        ({"kind": "mask", "fraction": 1.2}, r"defense\[1\]\.fraction = 1\.2: .*less than 1"),
        ({"kind": "prune", "fraction": math.nan}, r"defense\[1\]\.fraction"),
        ({"kind": "quantize", "bits": 1}, r"defense\[1\]\.bits = 1: .*2"),
        ({"kind": "quantize", "bits": 17}, r"defense\[1\]\.bits = 17: .*16"),
        ({"kind": "dp_sgd"}, r"defense\[1\]: give either noise_multiplier or epsilon"),
        (
            {"kind": "dp_sgd", "noise_multiplier": 1.0, "epsilon": 8.0},
            r"defense\[1\]: give either noise_multiplier or epsilon",
        ),
        ({"kind": "dp_sgd", "noise_multiplier": -0.5}, r"defense\[1\]\.noise_multiplier = -0\.5"),
        ({"kind": "local_dp", "max_norm": 1.0}, r"defense\[1\]: give either"),
        ({"kind": "local_dp", "epsilon": 1.0}, r"defense\[1\]\.max_norm is missing"),
        ({"kind": "freeze", "parameters": "q1"}, r"defense\[1\]\.parameters = 'q1'"),
        ({"kind": "freeze", "parameters": []}, r"defense\[1\]\.parameters"),
        ({"kind": "secure_sum", "clients": [0]}, r"defense\[1\]\.clients: secure_sum is of all"),
        (
            {"kind": "secure_sum", "clients": []},
            r"defense\[1\]\.clients = \[\]: list clients from 0 to 1",
        ),
        ({"kind": "sign", "scale": 1.0}, r"defense\[1\]: unknown key 'scale'"),
        ({"kind": "sign", "clients": [2]}, r"defense\[1\]\.clients = \[2\]: .*from 0 to 1"),
        ({"kind": "prone", "fraction": 0.5}, r"defense\[1\]\.kind: .*did you mean 'prune'"),
    ],
)
def test_a_wrong_table_is_refused_in_one_line_that_names_it(defense, says):
    with pytest.raises(ConfigError, match=says) as caught:
        parse(TABLE | {"defense": [{"kind": "sign"}, defense]})
    assert "\n" not in str(caught.value)


def test_a_freeze_that_matches_nothing_is_told_what_there_is(bert_tiny):
    obstacle = Freeze(parameters=("classifier", "poller")).obstacle(FEDSGD, bert_tiny)
    assert "parameters: 'poller' is in no parameter's name" in obstacle
    assert "pooler" in obstacle
    assert "9 layers" not in obstacle
    assert "4 layers" in Freeze(parameters=("q9",)).obstacle(FEDSGD, bert_tiny)
    assert Freeze(parameters=("pooler",)).obstacle(FEDSGD, bert_tiny) is None


@pytest.mark.parametrize("parameters", [("*",), ("embeddings", "t", "pooler", "classifier")])
def test_nothing_can_be_trained_where_all_is_frozen(bert_tiny, parameters):
    obstacle = Freeze(parameters=parameters).obstacle(FEDSGD, bert_tiny)
    assert "all that is trained" in obstacle


def test_what_adapters_leave_out_cannot_be_frozen(small):
    model = small("bert")
    adapt_(model.module, Lora(2, 4.0), model.family.classifier)
    assert "'embeddings' is nothing that is trained" in Freeze(("embeddings",)).obstacle(
        FEDSGD, model
    )
    assert Freeze(("lora_A",)).obstacle(FEDSGD, model) is None


@pytest.mark.parametrize(
    ("tables", "says"),
    [
        (
            {"defense": [{"kind": "sign"}, {"kind": "freeze", "parameters": ["poller"]}]},
            r"defense\[1\] \(freeze\): parameters: 'poller'",
        ),
        (
            {"defense": [{"kind": "freeze", "parameters": ["*"]}]},
            r"defense\[0\] \(freeze\): parameters: .*all that is trained",
        ),
        (
            # Each leaves something, but client 1 has both.
            {
                "defense": [
                    {"kind": "freeze", "parameters": ["t", "pooler"]},
                    {"kind": "freeze", "parameters": ["embeddings", "classifier"], "clients": [1]},
                ]
            },
            r"defense: client 1 has nothing left to train",
        ),
        (
            {
                "defense": [{"kind": "freeze", "parameters": ["q1"]}],
                "update": {"share": ["q1"]},
            },
            r"all that client 0 shares is frozen",
        ),
        (
            {
                "defense": [
                    {"kind": "mask", "fraction": 0.5},
                    {"kind": "dp_sgd", "epsilon": 0.001, "clients": [1]},
                ]
            },
            r"defense\[1\] \(dp_sgd\): epsilon = 0\.001 cannot be reached with delta = 1e-05",
        ),
        (
            {"defense": [{"kind": "local_dp", "epsilon": 0.001, "max_norm": 1.0}]},
            r"defense\[0\] \(local_dp\): epsilon = 0\.001 cannot be reached",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:Optimal order")
def test_what_cannot_work_is_refused_before_anything_is_written(tmp_path, tables, says):
    with pytest.raises(ConfigError, match=says) as caught:
        preparation.prepare(parse(TABLE | tables), tmp_path / "run")
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_dp_sgd_refuses_layers_that_mix_the_examples_of_a_batch(small):
    model, defense = small("bert"), MADE["dp_sgd"]
    assert defense.obstacle(FEDSGD, model) is None
    model.module.bert.pooler.norm = nn.BatchNorm1d(32)
    obstacle = defense.obstacle(FEDSGD, model)
    assert "'bert.pooler.norm'" in obstacle
    assert "LayerNorm" in obstacle
