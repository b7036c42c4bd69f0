"""What the rest of the library may ask of an architecture, whatever its size.

Shapes: V vocabulary, P positions, N tokens, D hidden size, H heads, K head size, B sequences,
T tokens of a sequence, O outputs and I inputs of a linear layer, R rank of an adapter.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

_PROJECTIONS = ("query", "key", "value")


class Directions(NamedTuple):
    """What first attention inputs are made of, up to a scale that tokens and position decide.

    The input of token v at position p is `(token_VD[v] + position_PD[p]) / sigma + constant`.

    Attributes:
        token_VD: A row per token.
        position_PD: A row per position; [0, D] where the input has no position in it.
        constant_CD: The norm's bias [1, D]; [0, D] where it has none, or only zeros.
    """

    token_VD: Tensor
    position_PD: Tensor
    constant_CD: Tensor


LORA_A, LORA_B = ".lora_A.default.weight", ".lora_B.default.weight"
"""Ends of the names, as peft has them, of an adapter's matrices."""


class TokenTable(NamedTuple):
    """The input of the first attention layer, per (token, position) pair.

    It is `norm(token_VD[v] + position_PD[p])`, so it depends on nothing else in the batch.

    Attributes:
        token_VD: A row per token.
        position_PD: A row per position; None of a rotary model, whose input has no position in it.
        norm: A LayerNorm or an RMSNorm.
        rms_eps: What an RMSNorm adds to the mean square; None of a LayerNorm, which has its own.
        dropout: Share of the input's numbers that training with dropout sets to zero.
    """

    token_VD: Tensor
    position_PD: Tensor | None
    norm: nn.Module
    rms_eps: float | None = None
    dropout: float = 0.0

    def __call__(self, ids_N: Tensor, positions_N: Tensor) -> Tensor:
        """Returns the attention inputs [N, D] of tokens at positions."""
        x_ND: Tensor = self.norm(self.embed(ids_N, positions_N))
        return x_ND

    def embed(self, ids_N: Tensor, positions_N: Tensor) -> Tensor:
        """Returns what the norm is applied to [N, D]."""
        if self.position_PD is None:
            return self.token_VD[ids_N]
        return self.token_VD[ids_N] + self.position_PD[positions_N]

    def enter_before_norm(self, ids_N: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Returns residual stream and attention input [N, D] of a block that begins with a norm."""
        residual_ND = self.embed(ids_N, positions_N)
        return residual_ND, self.norm(residual_ND)

    def directions(self) -> Directions:
        """Returns the rows as the norm scales and shifts them, before it divides."""
        gain_D = self.norm.get_parameter("weight").detach()
        none_0D = self.token_VD.new_empty(0, len(gain_D))
        shift_D = dict(self.norm.named_parameters()).get("bias")
        return Directions(
            gain_D * self._centred(self.token_VD),
            none_0D if self.position_PD is None else gain_D * self._centred(self.position_PD),
            none_0D if shift_D is None or not shift_D.any() else shift_D.detach()[None],
        )

    def scale(self, ids_N: Tensor, positions_N: Tensor) -> Tensor:
        """Returns sigma [N]: what the norm divides each pair's sum of rows by."""
        square_N = self._centred(self.embed(ids_N, positions_N)).square().mean(-1)
        if self.rms_eps is not None:
            return (square_N + self.rms_eps).sqrt()
        assert isinstance(self.norm, nn.LayerNorm)
        return (square_N + self.norm.eps).sqrt()

    def _centred(self, rows_ND: Tensor) -> Tensor:
        """Returns rows [N, D] less what the norm takes from them: an RMSNorm takes nothing."""
        return rows_ND if self.rms_eps is not None else rows_ND - rows_ND.mean(-1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class FirstBlock:
    """The first transformer block, taken apart so that a search can share keys and values.

    Attributes:
        num_heads: H.
        enter: (ids_N, positions_N) -> the residual stream [N, D] that enters the block, and the
            attention input [N, D] made from it.
        project: (attention inputs [N, D], positions_N) -> queries, keys and values, each
            [N, H, K]: rotated to their positions, and repeated where query heads share them.
        leave: (residual [N, D], mixed values [N, H K]) -> inputs [N, D] of the next attention.
        behind: (ids_N, positions_N, gradients [N, D] of `TokenTable.embed`, their part [N, D] at
            the attention input that comes through queries, keys and values) -> gradients at mixed
            values [N, F, H K]: the first row, and rows of which any multiple may be added to it,
            because a norm hides them. None if nobody needs it.
    """

    num_heads: int
    enter: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    project: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    leave: Callable[[Tensor, Tensor], Tensor]
    behind: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None


@runtime_checkable
class ModelFamily(Protocol):
    """An architecture, found by `config.model_type`. Parameters are named, never counted.

    A class that inherits from it gets what most decoders have in common.

    Attributes:
        model_type: The name that `config.model_type` has.
        causal: A token attends to earlier tokens only.
        word_embedding: Parameter name.
        position_embedding: Parameter name; None where positions are rotations.
        token_type_embedding: Parameter name; None where tokens are all of one type.
        embeddings: Parameter names of all tables that are looked up, and of their norm.
        layers: Name of the list of transformer layers.
        weights: Names of the weights of a layer, in it, by what they are (`modules`).
        classifier: Parameter names of the classification layer, weight first.
        feed_forward_norm: Name of the weight of the LayerNorm that the first block applies to what
            its feed-forward layer reads, where that layer is linear, has biases and GELUs, and the
            weights of queries, keys and values are separate; else None.
    """

    model_type: ClassVar[str]
    causal: ClassVar[bool]
    word_embedding: ClassVar[str]
    position_embedding: ClassVar[str | None] = None
    token_type_embedding: ClassVar[str | None] = None
    embeddings: ClassVar[tuple[str, ...]]
    layers: ClassVar[str]
    weights: ClassVar[Mapping[str, tuple[str, ...]]]
    classifier: ClassVar[tuple[str, ...]] = ("score.weight",)
    feed_forward_norm: ClassVar[str | None] = None

    def modules(self, layer: int) -> Mapping[str, tuple[str, ...]]:
        """Returns the weights of a layer, without adapters, by what they are.

        q, k, v: of query, key and value; o: attention output; f, p: first and second
        feed-forward. The letters of what one parameter holds together stand together: "qkv".
        """
        return {
            letters: tuple(f"{self.layers}.{layer}.{name}.weight" for name in names)
            for letters, names in self.weights.items()
        }

    def null_parameters(self, names: Iterable[str]) -> frozenset[str]:
        """Returns those of `names` whose gradient is zero, whatever the batch and the weights."""
        return frozenset()

    def attention_parameters(self, layer: int) -> tuple[str, ...]:
        """Returns the weights that multiply the attention input of a layer, without adapters.

        `lora_a` names their adapters.
        """
        of_layer = self.modules(layer).items()
        return tuple(name for letters, names in of_layer if letters in "qkv" for name in names)

    def projections(self, tensors: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
        """Returns those gradients [O, I] of "query", "key" and "value" that `tensors` holds."""
        named = zip(_PROJECTIONS, self.attention_parameters(layer), strict=True)
        return {part: tensors[name] for part, name in named if name in tensors}

    def attention_gradients(self, tensors: Mapping[str, Tensor], layer: int) -> list[Tensor]:
        """Returns the gradients [O, I] in `tensors` of weights on a layer's attention input.

        They are those of `projections`, and those of the adapters' first matrices.
        """
        adapters = map(lora_a, self.attention_parameters(layer))
        of_adapters = [tensors[name] for name in adapters if name in tensors]
        return [*self.projections(tensors, layer).values(), *of_adapters]

    def output_gradient(self, tensors: Mapping[str, Tensor], layer: int) -> Tensor | None:
        """Returns the gradient [O, I] of the attention output matrix, or of its adapter's first.

        None if neither is there.
        """
        (name,) = self.modules(layer)["o"]
        return tensors.get(name, tensors.get(lora_a(name)))

    def token_table(self, module: nn.Module) -> TokenTable:
        """Returns the parts of the first attention input."""

    def first_block(self, module: nn.Module) -> FirstBlock:
        """Returns the first block in parts."""

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
        which come first. A decoder's classifier is applied here, at each last token, and not by
        transformers, whose pooling looks for padding ids and so cannot pool word embeddings.
        """
        outer: Any = module
        hidden_BTD: Tensor = outer.base_model(
            input_ids=ids_BT,
            inputs_embeds=embeds_BTD,
            attention_mask=mask_BT,
            position_ids=positions(mask_BT),
            use_cache=False,
        ).last_hidden_state
        if hasattr(outer, "score"):
            return _pool_last(outer.score(hidden_BTD), mask_BT)
        logits_BTV: Tensor = outer.lm_head(hidden_BTD)
        return logits_BTV

    def encode(self, tokenizer: Any, texts: Sequence[str], task: str) -> list[list[int]]:
        """Returns the token ids that a client feeds for each text, special tokens included.

        For next-token training an end token closes each text.
        """
        ids: list[list[int]] = tokenizer(list(texts))["input_ids"]
        end = [tokenizer.eos_token_id] if task == "causal-lm" else []
        return [text_ids + end for text_ids in ids]


def heads(x_ND: Tensor, num_heads: int) -> Tensor:
    """Splits [N, D] into [N, H, K]."""
    return x_ND.reshape(*x_ND.shape[:-1], num_heads, -1)


def frozen_rows(module: nn.Module, *names: str) -> tuple[Tensor, ...]:
    """Returns parameters by name, without their gradients."""
    return tuple(module.get_parameter(name).detach() for name in names)


def lora_a(name: str) -> str:
    """Returns the name, as peft has it, of the first matrix A [R, I] of a weight's adapter."""
    return name.removesuffix(".weight") + LORA_A


def with_adapters(names: Iterable[str]) -> frozenset[str]:
    """Returns names of weights, and those of the first matrices of their adapters."""
    return frozenset(either for name in names for either in (name, lora_a(name)))


def lora_b(name: str) -> str:
    """Returns the name, as peft has it, of the second matrix B [O, R] of a weight's adapter."""
    return name.removesuffix(".weight") + LORA_B


def positions(mask_BT: Tensor) -> Tensor:
    """Returns the positions [B, T] of tokens, of which the first is at 0."""
    # A row for each example, each in memory, because per-example gradients look at them.
    return torch.arange(mask_BT.shape[1], device=mask_BT.device).repeat(len(mask_BT), 1)


def _pool_last(x_BTC: Tensor, mask_BT: Tensor) -> Tensor:
    """Returns [B, C]: each sequence's values at its last real token."""
    last_B = mask_BT.sum(1) - 1
    return x_BTC[torch.arange(len(x_BTC), device=x_BTC.device), last_B]
