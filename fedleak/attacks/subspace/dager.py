"""DAGER: exact recovery of a batch from the span of attention gradients.

Petrov et al., "DAGER: Exact Gradient Inversion for Large Language Models", NeurIPS 2024
(arXiv 2405.15586). Departures from the authors' code:

- All of the query, key and value gradients that were shared define the span, and the rank of each
  layer is read from its own spectrum; the authors fix absolute thresholds per batch size.
- Membership is judged by a residual in units of what rounding can cause (`span.Span.excess`).
- The gradient of the attention output matrix, if shared, gives a third span, which prunes before
  the MLP is paid for; keys and values of a token are computed once.
- Encoders: iterated local search over the candidates of each position (`encoder_search`) instead
  of a random draw of 10^7 sentences, until the sentences found hold as many tokens as the second
  layer has rank.
- For adapters in their first round, the gradients of the second matrices have the spans: of inputs
  times the first matrices (`span.ProjectedSpan`).
- Batch size, lengths and labels are not used.

Shapes: B prefixes, N candidates of the next position, C pairs of both that pass the first check,
T tokens of a prefix, D hidden size, H heads, K head size, S sketch columns; X: any axes.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedleak.attacks import AttackSetting, Show, certificate
from fedleak.attacks.clock import Clock
from fedleak.attacks.subspace.answer import (
    Judged,
    Reader,
    Reading,
    SpanSearch,
    by_excess,
    ranked,
    recovered,
    telling,
)
from fedleak.attacks.subspace.encoder_search import Effort, search_sentences
from fedleak.attacks.subspace.span import (
    ACCEPT,
    REPEATS,
    SKETCH,
    ProjectedSpan,
    Span,
    layer_spans,
    tokens_in_span,
)
from fedleak.attacks.subspace.token_bag import pairs, read_token_bag
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.models.family import TokenTable, lora_b, with_adapters
from fedleak.training.observation import Observation

_NEAR = ACCEPT**2
"""Largest excess of a token that noise may have pushed out of the span, if no other is inside."""


@dataclass(frozen=True, kw_only=True)
class Dager(Reader):
    """Exact token sequences from the first two layers' attention gradients.

    Attributes:
        enumerate_up_to: An encoder's sentences of one length are all tried up to this many.
        searches: Else, local searches that run side by side.
        kicks: Times that they are shaken, without finding anything new, before giving up.
        certify: Recompute the gradient, for labels, repeated texts and a proof of the whole batch.
        seconds: After which what was found so far counts; None: no limit.
    """

    kind: ClassVar[str] = "dager"
    uses: ClassVar[frozenset[str]] = frozenset()
    enumerate_up_to: Annotated[int, Field(ge=1)] = 512
    searches: Annotated[int, Field(ge=1)] = 4
    kicks: Annotated[int, Field(ge=0)] = 32
    certify: bool = True
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs gradients of attention weights, or of their adapters, of the first two layers."""
        # In a classifier's last layer only the pooled token's query counts: its span is too small.
        needed = 3 if setting.task == CLASSIFICATION else 2
        if setting.num_layers < needed:
            return (
                f"needs {needed} layers for task = {setting.task!r}, and the model has "
                f"{setting.num_layers}: choose another model.name"
            )
        for layer in (0, 1):
            names = setting.family.attention_parameters(layer)
            if not setting.shared & with_adapters(names):
                return (
                    f"needs one of {', '.join(names)}, or adapters of one, and clients send none: "
                    "see update.share and model.lora.targets"
                )
        return None

    def reads(self, setting: AttackSetting) -> frozenset[str]:
        """Reads the matrices that give the spans, and the classifier, which gives labels."""
        family = setting.family
        inputs = (*family.attention_parameters(0), *family.attention_parameters(1))
        second = {lora_b(name) for name in inputs}
        return with_adapters((*inputs, *family.modules(0)["o"])) | second | {*family.classifier}

    @torch.no_grad()
    def reading(
        self, seen: Observation, model: LanguageModel, rng: torch.Generator, on_progress: Show
    ) -> Reading:
        """Returns the sequences whose every token passes both layers' span checks.

        Their multiplicities, and a proof, are returned where the gradient gives them.
        """
        clock, tell = Clock(self.seconds), telling(on_progress, model)
        spans = layer_spans(model, certificate.as_gradient(seen))
        if spans is None:
            return Reading.none(
                "nothing proved: the gradients' row space has no end above their noise, or holds "
                f"as many tokens as the hidden size ({model.hidden_size}) or an adapter's rank",
            )
        # Except for repetitions, no sequence is longer than the rank of the second layer's inputs.
        slots = candidates(model, spans.first, rng, clock)[: spans.second.rank + REPEATS]
        block, wanted = model.family.first_block(model.module), seen.update.num_examples
        search = SpanSearch(slots, block, spans, wanted, rng, clock, tell)
        if model.family.causal:
            sentences = _without_runs(extend_prefixes(search), model)
        else:
            effort = Effort(self.enumerate_up_to, self.searches, self.kicks)
            sentences = search_sentences(search, model.tokenizer.sep_token_id, effort)
        exact = spans.second.exact
        passed = [sentence for sentence in sentences if exact and sentence.excess < ACCEPT]
        diagnostics: dict[str, Any] = {
            "rank": [spans.first.rank, spans.second.rank],
            "budget": [spans.second.rank, model.hidden_size],
            "candidates": {"pairs": sum(map(len, slots)), "passed": len(passed)},
        }
        if not sentences:
            reason = "nothing proved: no sequence passes the second layer's check"
            if clock.rang:
                reason = f"nothing passed in seconds = {self.seconds:g}: give it more"
            return Reading.none(reason, **diagnostics, **clock.late())
        ids = [sentence.ids for sentence in passed] if self.certify else []
        verdict = certificate.judge(model, ids, seen, clock)
        diagnostics |= clock.late()
        # Only the gradient tells a sequence that begins another, or that occurs twice.
        known = {sentence.ids for sentence in sentences}
        begun = []
        for text in verdict.repeats:
            if text not in known:
                longer = [sentence for sentence in sentences if sentence.ids[: len(text)] == text]
                begun.append(replace(min(longer, key=by_excess), ids=text))
        # Noise lets any number of them pass.
        sequences = ranked([*sentences, *begun], verdict, wanted)
        reason = "" if passed else "nothing proved: these are the likeliest sequences"
        return Reading.of(recovered(sequences, verdict, diagnostics=diagnostics, reason=reason))


