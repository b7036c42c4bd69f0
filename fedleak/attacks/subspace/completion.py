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

**A tied output layer** gives the row of every word a gradient, but longer ones to the words of the
texts. So the words with the longest rows are known vectors, as many as the rows of the attention
can tell apart. Of words that are in no text the parts there are noise: half of those whose parts
are no more than that are left out, and the others fitted anew, until none is left.

A zero is a number that did not come, if there are more zeros than rounding makes: it makes about as
many as there are equal numbers. (Of numbers on a grid, two are equal as often as one is zero.)

Limits: no dropout, and rows of both embeddings must have come. A mask that keeps a share a of D
numbers leaves a D of a row: distinct words and places must be fewer, but for its chance.

Shapes: D hidden size, O outputs, N rows at once, M known vectors, R their rank.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
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

_LONGEST = 0.75
"""Vectors that are tried where all tokens have a row, as a share of the numbers that came of a row
of the attention."""

_ROWS = 256
"""Rows of the attention that tell which tokens are in a text."""

_NEEDED = 6.0
"""Standard deviations by which a token's part must be above what noise makes it."""

_EQUATIONS = 2**22
"""Numbers of equations that are in memory at once."""


class Completed(NamedTuple):
    """Gradients with whole rows.

    Attributes:
        gradients: By parameter name; zeros for the rows that cannot be completed.
        tokens_N: The tokens in whose span they are, in rising order.
    """

    gradients: dict[str, Tensor]
    tokens_N: Tensor


def completed(
    model: LanguageModel,
    seen: Observation,
    observed: Mapping[str, Tensor],
    names: Sequence[str],
) -> Completed | None:
    """Returns gradients with whole rows.

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
    came_OD, variance_OD = _came(sent_OD), _rounding(model, seen, names)
    if variance_OD is not None:
        came_OD &= variance_OD.isfinite()
    if variance_OD is None and came_OD.all():
        return None
    sent = _Sent(sent_OD, came_OD, variance_OD)
    tokens_N = _tokens(model, observed, sent)
    if not len(tokens_N):
        return None
    whole_OD = _completed_in(_basis(_vectors(model, observed, tokens_N)), sent)
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
    return Completed(whole, tokens_N)


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


def _tokens(model: LanguageModel, observed: Mapping[str, Tensor], sent: _Sent) -> Tensor:
    """Returns the tokens [N] of the batch, in rising order: those whose embedding rows came.

    Where the output layer is the embedding all rows came. The rows of a text's tokens are among the
    longest, and of the tokens with the longest rows the attention needs those of texts alone.
    """
    length_V: Tensor = observed[model.family.word_embedding].double().norm(dim=1)
    tokens_N: Tensor = length_V.nonzero()[:, 0]
    if len(tokens_N) < sent.value_OD.shape[1]:
        return tokens_N
    came_O = sent.came_OD.sum(1)
    best_O = came_O.topk(min(_ROWS, len(came_O))).indices
    variance_OD = None if sent.variance_OD is None else sent.variance_OD[best_O]
    best = _Sent(sent.value_OD[best_O], sent.came_OD[best_O], variance_OD)
    count = int(_LONGEST * int(came_O[best_O[-1]])) - len(_vectors(model, observed, tokens_N[:0]))
    tokens_N = length_V.topk(max(count, 0)).indices.sort().values
    while len(tokens_N):
        needed_N = _needed(_vectors(model, observed, tokens_N), best)[: len(tokens_N)]
        spare_N = (needed_N < _NEEDED).nonzero()[:, 0]
        # Of tokens with nearly the same embedding each is spare, and one of them is not.
        spare_N = spare_N[needed_N[spare_N].argsort()][: -(-len(spare_N) // 2)]
        if not len(spare_N):
            break
        kept_N = torch.ones_like(tokens_N, dtype=torch.bool)
        kept_N[spare_N] = False
        tokens_N = tokens_N[kept_N]
    return tokens_N


def _needed(vector_MD: Tensor, sent: _Sent) -> Tensor:
    """Returns by how many deviations [M] the squares of each vector's parts are above noise."""
    needed_M, count = vector_MD.new_zeros(len(vector_MD)), 0
    for rows in _rows(sent, vector_MD):
        fit = _fitted(vector_MD, rows)
        square_NM = fit.part_NM.square() / (fit.noise_N[:, None] * fit.amplified_NM)
        square_NM = square_NM[square_NM.isfinite().all(1)]
        needed_M, count = needed_M + square_NM.sum(0), count + len(square_NM)
    # Of noise each square has a mean of 1, and a variance of 2.
    above_M: Tensor = (needed_M - count) / math.sqrt(2 * max(count, 1))
    return above_M


