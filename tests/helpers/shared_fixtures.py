"""What all tests share: small models, texts, and updates as a client makes them."""

import copy
import os
import signal
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import tiny
import torch
from hypothesis import settings
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from fedleak import models
from fedleak.data.notes import notes
from fedleak.models import CAUSAL_LM, CLASSIFICATION, LanguageModel, ModelSpec, loading
from fedleak.running import preparation, sweep
from fedleak.running.dispatch import dispatcher
from fedleak.training.local import local_update_
from fedleak.training.observation import Candidates, Example, Knowledge, Observation, UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.training.settings import LocalTraining

settings.register_profile("quick", max_examples=40, deadline=None, derandomize=True)
settings.load_profile("quick")
torch.set_num_threads(1)

# No test cuts the power, so that nothing has to wait until what is written is on the disk.
os.fsync = lambda file: None

# What is the same for all runs: git is not started, and no package looked up, for each.
preparation.git_commit = cache(preparation.git_commit)
preparation.versions = cache(preparation.versions)

# A shell's background jobs ignore Ctrl-C, and so would the commands that the tests start and stop.
signal.signal(signal.SIGINT, signal.default_int_handler)

_SAVED: set[str] = set()
"""The folders of `saved`."""

_load = loading.load


@lru_cache(maxsize=32)
def _loaded(spec: ModelSpec, weights: bool, files: Hashable) -> LanguageModel:
    return _load(spec, weights=weights)


def _load_once(spec: ModelSpec, *, weights: bool = True) -> LanguageModel:
    """Loads a model of `saved`, as long as its files stay as they are, once: then it is copied.

    Several hundred runs begin with one of a few. Copies share the tokenizer, as those who ask for
    an outline do.
    """
    if spec.name not in _SAVED:
        return _load(spec, weights=weights)
    model = _loaded(spec, weights, loading._files(spec.name))
    return replace(model, module=copy.deepcopy(model.module))


loading.load = _load_once

TEXTS = tuple(note.text for note in notes(60, seed=7))


@pytest.fixture(scope="session")
def workers_of() -> Callable[[int], list[psutil.Process]]:
    """Finds the worker processes of a process, by its number."""

    def find(pid: int) -> list[psutil.Process]:
        workers = []
        for child in psutil.Process(pid).children():
            with suppress(psutil.NoSuchProcess):  # it has just ended
                if any("spawn_main" in part for part in child.cmdline()):
                    workers.append(child)
        return workers

    return find


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attacks in this process: a worker takes seconds to start."""
    for module in (dispatcher, sweep):
        monkeypatch.setattr(module, "hire", lambda *_: nullcontext([tiny.Here()]))


@pytest.fixture(scope="session")
def texts() -> tuple[str, ...]:
    """Sentences that no built-in tokenizer was trained on by name."""
    return TEXTS


@pytest.fixture(scope="session")
def assets() -> Path:
    """The folder of real data and models; a machine without it skips."""
    beside = Path(__file__).parents[3] / "shared"
    folder = Path(os.environ.get("FEDLEAK_ASSETS") or beside)
    if not (folder / "data").is_dir():
        pytest.skip(f"no real data in {folder}: set FEDLEAK_ASSETS")
    return folder


@pytest.fixture(scope="session")
def bert_tiny() -> LanguageModel:
    return loading.load(ModelSpec(name="builtin/bert-tiny", task=CLASSIFICATION, num_labels=2))


@pytest.fixture(scope="session")
def gpt2_tiny() -> LanguageModel:
    return loading.load(ModelSpec(name="builtin/gpt2-tiny", task=CAUSAL_LM, num_labels=2))


@pytest.fixture(scope="session")
def llama_tiny() -> LanguageModel:
    return loading.load(ModelSpec(name="builtin/llama-tiny", task=CAUSAL_LM, num_labels=2))


@pytest.fixture(scope="session")
def small(bert_tiny, gpt2_tiny, llama_tiny) -> Callable[..., LanguageModel]:
    """Makes a model of any size with the vocabulary of a built-in one, from its own seed."""
    built_in = {"bert": bert_tiny, "gpt2": gpt2_tiny, "llama": llama_tiny}

    def make(
        family: str,
        task: str = CLASSIFICATION,
        *,
        width: int = 32,
        layers: int = 2,
        num_labels: int = 3,
        seed: int = 0,
        kv_heads: int = 2,
        longest: int = 64,
        **options: Any,
    ) -> LanguageModel:
        """Makes one for texts up to `longest`; a LLaMA has `kv_heads`.

        The `options` go to the config.
        """
        like = built_in[family]
        shared = {
            "vocab_size": len(like.tokenizer),
            "pad_token_id": like.tokenizer.pad_token_id,
            "num_labels": num_labels,
            "attn_implementation": "eager",
            # Larger than the default, so that attention and MLP matter.
            "initializer_range": 0.15,
            **options,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if family == "bert":
                config = BertConfig(
                    hidden_size=width,
                    num_hidden_layers=layers,
                    num_attention_heads=4,
                    max_position_embeddings=longest,
                    **({"intermediate_size": 2 * width} | shared),
                )
                module = BertForSequenceClassification(config)
            elif family == "gpt2":
                config = GPT2Config(
                    n_embd=width, n_layer=layers, n_head=4, n_positions=longest, **shared
                )
                cls = GPT2LMHeadModel if task == CAUSAL_LM else GPT2ForSequenceClassification
                module = cls(config)
            else:
                config = LlamaConfig(
                    hidden_size=width,
                    num_hidden_layers=layers,
                    num_attention_heads=4,
                    num_key_value_heads=kv_heads,
                    intermediate_size=2 * width,
                    max_position_embeddings=longest,
                    **shared,
                )
                cls = LlamaForCausalLM if task == CAUSAL_LM else LlamaForSequenceClassification
                module = cls(config)
            # Norms and biases start as ones and zeros, which would hide mistakes in them.
            for name, parameter in module.named_parameters():
                if parameter.dim() == 1:
                    shift = torch.randn_like(parameter) * 0.1
                    parameter.data.add_(shift.abs() if name.endswith("weight") else shift)
        return LanguageModel(
            module=module.eval(), tokenizer=like.tokenizer, family=like.family, task=task
        )

    return make


@pytest.fixture(scope="session")
def saved(small, tmp_path_factory) -> Callable[..., str]:
    """Saves a model of a built-in one's vocabulary that costs a tenth, and returns its folder."""

    @cache
    def save(family: str, task: str = CLASSIFICATION, **sizes: int) -> str:
        model = small(family, task, num_labels=2, **sizes)
        folder = tmp_path_factory.mktemp(family)
        model.module.save_pretrained(folder)
        model.tokenizer.save_pretrained(folder)
        _SAVED.add(str(folder))
        return str(folder)

    return save


