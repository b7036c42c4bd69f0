"""Chooses among sequences that several attacks read, by the observed gradient alone.

The gradient of a batch is a sum of its sequences' gradients, each of its own label and with its own
weight. So all attacks are compared by the residual of the observed gradient after least squares on
the gradients of a choice of (sequence, label) pairs, with no weight below zero. Weights are free,
because clipping, masks, local steps and repeated texts change them. Every number counts in units of
the noise, if its scale is known. Else it counts in units of the root mean square of its tensor:
with much noise of one size on all of them this is the same, and a tensor of small numbers counts as
much as one of large ones.

Least squares needs inner products only, and a weight's gradient `D^T A` has those of its factors
(`matching.gradient_distance`). So gradients are formed only where that takes less than the products
of all tokens with each other: one weight at a time.

Shapes: N sequences, C labels, K = N C pairs, T tokens, D hidden size, X and Y the sides of a
weight, M distinct tokens, or the tokens of all pairs.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks.certificate import close
from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.attacks.matching.factored_gradients import (
    BatchGradients,
    LogitGrad,
    class_logit_grad,
    next_token_logit_grad,
)
from fedleak.attacks.matching.gradient_distance import Gradient
from fedleak.attacks.reconstruction import Ids, tokens_of
from fedleak.models import CLASSIFICATION, LanguageModel, is_target, pad

_TOGETHER = 8
"""Sequences whose gradients are computed at once."""

_LOWER = 1 - 1e-9
"""A residual counts as lower by more than rounding."""

_MIX = 1e-10
"""Share of a gradient's square that must be beside those of others, or it is a mix of them."""

_PRODUCTS = 2**22
"""Inner products of tokens that are in memory at a time."""

_ROUNDING = 1e-6
"""A residual below this share of the gradient is rounding: it cannot become smaller."""

_DIGITS = 9
"""Digits of a residual: later ones depend on where its numbers lie in memory."""


class Factors(NamedTuple):
    """The gradients of K pairs in a weight, each the `left^T right` of its own tokens.

    Attributes:
        left_MX, right_MY: Of the tokens of all pairs, one pair after the other.
        counts: Tokens of each pair.
    """

    left_MX: Tensor
    right_MY: Tensor
    counts: list[int]


@dataclass(frozen=True)
class Pairs:
    """Inner products of the gradients of (sequence, label) pairs, in float64.

    Attributes:
        sequence: The index of each pair's sequence.
        label: Each pair's label; 0 in next-token training.
        gram_KK: Of the pairs with each other.
        observed_K: Of the pairs with the observed gradient.
        total: Of the observed gradient with itself.
    """

    sequence: tuple[int, ...]
    label: tuple[int, ...]
    gram_KK: Tensor
    observed_K: Tensor
    total: float

    def residual(self, chosen: Sequence[int]) -> float:
        """Returns the square of what these pairs leave, as a share of the gradient's square.

        It is infinite if a weight is not positive: without that pair it is no larger.
        """
        if not chosen:
            return 1.0
        weights = self.weights(chosen)
        if not bool((weights > 0).all()):
            return math.inf
        explained = float(weights @ self.observed_K[list(chosen)])
        return max(round(1 - explained / self.total, _DIGITS), _ROUNDING)

    def residuals_with(self, chosen: Sequence[int]) -> list[float]:
        """Returns for each pair the residual that it and those chosen leave, as `residual` does.

        A pair joins those chosen by a Schur complement, so all pairs take one system. It is
        infinite for those that are chosen already, and for what is a mix of them.
        """
        picked = torch.tensor(list(chosen), dtype=torch.long)
        beside_PK, observed_P = self.gram_KK[picked], self.observed_K[picked]
        system_PP = beside_PK[:, picked]
        sides_PX = torch.cat([observed_P[:, None], beside_PK], 1)
        solved_PX = torch.linalg.lstsq(system_PP, sides_PX).solution if chosen else sides_PX
        weight_P, mix_PK = solved_PX[:, 0], solved_PX[:, 1:]
        square_K = self.gram_KK.diagonal()
        left_K = square_K - (beside_PK * mix_PK).sum(0)
        weight_K = (self.observed_K - beside_PK.T @ weight_P) / left_K
        others_PK = weight_P[:, None] - mix_PK * weight_K
        explained_K = weight_K * self.observed_K + (others_PK * observed_P[:, None]).sum(0)
        residual_K = (1 - explained_K / self.total).round(decimals=_DIGITS).clamp_min(_ROUNDING)
        joins_K = (left_K > _MIX * square_K) & (weight_K > 0) & (others_PK > 0).all(0)
        joins_K[picked] = False
        return residual_K.masked_fill(~joins_K, math.inf).tolist()

    def weights(self, chosen: Sequence[int]) -> Tensor:
        """Returns the weights of pairs, by least squares."""
        picked = torch.tensor(list(chosen), dtype=torch.long)
        system = self.gram_KK[picked[:, None], picked]
        solution: Tensor = torch.linalg.lstsq(system, self.observed_K[picked, None]).solution[:, 0]
        return solution