def _vectors(model: LanguageModel, observed: Mapping[str, Tensor], tokens_N: Tensor) -> Tensor:
    """Returns vectors [M, D] in whose span all inputs of these tokens [N] lie, theirs first."""
    family = model.family
    directions = family.token_table(model.module).directions()
    known = [directions.token_VD[tokens_N], directions.constant_CD]
    if family.position_embedding is not None:
        known.append(directions.position_PD[observed[family.position_embedding].any(1)])
    return torch.cat(known).double()


def _basis(vector_MD: Tensor) -> Tensor:
    """Returns an orthonormal basis [R, D] of the span of vectors."""
    _, s_R, vh_RD = torch.linalg.svd(vector_MD, full_matrices=False)
    basis_RD: Tensor = vh_RD[s_R > _DEPENDENT * s_R[0]]
    return basis_RD


class _Rows(NamedTuple):
    """Rows of which more numbers came than a span has dimensions.

    Attributes:
        row_N: Which rows.
        value_ND: The numbers, zeros for those that did not come.
        count_ND: How many times each number counts: 0 times if it did not come.
        size_N: The mean square of the numbers that came.
    """

    row_N: Tensor
    value_ND: Tensor
    count_ND: Tensor
    size_N: Tensor


def _rows(sent: _Sent, vector_MD: Tensor) -> Iterator[_Rows]:
    """Yields rows that may be fitted with vectors, as many as memory holds."""
    most, width = vector_MD.shape
    enough_O = sent.value_OD.any(1) & (sent.came_OD.sum(1) >= most + _SPARE)
    for row_N in torch.split(enough_O.nonzero()[:, 0], max(1, _EQUATIONS // (most * width))):
        value_ND, came_ND = sent.value_OD[row_N].double(), sent.came_OD[row_N].double()
        size_N, count_ND = value_ND.square().sum(1) / came_ND.sum(1), came_ND
        if sent.variance_OD is not None:
            count_ND = came_ND / (sent.variance_OD[row_N] + _DRIFT**2 * size_N[:, None])
            count_ND *= (came_ND.sum(1) / count_ND.sum(1))[:, None]
        yield _Rows(row_N, value_ND, count_ND, size_N)


class _Fitted(NamedTuple):
    """Rows that were fitted.

    Attributes:
        part_NM: Of each vector.
        noise_N: Variance of a number that counts once; NaN if it could not be fitted.
        amplified_NM: The variance of each part, in units of `noise_N`.
    """

    part_NM: Tensor
    noise_N: Tensor
    amplified_NM: Tensor


def _fitted(vector_MD: Tensor, rows: _Rows) -> _Fitted:
    """Fits rows by least squares."""
    equations_NMM = (rows.count_ND[:, None] * vector_MD) @ vector_MD.T
    factor_NMM, failed_N = torch.linalg.cholesky_ex(equations_NMM)
    inverse_NMM = torch.cholesky_inverse(factor_NMM)
    right_NM1 = ((rows.count_ND * rows.value_ND) @ vector_MD.T)[..., None]
    part_NM = (inverse_NMM @ right_NM1)[..., 0]
    left_ND = rows.value_ND - part_NM @ vector_MD
    square_N = (rows.count_ND * left_ND.square()).sum(1).clamp_min(NOTHING)
    noise_N = square_N / ((rows.count_ND > 0).sum(1) - len(vector_MD))
    noise_N[failed_N != 0] = math.nan
    return _Fitted(part_NM, noise_N, inverse_NMM.diagonal(dim1=1, dim2=2))


def _completed_in(basis_RD: Tensor, sent: _Sent) -> Tensor:
    """Returns the rows [O, D] that lie in a span, as far as the part that was sent shows it.

    The numbers that came keep their part outside of the span, scaled to the size that noise has
    there in a whole row: an estimate of noise from it gives the noise of the completed numbers.
    """
    whole_OD, (rank, width) = torch.zeros_like(sent.value_OD), basis_RD.shape
    most = _ROUNDING if sent.variance_OD is None else _MOVED
    most_amplified = min(_AMPLIFIED * most, _MOVED)
    for rows in _rows(sent, basis_RD):
        part_NR, noise_N, amplified_NR = _fitted(basis_RD, rows)
        row_ND, amplified_N = part_NR @ basis_RD, amplified_NR.sum(1)
        # A comparison with NaN is false.
        right_N = noise_N < most**2 * rows.size_N
        right_N &= noise_N * amplified_N < most_amplified**2 * row_ND.square().sum(1)
        rest_ND = (rows.value_ND - row_ND) * rows.count_ND.sqrt()  # white
        rest_ND -= rest_ND @ basis_RD.T @ basis_RD
        outside_N = noise_N * amplified_N / rank * (width - rank)
        rest_ND *= (outside_N.sqrt() / rest_ND.norm(dim=1).clamp_min(NOTHING))[:, None]
        whole_OD[rows.row_N[right_N]] = (row_ND + rest_ND)[right_N].to(whole_OD)
    return whole_OD
