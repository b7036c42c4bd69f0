"""DAGER's search for the sentences of an encoder, where every position sees every other.

There are too many sentences to try them all, and a wrong token shows at all positions. Short
sentences are tried one by one; among longer ones, iterated local search (Lourenco et al. 2003)
descends to a sentence that no change of a single token improves, and is kicked out of it again.

Shapes: N candidates (token, position), B sentences, R searches, C candidates of one position,
T tokens, O other positions, D hidden size, H heads, K head size, S sketch columns.
"""

import itertools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.answer import Judged, SpanSearch, by_excess
from fedleak.attacks.subspace.span import ACCEPT, SKETCH, LayerSpans
from fedleak.models.family import FirstBlock

JUDGED_AT_ONCE = 512
"""Sentences that are judged before the clock is looked at."""

_LOWER = 1 - 1e-4
"""A cost counts as lower by more than rounding."""

_KICKED = 8
"""Positions that a kick changes, on average."""


@dataclass(frozen=True)
class Effort:
    """How long the sentences of one length are searched.

    Attributes:
        enumerate_up_to: All of them are tried if they are at most this many.
        searches: Else, local searches that run side by side.
        kicks: Times that they are shaken, without finding anything new, before giving up.
    """

    enumerate_up_to: int
    searches: int
    kicks: int


def search_sentences(search: SpanSearch, end: int, effort: Effort) -> list[Judged]:
    """Returns the sentences, of every length at which one can end, that pass.

    If fewer pass than are wanted, the nearest sentences of the other lengths follow.

    Args:
        search: What is searched.
        end: The token that ends every sentence and stands nowhere else.
        effort: For each length.
    """
    slots, block, spans, wanted, rng, clock, tell, _ = search
    of_lengths = [
        [*(ids[ids != end] for ids in slots[:last]), ids_at_end.new_tensor([end])]
        for last, ids_at_end in enumerate(slots)
        if end in ids_at_end and last
    ]
    of_lengths = [choices for choices in of_lengths if all(len(ids) for ids in choices)]
    passing: dict[Ids, Judged] = {}
    nearest: list[Judged] = []
    for done, of_length in enumerate(of_lengths):
        # Every dimension of the second layer's inputs is accounted for, or time is up.
        if sum(map(len, passing)) >= spans.second.rank or clock.up():
            break
        sentences = Sentences(of_length, block, spans, rng)
        own = clock.part(len(of_lengths) - done)
        passed, best = search_length(sentences, effort, rng, own)
        # Noise lets any number of sentences pass: no more than these can be in the answer.
        shown = passed if spans.second.exact else sorted(passed, key=by_excess)[:wanted]
        passing |= {sentence.ids: sentence for sentence in passed}
        passing |= {
            sentence.ids: sentences.with_margin(sentence) for sentence in shown if not clock.up()
        }
        nearest.append(best)
        clock.rang |= own.rang
        tell(done + 1, len(of_lengths), min(nearest, key=by_excess))
    spare = max(wanted - len(passing), 0)
    others = sorted(
        (sentence for sentence in nearest if sentence.ids not in passing), key=by_excess
    )
    return [*passing.values(), *others[:spare]]


