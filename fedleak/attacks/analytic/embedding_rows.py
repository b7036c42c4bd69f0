"""Facts in single rows of an update: which tokens occur, and how many positions are used.

An embedding row has a gradient only if its token (or position) occurred, so the support of the
embedding's update is the set of tokens and the number of positions; measured to survive dropout,
masking, pruning and local steps (Melis et al. 2019; Gupta et al. 2022, section 3.1). With an
output layer tied to the embedding every row has a gradient, and the used ones stand out by size.
Under Gaussian noise of one size the squared norms of unused rows have a chi-square distribution,
and rows beyond its reach were used.

Shapes: V rows of a table, D hidden size.
"""

from typing import NamedTuple

import torch
from torch import Tensor

CLEAR = 3.0
"""Used rows must be this many times larger than unused ones, or they are not told apart."""

_FALSE = 0.01
"""How often, at most, noise alone makes some row of a table look used."""

_ONE_SIGMA = 0.8413
"""The share of a normal distribution below one standard deviation above its mean."""

_ALIKE = 1.5
"""How many times wider or narrower than a chi-square the middle of the squared norms may be."""


class Used(NamedTuple):
    """The rows of a table that were used.

    Attributes:
        rows: In rising order.
        gap: The smallest used row's norm over the largest unused one's: infinite if the unused ones
            are zero.
        complete: No other row was used: there is a gap. Else noise may hide some.
    """

    rows: list[int]
    gap: float
    complete: bool


def used_rows(rows_VD: Tensor) -> Used | None:
    """Returns the rows that were used; None if they cannot be distinguished from the others."""
    norms_V = rows_VD.float().norm(dim=-1)
    order_V = norms_V.argsort(descending=True, stable=True)
    sorted_V = norms_V[order_V].double()
    if not sorted_V[0] > 0:
        return None
    support = int((sorted_V > 0).sum())
    if support < len(sorted_V):
        return Used(sorted(order_V[:support].tolist()), float("inf"), complete=True)
    ratios = sorted_V[:-1] / sorted_V[1:]
    cut = int(ratios.argmax()) + 1
    if ratios[cut - 1] >= CLEAR:
        return Used(sorted(order_V[:cut].tolist()), float(ratios[cut - 1]), complete=True)
    excess_V = above_noise(sorted_V.square(), rows_VD.shape[1])
    cut = int((excess_V > 1).sum())
    if not 0 < cut < len(ratios):
        return None
    complete = bool(excess_V[cut - 1] > CLEAR)
    return Used(sorted(order_V[:cut].tolist()), float(ratios[cut - 1]), complete)


def longest_sequence(rows_PD: Tensor) -> int | None:
    """Returns the number of positions that were used, from the rows of their table."""
    used = used_rows(rows_PD)
    if used is None or not used.complete:
        return None
    longest = used.rows[-1] + 1
    # Noise hides small rows: if it hid one between others, it may have hidden the last.
    return longest if used.gap >= CLEAR or len(used.rows) == longest else None


def above_noise(squares_V: Tensor, width: int) -> Tensor:
    """Returns how far squared norms are above those of noise, in units of how far noise gets.

    It is 0 for all if the middle of the squared norms is not spread as Gaussian noise alone is.

    Args:
        squares_V: Of the rows of a table; most were not used.
        width: Numbers in a row.
    """
    from scipy.special import gammainccinv, gammaincinv  # here, because it takes a while

    def quantile(share: float) -> float:
        """Returns the value below which a chi-square distribution of this width has this share."""
        return float(2 * gammaincinv(width / 2, share))

    middle = float(squares_V.median()) / quantile(0.5)
    levels = squares_V.new_tensor([1 - _ONE_SIGMA, _ONE_SIGMA])
    low, high = squares_V.quantile(levels).tolist()
    spread = quantile(_ONE_SIGMA) - quantile(1 - _ONE_SIGMA)
    if not 1 / _ALIKE < (high - low) / (spread * middle) < _ALIKE:
        return torch.zeros_like(squares_V)
    highest = float(2 * gammainccinv(width / 2, _FALSE / len(squares_V)))
    excess_V: Tensor = (squares_V / middle - width) / (highest - width)
    return excess_V
