"""Tests whether the difference of two updates is independent noise of one distribution.

The pooled variance is right also if one tensor has no noise and another twice as much, if a
generator is seeded anew for each tensor, or if a tensor repeats itself. A server that subtracts the
repeated noise is left with the update.

Each test gives its p under honest noise, corrected for how many tensors, pairs or lags it looks at.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

Floats = npt.NDArray[np.float64]

UNLIKELY = 1e-7
"""The p below which a test says that noise is not what it should be."""

PREFIX, FEWEST, LONGEST, BLOCK = 4096, 256, 2**20, 256
"""Numbers of each tensor that are compared between tensors; fewest numbers that a lag leaves; most
numbers of which all lags are tested; and rows and columns of a block whose rank is tested."""

DRAWN = 100_000
"""Most numbers that the distribution is tested on, and fewest whose kurtosis is nearly normal."""


class NoiseTest(NamedTuple):
    """One test.

    Attributes:
        name: What is tested.
        p: Corrected for how many tensors, pairs or lags are looked at.
        sees: The least flaw that it would find.
    """

    name: str
    p: float
    sees: str


def normal(x: Floats) -> Floats:
    """Returns the distribution function of the difference of two normal variables, variance 1."""
    from scipy.special import ndtr  # it takes a while to import

    return np.asarray(ndtr(x))


def laplace(x: Floats) -> Floats:
    """Returns the distribution function of the difference of two Laplace variables, variance 1."""
    far = 2 * np.abs(x)
    tail = 0.25 * np.exp(-far) * (2 + far)
    return np.asarray(np.where(x < 0, tail, 1 - tail))


def tests(
    noise: Mapping[str, Tensor], distribution: Callable[[Floats], Floats]
) -> Iterator[NoiseTest]:
    """Yields the tests of noise.

    Args:
        noise: By tensor, the difference of two draws, in any scale.
        distribution: The distribution function of a number, with variance 1.
    """
    flat = [noise[name].double().flatten().numpy() for name in sorted(noise)]
    count = sum(map(len, flat))
    scale = math.sqrt(sum(float(x @ x) for x in flat) / count)
    tensors = [x / scale for x in flat]
    yield _distribution(np.concatenate(tensors), distribution)
    if distribution is normal:
        yield _loudness(tensors)
        if count >= DRAWN:
            yield _tails(tensors, count)
    if len(tensors) > 1:
        yield _between(tensors)
    if long := [x for x in tensors if len(x) >= 2 * FEWEST]:
        yield _lags(long)
    matrices = [value.double().numpy() / scale for value in noise.values() if value.dim() == 2]
    if large := [matrix for matrix in matrices if min(matrix.shape) >= 16]:
        yield _rank(large)


def _distribution(numbers: Floats, distribution: Callable[[Floats], Floats]) -> NoiseTest:
    """Tests the distribution (Kolmogorov and Smirnov)."""
    from scipy.stats import kstest

    numbers = numbers[:: -(-len(numbers) // DRAWN)]
    far = math.sqrt(math.log(2 / UNLIKELY) / 2 / len(numbers))
    return NoiseTest(
        "distribution", float(kstest(numbers, distribution).pvalue), f"a distance of {far:.2g}"
    )


def _loudness(tensors: list[Floats]) -> NoiseTest:
    """Tests that the variance is the same in each tensor; a sum of squares is chi-square."""
    from scipy.stats import chi2

    sums = np.array([x @ x for x in tensors])
    sizes = np.array([len(x) for x in tensors])
    p = 2 * np.minimum(chi2.cdf(sums, sizes), chi2.sf(sums, sizes)).min() * len(tensors)
    off = 5.5 / math.sqrt(2 * sizes.max())
    return NoiseTest("as loud in each tensor", min(1.0, float(p)), f"{100 * off:.2g} % in one")


def _tails(tensors: list[Floats], count: int) -> NoiseTest:
    """Tests the kurtosis: 3, with the variance 24 / count. Sums of uniform numbers have less."""
    from scipy.special import ndtr

    deviation = math.sqrt(24 / count)
    fourth = math.fsum(float(np.square(x) @ np.square(x)) for x in tensors) / count
    p = float(2 * ndtr(-abs(fourth - 3) / deviation))
    return NoiseTest("tails", p, f"a kurtosis {5.5 * deviation:.2g} off")


def _by_chance(correlations: Floats, numbers: Floats) -> Floats:
    """Returns the two-sided p of correlations of independent normal numbers about 0."""
    from scipy.stats import t

    r = np.clip(correlations, -1 + 1e-15, 1 - 1e-15)
    return np.asarray(2 * t.sf(np.abs(r) * np.sqrt((numbers - 1) / (1 - r**2)), numbers - 1))


def _between(tensors: list[Floats]) -> NoiseTest:
    """Tests the first numbers of any two tensors: a generator that begins anew repeats them."""
    first = np.zeros((len(tensors), PREFIX))
    for row, x in zip(first, tensors, strict=True):
        row[: len(x)] = x[:PREFIX]
    sizes = np.array([min(len(x), PREFIX) for x in tensors])
    squares = np.cumsum(first**2, axis=1)
    i, j = np.triu_indices(len(tensors), 1)
    shared = np.minimum(sizes[i], sizes[j])
    kept = shared >= 8
    i, j, shared = i[kept], j[kept], shared[kept]
    if not len(i):
        return NoiseTest("between tensors", 1.0, "nothing")
    lengths = np.sqrt(squares[i, shared - 1] * squares[j, shared - 1])
    correlations = (first @ first.T)[i, j] / np.maximum(lengths, 1e-300)
    p = _by_chance(correlations, shared.astype(float)).min() * len(i)
    return NoiseTest(
        "between tensors",
        min(1.0, float(p)),
        f"a correlation of {7 / math.sqrt(shared.max()):.2g}",
    )


def _lags(tensors: list[Floats]) -> NoiseTest:
    """Tests each tensor against itself, shifted by any number: rows or halves that repeat."""
    from scipy.signal import fftconvolve
    from scipy.special import ndtr

    smallest, looked = 1.0, 0
    for x in tensors:
        begin = x[:LONGEST]
        lags = np.arange(1, len(begin) - FEWEST + 1)
        products = fftconvolve(begin, begin[::-1])[len(begin) - 1 :][lags]
        z = np.abs(products) / np.sqrt(len(begin) - lags)
        half = len(x) // 2
        z = max(float(z.max()), abs(float(x[:half] @ x[half : 2 * half])) / math.sqrt(half))
        smallest, looked = min(smallest, float(2 * ndtr(-z))), looked + len(lags) + 1
    longest = min(max(map(len, tensors)), LONGEST)
    return NoiseTest(
        "at lags within a tensor",
        min(1.0, smallest * looked),
        f"a correlation of {8 / math.sqrt(longest):.2g}",
    )


def _rank(matrices: list[Floats]) -> NoiseTest:
    """Tests the largest singular value: it is large if rows are sums of a few vectors.

    It is above sqrt(rows) + sqrt(columns) + t with a probability of at most exp(-t^2 / 2) (Davidson
    and Szarek 2001, theorem II.13).
    """
    smallest, highest_seen = 1.0, 0
    for matrix in matrices:
        block = matrix[:BLOCK, :BLOCK]
        rows, columns = block.shape
        edge = math.sqrt(rows) + math.sqrt(columns)
        above = float(np.linalg.norm(block, 2)) - edge
        smallest = min(smallest, math.exp(-(max(above, 0.0) ** 2) / 2))
        most = math.sqrt(2 * math.log(len(matrices) / UNLIKELY))
        highest_seen = max(highest_seen, int(rows * columns / (edge + most) ** 2))
    return NoiseTest(
        "rank", min(1.0, smallest * len(matrices)), f"a rank of {highest_seen} or less"
    )