def choose(pairs: Pairs, most: int, clock: Clock = UNLIMITED) -> list[int]:
    """Returns at most so many pairs of a small residual.

    First each next pair is the one that lowers the residual most (orthogonal matching pursuit),
    then pairs are exchanged one by one as long as that lowers it.

    Args:
        pairs: To choose from.
        most: The size of the batch.
        clock: When time is up, no more pairs are exchanged.
    """
    chosen: list[int] = []
    while len(chosen) < most:
        residuals = pairs.residuals_with(chosen)
        longer = [*chosen, residuals.index(min(residuals))] if residuals else chosen
        if pairs.residual(longer) >= pairs.residual(chosen):
            break
        chosen = longer
    for _ in clock.paced(itertools.count() if chosen else ()):
        shorter = [[*chosen[:i], *chosen[i + 1 :]] for i in range(len(chosen))]
        exchanged = [pairs.residuals_with(rest) for rest in shorter]
        place = min(range(len(chosen)), key=lambda i: min(exchanged[i]))
        residuals = exchanged[place]
        other = [*chosen[:place], residuals.index(min(residuals)), *chosen[place + 1 :]]
        if pairs.residual(other) >= pairs.residual(chosen) * _LOWER:
            break
        chosen = other
    return chosen


def compare(
    model: LanguageModel,
    sequences: Sequence[Ids],
    observed: Mapping[str, Tensor],
    noise: float | None = None,
) -> Pairs:
    """Returns the inner products of sequences' gradients with each other and the observed one.

    Args:
        model: At the broadcast weights.
        sequences: As attacks on spans give them (`certificate.close` adds the last target).
        observed: The mean gradient by parameter name.
        noise: The standard deviation of the noise on each number; None: not known.
    """
    labels = model.num_labels if model.task == CLASSIFICATION else 1
    every_NC = torch.arange(labels, device=model.device).repeat(len(sequences), 1)
    closed = [close(model, ids) for ids in sequences]
    return compare_labelled(model, closed, every_NC, observed, noise)


