"""Exact zeros where a trained model has none."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from fedleak.detectors import SECOND_FACTOR, Detector, Finding, Seen, matrices

TABLE = 16
"""The fewest rows of a matrix that may be a table with one row of zeros, for padding."""


@dataclass(frozen=True, kw_only=True)
class Zeros(Detector):
    """Counts exact zeros in matrices and in the scales of norms.

    A weight in float32 that was drawn or trained is zero with a probability below 1e-6, so one in a
    hundred is out of reach for an honest model. Left out are biases, one row for padding, and the
    second factors of adapters, which begin as zeros. A pruned model has honest zeros: raise the
    limit, or leave this detector out. A server that adds noise to its zeros is not noticed.

    Attributes:
        limit: Share of zeros above which it alarms.
    """

    kind: ClassVar[str] = "zeros"
    cost: ClassVar[str] = "one pass over the weights"
    limit: Annotated[float, Field(ge=0, lt=1)] = 0.01

    def __call__(self, seen: Seen) -> Finding:
        """Returns the largest share of zeros in a parameter."""
        scales = [
            (name, value.reshape(1, -1))
            for name, value in sorted(seen.now.parameters.items())
            if value.ndim == 1 and value.dtype.kind == "f" and name.endswith("weight")
        ]
        largest, where = 0.0, "any parameter"
        for name, value in [*matrices(seen.now.parameters, [SECOND_FACTOR]), *scales]:
            zeros_R = (value == 0).sum(axis=1)
            if len(value) >= TABLE:
                zeros_R = np.delete(zeros_R, zeros_R.argmax())
            share = float(zeros_R.sum()) / max(1, len(zeros_R) * value.shape[1])
            if share > largest:
                largest, where = share, repr(name)
        return Finding(
            f"{largest:.3g} of the numbers of {where} are exact zeros", largest, self.limit
        )
