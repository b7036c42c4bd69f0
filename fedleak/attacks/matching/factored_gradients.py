"""The gradients of guessed batches as factors (`gradient_distance`), so that no weight's is formed.

Forward hooks keep the inputs A of the layers that are matched; differentiating the loss in the
layers' outputs gives D.

Shapes: R rows, K guesses for each, B sequences, T tokens, N = B T places of a guess, S = R K B
sequences of all guesses, D hidden size, M word embeddings, X inputs and Y outputs of a layer,
C classes, V vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedleak.attacks.listening import listening
from fedleak.attacks.matching.gradient_distance import Gradient, Outer
from fedleak.models import LanguageModel

LogitGrad = Callable[[Tensor], Tensor]
"""Logits of all sequences -> the derivative of the sum of all guesses' losses in them."""

WeightRule = Callable[[nn.Module, Tensor, Tensor], Gradient]
"""(layer, its inputs [R, K, N, X], derivative at its outputs [R, K, N, Y]) -> weight's gradient."""


class BatchGradients:
    """Computes the gradients of guesses, as factors, for some of a model's parameters.

    Within `ready` the model's parameters are frozen.

    Args:
        model: The model.
        names: The parameters.

    Raises:
        NotImplementedError: A parameter belongs to a layer of a type that has no rule.
    """

    def __init__(self, model: LanguageModel, names: Sequence[str]) -> None:
        self._model, self._names = model, names
        self._tables = [name for name in tables(model) if name in names]
        words = model.family.word_embedding
        self._words = words if words in names else None
        owned = [n.rpartition(".") for n in names if n not in (*self._tables, words)]
        self._paths = {model.module.get_submodule(path): path for path, _, _ in owned}
        self._rules = {module: _rule(path, module) for module, path in self._paths.items()}
        for path, _, kind in owned:
            if kind not in ("weight", "bias"):
                module = model.module.get_submodule(path)
                raise NotImplementedError(_no_rule(f"{path}.{kind}", module))

    @contextmanager
    def ready(self) -> Iterator["BatchGradients"]:
        """Freezes the parameters; afterwards the model is as it was before."""
        trained = [p for p in self._model.module.parameters() if p.requires_grad]
        attention = _attend_by(self._model.module, "eager")
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            yield self
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
            _attend_by(self._model.module, attention)

    def __call__(
        self,
        x_RKBTD: Tensor,
        mask_RBT: Tensor,
        logit_grad: LogitGrad,
        *,
        differentiable: bool,
        mixture_RKBTM: Tensor | None = None,
    ) -> dict[str, Gradient]:
        """Returns the gradients of each guess's loss.

        Args:
            x_RKBTD: Word embeddings of the guesses.
            mask_RBT: 1 on the tokens of each row's sequences.
            logit_grad: The derivative of the loss in the logits.
            differentiable: The gradients can be differentiated in the variables behind x.
            mixture_RKBTM: How much of each of M word embeddings is in x: gives the gradients
                [R, K, M, D] of these embeddings. Needed if the word embedding is matched.
        """
        guesses = x_RKBTD.shape[:2]
        mask_ST = mask_RBT[:, None].expand(x_RKBTD.shape[:-1]).flatten(0, 2)
        with torch.enable_grad():
            x_STD = x_RKBTD.flatten(0, 2)
            if not differentiable:
                x_STD = x_STD.detach().requires_grad_()
            # PyTorch's fused kernels are faster, but have no second derivative.
            _attend_by(self._model.module, "eager" if differentiable else "sdpa")
            with listening(self._paths) as heard:
                logits = self._model.family.logits(
                    self._model.module, mask_ST, ids_BT=None, embeds_BTD=x_STD
                )
            rows_too = bool(self._tables) or self._words is not None
            at = [output for _, output in heard.values()] + ([x_STD] if rows_too else [])
            grad = logit_grad(logits)
            deltas = torch.autograd.grad(
                logits,
                at,
                grad if differentiable else grad.detach(),
                create_graph=differentiable,
                materialize_grads=True,
            )

        def rows(value: Tensor) -> Tensor:
            """Returns it as [R, K, N, ...]."""
            return value.reshape(*guesses, -1, value.shape[-1])

        gradients: dict[str, Gradient] = {}
        with torch.set_grad_enabled(differentiable):
            for (module, (given, _)), delta in zip(heard.items(), deltas, strict=False):
                delta_RKNY, path = rows(delta), self._paths[module]
                weight, bias = f"{path}.weight", f"{path}.bias"
                if weight in self._names:
                    given_RKNX = rows(given if differentiable else given.detach())
                    gradients[weight] = self._rules[module](module, given_RKNX, delta_RKNY)
                if bias in self._names:
                    gradients[bias] = delta_RKNY.sum(2)
            if not rows_too:
                return gradients
            dx_RKBTD = deltas[-1].view(x_RKBTD.shape)
            for name in self._tables:
                # Every token is of type 0.
                of_type = name == self._model.family.token_type_embedding
                gradients[name] = dx_RKBTD.sum((2, 3))[:, :, None] if of_type else dx_RKBTD.sum(2)
            if self._words is not None:
                assert mixture_RKBTM is not None
                share_RKNM, dx_RKND = mixture_RKBTM.flatten(2, 3), dx_RKBTD.flatten(2, 3)
                gradients[self._words] = share_RKNM.mT.to(dx_RKND.dtype) @ dx_RKND
        return gradients


