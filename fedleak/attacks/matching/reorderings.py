"""New orders of a sentence's tokens (LAMP, Balunovic et al. 2022, section 3.2).

An order is a tuple of places: the token that comes to place i was at place `order[i]`. Places are
those of content; what begins and ends every sentence is not in it.
"""

import math
from collections.abc import Iterable, Iterator

import torch

Order = tuple[int, ...]


def swap(length: int, i: int, j: int) -> Order:
    """Returns the order with the tokens at i and j exchanged."""
    order = list(range(length))
    order[i], order[j] = order[j], order[i]
    return tuple(order)


def move(length: int, start: int, stop: int, to: int) -> Order:
    """Returns the order with tokens start to stop (exclusive) moved before place `to` of the rest.

    With one token it is LAMP's move of a token, with several that of a subsequence, and with
    `start` 0 and `to` the end that of a prefix.
    """
    places = list(range(length))
    rest = places[:start] + places[stop:]
    return tuple(rest[:to] + places[start:stop] + rest[to:])


def nearby(length: int, most: int, rng: torch.Generator) -> list[Order]:
    """Returns at most so many of the orders that one swap or one move makes, each once.

    The present order is not among them. Where there are more, they are drawn at random by their
    number, because a sentence of 200 tokens has a million.
    """
    # A move makes two neighbouring blocks change places; so does a swap of neighbours.
    moved, swapped = math.comb(length + 1, 3), math.comb(max(length - 1, 0), 2)
    numbers: Iterable[int] = range(moved + swapped)
    if moved + swapped > most:
        numbers = torch.randperm(moved + swapped, generator=rng)[:most].tolist()
    orders = []
    for number in numbers:
        if number < moved:
            start, between, stop = _subset(number, 3)
            orders.append(move(length, start, between, start + stop - between))
        else:
            i, j = _subset(number - moved, 2)
            orders.append(swap(length, i, j + 1))
    return orders


def _subset(number: int, size: int) -> list[int]:
    """Returns the set of that number among sets of so many, rising (combinatorial numbers)."""
    chosen: list[int] = []
    for left in range(size, 0, -1):
        largest = left - 1
        while math.comb(largest + 1, left) <= number:
            largest += 1
        number -= math.comb(largest, left)
        chosen.insert(0, largest)
    return chosen


def sampled(length: int, draws: int, rng: torch.Generator) -> list[Order]:
    """Returns the distinct ones of LAMP's random moves, the present order first.

    A quarter each are swaps, moves of a token, of a subsequence, and of a prefix to the end.
    """
    orders = {tuple(range(length)): None}
    for order in _draws(length, draws, rng) if length > 1 else ():
        orders[order] = None
    return list(orders)


def _draws(length: int, draws: int, rng: torch.Generator) -> Iterator[Order]:
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
