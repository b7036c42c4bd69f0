"""What a line of a run's files may hold: each rule of a row refuses what breaks it."""

import json
import re
from typing import Any

import pytest

from fedleak.store.lines import Lines
from fedleak.store.records import (
    CANARIES,
    LEAKAGE,
    MEMBERSHIP,
    Answer,
    Fact,
    LeakageRow,
    LedgerRow,
    answers,
    text_counts,
    within,
)
from fedleak.store.run import Key

pytestmark = pytest.mark.core

CANARY: dict[str, Any] = {
    "round": 2,
    "client": 3,
    "slot": 0,
    "audited_copy": False,
    "whole": False,
    "rate": None,
    "steps": 1,
    "uses": 1,
    "numbers": 1,
    "noise_share": None,
    "inside": [True, False],
    "scores": [1.0, -1.0],
    "witnesses": [],
}
MEMBER: dict[str, Any] = {
    "round": 2,
    "client": 3,
    "attack": "members",
    "texts": [7, 4, 9, 1],
    "inside": [True, False, False, True],
    "pairs": [[3, 1], [0, 2]],
    "scores": {"loss": [0.1, 0.2, 0.3, 0.4]},
}
LEAK: dict[str, Any] = {
    "round": 2,
    "client": 3,
    "attack": "dager",
    "status": "recovered",
    "reason": "",
    "verified": False,
    "batch_size": 2,
    "texts": [
        {"rougeL": 1.0, "exact": False, "token_recall": 0.5},
        {"rougeL": 100.0, "exact": True, "token_recall": 1.0},
    ],
    "facts": {},
    "margin": None,
    "diagnostics": {},
    "seconds": 1.0,
    "device": "cpu",
    "knows": [],
}
RANGE = "rate, steps, uses or numbers are out of range"
TWICE = "texts: one is there twice, or nobody knows whether it was in"
ONE_IN = "pairs: one of each must be in"

GOOD = [
    (CANARIES, CANARY),
    (CANARIES, CANARY | {"rate": 1.0}),
    (CANARIES, CANARY | {"rate": 1e-9, "steps": 5, "uses": 2, "numbers": 9}),
    (MEMBERSHIP, MEMBER),
    (MEMBERSHIP, MEMBER | {"pairs": []}),
    (LEAKAGE, LEAK),
    (LEAKAGE, LEAK | {"texts": None}),
]

BAD = [
    (CANARIES, CANARY | {"scores": [1.0]}, "scores: 1 of 2 canaries"),
    (CANARIES, CANARY | {"scores": [], "inside": []}, "scores: 0 of 0 canaries"),
    *((CANARIES, CANARY | {name: 0}, RANGE) for name in ("steps", "uses", "numbers")),
    *((CANARIES, CANARY | {"rate": rate}, RANGE) for rate in (0.0, -0.1, 1.0001)),
    (MEMBERSHIP, MEMBER | {"texts": [7, 4, 9, 7]}, TWICE),
    (MEMBERSHIP, MEMBER | {"inside": [True, False, False]}, TWICE),
    (MEMBERSHIP, MEMBER | {"pairs": [[3, 1]]}, "pairs: not every text is in one"),
    (MEMBERSHIP, MEMBER | {"pairs": [[3, 1], [0, 1]]}, "pairs: not every text is in one"),
    (MEMBERSHIP, MEMBER | {"pairs": [[3, 1], [2, 0]]}, ONE_IN),
    (MEMBERSHIP, MEMBER | {"inside": [True] * 4}, ONE_IN),
    (MEMBERSHIP, MEMBER | {"inside": [False] * 4}, ONE_IN),
    (
        MEMBERSHIP,
        MEMBER | {"scores": {"loss": [0.1, 0.2, 0.3, 0.4], "other": [0.1]}},
        "scores: not of every text",
    ),
    (LEAKAGE, LEAK | {"batch_size": 3}, "texts: 2 for a batch of 3"),
    (LEAKAGE, LEAK | {"batch_size": None}, "texts: 2 for a batch of None"),
]


@pytest.mark.parametrize(("lines", "table"), GOOD)
def test_a_row_that_keeps_the_rules_is_read(lines: Lines[Any], table: dict[str, Any]) -> None:
    row = lines.parse_line(json.dumps(table).encode())
    assert row.key == Key(2, 3)
    assert json.loads(lines.written(row)).items() >= table.items()


@pytest.mark.parametrize(("lines", "table", "says"), BAD)
def test_a_row_that_breaks_a_rule_is_refused(
    lines: Lines[Any], table: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        lines.parse_line(json.dumps(table).encode())


def answered(**changes: Any) -> Answer:
    table = {
        "round": 2,
        "client": 3,
        "attack": "dager",
        "settings": {},
        "granted": [],
        "knows": [],
        "seconds": None,
        "device": None,
        "status": "recovered",
        "sequences": [[0, 9]],
        "margins": [],
        "tokens": [5],
        "facts": {},
        "diagnostics": {},
        "verified": False,
        "reason": "",
    }
    lines = answers("f00")
    return lines.parse_line(json.dumps({**table, "fingerprint": "f00", **changes}).encode())


def test_an_answer_is_of_its_experiment_and_its_ids_are_of_the_vocabulary() -> None:
    answer = answered()
    assert answer.id == (Key(2, 3), "dager")
    assert answers("f00").name == "reconstructions.jsonl"
    assert answers("f00").sealed
    line = answers("f00").written(answer).encode()
    assert answers("f00", 10).parse_line(line) == answer
    with pytest.raises(ValueError, match=r"^it is of another experiment$"):
        answers("f01").parse_line(line)
    with pytest.raises(ValueError, match=r"^it has token ids outside the vocabulary of 9$"):
        answers("f00", 9).parse_line(line)


@pytest.mark.parametrize("changes", [{"tokens": [-1]}, {"sequences": [[1], [12]]}])
def test_each_id_of_an_answer_is_looked_at(changes: dict[str, Any]) -> None:
    line = answers("f00").written(answered(**changes)).encode()
    with pytest.raises(ValueError, match="outside the vocabulary of 12"):
        answers("f00", 12).parse_line(line)


def test_an_answer_without_ids_has_none_outside() -> None:
    answer = answered(tokens=None, sequences=None)
    assert answers("f00", 1).parse_line(answers("f00").written(answer).encode()) == answer


def test_ids_of_a_vocabulary_begin_with_zero() -> None:
    assert within([0, 1, 2], 3)
    assert within([], 0)
    assert not within([3], 3)
    assert not within([-1], 3)


def test_a_fact_is_compared_where_somebody_knows_what_is_true() -> None:
    assert Fact(claimed=2).right is None
    assert Fact(claimed=2, true=2).right is True
    assert Fact(claimed=2, true=3).right is False


def test_texts_are_counted_by_update_where_the_truth_is_known() -> None:
    rows = [
        LeakageRow.model_validate_json(json.dumps(LEAK | changes))
        for changes in ({}, {"attack": "tag"}, {"client": 4, "batch_size": None, "texts": None})
    ]
    assert text_counts(rows) == {Key(2, 3): 2}


def test_nothing_is_guaranteed_in_every_word() -> None:
    row = LedgerRow.nothing_guaranteed(Key(2, 3))
    assert row.model_dump() == {
        "round": 2,
        "client": 3,
        **dict.fromkeys(("epsilon", "accountant", "unit", "neighbouring", "sampling"), "none"),
        **dict.fromkeys(("delta", "sampling_rate", "steps", "noise_multiplier")),
        "uses": (),
    }
