"""Means over rows with their intervals, and whether they are rates at all."""

from collections.abc import Sequence

from fedleak.audit.metrics import intervals
from fedleak.store.records import LeakageRow
from fedleak.store.run import EVERYONE
from fedleak.store.summaries import Estimate

FEW_TEXTS, FEW_CLIENTS = 20, 10
"""Fewer than these are reported with a warning."""


def mean_over_clients(
    rows_and_values: Sequence[tuple[LeakageRow, float]],
    most: float,
    weights: Sequence[float] | None = None,
) -> Estimate | None:
    """Returns the mean of values with its interval over clients; None if there are none.

    Args:
        rows_and_values: Values, each with the row that it is about.
        most: The largest value that there can be; the smallest is 0.
        weights: How much each value counts; None: all alike.
    """
    if not rows_and_values:
        return None
    values, clients = (
        [value for _, value in rows_and_values],
        [row.client for row, _ in rows_and_values],
    )
    return Estimate(**intervals.clustered_mean(values, clients, weights, most=most)._asdict())


def too_few(answered: Sequence[LeakageRow]) -> str | None:
    """Returns why the figures of these answers are examples and no rates; None if they are."""
    clients, texts = {row.client for row in answered}, sum(row.batch_size or 0 for row in answered)
    if clients == {EVERYONE}:
        few = ["one group of clients"]
    elif len(clients) == 1:
        few = ["one client"]
    else:
        few = [f"fewer than {FEW_CLIENTS} clients"] if len(clients) < FEW_CLIENTS else []
        few += [f"fewer than {FEW_TEXTS} texts"] if texts < FEW_TEXTS else []
    return f"{' and '.join(few)}: an example, not a rate" if clients and few else None
