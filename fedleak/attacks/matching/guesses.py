"""Guesses of batches: what is optimised, how it turns into model inputs, and how far it is off.

Several victims, shapes and starts are rows of one batch. A row is optimised either as free word
embeddings (DLG, TAG, LAMP), or, where the tokens of the batch are known, as a mixture of their
embeddings at every place. A mixture says where each embedding was looked up, so that the gradient
of the word embedding can be matched too, which free embeddings cannot (they have none).

Shapes: R rows, K guesses for each, B sequences, T tokens, D hidden size, M tokens of a vocabulary,
F numbers that are optimised at a place: D or M; V vocabulary.
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks.matching.batch_structure import Frame, Shape
from fedleak.attacks.matching.factored_gradients import (
    BatchGradients,
    classes_pull,
    next_token_pull,
)
from fedleak.attacks.matching.gradient_distance import Distance, Gradients, Target, added
from fedleak.models import CLASSIFICATION, LanguageModel

_TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 65536}
"""Tokens that are scored in one pass: what fits a cache, or keeps a GPU busy."""


@dataclass(frozen=True)
class Rows:
    """What is fixed in each row.

    Attributes:
        mask_RBT: 1 on the tokens of a sequence.
        fixed_RBT: Where the token is known: special tokens and padding.
        ids_RBT: The tokens there; 0 elsewhere.
        labels_RB: Classes.
        weights_RB: What each sequence counts in the loss; 0 for one that fills up a smaller batch.
    """

    mask_RBT: Tensor
    fixed_RBT: Tensor
    ids_RBT: Tensor
    labels_RB: Tensor
    weights_RB: Tensor

    def take(self, chosen_S: Tensor) -> "Rows":
        """Returns some of the rows."""
        return Rows(*(value[chosen_S] for value in vars(self).values()))

    @property
    def length(self) -> int:
        """T: tokens of the longest sequence, or more."""
        return self.mask_RBT.shape[2]

    def sequences_of(self, chosen: Sequence[int]) -> "Rows":
        """Returns only some sequences of each row, as long as the longest of them."""
        mask_RST = self.mask_RBT[:, list(chosen)]
        length = int(mask_RST.sum(-1).max())
        of_each = (value[:, list(chosen)] for value in vars(self).values())
        return Rows(*(value[..., :length] if value.dim() == 3 else value for value in of_each))

    def content(self, r: int, b: int) -> list[int]:
        """Returns the places of row r, sequence b whose tokens are to be found."""
        places: list[int] = (~self.fixed_RBT[r, b]).nonzero()[:, 0].tolist()
        return places

    def sequences(self, r: int, ids_BT: Tensor) -> list[tuple[int, ...]]:
        """Returns the token ids of row r without padding."""
        lengths = (self.mask_RBT[r].sum(-1) * (self.weights_RB[r] > 0)).tolist()
        return [tuple(ids_T[:n].tolist()) for ids_T, n in zip(ids_BT, lengths, strict=True) if n]


def rows_of(shapes: Sequence[Shape], around: Frame, model: LanguageModel) -> Rows:
    """Returns a row per shape."""
    rows, batch = len(shapes), max(len(shape.lengths) for shape in shapes)
    longest = max(max(shape.lengths) for shape in shapes)
    ids_RBT = torch.zeros(rows, batch, longest, dtype=torch.long)
    mask_RBT, fixed_RBT = torch.zeros_like(ids_RBT), torch.ones_like(ids_RBT, dtype=torch.bool)
    labels_RB = torch.zeros(rows, batch, dtype=torch.long)
    weights_RB = torch.zeros(rows, batch)
    mask_RBT[:, :, 0] = 1  # attention needs something to look at, also where there is no sequence
    for r, shape in enumerate(shapes):
        for b, length in enumerate(shape.lengths):
            first, last = len(around.first), length - len(around.last)
            mask_RBT[r, b, :length] = 1
            fixed_RBT[r, b, first:last] = False
            ids_RBT[r, b, :first] = torch.tensor(around.first, dtype=torch.long)
            ids_RBT[r, b, last:length] = torch.tensor(around.last, dtype=torch.long)
            ids_RBT[r, b, length:] = model.tokenizer.pad_token_id
            weights_RB[r, b] = _weight(shape, model)
            if shape.labels:
                labels_RB[r, b] = shape.labels[b]
    parts = (mask_RBT, fixed_RBT, ids_RBT, labels_RB, weights_RB)
    return Rows(*(part.to(model.device) for part in parts))


def _weight(shape: Shape, model: LanguageModel) -> float:
    """Returns what one example, or one target, counts in the mean loss."""
    if model.task == CLASSIFICATION:
        return 1 / len(shape.lengths)
    return 1 / max(sum(length - 1 for length in shape.lengths), 1)


class Guess(NamedTuple):
    """Inputs of the model.

    Attributes:
        x_RKBTD: Word embeddings.
        mixture_RKBTM: The share of each token of the rows' vocabularies in them; None if free.
        targets_RKBTV: For next-token training, the probability of each token at each place.
    """

    x_RKBTD: Tensor
    mixture_RKBTM: Tensor | None
    targets_RKBTV: Tensor | None

    def sequences(self, chosen: Sequence[int], length: int) -> "Guess":
        """Returns only so many tokens of some of the sequences."""
        x_RKBTD, mixture_RKBTM, targets_RKBTV = (
            None if part is None else part[:, :, list(chosen), :length] for part in self
        )
        assert x_RKBTD is not None
        return Guess(x_RKBTD, mixture_RKBTM, targets_RKBTV)


class Space(Protocol):
    """What is optimised at each place, and what it means."""

    @property
    def table_VD(self) -> Tensor:  # noqa: N802
        """The word embeddings."""
        ...

    def random(self, rows: Rows, rng: Sequence[torch.Generator]) -> Tensor:
        """Returns random numbers [R, B, T, F], which do not depend on other rows."""
        ...

    def start(self, rows: Rows, rng: Sequence[torch.Generator]) -> Tensor:
        """Returns a random start [R, B, T, F]."""
        ...

    def scaled(self, leaf_RBTF: Tensor) -> Tensor:
        """Returns a start as it is when the descent begins."""
        ...

    def guess(self, rows: Rows, leaf_RKBTF: Tensor) -> Guess:
        """Returns the inputs, differentiable in the leaf."""
        ...

    def read(self, rows: Rows, leaf_RKBTF: Tensor) -> Tensor:
        """Returns the nearest tokens [R, K, B, T]."""
        ...

    def exact(self, rows: Rows, ids_RKBT: Tensor) -> Guess:
        """Returns the inputs of token ids."""
        ...

    def leaf(self, rows: Rows, ids_RBT: Tensor) -> Tensor:
        """Returns what to optimise on from, [R, B, T, F], if it is to begin with these tokens."""
        ...

    def take(self, chosen_S: Tensor) -> "Space":
        """Returns the space of some of the rows."""
        ...


def _drawn(rows: Rows, widths: Sequence[int], width: int, rng: Sequence[torch.Generator]) -> Tensor:
    """Returns normal random numbers [R, B, T, width], zeros beyond a row's own width and lengths.

    So what is drawn for a row does not depend on what it is padded to.
    """
    drawn_RBTF = torch.zeros(*rows.mask_RBT.shape, width)
    lengths = (rows.mask_RBT.sum(-1) * (rows.weights_RB > 0)).tolist()
    for r, (own, one) in enumerate(zip(widths, rng, strict=True)):
        for b, length in enumerate(lengths[r]):
            drawn_RBTF[r, b, :length, :own] = torch.randn(length, own, generator=one)
    return drawn_RBTF


def _one_hot(ids_RKBT: Tensor, table_VD: Tensor) -> Tensor:
    """Returns the probabilities [R, K, B, T, V] of tokens that are certain."""
    return F.one_hot(ids_RKBT, len(table_VD)).to(table_VD.dtype)


@dataclass(frozen=True)
class FreeEmbeddings:
    """Any vectors; tokens are those of the largest cosine.

    Attributes:
        model: Its word embedding is the table.
        table_VD: That table.
        allowed_V: Tokens that may stand for a vector.
        norm: Length of the random vectors to start from; None leaves them as they are drawn.
    """

    model: LanguageModel
    table_VD: Tensor
    allowed_V: Tensor
    norm: float | None

    def random(self, rows: Rows, rng: Sequence[torch.Generator]) -> Tensor:
        """Returns normally distributed vectors [R, B, T, D]."""
        width = self.table_VD.shape[1]
        return _drawn(rows, [width] * len(rng), width, rng).to(self.table_VD)

    def start(self, rows: Rows, rng: Sequence[torch.Generator]) -> Tensor:
        """Returns those vectors."""
        return self.random(rows, rng)

    def scaled(self, leaf_RBTD: Tensor) -> Tensor:
        """Returns vectors of the length to start from."""
        return leaf_RBTD if self.norm is None else self.norm * F.normalize(leaf_RBTD, dim=-1)

    def guess(self, rows: Rows, leaf_RKBTF: Tensor) -> Guess:
        """Returns the vectors themselves, and known tokens where they are known."""
        fixed_R1BT = rows.fixed_RBT[:, None]
        known_R1BTD = self.table_VD[rows.ids_RBT][:, None]
        x_RKBTD = torch.where(fixed_R1BT[..., None], known_R1BTD, leaf_RKBTF)
        if self.model.task == CLASSIFICATION:
            return Guess(x_RKBTD, None, None)
        ids_RKBT = self.read(rows, leaf_RKBTF.detach())
        return Guess(x_RKBTD, None, _one_hot(ids_RKBT, self.table_VD))

    def read(self, rows: Rows, leaf_RKBTF: Tensor) -> Tensor:
        """Returns the allowed tokens of the largest cosine."""
        table_MD = F.normalize(self.table_VD[self.allowed_V], dim=-1)
        # The length of a vector does not change which token is the nearest.
        nearest = (leaf_RKBTF @ table_MD.T).argmax(-1)
        fixed_R1BT = rows.fixed_RBT[:, None]
        return torch.where(fixed_R1BT, rows.ids_RBT[:, None], self.allowed_V[nearest])

    def exact(self, rows: Rows, ids_RKBT: Tensor) -> Guess:
        """Returns the tokens' embeddings."""
        classifies = self.model.task == CLASSIFICATION
        targets = None if classifies else _one_hot(ids_RKBT, self.table_VD)
        return Guess(self.table_VD[ids_RKBT], None, targets)

    def leaf(self, rows: Rows, ids_RBT: Tensor) -> Tensor:
        """Returns the tokens' embeddings."""
        return self.table_VD[ids_RBT]

    def take(self, chosen_S: Tensor) -> "FreeEmbeddings":
        """Returns itself: the vocabulary is that of all rows."""
        return self