def _attend_by(module: Any, name: str) -> str:
    """Lets a model's layers attend in another way; returns the way they attended before."""
    before = str(module.config._attn_implementation)  # there is no public way to ask
    if name != before:
        module.set_attn_implementation(name)
    return before


@cache
def _rules() -> Mapping[type[nn.Module], WeightRule]:
    """Returns how the gradient of a layer's weight is made, by the type of the layer."""
    # Here, because they take a second.
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.pytorch_utils import Conv1D

    return {
        nn.Linear: lambda layer, given, delta: (Outer(delta, given),),
        Conv1D: lambda layer, given, delta: (Outer(given, delta),),
        nn.LayerNorm: _of_layer_norm,
        LlamaRMSNorm: _of_rms_norm,
    }


def _rule(path: str, layer: nn.Module) -> WeightRule:
    """Returns the rule of a layer's type, or of the nearest type that it is derived from."""
    for kind in type(layer).__mro__:
        if kind in _rules():
            return _rules()[kind]
    raise NotImplementedError(_no_rule(path, layer))


def _no_rule(name: str, layer: nn.Module) -> str:
    known = ", ".join(kind.__name__ for kind in _rules())
    return (
        f"gradient matching cannot match {name} (layer type {type(layer).__name__}): it knows the "
        f"weights and biases of {known}; leave it out of update.share"
    )


def _of_layer_norm(layer: nn.Module, given_RKNX: Tensor, delta_RKNY: Tensor) -> Gradient:
    assert isinstance(layer, nn.LayerNorm)
    normed = nn.functional.layer_norm(given_RKNX, layer.normalized_shape, eps=layer.eps)
    return (delta_RKNY * normed).sum(2)


def _of_rms_norm(layer: nn.Module, given_RKNX: Tensor, delta_RKNY: Tensor) -> Gradient:
    unit_weights = {name: torch.ones_like(value) for name, value in layer.named_parameters()}
    normed: Tensor = functional_call(layer, unit_weights, (given_RKNX,))
    return (delta_RKNY * normed).sum(2)


def tables(model: LanguageModel) -> list[str]:
    """Returns the tables whose rows are added to word embeddings, such as position embeddings."""
    family = model.family
    both = (family.position_embedding, family.token_type_embedding)
    return [name for name in both if name is not None]


def class_logit_grad(model: LanguageModel, labels_S: Tensor, weights_S: Tensor) -> LogitGrad:
    """Returns the derivative of a classifier's loss in its logits.

    Args:
        model: The classifier.
        labels_S: The class of each sequence.
        weights_S: The weight of each sequence in its guess's loss: 1 over the batch size.
    """

    def logit_grad(logits_SC: Tensor) -> Tensor:
        # Every loss is a mean over sequences; here each sequence counts on its own.
        loss = model.class_loss(logits_SC, labels_S) * len(labels_S)
        (each_SC,) = torch.autograd.grad(loss, logits_SC, create_graph=True)
        return each_SC * weights_S[:, None]

    return logit_grad


def next_token_logit_grad(targets_STV: Tensor, weights_ST: Tensor) -> LogitGrad:
    """Returns the derivative of the next-token loss in the logits.

    Args:
        targets_STV: The probability of each token at each position.
        weights_ST: The weight of the target at each position: 0 on first tokens and padding.
    """

    def logit_grad(logits_STV: Tensor) -> Tensor:
        apart_STV = logits_STV[:, :-1].softmax(-1) - targets_STV[:, 1:]
        return torch.cat(
            [apart_STV * weights_ST[:, 1:, None], torch.zeros_like(logits_STV[:, :1])], 1
        )

    return logit_grad
