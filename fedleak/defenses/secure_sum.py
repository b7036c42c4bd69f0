"""Secure aggregation: the server sees the sum over the round's clients, and nothing else."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from fedleak.defenses import Claims, TrustedAggregator
from fedleak.observation import ClientUpdate
from fedleak.training.aggregation import mean_update
from fedleak.training.settings import LocalTraining


@dataclass(frozen=True)
class SecureSum(TrustedAggregator):
    """Shows the server only the sum of a round's updates, not who sent what. For all clients.

    What a protocol such as Bonawitz et al. 2017 reveals, without its cryptography: each client's
    update is held apart until all have come, and only their mean, weighted by examples, is kept.
    No privacy guarantee: the sum of few clients is one larger batch.
    """

    kind: ClassVar[str] = "secure_sum"

    def combined(self, updates: Iterable[ClientUpdate]) -> ClientUpdate:
        """Returns the mean of the updates, weighted by examples: their sum, divided."""
        return mean_update(updates)

    def claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns that the server sees a mean."""
        return Claims(mean_of_clients=True)
