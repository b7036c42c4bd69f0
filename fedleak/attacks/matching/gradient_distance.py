"""Distances between gradients that are never formed.

Gradient matching computes, thousands of times, how far the gradient of a guessed batch is from the
observed one. The gradient of a linear layer is a sum of outer products over the batch's tokens,
`G = sum_n d_n a_n^T = D^T A`, with its inputs A and the loss's gradient D at its outputs, so

    |G|^2   = sum((A A^T) * (D D^T))            two Gram matrices, as large as the batch
    <G*, G> = sum((D U) * (A V))                where G* = U V^T, of rank no more than tokens
            = sum(D * (A G*^T))                 where G* has full rank, as noise makes it

and squared and cosine distances, with their derivatives in the guess, need nothing else. All other
gradients (biases, norms, positions) are small and are formed. `factored_gradients` computes both.
An absolute (L1) distance needs every element of G: it is summed over one weight at a time.

Shapes: R rows (each about one victim), K guesses for each, B sequences, T tokens, N = B T places of
a guess, D hidden size, X and Y the two sides of a weight, Q rank, P parameters, G parameters of
one shape, C = G R.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fedleak.util.lists import grouped

TOGETHER = {"cpu": 64, "cuda": 4096}
"""Weights of one shape are processed together up to so many tokens of all rows and guesses.

Measured on a CPU for a model of 6 x 384; for GPUs a guess.
"""

FACTORED = 0.3
"""Targets are kept as factors if their rank is below this share of their smaller side."""

Loss = Literal["cos", "l2l1", "l2"]
"""The distance of gradients that an attack minimises."""

L1_WEIGHT = 0.01

_TINY = 1e-30  # squares of float32 gradients are larger, or nothing


class LowRankGradient(NamedTuple):
    """Observed gradients of a weight as `left right^T`."""

    left_RXQ: Tensor
    right_RYQ: Tensor


@dataclass(frozen=True)
class Target:
    """The observed gradients of R rows, by parameter name.

    Attributes:
        tensors: Gradients [R, ...], or their factors.
        norms: Their norms [R]; a tensor whose norm is 0 is left out.
    """

    tensors: Mapping[str, LowRankGradient | Tensor]
    norms: Mapping[str, Tensor]

    def take(self, chosen_S: Tensor) -> "Target":
        """Returns the target of some rows; one may be chosen several times."""
        norms = {name: norm_R[chosen_S] for name, norm_R in self.norms.items()}
        return self._with(lambda tensor: tensor[chosen_S], norms)

    def to(self, dtype: torch.dtype) -> "Target":
        """Returns the target in another precision; norms keep theirs."""
        return self._with(lambda tensor: tensor.to(dtype), self.norms)

    def _with(self, change: Callable[[Tensor], Tensor], norms: Mapping[str, Tensor]) -> "Target":
        tensors = {
            name: LowRankGradient(*map(change, value))
            if isinstance(value, LowRankGradient)
            else change(value)
            for name, value in self.tensors.items()
        }
        return Target(tensors, norms)


class Outer(NamedTuple):
    """The gradient [X, Y] of a weight as `left^T right`, or a term of it.

    A term that all guesses share has K = 1.
    """

    left_RKNX: Tensor
    right_RKNY: Tensor


Gradient = tuple[Outer, ...] | Tensor
"""A weight's gradient as a sum of outer products; or a small gradient itself, [R, K, ...]."""

Gradients = Mapping[str, Gradient]

Distance = Callable[[Gradients, Target], Tensor]
"""(gradients of guesses, target) -> distances [R, K]."""


@dataclass(frozen=True)
class Cosine:
    """The mean over tensors of 1 - cosine (LAMP, Balunovic et al. 2022, equation 3).

    Attributes:
        weights: Weights of tensors, by parameter name; 1 for others.
    """

    weights: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, gradients: Gradients, target: Target) -> Tensor:
        """Returns the distances, from 0 to 2."""
        inner_PRK, square_PRK, norm_PR1 = _products(gradients, target)
        size_PRK = square_PRK.clamp_min(_TINY).sqrt() * norm_PR1.clamp_min(_TINY)
        weights = [self.weights.get(name, 1.0) for name in gradients]
        weight_PR1 = (norm_PR1 > 0) * norm_PR1.new_tensor(weights)[:, None, None]
        total_RK = ((1 - inner_PRK / size_PRK) * weight_PR1).sum(0)
        return total_RK / weight_PR1.sum(0).clamp_min(_TINY)


def squared(gradients: Gradients, target: Target) -> Tensor:
    """Returns the squared distance, summed over tensors (DLG, Zhu et al. 2019, equation 4)."""
    inner_PRK, square_PRK, norm_PR1 = _products(gradients, target)
    return ((square_PRK - 2 * inner_PRK + norm_PR1.square()) * (norm_PR1 > 0)).sum(0)


