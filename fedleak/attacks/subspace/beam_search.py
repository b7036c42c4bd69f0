"""The sentence of a seed: the smallest set of atoms that explains the gradient at it.

Orthogonal least squares (Chen, Billings and Luo, "Orthogonal least squares methods and their
application to non-linear system identification", 1989) finds it. Each step adds the atom that
leaves the smallest residual when all members of a set are fitted anew. A beam keeps the best sets
of each size.

Shapes: S seeds, W beams, H heads (of queries, then of keys), A atoms, K head size, M members of a
set, C children of a set, B beams of all seeds; X: any axes.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from fedleak.attacks.clock import Clock
from fedleak.attacks.subspace.answer import Judged
from fedleak.attacks.subspace.atoms import NOTHING, Atoms
from fedleak.attacks.subspace.span import ACCEPT

_WORTH_A_LOOK = 5 * ACCEPT
"""The beam's own residual, in float32, below which the exact residual is computed."""

SQUARED_ROUNDING = 1e-13
"""What float32 leaves of a unit vector's square when all of it is explained."""

_PARALLEL = 1e-6
"""Squared norm, of an average 1, below which an atom is taken to lie in the members' span."""


@dataclass(frozen=True)
class Spanned(Judged):
    """A sentence that spans a seed's gradient, or comes nearest.

    Its excess is the root mean square over heads. It passed if the same sentence without one token
    is rejected; the sentence that only comes nearest has 0 as its `rejected`.

    Attributes:
        seeds: Tokens, as indices of the bag, whose gradients are this sentence's alone.
        members_M: Its atoms; None: it was not made of atoms.
    """

    seeds: tuple[int, ...]
    members_M: Tensor | None = field(default=None, compare=False)

    @property
    def passed(self) -> bool:
        """Whether it spans the gradient and needs each of its tokens."""
        return self.rejected != 0


def read_seeds(atoms: Atoms, seeds: Sequence[int], width: int, clock: Clock) -> Iterator[Spanned]:
    """Yields for each seed the sentence that spans its gradient, or the nearest sentence."""
    best = {i: (math.inf, torch.empty(0)) for i in range(len(seeds))}
    seeds_S = torch.tensor(seeds, device=atoms.token_A.device)
    for members_SWM, at_SW, rest_SW in grow(atoms, seeds_S, width):
        whole_SW = atoms.whole(members_SWM)
        nearest_S = rest_SW.argmin(1).tolist()
        for i in list(best):
            w = nearest_S[i]
            if rest_SW[i, w] < _WORTH_A_LOOK:
                kept, own, rejected = needed(atoms, seeds[i], members_SWM[i, w], at_SW[i, w], clock)
                if own < atoms.accepts(kept) and atoms.whole(kept):
                    del best[i]
                    yield Spanned(atoms.ids(kept), own, rejected, (seeds[i],), kept)
                    continue
            rest_W = rest_SW[i].masked_fill(~whole_SW[i], math.inf)
            if rest_W.min() < best[i][0]:
                best[i] = (float(rest_W.min()), members_SWM[i, rest_W.argmin()])
        if not best:
            return
        if clock.up():
            break
    for i, (rest, members_M) in best.items():
        if math.isfinite(rest):
            yield Spanned(atoms.ids(members_M), rest, 0.0, (seeds[i],), members_M)


def needed(
    atoms: Atoms, seed: int, members_M: Tensor, at: Tensor, clock: Clock
) -> tuple[Tensor, float, float]:
    """Returns the members that the residual needs, their excess, and the least with one fewer.

    The third is 0 if time is up before it is known, and infinite if it was not sought.

    Args:
        atoms: The dictionary.
        seed: Index of the seed in the bag.
        members_M: Atoms of a set.
        at: The atom that is the seed at its own position.
        clock: Ends after the set whose members are being judged.
    """
    own = atoms.excess(seed, members_M, at)
    while own < atoms.accepts(members_M) and len(members_M) > 1:
        if clock.up():
            return members_M, own, 0.0
        without = [torch.cat([members_M[:i], members_M[i + 1 :]]) for i in range(len(members_M))]
        lowest, i = min((atoms.excess(seed, fewer, at), i) for i, fewer in enumerate(without))
        if lowest >= atoms.accepts(without[i]):
            return members_M, own, lowest
        members_M, own = without[i], lowest
    return members_M, own, math.inf


