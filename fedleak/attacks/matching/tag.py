"""TAG: gradient matching with a squared and an absolute distance.

Deng et al., "TAG: Gradient Attack on Transformer-based Language Models", Findings of EMNLP 2021.
It is the loop of DLG with another distance: `descent_loop.match_gradients`.

`faithful` is this loop as LAMP's authors compare with it (eth-sri/lamp at 852d12f): the absolute
distance has the same weight in every layer. `best` searches the tokens by our own algorithm with
the same distance.
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
        step_size=0.03,  # as the code has it; the paper says 0.01
        schedule=linear(1.0),
        clip=1.0,
        weight_decay=0.01,
        epsilon=1e-6,
    ),
}
"""The constants of LAMP's authors for this attack."""


@dataclass(frozen=True, kw_only=True)
class Tag(GradientMatching):
    """Gradient matching with a squared and an absolute distance."""

    kind: ClassVar[str] = "tag"

    def method(self) -> MatchingMethod:
        """Returns DLG's loop, or our own search, with a squared and an absolute distance."""
        if self.faithful:
            config = FAITHFUL[self.size].shortened(self.steps)
            return MatchingMethod(algorithm=match_gradients, config=config, loss="l2l1")
        known, free = relaxed_tokens.without_moves(self.steps)
        return MatchingMethod(
            algorithm=relaxed_tokens.reconstruct,
            config=known,
            free_config=free,
            loss="l2l1",
            scaled=True,
        )
