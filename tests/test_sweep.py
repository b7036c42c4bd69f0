"""A sweep: the grid and its refusals, cells that resume, sweep.json, the table and the figure."""

import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import tiny
from rich.console import Console
from tiny import call, toml

from fedleak.attacks.reconstruction import Status
from fedleak.config.loading import load, parse
from fedleak.config.tables import WorkersTable
from fedleak.config.wording import difference
from fedleak.report.drawings import chart
from fedleak.report.drawings.sweeps import along_first_key, axis_of, labels, tradeoff
from fedleak.report.tables.sweep import attacks_table
from fedleak.report.terminal.table import print_table
from fedleak.running import preparation, sweep
from fedleak.store import summaries
from fedleak.store.lines import Lines
from fedleak.store.provenance import unsealed
from fedleak.store.records import Guarantee, Utility
from fedleak.store.run import Run
from fedleak.store.summaries import (
    AttackSummary,
    Baseline,
    CellSummary,
    Estimate,
    MembershipFigures,
    MembershipSummary,
    SweepSummary,
)
from fedleak.util import processes
from fedleak.util.errors import ConfigError

BASE = toml({"name": "grid", "federation.batch_size": None})
SWEEP = BASE + '[sweep]\n"federation.batch_size" = [1, 2]\n'
CELLS = ["federation.batch_size=1", "federation.batch_size=2"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write(here: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = here / "grid.toml"
        path.write_text(text)
        return path

    return write


def read(path: Path) -> Any:
    return json.loads(path.read_text())


# --- the grid -------------------------------------------------------------------------------


def test_cells_are_the_product_in_the_files_order_and_differ_by_swept_keys_alone(write):
    text = BASE + '[sweep]\nseed = [0, 1]\n"update.share" = [["query"], "all"]\n'
    grid = sweep.load(write(text), ["federation.rounds=2"])
    assert list(grid.axes) == ["seed", "update.share"]
    values = [(cell.experiment.seed, cell.experiment.update.share) for cell in grid.cells]
    assert values == list(itertools.product([0, 1], [["query"], "all"]))
    assert [cell.values["seed"] for cell in grid.cells] == [0, 0, 1, 1]
    base = load(write(BASE), ["federation.rounds=2"]).model_dump(mode="json")
    for cell in grid.cells:
        changed = difference(base, cell.experiment.model_dump(mode="json"))
        assert {line.split(":")[0] for line in changed} <= {"seed", "update.share"}


def test_quoted_and_plain_keys_mean_the_same_also_from_the_command_line(write):
    quoted = sweep.load(write(SWEEP))
    plain = SWEEP.replace('"federation.batch_size"', "federation.batch_size")
    assert sweep.load(write(plain)) == quoted
    assert sweep.load(write(BASE), ["sweep.federation.batch_size=[1, 2]"]) == quoted


def test_one_at_a_time_has_the_cells_that_differ_from_the_first_in_one_key(write):
    grid = '"federation.batch_size" = [2, 1, 4]\nseed = [0, 1]\n"update.share" = ["all", ["q1"]]\n'
    full = sweep.load(write(f"{BASE}[sweep]\n{grid}"))
    reduced = sweep.load(write(f'{BASE}[sweep]\ndesign = "one-at-a-time"\n{grid}'))
    base = full.cells[0].values

    def moved(cell):
        return sum(cell.values[key] != base[key] for key in base)

    assert {cell.name for cell in reduced.cells} == {c.name for c in full.cells if moved(c) <= 1}
    assert len(reduced.cells) == 1 + 2 + 1 + 1
    assert reduced.cells[0] == full.cells[0]
    # The same folders, so what ran goes into the full grid.
    again = sweep.load(
        write(f'{BASE}[sweep]\ndesign = "one-at-a-time"\n{grid}'), ["sweep.design=all"]
    )
    assert again == full


FAMILIES = """
[sweep]
seed = [0, 1]
[[sweep.family]]
name = "none"
[[sweep.family]]
name = "mask"
unit = "share set to zero"
strengths = [0.5, 0.9]
set = { defense = [{ kind = "mask", fraction = "<strength>" }], federation.learning_rate = 0.5 }
[[sweep.family]]
name = "share"
strengths = ["q1", "o1"]
set.update.share = ["<strength>"]
without = ["dager", "second"]
"""
ATTACKS = "attack = [{kind='dager'}, {kind='dlg'}, {kind='dlg', name='second'}]\n"
WITH_ATTACKS = BASE.replace("attack = []\n", ATTACKS)


def test_a_family_sets_its_keys_with_each_strength_and_lacks_the_attacks_it_is_without(write):
    grid = sweep.load(write(WITH_ATTACKS + FAMILIES))
    assert list(grid.axes) == ["seed", "family"]
    assert grid.units == {"mask": "share set to zero"}
    made = [
        (
            cell.values["family"].get("strength"),
            [table["fraction"] for table in cell.experiment.defense],
            cell.experiment.federation.learning_rate,
            cell.experiment.update.share,
            [
                named_attack.name
                for named_attack in cell.experiment.attacks
                if named_attack.name != "probes"
            ],
        )
        for cell in grid.cells
    ]
    every = ["dager", "dlg", "second"]
    assert made == 2 * [
        (None, [], 0.1, "all", every),
        (0.5, [0.5], 0.5, "all", every),
        (0.9, [0.9], 0.5, "all", every),
        ("q1", [], 0.1, ["q1"], ["dlg"]),
        ("o1", [], 0.1, ["o1"], ["dlg"]),
    ]
    names = [cell.name for cell in grid.cells[:4]]
    assert names[1].startswith("seed=0,family=mask-strength-0.5-")
    assert len(set(names)) == 4


NOISE = [{"kind": "gaussian_noise", "sigma": 1e-4}]


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"federation.batch_size": 4, "seed": 1}, "federation.batch_size=4,seed=1"),
        ({"federation.learning_rate": 1e-05}, "federation.learning_rate=1e-05"),
        ({"federation.dropout": True}, "federation.dropout=true"),
        ({"update.share": "all"}, "update.share=all"),
        ({"defense": []}, "defense=none"),
        ({"defense": NOISE}, r"defense=gaussian_noise-sigma-0.0001-[0-9a-f]{6}"),
        ({"model.name": "builtin/bert-tiny"}, r"model.name=builtin-bert-tiny-[0-9a-f]{6}"),
        ({"update.share": ["all"]}, r"update.share=all-[0-9a-f]{6}"),
        ({"data.name": "../ü"}, r"data.name=[.]{2}-[0-9a-f]{6}"),
    ],
)
def test_a_cells_folder_is_readable_and_safe(values, name):
    assert re.fullmatch(name.replace("+", "[+]"), sweep.cell_name(values))
    assert sweep.cell_name(values) == sweep.cell_name(dict(values))


