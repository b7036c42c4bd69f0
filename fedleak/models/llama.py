"""LLaMA-like decoders: rotary positions, RMSNorm before each sub-layer, shared keys and values.

A position rotates queries and keys and is in no attention input. So a key's bias shifts scores
differently, and has a gradient. If there are fewer key-value heads than query heads, several query
heads in a row share one.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedleak.models.family import FirstBlock, ModelFamily, TokenTable, frozen_rows, heads


class Llama(ModelFamily):
    """Adapter for `config.model_type == "llama"`."""

    model_type: ClassVar[str] = "llama"
    causal: ClassVar[bool] = True
    word_embedding: ClassVar[str] = "model.embed_tokens.weight"
    embeddings: ClassVar[tuple[str, ...]] = (word_embedding,)
    layers: ClassVar[str] = "model.layers"
    weights: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "q": ("self_attn.q_proj",),
        "k": ("self_attn.k_proj",),
        "v": ("self_attn.v_proj",),
        "o": ("self_attn.o_proj",),
        "f": ("mlp.gate_proj", "mlp.up_proj"),  # two, because both come first
        "p": ("mlp.down_proj",),
    }

    def token_table(self, module: nn.Module) -> TokenTable:
        """Returns token rows, and the RMSNorm before the first attention."""
        norm: Any = module.get_submodule("model.layers.0.input_layernorm")
        (token_VD,) = frozen_rows(module, self.word_embedding)
        return TokenTable(token_VD, None, norm, rms_eps=float(norm.variance_epsilon))

    def first_block(self, module: nn.Module) -> FirstBlock:
        """Returns the first decoder block in parts."""
        model: Any = module.get_submodule("model")
        block, following = model.layers[0], model.layers[1]
        attention, rotary = block.self_attn, model.rotary_emb
        num_heads: int = model.config.num_attention_heads
        sharing: int = attention.num_key_value_groups
        table = self.token_table(module)

        def turn(x_NHK: Tensor, positions_N: Tensor) -> Tensor:
            # The model's own: it knows which frequencies a long-context checkpoint has.
            cos_N1K, sin_N1K = (part[..., None, :] for part in rotary(x_NHK, positions_N))
            left, right = x_NHK.chunk(2, dim=-1)
            out_NHK: Tensor = x_NHK * cos_N1K + torch.cat([-right, left], -1) * sin_N1K
            return out_NHK

        def project(x_ND: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q_NHK = heads(attention.q_proj(x_ND), num_heads)
            k_NHK, v_NHK = (
                heads(part(x_ND), num_heads // sharing).repeat_interleave(sharing, dim=-2)
                for part in (attention.k_proj, attention.v_proj)
            )
            return turn(q_NHK, positions_N), turn(k_NHK, positions_N), v_NHK

        def leave(residual_ND: Tensor, mixed_ND: Tensor) -> Tensor:
            x_ND = residual_ND + attention.o_proj(mixed_ND)
            x_ND = x_ND + block.mlp(block.post_attention_layernorm(x_ND))
            out_ND: Tensor = following.input_layernorm(x_ND)
            return out_ND

        return FirstBlock(
            num_heads=num_heads, enter=table.enter_before_norm, project=project, leave=leave
        )
