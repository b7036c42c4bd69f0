"""What was read in each update."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedleak.attacks.reconstruction import Status
from fedleak.audit.pairing import best
from fedleak.report.table import Cell, Column, Row, Table, Tone, cells, figures, words
from fedleak.report.words import NOT_MEASURED, number, percent
from fedleak.store.records import LeakageRow, LedgerRow
from fedleak.store.run import EVERYONE, Key
from fedleak.training.privacy.accounting import NONE
from fedleak.util.lists import grouped

CHANGED = "server_mode"
"""The fact in the rows of an attacker whose server changed the model that it sent."""

MOST_ROWS = 500
"""The most rows of a table; if a run has more, the file leakage.jsonl has the others."""


@dataclass(frozen=True)
class ReadShare:
    """What the best attack on each text read of one update; None: no answer.

    Attributes:
        exact: The share of texts that were read word for word.
        tokens: The mean share of the distinct tokens of a text.
    """

    exact: float | None
    tokens: float | None


def by_update(rows: Iterable[LeakageRow]) -> dict[Key, list[LeakageRow]]:
    """Returns the rows of each update, by round and client."""
    return grouped(sorted(rows, key=lambda row: row.key), lambda row: row.key)


def shares(rows: Sequence[LeakageRow]) -> dict[Key, ReadShare]:
    """Returns what all attacks together read of each update, by round and client."""
    return {
        key: ReadShare(
            _share(of_update, "exact", "exact_match"),
            _share(of_update, "token_recall", "token_recall"),
        )
        for key, of_update in by_update(rows).items()
    }


def _share(rows: Sequence[LeakageRow], of_text: str, of_row: str) -> float | None:
    """Returns the mean over texts of the best score; if no row has texts, the best row's figure."""
    if any(row.texts is not None for row in rows):
        scores = best(rows, of_text).values()
        return sum(scores) / len(scores) if scores else None
    figures = (getattr(row, of_row) for row in rows)
    return max((figure for figure in figures if figure is not None), default=None)


def client_name(client: int) -> str:
    """Returns what a report calls a client."""
    return "all" if client == EVERYONE else str(client)


def leakage_table(
    name: str,
    rows: Sequence[LeakageRow],
    read: Mapping[Key, ReadShare],
    ledger: Sequence[LedgerRow] = (),
    of_models: bool = False,
) -> Table:
    """Returns a line per round and client, with a column per attack.

    Args:
        name: The name of the run.
        rows: Scored answers.
        read: What attacks together read of each update.
        ledger: Rows of privacy.jsonl.
        of_models: Whether differences of published models were attacked, in place of updates.
    """
    changed = {row.key for row in rows if CHANGED in row.knows}
    subject = (
        "what the published models tell"
        if of_models
        else f"what {'a malicious' if changed else 'the'} server read in each update"
    )
    attacks = sorted({row.attack for row in rows})
    of_update = {key: of_key for key, of_key in by_update(rows).items() if key in read}
    shown = list(of_update)[:MOST_ROWS]
    spent = grouped(ledger, lambda row: row.round)
    notes = [
        "Of an attack: texts recovered exactly and ROUGE-L, or the share of tokens found; epsilon: "
        "spent so far."
    ]
    if more := len(of_update) - len(shown):
        notes.append(f"{more:,} more updates are in leakage.jsonl of the run.")
    return Table(
        f"{name}: {subject}",
        [
            *figures("round", "client", "texts", "tokens"),
            Column("word for word", page_only=True),
            Column("tokens found", page_only=True),
            *figures("no update", "epsilon", *attacks),
            *words(*["model sent"] * bool(changed)),
        ],
        cells(
            [
                *_row(of_update[key], read[key], spent.get(key.round, ()), attacks),
                *[Cell("changed", Tone.ALARM) if key in changed else "honest"] * bool(changed),
            ]
            for key in shown
        ),
        notes,
        groups=1,
        kept=8,
    )


def _row(
    rows: Sequence[LeakageRow], read: ReadShare, ledger: Sequence[LedgerRow], attacks: Sequence[str]
) -> Row:
    key, answers = rows[0].key, {row.attack: row for row in rows}
    # A row whose truth is damaged lacks the sizes that other rows of the update have.
    whole = max(rows, key=lambda row: row.batch_size or 0)
    guesses = [row.guess_rougeL for row in rows if row.guess_rougeL is not None]
    return [
        str(key.round),
        client_name(key.client),
        number(whole.batch_size),
        number(whole.num_tokens),
        percent(read.exact),
        percent(read.tokens),
        number(guesses[0] if guesses else None),
        epsilon_of(key, ledger),
        *(_answer(answers.get(attack)) for attack in attacks),
    ]


def _answer(row: LeakageRow | None) -> Cell | str:
    """Returns what one attack got from one update."""
    if row is None:
        return NOT_MEASURED
    if row.status != Status.RECOVERED:
        return Cell(row.status, Tone.GAP)
    if row.rougeL is None:
        return percent(row.token_recall)
    texts = row.batch_size or 0
    exact = f"{round((row.exact_match or 0) * texts)}/{texts}"
    return Cell(f"{exact} {row.rougeL:3.0f}", Tone.ALARM if row.exact_match else Tone.PLAIN)


def epsilon_of(key: Key, ledger: Sequence[LedgerRow]) -> str:
    """Returns the epsilon that a client has spent by a round; for a sum, the largest one."""
    clients: dict[int, list[float | str]] = {}
    for row in ledger:
        if row.round == key.round and key.client in (row.client, EVERYONE):
            clients.setdefault(row.client, []).append(row.epsilon)
    # Of several epsilons of one client, the smallest counts.
    epsilons = [min(map(float, spent)) for spent in clients.values() if NONE not in spent]
    if len(epsilons) < len(clients):
        return NONE
    return f"{max(epsilons):.3g}" if epsilons else NOT_MEASURED