def test_long_names_are_cut_and_still_differ():
    keys = [f"table.a_rather_long_key_{i}" for i in range(12)]
    names = {sweep.cell_name(dict.fromkeys(keys, value) | {"z": value}) for value in (1, 2)}
    assert len(names) == 2
    assert max(map(len, names)) < 255


BAD = [
    ('"federation.batch_sizes" = [1]', ["batch_sizes=1'", "[federation]", "'batch_size'"]),
    ("federation.batch_size = 4", ["sweep.federation.batch_size = 4", "list the values"]),
    ("seed = []", ["sweep.seed = []", "at least one"]),
    ("", ["sweep = {}", "[1, 2, 4]"]),
    ('name = ["a", "b"]', ["sweep.name", "whole sweep"]),
    (
        f'seed = {list(range(100))}\n"federation.rounds" = {list(range(1, 31))}',
        ["100 x 30 values are 3,000 cells", "at most 2,000", "list fewer"],
    ),
    ('"threat/knows" = [["labels"]]', ["cell", "unknown key 'threat/knows'"]),
    ("seed = [1, 1]", ["two cells", "seed=1", "each value once"]),
    ("seed = [0, -1]", ["cell 'seed=-1'", "greater than or equal to 0"]),
    ('"attack.0.steps" = [1]', ["cell", "attack.0.steps", "'attack' is not a table"]),
    ("defense = [[{kind='mask'}]]", ["cell 'defense=mask-", "fraction is missing"]),
    ("design = 'half'\nseed = [1]", ["sweep.design = 'half'", "all, one-at-a-time"]),
    ("family = 3", ["sweep.family = 3", "[[sweep.family]]"]),
    ("family = [{}]", ["sweep.family[0]", "name is missing"]),
    ("family = [{name='a', set={seed=1}, x=1}]", ["sweep.family[0]", "'x'"]),
    ("family = [{name='none', set={seed=1}}]", ["family 'none', and no other, sets nothing"]),
    ("family = [{name='a'}]", ["family 'none', and no other, sets nothing"]),
    (
        "family = [{name='a', strengths=[1], set={seed=1}}]",
        ["sweep.family[0]", "'<strength>' where they are set"],
    ),
    ("family = [{name='a', set={seed='<strength>'}}]", ["has strengths, and '<strength>'"]),
    (
        "family = [{name='a', set={seed=1}, without=['tag']}]",
        ["cell 'family=a-", "without 'tag'", "no attack of the file"],
    ),
    ("family = [{name='none'}, {name='none'}]", ["two cells", "family=none"]),
    ("family = [{name='a', strengths=[0.5], set={sed='<strength>'}}]", ["cell 'family=a", "'sed'"]),
    (
        f"family = [{{name='a', strengths={list(range(3000))}, set={{seed='<strength>'}}}}]",
        ["3,000 cells", "at most 2,000"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "words"), BAD, ids=lambda value: str(value)[:40])
def test_a_bad_sweep_is_refused_with_its_key_or_cell(write, lines, words):
    text = BASE.replace("attack = []", "attack = [{kind='dlg'}]")
    with pytest.raises(ConfigError) as caught:
        sweep.load(write(f"{text}[sweep]\n{lines}\n"))
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_each_command_sends_you_to_the_other(write, here):
    write(SWEEP)
    status, _, errors = call("run", "grid.toml")
    assert status == 2
    assert "use `fedleak sweep grid.toml`" in errors
    write(BASE)
    status, _, errors = call("sweep", "grid.toml")
    assert status == 2
    assert "use `fedleak run grid.toml`" in errors
    assert not (here / "runs").exists()


def test_a_swept_key_cannot_be_set_beside(write):
    with pytest.raises(ConfigError, match=r"federation\.batch_size is swept"):
        sweep.load(write(SWEEP), ["federation.batch_size=3"])


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        # Only the data and the model tell that these cannot work.
        ('"federation.clients" = [2, 50]', ["cell 'federation.clients=50'", "no data"]),
        ('"update.share" = ["all", ["poller"]]', ["cell 'update.share=poller-", "poller"]),
    ],
)
def test_a_cell_that_cannot_work_is_refused_before_anything_starts(write, here, lines, words):
    write(f"{BASE}[sweep]\n{lines}\n")
    status, _, errors = call("sweep", "grid.toml")
    assert status == 2
    assert errors.count("\n") == 1
    assert [word for word in words if word not in errors] == []
    assert not (here / "runs").exists()


