"""Slots: which word stands at which place of which text.

With the tags known, the input of every word at every place of every text is known, and where the
probe puts it. So few inputs can be in a bin, and pursuit among those finds the ones that are. A
slot that is filled excludes all other words there, so each pass leaves fewer candidates for the
bins that are not explained yet.

Shapes: N bins, D hidden size, K numbers of a tag, V words, T places, S texts, C candidates of a
bin, R picks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks.imprinted.bins import ROUNDING, SAMPLE, Bins, Words, pursue, whitening
from fedleak.attacks.imprinted.tags import SIGMAS, Tags
from fedleak.attacks.server_modes.imprint import Planted

MOST = 100_000_000
"""Words times places times texts: more inputs are not tabulated."""

_PICKS = 12
"""Tokens of a bin."""

_CLEAR = 3.0
"""A token is in a bin if it is so many times larger there than what may be left of the bin."""


@dataclass
class Slots:
    """What is read of the texts so far.

    Attributes:
        word_ST: The word, as an index, at a place of a text; -1: not read.
        left: Bins that are not explained.
    """

    word_ST: Tensor
    left: list[int]

    def add_texts_(self, texts: int, opening: int | None) -> None:
        """Adds empty slots for more texts, which begin with the word `opening`, if there is one."""
        more_ST = torch.full((texts, self.word_ST.shape[1]), -1)
        if opening is not None:
            more_ST[:, 0] = opening
        self.word_ST = torch.cat([self.word_ST, more_ST])


class _Inputs:
    """The normed inputs of all words at all places of all texts, in parts.

    The input of word v at place t of text s is `(row_VTD[v, t] + tag_SD[s] - mean) / sigma`.
    """

    def __init__(
        self, words: Words, planted: Planted, tags: Tags, noise: float, rng: torch.Generator
    ) -> None:
        """Tabulates what needs no input as a whole.

        Args:
            words: In the batch.
            planted: What the layer does.
            tags: Of the texts.
            noise: Of a number of a bin, as a share of the bin.
            rng: For a sample.
        """
        self.tags, self.row_VTD = tags, words.whole()
        width, size = self.row_VTD.shape[2], tags.tag_SK.shape[1]
        self.tag_SD = F.pad(tags.tag_SK, (0, width - size))
        mean_VTS = (self.row_VTD.sum(2)[..., None] + self.tag_SD.sum(1)) / width
        square_VTS = self._inner(torch.eye(width), mean_VTS)
        self.sigma_VTS = (square_VTS / width + planted.eps).sqrt_()
        probed_VTS = (self.row_VTD @ planted.probe_D)[..., None] + self.tag_SD @ planted.probe_D
        probed_VTS -= mean_VTS * planted.probe_D.sum()
        self.probed_VTS = probed_VTS.div_(self.sigma_VTS)
        """Where the probe puts each of them."""
        sample_C = torch.randint(self.probed_VTS.numel(), (SAMPLE,), generator=rng)
        self.white_DD = whitening(self.rows(sample_C), noise * math.sqrt(width))
        """What makes inputs as little alike as it can."""
        square_VTS = self._inner(self.white_DD @ self.white_DD, mean_VTS)
        floor = 1e-6 * float(square_VTS.max())
        self.per_norm_VTS = square_VTS.clamp_min_(floor).rsqrt_().mul_(self.sigma_VTS)
        """1 / the length of each of them, whitened."""

    def _inner(self, form_DD: Tensor, mean_VTS: Tensor) -> Tensor:
        """Returns the square [V, T, S] of each `row + tag - mean` in a symmetric form."""
        row_VTD = self.row_VTD @ form_DD
        square_VTS = (row_VTD * self.row_VTD).sum(2)[..., None] + 2 * row_VTD @ self.tag_SD.T
        square_VTS += ((self.tag_SD @ form_DD) * self.tag_SD).sum(1)
        along_VTS = row_VTD.sum(2)[..., None] + (self.tag_SD @ form_DD).sum(1)
        return square_VTS.add_(mean_VTS * (mean_VTS * form_DD.sum() - 2 * along_VTS))

    def rows(self, index_C: Tensor) -> Tensor:
        """Returns inputs [C, D] by their flat index."""
        texts = len(self.tag_SD)
        row_CD = self.row_VTD.flatten(0, 1)[index_C // texts] + self.tag_SD[index_C % texts]
        return F.layer_norm(row_CD, row_CD.shape[1:])

    def explains(self, index_R: Tensor, weight_R: Tensor, rest_D: Tensor, limit: float) -> bool:
        """Whether inputs leave no more of a bin than they may: more if tags are not exact."""
        size = self.tags.tag_SK.shape[1]
        per_sigma_R = weight_R.abs() / self.sigma_VTS.flatten()[index_R]
        error = float(per_sigma_R @ self.tags.error_S[index_R % len(self.tag_SD)].double())
        of_tags = SIGMAS * math.sqrt(size) * error
        return float(rest_D[size:].norm()) <= limit and float(rest_D.norm()) <= limit + of_tags


@torch.no_grad()
def fill_(
    slots: Slots,
    bins: Bins,
    words: Words,
    planted: Planted,
    tags: Tags,
    closing: int | None,
    rng: torch.Generator,
) -> None:
    """Fills slots with the contents of the bins that are not explained yet.

    Args:
        slots: Of the texts of `tags`.
        bins: The bins.
        words: What they may hold.
        planted: What the layer does.
        tags: Of the texts.
        closing: The word, as an index, that ends every text; None: any may.
        rng: For a sample of the inputs.
    """
    inputs = _Inputs(words, planted, tags, bins.noise(), rng)
    places, texts = inputs.probed_VTS.shape[1:]
    word_ST, filled = slots.word_ST, True
    while slots.left and filled:
        filled, left = False, []
        index_C = _allowed(word_ST, len(words.ids_V), closing).flatten().nonzero()[:, 0]
        probed_C, order_C = inputs.probed_VTS.flatten()[index_C].sort()
        index_C = index_C[order_C]
        first_N = torch.searchsorted(probed_C, bins.low_N).tolist()
        last_N = torch.searchsorted(probed_C, bins.high_N).tolist()
        for number in slots.left:
            among_C = index_C[first_N[number] : last_N[number]]
            members = _members(bins, number, inputs, among_C)
            if members is None:
                left.append(number)
                continue
            for flat in members:
                word, place, text = flat // (places * texts), flat // texts % places, flat % texts
                if word_ST[text, place] < 0:
                    word_ST[text, place] = word
                    filled = True
        slots.left = left


def _allowed(word_ST: Tensor, vocabulary: int, closing: int | None) -> Tensor:
    """Returns which words [V, T, S] a slot may hold: its own, and nothing behind a text's end."""
    texts, places = word_ST.shape
    open_ST = word_ST < 0
    if closing is not None:
        open_ST &= (word_ST == closing).cumsum(1) == 0
    allowed_VTS = open_ST.T.expand(vocabulary, places, texts).clone()
    text_X, place_X = (word_ST >= 0).nonzero(as_tuple=True)
    allowed_VTS[word_ST[text_X, place_X], place_X, text_X] = True
    return allowed_VTS


