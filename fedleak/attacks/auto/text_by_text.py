"""Text by text: the texts of a batch under noise, each sought by itself.

Two things judge a text alone: the span of what reaches the loss (`pooled_span`), and the table of
which word stands where (`placed_words`); a prior says what is language. A text begins as words of
the table, chosen by the prior, and is climbed: at each place, in random order, the best of other
words, a word more or less, or an end is taken. When that helps no more, words that the slope of the
score points to, and pairs of words of the table, are tried. A text that leaves what noise leaves,
or else the one of a few that explains most of the rows, is taken: its gradient is subtracted from
both embeddings' rows, and the table of the rest is made anew, and is shorter. When all texts are
taken, each is sought once more beside the others.

Shapes: T places, V words.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedleak.attacks import Progress, Show
from fedleak.attacks import clock as timing
from fedleak.attacks.analytic.placed_words import PlacedWords
from fedleak.attacks.auto.joint_likelihood import (
    NEVER,
    State,
    UnderAttack,
    next_words,
    prior_nats,
    table,
)
from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.pooled_span import SIGMAS
from fedleak.util.rng import stream

_TABLE = 8.0
"""Nats that the table gives a word, at most."""

_NEAR, _FAR, _EXPECTED = 4, 12, 4
"""Words at a place by the table's gain, at first and where these help no more; by the prior."""

_POINTED, _PAIRS = 64, 200
"""Changes that slopes point to, and pairs of words, that are tried at once."""

_READ, _APART = 4, 30.0
"""Changes of a group that the prior reads, and nats below the text at which it reads none."""


