"""What several benchmarks do: make texts, models and updates, time attacks, keep rows."""

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from clocks import now
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, BertConfig

from fedleak.attacks import Attack
from fedleak.attacks.reconstruction import Reconstruction
from fedleak.models import CAUSAL_LM, LanguageModel, ModelSpec, load_parameters_, loading
from fedleak.models.lora import Lora
from fedleak.training.local import local_update_
from fedleak.training.observation import ClientUpdate, Knowledge, Observation, UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.training.settings import LocalTraining

MOST_WORDS = 24


def keep(rows: Sequence[Any], path: Path | None) -> None:
    """Writes named tuples as JSON, if there is a file for them."""
    if path is not None:
        path.write_text(json.dumps([row._asdict() for row in rows], indent=1) + "\n")


def lines_of(path: Path, fewest: int, seed: int) -> list[str]:
    """Returns the lines of a file that have so many words, and at most 24, in a drawn order."""
    lines = [line.strip() for line in path.read_text().splitlines()]
    lines = [line for line in lines if fewest <= len(line.split()) <= MOST_WORDS]
    random.Random(seed).shuffle(lines)
    return lines


def sentences(folder: Path, name: str) -> list[str]:
    """Returns all sentences of CoLA's training set ("cola"), or of Rotten Tomatoes."""
    if name == "cola":
        rows = (folder / "cola" / "in_domain_train.tsv").read_text("utf-8").splitlines()
        return [row.split("\t")[3] for row in rows]
    files = sorted((folder / name).glob("rt-polarity.utf8.*"))
    return [row.strip() for file in files for row in file.read_text("utf-8").splitlines()]


def model_of(name: str | Path, task: str, seed: int = 0, lora: Lora | None = None) -> LanguageModel:
    """Returns a model of two classes; what it lacks is made from random numbers of the seed."""
    return loading.load(ModelSpec(name=str(name), task=task, num_labels=2, seed=seed, lora=lora))


def bert_config(vocabulary: int, layers: int, width: int, heads: int) -> BertConfig:
    """Returns the configuration of a BERT of some size, with eager attention."""
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        attn_implementation="eager",
    )


def save_random(source: str | Path, folder: str, task: str, seed: int, **changes: int) -> None:
    """Saves a model like another one, with other weights, and its tokenizer.

    Args:
        source: Of the other one.
        folder: Where to.
        task: Of the model.
        seed: Of the weights.
        changes: To the configuration.
    """
    torch.manual_seed(seed)
    kind = AutoModelForCausalLM if task == CAUSAL_LM else AutoModel
    kind.from_config(AutoConfig.from_pretrained(source, **changes)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


def timed(
    attack: Attack, seen: Observation, model: LanguageModel, rng: torch.Generator
) -> tuple[Reconstruction, float]:
    """Returns an attack's answer and its seconds."""
    begin = now(model.device)
    answer = attack(seen, model, rng=rng)
    return answer, now(model.device) - begin


def content(model: LanguageModel, sequences: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Returns texts without special tokens."""
    special = model.special_ids()
    return [tuple(token for token in ids if token not in special) for ids in sequences]


def gradient_of(size: int) -> LocalTraining:
    """Returns one step on a whole batch, whose gradient is sent."""
    return LocalTraining(
        kind=UpdateKind.GRADIENT, batch_size=size, epochs=1, learning_rate=1e-4, dropout=False
    )


def steps_of(size: int, rate: float, recipe: Recipe, *, dropout: bool = False) -> LocalTraining:
    """Returns one pass in steps of so many texts, whose change of the weights is sent."""
    return LocalTraining(
        kind=UpdateKind.DELTA,
        batch_size=size,
        epochs=1,
        learning_rate=rate,
        dropout=dropout,
        recipe=recipe,
    )


def update_of(
    model: LanguageModel,
    texts: Sequence[Sequence[int]],
    labels: Sequence[int],
    how: LocalTraining,
    seed: int,
) -> ClientUpdate:
    """Returns what a client sends; the model stays as it is."""
    before = {name: value.clone() for name, value in model.parameters().items()}
    update = local_update_(model, texts, labels, how, seed=seed)
    load_parameters_(model, before)
    return update


def known_of(how: LocalTraining, texts: int) -> Knowledge:
    """Returns what is known of a client's steps on so many texts: how it makes them."""
    return Knowledge(
        learning_rate=how.learning_rate,
        local_steps=how.steps(texts),
        local_epochs=how.epochs,
        dropout=how.dropout,
        recipe=how.recipe,
    )


def root_mean_square(tensors: Mapping[str, Tensor]) -> float:
    """Returns the root of the mean square of all numbers of an update."""
    numbers = sum(value.numel() for value in tensors.values())
    square = sum(float(value.double().square().sum()) for value in tensors.values())
    root: float = (square / numbers) ** 0.5
    return root
