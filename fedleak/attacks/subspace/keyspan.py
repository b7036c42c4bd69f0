"""Keyspan: whole sentences from the first attention layer alone, past the rank limit of DAGER.

In the first layer the query of token i is q_i = W_Q x_i, and likewise its key and value. With
scores S_ij = q_i . k_j / sqrt(K) and A = softmax(S), the gradients at queries and keys are

    dq_i = sum_j dS_ij k_j / sqrt(K)      dk_j = sum_i dS_ij q_i / sqrt(K)      in every head,

so the gradient at a token's query lies in the span of the keys of its own sequence, and the one at
its key in that of the queries, with as many equations as heads have dimensions, in every head at
once. `factors` splits the weight gradients into such gradients, one per token of the bag. For a
token that occurs once (a seed), the smallest set of (token, position) pairs that spans it in all
heads is its sequence. It is found by orthogonal least squares with a beam (Chen et al. 1989; for
decoders, SOMP, arXiv 2603.16761, is the closest relative), and the residual certifies it: a right
set leaves rounding, a set with one wrong token thousands of times as much.

What the model's own gradient confirms (`certificate`) is taken out of the update, and the rest read
anew: tokens that two sentences shared become seeds. Batch size, lengths and labels are not used.

Shapes: V tokens of the bag, A atoms (token, position), H heads (of queries, then of keys), K head
size, M members of a set, W beams.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fedleak.attacks import AttackSetting, OnProgress, Progress, certificate
from fedleak.attacks.clock import Clock
from fedleak.attacks.subspace.span import ACCEPT, Span, margin, row_space
from fedleak.attacks.subspace.token_bag import Factors, pairs, read_factors
from fedleak.models import LanguageModel
from fedleak.observation import Observation
from fedleak.reconstruction import Reconstruction, Status

_ROUNDING = 4 * torch.finfo(torch.float32).eps
"""Relative error of each term of dq and dk as the client's float32 sums them."""

_SQUARED_ROUNDING = 1e-13
"""What float32 leaves of a unit vector's square when all of it is explained."""

_PARALLEL = 1e-6
"""Squared norm, of an average 1, below which an atom is taken to lie in the members' span."""

_NOTHING = 1e-300

_WORTH_A_LOOK = 5 * ACCEPT
"""The beam's own residual, in float32, below which the exact one is computed."""

_PEELED = 1e-5
"""Relative error of a sentence's gradient that was taken out of the update."""

_NO_MORE = 0.1
"""Relative precision of what is left of an update at which nothing is left."""

_WIDER = 4
"""How much wider the beam is once more before what is left is given up."""

_NOISY_SEEDS = 4
"""Seeds for each text of the batch that are read where noise leaves only likely answers."""

_TOGETHER = 32
"""Seeds that a GPU reads side by side; a CPU gains more from skipping those already explained."""


