"""BERT-like encoders: learned absolute positions, LayerNorm after each sub-layer."""

from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedleak.models.family import FirstBlock, ModelFamily, TokenTable, frozen_rows, heads, positions


class Bert(ModelFamily):
    """Adapter for `config.model_type == "bert"`."""

    model_type: ClassVar[str] = "bert"
    causal: ClassVar[bool] = False
    word_embedding: ClassVar[str] = "bert.embeddings.word_embeddings.weight"
    position_embedding: ClassVar[str] = "bert.embeddings.position_embeddings.weight"
    token_type_embedding: ClassVar[str] = "bert.embeddings.token_type_embeddings.weight"
    embeddings: ClassVar[tuple[str, ...]] = (
        word_embedding,
        position_embedding,
        token_type_embedding,
        "bert.embeddings.LayerNorm.weight",
        "bert.embeddings.LayerNorm.bias",
    )
    layers: ClassVar[str] = "bert.encoder.layer"
    weights: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "q": ("attention.self.query",),
        "k": ("attention.self.key",),
        "v": ("attention.self.value",),
        "o": ("attention.output.dense",),
        "f": ("intermediate.dense",),
        "p": ("output.dense",),
    }
    classifier: ClassVar[tuple[str, ...]] = ("classifier.weight", "classifier.bias")
    feed_forward_norm: ClassVar[str] = "bert.encoder.layer.0.attention.output.LayerNorm.weight"

    def null_parameters(self, names: Iterable[str]) -> frozenset[str]:
        """Returns the key biases: they shift all scores of a query alike, which softmax ignores."""
        return frozenset(name for name in names if name.endswith(".attention.self.key.bias"))

    def token_table(self, module: nn.Module) -> TokenTable:
        """Returns token and position rows; every token is of type 0, folded into the positions."""
        token_VD, position_PD, kind_2D = frozen_rows(
            module, self.word_embedding, self.position_embedding, self.token_type_embedding
        )
        norm = module.get_submodule("bert.embeddings.LayerNorm")
        assert isinstance(norm, nn.LayerNorm)
        dropout = module.get_submodule("bert.embeddings.dropout")
        assert isinstance(dropout, nn.Dropout)
        return TokenTable(token_VD, position_PD + kind_2D[0], norm, dropout=dropout.p)

    def first_block(self, module: nn.Module) -> FirstBlock:
        """Returns the first encoder layer in parts."""
        layer: Any = module.get_submodule("bert.encoder.layer.0")
        attention = layer.attention.self
        num_heads: int = attention.num_attention_heads
        table = self.token_table(module)

        def enter(ids_N: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor]:
            # LayerNorm comes after each sum, so the residual stream is the attention input.
            x_ND = table(ids_N, positions_N)
            return x_ND, x_ND

        def project(x_ND: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = (f(x_ND) for f in (attention.query, attention.key, attention.value))
            return heads(q, num_heads), heads(k, num_heads), heads(v, num_heads)

        def leave(residual_ND: Tensor, mixed_ND: Tensor) -> Tensor:
            x_ND = layer.attention.output(mixed_ND, residual_ND)
            out_ND: Tensor = layer.output(layer.intermediate(x_ND), x_ND)
            return out_ND

        def behind(ids_N: Tensor, positions_N: Tensor, d_ND: Tensor, through_ND: Tensor) -> Tensor:
            # The norm takes from a gradient what lies along the ones and along its own output.
            embed_ND = table.embed(ids_N, positions_N).double()
            sigma_N1 = table.scale(ids_N, positions_N).double()[:, None]
            unit_ND = (embed_ND - embed_ND.mean(-1, keepdim=True)) / sigma_N1
            gain_D = table.norm.get_parameter("weight").detach().double()
            dx_NFD = torch.stack([sigma_N1 * d_ND, torch.ones_like(d_ND), unit_ND], 1) / gain_D
            dx_NFD[:, 0] -= through_ND
            do_NFD: Tensor = dx_NFD @ layer.attention.output.dense.weight.detach().double()
            return do_NFD

        return FirstBlock(
            num_heads=num_heads, enter=enter, project=project, leave=leave, behind=behind
        )

    def logits(
        self,
        module: nn.Module,
        mask_BT: Tensor,
        *,
        ids_BT: Tensor | None,
        embeds_BTD: Tensor | None,
    ) -> Tensor:
        """Returns class logits [B, C]."""
        positions_BT = positions(mask_BT)
        logits_BC: Tensor = module(
            input_ids=ids_BT,
            inputs_embeds=embeds_BTD,
            attention_mask=mask_BT,
            token_type_ids=torch.zeros_like(positions_BT),
            position_ids=positions_BT,
        ).logits
        return logits_BC
