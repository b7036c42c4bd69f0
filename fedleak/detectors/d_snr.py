"""Whether one example drowns the others of its batch."""

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from fedleak.detectors import EMBEDDINGS, Finding, OwnDetector, Seen, matrices


@dataclass(frozen=True, kw_only=True)
class DSnr(OwnDetector):
    """Disaggregation signal-to-noise ratio (Garov et al. 2024). No limit by itself.

    Over all matrices but embeddings, the largest ratio of one example's gradient norm to the sum of
    the others'. It finds attacks that single an example out. It grows as batches shrink, in honest
    rounds as well, so take a limit from honest rounds on public texts with as many examples. It
    does not see imprints, which keep all examples apart within one layer.

    Attributes:
        limit: Ratio above which it alarms; None: never.
    """

    kind: ClassVar[str] = "d_snr"
    cost: ClassVar[str] = "a forward and a backward pass for each example of the batch"

    def __call__(self, seen: Seen) -> Finding:
        """Returns the ratio."""
        if seen.own is None:
            return Finding("the app does not hand over gradients of its examples")
        layers = {name for name, _ in matrices(seen.now.parameters, EMBEDDINGS)}
        with np.errstate(invalid="ignore"):
            ratios = {
                name: float(norms_B.max() / max(norms_B.sum() - norms_B.max(), 1e-30))
                for name, norms_B in seen.own.example_norms().items()
                if len(norms_B) > 1 and name in layers
            }
        if not ratios:
            return Finding("a batch of one example has no others")
        # A ratio of NaN counts as the largest.
        name = max(ratios, key=lambda name: (math.isnan(ratios[name]), ratios[name]))
        return Finding(
            f"in {name!r} one example's gradient is {ratios[name]:.3g} times those of all others",
            ratios[name],
            self.limit,
        )