@dataclass(frozen=True)
class Keyspan:
    """Whole sentences and the exact token bag from the first attention layer's gradients alone.

    Attributes:
        beam: Sets of atoms that grow side by side for one seed.
        seconds: After which what was read so far counts; None: no limit.
    """

    kind: ClassVar[str] = "keyspan"
    uses: ClassVar[frozenset[str]] = frozenset()
    at_once: ClassVar[int] = 1
    beam: Annotated[int, Field(ge=1)] = 8
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs the query or the key matrix of the first layer, and learned positions."""
        if setting.num_layers < 2:
            return "needs 2 layers, and the model has 1: choose another model.name"
        if setting.family.position_embedding is None:
            return "reads learned positions, and the model's are rotary: use kind = 'dager'"
        names = setting.family.attention_parameters(0)[:2]
        if not setting.shared.intersection(names):
            return f"needs one of {', '.join(names)}: add it to update.share"
        return None

    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the sentences whose keys and queries span the gradients at their tokens."""
        return self.many([seen], model, rngs=[rng], report=lambda which, progress: None)[0]

    def many(
        self,
        seen: Sequence[Observation],
        model: LanguageModel,
        *,
        rngs: Sequence[torch.Generator],
        report: OnProgress,
    ) -> list[Reconstruction]:
        """Returns the same of each observation, one after the other, and reports progress."""
        return [
            self._read(each, model, rng, partial(report, i))
            for i, (each, rng) in enumerate(zip(seen, rngs, strict=True))
        ]

    @torch.no_grad()
    def _read(
        self,
        seen: Observation,
        model: LanguageModel,
        rng: torch.Generator,
        report: Callable[[Progress], None],
    ) -> Reconstruction:
        clock = Clock(self.seconds)
        observed = certificate.as_gradient(seen)
        names = [name for name in model.family.attention_parameters(0) if name in observed]
        whole = left = {name: observed[name] for name in names}
        among_V, width = None, self.beam
        passes: list[Atoms] = []
        sure: dict[tuple[int, ...], Spanned] = {}
        likely: list[Spanned] = []
        proofs: list[Proof] = []

        def told(step: int, steps: int, one: Spanned) -> None:
            report(Progress(step, steps, one.excess, model.decode(one.ids)))

        while (atoms := make_atoms(model, left, whole, among_V, rng)) is not None:
            passes.append(atoms)
            special, batch_size = model.special_ids(), seen.update.num_examples
            spanned, likely = read(atoms, width, special, batch_size, clock, told)
            sure = {one.ids: one for one in spanned} | sure
            linear = certificate.is_linear(seen)
            new = prove(spanned, atoms, model, names, seen, clock) if linear else []
            proofs += new
            if clock.up() or (not new and (width > self.beam or not atoms.span.exact)):
                break
            # A token that these share with others had a sum of gradients: read the rest anew.
            left = {name: g - sum(one.gradient[name] for one in new) for name, g in left.items()}
            if all(left[name].norm() < 2 * noise for name, noise in passes[0].noise.items()):
                break
            width = self.beam if new else _WIDER * self.beam
            among_V = atoms.factors.tokens_V
        answer = _answer(passes, list(sure.values()), likely, proofs, seen, model)
        if not clock.rang:
            return answer
        late = f"nothing proved in seconds = {self.seconds:g}: sentences that are here are guesses"
        return replace(
            answer,
            reason=answer.reason and late,
            diagnostics={**answer.diagnostics, "time_up": True},
        )


@dataclass(frozen=True)
class Atoms:
    """Keys and queries of each token of the bag at each position, and the gradients at them.

    Attributes:
        factors: The bag.
        span: The row space that it was read from.
        noise: The norm of each gradient's noise, by parameter name.
        bag_A, token_A, position_A: Which pair an atom is; its token as an index of the bag, too.
        vector_HAK: Its keys (heads of query gradients), then its queries (of key gradients).
        of_keys_H: True on the latter.
        target_VHK: The gradient at each token's query, then key, up to scale.
        noise_VH: Standard deviation of the noise in each number of it.
        causal: A token sees no later ones.
        first, last: Tokens that begin and end every sequence and stand nowhere else, or None.
    """

    factors: Factors
    span: Span
    noise: dict[str, float]
    bag_A: Tensor
    token_A: Tensor
    position_A: Tensor
    vector_HAK: Tensor
    of_keys_H: Tensor
    target_VHK: Tensor
    noise_VH: Tensor
    causal: bool
    first: int | None
    last: int | None

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
        """Returns the largest excess of a right set: rounding's, or of noise four deviations."""
        if self.span.exact:
            return ACCEPT
        heads, _, size = self.vector_HAK.shape
        freedom = heads * max(size - len(members_M), 1)
        return math.sqrt(1 + 4 * math.sqrt(2 / freedom))

    def visible(self, seed_A: Tensor) -> Tensor | None:
        """Returns [W, H, A]: which atoms take part in the gradient at each seed; None: all."""
        if not self.causal:
            return None
        from_W1 = self.position_A[seed_A][:, None]
        earlier_WA, later_WA = self.position_A <= from_W1, self.position_A >= from_W1
        return torch.where(self.of_keys_H[:, None], later_WA[:, None], earlier_WA[:, None])

    def whole(self, members_XM: Tensor) -> Tensor:
        """Returns [...]: whether members fill the positions from 0 on, up to the last mark."""
        position_XM = self.position_A[members_XM]
        whole_X = position_XM.amax(-1) + 1 == members_XM.shape[-1]
        if self.last is not None:
            last_X1 = position_XM.argmax(-1, keepdim=True)
            whole_X &= self.token_A[members_XM.gather(-1, last_X1)[..., 0]] == self.last
        return whole_X

    def ids(self, members_M: Tensor) -> tuple[int, ...]:
        """Returns the tokens of the members in the order of their positions."""
        order_M = self.position_A[members_M].argsort()
        return tuple(self.token_A[members_M[order_M]].tolist())