@dataclass
class TextSearch(UnderAttack):
    """Seeks one text after the other. `placed` is the table beside those that are taken.

    Attributes:
        taken: Texts that are taken out of the rows, by their number in the batch.
        climbed: The texts that climbs ended in.
        table_seconds: The time that the last table took.
    """

    taken: dict[int, Ids] = field(default_factory=dict)
    climbed: list[Ids] = field(default_factory=list)
    table_seconds: float = 0.0
    _nll: dict[Ids, float] = field(default_factory=dict)
    _of_placed: PlacedWords | None = None

    def run(self, on_progress: Show, others_read: Sequence[Ids] = ()) -> State:
        """Returns a text for each of the batch.

        Args:
            on_progress: Called with the progress.
            others_read: Texts that other attacks read: the accepted ones are taken first.
        """
        size = len(self.joint.labels)
        for text in others_read:
            if self.span and len(self.taken) < size and self._excess(text) < SIGMAS:
                self._take(text)
        self.climbed += others_read
        while self.span and len(self.taken) < size and not self.clock.up():
            self._take_next(on_progress)
        state, before = self._all(), None
        while self.span and state != before and not self.clock.up():
            if self.joint(state).excess < SIGMAS:
                break
            before = state
            for number in self.clock.paced(range(size)):
                state = self._again(state, number)
        return state

    def _take_next(self, on_progress: Show) -> None:
        """Takes the next text out of the rows: one that is accepted, or that explains most."""
        climbed, accepted = list[Ids](), None
        for end in self.clock.paced(self._ends()):
            number = len(self.climbed) + len(climbed)
            text = self._climbed(self._begun(end, f"text {number}"), number)
            climbed.append(text)
            excess, shown = self._excess(text), self.model.decode(text)
            on_progress(Progress(number, len(self.joint.labels), excess, shown, "text by text"))
            if excess < SIGMAS and text not in self.taken.values():
                accepted = text
                break
        self.climbed += climbed
        if climbed:
            # One that is taken may be in the batch twice.
            others = [ids for ids in self.climbed if ids not in self.taken.values()]
            self._take(accepted or min([*others, *climbed], key=self._left_by))

    def _take(self, text: Ids) -> None:
        """Takes a text out of the rows."""
        _, number = self._left_by(text)
        self._beside({**self.taken, number: text})

    def _beside(self, taken: dict[int, Ids]) -> None:
        """Makes the table of what stands beside texts that are taken."""
        begun, self.taken = timing.now(), taken
        rest = table(self.model, *self.joint.left(taken))
        self.table_seconds = timing.now() - begun
        # If noise hides what is left, the table before is all there is.
        self.placed = rest or self.placed

    def _left_by(self, text: Ids) -> tuple[float, int]:
        """Returns by how much a text raises the squares of its words' rows, and at which number.

        A text of the wrong class doubles its words' rows. (Rows of places do not tell: what all
        texts share is most of them.)
        """
        words = [*{*text} - self.special]
        numbers = [i for i in range(len(self.joint.labels)) if i not in self.taken]
        of_class = {self.joint.labels[i]: i for i in numbers}
        before, *after = (
            float(self.joint.left(texts)[0][words].square().sum())
            for texts in (self.taken, *({**self.taken, i: text} for i in of_class.values()))
        )
        return min(zip((left - before for left in after), of_class.values(), strict=True))

    def _again(self, state: State, number: int) -> State:
        """Returns a state after one text was sought beside the others."""
        self._beside({i: ids for i, ids in enumerate(state) if i != number})
        for begun in (state[number], self._begun(self._ends()[-1], None)):
            other = (*state[:number], self._climbed(begun, number), *state[number + 1 :])
            if self.joint(other).score > self.joint(state).score:
                state = other
        return state

    def likely(self, state: State, clock: Clock) -> list[bool]:
        """Returns which texts are likely to be in the batch.

        All texts together leave what noise leaves, and each change of such a text clearly more, of
        the span or of the update. (What the span accepts alone may be one of many that were tried.)
        """
        whole = self.joint(state).excess
        if whole >= SIGMAS:
            return [False] * len(state)
        return [self._is_likely(state, number, whole, clock) for number in range(len(state))]

    def _is_likely(self, state: State, number: int, whole: float, clock: Clock) -> bool:
        if clock.up(self.table_seconds):
            return False
        ids, alone = state[number], self._excess(state[number])
        # Twice: what is left may be as far below what is expected as it may be above.
        far, far_whole = (2 * SIGMAS + max(excess, 0.0) for excess in (alone, whole))
        far = far if alone < SIGMAS else math.inf
        self._beside({i: ids for i, ids in enumerate(state) if i != number})
        places = range(len(self.around.first), len(ids))
        visited = 0
        for place in clock.paced(places):
            visited += 1
            near = self._at(ids, place, _FAR)
            fits = zip(near, self.span.of(near), strict=True)
            alike = [other for other, fit in fits if not fit.excess > far]
            self.joint.gradients((other, self.joint.labels[number]) for other in alike)
            for other in alike:
                beside = (*state[:number], other, *state[number + 1 :])
                if self.joint(beside).excess <= far_whole:
                    return False
        return visited == len(places)

    def _all(self) -> State:
        """Returns a text for each number of the batch."""
        size, state, used = len(self.joint.labels), dict(self.taken), set[tuple[int, int]]()
        rest = dict.fromkeys(ids for ids in self.climbed if ids not in state.values())
        nearly, ends = sorted(rest, key=self._total), self._ends()
        for number in (i for i in range(size) if i not in state):
            end = ends[(size - len(state) - 1) % len(ends)]
            state[number] = nearly.pop() if nearly else self._begun(end, None, used)
            used |= {(word, place) for place, word in enumerate(state[number])}
        return tuple(state[i] for i in range(size))

    def _climbed(self, ids: Ids, number: int) -> Ids:
        """Returns the best text that changes of one lead to."""
        rng, level = stream(number, "places"), 0
        while level < 3 and not self.clock.up():
            before = ids
            if level < 2:
                order = torch.randperm(len(ids), generator=rng).tolist()
                for place in self.clock.paced(order):
                    if len(self.around.first) <= place < len(ids):
                        ids = self._better(ids, self._at(ids, place, (_NEAR, _FAR)[level]))
            else:
                ids = self._better(ids, self._pointed(ids))
                ids = self._better(ids, self._pairs(ids)) if ids == before else ids
            level = 0 if ids != before else level + 1
            if level == 2 and self._excess(ids) < 0:
                break
        return ids

    def _better(self, ids: Ids, changed: Iterable[Ids]) -> Ids:
        """Returns the best of a text and what it is changed to."""
        texts = [other for other in dict.fromkeys(changed) if other != ids]
        values = dict(zip(texts, self._values(texts), strict=True))
        level = self._values([ids])[0] - (_APART if self.prior else 0.0)
        best = [other for other in texts if values[other] > level]
        best = sorted(best, key=values.__getitem__)[-_READ:]
        self._read([ids, *best])
        return max([ids, *reversed(best)], key=self._total)

    def _at(self, ids: Ids, place: int, most: int) -> list[Ids]:
        """Returns a text with other words at a place, with a word more or less, or ended there."""
        end, words, texts = len(ids) - len(self.around.last), self._words_at(ids, place, most), []
        if place < end:
            texts += [(*ids[:place], word, *ids[place + 1 :]) for word in words]
        if place <= end:
            texts += self.resized(ids, place, words)
        return [other for other in texts if other != ids]

    def _words_at(self, ids: Ids, place: int, most: int) -> list[int]:
        """Returns words that may stand at a place."""
        if place >= self.placed.gain_VT.shape[1]:
            return []
        gain_V = self._gains()[place]
        best = gain_V.topk(min(most, len(gain_V)))
        words = self.placed_at(place) + best.indices[best.values > 0].tolist()
        if most > _NEAR and self.prior is not None:
            expected_V = self._next(ids[:place]) + gain_V
            words += expected_V.topk(_EXPECTED).indices.tolist()
        return [*dict.fromkeys(words)]

    def _pointed(self, ids: Ids) -> Iterator[Ids]:
        """Yields a text with words that the slope of the score points to."""
        first, end = len(self.around.first), len(ids) - len(self.around.last)
        rises_TV = self.span.slopes(ids)[first:end].cpu()
        known_TV = self._gains()[first:end]
        rises_TV[: len(known_TV)] += known_TV
        rises_TV[:, [*self.special]] = NEVER
        for flat in rises_TV.flatten().topk(_POINTED).indices.tolist():
            place, word = divmod(flat, rises_TV.shape[1])
            yield (*ids[: first + place], word, *ids[first + place + 1 :])

    def _pairs(self, ids: Ids) -> Iterator[Ids]:
        """Yields a text with two words of the table side by side."""
        pairs = 0
        for place in range(len(self.around.first), len(ids) - len(self.around.last) - 1):
            for word in self.placed_at(place):
                for following in self.placed_at(place + 1):
                    if word != ids[place] and following != ids[place + 1] and pairs < _PAIRS:
                        pairs += 1
                        yield (*ids[:place], word, following, *ids[place + 2 :])

    def _values(self, texts: Sequence[Ids]) -> list[float]:
        """Returns the scores that span and table give texts."""
        fits = self.span.of(texts)
        return [fit.score + self._of_table(ids) for fit, ids in zip(fits, texts, strict=True)]

    def _total(self, ids: Ids) -> float:
        """Returns the sum of all scores of a text."""
        self._read([ids])
        return self._values([ids])[0] - self._nll[ids]

    def _excess(self, ids: Ids) -> float:
        (fit,) = self.span.of([ids])
        return fit.excess

    def _of_table(self, ids: Ids) -> float:
        first, gain_TV = len(self.around.first), self._gains()
        end = min(len(ids) - len(self.around.last), len(gain_TV))
        return float(gain_TV[range(first, end), list(ids[first:end])].sum())

    def _read(self, texts: Sequence[Ids]) -> None:
        """Lets the prior read texts."""
        new = [ids for ids in texts if ids not in self._nll]
        if self.prior is None or not new:
            self._nll |= dict.fromkeys(new, 0.0)
            return
        self._nll |= dict(zip(new, prior_nats(self.prior, self.model, new), strict=True))

    def _next(self, beginning: Ids) -> Tensor:
        """Returns the log probability [V] of what stands behind a beginning, of marks lowest."""
        next_V = next_words(self.prior, beginning, len(self.joint.word_VD))
        next_V[[*self.special]] = NEVER
        return next_V

    def _begun(self, end: int, drawn: str | None, used: Iterable[tuple[int, int]] = ()) -> Ids:
        """Returns a text of words of the table, the prior choosing among them.

        Args:
            end: Where its words end.
            drawn: Names the stream that words are drawn from; None: the best are taken.
            used: Words at places that it may not have.
        """
        first, last = self.around
        text, banned = [*first], {*used}
        for place in range(len(first), end):
            next_V = self._next(tuple(text))
            words = [word for word in self.placed_at(place) if (word, place) not in banned]
            if not words:
                words = self._words_at(tuple(text), place, _FAR)[:_NEAR]
                words = words or next_V.topk(_NEAR).indices.tolist()
            share_W = torch.softmax(next_V[words], 0)
            if drawn is None:
                text.append(words[int(share_W.argmax())])
            else:
                rng = stream(place, drawn)
                share_W = 0.9 * share_W + 0.1 / len(words)
                text.append(words[int(torch.multinomial(share_W, 1, generator=rng))])
        return (*text, *last)

    def _ends(self) -> list[int]:
        """Returns where the words of a text that is not taken may end, the nearest first."""
        first, last, size = len(self.around.first), self.around.last, len(self.joint.labels)
        rest = [i for i in range(size) if i not in self.taken]
        if self.lengths is not None:
            # Lengths come in an order of their own.
            lengths = sorted(self.lengths)
            for ids in self.taken.values():
                if len(ids) in lengths:
                    lengths.remove(len(ids))
            return [length - len(last) for length in lengths]
        placed = [place for _, place in self.placed.variance]
        ends = {place for word, place in self.placed.variance if last and word == last[0]}
        longest = min(max([*placed, first]) + 1, self.placed.gain_VT.shape[1] - len(last))
        if len(ends) < len(rest):
            ends |= {longest, max(longest // 2, first + 1)}
        return sorted(end for end in ends if end > first) or [first + 1]

    def _gains(self) -> Tensor:
        """Returns the nats [T, V] that the table gives words; marks get none."""
        if self._of_placed is not self.placed:
            self._gain_TV = self.placed.gain_VT.T.float().clamp_max(_TABLE).contiguous().cpu()
            self._gain_TV[:, [*self.special]] = 0
            self._of_placed = self.placed
        return self._gain_TV