@dataclass(frozen=True, kw_only=True)
class Beams:
    """Sets of atoms that grow side by side, W for each of S seeds; float32.

    Attributes:
        members_SWM: Atoms.
        at_SW: The atom that is the seed at its own position.
        rest_HSWK: The seed's gradient, of unit norm in each head, outside the members' span.
        basis_HSWKM: Orthonormal basis of the members' span.
        outside_HSWA: Squared norm of each atom outside it.
    """

    members_SWM: Tensor
    at_SW: Tensor
    rest_HSWK: Tensor
    basis_HSWKM: Tensor
    outside_HSWA: Tensor


def grow(atoms: Atoms, seeds_S: Tensor, width: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields after each step members [S, W, M], the seeds' own atoms [S, W] and the rest [S, W].

    A step adds the atom that leaves the smallest residuals, as their product over heads. The rest
    is the root mean square of the residuals over heads, in units of the noise and the freedom left.

    Args:
        atoms: The dictionary.
        seeds_S: Indices of the seeds in the bag.
        width: Sets of each seed that are kept; more in the first step, one for each position.
    """
    size_H11 = atoms.vector_HAK.norm(dim=-1).mean(-1)[:, None, None].clamp_min(NOTHING)
    vector_HAK = (atoms.vector_HAK / size_H11).float()
    norm_SH1 = atoms.target_NHK[seeds_S].norm(dim=-1, keepdim=True).clamp_min(NOTHING)
    target_SHK = (atoms.target_NHK[seeds_S] / norm_SH1).float()
    noise_HS11 = (atoms.noise_NH[seeds_S] / norm_SH1[..., 0]).square().float().T[..., None, None]
    noise_HS11 = noise_HS11 + SQUARED_ROUNDING
    beams = _start(atoms, vector_HAK, target_SHK, seeds_S)
    size = vector_HAK.shape[-1]
    while True:
        members = beams.members_SWM.shape[-1]
        if members >= min(atoms.positions, size - 1):
            return
        rest_HSW = beams.rest_HSWK.square().sum(-1)
        along_HSWA = (beams.rest_HSWK.flatten(1, 2) @ vector_HAK.mT).reshape(
            beams.outside_HSWA.shape
        )
        gain_HSWA = along_HSWA.square_().div_(beams.outside_HSWA)
        visible_BHA = atoms.visible(beams.at_SW.flatten())
        if visible_BHA is not None:
            gain_HSWA *= visible_BHA.permute(1, 0, 2).reshape(gain_HSWA.shape)
        left_HSWA = torch.sub(rest_HSW[..., None], gain_HSWA, out=gain_HSWA).clamp_min_(0)
        score_SWA = left_HSWA.add_(noise_HS11).log_().sum(0)
        score_SWA.masked_fill_(atoms.misplaced(beams.members_SWM), torch.inf)
        parent_SW, atom_SW, possible = best_sets(score_SWA, beams.members_SWM, width)
        if not possible:
            return
        beams = extend(atoms, vector_HAK, beams, parent_SW, atom_SW)
        freedom = size - members - 1
        rest_HSW = beams.rest_HSWK.square().sum(-1) / (freedom * noise_HS11[..., 0])
        yield beams.members_SWM, beams.at_SW, rest_HSW.mean(0).sqrt()


def _start(atoms: Atoms, vector_HAK: Tensor, target_SHK: Tensor, seeds_S: Tensor) -> Beams:
    """Returns a beam for each position of a seed, with the mark that begins every sentence."""
    at_SW = pad_sequence(
        [
            ((atoms.bag_A == v) & (atoms.position_A >= atoms.begin)).nonzero().flatten()
            for v in seeds_S
        ],
        batch_first=True,
        padding_value=-1,
    )
    # A seed with fewer positions than others has its first one several times.
    at_SW = torch.where(at_SW < 0, at_SW[:, :1], at_SW)
    members_SWM = at_SW[..., None]
    if atoms.first is not None:
        members_SWM = torch.cat([members_SWM, atoms.mark().expand(*at_SW.shape, 1)], -1)
    basis_HSWKM = torch.linalg.qr(vector_HAK[:, members_SWM].mT)[0]
    target_HSWK = target_SHK.permute(1, 0, 2)[:, :, None].expand(*basis_HSWKM.shape[:4])
    along_HSWM1 = basis_HSWKM.mT @ target_HSWK[..., None]
    # One product with all bases, not a small one with each.
    inside_HAX = vector_HAK @ basis_HSWKM.permute(0, 3, 1, 2, 4).flatten(2)
    inside_HASW = inside_HAX.square_().reshape(*vector_HAK.shape[:2], *members_SWM.shape).sum(-1)
    outside_HSWA = vector_HAK.square().sum(-1)[:, None, None] - inside_HASW.permute(0, 2, 3, 1)
    return Beams(
        members_SWM=members_SWM,
        at_SW=at_SW,
        rest_HSWK=target_HSWK - (basis_HSWKM @ along_HSWM1)[..., 0],
        basis_HSWKM=basis_HSWKM,
        outside_HSWA=outside_HSWA.clamp_min_(_PARALLEL).contiguous(),
    )


def best_sets(score_SWA: Tensor, members_SWM: Tensor, width: int) -> tuple[Tensor, Tensor, bool]:
    """Returns the best children: their parents [S, W], new atoms [S, W], and whether any is left.

    Each set is kept once, from whichever parent it came.

    Args:
        score_SWA: Of each set with each atom added, lower is better; infinite: not allowed.
        members_SWM: The parents.
        width: Sets to keep of each seed.
    """
    score_SWC, atom_SWC = score_SWA.topk(min(width, score_SWA.shape[-1]), largest=False)
    code_SWC = _hashes(members_SWM).sum(-1, keepdim=True) + _hashes(atom_SWC)
    score_SC, order_SC = score_SWC.flatten(1).sort(stable=True)
    code_SC = code_SWC.flatten(1).gather(1, order_SC)
    sorted_SC, by_code_SC = code_SC.sort(stable=True)
    again_SC = F.pad(sorted_SC[:, 1:] == sorted_SC[:, :-1], (1, 0))
    score_SC = score_SC.masked_fill(again_SC.scatter(1, by_code_SC, again_SC), torch.inf)
    value_SW, choice_SW = score_SC.topk(min(width, score_SC.shape[1]), largest=False)
    # Fewer sets than beams: the best one fills them up.
    choice_SW = torch.where(value_SW.isinf(), choice_SW[:, :1], choice_SW)
    picked_SW = order_SC.gather(1, choice_SW)
    parent_SW = picked_SW // score_SWC.shape[-1]
    return (
        parent_SW,
        atom_SWC.flatten(1).gather(1, picked_SW),
        bool(value_SW[:, 0].isfinite().any()),
    )


def _hashes(atom: Tensor) -> Tensor:
    """Returns a hash of each atom; sums of hashes tell sets apart."""
    mixed = (atom + 1) * 0x5851F42D4C957F2D
    return (mixed ^ (mixed >> 29)) * 0x14057B7EF767814F


def extend(
    atoms: Atoms, vector_HAK: Tensor, beams: Beams, parent_SW: Tensor, atom_SW: Tensor
) -> Beams:
    """Returns the beams of these parents, each with one atom more."""
    row_S1 = torch.arange(len(parent_SW), device=parent_SW.device)[:, None]
    at_SW = beams.at_SW[row_S1, parent_SW]
    basis_HSWKM, rest_HSWK = (x[:, row_S1, parent_SW] for x in (beams.basis_HSWKM, beams.rest_HSWK))
    new_HSWK = vector_HAK[:, atom_SW]
    visible_BHA = atoms.visible(at_SW.flatten())
    if visible_BHA is not None:
        seen_BH1 = visible_BHA.take_along_dim(atom_SW.flatten()[:, None, None], 2)
        new_HSWK = new_HSWK * seen_BH1[..., 0].T.reshape(*new_HSWK.shape[:3], 1)
    for _ in range(2):  # once is not enough in float32
        new_HSWK = new_HSWK - (basis_HSWKM @ (basis_HSWKM.mT @ new_HSWK[..., None]))[..., 0]
    new_HSWK = new_HSWK / new_HSWK.norm(dim=-1, keepdim=True).clamp_min(_PARALLEL)
    along_HSWA = (new_HSWK.flatten(1, 2) @ vector_HAK.mT).reshape(
        *new_HSWK.shape[:3], vector_HAK.shape[1]
    )
    return Beams(
        members_SWM=torch.cat([beams.members_SWM[row_S1, parent_SW], atom_SW[..., None]], -1),
        at_SW=at_SW,
        rest_HSWK=rest_HSWK - (rest_HSWK * new_HSWK).sum(-1, keepdim=True) * new_HSWK,
        basis_HSWKM=torch.cat([basis_HSWKM, new_HSWK[..., None]], -1),
        outside_HSWA=(beams.outside_HSWA[:, row_S1, parent_SW] - along_HSWA.square_()).clamp_min_(
            _PARALLEL
        ),
    )
