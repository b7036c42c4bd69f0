import dataclasses
import math

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from scipy.stats import binom, chi2, kstest

from fedleak import defenses
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.defenses.mask import Mask
from fedleak.observation import ClientUpdate, UpdateKind
from fedleak.streams import stream

MADE = {"gaussian_noise": GaussianNoise(sigma=0.5), "mask": Mask(fraction=0.3)}
BAD = [
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
        assert (one.tensors[name].shape, one.tensors[name].dtype) == (before.shape, before.dtype)
    assert not torch.equal(one.tensors["a"], update.tensors["a"])
    assert not torch.equal(one.tensors["a"], other.tensors["a"])


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