class Spanned(NamedTuple):
    """A sentence that spans a seed's gradient.

    Attributes:
        ids: Its tokens.
        seed: Index of the seed in the bag.
        excess: The residual in units of the noise, root mean square over heads.
        rejected: The smallest such residual of the sentence with one token taken away; 0 of a
            sentence that is only the likeliest.
    """

    ids: tuple[int, ...]
    seed: int
    excess: float
    rejected: float


class Proof(NamedTuple):
    """A sentence whose own gradient was found in the observed one, and that gradient by name."""

    member: certificate.Member
    gradient: dict[str, Tensor]


def make_atoms(
    model: LanguageModel,
    gradients: Mapping[str, Tensor],
    whole: Mapping[str, Tensor],
    among_V: Tensor | None,
    rng: torch.Generator,
) -> Atoms | None:
    """Returns every token of the bag at every position; None where the bag cannot be read.

    Args:
        model: At the broadcast weights.
        gradients: Of the first layer's attention, by parameter name.
        whole: The same before anything was taken out of them.
        among_V: The only tokens that may be in the batch; None: all.
        rng: For sketches.
    """
    family = model.family
    by_side = family.projections(gradients, 0)
    table, block = family.token_table(model.module), family.first_block(model.module)
    directions = table.directions()
    taken = max(float(whole[name].norm() / g.norm()) for name, g in gradients.items())
    rounding = _PEELED * taken if gradients is not whole else 0.0
    span = row_space(list(by_side.values()), rounding) if rounding < _NO_MORE else None
    factors = None if span is None else read_factors(directions, span, rng, among_V=among_V)
    if span is None or factors is None or not len(factors.tokens_V):
        return None
    # The gradients at keys add up to nothing, so that by themselves they span no single input.
    single = span if by_side.keys() - {"key"} else None
    bag_A, position_A = pairs(table, factors, single)
    if not len(bag_A):
        return None
    token_A = factors.tokens_V[bag_A]
    q_AHK, k_AHK, _ = block.project(table(token_A, position_A), position_A)
    # Queries' gradients lie in the span of keys, and keys' in that of queries.
    spanning = {"query": k_AHK, "key": q_AHK}
    sides = [side for side in spanning if side in by_side]
    values = [factors.coefficients(by_side[side]) for side in sides]
    split = (len(factors.tokens_V), block.num_heads, -1)
    marks = (None, None)
    if not family.causal:
        marks = (model.tokenizer.cls_token_id, model.tokenizer.sep_token_id)
    return Atoms(
        factors,
        span,
        {
            name: sum(factors.noise(g) ** 2 for g in family.projections({name: own}, 0).values())
            ** 0.5
            for name, own in gradients.items()
        },
        bag_A,
        token_A,
        position_A,
        torch.cat([spanning[side].double().transpose(0, 1) for side in sides]),
        torch.tensor([s == "key" for s in sides for _ in range(block.num_heads)]).to(
            token_A.device
        ),
        torch.cat([one.value_VO.reshape(split) for one in values], 1),
        torch.cat([one.noise_VO.reshape(split).square().mean(-1).sqrt() for one in values], 1),
        family.causal,
        *marks,
    )


