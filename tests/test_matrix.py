"""The matrix of attacks: what its table says is what the runs say, and what is missing is said."""

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import toml

from fedleak.attacks.auto.attack import Auto
from fedleak.attacks.reconstruction import Status
from fedleak.audit.metrics.intervals import Interval
from fedleak.running import sweep
from fedleak.store.records import LEAKAGE
from fedleak.store.run import Run

ROOT = Path(__file__).parents[1]
MATRIX = runpy.run_path(str(ROOT / "experiments" / "matrix.py"))
FILES = sorted((ROOT / "experiments").glob("matrix-*.toml"))
MARKER = MATRIX["MARKER"]


def row(client: int, size: int, exact: float | None, rouge: float | None, seconds: float) -> Any:
    status = Status.ABSTAINED if rouge is None else Status.RECOVERED
    return SimpleNamespace(
        client=client, batch_size=size, exact_match=exact, rougeL=rouge, seconds=seconds,
        status=status,
    )  # fmt: skip


def test_an_update_without_an_answer_counts_as_nothing_read():
    rows = [row(0, 1, 1.0, 100.0, 2.0), row(1, 3, None, None, 4.0)]
    reading = MATRIX["reading"](rows)
    assert (reading.rows, reading.answers, reading.seconds) == (2, 1, 3.0)
    assert reading.exact.mean == pytest.approx(1 / 4)  # texts count, of which the second has three
    assert reading.rougeL.mean == pytest.approx(50.0)
    assert reading.rougeL.low < 50.0 < reading.rougeL.high
    assert MATRIX["reading"]([]) is None
    assert MATRIX["reading"]([row(0, 1, 1.0, 100.0, 1.0), row(1, None, None, None, 1.0)]) is None


def read(exact: tuple[float, float, float], rouge: tuple[float, float, float]) -> Any:
    return MATRIX["Reading"](
        rows=2, answers=2, exact=Interval(*exact), rougeL=Interval(*rouge), seconds=1.0
    )


HALF = read((0.5, 0.2, 0.7), (50.0, 20.0, 70.0))


@pytest.mark.parametrize(
    ("dager", "says"),
    [
        (read((0.5, 0.2, 0.7), (50.0, 20.0, 70.0)), "-"),
        (read((0.4, 0.2, 0.9), (30.0, 20.0, 95.0)), "-"),
        (read((0.6, 0.2, 0.9), (30.0, 20.0, 95.0)), "within: exact 60 of dager"),
        (read((0.4, 0.2, 0.9), (71.0, 69.0, 95.0)), "**below**: ROUGE-L 71 of dager"),
        (
            read((0.8, 0.5, 0.9), (60.0, 20.0, 70.0)),
            "**below**: exact 80 of dager<br>within: ROUGE-L 60 of dager",
        ),
    ],
)
def test_auto_is_below_where_a_single_attack_is_above_its_interval(dager, says):
    lamp = read((0.1, 0.0, 0.2), (10.0, 0.0, 20.0))
    assert MATRIX["shortfall"]({"auto": HALF, "lamp": lamp, "dager": dager}) == says


def test_nothing_is_said_where_auto_or_the_others_were_not_measured():
    assert MATRIX["shortfall"]({"dager": HALF}) == "not measured"
    assert MATRIX["shortfall"]({"auto": HALF}) == "not measured"


ATTACKS = [
    {"kind": "auto", "seconds": 0.2},
    {"kind": "keyspan", "seconds": 0.2},
    {"kind": "dlg", "steps": 2, "starts": 1, "shapes": 1},
]
GRID = (
    toml({"attack": ATTACKS, "name": "grid", "data.max_length": 8})
    + """
[sweep]
design = "one-at-a-time"
"federation.batch_size" = [1, 2]
[[sweep.family]]
name = "none"
[[sweep.family]]
name = "share"
strengths = ["o1"]
set.update.share = ["<strength>"]
without = ["keyspan"]
"""
)


def table(text: str) -> tuple[list[str], list[list[str]]]:
    lines = [line for line in text.partition(MARKER)[2].splitlines() if line.startswith("| ")]
    heading, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines)
    return heading, rows


