"""What clients' defenses did, and what they guarantee: defenses.jsonl and privacy.jsonl."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated

from pydantic import BaseModel, Field, model_validator

from fedleak import defenses
from fedleak.audit.gaps import Gaps
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import client_sizes, dropped_out
from fedleak.config.federation.schedule import clients_of_round, key_of_sum
from fedleak.config.tables import MOST_EXAMPLES
from fedleak.store.records import DefenseFigures, DefenseRow, Guarantee, LedgerRow
from fedleak.store.run import Key, Run
from fedleak.training.privacy import accounting
from fedleak.training.privacy.accounting import Event, Spent
from fedleak.training.privacy.sampling import least_likely
from fedleak.util.lists import grouped

UNLIKELY = 1e-6
"""How often a sampler that does what the ledger says causes an alarm."""

EXACT = 16
"""First rounds of a client that the accountant of the experiment composes. Of later rounds it
composes powers of two and the last one; the faster accountant composes the others."""

CONTRADICTED = "the mechanism does not do what the ledger says"
"""The end of each sentence because of which a run ends with status 1."""


class ClientNote(BaseModel):
    """A file in which a client noted what its defenses did in a round.

    Attributes:
        defenses: What each defense did.
        training: Figures of the training.
        events: What the round adds to the ledger.
        records: How many examples and dummies of canaries the client has.
        drawn: Which records each private step took; empty: an older version did not write them.
    """

    defenses: list[DefenseFigures]
    training: dict[str, float | None]
    events: list[Event]
    records: Annotated[int, Field(ge=0, le=2 * MOST_EXAMPLES)] = 0
    drawn: list[list[int]] = []

    @model_validator(mode="after")
    def _draws_of_records(self) -> "ClientNote":
        """Refuses numbers of records that do not exist."""
        if any(not 0 <= record < self.records for step in self.drawn for record in step):
            raise ValueError(f"drawn: a record is not one of {self.records}")
        return self


Noted = Mapping[Key, ClientNote | None]
"""Clients' notes by round and client; None: damaged."""


def ledger(
    run: Run, experiment: Experiment, notes: Noted, gaps: Gaps, before: Iterable[LedgerRow]
) -> list[LedgerRow]:
    """Returns the rows of privacy.jsonl: what each client has spent by each of its rounds.

    It is composed anew from clients' notes on every round, so a run that was stopped and goes on
    counts each round once. In a finished run every client trained in its rounds unless it dropped
    out, whatever files of it are here. From the first round whose note is gone, a client keeps its
    earlier rows; without earlier rows, nothing is guaranteed. Another app's clients note nothing.
    """
    table, finished = experiment.privacy, run.info()["status"] == "finished"
    truths, captured = set(run.vault.all_keys()), set(run.captures.all_keys())
    earlier = grouped(before, lambda row: row.key)
    events: dict[int, list[Event]] = defaultdict(list)
    counted: Counter[int] = Counter()
    last = {key.client: key.round for key in sorted(notes)}
    lost: set[int] = set()
    rows: list[LedgerRow] = []
    for round in range(1, experiment.federation.rounds + 1):
        summed = key_of_sum(experiment, round) in captured
        absent = dropped_out(run, round)
        for client in clients_of_round(experiment, round):
            key = Key(round, client)
            took_part = (summed or finished) and client not in absent
            trained = took_part or key in captured or key in truths
            if not (trained or key in notes or key in earlier):
                continue
            note = notes.get(key)
            if note is None and experiment.defenses_of(client):
                lost.add(client)
            if client in lost:
                rows += earlier.get(key) or [LedgerRow.nothing_guaranteed(key)]
                continue
            events[client] += note.events if note is not None else ()
            counted[client] += 1
            times = counted[client]
            exact = times <= EXACT or times.bit_count() == 1 or round == last.get(client)
            accountant = table.accountant if exact else accounting.FAST_ACCOUNTANT
            spent = accounting.compose(events[client], table.delta, accountant)
            rows += [_ledger_row(key, spending, accountant) for spending in spent] or [
                LedgerRow.nothing_guaranteed(key)
            ]
    rows = _never_above_later(rows)
    gaps.notes += _large_delta(experiment, client_sizes(run), rows)
    gaps.notes += _of_users(experiment, client_sizes(run), events)
    gaps.missing += _drawn_otherwise(notes)
    if experiment.aggregator is not None and experiment.aggregator.trust is not None:
        gaps.notes.append(experiment.aggregator.trust)
    if lost and experiment.tapped is None:
        clients = ", ".join(map(str, sorted(lost)))
        gaps.missing.append(
            f"what the defenses of {len(lost)} clients ({clients}) did is not all in "
            f"{run.path / 'defended'}: the ledger keeps what it had of them, and counts what it "
            f"never had as no guarantee; `fedleak score {run.path} --vault FOLDER` takes such "
            "files from the vault of a node, else only `fedleak run FILE --fresh` writes them again"
        )
    return rows


def _never_above_later(rows: Sequence[LedgerRow]) -> list[LedgerRow]:
    """Returns the rows, with each epsilon at most that of later rounds, which bounds it, too."""
    smallest: dict[tuple[int, str], float] = {}
    bounded = []
    for row in reversed(rows):
        if row.epsilon != accounting.NONE:
            unit = row.client, row.unit
            smallest[unit] = min(float(row.epsilon), smallest.get(unit, math.inf))
            row = row.model_copy(update={"epsilon": smallest[unit]})
        bounded.append(row)
    return bounded[::-1]


