"""Pooled span: whether a text is in a batch under noise, whatever the other texts are.

The loss of a classifier sees a text through one token: the first of an encoder, the last of a
decoder. So in the last block, behind the attention, a weight's gradient is `sum_b delta_b x_b^T`
with one input x_b of each text: of rank B, and the x_b are in the span of its rows. Without noise
`dager` tests inputs of attention so. Here the text as a whole is tested, in one forward pass, and
neither its label nor its share of the update matters.

**Noise.** Of G = S + noise of variance s^2 [m, n], a singular value a of S is seen if it is above
s (mn)^(1/4). Then G has the singular value b with `b^2 = (a^2 + m s^2)(a^2 + n s^2) / a^2`, and the
cosine of its right singular vector with that of S is
`cos^2 = (a^4 - m n s^4) / (a^2 (a^2 + n s^2))` (Benaych-Georges and Nadakuditi 2012, section 3.1).
So for a text of the batch, |x|^2 - sum (v_i x)^2, its part outside of the r vectors v_i that are
seen, is u times a chi-square of n - r, with u = sum (v_i x)^2 tan_i^2 / (n - r).

**Score.** Let E be what is left less u (n - r). What wrong words leave is no noise: if it is
Gaussian of unknown size in k directions, its log probability is -k/2 log E. So a weight adds
`-k/2 log(E + (k + 3 sqrt(2 (n - r))) u)`. The better a text is determined, the more it scores.

**A mask, or pruning** leaves a part of G as it was. That part determines a matrix of so small a
rank, by alternating least squares (Jain, Netrapalli and Sanghavi 2013) over the rows and columns of
which enough numbers came. More numbers came than the fit needs, and these check it.

Limits: one gradient of a classifier, no dropout. Of the directions of B texts only those that stand
out of the noise are seen: a text that points elsewhere is not recognised.

Shapes: N texts, T tokens, D hidden size, V words, n inputs of a weight and m outputs, R directions.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedleak.attacks.certificate import lacks_numbers
from fedleak.attacks.listening import listening
from fedleak.attacks.reconstruction import Ids
from fedleak.models import LanguageModel, pad

_DIRECTIONS = 100.0
"""k: directions in which wrong words move an input."""

SIGMAS = 3.0
"""Standard deviations by which a chi-square may miss what is expected."""

_CLEAR = 1.02
"""A direction is seen if its singular value is this many times the largest of noise alone."""

_FEWEST = 2
"""Directions below which a weight says nothing: one is shared by all texts of a language."""

_ROUNDING = 1e-5
"""Share of an input that a forward pass loses, with room."""

_AT_ONCE = 32
"""Texts of a forward pass."""

_SPARE = 4
"""Numbers beyond two for each text that must have come of a row or a column."""

_STEPS, _RIGHT = 100, 1e-6
"""Steps of alternating least squares at most, and what a right matrix leaves, as a share."""

_ANGLE = 2e-4
"""Angle by which directions of such a matrix are off, at most: rounding, amplified by its gaps."""

_RIDGE = 1e-14
"""Added to equations, in units of their diagonal, so that dependent ones have a solution."""


class Fit(NamedTuple):
    """How well a text fits into the span.

    Attributes:
        score: Its log probability, up to a constant.
        excess: The chi-square of what it leaves, in standard deviations from its mean.
    """

    score: float
    excess: float


class Directions(NamedTuple):
    """What is seen of the span of a weight's inputs.

    Attributes:
        vector_RX: Right singular vectors.
        tangent_R: The squared tangent of the angle by which noise turned each.
        told_X: 1 for the numbers of an input that are known, 0 for others.
    """

    vector_RX: Tensor
    tangent_R: Tensor
    told_X: Tensor


def directions(gradient_YX: Tensor, noise: float, most: int) -> Directions:
    """Returns the directions that stand out of the noise.

    Args:
        gradient_YX: A weight's gradient, outputs first.
        noise: Standard deviation of the noise.
        most: Texts of the batch.
    """
    m, n = gradient_YX.shape
    _, value_R, vector_RX = torch.linalg.svd(gradient_YX.double() / noise, full_matrices=False)
    value_R = value_R[:most]
    seen = int((value_R > _CLEAR * (math.sqrt(m) + math.sqrt(n))).sum())
    middle_R = (value_R[:seen].square() - m - n) / 2
    square_R = middle_R + (middle_R.square() - m * n).sqrt()
    cos2_R = (square_R.square() - m * n) / (square_R * (square_R + n))
    told_X = torch.ones_like(vector_RX[0]).float()
    return Directions(vector_RX[:seen].float(), (1 / cos2_R - 1).float(), told_X)


def completed_directions(sent_YX: Tensor, texts: int) -> Directions | None:
    """Returns the directions of a gradient of which a part came; None if they are not determined.

    Args:
        sent_YX: The part of a weight's gradient that came, outputs first.
        texts: The number of texts in the batch, which is the gradient's rank.
    """
    fewest = 2 * texts + _SPARE
    rows_YX = sent_YX.double()[(sent_YX != 0).sum(1) >= fewest]
    told_X = (rows_YX != 0).sum(0) >= fewest
    part_YX = rows_YX[:, told_X]
    if min(part_YX.shape) < fewest:
        return None
    came_YX = (part_YX != 0).double()
    right_XB = torch.linalg.svd(part_YX, full_matrices=False).Vh[:texts].T
    for _ in range(_STEPS):
        left_YB = torch.linalg.qr(_fitted(part_YX, came_YX, right_XB))[0]
        right_XB = _fitted(part_YX.T, came_YX.T, left_YB)
        left_YX = came_YX * (part_YX - left_YB @ right_XB.T)
        if left_YX.norm() < _RIGHT * part_YX.norm():
            vector_BX = sent_YX.new_zeros(texts, len(told_X)).float()
            vector_BX[:, told_X] = torch.linalg.qr(right_XB)[0].T.float()
            return Directions(vector_BX, vector_BX.new_full((texts,), _ANGLE**2), told_X.float())
    return None


def _fitted(part_YX: Tensor, came_YX: Tensor, right_XB: Tensor) -> Tensor:
    """Returns the factors [Y, B] that fit the numbers of each row that came, least squares."""
    equations_YBB = torch.einsum("yx,xb,xc->ybc", came_YX, right_XB, right_XB)
    ridge_Y11 = _RIDGE * equations_YBB.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    equations_YBB += ridge_Y11 * torch.eye(right_XB.shape[1]).to(right_XB)
    factors_YB: Tensor = torch.linalg.solve(equations_YBB, part_YX @ right_XB)
    return factors_YB


class PooledSpan:
    """Distinguishes texts of a batch from others.

    Args:
        model: At the broadcast weights.
        observed: The mean gradient by parameter name.
        noise: Its standard deviation, if all numbers came.
        size: Texts of the batch.
    """

    def __init__(
        self, model: LanguageModel, observed: Mapping[str, Tensor], noise: float, size: int
    ) -> None:
        self._model, self._known = model, dict[Ids, Fit]()
        self._parts: dict[nn.Module, Directions] = {}
        of_last = model.family.modules(model.num_layers - 1)
        for name in (name for letter in "ofp" for name in of_last.get(letter, ())):
            if name not in observed:
                continue
            module = model.module.get_submodule(name.removesuffix(".weight"))
            # A Conv1D has inputs first.
            gradient = observed[name] if isinstance(module, nn.Linear) else observed[name].T
            masked = lacks_numbers([gradient])
            seen = (
                completed_directions(gradient, size)
                if masked
                else directions(gradient, noise, size)
            )
            if seen is not None and len(seen.tangent_R) >= _FEWEST:
                self._parts[module] = seen

    def __bool__(self) -> bool:
        """Whether anything is seen."""
        return bool(self._parts)

    def of(self, texts: Sequence[Ids]) -> list[Fit]:
        """Returns how well texts fit: all alike if nothing is seen."""
        if not self:
            return [Fit(0.0, 0.0)] * len(texts)
        new = sorted({*texts} - self._known.keys(), key=lambda ids: (len(ids), ids))
        for start in range(0, len(new), _AT_ONCE):
            part = new[start : start + _AT_ONCE]
            ids_NT, mask_NT = pad(part, self._model.tokenizer.pad_token_id, self._model.device)
            with torch.no_grad():
                score_N, excess_N = self._judged(mask_NT, ids_BT=ids_NT, embeds_BTD=None)
            fits = map(Fit, score_N.tolist(), excess_N.tolist())
            self._known |= dict(zip(part, fits, strict=True))
        return [self._known[ids] for ids in texts]

    def slopes(self, ids: Ids) -> Tensor:
        """Returns by how much the score rises [T, V] to first order if a word is another one."""
        table_VD = self._model.module.get_parameter(self._model.family.word_embedding).detach()
        x_TD = table_VD[list(ids)]
        with torch.enable_grad():
            x_1TD = x_TD[None].clone().requires_grad_()
            mask_1T = torch.ones(x_1TD.shape[:2], dtype=torch.long, device=x_TD.device)
            score_1, _ = self._judged(mask_1T, ids_BT=None, embeds_BTD=x_1TD)
            (slope_1TD,) = torch.autograd.grad(score_1.sum(), x_1TD)
        rises_TV: Tensor = slope_1TD[0] @ table_VD.T
        return rises_TV - (slope_1TD[0] * x_TD).sum(1, keepdim=True)

    def _judged(self, mask_NT: Tensor, **given: Tensor | None) -> tuple[Tensor, Tensor]:
        """Returns scores and excesses [N]."""
        with listening(self._parts) as heard:
            self._model.family.logits(self._model.module, mask_NT, **given)
        pooled_N = (
            mask_NT.sum(1) - 1 if self._model.family.causal else mask_NT.new_zeros(len(mask_NT))
        )
        score_N, excess_N, free = mask_NT.new_zeros(1).float(), mask_NT.new_zeros(1).float(), 0
        for module, (vector_RX, tangent_R, told_X) in self._parts.items():
            x_NX = heard[module][0][torch.arange(len(mask_NT), device=pooled_N.device), pooled_N]
            x_NX = x_NX * told_X
            inside_NR = x_NX @ vector_RX.T
            n = int(told_X.sum()) - len(tangent_R)
            left_N = (x_NX - inside_NR @ vector_RX).square().sum(1)
            lost_N = (_ROUNDING * x_NX).square().sum(1)
            variance_N = (inside_NR.square() @ tangent_R + lost_N) / n
            room = _DIRECTIONS + SIGMAS * math.sqrt(2 * n)
            more_N = (left_N - n * variance_N).clamp_min(0) + room * variance_N
            score_N = score_N - _DIRECTIONS / 2 * more_N.log()
            excess_N, free = excess_N + left_N / variance_N - n, free + n
        return score_N, excess_N / math.sqrt(2 * free)
