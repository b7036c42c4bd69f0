"""What is said of time and disk, before a run and while it goes on."""

import io
from types import SimpleNamespace

import pytest
from rich.console import Console
from tiny import DLG, TABLES, call, toml

from fedleak.cli import display
from fedleak.config.federation.workload import outline
from fedleak.config.loading import parse
from fedleak.flower import inline
from fedleak.running import forecast, preparation
from fedleak.running.dispatch.progress import Finished, RunProgress
from fedleak.store.run import EVERYONE, Key
from fedleak.util.errors import ConfigError

TABLE = {
    "name": "small",
    "model": TABLES["model"],
    "data": {"name": "builtin/notes", "samples": 12, "held_out": 2},
    "federation": {"clients": 3, "rounds": 3, "batch_size": 1, "learning_rate": 0.1},
    "utility": {"rounds": []},
}


# --- disk ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"threat": {"rounds": [2]}},
        pytest.param({"threat": {"rounds": [3]}}, marks=pytest.mark.slow),
        pytest.param({"update": {"share": ["query", "embedding"]}}, marks=pytest.mark.slow),
        {"defense": [{"kind": "freeze", "parameters": ["embedding"], "clients": [1]}]},
        {"defense": [{"kind": "secure_sum"}]},
        pytest.param({"model": TABLE["model"] | {"lora": {"rank": 2}}}, marks=pytest.mark.slow),
        {"federation": TABLE["federation"] | {"server_optimiser": "adam"}},
    ],
    ids=lambda changes: "-".join(changes) or "plain",
)
def test_bytes_are_those_of_the_tensors_of_a_run(tmp_path, changes):
    experiment = parse(TABLE | changes)
    run = preparation.prepare(experiment, tmp_path / "run")
    needed = forecast.bytes_kept(experiment, outline(experiment, 2))
    inline.train(run, experiment)
    kept = [run.captures.read_capture(key).update.tensors for key in run.captures.all_keys()]
    kept += [run.models.read_model(round) for round in run.models.rounds()]
    moments = [run.moments.read_model(round) for round in run.moments.rounds()]
    kept += [{n: v for n, v in moment.items() if not n.startswith("steps.")} for moment in moments]
    assert needed == sum(t.numel() * 4 for tensors in kept for t in tensors.values())
    assert forecast.bytes_there(experiment, outline(experiment, 2), run) == needed


def test_a_run_that_does_not_fit_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    experiment = parse(TABLE)
    plan = preparation.plan(experiment)
    assert plan.disk > 10**6
    free = SimpleNamespace(free=plan.disk - 1)
    monkeypatch.setattr(forecast.shutil, "disk_usage", lambda path: free)
    with pytest.raises(ConfigError, match=r"needs 8 MB for captures and models, but only 8 MB "):
        preparation.open_run(plan, tmp_path / "runs" / "small")
    assert list(tmp_path.iterdir()) == []
    free.free = plan.disk
    run = preparation.open_run(plan, tmp_path / "runs" / "small")
    inline.train(run, experiment)
    free.free = 0  # what is there need not fit again
    preparation.open_run(plan, run.path)
    with pytest.raises(ConfigError, match=r"are free, [0-9,]+ bytes too few"):
        preparation.open_run(plan, run.path, fresh=True)
    assert run.exists()


def test_disk_is_not_worth_a_word_until_it_is_much(tmp_path):
    assert forecast.disk(forecast.WORTH_SAYING_BYTES - 1, tmp_path) is None
    sentence = forecast.disk(123 * 10**9, tmp_path / "not" / "there")
    assert sentence.startswith("captures and models take up to 123.0 GB; ")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (119, "119 s"), (121, "2 min"), (7300, "2 h"), (10**6, "12 days")],
)
def test_times_are_in_one_unit(seconds, words):
    assert forecast.duration(seconds) == words


# --- lines --------------------------------------------------------------------------------------


@pytest.fixture
def console():
    return Console(file=io.StringIO(), force_terminal=False, width=40)


@pytest.fixture
def printed(console):
    return lambda: console.file.getvalue().splitlines()


def at(answers=0, finished=(), captures=0, rounds=0, left=None, most=0.0, under_way=()):
    return RunProgress(captures, 12, answers, 8, under_way, tuple(finished), rounds, 3, left, most)


def test_without_a_terminal_there_is_a_line_per_answer_and_round(console, printed):
    recovered = Finished("lamp", Key(1, 2), "recovered", 61.23)
    failed = Finished("[red]a[/]\x1b[2J", Key(2, EVERYONE), "failed", None)
    with display.progress(console) as show:
        show(at())
        show(at(captures=3))
        show(at(captures=4, rounds=1))
        show(at(1, [recovered], captures=4, rounds=1))
        show(at(1, captures=4, rounds=1))
        show(at(3, [recovered, failed], captures=12, rounds=3, left=600.0))
    assert printed() == [
        "training: round 1 of 3, 4 of 12 updates",
        "lamp round 1 client 2: recovered in 61.2 s; 7 left",
        "training: round 3 of 3, 12 of 12 updates",
        "lamp round 1 client 2: recovered in 61.2 s; 6 left, about 10 min",
        r"[red]a[/]\x1b[2J round 2 all clients: failed; 5 left, about 10 min",
    ]


def test_rounds_of_an_earlier_command_are_not_told_again(console, printed):
    with display.progress(console) as show:
        show(at(captures=12, rounds=3))
        show(at(captures=12, rounds=3))
    assert printed() == []


def test_the_most_that_attacks_take_is_told_once_if_it_is_long(console, printed):
    with display.progress(console) as show:
        show(at(most=36_000.0))
        show(at(most=35_000.0))
    assert printed() == ["attacks with a time limit take at most 10 h"]
    with display.progress(console) as show:
        show(at(most=forecast.WORTH_SAYING_SECONDS - 1))
    assert len(printed()) == 1


def test_a_run_in_a_pipe_prints_a_line_per_answer(tmp_path, monkeypatch, in_process):
    attack = DLG | {"seconds": 400.0}
    (tmp_path / "small.toml").write_text(toml({"attack": [attack]}))
    monkeypatch.chdir(tmp_path)
    status, printed, errors = call("run", "small.toml")
    assert status == 0, errors
    lines = printed.splitlines()
    assert lines[0] == "attacks with a time limit take at most 13 min"
    assert "training: round 1 of 1, 2 of 2 updates" in lines
    answer_lines = [line for line in lines if " left" in line]
    assert [line.split(":")[0] for line in answer_lines] == [
        "probes round 1 client 0",
        "probes round 1 client 1",
        "dlg round 1 client 0",
        "dlg round 1 client 1",
    ]
    assert answer_lines[-1].endswith("; 0 left, about 0 s")
    assert [line.split("; ")[1].split(" ")[0] for line in answer_lines] == ["3", "2", "1", "0"]
