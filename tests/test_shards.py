"""Attacks in shards: the run directory is the queue, and answers are those of one machine."""

import json
import shutil
import stat
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import DLG, Here, call, tables, toml

from fedleak.config.components import NamedAttack
from fedleak.config.loading import load, parse
from fedleak.flower import inline
from fedleak.running import pipeline, preparation, sweep
from fedleak.running.dispatch.agenda import groups, part_of
from fedleak.running.dispatch.dispatcher import Crew
from fedleak.store.lines import Lines
from fedleak.store.run import Key, Run
from fedleak.store.shards import Shard, locked, read_answers, salvage_answers
from fedleak.util.errors import ConfigError, FedleakError

OTHER = DLG | {"name": "dlg-other", "steps": 3}
MAIN = "reconstructions.jsonl"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that is trained and not attacked, and the same one attacked by one process."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "small.toml").write_text(
        toml({"attack": [DLG, OTHER], "federation.clients": 3, "data.samples": 12})
    )
    experiment = load(folder / "small.toml")
    run = preparation.prepare(experiment, folder / "runs" / "small")
    with pipeline.noting_status(run):
        inline.train(run, experiment)
    whole = Run(folder / "whole")
    shutil.copytree(run.path, whole.path)
    pipeline.carry_out(whole, experiment, inline.train, Crew([Here()]))
    return folder


@pytest.fixture
def run(trained, tmp_path, monkeypatch, in_process):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Run(tmp_path / "runs" / "small")


def rows(path, name="leakage.jsonl"):
    file_rows = (json.loads(line) for line in (path / name).read_text().splitlines())
    return [row | {"seconds": None} for row in file_rows]


def answers(run):
    given = (answer.model_copy(update={"seconds": None}) for answer in read_answers(run))
    return sorted(given, key=lambda answer: answer.id)


def attack(*more, shard):
    return call("attack", "runs/small", "--shard", shard, *more)


class Killed(Here):
    """A worker whose process and all is gone once it has answered so often."""

    def __init__(self, after):
        super().__init__()
        self.left = after

    def submit(self, jobs):
        if not self.left:
            raise KeyboardInterrupt
        self.left -= 1
        super().submit(jobs)


# --- the division -------------------------------------------------------------------------------


