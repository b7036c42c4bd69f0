"""Closed-form facts of one update, in milliseconds.

Tokens from the word-embedding rows and the longest sequence from the position rows (`rows`); the
number of examples of each class from the classifier's gradient (Zhao et al. 2020, iDLG; Wainakh et
al. 2021, LLG); and how much of the rank budget of span attacks the batch uses up (Petrov et al.
2024, section 5).
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedleak.attacks import Setting
from fedleak.attacks.rows import used_rows
from fedleak.attacks.subspace import spectrum_rank
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.observation import Observation, UpdateKind
from fedleak.reconstruction import Reconstruction, Status

DUMMY_SEQUENCES = 32
DUMMY_LENGTH = 16
"""Random token sequences that stand in for the batch where the model's outputs are needed."""


@dataclass(frozen=True)
class Probes:
    """Token set, longest sequence, label counts and token budget, read off in milliseconds."""

    kind: ClassVar[str] = "probes"
    uses: ClassVar[frozenset[str]] = frozenset()

    def obstacle(self, setting: Setting) -> str | None:
        """Works on any update; a fact that is not in it is not reported."""
        return None

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
                tokens = tuple(used[0])
                diagnostics["token_gap"] = _json(used[1])
        if family.position_embedding in tensors:
            used = used_rows(tensors[family.position_embedding])
            if used is not None:
                facts["longest_sequence"] = used[0][-1] + 1
        counts = label_counts(seen, model, rng)
        if counts is not None:
            facts["label_counts"] = counts
        queries = family.attention_gradients(tensors, 0)
        if queries:
            # None (null): the rank cannot be told, for noise or for too many tokens.
            diagnostics["token_budget"] = [spectrum_rank(queries[0]), model.hidden_size]
        if tokens is None and not facts:
            return Reconstruction.none(
                Status.ABSTAINED, "no row or label stands out in what was shared", **diagnostics
            )
        return Reconstruction(Status.RECOVERED, tokens=tokens, facts=facts, diagnostics=diagnostics)


def label_counts(seen: Observation, model: LanguageModel, rng: torch.Generator) -> list[int] | None:
    """Returns the estimated number of examples of each class; None where it cannot be told.

    For mean cross-entropy the classifier's gradient is the mean of (p - y) h over the batch, so
    the counts y follow from p and h, which are estimated on random tokens.
    """
    shared = [name for name in model.family.classifier if name in seen.update.tensors]
    if model.task != CLASSIFICATION or seen.update.kind != UpdateKind.GRADIENT or not shared:
        return None
    ids_BT = torch.randint(len(model.tokenizer), (DUMMY_SEQUENCES, DUMMY_LENGTH), generator=rng).to(
        model.device
    )
    hidden: list[Tensor] = []
    classifier = model.module.get_submodule(model.family.classifier[0].rpartition(".")[0])
    hook = classifier.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    logits = model.family.logits(
        model.module, torch.ones_like(ids_BT), ids_BT=ids_BT, embeds_BTD=None
    )
    hook.remove()
    p_C = logits.softmax(-1).mean(0)
    gradient = seen.update.tensors[shared[-1]]
    if gradient.dim() == 1:
        error_C = gradient
    else:
        h_D = hidden[0].reshape(-1, hidden[0].shape[-1]).mean(0)
        error_C = gradient @ h_D / h_D.square().sum()
    return _round_to_sum((p_C - error_C).tolist(), seen.update.num_examples)


def _round_to_sum(shares: list[float], total: int) -> list[int]:
    """Returns whole counts with this sum, nearest to the shares (largest remainder)."""
    positive = [max(share, 0.0) for share in shares]
    scale = total / (sum(positive) or 1.0)
    exact = [share * scale for share in positive]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _json(value: float) -> float | str:
    """JSON has no infinity."""
    return value if math.isfinite(value) else "infinite"
