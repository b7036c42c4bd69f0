import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from fedleak.data.notes import notes
from fedleak.models import builtin

BERT, GPT2, LLAMA = "bert-tiny", "gpt2-tiny", "llama-tiny"
TEXTS = [note.text for note in notes(1_000, seed=3)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Iterator[dict[str, Path]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLEAK_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield {name: builtin.folder(name) for name in builtin.BUILTIN}


@pytest.fixture(params=[BERT, GPT2, LLAMA])
def made(request, folders) -> SimpleNamespace:
    path = folders[request.param]
    return SimpleNamespace(
        name=request.param, path=path, tokenizer=AutoTokenizer.from_pretrained(path)
    )


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def start(cache: Path, code: str) -> subprocess.Popen[str]:
    """Starts a process that runs code after importing `builtin`, with its own random hashes."""
    paths = f"import sys; sys.path[:] = {sys.path!r}"
    return subprocess.Popen(
        [sys.executable, "-c", f"{paths}\nfrom fedleak.models import builtin\n{code}"],
        env={**os.environ, "FEDLEAK_CACHE": str(cache)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_every_model_that_is_listed_can_be_made(folders):
    assert set(folders) == {BERT, GPT2, LLAMA}
    for name, path in folders.items():
        assert path.name.startswith(name + "-")
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= contents(path).keys()


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match="'bert-tny': did you mean 'bert-tiny'"):
        builtin.folder("bert-tny")


def test_a_second_call_makes_nothing(made, monkeypatch):
    monkeypatch.setenv("FEDLEAK_CACHE", str(made.path.parent))
    before = {path: path.stat().st_mtime_ns for path in made.path.parent.rglob("*")}
    assert builtin.folder(made.name) == made.path
    assert {path: path.stat().st_mtime_ns for path in made.path.parent.rglob("*")} == before


def test_without_the_variable_the_users_cache_is_used(monkeypatch, tmp_path):
    monkeypatch.delenv("FEDLEAK_CACHE", raising=False)
    monkeypatch.setattr(builtin, "user_cache_path", lambda app: tmp_path / app)
    assert builtin.folder(GPT2).parent == tmp_path / "fedleak"


def test_a_changed_recipe_gets_another_folder(folders, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLEAK_CACHE", str(tmp_path))
    monkeypatch.setattr(builtin, "version", lambda package: "another")
    monkeypatch.setattr(builtin, "_recipe", builtin._recipe.__wrapped__)  # a process makes one
    assert builtin.folder(GPT2).name != folders[GPT2].name


@pytest.mark.parametrize(
    "made",
    [
        GPT2,
        pytest.param(BERT, marks=pytest.mark.slow),
        pytest.param(LLAMA, marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_made_again_it_is_the_same_and_the_callers_random_numbers_too(made, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLEAK_CACHE", str(tmp_path))
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with torch.device("meta"):  # as a caller who wants a model's outline
        again = builtin.folder(made.name)
    assert torch.equal(torch.rand(3), expected)
    assert again != made.path
    assert contents(again) == contents(made.path)


@pytest.mark.parametrize(
    "made",
    [pytest.param(name, marks=pytest.mark.slow) for name in (BERT, GPT2, LLAMA)],
    indirect=True,
)
def test_processes_at_the_same_time_make_one_good_folder(made, tmp_path):
    processes = [start(tmp_path, f"print(builtin.folder({made.name!r}))") for _ in range(2)]
    printed = {process.communicate(timeout=300)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert printed == {str(tmp_path / made.path.name)}
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [made.path.name]
    assert contents(tmp_path / made.path.name) == contents(made.path)


@pytest.mark.slow
def test_a_killed_process_leaves_nothing_half_made(folders, monkeypatch, tmp_path):
    # It dies with the tokenizer written and the weights not.
    killed = start(
        tmp_path,
        "import os, transformers\n"
        "transformers.BertModel.save_pretrained = lambda *_: os.kill(os.getpid(), 9)\n"
        f"builtin.folder({BERT!r})",
    )
    killed.communicate(timeout=300)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name for path in tmp_path.rglob("tokenizer.json")] == ["tokenizer.json"]
    assert not (tmp_path / folders[BERT].name).exists()

    monkeypatch.setenv("FEDLEAK_CACHE", str(tmp_path))
    assert contents(builtin.folder(BERT)) == contents(folders[BERT])
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [folders[BERT].name]


def test_it_loads_without_asking_any_network(made, monkeypatch):
    requests = []

    def refuse(*args, **kwargs):
        requests.append(args)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    AutoConfig.from_pretrained(made.path)
    AutoTokenizer.from_pretrained(made.path)
    AutoModelForSequenceClassification.from_pretrained(made.path)
    assert requests == []


def test_the_config_is_the_recipes(made):
    config = AutoConfig.from_pretrained(made.path)
    assert config.model_type == made.name.removesuffix("-tiny")
    assert config.vocab_size == len(made.tokenizer) == 2_000
    assert config.hidden_size == 128
    assert config.num_hidden_layers == config.num_attention_heads == 4
    assert config.max_position_embeddings == made.tokenizer.model_max_length == 128
    assert config.pad_token_id == made.tokenizer.pad_token_id


def test_special_tokens_of_bert(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders[BERT])
    assert tokenizer.all_special_tokens == ["[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]"]
    assert tokenizer.pad_token_id == 0
    ids = tokenizer("Call me.")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "call", "me", ".", "[SEP]"]
    assert tokenizer("A", "B")["token_type_ids"] == [0, 0, 0, 1, 1]


def test_special_tokens_of_gpt2(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders[GPT2])
    config = AutoConfig.from_pretrained(folders[GPT2])
    assert tokenizer.all_special_tokens == ["<|endoftext|>"]
    assert {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} == {0}
    assert (config.bos_token_id, config.eos_token_id) == (0, 0)
    assert 0 not in tokenizer("Call me.")["input_ids"]


def test_special_tokens_of_llama(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders[LLAMA])
    config = AutoConfig.from_pretrained(folders[LLAMA])
    assert set(tokenizer.all_special_tokens) == {"<unk>", "<s>", "</s>", "<pad>"}
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 3)
    assert tokenizer.convert_tokens_to_ids(["<unk>", "<s>", "</s>", "<pad>"]) == [0, 1, 2, 3]
    ids = tokenizer("Call me\n.")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", "▁Call", "▁me", "<0x0A>", "."]


def test_heads_of_llama_share_keys_and_values(folders):
    weights = load_file(folders[LLAMA] / "model.safetensors")
    stem = "model.layers.0.self_attn"
    shapes = [tuple(weights[f"{stem}.{part}_proj.weight"].shape) for part in "qkv"]
    assert shapes == [(128, 128), (64, 128), (64, 128)]
    assert not torch.equal(weights["lm_head.weight"], weights["model.embed_tokens.weight"])
    # A row of zeros is no direction: only padding, which no attention reads, may be one.
    zero = (weights["model.embed_tokens.weight"] == 0).all(1).nonzero().flatten().tolist()
    assert zero == [3]


def test_decoding_gives_the_text_back(made):
    for text in [*TEXTS, "Wholly other words: zebrafish & quartz @ 100%!"]:
        ids = made.tokenizer(text)["input_ids"]
        decoded = made.tokenizer.decode(ids, skip_special_tokens=True)
        if made.name != BERT:
            assert decoded == text
        else:
            assert made.tokenizer.unk_token_id not in ids
            # WordPiece forgets case and the spaces around signs, and nothing else.
            assert decoded.replace(" ", "") == text.lower().replace(" ", "")
            assert made.tokenizer(decoded)["input_ids"] == ids


def test_bert_decodes_to_readable_text(folders):
    tokenizer = AutoTokenizer.from_pretrained(folders[BERT])
    text = "The spare key, as always, is under the doormat."
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text.lower()


def test_tokens_are_words_or_large_parts_of_words(made):
    lengths = [len(ids) for ids in made.tokenizer(TEXTS)["input_ids"]]
    num_words = sum(len(text.split()) for text in TEXTS)
    assert sum(lengths) < 2 * num_words
    assert max(lengths) < 64


@pytest.mark.parametrize(
    ("name", "auto"),
    [
        (BERT, AutoModelForSequenceClassification),
        (GPT2, AutoModelForSequenceClassification),
        (GPT2, AutoModelForCausalLM),
        (LLAMA, AutoModelForSequenceClassification),
        (LLAMA, AutoModelForCausalLM),
    ],
)
def test_each_head_loads_onto_the_saved_weights(folders, name, auto):
    model = auto.from_pretrained(folders[name])
    assert model.dtype == torch.float32
    loaded = {key: value for key, value in model.base_model.state_dict().items()}
    saved = {
        key.removeprefix("transformer.").removeprefix("model."): value
        for key, value in load_file(folders[name] / "model.safetensors").items()
        if key != "lm_head.weight"
    }
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[key], saved[key]) for key in saved)
    tokens = AutoTokenizer.from_pretrained(folders[name])(
        TEXTS[:4], padding=True, return_tensors="pt"
    )
    assert model(**tokens).logits.isfinite().all()
