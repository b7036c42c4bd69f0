"""Subspaces that weight gradients span, and a membership test that knows its noise.

A linear layer y = W x with inputs X [N, I] and output gradients D [N, O] has the weight gradient
D^T X: every row is a combination of inputs (Petrov et al. 2024, theorem 5.1). So an input lies in
the row space, and a vector that does not was no input.

Rounding (or noise) E perturbs the row space. To first order (Wedin 1972) a true input
x = sum_k c_k v_k shows a residual of at most ||E|| * sqrt(sum_k (c_k / s_k)^2), where s_k are the
singular values. `excess` is the residual in units of that bound: at most about 1 for a true
input, orders of magnitude more for others. That needs no threshold per model or batch size, and
no absolute tolerance.

Where the gradient carries more than rounding (added noise, local steps, half precision), the rank
is the number of singular values above the edge of the noise's own spectrum (Marchenko and Pastur
1967), and `excess` only ranks.

Shapes: N vectors, D hidden size, O outputs, R rank, I rank of an adapter, M known vectors,
S sketch columns, V vocabulary, P positions, C constants (0 or 1).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedleak.attacks.clock import Clock
from fedleak.models import LanguageModel
from fedleak.models.family import TokenTable, lora_a, lora_b

ACCEPT = 3.0
"""Largest `excess` of an input. First-order theory says 1; the rest is for the second order."""

SPARE = 8
"""Directions that must be left over, or a vector in the span says nothing."""

SKETCH = 64
"""Directions of the null space that a search for sequences looks at."""

_SHORTLIST, _PATIENCE = 2048, 3
"""Tokens of a position that are tested exactly; positions without a token that end a search."""

_FLOAT32 = 4 * torch.finfo(torch.float32).eps
"""Largest rounding noise of a float32 gradient, relative to its largest singular value."""

_LEAST = 0.1
"""Singular values of noise stay above this fraction of the lower edge of its spectrum."""

_TINY = 2e-3
"""Singular values below this fraction of the rounding are rounding themselves: no gap counts."""

_VANISHING = 1e-30
"""Singular values below this fraction of the largest count as this: their squares could be zero."""

_EDGE = 1.05
"""Singular values of noise pass the edge of its spectrum by a few per cent at these sizes."""

ACTIVATION_ROUNDING = 2e-6
"""Relative float32 error of activations: the client's and ours differ by as much."""

REPEATS = int((ACCEPT * ACTIVATION_ROUNDING) ** -0.5)
"""Tokens of a sequence that may add nothing to a span's rank, because they repeat others.

One equal token more moves a mean over n of them by about 1 / n^2: after so many, by rounding.
"""


@dataclass(frozen=True, kw_only=True)
class Span:
    """The row space of a layer's weight gradients.

    Attributes:
        basis_DR: Orthonormal, float64.
        singular_R: Singular values kept, the largest being 1.
        floor: The largest singular value dropped: the size of the noise.
        exact: Only rounding was dropped, so that `excess` decides; else it only ranks.
        full: More than noise was dropped: there are more inputs than dimensions.
    """

    basis_DR: Tensor
    singular_R: Tensor
    floor: float
    exact: bool = True
    full: bool = False

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
        excess_N: Tensor = residual_N / (bound_N + ACTIVATION_ROUNDING)
        return excess_N

    def null_sketch(self, columns: int, rng: torch.Generator) -> Tensor:
        """Returns [D, S]: orthonormal random directions at right angles to every input."""
        columns = min(columns, self.width - self.rank)
        z_DS = torch.randn(self.width, columns, generator=rng, dtype=torch.float64)
        z_DS = z_DS.to(self.basis_DR.device)
        z_DS = z_DS - self.basis_DR @ (self.basis_DR.T @ z_DS)
        basis_DS: Tensor = torch.linalg.qr(z_DS)[0]
        return basis_DS

    def beside(self, known_MD: Tensor) -> "Span":
        """Returns what the span adds to the span of known vectors, in their complement."""
        rest_RD = outside(self.singular_R[:, None] * self.basis_DR.T, known_MD.double())
        _, s_R, vh_RD = torch.linalg.svd(rest_RD, full_matrices=False)
        # What lies in the known span leaves its noise behind: about the floor.
        rank = int((s_R > (10 if self.exact else 2) * self.floor).sum())
        return Span(
            basis_DR=vh_RD[:rank].T.contiguous(),
            singular_R=s_R[:rank],
            floor=self.floor,
            exact=self.exact,
        )


