"""State pursuit: texts of a decoder, token after token, by the hidden states that they give.

In a causal model the states of a prefix depend on no later token. So texts grow token by token, as
in orthogonal matching pursuit (Pati et al. 1993), by what their states explain of an update
(`update_evidence`).

- **Search.** A beam of prefixes. Next tokens are tried by their log probability, by how much
  likelier a step along the update makes them, by what their inputs explain in the first layer once
  those of the prefix are taken out, and by what the output layer says, if it was trained. Prefixes
  are ranked by what each token explains more in the first layers, and then, of the best, in all:
  words in a wrong order explain much in the first layers and little in the last. Of that the
  logarithm counts: otherwise rare words, which explain most, would come before their turn.
- **Score.** A prefix may be a whole text, closed by the end token: the best of these are scored by
  their gradients, and by their log probabilities.
- **Mending.** Single changes anywhere in a text, as long as one scores more: a token less, more or
  another one, or some in another place. Those are scored whose states explain most.
- **Proof.** A text that scores more than those before is proved, or not, by its gradient or by the
  client's steps on it (`replay`). The search ends at a proof, or where nothing but noise or
  rounding is left (`goodness_of_fit`). Until then each text is sought twice more. Of one gradient,
  part of what a token explains behind any prefix is taken off in every second search. Else, and in
  a third search of one text, the best one so far is in the beam, and prefixes are ranked, and
  changes chosen, by their scores alone.
- **Batches.** Each text is sought, and mended, beside the texts that were found. The gradient of
  these is taken out of a gradient of several; else states of their words explain as much, so scores
  alone rank at once.

Shapes: N texts or prefixes, M of them that are tried, J next tokens, V vocabulary, D hidden size,
T tokens, L layers, K known tokens.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain, groupby
from typing import TYPE_CHECKING, Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks import AttackSetting, Show, certificate, replay
from fedleak.attacks.clock import UNLIMITED, Clock, Seconds
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.answer import Judged, Reader, Reading, ranked, recovered, telling
from fedleak.attacks.subspace.goodness_of_fit import leaves_only_blur
from fedleak.attacks.subspace.update_evidence import (
    NEVER,
    LayerInputs,
    UpdateEvidence,
    empty_cache,
    first_tokens,
    of_rows,
)
from fedleak.models import CAUSAL_LM, LanguageModel
from fedleak.models.family import with_adapters
from fedleak.training.observation import Observation

if TYPE_CHECKING:
    from transformers import DynamicCache

_BEGINNINGS = 48
"""First tokens, where none begins all texts."""

_DEPTH, _DEEP = 8, 384
"""Layers whose inputs all tokens that are tried are compared in; tokens whose inputs are compared
in all layers."""

_RANKED = 0.25
"""Weight of what speaks for a prefix where next tokens are chosen: the right one is seldom first
before it is long."""

_CLOSED = 6
"""Prefixes whose gradients are computed, as those of whole texts: so many that most speaks for, and
so many of which most speaks for the end."""

_TABLE = 0.1
"""Weight of the nats of the first layer beside log probabilities and scores."""

_EARLY, _COST = 192, 3
"""Where scores rank: prefixes that are kept, times the square of their number of tokens, while they
are short; times as many are kept where states rank, which need no gradient."""

_STALE, _BEGUN = 6, 8
"""Tokens by which the beam grows without a better text before the search ends; tokens from which on
there must be one that explains more than chance."""

_MOVED = 3
"""Successive tokens of a text that are moved together."""

_ANYWHERE = 0.6
"""Share of what a token explains at most that is taken off in every second search."""

_AGAIN = 2
"""Times that each text is sought again, beside all others of a batch, until there is a proof."""

_AT_ONCE, _NUMBERS = 512, 2**26
"""Tokens that go through the model together; numbers of their texts' gradients, at most."""

_ONLY_BLUR = "nothing proved: only noise or rounding is left, and more with a near word for any one"


class _Effort(NamedTuple):
    """How much is tried, and what counts.

    Attributes:
        wide: Prefixes that are kept where states rank, times their tokens, while they are short.
        behind: Next tokens behind each prefix.
        tried: Next tokens behind all of them, at least, where states rank: where few are kept, more
            are tried behind those that most speaks for.
        changes: Tokens at each place of a text that is mended.
        mended: Changes of a text whose gradients are computed, where states choose them.
        layers: Weight, beside log probabilities, of the logarithm of the nats that a token explains
            in a layer, a mean over layers.
    """

    wide: int
    behind: int
    tried: int
    changes: int
    mended: int
    layers: float


