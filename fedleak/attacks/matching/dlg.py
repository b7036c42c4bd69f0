"""DLG and TAG: gradient matching by descent alone.

DLG (Zhu et al., "Deep Leakage from Gradients", NeurIPS 2019, algorithm 1) on word embeddings: start
from noise, compute the gradient of the guess, step down its squared distance to the observed
gradient, and repeat: `optimizer.match_gradients`. TAG (Deng et al., "TAG: Gradient Attack on
Transformer-based Language Models", Findings of EMNLP 2021) adds an absolute distance.

`faithful` is this loop as LAMP's authors compare with it (eth-sri/lamp at 852d12f): with Adam in
place of L-BFGS, labels that are known, not optimised, and the same weight of TAG's absolute
distance in every layer. `best` searches the tokens by our own algorithm with the same distance.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from fedleak.attacks.matching import relaxed_tokens
from fedleak.attacks.matching.gradient_distance import Loss
from fedleak.attacks.matching.gradient_matching import GradientMatching, MatchingMethod
from fedleak.attacks.matching.optimizer import MatchingConfig, constant, linear, match_gradients


@dataclass(frozen=True, kw_only=True)
class Dlg(GradientMatching):
    """Gradient matching with a squared distance: the first of the field."""

    kind: ClassVar[str] = "dlg"
    loss: ClassVar[Loss] = "l2"
    large_step_size: ClassVar[float] = 0.1

    def method(self) -> MatchingMethod:
        """Returns algorithm 1 of the paper, or our own search."""
        if self.faithful:
            config = self.authors_constants().shortened(self.steps)
            return MatchingMethod(match_gradients, config, config, self.loss)
        known, free = (
            replace(preset.shortened(self.steps), discrete_at="never", lm_weight=0.0)
            for preset in (relaxed_tokens.BEST, relaxed_tokens.BEST_FREE)
        )
        return MatchingMethod(relaxed_tokens.reconstruct, known, free, self.loss, scaled=True)

    def authors_constants(self) -> MatchingConfig:
        """Returns the constants of LAMP's authors for this attack."""
        if self.size == "base":
            return MatchingConfig(steps=2500, step_size=0.1, schedule=constant)
        return MatchingConfig(
            steps=10_000,
            step_size=self.large_step_size,
            schedule=linear(1.0),
            clip=1.0,
            weight_decay=0.01,
            epsilon=1e-6,
        )


@dataclass(frozen=True, kw_only=True)
class Tag(Dlg):
    """Gradient matching with a squared and an absolute distance."""

    kind: ClassVar[str] = "tag"
    loss: ClassVar[Loss] = "l2l1"
    large_step_size: ClassVar[float] = 0.03  # as the code has it; the paper says 0.01