def candidates(
    model: LanguageModel, span: Span, rng: torch.Generator, clock: Clock
) -> list[Tensor]:
    """Returns for each position the tokens that may stand there.

    The token bag is read first, because that takes one look at the vocabulary; beyond its budget
    each position takes a look. A rotary model's first inputs do not depend on positions.
    """
    table = model.family.token_table(model.module)
    # The input that an adapter projects is no sum of rows.
    projected = isinstance(span, ProjectedSpan)
    bag = None if projected else read_token_bag(table.directions(), span, rng)
    if table.position_PD is None:
        if bag is None and not projected:
            return []
        tokens_N = _in_span(table, span) if bag is None else bag.tokens_N
        begin = tokens_N == model.tokenizer.bos_token_id
        # The last target of next-token training is no input, and has a place in the text.
        places = model.max_length - len(certificate.close(model, ()))
        if not begin.any():
            return [tokens_N] * places
        # A token after itself alone changes nothing: only its first place counts.
        return [tokens_N[begin], *[tokens_N[~begin]] * (places - 1)]
    if bag is None:
        return tokens_in_span(table, span, rng, clock)
    bag_A, position_A = pairs(table, bag, span)
    return [bag.tokens_N[bag_A[position_A == p]] for p in range(bag.positions)]


def _in_span(table: TokenTable, span: Span) -> Tensor:
    """Returns the tokens whose input, which has no position in it, lies in a span."""
    ids_V = torch.arange(len(table.token_VD), device=table.token_VD.device)
    return ids_V[span.excess(table(ids_V, torch.zeros_like(ids_V))) < ACCEPT]


def extend_prefixes(search: SpanSearch) -> list[Judged]:
    """Decoder: grows all prefixes by one token at a time; those that cannot grow are sentences.

    The second attention's input at a position depends on the prefix alone in a causal model, so a
    wrong token is seen at once and the search never backtracks.
    """
    slots, block, spans, wanted, rng, clock, tell = search
    done: list[Judged] = []
    prefixes = [Judged((), 0.0, math.inf)]
    null_DS = None if spans.mixed is None else spans.mixed.null_sketch(SKETCH, rng).float()
    k_BTHK = v_BTHK = torch.empty(0)
    for position, ids_N in enumerate(slots):
        if not len(ids_N) or clock.up():
            break
        positions_N = torch.full_like(ids_N, position)
        residual_ND, x_ND = block.enter(ids_N, positions_N)
        q_NHK, k_NHK, v_NHK = block.project(x_ND, positions_N)
        if position == 0:
            k_BTHK = v_BTHK = k_NHK.new_empty(1, 0, *k_NHK.shape[1:])
        mixed_BND = attend_next(q_NHK, k_NHK, v_NHK, k_BTHK, v_BTHK)
        first_BN = _mixed_excess(spans.mixed, mixed_BND, null_DS)
        parent_C, token_C = torch.where(first_BN < ACCEPT)
        inputs_CD = block.leave(residual_ND[token_C], mixed_BND[parent_C, token_C])
        excess_C = spans.second.excess(inputs_CD)
        prefixes = _with_rejected(prefixes, first_BN, parent_C, token_C, excess_C)
        kept_C = _kept(spans.second, excess_C, 0 if done else wanted)
        if (excess_C[kept_C] < ACCEPT).all():
            grown = set(parent_C[kept_C].tolist())
            done += [prefix for i, prefix in enumerate(prefixes) if prefix.ids and i not in grown]
        parents, tokens = parent_C[kept_C].tolist(), token_C[kept_C].tolist()
        prefixes = [
            replace(
                prefixes[parent],
                ids=(*prefixes[parent].ids, token),
                excess=max(prefixes[parent].excess, excess),
            )
            for parent, token, excess in zip(
                parents, ids_N[tokens].tolist(), excess_C[kept_C].tolist(), strict=True
            )
        ]
        if not prefixes:
            break
        k_BTHK = torch.cat([k_BTHK[parents], k_NHK[tokens][:, None]], 1)
        v_BTHK = torch.cat([v_BTHK[parents], v_NHK[tokens][:, None]], 1)
        tell(position + 1, len(slots), min(prefixes, key=by_excess))
    return done + [prefix for prefix in prefixes if prefix.ids]


