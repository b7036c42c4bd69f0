"""Closed-form facts of one update, in milliseconds.

They are the tokens of the batch, its longest sequence, the number of examples of each class
(`facts`), and how much of the rank budget of span attacks the batch uses up
(Petrov et al. 2024, section 5).
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedleak.attacks import AttackSetting
from fedleak.attacks.analytic.facts import label_counts, longest_sequence, used_rows
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.attacks.subspace.span import row_space
from fedleak.models import LanguageModel
from fedleak.models.family import with_adapters
from fedleak.training.observation import Observation


@dataclass(frozen=True)
class Probes:
    """Token bag, longest sequence, label counts and rank budget, read off in milliseconds."""

    kind: ClassVar[str] = "probes"
    always: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = frozenset()

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Works on any update; a fact that is not in it is not reported."""
        return None

    def reads(self, setting: AttackSetting) -> frozenset[str]:
        """Reads the embeddings, the first attention layer and the classifier."""
        attention = with_adapters(setting.family.attention_parameters(0))
        return attention | setting.tables | {*setting.family.classifier}

    @torch.no_grad()
    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the facts that the update holds."""
        family, tensors = model.family, seen.update.tensors
        facts: dict[str, Any] = {}
        diagnostics: dict[str, Any] = {}
        tokens: tuple[int, ...] | None = None
        if family.word_embedding in tensors:
            used = used_rows(tensors[family.word_embedding])
            if used is not None:
                tokens = tuple(used.rows)
                # JSON has no infinity.
                diagnostics["token_gap"] = used.gap if math.isfinite(used.gap) else "infinite"
        longest = longest_sequence(model, tensors)
        if longest is not None:
            facts["longest_sequence"] = longest
        counts = label_counts(seen, model, rng)
        if counts is not None:
            facts["label_counts"] = counts
        attention = family.attention_gradients(tensors, 0)
        if attention:
            # None (null): the rank is unknown, because of noise or too many tokens.
            span = row_space(attention)
            used_up = span.rank if span is not None and span.exact else None
            diagnostics["budget"] = [used_up, model.hidden_size]
        if tokens is None and not facts:
            return Reconstruction.abstained(
                "no row or label stands out in what was shared", **diagnostics
            )
        return Reconstruction(
            status=Status.RECOVERED, tokens=tokens, facts=facts, diagnostics=diagnostics
        )
