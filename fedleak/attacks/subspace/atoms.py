"""The dictionary that Keyspan searches: keys and queries of each token at each position.

An atom is a (token, position) pair that may be in the batch. A target is the gradient at the query
and the key of a token that is in it. `excess` tells whether a set of atoms spans a target.

Shapes: N tokens of the bag, A atoms, H heads (of queries, then of keys), K head size, O outputs (of
all heads), D hidden size, B seeds at positions, M members of a set, S seeds, W sets of each seed,
P positions; X: any axes.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.span import ACCEPT, Span, row_space
from fedleak.attacks.subspace.token_bag import TokenBag, pairs, read_token_bag
from fedleak.models import LanguageModel
from fedleak.models.family import heads

NOTHING = 1e-300
"""A norm that is below this is zero."""

ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Relative error of each term of dq and dk as the client's float32 sums them."""

SUBTRACTED = 1e-5
"""Relative error of a sentence's gradient that was taken out of the update."""

_LEAST_NOISE = 1e-4
"""Noise of an output, as a share of the largest, below which it counts as this large."""

_NO_MORE = 0.1
"""Relative precision of what is left of an update at which nothing is left."""


@dataclass(frozen=True, kw_only=True)
class Targets:
    """The gradients at the tokens of a batch, and their noise.

    Attributes:
        bag: The tokens of the batch.
        span: The row space of the gradients.
        noise: The norm of each gradient's noise, by parameter name.
        target_NHK: The gradient at each token's query, then key, up to scale, times the weights.
        noise_NH: Standard deviation of the noise in each number of a target.
        weight_HK: What the numbers of an output count.
    """

    bag: TokenBag
    span: Span
    noise: dict[str, float]
    target_NHK: Tensor
    noise_NH: Tensor
    weight_HK: Tensor

    def clearest(self) -> list[int]:
        """Returns the tokens, as indices of the bag, the clearest gradient first."""
        signal_N = self.target_NHK.square().sum((1, 2)) / self.noise_NH.square().sum(1)
        return signal_N.argsort(descending=True).tolist()

    @cached_property
    def told_HK(self) -> Tensor:  # noqa: N802
        """Which numbers of targets are known: a masked update may lack some rows."""
        return self.target_NHK.any(0)


