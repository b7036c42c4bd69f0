"""Texts of an encoder after Adam: signs of word and position rows show which words stand where.

Adam's first step makes of each large number of a gradient little more than its sign. With d_i as in
`position_marginals`, the row of a word is the sum of d_i over its places, and the row of a position
the sum over the tokens there. Two sums that share a term have the same sign more often than not:
signs of Gaussian numbers of correlation r correlate by 2 asin(r) / pi (the arcsine law, Van Vleck
and Middleton 1966). Ridge regression takes out what words have in common, and what is left is a
table of places and words, with dropout, too.

**One text** has the best word of the table at each place. A word that occurs once has exactly the
signs of its place there, and no other word has. **Several texts** begin as such words
whose rows are similar. Which of them belong together, and where a text ends, is then climbed:
single changes are kept that make the signs of the batch's own gradient more like those of the
update, with as much of the table, and with no word of the update missing. That alone proves
nothing; `replay` may.

Shapes: B texts, M words that were used, T places, D hidden size, X numbers that are compared.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Ids
from fedleak.models import CLASSIFICATION, LanguageModel, batch_loss, pad
from fedleak.training.observation import Observation
from fedleak.training.steps import Batch

_RIDGE = 0.1
"""Added to the correlations of words with themselves, which are 1."""

_TRIED = 4
"""Words that are tried at each place, beside one for each text."""

SAME = 0.99
"""Cosine from which on signs are the same, so that there is nothing to climb for."""

_KEPT = 64
"""Gradients of texts that are kept: a change leaves most texts as they are."""


class SignTable(NamedTuple):
    """Which words stand at which place.

    Attributes:
        words_M: The words.
        unit_MD: The signs of their rows, of length 1.
        cosine_TM: Of the signs of each place's row and of each word's.
        score_TM: How much speaks for each word at each place.
    """

    words_M: Tensor
    unit_MD: Tensor
    cosine_TM: Tensor
    score_TM: Tensor

    @classmethod
    def of(cls, word_VD: Tensor, position_PD: Tensor) -> "SignTable | str":
        """Returns the table of an update; or why there is none.

        Args:
            word_VD: What the word embedding changed by.
            position_PD: What the position embedding changed by.
        """
        words_M = word_VD.any(1).nonzero()[:, 0]
        used = position_PD.any(1).nonzero()[:, 0].tolist()
        if not used or not len(words_M):
            return "an embedding did not change: that table was frozen"
        if len(words_M) > word_VD.shape[1]:
            return f"rows of {len(words_M)} words changed, more than signs tell apart"
        unit_MD = F.normalize(word_VD[words_M].sign().float())
        unit_TD = F.normalize(position_PD[used[0] : used[-1] + 1].sign().float())
        alike_MM = unit_MD @ unit_MD.T + _RIDGE * torch.eye(len(words_M), device=unit_MD.device)
        cosine_TM = unit_TD @ unit_MD.T
        return cls(words_M, unit_MD, cosine_TM, torch.linalg.solve(alike_MM, cosine_TM.T).T)

    def text(self) -> tuple[Ids, float]:
        """Returns the text of an update of one, and the share of places with their word's signs."""
        best_T1 = self.score_TM.argmax(1, keepdim=True)
        same_T1 = self.cosine_TM.gather(1, best_T1) >= SAME
        return tuple(self.words_M[best_T1[:, 0]].tolist()), float(same_T1.float().mean())

    def begun(self, texts: int, end: int) -> list[Ids]:
        """Returns texts of words that have similar rows, as many as stand at each place.

        Args:
            texts: How many.
            end: The token that ends each text.
        """
        from scipy.optimize import linear_sum_assignment  # here, because it takes a while

        ending, last = int((self.words_M == end).nonzero()[0]), len(self.score_TM) - 1
        groups = [[int(self.score_TM[0].argmax())] for _ in range(texts)]
        sum_BD = self.unit_MD.new_zeros(texts, self.unit_MD.shape[1])
        for place in range(1, last + 1):
            going_on = [number for number, group in enumerate(groups) if group[-1] != ending]
            score_M = self.score_TM[place].clone()
            if place < last and len(going_on) == 1:
                score_M[ending] = -1.0  # a text is as long as there are places
            here = score_M.topk(min(len(going_on), len(score_M))).indices
            similar_BX = F.normalize(sum_BD[going_on]) @ self.unit_MD[here].T
            pairs = zip(*linear_sum_assignment(similar_BX.cpu(), maximize=True), strict=True)
            for row, column in pairs:
                number, word = going_on[row], ending if place == last else int(here[column])
                groups[number].append(word)
                sum_BD[number] += self.unit_MD[word]
        return [tuple(self.words_M[group].tolist()) for group in groups]

    def likeliest(self, place: int, count: int) -> list[int]:
        """Returns the words that most speaks for at a place."""
        rows = self.score_TM[place].topk(min(count, len(self.words_M))).indices
        return self.words_M[rows].tolist()

    def agreement(self, texts: Sequence[Ids]) -> float:
        """Returns the share of the table that texts have, less the share of words they lack."""
        rows = {token: row for row, token in enumerate(self.words_M.tolist())}
        cells = {(place, rows[token]) for ids in texts for place, token in enumerate(ids)}
        share = sum(float(self.score_TM[cell]) for cell in cells) / self.score_TM.relu().sum()
        return float(share) - 1 + len({row for _, row in cells}) / len(rows)


