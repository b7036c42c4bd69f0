"""The comparison of two versions' results finds whatever is not the same, and nothing else."""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "experiments" / "same_results.py"
NAMES = runpy.run_path(str(SCRIPT))

ROWS = {
    "reconstructions.jsonl": {"status": "recovered", "sequences": [[5, 6]], "seconds": 1.5},
    "leakage.jsonl": {"rougeL": 0.25, "device": "cpu", "facts": {"labels": [0, 1]}},
}

Change = Callable[[list[dict[str, Any]]], object]


def write(folder: Path, file: str = "", change: Change = lambda rows: None) -> Path:
    """Writes a run of two clients and one attack; `change` changes the rows of a file."""
    run = folder / "runs" / "one"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    for name, row in ROWS.items():
        rows = [{"round": 1, "client": c, "attack": "dlg"} | row for c in (0, 1)]
        if name == file:
            change(rows)
        (run / name).write_text("".join(json.dumps(row_to_write) + "\n" for row_to_write in rows))
    return folder


def compare(*arguments: object) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, SCRIPT, "compare", *map(str, arguments)], capture_output=True, text=True
    )
    return done.returncode, done.stdout + done.stderr


def differences(before: Path, after: Path) -> list[str]:
    return list(NAMES["differences"](before, after, NAMES["NEVER_THE_SAME"], {}))


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("reconstructions.jsonl", lambda rows: rows[1].update(seconds=9.0)),
        ("leakage.jsonl", lambda rows: rows[0].update(device="cuda:0", fingerprint="f")),
        ("leakage.jsonl", lambda rows: rows.reverse()),
    ],
    ids=["seconds", "device", "order"],
)
def test_what_no_version_promises_is_no_difference(tmp_path, file, change):
    before, after = write(tmp_path / "before"), write(tmp_path / "after", file, change)
    assert differences(before, after) == []


@pytest.mark.parametrize(
    ("file", "change", "line"),
    [
        (
            "leakage.jsonl",
            lambda rows: rows[1].update(rougeL=0.25000000000000006),
            "runs/one/leakage.jsonl: 1 1 dlg: rougeL: 0.25 -> 0.25000000000000006",
        ),
        (
            "leakage.jsonl",
            lambda rows: rows[0].update(facts={"labels": [1, 0]}),
            "runs/one/leakage.jsonl: 1 0 dlg: facts.labels: [0, 1] -> [1, 0]",
        ),
        (
            "reconstructions.jsonl",
            lambda rows: rows[0].update(sequences=None),
            "runs/one/reconstructions.jsonl: 1 0 dlg: sequences: [[5, 6]] -> null",
        ),
        (
            "reconstructions.jsonl",
            lambda rows: rows.append(rows[0] | {"client": 2}),
            "runs/one/reconstructions.jsonl: 1 2 dlg: the row: null -> ",
        ),
        (
            "leakage.jsonl",
            lambda rows: rows.pop(),
            "runs/one/leakage.jsonl: 1 1 dlg: the row: {",
        ),
    ],
    ids=["number", "nested", "nothing", "more", "fewer"],
)
def test_each_difference_is_one_line(tmp_path, file, change, line):
    before, after = write(tmp_path / "before"), write(tmp_path / "after", file, change)
    (difference,) = differences(before, after)
    assert difference.startswith(line)


def test_a_run_or_a_row_that_is_nowhere_is_a_difference(tmp_path):
    before, after = write(tmp_path / "before"), write(tmp_path / "after")
    (after / "runs" / "one").rename(after / "runs" / "two")
    assert differences(before, after) == [
        f"runs/one: only in {before}",
        f"runs/two: only in {after}",
        "no run is in both folders",
    ]
    both = [write(tmp_path / name, "leakage.jsonl", list.clear) for name in ("a", "b")]
    assert differences(*both) == ["runs/one/leakage.jsonl: no line"]


def test_a_field_that_was_changed_on_purpose_is_renamed_or_ignored(tmp_path):
    def change(rows):
        for row in rows:
            row["rouge_l"] = row.pop("rougeL")

    before, after = write(tmp_path / "before"), write(tmp_path / "after", "leakage.jsonl", change)
    status, output = compare(before, after)
    assert status == 1
    assert "4 differences" in output
    assert "1 0 dlg: rougeL: 0.25 -> null" in output
    for way in (["--renamed", "rougeL=rouge_l"], ["--ignore", "rougeL", "--ignore", "rouge_l"]):
        assert compare(before, after, *way) == (0, "the same\n")


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_two_recordings_of_one_version_are_the_same(tmp_path):
    without = {name: value for name, value in os.environ.items() if name != "FEDLEAK_ASSETS"}
    for name in ("before", "after"):
        command = [sys.executable, SCRIPT, "record", tmp_path / name]
        subprocess.run(command, check=True, capture_output=True, timeout=1200, env=without)
    assert len(list((tmp_path / "before").rglob("run.json"))) == 3
    assert compare(tmp_path / "before", tmp_path / "after") == (0, "the same\n")
