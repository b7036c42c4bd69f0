"""Adapters with which each attention head of the first block looks at one token of a text.

A client with LoRA has its base model from elsewhere, and gets only A and B. No part of an adapter
is off for some tokens, so it has no bins. But softmax can be off for tokens: with a query that is
large and the same for all tokens, a head attends to the one token whose key is farthest along that
query. All other tokens have no gradient there at the values. So the rows of the gradient of the
values' B that belong to one head are `sum_s g_s (A x_s)^T`, with one token x_s of each text s. The
inputs of the first block stand in a table of words and positions, and B is as wide as the adapter's
rank R: with fewer than R texts, the span of these rows tells which words at which positions the
head has looked at, whatever is in the others.

- A norm's output has a linear function that is the same for all tokens (its bias is not zero, and
  the mean is taken away). That is one row of A of the queries.
- The column of B behind it is the query, for each head another one. Together they are trained on
  public texts so that as many tokens as possible are looked at by any head.

Nothing else is changed: no other row, column, matrix or block. No publication is known that does
this; imprints by Fowl et al. (2022) and others need a layer's biases and weights of its own.

Shapes: H heads, K head size, D hidden size, R rank, X texts, T tokens of the longest text,
M tokens of all texts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from fedleak.attacks.server_modes import ModeSetting, ServerMode
from fedleak.models import LanguageModel, pad
from fedleak.models.family import ModelFamily, lora_a, lora_b
from fedleak.training.observation import Example

_STEPS = 300
"""Steps in which the queries are trained."""

_RATE = 0.1
"""Learning rate of these steps, for keys of about unit size."""

_AT_ONCE = 128
"""Texts of a step."""


@dataclass(frozen=True)
class AdapterImprint(ServerMode):
    """Sends adapters with which each head of the first block looks at one token of a text.

    Attributes:
        sharpness: Standard deviation of a head's scores over public tokens. The larger, the fewer
            tokens share a head's attention, and the farther the adapters are from honest ones.
    """

    kind: ClassVar[str] = "adapter_imprint"
    sharpness: Annotated[float, Field(ge=1, le=1e7)] = 1e4

    def changes(self) -> str:
        """Returns what the clients are sent."""
        return (
            "sends all clients adapters with which each attention head of the first block looks at "
            "one token of a text, so that the gradient of its values' adapter holds no other"
        )

    def obstacle(self, setting: ModeSetting, model: LanguageModel) -> str | None:
        """Returns that the architecture does not permit it, or that adapters are missing."""
        names = adapters(model.family)
        if names is None:
            return (
                "needs a first block with learned positions and separate queries, which a "
                f"{model.family.model_type} has not: choose a BERT (model.name)"
            )
        if missing := sorted(set(names) - setting.sent):
            return (
                f"changes and reads adapters, and clients send no {missing[0]}: set model.lora, "
                "with queries and values among its targets, or choose mode = 'imprint'"
            )
        if any("lora_magnitude" in name for name in model.parameters()):
            return "cannot make a query large where DoRA norms it: leave model.lora.dora out"
        return None

    @torch.no_grad()
    def broadcast(
        self,
        model: LanguageModel,
        *,
        targeted: bool,
        public: Sequence[Example],
        rng: torch.Generator,
    ) -> Mapping[str, Tensor]:
        """Returns A and B of the queries of the first block, of which a row and a column differ."""
        block, device = model.family.first_block(model.module), model.device
        ids_XT, mask_XT = pad([ids for ids, _ in public], 0, device)
        place_M = torch.arange(ids_XT.shape[1], device=device).expand_as(ids_XT).flatten()
        _, input_MD = block.enter(ids_XT.flatten(), place_M)
        _, key_MHK, _ = block.project(input_MD, place_M)
        inside_M = mask_XT.flatten().bool()
        equal_D = constant(input_MD[inside_M])
        key_XTHK = key_MHK.view(*ids_XT.shape, *key_MHK.shape[1:]).cpu()
        query_HK = _queries(key_XTHK, inside_M.view_as(ids_XT).cpu(), rng)
        score_MH = torch.einsum("mhk,hk->mh", key_MHK[inside_M].cpu(), query_HK)
        query_HK *= self.sharpness * math.sqrt(query_HK.shape[1]) / score_MH.std(0)[:, None]

        names, own = adapters(model.family), model.parameters()
        assert names is not None
        query_a, query_b, _ = names
        a_RD, b_OR = own[query_a].clone(), own[query_b].clone()
        layer = model.module.get_submodule(query_a.partition(".lora_A.")[0])
        query_O = query_HK.flatten() / float(layer.scaling["default"])  # type: ignore[index]
        # Both alike in size: that moves the model least.
        share = float((query_O.norm() / equal_D.norm()).sqrt())
        a_RD[0], b_OR[:, 0] = equal_D.to(a_RD) * share, query_O.to(b_OR) / share
        return {query_a: a_RD, query_b: b_OR}


def adapters(family: ModelFamily) -> tuple[str, str, str] | None:
    """Returns the names of A and B of the first block's queries, and of B of its values.

    None: in this family no head can be made to look at one token in this way.
    """
    if family.feed_forward_norm is None:
        return None
    parts = family.modules(0)
    (query,), (value,) = parts["q"], parts["v"]
    return lora_a(query), lora_b(query), lora_b(value)


def constant(input_MD: Tensor) -> Tensor:
    """Returns a direction [D] whose product with each input is 1, as far as there is one."""
    ones_M1 = torch.ones(len(input_MD), 1, dtype=torch.float64)
    solution_D1: Tensor = torch.linalg.lstsq(
        input_MD.cpu().double(), ones_M1, driver="gelsd"
    ).solution
    return solution_D1[:, 0].float()


@torch.enable_grad()
def _queries(key_XTHK: Tensor, inside_XT: Tensor, rng: torch.Generator) -> Tensor:
    """Returns a query of each head [H, K]: most tokens have the largest key of some head.

    The first token is left out: it is the same in every text.
    """
    wanted_XT = inside_XT.float()
    wanted_XT[:, 0] = 0
    size_HK = key_XTHK[inside_XT].std(0)
    start_HK = torch.randn(size_HK.shape, generator=rng) / size_HK / math.sqrt(size_HK.shape[1])
    query_HK = start_HK.requires_grad_()
    optimiser = torch.optim.Adam([query_HK], lr=_RATE)
    for _ in range(_STEPS):
        chosen = torch.randperm(len(key_XTHK), generator=rng)[:_AT_ONCE]
        score_XHT = torch.einsum("xthk,hk->xht", key_XTHK[chosen], query_HK)
        score_XHT = score_XHT.masked_fill(~inside_XT[chosen, None], -torch.inf)
        unseen_XT = (1 - score_XHT.softmax(-1)).clamp_min(1e-6).log().sum(1).exp()
        optimiser.zero_grad()
        ((unseen_XT * wanted_XT[chosen]).sum() / wanted_XT[chosen].sum()).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    return query_HK.detach()
