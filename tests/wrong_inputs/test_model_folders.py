"""Model folders that are wrong: refused before anything is made, and nothing in them is run."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedleak.config.loading import load
from fedleak.models import builtin
from fedleak.running import preparation

Change = Callable[[Path], object]


def configured(**values: Any) -> Change:
    """Returns what changes a folder's config.json; None takes a key out."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        config = json.loads(path.read_text()) | values
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return change


def weights(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Change:
    """Returns what changes a folder's weights."""

    def change_file(folder: Path) -> None:
        path = folder / "model.safetensors"
        save_file(change(load_file(path)), path, {"format": "pt"})

    return change_file


def without(*names: str) -> Change:
    """Returns what takes files away."""

    def change(folder: Path) -> None:
        for name in names:
            (folder / name).unlink(missing_ok=True)

    return change


def content(name: str, value: bytes) -> Change:
    """Returns what writes a file."""
    return lambda folder: (folder / name).write_bytes(value)


def cut(name: str, share: float) -> Change:
    """Returns what leaves the beginning of a file."""

    def change(folder: Path) -> None:
        old = (folder / name).read_bytes()
        (folder / name).write_bytes(old[: int(len(old) * share)])

    return change


def tokenizer_of(other: str) -> Change:
    """Returns what puts another model's tokenizer into a folder."""

    def change(folder: Path) -> None:
        for path in builtin.folder(other).glob("*token*"):
            shutil.copy(path, folder / path.name)

    return change


def remote_code(folder: Path) -> None:
    """Asks for code of the folder's own to be run."""
    configured(
        model_type="mine", auto_map={"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}
    )(folder)
    (folder / "mine.py").write_text("open('was-run', 'w').close()\n")


def pickled(folder: Path) -> None:
    """Puts a pickle that writes a file where the weights are."""

    class Hostile:
        def __reduce__(self) -> tuple[Any, tuple[str, str]]:
            return open, ("was-run", "w")

    (folder / "model.safetensors").unlink()
    torch.save({"embeddings.word_embeddings.weight": Hostile()}, folder / "pytorch_model.bin")


TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json")
HALF = {
    "half of the weights": lambda old: dict(list(old.items())[: len(old) // 2]),
    "nan": lambda old: {name: value * torch.nan for name, value in old.items()},
    "infinite": lambda old: {name: value + torch.inf for name, value in old.items()},
    "no embeddings": lambda old: {k: v for k, v in old.items() if "word_embeddings" not in k},
    "other names": lambda old: {f"x.{name}": value for name, value in old.items()},
    "other shapes": lambda old: {name: value[..., :-1].clone() for name, value in old.items()},
}

WRONG: dict[str, tuple[str, Change, tuple[str, ...]]] = {
    "empty": ("bert-tiny", lambda f: [p.unlink() for p in f.iterdir()], ("model.name",)),
    "no config": ("bert-tiny", without("config.json"), ("model.name",)),
    "config no json": ("bert-tiny", content("config.json", b"{"), ("config.json",)),
    "config a list": ("bert-tiny", content("config.json", b"[]"), ("model.name",)),
    "config empty": ("bert-tiny", content("config.json", b""), ("model.name",)),
    "no weights": ("bert-tiny", without("model.safetensors"), ("model.safetensors",)),
    "weights cut": ("bert-tiny", cut("model.safetensors", 0.5), ("weight",)),
    "weights empty": ("bert-tiny", content("model.safetensors", b""), ("weight",)),
    "weights garbage": ("bert-tiny", content("model.safetensors", b"\xff" * 4000), ("weight",)),
    "pickle": ("bert-tiny", pickled, ("weight",)),
    **{name: ("bert-tiny", weights(change), ("weight",)) for name, change in HALF.items()},
    "another width": ("bert-tiny", configured(hidden_size=64), ("weight",)),
    "more layers": ("bert-tiny", configured(num_hidden_layers=6), ("weight",)),
    "no tokenizer": ("bert-tiny", without(*TOKENIZER), ("tokenizer",)),
    "no tokenizer, gpt2": (
        "gpt2-tiny",
        without(*TOKENIZER, "vocab.json", "merges.txt"),
        ("tokenizer",),
    ),
    "no tokenizer, llama": ("llama-tiny", without(*TOKENIZER, "tokenizer.model"), ("tokenizer",)),
    "tokenizer cut": ("bert-tiny", cut("tokenizer.json", 0.5), ("tokenizer",)),
    "tokenizer empty": ("bert-tiny", content("tokenizer.json", b""), ("tokenizer",)),
    "tokenizer too large": (
        "bert-tiny",
        weights(
            lambda old: {
                k: v[:500].clone() if "word_embeddings" in k else v for k, v in old.items()
            }
        ),
        ("weight",),
    ),
    "vocabulary too small": (
        "bert-tiny",
        lambda f: (
            configured(vocab_size=500)(f),
            weights(
                lambda old: {
                    k: v[:500].clone() if "word_embeddings" in k else v for k, v in old.items()
                }
            )(f),
        ),
        ("tokenizer", "500"),
    ),
    "one layer": (
        "bert-tiny",
        lambda f: (
            configured(num_hidden_layers=1)(f),
            weights(
                lambda old: {k: v for k, v in old.items() if "layer." not in k or "layer.0." in k}
            )(f),
        ),
        ("keyspan", "layers"),
    ),
    "roberta": ("bert-tiny", configured(model_type="roberta"), ("roberta", "bert, gpt2, llama")),
    "distilbert": ("bert-tiny", configured(model_type="distilbert"), ("distilbert",)),
    "t5": ("bert-tiny", configured(model_type="t5"), ("t5",)),
    "unknown family": ("bert-tiny", configured(model_type="nobody"), ("model.name",)),
    "no family": ("bert-tiny", configured(model_type=None), ("model.name",)),
    "code of its own": ("bert-tiny", remote_code, ("model.name",)),
    "no layers": ("bert-tiny", configured(num_hidden_layers=0), ("model.name",)),
    "negative layers": ("bert-tiny", configured(num_hidden_layers=-1), ("model.name",)),
    "endless layers": ("bert-tiny", configured(num_hidden_layers=10**9), ("1,000,000,000 layers",)),
    "heads that do not divide": ("bert-tiny", configured(num_attention_heads=7), ("model.name",)),
    "a width that is a word": ("bert-tiny", configured(hidden_size="wide"), ("model.name",)),
    "an unknown activation": ("bert-tiny", configured(hidden_act="nope"), ("model.name",)),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_model_folder_that_is_wrong(run, refused, folder: Path, case: str) -> None:
    like, change, says = WRONG[case]
    shutil.copytree(builtin.folder(like), folder / "model")
    change(folder / "model")
    causal = {} if like.startswith("bert") else {"model.task": "causal-lm"}
    refused(run({"model.name": "./model", **causal}), *says)
    assert not (folder / "was-run").exists()
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("name", ["./nope", "/nope/model", "./e.toml", "~/nope-not-here"])
def test_a_folder_that_is_not_there(run, refused, folder: Path, name: str) -> None:
    refused(run({"model.name": name}), "model.name", "folder")
    assert not (folder / "runs").exists()


@pytest.mark.parametrize("like", builtin.BUILTIN)
def test_a_model_folder_that_is_right(experiment, folder: Path, like: str) -> None:
    shutil.copytree(builtin.folder(like), folder / "model")
    task = "sequence-classification" if like == "bert-tiny" else "causal-lm"
    changes = {"model.name": "./model", "model.task": task, "attack": []}
    (folder / "e.toml").write_text(experiment(changes))
    assert preparation.plan(load(folder / "e.toml"))
