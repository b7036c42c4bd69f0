"""The token bag and the positions of a batch, past the rank limit of span attacks.

A first attention input is `(token + position) / sigma + constant` (`models.family.Directions`), so
all inputs of a batch lie in the span of its distinct tokens, its positions and the constant. That
span is usually smaller than the number of tokens in the batch, and it is the budget here:
`distinct tokens + positions + 1 <= hidden size`. DAGER tests (token, position) pairs, which are
linearly dependent as soon as tokens and positions recur; here each token is tested by itself,
against the gradients' row space beside all positions and the constant.

With the bag known, least squares splits a gradient `G = sum_i dq_i x_i^T` into one coefficient per
direction. The coefficient of a token is the sum of `dq_i / sigma_i` over its occurrences.

Shapes: V vocabulary, N tokens of the bag, P positions, M directions of a basis, D hidden size,
O outputs, R rank, S sketch columns, A (token, position) pairs, L shortlisted tokens, C constants
(0 or 1).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.subspace.span import ACCEPT, SPARE, Span, outside
from fedleak.models.family import Directions, TokenTable

_FIRST_GUESS = 32
"""Positions that the search begins with: right at once for most sentences."""

_EXPLAINED = 30.0
"""Largest part of a row space, in units of its noise, outside the bag that explains it."""


class Coefficients(NamedTuple):
    """A gradient by token.

    Attributes:
        value_NO: The sum of `dq_i / sigma_i` over the token's occurrences.
        noise_NO: Standard deviation that the gradient's noise gives it.
    """

    value_NO: Tensor
    noise_NO: Tensor


@dataclass(frozen=True, kw_only=True)
class TokenBag:
    """The distinct tokens of a batch and the number of its positions.

    Attributes:
        tokens_N: Token ids in rising order.
        positions: Length of the longest sequence; 0 if inputs have no position in them.
        basis_MD: The directions of tokens, positions and constant, float64.
        worst_accepted: Largest excess of an accepted token.
        best_rejected: Smallest excess of a rejected token.
        exact: The tokens passed a test; else they are the nearest to the span.
    """

    tokens_N: Tensor
    positions: int
    basis_MD: Tensor
    worst_accepted: float = 0.0
    best_rejected: float = math.inf
    exact: bool = True

    @cached_property
    def inverse_DM(self) -> Tensor:  # noqa: N802
        """The pseudo-inverse of the basis."""
        inverse_DM: Tensor = torch.linalg.pinv(self.basis_MD)
        return inverse_DM

    def noise(self, gradient_OD: Tensor) -> float:
        """Returns the norm of a gradient's noise, from its part outside the basis."""
        rest_OD = gradient_OD - gradient_OD @ (self.inverse_DM @ self.basis_MD).to(gradient_OD)
        directions, width = self.basis_MD.shape
        return float(rest_OD.norm()) * math.sqrt(width / (width - directions))

    def coefficients(self, gradient_OD: Tensor) -> Coefficients:
        """Splits a gradient by token, least squares; its noise is its part outside the basis."""
        gradient_OD = gradient_OD.double()
        value_OM = gradient_OD @ self.inverse_DM
        rest_OD = gradient_OD - value_OM @ self.basis_MD
        directions, width = self.basis_MD.shape
        noise_O = rest_OD.norm(dim=1) / (width - directions) ** 0.5
        tokens = len(self.tokens_N)
        amplified_N = self.inverse_DM[:, :tokens].norm(dim=0)
        return Coefficients(value_OM[:, :tokens].T, amplified_N[:, None] * noise_O)


def read_token_bag(
    directions: Directions, span: Span, rng: torch.Generator, *, among_N: Tensor | None = None
) -> TokenBag | None:
    """Returns the token bag of the batch whose gradients span `span`, None beyond the budget.

    The number of positions is not known. It is first a number with which tokens and positions
    explain all of the span, then that of the last position in the span of gradients and tokens.

    Args:
        directions: Of all tokens and positions.
        span: The row space of the first layer's attention gradients.
        rng: For sketches.
        among_N: The only tokens that may be in the batch; None: the whole vocabulary.
    """
    tried = set()
    guesses = list(_guesses(len(directions.position_PD)))
    while guesses:
        positions = guesses.pop(0)
        tried.add(positions)
        known_MD = torch.cat([directions.position_PD[:positions], directions.constant_CD]).double()
        inner = span.beside(known_MD) if len(known_MD) else span
        over = inner.rank + len(known_MD) + SPARE - span.width
        if over > 0:
            # The next try is as many positions as fit beside the tokens.
            guesses[:0] = {positions - over}.intersection(range(1, positions)) - tried
            continue
        tokens_N, accepted, rejected = _tokens(directions, among_N, known_MD, inner, rng)
        token_ND = directions.token_VD[tokens_N].double()
        if span.exact and _unexplained(span, torch.cat([token_ND, known_MD])) > _EXPLAINED:
            continue
        if positions:
            positions = _last_position(directions, positions, token_ND, span)
            known_MD = torch.cat([directions.position_PD[:positions], directions.constant_CD])
        basis_MD = torch.cat([token_ND, known_MD.double()])
        return TokenBag(
            tokens_N=tokens_N,
            positions=positions,
            basis_MD=basis_MD,
            worst_accepted=accepted,
            best_rejected=rejected,
            exact=span.exact,
        )
    return None


