"""Layers whose rows all point the same way, as those of an imprint do."""

import hashlib
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from fedleak.detectors import EMBEDDINGS, SECOND_FACTOR, Detector, Finding, Seen, matrices

FEWEST = 16
"""The fewest rows for a useful median: the rows of a head of two classes oppose each other."""

MOST = 256
"""The most rows of a matrix that are compared.

A hash of the matrix decides which: whoever moves a row changes which are compared.
"""


@dataclass(frozen=True, kw_only=True)
class ParallelRows(Detector):
    """Looks for a layer half of whose pairs of rows, or of columns, are nearly parallel.

    The median of |cos| is 0.67 / sqrt(width) for random rows. Above the limit of 0.5 the layer has
    8 directions at most, by its Gram matrix: no layer that computes something else for each of its
    outputs. It is the median, because single pairs are nearly parallel in honest models too. Tables
    of embeddings and second factors of adapters are left out. A server that turns its rows apart is
    not noticed.

    Attributes:
        limit: Median of |cos| above which it alarms.
    """

    kind: ClassVar[str] = "parallel_rows"
    cost: ClassVar[str] = "a product of each matrix with itself: a second for MiniLM"
    limit: Annotated[float, Field(gt=0, le=1)] = 0.5

    def __call__(self, seen: Seen) -> Finding:
        """Returns the largest median of a matrix."""
        largest, where = 0.0, "no matrix"
        for name, value in matrices(seen.now.parameters, [*EMBEDDINGS, SECOND_FACTOR]):
            if not np.isfinite(value).all():
                return Finding(f"{name!r} holds numbers that are none", float("inf"), self.limit)
            # GPT-2 keeps the weights of a neuron in a column.
            for rows in (value, value.T):
                if len(rows) >= FEWEST <= rows.shape[1] and (of_rows := _median(rows)) > largest:
                    largest, where = of_rows, repr(name)
        return Finding(
            f"half of the pairs of rows of {where} have |cos| {largest:.3g} or more",
            largest,
            self.limit,
        )


def _median(rows: NDArray[np.floating]) -> float:
    """Returns the median |cos| of pairs of rows that are not zero."""
    rows = rows[np.any(rows != 0, axis=1)].astype(np.float64)
    if len(rows) > MOST:
        digest = hashlib.sha256(rows.tobytes()).digest()
        draw = np.random.default_rng(int.from_bytes(digest))
        rows = rows[draw.choice(len(rows), MOST, replace=False)]
    if len(rows) < 2:
        return 0.0
    units = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return float(np.median(np.abs(units @ units.T)[np.triu_indices(len(rows), 1)]))
