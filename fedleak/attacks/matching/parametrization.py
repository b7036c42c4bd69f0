"""What gradient matching optimises, and how it turns into inputs of the model.

Several victims, shapes and starts are rows of one batch. A row is optimised either as free word
embeddings (DLG, TAG, LAMP), or, where the tokens of the batch are known, as a mixture of their
embeddings at every place. A mixture says where each embedding was looked up, so that the gradient
of the word embedding can be matched too. Free embeddings have no such gradient.

Shapes: R rows, K guesses for each, B sequences, T tokens, D hidden size, M tokens that a row
chooses from, N places of a row whose tokens are to be found, F variables of a place: D or M;
S chosen rows, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks.matching.batch_structure import Rows
from fedleak.models import CLASSIFICATION, LanguageModel


class Guess(NamedTuple):
    """Guessed batches, as inputs of the model.

    Attributes:
        x_RKBTD: Word embeddings.
        mixture_RKBTM: The share of each of a row's tokens in them; None for free embeddings.
        targets_RKBTV: For next-token training, the probability of each token at each place.
    """

    x_RKBTD: Tensor
    mixture_RKBTM: Tensor | None
    targets_RKBTV: Tensor | None

    def sequences(self, chosen: Sequence[int], length: int) -> "Guess":
        """Returns the first tokens, as many as `length`, of some of the sequences."""
        x_RKBTD, mixture_RKBTM, targets_RKBTV = (
            None if part is None else part[:, :, list(chosen), :length] for part in self
        )
        assert x_RKBTD is not None
        return Guess(x_RKBTD, mixture_RKBTM, targets_RKBTV)


def _drawn(rows: Rows, widths: Sequence[int], width: int, rng: Sequence[torch.Generator]) -> Tensor:
    """Returns normal random numbers [R, B, T, F], zeros beyond a row's own width and lengths.

    So the numbers of a row do not depend on its padding.
    """
    drawn_RBTF = torch.zeros(*rows.mask_RBT.shape, width)
    lengths = (rows.mask_RBT.sum(-1) * (rows.weights_RB > 0)).tolist()
    for r, (own, generator) in enumerate(zip(widths, rng, strict=True)):
        for b, length in enumerate(lengths[r]):
            drawn_RBTF[r, b, :length, :own] = torch.randn(length, own, generator=generator)
    return drawn_RBTF


def _targets(model: LanguageModel, ids_RKBT: Tensor, table_VD: Tensor) -> Tensor | None:
    """Returns probabilities [R, K, B, T, V] of tokens that are certain; None for a classifier."""
    if model.task == CLASSIFICATION:
        return None
    return F.one_hot(ids_RKBT, len(table_VD)).to(table_VD.dtype)


@dataclass(frozen=True, kw_only=True)
class FreeEmbeddings:
    """Any vectors: each is read as the token whose embedding has the largest cosine with it.

    Attributes:
        model: The model.
        table_VD: Its word embedding.
        allowed_M: Tokens that a vector may be read as.
        norm: Length of the random vectors to start from; None leaves them as they are drawn.
    """

    model: LanguageModel
    table_VD: Tensor
    allowed_M: Tensor
    norm: float | None

    def random(self, rows: Rows, rng: Sequence[torch.Generator]) -> Tensor:
        """Returns normally distributed vectors [R, B, T, D]."""
        width = self.table_VD.shape[1]
        return _drawn(rows, [width] * len(rng), width, rng).to(self.table_VD)

    def start(self, rows: Rows, rng: Sequence[torch.Generator]) -> Tensor:
        """Returns normally distributed vectors."""
        return self.random(rows, rng)

    def scaled(self, variables_RBTD: Tensor) -> Tensor:
        """Returns vectors of length `norm`."""
        if self.norm is None:
            return variables_RBTD
        return self.norm * F.normalize(variables_RBTD, dim=-1)

    def guess(self, rows: Rows, variables_RKBTF: Tensor) -> Guess:
        """Returns the vectors themselves, and the embeddings of tokens that are known."""
        fixed_R1BT = rows.fixed_RBT[:, None]
        known_R1BTD = self.table_VD[rows.ids_RBT][:, None]
        x_RKBTD = torch.where(fixed_R1BT[..., None], known_R1BTD, variables_RKBTF)
        if self.model.task == CLASSIFICATION:
            return Guess(x_RKBTD, None, None)
        ids_RKBT = self.nearest_tokens(rows, variables_RKBTF.detach())
        return Guess(x_RKBTD, None, _targets(self.model, ids_RKBT, self.table_VD))

    def nearest_tokens(self, rows: Rows, variables_RKBTF: Tensor) -> Tensor:
        """Returns the allowed tokens of the largest cosine."""
        table_MD = F.normalize(self.table_VD[self.allowed_M], dim=-1)
        # The length of a vector does not change which token is the nearest.
        nearest = (variables_RKBTF @ table_MD.T).argmax(-1)
        fixed_R1BT = rows.fixed_RBT[:, None]
        return torch.where(fixed_R1BT, rows.ids_RBT[:, None], self.allowed_M[nearest])

    def exact(self, rows: Rows, ids_RKBT: Tensor) -> Guess:
        """Returns the tokens' embeddings."""
        targets = _targets(self.model, ids_RKBT, self.table_VD)
        return Guess(self.table_VD[ids_RKBT], None, targets)

    def variables(self, ids_RBT: Tensor) -> Tensor:
        """Returns the tokens' embeddings."""
        return self.table_VD[ids_RBT]

    def take(self, chosen_S: Tensor) -> "FreeEmbeddings":
        """Returns itself: all rows have the same vocabulary."""
        return self


