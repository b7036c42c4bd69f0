"""Continues texts with a causal model: how likely a secret is, and whether the model writes it.

Decoding is greedy, by beams, or contrastive between a model and the one before it. The last is in
the manner of Contrastive Decoding Diffing (Brzozowski et al. 2026, arXiv 2605.25902), which
amplifies at each step how the later model differs from the earlier one. It needs the models'
outputs alone. Here it may choose only tokens that the later model finds plausible (Li et al. 2023,
"Contrastive Decoding", equation 3).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedleak.config.federation.secrets import Secret
from fedleak.models import LanguageModel, pad, token_losses
from fedleak.util.lists import grouped

BATCH = 32

BEAMS = 8
"""Texts that beam search keeps."""

AMPLIFIED = 1.0
"""How many times the difference of two models is added to the later one's log-probabilities."""

PLAUSIBLE = 0.1
"""A token may be chosen if the later model gives it this share of the largest probability."""


@torch.no_grad()
def log_likelihoods(model: LanguageModel, asked: Sequence[Secret]) -> list[float]:
    """Returns the log-likelihood of each secret after its beginning, in nats."""
    model.module.eval()
    sums = list[float]()
    for start in range(0, len(asked), BATCH):
        batch = asked[start : start + BATCH]
        sequences = [secret.ids[: secret.prompt] + _content(model, secret) for secret in batch]
        ids_BT, mask_BT = pad(sequences, model.tokenizer.pad_token_id, model.device)
        logits_BTV = model.family.logits(model.module, mask_BT, ids_BT=ids_BT, embeds_BTD=None)
        nll_BT = token_losses(logits_BTV[:, :-1].float(), ids_BT[:, 1:])
        prompts_B1 = torch.tensor([[secret.prompt] for secret in batch], device=model.device)
        positions_T = torch.arange(1, ids_BT.shape[1], device=model.device)
        is_secret_BT = (positions_T >= prompts_B1) & (mask_BT[:, 1:] > 0)
        sums += (-(nll_BT * is_secret_BT).sum(1)).tolist()
    return sums


@torch.no_grad()
def written(
    model: LanguageModel,
    asked: Sequence[Secret],
    *,
    beams: int = 1,
    before: LanguageModel | None = None,
) -> tuple[bool, ...]:
    """Returns for each secret whether the model, given its beginning, writes it word for word.

    Args:
        model: The published model.
        asked: Secrets.
        beams: Texts that the search keeps, of which the likeliest is the answer; 1: it is greedy.
        before: The model to contrast with; None: none.
    """
    # So that no beginning is padded.
    by_length = grouped(range(len(asked)), lambda place: asked[place].prompt)
    came: dict[int, bool] = {}
    for places in by_length.values():
        for start in range(0, len(places), BATCH):
            batch = places[start : start + BATCH]
            answers = _written(model, [asked[place] for place in batch], beams, before)
            came |= zip(batch, answers, strict=True)
    return tuple(came[place] for place in range(len(asked)))


def _content(model: LanguageModel, secret: Secret) -> tuple[int, ...]:
    """Returns the tokens of a secret, without an end mark."""
    return model.content(secret.ids[secret.prompt :])


def _written(
    model: LanguageModel, batch: list[Secret], beams: int, before: LanguageModel | None
) -> list[bool]:
    """Returns the same as `written`, for secrets whose beginnings have one length."""
    contents = [_content(model, secret) for secret in batch]
    prompts = [secret.ids[: secret.prompt] for secret in batch]
    prompts_BT, mask_BT = pad(prompts, model.tokenizer.pad_token_id, model.device)
    module: Any = model.module.eval()
    ids_BT = module.generate(
        prompts_BT,
        attention_mask=mask_BT,
        max_new_tokens=max(map(len, contents)),
        num_beams=beams,
        do_sample=False,
        pad_token_id=model.tokenizer.pad_token_id,
        logits_processor=None if before is None else [_Contrast(before)],
    )
    answers = ids_BT[:, prompts_BT.shape[1] :].tolist()
    return [tuple(a[: len(c)]) == c for a, c in zip(answers, contents, strict=True)]


class _Contrast:
    """Adds to a model's logits, at each step, their difference from those of another model."""

    def __init__(self, before: LanguageModel) -> None:
        self._before: Any = before.module.eval()
        self._cache: Any = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns changed logits [B, V] for ids [B, T]; the names are those of transformers."""
        new_BT = input_ids if self._cache is None else input_ids[:, -1:]
        answer = self._before(input_ids=new_BT, past_key_values=self._cache, use_cache=True)
        self._cache = answer.past_key_values
        now_BV = scores.log_softmax(-1)
        then_BV = answer.logits[:, -1].to(scores.dtype).log_softmax(-1)
        least_B1 = now_BV.amax(-1, keepdim=True) + math.log(PLAUSIBLE)
        amplified_BV: Tensor = now_BV + AMPLIFIED * (now_BV - then_BV)
        return amplified_BV.masked_fill(now_BV < least_B1, -math.inf)
