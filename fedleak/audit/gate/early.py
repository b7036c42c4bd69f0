"""Whether an unfinished run exceeds a limit already, whatever the rest of it gives."""

from collections.abc import Iterator

from fedleak.audit.gate.check import Check, Outcome
from fedleak.audit.gate.evidence import NOTHING, Evidence, gather, recounted
from fedleak.audit.gate.limits import LEAKS, limit_checks
from fedleak.audit.vault import text_count
from fedleak.config.federation.lookup import captures_of, client_sizes, most_examples
from fedleak.config.federation.schedule import clients_of_round
from fedleak.config.tables import GateTable
from fedleak.store.records import LeakageRow
from fedleak.store.run import EVERYONE, Key, Run

COUNTED = LEAKS.keys() - {"personal_data"}
"""Limits on texts. How much personal data an update holds is not known before it is sent."""


def exceeded_already(run: Run, limits: GateTable) -> Check | None:
    """Returns the check of a limit that is exceeded whatever answers follow; None: there is none.

    Texts that no attack has answered for count as not read.

    Raises:
        FedleakError: A file of the run cannot be read.
    """
    evidence, counted = gather(run), GateTable(**limits.model_dump(include={*COUNTED}))
    if not evidence.rows.leakage:
        return None
    as_unread = recounted(evidence, [*evidence.rows.leakage, *_unread(evidence)])
    checks = limit_checks(counted, as_unread)
    return next((check for check in checks if check.outcome is Outcome.EXCEEDED), None)


def _unread(evidence: Evidence) -> Iterator[LeakageRow]:
    """Yields a row with nothing read for each answer that is missing or has no scores of texts."""
    answered = {row.id: row for row in evidence.rows.leakage}
    some = evidence.rows.leakage[0]
    for key in captures_of(evidence.run, evidence.experiment):
        summed = key.client == EVERYONE  # if they share texts, they say less
        size = text_count(evidence.run, key) or most_texts(evidence, key)
        for name in evidence.kinds:
            row = answered.get((key, name))
            if row is None or row.texts is None:
                place = {"round": key.round, "client": key.client, "attack": name}
                texts = {"texts": (NOTHING,) * size, "batch_size": size, "personal": ()}
                yield some.model_copy(update={**place, **texts, "apart": summed})


def most_texts(evidence: Evidence, key: Key) -> int:
    """Returns the most texts that an update which was not sent yet can be computed from."""
    run, experiment = evidence.run, evidence.experiment
    summed = key.client == EVERYONE
    clients = clients_of_round(experiment, key.round) if summed else [key.client]
    sizes = client_sizes(run) or ()
    return sum(
        sizes[client]
        if experiment.local_training_of(client).poisson  # which may draw all examples
        else most_examples(experiment, run, client)
        for client in clients
    )
