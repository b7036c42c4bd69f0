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

Only every so many rows of a weight are compared: noise is so small a part of a wrong word's trace
that a quarter of a million numbers show it.

Limits: one gradient of a classifier, of few texts, equally weighted (no clipping of each), no
dropout, Gaussian noise of one size.

Shapes: B texts, T places, D hidden size, V words, X numbers of all tensors that are compared.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks.analytic.placed_words import PlacedWords, placed_words
from fedleak.attacks.auto.evidence import gradients_of
from fedleak.attacks.matching.batch_structure import frame
from fedleak.attacks.matching.factored_gradients import BatchGradients
from fedleak.attacks.matching.gradient_distance import Gradient
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.pooled_span import SIGMAS
from fedleak.models import LanguageModel, pad
from fedleak.models.prior import Prior

State = tuple[Ids, ...]

MOST_TEXTS = 8
"""Texts of a batch, at most."""

_STANDS_OUT = 5.0
"""Standard deviations by which a row that was used is larger than noise."""

_DIRECTIONS, _OF_ROW = 100.0, 10.0
"""k: directions in which wrong words move a tensor, and a row of an embedding."""

_NUMBERS = 2**18
"""Numbers that are compared, about."""

_WHOLE = 16
"""Rows of a weight up to which all are compared."""

_LONGER = 3
"""Tokens by which a text may end behind the last place that stands out of the noise."""

_WORST = 5.0
"""Standard deviations by which one of a hundred parts may leave more than noise does."""

AT_ONCE = 32
"""Texts of a forward pass."""

_KEPT = 256
"""Texts whose gradients are kept."""

_LARGEST = 1e12
"""A number in units of the noise, at most."""


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
        worst: That of the part that leaves most.
    """

    score: float
    excess: float
    worst: float

    @property
    def accepted(self) -> bool:
        """Whether nothing but noise is left."""
        return self.excess < SIGMAS and self.worst < _WORST

    def rejects_beside(self, other: "Judgement") -> bool:
        """Whether clearly more is left than an accepted state leaves."""
        # Twice: what is left may be as far below what is expected as it may be above.
        far, far_of_part = (2 * SIGMAS + max(other.excess, 0.0)), 2 * _WORST
        return self.excess > far or self.worst > far_of_part


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
        self._word_square_V = self.word_VD.square().sum(1).double()
        self._clear = above(self.word_VD)
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
        parts = [
            *(
                (square - size, size, _DIRECTIONS)
                for square, size in zip(tensors, self._sizes, strict=True)
            ),
            *((square - width, width, _OF_ROW) for square in rows),
        ]
        left, numbers = (sum(values) for values in list(zip(*parts, strict=True))[:2])
        return Judgement(
            score=sum(_log_probability(*part) for part in parts),
            excess=left / math.sqrt(2 * numbers),
            worst=max(more / math.sqrt(2 * size) for more, size, _ in parts),
        )


def _log_probability(excess: float, numbers: int, directions: float) -> float:
    """Returns the log probability of a part that leaves so much more than noise does."""
    room = directions + SIGMAS * math.sqrt(2 * numbers)
    return -directions / 2 * math.log1p(max(excess, 0.0) / room)


def above(rows_RD: Tensor) -> set[int]:
    """Returns the rows that stand out of the noise, in whose units they are."""
    width = rows_RD.shape[1]
    far = width + _STANDS_OUT * math.sqrt(2 * width)
    return {*(rows_RD.square().sum(1) > far).nonzero()[:, 0].tolist()}


def table(model: LanguageModel, word_VD: Tensor, place_PD: Tensor) -> PlacedWords | None:
    """Returns which word stands where; None if noise hides all places.

    Args:
        model: Has marks that begin and end a text.
        word_VD: Rows of words, in units of the noise.
        place_PD: Rows of places, likewise.
    """
    around, used = frame(model), above(place_PD)
    first = len(around.first)
    if max(used, default=-1) < first:
        return None
    places = min(max(used) + 1 + _LONGER, len(place_PD))
    # The first mark of the end shows where a text ends.
    never = model.special_ids() - {*around.last[:1]}
    placed = placed_words(word_VD, place_PD[first:places], never)
    moved = {(word, place + first): value for (word, place), value in placed.variance.items()}
    return PlacedWords(moved, F.pad(placed.gain_VT, (first, 0)))


def prior_nats(prior: Prior, model: LanguageModel, texts: Sequence[Ids]) -> list[float]:
    """Returns the negative log probability of texts, in nats."""
    ids_NT, mask_NT = pad(texts, model.tokenizer.pad_token_id, prior.device)
    nll_N = prior.nll(ids_NT, mask_NT).cpu() * (mask_NT.sum(1).cpu() - 1)
    return nll_N.tolist()
