"""The gradients of guessed batches, in parts (`matching`), without forming those of weights.

Forward hooks keep the inputs A of the layers that are matched; differentiating the loss in the
layers' outputs gives D.

Shapes: R victims, K guesses for each, B sequences, T tokens, N = B T rows of a guess (or of all),
D hidden size, M word embeddings, Y outputs of a layer, C classes, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedleak.attacks.matching.gradient_distance import Gradient, Outer
from fedleak.models import LanguageModel

LogitGrad = Callable[[Tensor], Tensor]
"""The logits of all rows -> the gradient of the sum of all guesses' losses in them."""


class BatchGradients:
    """Computes the gradients of guesses, in parts, for some of a model's parameters.

    Within `ready` the model's parameters are frozen and its layers are listened to.
    """

    def __init__(self, model: LanguageModel, names: Sequence[str]) -> None:
        self._model, self._names = model, names
        self._tables = [name for name in tables(model) if name in names]
        words = model.family.word_embedding
        self._words = words if words in names else None
        owners = {n.rpartition(".")[0] for n in names if n not in (*self._tables, words)}
        self._modules = {
            path: module for path, module in model.module.named_modules() if path in owners
        }
        self._heard: list[tuple[str, Tensor, Tensor]] = []

    @contextmanager
    def ready(self) -> Iterator["BatchGradients"]:
        """Freezes the parameters and listens; both end with the block, as does its attention."""
        trained = [p for p in self._model.module.parameters() if p.requires_grad]
        attention = self._attention
        hooks = [
            module.register_forward_hook(self._listener(path))
            for path, module in self._modules.items()
        ]
        for parameter in trained:
            parameter.requires_grad_(False)
        try:
            yield self
        finally:
            for parameter in trained:
                parameter.requires_grad_(True)
            for hook in hooks:
                hook.remove()
            self._heard.clear()
            self._attend_by(attention)

    def _listener(self, path: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hear(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._heard.append((path, inputs[0], output))

        return hear

    @property
    def _attention(self) -> str:
        """How the model's layers attend."""
        # There is no public way to ask.
        return str(self._model.module.config._attn_implementation)  # type: ignore[union-attr]

    def _attend_by(self, name: str) -> None:
        """Lets the model's layers attend in another way."""
        if name != self._attention:
            self._model.module.set_attn_implementation(name)  # type: ignore[operator]

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
            mixture_RKBTM: How much of each of M word embeddings is in them: gives the gradients of
                those rows [R, K, M, D]. Needed if the word embedding is to be matched.
            mask_RBT: 1 on the tokens of each victim's sequences.
            logit_grad: Of the loss on the logits.
            differentiable: The gradients can be differentiated in what x was made from.
        """
        guesses = x_RKBTD.shape[:2]
        mask_NT = mask_RBT[:, None].expand(x_RKBTD.shape[:-1]).flatten(0, 2)
        with torch.enable_grad():
            x_NTD = x_RKBTD.flatten(0, 2)
            if not differentiable:
                x_NTD = x_NTD.detach().requires_grad_()
            self._heard.clear()
            # PyTorch's fused kernels are faster, but have no second derivative.
            self._attend_by("eager" if differentiable else "sdpa")
            logits = self._model.family.logits(
                self._model.module, mask_NT, ids_BT=None, embeds_BTD=x_NTD
            )
            heard, self._heard = self._heard, []
            rows_too = bool(self._tables) or self._words is not None
            at = [output for _, _, output in heard] + ([x_NTD] if rows_too else [])
            grad = logit_grad(logits)
            deltas = torch.autograd.grad(
                logits,
                at,
                grad if differentiable else grad.detach(),
                create_graph=differentiable,
                materialize_grads=True,
            )
        if not differentiable:
            heard = [(path, given.detach(), output.detach()) for path, given, output in heard]

        from transformers.pytorch_utils import Conv1D  # here, because it takes a second

        def rows(value: Tensor) -> Tensor:
            """Returns it as [R, K, N, ...]."""
            return value.reshape(*guesses, -1, value.shape[-1])

        gradients: dict[str, Gradient] = {}
        with torch.set_grad_enabled(differentiable):
            for (path, given, _), delta in zip(heard, deltas, strict=False):
                module = self._modules[path]
                delta_RKNY = rows(delta)
                weight, bias = f"{path}.weight", f"{path}.bias"
                if weight in self._names:
                    if isinstance(module, nn.Linear):
                        gradients[weight] = (Outer(delta_RKNY, rows(given)),)
                    elif isinstance(module, Conv1D):
                        gradients[weight] = (Outer(rows(given), delta_RKNY),)
                    else:
                        gradients[weight] = (delta_RKNY * rows(_normed(module, given))).sum(2)
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


def _normed(module: nn.Module, given: Tensor) -> Tensor:
    """Returns what a norm layer multiplies with its weight, whichever norm it is."""
    if isinstance(module, nn.LayerNorm):
        return nn.functional.layer_norm(given, module.normalized_shape, eps=module.eps)
    plain = {
        name: torch.zeros_like(value) if name == "bias" else torch.ones_like(value)
        for name, value in module.named_parameters()
    }
    out: Tensor = functional_call(module, plain, (given,))
    return out


def tables(model: LanguageModel) -> list[str]:
    """Returns the tables that are added to word embeddings: their gradients are those of inputs."""
    family = model.family
    both = (family.position_embedding, family.token_type_embedding)
    return [name for name in both if name is not None]


def class_logit_grad(model: LanguageModel, labels_N: Tensor, weights_N: Tensor) -> LogitGrad:
    """Returns the logit_grad of a classifier's loss.

    Args:
        model: The classifier.
        labels_N: Each row's class.
        weights_N: What each row's loss counts in its guess: 1 over the victim's examples.
    """

    def logit_grad(logits_NC: Tensor) -> Tensor:
        # The loss is a mean over rows, whatever it is; here each row counts on its own.
        loss = model.class_loss(logits_NC, labels_N) * len(labels_N)
        (each_NC,) = torch.autograd.grad(loss, logits_NC, create_graph=True)
        return each_NC * weights_N[:, None]

    return logit_grad


def next_token_logit_grad(targets_NTV: Tensor, weights_NT: Tensor) -> LogitGrad:
    """Returns the logit_grad of next-token training.

    Args:
        targets_NTV: The probability of each token at each position.
        weights_NT: What the target at each position counts in its guess: 0 on first tokens.
    """

    def logit_grad(logits_NTV: Tensor) -> Tensor:
        apart_NTV = logits_NTV[:, :-1].softmax(-1) - targets_NTV[:, 1:]
        return torch.cat(
            [apart_NTV * weights_NT[:, 1:, None], torch.zeros_like(logits_NTV[:, :1])], 1
        )

    return logit_grad