def squared_and_absolute(gradients: Gradients, target: Target) -> Tensor:
    """Returns the squared plus weighted absolute distance (TAG, Deng et al. 2021).

    It is summed over tensors. The weight is the same for every tensor, as in LAMP's comparison with
    TAG. The target must be whole, without factors.
    """
    first_R = next(iter(target.norms.values()))
    total_RK = first_R.new_zeros(len(first_R), 1)
    for name, gradient in gradients.items():
        observed = _formed(target.tensors[name])
        present_R1 = (target.norms[name] > 0).to(total_RK.dtype)[:, None]
        if isinstance(gradient, Tensor):
            apart_RKX = (gradient - _rows(observed, gradient)[:, None]).flatten(2)
            unused_R1X = observed.flatten(1)[:, None, apart_RKX.shape[2] :]
            apart_RK = _both_distances(apart_RKX) + _both_distances(unused_R1X)
        else:
            apart_RK = _whole_weight(observed, *(side for part in gradient for side in part))
        total_RK = total_RK + apart_RK.to(total_RK.dtype) * present_R1
    return total_RK


def _both_distances(apart_RKX: Tensor) -> Tensor:
    return _sum(apart_RKX.square()) + L1_WEIGHT * _sum(apart_RKX.abs())


class _WholeWeight(torch.autograd.Function):
    """The distance of one weight's gradient, which exists for one victim and guess at a time.

    Its derivative M in G turns into those in the sides of the outer products, `right M^T` and
    `left M`, at once, so that nothing as large as a weight is kept for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, observed_RXY: Tensor, *sides: Tensor) -> Tensor:
        parts = list(zip(sides[::2], sides[1::2], strict=True))
        victims, guesses = len(observed_RXY), max(left.shape[1] for left, _ in parts)
        out_RK = _sum(observed_RXY.new_zeros(victims, guesses, 1))
        wanted = any(ctx.needs_input_grad[1:])
        grads = [torch.zeros_like(side) for side in sides] if wanted else []
        for r in range(victims):
            for k in range(guesses):
                at = [
                    (left[r, k % left.shape[1]], right[r, k % right.shape[1]])
                    for left, right in parts
                ]
                apart_XY = observed_RXY[r]
                for i, (left_NX, right_NY) in enumerate(at):
                    apart_XY = torch.addmm(apart_XY, left_NX.T, right_NY, beta=1 if i else -1)
                out_RK[r, k] = _both_distances(apart_XY.flatten()[None, None])[0, 0]
                if not wanted:
                    continue
                grad_XY = apart_XY.sign().mul_(L1_WEIGHT).add_(apart_XY, alpha=2)
                for i, (left_NX, right_NY) in enumerate(at):
                    grads[2 * i][r, k % grads[2 * i].shape[1]] += right_NY @ grad_XY.T
                    grads[2 * i + 1][r, k % grads[2 * i + 1].shape[1]] += left_NX @ grad_XY
        ctx.save_for_backward(*grads)
        return out_RK

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad_RK,) = grad_outputs
        scaled = ((grad * grad_RK[:, :, None, None]).to(grad) for grad in ctx.saved_tensors)
        return None, *scaled


_whole_weight: Callable[..., Tensor] = _WholeWeight.apply


def _products(gradients: Gradients, target: Target) -> tuple[Tensor, Tensor, Tensor]:
    """Returns <G*, G> and |G|^2 [P, R, K] of P parameters, and |G*| [P, R, 1]."""
    # Gradients of the same shape together: there are many, and most are small.
    alike = grouped(gradients, lambda name: _kind(name, gradients[name], target.tensors[name]))
    inner: dict[str, Tensor] = {}
    square: dict[str, Tensor] = {}
    for names in alike.values():
        group, observed = [gradients[n] for n in names], [target.tensors[n] for n in names]
        of_names = _of_tables if isinstance(group[0], Tensor) else _of_weights
        inner_GRK, square_GRK = of_names(group, observed)
        inner |= zip(names, inner_GRK.unbind(), strict=True)
        square |= zip(names, square_GRK.unbind(), strict=True)
    norms = torch.stack([target.norms[name] for name in gradients])
    return (
        torch.stack([inner[name] for name in gradients]),
        torch.stack([square[name] for name in gradients]),
        norms[:, :, None],
    )


def _kind(name: str, gradient: Gradient, observed: LowRankGradient | Tensor) -> Hashable:
    """Returns a key that is equal for gradients that are processed together."""
    if isinstance(gradient, Tensor):
        return gradient.shape
    left_RKNX = gradient[0].left_RKNX
    tokens, most = left_RKNX[..., 0].numel(), TOGETHER.get(left_RKNX.device.type, 0)
    # Copying a target as large as the weight, or much else, costs more than a call for each.
    if isinstance(observed, Tensor) or tokens > most:
        return name
    return tuple(side.shape for part in (*gradient, observed) for side in part)


def _of_tables(
    gradients: Sequence[Gradient], observed: Sequence[LowRankGradient | Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns <G*, G> and |G|^2 [G, R, K] of gradients that are formed."""
    value_GRKX = torch.stack([_formed(gradient) for gradient in gradients])
    rows = [_rows(_formed(table), value_GRKX[0]) for table in observed]
    inner_GRK = _sum(value_GRKX * torch.stack(rows)[:, :, None], 3)
    return inner_GRK, _sum(value_GRKX.square(), 3)


