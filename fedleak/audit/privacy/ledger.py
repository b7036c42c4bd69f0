"""What clients' defenses did, and what they guarantee: defenses.jsonl and privacy.jsonl."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from pydantic import BaseModel, ValidationError

from fedleak import defenses
from fedleak.audit.gaps import Gaps
from fedleak.config.experiment import Experiment
from fedleak.federation.lookup import client_sizes, dropped_out
from fedleak.federation.schedule import clients_of_round, key_of_sum
from fedleak.store.lines import Measured
from fedleak.store.records import DefenseRow, LedgerRow
from fedleak.store.run import Key, Run
from fedleak.store.summaries import DefenseMeans, Guarantee
from fedleak.training import privacy
from fedleak.training.privacy import Event, Spent
from fedleak.util.errors import FedleakError

UNLIKELY = 1e-6
"""How often a sampler that does what the ledger says is accused."""


class _DefenseNote(Measured):
    """What one defense did to one update; its figures are by name."""

    defense: int
    kind: str


class ClientNote(BaseModel):
    """A file in which a client noted what its defenses did in a round."""

    defenses: list[_DefenseNote]
    training: dict[str, float | None]
    events: list[Event]


def client_notes(run: Run, gaps: Gaps) -> dict[Key, ClientNote | None]:
    """Returns what clients' defenses did; None where the file is damaged."""
    notes: dict[Key, ClientNote | None] = {}
    for key in run.defended.all_keys():
        try:
            notes[key] = ClientNote.model_validate(run.defended.read_note(key))
        except (FedleakError, ValidationError):
            notes[key] = None
            gaps.missing.append(
                f"{run.defended.path(key)} is damaged: what was counted with it "
                "stays, and only `fedleak run FILE --fresh` writes such a file again"
            )
    return notes


def ledger(
    run: Run,
    experiment: Experiment,
    notes: Mapping[Key, ClientNote | None],
    gaps: Gaps,
    before: Iterable[LedgerRow],
) -> list[LedgerRow]:
    """Returns the rows of privacy.jsonl: what each client has spent by each of its rounds.

    It is composed anew from what clients noted of every round, so a run that was stopped and goes
    on counts none twice and forgets none. From the first round whose note is gone a client
    keeps its earlier rows; where there are none, nothing is guaranteed.
    """
    table = experiment.privacy
    truths, captured = set(run.vault.all_keys()), set(run.captures.all_keys())
    earlier: dict[Key, list[LedgerRow]] = defaultdict(list)
    for row in before:
        earlier[row.key].append(row)
    events: dict[int, list[Event]] = defaultdict(list)
    lost: set[int] = set()
    rows: list[LedgerRow] = []
    for round in range(1, experiment.federation.rounds + 1):
        summed = key_of_sum(experiment, round) in captured
        absent = dropped_out(run, round)
        for client in clients_of_round(experiment, round):
            key = Key(round, client)
            trained = key in captured or (summed and client not in absent) or key in truths
            if not (trained or key in notes or key in earlier):
                continue
            note = notes.get(key)
            if note is None and experiment.defenses_of(client):
                lost.add(client)
            if client in lost:
                rows += earlier.get(key) or [LedgerRow.nothing_guaranteed(key)]
                continue
            events[client] += note.events if note is not None else ()
            spent = privacy.compose(events[client], table.delta, table.accountant)
            rows += [_ledger_row(key, spending, table.accountant) for spending in spent] or [
                LedgerRow.nothing_guaranteed(key)
            ]
    gaps.notes += _large_delta(experiment, client_sizes(run), rows)
    gaps.notes += _of_users(experiment, client_sizes(run), events)
    gaps.missing += _drawn_too_often(experiment, client_sizes(run), notes)
    if experiment.aggregator is not None and experiment.aggregator.trust is not None:
        gaps.notes.append(experiment.aggregator.trust)
    if lost:
        clients = ", ".join(map(str, sorted(lost)))
        gaps.missing.append(
            f"what the defenses of {len(lost)} clients ({clients}) did is not all in "
            f"{run.path / 'defended'}: the ledger keeps what it had of them, and counts what it "
            f"never had as no guarantee; `fedleak score {run.path} --vault FOLDER` takes such "
            "files from the vault of a node, else only `fedleak run FILE --fresh` writes them again"
        )
    return rows


