"""A run directory that a stranger made: what lies in it leads nowhere and runs nothing."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tomli_w
from cases import some
from tiny import DLG, Here, toml
from tiny import call as call_tiny

from fedleak.config.loading import load
from fedleak.flower.engines import train
from fedleak.running import pipeline, preparation
from fedleak.running.dispatch.dispatcher import Crew
from fedleak.store.run import Run

FOLDERS = ("captures", "models", "vault", "defended", "candidates", "held")
WRITTEN = (
    "log.txt", "flower.log", "run.json", "reconstructions.jsonl", "attempts.jsonl",
    "leakage.jsonl", "privacy.jsonl", "defenses.jsonl", "utility.jsonl", "membership.jsonl",
    "canaries.jsonl", "damaged.jsonl", "summary.json", "held_out.json", "checks.json",
    "reference.json", "report.html", "report-redacted.html",
)  # fmt: skip
COMMANDS = (
    "score RUN", "report RUN", "report RUN --redact", "attack RUN", "attack RUN --retry",
    "attack RUN --shard 1/2", "gate RUN", "compare RUN RUN", "export RUN --to out.csv",
    "run small.toml", "purge RUN",
)  # fmt: skip
SECRET = b'{"a line of the": "user"}\n'


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder with an experiment and its finished run."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "small.toml").write_text(toml({"attack": [DLG]}))
    run = preparation.prepare(load(folder / "small.toml"), folder / "runs" / "small")
    pipeline.carry_out(run, load(folder / "small.toml"), train, Crew([Here()]))
    return folder


@pytest.fixture
def run(finished, tmp_path, monkeypatch, in_process):
    """A copy of the finished run, below the current folder; attacks run in this process."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Run(tmp_path / "runs" / "small")


def call(command: str) -> tuple[int, str]:
    """Gives a command on the run, which ends in one line if it refuses; returns what it says."""
    status, _, errors = call_tiny(*command.replace("RUN", "runs/small").split())
    assert "Traceback" not in errors
    assert "unexpected" not in errors
    return status, errors


def link_files(run: Run, home: Path) -> None:
    for name in WRITTEN:
        shutil.copy(run.path / name, home) if (run.path / name).exists() else None
        (home / name).touch()
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).symlink_to(home / name)


def link_folders(run: Run, home: Path) -> None:
    for name in FOLDERS:
        if (run.path / name).exists():
            (run.path / name).rename(home / name)
        (home / name).mkdir(exist_ok=True)
        (run.path / name).symlink_to(home / name)


def link_what_all_commands_open(run: Run, home: Path) -> None:
    for name in (".lock", "run.json"):
        (run.path / name).rename(home / name)
        (run.path / name).symlink_to(home / name)


def link_shard(run: Run, home: Path) -> None:
    (home / "shard").mkdir()
    (run.path / "shard-1of2").symlink_to(home / "shard")


def link_content(run: Run, home: Path) -> None:
    for path in [path for path in run.path.rglob("*/*") if path.is_file()]:
        path.rename(home / path.name)
        path.symlink_to(home / path.name)


def pipes(run: Run, home: Path) -> None:
    paths = [path for path in run.path.rglob("*") if path.is_file()]
    paths = [path for path in paths if path.name not in (".lock", "run.json")]
    for path in paths:
        path.unlink()
        os.mkfifo(path)


PLANTED: dict[str, Callable[[Run, Path], None]] = {
    "linked files": link_files,
    "links in folders": link_content,
    "linked folders": link_folders,
    "a linked lock": link_what_all_commands_open,
    "pipes": pipes,
    "a linked shard": link_shard,
}


