"""New orders of a sentence's tokens (LAMP, Balunovic et al. 2022, section 3.2).

An order is a tuple of places: the token that comes to place i was at place `order[i]`. Only content
has places; the special tokens that begin and end a sentence have none.
"""

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")

Order = tuple[int, ...]


def swap(length: int, i: int, j: int) -> Order:
    """Returns the order with the tokens at i and j exchanged."""
    order = list(range(length))
    order[i], order[j] = order[j], order[i]
    return tuple(order)


def move(length: int, start: int, stop: int, to: int) -> Order:
    """Returns the order with tokens start to stop (exclusive) moved before place `to` of the rest.

    LAMP moves a token, a subsequence of several tokens, or a prefix (`start` 0) to the end.
    """
    places = list(range(length))
    rest = places[:start] + places[stop:]
    return tuple(rest[:to] + places[start:stop] + rest[to:])


def nearby(length: int, most: int, rng: torch.Generator) -> list[Order]:
    """Returns the distinct orders that one swap or one move makes, at most `most` of them.

    The present order is not among them. Where there are more, their numbers are drawn at random:
    a sentence of 200 tokens has a million of these orders.
    """
    # A move makes two neighbouring blocks change places; so does a swap of neighbours.
    moved, swapped = math.comb(length + 1, 3), math.comb(max(length - 1, 0), 2)
    orders = []
    for number in at_most(range(moved + swapped), most, rng):
        if number < moved:
            start, between, stop = _subset(number, 3)
            orders.append(move(length, start, between, start + stop - between))
        else:
            i, j = _subset(number - moved, 2)
            orders.append(swap(length, i, j + 1))
    return orders


def at_most(values: Sequence[Item], most: int, rng: torch.Generator) -> Sequence[Item]:
    """Returns all values, or so many of them drawn at random."""
    if len(values) <= most:
        return values
    return [values[i] for i in torch.randperm(len(values), generator=rng)[:most].tolist()]


def _subset(number: int, size: int) -> list[int]:
    """Returns set `number` of the sets of `size` integers, in the combinatorial number system."""
    chosen: list[int] = []
    for left in range(size, 0, -1):
        largest = left - 1
        while math.comb(largest + 1, left) <= number:
            largest += 1
        number -= math.comb(largest, left)
        chosen.insert(0, largest)
    return chosen


def sampled(length: int, draws: int, rng: torch.Generator) -> list[Order]:
    """Returns the present order, and then the distinct orders among LAMP's random moves.

    A quarter of the moves each are swaps, and moves of a token, of a subsequence, and of a prefix
    to the end.
    """
    moves = random_moves(length, draws, rng) if length > 1 else ()
    return list(dict.fromkeys([tuple(range(length)), *moves]))


def random_moves(length: int, draws: int, rng: torch.Generator) -> Iterator[Order]:
    """Yields LAMP's random moves 1 to `draws` - 1; the kind of a move goes by its number."""
    for draw in range(1, draws):
        a, b = torch.randint(length, (2,), generator=rng).tolist()
        if draw % 4 == 0:
            yield swap(length, a, b)
        elif draw % 4 == 1:
            yield move(length, a, a + 1, b)
        elif draw % 4 == 2:
            start, stop = sorted(torch.randint(length + 1, (2,), generator=rng).tolist())
            left = length - (stop - start)
            yield move(length, start, stop, int(torch.randint(left + 1, (), generator=rng)))
        else:
            yield move(length, 0, a, length - a)


def reordered(variables_RBTF: Tensor, order_RBT: Tensor) -> Tensor:
    """Returns the variables with the tokens of each sequence in another order."""
    return variables_RBTF.take_along_dim(order_RBT[..., None], -2)


def orders_tensor(orders: Sequence[Sequence[int]], places: Sequence[int], length: int) -> Tensor:
    """Returns orders of some places as orders [K, T] of all places."""
    order_KT = torch.arange(length).repeat(len(orders), 1)
    if places and orders:
        order_KT[:, places] = torch.tensor(places)[torch.tensor(orders)]
    return order_KT
