"""A model that writes each token of a batch into the gradient of its first block.

From the ideas of Decepticons (Fowl et al. 2022) and of the bins of Robbing the Fed (Fowl et al.
2021), without an added layer and without a change outside the first block:

- Queries and keys are zero, so that every token attends to its whole text alike. Values are K
  random projections of the inputs, and the output matrix writes them into the first K numbers of
  the stream. So each token carries the mean of K projections over its text: the text's *tag*. It
  tells which tokens belong together, and a whole text can be checked against it: a checksum.
- The norm before the feed-forward layer has no bias and the same gain at every number.
- All rows of the first feed-forward matrix are one random direction, the probe, at a slope so steep
  that a neuron is on or off. The biases are quantiles of the probe on public texts. So neuron n is
  on for the tokens that the probe puts above edge n, and the difference of the gradients of two
  neighbouring neurons is a sum over the tokens between two edges: a bin.
- All neurons write along one direction, with alternating signs, so that what they write is small.

Departs from Fowl et al. in the tag (theirs is the first token, which is [CLS] in every text that
BERT sees), and in the gain: the larger it is, the larger is the part of the update that is the
imprint, so that less of it is lost to rounding and noise.

Shapes: N neurons, D hidden size, K numbers of a tag, M tokens of public texts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks.server_modes import ModeSetting, ServerMode, sectors
from fedleak.models import LanguageModel
from fedleak.training.observation import Example


@dataclass(frozen=True)
class Imprint(ServerMode):
    """Sends a first block that sorts tokens into bins, and tags them with their text.

    Attributes:
        slope: How steep a neuron is, in standard deviations of the probe: the step of a neuron
            must be narrower than a bin.
        gain: Of the norm before the feed-forward layer. The larger, the more of the update is the
            imprint, and the less a proof says of the rest. None: 1e5, and 1 in a decoder.
        tag: Numbers of a text's tag; at most a quarter of the hidden size is used.
        left: The share that is left of the attention's matrices, where they are otherwise zero. It
            hides from detectors of zeros and of rank. What tokens say moves by about its square.
        neurons: The share of the neurons that sort tokens; the rows of the others are random, and
            hide from a detector that most rows, or columns, are parallel.
    """

    kind: ClassVar[str] = "imprint"
    slope: Annotated[float, Field(ge=100, le=1e7)] = 2e4
    gain: Annotated[float, Field(gt=0, le=1e12)] | None = None
    tag: Annotated[int, Field(ge=4, le=64)] = 16
    left: Annotated[float, Field(ge=0, lt=1)] = 0.0
    neurons: Annotated[float, Field(gt=0.1, le=1)] = 1.0

    def changes(self) -> str:
        """Returns what the clients are sent."""
        return (
            "sends all clients a model whose first block sorts tokens into bins of its "
            "feed-forward layer and tags them with their text, so that this layer's gradient "
            "holds them"
        )

    def obstacle(self, setting: ModeSetting, model: LanguageModel) -> str | None:
        """Returns that the first block cannot be changed, or is not sent."""
        names = sectors.changed_names(model) if model.family.causal else _names(model)
        if names is None:
            return (
                f"cannot imprint a {model.family.model_type}, whose first block it does not know: "
                "choose another model.name"
            )
        if model.family.causal and (self.left or self.neurons < 1):
            return "hides (left, neurons) in models like BERT alone: leave these settings out"
        return not_trained(names, setting, model)

    @torch.no_grad()
    def broadcast(
        self,
        model: LanguageModel,
        *,
        targeted: bool,
        public: Sequence[Example],
        rng: torch.Generator,
    ) -> Mapping[str, Tensor]:
        """Returns the first block but for its last norm; of a decoder, but for its first."""
        if model.family.causal:
            return sectors.plant(model, public, self.tag, self.slope, self.gain or 1.0, rng)
        gain = self.gain or 1e5
        names, norm = _names(model), model.family.feed_forward_norm
        assert names is not None
        assert norm is not None
        table, width = model.family.token_table(model.module), model.hidden_size
        device = model.device
        inputs = [
            table(torch.tensor(ids, device=device), torch.arange(len(ids), device=device)).cpu()
            for ids, _ in public
        ]
        size = min(self.tag, width // 4)
        own = {name: model.parameters()[name].cpu() for name in names}
        changed = {name: torch.zeros_like(value) for name, value in own.items()}
        block, honest = sectors.weights(model, changed), sectors.weights(model, own)
        for matrix, left in zip(block[:4], honest[:4], strict=True):
            matrix.copy_(self.left * left)

        # Tags of public texts are as wide as the numbers of the stream that they are added to.
        mean_XD = torch.stack([input_TD.mean(0) for input_TD in inputs])
        project_KD = torch.randn(size, width, generator=rng)
        wanted = float(torch.cat(inputs).var(0).mean()) ** 0.5
        project_KD *= wanted / (mean_XD @ project_KD.T).std(0)[:, None]
        block.value[:size] += project_KD
        block.biases["v"][:size] -= (mean_XD @ project_KD.T).mean(0)
        block.output[:size, :size] += torch.eye(size)
        block.output[size:, :size] *= self.left  # or tags would be outside of their numbers
        changed[norm] += gain

        # The tag moves the probe as much as the token does: equal tokens of two texts part.
        probe_D = torch.randn(width, generator=rng)
        probe_D[:size] *= probe_D[size:].norm() / probe_D[:size].norm()
        probe_D /= probe_D.norm()
        tags_XK = (mean_XD - mean_XD.mean(0)) @ project_KD.T
        position_M = probed(inputs, tags_XK, probe_D)
        neurons = round(self.neurons * len(block.first))
        edge_N = position_M.quantile((torch.arange(neurons) + 0.5) / neurons)
        edge_N[0] -= 10 * position_M.std()  # no token is below the first bin
        steep = self.slope / float(position_M.std())
        block.first[:neurons] += steep / gain * probe_D
        block.biases["f"][:neurons] -= steep * edge_N

        along_D = F.normalize(torch.randn(width, generator=rng), dim=0)
        sign_N = (-1.0) ** torch.arange(neurons)
        written = sectors.SHARE * gain * math.sqrt(width) / self.slope
        block.second[:, :neurons] += written * along_D[:, None] * sign_N
        others = len(block.first) - neurons
        random_ND = F.normalize(torch.randn(others, width, generator=rng), dim=1)
        block.first[neurons:] = steep / gain * random_ND
        random_ND = F.normalize(torch.randn(others, width, generator=rng), dim=1)
        block.second[:, neurons:] = written * random_ND.T
        return {name: value.to(device) for name, value in changed.items()}


def probed(streams: Sequence[Tensor], tags_XK: Tensor, probe_D: Tensor) -> Tensor:
    """Returns where a probe puts the tokens [M] of texts, with the tags of these."""
    tags_XD = F.pad(tags_XK, (0, len(probe_D) - tags_XK.shape[1]))
    tagged = (x_TD + tag_D for x_TD, tag_D in zip(streams, tags_XD, strict=True))
    return torch.cat([F.layer_norm(x_TD, probe_D.shape) @ probe_D for x_TD in tagged])


def not_trained(names: Iterable[str], setting: ModeSetting, model: LanguageModel) -> str | None:
    """Returns that one of these parameters is not trained, or what is read is not sent."""
    missing = sorted(set(names) - model.parameters().keys())
    if missing:
        return (
            f"changes {missing[0]}, which is not trained: remove model.lora, or choose "
            "mode = 'adapter_imprint'"
        )
    first = model.family.modules(0)["f"][0]
    if first not in setting.sent:
        return f"reads {first}, and clients send none: see update.share"
    return None


class Planted(NamedTuple):
    """What an imprinted first block does.

    Attributes:
        probe_D: The direction that sorts tokens.
        edge_N: Where the bins begin, in rising order, on normed inputs of gain 1.
        step: Farther than this above or below its edge a neuron is on or off.
        project_KD, shift_K: A tag is the mean of `project_KD @ x + shift_K` over a text.
        sign_N: Of what the neurons write, 1 for the first.
        eps: What the norm adds to the variance.
    """

    probe_D: Tensor
    edge_N: Tensor
    step: float
    project_KD: Tensor
    shift_K: Tensor
    sign_N: Tensor
    eps: float

    def nothing(self, sum_ND: Tensor) -> Tensor:
        """Returns what sums of inputs have where the norm leaves nothing [N]: noise."""
        return sum_ND.sum(1) / math.sqrt(sum_ND.shape[1])


_STEP = 6.0
"""Farther than this below its edge, a GELU's derivative is under 1e-8."""


