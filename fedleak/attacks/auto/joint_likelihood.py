"""Joint likelihood: the texts of a batch under noise, all of them at once.

A table of which word stands where (`placed_words`) says what the texts are made of, and not which
words belong together. The gradient does: in every layer, the gradient of a text depends on all of
its words. But a sum of squares over all numbers misleads a search. Most of a batch's gradient is
one direction that all texts share, whose length a few wrong words fit best.

**Score.** So each part of the update counts by itself. Of a part with n numbers (a tensor, the row
of a place, the row of a word) let E = |G - mean of the texts' gradients|^2 / s^2 - n. Right texts
leave E = 0, give or take sqrt(2 n). What wrong ones leave is no noise: if it is Gaussian of unknown
size in k directions, its log probability is -k/2 log(E). So a part adds
`-k/2 log(1 + E / (k + 3 sqrt(2 n)))`, as in `maximum_likelihood`, and no part can outvote the rest.

**Search.** From a text for each example (`text_by_text`) places are visited in random order. At
each the best of these changes is made: another word (of the table; that the gradient at this place,
or what is left of both rows, points to; that the prior expects), a word more or less, an end, two
texts exchanging a word or all that follows. If nothing helps, the best state is disturbed by two
exchanges, and the search goes on. It ends when a state leaves what noise leaves (E < 3 sqrt(2 n)
over all parts) and nothing is better, or when nothing helped several times. A text that the pooled
span accepts is not changed to one that it rejects.

Only every so many rows of a weight are compared: noise is so small a part of a wrong word's trace
that a quarter of a million numbers show it.

Limits: one gradient of a classifier, of few texts, equally weighted (no clipping of each), no
dropout, Gaussian noise of one size. A search proves nothing, and may end beside the texts.

Shapes: B texts, T places, D hidden size, V words, X numbers of all tensors that are compared.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks import Progress, Show
from fedleak.attacks.analytic.placed_words import PlacedWords, placed_words
from fedleak.attacks.auto.evidence import gradients_of
from fedleak.attacks.clock import Clock
from fedleak.attacks.matching.factored_gradients import BatchGradients
from fedleak.attacks.matching.gradient_distance import Gradient
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.pooled_span import SIGMAS, PooledSpan
from fedleak.models import Frame, LanguageModel, frame, pad
from fedleak.models.prior import Prior
from fedleak.util.rng import stream

State = tuple[Ids, ...]
Change = Mapping[int, Ids]
"""The number of a text -> its tokens afterwards."""

MOST_TEXTS = 8
"""Texts of a batch, at most: a place has changes for each pair of them."""

_STANDS_OUT = 5.0
"""Standard deviations by which a row that was used is larger than noise."""

_DIRECTIONS, _OF_ROW = 100.0, 10.0
"""k: directions in which wrong words move a tensor, and a row of an embedding."""

_NUMBERS = 2**18
"""Numbers that are compared, about."""

_WHOLE = 16
"""Rows of a weight up to which all are compared."""

_TRIED, _FEW = 5, 2
"""Words that are tried at a place by all that speaks for them, and by less."""

_TABLE, _POINTED = 20.0, 20.0
"""Nats that the table gives a word, and that a gradient adds or subtracts, at most."""

_LONGER = 3
"""Tokens by which a text may end behind the last place that stands out of the noise."""

_STALLS = 5
"""Times that nothing helps, also after a disturbance, before the search ends."""

AT_ONCE = 32
"""Texts of a forward pass."""

_KEPT = 256
"""Texts whose gradients are kept."""

_LARGEST = 1e12
"""A number in units of the noise, at most."""

NEVER = -1e9
"""Log probability of what cannot be."""


class TextGradient(NamedTuple):
    """The gradient of one text, in units of the noise.

    Attributes:
        numbers_X: Of the tensors, as far as they are compared.
        place_TD: The gradients at its places; both embeddings' rows are sums of these.
    """

    numbers_X: Tensor
    place_TD: Tensor


class Judgement(NamedTuple):
    """How well texts explain an update.

    Attributes:
        score: Their log probability, up to a constant; near 0 if all parts leave what noise leaves.
        excess: The chi-square over all parts, in standard deviations from its mean.
    """

    score: float
    excess: float


class Joint:
    """How well a batch of texts explains an update.

    Args:
        model: At the broadcast weights.
        observed: The mean gradient by parameter name.
        noise: Its standard deviation.
        labels: The class of each text.
    """

    def __init__(
        self,
        model: LanguageModel,
        observed: Mapping[str, Tensor],
        noise: float,
        labels: Sequence[int],
    ) -> None:
        family = model.family
        self._model, self._noise, self.labels = model, noise, labels
        self._places = str(family.position_embedding)
        others = family.null_parameters(observed) | {family.word_embedding, self._places}
        self._names = [name for name in observed if name not in others]
        numbers = sum(observed[name].numel() for name in self._names)
        self._every = max(1, numbers // _NUMBERS)
        parts = [self._compared(name, observed[name][None]) for name in self._names]
        self._sizes = [part.shape[1] for part in parts]
        self._target_X = self._in_noise(torch.cat(parts, 1)[0])
        self.word_VD = self._in_noise(observed[family.word_embedding])
        self.place_PD = self._in_noise(observed[self._places])
        width = self.word_VD.shape[1]
        self._word_square_V = self.word_VD.square().sum(1).double()
        self._clear = set(_clear(self._word_square_V, width))
        self._own = BatchGradients(model, [*self._names, self._places])
        self._known: dict[tuple[Ids, int], TextGradient] = {}
        self._judged: dict[State, Judgement] = {}

    def _in_noise(self, value: Tensor) -> Tensor:
        """Returns numbers in units of the noise, clamped so that squares are finite."""
        return (value.float() / self._noise).clamp(-_LARGEST, _LARGEST)

    def _compared(self, name: str, value_KYX: Tensor) -> Tensor:
        """Returns the numbers [K, n] of a tensor that are compared."""
        if name == self._model.family.token_type_embedding:
            value_KYX = value_KYX[:, :1]  # every token is of type 0
        if value_KYX.dim() == 3 and value_KYX.shape[1] > _WHOLE:
            value_KYX = value_KYX[:, :: self._every]
        return value_KYX.flatten(1).float()

    def gradients(self, texts: Iterable[tuple[Ids, int]]) -> list[TextGradient]:
        """Returns the gradients of texts, each with its class."""
        wanted = list(texts)
        new = [text for text in dict.fromkeys(wanted) if text not in self._known]
        if len(self._known) + len(new) > _KEPT:
            self._known = {text: self._known[text] for text in wanted if text in self._known}
        new.sort(key=lambda text: (len(text[0]), text))
        for start in range(0, len(new), AT_ONCE):
            part = new[start : start + AT_ONCE]
            labels_N1 = torch.tensor([[label] for _, label in part], device=self._model.device)
            closed = [ids for ids, _ in part]
            with self._own.ready():
                by_name = gradients_of(self._model, self._own, closed, labels_N1)
            numbers_NX = torch.cat([self._formed(name, by_name[name]) for name in self._names], 1)
            place_NTD = by_name[self._places]
            assert isinstance(place_NTD, Tensor)
            for n, text in enumerate(part):
                rows_TD = place_NTD[n, 0, : len(text[0])]
                self._known[text] = TextGradient(
                    self._in_noise(numbers_NX[n]), self._in_noise(rows_TD)
                )
        return [self._known[text] for text in wanted]

    def _formed(self, name: str, gradient: Gradient) -> Tensor:
        """Returns the numbers [K, n] of a parameter's gradients that are compared."""
        if isinstance(gradient, Tensor):
            return self._compared(name, gradient.flatten(0, 1))
        left, right = (torch.cat(side, 2).flatten(0, 1) for side in zip(*gradient, strict=True))
        if left.shape[2] > _WHOLE:
            left = left[:, :, :: self._every]
        return (left.mT @ right).flatten(1)

    def of(self, state: State) -> list[TextGradient]:
        """Returns the gradients of a state's texts."""
        return self.gradients(zip(state, self.labels, strict=True))

    def left(self, texts: Mapping[int, Ids]) -> tuple[Tensor, Tensor]:
        """Returns what texts, by their number, leave of the rows of words and of places."""
        word_VD, place_PD = self.word_VD.clone(), self.place_PD.clone()
        gradients = self.gradients((ids, self.labels[i]) for i, ids in texts.items())
        for ids, gradient in zip(texts.values(), gradients, strict=True):
            share_TD = gradient.place_TD / len(self.labels)
            place_PD[: len(ids)] -= share_TD
            word_VD.index_add_(0, torch.tensor(ids, device=word_VD.device), -share_TD)
        return word_VD, place_PD

    def __call__(self, state: State) -> Judgement:
        """Judges a state."""
        if state not in self._judged:
            self._judged[state] = self._judge(state)
        return self._judged[state]

    def _judge(self, state: State) -> Judgement:
        gradients, width = self.of(state), self.word_VD.shape[1]
        left_X = self._target_X.clone()
        for gradient in gradients:
            left_X.sub_(gradient.numbers_X, alpha=1 / len(state))
        squares = torch.split(left_X.square_(), self._sizes)
        tensors = torch.stack([square_X.sum() for square_X in squares]).tolist()
        longest = max(map(len, state)) + 1
        place_TD = self.place_PD[:longest].clone()
        tokens = torch.tensor([token for ids in state for token in ids]).to(place_TD.device)
        words_M, row_T = torch.unique(tokens, return_inverse=True)
        share_TD = torch.cat([gradient.place_TD for gradient in gradients]) / len(state)
        word_MD = self.word_VD[words_M].index_add_(0, row_T, -share_TD)
        for ids, gradient in zip(state, gradients, strict=True):
            place_TD[: len(ids)] -= gradient.place_TD / len(state)
        # Words that stand out of the noise and are in no text leave their whole rows.
        unused = sorted(self._clear - set(words_M.tolist()))
        rows = [*place_TD.square().sum(1).tolist(), *word_MD.square().sum(1).tolist()]
        rows += self._word_square_V[unused].tolist()
        score = sum(
            _log_probability(square - size, size, _DIRECTIONS)
            for square, size in zip(tensors, self._sizes, strict=True)
        ) + sum(_log_probability(square - width, width, _OF_ROW) for square in rows)
        numbers = sum(self._sizes) + width * len(rows)
        excess = (sum(tensors) + sum(rows) - numbers) / math.sqrt(2 * numbers)
        return Judgement(score, excess)