_TRUST = 10.0
"""The logit of a token whose gradient is that of the position."""

_SURE = 3.0
"""The logit, among zeros, of a token that a mixture begins with."""


@dataclass(frozen=True)
class Mixtures:
    """Softmax mixtures of the embeddings of each row's own few tokens.

    Attributes:
        model: Its word embedding is the table.
        table_VD: That table.
        ids_RM: The tokens of each row.
        there_RM: False where a row has fewer.
        hint_RTM: How much of a position's gradient is that of a token, where both are known: the
            gradient at a place is a part of both. Else zero.
    """

    model: LanguageModel
    table_VD: Tensor
    ids_RM: Tensor
    there_RM: Tensor
    hint_RTM: Tensor

    def random(self, rows: Rows, rng: Sequence[torch.Generator]) -> Tensor:
        """Returns normally distributed logits [R, B, T, M]."""
        widths = self.there_RM.sum(1).tolist()
        return _drawn(rows, widths, self.ids_RM.shape[1], rng).to(self.table_VD)

    def start(self, rows: Rows, rng: Sequence[torch.Generator]) -> Tensor:
        """Returns logits of mixtures that follow the hint."""
        return self.random(rows, rng) + _TRUST * self.hint_RTM[:, None]

    def guess(self, rows: Rows, leaf_RKBTF: Tensor) -> Guess:
        """Returns the mixed embeddings, and known tokens where they are known."""
        share_RKBTM = self._masked(leaf_RKBTF).softmax(-1)
        share_RKBTM = share_RKBTM * ~rows.fixed_RBT[:, None, :, :, None]
        known_R1BTD = self.table_VD[rows.ids_RBT][:, None] * rows.fixed_RBT[:, None, :, :, None]
        x_RKBTD = torch.einsum("rkbtm,rmd->rkbtd", share_RKBTM, self.table_VD[self.ids_RM])
        targets = None
        if self.model.task != CLASSIFICATION:
            known = F.one_hot(rows.ids_RBT, len(self.table_VD)) * rows.fixed_RBT[..., None]
            empty = known[:, None].to(share_RKBTM.dtype).expand(*share_RKBTM.shape[:-1], -1)
            index = self.ids_RM[:, None, None, None].expand(share_RKBTM.shape)
            targets = empty.scatter_add(-1, index, share_RKBTM)
        return Guess(x_RKBTD + known_R1BTD, share_RKBTM, targets)

    def scaled(self, leaf_RBTF: Tensor) -> Tensor:
        """Returns it as it is."""
        return leaf_RBTF

    def read(self, rows: Rows, leaf_RKBTF: Tensor) -> Tensor:
        """Returns the likeliest tokens of which each of the bag is at least once there."""
        from scipy.optimize import linear_sum_assignment  # here, because it takes a while

        score_RKBTM = self._masked(leaf_RKBTF).log_softmax(-1)
        ids_RKBT = rows.ids_RBT[:, None].repeat(1, leaf_RKBTF.shape[1], 1, 1)
        for r, k in product(range(ids_RKBT.shape[0]), range(ids_RKBT.shape[1])):
            free_BT = ~rows.fixed_RBT[r]
            tokens_M = self.ids_RM[r, self.there_RM[r]]
            score_NM = score_RKBTM[r, k, free_BT][:, : len(tokens_M)]
            best_N = score_NM.argmax(-1)
            # Every token of the bag is somewhere.
            place, token = linear_sum_assignment(score_NM.cpu().numpy(), maximize=True)
            best_N[torch.from_numpy(place)] = torch.from_numpy(token).to(best_N.device)
            ids_RKBT[r, k, free_BT] = tokens_M[best_N]
        return ids_RKBT

    def exact(self, rows: Rows, ids_RKBT: Tensor) -> Guess:
        """Returns the tokens' embeddings, as mixtures of one."""
        same_RKBTM = ids_RKBT[..., None] == self.ids_RM[:, None, None, None]
        same_RKBTM = same_RKBTM & self.there_RM[:, None, None, None]
        share_RKBTM = (same_RKBTM & ~rows.fixed_RBT[:, None, :, :, None]).to(self.table_VD.dtype)
        targets = None
        if self.model.task != CLASSIFICATION:
            targets = _one_hot(ids_RKBT, self.table_VD)
        return Guess(self.table_VD[ids_RKBT], share_RKBTM, targets)

    def leaf(self, rows: Rows, ids_RBT: Tensor) -> Tensor:
        """Returns logits in favour of the tokens."""
        same_RBTM = ids_RBT[..., None] == self.ids_RM[:, None, None]
        return _SURE * same_RBTM.to(self.table_VD.dtype) + _TRUST * self.hint_RTM[:, None]

    def take(self, chosen_S: Tensor) -> "Mixtures":
        """Returns the space of some of the rows."""
        return replace(
            self,
            ids_RM=self.ids_RM[chosen_S],
            there_RM=self.there_RM[chosen_S],
            hint_RTM=self.hint_RTM[chosen_S],
        )

    def _masked(self, leaf_RKBTF: Tensor) -> Tensor:
        return leaf_RKBTF.masked_fill(~self.there_RM[:, None, None, None], float("-inf"))


