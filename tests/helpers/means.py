"""The mean of updates, for tests to compare sums with."""

from collections.abc import Iterable

from fedleak.training.aggregation import WeightedSum
from fedleak.training.observation import ClientUpdate


def mean_update(updates: Iterable[ClientUpdate]) -> ClientUpdate:
    """Returns the mean of updates, weighted by examples: what secure aggregation reveals."""
    total = WeightedSum()
    for update in updates:
        total.add_(update)
    return total.mean()