def _log_probability(excess: float, numbers: int, directions: float) -> float:
    """Returns the log probability of a part that leaves so much more than noise does."""
    room = directions + SIGMAS * math.sqrt(2 * numbers)
    return -directions / 2 * math.log1p(max(excess, 0.0) / room)


def _clear(square_R: Tensor, width: int) -> list[int]:
    """Returns the rows that stand out of the noise, by their squares in its unit."""
    far = width + _STANDS_OUT * math.sqrt(2 * width)
    return (square_R > far).nonzero()[:, 0].tolist()


def table(model: LanguageModel, word_VD: Tensor, place_PD: Tensor) -> PlacedWords | None:
    """Returns which word stands where; None if noise hides all places.

    Args:
        model: Has marks that begin and end a text.
        word_VD: Rows of words, in units of the noise.
        place_PD: Rows of places, likewise.
    """
    width, around = place_PD.shape[1], frame(model)
    used, first = _clear(place_PD.square().sum(1).double(), width), len(around.first)
    if max(used, default=-1) < first:
        return None
    places = min(max(used) + 1 + _LONGER, len(place_PD))
    # The first mark of the end shows where a text ends.
    never = model.special_ids() - {*around.last[:1]}
    placed = placed_words(word_VD, place_PD[first:places], never)
    moved = {(word, place + first): value for (word, place), value in placed.variance.items()}
    return PlacedWords(moved, F.pad(placed.gain_VT, (first, 0)))


