"""Whether the broadcast has the parameters that it is to have."""

from dataclasses import dataclass
from typing import ClassVar

from fedleak.detectors import Detector, Finding, Seen


@dataclass(frozen=True, kw_only=True)
class Shapes(Detector):
    """Compares names and shapes of the parameters with those that the client was promised.

    Any difference is an alarm. It finds layers that were added or widened, as in Robbing the Fed
    (Fowl et al. 2022), and nothing that is done within the shapes.
    """

    kind: ClassVar[str] = "shapes"
    cost: ClassVar[str] = "nothing to speak of"

    def __call__(self, seen: Seen) -> Finding:
        """Returns how many parameters differ."""
        here = {name: tuple(value.shape) for name, value in seen.now.parameters.items()}
        names = here.keys() | seen.shapes.keys()
        others = sorted(name for name in names if here.get(name) != seen.shapes.get(name))
        first = f", such as {others[0]!r}" if others else ""
        return Finding(
            f"{len(others)} of {len(seen.shapes)} parameters are missing, new or of another "
            f"shape{first}",
            float(len(others)),
            0.0,
        )
