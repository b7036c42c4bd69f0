"""Text by text: the texts of a batch under noise, each sought by itself.

Two things judge a text alone: the span of what reaches the loss (`pooled_span`), and the table of
which word stands where (`placed_words`); a prior says what is language. A text begins as words of
the table that the prior chooses among, and is climbed: at each place in random order the best of
other words, a word more or less, or an end is taken; where that helps no more, words that the
slope of the score points to, and pairs of words of the table. A text that leaves what noise leaves
is found. Its gradient is taken out of both embeddings' rows, so that the table of the rest is made
anew, and shorter.

Shapes: T places, V words.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedleak.attacks import Progress
from fedleak.attacks.analytic.placed_words import PlacedWords
from fedleak.attacks.auto.joint_likelihood import Ids, Joint, State, table
from fedleak.attacks.auto.pooled_span import SIGMAS, PooledSpan
from fedleak.attacks.clock import Clock
from fedleak.attacks.matching.batch_structure import Frame
from fedleak.models import LanguageModel, pad
from fedleak.models.prior import Prior
from fedleak.util.rng import stream

_TABLE = 8.0
"""Nats that the table says of a word, at most."""

_NEAR, _FAR, _EXPECTED = 4, 12, 4
"""Words at a place by the table's gain, at first and where these help no more; by the prior."""

_POINTED, _PAIRS = 64, 200
"""Changes that slopes point to, and pairs of words, that are tried at once."""

_READ, _APART = 4, 30.0
"""Changes of a group that the prior reads, and nats below the text at which it reads none."""

_ROUNDS = 3
"""Times that a text is begun for each end without success, at most."""

_NEVER = -1e9
"""Log probability of what cannot be."""


