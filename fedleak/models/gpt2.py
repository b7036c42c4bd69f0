"""GPT-2-like decoders: learned absolute positions, LayerNorm before each sub-layer.

GPT-2 keeps query, key and value in one `Conv1D`, a linear layer whose weight is [I, 3 O]: the
transpose of what `nn.Linear` has. Only this file knows this. In the fused bias, only the third that
shifts keys has no gradient.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor, nn

from fedleak.models.family import FirstBlock, ModelFamily, TokenTable, frozen_rows, heads, lora_a


class Gpt2(ModelFamily):
    """Adapter for `config.model_type == "gpt2"`."""

    model_type: ClassVar[str] = "gpt2"
    causal: ClassVar[bool] = True
    word_embedding: ClassVar[str] = "transformer.wte.weight"
    position_embedding: ClassVar[str] = "transformer.wpe.weight"
    embeddings: ClassVar[tuple[str, ...]] = (word_embedding, position_embedding)
    layers: ClassVar[str] = "transformer.h"
    weights: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "qkv": ("attn.c_attn",),
        "o": ("attn.c_proj",),
        "f": ("mlp.c_fc",),
        "p": ("mlp.c_proj",),
    }

    def projections(self, tensors: Mapping[str, Tensor], layer: int) -> dict[str, Tensor]:
        """Returns the three gradients [O, I], cut out of the fused one."""
        (name,) = self.attention_parameters(layer)
        if name not in tensors:
            return {}
        return dict(zip(("query", "key", "value"), tensors[name].T.chunk(3), strict=True))

    def output_gradient(self, tensors: Mapping[str, Tensor], layer: int) -> Tensor | None:
        """Returns the gradient [O, I] of the attention output matrix, or of its adapter."""
        (name,) = self.modules(layer)["o"]
        # An adapter of a Conv1D is made of nn.Linear.
        return tensors[name].T if name in tensors else tensors.get(lora_a(name))

    def token_table(self, module: nn.Module) -> TokenTable:
        """Returns token and position rows, and the LayerNorm before the first attention."""
        norm = module.get_submodule("transformer.h.0.ln_1")
        assert isinstance(norm, nn.LayerNorm)
        token_VD, position_PD = frozen_rows(module, self.word_embedding, self.position_embedding)
        return TokenTable(token_VD, position_PD, norm)

    def first_block(self, module: nn.Module) -> FirstBlock:
        """Returns the first decoder block in parts."""
        blocks: Any = module.get_submodule("transformer.h")
        block, following = blocks[0], blocks[1]
        num_heads: int = block.attn.num_heads
        table = self.token_table(module)

        def project(x_ND: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = block.attn.c_attn(x_ND).chunk(3, dim=-1)
            return heads(q, num_heads), heads(k, num_heads), heads(v, num_heads)

        def leave(residual_ND: Tensor, mixed_ND: Tensor) -> Tensor:
            x_ND = residual_ND + block.attn.c_proj(mixed_ND)
            out_ND: Tensor = following.ln_1(x_ND + block.mlp(block.ln_2(x_ND)))
            return out_ND

        return FirstBlock(
            num_heads=num_heads, enter=table.enter_before_norm, project=project, leave=leave
        )