@given(
    clients=st.integers(1, 7),
    rounds=st.integers(1, 3),
    named=st.integers(1, 3),
    count=st.integers(1, 9),
)
def test_shards_have_all_of_the_work_once_and_alike(clients, rounds, named, count):
    keys = [Key(round, client) for round in range(1, rounds + 1) for client in range(clients)]
    work = groups([NamedAttack(str(i), SimpleNamespace()) for i in range(named)], keys)
    parts = [part_of(work, Shard(count, number)) for number in range(1, count + 1)]
    counts = Counter((task.attack.name, *task.keys) for part in parts for task in part)
    assert counts == Counter((task.attack.name, *task.keys) for task in work)
    for name in map(str, range(named)):  # a slow attack is not left to one of them
        sizes = [sum(task.attack.name == name for task in part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
    assert all(part == sorted(part, key=lambda task: task.keys[0]) for part in parts)


@pytest.mark.parametrize(
    "text", ["", "1", "0/2", "3/2", "1/0", "-1/2", "1/2/3", "a/b", "1/10001", "\uff11/2"]
)
def test_what_is_no_shard_is_refused_in_a_line(run, text):
    status, _, errors = attack(shard=text)
    assert status == 2
    assert errors.startswith(f"fedleak: --shard {text!r}: give a number and how many there are")
    assert not list(run.path.glob("shard-*"))


# --- what comes of them -------------------------------------------------------------------------


def test_shards_give_the_answers_and_the_scores_of_one_process(run, tmp_path):
    for number in (3, 1):
        status, text, _ = attack(shard=f"{number}/3")
        assert status == 0
        assert f"shard {number}/3: 3 of 3 answers are there" in text
        assert "fedleak score runs/small" in text
    status, _, errors = call("score", "runs/small")
    assert status == 1
    assert "3 of 9 answers are missing" in errors
    assert "not complete: shard 2/3;" in errors
    assert attack(shard="2/3")[0] == 0
    assert not (run.path / MAIN).exists()
    assert call("score", "runs/small")[0] == 0
    assert answers(run) == answers(Run(tmp_path / "whole"))
    assert rows(run.path) == rows(tmp_path / "whole")
    assert call("gate", "runs/small", "--set", "gate.exact=1")[0] in (0, 3)
    assert call("report", "runs/small")[0] == 0
    assert call("export", "runs/small", "--to", "rows.csv", "--texts")[0] == 0
    assert call("run", "small.toml")[0] == 0  # finished: nothing is attacked again
    assert not (run.path / MAIN).exists()
    files = [path for path in run.path.glob("shard-*/*") if path.is_file()]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in files)
    assert call("purge", "runs/small")[0] == 0
    assert not list(run.path.glob("shard-*"))
    assert rows(run.path) == rows(tmp_path / "whole")


def test_a_killed_shard_repeats_its_own_work_alone(run, tmp_path):
    experiment, shard = load(tmp_path / "small.toml"), Shard(2, 1)
    assert attack(shard="2/2")[0] == 0
    other = (run.path / "shard-2of2" / MAIN).read_bytes()
    with pytest.raises(KeyboardInterrupt):
        pipeline.attack_shard(run, experiment, shard, Crew([Killed(after=2)]))
    kept = (run.path / shard.folder / MAIN).read_bytes()
    assert kept.count(b"\n") == 2
    with open(run.path / shard.folder / MAIN, "ab") as file:
        file.write(b'{"round": 1, "cli')  # the third was being written
    assert "not complete: shard 1/2;" in call("score", "runs/small")[2]
    assert attack(shard="1/2")[0] == 0
    again = (run.path / shard.folder / MAIN).read_bytes()
    assert again.startswith(kept)
    assert len(answers(run)) == again.count(b"\n") + other.count(b"\n") == 9
    assert (run.path / "shard-2of2" / MAIN).read_bytes() == other
    assert answers(run) == answers(Run(tmp_path / "whole"))


def test_one_machine_can_finish_what_shards_began_and_shards_what_one_began(run, tmp_path):
    whole = tmp_path / "whole"
    shutil.copy(whole / MAIN, run.path / MAIN)
    some = (run.path / MAIN).read_text().splitlines(keepends=True)[:4]
    (run.path / MAIN).write_text("".join(some))
    for number in (1, 2):
        assert attack(shard=f"{number}/4")[0] == 0
    assert call("attack", "runs/small")[0] == 0
    given = [row["attack"] for path in run.path.rglob(MAIN) for row in rows(path.parent, MAIN)]
    assert len(given) == 9  # and no row comes twice
    assert rows(run.path) == rows(whole)


@pytest.mark.slow
def test_other_attacks_are_expected_by_the_score_too(run):
    other = ["--set", 'attack=[{kind="dlg", name="dlg-new", steps=2}]']
    assert call("attack", "runs/small")[0] == 0
    assert attack(*other, shard="1/2")[0] == 0
    status, _, errors = call("score", "runs/small")
    assert status == 1
    assert "answers are missing" in errors
    assert "shard 2/2;" in errors
    assert attack(*other, shard="2/2")[0] == 0
    assert call("score", "runs/small")[0] == 0


def test_more_shards_than_work_leave_some_with_nothing_to_do(run):
    status, text, _ = attack(shard="12/12")
    assert status == 0
    assert "0 of 0 answers" in text


@pytest.mark.parametrize("order", [pytest.param((1, 2, 3), marks=pytest.mark.slow), (3, 1, 2)])
def test_a_capture_goes_once_all_shards_have_answered_for_it(run, tmp_path, order):
    changes = {"attack": [DLG, OTHER], "federation.clients": 3, "data.samples": 12}
    experiment = parse(tables(changes | {"audit.keep": "none"}))
    preparation.prepare(experiment, run.path)  # it may change
    other = ["--set", 'attack=[{kind="dlg", name="dlg-new", steps=2}]']
    assert attack(*other, shard="1/2")[0] == 0
    new = {answer.key for answer in answers(run) if answer.attack == "dlg-new"}
    for number in order[:2]:
        assert attack(shard=f"{number}/3")[0] == 0
    with pytest.raises(KeyboardInterrupt):
        pipeline.attack_shard(run, experiment, Shard(3, order[2]), Crew([Killed(after=1)]))
    assert run.captures.deleted() <= new
    assert attack(shard=f"{order[2]}/3")[0] == 0
    assert (
        run.captures.deleted() == new < set(run.captures.all_keys())
    )  # the others wait for the other half
    assert attack(*other, shard="2/2")[0] == 0
    assert run.captures.deleted() == set(run.captures.all_keys())
    assert call("score", "runs/small")[0] == 0
    assert call("attack", "runs/small")[0] == 0  # nothing is left to do
    old_rows = [row for row in rows(run.path) if row["attack"] != "dlg-new"]
    assert old_rows == rows(tmp_path / "whole")
    late = ["--set", 'attack=[{kind="dlg", name="dlg-late", steps=2}]']
    status, _, errors = attack(*late, shard="1/2")
    assert (status, "captures were deleted once the attacks" in errors) == (2, True)


# --- who may do what at once --------------------------------------------------------------------


def test_shards_share_the_run_and_nobody_else_has_it_meanwhile(run):
    with locked(run, Shard(3, 1)):
        with locked(run, Shard(3, 2)), pytest.raises(FedleakError, match=r"shard-1of3.*in use"):
            locked(run, Shard(3, 1)).__enter__()
        for command in ("score", "attack", "purge", "report"):
            status, _, errors = call(command, "runs/small")
            assert (status, "is in use by another fedleak process" in errors) == (1, True)
        assert attack(shard="2/3")[0] == 0
    with run.lock():
        status, _, errors = attack(shard="1/3")
        assert (status, "is in use by another fedleak process" in errors) == (1, True)
    assert attack(shard="1/3")[0] == 0


# --- damage and failures ------------------------------------------------------------------------


def test_a_damaged_line_of_a_shard_is_put_aside_and_given_anew_by_it(run, tmp_path):
    for number in (1, 2):
        assert attack(shard=f"{number}/2")[0] == 0
    path = run.path / "shard-1of2" / MAIN
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], '{"round": 1, oops\n', *lines[2:]]))
    assert call("export", "runs/small", "--to", "rows.csv", "--texts")[0] == 1
    status, text, errors = call("score", "runs/small")
    assert status == 1
    assert "1 of 9 answers are missing" in errors
    assert "`fedleak attack runs/small` gives them" in errors
    assert f"line 2 of shard-1of2/{MAIN} was damaged" in text
    assert attack(shard="1/2")[0] == 0
    assert call("score", "runs/small")[0] == 0
    assert rows(run.path) == rows(tmp_path / "whole")