_TRUST = 10.0
"""The logit of a token that the hint is sure of."""

_SURE = 3.0
"""The logit, among zeros, of a token that a mixture begins with."""


@dataclass(frozen=True, kw_only=True)
class TokenMixtures:
    """Softmax mixtures of the embeddings of each row's own few tokens.

    Attributes:
        model: The model.
        table_VD: Its word embedding.
        ids_RM: The tokens of each row.
        there_RM: False where a row has fewer.
        hint_RTM: How much of a position's gradient comes from a token, where both gradients are
            known; else zero.
        complete: Every token of a row is in its batch.
    """

    model: LanguageModel
    table_VD: Tensor
    ids_RM: Tensor
    there_RM: Tensor
    hint_RTM: Tensor
    complete: bool = True

    def random(self, rows: Rows, rng: Sequence[torch.Generator]) -> Tensor:
        """Returns normally distributed logits [R, B, T, M]."""
        widths = self.there_RM.sum(1).tolist()
        return _drawn(rows, widths, self.ids_RM.shape[1], rng).to(self.table_VD)

    def start(self, rows: Rows, rng: Sequence[torch.Generator]) -> Tensor:
        """Returns random logits, raised where the hint places a token."""
        return self.random(rows, rng) + _TRUST * self.hint_RTM[:, None]

    def guess(self, rows: Rows, variables_RKBTF: Tensor) -> Guess:
        """Returns the mixed embeddings, and the embeddings of tokens that are known."""
        share_RKBTM = self._masked(variables_RKBTF).softmax(-1)
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

    def scaled(self, variables_RBTF: Tensor) -> Tensor:
        """Returns the logits as they are."""
        return variables_RBTF

    def nearest_tokens(self, rows: Rows, variables_RKBTF: Tensor) -> Tensor:
        """Returns the likeliest tokens: every token of a complete row is there at least once."""
        from scipy.optimize import linear_sum_assignment  # here, because it takes a while

        score_RKBTM = self._masked(variables_RKBTF).log_softmax(-1)
        ids_RKBT = rows.ids_RBT[:, None].repeat(1, variables_RKBTF.shape[1], 1, 1)
        for r, k in product(range(ids_RKBT.shape[0]), range(ids_RKBT.shape[1])):
            free_BT = ~rows.fixed_RBT[r]
            tokens_M = self.ids_RM[r, self.there_RM[r]]
            score_NM = score_RKBTM[r, k, free_BT][:, : len(tokens_M)]
            best_N = score_NM.argmax(-1)
            if self.complete:
                place, token = linear_sum_assignment(score_NM.cpu().numpy(), maximize=True)
                best_N[torch.from_numpy(place)] = torch.from_numpy(token).to(best_N.device)
            ids_RKBT[r, k, free_BT] = tokens_M[best_N]
        return ids_RKBT

    def exact(self, rows: Rows, ids_RKBT: Tensor) -> Guess:
        """Returns the tokens' embeddings, as mixtures of one."""
        same_RKBTM = ids_RKBT[..., None] == self.ids_RM[:, None, None, None]
        same_RKBTM = same_RKBTM & self.there_RM[:, None, None, None]
        share_RKBTM = (same_RKBTM & ~rows.fixed_RBT[:, None, :, :, None]).to(self.table_VD.dtype)
        targets = _targets(self.model, ids_RKBT, self.table_VD)
        return Guess(self.table_VD[ids_RKBT], share_RKBTM, targets)

    def variables(self, ids_RBT: Tensor) -> Tensor:
        """Returns logits in favour of these tokens."""
        same_RBTM = ids_RBT[..., None] == self.ids_RM[:, None, None]
        return _SURE * same_RBTM.to(self.table_VD.dtype) + _TRUST * self.hint_RTM[:, None]

    def take(self, chosen_S: Tensor) -> "TokenMixtures":
        """Returns the space of some of the rows."""
        return replace(
            self,
            ids_RM=self.ids_RM[chosen_S],
            there_RM=self.there_RM[chosen_S],
            hint_RTM=self.hint_RTM[chosen_S],
        )

    def _masked(self, variables_RKBTF: Tensor) -> Tensor:
        return variables_RKBTF.masked_fill(~self.there_RM[:, None, None, None], float("-inf"))


Space = FreeEmbeddings | TokenMixtures
"""What is optimised at each place: variables [R, B, T, F], and what they mean."""