def _members(bins: Bins, number: int, inputs: _Inputs, among_C: Tensor) -> list[int] | None:
    """Returns the inputs in a bin, by their flat index, among candidates; None: not explained."""
    limit = float(bins.limit_N[number])
    picks = explained(
        bins.sum_ND[number],
        limit,
        inputs.rows(among_C),
        inputs.per_norm_VTS.flatten()[among_C],
        inputs.white_DD,
        lambda pick_R, weight_R, rest_D: inputs.explains(among_C[pick_R], weight_R, rest_D, limit),
    )
    return None if picks is None else among_C[picks].tolist()


def explained(
    sum_D: Tensor,
    limit: float,
    row_CD: Tensor,
    per_norm_C: Tensor,
    white_DD: Tensor,
    explains: Callable[[list[int], Tensor, Tensor], bool] | None = None,
) -> list[int] | None:
    """Returns the few rows that are clearly in a sum and leave nothing of it; None: not explained.

    Args:
        sum_D: The sum.
        limit: The largest norm of the rest of an explained sum.
        row_CD: Candidates.
        per_norm_C: 1 / their length, whitened.
        white_DD: What makes rows as little alike as it can.
        explains: (rows, their weights, what is left) -> whether that is little enough; None: if it
            is no longer than the limit.
    """
    if not len(row_CD):
        return None

    def best(rest_1D: Tensor) -> tuple[Tensor, Tensor]:
        best_1 = (row_CD @ (white_DD @ rest_1D[0])).mul_(per_norm_C).abs_().argmax()[None]
        return best_1, row_CD[best_1] @ white_DD

    sum_1D = (sum_D @ white_DD)[None]
    enough_1 = limit * white_DD.norm() / math.sqrt(len(white_DD)) + ROUNDING * sum_1D.norm(dim=1)
    (pick_R,) = pursue(sum_1D, enough_1, min(_PICKS, len(row_CD)), best).tolist()
    picks = [pick for pick in pick_R if pick >= 0]
    for _ in range(2):
        if not picks:
            return None
        weight_R, rest_D, clear_R = fitted(sum_D, row_CD[picks], limit)
        little = float(rest_D.norm()) <= limit
        if not (little if explains is None else explains(picks, weight_R, rest_D)):
            return None
        if clear_R.all():
            return picks
        picks = [*compress(picks, clear_R.tolist())]
    return None


def fitted(sum_D: Tensor, row_RD: Tensor, limit: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the weights [R] of rows in a sum, what they leave [D], and which are clear [R].

    A row is clear if the sum has what no other row has, more than `limit`, its noise, allows.
    """
    system_DR, sum_D = row_RD.T.double(), sum_D.double()
    inverse_RD = torch.linalg.pinv(system_DR)
    weight_R = inverse_RD @ sum_D
    clear_R = weight_R.abs() > _CLEAR * limit * inverse_RD.norm(dim=1)
    return weight_R, sum_D - system_DR @ weight_R, clear_R
