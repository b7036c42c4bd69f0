"""Canaries' rows, and a bug of DP-SGD, as more than one module of tests needs them."""

from typing import Any

import pytest
import torch

from fedleak.store.records import CanaryRow
from fedleak.training import private_steps


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
