"""Language models: a torch module, its tokenizer and its family, loaded together.

A model is named by a hub id, a local folder, or `builtin/<name>`.
"""

import hashlib
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedleak.errors import ConfigError
from fedleak.models import builtin
from fedleak.models.family import ModelFamily
from fedleak.models.lora import Lora, adapt_
from fedleak.plugins import discover

_log = logging.getLogger(__name__)

CLASSIFICATION = "sequence-classification"
CAUSAL_LM = "causal-lm"

_LONGEST = 160
"""Characters of an error of another library that are repeated."""

_IGNORED = -100
"""The label that cross-entropy leaves out of its mean."""

ClassLoss = Callable[[Tensor, Tensor], Tensor]
"""(logits [B, C], classes [B] or class probabilities [B, C]) -> the mean loss."""


def squared_error(logits_BC: Tensor, labels: Tensor) -> Tensor:
    """Returns the mean squared difference of logits and one-hot classes, or probabilities."""
    if labels.is_floating_point():
        return F.mse_loss(logits_BC, labels)
    return F.mse_loss(logits_BC, F.one_hot(labels, logits_BC.shape[-1]).to(logits_BC.dtype))


CLASS_LOSSES: Mapping[str, ClassLoss] = {
    "cross-entropy": F.cross_entropy,
    "squared": squared_error,  # which DAGER's authors call Frobenius loss
}


@cache
def families() -> Mapping[str, ModelFamily]:
    """Returns the adapters, fedleak's own and those of others, by `config.model_type`."""
    made: dict[str, ModelFamily] = {}
    for name, make in discover(sys.modules[__name__], "model_type").kinds.items():
        try:
            made[name] = make()
        except Exception as error:  # noqa: BLE001 - it may be anybody's class
            _log.warning("the model family %r cannot be used: %s", name, error)
    return made


@dataclass(frozen=True)
class ModelSpec:
    """All that decides a model, on whatever machine it is loaded.

    Attributes:
        name: A hub id, a local folder, or `builtin/<name>`.
        task: "sequence-classification" or "causal-lm".
        num_labels: Classes, for classification.
        seed: For parameters that the checkpoint lacks: a new classifier, adapters.
        loss: A key of `CLASS_LOSSES`.
        lora: Adapters that are trained in place of the model; None trains all of it.
    """

    name: str
    task: str
    num_labels: int
    seed: int = 0
    loss: str = "cross-entropy"
    lora: Lora | None = None


