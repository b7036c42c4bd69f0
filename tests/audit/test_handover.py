"""Vaults that the owners of nodes hand over: what is taken, and what is refused and why."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import DLG, Here, call, toml

from fedleak.audit import handover
from fedleak.config.loading import load
from fedleak.flower.engines import train
from fedleak.running import pipeline, preparation
from fedleak.running.dispatch.dispatcher import Crew
from fedleak.store.lines import Lines
from fedleak.store.run import Key, Run

NOISY = {
    "kind": "dp_sgd",
    "noise_multiplier": 1.0,
    "max_grad_norm": 1.0,
    "sampling": "fixed",
    "clients": [1],
}
OF_1 = "node-1/small/vault/r0001-c01.json"
NOTE = "node-1/small/defended/r0001-c01.json"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, saved: Callable[..., str]) -> Path:
    folder, model = tmp_path_factory.mktemp("finished"), {"name": saved("bert", layers=1)}
    (folder / "small.toml").write_text(toml({"model": model, "defense": [NOISY], "attack": [DLG]}))
    run = preparation.prepare(load(folder / "small.toml"), folder / "runs" / "small")
    pipeline.carry_out(run, load(folder / "small.toml"), train, Crew([Here()]))
    return folder


@pytest.fixture
def apart(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A copy of the run, as a server has it whose clients keep their vaults for themselves."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    run = Run(tmp_path / "runs" / "small")
    for kind in ("vault", "defended"):
        for path in sorted((run.path / kind).iterdir()):
            node = tmp_path / f"node-{int(path.stem[-2:])}" / "small" / kind
            node.mkdir(parents=True, exist_ok=True)
            path.rename(node / path.name)
        (run.path / kind).rmdir()
    for name in ("leakage.jsonl", "privacy.jsonl", "defenses.jsonl", "summary.json"):
        (run.path / name).unlink()
    return run


def lines(run: Run, name: str) -> list[dict[str, Any]]:
    return run.rows(Lines(name, dict))


def test_a_server_without_vaults_scores_nothing_and_says_so(apart: Run) -> None:
    status, text, errors = call("score", str(apart.path))
    assert status == 1
    statuses = [row["status"] for row in lines(apart, "leakage.jsonl")]
    assert {*statuses} == {"unscored", "abstained"}
    assert f"{statuses.count('unscored')} answers are unscored: `fedleak score" in errors
    assert "--vault FOLDER` takes" in errors
    assert "unscored" in text
    assert {row["epsilon"] for row in lines(apart, "privacy.jsonl")} == {"none"}
    status, text, _ = call("gate", str(apart.path), "--set", "gate.exact=0.9")
    assert status == 3
    assert "its answers for 2 of 2 updates are unscored" in text
    assert call("report", str(apart.path))[0] == 1
    page = (apart.path / "report.html").read_text()
    assert "attacks gave answers for 2 updates, but what clients trained on is not here" in page
    assert call("export", str(apart.path), "--to", "rows.csv")[0] == 0


def test_vaults_that_are_handed_over_give_the_scores_of_the_whole_run(
    apart: Run, finished: Path
) -> None:
    whole = Run(finished / "runs" / "small")
    call("score", str(apart.path))
    status, text, errors = call("score", str(apart.path), "--vault", "node-0", "--vault", "node-1")
    assert (status, errors) == (0, "")
    assert "taken from vaults: 2 private batches and 1 notes on defenses" in text
    for name in ("leakage.jsonl", "privacy.jsonl", "defenses.jsonl"):
        assert lines(apart, name) == lines(whole, name)
    for kind in ("vault", "defended"):
        for path in (whole.path / kind).iterdir():
            assert (apart.path / kind / path.name).read_bytes() == path.read_bytes()
            assert os.stat(apart.path / kind / path.name).st_mode & 0o777 == 0o600
    again = call("score", str(apart.path), "--vault", "node-0/small")
    assert "taken from vaults: 0 private batches" in again[1]


def test_one_vault_scores_one_client_and_the_other_stays_unscored(apart: Run) -> None:
    status, _, errors = call("score", str(apart.path), "--vault", "node-0")
    assert status == 1
    assert "1 of 2 captures have no truth" in errors
    batch_sizes = {row["client"]: row["batch_size"] for row in lines(apart, "leakage.jsonl")}
    assert batch_sizes == {0: 1, 1: None}


def changed(name: str, **values: Any) -> Callable[[], None]:
    def change() -> None:
        path = Path(name)
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return change


def written(name: str, content: str) -> Callable[[], None]:
    return lambda: (Path(name).write_text(content), None)[1]


def linked() -> None:
    Path(OF_1).rename("elsewhere.json")
    Path(OF_1).symlink_to(Path("elsewhere.json").absolute())


def piped() -> None:
    Path(OF_1).unlink()
    os.mkfifo(OF_1)


def without_a_mark() -> None:
    value = json.loads(Path(OF_1).read_text())
    del value["fingerprint"]
    Path(OF_1).write_text(json.dumps(value))


COINS = {
    "inside": [True, False],
    "slot": 0,
    "copy": False,
    "whole": False,
    "rate": None,
    "steps": 1,
    "uses": 1,
}

HOSTILE: dict[str, tuple[Callable[[], None], str]] = {
    "another experiment": (changed(OF_1, fingerprint="0" * 16), "is of the experiment 0000"),
    "a long mark": (
        changed(OF_1, fingerprint="0" * 99),
        f"experiment {'0' * 40}, not of",
    ),
    "a mark of control codes": (changed(OF_1, fingerprint="\x1b[2J"), r"\x1b[2J"),
    "no mark": (without_a_mark, "is of the experiment None"),
    "another client": (changed(OF_1, client=0), "it is of another round or client"),
    "a client that is none": (
        lambda: (Path(OF_1).rename(OF_1.replace("c01", "c07")), None)[1],
        "r0001-c07.json: in this run no client trains then",
    ),
    "no batch": (changed(OF_1, sequences="all"), "it is no private batch"),
    "not JSON": (written(OF_1, "{"), "it is not JSON"),
    "deep": (written(OF_1, "[" * 100_000), "it is not JSON"),
    "a list": (written(OF_1, "[]"), "is of the experiment None"),
    "words that are none": (changed(OF_1, sequences=[[2, 10**9, 3]]), "outside the vocabulary"),
    "a label that is none": (changed(OF_1, labels=[7]), "none of the 2 classes"),
    "too many labels": (changed(OF_1, labels=[1, 1]), "not every text has one class"),
    "no labels": (changed(OF_1, labels=[]), "0 labels for 1 texts"),
    "no noise": (changed(OF_1, noise_scale=-1.0), "its noise_scale is -1.0"),
    "no step": (changed(OF_1, batch_size=0), "its batch_size is 0"),
    "coins that nobody threw": (changed(OF_1, canaries=COINS | {"drawn": [1]}), "its canaries"),
    "a rate of nothing": (changed(OF_1, canaries=COINS | {"rate": 0.0}), "its canaries cannot be"),
    "another batch": (changed(OF_1, batch_size=3), "it has 3 examples, but client 1 sent an"),
    "a link": (linked, "it is a link"),
    "a pipe": (piped, "it is a pipe"),
    "other defenses": (
        changed(NOTE, defenses=[{"defense": 5, "kind": "clip"}]),
        "client 1 has other defenses",
    ),
    "no note": (changed(NOTE, events=5), "it is no note on defenses"),
    "records without end": (changed(NOTE, records=10**15), "it is no note on defenses"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_vault_that_cannot_be_of_this_run_is_refused_whole(case: str, apart: Run) -> None:
    damage, says = HOSTILE[case]
    damage()
    status, _, errors = call("score", str(apart.path), "--vault", "node-0", "--vault", "node-1")
    assert status == 1
    assert says in errors
    assert "nothing was taken" in errors
    assert errors.count("\n") == 1
    assert not (apart.path / "vault").exists()
    assert not (apart.path / "leakage.jsonl").exists()


def test_a_note_whose_events_cannot_be_composed_is_refused(apart: Run) -> None:
    note = json.loads(Path(NOTE).read_text())
    cases = {"counts more steps": {"steps": 10**9}, "nothing can be": {"sampling_rate": 7.0}}
    for says, change in cases.items():
        changed(NOTE, events=[note["events"][0] | change])()
        status, _, errors = call("score", str(apart.path), "--vault", "node-1")
        assert status == 1
        assert says in errors
        assert "nothing was taken" in errors


def test_a_file_that_is_too_large_is_not_read(apart: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "MOST_BYTES", 10)
    assert "more than 10 bytes" in call("score", str(apart.path), "--vault", "node-1")[2]


def test_a_vault_without_the_run_is_refused_with_what_it_has(apart: Run) -> None:
    Path("node-1/small").rename("node-1/other")
    status, _, errors = call("score", str(apart.path), "--vault", "node-1")
    assert status == 2
    assert "holds no private batches of the run 'small' (it has other)" in errors
    assert "(it has no run's)" in call("score", str(apart.path), "--vault", "node-7")[2]


def test_nothing_that_is_here_is_replaced_by_something_else(apart: Run) -> None:
    assert call("score", str(apart.path), "--vault", "node-1")[0] == 1
    before = (apart.path / "vault" / "r0001-c01.json").read_bytes()
    batch = json.loads(Path(OF_1).read_text())["sequences"][0]
    changed(OF_1, sequences=[batch[:2] + batch[3:]])()
    status, _, errors = call("score", str(apart.path), "--vault", "node-1")
    assert status == 1
    assert "holds something else than the vault that was handed over" in errors
    assert (apart.path / "vault" / "r0001-c01.json").read_bytes() == before


def test_a_damaged_batch_is_mended(apart: Run) -> None:
    call("score", str(apart.path), "--vault", "node-1")
    (apart.path / "vault" / "r0001-c01.json").write_text("{")
    assert "1 private batches" in call("score", str(apart.path), "--vault", "node-1")[1]
    assert apart.vault.all_keys() == [Key(1, 1)]


def test_two_vaults_that_differ_about_a_client_are_refused(apart: Run) -> None:
    shutil.copytree("node-1", "node-2")
    batch = json.loads(Path(OF_1).read_text())["sequences"][0]
    changed(OF_1, sequences=[batch[:2] + batch[3:]])()
    status, _, errors = call("score", str(apart.path), "--vault", "node-1", "--vault", "node-2")
    assert status == 1
    assert "another folder has another file for r0001-c01" in errors
    assert not (apart.path / "vault").exists()