# --- running --------------------------------------------------------------------------------


def stamps(folder: Path) -> dict[str, int]:
    """Returns when each file of a run was written."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in files}


def test_a_sweep_is_collected_drawn_and_not_done_twice(write, here):
    write(SWEEP)
    status, text, errors = call("sweep", "grid.toml")
    assert status == 0, errors
    assert "1 of 2: federation.batch_size=1" in text
    assert "no" in text.split()
    folder = here / "runs" / "grid"
    collected = read(folder / "sweep.json")
    assert collected["schema_version"] == 2
    assert collected["name"] == "grid"
    assert collected["axes"] == {"federation.batch_size": [1, 2]}
    assert [row["cell"] for row in collected["cells"]] == CELLS
    for row, size in zip(collected["cells"], (1, 2), strict=True):
        summary = read(folder / row["cell"] / "summary.json")
        assert row["values"] == {"federation.batch_size": size}
        assert row["status"] == "finished"
        assert row["attacks"] == summary["attacks"]
        assert row["attacks"]["probes"]["token_recall"]["mean"] > 0.5
        assert row["utility"] == summary["utility"]
        assert (
            read(folder / row["cell"] / "run.json")["experiment"]["federation"]["batch_size"]
            == size
        )
    drawn = (folder / "sweep.svg").read_text()
    for words in ("federation.batch_size", "tokens found, %", "probes", "no update"):
        assert words in drawn

    before = [stamps(folder / cell) for cell in CELLS]
    status, text, _ = call("sweep", "grid.toml")
    assert status == 0
    assert "of 2" not in text
    assert [stamps(folder / cell) for cell in CELLS] == before
    assert read(folder / "sweep.json") == collected
    assert [cell.cell for cell in Run(folder).read_document(summaries.SWEEP).cells] == CELLS
    assert (folder / "sweep.svg").read_text() == drawn

    # Another value is one more cell; what else is changed is another experiment.
    write(SWEEP.replace("[1, 2]", "[1, 4, 2]"))
    assert call("sweep", "grid.toml")[0] == 0
    assert [row["status"] for row in read(folder / "sweep.json")["cells"]] == ["finished"] * 3
    assert [stamps(folder / cell) for cell in CELLS] == before
    status, _, errors = call("sweep", "grid.toml", "--set", "federation.rounds=2")
    assert status == 2
    assert "cell 'federation.batch_size=1'" in errors
    assert "federation.rounds: 1 -> 2" in errors

    # A single run of this name would mix with the cells.
    write(BASE)
    status, _, errors = call("run", "grid.toml")
    assert status == 2
    assert "holds a sweep" in errors
    assert call("run", "grid.toml", "--fresh")[0] == 0
    write(SWEEP)
    status, _, errors = call("sweep", "grid.toml")
    assert status == 2
    assert "holds a single run" in errors
    assert len(list((here / "runs").iterdir())) == 2


@pytest.mark.parametrize("jobs", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_cell_that_fails_is_named_and_the_others_are_done(write, here, jobs):
    write(SWEEP)
    folder = here / "runs" / "grid"
    with Run(folder / CELLS[0]).lock():
        status, text, errors = call("sweep", "grid.toml", "--jobs", jobs)
    assert status == 1
    assert (f"1 of 2 failed: {CELLS[0]}" in text) == (jobs == "2")
    assert "1 of 2 cells failed" in errors
    assert f"cell '{CELLS[0]}'" in errors
    assert "is in use" in errors
    assert "new" in text
    rows = read(folder / "sweep.json")["cells"]
    assert [(row["status"], sorted(row["attacks"])) for row in rows] == [
        ("new", []),
        ("finished", ["probes"]),
    ]
    before = stamps(folder / CELLS[1])
    assert call("sweep", "grid.toml")[0] == 0
    assert stamps(folder / CELLS[1]) == before
    assert [row["status"] for row in read(folder / "sweep.json")["cells"]] == ["finished"] * 2


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_a_cell_that_breaks_is_named_and_the_others_are_done(write, here, jobs, monkeypatch):
    """Also where the fault is none that fedleak foresees."""
    write(SWEEP)
    train = sweep.pipeline.carry_out

    def carry_out(run, *arguments, **more):
        if run.path.name == CELLS[0]:
            raise MemoryError("no room")
        return train(run, *arguments, **more)

    def side_by_side(calls, at_once, started, ended):  # here, so that the patch counts
        for name, start_call in calls.items():
            started(name)
            ended(name, start_call(0))

    monkeypatch.setattr(sweep.pipeline, "carry_out", carry_out)
    monkeypatch.setattr(processes, "side_by_side", side_by_side)
    status, _, errors = call("sweep", "grid.toml", "--jobs", jobs)
    assert status == 1
    assert f"1 of 2 cells failed (cell '{CELLS[0]}': MemoryError: no room)" in errors
    rows = read(here / "runs" / "grid" / "sweep.json")["cells"]
    assert [sorted(row["attacks"]) for row in rows] == [[], ["probes"]]
    log = (here / "runs" / "grid" / "log.txt").read_text()
    assert f"fedleak.running.sweep: cell {CELLS[0]} failed\nTraceback" in log
    assert "MemoryError: no room" in log


def runs_of(grid: sweep.Sweep) -> list[Run]:
    return [grid.run(cell) for cell in grid.cells]


def results(folder: Path) -> dict[str, Any]:
    """Returns what a cell found out, without what a clock or a device wrote."""
    names = ("reconstructions.jsonl", "leakage.jsonl", "utility.jsonl")
    rows_by_file: dict[str, Any] = {
        name: sorted(
            json.dumps(row | {"seconds": None, "device": None, "seal": None})
            for row in Run(folder).rows(Lines(name, dict))
        )
        for name in names
    }
    tensors = [*folder.glob("captures/*"), *folder.glob("models/*")]
    return rows_by_file | {str(path.relative_to(folder)): path.read_bytes() for path in tensors}


def test_cells_that_differ_in_attacks_alone_are_trained_once(write, here):
    lists: list[Any] = [[], [tiny.DLG]]
    write(toml({"name": "grid", "attack": None, "sweep.attack": lists}))
    first, second = runs_of(sweep.load(here / "grid.toml"))
    torn = second.path.with_name(f".{second.path.name}") / "models"  # a command was killed there
    torn.mkdir(parents=True)
    (torn / "r0001.safetensors").write_bytes(b"torn")
    assert call("sweep", "grid.toml")[::2] == (0, "")
    for file in first.path.glob("captures/*.safetensors"):
        assert file.samefile(second.path / "captures" / file.name)
    (here / "alone.toml").write_text(toml({"name": "alone", "attack": lists[1]}))
    assert call("run", "alone.toml")[0] == 0
    alone = results(here / "runs" / "alone")
    assert results(second.path) == alone
    assert len(alone["leakage.jsonl"]) == 2 * len(results(first.path)["leakage.jsonl"]) > 0
    assert unsealed(second) == []
    assert not torn.exists()


def test_what_is_trained_otherwise_or_not_all_kept_is_not_shared():
    plain = parse(tiny.tables())

    def alike(**tables: Any) -> bool:
        return preparation.trains_alike(plain, parse(tiny.tables(tables)))

    assert alike(attack=[tiny.DLG], gate={"exact": 0.1}, threat={"knows": ["labels"]})
    assert not alike(threat={"rounds": [1]})
    assert not alike(seed=9)
    deletes = parse(tiny.tables({"audit.keep": "none"}))
    assert not preparation.trains_alike(deletes, deletes)


@pytest.mark.slow
def test_cells_at_once_find_what_they_find_one_after_the_other(write, here):
    write(SWEEP.replace("attack = []", 'attack = [{kind = "dlg", steps = 2}]'))
    status, text, errors = call("sweep", "grid.toml", "--jobs", "2")
    assert status == 0, errors
    lines = [
        f"{i} of 2 {event}: {cell}"
        for i, cell in enumerate(CELLS, 1)
        for event in ("started", "finished")
    ]
    assert [line for line in lines if line not in text.splitlines()] == []
    assert "attacks" not in text  # no bars
    assert call("sweep", "grid.toml", "--jobs", "1", "--set", "name=alone")[0] == 0
    for cell in CELLS:
        at_once, alone = (results(here / "runs" / name / cell) for name in ("grid", "alone"))
        assert len(alone["leakage.jsonl"]) == 4
        assert at_once == alone
    cell_rows = []
    for name in ("grid", "alone"):
        cells = read(here / "runs" / name / "sweep.json")["cells"]
        assert [row["status"] for row in cells] == ["finished"] * 2
        for figures in (figures for row in cells for figures in row["attacks"].values()):
            assert figures.pop("seconds") > 0
            figures.pop("seconds_per_update")
        cell_rows.append(cells)
    assert cell_rows[0] == cell_rows[1]
    assert (here / "runs" / "grid" / "tradeoff.svg").is_file()


def test_jobs_divide_the_devices_and_share_them_only_if_there_are_too_few():
    three = ["cuda:0", "cuda:1", "cuda:2"]
    assert [sweep.devices_of_job(three, 2, place) for place in (0, 1)] == [
        ["cuda:0", "cuda:2"],
        ["cuda:1"],
    ]
    assert [sweep.devices_of_job(three, 4, place) for place in range(4)] == [
        [device] for device in [*three, three[0]]
    ]
    assert [sweep.devices_of_job(["cpu"], 2, place) for place in (0, 1)] == [["cpu"], ["cpu"]]


@pytest.mark.parametrize(
    ("on", "cores", "wanted", "jobs"),
    [
        (["cpu"], 1, None, 1),
        (["cpu"], 7, None, 3),
        (["cpu"], 64, None, 5),
        (["cpu"], 2, 4, 4),
        (["cpu"], 2, 9, 5),
        (["cuda:0", "cuda:1"], 64, None, 2),
        (["cuda:0", "cuda:1"], 64, 1, 1),
    ],
)
def test_as_many_cells_at_once_as_gpus_and_cores_allow(monkeypatch, on, cores, wanted, jobs):
    monkeypatch.setattr(sweep, "devices", lambda wanted: on)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    workers = WorkersTable()
    plan = SimpleNamespace(experiment=SimpleNamespace(workers=workers))
    assert sweep.jobs(dict.fromkeys("abcde", plan), wanted) == jobs
    assert sweep.jobs({}, wanted) == 1


def test_a_process_that_dies_is_a_failure_of_its_own_call_only():
    ended: dict[str, str | None] = {}
    started: list[str] = []
    # They are passed the number of their place, 0: an exit status, and a key that is not there.
    calls = {"killed": partial(os._exit), "done": partial({}.get)}
    processes.side_by_side(calls, 1, started.append, ended.__setitem__)
    assert started == list(calls)
    assert ended["done"] is None
    assert "exit status 0 and no answer" in (ended["killed"] or "")


COMMAND = [sys.executable, "-c", "from fedleak.cli import app; app()", "sweep", "grid.toml"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_sweep_goes_on_where_it_stopped(write, here, number):
    rounds = 12  # long enough that the signal comes before the end
    write(SWEEP.replace("rounds = 1", f"rounds = {rounds}"))
    folder = here / "runs" / "grid"
    process = subprocess.Popen(
        COMMAND, cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)
    )
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if (folder / CELLS[1] / "captures").exists():
            process.send_signal(number)
            break
        time.sleep(0.02)
    _, error_output = process.communicate(timeout=60)
    assert process.returncode == (-signal.SIGKILL if number == signal.SIGKILL else 130), (
        error_output
    )
    assert Run(folder / CELLS[1]).info()["status"] in ("running", "interrupted")
    before = stamps(folder / CELLS[0])
    assert "summary.json" in before

    status, text, errors = call("sweep", "grid.toml")
    assert status == 0, errors
    assert "2 of 2: federation.batch_size=2" in text
    assert "1 of 2: " not in text
    assert stamps(folder / CELLS[0]) == before
    assert [row["status"] for row in read(folder / "sweep.json")["cells"]] == ["finished"] * 2
    answers = Run(folder / CELLS[1]).rows(Lines("reconstructions.jsonl", dict))
    assert sorted((row["round"], row["client"]) for row in answers) == list(
        itertools.product(range(1, rounds + 1), [0, 1])
    )


@pytest.mark.slow
def test_cells_at_once_end_with_the_command_and_go_on_where_they_stopped(write, here):
    rounds = 30  # long enough that the signals come before the end
    write(SWEEP.replace("rounds = 1", f"rounds = {rounds}"))
    cells = [Run(here / "runs" / "grid" / cell) for cell in CELLS]

    def statuses() -> list[str]:
        return [cell.info()["status"] if cell.exists() else "new" for cell in cells]

    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)):
        for cell in cells:
            if cell.exists() and cell.info()["status"] == "running":
                cell.update_info(status="killed")  # else we could not tell when it goes on
        process = subprocess.Popen(
            [*COMMAND, "--jobs", "2"],
            cwd=here,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        deadline = time.monotonic() + 120
        while statuses() != ["running"] * 2 and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        begun = psutil.Process(process.pid).children(recursive=True)
        assert len(begun) >= 4  # two cells, and a worker of each
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == code
        assert "Traceback" not in errors
        _, alive = psutil.wait_procs(begun, timeout=15)
        assert not alive
        assert statuses() == ["interrupted" if number == signal.SIGINT else "running"] * 2

    status, _, errors = call("sweep", "grid.toml", "--jobs", "2")
    assert status == 0, errors
    assert statuses() == ["finished"] * 2
    for cell in cells:
        answers = cell.rows(Lines("reconstructions.jsonl", dict))
        assert sorted((row["round"], row["client"]) for row in answers) == list(
            itertools.product(range(1, rounds + 1), [0, 1])
        )


# --- the figure -----------------------------------------------------------------------------


def interval(mean: float) -> Estimate:
    return Estimate(mean=mean, low=0.9 * mean, high=min(1.0, 1.1 * mean))


def summary(**measured: Any) -> AttackSummary:
    """Returns a summary in which nothing else is measured."""
    rest = {
        "rows": 8, "status": {Status.RECOVERED: 6, Status.FAILED: 2}, "verified": 0, "knows": (),
        "sequences": 0, "clients": 0, "facts": {}, "seconds": 1.0,
    }  # fmt: skip
    return AttackSummary(**dict.fromkeys(AttackSummary.model_fields) | rest | measured)


def changed(value: Any, **fields: Any) -> Any:
    """Returns a record with other values of some fields."""
    return value.model_copy(update=fields)


def collected(axes: dict[str, list[Any]]) -> SweepSummary:
    """Returns the summary of a sweep of an attack on sequences and one on tokens."""
    cells = []
    for combination in itertools.product(*axes.values()):
        tokens = {
            "token_recall": interval(0.8),
            "guess_rougeL": interval(0.1),
            "guess_token_recall": interval(0.1),
        }
        attacks = {
            "dager": summary(exact_match=interval(0.5), rougeL=interval(0.5), **tokens),
            "probes": summary(**tokens),
        }
        values = dict(zip(axes, combination, strict=True))
        name = sweep.cell_name(values)
        cells.append(CellSummary(cell=name, values=values, status="finished", attacks=attacks))
    return SweepSummary(name="grid", axes=axes, cells=tuple(cells))


def with_cells(
    sweep_summary: SweepSummary, change: Callable[[int, CellSummary], CellSummary]
) -> Any:
    """Returns a sweep with other cells."""
    return changed(
        sweep_summary, cells=tuple(change(i, cell) for i, cell in enumerate(sweep_summary.cells))
    )


def test_a_line_per_attack_and_combination_and_a_panel_per_measured_figure(tmp_path):
    axes = {"defense": [[], NOISE], "seed": [0, 1]}
    chart.write(along_first_key(collected(axes)), tmp_path / "sweep.svg")
    drawn = (tmp_path / "sweep.svg").read_text()
    for words in (
        "texts exact, %", "ROUGE-L", "tokens found, %", "no update", "dager, seed 0",
        "dager, seed 1", "probes, seed 1", "none", "gaussian_noise",
    ):  # fmt: skip
        assert f">{words}<" in drawn
    chart.write(along_first_key(collected(axes)), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == drawn


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([1, 2, 4, 8, 16], "linear"),
        ([16, 1, 4], "linear"),
        ([0.0, 0.5, 1.0], "linear"),
        ([1e-5, 1e-3, 1e-1], "log"),
        ([0.0, 1e-5, 1e-3], "even"),
        (["a", "b"], "even"),
        ([1, "b"], "even"),
        ([True, False], "even"),
        ([3], "linear"),
    ],
)
def test_the_x_axis_suits_the_values(values, scale):
    assert axis_of(values)[0] == scale


def rows_of(panel: dict[str, Any], mark: str, series: str) -> list[dict[str, Any]]:
    """Returns the rows of a series that a mark draws in a panel."""
    layers = [layer for layer in panel["layer"] if layer["mark"]["type"] == mark]
    values = [row for layer in layers for row in layer["data"]["values"]]
    return [row for row in values if row["series"] == series]


def x_axis(panel: dict[str, Any]) -> dict[str, Any]:
    return next(layer["encoding"]["x"] for layer in panel["layer"])


def test_no_line_runs_through_a_cell_without_an_answer():
    nothing = {"dager": summary(), "probes": summary()}
    sweep_summary = with_cells(
        collected({"federation.batch_size": [1, 2, 4, 8]}),
        # The last one is not finished: nothing is known of an answer.
        lambda i, cell: changed(cell, attacks=(cell.attacks, nothing, cell.attacks, {})[i]),
    )
    exact, *_ = along_first_key(sweep_summary)["concat"]
    line = rows_of(exact, "line", "dager")
    assert [row["x"] for row in line] == [1, 2, 4, 8]
    assert [row["y"] is None for row in line] == [False, True, False, True]
    [no_answer] = rows_of(exact, "point", chart.silent("dager"))
    assert (no_answer["x"], no_answer["y"]) == (2, chart.NOWHERE)
    assert rows_of(exact, "line", chart.silent("dager")) == []


def test_between_two_defenses_there_is_no_line():
    sweep_summary = collected({"defense": [[], NOISE, [{"kind": "sign"}]]})
    for panel in along_first_key(sweep_summary)["concat"]:
        assert "line" not in [layer["mark"]["type"] for layer in panel["layer"]]
        shifts = {row["shift"] for row in rows_of(panel, "point", "dager")}
        assert not shifts & {row["shift"] for row in rows_of(panel, "point", "probes")}


def test_words_below_the_axis_do_not_overlap():
    kinds = ("dp_sgd", "local_dp", "gaussian_noise", "laplace_noise")
    defenses = [[], *([{"kind": kind, "noise_multiplier": 1.0, "max_norm": 0.5}] for kind in kinds)]
    for values, angle in ((defenses, -90), ([[], [{"kind": "sign"}]], 0)):
        for panel in along_first_key(collected({"defense": values}))["concat"]:
            x = x_axis(panel)
            assert x["axis"]["labelAngle"] == angle
            assert max(word.count("\n") for word in x["scale"]["domain"]) < 4  # of 60 pixels


def test_nothing_measured_is_no_figure(tmp_path):
    nothing = with_cells(collected({"seed": [0]}), lambda _, cell: changed(cell, attacks={}))
    chart.write(along_first_key(nothing), tmp_path / "sweep.svg")
    assert not (tmp_path / "sweep.svg").exists()


# --- the trade-off ----------------------------------------------------------------------------


def traded(
    measure: str,
    utilities: list[float | None],
    epsilons: list[float | str | None],
    multipliers: list[float | None],
) -> SweepSummary:
    """Returns a sweep with utility and privacy; the attack reads 10, 20, ... of 100."""

    def cell_of(i: int, cell: CellSummary) -> CellSummary:
        n, utility, epsilon = i + 1, utilities[i], epsilons[i]
        dager = changed(
            cell.attacks["dager"],
            rougeL=Estimate(mean=10.0 * n, low=9.0 * n, high=12.0 * n),
            guess_rougeL=interval(7.0),
        )
        probes = changed(cell.attacks["probes"], rougeL=None, guess_rougeL=None)
        cell = changed(cell, attacks={"dager": dager, "probes": probes})
        if utility is not None:
            cell = changed(
                cell,
                utility=Utility(round=1, loss=1.0, **{measure: utility}),
                utility_reference=Baseline(steps=0, loss=1.0, **{measure: 0.75}),
            )
        if epsilon is not None:
            guarantee = Guarantee(
                epsilon=epsilon,
                delta=1e-5,
                accountant="rdp",
                unit="example",
                neighbouring="replace one, given n",
                noise_multiplier=multipliers[i],
            )
            cell = changed(cell, privacy=guarantee)
        return cell

    return with_cells(collected({"seed": list(range(len(utilities)))}), cell_of)


CLASSES = ("mcc", [0.6, 0.5, 0.0, None], ["none", 31.25, 3.14159, 0.5], [None, 0.25, 1.0, 4.0])


@pytest.mark.slow
def test_a_sweep_of_families_draws_its_frontier(write, here):
    families = """
