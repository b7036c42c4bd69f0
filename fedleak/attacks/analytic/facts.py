"""Facts in single rows and small tensors: which tokens occur, how many positions, and which labels.

**Rows.** An embedding row has a gradient only if its token (or position) occurred, so the support
of the embedding's update is the set of tokens and the number of positions; measured to survive
dropout, masking, pruning and local steps (Melis et al. 2019; Gupta et al. 2022, section 3.1). With
an output layer tied to the embedding every row has a gradient, and the used ones stand out by size.
Under Gaussian noise of one size the squared norms of unused rows have a chi-square distribution,
and rows beyond its reach were used.

**Labels.** How many examples of each class a batch has follows from the gradient of the classifier:
its bias gives it for batches (Wainakh et al. 2021, LLG), its weight for a single example (Zhao et
al. 2020, iDLG).

Shapes: V rows of a table, D hidden size, B sequences, T tokens, C classes, L classes as labels.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks.adam_step import BehindAdam
from fedleak.models import CAUSAL_LM, CLASSIFICATION, LanguageModel
from fedleak.training.observation import Observation, UpdateKind

CLEAR = 3.0
"""Used rows must be this many times larger than unused ones, or they are not told apart."""

_FALSE = 0.01
"""How often, at most, noise alone makes some row of a table look used."""

_ONE_SIGMA = 0.8413
"""The share of a normal distribution below one standard deviation above its mean."""

_ALIKE = 1.5
"""How many times wider or narrower than a chi-square the middle of the squared norms may be."""

DUMMY_SEQUENCES = 32
DUMMY_LENGTH = 16
"""Random token sequences that stand in for the batch where the model's outputs are needed."""


class Used(NamedTuple):
    """The rows of a table that were used.

    Attributes:
        rows: In rising order.
        gap: The smallest used row's norm over the largest unused one's: infinite if the unused ones
            are zero.
        complete: No other row was used: there is a gap. Else noise may hide some.
    """

    rows: list[int]
    gap: float
    complete: bool


def used_rows(rows_VD: Tensor) -> Used | None:
    """Returns the rows that were used; None if they cannot be distinguished from the others."""
    norms_V = rows_VD.float().norm(dim=-1)
    order_V = norms_V.argsort(descending=True, stable=True)
    sorted_V = norms_V[order_V].double()
    if not sorted_V[0] > 0:
        return None
    support = int((sorted_V > 0).sum())
    if support < len(sorted_V):
        return Used(sorted(order_V[:support].tolist()), float("inf"), complete=True)
    ratios = sorted_V[:-1] / sorted_V[1:]
    cut = int(ratios.argmax()) + 1
    if ratios[cut - 1] >= CLEAR:
        return Used(sorted(order_V[:cut].tolist()), float(ratios[cut - 1]), complete=True)
    excess_V = above_noise(sorted_V.square(), rows_VD.shape[1])
    cut = int((excess_V > 1).sum())
    if not 0 < cut < len(ratios):
        return None
    complete = bool(excess_V[cut - 1] > CLEAR)
    return Used(sorted(order_V[:cut].tolist()), float(ratios[cut - 1]), complete)


def longest_sequence(model: LanguageModel, tensors: Mapping[str, Tensor]) -> int | None:
    """Returns the tokens of the longest text, from the rows of positions; None if it is unknown."""
    rows_PD = tensors.get(model.family.position_embedding or "")
    used = None if rows_PD is None else used_rows(rows_PD)
    if used is None or not used.complete:
        return None
    inputs = used.rows[-1] + 1
    # Noise hides small rows: if it hid one between others, it may have hidden the last.
    if not (used.gap >= CLEAR or len(used.rows) == inputs):
        return None
    # In next-token training the last token is only a target: its position has no row.
    return inputs + int(model.task == CAUSAL_LM)


