"""Text by text: the texts of a batch under noise, each sought by itself.

An update says of a single text how well it explains what other texts leave (`text_evidence`), so
each can be climbed.

- **A climb** visits the places in random order and makes the best change at each: another word, a
  word more or less, an end. Words are those that three point to: the table of which word stands
  where (`placed_words`), the prior, and the gradient that the text has at the place. Of all changes
  at a place the few that promise most are tried.
- **One by one.** Texts of words of the table are drawn, the prior choosing among them. The one that
  explains most for its length is climbed, and its gradient is taken out of the update and of the
  table. So it goes on until there are as many as the batch has.
- **Beside each other** they are climbed again, as the others no longer hide what is wrong with one:
  first those that leave most. Where a climb helps no more, words are moved; then more words are
  tried; then the text is sought anew.
- **The end** is when all together leave what noise leaves (`joint_likelihood`), or all was tried.

Shapes: T places, V words, D hidden size.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations, permutations

import torch
from torch import Tensor

from fedleak.attacks import Progress, Show
from fedleak.attacks import clock as timing
from fedleak.attacks.analytic.placed_words import PlacedWords
from fedleak.attacks.auto.joint_likelihood import Joint, State, above, table
from fedleak.attacks.auto.text_evidence import Explained, TextEvidence
from fedleak.attacks.clock import Clock
from fedleak.attacks.matching.batch_structure import Frame, frame
from fedleak.attacks.reconstruction import Ids
from fedleak.models import LanguageModel
from fedleak.models.prior import Prior
from fedleak.util.rng import stream

_TABLE = 20.0
"""Nats that the table, or the gradient at a place, gives a word, at most."""

_BEGUN, _OF_TABLE, _DRAWN, _CONTEXT = 16, 4, 0.3, 6
"""Texts that are begun; words that the table adds to those that it has at a place; the share of a
draw that all words have alike; words before it that the prior sees."""

_MOVED, _WIDE, _ANEW = 1, 2, 3
"""Kinds of changes: moves of words, more words, and a text that is sought anew."""

_WORDS, _MORE = {0: 6, _WIDE: 16}, {0: 3, _WIDE: 8}
"""Words that are tried in place of another, and between two words, at first and afterwards."""

_LONG = 0.1
"""Words of which more than noise is left that speak for changes as much as one word of a text."""

_TRIED, _MOVES = 3, 150
"""Changes that are tried of those at a place, by what they seem to explain; moves of words among
which these are sought."""


@dataclass
class TextSearch:
    """Seeks the texts of a batch.

    Attributes:
        model: At the broadcast weights.
        joint: Judges all texts together.
        evidence: Judges single texts.
        placed: Which word stands where, beside the texts that are taken.
        lengths: Of the texts, if they are known.
        prior: Of what stands behind a beginning; None: all words are alike.
        clock: The time that the search may take.
        table_seconds: The time that the last table took.
    """

    model: LanguageModel
    joint: Joint
    evidence: TextEvidence
    placed: PlacedWords
    lengths: Sequence[int] | None
    prior: Prior | None
    clock: Clock
    table_seconds: float = 0.0
    _beside: dict[int, Ids] | None = field(default=None, init=False)

    def run(self, on_progress: Show, others_read: Sequence[Ids] = ()) -> State:
        """Returns a text for each of the batch.

        Args:
            on_progress: Called with the progress.
            others_read: Texts that other attacks read, which are begun with, too.
        """
        taken = dict[int, Ids]()
        while len(taken) < len(self.joint.labels):
            if not taken or not self.clock.up(self.table_seconds):
                self.take(taken)
            number, ids = self._next(taken, others_read)
            taken[number] = ids
            self._show(on_progress, taken, number)
        state = tuple(taken[number] for number in range(len(taken)))
        return self._mended(state, on_progress)

    def _mended(self, state: State, on_progress: Show) -> State:
        """Returns a state after its texts were climbed beside each other."""
        kinds, known, best = [0] * len(state), {state}, state
        while min(kinds) <= _ANEW and not self.clock.up(self.table_seconds):
            if self.joint(state).accepted:
                return state
            doubts = self._doubts(state)
            open_texts = [i for i, kind in enumerate(kinds) if kind <= _ANEW]
            number = max(open_texts, key=lambda i: doubts[i] / (1 + kinds[i]))
            state = self._again(state, number, kinds[number])
            if state in known:
                kinds[number] += 1
            else:
                kinds = [0] * len(state)
            known.add(state)
            best = max(best, state, key=lambda texts: self.joint(texts).score)
            self._show(on_progress, dict(enumerate(state)), number)
        return best

    def _doubts(self, state: State) -> list[float]:
        """Returns how much speaks for changes of each text.

        Of the words that a right text has alone, noise is left. Long texts are seldom right.
        """
        left_VD, _ = self.joint.left(dict(enumerate(state)))
        clear, texts = above(left_VD), Counter(word for ids in state for word in {*ids})
        alone = [{word for word in ids if texts[word] == 1} for ids in state]
        return [
            len(clear & words) + _LONG * len(ids) for words, ids in zip(alone, state, strict=True)
        ]

    def likely(self, state: State, clock: Clock) -> list[bool]:
        """Returns which texts are likely to be in the batch.

        All texts together leave what noise leaves, and each change of such a text clearly more.
        """
        if not self.joint(state).accepted:
            return [False] * len(state)
        return [self._is_likely(state, number, clock) for number in range(len(state))]

    def _is_likely(self, state: State, number: int, clock: Clock) -> bool:
        if clock.up(self.table_seconds):
            return False
        ids, label = state[number], self.joint.labels[number]
        self.take({i: other for i, other in enumerate(state) if i != number})
        places, nexts_TV, visited = range(len(self.around.first), len(ids)), self._nexts(ids), 0
        for place in clock.paced(places):
            visited += 1
            near = self._at(ids, label, place, nexts_TV, 0)
            self.joint.gradients((other, label) for other in near)
            for other in near:
                changed = self.joint((*state[:number], other, *state[number + 1 :]))
                if not changed.rejects_beside(self.joint(state)):
                    return False
        return visited == len(places)

    def take(self, texts: dict[int, Ids]) -> None:
        """Takes texts out of the update, and makes the table of what stands beside them."""
        if texts == self._beside:
            return
        begun, self._beside = timing.now(), dict(texts)
        rows = self.evidence.beside(texts)
        self._word_VD = rows[0]
        # If noise hides what is left, the table before is all there is.
        self.placed = table(self.model, *rows) or self.placed
        gain_TV = self.placed.gain_VT.T.float().clamp_max(_TABLE).contiguous().cpu()
        gain_TV[:, self._marks] = 0
        self._gain_TV = gain_TV
        self.table_seconds = timing.now() - begun

    def _next(self, taken: Mapping[int, Ids], others_read: Sequence[Ids]) -> tuple[int, Ids]:
        """Returns the best text that is found beside others, and its number."""
        free = [i for i in range(len(self.joint.labels)) if i not in taken]
        rest = [ids for ids in others_read if ids not in taken.values()]
        begun = [*dict.fromkeys([*rest, *self._begun(free, f"text {len(taken)}")])]
        by_label = {self.joint.labels[i]: i for i in free}
        _, ids, number = max(
            (explained.nats / len(ids), ids, number)
            for label, number in by_label.items()
            for ids, explained in zip(begun, self.evidence.of(begun, label), strict=True)
        )
        return number, self._climbed(ids, self.joint.labels[number], 0)

    def _again(self, state: State, number: int, kind: int) -> State:
        """Returns a state after one text was sought beside the others, by a kind of changes."""
        label = self.joint.labels[number]
        self.take({i: ids for i, ids in enumerate(state) if i != number})
        if kind < _ANEW:
            ids = self._climbed(state[number], label, kind)
        else:
            taken = self._beside or {}
            anew = self._next(taken, ())[1]
            ids = self._best(state[number], label, [anew])
        return (*state[:number], ids, *state[number + 1 :])

    def _climbed(self, ids: Ids, label: int, kind: int) -> Ids:
        """Returns the best text that changes of a kind lead to."""
        before = None
        while ids != before and not self.clock.up():
            before, rng = ids, stream(len(ids), f"places {kind}")
            if kind == _MOVED:
                moved = self._moved(ids)
                drawn = torch.randperm(len(moved), generator=rng)[:_MOVES].tolist()
                ids = self._best(ids, label, [moved[i] for i in drawn])
                continue
            nexts_TV = self._nexts(ids)
            for place in self.clock.paced(torch.randperm(len(ids) + 2, generator=rng).tolist()):
                if len(self.around.first) <= place <= len(ids) - len(self.around.last):
                    ids = self._best(ids, label, self._at(ids, label, place, nexts_TV, kind))
        return ids

    def _best(self, ids: Ids, label: int, changed: Sequence[Ids]) -> Ids:
        """Returns the best of a text and the most promising of its changes."""
        texts = [ids, *self.evidence.promising(ids, label, changed, _TRIED)]
        nats = [explained.nats for explained in self.evidence.of(texts, label)]
        return texts[nats.index(max(nats))]

    def _explained(self, ids: Ids, label: int) -> Explained:
        (explained,) = self.evidence.of([ids], label)
        return explained

    def _at(self, ids: Ids, label: int, place: int, nexts_TV: Tensor, kind: int) -> list[Ids]:
        """Returns a text with other words at a place, with a word more or less, or ended there.

        Args:
            ids: The text.
            label: Its class.
            place: Before the marks of the end, or where these begin.
            nexts_TV: What the prior expects at each place.
            kind: Of changes.
        """
        first, end = len(self.around.first), len(ids) - len(self.around.last)
        if place >= len(self._gain_TV) or place > end:
            return []
        here = [word for word in self.placed.at(place) if word not in self._marks]
        expected_V = self._gain_TV[place] + nexts_TV[min(place, len(nexts_TV) - 1)]
        changed = []
        if place < end:
            row_D = self._explained(ids, label).place_TD[place] / len(self.joint.labels)
            # The match of a row with the gradient that a word at this place has.
            match_V = (self._word_VD @ row_D - 0.5 * row_D.square().sum()).cpu()
            match_V[ids[place]] += float(row_D.square().sum())
            words = self._most(expected_V + match_V.clamp(-_TABLE, _TABLE), _WORDS[kind])
            if kind == _WIDE:
                words += self._most(expected_V, _MORE[kind])
                words += self._most(self._gain_TV[place], _MORE[kind])
            changed += [(*ids[:place], word, *ids[place + 1 :]) for word in here + words]
        if self.lengths is None:
            if place < end and end - first > 1:
                changed.append((*ids[:place], *ids[place + 1 :]))
            if first < place < end - 1:
                changed.append((*ids[:place], *self.around.last))
            if len(ids) < len(self._gain_TV):
                words = here + self._most(expected_V, _MORE[kind])
                changed += [(*ids[:place], word, *ids[place:]) for word in words]
        return [other for other in dict.fromkeys(changed) if other != ids]

    def _most(self, score_V: Tensor, count: int) -> list[int]:
        """Returns the words of the highest scores, and no marks."""
        best_V = score_V.topk(min(count + len(self._marks), len(score_V))).indices
        return [word for word in best_V.tolist() if word not in self._marks][:count]

    def _moved(self, ids: Ids) -> list[Ids]:
        """Returns a text with two words exchanged, or with one in another place."""
        first, end = len(self.around.first), len(ids) - len(self.around.last)
        changed = []
        for place, other in combinations(range(first, end), 2):
            words = [*ids]
            words[place], words[other] = words[other], words[place]
            changed.append(tuple(words))
        for place, other in permutations(range(first, end), 2):
            rest = (*ids[:place], *ids[place + 1 :])
            changed.append((*rest[:other], ids[place], *rest[other:]))
        return [text for text in dict.fromkeys(changed) if text != ids]

    def _begun(self, free: Sequence[int], drawn: str) -> list[Ids]:
        """Returns texts of words of the table, the prior choosing among them.

        Args:
            free: Numbers of the texts that are not taken.
            drawn: Names the stream that words are drawn from.
        """
        first, last = self.around
        ends, count = self._ends(free), 1 if self.clock.up() else _BEGUN
        rng, texts = stream(0, drawn), [[*first] for _ in range(count)]
        for place in range(len(first), max(ends)):
            next_NV = self._behind([ids[-_CONTEXT:] for ids in texts])
            here = [word for word in self.placed.at(place) if word not in self._marks]
            best = self._gain_TV[place].topk(_OF_TABLE)
            here += best.indices[best.values > 0].tolist()
            for ids, next_V in zip(texts, next_NV, strict=True):
                words = [*dict.fromkeys(here)] or self._most(next_V, _OF_TABLE)
                share_W = torch.softmax(next_V[words], 0)
                share_W = (1 - _DRAWN) * share_W + _DRAWN / len(words)
                ids.append(words[int(torch.multinomial(share_W, 1, generator=rng))])
        return [(*ids[: ends[n % len(ends)]], *last) for n, ids in enumerate(texts)]

    def _behind(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """Returns the log probability [N, V] of what stands behind beginnings of one length."""
        size = (len(texts), self.model.vocabulary)
        if self.prior is None or not texts[0]:
            return torch.zeros(size)
        ids_NT = torch.tensor(texts, device=self.prior.device)
        return self.prior.next_token(ids_NT).cpu().expand(size)

    def _ends(self, free: Sequence[int]) -> list[int]:
        """Returns where the words of a text that is not taken may end, the nearest first."""
        first, last = len(self.around.first), self.around.last
        if self.lengths is not None:
            # Lengths come in an order of their own.
            lengths = sorted(self.lengths)
            for ids in (self._beside or {}).values():
                if len(ids) in lengths:
                    lengths.remove(len(ids))
            return [length - len(last) for length in lengths]
        places = [place for _, place in self.placed.variance]
        longest = min(max([*places, first]) + 1, len(self._gain_TV) - len(last))
        ends = {place for word, place in self.placed.variance if last and word == last[0]}
        if len(ends) < len(free):
            ends |= {longest, max(longest // 2, first + 1)}
        return sorted(end for end in ends if end > first) or [first + 1]

    def _nexts(self, ids: Ids) -> Tensor:
        """Returns the log probability of words at each place [T, V], as the prior expects them."""
        if self.prior is None:
            return torch.zeros(1, 1)
        next_TV = self.prior.next_tokens(torch.tensor([ids], device=self.prior.device))[0].cpu()
        return torch.cat([torch.zeros_like(next_TV[:1]), next_TV])

    def _show(self, on_progress: Show, taken: Mapping[int, Ids], number: int) -> None:
        nats = self._explained(taken[number], self.joint.labels[number]).nats
        text, size = self.model.decode(taken[number]), len(self.joint.labels)
        on_progress(Progress(len(taken), size, nats, text, "text by text"))

    @cached_property
    def around(self) -> Frame:
        """Marks that begin and end a text."""
        return frame(self.model)

    @cached_property
    def _marks(self) -> list[int]:
        return sorted(self.model.special_ids())
