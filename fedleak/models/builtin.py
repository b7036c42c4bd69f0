"""The built-in models: small, with random weights, made on this machine when first asked for.

They need no hub. Each is a folder that transformers loads like any other checkpoint, kept in the
user's cache (or in `FEDLEAK_CACHE`). Its tokenizer is trained on `builtin/notes` of a seed that no
client's data has.
"""

import hashlib
import json
import os
import shutil
import string
from collections.abc import Callable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock
from platformdirs import user_cache_path

from fedleak.util.errors import unknown

# torch, transformers and the notes are imported where a model is made: finding one takes no time.

BUILTIN: Mapping[str, str] = {
    "bert-tiny": "a lower-casing BERT of 4 layers and width 128, 2,000 tokens, random weights",
    "gpt2-tiny": "a GPT-2 of 4 layers and width 128, 2,000 tokens, random weights",
    "llama-tiny": "a LLaMA of 4 layers and width 128, 2,000 tokens, random weights",
}

_SEED = 1
_NOTES = 10_000
_VOCABULARY = 2_000
_LENGTH = 128
_WIDTH = 128
_LAYERS = 4
_HEADS = 4
_KEY_VALUE_HEADS = 2


def folder(name: str) -> Path:
    """Returns the folder of a built-in model, which is made if it is not there yet.

    Raises:
        ValueError: There is no such model.
    """
    if name not in BUILTIN:
        raise ValueError(unknown("built-in model", name, BUILTIN))
    cache = Path(os.environ.get("FEDLEAK_CACHE") or user_cache_path("fedleak")).absolute()
    made = cache / f"{name}-{_recipe()}"
    if made.is_dir():
        return made
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{made}.lock"):
        if not made.is_dir():
            part = Path(f"{made}.part")
            shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
            part.mkdir()
            tokenizer, model = _MAKE[name]()
            tokenizer.save_pretrained(part)
            model.save_pretrained(part)
            part.rename(made)
    return made


@cache
def _recipe() -> str:
    """Returns a hash of all that decides what is made: a changed recipe makes a new folder."""
    here = Path(__file__)
    digest = hashlib.sha256()
    notes = here.parents[1] / "data" / "notes.py"
    for source in (here, notes, notes.with_suffix(".toml")):
        digest.update(source.read_bytes())
    for package in ("tokenizers", "torch", "transformers"):
        digest.update(f"{package} {version(package)}\n".encode())
    return digest.hexdigest()[:12]


def _bert() -> tuple[Any, Any]:
    from tokenizers import models, normalizers, pre_tokenizers, trainers
    from transformers import BertConfig, BertModel, BertTokenizer

    letters = string.ascii_lowercase + string.digits
    # The trainer would number the pieces of one sign in the order of a hash map, which differs
    # between processes, and break ties by number: all of them are given, so that none is numbered.
    given = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *string.punctuation]
    given += [f"##{letter}" for letter in letters]
    learned = _learned(
        models.WordPiece(unk_token="[UNK]"),
        pre_tokenizers.BertPreTokenizer(),
        trainers.WordPieceTrainer(
            vocab_size=_VOCABULARY, special_tokens=given, show_progress=False
        ),
        normalizers.BertNormalizer(lowercase=True),
    )
    tokenizer = BertTokenizer(vocab=learned["vocab"], model_max_length=_LENGTH)
    return tokenizer, _model(BertModel, BertConfig, tokenizer, intermediate_size=4 * _WIDTH)


def _gpt2() -> tuple[Any, Any]:
    from tokenizers import pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

    end = "<|endoftext|>"
    bytes_ = pre_tokenizers.ByteLevel
    tokenizer = GPT2Tokenizer(
        **_byte_pairs(bytes_(add_prefix_space=False), [end], bytes_.alphabet()), pad_token=end
    )
    return tokenizer, _model(GPT2LMHeadModel, GPT2Config, tokenizer)


def _llama() -> tuple[Any, Any]:
    from tokenizers import pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaTokenizer

    # Padding has its own token: its embedding is zeros, which those of real tokens must not be.
    given = ["<unk>", "<s>", "</s>", "<pad>", *(f"<0x{byte:02X}>" for byte in range(256))]
    # LLaMA's own tokenizer does not split. Merges that were learned within words stay there.
    words = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(),
            pre_tokenizers.Punctuation(),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    signs = [*string.ascii_letters, *string.digits, *string.punctuation]
    tokenizer = LlamaTokenizer(
        **_byte_pairs(words, given, signs), pad_token="<pad>", add_bos_token=True
    )
    sizes = {"num_key_value_heads": _KEY_VALUE_HEADS, "intermediate_size": 3 * _WIDTH}
    return tokenizer, _model(LlamaForCausalLM, LlamaConfig, tokenizer, **sizes)


def _byte_pairs(words: Any, given: list[str], signs: list[str]) -> dict[str, Any]:
    """Returns what a tokenizer of byte pairs is made of, learned within `words`."""
    from tokenizers import models, trainers

    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=given, initial_alphabet=signs, show_progress=False
    )
    learned = _learned(models.BPE(), words, trainer)
    merges = [tuple(pair) for pair in learned["merges"]]
    return {"vocab": learned["vocab"], "merges": merges, "model_max_length": _LENGTH}


def _learned(model: Any, words: Any, trainer: Any, normalizer: Any = None) -> dict[str, Any]:
    """Returns what a tokenizer learns from notes that no client's data has."""
    from tokenizers import Tokenizer

    from fedleak.data.notes import notes

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = words
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.train_from_iterator([note.text for note in notes(_NOTES, _SEED)], trainer)
    learned: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return learned


def _model(model: Any, config: Any, tokenizer: Any, **sizes: int) -> Any:
    """Returns a model with random weights, whatever the caller has drawn or set."""
    import torch

    settings = config(
        vocab_size=len(tokenizer),
        hidden_size=_WIDTH,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        max_position_embeddings=_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **sizes,
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Only this generator: torch.manual_seed would reseed the GPUs' too.
        torch.default_generator.manual_seed(_SEED)
        return model(settings)


_MAKE: Mapping[str, Callable[[], tuple[Any, Any]]] = {
    "bert-tiny": _bert,
    "gpt2-tiny": _gpt2,
    "llama-tiny": _llama,
}
