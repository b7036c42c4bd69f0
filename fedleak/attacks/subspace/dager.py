"""DAGER: exact recovery of a batch from the span of attention gradients.

Petrov et al., "DAGER: Exact Gradient Inversion for Large Language Models", NeurIPS 2024
(arXiv 2405.15586). Departures from the authors' code:

- All of the query, key and value gradients that were shared define the span, and the rank of each
  layer is read from its own spectrum; the authors fix absolute thresholds per batch size.
- Membership is judged by a residual in units of what rounding can cause (`subspace.Span.excess`).
- The gradient of the attention output matrix, if shared, gives a third span, which prunes before
  the MLP is paid for; keys and values of a token are computed once.
- Encoders: iterated local search over the candidates of each position instead of a random draw
  of 10^7 sentences, until the sentences found hold as many tokens as the second layer has rank.
- Batch size, lengths and labels are not used.

Shapes: N candidates (token, position), B sequences or prefixes, R searches, C candidates of one
position, T tokens, D hidden size, H heads, K head size.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedleak.attacks import AttackSetting, OnProgress, Progress, certificate
from fedleak.attacks.clock import Clock
from fedleak.attacks.subspace.span import ACCEPT, REPEATS, Span, margin, row_space, tokens_in_span
from fedleak.attacks.subspace.token_bag import pairs, read_factors
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.models.family import FirstBlock, lora_a
from fedleak.observation import Observation
from fedleak.reconstruction import Reconstruction, Status

SKETCH = 64
"""Directions of the null space that a local search looks at."""

_NEAR = ACCEPT**2
"""Largest excess of a token that noise may have pushed out of the span, if no other is inside."""

_LOWER = 1 - 1e-4
"""A cost counts as lower by more than rounding."""

KICKED = 8
"""Positions that a kick changes, on average."""

_AT_ONCE = 512
"""Sentences that are judged before the clock is looked at."""


@dataclass(frozen=True)
class Dager:
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
    at_once: ClassVar[int] = 1
    enumerate_up_to: Annotated[int, Field(ge=1)] = 512
    searches: Annotated[int, Field(ge=1)] = 4
    kicks: Annotated[int, Field(ge=0)] = 32
    certify: bool = True
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs gradients of attention weights, or of their adapters, of the first two layers."""
        # Of a classifier's last layer only the pooled token's query counts: its span is too small.
        needed = 3 if setting.task == CLASSIFICATION else 2
        if setting.num_layers < needed:
            return (
                f"needs {needed} layers for task = {setting.task!r}, and the model has "
                f"{setting.num_layers}: choose another model.name"
            )
        for layer in (0, 1):
            names = setting.family.attention_parameters(layer)
            if not setting.shared.intersection((*names, *map(lora_a, names))):
                return f"needs one of {', '.join(names)}: add it to update.share"
        return None

    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the sequences whose every token passes both layers' span checks."""
        return self.many([seen], model, rngs=[rng], report=lambda which, progress: None)[0]

    def many(
        self,
        seen: Sequence[Observation],
        model: LanguageModel,
        *,
        rngs: Sequence[torch.Generator],
        report: OnProgress,
    ) -> list[Reconstruction]:
        """Returns the same of each observation, one after the other, and reports progress."""
        return [
            self._read(each, model, rng, partial(report, i))
            for i, (each, rng) in enumerate(zip(seen, rngs, strict=True))
        ]

    @torch.no_grad()
    def _read(
        self,
        seen: Observation,
        model: LanguageModel,
        rng: torch.Generator,
        report: Callable[[Progress], None],
    ) -> Reconstruction:
        clock = Clock(self.seconds)
        family, gradients = model.family, certificate.as_gradient(seen)
        first = row_space(family.attention_gradients(gradients, 0))
        second = row_space(family.attention_gradients(gradients, 1))
        output = family.output_gradient(gradients, 0)
        mixed = None if output is None else row_space([output])
        if first is None or second is None:
            return Reconstruction.none(
                Status.ABSTAINED,
                "nothing proved: the gradients' row space has no end above their noise, or holds "
                f"as many tokens as the hidden size ({model.hidden_size})",
            )
        # No sequence is longer than the second layer's inputs have dimensions, but for repetitions.
        slots = candidates(model, first, rng, clock)[: second.rank + REPEATS]
        search = extend_prefixes if family.causal else self._descend
        spans, block = Spans(second, mixed), family.first_block(model.module)

        def told(step: int, steps: int, best: Found) -> None:
            report(Progress(step, steps, best.excess, model.decode(best.ids)))

        found = search(slots, block, spans, model, seen.update.num_examples, rng, clock, told)
        return self._answer(found, first, second, slots, seen, model, clock)

    def _descend(
        self,
        slots: list[Tensor],
        block: FirstBlock,
        spans: "Spans",
        model: LanguageModel,
        wanted: int,
        rng: torch.Generator,
        clock: Clock,
        told: "Told",
    ) -> list["Found"]:
        """Encoder: returns the sentences, of every length at which one can end, that pass.

        If fewer than `wanted` pass, the nearest of each length that did not make up for them.
        """
        end = model.tokenizer.sep_token_id
        of_lengths = [
            [*(ids[ids != end] for ids in slots[:last]), ids_at_end.new_tensor([end])]
            for last, ids_at_end in enumerate(slots)
            if end in ids_at_end and last
        ]
        of_lengths = [one for one in of_lengths if all(len(ids) for ids in one)]
        found: dict[tuple[int, ...], Found] = {}
        nearest: list[Found] = []
        for done, of_length in enumerate(of_lengths):
            # Every dimension of the second layer's inputs is accounted for, or time is up.
            if sum(map(len, found)) >= spans.second.rank or clock.up():
                break
            sentences = Sentences(of_length, block, spans, rng)
            own = clock.share(len(of_lengths) - done)
            passed, best = self._search_length(sentences, rng, own)
            # Noise lets any number of them pass: no more than these can be in the answer.
            shown = passed if spans.second.exact else sorted(passed, key=_by_excess)[:wanted]
            found |= {one.ids: one for one in passed}
            found |= {one.ids: sentences.with_margin(one) for one in shown if not clock.up()}
            nearest.append(best)
            clock.rang |= own.rang
            told(done + 1, len(of_lengths), min(nearest, key=_by_excess))
        spare = max(wanted - len(found), 0)
        likely = sorted((one for one in nearest if one.ids not in found), key=_by_excess)
        return [*found.values(), *likely[:spare]]

    def _search_length(
        self, sentences: "Sentences", rng: torch.Generator, clock: Clock
    ) -> tuple[list["Found"], "Found"]:
        """Returns the sentences of one length that pass, and the nearest of all that were tried."""
        if sentences.count <= self.enumerate_up_to:
            tried: list[Found] = []
            for picks_BT in torch.split(sentences.all(), _AT_ONCE):
                tried += sentences.judge(picks_BT)
                if clock.up():
                    break
            return [one for one in tried if one.excess < ACCEPT], min(tried, key=_by_excess)
        found: dict[tuple[int, ...], Found] = {}
        picks_RT, cost_R = sentences.descend(sentences.start([], self.searches, rng), rng, clock)
        best, stale = Found((), math.inf), 0
        while True:
            tried = sentences.judge(picks_RT)
            best = min(best, *tried, key=_by_excess)
            passed = {one.ids: one for one in tried if one.excess < ACCEPT}
            stale = stale + 1 if found.keys() >= passed.keys() else 0
            found |= passed
            complete = sum(map(len, found)) >= sentences.spans.second.rank
            if stale > self.kicks or complete or clock.up():
                return list(found.values()), best
            # A search that arrived starts anew; the others go on from where they are, shaken.
            passed_R = torch.tensor([one.excess < ACCEPT for one in tried], device=cost_R.device)
            fresh_RT = sentences.start(list(found), self.searches, rng)
            trial_RT = torch.where(passed_R[:, None], fresh_RT, sentences.kick(picks_RT, rng))
            trial_RT, trial_R = sentences.descend(trial_RT, rng, clock)
            better_R = passed_R | (trial_R < cost_R)
            picks_RT = torch.where(better_R[:, None], trial_RT, picks_RT)
            cost_R = torch.where(better_R, trial_R, cost_R)

    def _answer(
        self,
        found: list["Found"],
        first: Span,
        second: Span,
        slots: list[Tensor],
        seen: Observation,
        model: LanguageModel,
        clock: Clock,
    ) -> Reconstruction:
        """Returns what passed, with multiplicities and a proof where the gradient gives them."""
        sure = [one for one in found if one.excess < ACCEPT] if second.exact else []
        diagnostics: dict[str, Any] = {
            "rank": [first.rank, second.rank],
            "budget": [second.rank, model.hidden_size],
            "candidates": {"pairs": sum(map(len, slots)), "passed": len(sure)},
        }
        if not found:
            reason = "nothing proved: no sequence passes the second layer's check"
            if clock.rang:
                reason = f"nothing passed in seconds = {self.seconds:g}: give it more"
                diagnostics["time_up"] = True
            return Reconstruction.none(Status.ABSTAINED, reason, **diagnostics)
        explained = self.certify and sure and certificate.is_linear(seen)
        passed = [one.ids for one in sure]
        members = certificate.explain(model, passed, seen, clock) if explained else []
        if clock.rang:
            diagnostics["time_up"] = True
        verdict = certificate.verify(model, members, seen)
        if verdict.difference is not None:
            diagnostics["gradient_difference"] = verdict.difference
        # A sequence that begins another, or that occurs twice, only the gradient can tell.
        known = {one.ids for one in found}
        begun = [
            replace(_longer(ids, found), ids=ids) for ids in verdict.repeats if ids not in known
        ]
        ranked = [
            one
            for one in sorted([*found, *begun], key=_by_excess)
            for _ in range(verdict.repeats.get(one.ids, 0 if verdict.verified else 1))
        ]
        if not second.exact:
            ranked = ranked[: seen.update.num_examples]  # noise lets any number of them pass
        return Reconstruction(
            Status.RECOVERED,
            sequences=tuple(one.ids for one in ranked),
            evidence=tuple(one.excess for one in ranked),
            margins=tuple(margin(one.excess, one.rejected) for one in ranked),
            tokens=tuple(sorted({token for one in ranked for token in one.ids})),
            diagnostics=diagnostics,
            verified=verdict.verified,
            reason="" if sure else "nothing proved: these are the likeliest sequences",
        )


