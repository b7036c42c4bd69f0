"""Means over rows with their intervals, and whether they are rates or only examples."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fedleak.audit.metrics import intervals
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import client_sizes
from fedleak.config.federation.schedule import rounds_of_clients
from fedleak.store.records import LeakageRow, PersonalItem
from fedleak.store.run import EVERYONE, Run
from fedleak.store.summaries import Estimate, KindRead, MeanOfClients, PersonalData
from fedleak.training.observation import UpdateKind
from fedleak.util.lists import grouped

FEW_TEXTS, FEW_CLIENTS = 20, 10
"""Fewer than these are reported with a warning."""


class Largest(NamedTuple):
    """The most texts and updates that a client of the federation has in the attacked rounds.

    0: not known. All clients count, attacked or not: a client with many texts may be read more or
    less than others, and may not be among the few that are attacked.
    """

    texts: int = 0
    updates: int = 0


def largest_client(run: Run, experiment: Experiment) -> Largest:
    """Returns the most texts and updates of a client, attacked or not, or of a sum of clients."""
    attacked, local = experiment.threat.rounds, experiment.local_training
    rounds = rounds_of_clients(experiment)
    updates = max(
        sum(attacked is None or round in attacked for round in of_client) for of_client in rounds
    )
    size = max(client_sizes(run) or [0])
    poisson = any(experiment.local_training_of(c).poisson for c in experiment.unlike_clients)
    if local.kind == UpdateKind.GRADIENT and not poisson:  # which may draw all examples
        size = min(local.batch_size, size)
    if experiment.sees != "updates" and not experiment.server_built.malicious:
        return Largest(texts=experiment.clients_per_round * size, updates=1)  # of one sum
    return Largest(texts=updates * size, updates=updates)


def estimate(
    values: Sequence[float],
    clients: Sequence[int],
    weights: Sequence[float] | None = None,
    *,
    most: float,
    largest: float,
    miss: float = intervals.MISS,
) -> Estimate:
    """Returns the mean of values and the mean of clients' means, each with its interval.

    The first is over texts (or updates), the second over clients. They are equal if all clients
    have as many, and the second needs no knowledge of the sizes of other clients.

    Args:
        values, clients, weights, most, largest, miss: As in `intervals.clustered_mean`.
    """
    counted = np.ones(len(values)) if weights is None else np.asarray(weights, float)
    names, indices = np.unique(np.asarray(clients), return_inverse=True)
    means = np.bincount(indices, counted * np.asarray(values)) / np.bincount(indices, counted)
    of_client = intervals.clustered_mean(means.tolist(), names.tolist(), most=most, miss=miss)
    of_value = intervals.clustered_mean(
        values, clients, weights, most=most, largest=largest, miss=miss
    )
    return Estimate(**of_value._asdict(), of_clients=MeanOfClients(**of_client._asdict()))


Valued = Sequence[tuple[LeakageRow, float]]
"""Values, each with the row that it is about."""


def mean_over_clients(
    rows_and_values: Valued, most: float, weights: Sequence[float] | None = None, *, largest: float
) -> Estimate | None:
    """Returns the mean of values with its interval over clients; None if there are none.

    Args:
        rows_and_values: Values, each with the row that it is about.
        most: The largest value that there can be; the smallest is 0.
        weights: How much each value counts; None: all alike.
        largest: The most that the values of any client of the federation can count together.
    """
    if not rows_and_values:
        return None
    units, values = zip(*((row.unit, value) for row, value in rows_and_values), strict=True)
    return estimate(values, units, weights, most=most, largest=largest)


def personal_data(
    rows_and_items: Sequence[tuple[LeakageRow, PersonalItem]],
) -> PersonalData | None:
    """Returns what was read of personal data; None where there is none.

    How much personal data the other clients of a federation have is not known, so the interval is
    for clients that have no more of it than the client here with the most.

    Args:
        rows_and_items: Pieces, each with the row that it is about.
    """
    answered = [(row, item) for row, item in rows_and_items if item.read is not None]
    if not rows_and_items:
        return None
    kinds = grouped((item for _, item in answered), lambda item: item.kind)
    read = [(row, float(bool(item.read))) for row, item in answered]
    control = [(row, float(item.control)) for row, item in answered if item.control is not None]
    return PersonalData(
        kinds={
            kind: KindRead(
                items=len(items),
                read=sum(bool(item.read) for item in items),
                control=sum(bool(item.control) for item in items),
            )
            for kind, items in sorted(kinds.items())
        },
        unanswered=len(rows_and_items) - len(answered),
        read=mean_over_clients(read, 1.0, largest=0),
        control=mean_over_clients(control, 1.0, largest=0),
    )


def too_few(answered: Sequence[LeakageRow]) -> str | None:
    """Returns why the figures of these answers are examples and no rates; None: they are rates."""
    clients, texts = {row.unit for row in answered}, sum(row.batch_size or 0 for row in answered)
    sums = min(clients, default=0) <= EVERYONE
    units = "sums of different texts" if sums else "clients"
    if len(clients) == 1:
        few = ["one group of clients" if sums else "one client"]
    else:
        few = [f"fewer than {FEW_CLIENTS} {units}"] if len(clients) < FEW_CLIENTS else []
        few += [f"fewer than {FEW_TEXTS} texts"] if texts < FEW_TEXTS else []
    return f"{' and '.join(few)}: an example, not a rate" if clients and few else None
