"""Opens the vault: the private batches that clients wrote beside the wire."""

import math
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import aggregator_in, dropped_out, stored
from fedleak.config.federation.schedule import clients_of_round, target
from fedleak.store.run import EVERYONE, Key, Run
from fedleak.training.truth import GroundTruth
from fedleak.util.errors import CaptureError, FedleakError


def read_truth(run: Run, key: Key) -> GroundTruth | None:
    """Opens the vault for one client and round, or for all clients of a round with a captured sum.

    Raises:
        CaptureError: A file of the vault is damaged.
    """
    if key.client == EVERYONE:
        return _truth_of_all(run, key.round)
    truth = own_truth(run, key)
    if truth is None or truth.noise_scale is None or not run.info()["experiment"].get("server"):
        return truth
    experiment = stored(run)
    if experiment.sees != "sum" or target(experiment, key.round) != key.client:
        return truth
    return replace(truth, noise_scale=_noise_around(run, experiment, key, truth))


def own_truth(run: Run, key: Key) -> GroundTruth | None:
    """Opens the vault for one client and round, with the scale of that client's own noise."""
    try:
        value = run.vault.read_note(key)
    except FedleakError as error:
        raise CaptureError(str(error)) from error
    return None if value is None else check_truth(value, key, run.vault.path(key))


def _noise_around(run: Run, experiment: Experiment, key: Key, truth: GroundTruth) -> float | None:
    """Returns the scale of the noise on an update that was taken out of a sum; None: unknown.

    The others sent nothing but their noise, and the sum was scaled to the weight of this client.
    """
    clients = summed_clients(run, experiment, key.round)
    truths = [own_truth(run, Key(key.round, client)) for client in clients]
    scales = [weight(other, experiment) * (other.noise_scale or 0.0) for other in truths if other]
    return math.hypot(*scales) / weight(truth, experiment) if None not in truths else None


def text_count(run: Run, key: Key) -> int | None:
    """Returns how many private texts an update was computed from; None: nobody here knows."""
    try:
        truth = read_truth(run, key)
    except CaptureError:  # scoring says so
        return None
    return None if truth is None else len(truth.sequences)


def check_truth(value: Any, key: Key, file: Path) -> GroundTruth:
    """Returns the content of a file as a private batch.

    Raises:
        CaptureError: It is no private batch, or one of another round or client.
    """
    try:
        truth = _TRUTH.validate_python(value)
    except ValidationError as error:
        raise CaptureError(f"{file} is damaged (it is no private batch)") from error
    if len(truth.labels) not in (0, len(truth.sequences)):
        raise CaptureError(f"{file} is damaged (not every text has one class)")
    if key != (truth.round, truth.client):
        raise CaptureError(f"{file} is damaged (it is of another round or client)")
    return truth


_TRUTH = TypeAdapter(GroundTruth)


def weight(truth: GroundTruth, experiment: Experiment) -> int:
    """Returns the number of examples that a client reports, by which the server weighs it.

    Under FedSGD it is the expected size of a batch: Poisson sampling may draw another number.
    """
    of_fedsgd = experiment.federation.algorithm == "fedsgd"
    return truth.batch_size if of_fedsgd else len(truth.sequences)


def summed_clients(run: Run, experiment: Experiment, round: int) -> list[int]:
    """Returns the clients whose updates are in a round's sum: all but those that dropped out."""
    absent = dropped_out(run, round)
    return [client for client in clients_of_round(experiment, round) if client not in absent]


def _truth_of_all(run: Run, round: int) -> GroundTruth | None:
    """Returns the batches of all clients in a round's sum as one; None if any is missing."""
    experiment = stored(run)
    clients = summed_clients(run, experiment, round)
    batches = [read_truth(run, Key(round, client)) for client in clients]
    truths = [truth for truth in batches if truth is not None]
    if len(truths) < len(clients):
        return None
    weights = [weight(truth, experiment) for truth in truths]
    scales = [
        w * (truth.noise_scale or 0.0) / sum(weights)
        for w, truth in zip(weights, truths, strict=True)
    ]
    noise_scale = math.hypot(*scales) if any(scales) else None
    aggregator = aggregator_in(run, experiment, round)
    if aggregator is not None and (added := aggregator.noise_on_mean(len(clients), round)):
        # The clients' own noise is clipped with their updates: its scale is not known then.
        noise_scale = None if noise_scale else added
    labels = tuple(chain.from_iterable(truth.labels for truth in truths))
    # A client that drew no text has neither texts nor classes.
    if labels and not all(truth.labels for truth in truths if truth.sequences):
        raise CaptureError(f"{run.path / 'vault'}: not every text of round {round} has a class")
    return GroundTruth(
        round=round,
        client=EVERYONE,
        sequences=tuple(chain.from_iterable(truth.sequences for truth in truths)),
        labels=labels,
        batch_size=sum(truth.batch_size for truth in truths),
        noise_scale=noise_scale,
    )