@dataclass(frozen=True, kw_only=True)
class Atoms(Targets):
    """Keys and queries of each token of the bag at each position.

    Attributes:
        bag_A: The token of each atom, as an index of the bag.
        position_A: The position of each atom.
        vector_HAK: The keys of each atom (heads of query gradients), then its queries (heads of key
            gradients).
        of_keys_H: Which heads are of key gradients.
        causal: A token sees no later tokens.
        first, last: Tokens that begin and end every sequence and stand nowhere else, or None.
    """

    bag_A: Tensor
    position_A: Tensor
    vector_HAK: Tensor
    of_keys_H: Tensor
    causal: bool
    first: int | None
    last: int | None

    @cached_property
    def token_A(self) -> Tensor:  # noqa: N802
        """The token of each atom, as an id."""
        return self.bag.tokens_N[self.bag_A]

    @property
    def begin(self) -> int:
        """The first position that a seed may have."""
        return 0 if self.first is None else 1

    def mark(self) -> Tensor:
        """Returns the atom that begins every sentence: none, or an index [1]."""
        return ((self.token_A == self.first) & (self.position_A == 0)).nonzero().flatten()

    @property
    def positions(self) -> int:
        """Length of the longest sequence."""
        return int(self.position_A.max()) + 1

    def accepts(self, members_M: Tensor) -> float:
        """Returns the largest excess of a right set: that allows noise four standard deviations."""
        if self.span.exact:
            return ACCEPT
        heads, _, size = self.vector_HAK.shape
        freedom = heads * max(size - len(members_M), 1)
        return math.sqrt(1 + 4 * math.sqrt(2 / freedom))

    def visible(self, seeds_B: Tensor) -> Tensor | None:
        """Returns [B, H, A]: which atoms take part in the gradient at each seed; None: all."""
        if not self.causal:
            return None
        from_B1 = self.position_A[seeds_B][:, None]
        earlier_BA, later_BA = self.position_A <= from_B1, self.position_A >= from_B1
        return torch.where(self.of_keys_H[:, None], later_BA[:, None], earlier_BA[:, None])

    def misplaced(self, members_SWM: Tensor) -> Tensor:
        """Returns [S, W, A]: which atoms stand at a taken position or outside the marks."""
        position_SWM, token_SWM = self.position_A[members_SWM], self.token_A[members_SWM]
        taken_SWP = torch.zeros(
            *members_SWM.shape[:2], self.positions, dtype=torch.bool, device=members_SWM.device
        ).scatter_(2, position_SWM, True)
        wrong_SWA = taken_SWP[..., self.position_A]
        if self.first is not None:
            wrong_SWA |= self.token_A == self.first
        if self.last is not None:
            ends_SWM, ends_A = token_SWM == self.last, self.token_A == self.last
            end_SW1 = torch.where(ends_SWM, position_SWM, self.positions).amin(-1, keepdim=True)
            highest_SW1 = position_SWM.amax(-1, keepdim=True)
            ended_SW1 = ends_SWM.any(-1, keepdim=True)
            wrong_SWA |= self.position_A > end_SW1
            wrong_SWA |= ends_A & ((self.position_A < highest_SW1) | ended_SW1)
        return wrong_SWA

    def whole(self, members_XM: Tensor) -> Tensor:
        """Returns [X]: whether members fill all positions from 0 on, up to the last mark."""
        position_XM = self.position_A[members_XM]
        whole_X = position_XM.amax(-1) + 1 == members_XM.shape[-1]
        if self.last is not None:
            last_X1 = position_XM.argmax(-1, keepdim=True)
            whole_X &= self.token_A[members_XM.gather(-1, last_X1)[..., 0]] == self.last
        return whole_X

    def ids(self, members_M: Tensor) -> Ids:
        """Returns the tokens of the members in the order of their positions."""
        order_M = self.position_A[members_M].argsort()
        return tuple(self.token_A[members_M[order_M]].tolist())

    def excess(self, seed: int, members_M: Tensor, at: Tensor) -> float:
        """Returns the residual of a seed's gradient outside the span of members, over its noise.

        Args:
            seed: Index of the seed in the bag.
            members_M: Atoms of the set.
            at: The atom that is the seed at its own position.
        """
        target_HK, vector_HMK = self.target_NHK[seed], self.vector_HAK[:, members_M]
        visible_1HA = self.visible(at[None])
        if visible_1HA is not None:
            vector_HMK = vector_HMK * visible_1HA[0][:, members_M, None]
        weight_HM1 = torch.linalg.pinv(vector_HMK.mT) @ target_HK[..., None]
        rest_HK = target_HK - (vector_HMK.mT @ weight_HM1)[..., 0]
        size_HM = vector_HMK.norm(dim=-1)
        freedom_H = self.told_HK.sum(1) - (size_HM > 0).sum(1)
        terms_H = (weight_HM1[..., 0] * size_HM).norm(dim=-1)
        bound_H = freedom_H * self.noise_NH[seed].square() + (ROUNDING * terms_H).square()
        rest_H = rest_HK.square().sum(-1) / bound_H.clamp_min(NOTHING)
        # A head with fewer known rows than members decides nothing.
        return float(rest_H[freedom_H > 0].mean().sqrt()) if (freedom_H > 0).any() else math.inf