def read(
    atoms: Atoms,
    width: int,
    special: frozenset[int],
    batch_size: int,
    clock: Clock,
    told: Callable[[int, int, Spanned], None],
) -> tuple[list[Spanned], list[Spanned]]:
    """Returns the sentences that seeds certify, and the likeliest ones of the other seeds.

    Args:
        atoms: The dictionary.
        width: Of the beam.
        special: Tokens that are in every sentence, so that they are no seeds.
        batch_size: Sentences at most; it limits the work that is spent on noise.
        clock: Ends with the seed that is being read, and with the sets that it has.
        told: Is told of how many seeds, of how many, a sentence is known, and a new sentence.
    """
    signal_V = atoms.target_VHK.square().sum((1, 2)) / atoms.noise_VH.square().sum(1)
    tokens = atoms.factors.tokens_V.tolist()
    placed = set(atoms.bag_A[atoms.position_A >= atoms.begin].tolist())
    waiting = [
        v
        for v in signal_V.argsort(descending=True).tolist()
        if v in placed and tokens[v] not in special
    ]
    if atoms.first is not None and not len(atoms.mark()):
        waiting = []  # no sentence can begin
    if not atoms.span.exact:
        # No gradient can be split by tokens that are more than there is room for.
        waiting = [] if atoms.span.full else waiting[: _NOISY_SEEDS * batch_size]
    sure: dict[tuple[int, ...], Spanned] = {}
    likely: list[Spanned] = []
    if waiting and len(atoms.token_A) == atoms.positions and atoms.span.exact:
        # One token for each position: the span alone tells the only sentence, however long.
        ids = atoms.ids(torch.arange(atoms.positions, device=atoms.token_A.device))
        bag = atoms.factors
        sure[ids] = Spanned(ids, waiting[0], bag.worst_accepted, bag.best_rejected)
        waiting = []
    seeds_in_all = len(waiting)
    together = 1 if atoms.token_A.is_cpu else _TOGETHER
    while waiting and not clock.up():
        seeds, waiting = waiting[:together], waiting[together:]
        for one in read_seeds(atoms, seeds, width, clock):
            if one.rejected:
                sure.setdefault(one.ids, one)
            else:
                likely.append(one)
            told(seeds_in_all - len(waiting), seeds_in_all, one)
        # A token of a sentence that was found is in it alone, or is no seed at all.
        known = {token for ids in sure for token in ids}
        waiting = [v for v in waiting if tokens[v] not in known]
    return list(sure.values()), sorted(likely, key=lambda one: one.excess)


def read_seeds(atoms: Atoms, seeds: Sequence[int], width: int, clock: Clock) -> Iterator[Spanned]:
    """Yields for each seed the sentence that spans its gradient, or the one that comes nearest."""
    best = {i: (math.inf, torch.empty(0)) for i in range(len(seeds))}
    seeds_S = torch.tensor(seeds, device=atoms.token_A.device)
    for members_SWM, at_SW, rest_SW in grow(atoms, seeds_S, width):
        whole_SW = atoms.whole(members_SWM)
        nearest_S = rest_SW.argmin(1).tolist()
        for i in list(best):
            w = nearest_S[i]
            if rest_SW[i, w] < _WORTH_A_LOOK:
                kept, own, rejected = _needed(
                    atoms, seeds[i], members_SWM[i, w], at_SW[i, w], clock
                )
                if own < atoms.accepts(kept) and atoms.whole(kept):
                    del best[i]
                    yield Spanned(atoms.ids(kept), seeds[i], own, rejected)
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
            yield Spanned(atoms.ids(members_M), seeds[i], rest, 0.0)


def _needed(
    atoms: Atoms, seed: int, members_M: Tensor, at: Tensor, clock: Clock
) -> tuple[Tensor, float, float]:
    """Returns the members that the residual needs, theirs, and the least without one of them.

    That is 0 if time is up before it is known.
    """
    own = excess(atoms, seed, members_M, at)
    while own < atoms.accepts(members_M) and len(members_M) > 1:
        if clock.up():
            return members_M, own, 0.0
        without = [torch.cat([members_M[:i], members_M[i + 1 :]]) for i in range(len(members_M))]
        least, i = min((excess(atoms, seed, fewer, at), i) for i, fewer in enumerate(without))
        if least >= atoms.accepts(without[i]):
            return members_M, own, least
        members_M, own = without[i], least
    return members_M, own, math.inf


