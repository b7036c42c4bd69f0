import json
import os
import shutil
import stat
from pathlib import Path

import datasets
import pytest
from tiny import DLG, call, trained_here

from fedleak.audit.score_files import mark
from fedleak.config.federation.lookup import stored
from fedleak.config.federation.workload import outline
from fedleak.store.records import LEAKAGE, ScoredRows
from fedleak.store.run import Run
from fedleak.store.summaries import SUMMARY

READERS = {"csv": datasets.Dataset.from_csv, "parquet": datasets.Dataset.from_parquet}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained_here(tmp_path_factory.mktemp("trained"), {"attack": [DLG]})


@pytest.fixture
def run(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, tmp_path / "runs" / "small")
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
    table = READERS[kind](f"rows.{kind}", cache_dir=str(tmp_path / "cache"))
    rows = run.rows(LEAKAGE)
    assert table["attack"][:] == [row.attack for row in rows]
    assert table["rougeL"][:] == pytest.approx([row.rougeL for row in rows], nan_ok=True)
    assert [json.loads(cell) for cell in table["diagnostics"]] == [row.diagnostics for row in rows]
    assert "pairs" not in table.column_names
    assert "patient" not in Path(f"rows.{kind}").read_bytes().decode("latin-1")


def test_private_texts_are_there_when_they_are_asked_for(run: Run, tmp_path: Path) -> None:
    status, text, _ = call("export", str(run.path), "--to", "rows.parquet", "--texts")
    assert (status, text) == (0, "4 rows, with private texts: rows.parquet\n")
    table = datasets.Dataset.from_parquet("rows.parquet", cache_dir=str(tmp_path / "cache"))
    for attack, client, pairs in zip(table["attack"], table["client"], table["pairs"], strict=True):
        (pair,) = json.loads(pairs)
        assert len(pair["text"]) > 10
        assert (pair["read"] is None) == (attack == "probes"), (attack, client)


def test_no_cell_is_a_formula(run: Run) -> None:
    rows = [row.model_copy(update={"reason": '=HYPERLINK("x")'}) for row in run.rows(LEAKAGE)]
    run.write_rows(LEAKAGE, rows)
    assert call("export", str(run.path), "--to", "rows.csv")[0] == 0
    assert "'=HYPERLINK" in Path("rows.csv").read_text()
    assert ",=HYPERLINK" not in Path("rows.csv").read_text()


def test_the_annex_says_what_the_report_says_without_private_texts(run: Run) -> None:
    run.update_info(user="somebody", git_commit="0123456789abcdef")
    edited = run.info()["experiment"] | {"gate": {"exact": 1.0}}
    run.update_info(experiment=edited)
    assert call("export", str(run.path), "--to", "annex.md") == (0, "annex: annex.md\n", "")
    assert stat.S_IMODE(Path("annex.md").stat().st_mode) == 0o600
    text = Path("annex.md").read_text()
    titles = [line for line in text.splitlines() if line.startswith("## ")]
    assert [title.split(":")[0] for title in titles] == [
        "## What was tested",
        "## How",
        "## By whom, when, and with what",
        "## Result",
        "## Limits that were set",
        "## What is left",
        "## Marks",
    ]
    summary = run.read_document(SUMMARY)
    rows = ScoredRows.read_files(run.rows)
    assert mark(rows, summary.positive_control) in text
    assert run.info()["fingerprint"] in text
    assert "0123456789abcdef" in text
    assert "| exact | " in text
    assert "not kept, or not enough was measured" in text
    assert "safe" not in text
    assert "somebody" not in text
    for file in (run.path / "vault").glob("*.json"):
        batch = json.loads(file.read_text())
        for ids in batch["sequences"]:
            private = outline(stored(run), 2).decode(ids)
            assert private
            assert private not in text


def test_no_cell_of_the_annex_ends_early_or_is_a_tag(run: Run) -> None:
    run.update_info(machine="<script>|\n\\| ![a](https://example.org)")
    assert call("export", str(run.path), "--to", "annex.md")[0] == 0
    text = Path("annex.md").read_text()
    assert r"| machine | &lt;script&gt;\|\\n\\\| ![a\](https://example.org) |" in text
    assert "limits that were set: none" in text.lower()


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["runs/small", "--to", "annex.md", "--texts"], 2, "the annex has no private texts"),
        (["runs/small", "--to", "rows.xlsx"], 2, "end it in .csv or .parquet"),
        (["nowhere", "--to", "rows.csv"], 2, "is not a run directory"),
        (["runs/small", "--to", "no/such/rows.csv"], 1, "no/such"),
    ],
)
def test_what_cannot_be_written_is_one_line(
    run: Run, arguments: list[str], status: int, says: str
) -> None:
    exit_status, _, errors = call("export", *arguments)
    assert exit_status == status
    assert says in errors
    assert errors.count("\n") == 1


def test_texts_that_are_gone_are_not_written(run: Run) -> None:
    assert call("purge", str(run.path))[0] == 0
    assert call("export", str(run.path), "--to", "rows.csv")[0] == 0
    status, _, errors = call("export", str(run.path), "--to", "texts.csv", "--texts")
    assert status == 2
    assert "was purged" in errors
    assert not Path("texts.csv").exists()
