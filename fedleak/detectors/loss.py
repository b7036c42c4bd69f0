"""How well the broadcast does on the client's own batch."""

from dataclasses import dataclass
from typing import ClassVar

from fedleak.detectors import Finding, OwnDetector, Seen


@dataclass(frozen=True, kw_only=True)
class Loss(OwnDetector):
    """Measures the loss of the broadcast on the client's batch. It has no limit by itself.

    A model that was turned into an imprint does badly, but a fresh head does too, and then the loss
    says nothing. Take a limit from honest rounds on public texts.

    Attributes:
        limit: Loss above which it alarms; None: never.
    """

    kind: ClassVar[str] = "loss"
    cost: ClassVar[str] = "a forward pass on the batch"

    def __call__(self, seen: Seen) -> Finding:
        """Returns the loss."""
        if seen.own is None:
            return Finding("the app does not hand over its loss")
        loss = seen.own.loss()
        return Finding(f"the client's loss is {loss:.3g}", loss, self.limit)
