"""How many examples of each class a batch has, from the gradient of the classifier.

The bias gives it for batches (Wainakh et al. 2021, LLG), the weight for a single example (Zhao et
al. 2020, iDLG).

Shapes: B sequences, T tokens, D hidden size, C classes, L classes as labels.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.training.observation import Observation, UpdateKind

DUMMY_SEQUENCES = 32
DUMMY_LENGTH = 16
"""Random token sequences that stand in for the batch where the model's outputs are needed."""


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
    num_examples = seen.update.num_examples
    if bias and bias[0] in seen.update.tensors:
        ids_BT = torch.randint(
            len(model.tokenizer), (DUMMY_SEQUENCES, DUMMY_LENGTH), generator=rng
        ).to(model.device)
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
