"""Texts of a decoder whose tokens are in the spans of many layers, as behind a step of Adam.

Where each number of a gradient has noise of its own (`weighted_span`), two layers do not tell all
wrong tokens, as DAGER's (Petrov et al. 2024) do: many do. In a causal model the states of a prefix
depend on no later token. So prefixes grow token by token. Of a next token's state in each layer,
the part that the states of its prefix do not explain must be in the layer's span, too, or a
repeated token would pass again and again. That part's excess, a geometric mean over layers, must be
small, and prefixes with the smallest product of these are kept.

Where texts end is not told by spans, because the last tokens have the smallest gradients. So the
batch is chosen among the best prefixes by the gradients of whole texts: by least squares on the
numbers that are known.

In a first round of adapters, spans are those of A x (`span.ProjectedSpan`).

Shapes: K prefixes, N next tokens, M pairs of both, T tokens, I inputs of a layer, D width of its
span, O rows, P texts that are compared, X numbers of a gradient that are known.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedleak.attacks import certificate
from fedleak.attacks.adam_step import BehindAdam
from fedleak.attacks.clock import Clock
from fedleak.attacks.listening import AllHeardError, listening
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.answer import Judged, OnJudged, by_excess, distinct
from fedleak.attacks.subspace.span import ACCEPT
from fedleak.attacks.subspace.update_evidence import (
    empty_cache,
    first_tokens,
    log_probabilities,
    of_rows,
)
from fedleak.attacks.subspace.weighted_span import LowRank, WeightedSpan
from fedleak.models import CAUSAL_LM, LanguageModel
from fedleak.models.family import lora_a, lora_b

if TYPE_CHECKING:
    from transformers import DynamicCache

_DEPTHS = 4
"""Layers whose spans are looked at, beside the first: the second, and others further on."""

_FIRST = 10.0
"""Largest excess of a token in the first layer: where tokens are weak there, others tell them."""

_PROPOSED = 512
"""Next tokens behind a prefix: the likeliest of those that the first layer lets pass, and as many
that are the nearest to its span."""

_TRIED, _KEPT = 48, 4
"""Prefixes that are tested in all layers, and that are kept, for each text of the batch."""

_AT_ONCE = 512
"""Tokens that go through the model together."""

_CUT = 3
"""Tokens at the end of a prefix that may be none of its text's."""

_COMPARED, _BRANCHES = 8, 3
"""Prefixes whose gradients are compared, for each text of the batch, and texts that they begin."""

_MOST = 64
"""Texts whose gradients are compared, at most: they are in memory together."""

_LEFT = 0.5
"""Share of the square of a gradient that texts may leave, or they are none of its batch."""

_LORA_A, _LORA_B = lora_a(""), lora_b("")
"""Ends of the names of an adapter's matrices."""


class SpannedLayer(NamedTuple):
    """A layer, and the span of its inputs.

    Attributes:
        number: Of the layer.
        module: What multiplies the inputs.
        span: Of the inputs, or of what a projection makes of them.
        first_DI: The projection: an adapter's first matrix in its first round; None: none.
    """

    number: int
    module: nn.Module
    span: WeightedSpan
    first_DI: Tensor | None

    def vectors(self, x_NI: Tensor) -> Tensor:
        """Returns the vectors [N, D] of inputs that are in the span."""
        x_NI = x_NI.double()
        return x_NI if self.first_DI is None else x_NI @ self.first_DI.T

    def excess(self, x_NI: Tensor) -> Tensor:
        """Returns the excess [N] of inputs."""
        return self.span.excess(self.vectors(x_NI))