def _of_users(
    experiment: Experiment, sizes: Sequence[int] | None, events: Mapping[int, Sequence[Event]]
) -> Iterator[str]:
    """Yields what all examples of a client spend together, where one is what is protected."""
    table, spent = experiment.privacy, {}
    for client, own in events.items():
        of_examples = [event for event in own if event.unit == "example"]
        if of_examples and sizes is not None:
            batch_size = experiment.local_training.batch_size
            of_all = privacy.of_all_examples(of_examples, sizes[client], batch_size)
            (together,) = privacy.compose(of_all, table.delta, "rdp")
            spent[client] = together.epsilon
    if spent:
        client = max(spent, key=lambda client: spent[client])
        yield (
            f"epsilon is about one example: all that client {client} has together spends at most "
            f"{spent[client]:.4g}, the most of all clients (rdp)"
        )


def _drawn_too_often(
    experiment: Experiment, sizes: Sequence[int] | None, notes: Mapping[Key, ClientNote | None]
) -> Iterator[str]:
    """Yields a sentence if the steps of `dp_sgd` had more examples than its events announce.

    Under Poisson sampling their number is binomial; else a batch or a pass has so many.
    """
    from scipy.stats import binom  # it takes half a second to import

    trials, drawn, rate = 0, 0, 0.0
    for key, note in notes.items():
        taken = note.training.get("examples") if note is not None else None
        if note is None or taken is None or sizes is None:
            continue
        for event in note.events:
            if event.unit != "example":
                continue
            if event.sampling == "Poisson":
                trials, drawn = trials + sizes[key.client] * event.steps, drawn + int(taken)
                rate = max(rate, event.sampling_rate)
                continue
            of_batch = min(experiment.local_training.batch_size, sizes[key.client])
            most = of_batch if event.disjoint is not None else sizes[key.client] * event.steps
            if taken > most:
                yield (
                    f"the steps of {key} had {int(taken)} examples, and the ledger counts {most}: "
                    "the mechanism does not do what the ledger says"
                )
    if binom.sf(drawn - 1, trials, rate) < UNLIKELY:
        yield (
            f"{drawn} examples were drawn in {trials} draws, and the ledger says {rate:.3g} of "
            f"them (p < {UNLIKELY:g}): the mechanism does not do what the ledger says"
        )


def _large_delta(
    experiment: Experiment, sizes: Sequence[int] | None, rows: Sequence[LedgerRow]
) -> Iterator[str]:
    """Yields a sentence for each unit whose delta allows to publish one of them whole."""
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
    return LedgerRow(
        round=key.round,
        client=key.client,
        epsilon=spent.epsilon if math.isfinite(spent.epsilon) else privacy.NONE,
        delta=spent.delta,
        accountant=accountant,
        unit=spent.of.unit,
        neighbouring=spent.of.neighbouring,
        sampling=spent.of.sampling,
        sampling_rate=spent.of.sampling_rate,
        steps=sum(event.steps for event in spent.events),
        noise_multiplier=spent.of.noise_multiplier,
        uses=spent.uses,
    )


def guarantee(rows: Sequence[LedgerRow]) -> Guarantee | None:
    """Returns what holds for every client after its last round: the weakest of the strongest.

    A client that bounds both its examples and itself has the smaller epsilon of the two.
    """
    last = {(row.client, row.unit): row for row in rows}

    def size(row: LedgerRow) -> float:
        return math.inf if row.epsilon == privacy.NONE else float(row.epsilon)

    of_client = [
        min((row for row in last.values() if row.client == client), key=size)
        for client in sorted({row.client for row in rows})
    ]
    if not of_client:
        return None
    return Guarantee.model_validate(max(of_client, key=size), from_attributes=True)


def defense_rows(
    notes: Mapping[Key, ClientNote | None], before: Iterable[DefenseRow]
) -> list[DefenseRow]:
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


def defense_means(rows: Sequence[DefenseRow]) -> tuple[DefenseMeans, ...]:
    """Returns for each defense the means of its figures over all updates that have them."""
    by_defense: dict[tuple[int, str], dict[str, list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for row in rows:
        of_defense = by_defense[row.defense, row.kind]
        for name, value in row.figures.items():
            if value is not None:
                of_defense[name].append(value)
    return tuple(
        DefenseMeans(
            defense=number,
            kind=kind,
            **{name: sum(values) / len(values) for name, values in sorted(figures.items())},
        )
        for (number, kind), figures in sorted(by_defense.items())
    )
