"""Completion: the first layer's gradients in the span of the known inputs, row by row.

A row of the gradient G = sum_i dq_i x_i^T is a combination of the inputs x_i. All of these lie in
the span of a few known vectors (`models.family.Directions`): those of the words whose embedding
rows came, of the places whose rows came, and of the constant. So a row of which more numbers came
than that span has dimensions is determined by least squares, and the numbers left over check it.

**A mask, or pruning** leaves a part of a row as it was. In one float32 gradient the completed rows
are exact, and are read as whole rows are. Other rows are completed in the span of the completed
ones, which has no more dimensions than there are inputs.

**A first step of Adam** shows small numbers well, and of large ones the sign alone (`adam_step`).
Each number counts by its own variance, and large ones as if they had not come. A row's small
numbers determine it, so that in MiniLM a tenth of a per cent of it stays wrong.

**A change of weights** is rounded to the precision of each weight w: to a step of 2^-23 w or less,
which small weights hardly feel. So each number counts by its own step, up to a limit: several
local steps move all of them. That removes what rounding puts outside of the span, masked or not.

A zero is a number that did not come, if there are more zeros than rounding makes: it makes about as
many as there are equal numbers. (Of numbers on a grid, two are equal as often as one is zero.)

Limits: no dropout, and both embeddings' rows must have come. A mask that keeps a share a of D
numbers leaves a D of a row: distinct words and places must be fewer, but for its chance.

Shapes: D hidden size, O outputs, N rows at once, M known vectors, R their rank.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.adam_step import BehindAdam
from fedleak.attacks.certificate import lacks_numbers
from fedleak.attacks.subspace.atoms import NOTHING
from fedleak.attacks.subspace.span import row_space
from fedleak.models import LanguageModel
from fedleak.training.observation import Observation, UpdateKind

_SPARE = 4
"""Numbers of a row, beyond those that determine it, that check it."""

_ROUNDING, _MOVED = 1e-5, 0.3
"""Noise in a row, as a share of its root mean square, at most: of a gradient in float32, with room,
and of a change of weights."""

_DRIFT = 1e-3
"""What is in a number of a change of weights beside rounding, in the same units: at least this."""

_AMPLIFIED = 100.0
"""Times by which rounding may grow in what is completed."""

_DEPENDENT = 1e-5
"""Singular values of known vectors below this share of the largest are rounding."""

_EQUAL = 10.0
"""Zeros for each pair of equal numbers, above which they are no rounded numbers."""

_EQUATIONS = 2**22
"""Numbers of equations that are in memory at once."""


def completed(
    model: LanguageModel,
    seen: Observation,
    observed: Mapping[str, Tensor],
    names: Sequence[str],
) -> dict[str, Tensor] | None:
    """Returns gradients with whole rows: those that can be completed, and zeros for the others.

    None if they are whole as they came, or if none of them can be completed.

    Args:
        model: At the broadcast weights.
        seen: The update.
        observed: The same as a gradient, by parameter name.
        names: Parameters of the first layer's attention that were sent.
    """
    family, gradients = model.family, {name: observed[name] for name in names}
    sent_OD = torch.cat([*family.projections(gradients, 0).values()])
    tables = {family.word_embedding, family.position_embedding} - {None}
    if not tables <= observed.keys():
        return None
    if int(observed[family.word_embedding].any(1).sum()) >= sent_OD.shape[1]:
        return None  # that many words span everything, as where a tied layer gives all a row
    came_OD, variance_OD = _came(sent_OD), _rounding(model, seen, names)
    if variance_OD is not None:
        came_OD &= variance_OD.isfinite()
    if variance_OD is None and came_OD.all():
        return None
    sent = _Sent(sent_OD, came_OD, variance_OD)
    whole_OD = _completed_in(_known(model, observed), sent)
    if (span := row_space([whole_OD])) is not None and span.exact:
        again_OD = _completed_in(span.basis_DR.T, sent)
        whole_OD = torch.where(whole_OD.any(1, keepdim=True), whole_OD, again_OD)
    if not whole_OD.any():
        return None
    whole = {name: value.clone() for name, value in gradients.items()}
    parts = [*family.projections(whole, 0).values()]
    rows = torch.split(whole_OD, [len(part_OD) for part_OD in parts])
    for part_OD, rows_OD in zip(parts, rows, strict=True):
        part_OD.copy_(rows_OD)
    return whole


class _Sent(NamedTuple):
    """The part of rows that was sent.

    Attributes:
        value_OD: The numbers, zeros for those that did not come.
        came_OD: Which came.
        variance_OD: Of what rounding of the weights added to each; None: the update is a gradient.
    """

    value_OD: Tensor
    came_OD: Tensor
    variance_OD: Tensor | None


def _came(sent_OD: Tensor) -> Tensor:
    """Returns which numbers [O, D] came: all, unless a mask or pruning made zeros of some."""
    used_OD = sent_OD != 0
    size_OD, next_OD = sent_OD.abs(), sent_OD.abs().roll(1, 1)
    pairs_OD = used_OD & (next_OD != 0)
    equal = float((pairs_OD & (size_OD == next_OD)).sum()) / max(int(pairs_OD.sum()), 1)
    zeros = 1 - int(used_OD.sum()) / max(int(sent_OD.any(1).sum()) * sent_OD.shape[1], 1)
    part = lacks_numbers([sent_OD]) and zeros > _EQUAL * equal
    return used_OD if part else torch.ones_like(used_OD)


def _rounding(model: LanguageModel, seen: Observation, names: Sequence[str]) -> Tensor | None:
    """Returns the variance [O, D] of what rounding of the weights adds to a gradient, or None."""
    if isinstance(seen, BehindAdam):
        variances = {name: seen.variance(model, name) for name in names}
        return torch.cat([*model.family.projections(variances, 0).values()])
    if seen.update.kind == UpdateKind.GRADIENT:
        return None
    before, tensors = dict(model.module.named_parameters()), seen.update.tensors
    larger = {
        name: torch.maximum(before[name].abs(), (before[name] + tensors[name]).abs())
        for name in names
    }
    weight_OD = torch.cat([*model.family.projections(larger, 0).values()])
    # The last digit of m 2^e, with .5 <= m < 1, is 2^e eps / 2; rounding is uniform within it.
    # That of the larger weight, before or after, is the coarser one.
    step_OD = torch.frexp(weight_OD)[1].double().exp2() * torch.finfo(weight_OD.dtype).eps / 2
    scale = (seen.knowledge.local_steps or 1) / (seen.knowledge.learning_rate or 1.0) ** 2
    return scale * step_OD.square() / 12


def _known(model: LanguageModel, observed: Mapping[str, Tensor]) -> Tensor:
    """Returns an orthonormal basis [R, D] of the span in which all inputs lie."""
    family = model.family
    directions = family.token_table(model.module).directions()
    known = [directions.token_VD[observed[family.word_embedding].any(1)], directions.constant_CD]
    if family.position_embedding is not None:
        known.append(directions.position_PD[observed[family.position_embedding].any(1)])
    _, s_R, vh_RD = torch.linalg.svd(torch.cat(known).double(), full_matrices=False)
    basis_RD: Tensor = vh_RD[s_R > _DEPENDENT * s_R[0]]
    return basis_RD


class _Fitted(NamedTuple):
    """Rows that were fitted.

    Attributes:
        row_ND: In the span.
        noise_N: Variance of a number that counts once; NaN if it could not be fitted.
        amplified_N: The variance of a row in all dimensions of the span, in units of `noise_N`.
    """

    row_ND: Tensor
    noise_N: Tensor
    amplified_N: Tensor


def _fitted(basis_RD: Tensor, sent_ND: Tensor, count_ND: Tensor) -> _Fitted:
    """Fits rows by least squares; each number counts so many times, 0 times if it did not come."""
    rank = len(basis_RD)
    equations_NRR = (count_ND[:, None] * basis_RD) @ basis_RD.T
    factor_NRR, failed_N = torch.linalg.cholesky_ex(equations_NRR)
    inverse_NRR = torch.cholesky_inverse(factor_NRR)
    weight_NR = inverse_NRR @ ((count_ND * sent_ND) @ basis_RD.T)[..., None]
    row_ND = weight_NR[..., 0] @ basis_RD
    square_N = (count_ND * (sent_ND - row_ND).square()).sum(1).clamp_min(NOTHING)
    noise_N = square_N / ((count_ND > 0).sum(1) - rank)
    noise_N[failed_N != 0] = math.nan
    return _Fitted(row_ND, noise_N, inverse_NRR.diagonal(dim1=1, dim2=2).sum(1))


def _completed_in(basis_RD: Tensor, sent: _Sent) -> Tensor:
    """Returns the rows [O, D] that lie in a span, as far as the part that was sent shows it.

    The numbers that came keep their part outside of the span, scaled to the size that noise has
    there in a whole row: an estimate of noise from it gives the noise of the completed numbers.
    """
    whole_OD, (rank, width) = torch.zeros_like(sent.value_OD), basis_RD.shape
    most = _ROUNDING if sent.variance_OD is None else _MOVED
    most_amplified = min(_AMPLIFIED * most, _MOVED)
    enough_O = sent.value_OD.any(1) & (sent.came_OD.sum(1) >= rank + _SPARE)
    for rows_N in torch.split(enough_O.nonzero()[:, 0], max(1, _EQUATIONS // (rank * width))):
        sent_ND, came_ND = sent.value_OD[rows_N].double(), sent.came_OD[rows_N].double()
        size_N = sent_ND.square().sum(1) / came_ND.sum(1)
        count_ND = came_ND
        if sent.variance_OD is not None:
            count_ND = came_ND / (sent.variance_OD[rows_N] + _DRIFT**2 * size_N[:, None])
            count_ND *= (came_ND.sum(1) / count_ND.sum(1))[:, None]
        fit = _fitted(basis_RD, sent_ND, count_ND)
        # A comparison with NaN is false.
        right_N = fit.noise_N < most**2 * size_N
        right_N &= fit.noise_N * fit.amplified_N < most_amplified**2 * fit.row_ND.square().sum(1)
        rest_ND = (sent_ND - fit.row_ND) * count_ND.sqrt()  # white
        rest_ND -= rest_ND @ basis_RD.T @ basis_RD
        outside_N = fit.noise_N * fit.amplified_N / rank * (width - rank)
        rest_ND *= (outside_N.sqrt() / rest_ND.norm(dim=1).clamp_min(NOTHING))[:, None]
        whole_OD[rows_N[right_N]] = (fit.row_ND + rest_ND)[right_N].to(whole_OD)
    return whole_OD