[[sweep.family]]
name = "none"
[[sweep.family]]
name = "sign"
set.defense = [{ kind = "sign" }]
"""
    write(BASE.replace("attack = []", "attack = [{kind='dager'}]") + families)
    status, _, _ = call("sweep", "grid.toml", "--jobs", "1")
    assert status == 0
    drawn = (here / "runs" / "grid" / "frontier.svg").read_text()
    for words in ("sign", "undefended", "texts exact, %", "MCC of the trained model"):
        assert f">{words}<" in drawn
    status, _, _ = call("report", "runs/grid")
    assert status == 0
    assert "Where each kind of leak ends" in (here / "runs" / "grid" / "report.html").read_text()


def test_the_tradeoff_draws_each_attack_at_its_utility_and_at_its_epsilon(tmp_path):
    drawing = tradeoff(traded(*CLASSES))
    assert drawing is not None
    by_utility, by_epsilon, without = drawing["concat"]
    x = x_axis(by_epsilon)
    assert (x["title"], x["scale"]["type"]) == ("epsilon", "log")
    for panel, read_at in (
        (by_utility, {0.6: 1, 0.5: 2, 0.0: 3}),
        (by_epsilon, {31.25: 2, 3.14159: 3, 0.5: 4}),
        (without, {"none": 1}),
    ):
        drawn = rows_of(panel, "point", "dager")  # probes read no texts
        assert {row["x"]: row["y"] for row in drawn} == {x: 10.0 * n for x, n in read_at.items()}
        assert [(row["low"], row["high"]) for row in drawn] == [
            (9.0 * n, 12.0 * n) for n in read_at.values()
        ]
        controls = rows_of(panel, "point", "no update")
        assert {row["x"]: row["y"] for row in controls} == dict.fromkeys(read_at, 7.0)
        texts = {row["x"]: row["text"] for row in rows_of(panel, "text", "dager")}
        assert texts == {x: str(n) for x, n in read_at.items()}
    [reference] = rows_of(by_utility, "rule", "central, undefended")
    assert reference["x"] == 0.75

    chart.write(drawing, tmp_path / "tradeoff.svg")
    drawn = (tmp_path / "tradeoff.svg").read_text()
    for words in (
        "MCC",
        "ROUGE-L",
        "epsilon",
        "none",
        "dager",
        "no update",
        "cells by seed",
        "4: 3",
    ):
        assert f">{words}<" in drawn
    chart.write(tradeoff(traded(*CLASSES)), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == drawn


def test_without_a_guarantee_anywhere_there_is_no_axis_of_epsilons():
    drawing = tradeoff(traded("perplexity", [20.0, 9000.0], ["none"] * 2, [None] * 2))
    assert drawing is not None
    [panel] = drawing["concat"]
    assert (x_axis(panel)["title"], x_axis(panel)["scale"]["type"]) == ("perplexity", "log")


def test_one_cell_with_utility_trades_nothing_off(tmp_path):
    path = tmp_path / "tradeoff.svg"
    path.touch()
    chart.write(tradeoff(traded("mcc", [0.5, None], [1.0, 2.0], [1.0, 0.5])), path)
    assert not path.exists()
    assert tradeoff(collected({"seed": [0, 1]})) is None  # of before there was a trade-off


def test_labels_leave_out_what_is_the_same_in_all_cells():
    noise = [
        [],
        *([{"kind": "dp", "noise": noise_scale, "clip": 1.0}] for noise_scale in (0.5, 2.0)),
    ]
    cells = collected({"defense": noise, "seed": [3]}).cells
    assert labels(cells) == ["none, 3", "dp noise=0.5, 3", "dp noise=2.0, 3"]
    once = collected({"defense": [[{"kind": "dp"}], noise[1]]}).cells
    assert labels(once) == ["dp", "dp noise=0.5 clip=1.0"]


def headings_and_first_line(collected: SweepSummary) -> dict[str, str]:
    table = attacks_table(collected)
    headings = [column.heading for column in table.columns]
    return {heading: cell.text for heading, cell in zip(headings, table.rows[0], strict=True)}


def test_the_table_has_utility_epsilon_and_beside_it_the_noise_multiplier():
    first_line = headings_and_first_line(
        traded("mcc", [0.614, 0.5], [3.14159, "none"], [1.0, None])
    )
    assert list(first_line)[:4] == ["seed", "MCC", "epsilon", "noise multiplier"]
    assert list(first_line.values())[:4] == ["0", "0.61", "3.14", "1"]
    first_line = headings_and_first_line(traded("mcc", [None, 0.5], ["none", 2.0], [None, 1.0]))
    assert list(first_line.values())[:4] == ["0", "-", "none", "-"]
    first_line = headings_and_first_line(
        traded("perplexity", [31.27] * 2, ["none"] * 2, [None] * 2)
    )
    assert list(first_line)[:3] == ["seed", "perplexity", "attack"]
    assert first_line["perplexity"] == "31.3"
    assert list(headings_and_first_line(collected({"seed": [0]})))[:2] == ["seed", "attack"]


def test_the_table_has_the_areas_of_the_main_and_of_the_calibrated_score():
    def told(i: int, cell: CellSummary) -> CellSummary:
        figures = tuple(
            MembershipFigures.model_construct(attack="dager", score=score, auc=interval(area))
            for score, area in [("residual", 0.875), ("calibrated", 0.5)][: i + 1]
        )
        membership = MembershipSummary(confidence=0.95, delta=1e-5, figures=())
        return changed(cell, membership=changed(membership, figures=figures))

    without = collected({"seed": [0, 1]})
    assert "who was in, AUC" not in headings_and_first_line(without)
    main_only = changed(without, cells=with_cells(without, told).cells[:1])
    assert "AUC, calibrated" not in headings_and_first_line(main_only)
    table = attacks_table(with_cells(without, told))
    first, second = ([cell.text for cell in table.rows[i]] for i in (0, 2))
    headings = [column.heading for column in table.columns]
    main, calibrated = headings.index("who was in, AUC"), headings.index("AUC, calibrated")
    assert [line[main][:4] for line in (first, second)] == ["0.88", "0.88"]
    assert (first[calibrated], second[calibrated][:4]) == ("-", "0.50")


def test_the_table_fits_a_terminal_of_eighty_columns():
    console = Console(width=80, record=True, file=io.StringIO())
    print_table(console, attacks_table(traded(*CLASSES)))
    text = console.export_text()
    for words in ("epsilon", "multiplier", "dager", "3.14", "[27,36]", "seconds"):
        assert words in text
    assert "\u2026" not in text


def test_no_word_of_a_cell_is_broken_where_room_is_short():
    noise = [[], [{"kind": "gaussian_noise", "sigma": 1e-4}], [{"kind": "dp_sgd", "epsilon": 8.0}]]
    figures = traded("mcc", [0.6, 0.5, 0.0], ["none", 31.25, 3.1], [None, 0.25, 1.0])
    algorithms = ["fedsgd", "fedavg", "fedsgd"]
    swept = {
        "defense": noise,
        "federation.batch_size": [1, 2, 4],
        "federation.algorithm": algorithms,
    }
    cells = tuple(
        changed(cell, values={key: values[i] for key, values in swept.items()})
        for i, cell in enumerate(figures.cells)
    )
    sweep_summary = changed(figures, axes=swept, cells=cells)
    words = {"gaussian_noise", "sigma=0.0001", "dp_sgd", "epsilon=8.0", "defense", "dager", "31.2"}
    words |= {"fedavg", "ROUGE-L", "seconds"}  # also the last column
    for width in range(44, 160, 3):
        console = Console(width=width, record=True, file=io.StringIO())
        print_table(console, attacks_table(sweep_summary))
        text = console.export_text()
        assert words <= set(text.split()), text
        assert max(map(len, text.splitlines())) <= width


def test_an_attack_without_an_answer_is_drawn_below_zero_and_said_to_be():
    def silenced(i: int, cell: CellSummary) -> CellSummary:
        silent = {"dager": changed(cell.attacks["dager"], rougeL=None)}
        return changed(cell, attacks=cell.attacks | silent) if i == 1 else cell

    drawing = tradeoff(with_cells(traded(*CLASSES), silenced))
    assert drawing is not None
    by_utility, by_epsilon, _ = drawing["concat"]
    for panel, x in ((by_utility, 0.5), (by_epsilon, 31.25)):
        [no_answer] = rows_of(panel, "point", chart.silent("dager"))
        assert (no_answer["x"], no_answer["y"]) == (x, chart.NOWHERE)
        assert chart.NOWHERE < 0
    # One that reads no texts anywhere has no place in it.
    assert "probes" not in json.dumps(drawing)