@dataclass(frozen=True)
class LanguageModel:
    """A model as server, client and attacker all have it.

    Attributes:
        module: The network.
        tokenizer: Of its checkpoint.
        family: Its architecture.
        task: "sequence-classification" or "causal-lm".
        class_loss: What a classifier is trained on.
    """

    module: nn.Module
    tokenizer: Any
    family: ModelFamily
    task: str
    class_loss: ClassLoss = F.cross_entropy

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.module.parameters()).device

    @property
    def max_length(self) -> int:
        """Tokens that the longest sequence may have, special tokens included."""
        return int(self.module.config.max_position_embeddings)  # type: ignore[union-attr,arg-type]

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return int(self.module.config.hidden_size)  # type: ignore[union-attr,arg-type]

    @property
    def tied(self) -> bool:
        """Whether the output layer of next-token training is the word embedding."""
        return self.task == CAUSAL_LM and bool(self.module.config.tie_word_embeddings)  # type: ignore[union-attr]

    @property
    def num_labels(self) -> int:
        """Classes of the classifier."""
        return int(self.module.config.num_labels)  # type: ignore[union-attr,arg-type]

    @property
    def num_layers(self) -> int:
        """Transformer blocks."""
        return int(self.module.config.num_hidden_layers)  # type: ignore[union-attr,arg-type]

    def trained(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that are trained, by name; a tied one once."""
        return {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def parameters(self) -> dict[str, Tensor]:
        """Returns the trained parameters, detached. These are what travels."""
        return {name: p.detach() for name, p in self.trained().items()}

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the token ids that a client feeds for each text."""
        return self.family.encode(self.tokenizer, texts, self.task)

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Returns text, without special tokens unless asked for."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=not special)
        return text.strip()

    def special_ids(self) -> frozenset[int]:
        """Returns the ids that are not content; an unknown word is content if it has its own."""
        return frozenset(self.tokenizer.all_special_ids) - self.unknown_ids()

    def unknown_ids(self) -> frozenset[int]:
        """Returns the id that stands for unknown words, if it stands for nothing else."""
        tokenizer = self.tokenizer
        marks = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
        return frozenset({tokenizer.unk_token_id} - marks - {None})


def load_parameters_(model: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` into the model, which must train exactly these parameters."""
    own = model.parameters()
    if own.keys() != tensors.keys():
        different = sorted(own.keys() ^ tensors.keys())
        raise ValueError(f"the weights are of another model: {different[:3]} differ")
    for name, value in tensors.items():
        own[name].copy_(value)


def batch_loss(
    model: LanguageModel,
    ids_BT: Tensor,
    mask_BT: Tensor,
    labels: Tensor | None,
    *,
    embeds_BTD: Tensor | None = None,
) -> Tensor:
    """Returns the mean loss that a client trains on; clients and attacks share it.

    Args:
        model: The model.
        ids_BT: Token ids; for a causal model also the targets.
        mask_BT: 1 on real tokens, which come first in each row.
        labels: Classes [B], or class probabilities [B, C]; None for a causal model.
        embeds_BTD: Word embeddings to use in place of those of `ids_BT`.
    """
    logits = model.family.logits(
        model.module,
        mask_BT,
        ids_BT=None if embeds_BTD is not None else ids_BT,
        embeds_BTD=embeds_BTD,
    )
    if model.task == CLASSIFICATION:
        assert labels is not None
        return model.class_loss(logits, labels)
    targets_BT = ids_BT.masked_fill(mask_BT == 0, _IGNORED)
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets_BT[:, 1:].flatten(), ignore_index=_IGNORED
    )


def example_losses(
    model: LanguageModel, ids_BT: Tensor, mask_BT: Tensor, labels_B: Tensor
) -> Tensor:
    """Returns each example's own mean loss [B], which no other example has a part in.

    For a classifier their mean is `batch_loss`; for a causal model that weighs tokens alike, and
    this weighs texts alike.
    """
    logits = model.family.logits(model.module, mask_BT, ids_BT=ids_BT, embeds_BTD=None)
    if model.task == CLASSIFICATION:
        each = zip(torch.split(logits, 1), torch.split(labels_B, 1), strict=True)
        return torch.stack([model.class_loss(one, label) for one, label in each])
    targets_BT = ids_BT.masked_fill(mask_BT == 0, _IGNORED)[:, 1:]
    nll_BT = F.cross_entropy(
        logits[:, :-1].transpose(1, 2), targets_BT, ignore_index=_IGNORED, reduction="none"
    )
    return nll_BT.sum(1) / (targets_BT != _IGNORED).sum(1).clamp_min(1)


def pad(
    sequences: Sequence[Sequence[int]], padding: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns ids [B, T] padded on the right, and the mask [B, T]."""
    longest = max(map(len, sequences))
    ids_BT = torch.full((len(sequences), longest), padding, dtype=torch.long)
    mask_BT = torch.zeros_like(ids_BT)
    for row, sequence in enumerate(sequences):
        ids_BT[row, : len(sequence)] = torch.tensor(sequence)
        mask_BT[row, : len(sequence)] = 1
    return ids_BT.to(device), mask_BT.to(device)


def load(spec: ModelSpec, *, weights: bool = True) -> LanguageModel:
    """Loads a model with its tokenizer.

    Args:
        spec: Which one.
        weights: False leaves uninitialised what a broadcast fills: all that is trained.

    Raises:
        ConfigError: No such model, or an architecture, task or adapter that is not supported.
    """
    # What adapters are added to does not travel.
    return _make(spec, checkpoint=weights or spec.lora is not None)


def check_weights(spec: ModelSpec) -> None:
    """Loads a model and forgets it; a second time in this process it does nothing.

    Raises:
        ConfigError: `load` would refuse it, for example for weights that do not fit.
    """
    _load_once(spec.name, spec.task, spec.num_labels)


@lru_cache(maxsize=64)
def _load_once(name: str, task: str, num_labels: int) -> None:
    load(ModelSpec(name, task, num_labels))


def outline(spec: ModelSpec) -> LanguageModel:
    """Returns a model with its tokenizer and its parameters' names, but without weights.

    Raises:
        ConfigError: No such model, or an architecture, task or adapter that is not supported.
    """
    with torch.device("meta"):
        return _make(spec, checkpoint=False)


def _make(spec: ModelSpec, *, checkpoint: bool) -> LanguageModel:
    """Makes a model, with the weights of its checkpoint or with any."""
    from transformers import (  # here, because it takes a second
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
    )

    name, task = spec.name, spec.task
    source = _source(name)
    try:
        # Code that comes with a checkpoint is not run.
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            f"model.name = {name!r} cannot be loaded ({_said(error)}): give a hub id "
            f"that can be reached from here, a folder with config.json, weights and tokenizer, or "
            f"one of {', '.join('builtin/' + known for known in builtin.BUILTIN)}"
        ) from error
    family = families().get(config.model_type)
    if family is None:
        raise ConfigError(
            f"model.name = {name!r} is of the family {config.model_type!r}: choose one of the "
            f"families {', '.join(sorted(families()))}"
            + discover(sys.modules[__name__], "model_type").cannot_be_used()
        )
    if task == CAUSAL_LM and not family.causal:
        causal = " or ".join(sorted(known for known, one in families().items() if one.causal))
        raise ConfigError(
            f"model.task = {task!r} needs a causal model, but {name!r} is a {config.model_type} "
            f"encoder: set model.task = {CLASSIFICATION!r} or choose a {causal} model"
        )
    if getattr(config, "is_decoder", False) and not family.causal:
        raise ConfigError(
            f"model.name = {name!r} is a {config.model_type} that reads one way only: set "
            "is_decoder to false in its config.json, or choose another model"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            f"model.name = {name!r} has no tokenizer that can be loaded ({_said(error)}): "
            "save it beside config.json, as tokenizer.save_pretrained does"
        ) from error
    _check_tokenizer_(name, tokenizer, config.vocab_size, task)
    config.pad_token_id = tokenizer.pad_token_id
    config.num_labels = spec.num_labels
    # Fused attention has no second derivative, and gradient matching needs one.
    config._attn_implementation = "eager"
    auto = AutoModelForCausalLM if task == CAUSAL_LM else AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(spec.seed)  # torch.manual_seed would reseed GPUs too
        try:
            if checkpoint:
                module, found = auto.from_pretrained(
                    source,
                    config=config,
                    dtype=torch.float32,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are refused below, by name
                )
            else:
                module = auto.from_config(config, dtype=torch.float32)
        except Exception as error:
            raise ConfigError(
                f"model.name = {name!r} has weights that cannot be loaded "
                f"({_said(error)}): save it again, or download it again"
            ) from error
        if checkpoint:
            _check_weights(name, task, module, found)
        if spec.lora is not None:
            adapt_(module, spec.lora, family.classifier if task == CLASSIFICATION else ())
    module.eval()
    return LanguageModel(module, tokenizer, family, task, CLASS_LOSSES[spec.loss])


def _check_tokenizer_(name: str, tokenizer: Any, rows: int, task: str) -> None:
    """Refuses a tokenizer that is not the model's, and gives it padding if it has none.

    Args:
        name: Of the model.
        tokenizer: What was found beside it; transformers makes an empty one where there is none.
        rows: Tokens that the model has an embedding for.
        task: What is trained.
    """
    vocabulary = tokenizer.get_vocab()
    if set(vocabulary) <= set(tokenizer.all_special_tokens):
        raise ConfigError(
            f"model.name = {name!r} has no tokenizer: save it beside config.json, as "
            "tokenizer.save_pretrained does"
        )
    largest = max(vocabulary.values())
    # Tables are padded to a round number, by a few rows of many thousand.
    if largest >= rows or len(vocabulary) < rows / 2:
        raise ConfigError(
            f"model.name = {name!r} has the tokenizer of another model: it has {len(vocabulary):,} "
            f"tokens, up to number {largest:,}, and the model has embeddings of {rows:,}: save the "
            "tokenizer that the model was trained with beside it"
        )
    if task == CAUSAL_LM and tokenizer.eos_token_id is None:
        raise ConfigError(
            f"model.name = {name!r} has a tokenizer without an end token, which closes each text "
            "of next-token training: set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"model.name = {name!r} has a tokenizer without a padding or an end token: set "
            "pad_token in its tokenizer_config.json"
        )


def _check_weights(name: str, task: str, module: nn.Module, found: Mapping[str, Any]) -> None:
    """Refuses a checkpoint that is not the model's, but for a classifier that is new."""
    prefix = f"{module.base_model_prefix}."

    def of_head(key: str) -> bool:
        """Whether a classifier is trained with such a parameter from scratch."""
        return task == CLASSIFICATION and (not key.startswith(prefix) or ".pooler." in key)

    names = [key for key, _ in module.named_parameters()]
    new = sorted(key for key in found["missing_keys"] if of_head(key))
    if missing := sorted(set(found["missing_keys"]) - set(new)):
        raise ConfigError(
            f"model.name = {name!r} lacks {len(missing)} of its {len(names)} weights, such as "
            f"{missing[0]}: give a whole checkpoint"
        )
    for key, there, wanted in sorted(found["mismatched_keys"]):
        if of_head(key):
            raise ConfigError(
                f"model.name = {name!r} has a classifier for {there[0]} classes, and the data has "
                f"{wanted[0]}: give other data, or save the checkpoint without its classifier"
            )
        raise ConfigError(
            f"model.name = {name!r} has the weight {key} of shape {list(there)}, and its "
            f"config.json asks for {list(wanted)}: give the config.json that it was saved with"
        )
    if broken := [key for key, p in module.named_parameters() if not p.isfinite().all()]:
        raise ConfigError(
            f"model.name = {name!r} has {len(broken)} weights that are not finite, such as "
            f"{broken[0]}: give a checkpoint whose training did not diverge"
        )
    if new:
        _log.info("%s: new weights for %s", name, ", ".join(new))


def absolute(name: str) -> str:
    """Returns the absolute path of a file or folder, and any other name as it is.

    Clients and attackers may run elsewhere.

    Raises:
        ValueError: No file system has such a name.
    """
    try:
        return str(Path(name).absolute()) if Path(name).exists() else name
    except OSError as error:
        raise ValueError(f"{name[:40]!r}... is no name ({error.strerror}): shorten it") from error


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """Returns a short hash of parameter names and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def _source(name: str) -> str:
    if name.startswith("builtin/"):
        try:
            return str(builtin.folder(name.removeprefix("builtin/")))
        except ValueError as error:
            raise ConfigError(f"model.name: {error}") from error
    path = os.path.expanduser(name)  # which leaves a user that there is not as it is
    if name.startswith((".", "/", "~")) and not os.path.isdir(path):
        raise ConfigError(
            f"model.name = {name!r}: there is no such folder: give one with config.json, weights "
            "and tokenizer"
        )
    return path if os.path.isdir(path) else name


def _said(error: Exception) -> str:
    """Returns what an error of another library says, in one line that is not too long."""
    return " ".join(str(error).split())[:_LONGEST].rstrip(" .") or type(error).__name__
