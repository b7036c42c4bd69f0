"""How long the client's own gradient is."""

from dataclasses import dataclass
from typing import ClassVar

from fedleak.detectors import Finding, OwnDetector, Seen


@dataclass(frozen=True, kw_only=True)
class GradientNorm(OwnDetector):
    """Measures the L2 norm of the client's own gradient. It has no limit by itself.

    What is normal depends on model and data, and no bound is known: take a limit from honest rounds
    on public texts. An attacker can trade sharpness of its bins for a normal norm.

    Attributes:
        limit: Norm above which it alarms; None: never.
    """

    kind: ClassVar[str] = "gradient_norm"
    cost: ClassVar[str] = "a forward and a backward pass on the batch"

    def __call__(self, seen: Seen) -> Finding:
        """Returns the norm."""
        if seen.own is None:
            return Finding("the app does not hand over its gradient")
        norm = seen.own.gradient_norm()
        return Finding(f"the client's gradient has norm {norm:.3g}", norm, self.limit)