def compare_labelled(
    model: LanguageModel,
    closed: Sequence[Ids],
    labels_NC: Tensor,
    observed: Mapping[str, Tensor],
    noise: float | None = None,
) -> Pairs:
    """Returns the inner products of the gradients of sequences with some labels.

    Args:
        model: At the broadcast weights.
        closed: The sequences, as clients train on them.
        labels_NC: Of each; of no meaning in next-token training.
        observed: The mean gradient by parameter name.
        noise: The standard deviation of the noise on each number; None: not known.
    """
    weight = weights(model, observed, noise)
    words = model.family.word_embedding
    words_M = torch.tensor(tokens_of(closed), device=model.device)
    own = BatchGradients(model, list(weight))
    # Texts of nearly one length go together, so that little is computed for padding.
    order = sorted(range(len(closed)), key=lambda n: len(closed[n]))
    parts = [order[start : start + _TOGETHER] for start in range(0, len(order), _TOGETHER)]
    gradients = list[dict[str, Factors | Tensor]]()
    one_direction = directions(model) == 1 < labels_NC.shape[1]
    scales = list[Tensor]()

    def direction(logits_NC: Tensor) -> Tensor:
        """Returns the derivative of z_0 - z_1; class 0 has -p_1 times it, and class 1 p_0 times."""
        p0_N, p1_N = logits_NC.double().softmax(1).detach().unbind(1)
        scales.append(torch.stack([-p1_N, p0_N], 1).cpu())
        return logits_NC.new_tensor([1.0, -1.0]).expand_as(logits_NC)

    with own.ready():
        for part in parts:
            texts, labels = [closed[n] for n in part], labels_NC[part]
            if one_direction:
                padded = gradients_of(model, own, texts, labels[:, :1], words_M, direction)
            else:
                padded = gradients_of(model, own, texts, labels, words_M)
            gradients.append(_without_padding(padded, [len(ids) for ids in texts]))
    pairs = len(closed) * (1 if one_direction else labels_NC.shape[1])
    gram_KK = torch.zeros(pairs, pairs, dtype=torch.float64)
    observed_K = torch.zeros(pairs, dtype=torch.float64)
    for name in weight:
        target = observed[name][words_M] if name == words else observed[name]
        gram, inner = _products([part[name] for part in gradients], target)
        gram_KK += weight[name] * gram.double().cpu()
        observed_K += weight[name] * inner.double().cpu()
    if one_direction:
        scale_K = torch.cat(scales).gather(1, labels_NC[order].cpu()).flatten()
        text_K = torch.arange(pairs).repeat_interleave(labels_NC.shape[1])
        gram_KK = gram_KK[text_K[:, None], text_K] * scale_K.outer(scale_K)
        observed_K = observed_K[text_K] * scale_K
    pair_NC = torch.arange(labels_NC.numel()).view(labels_NC.shape)
    place_K = pair_NC[order].flatten().argsort()
    return Pairs(
        sequence=tuple(i for i in range(len(closed)) for _ in range(labels_NC.shape[1])),
        label=tuple(labels_NC.flatten().tolist()),
        gram_KK=gram_KK[place_K[:, None], place_K],
        observed_K=observed_K[place_K],
        total=sum(weight[name] * _square(observed[name]) for name in weight),
    )


def directions(model: LanguageModel) -> int:
    """Returns how many gradients make up those of a sequence with each of its labels.

    The softmax of two classes has one degree of freedom.
    """
    if model.task != CLASSIFICATION:
        return 1
    return 1 if model.num_labels == 2 and model.class_loss is F.cross_entropy else model.num_labels


def weights(
    model: LanguageModel, observed: Mapping[str, Tensor], noise: float | None = None
) -> dict[str, float]:
    """Returns what the square of a number counts, by the parameters that are compared."""
    # The rows of a tied embedding also hold the output layer's gradient.
    left_out = {model.family.word_embedding} if model.tied else set()
    left_out |= model.family.null_parameters(observed)
    counts = {name: _weight(value) for name, value in observed.items() if name not in left_out}
    return {
        name: weight if noise is None else noise**-2 for name, weight in counts.items() if weight
    }


def _weight(observed: Tensor) -> float:
    """Returns one over the mean square of the numbers that are not zero; 0 if all are."""
    square = _square(observed)
    return int(observed.count_nonzero()) / square if square > 1e-30 else 0.0


def _square(value: Tensor) -> float:
    """Returns the sum of the squares of a tensor's numbers."""
    rows = value.float() if value.dim() else value.float()[None]
    # Of rows in float32: the numbers in float64 take four times as long, and all in float32 lose.
    return float(torch.linalg.vecdot(rows, rows).sum(dtype=torch.float64))


