"""Central differential privacy: a trusted server clips updates and publishes their noisy mean."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedleak.defenses import Claims, NoiseOrEpsilon, TrustedAggregator
from fedleak.defenses.clip import clipped
from fedleak.training.aggregation import WeightedSum
from fedleak.training.observation import ClientUpdate, Sight
from fedleak.training.privacy.accounting import Epsilon, Noise, Positive
from fedleak.training.settings import LocalTraining


@dataclass(frozen=True)
class CentralDp(NoiseOrEpsilon, TrustedAggregator):
    """A trusted server clips each update and adds noise to their mean. For all clients.

    DP-FedAvg (McMahan et al. 2018, algorithm 1) with as many clients in each round. Every client
    counts once, however many examples it has, and the sum is divided by the number of clients,
    which is public. So a client that sends zeros instead moves the sum by no more than the norm.
    All that a client has is protected from those who see the models that the server publishes. The
    server itself sees every update, and is trusted. A round's clients are not drawn each by its
    own coin, so no amplification by sampling is counted.

    Attributes:
        max_norm: L2 norm that the server clips a client's update to.
        noise_multiplier: Standard deviation of the noise on the sum of updates, in max_norm.
        epsilon: What all rounds together may spend of a client; in place of a noise multiplier.
    """

    kind: ClassVar[str] = "central_dp"
    sights: ClassVar[tuple[Sight, ...]] = ("models",)
    trust: ClassVar[str | None] = (
        "epsilon holds for those who see the models that the server publishes; the server itself "
        "sees each client's update, and has to be trusted"
    )
    max_norm: Positive
    noise_multiplier: Noise | None = None
    epsilon: Epsilon | None = None

    def combined(self, updates: Iterable[ClientUpdate], *, rng: torch.Generator) -> ClientUpdate:
        """Returns the mean of the clipped updates plus noise."""
        total, examples = WeightedSum(), 0
        for update in updates:
            total.add_(replace(clipped(update, self.max_norm), num_examples=1))
            examples += update.num_examples
        mean = total.mean()
        sigma = self.noise_on_mean(mean.num_examples)
        noisy = {
            name: value + sigma * torch.randn(value.shape, generator=rng)
            for name, value in sorted(mean.tensors.items())
        }
        return replace(mean, tensors=noisy, num_examples=examples)

    def noise_on_mean(self, clients: int, round: int = 1) -> float:
        """Returns the standard deviation of the noise on a number of the mean."""
        return self._noise * self.max_norm / clients

    def round_obstacle(self, clients: int, parameters: Collection[frozenset[str]]) -> str | None:
        """Returns that clients send different parameters, if they do."""
        if len(parameters) < 2:
            return None
        return (
            "each number of the sum is divided by the same number of clients, and clients freeze "
            "different parameters: freeze the same for all"
        )

    def update_claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns by how much a client moves the sum."""
        return Claims(client_norm=self.max_norm)