def make_atoms(
    model: LanguageModel,
    gradients: Mapping[str, Tensor],
    whole: Mapping[str, Tensor],
    *,
    among_N: Tensor | None,
    rng: torch.Generator,
) -> Atoms | None:
    """Returns every token of the bag at every position; None if the bag cannot be read.

    Args:
        model: At the broadcast weights.
        gradients: Of the first layer's attention, by parameter name.
        whole: The same gradients before any sentence was subtracted.
        among_N: The only tokens that may be in the batch; None: all.
        rng: For sketches.
    """
    family = model.family
    by_side = family.projections(gradients, 0)
    table = family.token_table(model.module)
    directions = table.directions()
    taken = max(float(whole[name].norm() / g.norm()) for name, g in gradients.items())
    rounding = SUBTRACTED * taken if gradients is not whole else 0.0
    span = row_space(list(by_side.values()), rounding) if rounding < _NO_MORE else None
    bag = None if span is None else read_token_bag(directions, span, rng, among_N=among_N)
    if span is None or bag is None or not len(bag.tokens_N):
        return None
    # The gradients at keys add up to nothing, so that by themselves they span no single input.
    single = span if by_side.keys() - {"key"} else None
    bag_A, position_A = pairs(table, bag, single)
    if not len(bag_A):
        return None
    token_A = bag.tokens_N[bag_A]
    return atoms_of(model, gradients, bag, span, bag_A, position_A, table(token_A, position_A))


def atoms_of(
    model: LanguageModel,
    gradients: Mapping[str, Tensor],
    bag: TokenBag,
    span: Span,
    bag_A: Tensor,
    position_A: Tensor,
    x_AD: Tensor,
) -> Atoms:
    """Returns the dictionary of attention inputs.

    Args:
        model: At the broadcast weights.
        gradients: Of the first layer's attention, by parameter name.
        bag: The tokens, and what splits the gradients by them.
        span: The row space of the gradients.
        bag_A, position_A: The token of each atom, as an index of the bag, and its position.
        x_AD: Its attention input.
    """
    family = model.family
    by_side, block = family.projections(gradients, 0), family.first_block(model.module)
    q_AHK, k_AHK, _ = block.project(x_AD, position_A)
    # Queries' gradients lie in the span of keys, and keys' in that of queries.
    spanning = {"query": k_AHK, "key": q_AHK}
    sides = [side for side in spanning if side in by_side]
    values = [bag.coefficients(by_side[side]) for side in sides]
    target_NHK = torch.cat([heads(coeffs.value_NO, block.num_heads) for coeffs in values], 1)
    noise_NHK = torch.cat([heads(coeffs.noise_NO, block.num_heads) for coeffs in values], 1)
    vector_HAK = torch.cat([spanning[side].double().transpose(0, 1) for side in sides])
    weight_HK = weights(target_NHK, noise_NHK, exact=span.exact)
    first, last = None, None
    if not family.causal:
        first, last = model.tokenizer.cls_token_id, model.tokenizer.sep_token_id
    return Atoms(
        bag=bag,
        span=span,
        noise=noises(model, bag, gradients),
        bag_A=bag_A,
        position_A=position_A,
        weight_HK=weight_HK,
        vector_HAK=vector_HAK * weight_HK[:, None],
        of_keys_H=torch.tensor(
            [side == "key" for side in sides for _ in range(block.num_heads)]
        ).to(x_AD.device),
        target_NHK=target_NHK * weight_HK,
        noise_NH=(noise_NHK * weight_HK).square().mean(-1).sqrt(),
        causal=family.causal,
        first=first,
        last=last,
    )


def weights(target_NHK: Tensor, noise_NHK: Tensor, *, exact: bool) -> Tensor:
    """Returns what the numbers [H, K] of an output count, in spans of targets as in targets.

    Nothing if they did not come: no token explains anything there. Noise grows with the numbers of
    an output, which count less by as much, so that all outputs tell right spans from wrong ones.
    """
    told_HK = target_NHK.any(0).double()
    if exact:
        return told_HK
    noise_HK = noise_NHK[0]  # that of other tokens is in proportion
    return told_HK / noise_HK.clamp_min(_LEAST_NOISE * float(noise_HK.max()))


def noises(
    model: LanguageModel, bag: TokenBag, gradients: Mapping[str, Tensor]
) -> dict[str, float]:
    """Returns the norm of the noise in each gradient, over its parts of equal inputs."""
    parts = {name: model.family.projections({name: g}, 0).values() for name, g in gradients.items()}
    return {
        name: float(sum(bag.noise(part_OD) ** 2 for part_OD in of_name) ** 0.5)
        for name, of_name in parts.items()
    }