_LEFT = 0.05
"""Queries and keys with larger numbers let tokens attend to some more than to others."""

_FEWEST = 8
"""The fewest rows of one direction that are no accident."""


class Probe(NamedTuple):
    """What a feed-forward matrix does whose rows all have one direction, as in `Planted`."""

    probe_D: Tensor
    edge_N: Tensor
    step: float


def read_probe(first_ND: Tensor, bias_N: Tensor, gain: float) -> Probe | None:
    """Returns what its first rows do, as far as they have one direction; None: they do not sort.

    Args:
        first_ND: The matrix.
        bias_N: Its bias.
        gain: Of the norm before it.
    """
    rows_ND = first_ND.double()
    direction_D = rows_ND[0] / rows_ND[0].norm()
    slope_N = rows_ND @ direction_D
    apart_N = (rows_ND - slope_N[:, None] * direction_D).norm(dim=1)
    sorts_N = (slope_N > 0) & (apart_N < sectors.PARALLEL * rows_ND.norm(dim=1))
    neurons = int(sorts_N.cumprod(0).sum())
    edge_N = -bias_N[:neurons] / slope_N[:neurons] / gain
    if neurons < _FEWEST or not (edge_N.diff() >= 0).all():
        return None
    return Probe(direction_D.float(), edge_N.float(), _STEP / float(slope_N[0] * gain))