def gradients_of(
    model: LanguageModel,
    own: BatchGradients,
    closed: Sequence[Ids],
    labels_NC: Tensor,
    words_M: Tensor | None = None,
    logit_grad: LogitGrad | None = None,
) -> dict[str, Gradient]:
    """Returns the gradients of each sequence's mean loss with each of its labels.

    Args:
        model: At the broadcast weights.
        own: Of this model, ready.
        closed: The sequences, as clients train on them.
        labels_NC: Of each; of no meaning in next-token training.
        words_M: The tokens whose rows of the word embedding's gradient are wanted; None: it is not.
        logit_grad: The derivative of something else, in place of the loss.
    """
    ids_NT, mask_NT = pad(closed, model.tokenizer.pad_token_id, model.device)
    labels = labels_NC.shape[1]
    table_VD = model.module.get_parameter(model.family.word_embedding).detach()
    x_NCTD = table_VD[ids_NT][:, None].expand(-1, labels, -1, -1)
    share_NCKTM = None
    if words_M is not None:
        share_NTM = (ids_NT[..., None] == words_M) & (mask_NT[..., None] > 0)
        share_NCKTM = share_NTM.to(table_VD.dtype)[:, None, None].expand(-1, labels, -1, -1, -1)
    return own(
        x_NCTD[:, :, None],
        mask_NT[:, None],
        logit_grad or _logit_grad(model, ids_NT, mask_NT, labels_NC),
        differentiable=False,
        mixture_RKBTM=share_NCKTM,
    )


def _logit_grad(
    model: LanguageModel, ids_NT: Tensor, mask_NT: Tensor, labels_NC: Tensor
) -> LogitGrad:
    """Returns the derivative of each sequence's mean loss in its logits."""
    if model.task == CLASSIFICATION:
        equal_weights = torch.ones(labels_NC.numel(), device=model.device)
        return class_logit_grad(model, labels_NC.flatten(), equal_weights)
    table_VD = model.module.get_parameter(model.family.word_embedding)
    targets_NTV = F.one_hot(ids_NT, len(table_VD)).to(table_VD.dtype)
    counted_NT = is_target(model, ids_NT, mask_NT)
    weights_NT = counted_NT / counted_NT.sum(1, keepdim=True).clamp_min(1)
    return next_token_logit_grad(targets_NTV, weights_NT.to(table_VD.dtype))


def slopes(
    model: LanguageModel,
    ids: Sequence[int],
    label: int,
    observed: Mapping[str, Tensor],
    weight: Mapping[str, float],
) -> tuple[Tensor, Tensor]:
    """Returns how the fit of a sequence changes with its embeddings [T, D], and its own deltas.

    The deltas [T, D] are the gradient of its loss at its embeddings, which is what the rows of the
    word embedding's gradient are sums of.
    """
    ids_1T, mask_1T = pad([ids], model.tokenizer.pad_token_id, model.device)
    table_VD = model.module.get_parameter(model.family.word_embedding).detach()
    labels_11 = torch.tensor([[label]], device=model.device)
    logit_grad = _logit_grad(model, ids_1T, mask_1T, labels_11)
    own = BatchGradients(model, [name for name in weight if name != model.family.word_embedding])
    with own.ready(), torch.enable_grad():
        x_TD = table_VD[list(ids)].clone().requires_grad_()
        gradients = own(x_TD[None, None, None], mask_1T[None], logit_grad, differentiable=True)
        fit = fits(gradients, observed, weight).sum()
        (slope_TD,) = torch.autograd.grad(fit, x_TD)
        loss_x = table_VD[list(ids)].clone().requires_grad_()
        logits = model.family.logits(model.module, mask_1T, ids_BT=None, embeds_BTD=loss_x[None])
        (delta_TD,) = torch.autograd.grad(logits, loss_x, logit_grad(logits).detach())
    return slope_TD, delta_TD


def _without_padding(
    gradients: Mapping[str, Gradient], lengths: Sequence[int]
) -> dict[str, Factors | Tensor]:
    """Returns the factors of gradients at tokens alone, and small gradients as they are [K, ...].

    Args:
        gradients: Of N sequences, padded, with C labels.
        lengths: Of the sequences.
    """
    flat: dict[str, Factors | Tensor] = {}
    for name, gradient in gradients.items():
        if isinstance(gradient, Tensor):
            flat[name] = gradient.flatten(0, 1)
            continue
        ((left_NCTX, right_NCTY),) = gradient
        labels, places = left_NCTX.shape[1:3]
        # Behind the pooling of a classifier each text has one place.
        counts = [min(length, places) for length in lengths for _ in range(labels)]
        count_K1 = torch.tensor(counts, device=left_NCTX.device)[:, None]
        token_KT = torch.arange(places, device=left_NCTX.device) < count_K1
        left_MX, right_MY = (side.flatten(0, 1)[token_KT] for side in (left_NCTX, right_NCTY))
        flat[name] = Factors(left_MX, right_MY, counts)
    return flat


