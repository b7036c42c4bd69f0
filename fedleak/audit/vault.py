"""Opens the vault: the private batches that clients wrote beside the wire."""

import math
from itertools import chain

from pydantic import TypeAdapter, ValidationError

from fedleak.errors import CaptureError, FedleakError
from fedleak.federation.lookup import stored
from fedleak.federation.schedule import clients_of_round
from fedleak.store.run import EVERYONE, Key, Run
from fedleak.truth import GroundTruth


def read_truth(run: Run, key: Key) -> GroundTruth | None:
    """Opens the vault for one client and round, or for all of a round whose sum was captured.

    Raises:
        CaptureError: A file of the vault is damaged.
    """
    if key.client == EVERYONE:
        return _truth_of_all(run, key.round)
    file = run.path / "vault" / f"{key}.json"
    try:
        value = run.read_truth(key)
        truth = None if value is None else _TRUTH.validate_python(value)
    except FedleakError as error:
        raise CaptureError(str(error)) from error
    except ValidationError as error:
        raise CaptureError(f"{file} is damaged (it is no private batch)") from error
    if truth is not None and key != (truth.round, truth.client):
        raise CaptureError(f"{file} is damaged (it is of another round or client)")
    return truth


_TRUTH = TypeAdapter(GroundTruth)


def _truth_of_all(run: Run, round: int) -> GroundTruth | None:
    """Returns the batches of all clients of a round as one; None if any of them is missing."""
    experiment = stored(run)
    clients = clients_of_round(experiment, round)
    found = [read_truth(run, Key(round, client)) for client in clients]
    truths = [truth for truth in found if truth is not None]
    if len(truths) < len(clients):
        return None
    # As the server weighs them: of FedSGD a client reports the size that it expects.
    of_fedsgd = experiment.federation.algorithm == "fedsgd"
    weights = [truth.batch_size if of_fedsgd else len(truth.sequences) for truth in truths]
    scales = [
        w * (truth.noise_scale or 0.0) / sum(weights)
        for w, truth in zip(weights, truths, strict=True)
    ]
    return GroundTruth(
        round=round,
        client=EVERYONE,
        sequences=tuple(chain.from_iterable(truth.sequences for truth in truths)),
        labels=tuple(chain.from_iterable(truth.labels for truth in truths)),
        batch_size=sum(truth.batch_size for truth in truths),
        noise_scale=math.hypot(*scales) if any(scales) else None,
    )
