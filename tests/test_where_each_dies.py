"""The picture of where reading, membership and canaries end: what it says is what the runs say."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from tiny import toml

from fedleak.config.families import FAMILY
from fedleak.running import sweep
from fedleak.store.run import EVERYONE, Run
from fedleak.store.summaries import SUMMARY

ROOT = Path(__file__).parents[1]
PICTURE = runpy.run_path(str(ROOT / "experiments" / "where_each_dies.py"))
FILE = ROOT / "experiments" / "where-each-dies.toml"
MARKER = PICTURE["MARKER"]


def table(text):
    lines = [line for line in text.partition(MARKER)[2].splitlines() if line.startswith("| ")]
    heading, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines)
    return heading, rows


@pytest.fixture
def draw(tmp_path, monkeypatch, in_process):
    """Runs the command on a sweep of four cells, and returns its exit status."""
    monkeypatch.chdir(tmp_path)
    grid = toml(
        {
            "name": "grid",
            "model": {"name": "builtin/gpt2-tiny", "task": "causal-lm"},
            "data": {"name": "builtin/notes", "samples": 4, "held_out": 40},
            "federation": {"clients": 2, "batch_size": 2},
            "utility": {"rounds": []},
            "attack": [{"kind": "auto", "seconds": 5.0}, {"kind": "membership"}],
        }
    )
    families = FILE.read_text().partition("[[sweep.family]]")[2]
    few = re.sub(r"strengths = .*", "strengths = [0.1]", families)
    Path("grid.toml").write_text(f"{grid}\n[[sweep.family]]{few}")

    def command(*more):
        arguments = ["where_each_dies.py", "grid.toml", "--out", "page.md", *more]
        monkeypatch.setattr(sys, "argv", arguments)
        return PICTURE["main"]()

    return command


def test_what_was_not_run_is_said(draw, capsys):
    assert draw("--no-run") == 0
    assert "3 cells were not run" in Path("page.md").read_text()
    assert not Path("page.svg").exists()
    Path("page.md").write_text("somebody's notes")
    assert draw("--no-run") == 2
    assert "has no line" in capsys.readouterr().err


@pytest.mark.slow
def test_page_and_drawing_are_of_the_runs(draw):
    assert draw() == 0
    _, rows = table(Path("page.md").read_text())
    assert [row[0] for row in rows] == ["none", "0.1"]
    folder = Path("runs", "grid")
    summaries = {}
    for cell in sweep.load(Path("grid.toml")).cells:
        summaries[cell.values[FAMILY]["kind"]] = Run(folder / cell.name).read_document(SUMMARY)
    assert rows[0][1].startswith("100 [")
    assert rows[0][5:] == ["-"] * 4
    for row, name in zip(rows, ("none", "attacks"), strict=True):
        residual = summaries[name].membership.figures_of("membership")
        assert residual.score == "residual"
        assert float(row[3].split()[0]) == pytest.approx(residual.auc.mean, abs=0.005)
    (bound,) = [bound for bound in summaries["canaries"].canary.bounds if bound.client == EVERYONE]
    assert float(rows[1][5]) == pytest.approx(bound.epsilon, rel=0.01)
    assert float(rows[1][6]) == pytest.approx(bound.gaussian, rel=0.01)
    drawn = Path("page.svg").read_text()
    for words in ("noise multiplier", "texts exact", "AUC", "accounted", "f-DP"):
        assert words in drawn
    assert draw("--no-run") == 0
    assert Path("page.svg").read_text() == drawn


def test_the_committed_page_is_of_its_file():
    """Not its figures, which take half an hour: its lines are the strengths of the file."""
    _, rows = table((ROOT / "docs" / "where-each-dies.md").read_text())
    families = [cell.values[FAMILY] for cell in sweep.load(FILE).cells]
    strengths = {family["strength"] for family in families if "strength" in family}
    assert [row[0] for row in rows] == [
        "none",
        *(f"{strength:g}" for strength in sorted(strengths)),
    ]