def _longer(ids: tuple[int, ...], found: Iterable["Found"]) -> "Found":
    """Returns the nearest of the sequences that begin with these tokens."""
    return min((one for one in found if one.ids[: len(ids)] == ids), key=_by_excess)


def _by_excess(one: "Found") -> float:
    return one.excess


def candidates(
    model: LanguageModel, span: Span, rng: torch.Generator, clock: Clock
) -> list[Tensor]:
    """Returns for each position the tokens that may stand there.

    The token bag is read first, as that is one look at the vocabulary; beyond its budget every
    position is looked at. A rotary model's first attention input says nothing of positions.
    """
    table = model.family.token_table(model.module)
    factors = read_factors(table.directions(), span, rng)
    if factors is None:
        return [] if table.position_PD is None else tokens_in_span(table, span, rng, clock)
    if table.position_PD is None:
        begin = factors.tokens_V == model.tokenizer.bos_token_id
        if not begin.any():
            return [factors.tokens_V] * model.max_length
        # After itself alone a token changes nothing, so that only its place tells how often.
        return [factors.tokens_V[begin], *[factors.tokens_V[~begin]] * (model.max_length - 1)]
    bag_A, position_A = pairs(table, factors, span)
    return [factors.tokens_V[bag_A[position_A == p]] for p in range(factors.positions)]


