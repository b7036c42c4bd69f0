"""DLG: gradient matching with a squared distance.

Zhu et al., "Deep Leakage from Gradients", NeurIPS 2019, algorithm 1, on word embeddings, with
Adam in place of L-BFGS, as LAMP's authors compare with it (eth-sri/lamp at 852d12f).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from fedleak.attacks.matching import lamp, relaxed_tokens
from fedleak.attacks.matching.gradient_matching import GradientMatching, Method
from fedleak.attacks.matching.optimizer import Loss, Recipe, constant, linear

_BASE = Recipe(steps=2500, step_size=0.1, schedule=constant)
FAITHFUL = {
    "base": _BASE,
    "large": replace(
        _BASE,
        steps=10_000,
        schedule=linear(1.0),
        clip=1.0,
        weight_decay=0.01,
        epsilon=1e-6,
    ),
}
"""The constants of LAMP's authors for this attack."""


@dataclass(frozen=True)
class Dlg(GradientMatching):
    """Gradient matching with a squared distance: the first of the field."""

    kind: ClassVar[str] = "dlg"

    def method(self) -> Method:
        """Returns LAMP's descent without its discrete steps, or our own without moves."""
        return descent_alone(self, "l2", FAITHFUL)


def descent_alone(attack: GradientMatching, loss: Loss, faithful: Mapping[str, Recipe]) -> Method:
    """Returns the method of an attack that neither has a prior nor moves words."""
    if attack.faithful:
        recipe = faithful[attack.size].shortened(attack.steps)
        return Method(lamp.reconstruct, recipe, recipe, loss, False)
    known, free = (
        replace(one.shortened(attack.steps), discrete_at="never", lm_weight=0.0)
        for one in (lamp.BEST, lamp.BEST_FREE)
    )
    return Method(relaxed_tokens.reconstruct, known, free, loss, True)
