"""Texts of a decoder whose tokens are in the spans of many layers, as behind a step of Adam.

Where each number of a gradient has noise of its own (`weighted_span`), two layers do not tell all
wrong tokens, as DAGER's (Petrov et al. 2024) do: many do. In a causal model the states of a prefix
depend on no later token. So prefixes grow token by token. Of a next token's state in each layer,
the part that the states of its prefix do not explain must be in the layer's span, too, or a
repeated token would pass again and again. That part's excess, a geometric mean over layers, must be
small, and prefixes with the smallest product of these are kept.

A batch may have more tokens than a layer has rows. Then the rows hold mixes of all states, and no
state by itself. But the states of a prefix are known, and rows and prefix together hold all others
as soon as the prefix has as many tokens as there are more tokens than rows (as in Lee, Bresler and
Junge, "Subspace Methods for Joint Sparse Recovery", IEEE Trans. Inf. Theory 2012). Before that,
right tokens are nearer to both than wrong ones. So where a fit has no end, or its texts do not
explain the gradient, next states are tested by the rows as they came and those of their prefix.

Where texts end is not told by spans, because the last tokens have the smallest gradients. So the
batch is chosen among the best prefixes by the gradients of whole texts: by least squares on the
numbers that are known. What it leaves is about as much as their noise, or texts are wrong.

In a first round of adapters, spans are those of A x (`span.ProjectedSpan`).

Shapes: K prefixes, N next tokens, M pairs of both, T tokens, I inputs of a layer, D width of its
span, O rows, P texts that are compared, X numbers of a gradient that are known.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedleak.attacks import certificate
from fedleak.attacks.clock import Clock
from fedleak.attacks.listening import AllHeardError, listening
from fedleak.attacks.measured_gradient import MeasuredGradient
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.answer import Judged, OnJudged, by_excess, distinct
from fedleak.attacks.subspace.span import ACCEPT, SPARE
from fedleak.attacks.subspace.sparse_bayes import Bag
from fedleak.attacks.subspace.update_evidence import (
    empty_cache,
    first_tokens,
    log_probabilities,
    of_rows,
)
from fedleak.attacks.subspace.weighted_span import LowRank, WeightedSpan
from fedleak.models import CAUSAL_LM, LanguageModel
from fedleak.models.family import LORA_A, LORA_B, lora_a, lora_b

if TYPE_CHECKING:
    from transformers import DynamicCache

_DEPTHS = 4
"""Layers whose spans are looked at, beside the first: the second, and others further on."""

_FIRST = 10.0
"""Largest excess of a token in the first layer: where tokens are weak there, others tell them."""

_PROPOSED = 512
"""Next tokens behind a prefix: the likeliest of those that the first layer lets pass, and as many
that are the nearest to its span."""

_ALIKE = 64
"""Likeliest tokens behind a prefix, of those whose vectors hardly differ from that of a token of
the batch."""

_TRIED, _TRIED_BY_ROWS, _KEPT = 48, 256, 4
"""Prefixes that are tested in all layers, and that are kept, for each text of the batch."""

BEYOND = 12
"""Tokens of a text that need not pass, where there may be so many more of them than rows; and of a
batch, more than that many cannot be known by the beginning of one text."""

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

_CLEAR = 2.0
"""What the texts of the batch leave of its gradient, at most, in units of its noise."""


class SpannedLayer(NamedTuple):
    """A layer, and the span of its inputs.

    Attributes:
        number: Of the layer.
        module: What multiplies the inputs.
        span: Of the inputs, or of what a projection makes of them.
        first_DI: The projection: an adapter's first matrix in its first round; None: none.
        whole: All tokens of the batch are in the span; else there may be more of them than rows.
    """

    number: int
    module: nn.Module
    span: WeightedSpan
    first_DI: Tensor | None
    whole: bool

    def vectors(self, x_NI: Tensor) -> Tensor:
        """Returns the vectors [N, D] of inputs that are in the span, of length 1."""
        x_NI = x_NI.double()
        return F.normalize(x_NI if self.first_DI is None else x_NI @ self.first_DI.T)

    def beside(self, known_TD: Tensor) -> WeightedSpan:
        """Returns the span with what a prefix adds to it, orthonormal."""
        return self.span if self.whole else self.span.beside(known_TD[known_TD.any(1)])


def spanned_layers(
    model: LanguageModel, behind: MeasuredGradient, clock: Clock, rank: int = 1
) -> Iterator[list[SpannedLayer]]:
    """Yields the spans of the first layer and of some others: of all tokens, then of the rows.

    Of all tokens where fits of all layers, of this rank at least, have an end; and as the rows came
    where there are fewer of them than columns.
    """
    came = [layer for layer in range(model.num_layers) if adapters_of(model, behind, layer)]
    if came[:1] != [0] or len(came) < 2:
        return
    deep = came[1:]
    numbers = [0, *sorted({deep[round(i * (len(deep) - 1) / _DEPTHS)] for i in range(_DEPTHS)})]
    rows = {number: layer_rows(model, behind, number) for number in numbers}
    matrices = [matrix for matrix, _, _ in rows.values()]

    def layers(spans: Iterable[WeightedSpan], whole: bool) -> list[SpannedLayer]:
        return [
            SpannedLayer(number, module, span, first_DI, whole)
            for (number, (_, module, first_DI)), span in zip(rows.items(), spans, strict=True)
        ]

    fits = _fits(matrices, clock, rank)
    if fits is not None:
        yield layers((fit.span() for fit in fits), whole=True)
    if all(count + SPARE <= width for count, width in (m.value_OD.shape for m in matrices)):
        yield layers((matrix.rows() for matrix in matrices), whole=False)


def _fits(matrices: Sequence[LowRank], clock: Clock, rank: int) -> list[LowRank] | None:
    """Returns fits of the largest rank of these; None: there may be more tokens than rows.

    All have that rank, because the weakest tokens may be missed in a layer.
    """
    fits = list[LowRank]()
    for matrix in matrices:
        fit = matrix.fitted(rank // 2, clock)  # Deeper layers have about as many dimensions.
        if fit is None:
            return None
        fits, rank = [*fits, fit], fit.rank
    rank = max(fit.rank for fit in fits)
    if any(rank >= fit.most for fit in fits):
        return None
    return [fit.wider(rank - fit.rank) for fit in fits]


def adapters_of(model: LanguageModel, behind: MeasuredGradient, layer: int) -> list[str]:
    """Returns the names of the matrices of a layer's adapters whose rows are mixes of its inputs.

    In the first round they are second ones. Of these that of values alone is taken: the first token
    has no gradient at its query, because it attends to itself alone.
    """
    weights, tensors = model.family.attention_parameters(layer), behind.update.tensors
    first = [lora_a(name) for name in weights if lora_a(name) in tensors]
    trained = [name for name in first if tensors[name].any()]
    return trained or [name for name in [lora_b(weights[-1])] if name in tensors]


def layer_rows(
    model: LanguageModel, behind: MeasuredGradient, layer: int
) -> tuple[LowRank, nn.Module, Tensor | None]:
    """Returns what came of a layer's rows, what multiplies its inputs, and their projection."""
    names, first_DI = adapters_of(model, behind, layer), None
    of_inputs = names[0]
    if of_inputs.endswith(LORA_B):
        of_inputs = of_inputs.removesuffix(LORA_B) + LORA_A
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
    behind: MeasuredGradient,
    bag: Bag | None,
    clock: Clock,
    tell: OnJudged,
) -> list[Judged] | None:
    """Returns the texts of a batch, those with the most evidence first; None: there is no span.

    Args:
        model: A decoder at the broadcast weights.
        behind: The gradient behind the update.
        bag: The tokens of the batch; None: they are not known.
        clock: When time is up, prefixes grow no longer.
        tell: Called with the number of positions that are done, and the best prefix.
    """
    size, best = behind.update.num_examples, None
    for layers in spanned_layers(model, behind, clock, 1 if bag is None else len(bag.tokens_N)):
        if size > 1 and _beyond(layers[0], bag) > BEYOND:
            continue  # no text has so many tokens that the rest is told from
        prefixes = _prefixes(model, layers, size, bag, clock, tell)
        batch = _batch(model, behind, prefixes, layers[0].whole, clock)
        if best is None or batch.left < best.left:
            best = batch
        if best.left < _CLEAR:
            break
    return None if best is None else best.texts