def state(folder: Path) -> dict[Path, bytes | None]:
    return {
        path: path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("kind", some(PLANTED, every=2))
def test_no_command_writes_through_what_a_stranger_has_planted(run, tmp_path_factory, kind):
    home = tmp_path_factory.mktemp("home")
    PLANTED[kind](run, home)
    before = state(home)
    for command in COMMANDS:
        call(command)
        assert state(home) == before, command


@pytest.mark.parametrize("name", ["damaged.jsonl", "log.txt"])
def test_a_damaged_line_is_not_appended_through_a_link(run, tmp_path_factory, name):
    profile = tmp_path_factory.mktemp("home") / ".profile"
    profile.write_bytes(SECRET)
    (run.path / name).unlink(missing_ok=True)
    (run.path / name).symlink_to(profile)
    with open(run.path / "reconstructions.jsonl", "a") as file:
        file.write('{"a $(touch ran)": \n')
    status, errors = call("score RUN")
    assert profile.read_bytes() == SECRET
    assert name == "log.txt" or (status == 1 and "it is a link, and no plain file" in errors)


@pytest.mark.parametrize(
    "command", ["report RUN --out", "export RUN --to", "gate RUN --set gate.exact=1 --junit"]
)
def test_a_link_or_a_pipe_is_not_replaced(run, command):
    Path("target.csv").write_bytes(SECRET)
    Path("link.csv").symlink_to("target.csv")
    os.mkfifo("pipe.csv")
    for name in ("link.csv", "pipe.csv"):
        status, errors = call(f"{command} {name}")
        assert status == 1
        assert "and no plain file" in errors
    assert Path("link.csv").is_symlink()
    assert Path("pipe.csv").is_fifo()
    assert Path("target.csv").read_bytes() == SECRET


def test_sizes_of_other_clients_are_refused_in_a_line(run):
    path = run.path / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"node_examples": [1]}))
    for command in ("score RUN", "report RUN", "gate RUN --set gate.exact=1"):
        status, errors = call(command)
        assert status == 1
        assert "node_examples has 1 clients" in errors


# --- programs -------------------------------------------------------------------------------------

PROGRAM = "touch ran {observation} {answer}"
OF_RAY = {"engine": "ray", "ray": {"address": "127.0.0.1:9"}}


def changed(run: Run, **tables) -> None:
    """Changes the experiment in run.json, as somebody does who has not this machine's key."""
    path = run.path / "run.json"
    info = json.loads(path.read_text())
    info["experiment"] |= tables
    path.write_text(json.dumps(info))


def test_a_command_in_a_run_of_somebody_else_does_not_run(run):
    changed(run, attack=[{"kind": "command", "command": f"{PROGRAM} \x1b[2J{'x' * 900}"}])
    starting = ("attack RUN", "attack RUN --shard 1/2", "run RUN/run.json")
    for command in ("score RUN", "report RUN", "gate RUN", *starting):
        status, errors = call(command)
        assert not Path("ran").exists(), command
        if command in starting:
            assert status == 2
            assert "would use the command 'touch ran" in errors
            assert "give --allow-commands" in errors
            assert len(errors) < 600
            assert errors[:-1].isprintable()


def test_a_command_that_the_user_allows_runs(run):
    program = PROGRAM.replace("ran", str(run.path / "ran"))
    changed(run, attack=[{"kind": "command", "command": program}])
    call("attack RUN --allow-commands")
    assert (run.path / "ran").exists()
    (run.path / "ran").unlink()
    attack = f'attack=[{{kind="command", name="mine", command="{program}"}}]'
    call_tiny("attack", str(run.path), "--set", attack)
    assert (run.path / "ran").exists()
    assert not run.is_genuine("run.json")


def test_a_command_of_a_run_that_was_made_here_runs(run):
    run.update_info(
        experiment=run.info()["experiment"]
        | {"attack": [{"kind": "command", "command": PROGRAM.replace("ran", f"{run.path}/ran")}]}
    )
    assert run.is_genuine("run.json")
    call("attack RUN")
    assert (run.path / "ran").exists()


def test_nothing_is_sent_to_a_cluster_that_somebody_else_names(run):
    changed(run, workers=OF_RAY)
    assert "would use the Ray cluster at '127.0.0.1:9'" in call("attack RUN")[1]
    assert "would use" not in call("attack RUN --set workers.engine=local")[1]
    changed(run, workers={})
    assert call("attack RUN")[0] == 0


def test_a_command_in_the_file_beside_a_tap_is_not_taken_into_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tap").mkdir()
    about = {
        "model": {"name": "builtin/bert-tiny"},
        "training": {"batch_size": 1, "learning_rate": 0.1, "dropout": False},
        "attack": [{"kind": "command", "command": PROGRAM}],
    }
    Path("own.toml").write_text(tomli_w.dumps(about))
    shutil.copy("own.toml", "tap/about.toml")
    assert "would use the command" in call("import tap")[1]
    for own in ("--about own.toml", "--allow-commands"):
        assert "is not the folder of a tap" in call(f"import tap {own}")[1]