def test_the_table_is_of_the_runs_and_says_what_is_missing(
    tmp_path, monkeypatch, capsys, in_process
):
    (tmp_path / "grid.toml").write_text(GRID)
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"# By hand\n\n{MARKER}what was there")

    def matrix(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["matrix.py", "grid.toml", "--out", "page.md", *arguments])
        status: int = MATRIX["main"]()
        return status

    assert matrix("--no-run") == 0
    heading, rows = table(page.read_text())
    assert heading == [
        "model", "batch size", "family", "auto", "keyspan", "dlg", "version of auto",
        "best single attack above auto",
    ]  # fmt: skip
    assert [table_row[:3] for table_row in rows] == [
        ["bert-tiny", "1", "none"],
        ["bert-tiny", "2", "none"],
        ["bert-tiny", "1", "share o1"],
    ]
    assert all(set(table_row[3:]) == {"not run"} for table_row in rows)
    assert "0 of 3 cells were run" in page.read_text()

    assert matrix() == 0
    assert page.read_text().startswith(f"# By hand\n\n{MARKER}")
    assert "what was there" not in page.read_text()
    assert "3 of 3 cells were run" in page.read_text()
    heading, rows = table(page.read_text())
    assert rows[2][4] == "cannot"
    assert {table_row[6] for table_row in rows} == {str(Auto.version)}
    for cell, shown in zip(sweep.load(Path("grid.toml")).cells, rows, strict=True):
        leakage_rows = Run(tmp_path / "runs" / "grid" / cell.name).rows(LEAKAGE)
        for attack, words in zip(heading[3:6], shown[3:6], strict=True):
            mine = [leakage_row for leakage_row in leakage_rows if leakage_row.attack == attack]
            if not mine or words.startswith("no answer"):
                assert not any(leakage_row.rougeL for leakage_row in mine)
                continue
            rouge = sum(leakage_row.rougeL or 0.0 for leakage_row in mine) / len(mine)
            exact = sum(
                (leakage_row.exact_match or 0.0) * leakage_row.batch_size for leakage_row in mine
            )
            exact /= sum(leakage_row.batch_size for leakage_row in mine)
            first, second, *_ = (float(number) for number in re.findall(r"(\d+) \[", words))
            assert (first, second) == (round(100 * exact), round(rouge))

    # One cell is gone: the others stay, and its own line, too, if that is wanted.
    lost = sweep.load(Path("grid.toml")).cells[1].name
    Run(tmp_path / "runs" / "grid" / lost).update_info(status="interrupted")
    whole = page.read_text()
    assert matrix("--no-run", "--keep") == 0
    assert page.read_text() == whole
    assert matrix("--no-run") == 0
    assert "2 of 3 cells were run" in page.read_text()
    assert table(page.read_text())[1][1][3:] == ["not run"] * 5
    assert matrix("--no-run", "--full") == 0
    assert "2 of 4 cells were run" in page.read_text()

    page.write_text("somebody's notes")
    assert matrix("--no-run") == 2
    assert "has no line" in capsys.readouterr().err
    assert page.read_text() == "somebody's notes"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_matrix_has_every_value_that_it_claims_and_equal_seconds(path, monkeypatch):
    monkeypatch.setenv("FEDLEAK_ASSETS", "/nowhere")
    grid = sweep.load(path)
    tables_of = [cell.experiment for cell in grid.cells]
    assert {experiment.federation.batch_size for experiment in tables_of} == {1, 2, 4, 8, 16}
    assert {experiment.federation.algorithm for experiment in tables_of} == {"fedsgd", "fedavg"}
    defenses = {
        (table["kind"], *(value for key, value in table.items() if key != "kind"))
        for experiment in tables_of
        for table in experiment.defense
    }
    assert defenses == {
        ("gaussian_noise", 0.3), ("gaussian_noise", 3), ("gaussian_noise", 30), ("mask", 0.9),
        ("prune", 0.99), ("quantize", 8), ("sign",), ("cast", "float16"), ("cast", "bfloat16"),
        ("secure_sum",),
    }  # fmt: skip
    assert {experiment.federation.dropout for experiment in tables_of} == {False, True}
    assert {experiment.model.lora is None for experiment in tables_of} == {False, True}
    assert any(experiment.update.share != "all" for experiment in tables_of)
    (summed,) = [
        experiment for experiment in tables_of if experiment.defense == ({"kind": "secure_sum"},)
    ] or [None]
    assert summed is None or summed.federation.clients_per_round == 4
    seconds = {table["seconds"] for experiment in tables_of for table in experiment.attack}
    assert len(seconds) == 1
    assert "auto" in {table["kind"] for table in tables_of[0].attack}
    full = sweep.load(path, ["sweep.design=all"])
    assert {cell.name for cell in grid.cells} < {cell.name for cell in full.cells}


@pytest.mark.slow
def test_the_matrix_command_runs_its_own_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments = [
        str(ROOT / "experiments" / "matrix-gpt2.toml"),
        *("--out", str(tmp_path / "page.md")),
        *("--set", "sweep.federation.batch_size=[1]"),
        *("--set", 'attack=[{kind="auto", seconds=5.0}, {kind="dager", seconds=5.0}]'),
        *("--set", 'sweep.family=[{name="none"}, {name="sign", set={defense=[{kind="sign"}]}}]'),
    ]
    monkeypatch.setattr(sys, "argv", ["matrix.py", *arguments])
    assert MATRIX["main"]() == 0
    _, rows = table((tmp_path / "page.md").read_text())
    assert len(rows) == 3
    assert not any("not run" in table_row for table_row in rows)
    assert rows[0][4].startswith("100 [")  # auto reads one text of an undefended update


def test_the_committed_table_is_of_these_files(monkeypatch):
    """Not its figures, which take an hour: its lines are the cells of the files."""
    monkeypatch.setenv("FEDLEAK_ASSETS", "/nowhere")
    _, rows = table((ROOT / "docs" / "matrix.md").read_text())
    grids = [sweep.load(path) for path in FILES]
    wanted = list(MATRIX["markdown"](grids))[5:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")][:4] for line in wanted]
    assert [table_row[:4] for table_row in rows] == cells
