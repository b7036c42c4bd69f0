"""Sentences of a rotary model from its first layer alone, grown from their beginnings.

A rotary layer's input depends on the token alone, `x_v = token_v / sigma_v`, so least squares over
the distinct tokens splits the gradient of W_Q into one sum for each token: the sum over its places
i of `dq_i`, turned back to position 0. In causal attention

    dq_i = sum_(j <= i) dS_ij R_(j - i) k_j / sqrt(K)      in every head,

with R_o the rotation by o positions: the gradient at a query lies in the span of the keys before it
and its own, whatever comes later and whatever the loss is. If all places of a token v have the same
prefix P (it occurs once, or only in equal beginnings), so does the sum of their gradients, and

    v follows P   <=>   dq_v lies in the span of {R_(j - |P|) k_j: j in P} and k_v

is a test of H (K - |P| - 1) equations: a right token leaves rounding. So the prefixes of a batch
grow as a tree. The distinct tokens must be fewer than the hidden size; the numbers of tokens and of
texts do not matter. A text stays shorter than a head is wide.

A token with several prefixes passes nowhere. It is stepped over: a run of such tokens between a
prefix and the next token that passes belongs to the span, and all runs are tried. After the last
token that passes the same holds for keys,

    dk_j = sum_(i >= j) dS_ij R_(i - j) q_i / sqrt(K),

so the tokens behind it are found likewise; if its own query is enough, it is the last token. Where
heads share keys, a key's gradient has the queries of all of them in its span. What is proved is
taken out of the update (`keyspan`): repeated tokens then have fewer prefixes.

**Under noise** a wrong span, too, leaves less of a small gradient than noise. So tokens with clear
gradients pass first, and the ends, whose gradients are the smallest, stay open: all tails that may
be are yielded, and the gradient of the whole text tells which is right (`keyspan`).

Shapes: N tokens of the bag, U of them that are sought, R that may stand between, H heads of
queries, G of keys, S heads of queries that share one of keys, K head size, D hidden size, O
outputs, M members of a span, W runs side by side; X: any axes.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedleak.attacks.clock import Clock
from fedleak.attacks.subspace.answer import OnJudged, by_excess
from fedleak.attacks.subspace.atoms import (
    NOTHING,
    ROUNDING,
    SUBTRACTED,
    Targets,
    noises,
    weights,
)
from fedleak.attacks.subspace.beam_search import Spanned
from fedleak.attacks.subspace.span import ACCEPT, SPARE, row_space
from fedleak.attacks.subspace.token_bag import TokenBag, read_token_bag
from fedleak.models import LanguageModel
from fedleak.models.family import FirstBlock

_HEARD = ACCEPT**2
"""How many times its noise a gradient must be: a smaller one may be noise alone."""

_CLEAR = 300.0
"""Likewise: a smaller one lies in wrong spans, too, which leave a thirtieth of it at the least."""

_CLEARER = (_CLEAR, 100.0, 30.0, _HEARD)
"""Likewise under noise, one after the other: from the third on, the tree may be whole."""

_LEFT = 10 * SUBTRACTED
"""Share of a token's gradient below which the token is no longer in the rest of an update."""

_SIDE_BY_SIDE = 32
"""Runs that grow side by side."""

_FREE = 2
"""Dimensions of each head that a span must leave, or it says nothing."""

_TRIED = 2
"""Length of a run up to which all runs are tried."""

LONGEST_TAIL = 4
"""Tokens behind the last one that passes, at most."""


