"""Canaries: made-up gradients of random direction that an audit looks for in an update.

Each canary is a Gaussian vector on numbers of the update that no other canary uses: from a random
first number on, every few numbers one belongs to a canary, to each in turn. Only a seed is kept;
the vectors are drawn again where they are needed.

The score of a canary is z = sqrt(s) <u, c> / (|u| |c|) on its numbers (the cosine of Andrew et al.
2024, "One-shot empirical privacy estimation for federated learning", section 3, on s of the
numbers). A canary that is not in the update is independent of it, so its z has mean 0 and variance
1 and is nearly normal, whatever the update is. For a canary that is in, z has the mean C / sigma,
if C is its norm and sigma the standard deviation of the noise on each number.

Updates are NumPy arrays or torch tensors by name. Torch is not imported here.

Shapes: K canaries, S numbers of each, B records of a batch.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedleak.util.rng import stream_seed

MOST_NUMBERS, FEWEST_NUMBERS = 4096, 256
"""The most and the fewest numbers of a canary: a score is at most the square root of their number,
and nearly normal from the second on."""

Floats = NDArray[np.floating[Any]]
Tensors = Mapping[str, Any]
"""NumPy arrays or torch tensors, by parameter name."""


@dataclass(frozen=True)
class Canaries:
    """The canaries of one update: where they are, and their directions.

    Attributes:
        sizes: How many numbers each parameter that is sent has, by name.
        count: Canaries.
        seed: The seed of their places and directions.
    """

    sizes: Mapping[str, int]
    count: int
    seed: int

    @property
    def numbers(self) -> int:
        """S: numbers of each canary."""
        return min(MOST_NUMBERS, sum(self.sizes.values()) // self.count)

    def directions(self) -> Floats:
        """Returns the directions, of norm 1 [S, K]."""
        return _directions(self.count, self.numbers, self.seed)

    def add_(self, tensors: Tensors, values_SK: Floats) -> None:
        """Adds values at the canaries' numbers; of parameters that are not sent nothing changes."""
        _add_(tensors, self._places(), values_SK.reshape(-1))

    def taken(self, update: Tensors) -> Floats:
        """Returns the numbers of the canaries in an update [S, K]."""
        parts = [_numbers(update[name], places) for name, places, _ in self._places()]
        return np.concatenate(parts).reshape(self.numbers, self.count)

    def score(self, update: Tensors) -> Floats:
        """Returns the score of each canary in an update that goes along the gradient [K]."""
        return scores(self.taken(update), self.directions())

    def put_(
        self,
        gradients: Tensors,
        canary_of_record: Sequence[int],
        coins: Sequence[bool],
        norm: float,
    ) -> None:
        """Puts canaries in the place of the gradients of dummy records.

        Do so after the backward pass and before norms are taken. A canary that is out leaves a
        gradient of zeros.

        Args:
            gradients: One for each record of a batch, by parameter name [B, *shape]. With Opacus
                it is `p.grad_sample` of each parameter.
            canary_of_record: The canary that each record is a dummy of; -1: an example [B].
            coins: Whether each canary is in [K].
            norm: L2 norm of a canary before it is clipped.
        """
        directions_SK = self.directions()
        for record, canary in enumerate(map(int, canary_of_record)):
            if canary < 0:
                continue
            own = {name: gradient[record] for name, gradient in gradients.items()}
            for value in own.values():
                value[...] = 0.0
            if coins[canary]:
                _add_(own, self._places(canary), norm * directions_SK[:, canary])

    def norms(self, canary: int) -> dict[str, float]:
        """Returns the norm of a canary's direction on each parameter that it is on, by name."""
        direction_S = self.directions()[:, canary]
        places = self._places(canary)
        return {name: float(np.linalg.norm(direction_S[numbers])) for name, _, numbers in places}

    def _places(self, canary: int | None = None) -> Iterator[tuple[str, slice, slice]]:
        """Yields which numbers of a parameter belong to canaries, and their places among these.

        The i-th of them belongs to canary i modulo K. With `canary`, only this canary's are meant.
        """
        total = self.numbers * self.count
        stride = sum(self.sizes.values()) // total
        room = sum(self.sizes.values()) - (total - 1) * stride
        rng = np.random.default_rng(stream_seed(self.seed, "places"))
        first = int(rng.integers(room))
        if canary is not None:
            first, stride, total = first + canary * stride, stride * self.count, self.numbers
        begin = 0
        for name in sorted(self.sizes):
            end = begin + self.sizes[name]
            low = max(0, -((first - begin) // stride))
            high = min(total, -((first - end) // stride))
            if low < high:
                start = first + low * stride - begin
                stop = first + (high - 1) * stride - begin + 1
                yield name, slice(start, stop, stride), slice(low, high)
            begin = end


@lru_cache(maxsize=1)  # a step asks for them several times
def _directions(count: int, numbers: int, seed: int) -> Floats:
    rng = np.random.default_rng(stream_seed(seed, "directions"))
    directions_KS = rng.standard_normal((count, numbers), dtype=np.float32)
    directions_KS /= np.linalg.norm(directions_KS, axis=1, keepdims=True)
    directions_SK = np.ascontiguousarray(directions_KS.T)
    directions_SK.flags.writeable = False
    return directions_SK


def _add_(tensors: Tensors, places: Iterator[tuple[str, slice, slice]], values_N: Floats) -> None:
    for name, there, numbers in places:
        tensor, values = tensors[name], values_N[numbers]
        flat = tensor.reshape(-1)
        if isinstance(tensor, np.ndarray):
            flat[there] += values.astype(tensor.dtype)
            in_place = np.shares_memory(flat, tensor)
        else:
            flat[there] += flat.new_tensor(values)
            in_place = flat.data_ptr() == tensor.data_ptr()
        if not in_place:  # a copy, because it is a transpose
            tensor[...] = flat.reshape(tensor.shape)


def _numbers(tensor: Any, places: slice) -> Floats:
    if not isinstance(tensor, np.ndarray):
        return np.asarray(tensor.detach().flatten()[places].float().cpu())
    return tensor.reshape(-1)[places].astype(np.float32)


def scores(values_SK: Floats, directions_SK: Floats) -> NDArray[np.float64]:
    """Returns the score of each canary [K].

    A number that is exactly zero was taken out on the way (by a mask, say) and says nothing, so it
    is left out. Where nothing is left the score is 0.
    """
    values_SK = values_SK.astype(np.float64)
    directions_SK = directions_SK * (values_SK != 0)
    left_K = np.sqrt((values_SK != 0).sum(0))
    lengths_K = np.linalg.norm(values_SK, axis=0) * np.linalg.norm(directions_SK, axis=0)
    products_K = (values_SK * directions_SK).sum(0) * left_K
    cosines_K: NDArray[np.float64] = products_K / np.maximum(lengths_K, 1e-300)
    return cosines_K


def log_ratios(
    scores_K: Sequence[float] | Floats, mu: float, *, rate: float, steps: int, numbers: int
) -> NDArray[np.float64]:
    """Returns the log likelihood ratio of in to out of each canary that is sampled [K].

    A canary that is in takes part in each step with the same probability. In n of S steps the mean
    of its score is `mu` n / S, but no score is larger than the square root of a canary's numbers; n
    is binomial.

    Args:
        scores_K: In one update.
        mu: Mean of the score of a canary that is in every step.
        rate: Probability to be in a step.
        steps: Steps that the update is made of.
        numbers: S of the canaries.
    """
    from scipy.special import gammaln, logsumexp  # here, because it takes a while

    n = np.arange(steps + 1)
    mean = n * mu / steps
    mean /= np.sqrt(1 + mean**2 / numbers)
    # Where every example is in every step, log(1 - rate) is minus infinity, as it should be.
    with np.errstate(divide="ignore", invalid="ignore"):
        absent = np.where(n < steps, (steps - n) * np.log1p(-rate), 0.0)
    ways = gammaln(steps + 1) - gammaln(n + 1) - gammaln(steps - n + 1)
    weight = ways + n * math.log(rate) + absent
    ratios_KN = np.outer(scores_K, mean) - mean**2 / 2 + weight
    log_ratios_K: NDArray[np.float64] = logsumexp(ratios_KN, axis=1)
    return log_ratios_K


def most_canaries(numbers: int) -> int:
    """Returns how many canaries there is room for in an update of so many numbers."""
    return numbers // FEWEST_NUMBERS
