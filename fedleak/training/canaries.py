"""Canaries: made-up gradients of random direction that an audit looks for in an update.

Each canary is a Gaussian vector on numbers of the update that no other canary uses: every few
numbers there is one, of each canary in turn, from a random first one on. Only a seed is kept; the
vectors are drawn again where they are needed.

The score of a canary is z = sqrt(s) <u, c> / (|u| |c|) on its numbers (the cosine of Andrew et al.
2024, "One-shot empirical privacy estimation for federated learning", section 3, on s of the
numbers). A canary that is not in the update is independent of it, so its z has mean 0 and variance
1 and is nearly normal, whatever the update is. One that is in has the mean C / sigma where it has
the norm C and the noise on each number the standard deviation sigma.

Shapes: K canaries, S numbers of each.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedleak.training.batches import Records
from fedleak.util.rng import stream

MOST_NUMBERS, FEWEST_NUMBERS = 4096, 256
"""Numbers of a canary: scores end at the square root of them, and are nearly normal above the
second."""


@dataclass(frozen=True)
class Canaries:
    """The canaries of one update: where they are, and their directions.

    Attributes:
        sizes: How many numbers each parameter that is sent has, by name.
        count: Canaries.
        seed: Of their places and directions.
    """

    sizes: Mapping[str, int]
    count: int
    seed: int

    @property
    def numbers(self) -> int:
        """S: numbers of each canary."""
        return min(MOST_NUMBERS, sum(self.sizes.values()) // self.count)

    def directions(self) -> Tensor:
        """Returns the directions, of norm 1 [S, K]."""
        rng = stream(self.seed, "directions")
        directions_KS = torch.randn(self.count, self.numbers, generator=rng)
        directions_KS /= directions_KS.norm(dim=1, keepdim=True)
        return directions_KS.mT.contiguous()

    def add_(self, tensors: Mapping[str, Tensor], values_SK: Tensor) -> None:
        """Adds values at the canaries' numbers; of parameters that are not sent nothing changes."""
        values_N = values_SK.flatten()
        for name, places, numbers in self._places():
            tensor = tensors[name]
            flat = tensor.reshape(-1)
            flat[places] += values_N[numbers].to(flat)
            if flat.data_ptr() != tensor.data_ptr():  # a copy, because it is a transpose
                tensor.copy_(flat.view_as(tensor))

    def taken(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the numbers of the canaries [S, K]."""
        parts = [tensors[name].flatten()[places].float() for name, places, _ in self._places()]
        return torch.cat(parts).view(self.numbers, self.count)

    def _places(self) -> Iterator[tuple[str, slice, slice]]:
        """Yields which numbers of a parameter are canaries', and which of all of theirs they are.

        The i-th of them belongs to canary i modulo K.
        """
        total = self.numbers * self.count
        stride = sum(self.sizes.values()) // total
        room = sum(self.sizes.values()) - (total - 1) * stride
        first = int(torch.randint(room, (), generator=stream(self.seed, "places")))
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


def scores(values_SK: Tensor, directions_SK: Tensor) -> Tensor:
    """Returns the score of each canary [K], float64.

    A number that is exactly zero was taken out on the way (by a mask, say) and says nothing, so it
    is left out. Where nothing is left the score is 0.
    """
    values_SK = values_SK.double()
    directions_SK = directions_SK.double() * (values_SK != 0)
    left_K = (values_SK != 0).sum(0)
    lengths_K = values_SK.norm(dim=0) * directions_SK.norm(dim=0)
    products_K = (values_SK * directions_SK).sum(0) * left_K.sqrt()
    return torch.where(lengths_K > 0, products_K / lengths_K.clamp_min(1e-300), 0.0)


@dataclass(frozen=True)
class Planted:
    """Canaries as they enter steps of DP-SGD, each as the gradient of one more example.

    Attributes:
        canaries: Where they are.
        coins_K: Which are in: nobody but the client knows.
        norm: Of each before it is clipped.
        records: Canaries and examples as the sampler draws them.
        drawn_K: Which take part in the step of a FedSGD round, in or not; None: not drawn yet, or
            drawn in every local step.
    """

    canaries: Canaries
    coins_K: Tensor
    norm: float
    records: Records
    drawn_K: Tensor | None = None

    def norms(self) -> Tensor:
        """Returns the norm of each [K]."""
        return torch.full((self.canaries.count,), self.norm)

    def add_(self, sums: Mapping[str, Tensor], takes_part_K: Tensor, factors_K: Tensor) -> None:
        """Adds those that are in and take part, each times its factor."""
        sizes_K = self.norm * factors_K * self.coins_K * takes_part_K
        if sizes_K.any():
            self.canaries.add_(sums, self.canaries.directions() * sizes_K)


def most_canaries(numbers: int) -> int:
    """Returns how many canaries there is room for in an update of so many numbers."""
    return numbers // FEWEST_NUMBERS
