"""Orthogonal matching pursuit (Pati et al. 1993) of many sums of rows at once.

Shapes: N sums, L numbers of each, R picks, X sums that are not explained yet.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Best = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(the numbers of sums [X], what is left of them [X, L]) -> the rows that are nearest to that, as
numbers [X] and as they are [X, L]."""


@torch.no_grad()
def pursue(sum_NL: Tensor, enough_N: Tensor, most: int, best: Best) -> Tensor:
    """Returns the numbers of the few rows [N, R] that explain each sum; -1: no more was needed.

    If the same row is nearest to a sum twice, the sum is left as it is then.

    Args:
        sum_NL: The sums.
        enough_N: A sum is explained when no more than this is left of it.
        most: R, the largest number of rows.
        best: Finds the next row of each.
    """
    rest_NL = sum_NL.clone()
    basis_NRL = rest_NL.new_zeros(len(rest_NL), most, rest_NL.shape[1])
    row_NR = torch.full((len(rest_NL), most), -1)
    live_X = torch.arange(len(rest_NL))
    for pick in range(most):
        live_X = live_X[rest_NL[live_X].norm(dim=1) > enough_N[live_X]]
        if not len(live_X):
            break
        row_X, row_XL = best(live_X, rest_NL[live_X])
        new_X = (row_NR[live_X] != row_X[:, None]).all(1)
        live_X, row_XL = live_X[new_X], row_XL[new_X]
        row_NR[live_X, pick] = row_X[new_X]
        basis_XRL = basis_NRL[live_X]
        for _ in range(2):  # twice is enough (Giraud et al. 2005)
            inner_XR = torch.einsum("xl,xrl->xr", row_XL, basis_XRL)
            row_XL = row_XL - torch.einsum("xr,xrl->xl", inner_XR, basis_XRL)
        basis_NRL[live_X, pick] = row_XL = F.normalize(row_XL, dim=1)
        rest_XL = rest_NL[live_X]
        rest_NL[live_X] = rest_XL - (rest_XL * row_XL).sum(1, keepdim=True) * row_XL
    return row_NR
