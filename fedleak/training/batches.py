"""Which clients train in a round, and on which of their examples."""

import torch

from fedleak.training.observation import UpdateKind
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream


def round_clients(clients: int, per_round: int, *, seed: int, round: int) -> list[int]:
    """Returns the clients that train in a round, in order."""
    if per_round >= clients:
        return list(range(clients))
    order = torch.randperm(clients, generator=stream(seed, "clients", round))
    return sorted(order[:per_round].tolist())


def round_batch(
    num_examples: int, training: LocalTraining, *, seed: int, client: int, round: int
) -> list[int]:
    """Returns which of its examples a client trains on in a round.

    FedAvg uses all, and draws batches of its own. FedSGD takes the next batch of a shuffled pass;
    what is left over at the end of a pass, too little for a batch, waits for the next. With Poisson
    sampling it takes each example with the same probability, so a batch may be empty.
    """
    if training.kind == UpdateKind.DELTA:
        return list(range(num_examples))
    batch = min(training.batch_size, num_examples)
    if training.private is not None and training.private.sampling == "poisson":
        drawn = torch.rand(num_examples, generator=stream(seed, "poisson", client, round))
        return (drawn < batch / num_examples).nonzero()[:, 0].tolist()
    sweep, step = divmod(round - 1, passes(num_examples, training))
    order = torch.randperm(num_examples, generator=stream(seed, "batches", client, sweep)).tolist()
    chosen: list[int] = order[step * batch : (step + 1) * batch]
    return chosen


def passes(num_examples: int, training: LocalTraining) -> int:
    """Returns the rounds of FedSGD in which a client takes none of its examples twice."""
    return num_examples // min(training.batch_size, num_examples)