def _prefixes(
    model: LanguageModel,
    layers: Sequence[SpannedLayer],
    size: int,
    bag: Bag | None,
    clock: Clock,
    tell: OnJudged,
) -> list[Judged]:
    """Returns the best prefixes of each length."""
    beam, prefixes = _Beam.empty(layers), list[Judged]()
    beyond = _beyond(layers[0], bag)
    longest = len(layers[0].span.axis_RD) + max(beyond, BEYOND)
    longest = model.max_length if layers[0].whole else longest
    for position, slot in enumerate(islice(_slots(model, layers[0], bag), longest), 1):
        tokens_KN = _proposed(model, beam, slot)
        if not tokens_KN.numel() or clock.up():
            break
        beam = _grown(model, beam, tokens_KN, layers, size, beyond)
        if not beam.ids:
            break
        totals = beam.total_K.tolist()
        grown = [Judged(*pair, math.inf) for pair in zip(beam.ids, totals, strict=True)]
        tell(position, model.max_length, grown[0])
        prefixes += grown
    return prefixes


def _beyond(first: SpannedLayer, bag: Bag | None) -> int:
    """Returns how many more tokens than rows there are; if that is not known, at most."""
    if first.whole:
        return 0
    return BEYOND if bag is None else max(len(bag.tokens_N) - len(first.span.axis_RD), 0)