def spanned_layers(
    model: LanguageModel, behind: BehindAdam, clock: Clock
) -> list[SpannedLayer] | None:
    """Returns the spans of the first layer and of some others; None if one of them has no end.

    All have the largest rank of these, because the weakest tokens may be missed in a layer.
    """
    came = [layer for layer in range(model.num_layers) if _adapters(model, behind, layer)]
    if came[:1] != [0] or len(came) < 2:
        return None
    deep = came[1:]
    numbers = [0, *sorted({deep[round(i * (len(deep) - 1) / _DEPTHS)] for i in range(_DEPTHS)})]
    rows = [_rows(model, behind, number) for number in numbers]
    fits, rank = list[LowRank](), 1
    for matrix, _, _ in rows:
        fit = matrix.fitted(rank // 2, clock)  # Deeper layers have about as many dimensions.
        if fit is None:
            return None
        fits, rank = [*fits, fit], fit.rank
    rank = max(fit.rank for fit in fits)
    if any(rank >= fit.most for fit in fits):  # There may be more tokens than rows.
        return None
    return [
        SpannedLayer(number, module, fit.wider(rank - fit.rank).span(), first_DI)
        for number, fit, (_, module, first_DI) in zip(numbers, fits, rows, strict=True)
    ]


def _adapters(model: LanguageModel, behind: BehindAdam, layer: int) -> list[str]:
    """Returns the names of the matrices of a layer's adapters whose rows are mixes of its inputs.

    In the first round they are second ones. Of these that of values alone is taken: the first token
    has no gradient at its query, because it attends to itself alone.
    """
    weights, tensors = model.family.attention_parameters(layer), behind.update.tensors
    first = [lora_a(name) for name in weights if lora_a(name) in tensors]
    trained = [name for name in first if tensors[name].any()]
    return trained or [name for name in [lora_b(weights[-1])] if name in tensors]


def _rows(
    model: LanguageModel, behind: BehindAdam, layer: int
) -> tuple[LowRank, nn.Module, Tensor | None]:
    """Returns what came of a layer's rows, what multiplies its inputs, and their projection."""
    names, first_DI = _adapters(model, behind, layer), None
    of_inputs = names[0]
    if of_inputs.endswith(_LORA_B):
        of_inputs = of_inputs.removesuffix(_LORA_B) + _LORA_A
        first_DI = model.module.get_parameter(of_inputs).detach().double()
    matrix = LowRank.of(
        torch.cat([behind.update.tensors[name] for name in names]),
        torch.cat([behind.variance(model, name) for name in names]),
    )
    return matrix, model.module.get_submodule(of_inputs.removesuffix(".weight")), first_DI


@dataclass(frozen=True)
class _Beam:
    """Prefixes of one length.

    Attributes:
        ids: The prefixes.
        total_K: The sum over tokens of the logarithm of their excess, as a share of the largest.
        known: What their states span in each layer, orthonormal, [K, T, D].
        cache: What the model keeps of their tokens.
    """

    ids: list[Ids]
    total_K: Tensor
    known: list[Tensor]
    cache: "DynamicCache"

    @classmethod
    def empty(cls, layers: Sequence[SpannedLayer]) -> "_Beam":
        """Returns the prefix without a token."""
        zero_1 = layers[0].span.axis_RD.new_zeros(1)
        known = [zero_1.new_zeros(1, 0, layer.span.axis_RD.shape[1]) for layer in layers]
        return cls([()], zero_1, known, empty_cache())

    def longer(self, rows_M: Tensor, tokens_M: Tensor) -> list[Ids]:
        """Returns some prefixes, each with one more token."""
        pairs = zip(rows_M.tolist(), tokens_M.tolist(), strict=True)
        return [(*self.ids[row], token) for row, token in pairs]


def read_depths(
    model: LanguageModel,
    behind: BehindAdam,
    clock: Clock,
    tell: OnJudged,
) -> list[Judged] | None:
    """Returns the texts of a batch, those with the most evidence first; None: spans have no end.

    Args:
        model: A decoder at the broadcast weights.
        behind: The gradient behind the update.
        clock: When time is up, prefixes grow no longer.
        tell: Called with the number of positions that are done, and the best prefix.
    """
    layers = spanned_layers(model, behind, clock)
    if layers is None:
        return None
    size = behind.update.num_examples
    deep, places = layers[1:], model.max_length
    beam, prefixes = _Beam.empty(deep), list[Judged]()
    for position, tokens_N in enumerate(_slots(model, layers[0]), 1):
        if not len(tokens_N) or clock.up():
            break
        beam = _grown(model, beam, tokens_N, deep, size)
        if not beam.ids:
            break
        totals = beam.total_K.tolist()
        grown = [Judged(*pair, math.inf) for pair in zip(beam.ids, totals, strict=True)]
        tell(position, places, grown[0])
        prefixes += grown
    return _batch(model, behind, prefixes, clock)


def _slots(model: LanguageModel, first: SpannedLayer) -> Iterator[Tensor]:
    """Yields for each position the tokens that the first layer lets pass, the nearest first."""
    table, begin = model.family.token_table(model.module), first_tokens(model)
    ids_V, passed_N = torch.arange(model.vocabulary, device=model.device), torch.empty(0)
    for position in range(model.max_length - len(certificate.close(model, ()))):
        if position == 0 or table.position_PD is not None:
            excess_V = first.excess(table(ids_V, torch.full_like(ids_V, position)))
            passed_N = excess_V.argsort()[: int((excess_V < _FIRST).sum())]
        yield ids_V[list(begin[position : position + 1])] if position < len(begin) else passed_N


def _grown(
    model: LanguageModel, beam: _Beam, tokens_N: Tensor, layers: Sequence[SpannedLayer], size: int
) -> _Beam:
    """Returns the best prefixes that are one token longer than those of a beam, best first."""
    tokens_KN = _proposed(model, beam, tokens_N)
    rows_M = torch.arange(len(beam.ids), device=tokens_N.device)
    rows_M, tokens_M = rows_M.repeat_interleave(tokens_KN.shape[1]), tokens_KN.flatten()
    if len(rows_M) > _TRIED * size:
        # The second layer tells most wrong tokens, and costs little.
        estimates = list[Tensor]()
        for some_M in torch.split(torch.arange(len(rows_M), device=rows_M.device), _AT_ONCE):
            ((x_MD, _),), _ = _states(model, beam, rows_M[some_M], tokens_M[some_M], layers[:1])
            estimates.append(layers[0].span.estimate(x_MD))
        total_M = beam.total_K[rows_M] + torch.cat(estimates).log()
        tried_M = total_M.topk(_TRIED * size, largest=False).indices
        rows_M, tokens_M = rows_M[tried_M], tokens_M[tried_M]
    states, cache = _states(model, beam, rows_M, tokens_M, layers)
    spans = [layer.span for layer in layers]
    excess_LM = torch.stack(
        [span.excess(x_MD) for span, (x_MD, _) in zip(spans, states, strict=True)]
    )
    log_M = (excess_LM / ACCEPT).log().mean(0)
    total_M = (beam.total_K[rows_M] + log_M).masked_fill(log_M >= 0, math.inf)
    best_K = total_M.argsort()[: _KEPT * size]
    best_K = best_K[total_M[best_K].isfinite()]
    return _Beam(
        ids=beam.longer(rows_M[best_K], tokens_M[best_K]),
        total_K=total_M[best_K],
        known=[torch.cat([known_MTD, x_MD[:, None]], 1)[best_K] for x_MD, known_MTD in states],
        cache=of_rows(cache, best_K),
    )


def _proposed(model: LanguageModel, beam: _Beam, tokens_N: Tensor) -> Tensor:
    """Returns next tokens [K, J] behind each prefix: all of some, or the best, nearest first."""
    if len(tokens_N) <= 2 * _PROPOSED or not beam.ids[0] or model.task != CAUSAL_LM:
        return tokens_N.expand(len(beam.ids), -1)
    nearest_N, further_N = tokens_N[:_PROPOSED], tokens_N[_PROPOSED:]
    ids_KT = torch.tensor(beam.ids, device=tokens_N.device)
    likely_KV = log_probabilities(model, ids_KT)[:, -1]
    likely_KN = further_N[likely_KV[:, further_N].topk(_PROPOSED).indices]
    return torch.cat([nearest_N.expand(len(beam.ids), -1), likely_KN], 1)


def _states(
    model: LanguageModel,
    beam: _Beam,
    rows_M: Tensor,
    tokens_M: Tensor,
    layers: Sequence[SpannedLayer],
) -> tuple[list[tuple[Tensor, Tensor]], "DynamicCache"]:
    """Returns the states [M, D] of tokens behind prefixes in some layers, and the model's cache.

    Of each state the part that those of the prefix do not explain; and what these span [M, T, D].
    """
    cache = of_rows(beam.cache, rows_M, layers[-1].number)
    outer: Any = model.module
    with listening([layer.module for layer in layers], stop=True) as heard, suppress(AllHeardError):
        outer.base_model(input_ids=tokens_M[:, None], past_key_values=cache, use_cache=True)
    states = list[tuple[Tensor, Tensor]]()
    for layer, known_KTD in zip(layers, beam.known, strict=False):
        x_MD = F.normalize(layer.vectors(heard[layer.module][0][:, 0]))
        known_MTD = known_KTD[rows_M]
        for _ in range(2):  # Once more, because what is left may be small.
            x_MD = F.normalize(x_MD - ((known_MTD @ x_MD[..., None]) * known_MTD).sum(1))
        states.append((x_MD, known_MTD))
    return states, cache


def _batch(
    model: LanguageModel, behind: BehindAdam, prefixes: Sequence[Judged], clock: Clock
) -> list[Judged]:
    """Returns the texts, among the best prefixes, whose gradients explain most, best first."""
    size, nearest = behind.update.num_examples, sorted(prefixes, key=by_excess)
    branches = distinct(nearest, ())[: _BRANCHES * size]
    if model.task != CAUSAL_LM:  # Labels are not known.
        return branches[:size]
    by_ids = {prefix.ids: prefix for prefix in nearest}
    cut = [text.ids[: len(text.ids) - count] for count in range(_CUT + 1) for text in branches]
    pool = [by_ids[ids] for ids in dict.fromkeys([*cut, *by_ids]) if ids in by_ids]
    pool = pool[: min(_COMPARED * size, _MOST)]
    tensors = {
        name: value
        for name, value in behind.update.tensors.items()
        if name.endswith((_LORA_A, _LORA_B))
    }
    # Divided by its root mean square each tensor counts alike; what is not known does not count.
    weight = {name: _weight(model, behind, name) for name in tensors}
    names = [name for name in tensors if weight[name].any()]
    if not names or not pool:
        return []
    columns = list[Tensor]()
    for text in clock.paced(pool, least=size):
        (unit,) = certificate.units(model, [text.ids], names)
        (gradients,) = unit.gradients
        columns.append(torch.cat([(gradients[name] * weight[name]).flatten() for name in names]))
    observed_X = torch.cat([(tensors[name] * weight[name]).flatten() for name in names])
    gradient_XP = torch.stack(columns, 1).double()
    share_P = _shares(gradient_XP, observed_X.double())
    left_X = observed_X - gradient_XP @ share_P
    if left_X.square().sum() > _LEFT * observed_X.square().sum():
        return []
    best = share_P.argsort(descending=True)[:size].tolist()
    return [pool[i] for i in best]


def _weight(model: LanguageModel, behind: BehindAdam, name: str) -> Tensor:
    """Returns what numbers of a tensor count: zero for those that are not known."""
    gradient = behind.update.tensors[name]
    came = behind.variance(model, name).isfinite() & (gradient != 0)
    square = gradient[came].square().mean() if came.any() else gradient.new_ones(())
    return came / square.sqrt()


def _shares(gradient_XP: Tensor, observed_X: Tensor) -> Tensor:
    """Returns the shares [P], none below zero, in which gradients make up an observed one."""
    from scipy.optimize import nnls  # here, because it takes a while

    q_XP, r_PP = torch.linalg.qr(gradient_XP)
    share_P, _ = nnls(r_PP.cpu().numpy(), (q_XP.T @ observed_X).cpu().numpy(), maxiter=1000)
    return torch.from_numpy(share_P).to(observed_X)
