"""Matrices of low rank where a trained model has full ones."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from fedleak.detectors import ROUNDING, SECOND_FACTOR, Detector, Finding, Seen, matrices


@dataclass(frozen=True, kw_only=True)
class Rank(Detector):
    """Looks for matrices that lack most of their rank.

    A random matrix has full rank with probability 1, and training does not take it away. A singular
    value counts as zero below the rounding of float32, as in `numpy.linalg.matrix_rank`, with the
    matrix's shorter side for its factor. The second factors of adapters are left out: after few
    steps their rank is that of few texts. A server that adds noise to its matrices is not noticed.

    Attributes:
        limit: Share of the rank that is missing, above which it alarms; half is a convention.
    """

    kind: ClassVar[str] = "rank"
    cost: ClassVar[str] = "the eigenvalues of a Gram matrix for each matrix: a second for MiniLM"
    limit: Annotated[float, Field(ge=0, lt=1)] = 0.5

    def __call__(self, seen: Seen) -> Finding:
        """Returns the largest share of its rank that a matrix lacks."""
        largest, sentence = 0.0, "every matrix has its full rank"
        for name, value in matrices(seen.now.parameters, [SECOND_FACTOR]):
            full = min(value.shape)
            wide = value.astype(np.float64)
            gram = wide @ wide.T if len(value) == full else wide.T @ wide
            if not np.isfinite(gram).all():
                return Finding(f"{name!r} holds numbers that are none", float("inf"), self.limit)
            squares = np.linalg.eigvalsh(gram).clip(min=0.0)
            rank = int((squares > squares.max() * (full * ROUNDING) ** 2).sum())
            if 1 - rank / full > largest:
                largest = 1 - rank / full
                sentence = f"{name!r} lacks {100 * largest:.3g} % of its rank"
        return Finding(sentence, largest, self.limit)