def above_noise(squares_V: Tensor, width: int) -> Tensor:
    """Returns how far squared norms are above those of noise, in units of how far noise gets.

    It is 0 for all if the middle of the squared norms is not spread as Gaussian noise alone is.

    Args:
        squares_V: Of the rows of a table; most were not used.
        width: Numbers in a row.
    """
    from scipy.special import gammainccinv, gammaincinv  # here, because it takes a while

    def quantile(share: float) -> float:
        """Returns the value below which a chi-square distribution of this width has this share."""
        return float(2 * gammaincinv(width / 2, share))

    middle = float(squares_V.median()) / quantile(0.5)
    levels = squares_V.new_tensor([1 - _ONE_SIGMA, _ONE_SIGMA])
    low, high = squares_V.quantile(levels).tolist()
    spread = quantile(_ONE_SIGMA) - quantile(1 - _ONE_SIGMA)
    if not 1 / _ALIKE < (high - low) / (spread * middle) < _ALIKE:
        return torch.zeros_like(squares_V)
    highest = float(2 * gammainccinv(width / 2, _FALSE / len(squares_V)))
    return (squares_V / middle - width) / (highest - width)


def label_counts(seen: Observation, model: LanguageModel, rng: torch.Generator) -> list[int] | None:
    """Returns the estimated number of examples of each class; None if it is unknown.

    The gradient of the classifier's bias is the mean over the batch of the loss's gradient at the
    logits z: p - y under cross-entropy, 2/C (z - y) under the squared error. So the shares y follow
    from the mean of p or z, which is estimated on random tokens (LLG). Without a bias, a single
    example can be told under cross-entropy with three or more classes: the row of its class in the
    weight gradient points away from all other rows (iDLG).
    """
    if model.task != CLASSIFICATION or seen.update.kind != UpdateKind.GRADIENT:
        return None
    weight, *bias = model.family.classifier
    if isinstance(seen, BehindAdam) and any(seen.lacks(model, name) for name in (weight, *bias)):
        return None
    num_examples = seen.update.num_examples
    if bias and bias[0] in seen.update.tensors:
        shape = DUMMY_SEQUENCES, min(DUMMY_LENGTH, model.max_length)
        ids_BT = torch.randint(len(model.tokenizer), shape, generator=rng).to(model.device)
        mask_BT = torch.ones_like(ids_BT)
        logits_BC = model.family.logits(model.module, mask_BT, ids_BT=ids_BT, embeds_BTD=None)
        shares_C = class_shares(model, logits_BC, seen.update.tensors[bias[0]])
        return rounded_to_sum(shares_C.tolist(), num_examples)
    signed = model.class_loss is F.cross_entropy and model.num_labels > 2
    if weight in seen.update.tensors and num_examples == 1 and signed:
        rows_CD = seen.update.tensors[weight].double()
        apart_C = (rows_CD @ rows_CD.T < 0).sum(1) == model.num_labels - 1
        return apart_C.long().tolist() if apart_C.sum() == 1 else None
    return None


def class_shares(model: LanguageModel, logits_BC: Tensor, bias_grad_C: Tensor) -> Tensor:
    """Returns the shares of classes [C], of sum 1, that explain the gradient of the bias."""
    logits_BC = logits_BC.detach().double().requires_grad_()
    grads: list[Tensor] = []
    with torch.enable_grad():
        for label in range(model.num_labels):
            labels_B = torch.full((len(logits_BC),), label, device=logits_BC.device)
            grads += torch.autograd.grad(model.class_loss(logits_BC, labels_B), logits_BC)
    grad_LC = torch.stack([grad_BC.sum(0) for grad_BC in grads])
    even_C = grad_LC.mean(0)
    # What the shares add to the gradient of even shares, and that their sum is 1.
    system_XL = torch.cat([(grad_LC - even_C).T, torch.ones_like(even_C)[None]])
    wanted_X1 = torch.cat([bias_grad_C.double() - even_C, even_C.new_ones(1)])[:, None]
    shares_C: Tensor = torch.linalg.lstsq(system_XL, wanted_X1).solution[:, 0]
    return shares_C


def rounded_to_sum(shares: list[float], total: int) -> list[int] | None:
    """Returns whole counts with this sum, nearest to the shares (largest remainder)."""
    positive = [max(share, 0.0) for share in shares]
    if not sum(positive):
        return None
    scale = total / sum(positive)
    exact = [share * scale for share in positive]
    counts = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return counts
