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
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedleak.attacks import Setting
from fedleak.attacks.subspace import ACCEPT, Span, row_space, tokens_in_span
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.models.family import FirstBlock
from fedleak.observation import Observation, UpdateKind
from fedleak.reconstruction import Reconstruction, Status

SKETCH = 64
"""Directions of the null space that a local search looks at."""

KICKED = 8
"""Positions that a kick changes, on average."""


@dataclass(frozen=True)
class Dager:
    """Exact token sequences from the first two layers' attention gradients (FedSGD, no noise).

    Attributes:
        enumerate_up_to: An encoder's sentences of one length are all tried up to this many.
        searches: Else, local searches that run side by side.
        kicks: Times that they are shaken, without finding anything new, before giving up.
    """

    kind: ClassVar[str] = "dager"
    uses: ClassVar[frozenset[str]] = frozenset()
    enumerate_up_to: Annotated[int, Field(ge=1)] = 512
    searches: Annotated[int, Field(ge=1)] = 4
    kicks: Annotated[int, Field(ge=0)] = 32

    def obstacle(self, setting: Setting) -> str | None:
        """Needs a gradient that holds attention weights of the first two layers."""
        if setting.update != UpdateKind.GRADIENT:
            return "reads gradients, and clients send weight deltas: use algorithm = 'fedsgd'"
        # Of a classifier's last layer only the pooled token's query counts: its span is too small.
        needed = 3 if setting.task == CLASSIFICATION else 2
        if setting.num_layers < needed:
            return (
                f"needs {needed} layers for task = {setting.task!r}, and the model has "
                f"{setting.num_layers}: choose another model.name"
            )
        for layer in (0, 1):
            names = setting.family.attention_parameters(layer)
            if not setting.shared.intersection(names):
                return f"needs one of {', '.join(names)}: add it to update.share"
        return None

    @torch.no_grad()
    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the sequences whose every token passes both layers' span checks."""
        family, tensors = model.family, seen.update.tensors
        first = row_space(family.attention_gradients(tensors, 0))
        second = row_space(family.attention_gradients(tensors, 1))
        output = family.output_gradient(tensors, 0)
        mixed = None if output is None else row_space([output])
        if first is None or second is None:
            return Reconstruction.none(
                Status.ABSTAINED,
                "the gradients' spectrum has no end above rounding: noise, or more tokens than "
                f"the hidden size ({model.hidden_size})",
            )
        candidates = tokens_in_span(family.token_table(model.module), first, rng)
        spans = Spans(second, mixed)
        block = family.first_block(model.module)
        search = extend_prefixes if family.causal else self._descend
        found = search(candidates, block, spans, model, rng)
        found.sort(key=lambda one: one.excess)
        diagnostics = {
            "rank": [first.rank, second.rank],
            "hidden_size": model.hidden_size,
            "candidates": [len(ids) for ids in candidates],
        }
        if not found:
            return Reconstruction.none(
                Status.ABSTAINED, "no sequence passes the second layer's check", **diagnostics
            )
        return Reconstruction(
            Status.RECOVERED,
            sequences=tuple(one.ids for one in found),
            evidence=tuple(one.excess for one in found),
            tokens=tuple(sorted({token for one in found for token in one.ids})),
            diagnostics=diagnostics,
        )

    def _descend(
        self,
        candidates: list[Tensor],
        block: FirstBlock,
        spans: "Spans",
        model: LanguageModel,
        rng: torch.Generator,
    ) -> list["Found"]:
        """Encoder: returns the sentences, of every length at which one can end, that pass."""
        end = model.tokenizer.sep_token_id
        found: dict[tuple[int, ...], Found] = {}
        for last, ids_at_end in enumerate(candidates):
            if end not in ids_at_end or last == 0:
                continue
            slots = [ids[ids != end] for ids in candidates[:last]] + [ids_at_end.new_tensor([end])]
            if all(len(ids) for ids in slots):
                sentences = Sentences(slots, block, spans, rng)
                for one in self._search_length(sentences, rng):
                    found.setdefault(one.ids, one)
            if sum(map(len, found)) >= spans.second.rank:
                break  # every dimension of the second layer's inputs is accounted for
        return list(found.values())

    def _search_length(self, sentences: "Sentences", rng: torch.Generator) -> list["Found"]:
        """Returns the sentences of one length that pass."""
        if sentences.count <= self.enumerate_up_to:
            return sentences.passing(sentences.all())[1]
        found: dict[tuple[int, ...], Found] = {}
        picks_RT, cost_R = sentences.descend(sentences.start([], self.searches, rng), rng)
        stale = 0
        while True:
            passed_R, answers = sentences.passing(picks_RT)
            stale = stale + 1 if found.keys() >= {one.ids for one in answers} else 0
            found |= {one.ids: one for one in answers}
            if stale > self.kicks or sum(map(len, found)) >= sentences.spans.second.rank:
                return list(found.values())
            # A search that arrived starts anew; the others go on from where they are, shaken.
            fresh_RT = sentences.start(list(found), self.searches, rng)
            trial_RT = torch.where(passed_R[:, None], fresh_RT, sentences.kick(picks_RT, rng))
            trial_RT, trial_R = sentences.descend(trial_RT, rng)
            better_R = passed_R | (trial_R < cost_R)
            picks_RT = torch.where(better_R[:, None], trial_RT, picks_RT)
            cost_R = torch.where(better_R, trial_R, cost_R)


@dataclass(frozen=True)
class Found:
    """A sequence that passed, and its largest excess over positions."""

    ids: tuple[int, ...]
    excess: float