def _products(parts: Sequence[Factors | Tensor], observed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns inner products of pairs with each other [K, K], and with the observed one [K]."""
    values, factors = list[Tensor](), list[Factors]()
    for part in parts:
        if isinstance(part, Tensor):
            values.append(part)
        else:
            factors.append(part)
    if values:
        if values[0].dim() == 3:  # of a table, only the first rows were looked up
            rows = max(value.shape[1] for value in values)
            values = [F.pad(value, (0, 0, 0, rows - value.shape[1])) for value in values]
            observed = observed[:rows]
        return _formed_products(torch.cat(values).flatten(1), observed)
    left_MX = torch.cat([part.left_MX for part in factors])
    right_MY = torch.cat([part.right_MY for part in factors])
    counts = [count for part in factors for count in part.counts]
    pairs, tokens, sides = len(counts), len(left_MX), (left_MX.shape[1], right_MY.shape[1])
    if tokens**2 * sum(sides) > (tokens + pairs**2) * math.prod(sides):
        sides_KTX = zip(torch.split(left_MX, counts), torch.split(right_MY, counts), strict=True)
        # Long texts: the gradients themselves are smaller.
        value_KX = torch.stack([(a_TX.T @ b_TY).flatten() for a_TX, b_TY in sides_KTX])
        return _formed_products(value_KX, observed)
    pair_M = torch.repeat_interleave(torch.tensor(counts)).to(left_MX.device)
    inner_M = (left_MX * (right_MY @ observed.mT)).sum(1)
    gram_KK = left_MX.new_zeros(pairs, pairs)
    at_once = max(1, _PRODUCTS // tokens)
    for start in range(0, tokens, at_once):
        some = slice(start, start + at_once)
        both_SM = (left_MX[some] @ left_MX.T).mul_(right_MY[some] @ right_MY.T)
        both_SK = both_SM.new_zeros(len(both_SM), pairs).index_add_(1, pair_M, both_SM)
        gram_KK.index_add_(0, pair_M[some], both_SK)
    return gram_KK, inner_M.new_zeros(pairs).index_add_(0, pair_M, inner_M)


def _formed_products(value_KX: Tensor, observed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the inner products of gradients that are formed."""
    return value_KX @ value_KX.T, value_KX @ observed.flatten()


def fits(
    gradients: Mapping[str, Gradient], observed: Mapping[str, Tensor], weight: Mapping[str, float]
) -> Tensor:
    """Returns the cosine [K] of each guess's gradient with the observed one, differentiable.

    Args:
        gradients: Of K rows of one guess each, or of a row of K guesses.
        observed: By parameter name; of the word embedding only the rows in the guesses.
        weight: What the square of a number counts, by parameter name (`weights`).
    """
    inner_K = square_K = torch.zeros(())
    total = 0.0
    for name, gradient in gradients.items():
        square, inner = _own_products(gradient, observed[name])
        inner_K = inner_K + weight[name] * inner
        square_K = square_K + weight[name] * square
        total += weight[name] * float(observed[name].square().sum())
    return inner_K / (square_K.clamp_min(1e-30) * total).sqrt()


def _own_products(gradient: Gradient, observed: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the square [K] of each gradient, and its inner product [K] with the observed one."""
    if isinstance(gradient, Tensor):
        value = gradient.flatten(0, 1)
        target = observed[: value.shape[1]] if value.dim() == 3 else observed
        return value.flatten(1).square().sum(1), value.flatten(1) @ target.flatten()
    left, right = (torch.cat(side, 2).flatten(0, 1) for side in zip(*gradient, strict=True))
    square_K = ((left @ left.mT) * (right @ right.mT)).flatten(1).sum(1)
    return square_K, (left * (right @ observed.mT)).flatten(1).sum(1)
