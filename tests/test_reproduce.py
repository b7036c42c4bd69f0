"""Published tables are whole, sweeps fill them, and our figures are printed beside them."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny import toml

from fedleak.config.sent_parameters import selected_parameters
from fedleak.running import sweep
from fedleak.store.lines import Lines
from fedleak.store.run import Run

EXPERIMENTS = Path(__file__).parents[1] / "experiments"
REPRODUCE = runpy.run_path(str(EXPERIMENTS / "reproduce.py"))

LINES = {
    "lamp-table1": 3 * 4 * 4,
    "lamp-table2": 3 * 3 * 4,
    "lamp-table4": 3 * 7,
    "lamp-table5": 4 * 4,
    "lamp-table8": 4,
    "lamp-table9": 3 * 2,
    "lamp-fedavg": 2,
    "dager-table10": 4,
    "partial-table2": 7 * 4,
    "partial-table3": 3 * 9 * 4,
    "partial-table4": 3 * 7 * 3,
}


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[sweep.Sweep]]:
    """Returns the sweeps that fill a table."""
    monkeypatch.setenv("FEDLEAK_ASSETS", "assets")

    def grids(name: str) -> list[sweep.Sweep]:
        table = REPRODUCE["read"](EXPERIMENTS / f"{name}.toml")
        return [sweep.load(path, changes) for path, changes in table.sweeps]

    return grids


def test_every_table_is_here():
    assert {path.stem for path in (EXPERIMENTS / "paper").iterdir()} == LINES.keys()


@pytest.mark.parametrize(("name", "lines"), LINES.items())
def test_a_table_is_whole_and_each_line_is_an_attack_in_a_cell(grids, name, lines):
    table = REPRODUCE["read"](EXPERIMENTS / f"{name}.toml")
    assert len(table.lines) == lines
    for line in table.lines:
        ordered = [line.scores[k] for k in ("rouge2", "rougeL", "rouge1") if k in line.scores]
        assert len(ordered) > 1
        assert [0, *ordered, 100] == sorted([0, *ordered, 100])
    score_ids = [
        id(table.scores(cell.experiment.model_dump(mode="json"), named_attack.name))
        for grid in grids(name)
        for cell in grid.cells
        for named_attack in cell.experiment.attacks
        if named_attack.attack.kind != "probes"
    ]
    assert sorted(score_ids) == sorted(id(line.scores) for line in table.lines)


@pytest.mark.parametrize("name", LINES)
def test_a_sweep_of_a_table_is_the_published_setting(grids, name):
    folders = [grid.name for grid in grids(name)]
    assert len(set(folders)) == len(folders)
    for grid in grids(name):
        for cell in grid.cells:
            table = cell.experiment.federation
            tens = name in ("partial-table3", "partial-table4")
            assert (table.clients, table.rounds) == (10 if tens else 100, 1)
            assert cell.experiment.data.samples >= table.clients * table.batch_size
            known = set() if name == "dager-table10" else {"labels", "lengths", "batch_size"}
            assert set(cell.experiment.threat.knows) == known
            for named_attack in cell.experiment.attacks:
                if named_attack.attack.kind in ("probes", "dager"):
                    continue
                assert named_attack.attack.faithful
                assert named_attack.attack.precision == "float32"
                large = cell.experiment.model.name == "bert-large-uncased"
                assert named_attack.attack.size == (
                    "large" if large and name == "lamp-table1" else "base"
                )


def test_parts_of_the_tables_are_parts_of_a_model(grids, bert_tiny):
    for name in ("partial-table3", "partial-table4"):
        sent = {
            str(cell.experiment.update.share): len(selected_parameters(cell.experiment, bert_tiny))
            for grid in grids(name)
            for cell in grid.cells
        }
        layer = sent["['t1']"]
        assert sent["['t']"] == bert_tiny.num_layers * layer < sent["all"]
        assert {sent[f"['{letter}1']"] for letter in "qofp"} == {1}


# --- printing -------------------------------------------------------------------------------

FAITHFUL = {"preset": "faithful", "steps": 1}
BATCHES = [{"batch_size": size, "clients": 2, "rounds": 1} for size in (1, 2)]
TINY = toml(
    {
        "name": "tiny",
        "threat.knows": ["labels", "lengths", "batch_size"],
        "attack": [
            {"kind": "dlg", **FAITHFUL},
            {"kind": "tag", "name": "other", **FAITHFUL},
        ],
        "sweep": {"model.name": ["builtin/bert-tiny"], "federation": BATCHES},
    }
)

PAPER = """
always = { "model.name" = "builtin/bert-tiny" }
columns = ["federation.batch_size", "attack", "rouge1", "rouge2", "rougeL"]
rows = [[1, "dlg", 99.9, 0.0, 0.0], [3, "dlg", 1.0, 1.0, 1.0]]
[[sweep]]
file = "tiny.toml"
set = ["sweep.federation = [{ batch_size = 1, clients = 2, rounds = 1 }]"]
[[sweep]]
file = "tiny.toml"
set = ["sweep.federation = [{ batch_size = 2, clients = 2, rounds = 1 }]"]
"""


@pytest.fixture
def reproduce(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    in_process: None,
) -> Callable[..., tuple[int, list[list[str]], str]]:
    """Runs the command in an empty folder; returns status, the table's cells and all it said."""
    (tmp_path / "tiny.toml").write_text(TINY)
    monkeypatch.chdir(tmp_path)

    def reproduce(*arguments: str) -> tuple[int, list[list[str]], str]:
        monkeypatch.setattr(sys, "argv", ["reproduce.py", "tiny.toml", *arguments])
        status = REPRODUCE["main"]()
        output = "".join(capsys.readouterr())
        table = [line for line in output.splitlines() if line.startswith("| ")]
        return (
            status,
            [[cell.strip() for cell in line.strip("|").split("|")] for line in table],
            output,
        )

    return reproduce


