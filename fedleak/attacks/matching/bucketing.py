"""Which victims are worth a batch together: all are padded to the longest, which costs time."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

PASS = {"cpu": 32, "cuda": 1024}
"""Tokens that take as long to look at as a pass over the model takes however few there are.

Measured on a CPU for a step of gradient matching on a model of 6 x 384; for GPUs a guess.
"""


class Size(NamedTuple):
    """What of a batch a victim takes.

    Attributes:
        length: Tokens of its longest sequence.
        sequences: Sequences of its largest row.
        rows: What is tried of it side by side.
    """

    length: int
    sequences: int
    rows: int


def cost(sizes: Sequence[Size], a_pass: int) -> int:
    """Returns what a pass over victims together costs, in tokens."""
    largest = max(one.length for one in sizes) * max(one.sequences for one in sizes)
    return a_pass + largest * sum(one.rows for one in sizes)


def parts(group: Sequence[int], sizes: Mapping[int, Size], a_pass: int) -> list[list[int]]:
    """Returns victims in the parts that cost least in all, of those of neighbours in length."""
    order = sorted(group, key=lambda i: sizes[i])
    # For the first so many of them, what they cost and their parts.
    best: list[tuple[int, list[list[int]]]] = [(0, [])]
    for stop in range(1, len(order) + 1):
        ways = []
        for start, (so_far, before) in enumerate(best):
            part = order[start:stop]
            ways.append((so_far + cost([sizes[i] for i in part], a_pass), [*before, part]))
        best.append(min(ways, key=lambda way: way[0]))
    return [sorted(part) for part in best[-1][1]]