@dataclass(frozen=True)
class Objective:
    """How far the gradients of guesses are from those observed, for each row.

    Attributes:
        model: At the broadcast weights, maybe in lower precision.
        batch_gradients: Of that model, ready.
        distance: Of gradients.
        target: Of each row.
        rows: What is known of each row.
        space: What each row's guesses are.
        victim_R: Which victim a row is about.
        unit_R: What distances are counted in.
        rough: The same in lower precision, to rank guesses and to start the descent with.
    """

    model: LanguageModel
    batch_gradients: BatchGradients
    distance: Distance
    target: Target
    rows: Rows
    space: Space
    victim_R: Tensor
    unit_R: Tensor
    rough: "Objective | None" = None

    def take(self, chosen_S: Tensor) -> "Objective":
        """Returns the objective of some of the rows."""
        return replace(
            self,
            target=self.target.rows(chosen_S),
            rows=self.rows.take(chosen_S),
            space=self.space.take(chosen_S),
            victim_R=self.victim_R[chosen_S],
            unit_R=self.unit_R[chosen_S],
            rough=None if self.rough is None else self.rough.take(chosen_S),
        )

    def loss(self, leaf_RBTF: Tensor) -> Tensor:
        """Returns the distances [R], differentiable."""
        guess = self.space.guess(self.rows, leaf_RBTF[:, None])
        gradients = self._gradients(guess, self.rows, differentiable=True)
        return self._distance(gradients)[:, 0]

    def read(self, leaf_RBTF: Tensor) -> Tensor:
        """Returns the nearest tokens [R, B, T]."""
        return self.space.read(self.rows, leaf_RBTF[:, None])[:, 0]

    def norm_gap(self, leaf_RBTF: Tensor) -> Tensor:
        """Returns the squared difference [R] of the mean norm to the table's (LAMP, equation 4)."""
        x_RBTD = self.space.guess(self.rows, leaf_RBTF[:, None]).x_RKBTD[:, 0]
        there_RBT = self.rows.mask_RBT * (self.rows.weights_RB > 0)[..., None]
        mean_R = (x_RBTD.norm(dim=-1) * there_RBT).sum((1, 2)) / there_RBT.sum((1, 2))
        gap_R: Tensor = (mean_R - self._norm).square()
        return gap_R

    @cached_property
    def _norm(self) -> Tensor:
        return mean_norm(self.space.table_VD)

    def scores(self, guess: Guess) -> Tensor:
        """Returns the distances [R, K] of whole batches."""
        with torch.no_grad():
            gradients = self._gradients(guess, self.rows, differentiable=False)
            return self._distance(gradients)

    def other_sequences(self, guess: Guess, b: int) -> Gradients | None:
        """Returns what all sequences but b give to the gradients; None if there are no others.

        Sequences of a batch do not interact, so this is computed once for all guesses of b.
        """
        others = [i for i in range(guess.x_RKBTD.shape[2]) if i != b]
        if not others:
            return None
        rows = self.rows.sequences_of(others)
        with torch.no_grad():
            return self._gradients(guess.sequences(others, rows.length), rows, differentiable=False)

    def scores_of_sequence(self, guess: Guess, b: int, others: Gradients | None) -> Tensor:
        """Returns the distances [R, K] of batches with these guesses of sequence b."""
        rows = self.rows.sequences_of([b])
        with torch.no_grad():
            gradients = self._gradients(guess, rows, differentiable=False)
            whole = gradients if others is None else added(others, gradients)
            return self._distance(whole)

    def chunks(self, guesses: int, sequences: int) -> Iterator[slice]:
        """Yields as many of the guesses of every row as are scored at once."""
        tokens = len(self.rows.mask_RBT) * sequences * self.rows.length
        at_once = _TOKENS_AT_ONCE.get(self.model.device.type, _TOKENS_AT_ONCE["cpu"])
        size = max(1, at_once // tokens)
        for start in range(0, guesses, size):
            yield slice(start, min(start + size, guesses))

    def _distance(self, gradients: Gradients) -> Tensor:
        return self.distance(gradients, self.target) / self.unit_R[:, None]

    def _gradients(self, guess: Guess, rows: Rows, *, differentiable: bool) -> Gradients:
        dtype = next(self.model.module.parameters()).dtype
        guesses = guess.x_RKBTD.shape[1]
        if guess.targets_RKBTV is None:
            labels_N = rows.labels_RB[:, None].expand(-1, guesses, -1).flatten()
            weights_N = rows.weights_RB[:, None].expand(-1, guesses, -1).flatten()
            pull = classes_pull(self.model, labels_N, weights_N.to(dtype))
        else:
            # A first token is no target, and neither is padding.
            counts_RBT = rows.mask_RBT * rows.weights_RB[..., None]
            weights_NT = counts_RBT[:, None].expand(-1, guesses, -1, -1).flatten(0, 2)
            pull = next_token_pull(
                guess.targets_RKBTV.flatten(0, 2).to(dtype), weights_NT.to(dtype)
            )
        return self.batch_gradients(
            guess.x_RKBTD.to(dtype),
            rows.mask_RBT,
            pull,
            differentiable=differentiable,
            mixture_RKBTM=guess.mixture_RKBTM,
        )


def mean_norm(table_VD: Tensor) -> Tensor:
    """Returns the mean norm of word embeddings."""
    mean: Tensor = table_VD.norm(dim=-1).mean()
    return mean


def lower_precision(model: LanguageModel) -> LanguageModel:
    """Returns a copy in bfloat16."""
    return replace(model, module=copy.deepcopy(model.module).to(torch.bfloat16))
