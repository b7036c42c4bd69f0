"""adapter_imprint: the tokens that attention heads were made to look at, text by text.

The module of the server mode of this name describes what it does to the gradient. For each head:

1. The rows of the gradient of the values' B have a span. If the input of a word at a position, seen
   through A, lies in it, the head looked at that word in some text.
2. The weight of such a token is the gradient g_s of its text at this head. The g_s of all heads are
   parts of one gradient at attention's output. How these parts go together is learned from texts
   made of the words that were read: the second moment of their gradients. So the gradient of a text
   at some heads predicts the one at the next head, and the text's token there.

Positions put the words of a text in order. Places that no head has looked at stay empty.

Shapes: H heads, K head size, O = H K, R rank, V words, C tokens of a head, S texts.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks import AttackSetting, certificate
from fedleak.attacks.imprinted.answer import answered, not_served
from fedleak.attacks.imprinted.checksum import Text
from fedleak.attacks.listening import listening
from fedleak.attacks.reconstruction import Reconstruction
from fedleak.attacks.server_modes.adapter_imprint import AdapterImprint, adapters
from fedleak.attacks.subspace.span import ACCEPT, Span
from fedleak.models import LanguageModel, frame, pad
from fedleak.models.family import lora_a, lora_b
from fedleak.training.observation import Observation

_ROUNDING = 1e-5
"""Singular values below this share of the largest one are rounding."""

_EMPTY = 8
"""Positions without a token, one after the other, behind which no text goes on."""

_MIXED = 512
"""Texts that the second moment is taken of."""

_RIDGE = 1e-6
"""What is added to the second moment, as a share of it."""


class Looked(NamedTuple):
    """What a head has looked at.

    Attributes:
        head: Which one.
        tokens: Position and word of each.
        weight_CK: The gradient of each one's text at the head.
    """

    head: int
    tokens: list[tuple[int, int]]
    weight_CK: Tensor


@dataclass(frozen=True)
class AdapterImprintReader:
    """Words and positions that attention heads were made to look at, where the server did so."""

    kind: ClassVar[str] = "adapter_imprint"
    uses: ClassVar[frozenset[str]] = frozenset()

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs adapters that were changed so, and the gradient of the values' B."""
        if reason := not_served(setting, AdapterImprint, "adapters that were changed for it"):
            return reason
        names = adapters(setting.family)
        if names is None or names[-1] not in setting.shared:
            return "needs adapters of the first block's values: see model.lora.targets"
        return None

    def reads(self, setting: AttackSetting) -> frozenset[str]:
        """Reads the gradients of the adapters, and the classifier for the proof."""
        return frozenset((*(adapters(setting.family) or ()), *setting.family.classifier))

    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the texts, those without empty places first."""
        looked = _looked(model, certificate.as_gradient(seen))
        if not looked:
            reason = "no head's rows have a span: noise, or as many texts as the adapter's rank"
            return Reconstruction.abstained(reason)
        moment_OO = _moment(model, looked, rng)
        texts = [_text(words, model) for words in _linked(looked, moment_OO)]
        numbers = {"heads": len(looked), "tokens read": sum(len(own.tokens) for own in looked)}
        return answered(seen, model, range(model.vocabulary), texts, numbers, alone=False)


def _span(rows_KR: Tensor) -> Span | None:
    """Returns the span of a head's rows; None if it has no end."""
    _, s_R, vh_RR = torch.linalg.svd(rows_KR.double(), full_matrices=False)
    if not s_R[0] > 0:
        return None
    s_R = s_R / s_R[0]
    rank = int((s_R > _ROUNDING).sum())
    if rank + 1 >= len(s_R):  # one direction over is too few for so many words and positions
        return None
    floor = max(float(s_R[rank]), float(torch.finfo(torch.float32).eps))
    return Span(basis_DR=vh_RR[:rank].T.contiguous(), singular_R=s_R[:rank], floor=floor)


@torch.no_grad()
def _looked(model: LanguageModel, tensors: dict[str, Tensor]) -> list[Looked]:
    """Returns what each head has looked at, those that have looked at most tokens first."""
    (value,), table = model.family.modules(0)["v"], model.family.token_table(model.module)
    heads = model.family.first_block(model.module).num_heads
    rows_HKR = tensors[lora_b(value)].cpu().double().chunk(heads)
    a_RD = model.module.get_parameter(lora_a(value)).detach()
    spans = {head: span for head, rows in enumerate(rows_HKR) if (span := _span(rows))}
    passed: dict[int, list[tuple[float, int, int]]] = {head: [] for head in spans}
    ids_V, last = torch.arange(model.vocabulary, device=model.device), 0
    for place in range(model.max_length):
        if place - last > _EMPTY:
            break
        row_VR = (table(ids_V, torch.full_like(ids_V, place)) @ a_RD.T).cpu()
        for head, span in spans.items():
            excess_V = span.excess(row_VR)
            for word in (excess_V < ACCEPT).nonzero()[:, 0].tolist():
                passed[head].append((float(excess_V[word]), place, word))
                last = place
    looked = []
    for head, span in spans.items():
        tokens = [(place, word) for _, place, word in sorted(passed[head])[: span.rank]]
        if tokens:
            place_C, word_C = torch.tensor(tokens, device=model.device).T
            seen_CR = (table(word_C, place_C) @ a_RD.T).cpu().double()
            weight_CK = torch.linalg.lstsq(seen_CR.T, rows_HKR[head].T).solution
            looked.append(Looked(head, tokens, weight_CK))
    return sorted(looked, key=lambda own: -len(own.tokens))