def excess(atoms: Atoms, seed: int, members_M: Tensor, at: Tensor) -> float:
    """Returns the residual of a seed's gradient outside the span of members, over its noise.

    Args:
        atoms: The dictionary.
        seed: Index of the seed in the bag.
        members_M: Atoms of the set.
        at: The atom that is the seed at its own position.
    """
    target_HK, vector_HMK = atoms.target_VHK[seed], atoms.vector_HAK[:, members_M]
    visible_1HA = atoms.visible(at[None])
    if visible_1HA is not None:
        vector_HMK = vector_HMK * visible_1HA[0][:, members_M, None]
    weight_HM1 = torch.linalg.pinv(vector_HMK.mT) @ target_HK[..., None]
    rest_HK = target_HK - (vector_HMK.mT @ weight_HM1)[..., 0]
    size_HM = vector_HMK.norm(dim=-1)
    freedom_H = (target_HK.shape[1] - (size_HM > 0).sum(1)).clamp_min(1)
    terms_H = (weight_HM1[..., 0] * size_HM).norm(dim=-1)
    bound_H = freedom_H * atoms.noise_VH[seed].square() + (_ROUNDING * terms_H).square()
    return float((rest_HK.square().sum(-1) / bound_H.clamp_min(_NOTHING)).mean().sqrt())


class Beams(NamedTuple):
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
    """Orthogonal least squares: yields members [S, W, M], seeds' atoms [S, W] and rest [S, W].

    A step adds the atom that leaves the smallest product over heads of what remains unexplained.
    The rest is its root mean square over heads, in units of the noise and the freedom left.
    """
    vector_HAK = atoms.vector_HAK / atoms.vector_HAK.norm(dim=-1).mean(-1)[:, None, None]
    vector_HAK = vector_HAK.float()
    norm_SH1 = atoms.target_VHK[seeds_S].norm(dim=-1, keepdim=True).clamp_min(_NOTHING)
    target_SHK = (atoms.target_VHK[seeds_S] / norm_SH1).float()
    noise_HS11 = (atoms.noise_VH[seeds_S] / norm_SH1[..., 0]).square().float().T[..., None, None]
    noise_HS11 = noise_HS11 + _SQUARED_ROUNDING
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
        visible = atoms.visible(beams.at_SW.flatten())
        if visible is not None:
            gain_HSWA *= visible.permute(1, 0, 2).reshape(gain_HSWA.shape)
        left_HSWA = torch.sub(rest_HSW[..., None], gain_HSWA, out=gain_HSWA).clamp_min_(0)
        score_SWA = left_HSWA.add_(noise_HS11).log_().sum(0)
        score_SWA.masked_fill_(_misplaced(atoms, beams.members_SWM), torch.inf)
        parent_SW, atom_SW, possible = _best(score_SWA, beams.members_SWM, width)
        if not possible:
            return
        beams = _extend(atoms, vector_HAK, beams, parent_SW, atom_SW)
        freedom = size - members - 1
        rest_HSW = beams.rest_HSWK.square().sum(-1) / (freedom * noise_HS11[..., 0])
        yield beams.members_SWM, beams.at_SW, rest_HSW.mean(0).sqrt()


def _start(atoms: Atoms, vector_HAK: Tensor, target_SHK: Tensor, seeds_S: Tensor) -> Beams:
    """Returns a beam for each position that a seed may have, with the mark that begins it."""
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
        members_SWM,
        at_SW,
        target_HSWK - (basis_HSWKM @ along_HSWM1)[..., 0],
        basis_HSWKM,
        outside_HSWA.clamp_min_(_PARALLEL).contiguous(),
    )


def _misplaced(atoms: Atoms, members_SWM: Tensor) -> Tensor:
    """Returns [S, W, A]: atoms whose position is taken, or that would stand beyond the marks."""
    position_SWM, token_SWM = atoms.position_A[members_SWM], atoms.token_A[members_SWM]
    taken_SWP = torch.zeros(
        *members_SWM.shape[:2], atoms.positions, dtype=torch.bool, device=members_SWM.device
    ).scatter_(2, position_SWM, True)
    wrong_SWA = taken_SWP[..., atoms.position_A]
    if atoms.first is not None:
        wrong_SWA |= atoms.token_A == atoms.first
    if atoms.last is not None:
        ends_SWM, ends_A = token_SWM == atoms.last, atoms.token_A == atoms.last
        end_SW1 = torch.where(ends_SWM, position_SWM, atoms.positions).amin(-1, keepdim=True)
        highest_SW1 = position_SWM.amax(-1, keepdim=True)
        ended_SW1 = ends_SWM.any(-1, keepdim=True)
        wrong_SWA |= atoms.position_A > end_SW1
        wrong_SWA |= ends_A & ((atoms.position_A < highest_SW1) | ended_SW1)
    return wrong_SWA


