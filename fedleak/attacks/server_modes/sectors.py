"""The imprint of a causal model's first block: GPT-2 and LLaMA.

LLaMA's layers have no biases and its norms take no mean, so nothing there can compare a token with
a threshold. A comparison of two projections needs neither: all rows of the first feed-forward
matrix (of LLaMA's gate) lie in one plane, at rising angles. Neuron n is on for the tokens on one
side of a line through the origin of that plane, so two neighbouring neurons differ in the tokens of
a narrow sector, and of the opposite one: a bin. The scale of the norm moves no token to another.

Queries and keys are zero, as in BERT's imprint, so a token attends alike to all tokens up to
itself, and its tag is the mean of K projections over them. Tags chain tokens: the tag of a token
and its word give the tag of the token before it.

Shapes: N neurons, D hidden size, K numbers of a tag, X tokens.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedleak.models import LanguageModel
from fedleak.models.family import Directions, TokenTable
from fedleak.training.observation import Example

SHARE = 0.01
"""The size of what the neurons write, as a share of what they are added to."""

PARALLEL = 1e-4
"""How far rows may be from their plane, or from one direction, as rounding has it."""

_RIDGE = 1e-3
"""What is added to a second moment, as a share of it, before it is inverted."""

_STEP = 20.0
"""Where a neuron's input is farther than this from 0, the derivative of SiLU is 0 or 1 to 1e-7."""


