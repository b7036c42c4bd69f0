"""Subspaces that weight gradients span, and a membership test that knows its noise.

A linear layer y = W x with inputs X [N, I] and output gradients D [N, O] has the weight gradient
D^T X: every row is a combination of inputs (Petrov et al. 2024, theorem 5.1). So an input lies in
the row space, and a vector that does not was no input.

Rounding (or noise) E perturbs the row space. To first order (Wedin 1972) a true input
x = sum_k c_k v_k shows a residual of at most ||E|| * sqrt(sum_k (c_k / s_k)^2), where s_k are the
singular values. `excess` is the residual in units of that bound: at most about 1 for a true
input, orders of magnitude more for others. That needs no threshold per model or batch size, and
no absolute tolerance.

Shapes: N vectors, D hidden size, O outputs, R rank, S sketch columns, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedleak.models.family import TokenTable

ACCEPT = 3.0
"""Largest `excess` of an input. First-order theory says 1; the rest is for the second order."""

_FLOAT32 = 4 * torch.finfo(torch.float32).eps
"""Largest rounding noise of a float32 gradient, relative to its largest singular value."""

_TINY = 1e-9
"""Singular values below this fraction of the largest are rounding of rounding: no gap there."""

_ACTIVATION_ROUNDING = 2e-6
"""Relative float32 error of activations: the client's and ours differ by as much."""


@dataclass(frozen=True)
class Span:
    """The row space of a layer's weight gradients.

    Attributes:
        basis_DR: Orthonormal, float64.
        singular_R: Singular values kept, the largest being 1.
        floor: The largest singular value dropped: the size of the noise.
    """

    basis_DR: Tensor
    singular_R: Tensor
    floor: float

    @property
    def rank(self) -> int:
        """Dimensions of the subspace."""
        return self.basis_DR.shape[1]

    @property
    def width(self) -> int:
        """Dimensions of the space around it."""
        return self.basis_DR.shape[0]

    def excess(self, x_ND: Tensor) -> Tensor:
        """Returns [N]: each vector's residual over the largest that an input could have."""
        x_ND = x_ND.double()
        x_ND = x_ND / x_ND.norm(dim=-1, keepdim=True)
        c_NR = x_ND @ self.basis_DR
        residual_N = (x_ND - c_NR @ self.basis_DR.T).norm(dim=-1)
        bound_N = self.floor * (c_NR / self.singular_R).norm(dim=-1)
        excess_N: Tensor = residual_N / (bound_N + _ACTIVATION_ROUNDING)
        return excess_N

    def null_sketch(self, columns: int, rng: torch.Generator) -> Tensor:
        """Returns [D, S]: orthonormal random directions that no input has a part in."""
        columns = min(columns, self.width - self.rank)
        z_DS = torch.randn(self.width, columns, generator=rng, dtype=torch.float64)
        z_DS = z_DS.to(self.basis_DR.device)
        z_DS = z_DS - self.basis_DR @ (self.basis_DR.T @ z_DS)
        basis_DS: Tensor = torch.linalg.qr(z_DS)[0]
        return basis_DS


def row_space(gradients_OD: Sequence[Tensor]) -> Span | None:
    """Returns the span of the rows of all gradients, or None where noise hides its end.

    Each gradient counts with unit norm. The rank is where the spectrum falls most steeply into
    float32 rounding; without such a fall (noise was added, or there are as many tokens as
    dimensions) no subspace can be told.
    """
    unit = [g.double() / g.double().norm() for g in gradients_OD if g.norm() > 0]
    if not unit:
        return None
    _, s_D, vh_DD = torch.linalg.svd(torch.cat(unit), full_matrices=False)
    s_D = s_D / s_D[0]
    clamped_D = s_D.clamp_min(_TINY)
    falls = (clamped_D[:-1] / clamped_D[1:]).masked_fill(s_D[1:] > _FLOAT32, 0.0)
    if not falls.any():
        return None
    rank = int(falls.argmax()) + 1
    return Span(vh_DD[:rank].T.contiguous(), s_D[:rank], float(s_D[rank]))


def tokens_in_span(
    table: TokenTable, span: Span, rng: torch.Generator, *, shortlist: int = 2048, patience: int = 3
) -> list[Tensor]:
    """Returns for each position the tokens whose attention input lies in the span.

    The whole vocabulary goes through a sketch of the null space, where an input is zero; only
    the `shortlist` nearest are tested exactly. Every position up to the longest sequence has a
    token, so the search ends after `patience` positions without one.
    """
    z_DS = span.null_sketch(32, rng).float()
    token_VD = table.token_VD - table.token_VD.mean(-1, keepdim=True)
    position_PD = table.position_PD - table.position_PD.mean(-1, keepdim=True)
    gain_DS = table.norm.weight.detach()[:, None] * z_DS
    token_VS, position_PS = token_VD @ gain_DS, position_PD @ gain_DS
    shift_S = table.norm.bias.detach() @ z_DS
    square_V = token_VD.square().mean(-1)

    found: list[Tensor] = []
    for position in range(len(position_PD)):
        p_D = position_PD[position]
        # The LayerNorm's variance of e + p, without forming e + p for the whole vocabulary.
        cross_V = token_VD @ p_D * (2 / span.width)
        sigma_V = (square_V + cross_V + p_D.square().mean() + table.norm.eps).sqrt()
        sketch_VS = (token_VS + position_PS[position]) / sigma_V[:, None] + shift_S
        nearest = sketch_VS.norm(dim=-1).topk(min(shortlist, len(token_VD)), largest=False).indices
        x_ND = table(nearest, torch.full_like(nearest, position))
        found.append(nearest[span.excess(x_ND) < ACCEPT].sort().values)
        if len(found) >= patience and not any(len(ids) for ids in found[-patience:]):
            break
    while found and not len(found[-1]):
        found.pop()
    return found