def _moment(model: LanguageModel, looked: list[Looked], rng: torch.Generator) -> Tensor:
    """Returns the second moment [O, O] of the gradients of texts at the first block's values."""
    at: dict[int, list[int]] = {}
    for place, word in (token for own in looked for token in own.tokens):
        at.setdefault(place, []).append(word)
    words = [word for read in at.values() for word in read]
    lengths = [place + 1 for place in at if place] or [1]

    def drawn(pool: list[int]) -> int:
        return pool[int(torch.randint(len(pool), (), generator=rng))]

    texts = [
        [drawn(at.get(place, words)) for place in range(drawn(lengths))] for _ in range(_MIXED)
    ]
    value = model.module.get_submodule(model.family.modules(0)["v"][0].removesuffix(".weight"))
    ids_XT, mask_XT = pad(texts, 0, model.device)
    with listening([value]) as heard:
        logits_XC = model.family.logits(model.module, mask_XT, ids_BT=ids_XT, embeds_BTD=None)
    label_X = torch.randint(logits_XC.shape[1], (len(texts),), generator=rng).to(model.device)
    loss = F.cross_entropy(logits_XC, label_X, reduction="sum")
    (gradient_XTO,) = torch.autograd.grad(loss, heard[value][1])
    gradient_XO = gradient_XTO.sum(1).cpu().double()
    moment_OO = gradient_XO.T @ gradient_XO / len(texts)
    return moment_OO + _RIDGE * moment_OO.diagonal().mean() * torch.eye(len(moment_OO))


def _linked(looked: list[Looked], moment_OO: Tensor) -> list[dict[int, int]]:
    """Returns the words of each text by position."""
    from scipy.optimize import linear_sum_assignment  # here, because it takes a while

    first, *others = looked
    size = first.weight_CK.shape[1]
    texts = [dict([token]) for token in first.tokens]
    known_SO, at = first.weight_CK, _rows(first.head, size)
    for own in others:
        here = _rows(own.head, size)
        map_OK = torch.linalg.solve(moment_OO[at][:, at], moment_OO[at][:, here])
        left_KK = moment_OO[here][:, here] - moment_OO[here][:, at] @ map_OK
        whiten_KK = torch.linalg.inv(torch.linalg.cholesky(left_KK)).T
        guess_SK = known_SO @ map_OK
        cost_SC = torch.cdist(guess_SK @ whiten_KK, own.weight_CK @ whiten_KK)
        text_C, token_C = map(torch.tensor, linear_sum_assignment(cost_SC.numpy()))
        weight_SK, of_S = guess_SK.clone(), torch.full((len(texts),), -1)
        of_S[text_C], weight_SK[text_C] = token_C, own.weight_CK[token_C]
        for text in (of_S < 0).nonzero()[:, 0].tolist():  # it shares its token with another text
            sum_CK = torch.zeros_like(own.weight_CK).index_add_(0, token_C, guess_SK[text_C])
            both_CK = (own.weight_CK - sum_CK - guess_SK[text]) @ whiten_KK
            of_S[text] = both_CK.norm(dim=1).argmin()
            shared_C = text_C[token_C == of_S[text]]
            weight_SK[shared_C] = guess_SK[shared_C]
        for words, token in zip(texts, of_S.tolist(), strict=True):
            words.setdefault(*own.tokens[token])
        known_SO, at = torch.cat([known_SO, weight_SK], 1), torch.cat([at, here])
    return texts


def _rows(head: int, size: int) -> Tensor:
    return torch.arange(head * size, (head + 1) * size)


def _text(words: dict[int, int], model: LanguageModel) -> Text:
    """Returns a text, up to the word that ends every text; None at places where no head looked."""
    opening, closing = frame(model)
    words = dict(enumerate(opening)) | words
    ends = [place for place, word in words.items() if place and (word,) == closing]
    length = min(ends, default=max(words)) + 1
    read = tuple(words.get(place) for place in range(length))
    complete = None not in read and (bool(ends) or not closing)
    return Text(read, 0.0 if complete else None, 0.0 if complete else math.inf)