def pairs(table: TokenTable, bag: TokenBag, span: Span | None) -> tuple[Tensor, Tensor]:
    """Returns the (token, position) pairs that may have been inputs, as indices [A] of each.

    Tokens are indices of the bag. A pair outside the gradients' span was no input. With few tokens
    few pairs are left; with many, the graph of tokens and positions has cycles, and every pair of a
    cycle is inside. Where noise blurs the bag's own edge, or without a span, no pair is excluded.
    """
    ranges = torch.arange(len(bag.tokens_N)), torch.arange(bag.positions)
    bag_A, position_A = torch.cartesian_prod(*ranges).T.to(bag.tokens_N.device)
    if span is None or (not span.exact and not bag.worst_accepted < ACCEPT < bag.best_rejected):
        return bag_A, position_A
    inside_A = span.excess(table(bag.tokens_N[bag_A], position_A)) < ACCEPT
    return bag_A[inside_A], position_A[inside_A]


def _guesses(available: int) -> Iterator[int]:
    """Yields numbers of positions to try: fewer too, where the budget is short."""
    if not available:
        yield 0
        return
    first = min(_FIRST_GUESS, available)
    yield from (first, first // 2, first // 4)
    while first < available:
        first = min(2 * first, available)
        yield first


def _tokens(
    directions: Directions,
    among_N: Tensor | None,
    known_MD: Tensor,
    inner: Span,
    rng: torch.Generator,
) -> tuple[Tensor, float, float]:
    """Returns the tokens in the span, the largest excess among them and the smallest beyond.

    The whole vocabulary goes through a sketch of the null space, where a token of the batch is
    zero; only the nearest are tested exactly.
    """
    token_VD = directions.token_VD if among_N is None else directions.token_VD[among_N]
    known_DM = torch.linalg.qr(known_MD.T)[0]
    both = Span(
        basis_DR=torch.cat([inner.basis_DR, known_DM], 1),
        singular_R=torch.ones(inner.rank + known_DM.shape[1]),
        floor=0.0,
    )
    sketch_VS = token_VD @ both.null_sketch(48, rng).to(token_VD.dtype)
    distance_V = sketch_VS.norm(dim=1) / token_VD.norm(dim=1)
    shortlist = min(2 * inner.rank + 64, len(token_VD))
    nearest_L = distance_V.topk(shortlist, largest=False).indices
    excess_L = inner.excess(outside(token_VD[nearest_L].double(), known_MD))
    order_L = excess_L.argsort()
    # Without an exact test: as many tokens as there are directions above the noise.
    count = int((excess_L < ACCEPT).sum()) if inner.exact else min(inner.rank, len(order_L))
    accepted = float(excess_L[order_L[count - 1]]) if count else 0.0
    rejected = float(excess_L[order_L[count]]) if count < len(order_L) else float("inf")
    tokens_L = nearest_L if among_N is None else among_N[nearest_L]
    return tokens_L[order_L[:count]].sort().values, accepted, rejected


def _unexplained(span: Span, basis_MD: Tensor) -> float:
    """Returns the largest part of the span's rows outside a basis, in units of the noise."""
    rest_RD = outside(span.singular_R[:, None] * span.basis_DR.T, basis_MD)
    return float(rest_RD.norm(dim=1).max()) / span.floor


def _last_position(directions: Directions, positions: int, token_ND: Tensor, span: Span) -> int:
    """Returns the number of positions up to the last in the span of gradients and tokens."""
    known_MD = torch.cat([token_ND, directions.constant_CD.double()])
    x_PD = directions.position_PD[:positions].double()
    excess_P = span.beside(known_MD).excess(outside(x_PD, known_MD))
    inside = (excess_P < ACCEPT).nonzero()
    return int(inside[-1]) + 1 if len(inside) else positions
