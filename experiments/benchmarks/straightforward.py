"""LAMP as its paper states it (Balunovic et al. 2022, algorithm 1), for a batch of one sentence.

One guess at a time, and the gradient of every parameter is formed: what `gradient_matching`
compares fedleak with, in results and in time. BERT classifiers of transformers; no padding.

Shapes: T tokens, D hidden size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedleak.attacks.matching.gradient_distance import L1_WEIGHT, Loss


@dataclass(frozen=True)
class Attack:
    """What the server knows of one victim.

    Attributes:
        module: The classifier, whose parameters need gradients.
        observed: The gradients that are matched, by parameter name.
        label: Of the sentence.
        loss: What gradients are measured by.
    """

    module: nn.Module
    observed: Mapping[str, Tensor]
    label: int
    loss: Loss

    @property
    def table_VD(self) -> Tensor:  # noqa: N802
        """The word embeddings."""
        embedding: Any = self.module.get_input_embeddings()  # type: ignore[operator]
        table_VD: Tensor = embedding.weight.detach()
        return table_VD

    def distance(self, x_TD: Tensor, *, differentiable: bool) -> Tensor:
        """Returns how far the gradients of a guess are from those observed."""
        guess_gradients = gradients(
            self.module, list(self.observed), x_TD, self.label, differentiable=differentiable
        )
        pairs = [(self.observed[name], gradient) for name, gradient in guess_gradients.items()]
        if self.loss == "cos":
            distances = [1 - (a * b).sum() / (a.norm() * b.norm()) for a, b in pairs]
            return torch.stack(distances).mean()
        squared = torch.stack([(a - b).square().sum() for a, b in pairs]).sum()
        if self.loss == "l2":
            return squared
        return squared + L1_WEIGHT * torch.stack([(a - b).abs().sum() for a, b in pairs]).sum()

    def objective(self, x_TD: Tensor, norm: float, norm_weight: float) -> Tensor:
        """Returns what a step goes down: the distance, and how far off the mean norm is."""
        gap: Tensor = x_TD.norm(dim=-1).mean() - norm
        return self.distance(x_TD, differentiable=True) + norm_weight * gap.square()

    def nearest(self, x_TD: Tensor) -> Tensor:
        """Returns the tokens [T] of the largest cosine."""
        return (F.normalize(x_TD, dim=-1) @ F.normalize(self.table_VD, dim=-1).T).argmax(-1)


def gradients(
    module: nn.Module, names: Sequence[str], x_TD: Tensor, label: int, *, differentiable: bool
) -> dict[str, Tensor]:
    """Returns a client's gradients of some parameters for one sentence of word embeddings."""
    logits_1C = module(inputs_embeds=x_TD[None]).logits
    loss = F.cross_entropy(logits_1C, torch.tensor([label], device=logits_1C.device))
    parameters = [module.get_parameter(name) for name in names]
    parameter_gradients = torch.autograd.grad(loss, parameters, create_graph=differentiable)
    return dict(zip(names, parameter_gradients, strict=True))


class Search:
    """The embeddings of one sentence on their way down.

    Attributes:
        x_TD: Where they are.
    """

    def __init__(
        self, attack: Attack, start_TD: Tensor, fixed: Mapping[int, int], rate: float, weight: float
    ) -> None:
        self._attack, self._fixed, self._weight = attack, fixed, weight
        self._norm = float(attack.table_VD.norm(dim=-1).mean())
        self.x_TD = start_TD.clone().requires_grad_()
        self._adam = torch.optim.Adam([self.x_TD], lr=rate)

    def step(self) -> float:
        """Makes a step down and returns the loss before it."""
        # `backward` would go on into the parameters, which no step needs.
        loss = self._attack.objective(self.x_TD, self._norm, self._weight)
        (self.x_TD.grad,) = torch.autograd.grad(loss, self.x_TD)
        self._adam.step()
        with torch.no_grad():
            for place, token in self._fixed.items():
                self.x_TD[place] = self._attack.table_VD[token]
        return float(loss.detach())


def nll(language_model: nn.Module, ids_T: Tensor) -> float:
    """Returns the mean negative log-likelihood of all tokens but the first."""
    with torch.no_grad():
        return float(language_model(input_ids=ids_T[None], labels=ids_T[None]).loss)


def scores(
    attack: Attack,
    language_model: nn.Module,
    x_TD: Tensor,
    ids_T: Tensor,
    orders: Sequence[Sequence[int]],
    lm_weight: float,
) -> list[float]:
    """Returns the score of each order of embeddings and of the tokens nearest to them."""
    return [
        float(attack.distance(x_TD[list(order)], differentiable=False))
        + lm_weight * nll(language_model, ids_T[list(order)])
        for order in orders
    ]