def _best(score_SWA: Tensor, members_SWM: Tensor, width: int) -> tuple[Tensor, Tensor, bool]:
    """Returns the best new sets as parent [S, W] and atom [S, W], each set once; and if any is."""
    score_SWC, atom_SWC = score_SWA.topk(min(width, score_SWA.shape[-1]), largest=False)
    code_SWC = _code(members_SWM).sum(-1, keepdim=True) + _code(atom_SWC)
    score_SC, order_SC = score_SWC.flatten(1).sort(stable=True)
    code_SC = code_SWC.flatten(1).gather(1, order_SC)
    sorted_SC, by_code_SC = code_SC.sort(stable=True)
    again_SC = torch.zeros_like(score_SC, dtype=torch.bool)
    again_SC[:, 1:] = sorted_SC[:, 1:] == sorted_SC[:, :-1]
    score_SC = score_SC.masked_fill(
        torch.zeros_like(again_SC).scatter_(1, by_code_SC, again_SC), torch.inf
    )
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


def _code(atom: Tensor) -> Tensor:
    """Returns a hash of atoms whose sum tells sets apart."""
    mixed = (atom + 1) * 0x5851F42D4C957F2D
    return (mixed ^ (mixed >> 29)) * 0x14057B7EF767814F


def _extend(
    atoms: Atoms, vector_HAK: Tensor, beams: Beams, parent_SW: Tensor, atom_SW: Tensor
) -> Beams:
    """Returns the beams of these parents, each with one atom more."""
    row_S1 = torch.arange(len(parent_SW), device=parent_SW.device)[:, None]
    at_SW = beams.at_SW[row_S1, parent_SW]
    basis_HSWKM, rest_HSWK = (x[:, row_S1, parent_SW] for x in (beams.basis_HSWKM, beams.rest_HSWK))
    new_HSWK = vector_HAK[:, atom_SW]
    visible = atoms.visible(at_SW.flatten())
    if visible is not None:
        seen_WH = visible.gather(
            2, atom_SW.flatten()[:, None, None].expand(-1, visible.shape[1], 1)
        )
        new_HSWK = new_HSWK * seen_WH[..., 0].T.reshape(*new_HSWK.shape[:3], 1)
    for _ in range(2):  # once is not enough in float32
        new_HSWK = new_HSWK - (basis_HSWKM @ (basis_HSWKM.mT @ new_HSWK[..., None]))[..., 0]
    new_HSWK = new_HSWK / new_HSWK.norm(dim=-1, keepdim=True).clamp_min(_PARALLEL)
    along_HSWA = (new_HSWK.flatten(1, 2) @ vector_HAK.mT).reshape(
        *new_HSWK.shape[:3], vector_HAK.shape[1]
    )
    return Beams(
        torch.cat([beams.members_SWM[row_S1, parent_SW], atom_SW[..., None]], -1),
        at_SW,
        rest_HSWK - (rest_HSWK * new_HSWK).sum(-1, keepdim=True) * new_HSWK,
        torch.cat([basis_HSWKM, new_HSWK[..., None]], -1),
        (beams.outside_HSWA[:, row_S1, parent_SW] - along_HSWA.square_()).clamp_min_(_PARALLEL),
    )


