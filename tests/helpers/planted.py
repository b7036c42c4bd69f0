"""Canaries' rows, and bugs of DP-SGD, as more than one module of tests needs them."""

from typing import Any

import pytest
import torch

from fedleak.store.records import CanaryRow
from fedleak.training import private_steps
from fedleak.training.planted import DUMMIES
from fedleak.training.private_steps import ClippedSum


def canary_row(client: int, round: int = 1, **changes: Any) -> CanaryRow:
    """Returns a row of two canaries, of which the first is in."""
    row: dict[str, Any] = {
        "round": round,
        "client": client,
        "slot": 0,
        "audited_copy": False,
        "whole": False,
        "rate": None,
        "steps": 1,
        "uses": 1,
        "numbers": 100,
        "noise_share": 1.0,
        "inside": (True, False),
        "scores": (1.0, 0.0),
        "witnesses": (),
    }
    return CanaryRow(**row | changes)


def long_texts_clipped_less(patch: pytest.MonkeyPatch) -> None:
    """Lets a text of more than 14 tokens move a step by four clipping norms."""
    original = private_steps._clipped_records_

    def clipped_records_(model: Any, records: Any, *rest: Any) -> Any:
        most_R = torch.tensor([4.0 if len(text) > 14 else 1.0 for text in records[0]])
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                private_steps,
                "clipping_factors",
                lambda norms_R, most: (most_R * most / (norms_R + 1e-6)).clamp(max=1.0),
            )
            return original(model, records, *rest)

    patch.setattr(private_steps, "_clipped_records_", clipped_records_)


def clipping_of_the_mean(patch: pytest.MonkeyPatch) -> None:
    """Clips the mean of a batch, canaries and all, in place of each gradient.

    Frameworks without gradients of single examples do so.
    """

    def clipped_sum_(
        model: Any, batch: Any, joining: Any, hooks: Any, optimizer: Any, ghost: Any
    ) -> ClippedSum:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                private_steps, "clipping_factors", lambda norms_R, most: torch.ones_like(norms_R)
            )
            norms, _ = private_steps._clipped_records_(model, batch, None, hooks, optimizer, ghost)
        sums = {name: p.summed_grad for name, p in model.trained().items()}
        records = len(norms)
        if joining is not None:
            records += int(joining.takes_part_K.sum())
            joining.planted.add_(sums, joining.takes_part_K, torch.ones(DUMMIES))
        whole = torch.stack([value.norm() for value in sums.values()]).norm()
        for value in sums.values():
            value *= min(1.0, optimizer.max_grad_norm * records / max(float(whole), 1e-30))
        return ClippedSum(norms, whole)

    patch.setattr(private_steps, "clipped_sum_", clipped_sum_)
