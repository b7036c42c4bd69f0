"""Priors: how likely a causal language model finds candidate texts.

Attacks that match gradients rank orders of the same tokens with one (LAMP, Balunovic et al. 2022).
It is part of what the attacker brings along, like the tokenizer, and knows nothing of the update.

Shapes: N candidates, U distinct ones, C of them scored at once, T tokens of the longest,
V the prior's vocabulary.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedleak.models import LanguageModel, loading, pad
from fedleak.util.errors import ConfigError

_NONE = -1
"""Stands where a row has no token."""

_LOGITS: Mapping[str, int] = {"cpu": 2**23, "cuda": 2**26}
"""Next-token logits in memory at a time, by device: 32 MiB, where a CPU is fastest, or 256 MiB."""


@dataclass(frozen=True)
class Prior:
    """A causal language model that scores token ids of the victim.

    Attributes:
        module: The network; in evaluation mode, and its parameters need no gradient.
        tokenizer: Its own.
        victim_tokenizer: What candidates are decoded with; None where the vocabularies are the
            same, so that the victim's ids are the prior's.
    """

    module: nn.Module
    tokenizer: Any
    victim_tokenizer: Any | None = None

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(self.module.parameters()).device

    @property
    def max_length(self) -> int | None:
        """Tokens that the prior has positions for; None of one that has no limit."""
        limit: int | None = getattr(self._config, "max_position_embeddings", None)
        return limit

    def nll(
        self, ids_NT: Tensor, mask_NT: Tensor, *, stop: Callable[[], bool] = lambda: False
    ) -> Tensor:
        """Returns each candidate's mean negative log-likelihood [N], in nats per token, float32.

        In the victim's vocabulary, ids are fed as they are, special tokens included, and the mean
        is over all tokens but the first, which is context. A candidate that is longer than the
        prior has positions for is scored on as many of its first tokens.

        In another vocabulary, the candidate's text without special tokens is tokenised again, with
        a beginning-of-text token in front if the prior has one, and cut likewise. What the prior
        finds in total is divided by the number of the *victim's* tokens in that text, and not of
        its own: orders of the same tokens can differ in the latter, and are still comparable.

        Padding never counts, and a candidate of fewer than two tokens has 0. Memory does not grow
        with N.

        Args:
            ids_NT: The victim's token ids.
            mask_NT: 1 on real tokens, which come first in each row.
            stop: Called before each pass; if it returns true, the pass's candidates get infinity.
        """
        tokens_NT = ids_NT.masked_fill(mask_NT == 0, _NONE)
        tokens_UT, which_N = torch.unique(tokens_NT, dim=0, return_inverse=True)
        with torch.inference_mode():
            if self.victim_tokenizer is None:
                own_UT = tokens_UT[:, : self.max_length]
                scored_U = _lengths(own_UT) - 1
            else:
                own_UT, scored_U = self._translated(tokens_UT, self.victim_tokenizer)
            nll_U = self._totals(own_UT, stop) / scored_U.clamp(min=1)
            nll_U = nll_U.masked_fill(_lengths(tokens_UT) < 2, 0)
        # Indexed out here: the copy is an ordinary tensor, which autograd may keep.
        return nll_U[which_N]

    def next_token(self, ids_NT: Tensor) -> Tensor:
        """Returns the log probability [N, V] of each victim token after beginnings of one length.

        A prior with another vocabulary, or with fewer positions than a beginning has tokens, cannot
        tell tokens apart: then the result is a zero [1, 1].

        Args:
            ids_NT: The victim's token ids, at least one in each row.
        """
        if self.victim_tokenizer is not None or ids_NT.shape[1] > (self.max_length or math.inf):
            return ids_NT.new_zeros((1, 1), dtype=torch.float32)
        with torch.inference_mode():
            logits_N1V = self.module(input_ids=ids_NT, use_cache=False, logits_to_keep=1).logits
            log_NV: Tensor = logits_N1V[:, -1].float().log_softmax(-1)
        return log_NV.clone()

    def to(self, dtype: torch.dtype) -> "Prior":
        """Returns this prior with weights and arithmetic of another precision.

        The log-likelihoods are still summed in float32.
        """
        return replace(self, module=_in_precision(self.module, dtype))

    @property
    def _config(self) -> Any:
        config: Any = self.module.config
        return config.get_text_config(decoder=True)

    def _translated(self, tokens_UT: Tensor, victim_tokenizer: Any) -> tuple[Tensor, Tensor]:
        """Returns rows in the prior's own tokens, and the victim's content tokens in each [U]."""
        rows = [[token for token in row if token != _NONE] for row in tokens_UT.tolist()]
        special = frozenset(victim_tokenizer.all_special_ids)
        content = [sum(token not in special for token in row) for row in rows]
        decoded = victim_tokenizer.batch_decode(rows, skip_special_tokens=True)
        encoded = self.tokenizer([text.strip() for text in decoded])["input_ids"]
        begin = self.tokenizer.bos_token_id
        own = [ids if begin is None or ids[:1] == [begin] else [begin, *ids] for ids in encoded]
        own_UT, _ = pad([ids[: self.max_length] for ids in own], _NONE, tokens_UT.device)
        return own_UT, torch.tensor(content, device=tokens_UT.device)

    def _totals(self, own_UT: Tensor, stop: Callable[[], bool]) -> Tensor:
        """Returns the negative log-likelihood [U] of all tokens of a row but the first."""
        total_U = torch.zeros(len(own_UT), device=own_UT.device)
        # Rows of like length are scored together, so that little of a chunk is padding.
        lengths_U, order_U = _lengths(own_UT).sort(descending=True)
        lengths = lengths_U.tolist()
        tokens = _LOGITS.get(self.device.type, _LOGITS["cpu"]) // self._config.vocab_size
        for rows in chunks(lengths, tokens):
            chosen_C = order_U[rows]
            own_CT = own_UT[chosen_C, : lengths[rows.start]]
            total_U[chosen_C] = torch.inf if stop() else self._total(own_CT)
        return total_U

    def _total(self, own_CT: Tensor) -> Tensor:
        """Returns `_totals` of one chunk."""
        read_CT, targets_CT = own_CT[:, :-1], own_CT[:, 1:]
        logits_CTV = self.module(
            input_ids=read_CT.clamp(min=0),
            attention_mask=(read_CT != _NONE).long(),
            use_cache=False,
        ).logits
        nll = F.cross_entropy(
            logits_CTV.flatten(0, 1).float(),
            targets_CT.flatten(),
            ignore_index=_NONE,
            reduction="none",
        )
        return nll.view(targets_CT.shape).sum(1)


def load(name: str, victim: LanguageModel) -> Prior:
    """Loads a prior for a victim, onto its device; the prior is kept for later calls.

    Args:
        name: A hub id, a folder, or `builtin/<name>`: any causal language model of transformers.
        victim: Whose token ids it is to score.

    Raises:
        ConfigError: No such model, or not a causal one.
    """
    module, tokenizer = _loaded(name, loading.source(f"prior = {name!r}", name), victim.device)
    same = _same_vocabulary(tokenizer, victim.tokenizer)
    return Prior(module, tokenizer, None if same else victim.tokenizer)


def check(name: str) -> None:
    """Refuses a name that `load` would refuse, as far as that shows without reading weights.

    Raises:
        ConfigError: No such model, or not a causal one.
    """
    _causal_outline(name, loading.source(f"prior = {name!r}", name))


@lru_cache(maxsize=8)
def _causal_outline(name: str, source: str) -> tuple[Any, Any]:
    """Returns config and tokenizer of a model that predicts the next token.

    A refusal is not cached, so a repaired model is found.
    """
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    named = f"prior = {name!r}"
    config, tokenizer = loading.read_config(named, name), loading.read_tokenizer(named, name)
    kind = config.model_type
    # These architectures read both ways unless they are told not to: each token would see itself.
    one_way = getattr(config, "is_decoder", False)
    both_ways = kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not one_way
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or both_ways:
        raise ConfigError(
            f"{named} is a {kind} model, which does not predict the next token: give a "
            "causal language model, such as a GPT-2 or what `fedleak train-prior` makes"
        )
    return config, tokenizer


@lru_cache(maxsize=2)
def _loaded(name: str, source: str, device: torch.device) -> tuple[nn.Module, Any]:
    """Returns network and tokenizer of a prior; the source is where the name leads from here."""
    from transformers import AutoModelForCausalLM

    config, tokenizer = _causal_outline(name, source)
    try:
        module, loading_info = AutoModelForCausalLM.from_pretrained(
            source, config=config, dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:
        raise ConfigError(
            f"prior = {name!r} has weights that cannot be loaded ({loading.one_line(error)}): "
            "save it again, or download it again"
        ) from error
    if missing := sorted(loading_info["missing_keys"]):
        raise ConfigError(
            f"prior = {name!r} lacks the weights {', '.join(missing[:3])}, without which it "
            "predicts nothing: give a checkpoint with its language-model head"
        )
    module.to(device).eval().requires_grad_(False)
    return module, tokenizer


@lru_cache(maxsize=8)
def _same_vocabulary(first: Any, second: Any) -> bool:
    """Whether two tokenizers give every token the same id."""
    return bool(first.get_vocab() == second.get_vocab())


@lru_cache(maxsize=2)
def _in_precision(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Returns a network in a precision: itself, or a copy that is made once."""
    if next(module.parameters()).dtype == dtype:
        return module
    return copy.deepcopy(module).to(dtype)


def _lengths(tokens_UT: Tensor) -> Tensor:
    """Returns the number of tokens in each row [U]."""
    return (tokens_UT != _NONE).sum(1)


def chunks(lengths: Sequence[int], limit: int) -> Iterator[slice]:
    """Cuts rows, longest first, into chunks of at most `limit` tokens with their padding.

    A row that is longer is a chunk to itself; rows with nothing to predict are in none.
    """
    start, end = 0, sum(length >= 2 for length in lengths)
    while start < end:
        stop = min(end, start + max(1, limit // lengths[start]))
        yield slice(start, stop)
        start = stop