def prove(
    spanned: Sequence[Spanned],
    atoms: Atoms,
    model: LanguageModel,
    names: Sequence[str],
    seen: Observation,
    clock: Clock,
) -> list[Proof]:
    """Returns the sentences whose own gradient at their seed is the observed one, up to labels.

    Args:
        spanned: Sentences.
        atoms: Those they were read from.
        model: At the broadcast weights.
        names: Parameters of the first layer's attention that were shared.
        seen: For the batch size that the client reported.
        clock: Sentences that are left when time is up stay without a proof.
    """
    proofs = []
    for one in spanned:
        if clock.up():
            break
        (unit,) = certificate.units(model, [one.ids], names)
        columns = [_at_seed(atoms, model, gradient, one.seed) for gradient in unit.gradients]
        system_XC = torch.stack([column.flatten() for column in columns], 1)
        target_X = atoms.target_VHK[one.seed].flatten()
        kappa_C = torch.linalg.lstsq(system_XC, target_X[:, None]).solution[:, 0]
        rest = (target_X - system_XC @ kappa_C).norm()
        noise = atoms.noise_VH[one.seed].norm() * atoms.target_VHK.shape[-1] ** 0.5
        if rest > ACCEPT * noise + certificate.PRECISION * target_X.norm():
            continue
        member = certificate.member(model, unit, kappa_C, seen.update.num_examples)
        if member is not None:
            weights = kappa_C.tolist()
            gradient = {
                name: sum(w * g[name] for w, g in zip(weights, unit.gradients, strict=True))
                for name in names
            }
            proofs.append(Proof(member, gradient))
    return proofs


def _at_seed(
    atoms: Atoms, model: LanguageModel, gradients: Mapping[str, Tensor], seed: int
) -> Tensor:
    """Returns a gradient's coefficient of one token [H, K], as the targets are."""
    by_side = model.family.projections(gradients, 0)
    inverse_D = atoms.factors.inverse_DM[:, seed]
    sides = [by_side[side].double() @ inverse_D for side in ("query", "key") if side in by_side]
    return torch.cat(sides).reshape(atoms.target_VHK.shape[1:])


def _answer(
    passes: Sequence[Atoms],
    sure: Sequence[Spanned],
    likely: Sequence[Spanned],
    proofs: Sequence[Proof],
    seen: Observation,
    model: LanguageModel,
) -> Reconstruction:
    """Returns what was read: certain sentences first, then the likeliest.

    Only a batch of which all is known is verified, and then nothing else is in the answer.
    """
    if not passes:
        return Reconstruction.none(
            Status.ABSTAINED,
            "nothing proved: the gradients' row space has no end, or has no room for tokens "
            f"(distinct tokens + positions + 1 must stay below the hidden size, "
            f"{model.hidden_size})",
        )
    first, members = passes[0], [one.member for one in proofs]
    diagnostics: dict[str, Any] = {
        "rank": first.span.rank,
        "budget": list(first.factors.basis_MD.shape),
        "candidates": {
            "tokens": len(first.factors.tokens_V),
            "pairs": len(first.token_A),
            "spanned": len(sure),
            "proved": len(members),
        },
        "token_margin": margin(first.factors.worst_accepted, first.factors.best_rejected),
        "passes": len(passes),
    }
    verdict = certificate.verify(model, members, seen)
    if verdict.difference is not None:
        diagnostics["gradient_difference"] = verdict.difference
    ranked = [
        one
        for one in sorted(sure, key=lambda one: one.excess)
        for _ in range(verdict.repeats.get(one.ids, 0 if verdict.verified else 1))
    ]
    if not verdict.verified:
        ranked += _apart(likely, sure)
        ranked = ranked[: max(seen.update.num_examples, len(sure))]
    unsure = "nothing proved: tokens and sentences are the likeliest ones"
    if first.span.full:
        unsure = (
            "nothing proved: there are more tokens than the hidden size "
            f"({model.hidden_size}), so that these are the likeliest and no sentence is sought"
        )
    return Reconstruction(
        Status.RECOVERED,
        sequences=tuple(one.ids for one in ranked),
        evidence=tuple(one.excess for one in ranked),
        margins=tuple(margin(one.excess, one.rejected) for one in ranked),
        tokens=tuple(first.factors.tokens_V.tolist()),
        diagnostics=diagnostics,
        verified=verdict.verified,
        reason="" if sure else unsure,
    )


def _apart(likely: Sequence[Spanned], sure: Sequence[Spanned]) -> list[Spanned]:
    """Returns the likeliest sentences, without those that repeat most of a better one."""
    kept: list[Spanned] = []
    for one in likely:
        others = (set(enumerate(other.ids)) for other in (*sure, *kept))
        own = set(enumerate(one.ids))
        if all(2 * len(own & other) <= len(own) for other in others):
            kept.append(one)
    return kept