@pytest.fixture(scope="session", autouse=True)
def tiny_experiment(saved) -> None:
    """Gives the tiny experiment the smallest model that every attack can work on."""
    tiny.TABLES["model"]["name"] = saved("bert", layers=3, width=48)


@pytest.fixture(scope="session")
def observe() -> Callable[..., SimpleNamespace]:
    """Returns what a server sees of a client that trains on texts, and beside it the truth."""

    def make(
        model: LanguageModel,
        texts_or_count: Sequence[str] | int,
        labels: Sequence[int] | None = None,
        *,
        granted: Sequence[str] = (),
        kind: UpdateKind = UpdateKind.GRADIENT,
        max_length: int | None = None,
        dropout: bool = False,
        learning_rate: float = 0.1,
        server_mode: str | None = None,
        recipe: Recipe | None = None,
        batch_size: int | None = None,
    ) -> SimpleNamespace:
        chosen = TEXTS[:texts_or_count] if isinstance(texts_or_count, int) else texts_or_count
        cut = max_length or 10**6
        sequences = [
            (*ids[: cut - 1], ids[-1]) if len(ids) > cut else tuple(ids)
            for ids in model.encode(chosen)
        ]
        sequences.sort(key=len, reverse=True)
        labels = labels or [i % model.num_labels for i in range(len(sequences))]
        before = {name: value.clone() for name, value in model.parameters().items()}
        how = LocalTraining(
            kind=kind,
            batch_size=batch_size or len(sequences),
            epochs=1,
            learning_rate=learning_rate,
            dropout=dropout,
            recipe=recipe or Recipe(),
        )
        update = local_update_(model, sequences, labels, how, seed=0)
        models.load_parameters_(model, before)
        model.module.zero_grad()  # FedAvg leaves its last step's gradients behind
        others = [text for text in TEXTS if text not in chosen]
        apart = [tuple([*ids[: cut - 1], ids[-1]][:cut]) for ids in model.encode(others)]
        membership_pairs = [
            *((Example(ids, label), True) for ids, label in zip(sequences, labels, strict=True)),
            *((Example(ids, labels[0]), False) for ids in apart[: len(sequences)]),
        ]
        membership_pairs = membership_pairs[1::2] + membership_pairs[::2]
        public = [Example(ids, 0) for ids in apart[len(sequences) :]]
        private = {
            "candidates": Candidates(
                tuple(example for example, _ in membership_pairs), tuple(public)
            ),
            "batch_size": how.batch_size,
            "labels": tuple(labels),
            "lengths": tuple(map(len, sequences)),
        }
        knowledge = Knowledge(
            learning_rate=learning_rate,
            local_steps=how.steps(len(sequences)),
            dropout=dropout,
            server_mode=server_mode,
            recipe=recipe,
            local_epochs=recipe and 1,
            **{fact: private[fact] for fact in granted},
        )
        seen = Observation(round=1, client=0, update=update, knowledge=knowledge)
        return SimpleNamespace(
            seen=seen,
            sequences=sequences,
            labels=labels,
            candidates=private["candidates"],
            inside=[inside for _, inside in membership_pairs],
        )

    return make