class Sectors(NamedTuple):
    """What an imprinted first block does.

    Attributes:
        project_KD: A tag is the mean of `project_KD @ x` over the attention inputs up to a token.
        plane_2D: Two orthogonal directions of the plane.
        edge_N: Where the bins begin, in rising order, as angles from 0 to pi.
        slope: Of a neuron's input, for a token whose normed input has length 1 in the plane.
        sign_N: Of what the neurons write, 1 for the first.
        centres: The norm takes the mean away; if not, its gain is zero for the last number.
    """

    project_KD: Tensor
    plane_2D: Tensor
    edge_N: Tensor
    slope: float
    sign_N: Tensor
    centres: bool

    def clear(self, stream_XD: Tensor) -> Tensor:
        """Returns what the norm makes of its inputs, but for the scale [X, D]."""
        if self.centres:
            return stream_XD - stream_XD.mean(1, keepdim=True)
        return torch.cat([stream_XD[:, :-1], torch.zeros_like(stream_XD[:, :1])], 1)

    def angles(self, clear_XD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns where tokens are between the edges, and how far off a neuron may see them [X]."""
        across_X2 = clear_XD @ self.plane_2D.T
        angle_X = (torch.atan2(across_X2[:, 1], across_X2[:, 0]) - math.pi / 2) % math.pi
        length_X = across_X2.norm(dim=1) * math.sqrt(clear_XD.shape[1]) / clear_XD.norm(dim=1)
        return angle_X, (_STEP / self.slope / length_X.clamp_min(1e-9)).clamp_max(math.pi)

    def nothing(self, sum_ND: Tensor) -> Tensor:
        """Returns what sums of inputs have where the norm leaves nothing [N]: noise."""
        return sum_ND.sum(1) / math.sqrt(sum_ND.shape[1]) if self.centres else sum_ND[:, -1]


class Stream(NamedTuple):
    """What the norm of an imprinted block makes of tokens without tags, as a `TokenTable` does.

    Attributes:
        known: What the block does.
        token_VD: A row per token.
        position_PD: A row per position; a rotary model has one of zeros.
    """

    known: Sectors
    token_VD: Tensor
    position_PD: Tensor

    @classmethod
    def of(cls, table: TokenTable, known: Sectors) -> "Stream":
        """Returns it for the inputs of a model."""
        none_1D = torch.zeros_like(table.token_VD[:1])
        place_PD = none_1D if table.position_PD is None else table.position_PD
        return cls(known, table.token_VD, place_PD)

    def __call__(self, ids_X: Tensor, positions_X: Tensor) -> Tensor:
        """Returns the rows [X, D] of tokens at positions."""
        place_X = positions_X.clamp_max(len(self.position_PD) - 1)
        return self.known.clear(self.token_VD[ids_X] + self.position_PD[place_X])

    def directions(self) -> Directions:
        """Returns the rows as sums of a part of the token and one of the position."""
        token_VD, position_PD = map(self.known.clear, (self.token_VD, self.position_PD))
        return Directions(token_VD, position_PD, token_VD[:0])

    def scale(self, ids_X: Tensor, positions_X: Tensor) -> Tensor:
        """Returns what each sum is divided by [X]: nothing."""
        return torch.ones(len(ids_X), device=ids_X.device)


class Weights(NamedTuple):
    """The matrices of a block, as linear layers have them [outputs, inputs].

    Attributes:
        up: Beside the first feed-forward matrix; None where there is none.
        biases: By the letters of `ModelFamily.modules`; none of layers without biases.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    first: Tensor
    second: Tensor
    up: Tensor | None
    biases: Mapping[str, Tensor]


def changed_names(model: LanguageModel) -> list[str]:
    """Returns the names of the first block's parameters but for its first norm."""
    family, norm = model.family, model.family.token_table(model.module).norm
    first = next(name for name, module in model.module.named_modules() if module is norm)
    inside = f"{family.layers}.0."
    names = (name for name, _ in model.module.named_parameters())
    return [name for name in names if name.startswith(inside) and not name.startswith(f"{first}.")]


def bias_of(weight: str) -> str:
    """Returns the name of the bias beside a weight."""
    return f"{weight.removesuffix('weight')}bias"


def weights(model: LanguageModel, tensors: Mapping[str, Tensor], layer: int = 0) -> Weights:
    """Returns views of the matrices and biases of a block among tensors by name."""
    parts: dict[str, Tensor] = {}
    biases: dict[str, Tensor] = {}
    up = None
    for letters, (name, *others) in model.family.modules(layer).items():
        # What is fused is named together: "qkv".
        whole = as_linear(model, name, tensors[name])
        parts |= zip(letters, whole.chunk(len(letters)), strict=True)
        if (bias := tensors.get(bias_of(name))) is not None:
            biases |= zip(letters, bias.chunk(len(letters)), strict=True)
        if others:
            up = as_linear(model, others[0], tensors[others[0]])
    query, key, value, output, first, second = (parts[letter] for letter in "qkvofp")
    return Weights(query, key, value, output, first, second, up, biases)


def _scale(tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the scale [D] of the one norm among what `changed_names` names."""
    (norm_D,) = [tensors[n] for n in tensors if n.endswith("weight") and tensors[n].dim() == 1]
    return norm_D


def as_linear(model: LanguageModel, name: str, value: Tensor) -> Tensor:
    """Returns a weight, or its gradient, as [outputs, inputs]: GPT-2 keeps the transpose."""
    module = model.module.get_submodule(name.removesuffix(".weight"))
    return value if isinstance(module, nn.Linear) else value.T


def head_size(model: LanguageModel) -> int:
    """Returns the size of an attention head."""
    return model.hidden_size // int(model.module.config.num_attention_heads)  # type: ignore[union-attr,arg-type]


@torch.no_grad()
def plant(
    model: LanguageModel,
    public: Sequence[Example],
    size: int,
    slope: float,
    gain: float,
    rng: torch.Generator,
) -> dict[str, Tensor]:
    """Returns the parameters of an imprinted first block, by name.

    Args:
        model: The global model.
        public: Texts that no client has.
        size: K; no more than a head is wide.
        slope: How steep a neuron is.
        gain: Of the norm before the feed-forward layer.
        rng: For the projections.
    """
    table, width = model.family.token_table(model.module), model.hidden_size
    own = dict(model.module.named_parameters())
    changed = {name: torch.zeros_like(own[name]).cpu() for name in changed_names(model)}
    parts, norm_D = weights(model, changed), _scale(changed)
    device, size = model.device, min(size, head_size(model))
    streams, inputs = [], []
    for ids, _ in public:
        place_T = torch.arange(len(ids), device=device)
        streams.append(table.embed(torch.tensor(ids, device=device), place_T).cpu())
        inputs.append(table.norm(streams[-1].to(device)).cpu())

    # Without a bias, tags are about zero in the mean where their projections are blind to the mean.
    project_KD, mean_D = torch.randn(size, width, generator=rng), torch.cat(inputs).mean(0)
    project_KD -= (project_KD @ mean_D)[:, None] * mean_D / mean_D.square().sum()
    count_T = torch.arange(1, max(map(len, inputs)) + 1)[:, None]
    tags = [(x_TD @ project_KD.T).cumsum(0) / count_T[: len(x_TD)] for x_TD in inputs]
    stream_MD = torch.cat(streams)
    per_tag_K = float(stream_MD.var(0).mean()) ** 0.5 / torch.cat(tags).std(0)
    project_KD *= per_tag_K[:, None]
    parts.value[:size] = project_KD
    parts.output[:size, :size] = torch.eye(size)
    stream_MD[:, :size] += torch.cat(tags) * per_tag_K
    norm_D.add_(gain)
    centres = isinstance(table.norm, nn.LayerNorm)
    if not centres:
        norm_D[-1] = 0

    plane_2D = torch.randn(2, width, generator=rng)
    plane_2D[:, :size] *= plane_2D[:, size:].norm() / plane_2D[:, :size].norm()
    plane_2D = torch.linalg.qr(plane_2D.T)[0].T.contiguous()
    neurons = len(parts.first)
    known = Sectors(project_KD, plane_2D, torch.empty(0), slope, torch.empty(0), centres)
    angle_M, _ = known.angles(known.clear(stream_MD))
    edge_N = angle_M.quantile((torch.arange(neurons) + 0.5) / neurons)
    edge_N -= edge_N[0].clone()  # the first direction of the plane is that of the first neuron
    start = float(angle_M.quantile(0.5 / neurons))
    angle_N = edge_N + start
    parts.first.add_(slope / gain * torch.stack([angle_N.cos(), angle_N.sin()], 1) @ plane_2D)
    if parts.up is not None:
        # Nearly the same for all tokens, so that none is much weaker than others.
        row_MD = nn.functional.normalize(known.clear(stream_MD), dim=1) * math.sqrt(width)
        moment_DD = row_MD.T @ row_MD / len(row_MD)
        moment_DD += _RIDGE * moment_DD.diagonal().mean() * torch.eye(width)
        parts.up.add_(torch.linalg.solve(moment_DD, row_MD.mean(0)) / gain)
    along_D = torch.nn.functional.pad(torch.randn(width - size, generator=rng), (size, 0))
    sign_N = (-1.0) ** torch.arange(neurons)
    written = SHARE * float(stream_MD.norm(dim=1).median()) / slope
    parts.second.add_(written * (along_D / along_D.norm())[:, None] * sign_N)
    return {name: value.to(device) for name, value in changed.items()}


@torch.no_grad()
def planted(model: LanguageModel) -> Sectors | None:
    """Returns what the first block of a causal model does to tokens; None: it is not imprinted."""
    own = dict(model.module.named_parameters())
    tensors = {name: own[name].detach().cpu() for name in changed_names(model)}
    parts, gain_D = weights(model, tensors), _scale(tensors)[:-1]
    size = int(parts.output.any(1).sum())
    row_ND = parts.first.double()
    if parts.query.any() or parts.key.any() or not size or not (gain_D == gain_D[0]).all():
        return None
    length = row_ND.norm(dim=1).mean()
    first_D = row_ND[0] / length
    other_D = row_ND[len(row_ND) // 2] - row_ND[len(row_ND) // 2] @ first_D * first_D
    plane_2D = torch.stack([first_D, other_D / other_D.norm()])
    across_N2 = row_ND @ plane_2D.T
    edge_N = torch.atan2(across_N2[:, 1], across_N2[:, 0])
    apart = (row_ND - across_N2 @ plane_2D).norm() + (row_ND.norm(dim=1) - length).norm()
    rises = bool((edge_N.diff() >= 0).all()) and float(edge_N[-1]) < math.pi
    if not (rises and apart < PARALLEL * row_ND.norm()):
        return None
    row_N = parts.second[parts.second.abs().sum(1).argmax()]
    return Sectors(
        project_KD=parts.output[:size, :size] @ parts.value[:size],
        plane_2D=plane_2D.float(),
        edge_N=edge_N.float(),
        slope=float(length * gain_D[0]),
        sign_N=row_N.sign() * row_N[0].sign(),
        centres=isinstance(model.family.token_table(model.module).norm, nn.LayerNorm),
    )
