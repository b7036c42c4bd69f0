"""Who trains in which round, and which captures the server makes of it."""

from collections.abc import Sequence
from functools import lru_cache

from fedleak.config.experiment import Experiment
from fedleak.store.run import EVERYONE, Key
from fedleak.training.batches import round_clients


def clients_of_round(experiment: Experiment, round: int) -> list[int]:
    """Returns the clients that train in a round, in order."""
    return round_clients(
        experiment.federation.clients,
        experiment.clients_per_round,
        seed=experiment.seed,
        round=round,
    )


def rounds_of_clients(experiment: Experiment) -> Sequence[Sequence[int]]:
    """Returns for each client the rounds in which it trains."""
    table = experiment.federation
    return _rounds_of_clients(
        table.clients, experiment.clients_per_round, table.rounds, experiment.seed
    )


@lru_cache(maxsize=4)
def _rounds_of_clients(
    clients: int, per_round: int, rounds: int, seed: int
) -> Sequence[Sequence[int]]:
    found: list[list[int]] = [[] for _ in range(clients)]
    for round in range(1, rounds + 1):
        for client in round_clients(clients, per_round, seed=seed, round=round):
            found[client].append(round)
    return found


def expected_captures(experiment: Experiment) -> list[Key]:
    """Returns the captures of a complete run: of all rounds and clients that are attacked."""
    return [key for key in captures_made(experiment) if experiment.attacked(*key)]


def rounds_attacked(experiment: Experiment) -> frozenset[int]:
    """Returns the rounds of which something is captured, so their models stay."""
    return frozenset(key.round for key in expected_captures(experiment))


def captures_made(experiment: Experiment) -> list[Key]:
    """Returns the captures that a run makes, kept or not."""
    rounds = range(1, experiment.federation.rounds + 1)
    if experiment.aggregator is not None:
        return [Key(round, EVERYONE) for round in rounds]
    return [
        Key(round, client) for round in rounds for client in clients_of_round(experiment, round)
    ]