class Side(NamedTuple):
    """Gradients at the queries or at the keys of tokens, and what noise does to them.

    Attributes:
        target_NGK: Of each token, up to scale: the sum over its places, times the weights.
        noise_NG: Standard deviation of the noise in each number.
        slack_N: Square of the errors that are proportional to what was summed.
        weight_GK: What the numbers of an output count: 0 if it did not come; under noise, less of
            what is large.
    """

    target_NGK: Tensor
    noise_NG: Tensor
    slack_N: Tensor
    weight_GK: Tensor

    def bound(self, freedom: int) -> Tensor:
        """Returns the square [N] of what errors leave in so many dimensions of each head."""
        bound_N: Tensor = freedom * self.noise_NG.square().sum(1) + self.slack_N
        return bound_N.clamp_min(NOTHING)

    def excess(self, square_NX: Tensor, members: int, tokens_N: Tensor) -> Tensor:
        """Returns residuals' squares [N, X] of some tokens as an excess over their noise."""
        freedom = max(self.target_NGK.shape[-1] - members, 1)
        return (square_NX.clamp_min(0) / self.bound(freedom)[tokens_N, None]).sqrt()

    def square(self) -> Tensor:
        """Returns the square [N] of each token's gradient."""
        return self.target_NGK.square().sum((1, 2))

    def above(self, times: float) -> Tensor:
        """Returns which tokens [N] have a gradient of so many times its noise."""
        bound_N = self.bound(self.target_NGK.shape[-1])
        return self.square() > times**2 * bound_N