def _with_rejected(
    prefixes: list[Judged], first_BN: Tensor, parent_C: Tensor, token_C: Tensor, excess_C: Tensor
) -> list[Judged]:
    """Returns the prefixes, each with the smallest excess of a next token that did not pass.

    Args:
        prefixes: B of them.
        first_BN: The excess of each next token in the first check.
        parent_C, token_C: The prefixes and next tokens that passed it.
        excess_C: Their excess in the second check.
    """
    rejected_BN = torch.where(first_BN < ACCEPT, torch.inf, first_BN)
    rejected_BN[parent_C, token_C] = torch.where(excess_C < ACCEPT, torch.inf, excess_C)
    return [
        replace(prefix, rejected=min(prefix.rejected, rejected))
        for prefix, rejected in zip(prefixes, rejected_BN.amin(1).tolist(), strict=True)
    ]


def _kept(span: Span, excess_C: Tensor, wanted: int) -> Tensor:
    """Returns the candidates in the span, nearest first, no more than inputs have dimensions.

    If none is, the nearest that noise may have pushed out of it, at most `wanted`.
    """
    nearest_C = excess_C.argsort()[: span.rank]
    inside_C = nearest_C[excess_C[nearest_C] < ACCEPT]
    if len(inside_C) or span.exact:
        return inside_C
    near_C = nearest_C[:wanted]
    return near_C[excess_C[near_C] < _NEAR]


def _without_runs(sentences: list[Judged], model: LanguageModel) -> list[Judged]:
    """Returns the sequences, and each run of one token as that token alone.

    The length of a run is unknown. It is left out if its token begins another sequence.
    """
    runs = [sentence for sentence in sentences if certificate.is_run(model, sentence.ids)]
    others = [sentence for sentence in sentences if sentence not in runs]
    begun = {sentence.ids[0] for sentence in others}
    return others + [
        replace(sentence, ids=sentence.ids[:1]) for sentence in runs if sentence.ids[0] not in begun
    ]


def attend_next(
    q_NHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor
) -> Tensor:
    """Returns mixed values [B, N, D] of each candidate as the next token of each prefix."""
    scale = 1 / math.sqrt(q_NHK.shape[-1])
    past_BNHT = torch.einsum("nhk,bthk->bnht", q_NHK, k_BTHK)
    self_NH = (q_NHK * k_NHK).sum(-1)
    self_BNH1 = self_NH.expand(len(k_BTHK), *self_NH.shape)[..., None]
    weights = (torch.cat([past_BNHT, self_BNH1], -1) * scale).softmax(-1)
    mixed_BNHK = torch.einsum("bnht,bthk->bnhk", weights[..., :-1], v_BTHK)
    return (mixed_BNHK + weights[..., -1:] * v_NHK).flatten(2)


def _mixed_excess(span: Span | None, mixed_BND: Tensor, null_DS: Tensor | None) -> Tensor:
    """Returns [B, N]: the excess of mixed values in the output matrix's span; 0 without one.

    The span holds no more inputs than it has dimensions. So only the nearest by a sketch of the
    null space, where inputs are zero, are tested; the excess of the others is infinite. Where noise
    leaves none inside, nothing is judged: the excess of all is 0.
    """
    shape = mixed_BND.shape[:2]
    if span is None or null_DS is None:
        return torch.zeros(shape, dtype=torch.float64, device=mixed_BND.device)
    mixed_XD = mixed_BND.flatten(0, 1)
    distance_X = (mixed_XD @ null_DS).norm(dim=-1)
    nearest = distance_X.topk(min(4 * span.rank, len(mixed_XD)), largest=False).indices
    excess_X = torch.full_like(distance_X, torch.inf, dtype=torch.float64)
    excess_X[nearest] = span.excess(mixed_XD[nearest])
    if not span.exact and not (excess_X < ACCEPT).any():
        excess_X = torch.zeros_like(excess_X)
    return excess_X.reshape(shape)