def next_words(prior: Prior | None, beginning: Ids, words: int) -> Tensor:
    """Returns the log probability [V] of what stands behind a beginning; all alike if unknown."""
    if prior is None or not beginning:
        return torch.zeros(words)
    ids_1T = torch.tensor([beginning], device=prior.device)
    # A prior of another vocabulary gives all words one number.
    return prior.next_token(ids_1T)[0].cpu().expand(words).clone()


def prior_nats(prior: Prior, model: LanguageModel, texts: Sequence[Ids]) -> list[float]:
    """Returns the negative log probability of texts, in nats."""
    ids_NT, mask_NT = pad(texts, model.tokenizer.pad_token_id, prior.device)
    nll_N = prior.nll(ids_NT, mask_NT).cpu() * (mask_NT.sum(1).cpu() - 1)
    return nll_N.tolist()


@dataclass
class UnderAttack:
    """An update under attack, and what judges texts by it.

    Attributes:
        model: At the broadcast weights.
        joint: Judges states.
        span: Judges texts, if it sees anything.
        placed: Which word stands where.
        lengths: Of the texts, if they are known.
        prior: Of what stands behind a beginning; None: all words are alike.
        clock: The time that the search may take.
    """

    model: LanguageModel
    joint: Joint
    span: PooledSpan
    placed: PlacedWords
    lengths: Sequence[int] | None
    prior: Prior | None
    clock: Clock

    def placed_at(self, place: int) -> list[int]:
        """Returns the words that the table has at a place, without marks."""
        return [word for word in self.placed.at(place) if word not in self.special]

    def resized(self, ids: Ids, place: int, words: Iterable[int]) -> Iterator[Ids]:
        """Yields a text without the word at a place, ended there, or with one of some words more.

        There is none if lengths are known.
        """
        first, last = self.around
        end = len(ids) - len(last)
        if self.lengths is not None:
            return
        if place < end and end - len(first) > 1:
            yield (*ids[:place], *ids[place + 1 :])
        if len(first) < place < end - 1:
            yield (*ids[:place], *last)
        if len(ids) < self.placed.gain_VT.shape[1]:
            yield from ((*ids[:place], word, *ids[place:]) for word in words)

    @cached_property
    def around(self) -> Frame:
        """Marks that begin and end a text."""
        return frame(self.model)

    @property
    def special(self) -> frozenset[int]:
        """Marks: no words."""
        return self.model.special_ids()