@dataclass(frozen=True, kw_only=True)
class ProjectedSpan(Span):
    """The row space of the gradient of an adapter's second matrix B, while B is zero.

    An adapter adds B A x to W x, so that the gradient of B is the sum of g (A x)^T: its rows are
    combinations of A x, of which A is known. The gradient of A, B^T g x^T, is zero because B is.
    The basis has as many dimensions as A has rows, so the batch must have fewer tokens than that.

    Attributes:
        first_ID: A.
    """

    first_ID: Tensor

    def excess(self, x_ND: Tensor) -> Tensor:
        """Returns [N]: the residual of A x over the largest that an input could have."""
        return super().excess(x_ND.double() @ self.first_ID.T)

    def null_sketch(self, columns: int, rng: torch.Generator) -> Tensor:
        """Returns [D, S]: random directions at right angles to every input, of no common length."""
        return self.first_ID.T @ super().null_sketch(columns, rng)


def outside(x_ND: Tensor, known_MD: Tensor) -> Tensor:
    """Returns the part [N, D] of vectors at right angles to all of some known ones."""
    known_DM: Tensor = torch.linalg.qr(known_MD.T)[0]
    return x_ND - (x_ND @ known_DM) @ known_DM.T


def margin(accepted: float, rejected: float) -> float | None:
    """Returns how many times larger a rejected excess is; None if nothing was rejected.

    An excess below 1 is rounding, and counts as 1.
    """
    return rejected / max(accepted, 1.0) if math.isfinite(rejected) else None


def row_space(
    gradients_OD: Sequence[Tensor], rounding: float = 0.0, spare: int = SPARE
) -> Span | None:
    """Returns the span of the rows of all gradients; None where it has no end.

    Each gradient counts with unit norm, and the rank is where the spectrum falls most steeply
    into float32 rounding. Without such a fall there is noise, or there are as many tokens as
    dimensions: each gradient then counts in units of its own noise, and the rank is the number of
    singular values that noise alone would not reach. None if that leaves no directions over.

    Args:
        gradients_OD: Of matrices with the same input.
        rounding: Relative size of their rounding, if it is more than float32's own.
        spare: Directions that must be left over.
    """
    rounding = max(rounding, _FLOAT32)
    # An output without a gradient would let the spectrum fall where no rank ends.
    blocks = [g[g.any(dim=1)].double() for g in gradients_OD if g.norm() > 0]
    if not blocks:
        return None
    stacked_OD = torch.cat([g / g.norm() for g in blocks])
    rows, width = stacked_OD.shape
    columns = 64
    while True:
        s_R, basis_DR = _leading(stacked_OD, columns)
        complete = len(s_R) == min(rows, width)
        rank = _end(s_R, rounding)
        # A sketch has to have some columns more than the rank.
        if rank is not None and (complete or rank + SPARE <= len(s_R)) and rank + spare <= width:
            floor = max(float(s_R[rank]), _TINY * rounding)
            return Span(
                basis_DR=basis_DR[:, :rank].contiguous(), singular_R=s_R[:rank], floor=floor
            )
        if complete:
            return _noisy(blocks, rounding)
        columns *= 2


@dataclass(frozen=True)
class LayerSpans:
    """The row spaces of the first two layers' attention gradients.

    Attributes:
        first: Spanned by the inputs of the first attention.
        second: Spanned by the inputs of the second attention.
        mixed: Spanned by the inputs of the first attention's output matrix; None if not shared.
    """

    first: Span
    second: Span
    mixed: Span | None