def _of_users(
    experiment: Experiment, sizes: Sequence[int] | None, events: Mapping[int, Sequence[Event]]
) -> Iterator[str]:
    """Yields what all examples of a client spend together, if the unit is one example."""
    table, spent = experiment.privacy, {}
    for client, own in events.items():
        of_examples = [event for event in own if event.unit == "example"]
        if of_examples and sizes is not None:
            batch_size = experiment.local_training.batch_size
            of_all = accounting.of_all_examples(of_examples, sizes[client], batch_size)
            (together,) = accounting.compose(of_all, table.delta, "rdp")
            spent[client] = together.epsilon
    if spent:
        client = max(spent, key=lambda client: spent[client])
        yield (
            f"epsilon is about one example: all that client {client} has together spends at most "
            f"{spent[client]:.4g}, the most of all clients (rdp)"
        )


def _drawn_otherwise(notes: Noted) -> Iterator[str]:
    """Yields a sentence for each client whose steps did not draw records as its events announce.

    Under Poisson sampling each step takes each record by a coin. Else no record is in more steps
    of a pass than are counted.
    """
    steps: dict[tuple[int, int, float], list[list[int]]] = defaultdict(list)
    counted: dict[tuple[int, Key | int], int] = {}
    taken: dict[tuple[int, Key | int], Counter[int]] = defaultdict(Counter)
    for key, note in notes.items():
        if note is None or not note.drawn:
            continue
        for event in note.events:
            if event.sampling == "Poisson":
                if len(note.drawn) > event.steps:
                    yield (
                        f"{key}: {len(note.drawn)} steps were made, and the ledger counts "
                        f"{event.steps}: {CONTRADICTED}"
                    )
                steps[key.client, note.records, event.sampling_rate] += note.drawn
            elif event.unit == "example":
                part = (key.client, key if event.disjoint is None else event.disjoint)
                counted[part] = event.steps
                taken[part].update(chain(*note.drawn))
    for (client, records, rate), of_client in steps.items():
        drawn = least_likely(of_client, records, rate)
        if drawn.p * len(steps) < UNLIKELY:
            yield f"client {client}: {drawn} (p < {UNLIKELY:g}): {CONTRADICTED}"
    for part, most in counted.items():
        if max(taken[part].values(), default=0) > most:
            yield (
                f"client {part[0]}: a record was in {max(taken[part].values())} steps of a pass, "
                f"and the ledger counts {most}: {CONTRADICTED}"
            )


def _large_delta(
    experiment: Experiment, sizes: Sequence[int] | None, rows: Sequence[LedgerRow]
) -> Iterator[str]:
    """Yields a sentence for each unit if delta is so large that it allows to publish one whole."""
    delta = experiment.privacy.delta
    numbers = {"client": experiment.federation.clients}
    if sizes is not None:
        numbers["example"] = min(sizes[row.client] for row in rows) if rows else 0
    for unit in sorted({row.unit for row in rows} & numbers.keys()):
        if delta * (number := numbers[unit]) >= 1:
            who = "a client has" if unit == "example" else "there are"
            yield (
                f"privacy.delta = {delta:g} is at least 1/{number}, and {who} {number} {unit}s: to "
                f"publish one of them whole would satisfy it: choose a delta far below 1/{number}"
            )


def _ledger_row(key: Key, spent: Spent, accountant: str) -> LedgerRow:
    of_event = ("unit", "neighbouring", "sampling", "sampling_rate", "noise_multiplier")
    return LedgerRow(
        **key._asdict(),
        epsilon=spent.epsilon if math.isfinite(spent.epsilon) else accounting.NONE,
        delta=spent.delta,
        accountant=accountant,
        steps=sum(event.steps for event in spent.events),
        **{name: getattr(spent.of, name) for name in of_event},
        uses=spent.uses,
    )


def guarantee(rows: Sequence[LedgerRow]) -> Guarantee | None:
    """Returns the guarantee that holds for every client after its last round.

    It is the weakest one. A client with one for its examples and one for itself has the stronger.
    """
    last = {(row.client, row.unit): row for row in rows}

    def size(row: LedgerRow) -> float:
        return math.inf if row.epsilon == accounting.NONE else float(row.epsilon)

    of_clients = grouped(last.values(), lambda row: row.client)
    of_client = [min(own, key=size) for _, own in sorted(of_clients.items())]
    if not of_client:
        return None
    largest = max(of_client, key=size)
    return Guarantee(**{name: getattr(largest, name) for name in Guarantee.model_fields})


def defense_rows(notes: Noted, before: Iterable[DefenseRow]) -> list[DefenseRow]:
    """Returns the rows of defenses.jsonl: what each defense did to each update.

    The earlier rows of an update whose note is gone stay.
    """
    rows = [
        DefenseRow(
            round=key.round,
            client=key.client,
            defense=did.defense,
            kind=did.kind,
            **did.figures,
            **(note.training if _reports_training(did.kind) else {}),
        )
        for key, note in notes.items()
        if note is not None
        for did in note.defenses
    ]
    kept = [row for row in before if notes.get(row.key) is None]
    return sorted(rows + kept, key=lambda row: (row.key, row.defense))


def _reports_training(kind: str) -> bool:
    """Returns whether the figures of a client's training are about a defense of this kind."""
    defense = defenses.kinds().get(kind)
    return defense is not None and defense.reports_training


def defense_means(rows: Sequence[DefenseRow]) -> tuple[DefenseFigures, ...]:
    """Returns for each defense the means of its figures over all updates that have them."""
    means = []
    for (number, kind), own in sorted(grouped(rows, lambda row: (row.defense, row.kind)).items()):
        figures = {}
        for name in sorted({name for row in own for name in row.figures}):
            values = [value for row in own if (value := row.figures.get(name)) is not None]
            if values:
                figures[name] = sum(values) / len(values)
        means.append(DefenseFigures(defense=number, kind=kind, **figures))
    return tuple(means)