def test_failed_answers_are_tried_again_by_their_shard_or_by_all(run, tmp_path):
    capture = run.path / "captures" / "r0001-c01.safetensors"
    content = capture.read_bytes()
    capture.write_bytes(content[:5000])
    for number in (1, 2):
        status, _, errors = attack(shard=f"{number}/2")
        assert ("failed: --retry tries them again" in errors) == (status == 1)
    capture.write_bytes(content)
    assert sum(answer.status == "failed" for answer in answers(run)) == 3
    status, _, errors = attack(shard="1/2")
    assert status == 1  # it does not try again unasked
    assert attack("--retry", shard="1/2")[0] == 0
    failed = [answer.id for answer in answers(run) if answer.status == "failed"]
    assert 0 < len(failed) < 3
    assert attack(shard="1/3")[0] == 0  # another division, in which nobody has failed yet
    assert call("attack", "runs/small", "--retry")[0] == 0
    assert rows(run.path) == rows(tmp_path / "whole")
    assert answers(run) == answers(Run(tmp_path / "whole"))


def test_answers_of_another_experiment_are_no_answers(run, tmp_path):
    path, lines = run.path / Shard(1, 1).folder, Lines(MAIN, dict)
    path.mkdir()
    shutil.copy(tmp_path / "whole" / MAIN, path)  # as if the shard had given them
    assert len(read_answers(run)) == 9
    Run(path).write_rows(lines, [row | {"fingerprint": "0" * 16} for row in Run(path).rows(lines)])
    assert salvage_answers(run) == []
    assert len(run.damaged()) == 9


# --- the cells of a sweep -----------------------------------------------------------------------


def test_shards_of_a_sweep_run_its_cells_and_the_sweep_compares_them(
    tmp_path, monkeypatch, in_process
):
    monkeypatch.chdir(tmp_path)
    axes = "[sweep]\nseed = [0, 1, 2]\n"
    (tmp_path / "grid.toml").write_text(toml({"name": "grid"}) + axes)
    folder = tmp_path / "runs" / "grid"
    status, text, _ = call("sweep", "grid.toml", "--shard", "1/2", "--jobs", "1")
    assert (status, "shard 1/2: 2 cells are complete" in text) == (0, True)
    assert sorted(path.name for path in folder.glob("seed=*")) == ["seed=0", "seed=2"]
    status, _, errors = call("sweep", "grid.toml", "--shard", "2/2", "--fresh")
    assert (status, "before the first starts" in errors) == (2, True)
    whole = sweep.load(tmp_path / "grid.toml")
    with whole.part(Shard(2, 1)).lock():  # it goes on meanwhile
        assert call("sweep", "grid.toml", "--shard", "2/2", "--jobs", "1")[0] == 0
        assert "is in use" in call("sweep", "grid.toml", "--jobs", "1")[2]
    assert not (folder / "sweep.json").exists()
    before = {path: path.stat().st_mtime_ns for path in folder.glob("seed=*/leakage.jsonl")}
    assert call("sweep", "grid.toml")[0] == 0
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("seed=*/leakage.jsonl")}
    cells = json.loads((folder / "sweep.json").read_text())["cells"]
    assert [(cell["cell"], cell["status"]) for cell in cells] == [
        (f"seed={seed}", "finished") for seed in range(3)
    ]


def test_shard_numbers_are_read_as_they_are_written():
    for shard in (Shard(1, 1), Shard(10_000, 7)):
        assert Shard.parse(str(shard)) == shard
    with pytest.raises(ConfigError, match="such as 2/4"):
        Shard.parse("7")