def layer_spans(model: LanguageModel, gradients: Mapping[str, Tensor]) -> LayerSpans | None:
    """Returns the spans of gradients by parameter name; None if an attention's span has no end."""
    family = model.family
    first, second = (
        row_space(family.attention_gradients(gradients, layer))
        or _projected(model, gradients, layer)
        for layer in (0, 1)
    )
    output_DD = family.output_gradient(gradients, 0)
    mixed = None if output_DD is None else row_space([output_DD])
    return None if first is None or second is None else LayerSpans(first, second, mixed)


def _projected(
    model: LanguageModel, gradients: Mapping[str, Tensor], layer: int
) -> ProjectedSpan | None:
    """Returns the span of A x of a layer's attention inputs; None if no adapter of values has one.

    The first token has no gradient at its query, because it attends to itself alone.
    """
    *_, value = model.family.attention_parameters(layer)
    gradient_OI = gradients.get(lora_b(value))
    if gradient_OI is None:
        return None
    span = row_space([gradient_OI], spare=1)
    if span is None or not span.exact:
        return None
    first_ID = model.module.get_parameter(lora_a(value)).detach().double()
    return ProjectedSpan(**vars(span), first_ID=first_ID)


def _leading(matrix_OD: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Returns the leading singular values, the largest being 1, and right vectors [D, R].

    A random range finder (Halko et al. 2011), orthonormalised at every product, or small singular
    values would be squared into rounding; with about as many columns as dimensions, all of them.
    """
    rows, width = matrix_OD.shape
    if 2 * columns >= min(rows, width):
        _, s_R, vh_RD = torch.linalg.svd(torch.linalg.qr(matrix_OD)[1], full_matrices=False)
        return s_R / s_R[0], vh_RD.T
    # Any test directions will do: these are the same in every call.
    rng = torch.Generator().manual_seed(0)
    test_SO = torch.randn(columns, rows, generator=rng, dtype=torch.float64).to(matrix_OD.device)
    range_DS = torch.linalg.qr((test_SO @ matrix_OD).T)[0]
    # Once to the outputs and back, each time orthonormalised: as good as the whole decomposition.
    range_OS = torch.linalg.qr(matrix_OD @ range_DS)[0]
    range_DS, triangle_SS = torch.linalg.qr(matrix_OD.T @ range_OS)
    u_SR, s_R, _ = torch.linalg.svd(triangle_SS)
    return s_R / s_R[0], range_DS @ u_SR


def _end(s_R: Tensor, rounding: float) -> int | None:
    """Returns where a falling spectrum drops most steeply into rounding, None if it does not."""
    clamped_R = s_R.clamp_min(_TINY * rounding)
    falls = (clamped_R[:-1] / clamped_R[1:]).masked_fill(s_R[1:] > rounding, 0.0)
    return int(falls.argmax()) + 1 if falls.any() else None


def _noisy(blocks_OD: Sequence[Tensor], rounding: float) -> Span | None:
    """Returns the span of what stands above the noise, None if nothing or everything does."""
    scaled_OD = torch.cat([_in_units_of_noise(g, rounding) for g in blocks_OD])
    rows, width = scaled_OD.shape
    _, s_R, vh_RD = torch.linalg.svd(torch.linalg.qr(scaled_OD)[1], full_matrices=False)
    edge = _EDGE * max(1.0, _noise(s_R, rows, width)) * (rows**0.5 + width**0.5)
    rank = int((s_R > edge).sum())
    if not 0 < rank <= width - SPARE:
        return None
    # Noise fills every direction: with more rows than columns none is left nearly without it.
    full = float(s_R[-1]) < _LEAST * (rows**0.5 - width**0.5)
    floor = float(edge / s_R[0])
    return Span(
        basis_DR=vh_RD[:rank].T.contiguous(),
        singular_R=s_R[:rank] / s_R[0],
        floor=floor,
        exact=False,
        full=full,
    )


def _in_units_of_noise(gradient_OD: Tensor, rounding: float) -> Tensor:
    """Scales rows so that the noise has unit variance: rounding if they were rounded, else any."""
    for dtype, digits, smallest in ((torch.bfloat16, 7, -133), (torch.float16, 10, -24)):
        if torch.equal(gradient_OD.to(dtype).to(gradient_OD.dtype), gradient_OD):
            # Half precision spaces numbers by their exponent; rounding is uniform in a space.
            exponent_OD = torch.frexp(gradient_OD).exponent - 1.0
            spacing_OD = torch.exp2((exponent_OD - digits).clamp_min(smallest))
            return gradient_OD / (spacing_OD.square().mean(1, keepdim=True) / 12).sqrt()
    s_R = torch.linalg.svdvals(gradient_OD)
    # A mask leaves rows without a number, and directions without any noise.
    return gradient_OD / max(_noise(s_R, *gradient_OD.shape), _TINY * rounding * float(s_R[0]))


def _noise(s_R: Tensor, rows: int, columns: int) -> float:
    """Returns the standard deviation of the noise, from singular values in falling order.

    The rank is the smallest at which noise alone explains the remaining values: none of them
    exceeds the edge that their own mean square implies.
    """
    s_R = s_R.clamp_min(_VANISHING * float(s_R[0]))
    tail_R = s_R.square().flip(0).cumsum(0).flip(0)
    left_R = torch.arange(len(s_R), 0, -1, device=s_R.device)
    # Beside a signal of rank r there is room for noise in r fewer rows and columns.
    rows_R = left_R + abs(rows - columns)
    sigma_R = (tail_R / (left_R * rows_R)).sqrt()
    edge_R = _EDGE * sigma_R * (rows_R.double().sqrt() + left_R.double().sqrt())
    first = int((s_R <= edge_R).nonzero()[0])
    return float(sigma_R[first])


def nearest_in(span: Span, x_ND: Tensor, most: int | None) -> Tensor:
    """Returns which vectors lie in a span, in rising order: the nearest, at most so many."""
    excess_N = span.excess(x_ND)
    inside_N = (excess_N < ACCEPT).nonzero()[:, 0]
    return inside_N[excess_N[inside_N].argsort()[:most]].sort().values


def tokens_in_span(
    table: TokenTable, span: Span, rng: torch.Generator, clock: Clock, most: int | None = None
) -> list[Tensor]:
    """Returns for each position the tokens whose attention input lies in the span.

    The whole vocabulary goes through a sketch of the null space, where an input is zero; only
    the nearest are tested exactly. Every position up to the longest sequence has a token, so the
    search ends after some positions without one, or when time is up.
    """
    z_DS = span.null_sketch(32, rng).float()
    token_VD, position_PD, constant_CD = table.directions()
    token_VS, position_PS = token_VD @ z_DS, position_PD @ z_DS
    shift_S = constant_CD.sum(0) @ z_DS
    everything_V = torch.arange(len(token_VD), device=token_VD.device)

    tokens: list[Tensor] = []
    for position in range(len(position_PD)):
        if clock.up():
            break
        sigma_V = table.scale(everything_V, torch.full_like(everything_V, position))
        sketch_VS = (token_VS + position_PS[position]) / sigma_V[:, None] + shift_S
        nearest = sketch_VS.norm(dim=-1).topk(min(_SHORTLIST, len(token_VD)), largest=False).indices
        x_ND = table(nearest, torch.full_like(nearest, position))
        tokens.append(nearest[nearest_in(span, x_ND, most)].sort().values)
        if len(tokens) >= _PATIENCE and not any(len(ids) for ids in tokens[-_PATIENCE:]):
            break
    while tokens and not len(tokens[-1]):
        tokens.pop()
    return tokens
