"""Which clients train in a round, and on which of their examples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedleak.training.observation import UpdateKind
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream


def round_clients(
    clients: int, per_round: int, *, seed: int, round: int, cyclic: bool = False
) -> list[int]:
    """Returns the clients that train in a round, in order; if it is cyclic, they take turns."""
    if per_round >= clients:
        return list(range(clients))
    if cyclic:
        order = torch.randperm(clients, generator=stream(seed, "clients"))
        return sorted(order.roll(-per_round * (round - 1))[:per_round].tolist())
    order = torch.randperm(clients, generator=stream(seed, "clients", round))
    return sorted(order[:per_round].tolist())


def round_batch(
    num_examples: int, training: LocalTraining, *, seed: int, client: int, round: int
) -> list[int]:
    """Returns which of its examples a client trains on in a round.

    FedAvg uses all examples, and draws its batches itself; if `max_steps` take fewer examples, it
    uses that many random ones, unless each step samples from all. FedSGD takes the next batch of a
    shuffled pass; the end of a pass that is too short for a batch is left out. With Poisson
    sampling FedSGD takes each example with the same probability, so a batch may be empty.
    """
    if training.kind == UpdateKind.DELTA:
        room = (training.max_steps or num_examples) * training.batch_size
        if room >= num_examples or training.poisson:
            return list(range(num_examples))
        drawn = torch.randperm(num_examples, generator=stream(seed, "batches", client, round))
        return sorted(drawn[:room].tolist())
    batch = min(training.batch_size, num_examples)
    if training.poisson:
        drawn = torch.rand(num_examples, generator=stream(seed, "poisson", client, round))
        return (drawn < batch / num_examples).nonzero()[:, 0].tolist()
    sweep, step = divmod(round - 1, passes(num_examples, training))
    order = torch.randperm(num_examples, generator=stream(seed, "batches", client, sweep)).tolist()
    return order[step * batch : (step + 1) * batch]


@dataclass(frozen=True)
class Records:
    """A client's examples and the dummy records of canaries, as one data set for the sampler.

    Under Poisson sampling each canary is a record of its own, and batches are expected to be larger
    in the same proportion, so that every record has the rate of an example. Else a canary stands
    beside an example, so that batches have as many examples as without canaries.

    Attributes:
        examples: The client's examples.
        canaries: K, the number of canaries.
        sampled: Poisson sampling is announced.
    """

    examples: int
    canaries: int
    sampled: bool

    @property
    def _times(self) -> int:
        return 1 + -(-self.canaries // self.examples) if self.sampled else 1

    @property
    def count(self) -> int:
        """The number of records; those from `examples` on are dummies."""
        return self.examples * self._times

    def training(self, local: LocalTraining) -> LocalTraining:
        """Returns training whose batches are of records."""
        size = min(local.batch_size, self.examples)
        return replace(local, batch_size=size * self._times)

    def drawn_examples(self, drawn: Sequence[int]) -> list[int]:
        """Returns the examples among records that were drawn."""
        return [record for record in drawn if record < self.examples]

    def drawn_canaries(self, drawn: Sequence[int]) -> Tensor:
        """Returns which canaries are among records that were drawn [K]."""
        drawn_R = torch.zeros(self.count, dtype=torch.bool)
        drawn_R[list(drawn)] = True
        records_K = torch.arange(self.canaries)
        return drawn_R[self.examples + records_K if self.sampled else records_K % self.examples]


def passes(num_examples: int, training: LocalTraining) -> int:
    """Returns for how many rounds of FedSGD a client takes no example twice."""
    return num_examples // min(training.batch_size, num_examples)