@dataclass(frozen=True)
class Found:
    """A sequence that was tried.

    Attributes:
        ids: Its tokens.
        excess: The largest of its positions: below `ACCEPT` it passed.
        rejected: The smallest excess of a sequence with another token that did not pass.
    """

    ids: tuple[int, ...]
    excess: float
    rejected: float = math.inf


Told = Callable[[int, int, Found], None]
"""Is told how many positions or lengths are done, of how many, and the nearest so far."""


@dataclass(frozen=True)
class Spans:
    """The inputs of the second attention, and those of the first's output matrix if shared."""

    second: Span
    mixed: Span | None


def extend_prefixes(
    slots: list[Tensor],
    block: FirstBlock,
    spans: Spans,
    model: LanguageModel,
    wanted: int,
    rng: torch.Generator,
    clock: Clock,
    told: Told,
) -> list[Found]:
    """Decoder: grows all prefixes by one token at a time; those that cannot grow are sentences.

    A causal model's second attention input at a position depends on the prefix alone, so a
    wrong token is seen at once and the search never backtracks. Where noise pushes every token of a
    position out of the span, up to `wanted` near ones go on.
    """
    done: list[Found] = []
    prefixes: list[Found] = [Found((), 0.0)]
    null_DS = None if spans.mixed is None else spans.mixed.null_sketch(SKETCH, rng).float()
    k_BTHK = v_BTHK = torch.empty(0, device=model.device)
    for position, ids_N in enumerate(slots):
        if not len(ids_N) or clock.up():
            break
        positions_N = torch.full_like(ids_N, position)
        residual_ND, x_ND = block.enter(ids_N, positions_N)
        q_NHK, k_NHK, v_NHK = block.project(x_ND, positions_N)
        if position == 0:
            k_BTHK = v_BTHK = k_NHK.new_empty(1, 0, *k_NHK.shape[1:])
        mixed_BND = attend_next(q_NHK, k_NHK, v_NHK, k_BTHK, v_BTHK)
        mixed_BN = _mixed_excess(spans.mixed, mixed_BND, null_DS)
        if spans.mixed is not None and not spans.mixed.exact and not (mixed_BN < ACCEPT).any():
            mixed_BN = torch.zeros_like(mixed_BN)  # too much noise for this check
        parents, children = torch.where(mixed_BN < ACCEPT)
        inputs_ND = block.leave(residual_ND[children], mixed_BND[parents, children])
        excess = spans.second.excess(inputs_ND)
        rejected_BN = torch.where(mixed_BN < ACCEPT, torch.inf, mixed_BN)
        rejected_BN[parents, children] = torch.where(excess < ACCEPT, torch.inf, excess)
        rejected = rejected_BN.amin(1).tolist()
        prefixes = [
            replace(one, rejected=min(one.rejected, r))
            for one, r in zip(prefixes, rejected, strict=True)
        ]
        # No more prefixes are real than the second layer's inputs have dimensions.
        best = excess.argsort()[: spans.second.rank]
        kept = best[excess[best] < ACCEPT].tolist()
        blind = not spans.second.exact and not kept and not done
        if blind:
            kept = best[:wanted][excess[best[:wanted]] < _NEAR].tolist()
            blind = bool(kept)
        parent, child = parents[kept].tolist(), children[kept].tolist()
        if not blind:
            done += [one for i, one in enumerate(prefixes) if one.ids and i not in parent]
        prefixes = [
            replace(
                prefixes[p],
                ids=(*prefixes[p].ids, token),
                excess=max(prefixes[p].excess, worst),
            )
            for p, token, worst in zip(
                parent, ids_N[child].tolist(), excess[kept].tolist(), strict=True
            )
        ]
        k_BTHK = torch.cat([k_BTHK[parent], k_NHK[child][:, None]], 1)
        v_BTHK = torch.cat([v_BTHK[parent], v_NHK[child][:, None]], 1)
        if not prefixes:
            break
        told(position + 1, len(slots), min(prefixes, key=_by_excess))
    return _without_runs(done + [one for one in prefixes if one.ids], model)