class Climb:
    """The search for the batch whose own gradient has the signs of an update."""

    def __init__(self, model: LanguageModel, seen: Observation, table: SignTable, end: int) -> None:
        """Takes the table of an update, and the token that ends each text."""
        sent = seen.update.tensors
        names = [
            name
            for layer in range(model.num_layers)
            for name in model.family.attention_parameters(layer)
            if name in sent
        ]
        self._model, self._table, self._end = model, table, end
        parameters = [model.module.get_parameter(name) for name in names]
        self._gradient = lru_cache(_KEPT)(partial(_gradient, model, parameters))
        signs = [-sent[name].sign().float().flatten() for name in names]
        self._sent_X = torch.cat(signs) if signs else None

    def best(self, texts: Sequence[Ids], clock: Clock, rng: torch.Generator) -> tuple[Batch, float]:
        """Returns the best batch that single changes lead to, and the cosine of its signs."""
        batch, better = Batch(texts, [0] * len(texts)), True
        alike = self._alike(batch)
        score = alike + self._table.agreement(texts)
        while better and alike < SAME and self._sent_X is not None:
            better = False
            changes = list(self._changes(batch))
            for i in torch.randperm(len(changes), generator=rng).tolist():
                if clock.up():
                    break
                agreement = self._table.agreement(changes[i].sequences)
                if agreement + 1 <= score:  # whatever its gradient is
                    continue
                now = self._alike(changes[i])
                if now + agreement > score:
                    batch, alike, score, better = changes[i], now, now + agreement, True
                    break
        return batch, alike

    def _changes(self, batch: Batch) -> Iterator[Batch]:
        """Yields batches with another class or word, one word less, or parts of texts exchanged."""
        texts, labels = [*batch.sequences], [*batch.labels]
        longest = max(map(len, texts))
        classes = self._model.num_labels if self._model.task == CLASSIFICATION else 1
        for number, ids in enumerate(texts):
            before, behind = texts[:number], texts[number + 1 :]
            for label in {*range(classes)} - {labels[number]}:
                yield Batch(texts, [*labels[:number], label, *labels[number + 1 :]])
            for place in range(1, len(ids)):
                for changed in self._changed(tuple(ids), place, len(texts)):
                    yield Batch([*before, changed, *behind], labels)
            for other in range(number):
                for place in range(1, min(len(ids), len(texts[other]))):
                    for until in (place + 1, longest):
                        yield Batch(_exchanged(texts, number, other, place, until), labels)

    def _changed(self, ids: Ids, place: int, texts: int) -> Iterator[Ids]:
        """Yields a text with another word at a place, ended there, longer, or without the word."""
        before, behind = ids[:place], ids[place + 1 :]
        for word in {*self._table.likeliest(place, texts + _TRIED)} - {ids[place]}:
            if word == self._end:
                yield (*before, word)
            elif behind:
                yield (*before, word, *behind)
            elif place + 1 < len(self._table.score_TM):
                yield (*before, word, self._end)
        if behind:
            yield before + behind

    def _alike(self, batch: Batch) -> float:
        """Returns the cosine of the signs of a batch's gradient and of the update."""
        if self._sent_X is None:
            return 0.0
        gradient_X = torch.zeros_like(self._sent_X)
        for ids, label in zip(*batch, strict=True):
            gradient_X += self._gradient(tuple(ids), label)
        return float(F.cosine_similarity(gradient_X.sign(), self._sent_X, dim=0))


def _gradient(model: LanguageModel, parameters: Sequence[Tensor], ids: Ids, label: int) -> Tensor:
    """Returns the gradient [X] of a text."""
    ids_BT, mask_BT = pad([ids], model.tokenizer.pad_token_id, model.device)
    labels_B = torch.tensor([label], device=model.device)
    with torch.enable_grad():
        loss = batch_loss(model, ids_BT, mask_BT, labels_B)
        parts = torch.autograd.grad(loss, parameters)
    return torch.cat([part.flatten() for part in parts])


def _exchanged(
    texts: Sequence[Sequence[int]], number: int, other: int, place: int, until: int
) -> list[Sequence[int]]:
    """Returns texts of which two exchange what stands from one place until another."""
    changed, here, there = [*texts], texts[number], texts[other]
    changed[number] = (*here[:place], *there[place:until], *here[until:])
    changed[other] = (*there[:place], *here[place:until], *there[until:])
    return changed
