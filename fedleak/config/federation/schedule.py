"""Who trains in which round, and which captures the server makes of it."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from fedleak.config.experiment import Experiment
from fedleak.store.run import EVERYONE, Key
from fedleak.training.batches import round_clients
from fedleak.util.lists import first_of
from fedleak.util.rng import stream

MOST_NAMED = 12
"""How many rounds a sentence names at most."""


def clients_of_round(experiment: Experiment, round: int) -> list[int]:
    """Returns the clients that train in a round, in order."""
    if experiment.tapped is not None:
        return list(experiment.tapped.clients[round - 1])
    return round_clients(
        experiment.federation.clients,
        experiment.clients_per_round,
        seed=experiment.seed,
        round=round,
        cyclic=experiment.federation.participation == "cyclic",
    )


@lru_cache(maxsize=4)
def rounds_of_clients(experiment: Experiment) -> Sequence[Sequence[int]]:
    """Returns for each client the rounds in which it trains."""
    rounds_by_client: list[list[int]] = [[] for _ in range(experiment.federation.clients)]
    for round, client in updates(experiment):
        rounds_by_client[client].append(round)
    return rounds_by_client


def target(experiment: Experiment, round: int) -> int | None:
    """Returns the client that a malicious server is after in a round; None: all of them."""
    if (mode := experiment.mode_in(round)) is None:
        return None
    clients = clients_of_round(experiment, round)
    return mode.target(clients, round, rng=stream(experiment.seed, "target", round))


def key_of_sum(experiment: Experiment, round: int) -> Key:
    """Returns the key of the capture of a round's sum, or of the target's part of the sum."""
    client = target(experiment, round)
    return Key(round, EVERYONE if client is None else client)


def expected_captures(experiment: Experiment) -> list[Key]:
    """Returns the captures of a complete run: of all rounds and clients that are attacked."""
    keys = [key for key in captures_made(experiment) if experiment.attacked(*key)]
    targets = {round: target(experiment, round) for round in {key.round for key in keys}}
    return [key for key in keys if targets[key.round] in (None, key.client)]


def rounds_attacked(experiment: Experiment) -> frozenset[int]:
    """Returns the rounds with a capture, whose models are kept."""
    return frozenset(key.round for key in expected_captures(experiment))


def first_of_adapters(experiment: Experiment) -> str | None:
    """Returns what is special about the first gradients of LoRA; None: they are not attacked."""
    gradients = experiment.federation.algorithm == "fedsgd" and experiment.tapped is None
    if experiment.model.lora is None or not gradients or 1 not in rounds_attacked(experiment):
        return None
    return (
        "in round 1 one factor of each LoRA adapter is zero, so that the other has no gradient: "
        "what is not read of round 1 is no evidence of later rounds (threat.rounds)"
    )


def malicious_server(experiment: Experiment) -> str | None:
    """Returns what a malicious server does, when, and to whom; None: it follows the protocol.

    Every table and report shows this sentence.
    """
    server, table = experiment.server_built, experiment.federation
    if not server.malicious:
        return None
    rounds = [r for r in range(1, table.rounds + 1) if experiment.mode_in(r) is not None]
    targets = {round: target(experiment, round) for round in rounds}
    when = "every round" if len(rounds) == table.rounds else f"round {first_of(rounds, MOST_NAMED)}"
    named = [f"{client} in round {r}" for r, client in targets.items() if client is not None]
    whom = f"; its targets: client {first_of(named, MOST_NAMED)}" if named else ""
    if experiment.tapped is not None:
        return f"in {when} the server ({server.mode.kind}) {server.mode.changes()}, says its user"
    after = (
        "the honest model, which it keeps, is trained on what clients send then"
        if server.aggregate
        else "what clients send then is left out of the honest model, which it keeps"
    )
    return f"in {when} the server ({server.mode.kind}) {server.mode.changes()}{whom}; {after}"


def captures_made(experiment: Experiment) -> list[Key]:
    """Returns the captures that a run makes, kept or not."""
    rounds = range(1, experiment.federation.rounds + 1)
    if experiment.sees != "updates":
        # A round of another app may have no sum.
        trained = [round for round in rounds if clients_of_round(experiment, round)]
        return [key_of_sum(experiment, round) for round in trained]
    return list(updates(experiment))


def updates(experiment: Experiment) -> Iterator[Key]:
    """Yields the update of each client, round by round, whether it is captured or not."""
    for round in range(1, experiment.federation.rounds + 1):
        for client in clients_of_round(experiment, round):
            yield Key(round, client)