@dataclass(frozen=True)
class Spans:
    """The inputs of the second attention, and those of the first's output matrix if shared."""

    second: Span
    mixed: Span | None


def extend_prefixes(
    candidates: list[Tensor],
    block: FirstBlock,
    spans: Spans,
    model: LanguageModel,
    rng: torch.Generator,
) -> list[Found]:
    """Decoder: grows all prefixes by one token at a time; those that cannot grow are sentences.

    A causal model's second attention input at a position depends on the prefix alone, so a
    wrong token is seen at once and the search never backtracks.
    """
    done: list[Found] = []
    prefixes: list[Found] = [Found((), 0.0)]
    no_past = (1, 0, block.num_heads, model.hidden_size // block.num_heads)
    k_BTHK = v_BTHK = torch.empty(no_past, device=model.device)
    for position, ids_N in enumerate(candidates):
        if not len(ids_N):
            break
        residual_ND, x_ND = block.enter(ids_N, torch.full_like(ids_N, position))
        q_NHK, k_NHK, v_NHK = block.project(x_ND)
        mixed_BND = attend_next(q_NHK, k_NHK, v_NHK, k_BTHK, v_BTHK)
        parents, children = torch.where(_may_pass(spans.mixed, mixed_BND))
        inputs_ND = block.leave(residual_ND[children], mixed_BND[parents, children])
        excess = spans.second.excess(inputs_ND)
        # No more prefixes are real than the second layer's inputs have dimensions.
        best = excess.argsort()[: spans.second.rank]
        kept = best[excess[best] < ACCEPT].tolist()
        parent, child = [int(parents[i]) for i in kept], [int(children[i]) for i in kept]
        done += [one for i, one in enumerate(prefixes) if one.ids and i not in parent]
        prefixes = [
            Found((*prefixes[p].ids, int(ids_N[c])), max(prefixes[p].excess, float(excess[i])))
            for i, p, c in zip(kept, parent, child, strict=True)
        ]
        k_BTHK = torch.cat([k_BTHK[parent], k_NHK[child][:, None]], 1)
        v_BTHK = torch.cat([v_BTHK[parent], v_NHK[child][:, None]], 1)
        if not prefixes:
            break
    return done + [one for one in prefixes if one.ids]


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
        q_NHK, k_NHK, self.v_NHK = block.project(x_ND)
        scale = 1 / math.sqrt(q_NHK.shape[-1])
        self.scores_NNH = torch.einsum("nhk,mhk->nmh", q_NHK, k_NHK) * scale
        span = spans.mixed or spans.second
        self.null_DS = span.null_sketch(SKETCH, rng).float()

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
        weights_BTTH = self.scores_NNH[n_BT[:, :, None], n_BT[:, None, :]].softmax(2)
        return torch.einsum("bijh,bjhk->bihk", weights_BTTH, self.v_NHK[n_BT]).flatten(2)

    def second_inputs(self, picks_BT: Tensor) -> Tensor:
        """Returns the second attention's inputs [B, T, D]."""
        mixed_BTD = self.mixed(picks_BT)
        residual_BTD = self.residual_ND[picks_BT + self.offset_T]
        inputs = self.block.leave(residual_BTD.flatten(0, 1), mixed_BTD.flatten(0, 1))
        return inputs.reshape(mixed_BTD.shape)

    def cost(self, picks_BT: Tensor) -> Tensor:
        """Returns [B]: the mean residual over positions, sketched, where it is cheapest to see."""
        see = self.second_inputs if self.spans.mixed is None else self.mixed
        x_BTD = see(picks_BT)
        residual_BT: Tensor = (x_BTD @ self.null_DS).norm(dim=-1) / x_BTD.norm(dim=-1)
        return residual_BT.mean(-1)

    def descend(self, picks_RT: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Returns picks [R, T] that no change of a single token improves, and their costs [R]."""
        picks_RT, cost_R = picks_RT.clone(), self.cost(picks_RT)
        free, rows_R = torch.tensor(self.free), torch.arange(len(picks_RT))
        while True:
            before_R = cost_R
            for t in free[torch.randperm(len(free), generator=rng)].tolist():
                trial_RCT = picks_RT[:, None].repeat(1, len(self.slots[t]), 1)
                trial_RCT[..., t] = torch.arange(trial_RCT.shape[1], device=picks_RT.device)
                cost_RC = self.cost(trial_RCT.flatten(0, 1)).reshape(trial_RCT.shape[:2])
                choice_R = cost_RC.argmin(1)
                better_R = cost_RC[rows_R, choice_R] < cost_R
                picks_RT[:, t] = torch.where(better_R, choice_R, picks_RT[:, t])
                cost_R = torch.where(better_R, cost_RC[rows_R, choice_R], cost_R)
            if not (cost_R < before_R).any():
                return picks_RT, cost_R

    def passing(self, picks_BT: Tensor) -> tuple[Tensor, list[Found]]:
        """Returns which sentences [B] have all second attention inputs in the span, and those."""
        excess_B = self.spans.second.excess(self.second_inputs(picks_BT)).amax(-1)
        passed_B = excess_B < ACCEPT
        passed = passed_B.nonzero().flatten().tolist()
        return passed_B, [Found(self.ids(picks_BT[i]), float(excess_B[i])) for i in passed]


def _may_pass(span: Span | None, mixed_BND: Tensor) -> Tensor:
    """Returns [B, N]: whether mixed values lie in the output matrix's span; all, without one."""
    if span is None:
        return torch.ones(mixed_BND.shape[:2], dtype=torch.bool, device=mixed_BND.device)
    return span.excess(mixed_BND) < ACCEPT