_BY_STATES = _Effort(wide=256, behind=40, tried=1536, changes=20, mended=24, layers=12.0)
_BY_HEAD = _BY_STATES._replace(behind=12, changes=8, mended=96, layers=4.0)
_BY_ROWS = _BY_HEAD._replace(wide=128, tried=512)
"""Without, and with, rows of the output layer that name the next token, and also with rows of the
word embedding that tell which tokens are in no text."""


@dataclass(frozen=True, kw_only=True)
class StatePursuit(Reader):
    """Texts of a decoder by what their tokens explain of an update, also of Adam on LoRA.

    Attributes:
        width: Prefixes that are kept.
        longest: Tokens of a text, at most.
        seconds: After which what was read so far counts; None: no limit.
    """

    kind: ClassVar[str] = "state_pursuit"
    version: ClassVar[int] = 9
    slow: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = frozenset()
    width: Annotated[int, Field(ge=1)] = 12
    longest: Annotated[int, Field(ge=1)] = 64
    seconds: Seconds | None = None

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs attention weights of a causal model, or their adapters, of some layer."""
        if setting.task != CAUSAL_LM:
            return (
                f"reads next-token training, and the task is {setting.task!r}: use kind = 'dager'"
            )
        layers = range(setting.num_layers)
        needed = (with_adapters(setting.family.attention_parameters(layer)) for layer in layers)
        if setting.shared.isdisjoint(frozenset().union(*needed)):
            return (
                "needs attention weights or adapters of them, and clients send none: see "
                "update.share and model.lora.targets"
            )
        return None

    @torch.no_grad()
    def reading(
        self, seen: Observation, model: LanguageModel, rng: torch.Generator, on_progress: Show
    ) -> Reading:
        """Returns the texts that explain most, those with the most evidence first."""
        clock, tell = Clock(self.seconds), telling(on_progress, model)
        update = UpdateEvidence(model, seen, rng)
        if not update.layers:
            return Reading.none("nothing read: the attention weights did not change")
        fits = cache(partial(leaves_only_blur, model, seen, clock))
        ends = partial(_ends, model, seen, clock, fits)
        texts = self._texts(seen, model, update, clock, tell, ends)
        wanted, later = seen.update.num_examples, _later(seen)
        if not texts:
            reason = f"nothing read: no text explains more of the update than chance does{later}"
            return Reading.none(reason, **clock.late())
        opened = [replace(text, ids=certificate.opened(model, text.ids)) for text in texts]
        verdict = certificate.judge(model, [text.ids for text in opened], seen, clock)
        best = ranked(opened, verdict, wanted)
        settled = not verdict.verified and fits(tuple(sorted(text.ids for text in texts)))
        likely = {"likely": [True] * len(best)} if settled else {}
        reason = _ONLY_BLUR if settled else f"nothing proved: these texts explain most{later}"
        answer = recovered(
            [replace(text, ids=certificate.close(model, text.ids)) for text in best],
            verdict,
            diagnostics={"nats": [-text.excess for text in texts]} | likely | clock.late(),
            reason="" if verdict.verified else reason,
        )
        return Reading(answer, tuple(text.ids for text in best), settled=settled)

    def _texts(
        self,
        seen: Observation,
        model: LanguageModel,
        update: UpdateEvidence,
        clock: Clock,
        tell: Callable[[int, int, Judged], None],
        ends: Callable[[Sequence[Ids], Ids], bool],
    ) -> list[Judged]:
        """Returns the texts, closed, after so many searches of each as there may be.

        `ends` tells whether the others and one more text are the whole batch.
        """
        longest, wanted = min(self.longest, model.max_length), seen.update.num_examples
        texts: list[Judged] = []
        # Gradients add up, so that those of other texts can be taken out.
        linear = certificate.is_linear(seen)
        for again in range(1 + _AGAIN):
            before = [text.ids for text in texts]
            for i in range(min(wanted, len(texts) + 1) if again else wanted):
                if clock.up():
                    return texts
                known, others = texts[i : i + 1], [*texts[:i], *texts[i + 1 :]]
                whole = cache(partial(ends, [text.ids for text in others]))
                by_states = linear if wanted > 1 else again < (2 if linear else 1)
                anywhere = _ANYWHERE if again % 2 else 0.0
                evidence, beside = update, others
                if linear and others:
                    evidence, beside = update.without([text.ids for text in others]), []
                    if not evidence.layers:
                        return texts
                search = _Search(model, evidence, beside, longest, by_states, whole, anywhere)
                begun = search.best(self.width, clock, *(text.ids for text in known))
                text = search.mended(begun, clock)
                if text.excess < 0:  # It explains more than chance does.
                    texts[i : i + 1] = [text]
                    tell(len(texts), wanted, text)
                    if whole(text.ids):
                        return texts
                elif i == len(texts):
                    break
            if [text.ids for text in texts] == before:
                break
        return texts


class _Beam(NamedTuple):
    """Prefixes of one length, and what was computed of them.

    Attributes:
        ids: The prefixes.
        support_N: What speaks for them.
        parts_LNKD: What each of K inputs has beside those before it, in each layer.
        share_LN: The share of a layer's rows that they explain.
        caches: What the models before and after a step along the update keep of the tokens.
        hints_NV: What speaks for each next token.
    """

    ids: list[Ids]
    support_N: Tensor
    parts_LNKD: Tensor
    share_LN: Tensor
    caches: "tuple[DynamicCache, DynamicCache]"
    hints_NV: Tensor


class _Search:
    """The search for one text of a batch, beside others."""

    def __init__(
        self,
        model: LanguageModel,
        update: UpdateEvidence,
        beside: Sequence[Judged],
        longest: int,
        by_states: bool,
        ends: Callable[[Ids], bool],
        anywhere: float = 0.0,
    ) -> None:
        """Takes whether states rank prefixes, and what tells that no other text lacks.

        `anywhere` is the share of what a token explains at most that is taken off.
        """
        self._update, self._longest, self._by_states = update, longest, by_states
        self._anywhere = anywhere
        self._device, self._ends = model.device, ends
        # In later steps states are those of other weights, and rows name less.
        named = update.head is not None and update.one_step
        rows_tell = update.absent_V is not None and bool(update.absent_V.any())
        self._effort = (_BY_ROWS if rows_tell else _BY_HEAD) if named else _BY_STATES
        self._first = first_tokens(model)
        (self._end,) = certificate.close(model, ())
        self._known = {token for text in beside for token in text.ids}
        self._beside = [torch.zeros_like(layer.sent_OI)[None] for layer in update.layers]
        for text in beside:
            _, gradients = update.gradients([text.ids])
            self._beside = [a + b for a, b in zip(self._beside, gradients, strict=True)]

    def best(self, width: int, clock: Clock, *known: Ids) -> Ids:
        """Returns the text of the best score among known ones and those of a beam, closed."""
        beam = self._begun()
        ended, most, stale = {ids: float(self._scores([ids])) for ids in known}, -math.inf, 0
        while True:
            rank_N = beam.support_N - self._worth(beam.ids)
            likely = _best_of((rank_N, rank_N + beam.hints_NV[:, self._end]), _CLOSED)
            closed = [(*beam.ids[row], self._end) for row in likely]
            scores_N = self._scores(closed, clock)
            ended |= zip(closed, scores_N.tolist(), strict=True)
            best = max(closed, key=ended.__getitem__)
            if ended[best] > most and self._ends(best):
                return best
            stale, most = (0, ended[best]) if ended[best] > most else (stale + 1, most)
            given_up = stale >= _STALE and (most > 0 or len(closed[0]) > _BEGUN)
            if given_up or len(closed[0]) >= self._longest or clock.up():
                return max(ended, key=ended.__getitem__)
            if self._by_states:
                kept = self._explaining(beam, width, clock)
            else:
                kept = self._scored(beam, width, clock, known)
            beam = self._grown(beam, *kept)

    def _begun(self) -> _Beam:
        """Returns what begins all texts, or the first tokens that the first layer supports."""
        if self._first:
            ids_NT = torch.tensor([self._first], device=self._device)
        else:
            # The first token is no target, so that nothing else is known of it.
            (nats_V,) = self._update.first_layer.nats([self._known])
            ids_NT = nats_V.topk(min(_BEGINNINGS, len(nats_V))).indices[:, None]
        layers, count = self._update.mixed, len(ids_NT)
        zeros = partial(torch.zeros, device=self._device)
        beam = _Beam(
            ids=[()] * count,
            support_N=zeros(count),
            parts_LNKD=zeros((len(layers), count, 0, len(layers[0].whiten_DD))),
            share_LN=zeros((len(layers), count)),
            caches=(empty_cache(), empty_cache()),
            hints_NV=zeros((count, 0)),
        )
        rows_N = torch.arange(count, device=self._device)
        for tokens_N in ids_NT.T:
            beam = self._grown(beam, rows_N, tokens_N, beam.support_N)
        return beam

    def _grown(self, beam: _Beam, rows_N: Tensor, tokens_N: Tensor, support_N: Tensor) -> _Beam:
        """Returns some prefixes of a beam, each with one more token."""
        _, parts_LND, share_LN = self._gain(beam, rows_N, tokens_N, self._update.mixed, UNLIMITED)
        before, after = (of_rows(cache, rows_N) for cache in beam.caches)
        hints_NTV = self._update.hints(tokens_N[:, None], (before, after))
        return _Beam(
            ids=_longer(beam, rows_N, tokens_N),
            support_N=support_N,
            parts_LNKD=torch.cat([beam.parts_LNKD[:, rows_N], parts_LND[:, :, None]], 2),
            share_LN=share_LN,
            caches=(before, after),
            hints_NV=hints_NTV[:, -1],
        )

    def _next_words(self, beam: _Beam) -> tuple[Tensor, Tensor]:
        """Returns hints [N, V] without the end token, and nats [N, V] of the first layer."""
        hints_NV = beam.hints_NV.clone()
        hints_NV[:, self._end] = NEVER
        return hints_NV, self._update.first_layer.nats([{*ids, *self._known} for ids in beam.ids])

    def _explaining(self, beam: _Beam, width: int, clock: Clock) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the prefixes [N] and their next tokens [N] that explain most, and support [N]."""
        hints_NV, table_NV = self._next_words(beam)
        rank_N = beam.support_N - self._worth(beam.ids)
        tried_NV = _RANKED * rank_N[:, None] + hints_NV + _TABLE * table_NV
        vocabulary = tried_NV.shape[1]
        behind_NJ = _tried(hints_NV, table_NV, self._effort.behind)
        tried_N = tried_NV.scatter_(1, behind_NJ, math.inf).flatten()
        tried = max(self._effort.tried, behind_NJ.numel())
        pairs_M = tried_N.topk(min(tried, len(tried_N))).indices
        rows_M, tokens_M = pairs_M // vocabulary, pairs_M % vocabulary
        layers = self._update.mixed
        kept = max(width, self._effort.wide // (len(beam.ids[0]) + 1))
        stages = [(layers, kept)]
        if len(layers) > _DEPTH:
            stages.insert(0, (layers[:_DEPTH], _DEEP))
        for some, count in stages:
            gain_M, _, _ = self._gain(beam, rows_M, tokens_M, some, clock)
            gain_M += hints_NV[rows_M, tokens_M]
            self._update.most_V.scatter_reduce_(0, tokens_M, gain_M, "amax")
            support_M = beam.support_N[rows_M] + gain_M
            rank_M = support_M - self._worth(_longer(beam, rows_M, tokens_M))
            best_M = rank_M.topk(min(count, len(rank_M))).indices
            rows_M, tokens_M, support_M = rows_M[best_M], tokens_M[best_M], support_M[best_M]
        return rows_M, tokens_M, support_M

    def _worth(self, prefixes: Sequence[Ids]) -> Tensor:
        """Returns what is taken off what speaks for prefixes [N], of one length.

        The words of a text speak for it in any order, and rare ones far more than others, so that
        they come before their turn. Part of what a token has explained at most, behind any prefix,
        is taken off wherever it stands. Words of no text, which explain little, gain by that: so
        one search does without, and the next does it.
        """
        ids_NT = torch.tensor(prefixes, device=self._device)
        return self._anywhere * self._update.most_V[ids_NT].sum(1)

    def _scored(
        self, beam: _Beam, width: int, clock: Clock, known: Sequence[Ids]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Likewise, by scores.

        A score does not contain a token's effect on later ones, so half of the prefixes are those
        whose last token the first layer supports. What begins a known text is kept, too.
        """
        hints_NV, table_NV = self._next_words(beam)
        length = len(beam.ids[0])
        rows = {ids: row for row, ids in enumerate(beam.ids)}
        begun = [
            (rows[ids[:length]], ids[length])
            for ids in known
            if ids[:length] in rows and len(ids) > length + 1
        ]
        tried = _tried(hints_NV, table_NV, self._effort.behind).tolist()
        pairs = [*begun, *((row, token) for row, tokens in enumerate(tried) for token in tokens)]
        rows_M, tokens_M = torch.tensor([*dict.fromkeys(pairs)], device=self._device).T
        scores_M = self._scores(_longer(beam, rows_M, tokens_M), clock)
        count = max(width // _COST, _EARLY // (length + 1) ** 2, 1)
        ranks = (scores_M, scores_M + _TABLE * table_NV[rows_M, tokens_M])
        best_N = sorted({*range(len(begun)), *_best_of(ranks, -(-count // 2))})
        return rows_M[best_N], tokens_M[best_N], scores_M[best_N]

    def _gain(
        self,
        beam: _Beam,
        rows_M: Tensor,
        tokens_M: Tensor,
        layers: Sequence[LayerInputs],
        clock: Clock,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns what speaks for tokens [M] by what they explain in layers, each after a prefix.

        Beside it: what their inputs have beside those of the prefix [L, M, D], and the share of
        each layer's rows that all explain [L, M]. What time does not reach explains nothing.
        """
        known = beam.parts_LNKD.shape[2]
        share_LM = beam.share_LN[: len(layers), rows_M]
        before_LM, after_LM = torch.empty_like(share_LM), torch.empty_like(share_LM)
        parts_LMD = share_LM.new_zeros((*share_LM.shape, beam.parts_LNKD.shape[3]))
        for number, layer in enumerate(layers):
            before_LM[number] = layer.nats_of(share_LM[number], known)
        for some in _parts(len(rows_M), known + 1, clock):
            cache = of_rows(beam.caches[0], rows_M[some], layers[-1].number)
            given = self._update.inputs(tokens_M[some, None], layers, cache)
            for number, (layer, inputs_NTD) in enumerate(zip(layers, given, strict=True)):
                known_NKD = beam.parts_LNKD[number, rows_M[some]]
                parts_LMD[number, some], more_N = layer.more(inputs_NTD[:, 0], known_NKD)
                share_LM[number, some] += more_N
        for number, layer in enumerate(layers):
            after_LM[number] = layer.nats_of(share_LM[number], known + 1)
        more_M = (after_LM - before_LM).clamp_min(0).log1p().mean(0)
        return self._effort.layers * more_M, parts_LMD, share_LM

    def mended(self, ids: Ids, clock: Clock) -> Judged:
        """Returns a closed text after single changes that explain more, the best one first."""
        score = float(self._scores([ids]))
        while not self._ends(ids) and not clock.up():
            # Sorted, so that those of one length go through the model together.
            texts = sorted(self._changed(ids), key=len)
            if self._by_states:
                texts = self._supported(texts, clock)
            best, i = self._scores(texts, clock).max(0)
            if best <= score:
                break
            ids, score = texts[int(i)], float(best)
        return Judged(ids, -score, math.inf)

    def _supported(self, texts: Sequence[Ids], clock: Clock) -> list[Ids]:
        """Returns the closed texts, sorted by length, whose states explain most."""
        support_N = torch.cat(
            [
                self._explained([ids[:-1] for ids in of_length], clock).sum(1)
                for _, of_length in groupby(texts, len)
            ]
        )
        likely = support_N.topk(min(self._effort.mended, len(texts))).indices.sort().values
        return [texts[i] for i in likely.tolist()]

    def _changed(self, ids: Ids) -> Iterator[Ids]:
        """Yields texts with a token less, another one, one more, or some in another place."""
        places = range(len(self._first), len(ids))
        others = [{*ids[:place], *ids[place + 1 :], *self._known} for place in places]
        # A first token is no target: all are as likely.
        hints_TV = self._update.hints(torch.tensor([ids[:-1]], device=self._device))[0]
        hints_TV = F.pad(hints_TV, (0, 0, 1, 0))[len(self._first) :]
        tried_TJ = _tried(hints_TV, self._update.first_layer.nats(others), self._effort.changes)
        for place, tried in zip(places, tried_TJ.tolist(), strict=True):
            before, behind = ids[:place], ids[place + 1 :]
            for token in tried:
                if len(ids) < self._longest:
                    yield (*before, token, *ids[place:])
                if behind:
                    yield (*before, token, *behind)
            if behind and len(ids) > 2:
                yield before + behind
        # Where all changes need a gradient, only single tokens.
        for count in range(1, _MOVED + 1 if self._by_states else 2):
            for place in places[:-count]:
                moved, left = ids[place : place + count], ids[:place] + ids[place + count :]
                for to in places[:-count]:
                    if to != place:
                        yield left[:to] + moved + left[to:]

    def _explained(self, texts: Sequence[Ids], clock: Clock) -> Tensor:
        """Returns the nats [N, L] that the inputs of tokens explain in L layers.

        Texts, of one length, that time does not reach explain nothing.
        """
        layers = self._update.mixed[:_DEPTH]
        nats_NL = self._beside[0].new_full((len(texts), len(layers)), NEVER)
        for some in _parts(len(texts), len(texts[0]), clock):
            given = self._update.inputs(torch.tensor(texts[some], device=self._device), layers)
            nats_NL[some] = torch.stack(
                [layer.nats(x) for layer, x in zip(layers, given, strict=True)], 1
            )
        return nats_NL

    def _scores(self, texts: Sequence[Ids], clock: Clock = UNLIMITED) -> Tensor:
        """Returns the nats that texts explain beside the others, and their log probability [N].

        Texts that time does not reach have a score below all others.
        """
        scores_N = self._beside[0].new_full((len(texts),), -math.inf)
        numbers = sum(layer.sent_OI.numel() for layer in self._update.layers)
        for some in _parts(len(texts), max(map(len, texts)), clock, numbers):
            prior_N, gradients = self._update.gradients(texts[some])
            sums = [a + b for a, b in zip(self._beside, gradients, strict=True)]
            scores_N[some] = prior_N + self._update.nats(sums)
        return scores_N - self._update.nats(self._beside)


def _ends(
    model: LanguageModel,
    seen: Observation,
    clock: Clock,
    fits: Callable[[tuple[Ids, ...]], bool],
    others: Sequence[Ids],
    ids: Ids,
) -> bool:
    """Whether closed texts explain all of an update.

    That is if it is their gradient, if they leave nothing of it but blur, which `fits` tells, or if
    the client's steps on them give it.
    """
    texts = [*others, ids]
    if len(texts) < seen.update.num_examples:
        return False
    if certificate.proves(model, texts, seen, clock) or fits(tuple(sorted(texts))):
        return True
    if len(texts) > 1 and seen.knowledge.local_steps != 1:  # Their orders are many.
        return False
    made = replay.replay(model, texts, seen, clock.left())
    return made is not None and made.verified


def _longer(beam: _Beam, rows_M: Tensor, tokens_M: Tensor) -> list[Ids]:
    """Returns prefixes of a beam, each with one more token."""
    pairs = zip(rows_M.tolist(), tokens_M.tolist(), strict=True)
    return [(*beam.ids[row], token) for row, token in pairs]


def _best_of(ranks: Sequence[Tensor], count: int) -> list[int]:
    """Returns the indices, in rising order, of so many of each rank."""
    best = (rank_N.topk(min(count, len(rank_N))).indices.tolist() for rank_N in ranks)
    return sorted({*chain.from_iterable(best)})


def _tried(hints_NV: Tensor, table_NV: Tensor, count: int) -> Tensor:
    """Returns the tokens [N, J] that most speaks for; for a quarter, what the first layer says."""
    both_NV = hints_NV + _TABLE * table_NV
    count = min(count, both_NV.shape[1])
    both_NV.scatter_(1, table_NV.topk(count // 4).indices, math.inf)
    return both_NV.topk(count).indices


def _parts(count: int, tokens: int, clock: Clock, numbers: int = 1) -> Iterator[slice]:
    """Yields which of so many rows of so many tokens go through the model together, in time.

    Each leaves so many numbers.
    """
    size = max(1, min(_AT_ONCE // tokens, _NUMBERS // numbers))
    for start in clock.paced(range(0, count, size), least=1):
        yield slice(start, start + size)


def _later(seen: Observation) -> str:
    """Returns what an update of several steps of Adam lacks, as the end of a sentence."""
    known, steps = seen.knowledge, seen.knowledge.local_steps or 1
    if steps == 1 or known.recipe is None or known.recipe.optimiser == "sgd":
        return ""
    return f"; of {steps} local steps the texts of the first count most"