def _of_weights(
    gradients: Sequence[Gradient], observed: Sequence[LowRankGradient | Tensor]
) -> tuple[Tensor, Tensor]:
    """Returns <G*, G> and |G|^2 [G, R, K] of weights' gradients in parts."""
    if isinstance(observed[0], Tensor):
        seen: tuple[Tensor, ...] = (observed[0],)
    else:
        seen = tuple(_joined(sides) for sides in zip(*observed, strict=True))
    parts = zip(*(gradient for gradient in gradients if isinstance(gradient, tuple)), strict=True)
    sides = [_joined(side) for same in parts for side in zip(*same, strict=True)]
    inner_CK, square_CK = _of_weight(seen, *sides)
    shape = len(gradients), -1, inner_CK.shape[1]
    return inner_CK.view(shape), square_CK.view(shape)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns tensors one after the other, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _formed(gradient: Gradient | LowRankGradient) -> Tensor:
    """Returns a small gradient, which is always formed."""
    assert isinstance(gradient, Tensor)
    return gradient


class _OfWeight(torch.autograd.Function):
    """<G*, G> and |G|^2 [C, K] of gradients of one or several weights, stacked along the rows.

    The derivatives in the sides need no more than the Gram matrices. Written by hand, they take a
    third of the operations that autograd would record.
    """

    @staticmethod
    def forward(ctx: Any, observed: tuple[Tensor, ...], *sides: Tensor) -> tuple[Tensor, Tensor]:
        parts = list(zip(sides[::2], sides[1::2], strict=True))
        seen = [_seen(observed, left, right) for left, right in parts]
        grams: list[tuple[int, int, Tensor, Tensor]] = []
        terms = [_sum(a * b) for a, b in seen]
        inner_RK = sum(terms[1:], terms[0])
        squares = []
        for i, (left, right) in enumerate(parts):
            for j, (left_too, right_too) in enumerate(parts[: i + 1]):
                left_gram, right_gram = left @ left_too.mT, right @ right_too.mT
                grams.append((i, j, left_gram, right_gram))
                squares.append(_sum(left_gram * right_gram) * (1 if i == j else 2))
        square_RK = sum(squares[1:], squares[0])
        if any(ctx.needs_input_grad[1:]):
            ctx.parts, ctx.seen, ctx.grams, ctx.observed = parts, seen, grams, observed
        return inner_RK, square_RK

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dtype = ctx.parts[0][0].dtype
        inner_RK11, square_RK11 = (grad[:, :, None, None].to(dtype) for grad in grad_outputs)
        grads = [
            list(_side_grads(ctx.observed, left_seen * inner_RK11, right_seen * inner_RK11))
            for left_seen, right_seen in ctx.seen
        ]
        for i, j, left_gram, right_gram in ctx.grams:
            left_term = 2 * square_RK11 * left_gram
            right_term = 2 * square_RK11 * right_gram
            grads[i][0] = grads[i][0] + right_term @ ctx.parts[j][0]
            grads[i][1] = grads[i][1] + left_term @ ctx.parts[j][1]
            if i != j:
                grads[j][0] = grads[j][0] + right_term.mT @ ctx.parts[i][0]
                grads[j][1] = grads[j][1] + left_term.mT @ ctx.parts[i][1]
        return None, *(grad for pair in grads for grad in pair)


_of_weight: Callable[..., tuple[Tensor, Tensor]] = _OfWeight.apply


def _flat(value_RKNX: Tensor, matrix_RXQ: Tensor) -> Tensor:
    """Returns the product [R, K, N, Q] of all guesses of a row with the row's matrix."""
    flat = value_RKNX.flatten(1, 2) @ matrix_RXQ
    return flat.view(*value_RKNX.shape[:3], flat.shape[2])


