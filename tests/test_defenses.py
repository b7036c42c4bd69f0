import dataclasses
import math

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from scipy.stats import binom, chi2, kstest

from fedleak import defenses
from fedleak.defenses.cast import Cast
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.defenses.mask import Mask
from fedleak.observation import ClientUpdate, UpdateKind
from fedleak.streams import stream

MADE = {
    "cast": Cast(dtype="bfloat16"),
    "gaussian_noise": GaussianNoise(sigma=0.5),
    "mask": Mask(fraction=0.3),
}
WITHOUT_CHANCE = {"cast"}
BAD = [
    ("cast", {}),
    ("cast", {"dtype": "float32"}),
    ("cast", {"dtype": "half"}),
    ("gaussian_noise", {}),
    ("gaussian_noise", {"sigma": 0.0}),
    ("gaussian_noise", {"sigma": -1.0}),
    ("gaussian_noise", {"sigma": math.nan}),
    pytest.param(
        "gaussian_noise",
        {"sigma": math.inf},
    ),
    ("mask", {"fraction": 0.0}),
    ("mask", {"fraction": 1.0}),
    ("mask", {"fraction": 1.2}),
    ("mask", {"fraction": "most"}),
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


def test_every_defense_is_in_this_file():
    assert MADE.keys() == defenses.kinds().keys()
    assert all(type(MADE[kind]) is cls for kind, cls in defenses.kinds().items())


@pytest.mark.parametrize("kind", MADE)
def test_a_defense_is_a_pure_function_of_update_and_stream(kind):
    defense, update = MADE[kind], update_of()
    state = torch.get_rng_state()
    one, same, other = (defense(update, rng=stream(0, "d", n)) for n in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state), "draws from the global stream"
    assert (one.kind, one.num_examples) == (update.kind, update.num_examples)
    assert list(one.tensors) == list(update.tensors)
    for name, before in update_of().tensors.items():
        assert torch.equal(update.tensors[name], before)
        assert torch.equal(one.tensors[name], same.tensors[name])
        dtype = torch.bfloat16 if kind == "cast" else before.dtype
        assert (one.tensors[name].shape, one.tensors[name].dtype) == (before.shape, dtype)
    assert not torch.equal(one.tensors["a"], update.tensors["a"])
    assert torch.equal(one.tensors["a"], other.tensors["a"]) == (kind in WITHOUT_CHANCE)


@pytest.mark.parametrize("kind", MADE)
def test_a_defense_is_a_frozen_value_that_says_what_it_does(kind):
    defense = MADE[kind]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(defense, dataclasses.fields(defense)[0].name, 0.1)
    assert TypeAdapter(type(defense)).validate_python(dataclasses.asdict(defense)) == defense
    assert type(defense).__doc__.splitlines()[0].endswith(".")


@pytest.mark.parametrize(("kind", "settings"), BAD)
def test_settings_out_of_bounds_are_refused(kind, settings):
    with pytest.raises(ValidationError):
        TypeAdapter(defenses.kinds()[kind]).validate_python(settings)


def test_only_noise_has_a_scale():
    assert GaussianNoise(sigma=0.25).noise_scale == 0.25
    assert Mask(fraction=0.5).noise_scale is None
    assert Cast(dtype="float16").noise_scale is None


@pytest.mark.parametrize("kind", MADE)
def test_a_defense_works_on_what_was_cast_and_keeps_its_precision(kind):
    for dtype in (torch.float16, torch.bfloat16):
        update = update_of()
        half = dataclasses.replace(
            update, tensors={name: value.to(dtype) for name, value in update.tensors.items()}
        )
        found = MADE[kind](half, rng=stream(0, "d")).tensors
        expected = torch.bfloat16 if kind == "cast" else dtype
        assert {value.dtype for value in found.values()} == {expected}
        assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize(
    ("dtype", "largest", "bits"), [("float16", 65504.0, 11), ("bfloat16", 3.3895e38, 8)]
)
def test_a_cast_is_to_the_nearest_number_of_so_many_bits(dtype, largest, bits):
    numbers = [1.0, 1 / 3, -2 / 3, 1000.1, 3.1e-4, 0.0, largest]
    values = torch.tensor([*numbers, 2 * largest, -2 * largest])
    update = ClientUpdate(UpdateKind.GRADIENT, {"a": values}, 1)
    cast = Cast(dtype=dtype)(update, rng=stream(0, "d")).tensors["a"]
    assert cast.element_size() == 2
    *within, above, below = cast.double().tolist()
    for found, number in zip(within, values.double().tolist(), strict=False):
        mantissa, exponent = math.frexp(number)
        rounded = math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)
        assert found == rounded
    assert (above, below) == (math.inf, -math.inf)


@pytest.mark.parametrize("sigma", [1e-3, 0.5, 20.0])
def test_noise_is_normal_with_its_variance(sigma):
    update = update_of()
    noisy = GaussianNoise(sigma=sigma)(update, rng=stream(0, "noise"))
    noise = (noisy.tensors["a"].double() - update.tensors["a"].double()).flatten() / sigma
    low, high = chi2.ppf([1e-4, 1 - 1e-4], len(noise))
    assert low < float(noise.square().sum()) < high
    assert kstest(noise.numpy(), "norm").pvalue > 1e-4


@pytest.mark.parametrize("fraction", [0.05, 0.5, 0.99])
def test_a_mask_drops_its_fraction_and_keeps_the_rest_as_it_was(fraction):
    update = update_of()
    before = update.tensors["a"]
    after = Mask(fraction=fraction)(update, rng=stream(0, "mask")).tensors["a"]
    dropped = after == 0
    low, high = binom.ppf([1e-4, 1 - 1e-4], before.numel(), fraction)
    assert low <= int(dropped.sum()) <= high
    assert torch.equal(after[~dropped], before[~dropped])
    # By chance, not by size.
    assert kstest(before[dropped].numpy(), before.flatten().numpy()).pvalue > 1e-4
