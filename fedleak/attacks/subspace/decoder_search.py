"""Sequences of a decoder whose every token passes the checks of two layers, grown token by token.

It is the search of DAGER (Petrov et al. 2024) for causal models (`dager`). The gradient of the
attention output matrix, if shared, gives a third span, which prunes before the MLP is paid for;
keys and values of a token are computed once.

Shapes: B prefixes, N candidates of the next position, C pairs of both that pass the first check,
T tokens of a prefix, D hidden size, H heads, K head size, S sketch columns, V vocabulary; X: any
axes.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks import certificate
from fedleak.attacks.clock import Clock
from fedleak.attacks.subspace.answer import Judged, SpanSearch, by_excess
from fedleak.attacks.subspace.span import ACCEPT, SKETCH, Span, nearest_in, tokens_in_span
from fedleak.attacks.subspace.update_evidence import first_tokens
from fedleak.models import LanguageModel

_NEAR = ACCEPT**2
"""Largest excess of a token that noise may have pushed out of the span, if no other is inside."""

_PAIRS = 2**19
"""Prefixes times next tokens, at most: the nearest prefixes are kept."""


def first_inputs(
    model: LanguageModel, span: Span, rng: torch.Generator, clock: Clock, most: int | None = None
) -> list[Tensor]:
    """Returns for each position the tokens whose first input lies in a span, or the nearest."""
    table = model.family.token_table(model.module)
    if table.position_PD is not None:
        return tokens_in_span(table, span, rng, clock, most)
    ids_V = torch.arange(len(table.token_VD), device=table.token_VD.device)
    inputs_VD = table(ids_V, torch.zeros_like(ids_V))
    return at_all_places(model, nearest_in(span, inputs_VD, most))


def at_all_places(model: LanguageModel, tokens_N: Tensor) -> list[Tensor]:
    """Returns for each position of a rotary model the tokens that its texts may have."""
    begin = torch.isin(tokens_N, torch.tensor(first_tokens(model), device=tokens_N.device))
    # The last target of next-token training is no input, and has a place in the text.
    places = model.max_length - len(certificate.close(model, ()))
    if not begin.any():
        return [tokens_N] * places
    # A token after itself alone changes nothing: only its first place counts.
    return [tokens_N[begin], *[tokens_N[~begin]] * (places - 1)]


def extend_prefixes(search: SpanSearch) -> list[Judged]:
    """Decoder: grows all prefixes by one token at a time; those that cannot grow are sentences.

    The second attention's input at a position depends on the prefix alone in a causal model, so a
    wrong token is seen at once and the search never backtracks.
    """
    slots, block, spans, wanted, rng, clock, tell, accept = search
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
        first_BN = _mixed_excess(search, mixed_BND, null_DS)
        parent_C, token_C = torch.where(first_BN < accept)
        inputs_CD = block.leave(residual_ND[token_C], mixed_BND[parent_C, token_C])
        excess_C = spans.second.excess(inputs_CD)
        prefixes = _with_rejected(prefixes, first_BN, parent_C, token_C, excess_C, accept)
        kept_C = _kept(spans.second, excess_C, 0 if done else wanted, accept)
        kept_C = kept_C[: max(1, _PAIRS // max(map(len, slots)))]
        if (excess_C[kept_C] < accept).all():
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
    prefixes: list[Judged],
    first_BN: Tensor,
    parent_C: Tensor,
    token_C: Tensor,
    excess_C: Tensor,
    accept: float,
) -> list[Judged]:
    """Returns the prefixes, each with the smallest excess of a next token that did not pass.

    Args:
        prefixes: B of them.
        first_BN: The excess of each next token in the first check.
        parent_C, token_C: The prefixes and next tokens that passed it.
        excess_C: Their excess in the second check.
        accept: Largest excess of an input.
    """
    rejected_BN = torch.where(first_BN < accept, torch.inf, first_BN)
    rejected_BN[parent_C, token_C] = torch.where(excess_C < accept, torch.inf, excess_C)
    return [
        replace(prefix, rejected=min(prefix.rejected, rejected))
        for prefix, rejected in zip(prefixes, rejected_BN.amin(1).tolist(), strict=True)
    ]


def _kept(span: Span, excess_C: Tensor, wanted: int, accept: float) -> Tensor:
    """Returns the candidates in the span, nearest first, no more than inputs have dimensions.

    Words of one embedding, which have one input, count once. If none is in the span, returns the
    nearest that noise may have pushed out of it, at most `wanted`.
    """
    sorted_C, nearest_C = excess_C.sort()
    place_C = F.pad((sorted_C.diff() > 0).cumsum(0), (min(len(sorted_C), 1), 0))
    nearest_C = nearest_C[place_C < span.rank]
    inside_C = nearest_C[excess_C[nearest_C] < accept]
    if len(inside_C) or span.exact:
        return inside_C
    near_C = nearest_C[:wanted]
    return near_C[excess_C[near_C] < _NEAR]


def without_runs(sentences: list[Judged], model: LanguageModel) -> list[Judged]:
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


def _mixed_excess(search: SpanSearch, mixed_BND: Tensor, null_DS: Tensor | None) -> Tensor:
    """Returns [B, N]: the excess of mixed values in the output matrix's span; 0 without one.

    The span holds no more inputs than it has dimensions. So only the nearest by a sketch of the
    null space, where inputs are zero, are tested; the excess of the others is infinite. Where noise
    leaves none inside, nothing is judged: the excess of all is 0, unless none are wanted then.
    """
    span, shape = search.spans.mixed, mixed_BND.shape[:2]
    if span is None or null_DS is None:
        return torch.zeros(shape, dtype=torch.float64, device=mixed_BND.device)
    mixed_XD = mixed_BND.flatten(0, 1)
    distance_X = (mixed_XD @ null_DS).norm(dim=-1)
    nearest = distance_X.topk(min(4 * span.rank, len(mixed_XD)), largest=False).indices
    excess_X = torch.full_like(distance_X, torch.inf, dtype=torch.float64)
    excess_X[nearest] = span.excess(mixed_XD[nearest])
    if search.wanted and not span.exact and not (excess_X < search.accept).any():
        excess_X = torch.zeros_like(excess_X)
    return excess_X.reshape(shape)
