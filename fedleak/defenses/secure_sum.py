"""Secure aggregation: the server sees the sum over the round's clients, and nothing else."""

from dataclasses import dataclass
from typing import ClassVar

from fedleak.defenses import Defense


@dataclass(frozen=True)
class SecureSum(Defense):
    """Shows the server only the sum of a round's updates, not who sent what. For all clients.

    What a protocol such as Bonawitz et al. 2017 reveals, without its cryptography: each client's
    update is held apart until all have come, and only their mean, weighted by examples, is kept.
    No privacy guarantee: the sum of few clients is one larger batch.
    """

    kind: ClassVar[str] = "secure_sum"