@dataclass
class TextSearch:
    """One update under attack.

    Attributes:
        model: At the broadcast weights.
        joint: Has the rows, and the classes of the texts.
        span: Judges texts.
        placed: Which word stands where, beside the texts that are found.
        around: Marks that begin and end a text.
        lengths: Of the texts, if they are known.
        prior: Of language; None: all words are alike.
        clock: Of the time that it may take.
        found: The texts that leave what noise leaves, by their number in the batch.
        tried: The excess of each text that a climb ended in.
    """

    model: LanguageModel
    joint: Joint
    span: PooledSpan
    placed: PlacedWords
    around: Frame
    lengths: Sequence[int] | None
    prior: Prior | None
    clock: Clock
    found: dict[int, Ids] = field(default_factory=dict)
    tried: dict[Ids, float] = field(default_factory=dict)
    _nll: dict[Ids, float] = field(default_factory=dict)
    _of_placed: PlacedWords | None = None

    def run(self, on_progress: Callable[[Progress], None]) -> State:
        """Returns a text for each of the batch."""
        if not self.span:
            return self._all()
        size, begun = len(self.joint.labels), 0
        while len(self.found) < size and not self.clock.up():
            ends = self._ends()
            for end in self.clock.paced(ends):
                text = self._climbed(self._begun(end, f"text {begun}"), begun)
                begun += 1
                self.tried[text] = excess = self._excess(text)
                shown = self.model.decode(text)
                on_progress(Progress(begun, size, excess, shown, "text by text"))
                if excess < SIGMAS and text not in self.found.values():
                    break
            rest = [ids for ids in self.tried if ids not in self.found.values()]
            accepted = [ids for ids in rest if self.tried[ids] < SIGMAS]
            if accepted or rest:
                self._take(accepted[0] if accepted else max(rest, key=self._explained))
        state = self._all()
        before: State | None = None
        while state != before and not self.clock.up():
            before = state
            for number in self.clock.paced(range(size)):
                state = self._again(state, number)
        return state

    def _again(self, state: State, number: int) -> State:
        """Returns a state after one text was sought beside the others."""
        others = {i: ids for i, ids in enumerate(state) if i != number}
        rest = table(*self.joint.left(others), self.around, self._special)
        if rest is None:
            return state
        self.found, self.placed = others, rest
        begun = [state[number], *(self._begun(end, None) for end in self._ends()[-1:])]
        for ids in begun:
            text = self._climbed(ids, number)
            other = (*state[:number], text, *state[number + 1 :])
            if self.joint(other).score > self.joint(state).score:
                state = other
        return state

    def _explained(self, text: Ids) -> float:
        """Returns by how much a text lowers the squares of the rows, beside those found."""
        number = next(i for i in range(len(self.joint.labels)) if i not in self.found)
        squares = [
            sum(float(rows.square().sum()) for rows in self.joint.left(texts))
            for texts in (self.found, {**self.found, number: text})
        ]
        return squares[0] - squares[1]

    def likely(self, state: State, clock: Clock) -> list[bool]:
        """Returns of which texts it is likely that they are in the batch.

        Such a text leaves what noise leaves, and each that differs by a change clearly more: of
        the span, or of the update beside the other texts if these leave noise alone.
        """
        whole = self.joint(state).excess
        return [self._is_likely(state, number, whole, clock) for number in range(len(state))]

    def _is_likely(self, state: State, number: int, whole: float, clock: Clock) -> bool:
        ids, alone = state[number], self._excess(state[number])
        if alone >= SIGMAS or not (self.span or whole < SIGMAS):
            return False
        # Twice: what is left may be as far below what is expected as it may be above.
        least, least_whole = (2 * SIGMAS + max(excess, 0.0) for excess in (alone, whole))
        places = range(len(self.around.first), len(ids))
        visited = 0
        for place in clock.paced(places):
            visited += 1
            near = self._at(ids, place, _FAR)
            fits = zip(near, self.span.of(near), strict=True)
            alike = [other for other, fit in fits if not fit.excess > least]
            if alike and whole >= SIGMAS:
                return False
            self.joint.gradients((other, self.joint.labels[number]) for other in alike)
            for other in alike:
                beside = (*state[:number], other, *state[number + 1 :])
                if self.joint(beside).excess <= least_whole:
                    return False
        return visited == len(places)

    def _take(self, text: Ids) -> None:
        """Takes a text out of the rows."""
        free = [i for i in range(len(self.joint.labels)) if i not in self.found]
        # Of each class one number, by what the text leaves of the rows of places.
        of_class = {self.joint.labels[i]: i for i in free}
        left = {
            i: float(self.joint.left({**self.found, i: text})[1].square().sum())
            for i in of_class.values()
        }
        self.found[min(left, key=left.__getitem__)] = text
        rest = table(*self.joint.left(self.found), self.around, self._special)
        if rest is not None:
            self.placed = rest

    def _all(self) -> State:
        """Returns a text for each number of the batch."""
        size, state = len(self.joint.labels), dict(self.found)
        rest = [ids for ids in self.tried if ids not in self.found.values()]
        nearly = sorted(rest, key=self._total)
        ends = self._ends()
        taken: set[tuple[int, int]] = set()
        for number in (i for i in range(size) if i not in state):
            if nearly:
                state[number] = nearly.pop()
            else:
                end = ends[(size - len(state) - 1) % len(ends)]
                state[number] = self._begun(end, None, taken)
            taken |= {(word, place) for place, word in enumerate(state[number])}
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
        least = self._values([ids])[0] - (_APART if self.prior else 0.0)
        best = [other for other in texts if values[other] > least]
        best = sorted(best, key=values.__getitem__)[-_READ:]
        self._read([ids, *best])
        return max([ids, *reversed(best)], key=self._total)

    def _at(self, ids: Ids, place: int, most: int) -> list[Ids]:
        """Returns a text with other words at a place, with a word more or less, or ended there."""
        first, last = self.around
        end, words, texts = len(ids) - len(last), self._words_at(ids, place, most), list[Ids]()
        if place > end:
            return texts
        if place < end:
            texts += [(*ids[:place], word, *ids[place + 1 :]) for word in words]
        if self.lengths is None:
            if place < end and end - len(first) > 1:
                texts.append((*ids[:place], *ids[place + 1 :]))
            if len(first) < place < end - 1:
                texts.append((*ids[:place], *last))
            if len(ids) < self.placed.gain_VT.shape[1]:
                texts += [(*ids[:place], word, *ids[place:]) for word in words]
        return [other for other in texts if other != ids]

    def _words_at(self, ids: Ids, place: int, most: int) -> list[int]:
        """Returns words that may stand at a place."""
        if place >= self.placed.gain_VT.shape[1]:
            return []
        gain_V = self._gains()[place]
        best = gain_V.topk(most)
        words = self._table_at(place) + best.indices[best.values > 0].tolist()
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
        rises_TV[:, [*self._special]] = _NEVER
        for flat in rises_TV.flatten().topk(_POINTED).indices.tolist():
            place, word = divmod(flat, rises_TV.shape[1])
            yield (*ids[: first + place], word, *ids[first + place + 1 :])

    def _pairs(self, ids: Ids) -> Iterator[Ids]:
        """Yields a text with two words of the table side by side."""
        pairs = 0
        for place in range(len(self.around.first), len(ids) - len(self.around.last) - 1):
            for word in self._table_at(place):
                for following in self._table_at(place + 1):
                    if word != ids[place] and following != ids[place + 1] and pairs < _PAIRS:
                        pairs += 1
                        yield (*ids[:place], word, following, *ids[place + 2 :])

    def _values(self, texts: Sequence[Ids]) -> list[float]:
        """Returns what span and table say of texts."""
        fits = self.span.of(texts)
        return [fit.score + self._of_table(ids) for fit, ids in zip(fits, texts, strict=True)]

    def _total(self, ids: Ids) -> float:
        """Returns what all say of a text."""
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
        ids_NT, mask_NT = pad(new, self.model.tokenizer.pad_token_id, self.prior.device)
        nll_N = self.prior.nll(ids_NT, mask_NT).cpu() * (mask_NT.sum(1).cpu() - 1)
        self._nll |= dict(zip(new, nll_N.tolist(), strict=True))

    def _next(self, beginning: Ids) -> Tensor:
        """Returns the log probability [V] of what stands behind a beginning, of marks lowest."""
        if self.prior is None or not beginning:
            next_V = torch.zeros(len(self.joint.word_VD))
        else:
            ids_1T = torch.tensor([beginning], device=self.prior.device)
            next_V = self.prior.next_token(ids_1T)[0].cpu()
        next_V[[*self._special]] = _NEVER
        return next_V

    def _begun(self, end: int, drawn: str | None, taken: Iterable[tuple[int, int]] = ()) -> Ids:
        """Returns a text of words of the table, the prior choosing among them.

        Args:
            end: Where its words end.
            drawn: Names the stream that words are drawn from; None: the best are taken.
            taken: Words at places that it may not have.
        """
        first, last = self.around
        text, banned = [*first], {*taken}
        for place in range(len(first), end):
            next_V = self._next(tuple(text))
            words = [word for word in self._table_at(place) if (word, place) not in banned]
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
        """Returns where the words of a text that is not found may end, the nearest first."""
        first, last, size = len(self.around.first), self.around.last, len(self.joint.labels)
        rest = [i for i in range(size) if i not in self.found]
        if self.lengths is not None:
            # Lengths come in an order of their own.
            lengths = sorted(self.lengths)
            for ids in self.found.values():
                if len(ids) in lengths:
                    lengths.remove(len(ids))
            return [length - len(last) for length in lengths]
        placed = [place for _, place in self.placed.variance]
        ends = {place for word, place in self.placed.variance if last and word == last[0]}
        longest = min(max([*placed, first]) + 1, self.placed.gain_VT.shape[1] - len(last))
        if len(ends) < len(rest):
            ends |= {longest, max(longest // 2, first + 1)}
        return sorted(end for end in ends if end > first) or [first + 1]

    def _table_at(self, place: int) -> list[int]:
        """Returns the words that the table has at a place, without marks."""
        return [word for word in self.placed.at(place) if word not in self._special]

    @property
    def _special(self) -> frozenset[int]:
        return frozenset(self.model.special_ids())

    def _gains(self) -> Tensor:
        """Returns the nats [T, V] that the table says of words, of marks none."""
        if self._of_placed is not self.placed:
            self._gain_TV = self.placed.gain_VT.T.float().clamp_max(_TABLE).contiguous()
            self._gain_TV[:, [*self._special]] = 0
            self._of_placed = self.placed
        return self._gain_TV
