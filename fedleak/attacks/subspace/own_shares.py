"""The shares of a batch's tokens and positions in the gradients of texts by themselves.

The gradient of a layer's adapters is a mix of its inputs, and a first layer's inputs are known sums
of tokens, positions and a constant. So the gradient of any text gives their shares in it, as the
update gives those in the batch (`sparse_bayes`).

Shapes: B texts, T tokens, O rows of adapters, D columns, M directions of first inputs, N tokens of
the batch, C classes, U rows of which some did not come, X any axes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks.listening import listening
from fedleak.attacks.measured_gradient import MeasuredGradient
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.depth_search import adapters_of, layer_rows
from fedleak.attacks.subspace.sparse_bayes import Bag
from fedleak.attacks.subspace.update_evidence import last_hidden, logits
from fedleak.models import LanguageModel, is_target, pad

_AT_ONCE = 512
"""Tokens that go through the model together."""


class OwnShares:
    """Shares in the gradients of texts, in units of those of the batch's tokens.

    Attributes:
        size_O: The root mean square of the shares of the batch's tokens in each row.
    """

    def __init__(self, model: LanguageModel, gradient: MeasuredGradient, bag: Bag) -> None:
        """Takes the tokens of a batch, and what their directions are in the first layer."""
        self._model, self._bag = model, bag
        names = (name.removesuffix(".weight") for name in adapters_of(model, gradient, 0))
        self._adapters = [model.module.get_submodule(name) for name in names]
        self._size_U = layer_rows(model, gradient, 0)[0].size_U
        self._apart_DM = torch.linalg.pinv(bag.axis_MD)
        self.size_O = bag.share_NO.square().mean(0).sqrt()

    def of_closed(self, texts: Sequence[Ids]) -> Tensor:
        """Returns the shares [B, N, O] of all tokens for the summed loss of closed texts."""
        gradients = [self.gradients(some) for some in _parts(texts)]
        return self._shares(torch.cat(gradients))[:, -len(self._bag.tokens_N) :]

    def gradients(self, texts: Sequence[Ids]) -> Tensor:
        """Returns the adapters' gradients [B, O, D] of closed texts, each in units of its row's."""
        ids_BT, mask_BT = pad(texts, self._model.tokenizer.pad_token_id, self._model.device)
        with listening(self._adapters) as heard, torch.enable_grad():
            hidden_BTD = last_hidden(self._model, ids_BT[:, :-1])
            # As one matrix: with several, a product with each is computed, which takes longer.
            logits_XV = logits(self._model, hidden_BTD.flatten(0, 1))
            loss_X = F.cross_entropy(logits_XV, ids_BT[:, 1:].flatten(), reduction="none")
            loss = loss_X[is_target(self._model, ids_BT, mask_BT)[:, 1:].flatten()].sum()
            outputs = [heard[module][1] for module in self._adapters]
            slope_BTO = torch.cat(torch.autograd.grad(loss, outputs), -1)
        return self._gradients(slope_BTO, heard[self._adapters[0]][0])

    def of_classes(self, texts: Sequence[Ids], labels: Sequence[int]) -> Tensor:
        """Returns the shares [C, B, M, O] of all directions in texts of each of some classes."""
        return torch.cat([self._of_classes(some, labels) for some in _parts(texts)], 1)

    def _of_classes(self, texts: Sequence[Ids], labels: Sequence[int]) -> Tensor:
        ids_BT, mask_BT = pad(texts, self._model.tokenizer.pad_token_id, self._model.device)
        slopes = list[Tensor]()
        with listening(self._adapters) as heard, torch.enable_grad():
            logits_BC = self._model.family.logits(
                self._model.module, mask_BT, ids_BT=ids_BT, embeds_BTD=None
            )
            outputs = [heard[module][1] for module in self._adapters]
            for label in labels:
                labels_B = torch.full_like(ids_BT[:, 0], label)
                loss = len(texts) * self._model.class_loss(logits_BC, labels_B)
                slopes.append(torch.cat(torch.autograd.grad(loss, outputs, retain_graph=True), -1))
        given_BTD = heard[self._adapters[0]][0]
        return torch.stack([self._shares(self._gradients(slope, given_BTD)) for slope in slopes])

    def _gradients(self, slope_BTO: Tensor, given_BTD: Tensor) -> Tensor:
        came_U = self._size_U > 0
        gradient_BOD: Tensor = slope_BTO[..., came_U].double().mT @ given_BTD.detach().double()
        return gradient_BOD / self._size_U[came_U, None]

    def _shares(self, gradient_BOD: Tensor) -> Tensor:
        shares_BMO: Tensor = (gradient_BOD @ self._apart_DM).mT / self.size_O
        return shares_BMO


def _parts(texts: Sequence[Ids]) -> list[Sequence[Ids]]:
    """Returns the texts, as many at once as their tokens allow."""
    size = max(1, _AT_ONCE // max(map(len, texts)))
    return [texts[start : start + size] for start in range(0, len(texts), size)]