def test_a_sweep_is_run_once_and_printed_with_what_was_published(reproduce, tmp_path):
    status, (heading, _), output = reproduce("--no-run")
    assert status == 0
    assert "not finished: 2 of 2 cells" in output
    metrics = ["R-1", "R-2", "R-L", "content", "chance"]
    assert heading == ["model", "batch size", "attack", "answers", *metrics]

    status, (_, _, *rows), output = reproduce("--set", "seed=3")
    assert status == 0
    assert "not finished" not in output
    assert [row[:4] for row in rows] == [
        ["builtin/bert-tiny", size, attack, "2 of 2"]
        for size in "12"
        for attack in ("dlg", "other")
    ]
    # The figures are means of what stands in the cell.
    run = next(Run(path) for path in (tmp_path / "runs" / "tiny").glob("*batch_size-1-*"))
    assert run.info()["experiment"]["seed"] == 3
    of_dlg = [row for row in run.rows(Lines("leakage.jsonl", dict)) if row["attack"] == "dlg"]
    fields = ("paper_rouge1", "rougeL", "guess_rougeL")
    paper, content, chance = (sum(row[field] for row in of_dlg) / 2 for field in fields)
    assert rows[0][4].startswith(f"{paper:.1f} [")
    assert rows[0][7].split(" / ")[2] == f"{content:.1f}"
    assert rows[0][8] == f"{chance:.1f}"
    assert paper > content  # [CLS] and [SEP] always match
    assert reproduce("--set", "seed=3")[1][2:] == rows

    (tmp_path / "paper").mkdir()
    (tmp_path / "paper" / "tiny.toml").write_text(PAPER)
    status, (heading, _, *beside), _ = reproduce("--no-run")
    assert heading.count("paper") == 3
    assert [row[:5] for row in beside] == [row[:5] for row in rows]
    assert beside[0][5] == "99.9 above"
    assert beside[0][9] == "0.0 below"
    assert beside[0][7] in ("0.0 inside", "0.0 below")
    assert all(row[5] == row[7] == row[9] == "-" for row in beside[1:])

    other = PAPER.replace("builtin/bert-tiny", "bert-base-uncased")
    (tmp_path / "paper" / "tiny.toml").write_text(other)
    assert reproduce("--no-run")[1][2][5] == "-"

    # What there is of a run that was stopped: here the answer for one client.
    answers = [row for row in run.rows(Lines("reconstructions.jsonl", dict)) if row["client"] == 0]
    run.write_rows(Lines("reconstructions.jsonl", dict), answers)
    run.update_info(status="interrupted")
    (run.path / "leakage.jsonl").unlink()
    status, (_, _, *rows), output = reproduce("--no-run")
    assert status == 0
    assert [row[3] for row in rows] == ["1 of 2", "1 of 2", "2 of 2", "2 of 2"]
    assert "not finished: 1 of 2 cells" in output
    with run.lock():  # it is going on
        assert reproduce("--no-run")[1][2:] == rows


@pytest.mark.parametrize(
    ("change", "says"),
    [("data.sampels=1", "'sampels'"), ('sweep.model.name=["./none"]', "there is no such folder")],
)
def test_a_wrong_setting_is_told_what_is_right(reproduce, tmp_path, change, says):
    status, _, output = reproduce("--set", change)
    assert status == 2
    assert output.startswith("fedleak: cell ") or "\nfedleak: cell " in output
    assert says in output
    assert not (tmp_path / "runs").exists()


def test_a_file_that_is_not_there_is_named(reproduce, tmp_path):
    (tmp_path / "tiny.toml").unlink()
    status, _, output = reproduce()
    assert status == 2
    assert output == "fedleak: experiment file 'tiny.toml': there is no such file\n"


def test_a_sweep_of_families_is_sent_to_its_own_command(reproduce):
    status, _, output = reproduce("--set", 'sweep.family=[{name="none"}]')
    assert status == 2
    assert "use `fedleak sweep tiny.toml`" in output
