"""The ledger is composed anew from what clients noted, and what is lost is no guarantee."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tiny import tables

from fedleak.audit.gaps import Gaps, read_notes
from fedleak.audit.privacy.ledger import ClientNote, defense_rows, ledger
from fedleak.config.experiment import Experiment
from fedleak.config.loading import parse
from fedleak.store.records import DefenseRow, LedgerRow
from fedleak.store.run import EVERYONE, Capture, Key, Run
from fedleak.training.observation import ClientUpdate, Knowledge, UpdateKind
from fedleak.training.privacy import accounting
from fedleak.training.privacy.accounting import Event, Use

pytestmark = pytest.mark.core

EVENT = Event(
    noise_multiplier=2.0, sampling_rate=1.0, steps=3, unit="example", neighbouring="zero out one"
)
NOISE = {"kind": "gaussian_noise", "sigma": 0.1}
CENTRAL = {"kind": "central_dp", "max_norm": 1.0, "noise_multiplier": 1.0}


def experiment(**changes: Any) -> Experiment:
    return parse(
        tables(
            {
                "federation": {"clients": 2, "rounds": 3, "batch_size": 2},
                "data": {"name": "builtin/notes", "samples": 4, "held_out": 4},
                "defense": [NOISE],
                **changes,
            }
        )
    )


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "r")
    run.create(experiment={}, fingerprint="f00", status="new", num_labels=2)
    return run


def note(*events: Event) -> ClientNote:
    return ClientNote(defenses=[], training={}, events=list(events))


def captured(run: Run, *keys: Key) -> None:
    update = ClientUpdate(UpdateKind.GRADIENT, {"weight": torch.ones(2)}, 2)
    for key in keys:
        run.captures.write(Capture(key, update, Knowledge()))


def spent(events: int) -> float:
    (composed,) = accounting.compose([EVENT] * events, 1e-5, "prv")
    return composed.epsilon


def epsilons(rows: list[LedgerRow]) -> Mapping[tuple[int, int], object]:
    return {(row.round, row.client): row.epsilon for row in rows}


def test_each_round_adds_what_was_noted_of_it(run: Run) -> None:
    notes = {Key(round, 0): note(EVENT) for round in (1, 2)} | {Key(1, 1): note(EVENT, EVENT)}
    gaps = Gaps()
    rows = ledger(run, experiment(), notes, gaps, [])
    assert epsilons(rows) == {(1, 0): spent(1), (2, 0): spent(2), (1, 1): spent(2)}
    assert rows[-1] == LedgerRow(
        round=2, client=0, epsilon=spent(2), delta=1e-5, accountant="prv", unit="example",
        neighbouring="zero out one", sampling="none", sampling_rate=1.0, steps=6,
        noise_multiplier=2.0, uses=(Use(2.0, 1.0, 6),),
    )  # fmt: skip
    assert (gaps.missing, gaps.notes) == ([], [])


@pytest.mark.parametrize(
    ("delta", "unit", "says"),
    [
        (0.25, "example", "privacy.delta = 0.25 is at least 1/4, and a client has 4 examples: "),
        (0.2, "example", None),
        (0.5, "client", "privacy.delta = 0.5 is at least 1/2, and there are 2 clients: "),
        (0.4, "client", None),
    ],
)
def test_a_delta_that_allows_to_publish_one_whole_is_said(
    run: Run, delta: float, unit: Any, says: str | None
) -> None:
    run.update_info(node_examples=[4, 9])
    notes = {Key(1, client): note(replace(EVENT, unit=unit)) for client in (0, 1)}
    gaps = Gaps()
    ledger(run, experiment(privacy={"delta": delta}), notes, gaps, [])
    of_delta = [sentence for sentence in gaps.notes if "privacy.delta" in sentence]
    assert [sentence[: len(says or "")] for sentence in of_delta] == ([says] if says else [])
    of_users = [sentence for sentence in gaps.notes if "all that client 1 has" in sentence]
    assert len(of_users) == (unit == "example")


POISSON = replace(EVENT, sampling="Poisson", sampling_rate=0.25, steps=48)
FAIR = [[0, 5], [2], [1, 3, 6], [0, 7], [4, 5]]


@pytest.mark.parametrize(
    ("event", "steps", "says"),
    [
        (replace(EVENT, steps=1, disjoint=0), [[0, 1]], None),
        (replace(EVENT, steps=1, disjoint=0), [[0, 1], [1, 2]], "client 0: a record was in 2 step"),
        (EVENT, [[0, 1]] * 3, None),
        (EVENT, [[0, 1]] * 3 + [[1]], "a record was in 4 steps of a pass, and the ledger counts 3"),
        (POISSON, FAIR, None),
        (POISSON, [range(8)] * 2, "client 0: 16 of 16 draws took a record, where a share of 0.25"),
        (POISSON, [[0, 1]] * 12, "12 of 12 steps took both of two records, where a share of 0.0"),
        (POISSON, [[step % 8] for step in range(48)], "of 384 draws took a record"),
        (replace(POISSON, steps=4), FAIR, "r0001-c00: 5 steps were made, and the ledger counts 4"),
        (POISSON, [[0]] * 14, "14 of 14 steps took one record, where a share of 0.25 is announced"),
    ],
)
def test_steps_that_do_not_draw_as_the_ledger_says_are_an_alarm(
    run: Run, event: Event, steps: list[list[int]], says: str | None
) -> None:
    run.update_info(node_examples=[8, 8])
    gaps = Gaps()
    drawn = ClientNote(
        defenses=[], training={}, events=[event], records=8, drawn=[list(step) for step in steps]
    )
    ledger(run, experiment(), {Key(1, 0): drawn}, gaps, [])
    assert len(gaps.missing) == (says is not None)
    assert all(says and says in sentence for sentence in gaps.missing)
    assert all("does not do what the ledger says" in sentence for sentence in gaps.missing)


def test_a_note_of_a_record_that_is_not_there_is_damaged() -> None:
    with pytest.raises(ValidationError, match="a record is not one of 2"):
        ClientNote(defenses=[], training={}, events=[], records=2, drawn=[[0], [2]])


def test_without_noise_nothing_is_guaranteed(run: Run) -> None:
    silent, endless = note(), note(replace(EVENT, noise_multiplier=0.0))
    rows = ledger(run, experiment(), {Key(1, 0): silent, Key(1, 1): endless}, Gaps(), [])
    assert epsilons(rows) == {(1, 0): "none", (1, 1): "none"}
    assert rows[0] == LedgerRow.nothing_guaranteed(Key(1, 0))
    assert (rows[1].accountant, rows[1].steps) == ("prv", 3)


def test_from_a_lost_note_on_the_rows_are_the_earlier_ones(run: Run) -> None:
    captured(run, Key(2, 1), Key(3, 1))
    notes = {
        Key(1, 0): note(EVENT),
        Key(1, 1): note(EVENT),
        Key(2, 0): None,
        Key(3, 0): note(EVENT),
    }
    before = [LedgerRow.nothing_guaranteed(Key(2, 0)).model_copy(update={"epsilon": 7.5})]
    gaps = Gaps()
    rows = ledger(run, experiment(), notes, gaps, before)
    assert epsilons(rows) == {
        (1, 0): spent(1),
        (1, 1): spent(1),
        (2, 0): 7.5,
        (2, 1): "none",
        (3, 0): "none",
        (3, 1): "none",
    }
    assert gaps.missing == [
        f"what the defenses of 2 clients (0, 1) did is not all in {run.path / 'defended'}: the "
        "ledger keeps what it had of them, and counts what it never had as no guarantee; `fedleak "
        f"score {run.path} --vault FOLDER` takes such files from the vault of a node, else only "
        "`fedleak run FILE --fresh` writes them again"
    ]


def test_a_client_without_defenses_needs_no_note(run: Run) -> None:
    captured(run, Key(1, 0), Key(1, 1))
    gaps = Gaps()
    rows = ledger(run, experiment(defense=[NOISE | {"clients": [1]}]), {}, gaps, [])
    assert epsilons(rows) == {(1, 0): "none", (1, 1): "none"}
    assert len(gaps.missing) == 1
    assert "of 1 clients (1) did" in gaps.missing[0]


def test_who_trained_is_known_from_captures_sums_private_batches_and_earlier_rows(
    run: Run,
) -> None:
    run.update_info(dropped_out={"2": [0]})
    captured(run, Key(2, EVERYONE))
    run.vault.write(Key(3, 0), {})
    before = [LedgerRow.nothing_guaranteed(Key(1, 1))]
    rows = ledger(run, experiment(defense=[]), {}, Gaps(), before)
    assert list(epsilons(rows)) == [(1, 1), (2, 1), (3, 0)]


def test_in_a_finished_run_who_handed_over_nothing_trained_too(run: Run) -> None:
    notes = {Key(round, 0): note(EVENT) for round in (1, 3)} | {Key(1, 1): note(EVENT)}
    run.update_info(status="finished", dropped_out={"3": [1]})
    gaps = Gaps()
    rows = ledger(run, experiment(), notes, gaps, [])
    assert epsilons(rows) == {
        (1, 0): spent(1),
        (1, 1): spent(1),
        (2, 0): "none",
        (2, 1): "none",
        (3, 0): "none",
    }
    assert "of 2 clients (0, 1) did" in gaps.missing[0]


def test_clients_of_another_app_note_nothing_and_nothing_is_missing(run: Run) -> None:
    tapped = {"optimiser": "sgd", "labels": 2, "clients": [[0, 1]], "messages": "0"}
    changes = {"federation": {"clients": 2, "rounds": 1, "batch_size": 2}, "tapped": tapped}
    captured(run, Key(1, EVERYONE))
    run.update_info(status="finished")
    gaps = Gaps()
    rows = ledger(run, experiment(defense=[{"kind": "secure_sum"}], **changes), {}, gaps, [])
    assert epsilons(rows) == {(1, 0): "none", (1, 1): "none"}
    assert not gaps.missing


def test_whom_the_guarantee_needs_to_be_trusted_is_noted(run: Run) -> None:
    gaps = Gaps()
    central = experiment(defense=[CENTRAL])
    ledger(run, central, {}, gaps, [])
    assert central.aggregator is not None
    assert gaps.notes == ([] if central.aggregator.trust is None else [central.aggregator.trust])


def test_a_damaged_note_is_named_and_the_others_are_read(run: Run) -> None:
    table = {"defenses": [], "training": {"loss": None}, "events": [asdict(EVENT)]}
    run.defended.write(Key(1, 0), table)
    run.defended.write(Key(1, 1), {"defenses": []})
    gaps = Gaps()
    notes = read_notes(run.defended, ClientNote, gaps)
    assert list(notes) == [Key(1, 0), Key(1, 1)]
    kept = notes[Key(1, 0)]
    assert kept is not None
    assert (kept.events, kept.training) == ([EVENT], {"loss": None})
    assert notes[Key(1, 1)] is None
    assert gaps.missing == [
        f"{run.path / 'defended' / 'r0001-c01.json'} is damaged: what was counted with it stays, "
        "and only `fedleak run FILE --fresh` writes such a file again"
    ]


def test_figures_of_training_stand_beside_the_defense_that_they_are_about() -> None:
    made = ClientNote.model_validate(
        {
            "defenses": [
                {"defense": 1, "kind": "mask", "zeroed": 0.5},
                {"defense": 0, "kind": "dp_sgd", "clipped": 1.0},
                {"defense": 2, "kind": "of another version"},
            ],
            "training": {"examples": 3.0},
            "events": [],
        }
    )
    kept = DefenseRow(round=1, client=1, defense=0, kind="mask", zeroed=0.25)
    replaced = DefenseRow(round=2, client=0, defense=0, kind="mask", zeroed=0.75)
    rows = defense_rows({Key(2, 0): made, Key(1, 1): None}, [replaced, kept])
    assert [(row.key, row.defense, row.kind, dict(row.figures)) for row in rows] == [
        (Key(1, 1), 0, "mask", {"zeroed": 0.25}),
        (Key(2, 0), 0, "dp_sgd", {"clipped": 1.0, "examples": 3.0}),
        (Key(2, 0), 1, "mask", {"zeroed": 0.5}),
        (Key(2, 0), 2, "of another version", {}),
    ]


def test_many_rounds_are_composed_faster_and_no_epsilon_is_above_a_later_one(run: Run) -> None:
    event = replace(EVENT, steps=1)
    notes = {Key(round, 0): note(event) for round in range(1, 41)}
    many = experiment(federation={"clients": 2, "rounds": 40, "batch_size": 2})
    rows = ledger(run, many, notes, Gaps(), [])
    exact = {row.round: accounting.epsilon(row.uses, 1e-5, "prv") for row in rows}
    assert [row.round for row in rows if row.accountant == "prv"] == [*range(1, 17), 32, 40]
    for row, following in pairwise(rows):
        assert exact[row.round] <= row.epsilon <= following.epsilon
    assert all(row.epsilon == exact[row.round] for row in rows if row.accountant == "prv")