@torch.no_grad()
def planted(model: LanguageModel) -> Planted | None:
    """Returns what the first block of a model does to tokens; None if it was not imprinted.

    All of it is in the weights, so whoever has the model knows it.
    """
    name = model.family.feed_forward_norm
    if name is None:
        return None
    own = {name: value.detach().cpu() for name, value in model.module.named_parameters()}
    block, gain_D = sectors.weights(model, own), own[name]
    if max(block.query.abs().max(), block.key.abs().max()) > _LEFT:
        return None
    size = int((block.output.abs().amax(1) > 0.5).sum())
    probe = read_probe(block.first, block.biases["f"], float(gain_D[0]))
    flat = bool((gain_D == gain_D[0]).all()) and not own[sectors.bias_of(name)].any()
    if not (size and probe and flat):
        return None
    second_DN = block.second[:, : len(probe.edge_N)]
    row_N = second_DN[second_DN.abs().sum(1).argmax()]
    norm = model.module.get_submodule(name.removesuffix(".weight"))
    assert isinstance(norm, torch.nn.LayerNorm)
    return Planted(
        *probe,
        project_KD=(block.output @ block.value)[:size],
        shift_K=(block.output @ block.biases["v"])[:size],
        sign_N=row_N.sign() * row_N[0].sign(),
        eps=norm.eps,
    )


def _names(model: LanguageModel) -> list[str] | None:
    """Returns the names of what is changed; None of a family that cannot be imprinted."""
    family = model.family
    if family.feed_forward_norm is None:
        return None
    weights = [*(weight for (weight,) in family.modules(0).values()), family.feed_forward_norm]
    return [name for weight in weights for name in (weight, sectors.bias_of(weight))]
