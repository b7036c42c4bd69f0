"""Length bucketing: which victims share a batch, whose rows are all padded to the longest."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

PASS = {"cpu": 32, "cuda": 1024}
"""The fixed cost of a pass over the model, in tokens.

Measured on a CPU for a step of gradient matching on a model of 6 x 384; for GPUs a guess.
"""


class Size(NamedTuple):
    """How much of a batch a victim takes.

    Attributes:
        length: Tokens of its longest sequence.
        sequences: Sequences of its largest row.
        rows: Its rows: shapes and starts that are tried side by side.
    """

    length: int
    sequences: int
    rows: int


def cost(sizes: Sequence[Size], a_pass: int) -> int:
    """Returns the cost of a pass over victims together, in tokens."""
    largest = max(size.length for size in sizes) * max(size.sequences for size in sizes)
    return a_pass + largest * sum(size.rows for size in sizes)


def parts(group: Sequence[int], sizes: Mapping[int, Size], a_pass: int) -> list[list[int]]:
    """Returns the cheapest partition of victims into parts of neighbours in length."""
    order = sorted(group, key=lambda i: sizes[i])
    # The least cost of the first 0, 1, 2, ... victims, and their parts.
    best: list[tuple[int, list[list[int]]]] = [(0, [])]
    for stop in range(1, len(order) + 1):
        ways = []
        for start, (so_far, before) in enumerate(best):
            part = order[start:stop]
            ways.append((so_far + cost([sizes[i] for i in part], a_pass), [*before, part]))
        best.append(min(ways, key=lambda way: way[0]))
    return [sorted(part) for part in best[-1][1]]
