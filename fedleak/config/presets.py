"""Presets: what is published of how people fine-tune language models in federations."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal

PresetName = Literal["flowertune", "nvflare"]

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Flower's FlowerTune LLM template: HF Trainer (AdamW, clipping at 1), adapters of an
    # instruction-tuned decoder, 200 rounds of 2 of 20 clients.
    "flowertune": {
        "model": {
            "task": "causal-lm",
            "response_template": "### Response:",
            "lora": {"rank": 32, "alpha": 64.0, "dropout": 0.075},
        },
        "data": {
            "text": "Below is an instruction that describes a task. Write a response that "
            "appropriately completes the request.\n### Instruction:\n{instruction}\n### Response: "
            "{response}",
        },
        "federation": {
            "algorithm": "fedavg",
            "clients": 20,
            "clients_per_round": 2,
            "batch_size": 16,
            "learning_rate": 5e-5,
            "dropout": True,
        },
        "client": {
            "optimiser": "adamw",
            "max_grad_norm": 1.0,
            "max_steps": 10,
            "precision": "bfloat16-mixed",
            "schedule": "cosine",
            "schedule_rounds": 200,
            "final_learning_rate": 1e-6,
        },
    },
    # NVFlare's example llm_hf: one epoch of 4 x 10 accumulated examples a step.
    "nvflare": {
        "model": {
            "task": "causal-lm",
            "lora": {"rank": 64, "alpha": 16.0, "dropout": 0.1},
        },
        "federation": {
            "algorithm": "fedavg",
            "batch_size": 4,
            "local_epochs": 1,
            "learning_rate": 5e-4,
            "dropout": True,
        },
        "client": {
            "optimiser": "adamw",
            "max_grad_norm": 0.3,
            "accumulate": 10,
            "precision": "bfloat16",
        },
    },
}
"""The tables of each preset. Both federations quantise the base; what is not simulated is said in
docs/experiment-file.md."""


def with_preset(table: dict[str, Any]) -> dict[str, Any]:
    """Returns the tables of an experiment with those of its preset below them.

    A preset that there is not is for the experiment's own check to refuse.
    """
    preset = PRESETS.get(str(table.get("preset")))
    return table if preset is None else _below(preset, table)


def settings(preset: str) -> Iterator[tuple[str, Any]]:
    """Yields what a preset sets, each with its dotted key."""
    yield from _flat(PRESETS[preset], "")


def _below(preset: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns tables filled in with those of a preset."""
    merged = dict(table)
    for key, value in preset.items():
        if key not in merged:
            merged[key] = value
        elif isinstance(value, Mapping) and isinstance(merged[key], Mapping):
            merged[key] = _below(value, merged[key])
    return merged


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
