"""Facts that stand in single rows of an update: who was looked up, and how far positions go.

An embedding row has a gradient only if its token (or position) occurred, so the support of the
embedding's update is the set of tokens and the number of positions; measured to survive dropout,
masking, pruning and local steps (Melis et al. 2019; Gupta et al. 2022, section 3.1). With an
output layer tied to the embedding every row has a gradient, and the used ones stand out by size.

Shapes: V rows of a table, D hidden size.
"""

from torch import Tensor

CLEAR = 3.0
"""Used rows must be this many times larger than unused ones, or they are not told apart."""


def used_rows(rows_VD: Tensor) -> tuple[list[int], float] | None:
    """Returns the rows that were used and the gap that sets them apart; None without a gap.

    The gap is the smallest used row's norm over the largest unused one's: infinite where the
    unused ones are zero.
    """
    norms_V = rows_VD.float().norm(dim=-1)
    order_V = norms_V.argsort(descending=True, stable=True)
    sorted_V = norms_V[order_V].double()
    if not sorted_V[0] > 0:
        return None
    support = int((sorted_V > 0).sum())
    if support < len(sorted_V):
        return sorted(order_V[:support].tolist()), float("inf")
    ratios = sorted_V[:-1] / sorted_V[1:]
    cut = int(ratios.argmax())
    if ratios[cut] < CLEAR:
        return None
    return sorted(order_V[: cut + 1].tolist()), float(ratios[cut])
