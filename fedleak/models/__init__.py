"""Language models: a torch module, its tokenizer and its family, loaded together.

A model is named by a hub id, a local folder, or `builtin/<name>`.
"""

import hashlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fedleak.models.family import ModelFamily
from fedleak.models.lora import Lora
from fedleak.util.plugins import Discovered, discover

_log = logging.getLogger(__name__)

CLASSIFICATION = "sequence-classification"
CAUSAL_LM = "causal-lm"

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


def found_families() -> Discovered:
    """Returns the classes of adapters, fedleak's own and those of others, and what is broken."""
    return discover(sys.modules[__name__], "model_type")


@cache
def families() -> Mapping[str, ModelFamily]:
    """Returns the adapters, fedleak's own and those of others, by `config.model_type`."""
    made: dict[str, ModelFamily] = {}
    for name, make in found_families().kinds.items():
        try:
            made[name] = make()
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            _log.warning("the model family %r cannot be used: %s", name, error)
    return made


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """All that decides a model, on whatever machine it is loaded.

    Attributes:
        name: A hub id, a local folder, or `builtin/<name>`.
        tokenizer: Where the tokenizer is, likewise; None: with the model.
        task: "sequence-classification" or "causal-lm".
        num_labels: Classes, for classification.
        seed: For parameters that the checkpoint lacks: a new classifier, adapters.
        loss: A key of `CLASS_LOSSES`.
        lora: Adapters that are trained in place of the model; None trains all of it.
        response_template: The words behind which next-token training begins; empty: it counts all
            tokens.
    """

    name: str
    task: str
    num_labels: int
    seed: int = 0
    loss: str = "cross-entropy"
    lora: Lora | None = None
    tokenizer: str | None = None
    response_template: str = ""


@dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A model as server, client and attacker all have it.

    Attributes:
        module: The network.
        tokenizer: Of its checkpoint.
        family: Its architecture.
        task: "sequence-classification" or "causal-lm".
        class_loss: What a classifier is trained on.
        response_template: Token ids behind which next-token training begins; empty: it counts all
            tokens.
    """

    module: nn.Module
    tokenizer: Any
    family: ModelFamily
    task: str
    class_loss: ClassLoss = F.cross_entropy
    response_template: tuple[int, ...] = ()

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.module.parameters()).device

    @property
    def max_length(self) -> int:
        """Tokens that the longest sequence may have, special tokens included."""
        return int(self.module.config.max_position_embeddings)  # type: ignore[union-attr,arg-type]

    @property
    def vocabulary(self) -> int:
        """Token ids that a text may have; a model may have more than its tokenizer."""
        return max(int(self.module.config.vocab_size), len(self.tokenizer))  # type: ignore[union-attr,arg-type]

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

    def decode(self, ids: Sequence[int]) -> str:
        """Returns text, without special tokens."""
        return text_of(self.tokenizer, ids)

    def content(self, ids: Iterable[int]) -> tuple[int, ...]:
        """Returns token ids without special tokens."""
        special = self.special_ids()
        return tuple(token for token in ids if token not in special)

    def special_ids(self) -> frozenset[int]:
        """Returns the ids that are not content; an unknown word is content if it has its own."""
        return self._special_ids

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.tokenizer.all_special_ids) - self.unknown_ids()

    def unknown_ids(self) -> frozenset[int]:
        """Returns the id that stands for unknown words, if it stands for nothing else."""
        tokenizer = self.tokenizer
        marks = {tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id}
        return frozenset({tokenizer.unk_token_id} - marks - {None})


class Frame(NamedTuple):
    """The special tokens that begin and end every sequence."""

    first: tuple[int, ...]
    last: tuple[int, ...]


def frame(model: LanguageModel) -> Frame:
    """Returns the special tokens around every text."""
    (ids,) = model.encode(["a"])
    special = model.special_ids()
    content = [place for place, token in enumerate(ids) if token not in special]
    return Frame(tuple(ids[: content[0]]), tuple(ids[content[-1] + 1 :]))


def text_of(tokenizer: Any, ids: Sequence[int], *, special: bool = False) -> str:
    """Returns the text of token ids, without special tokens unless asked for."""
    text: str = tokenizer.decode(list(ids), skip_special_tokens=not special)
    return text.strip()


def load_parameters_(model: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` into the model, which must train exactly these parameters."""
    own = model.parameters()
    _refuse_others(own, tensors)
    for name, value in tensors.items():
        own[name].copy_(value)


def lend_parameters_(model: LanguageModel, tensors: Mapping[str, Tensor]) -> None:
    """Makes the model compute with `tensors` themselves, so that it takes no memory for them.

    It must not be trained afterwards: that would change them.
    """
    own = model.trained()
    _refuse_others(own, tensors)
    for name, value in tensors.items():
        own[name].data = value