@dataclass(frozen=True)
class _Slot:
    """What may stand at a position.

    Attributes:
        first: The first layer.
        tokens_N: Tokens that it lets pass, the nearest first.
        nearest, likeliest: How many of the nearest, and of the likeliest others, are proposed, if
            they are not all.
        x_VD: Vectors of all tokens in that layer, of which the nearest depend on the prefix; None:
            they do not.
    """

    first: SpannedLayer
    tokens_N: Tensor
    nearest: int = _PROPOSED
    likeliest: int = _PROPOSED
    x_VD: Tensor | None = None

    def behind(self, known_KTD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the tokens [K, N] behind prefixes, the nearest first, and which of them pass."""
        if self.x_VD is None:
            tokens_KN = self.tokens_N.expand(len(known_KTD), -1)
            return tokens_KN, torch.ones_like(tokens_KN, dtype=torch.bool)
        excess_KN, tokens_KN = torch.stack(
            [self.first.beside(known_TD).estimate(self.x_VD) for known_TD in known_KTD]
        ).sort()
        return tokens_KN, excess_KN < ACCEPT


def _slots(model: LanguageModel, first: SpannedLayer, bag: Bag | None) -> Iterator[_Slot]:
    """Yields what may stand at each position."""
    table, begin = model.family.token_table(model.module), first_tokens(model)
    ids_V, slot = torch.arange(model.vocabulary, device=model.device), None
    if bag is not None:
        alike_A = bag.alike_A[torch.isin(bag.alike_A, bag.tokens_N, invert=True)]
        slot = _Slot(first, torch.cat([bag.tokens_N, alike_A]), len(bag.tokens_N), _ALIKE)
    for position in range(model.max_length - len(certificate.close(model, ()))):
        if slot is None or (bag is None and table.position_PD is not None):
            x_VD = first.vectors(table(ids_V, torch.full_like(ids_V, position)))
            if first.whole:
                excess_V = first.span.excess(x_VD)
                slot = _Slot(first, excess_V.argsort()[: int((excess_V < _FIRST).sum())])
            else:
                slot = _Slot(first, ids_V, x_VD=x_VD)
        begun = begin[position : position + 1]
        yield _Slot(first, ids_V[list(begun)]) if begun else slot


def _grown(
    model: LanguageModel,
    beam: _Beam,
    tokens_KN: Tensor,
    layers: Sequence[SpannedLayer],
    size: int,
    beyond: int,
) -> _Beam:
    """Returns the best prefixes that are one token longer than those of a beam, best first.

    The first tokens, `beyond` of them, need not pass.
    """
    rows_M = torch.arange(len(beam.ids), device=tokens_KN.device)
    rows_M, tokens_M = rows_M.repeat_interleave(tokens_KN.shape[1]), tokens_KN.flatten()
    tried = size * (_TRIED if layers[0].whole else _TRIED_BY_ROWS)
    if len(rows_M) > tried:
        # The second layer tells most wrong tokens, and costs little.
        estimates = list[Tensor]()
        for some_M in torch.split(torch.arange(len(rows_M), device=rows_M.device), _AT_ONCE):
            rows = rows_M[some_M]
            (_, x_MD), _ = _states(model, beam, rows, tokens_M[some_M], layers[:2])
            estimates.append(_measured(layers[1], beam.known[1], rows, x_MD, WeightedSpan.estimate))
        total_M = beam.total_K[rows_M] + torch.cat(estimates).log()
        tried_M = total_M.topk(tried, largest=False).indices
        rows_M, tokens_M = rows_M[tried_M], tokens_M[tried_M]
    states, cache = _states(model, beam, rows_M, tokens_M, layers)
    excess = [
        _measured(layer, known_KTD, rows_M, x_MD, WeightedSpan.excess)
        for layer, known_KTD, x_MD in zip(layers, beam.known, states, strict=True)
    ]
    log_M = (torch.stack(excess[1:]) / ACCEPT).log().mean(0)
    total_M = beam.total_K[rows_M] + log_M
    if len(beam.ids[0]) >= beyond:
        total_M = total_M.masked_fill(log_M >= 0, math.inf)
    best_K = total_M.argsort()[: _KEPT * size]
    best_K = best_K[total_M[best_K].isfinite()]
    known = [known_KTD[rows_M[best_K]] for known_KTD in beam.known]
    return _Beam(
        ids=beam.longer(rows_M[best_K], tokens_M[best_K]),
        total_K=total_M[best_K],
        known=[
            torch.cat([known_KTD, x_MD[best_K, None]], 1)
            for known_KTD, x_MD in zip(known, states, strict=True)
        ],
        cache=of_rows(cache, best_K),
    )


def _measured(
    layer: SpannedLayer,
    known_KTD: Tensor,
    rows_M: Tensor,
    x_MD: Tensor,
    measure: Callable[[WeightedSpan, Tensor], Tensor],
) -> Tensor:
    """Returns a measure [M] of states behind prefixes."""
    if layer.whole:
        return measure(layer.span, x_MD)
    measured_M = x_MD.new_empty(len(x_MD))
    for row in range(len(known_KTD)):
        of_row_M = rows_M == row
        measured_M[of_row_M] = measure(layer.beside(known_KTD[row]), x_MD[of_row_M])
    return measured_M


def _proposed(model: LanguageModel, beam: _Beam, slot: _Slot) -> Tensor:
    """Returns next tokens [K, J] behind each prefix: all of some, or the best, nearest first."""
    tokens_KN, passed_KN = slot.behind(beam.known[0])
    proposed = slot.nearest + slot.likeliest
    if tokens_KN.shape[1] <= proposed or not beam.ids[0]:
        return tokens_KN
    if model.task != CAUSAL_LM:  # Rows by themselves let all tokens pass.
        return tokens_KN if slot.first.whole else tokens_KN[:, :proposed]
    nearest_KN, further_KN = tokens_KN[:, : slot.nearest], tokens_KN[:, slot.nearest :]
    ids_KT = torch.tensor(beam.ids, device=tokens_KN.device)
    likely_KV = log_probabilities(model, ids_KT)[:, -1]
    likely_KN = likely_KV.gather(1, further_KN).where(passed_KN[:, slot.nearest :], -math.inf)
    likely_KJ = likely_KN.topk(slot.likeliest).indices
    return torch.cat([nearest_KN, further_KN.gather(1, likely_KJ)], 1)


def _states(
    model: LanguageModel,
    beam: _Beam,
    rows_M: Tensor,
    tokens_M: Tensor,
    layers: Sequence[SpannedLayer],
) -> tuple[list[Tensor], "DynamicCache"]:
    """Returns the states [M, D] of tokens behind prefixes in some layers, and the model's cache.

    Of each state the part that those of the prefix do not explain.
    """
    cache = of_rows(beam.cache, rows_M, layers[-1].number)
    outer: Any = model.module
    with listening([layer.module for layer in layers], stop=True) as heard, suppress(AllHeardError):
        outer.base_model(input_ids=tokens_M[:, None], past_key_values=cache, use_cache=True)
    states = list[Tensor]()
    for layer, known_KTD in zip(layers, beam.known, strict=False):
        x_MD = layer.vectors(heard[layer.module][0][:, 0])
        known_MTD = known_KTD[rows_M]
        for _ in range(2):  # Once more, because what is left may be small.
            x_MD = F.normalize(x_MD - ((known_MTD @ x_MD[..., None]) * known_MTD).sum(1))
        states.append(x_MD)
    return states, cache


class _Batch(NamedTuple):
    """Texts, and what they leave of the gradient.

    Attributes:
        texts: Those that explain most first.
        left: The square that they leave, in units of what noise is expected to leave.
    """

    texts: list[Judged]
    left: float


def _batch(
    model: LanguageModel,
    behind: MeasuredGradient,
    prefixes: Sequence[Judged],
    whole: bool,
    clock: Clock,
) -> _Batch:
    """Returns the texts, among the best prefixes, whose gradients explain most.

    The prefixes are of spans of all tokens (`whole`), or of rows.
    """
    size, nearest = behind.update.num_examples, sorted(prefixes, key=by_excess)
    branches = distinct(nearest, ())[: _BRANCHES * size]
    if model.task != CAUSAL_LM:  # Labels are not known.
        return _Batch(branches[:size], 0.0)
    by_ids = {prefix.ids: prefix for prefix in nearest}
    cut = [text.ids[: len(text.ids) - count] for count in range(_CUT + 1) for text in branches]
    if not whole:  # Rows may let many tokens pass behind the end of a text.
        cut += [text.ids[:count] for text in branches[:size] for count in range(len(text.ids))]
    pool = [by_ids[ids] for ids in dict.fromkeys([*cut, *by_ids]) if ids in by_ids]
    pool = pool[: min(_COMPARED * size, _MOST) if whole else _MOST]
    tensors = {
        name: value
        for name, value in behind.update.tensors.items()
        if name.endswith((LORA_A, LORA_B))
    }
    # Divided by its root mean square each tensor counts alike; what is not known does not count.
    weight = {name: _weight(model, behind, name) for name in tensors}
    names = [name for name in tensors if weight[name].any()]
    if not names or not pool:
        return _Batch([], math.inf)
    noise = sum(
        float((behind.variance(model, name) * weight[name].square()).nansum()) for name in names
    )
    columns = list[Tensor]()
    for text in clock.paced(pool, least=size):
        (unit,) = certificate.units(model, [text.ids], names)
        (gradients,) = unit.gradients
        columns.append(torch.cat([(gradients[name] * weight[name]).flatten() for name in names]))
    observed_X = torch.cat([(tensors[name] * weight[name]).flatten() for name in names])
    gradient_XP = torch.stack(columns, 1).double()
    share_P = _shares(gradient_XP, observed_X.double())
    left_X = observed_X - gradient_XP @ share_P
    best = share_P.argsort(descending=True)[:size].tolist()
    left, square = float(left_X.square().sum()), float(observed_X.square().sum())
    return _Batch([pool[i] for i in best] if left < _LEFT * square else [], left / noise)


def _weight(model: LanguageModel, behind: MeasuredGradient, name: str) -> Tensor:
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
