"""TAG: gradient matching with a squared and an absolute distance.

Deng et al., "TAG: Gradient Attack on Transformer-based Language Models", Findings of EMNLP 2021,
as LAMP's authors compare with it (eth-sri/lamp at 852d12f): the absolute distance counts alike in
every layer.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from fedleak.attacks.matching import dlg
from fedleak.attacks.matching.gradient_matching import GradientMatching, Method

FAITHFUL = {
    "base": dlg.FAITHFUL["base"],
    # As the code has it; the paper says 0.01.
    "large": replace(dlg.FAITHFUL["large"], step_size=0.03),
}
"""The constants of LAMP's authors for this attack."""


@dataclass(frozen=True)
class Tag(GradientMatching):
    """Gradient matching with a squared and an absolute distance."""

    kind: ClassVar[str] = "tag"

    def method(self) -> Method:
        """Returns LAMP's descent without its discrete steps, or our own without moves."""
        return dlg.descent_alone(self, "l2l1", FAITHFUL)
