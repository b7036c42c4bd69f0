"""Completion: whole rows of the first layer's gradients, of which a mask or pruning left a part.

A row of the gradient G = sum_i dq_i x_i^T is a combination of the inputs x_i. All of these lie in
the span of a few known vectors (`models.family.Directions`): those of the words whose embedding
rows came, of the places whose rows came, and of the constant. So a row of which more numbers came
than that span has dimensions is determined by least squares, and the numbers left over check it.
Other rows are completed in the span of those that are, which has no more dimensions than there are
inputs. That is exact: what is read of whole rows is read of these, and a mask hides nothing.

Limits: one gradient without dropout, in float32, of which both embeddings' rows came. A mask that
keeps a share a of D numbers leaves a D of a row: distinct words and places must be fewer, but for
its chance. A change of weights is rounded to their precision, and is not completed.

Shapes: D hidden size, O outputs, M known vectors, R their rank.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedleak.attacks.certificate import lacks_numbers
from fedleak.attacks.subspace.atoms import NOTHING
from fedleak.attacks.subspace.span import row_space
from fedleak.models import LanguageModel

_SPARE = 4
"""Numbers of a row, beyond those that determine it, that check it."""

_ROUNDING = 1e-5
"""Noise in a row, as a share of its root mean square: float32's rounding, with room."""

_AMPLIFIED = 100.0
"""Times by which rounding may grow in what is completed."""

_DEPENDENT = 1e-5
"""Singular values of known vectors below this share of the largest are rounding."""


def completed(
    model: LanguageModel, observed: Mapping[str, Tensor], names: Sequence[str]
) -> dict[str, Tensor] | None:
    """Returns gradients with whole rows: those that can be completed, and zeros for the others.

    None if they lack nothing, or if none of them can be completed.

    Args:
        model: At the broadcast weights.
        observed: The gradient by parameter name.
        names: Parameters of the first layer's attention that were sent.
    """
    family, gradients = model.family, {name: observed[name] for name in names}
    sent_OD = torch.cat([*family.projections(gradients, 0).values()])
    tables = {family.word_embedding, family.position_embedding} - {None}
    if not lacks_numbers([sent_OD]) or not tables <= observed.keys():
        return None
    whole_OD = _completed_in(_known(model, observed), sent_OD)
    if (span := row_space([whole_OD])) is not None and span.exact:
        again_OD = _completed_in(span.basis_DR.T, sent_OD)
        whole_OD = torch.where(whole_OD.any(1, keepdim=True), whole_OD, again_OD)
    if not whole_OD.any():
        return None
    whole = {name: value.clone() for name, value in gradients.items()}
    parts = [*family.projections(whole, 0).values()]
    rows = torch.split(whole_OD, [len(part_OD) for part_OD in parts])
    for part_OD, rows_OD in zip(parts, rows, strict=True):
        part_OD.copy_(rows_OD)
    return whole


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


def _completed_in(basis_RD: Tensor, sent_OD: Tensor) -> Tensor:
    """Returns the rows [O, D] that lie in a span, as far as what was sent of them shows it.

    Where numbers came, what they miss of the span is left in a row, scaled to what noise leaves of
    a whole row outside of it: who estimates noise from there gets that of the completed numbers.
    """
    whole_OD, (rank, width) = torch.zeros_like(sent_OD), basis_RD.shape
    enough_O = (sent_OD != 0).sum(1) >= rank + _SPARE
    for o in enough_O.nonzero()[:, 0].tolist():
        sent_D = sent_OD[o].double()
        came_D = sent_D != 0
        u_XR, s_R, vh_RR = torch.linalg.svd(basis_RD[:, came_D].T, full_matrices=False)
        if s_R[-1] * _AMPLIFIED < 1:
            continue
        row_D = ((sent_D[came_D] @ u_XR) / s_R) @ vh_RR @ basis_RD
        rest_D = (sent_D - row_D).where(came_D, 0)
        square = rest_D.square().sum().clamp_min(NOTHING)
        noise = square / (len(u_XR) - rank)
        if noise < _ROUNDING**2 * sent_D[came_D].square().mean():
            outside = noise * s_R.pow(-2).mean() * (width - rank)
            whole_OD[o] = (row_D + rest_D * (outside / square).sqrt()).to(whole_OD)
    return whole_OD
