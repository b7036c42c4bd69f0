"""Model folders that are not whole, or whose parts are not of one model, are refused in a line."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertForMaskedLM, BertForSequenceClassification, LlamaModel

from fedleak.config.loading import parse
from fedleak.models import CAUSAL_LM, CLASSIFICATION, ModelSpec, builtin, loading
from fedleak.running import preparation
from fedleak.util.errors import ConfigError

pytestmark = pytest.mark.core


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def tokenizer_of_another(folder: Path) -> None:
    """Its 2,000 tokens are few among 30,522."""
    change_json(folder / "config.json", vocab_size=30_522)


def too_large_ids(folder: Path) -> None:
    change_json(folder / "config.json", vocab_size=1_000)


def one_way(folder: Path) -> None:
    change_json(folder / "config.json", is_decoder=True)


def half_of_the_weights(folder: Path) -> None:
    change_weights(
        folder, lambda weights: [weights.pop(name) for name in list(weights) if "layer.3" in name]
    )


def other_shapes(folder: Path) -> None:
    change_json(folder / "config.json", intermediate_size=96)


def not_a_number(folder: Path) -> None:
    change_weights(
        folder, lambda weights: weights["encoder.layer.2.output.dense.bias"].fill_(torch.nan)
    )


def five_classes(folder: Path) -> None:
    config = BertConfig.from_pretrained(folder)
    config.num_labels = 5
    BertForSequenceClassification(config).save_pretrained(folder)


def garbage(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"x" * 100)


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def nonsense(folder: Path) -> None:
    change_json(folder / "config.json", num_attention_heads="four")


def no_marks(folder: Path) -> None:
    """Neither an end token nor padding."""
    change_json(folder / "tokenizer_config.json", eos_token=None, pad_token=None, bos_token=None,
                unk_token=None)  # fmt: skip


def headless(folder: Path) -> None:
    LlamaModel.from_pretrained(folder).save_pretrained(folder)


def remote_code(folder: Path) -> None:
    change_json(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.Config"})
    (folder / "own.py").write_text("raise SystemExit('ran')")


REFUSED = [
    ("bert-tiny", no_tokenizer, ["has no tokenizer", "save it beside config.json"]),
    ("gpt2-tiny", no_tokenizer, ["has no tokenizer", "save it beside config.json"]),
    ("llama-tiny", no_tokenizer, ["no tokenizer that can be loaded", "save it beside"]),
    ("bert-tiny", tokenizer_of_another, ["tokenizer of another", "2,000 tokens", "30,522"]),
    ("bert-tiny", too_large_ids, ["tokenizer of another", "number 1,999", "of 1,000"]),
    ("bert-tiny", one_way, ["reads one way", "is_decoder to false"]),
    ("bert-tiny", half_of_the_weights, ["lacks 16 of its 73 weights", "layer.3", "whole"]),
    ("bert-tiny", other_shapes, ["weight bert.encoder.layer.0", "[512]", "[96]", "config.json"]),
    ("bert-tiny", not_a_number, ["1 weights that are not finite", "layer.2.output.dense.bias"]),
    ("bert-tiny", five_classes, ["5 classes", "the data has 2", "without its classifier"]),
    ("bert-tiny", garbage, ["weights that cannot be loaded", "save it again"]),
    ("bert-tiny", no_weights, ["weights that cannot be loaded", "no file named"]),
    ("bert-tiny", nonsense, ["cannot be loaded", "num_attention_heads"]),
    ("bert-tiny", remote_code, ["cannot be loaded"]),
    ("gpt2-tiny", no_marks, ["without an end token", "set eos_token"]),
    ("llama-tiny", headless, ["lacks 1 of its 39 weights", "lm_head.weight"]),
]


@pytest.mark.parametrize(("name", "damage", "words"), REFUSED)
def test_a_folder_that_is_no_whole_model_is_refused_when_it_is_planned(
    tmp_path, name, damage, words
):
    shutil.copytree(builtin.folder(name), tmp_path / "model")
    damage(tmp_path / "model")
    task = CLASSIFICATION if name == "bert-tiny" else CAUSAL_LM
    experiment = parse(
        {
            "name": "a",
            "model": {"name": str(tmp_path / "model"), "task": task},
            "data": {"name": "builtin/notes", "samples": 8, "held_out": 2},
        }
    )
    with pytest.raises(ConfigError) as caught:
        preparation.plan(experiment)
    assert [w for w in [*words, str(tmp_path / "model")] if w not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("marks", [{"pad_token": None}, {"pad_token": None, "eos_token": None}])
def test_padding_is_the_end_token_where_there_is_none(tmp_path, marks):
    shutil.copytree(builtin.folder("gpt2-tiny"), tmp_path / "model")
    change_json(tmp_path / "model/tokenizer_config.json", **marks)
    spec = ModelSpec(name=str(tmp_path / "model"), task=CLASSIFICATION, num_labels=2)
    if "eos_token" in marks:
        with pytest.raises(ConfigError, match=r"without a padding or an end token: set pad_token"):
            loading.outline(spec)
    else:
        assert loading.outline(spec).tokenizer.pad_token_id == 0


def test_an_outline_is_made_anew_once_a_file_of_it_is_another(tmp_path):
    for part in ("model", "words"):
        shutil.copytree(builtin.folder("gpt2-tiny"), tmp_path / part)
    spec = ModelSpec(
        name=str(tmp_path / "model"),
        tokenizer=str(tmp_path / "words"),
        task=CLASSIFICATION,
        num_labels=2,
    )
    first = loading.outline(spec)
    assert loading.outline(spec) is first
    assert loading.outline(replace(spec, num_labels=3)).num_labels == 3
    change_json(tmp_path / "words/tokenizer_config.json", pad_token="a")
    second = loading.outline(spec)
    assert second.tokenizer.pad_token == "a" != first.tokenizer.pad_token
    change_json(tmp_path / "model/config.json", n_positions=32)
    assert loading.outline(spec).max_length == 32 != second.max_length
    (tmp_path / "model/config.json").unlink()
    with pytest.raises(ConfigError, match="cannot be loaded"):
        loading.outline(spec)


def test_a_folder_of_a_user_that_there_is_not_is_not_there():
    with pytest.raises(ConfigError, match="'~nobody-at-all/model': there is no such folder"):
        loading.outline(ModelSpec(name="~nobody-at-all/model", task=CLASSIFICATION, num_labels=2))


def test_a_new_classifier_and_a_tied_head_may_be_missing(tmp_path, caplog):
    """As in every checkpoint that was trained on text alone."""
    shutil.copytree(builtin.folder("bert-tiny"), tmp_path / "bert")
    BertForMaskedLM.from_pretrained(tmp_path / "bert").save_pretrained(tmp_path / "bert")
    with caplog.at_level("INFO", logger="fedleak.models"):
        loading.check_weights(str(tmp_path / "bert"), CLASSIFICATION, 2)
    assert "bert.pooler.dense.weight, classifier.bias, classifier.weight" in caplog.text
    shutil.copytree(builtin.folder("gpt2-tiny"), tmp_path / "gpt2")
    change_weights(tmp_path / "gpt2", lambda weights: weights.pop("lm_head.weight", None))
    loading.check_weights(str(tmp_path / "gpt2"), CAUSAL_LM, 2)


def test_weights_are_read_once_for_all_cells_of_a_sweep(monkeypatch):
    loads = []
    monkeypatch.setattr(loading, "load", lambda spec: loads.append(spec.name))
    for _ in range(3):
        loading.check_weights("builtin/another", CLASSIFICATION, 2)
    assert loads == ["builtin/another"]