@dataclass(frozen=True, kw_only=True)
class Prefixes(Targets):
    """What a tree of prefixes is grown from.

    Attributes:
        x_ND: The attention input of each token of the bag.
        block: The first block.
        begin: The mark that begins every sentence, as an index of the bag; None: there is none.
        query, key: The gradients; None if those at keys were not sent.
        first_N: Which tokens begin a sentence. Such a token attends to itself alone, so only its
            query has no gradient.
        present_N: Which tokens are in what is left of the update.
    """

    x_ND: Tensor
    block: FirstBlock
    begin: int | None
    query: Side
    key: Side | None
    first_N: Tensor
    present_N: Tensor
    _turned: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def turned(self, offset: int) -> tuple[Tensor, Tensor]:
        """Returns queries and keys [N, H, K] of all tokens so many places from another."""
        if offset not in self._turned:
            offset_N = torch.full((len(self.x_ND),), offset, device=self.x_ND.device)
            q_NHK, k_NHK, _ = self.block.project(self.x_ND, offset_N)
            by_query_HK = self.query.weight_GK
            by_key_GK = by_query_HK if self.key is None else self.key.weight_GK
            by_key_HK = by_key_GK.repeat_interleave(q_NHK.shape[1] // len(by_key_GK), 0)
            self._turned[offset] = q_NHK.double() * by_key_HK, k_NHK.double() * by_query_HK
        return self._turned[offset]

    def grouped(self, offset: int, heads: int) -> Tensor:
        """Returns queries [N, G, K, S] by the heads of keys that they share."""
        q_NHK = self.turned(offset)[0]
        return q_NHK.reshape(len(q_NHK), heads, -1, q_NHK.shape[-1]).mT

    def before(self, path: Sequence[int], run: int) -> Tensor:
        """Returns an orthonormal basis [H, K, M] of a prefix's keys, seen over a run behind it."""
        keys = [self.turned(at - len(path) - run)[1][token] for at, token in enumerate(path)]
        if not keys:
            heads, size = self.query.target_NGK.shape[1:]
            return self.query.target_NGK.new_empty(heads, size, 0)
        basis_HKM: Tensor = torch.linalg.qr(torch.stack(keys, -1))[0]
        return basis_HKM


class Fit(NamedTuple):
    """The best places of tokens that are sought.

    Attributes:
        excess_U: Of the best place.
        second_U: The smallest excess in another place.
        path: Of each token, the prefix and the run before it, as indices of the bag.
    """

    excess_U: Tensor
    second_U: Tensor
    path: list[tuple[int, ...]]

    def or_(self, other: "Fit") -> "Fit":
        """Returns the better of two places of each token."""
        both_2U = torch.stack([self.excess_U, other.excess_U])
        second_U = torch.minimum(both_2U.amax(0), torch.minimum(self.second_U, other.second_U))
        path = [
            own if first else others
            for own, others, first in zip(
                self.path, other.path, (both_2U[0] <= both_2U[1]).tolist(), strict=True
            )
        ]
        return Fit(both_2U.amin(0), second_U, path)


class Grown(NamedTuple):
    """Tokens one behind the other.

    Attributes:
        path: Indices of the bag.
        excess: Of a gradient outside the span that they complete.
        rejected: The smallest excess of other tokens in their place; 0 where these are only the
            nearest.
    """

    path: tuple[int, ...]
    excess: float
    rejected: float


def make_prefixes(
    model: LanguageModel,
    gradients: Mapping[str, Tensor],
    whole: Mapping[str, Tensor],
    *,
    among_N: Tensor | None,
    rng: torch.Generator,
) -> Prefixes | None:
    """Returns the gradient of each token of the bag; None if the bag cannot be read.

    Args:
        model: At the broadcast weights.
        gradients: Of the first layer's attention, by parameter name.
        whole: The same gradients before any sentence was subtracted.
        among_N: The tokens of the batch, in rising order; None: they are not known yet.
        rng: For sketches.
    """
    family = model.family
    table, block = family.token_table(model.module), family.first_block(model.module)
    directions = table.directions()
    span = row_space(list(family.projections(whole, 0).values()))
    if span is None:
        return None
    tokens_N, accepted, rejected = among_N, 0.0, math.inf
    if tokens_N is None:
        read = read_token_bag(directions, span, rng)
        if read is None:
            return None
        tokens_N, accepted, rejected = read.tokens_N, read.worst_accepted, read.best_rejected
    # The first token attends to itself alone: its query has no gradient that would show it.
    mark = model.encode([""])[0][:1]
    mark = mark if mark == [model.tokenizer.bos_token_id] else []
    tokens_N = torch.unique(torch.cat([tokens_N, tokens_N.new_tensor(mark)]))
    if not len(tokens_N) or len(tokens_N) + SPARE > span.width:
        return None
    bag = TokenBag(
        tokens_N=tokens_N,
        positions=0,
        basis_MD=directions.token_VD[tokens_N].double(),
        worst_accepted=accepted,
        best_rejected=rejected,
        exact=span.exact,
    )
    of_whole = _sides(bag, family.projections(whole, 0), block.num_heads, {})
    known = {name: side.weight_GK for name, side in of_whole.items()}
    sides = _sides(bag, family.projections(gradients, 0), block.num_heads, known)
    square_N, whole_N = (
        torch.stack([side.square() for side in some.values()]).sum(0) for some in (sides, of_whole)
    )
    present_N = square_N > _LEFT**2 * whole_N
    if not present_N.any():
        return None
    for name, side in sides.items():
        taken_N = (of_whole[name].target_NGK - side.target_NGK).square().sum((1, 2))
        sides[name] = side._replace(slack_N=side.slack_N + SUBTRACTED**2 * taken_N)
    spanning = [sides[name] for name in ("query", "key") if name in sides]
    heard_N = torch.stack([side.above(_HEARD) for side in sides.values()]).any(0)
    return Prefixes(
        bag=bag,
        span=span,
        noise=noises(model, bag, gradients),
        target_NHK=torch.cat([side.target_NGK for side in spanning], 1),
        noise_NH=torch.cat([side.noise_NG for side in spanning], 1),
        weight_HK=torch.cat([side.weight_GK for side in spanning]),
        x_ND=table(bag.tokens_N, torch.zeros_like(bag.tokens_N)),
        block=block,
        begin=tokens_N.tolist().index(mark[0]) if mark else None,
        query=sides["query"],
        key=sides.get("key"),
        first_N=heard_N & ~sides["query"].above(_HEARD),
        present_N=present_N,
    )


def _sides(
    bag: TokenBag,
    by_side: Mapping[str, Tensor],
    num_heads: int,
    known: Mapping[str, Tensor],
) -> dict[str, Side]:
    """Returns gradients [O, D] by token, those of queries with so many heads.

    What the numbers of an output count is computed where it is not known.
    """
    size = len(by_side["query"]) // num_heads
    sides = {}
    for name, gradient_OD in by_side.items():
        value_NO, noise_NO = bag.coefficients(gradient_OD)
        target_NGK, noise_NGK = (x_NO.reshape(len(x_NO), -1, size) for x_NO in (value_NO, noise_NO))
        weight_GK = known.get(name)
        if weight_GK is None:
            weight_GK = weights(target_NGK, noise_NGK, exact=bag.exact)
        target_NGK, noise_NGK = target_NGK * weight_GK, noise_NGK * weight_GK
        slack_N = ROUNDING**2 * target_NGK.square().sum((1, 2))
        sides[name] = Side(target_NGK, noise_NGK.square().mean(-1).sqrt(), slack_N, weight_GK)
    return sides


def read_tree(
    prefixes: Prefixes, longest_run: int, clock: Clock, tell: OnJudged
) -> tuple[list[Spanned], list[Spanned]]:
    """Returns the sentences that passed, and the nearest of the others.

    Args:
        prefixes: What the tree is grown from.
        longest_run: Tokens between two that pass, at most.
        clock: Ends with the prefixes that are being extended.
        tell: Called with the number of tokens passed, the number of all, and each new sentence.
    """
    passed: list[Spanned] = []
    nearest: list[Spanned] = []
    for nodes, loose_R in grow(prefixes, longest_run, clock):
        inner = {node.path[:length] for node in nodes for length in range(1, len(node.path))}
        leaves = [node for node in nodes if node.path not in inner]
        # A token is of one text alone if one leaf is behind it.
        ways = Counter(
            leaf.path[:length] for leaf in leaves for length in range(len(leaf.path) + 1)
        )
        own = {node.path for node in nodes if ways[node.path] == 1}
        for path, excess, second in clock.paced(leaves):
            lengths = range(2, len(path) + 1)
            seeds = tuple(path[length - 1] for length in lengths if path[:length] in own)
            for tail in tails(prefixes, path[-1], loose_R):
                if (*path, *tail.path) == (prefixes.begin,):
                    continue
                sentence = Spanned(
                    ids=tuple(prefixes.bag.tokens_N[[*path, *tail.path]].tolist()),
                    excess=max(excess, tail.excess),
                    rejected=min(second, tail.rejected),
                    seeds=seeds or path[-1:],
                )
                (passed if sentence.passed else nearest).append(sentence)
                tell(len(nodes), len(prefixes.x_ND), sentence)
    return passed, sorted(nearest, key=by_excess)


def grow(
    prefixes: Prefixes, longest_run: int, clock: Clock
) -> Iterator[tuple[list[Grown], Tensor]]:
    """Yields the tokens that follow one prefix, and the others [R], as indices of the bag.

    Each prefix is extended by a token, and by a longer run only if no prefix can be extended. Under
    noise wrong spans, too, leave less of a small gradient than noise. There the tree is yielded
    first as it is grown from tokens with clear gradients alone.
    """
    first = prefixes.first_N.nonzero().flatten().tolist()
    if prefixes.begin is not None:
        first = [prefixes.begin]
    nodes = [Grown((token,), 0.0, math.inf) for token in first]
    loose_N = prefixes.present_N.clone()
    loose_N[first] = False
    times = (_CLEAR,) if prefixes.span.exact else _CLEARER
    for number, clear in enumerate(times):
        _extend(prefixes, nodes, loose_N, prefixes.query.above(clear), longest_run, clock)
        if number + 2 >= len(times):
            yield nodes, loose_N.nonzero().flatten()


def _extend(
    prefixes: Prefixes,
    nodes: list[Grown],
    loose_N: Tensor,
    clear_N: Tensor,
    longest_run: int,
    clock: Clock,
) -> None:
    """Adds tokens to nodes, as long as one that is loose and clear follows one of them."""
    pending = [[node.path for node in nodes], *[[] for _ in range(longest_run)]]
    if prefixes.begin is None and longest_run:
        pending[1].append(())
    while any(pending) and (sought_N := loose_N & clear_N).any() and not clock.up():
        run = next(run for run, paths in enumerate(pending) if paths)
        paths, pending[run] = pending[run], []
        if run < longest_run:
            pending[run + 1] += paths
        if run > 1:
            # Long runs are tried where a sentence breaks off, and where all begin.
            inner = {path[:length] for path in paths for length in range(2, len(path))}
            paths = [path for path in paths if path not in inner]
        loose_R, sought_U = (which_N.nonzero().flatten() for which_N in (loose_N, sought_N))
        fits = [followers(prefixes, path, run, loose_R, sought_U) for path in clock.paced(paths)]
        if not fits:
            break
        best = functools.reduce(Fit.or_, fits)
        for token, path, excess, second in zip(
            sought_U.tolist(),
            best.path,
            best.excess_U.tolist(),
            best.second_U.tolist(),
            strict=True,
        ):
            if excess < ACCEPT:
                nodes.append(Grown((*path, token), excess, second))
                pending[0].append((*path, token))
                loose_N[token] = False


def followers(
    prefixes: Prefixes, path: tuple[int, ...], run: int, loose_R: Tensor, sought_U: Tensor
) -> Fit:
    """Returns how well each token that is sought follows a prefix and some run of that length.

    Args:
        prefixes: The gradients.
        path: The prefix, as indices of the bag.
        run: Length of the run.
        loose_R: What a run may consist of, as indices of the bag.
        sought_U: Likewise, the tokens that may follow.
    """
    basis_HKM = prefixes.before(path, run)
    if basis_HKM.shape[-1] + 1 + run + _FREE > basis_HKM.shape[1]:
        none_U = torch.full((len(sought_U),), math.inf, device=sought_U.device).double()
        return Fit(none_U, none_U, [path] * len(sought_U))
    own_UHK1 = _outside(basis_HKM, prefixes.turned(0)[1][sought_U][..., None])
    keys = [prefixes.turned(-offset)[1][loose_R][..., None] for offset in range(run, 0, -1)]
    if run <= _TRIED:
        target_UHK1 = _outside(basis_HKM, prefixes.query.target_NGK[sought_U][..., None])
        keys = [_outside(basis_HKM, key_RHK1) for key_RHK1 in keys]
        step = _Step(path, basis_HKM.shape[-1], target_UHK1, own_UHK1)
        return _all_runs(prefixes, step, keys, loose_R, sought_U)
    fits = []
    for token, own_HK1 in zip(sought_U.tolist(), _unit(own_UHK1), strict=True):
        known_HKM = torch.cat([basis_HKM, own_HK1], -1)
        # The nearest first: they weigh most.
        *_, (fit, *_) = filled(prefixes.query, token, known_HKM, keys[::-1], loose_R)
        fits.append(fit)
    backwards, excess, second = zip(*fits, strict=True)
    of_runs = [(*path, *tokens[::-1]) for tokens in backwards]
    return Fit(basis_HKM.new_tensor(excess), basis_HKM.new_tensor(second), of_runs)


class _Step(NamedTuple):
    """A prefix, with what is outside the span of its keys.

    Attributes:
        path: The prefix, as indices of the bag.
        members: Its keys.
        target_UHK1: The gradients of the tokens that are sought.
        own_UHK1: Their keys.
    """

    path: tuple[int, ...]
    members: int
    target_UHK1: Tensor
    own_UHK1: Tensor


def _all_runs(
    prefixes: Prefixes, step: _Step, keys: Sequence[Tensor], loose_R: Tensor, sought_U: Tensor
) -> Fit:
    """Returns the best of all runs between a prefix and the tokens that are sought.

    Args:
        prefixes: The gradients.
        step: The prefix.
        keys: For each place of the run the keys [R, H, K, 1] outside the span of the prefix.
        loose_R: What a run may consist of, as indices of the bag.
        sought_U: Likewise, the tokens that may follow.
    """
    if len(keys) > 1:
        fits = []
        for token, key_HK1 in zip(loose_R.tolist(), _unit(keys[0]), strict=True):
            longer = _Step(
                (*step.path, token),
                step.members + 1,
                _outside(key_HK1, step.target_UHK1),
                _outside(key_HK1, step.own_UHK1),
            )
            behind = [_outside(key_HK1, key_RHK1) for key_RHK1 in keys[1:]]
            fits.append(_all_runs(prefixes, longer, behind, loose_R, sought_U))
        return functools.reduce(Fit.or_, fits)
    own_UHK1 = _unit(step.own_UHK1)
    target_UHK = _outside(own_UHK1, step.target_UHK1[:, None])[:, 0, ..., 0]
    square_U1 = target_UHK.square().sum((1, 2))[:, None]
    members = step.members + 1 + len(keys)
    if not keys:
        excess_U = prefixes.query.excess(square_U1, members, sought_U)[:, 0]
        return Fit(excess_U, torch.full_like(excess_U, math.inf), [step.path] * len(sought_U))
    key_RHK = keys[0][..., 0]
    # One product with all keys in each head, not a small one with each.
    along_HUR, own_HUR = (
        x_UHK.transpose(0, 1) @ key_RHK.permute(1, 2, 0) for x_UHK in (target_UHK, own_UHK1[..., 0])
    )
    left_HUR = key_RHK.square().sum(-1).T[:, None] - own_HUR.square()
    square_UR = square_U1 - (along_HUR.square() / left_HUR.clamp_min(NOTHING)).sum(0)
    excess_UR = prefixes.query.excess(square_UR, members, sought_U)
    excess_U, chosen_U = excess_UR.min(1)
    second_U = excess_UR.scatter(1, chosen_U[:, None], math.inf).amin(1)
    return Fit(excess_U, second_U, [(*step.path, token) for token in loose_R[chosen_U].tolist()])


def tails(prefixes: Prefixes, seed: int, loose_R: Tensor) -> list[Grown]:
    """Returns what follows the last token that passed.

    Nothing follows if the token's own query explains the gradient at its key. If no tail explains
    it, the nearest tail follows. Without that gradient, any tail of at most one token may.
    """
    side = prefixes.key
    if side is None:
        return [Grown((), 0.0, 1.0), *(Grown((token,), 0.0, 1.0) for token in loose_R.tolist())]
    heads = side.target_NGK.shape[1]
    own_GKS = prefixes.grouped(0, heads)[seed]
    basis_GKM = torch.linalg.qr(own_GKS)[0]
    rest_1GK1 = _outside(basis_GKM, side.target_NGK[seed][None, ..., None])
    members, seed_1 = basis_GKM.shape[-1], loose_R.new_tensor([seed])
    own = float(side.excess(rest_1GK1.square().sum()[None, None], members, seed_1))
    exact = prefixes.span.exact
    if exact and own < ACCEPT:
        return [Grown((), own, math.inf)]
    behind = [prefixes.grouped(offset, heads)[loose_R] for offset in range(1, LONGEST_TAIL + 1)]
    grown = filled(side, seed, basis_GKM, behind, loose_R)
    if not exact:
        # Noise hides how much a short tail leaves: the gradient of the text has to tell.
        return [Grown((), own, 1.0), *(tail._replace(rejected=1.0) for tail in chain(*grown))]
    of_each_length = [Grown((), own, 0.0)]
    for tail, *_ in grown:
        if tail.excess < ACCEPT:
            return [tail]
        of_each_length.append(tail._replace(rejected=0.0))
    # More tokens always leave less: the shortest that leaves about as little as any.
    lowest = min(tail.excess for tail in of_each_length)
    return [next(tail for tail in of_each_length if tail.excess < ACCEPT * lowest)]


def filled(
    side: Side, seed: int, basis_GKM: Tensor, places: Sequence[Tensor], loose_R: Tensor
) -> Iterator[list[Grown]]:
    """Yields after each place the tokens that fill all so far, the best first.

    Orthogonal least squares with a beam, as `beam_search` does it for sentences without an order.

    Args:
        side: The gradients.
        seed: The token whose gradient is explained.
        basis_GKM: Orthonormal basis of the known part of the span.
        places: What each token adds to the span in each place [R, G, K, S].
        loose_R: Tokens that may stand there, as indices of the bag.
    """
    seed_1, heads = loose_R.new_tensor([seed]), len(basis_GKM)
    floor = float(side.bound(1)[seed]) / heads
    rest_WGK = _outside(basis_GKM, side.target_NGK[seed][None, ..., None])[..., 0]
    basis_WGKM, grown_WM = basis_GKM.new_empty(1, *basis_GKM.shape[:2], 0), loose_R.new_empty(1, 0)
    for place_RGKS in places:
        members = basis_GKM.shape[-1] + basis_WGKM.shape[-1] + place_RGKS.shape[-1]
        if members + _FREE > basis_GKM.shape[1] or not len(loose_R):
            return
        new_WRGKS = _outside(basis_WGKM, _outside(basis_GKM, place_RGKS)[None])
        along_WRGS1 = torch.einsum("wgk,wrgks->wrgs", rest_WGK, new_WRGKS)[..., None]
        gram_WRGSS = new_WRGKS.mT @ new_WRGKS
        if gram_WRGSS.shape[-1] == 1:
            taken_WRGS1 = along_WRGS1 / gram_WRGSS.clamp_min(NOTHING)
        else:
            taken_WRGS1 = torch.linalg.pinv(gram_WRGSS, hermitian=True) @ along_WRGS1
        taken_WRG = (along_WRGS1 * taken_WRGS1).sum((3, 4))
        square_WRG = (rest_WGK.square().sum(2)[:, None] - taken_WRG).clamp_min(0)
        # As a product over heads: a right token counts in all of them.
        score_X = (square_WRG + floor).log().sum(2).flatten()
        chosen_W = score_X.topk(min(_SIDE_BY_SIDE, len(score_X)), largest=False).indices
        parent_W, token_W = chosen_W // len(loose_R), chosen_W % len(loose_R)
        grown_WM = torch.cat([grown_WM[parent_W], loose_R[token_W][:, None]], 1)
        square_1W = square_WRG[parent_W, token_W].sum(1)[None]
        excess_W, order_W = side.excess(square_1W, members, seed_1)[0].sort()
        second = float(excess_W[1]) if len(excess_W) > 1 else math.inf
        yield [
            Grown(tuple(tokens), excess, second)
            for tokens, excess in zip(grown_WM[order_W].tolist(), excess_W.tolist(), strict=True)
        ]
        new_WGKS = torch.linalg.qr(new_WRGKS[parent_W, token_W])[0]
        basis_WGKM = torch.cat([basis_WGKM[parent_W], new_WGKS], -1)
        rest_W1GK1 = _outside(new_WGKS, rest_WGK[parent_W][:, None, ..., None])
        rest_WGK = rest_W1GK1[:, 0, ..., 0]


def _unit(x_XK1: Tensor) -> Tensor:
    """Returns columns of unit norm."""
    return F.normalize(x_XK1, dim=-2, eps=NOTHING)


def _outside(basis_XGKM: Tensor, x_XNGKS: Tensor) -> Tensor:
    """Returns the part of columns of N tokens outside the spans of orthonormal bases."""
    # One product with all tokens in each head, not a small one with each.
    columns_XGKY = x_XNGKS.movedim(-4, -2).flatten(-2)
    outside_XGKY: Tensor = columns_XGKY - basis_XGKM @ (basis_XGKM.mT @ columns_XGKY)
    tokens = x_XNGKS.shape[-4]
    return outside_XGKY.reshape(*outside_XGKY.shape[:-1], tokens, -1).movedim(-2, -4)
