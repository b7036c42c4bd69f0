"""What the rest of the library may ask of an architecture, whatever its size.

Shapes: V vocabulary, P positions, N tokens, D hidden size, H heads, K head size, B sequences,
T tokens of a sequence, O outputs and I inputs of a linear layer.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn


class TokenTable(NamedTuple):
    """The input of the first attention layer, per (token, position) pair.

    It is `norm(token_VD[v] + position_PD[p])`, so it depends on nothing else in the batch.
    """

    token_VD: Tensor
    position_PD: Tensor
    norm: nn.LayerNorm

    def __call__(self, ids_N: Tensor, positions_N: Tensor) -> Tensor:
        """Returns the attention inputs [N, D] of tokens at positions."""
        x_ND: Tensor = self.norm(self.token_VD[ids_N] + self.position_PD[positions_N])
        return x_ND


@dataclass(frozen=True)
class FirstBlock:
    """The first transformer block, taken apart so that a search can share keys and values.

    Attributes:
        num_heads: H.
        enter: (ids_N, positions_N) -> the residual stream [N, D] that enters the block, and the
            attention input [N, D] made from it.
        project: attention inputs [N, D] -> queries, keys and values, each [N, H, K].
        leave: (residual [N, D], mixed values [N, D]) -> inputs [N, D] of the next attention.
    """

    num_heads: int
    enter: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    project: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    leave: Callable[[Tensor, Tensor], Tensor]


class ModelFamily(Protocol):
    """An architecture, found by `config.model_type`. Parameters are named, never counted.

    Attributes:
        model_type: The name that `config.model_type` has.
        causal: A token attends to earlier tokens only.
        word_embedding, position_embedding: Parameter names.
        classifier: Parameter names of the classification layer, weight first.
    """

    model_type: ClassVar[str]
    causal: ClassVar[bool]
    word_embedding: ClassVar[str]
    position_embedding: ClassVar[str]
    classifier: ClassVar[tuple[str, ...]]

    def attention_parameters(self, layer: int) -> tuple[str, ...]:
        """Returns the names of the parameters that multiply the attention input of a layer."""
        ...

    def attention_gradients(self, tensors: Mapping[str, Tensor], layer: int) -> list[Tensor]:
        """Returns those of the query, key and value gradients [O, I] that `tensors` holds."""
        ...

    def output_gradient(self, tensors: Mapping[str, Tensor], layer: int) -> Tensor | None:
        """Returns the gradient [O, I] of the attention output matrix, None if not there."""
        ...

    def token_table(self, module: nn.Module) -> TokenTable:
        """Returns the parts of the first attention input."""
        ...

    def first_block(self, module: nn.Module) -> FirstBlock:
        """Returns the first block in parts."""
        ...

    def logits(
        self,
        module: nn.Module,
        mask_BT: Tensor,
        *,
        ids_BT: Tensor | None,
        embeds_BTD: Tensor | None,
    ) -> Tensor:
        """Returns class logits [B, C], or next-token logits [B, T, V] of a causal model.

        Exactly one of token ids and word embeddings is given; the mask is 1 on real tokens,
        which come first.
        """
        ...

    def encode(self, tokenizer: Any, texts: Sequence[str], task: str) -> list[list[int]]:
        """Returns the token ids that a client feeds for each text, special tokens included."""
        ...


def heads(x_ND: Tensor, num_heads: int) -> Tensor:
    """Splits [N, D] into [N, H, K]."""
    return x_ND.reshape(*x_ND.shape[:-1], num_heads, -1)


def frozen_rows(module: nn.Module, *names: str) -> tuple[Tensor, ...]:
    """Returns parameters by name, without their gradients."""
    return tuple(module.get_parameter(name).detach() for name in names)


def pool_last(x_BTC: Tensor, mask_BT: Tensor) -> Tensor:
    """Returns [B, C]: each sequence's values at its last real token."""
    last_B = mask_BT.sum(1) - 1
    return x_BTC[torch.arange(len(x_BTC), device=x_BTC.device), last_B]