def search_length(
    sentences: "Sentences", effort: Effort, rng: torch.Generator, clock: Clock
) -> tuple[list[Judged], Judged]:
    """Returns the sentences of one length that pass, and the nearest sentence of all tried."""
    if sentences.count <= effort.enumerate_up_to:
        tried: list[Judged] = []
        for picks_BT in torch.split(sentences.all(), JUDGED_AT_ONCE):
            tried += sentences.judge(picks_BT)
            if clock.up():
                break
        return [sentence for sentence in tried if sentence.excess < ACCEPT], min(
            tried, key=by_excess
        )
    passing: dict[Ids, Judged] = {}
    picks_RT, cost_R = sentences.descend(sentences.start([], effort.searches, rng), rng, clock)
    best, stale = Judged((), math.inf, math.inf), 0
    while True:
        tried = sentences.judge(picks_RT)
        best = min(best, *tried, key=by_excess)
        passed = {sentence.ids: sentence for sentence in tried if sentence.excess < ACCEPT}
        stale = stale + 1 if passing.keys() >= passed.keys() else 0
        passing |= passed
        complete = sum(map(len, passing)) >= sentences.spans.second.rank
        if stale > effort.kicks or complete or clock.up():
            return list(passing.values()), best
        # A search that arrived starts anew; the others go on from where they are, shaken.
        passed_R = torch.tensor(
            [sentence.excess < ACCEPT for sentence in tried], device=cost_R.device
        )
        fresh_RT = sentences.start(list(passing), effort.searches, rng)
        trial_RT = torch.where(passed_R[:, None], fresh_RT, sentences.kick(picks_RT, rng))
        trial_RT, trial_R = sentences.descend(trial_RT, rng, clock)
        better_R = passed_R | (trial_R < cost_R)
        picks_RT = torch.where(better_R[:, None], trial_RT, picks_RT)
        cost_R = torch.where(better_R, trial_R, cost_R)


class Sentences:
    """All sentences of one length over the candidates of each position.

    A sentence is a vector of picks [T]: which candidate stands at each position. Queries, keys
    and values of the candidates are computed once.
    """

    def __init__(
        self, slots: list[Tensor], block: FirstBlock, spans: LayerSpans, rng: torch.Generator
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

    def ids(self, picks_T: Tensor) -> Ids:
        """Returns the tokens of a sentence."""
        return tuple(int(ids[p]) for ids, p in zip(self.slots, picks_T.tolist(), strict=True))

    def start(self, known: list[Ids], searches: int, rng: torch.Generator) -> Tensor:
        """Returns random picks [R, T] that favour candidates which no known sentence uses."""
        picks = []
        for t, ids in enumerate(self.slots):
            uses_C = torch.tensor([sum(s[t] == i for s in known) for i in ids.tolist()])
            weights_C = 1 / (1 + 3 * uses_C.float())
            picks.append(torch.multinomial(weights_C, searches, replacement=True, generator=rng))
        return torch.stack(picks, 1).to(self.offset_T.device)

    def kick(self, picks_RT: Tensor, rng: torch.Generator) -> Tensor:
        """Returns picks with new random tokens at a few positions of each row."""
        shape = picks_RT.shape
        sizes_T = torch.tensor([len(ids) for ids in self.slots])
        random_RT = (torch.rand(shape, generator=rng) * sizes_T).long().to(picks_RT.device)
        kicked_RT = torch.rand(shape, generator=rng) < _KICKED / max(len(self.free), 1)
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

    def with_margin(self, sentence: Judged) -> Judged:
        """Returns a sentence that passed with the smallest excess of those one token away."""
        own_T = torch.tensor(
            [ids.tolist().index(token) for ids, token in zip(self.slots, sentence.ids, strict=True)]
        ).to(self.offset_T)
        trials = []
        for t in self.free:
            trial_CT = own_T.repeat(len(self.slots[t]), 1)
            trial_CT[:, t] = torch.arange(len(trial_CT), device=own_T.device)
            trials.append(trial_CT)
        tried = self.judge(torch.cat(trials)) if trials else []
        missed = [other.excess for other in tried if other.excess >= ACCEPT]
        return replace(sentence, rejected=min(missed, default=math.inf))

    def judge(self, picks_BT: Tensor) -> list[Judged]:
        """Returns the sentences with the largest excess of their second attention inputs."""
        excess_B = self.spans.second.excess(self.second_inputs(picks_BT)).amax(-1)
        ids_BT = torch.cat(self.slots)[picks_BT + self.offset_T]
        return [
            Judged(tuple(ids), excess, math.inf)
            for ids, excess in zip(ids_BT.tolist(), excess_B.tolist(), strict=True)
        ]
