"""Answers of a run and of its shards, read and mended together."""

from pathlib import Path
from typing import Any

import pytest

from fedleak.attacks.reconstruction import Status
from fedleak.store import shards
from fedleak.store.records import ATTEMPTS, Answer, Attempt, answers
from fedleak.store.run import Run
from fedleak.store.shards import Shard, Share
from fedleak.util.errors import FedleakError

pytestmark = pytest.mark.core

LINES = answers("f00")
FIRST, SECOND = Shard(count=2, number=1), Shard(count=2, number=2)


def answer(client: int, status: Status = Status.RECOVERED, **changes: Any) -> Answer:
    return Answer.model_validate(
        {
            "round": 1,
            "client": client,
            "attack": "dager",
            "settings": {},
            "granted": (),
            "knows": (),
            "seconds": None,
            "device": None,
            "status": status,
            "sequences": None,
            "margins": (),
            "tokens": None,
            "facts": {},
            "diagnostics": {},
            "verified": False,
            "reason": "",
            **changes,
        }
    )


def attempt(client: int) -> Attempt:
    return Attempt(round=1, client=client, attack="dager", reason="it crashed")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path / "r")
    run.create(experiment={}, fingerprint="f00", status="new", num_labels=2)
    return run


def give(run: Run, shard: Shard | None, *given: Answer) -> None:
    run.append(LINES if shard is None else shard.lines(LINES), *given)


def test_of_several_answers_the_first_that_did_not_fail_counts(run: Run) -> None:
    failed = answer(1, Status.FAILED)
    give(run, None, answer(0, reason="of the run"), failed)
    give(run, FIRST, answer(1, Status.ABSTAINED), answer(2, Status.FAILED, reason="first"))
    give(run, SECOND, answer(0, reason="later"), answer(1), answer(2, Status.FAILED, reason="last"))
    given = shards.read_answers(run)
    assert [(row.client, row.status, row.reason) for row in given] == [
        (0, Status.RECOVERED, "of the run"),
        (1, Status.ABSTAINED, ""),
        (2, Status.FAILED, "last"),
    ]
    assert shards.readable_answers(run) == shards.salvage_answers(run) == given
    # Each shard tries its own failures again no more, and those of others once.
    assert {row.client for row in shards.answers_for(run, FIRST)} == {0, 1, 2}
    assert {row.client for row in shards.answers_for(run, Shard(count=3, number=1))} == {0, 1}


def test_ids_outside_the_vocabulary_are_no_answer(run: Run) -> None:
    give(run, FIRST, answer(0, tokens=(9,)))
    assert shards.read_answers(run, 10) == [answer(0, tokens=(9,))]
    with pytest.raises(FedleakError, match="outside the vocabulary of 9"):
        shards.read_answers(run, 9)
    assert shards.salvage_answers(run, 9) == []
    (line,) = shards.damaged(run)
    assert (line.file, line.line) == ("shard-1of2/reconstructions.jsonl", 1)


def test_damaged_lines_of_the_run_come_before_those_of_its_shards(run: Run) -> None:
    give(run, None, answer(0))
    give(run, SECOND, answer(1))
    for name in (LINES.name, SECOND.lines(LINES).name):
        with (run.path / name).open("a") as file:
            file.write("oops\n")
    assert [row.client for row in shards.readable_answers(run)] == [0, 1]
    assert shards.damaged(run) == []
    assert [row.client for row in shards.salvage_answers(run)] == [0, 1]
    assert [(line.file, line.line) for line in shards.damaged(run)] == [
        ("reconstructions.jsonl", 2),
        ("shard-2of2/reconstructions.jsonl", 2),
    ]


@pytest.mark.parametrize(
    ("shard", "forgotten", "left"),
    [(None, 3, [0, 2]), (FIRST, 1, [0, 1, 2, 5]), (SECOND, 1, [0, 1, 2, 3])],
)
def test_failures_are_forgotten_with_their_attempts(
    run: Run, shard: Shard | None, forgotten: int, left: list[int]
) -> None:
    places = {None: run, FIRST: run.inside(FIRST.folder), SECOND: run.inside(SECOND.folder)}
    for at, clients in zip(places, ((0, 1), (2, 3), (5,)), strict=True):
        given = [answer(n, Status.FAILED if n % 2 else Status.RECOVERED) for n in clients]
        give(run, at, *given)
        places[at].append(ATTEMPTS, *(attempt(client) for client in clients))
    assert shards.drop_failures(run, shard) == forgotten
    assert sorted(row.client for row in shards.read_answers(run)) == left
    tried = [row.client for place in places.values() for row in place.rows(ATTEMPTS)]
    assert sorted(tried) == left
    assert shards.drop_failures(run, shard) == 0


def test_shards_that_have_begun_are_listed_with_what_they_say(run: Run) -> None:
    wide = Shard(count=10, number=2)
    for shard in (wide, SECOND, FIRST):
        give(run, shard, answer(0, attack="tag"), answer(0), answer(1))
    (run.path / "shard-1of2x").mkdir()
    share = Share(attacks=("dager",), complete=True)
    run.write(shards.share(FIRST), share)
    run.write(shards.share(wide), share)
    (run.path / "shard-2of10" / "shard.json").write_text("{")
    assert shards.begun(run) == [FIRST, SECOND, wide]
    assert shards.shares(run) == {FIRST: share, SECOND: None, wide: None}
    assert shards.attacks_in(run, SECOND) == ["dager", "tag"]
    assert shards.attacks_in(run, Shard(count=3, number=1)) == []
    with pytest.raises(FedleakError) as refused:
        run.read_document(shards.share(wide))
    assert str(refused.value).endswith("): `fedleak attack RUN --shard 2/10` makes it anew")


def test_a_shard_leaves_the_run_to_other_shards_and_to_nobody_else(run: Run) -> None:
    with shards.locked(run, FIRST):
        with shards.locked(run, SECOND):
            pass
        with pytest.raises(FedleakError, match="in use"), shards.locked(run, FIRST):
            pass
        with pytest.raises(FedleakError, match="in use"), run.lock():
            pass
    with run.lock():
        pass


def test_the_parts_of_all_shards_are_all() -> None:
    parts = [Shard(count=3, number=number).part("abcdefgh") for number in (1, 2, 3)]
    assert parts == [["a", "d", "g"], ["b", "e", "h"], ["c", "f"]]