def _seen(observed: tuple[Tensor, ...], left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two tensors [R, K, N, ...] whose inner product is <G*, left^T right>."""
    if len(observed) == 2:
        return _flat(left, observed[0]), _flat(right, observed[1])
    return left, _flat(right, observed[0].mT)


def _side_grads(
    observed: tuple[Tensor, ...], left_seen: Tensor, right_seen: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns the derivatives of <G*, left^T right> in left and right.

    `left_seen` and `right_seen` are the tensors of `_seen`, times the factor from the outer
    derivative.
    """
    if len(observed) == 2:
        return _flat(right_seen, observed[0].mT), _flat(left_seen, observed[1].mT)
    return right_seen, _flat(left_seen, observed[0])


def _sum(terms: Tensor, kept: int = 2) -> Tensor:
    """Returns the sum over all but the first dimensions, in float32 where the terms have less."""
    half = terms.dtype in (torch.bfloat16, torch.float16)
    return terms.flatten(kept).sum(kept, dtype=torch.float32 if half else None)


def _rows(observed: Tensor, gradient: Tensor) -> Tensor:
    """Returns as many rows of an observed table [R, X, D] as a gradient [R, K, T, D] has."""
    return observed[:, : gradient.shape[2]] if gradient.dim() == 4 else observed


def _with_rows(gradient: Tensor, rows: int) -> Tensor:
    """Returns a small gradient, and a table's [R, K, T, D] with zeros up to so many rows."""
    if gradient.dim() != 4 or gradient.shape[2] == rows:
        return gradient
    return torch.nn.functional.pad(gradient, (0, 0, 0, rows - gradient.shape[2]))


def of_nothing(distance: Distance, target: Target) -> Tensor:
    """Returns the distances [R] of gradients that are zero."""
    zeros: dict[str, Gradient] = {}
    for name, value in target.tensors.items():
        if isinstance(value, LowRankGradient):
            sides = (part.new_zeros(len(part), 1, 0, part.shape[1]) for part in value)
            zeros[name] = (Outer(*sides),)
        else:
            zeros[name] = value.new_zeros(()).expand(len(value), 1, *value.shape[1:])
    return distance(zeros, target)[:, 0]


def added(fixed: Gradients, changing: Gradients) -> dict[str, Gradient]:
    """Returns the sum of gradients of the same parameters; `fixed` has K = 1.

    One gradient of a table may have fewer rows than the other.
    """
    total: dict[str, Gradient] = {}
    for name, gradient in changing.items():
        fixed_gradient = fixed[name]
        if isinstance(fixed_gradient, Tensor):
            rows = max(_formed(gradient).shape[2], fixed_gradient.shape[2])
            total[name] = _with_rows(_formed(gradient), rows) + _with_rows(fixed_gradient, rows)
        else:
            assert isinstance(gradient, tuple)
            total[name] = (*gradient, *fixed_gradient)
    return total


def distance_of(loss: Loss, weights: Mapping[str, float] | None = None) -> Distance:
    """Returns the distance of a name; a cosine takes `weights` of tensors."""
    distances: Mapping[Loss, Distance] = {
        "cos": Cosine(weights or {}),
        "l2l1": squared_and_absolute,
        "l2": squared,
    }
    return distances[loss]


def target_of(
    observed: Sequence[Mapping[str, Tensor]], rank: int, whole: Collection[str]
) -> Target:
    """Returns the target of several victims, who sent the same parameters.

    Args:
        observed: Each victim's gradients.
        rank: Tokens in the largest batch: a gradient without noise has no larger rank.
        whole: Parameters whose gradients are not factored: tables, because the gradients of guesses
            are formed, too, and all parameters for an absolute distance.
    """
    tensors: dict[str, LowRankGradient | Tensor] = {}
    norms = {}
    for name in observed[0]:
        value_RXY = torch.stack([tensors_of[name] for tensors_of in observed])
        norms[name] = value_RXY.flatten(1).norm(dim=1)
        small = value_RXY.dim() == 3 and rank < FACTORED * min(value_RXY.shape[1:])
        factors = _low_rank(value_RXY, rank) if small and name not in whole else None
        tensors[name] = value_RXY if factors is None else factors
    return Target(tensors, norms)


def _low_rank(value_RXY: Tensor, rank: int) -> LowRankGradient | None:
    """Returns exact factors of gradients of at most this rank; None if the rank is larger.

    A random range finder (Halko et al. 2011) with one power step, then a check against all of it.
    """
    rng = torch.Generator().manual_seed(0)
    probe_YQ = torch.randn(value_RXY.shape[2], rank + 4, generator=rng).to(value_RXY)
    left_RXQ = torch.linalg.qr(value_RXY @ probe_YQ)[0]
    right_RYQ = torch.linalg.qr(value_RXY.mT @ left_RXQ)[0]
    left_RXQ = value_RXY @ right_RYQ
    rest_R = (value_RXY - left_RXQ @ right_RYQ.mT).flatten(1).norm(dim=1)
    whole_R = value_RXY.flatten(1).norm(dim=1)
    rounding = 32 * torch.finfo(value_RXY.dtype).eps
    return LowRankGradient(left_RXQ, right_RYQ) if (rest_R <= rounding * whole_R).all() else None
