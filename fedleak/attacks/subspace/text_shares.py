"""Whether a text was in a batch, told by its tokens' shares in the rows of the first layer.

The share of a token is the sum of the gradients at the adapters' outputs in all of its places. The
gradient of a closed text by itself gives its tokens' shares, all times one factor that the batch
and clipping make. A token that stands in no other text has nothing else.

- **Nats.** For each token speak the nats by which its shares are likelier as those of the text than
  as any of their size. Their errors have a known variance, of noise in the rows and a small part of
  the shares themselves; dropout leaves some hundredths, half precision some thousandths.
- **Near texts.** One wrong word changes the gradients at all others, the more the nearer they
  stand. So an error may be larger than is known, and its size is then estimated for each token by
  itself: with an error of e^2 times the known variance a token has O/2 (1 + log e^2) nats less, in
  place of O/2 e^2. So nats tell which of two wrong texts is nearer, and where it is wrong.
- **Read.** Only a token whose error is within what is known agrees. A text of which enough agree
  was in the batch, the one with the most nats first, and its shares are taken out of all.

Shapes: N tokens of the batch, O rows of adapters, K tokens of a text, F factors.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.sparse_bayes import Bag

_ERROR = 0.03
"""Error of shares beside the noise of rows, as a part of them: half precision leaves as much."""

_AGREE, _LATE, _SURE = 0.5, 3, 20.0
"""Share of a text's tokens that agree, at least, because the others may stand in other texts, too;
last tokens of which one must be among these, because the first agree with some other texts; and
nats that speak for a text."""

_CLEAR = 3.0
"""Shares below so many times their error say nothing."""


class Checked(NamedTuple):
    """A closed text, whose tokens' shares were compared with those of the batch.

    Attributes:
        ids: The text.
        nats: What speaks for it.
        agrees: Whether so many of its tokens agree that it was in the batch.
        nats_N: What speaks for each token of the batch in it.
        part_NO: The text's part of all shares.
        factor: That part over the shares of its own gradient; 0: none fits.
    """

    ids: Ids
    nats: float
    agrees: bool
    nats_N: Tensor
    part_NO: Tensor
    factor: float = 0.0


class Shares(NamedTuple):
    """What is known of the shares of a batch's tokens.

    Attributes:
        tokens_N: The tokens.
        all_NO: Their shares in all texts; in each row they have a root mean square of 1.
        left_NO: What is left of these without the texts that were read.
        variance_NO: Of the errors of what is left.
        late: Of so many last tokens of a text one must agree.
    """

    tokens_N: Tensor
    all_NO: Tensor
    left_NO: Tensor
    variance_NO: Tensor
    late: int = _LATE

    @classmethod
    def of(cls, bag: Bag, size_O: Tensor) -> "Shares":
        """Takes those of a bag, and their root mean square in each row."""
        share_NO = bag.share_NO / size_O
        variance_NO = (bag.error_O / size_O).square().expand_as(share_NO)
        return cls(bag.tokens_N, share_NO, share_NO, variance_NO)

    @property
    def standing(self) -> Tensor:
        """Which tokens [N] may stand in other texts than those that were read."""
        standing_N: Tensor = self.left_NO.norm(dim=1) > _ERROR * self.all_NO.norm(dim=1)
        return standing_N

    def without(self, text: Checked) -> "Shares":
        """Returns what is left without a text."""
        error_NO = _ERROR * text.part_NO
        return self._replace(
            left_NO=self.left_NO - text.part_NO, variance_NO=self.variance_NO + error_NO.square()
        )

    def checked(self, ids: Ids, share_NO: Tensor) -> Checked:
        """Compares the shares of a closed text's tokens, but for one factor.

        Args:
            ids: The text.
            share_NO: Of its own gradient, times any factor.
        """
        clear_N = self.left_NO.norm(dim=1) > _CLEAR * self.variance_NO.sum(1).sqrt()
        in_N = torch.isin(self.tokens_N, self.tokens_N.new_tensor(ids[:-1])) & clear_N
        left_KO, share_KO = self.left_NO[in_N], share_NO[in_N]
        square_K1 = left_KO.square().mean(1, keepdim=True)
        variance_KO = self.variance_NO[in_N] + _ERROR**2 * square_K1
        # A token that stands in no other text has the factor of all.
        fitted_F = (share_KO * left_KO / variance_KO).sum(1) / (share_KO**2 / variance_KO).sum(1)
        factor_F = fitted_F[fitted_F > 0]
        nats_N = torch.zeros_like(self.left_NO[:, 0])
        if not len(factor_F):
            return Checked(ids, 0.0, False, nats_N, torch.zeros_like(share_NO))
        error_FKO = left_KO - factor_F[:, None, None] * share_KO
        any_KO = variance_KO + square_K1
        gained_K = ((any_KO / variance_KO).log() + left_KO.square() / any_KO).mean(1)
        error_FK = (error_FKO.square() / variance_KO).mean(2)
        # One wrong word makes larger errors, whose size is not known, of all tokens.
        cost_FK = error_FK.clamp_max(1) + error_FK.clamp_min(1).log()
        nats_FK = (gained_K - cost_FK).clamp_min(0) * left_KO.shape[1] / 2
        nats, best = nats_FK.sum(1).max(0)
        nats_N[in_N] = nats_FK[best]
        sure_K = (gained_K - error_FK[best]).clamp_min(0) * left_KO.shape[1] / 2
        late_K = torch.isin(self.tokens_N[in_N], self.tokens_N.new_tensor(ids[-1 - self.late : -1]))
        agree, tokens = int((sure_K > 0).sum()), len({*ids[:-1]})
        enough = agree >= max(_AGREE * tokens, 2) and float(sure_K.sum()) >= _SURE
        agrees = enough and bool((late_K & (sure_K > 0)).any())
        factor = float(factor_F[best])
        return Checked(ids, float(nats), agrees, nats_N, factor * share_NO, factor)

    def read(self, closed: Mapping[Ids, Tensor]) -> "tuple[list[Checked], Shares]":
        """Returns the texts whose tokens' shares agree, and what they leave.

        That with the most nats is taken out before the others are weighed anew.

        Args:
            closed: Texts, with the shares of their own gradients.
        """
        texts, left, closed = list[Checked](), self, dict(closed)
        while True:
            checked = (left.checked(*pair) for pair in closed.items())
            agreeing = (text for text in checked if text.agrees)
            best = max(agreeing, key=lambda text: text.nats, default=None)
            if best is None:
                return texts, left
            del closed[best.ids]
            texts, left = [*texts, best], left.without(best)