def _without_runs(found: list[Found], model: LanguageModel) -> list[Found]:
    """Returns the sequences; where nothing tells how often a token is repeated, it is there once.

    A run that passes also begins another sequence, if its token does.
    """
    runs = [one for one in found if certificate.is_run(model, one.ids)]
    others = [one for one in found if one not in runs]
    begun = {one.ids[0] for one in others}
    return others + [replace(one, ids=one.ids[:1]) for one in runs if one.ids[0] not in begun]


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


class Sentences:
    """All sentences of one length over the candidates of each position.

    A sentence is a vector of picks [T]: which candidate stands at each position. Queries, keys
    and values of the candidates are computed once.
    """

    def __init__(
        self, slots: list[Tensor], block: FirstBlock, spans: Spans, rng: torch.Generator
    ) -> None:
        self.slots, self.block, self.spans = slots, block, spans
        sizes = [len(ids) for ids in slots]
        self.count = math.prod(sizes)
        self.free = [t for t, size in enumerate(sizes) if size > 1]
        device = slots[0].device
        self.offset_T = torch.tensor([0, *itertools.accumulate(sizes[:-1])], device=device)
        ids_N = torch.cat(slots)
        positions_N = torch.repeat_interleave(
            torch.arange(len(slots), device=device), torch.tensor(sizes, device=device)
        )
        self.residual_ND, x_ND = block.enter(ids_N, positions_N)
        q_NHK, k_NHK, self.v_NHK = block.project(x_ND, positions_N)
        scale = 1 / math.sqrt(q_NHK.shape[-1])
        scores_NNH = torch.einsum("nhk,mhk->nmh", q_NHK, k_NHK) * scale
        # Softmax does not change when a query's scores are shifted together.
        self.weights_NNH = (scores_NNH - scores_NNH.amax(1, keepdim=True)).exp()
        span = spans.mixed or spans.second
        self.null_DS = span.null_sketch(SKETCH, rng).float()
        null_HKS = self.null_DS.reshape(block.num_heads, -1, self.null_DS.shape[1])
        self.sketched_NHS = torch.einsum("nhk,hks->nhs", self.v_NHK, null_HKS)

    def all(self) -> Tensor:
        """Returns every sentence's picks [B, T]."""
        ranges = [torch.arange(len(ids), device=ids.device) for ids in self.slots]
        return torch.cartesian_prod(*ranges).reshape(-1, len(self.slots))

    def ids(self, picks_T: Tensor) -> tuple[int, ...]:
        """Returns the tokens of a sentence."""
        return tuple(int(ids[p]) for ids, p in zip(self.slots, picks_T.tolist(), strict=True))

    def start(self, found: list[tuple[int, ...]], searches: int, rng: torch.Generator) -> Tensor:
        """Returns random picks [R, T] that favour candidates which no found sentence uses."""
        picks = []
        for t, ids in enumerate(self.slots):
            uses_C = torch.tensor([sum(s[t] == i for s in found) for i in ids.tolist()])
            weights_C = 1 / (1 + 3 * uses_C.float())
            picks.append(torch.multinomial(weights_C, searches, replacement=True, generator=rng))
        return torch.stack(picks, 1).to(self.offset_T.device)

    def kick(self, picks_RT: Tensor, rng: torch.Generator) -> Tensor:
        """Returns picks with new random tokens at a few positions of each row."""
        shape = picks_RT.shape
        sizes_T = torch.tensor([len(ids) for ids in self.slots])
        random_RT = (torch.rand(shape, generator=rng) * sizes_T).long().to(picks_RT.device)
        kicked_RT = torch.rand(shape, generator=rng) < KICKED / max(len(self.free), 1)
        return torch.where(kicked_RT.to(picks_RT.device), random_RT, picks_RT)

    def mixed(self, picks_BT: Tensor) -> Tensor:
        """Returns the attention's mixed values [B, T, D]."""
        n_BT = picks_BT + self.offset_T
        weights_BTTH = self.weights_NNH[n_BT[:, :, None], n_BT[:, None, :]]
        mixed_BTHK = torch.einsum("bijh,bjhk->bihk", weights_BTTH, self.v_NHK[n_BT])
        return (mixed_BTHK / weights_BTTH.sum(2)[..., None]).flatten(2)

    def second_inputs(self, picks_BT: Tensor) -> Tensor:
        """Returns the second attention's inputs [B, T, D]."""
        mixed_BTD = self.mixed(picks_BT)
        residual_BTD = self.residual_ND[picks_BT + self.offset_T]
        inputs = self.block.leave(residual_BTD.flatten(0, 1), mixed_BTD.flatten(0, 1))
        return inputs.reshape(mixed_BTD.shape)

    def cost(self, picks_BT: Tensor) -> Tensor:
        """Returns [B]: the mean residual over positions, sketched, where it is cheapest to see."""
        see = self.second_inputs if self.spans.mixed is None else self.mixed
        residual_BT: Tensor = (see(picks_BT) @ self.null_DS).norm(dim=-1)
        return residual_BT.mean(-1)

    def costs_at(self, picks_RT: Tensor, t: int) -> Tensor:
        """Returns [R, C]: the cost with each candidate of one position in place of what is there.

        A token is one column of the attention weights, so that the others' sums are shared.
        """
        searches, count = len(picks_RT), len(self.slots[t])
        n_C = self.offset_T[t] + torch.arange(count, device=picks_RT.device)
        if self.spans.mixed is None:
            trial_RCT = picks_RT[:, None].repeat(1, count, 1)
            trial_RCT[..., t] = n_C - self.offset_T[t]
            return self.cost(trial_RCT.flatten(0, 1)).reshape(searches, count)
        n_RT = picks_RT + self.offset_T
        others = [i for i in range(len(self.slots)) if i != t]
        n_RO = n_RT[:, others]
        # The other positions as queries: their sums without t, and the candidate's part.
        weights_ROOH = self.weights_NNH[n_RO[:, :, None], n_RO[:, None]]
        sums_ROHS = torch.einsum("rijh,rjhs->rihs", weights_ROOH, self.sketched_NHS[n_RO])
        new_ROCH = self.weights_NNH[n_RO[:, :, None], n_C]
        share_ROCH = 1 / (weights_ROOH.sum(2)[:, :, None] + new_ROCH)
        y_ROCS = torch.einsum("roch,rohs->rocs", share_ROCH, sums_ROHS)
        y_ROCS += torch.einsum("roch,chs->rocs", share_ROCH * new_ROCH, self.sketched_NHS[n_C])
        # The candidate as the query.
        own_RCOH = self.weights_NNH[n_C[:, None], n_RO[:, None]]
        self_CH1 = self.weights_NNH[n_C, n_C][..., None]
        top_RCHS = torch.einsum("rcoh,rohs->rchs", own_RCOH, self.sketched_NHS[n_RO])
        top_RCHS = top_RCHS + self_CH1 * self.sketched_NHS[n_C]
        y_RCS = (top_RCHS / (own_RCOH.sum(2)[..., None] + self_CH1)).sum(2)
        total_RC: Tensor = y_ROCS.norm(dim=-1).sum(1) + y_RCS.norm(dim=-1)
        return total_RC / len(self.slots)

    def descend(
        self, picks_RT: Tensor, rng: torch.Generator, clock: Clock
    ) -> tuple[Tensor, Tensor]:
        """Returns picks [R, T] that no change of a single token improves, and their costs [R]."""
        picks_RT, cost_R = picks_RT.clone(), self.cost(picks_RT)
        free = torch.tensor(self.free)
        while True:
            before_R = cost_R
            for t in free[torch.randperm(len(free), generator=rng)].tolist():
                if clock.up():
                    return picks_RT, cost_R
                least_R, choice_R = self.costs_at(picks_RT, t).min(1)
                better_R = least_R < _LOWER * cost_R
                picks_RT[:, t] = torch.where(better_R, choice_R, picks_RT[:, t])
                cost_R = torch.where(better_R, least_R, cost_R)
            if not (cost_R < before_R).any():
                return picks_RT, cost_R

    def with_margin(self, one: Found) -> Found:
        """Returns a sentence that passed with the smallest excess of those one token away."""
        own_T = torch.tensor(
            [ids.tolist().index(token) for ids, token in zip(self.slots, one.ids, strict=True)]
        ).to(self.offset_T)
        trials = []
        for t in self.free:
            trial_CT = own_T.repeat(len(self.slots[t]), 1)
            trial_CT[:, t] = torch.arange(len(trial_CT), device=own_T.device)
            trials.append(trial_CT)
        tried = self.judge(torch.cat(trials)) if trials else []
        missed = [other.excess for other in tried if other.excess >= ACCEPT]
        return replace(one, rejected=min(missed, default=math.inf))

    def judge(self, picks_BT: Tensor) -> list[Found]:
        """Returns the sentences with the largest excess of their second attention inputs."""
        excess_B = self.spans.second.excess(self.second_inputs(picks_BT)).amax(-1)
        ids_BT = torch.cat(self.slots)[picks_BT + self.offset_T]
        return [
            Found(tuple(ids), excess)
            for ids, excess in zip(ids_BT.tolist(), excess_B.tolist(), strict=True)
        ]


def _mixed_excess(span: Span | None, mixed_BND: Tensor, null_DS: Tensor | None) -> Tensor:
    """Returns [B, N]: the excess of mixed values in the output matrix's span; 0 without one.

    No more can be inputs than the span has dimensions, so only the nearest by a sketch of the null
    space, where inputs are zero, are tested; it is infinite for the others.
    """
    shape = mixed_BND.shape[:2]
    if span is None or null_DS is None:
        return torch.zeros(shape, dtype=torch.float64, device=mixed_BND.device)
    mixed_XD = mixed_BND.flatten(0, 1)
    distance_X = (mixed_XD @ null_DS).norm(dim=-1)
    nearest = distance_X.topk(min(4 * span.rank, len(mixed_XD)), largest=False).indices
    excess_X = torch.full_like(distance_X, torch.inf, dtype=torch.float64)
    excess_X[nearest] = span.excess(mixed_XD[nearest])
    return excess_X.reshape(shape)
