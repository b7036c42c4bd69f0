"""Decepticons (Fowl et al. 2022, arXiv 2201.12675), for comparison with `imprint`.

As in the paper: the first v numbers of every embedding are zero. In the first block every token
attends to one position, and the word there is copied into these v numbers: the tag of the text. No
other block attends. The rows of all first feed-forward matrices are one random direction, the
probe, and their biases are quantiles of a normal distribution, those of all blocks one after the
other. What the neurons write goes into the last number of the stream, which nothing else uses.

The authors' code relies on what a server of fine-tuned models does not have. These points differ:

- All texts begin with the same mark there, too, so tags would be alike: the copied word is the
  first one behind what all public texts begin with.
- In their code, the size of position embeddings decides which position is attended to. Here that
  position has a number of its own, the last one of the stream.
- Their models are random. Here all norms are made those of a random model: scale 1, no shift.
- A GELU is no step at slope 1, so the slope is a setting.
- Neighbouring blocks share an edge, as their gradients cannot be subtracted from each other.
- A classifier looks at one token. So the last block attends to all tokens alike, which the authors
  do for masked language models alone, and holds no bins.

Shapes: N neurons of a block, D hidden size, K numbers of a tag, M tokens of public texts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from fedleak.attacks.server_modes import ModeSetting, ServerMode
from fedleak.attacks.server_modes.imprint import Planted, not_trained, probed, read_probe
from fedleak.attacks.server_modes.sectors import head_size, weights
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.training.observation import Example

_SKEW = 1e8
"""How much larger the score is of the position that all tokens attend to."""

_WRITTEN = 1e-4
"""What the neurons write, in all."""

_EQUAL = 10.0
"""What the last block adds to a token: so many times the mean of its text."""


@dataclass(frozen=True)
class Decepticons(ServerMode):
    """Sends a model of which all blocks do nothing but sort tokens into bins (Fowl et al. 2022).

    Attributes:
        slope: How steep a neuron is, in standard deviations of the probe: the step of a neuron
            must be narrower than a bin.
        tag: Numbers of a text's tag; at most as many as an attention head has are used.
    """

    kind: ClassVar[str] = "decepticons"
    slope: Annotated[float, Field(ge=1, le=1e7)] = 1e5
    tag: Annotated[int, Field(ge=3, le=64)] = 6

    def changes(self) -> str:
        """Returns what the clients are sent."""
        return (
            "sends all clients a model whose blocks do nothing but sort tokens into bins of their "
            "feed-forward layers and tag them with the first word of their text (Decepticons), so "
            "that these layers' gradients hold them"
        )

    def obstacle(self, setting: ModeSetting, model: LanguageModel) -> str | None:
        """Returns that the architecture does not permit it, or that a part is not sent."""
        if not _norms(model):
            return (
                f"needs layers with biases and norms that take the mean away, which a "
                f"{model.family.model_type} has not: choose another model.name, or "
                "mode = 'imprint'"
            )
        if not blocks(model):
            return "needs two layers, because the last one holds no bins: choose another model.name"
        return not_trained(_names(model), setting, model)

    @torch.no_grad()
    def broadcast(
        self,
        model: LanguageModel,
        *,
        targeted: bool,
        public: Sequence[Example],
        rng: torch.Generator,
    ) -> Mapping[str, Tensor]:
        """Returns all embeddings and all blocks."""
        family, width, own = model.family, model.hidden_size, model.parameters()
        size = min(self.tag, head_size(model))
        changed = {name: torch.zeros_like(own[name]).cpu() for name in _names(model)}
        for name in _norms(model):
            changed[f"{name}.weight"] += 1
        # The word that tags a text comes after the common beginning of all texts.
        anchor = int(len({ids[0] for ids, _ in public}) == 1)
        tables = [family.word_embedding, family.position_embedding, family.token_type_embedding]
        for table in filter(None, tables):
            changed[table] += own[table].cpu()
            changed[table][:, [*range(size), -1]] = 0
        word_VD, position_PD = (changed[table] for table in filter(None, tables[:2]))
        if family.token_type_embedding:
            position_PD = position_PD + changed[family.token_type_embedding][0]
        mark = float(word_VD.norm(dim=1).median() + position_PD.norm(dim=1).median())
        position_PD[anchor, -1] = changed[family.position_embedding or ""][anchor, -1] = mark

        streams = [word_VD[list(ids)] + position_PD[: len(ids)] for ids, _ in public]
        streams = [stream_TD for stream_TD in streams if len(stream_TD) > anchor]
        inputs = [F.layer_norm(stream_TD, (width,)) for stream_TD in streams]
        copied_XK = torch.stack([input_TD[anchor, size : 2 * size] for input_TD in inputs])
        tags_XK = copied_XK - copied_XK.mean(0)
        if not family.causal:  # the norm comes before the block
            streams = inputs
        probe_D = F.pad(torch.randn(width - size - 1, generator=rng), (size, 1))
        probe_D /= probe_D.norm()
        deviation, mean = torch.std_mean(probed(streams, tags_XK, probe_D))
        steep, bins_of = self.slope / float(deviation), blocks(model)
        first_block = weights(model, changed)
        neurons = len(first_block.first)
        total = len(bins_of) * (neurons - 1) + 1
        edge_X = mean + deviation * torch.special.ndtri((torch.arange(total) + 0.5) / total)
        edge_X[0] = mean - 10 * deviation  # no token is below the first bin

        first_block.key[0, -1] = 1
        first_block.value[:size, size : 2 * size] = torch.eye(size)
        first_block.output.copy_(torch.eye(width))
        first_block.biases["q"][0] = _SKEW
        first_block.biases["v"][:size] = -copied_XK.mean(0)
        for block in bins_of:
            own_block = weights(model, changed, block)
            own_block.first.add_(steep * probe_D)
            own_block.biases["f"].sub_(steep * edge_X[block * (neurons - 1) :][:neurons])
            own_block.second[-1] = _WRITTEN / (neurons * self.slope)
        if len(bins_of) < model.num_layers:
            last = weights(model, changed, model.num_layers - 1)
            last.value.copy_(torch.eye(width))
            last.output.copy_(_EQUAL * torch.eye(width))
        return {name: value.to(model.device) for name, value in changed.items()}


def planted(model: LanguageModel) -> list[Planted] | None:
    """Returns what each block with bins does to tokens; None if this mode did not change the model.

    All of it is in the weights, so whoever has the model knows it.
    """
    if not _norms(model) or not blocks(model):
        return None
    own = {name: value.detach().cpu() for name, value in model.module.named_parameters()}
    first_block = weights(model, own)
    size = int(first_block.value.any(1).sum())
    if first_block.query.any() or not 0 < size < model.hidden_size:
        return None
    known = []
    for block in blocks(model):
        own_block = weights(model, own, block)
        probe = read_probe(own_block.first, own_block.biases["f"], 1.0)
        if probe is None:
            return None
        known.append(
            Planted(
                *probe,
                project_KD=first_block.value[:size],
                shift_K=first_block.biases["v"][:size],
                sign_N=torch.ones(len(probe.edge_N)),
                eps=0.0,
            )
        )
    return known


def blocks(model: LanguageModel) -> range:
    """Returns the numbers of the blocks with bins: of a classifier, all but the last one."""
    return range(model.num_layers - (model.task == CLASSIFICATION))


def _norms(model: LanguageModel) -> list[str]:
    """Returns the names of the norms of embeddings and blocks; none if there are other norms."""
    family, inside = model.family, f"{model.family.layers}."
    norms = [
        name
        for name, module in model.module.named_modules()
        if isinstance(module, nn.LayerNorm)
        and (name.startswith(inside) or f"{name}.weight" in family.embeddings)
    ]
    return norms if family.position_embedding else []


def _names(model: LanguageModel) -> list[str]:
    """Returns the names of the parameters that are changed."""
    inside = (*model.family.embeddings, f"{model.family.layers}.")
    return [name for name, _ in model.module.named_parameters() if name.startswith(inside)]
