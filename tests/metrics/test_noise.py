"""Noise that is honest passes its tests, and noise that is not fails the right one."""

import pytest
import torch
from scipy.stats import kstest

from fedleak.audit.metrics import noise

pytestmark = pytest.mark.core

SHAPES = {"a": (64, 32), "b": (64, 32), "c": (96, 16), "d": (64,), "e": (2,)}


def normal(shapes, rng):
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def laplace(shapes, rng):
    def drawn(shape):
        u = torch.rand((2, *shape), generator=rng, dtype=torch.float64) - 0.5
        first, second = -u.sign() * torch.log1p(-2 * u.abs())
        return first - second

    return {name: drawn(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("draw", [normal, laplace])
def test_honest_noise_passes_and_its_p_are_those_of_chance(draw):
    rng = torch.Generator().manual_seed(1)
    by_test = {}
    for _ in range(60):
        for test in noise.tests(draw(SHAPES, rng), getattr(noise, draw.__name__)):
            by_test.setdefault(test.name, []).append(test.p)
    assert len(by_test) == (5 if draw is normal else 4)
    assert min(min(ps) for ps in by_test.values()) > 1e-4
    for ps in by_test.values():  # corrected for how many are looked at, they may only be larger
        assert kstest(ps, "uniform", alternative="greater").pvalue > 1e-4


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda made: made | {"b": made["a"].clone()}, "between tensors"),
        (lambda made: made | {"d": made["a"].flatten()[:64]}, "between tensors"),
        (lambda made: made | {"e": torch.zeros(2)}, "as loud in each tensor"),
        (
            lambda made: made | {"a": 1.2 * made["a"], "b": 0.8 * made["b"]},
            "as loud in each tensor",
        ),
        (lambda made: made | {"a": made["a"][:32].repeat(2, 1)}, "at lags within a tensor"),
        (lambda made: made | {"a": made["a"][::2].repeat_interleave(2, 0)}, "at lags within"),
        (lambda made: made | {"c": made["c"][:, :1] * torch.ones(16)}, "rank"),
        (lambda made: {name: value.sign() for name, value in made.items()}, "distribution"),
    ],
)
def test_noise_that_is_not_independent_fails_the_test_that_looks_for_it(change, name):
    made = change(normal(SHAPES, torch.Generator().manual_seed(2)))
    failed = {test.name for test in noise.tests(made, noise.normal) if test.p < noise.UNLIKELY}
    assert any(test.startswith(name) for test in failed), failed


def test_sums_of_uniform_numbers_have_too_short_tails():
    rng = torch.Generator().manual_seed(3)
    for count, seen in ((noise.DRAWN - 1, None), (500_000, True)):
        made = {"a": torch.rand((12, count), generator=rng).sum(0) - 6}
        made["a"] -= torch.rand((12, count), generator=rng).sum(0) - 6
        tails = [test for test in noise.tests(made, noise.normal) if test.name == "tails"]
        assert [test.p < noise.UNLIKELY for test in tails] == ([True] if seen else [])
    honest = {"a": torch.randn(500_000, generator=rng)}
    assert all(test.p > 1e-4 for test in noise.tests(honest, noise.normal))
