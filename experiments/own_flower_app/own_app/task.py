"""Model, data and training, in plain PyTorch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

from .texts import TEXTS

OPTIMISERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def get_model(name: str) -> Any:
    """Loads a classifier."""
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(name, num_labels=2)


def texts_of(partition: int, count: int) -> list[tuple[int, str]]:
    """Returns a client's classes and texts."""
    return [TEXTS[i % len(TEXTS)] for i in range(partition * count, (partition + 1) * count)]


def loader_of(rows: list[tuple[int, str]], name: str, batch_size: int) -> DataLoader[Any]:
    """Returns batches."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    examples = [{**tokenizer(text, truncation=True), "labels": label} for label, text in rows]
    collate = DataCollatorWithPadding(tokenizer)
    return DataLoader(examples, batch_size=batch_size, collate_fn=collate)  # type: ignore[arg-type]


def train(model: nn.Module, loader: DataLoader[Any], lr: float, config: Mapping[str, Any]) -> float:
    """Trains in place and returns the last loss."""
    kind, decay = OPTIMISERS[str(config["optimiser"])], float(config["weight-decay"])
    optimiser = kind(model.parameters(), lr=lr, weight_decay=decay)
    accumulate, epochs = int(config["accumulate"]), int(config["epochs"])
    steps = epochs * -(-len(loader) // accumulate)
    last = 0.1 if config["schedule"] else 1.0
    schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, last, max(steps - 1, 1))
    model.train(bool(config["dropout"]))
    half = config["precision"] != "float32"
    value = 0.0
    for _ in range(epochs):
        for i, batch in enumerate(loader, 1):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
                loss = model(**batch).loss / accumulate
            loss.backward()
            value = loss.item()
            if i % accumulate == 0 or i == len(loader):
                optimiser.step()
                optimiser.zero_grad()
                schedule.step()
    return value