class Search(UnderAttack):
    """Seeks all texts at once."""

    def run(self, state: State, on_progress: Show) -> State:
        """Returns the texts that explain the update best, beginning with some."""
        best, judgement = state, self.joint(state)
        stalls, sweep = 0, 0
        while stalls < _STALLS and not self.clock.up():
            before, sweep = state, sweep + 1
            rng = stream(sweep, "places")
            places = self.placed.gain_VT.shape[1]
            order = torch.randperm(places - len(self.around.first), generator=rng).tolist()
            visited = 0
            for step, index in enumerate(self.clock.paced(order)):
                state = self._improved(state, index + len(self.around.first))
                visited += 1
                text = self.model.decode(state[step % len(state)])
                excess = self.joint(state).excess
                on_progress(Progress(step, len(order), excess, text, f"sweep {sweep}"))
            if (now := self.joint(state)).score > judgement.score:
                best, judgement, stalls = state, now, 0
            if state == before and visited == len(order):
                if judgement.excess < SIGMAS:
                    break
                stalls += 1
                state = self._disturbed(best, rng)
        return best

    def _improved(self, state: State, place: int) -> State:
        """Returns a state after the best change at a place, or as it is."""
        changes = self._possible(state, [*self._changes(state, place)])
        changed = [tuple(change.get(i, ids) for i, ids in enumerate(state)) for change in changes]
        self.joint.gradients(
            (ids, self.joint.labels[i]) for change in changes for i, ids in change.items()
        )
        best, score = state, self.joint(state).score
        for other in changed:
            if (now := self.joint(other).score) > score:
                best, score = other, now
        return best

    def _possible(self, state: State, changes: Sequence[Change]) -> list[Change]:
        """Returns the changes in which no text leaves the span that the text before it was in."""
        if not self.span:
            return [*changes]
        self.span.of([ids for change in changes for ids in change.values()])
        most = [
            2 * SIGMAS + max(fit.excess, 0.0) if fit.excess < SIGMAS else math.inf
            for fit in self.span.of(state)
        ]
        return [
            change
            for change in changes
            if all(self.span.of([ids])[0].excess <= most[i] for i, ids in change.items())
        ]

    def _changes(self, state: State, place: int) -> Iterator[Change]:
        """Yields the changes at a place that are worth a try."""
        last = self.around.last
        word_VD, place_PD = self.joint.left(dict(enumerate(state)))
        here = {ids[place] for ids in state if place < len(ids)}
        # What is left of both rows points to a word that no text has there.
        pointed_V = self._allowed(word_VD @ place_PD[place])
        absent = [word for word in self.placed_at(place) if word not in here]
        absent += pointed_V.topk(_TRIED).indices.tolist()[: _FEW + 1]
        table_V = self.placed.gain_VT[:, place].to(word_VD).clamp_max(_TABLE)
        for number, (ids, gradient) in enumerate(zip(state, self.joint.of(state), strict=True)):
            end = len(ids) - len(last)
            if place > end:
                continue
            before = ids[:place]
            prior_V = next_words(self.prior, before, len(word_VD)).to(word_VD)
            own_V = self._allowed(prior_V + table_V)
            other_V = own_V.clone()
            other_V[[*here]] = NEVER
            words = {*absent, *other_V.topk(_FEW).indices.tolist()}
            if place < end:
                row_D = gradient.place_TD[place] / len(state)
                # The match of a row with the gradient that a word at this place has.
                match_V = word_VD @ row_D - 0.5 * row_D.square().sum()
                match_V[ids[place]] += row_D.square().sum()
                match_V = match_V.clamp(-_POINTED, _POINTED)
                tried = words | {*(own_V + match_V).topk(_TRIED).indices.tolist()}
                for word in sorted(tried - {ids[place]}):
                    yield {number: (*before, word, *ids[place + 1 :])}
            if self.prior is not None:
                words |= {*self._allowed(prior_V).topk(_FEW).indices.tolist()}
            for other in self.resized(ids, place, sorted(words)):
                yield {number: other}
            for earlier in range(number):
                yield from self._exchanges(state, place, number, earlier)

    def _exchanges(self, state: State, place: int, number: int, other: int) -> Iterator[Change]:
        """Yields two texts that exchange their words at a place, or all from there on."""
        ids, others, marks = state[number], state[other], len(self.around.last)
        ends = len(ids) - marks, len(others) - marks
        if place < min(ends) and ids[place] != others[place]:
            yield {
                number: (*ids[:place], others[place], *ids[place + 1 :]),
                other: (*others[:place], ids[place], *others[place + 1 :]),
            }
        inner = place > len(self.around.first) or max(ends) > place
        if place <= min(ends) and inner and ids[place:] != others[place:]:
            swapped = (*ids[:place], *others[place:]), (*others[:place], *ids[place:])
            if min(map(len, swapped)) > len(self.around.first) + marks:
                yield dict(zip((number, other), swapped, strict=True))

    def _disturbed(self, state: State, rng: torch.Generator) -> State:
        """Returns a state after two random exchanges."""
        for _ in range(2):
            number, other = sorted(torch.randperm(len(state), generator=rng)[:2].tolist())
            shorter = min(len(state[number]), len(state[other])) - len(self.around.last)
            first = len(self.around.first)
            place = first + int(torch.randint(shorter - first, (1,), generator=rng))
            changes = [*self._exchanges(state, place, other, number)]
            if changes:
                change = changes[int(torch.randint(len(changes), (1,), generator=rng))]
                state = tuple(change.get(i, ids) for i, ids in enumerate(state))
        return state

    def _allowed(self, score_V: Tensor) -> Tensor:
        """Returns the scores of words, those of marks lowest."""
        score_V[[*self.special]] = NEVER
        return score_V
