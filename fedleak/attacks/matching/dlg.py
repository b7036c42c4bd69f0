"""DLG: gradient matching with a squared distance.

Zhu et al., "Deep Leakage from Gradients", NeurIPS 2019, algorithm 1, on word embeddings. Start
from noise, compute the gradient of the guess, step down its squared distance to the observed
gradient, and repeat: `descent_loop.match_gradients`.

`faithful` is this loop as LAMP's authors compare with it (eth-sri/lamp at 852d12f): with Adam in
place of L-BFGS, and labels that are known, not optimised. `best` searches the tokens by our own
algorithm with the same distance.
"""

from dataclasses import dataclass
from typing import ClassVar

from fedleak.attacks.matching import relaxed_tokens
from fedleak.attacks.matching.descent_loop import match_gradients
from fedleak.attacks.matching.gradient_matching import GradientMatching, MatchingMethod
from fedleak.attacks.matching.optimizer import MatchingConfig, constant, linear

FAITHFUL = {
    "base": MatchingConfig(steps=2500, step_size=0.1, schedule=constant),
    "large": MatchingConfig(
        steps=10_000,
        step_size=0.1,
        schedule=linear(1.0),
        clip=1.0,
        weight_decay=0.01,
        epsilon=1e-6,
    ),
}
"""The constants of LAMP's authors for this attack."""


@dataclass(frozen=True, kw_only=True)
class Dlg(GradientMatching):
    """Gradient matching with a squared distance: the first of the field."""

    kind: ClassVar[str] = "dlg"

    def method(self) -> MatchingMethod:
        """Returns algorithm 1 of the paper, or our own search, with a squared distance."""
        if self.faithful:
            config = FAITHFUL[self.size].shortened(self.steps)
            return MatchingMethod(algorithm=match_gradients, config=config, loss="l2")
        known, free = relaxed_tokens.without_moves(self.steps)
        return MatchingMethod(
            algorithm=relaxed_tokens.reconstruct,
            config=known,
            free_config=free,
            loss="l2",
            scaled=True,
        )
