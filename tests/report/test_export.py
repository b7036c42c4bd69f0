import json
import os
import stat
from pathlib import Path

import datasets
import pytest
from tiny import DLG, call, toml

from fedleak.store.records import LEAKAGE
from fedleak.store.run import Run

READERS = {"csv": datasets.Dataset.from_csv, "parquet": datasets.Dataset.from_parquet}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None) -> Run:
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(toml({"attack": [DLG]}))
    assert call("run", "small.toml")[0] == 0
    return Run(tmp_path / "runs" / "small")


@pytest.mark.parametrize("kind", READERS)
def test_rows_are_read_back_by_others(run: Run, tmp_path: Path, kind: str) -> None:
    umask = os.umask(0)
    try:
        status, text, _ = call("export", str(run.path), "--to", f"rows.{kind}")
    finally:
        os.umask(umask)
    assert (status, text) == (0, f"4 rows: rows.{kind}\n")
    assert stat.S_IMODE(Path(f"rows.{kind}").stat().st_mode) == 0o600
    found = READERS[kind](f"rows.{kind}", cache_dir=str(tmp_path / "cache"))
    rows = run.rows(LEAKAGE)
    assert found["attack"][:] == [row.attack for row in rows]
    assert found["rougeL"][:] == pytest.approx([row.rougeL for row in rows], nan_ok=True)
    assert [json.loads(one) for one in found["diagnostics"]] == [row.diagnostics for row in rows]
    assert "pairs" not in found.column_names
    assert "patient" not in Path(f"rows.{kind}").read_bytes().decode("latin-1")


def test_private_texts_are_there_when_they_are_asked_for(run: Run, tmp_path: Path) -> None:
    status, text, _ = call("export", str(run.path), "--to", "rows.parquet", "--texts")
    assert (status, text) == (0, "4 rows, with private texts: rows.parquet\n")
    found = datasets.Dataset.from_parquet("rows.parquet", cache_dir=str(tmp_path / "cache"))
    for attack, client, pairs in zip(found["attack"], found["client"], found["pairs"], strict=True):
        (pair,) = json.loads(pairs)
        assert len(pair["text"]) > 10
        assert (pair["read"] is None) == (attack == "probes"), (attack, client)


def test_no_cell_is_a_formula(run: Run) -> None:
    rows = [row.model_copy(update={"reason": '=HYPERLINK("x")'}) for row in run.rows(LEAKAGE)]
    run.write_rows(LEAKAGE, rows)
    assert call("export", str(run.path), "--to", "rows.csv")[0] == 0
    assert "'=HYPERLINK" in Path("rows.csv").read_text()
    assert ",=HYPERLINK" not in Path("rows.csv").read_text()


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["runs/small", "--to", "rows.xlsx"], 2, "end it in .csv or .parquet"),
        (["nowhere", "--to", "rows.csv"], 2, "is not a run directory"),
        (["runs/small", "--to", "no/such/rows.csv"], 1, "no/such"),
    ],
)
def test_what_cannot_be_written_is_one_line(
    run: Run, arguments: list[str], status: int, says: str
) -> None:
    found, _, errors = call("export", *arguments)
    assert found == status
    assert says in errors
    assert errors.count("\n") == 1


def test_texts_that_are_gone_are_not_written(run: Run) -> None:
    assert call("purge", str(run.path))[0] == 0
    assert call("export", str(run.path), "--to", "rows.csv")[0] == 0
    status, _, errors = call("export", str(run.path), "--to", "texts.csv", "--texts")
    assert status == 2
    assert "was purged" in errors
    assert not Path("texts.csv").exists()