def _refuse_others(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Refuses tensors that are not named as the model's own."""
    if own.keys() != tensors.keys():
        different = sorted(own.keys() ^ tensors.keys())
        raise ValueError(f"the weights are of another model: {different[:3]} differ")


def has_dropout(module: nn.Module) -> bool:
    """Whether training with dropout sets any number inside a transformers model to zero."""
    if any(isinstance(layer, nn.Dropout) and layer.p > 0 for layer in module.modules()):
        return True
    # Some families have no layer for the dropout of attention.
    config: Any = module.config
    return any("drop" in name and value for name, value in config.to_dict().items())


def batch_loss(
    model: LanguageModel, ids_BT: Tensor, mask_BT: Tensor, labels: Tensor | None
) -> Tensor:
    """Returns the mean loss that a client trains on; clients and attacks share it.

    Args:
        model: The model.
        ids_BT: Token ids; for a causal model also the targets.
        mask_BT: 1 on real tokens, which come first in each row.
        labels: Classes [B], or class probabilities [B, C]; None for a causal model.
    """
    logits = model.family.logits(model.module, mask_BT, ids_BT=ids_BT, embeds_BTD=None)
    if logits.dtype == torch.bfloat16:
        logits = logits.float()  # as transformers computes the loss
    if model.task == CLASSIFICATION:
        assert labels is not None
        return model.class_loss(logits, labels)
    targets_BT = _targets(model, ids_BT, mask_BT)
    total = F.cross_entropy(
        logits[:, :-1].flatten(0, 1),
        targets_BT[:, 1:].flatten(),
        ignore_index=_IGNORED,
        reduction="sum",
    )
    return total / (targets_BT != _IGNORED).sum().clamp_min(1)


def is_target(model: LanguageModel, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Returns which tokens next-token training counts [B, T]: only this function decides it.

    They are all but the first; with a response template, those behind its last occurrence, and none
    in a text without it, as in TRL's `DataCollatorForCompletionOnlyLM`.
    """
    template, place_T = model.response_template, torch.arange(ids_BT.shape[1], device=ids_BT.device)
    there_BT = mask_BT != 0
    if not template:
        return there_BT & (place_T > 0)
    if len(place_T) < len(template):
        return torch.zeros_like(there_BT)
    windows_BSN = ids_BT.masked_fill(~there_BT, -1).unfold(1, len(template), 1)
    stands_BS = (windows_BSN == ids_BT.new_tensor(template)).all(-1)
    behind_S = place_T[: stands_BS.shape[1]] + len(template)
    begin_B = torch.where(stands_BS.any(1), (stands_BS * behind_S).amax(1), len(place_T))
    return there_BT & (place_T >= begin_B[:, None])


def _targets(model: LanguageModel, ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    return ids_BT.masked_fill(~is_target(model, ids_BT, mask_BT), _IGNORED)


def target_counts(model: LanguageModel, sequences: Sequence[Sequence[int]]) -> list[int]:
    """Returns how many terms of a batch's mean loss each text has: tokens to be predicted, or 1."""
    if model.task == CLASSIFICATION or not sequences:
        return [1] * len(sequences)
    ids_BT, mask_BT = pad(sequences, 0, torch.device("cpu"))
    return is_target(model, ids_BT, mask_BT).sum(1).tolist()


def example_losses(
    model: LanguageModel, ids_BT: Tensor, mask_BT: Tensor, labels_B: Tensor
) -> Tensor:
    """Returns each example's own mean loss [B], which no other example affects.

    For a classifier their mean is `batch_loss`. For a causal model, `batch_loss` weighs tokens
    alike, and this mean weighs texts alike.
    """
    logits = model.family.logits(model.module, mask_BT, ids_BT=ids_BT, embeds_BTD=None)
    if model.task == CLASSIFICATION:
        pairs = zip(torch.split(logits, 1), torch.split(labels_B, 1), strict=True)
        return torch.stack([model.class_loss(logits_1C, label) for logits_1C, label in pairs])
    targets_BT = _targets(model, ids_BT, mask_BT)[:, 1:]
    losses_BT = token_losses(logits[:, :-1], targets_BT)
    return losses_BT.sum(1) / (targets_BT != _IGNORED).sum(1).clamp_min(1)


def token_losses(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Returns the loss of each target [B, T]; 0 where there is none.

    Tokens stand in rows: along columns torch sums a large vocabulary with errors of 1e-4.
    """
    losses_N = F.cross_entropy(
        logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=_IGNORED, reduction="none"
    )
    return losses_N.view_as(targets_BT)


def pad(
    sequences: Sequence[Sequence[int]], padding: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Returns ids [B, T] padded on the right, and the mask [B, T]."""
    rows = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
    ids_BT = pad_sequence(rows, batch_first=True, padding_value=padding)
    mask_BT = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return ids_BT.to(device), mask_BT.to(device)


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
        values = tensors[name].detach().cpu().contiguous()
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)  # no copy
    return digest.hexdigest()[:16]
