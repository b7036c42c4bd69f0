"""The command line: exit statuses, one-line errors, attacks that fail, damaged captures."""

import inspect
import io
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tiny import DLG, call, invoked, toml

import fedleak
from fedleak.cli import app, planning, runs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.toml").write_text(toml({"attack": [DLG]}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def here(folder: Path, in_process: None) -> Path:
    return folder


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("runs/small", name).read_text().splitlines()]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("federation.round=3", "did you mean 'rounds'?"),
        ('attack=[{kind="dagger"}]', "did you mean 'dager'?"),
        ("data.name=./missing.csv", "data.text is missing"),
        ("federation.clients=50", "leaves a client with no data"),
        ('update.share=["poller"]', "is in no parameter's name"),
        ("model.task=causal-lm", "needs a causal model"),
    ],
)
def test_a_wrong_experiment_is_one_line_and_status_2(here: Path, change: str, says: str) -> None:
    status, _, errors = call("run", "small.toml", "--set", change)
    assert status == 2
    assert says in errors
    assert errors.count("\n") == 1
    assert not (here / "runs").exists()


def test_list_names_every_kind(here: Path) -> None:
    status, text, _ = call("list")
    assert status == 0
    for name in (
        "dager",
        "keyspan",
        "dlg",
        "lamp",
        "probes",
        "tag",
        "gaussian_noise",
        "mask",
        "builtin/bert-tiny",
        "builtin/llama-tiny",
        "glue/cola",
    ):
        assert name in text


HEAVY = {
    *("accelerate", "datasets", "flwr", "flwr_datasets", "matplotlib", "nltk", "opacus", "pandas"),
    *("peft", "pyarrow", "ray", "rouge_score", "scipy", "seaborn", "sklearn", "transformers"),
}
"""What takes a second or more to import, altogether ten."""


LIGHT = {
    "--help": 0,
    "--version": 0,
    "run --help": 0,
}
"""Commands that read no experiment, with their exit status."""

LIGHT_WITH_TORCH = {
    "list": 0,
    "run small.toml --set federation.rounds=0": 2,
    "run small.toml --set attack=[{kind='dagger'}]": 2,
    "sweep small.toml": 2,
    "check-defense small.toml --set seed=-1": 2,
}
"""Commands that train nothing, too."""


@pytest.mark.parametrize(
    ("commands", "unused"),
    [(LIGHT, HEAVY | {"torch", "pydantic"}), (LIGHT_WITH_TORCH, HEAVY)],
    ids=["nothing is read", "nothing is trained"],
)
def test_what_trains_nothing_imports_nothing_heavy(
    here: Path, commands: dict[str, int], unused: set[str]
) -> None:
    """All in one process: what none of them imports, no one of them does."""
    code = f"""
import runpy, sys
for command, status in {commands}.items():
    sys.argv[1:] = command.split(" ", 3)
    try:
        runpy.run_module("fedleak", run_name="__main__")
    except SystemExit as ended:
        assert (ended.code or 0) == status, (command, ended.code)
print("IMPORTED", *{{name.split(".")[0] for name in sys.modules}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    imported = set(done.stdout.rpartition("IMPORTED")[2].split())
    assert "fedleak" in imported
    assert imported & unused == set()


def test_versions_are_one_in_a_line_and_fedleaks_is_the_first() -> None:
    status, text, errors = call("--version")
    assert (status, errors) == (0, "")
    lines = [line.split() for line in text.splitlines()]
    assert lines[0] == ["fedleak", fedleak.__version__]
    versions = dict(lines)
    assert versions["python"] == platform.python_version()
    assert versions["torch"] == metadata.version("torch")
    assert versions["flwr"] == metadata.version("flwr")


# --- help and completion ------------------------------------------------------------------------


def shell(*arguments: str, **environment: str) -> str:
    """Runs `python -m fedleak`, as a shell does; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "fedleak", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def help_of(*command: str) -> str:
    done = invoked(*command, "--help", prog_name="fedleak", env={"COLUMNS": "80"})
    assert done.exit_code == 0
    return done.stdout


COMMANDS = {
    command.name or command.callback.__name__.replace("_", "-"): command.callback
    for command in app.registered_commands
    if command.callback is not None
}


def test_a_module_is_the_command_by_its_name() -> None:
    text = shell("--help", COLUMNS="80")
    assert "Usage: fedleak [OPTIONS] COMMAND [ARGS]..." in text
    assert all(f" {name} " in text for name in COMMANDS)


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)], ids=" ".join)
def test_help_is_whole_at_80_columns(command: tuple[str, ...]) -> None:
    text = help_of(*command)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    assert " ".join(["Usage: fedleak", *command]) in text
    words = " ".join(text.replace("│", " ").split())
    for name in command:
        for parameter in inspect.signature(COMMANDS[name]).parameters.values():
            (about,) = parameter.annotation.__metadata__
            assert " ".join((about.help or "").split()) in words
            if not about.help:  # the text of the command describes its arguments
                described = (about.metavar or "").strip("[].")
                assert f"{described} is a" in words


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("fedleak ", {"run", "sweep", "list", "check-defense"}),
        ("fedleak sw", {"sweep"}),
        ("fedleak run ", {"small.toml", "grids/large.toml"}),
        ("fedleak run small.toml gr", {"grids/large.toml"}),
        ("fedleak sweep grids/", {"grids/large.toml"}),
        ("fedleak check-defense s", {"small.toml"}),
        ("fedleak score ", {"runs/small", "runs/grid/0001"}),
        ("fedleak attack runs/s", {"runs/small"}),
        ("fedleak purge runs/grid/", {"runs/grid/0001"}),
        ("fedleak purge [", set()),
    ],
)
def test_a_shell_completes_commands_files_and_runs(
    here: Path, words: str, offered: set[str]
) -> None:
    for path in ("grids/large.toml", "runs/small/run.json", "runs/grid/0001/run.json", "runs/a/b"):
        (here / path).parent.mkdir(parents=True, exist_ok=True)
        (here / path).touch()
    typed = words.split(" ")
    done = invoked(
        prog_name="fedleak",
        env={
            "_FEDLEAK_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(typed) - 1),
        },
    )
    completions = set(done.stdout.split())
    assert offered <= completions
    assert all(completion.startswith(typed[-1]) for completion in completions)
    assert offered or not completions


def test_nothing_is_cut_at_60_columns(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In tables and in the list; sentences with commands to copy are left to the terminal."""
    assert call("run", "small.toml")[0] == 0
    other = 'attack=[{kind="dlg", name="dlg-with-a-name-of-its-own", steps=2}]'
    assert call("attack", "runs/small", "--set", other)[0] == 0
    narrow = Console(file=io.StringIO(), width=60, force_terminal=False, emoji=False)
    for commands in (planning, runs):
        monkeypatch.setattr(commands, "console", narrow)
    assert call("list")[0] == 0
    assert call("score", "runs/small")[0] == 0
    text = narrow.file.getvalue()
    assert "…" not in text
    tables, _, sentences = text.partition("intervals: ")
    assert max(map(len, tables.splitlines())) <= 60
    for word in ("dlg-with-a-name-of-its-own", "probes", "none", "builtin/bert-tiny"):
        assert word in tables.split()
    assert tables.count("what the server read in each update") == 1
    assert tables.count("texts recovered exactly and ROUGE-L") == 1
    assert "results: " in sentences


def test_a_folder_that_is_no_run_is_status_2(here: Path) -> None:
    for command in ("attack", "score", "purge"):
        for path in (".", "nowhere", "small.toml"):
            status, _, errors = call(command, path)
            assert status == 2
            assert "is not a run directory" in errors
            assert errors.count("\n") == 1


@pytest.mark.slow
def test_too_slow_an_attack_is_tried_three_times_and_then_a_failed_row(folder: Path) -> None:
    attack = 'attack=[{kind="dlg", preset="faithful", steps=100000}]'
    status, text, errors = call(
        "run", "small.toml", "--set", attack, "--set", "workers.time_limit=5",
        "--set", "federation.clients_per_round=1",
    )  # fmt: skip
    assert status == 1
    assert errors.startswith("fedleak: 1 of 2 answers failed (dlg: TimeoutError: took longer than")
    assert errors.endswith("runs/small --retry` tries them again\n")
    assert "what the server read in each update" in text  # the report comes first
    assert [line["attack"] for line in rows("attempts.jsonl")] == ["dlg"] * 3
    failed = {row["attack"]: row for row in rows("leakage.jsonl")}
    assert failed["dlg"]["status"] == "failed"
    assert "workers.time_limit = 5 s" in failed["dlg"]["reason"]
    assert failed["dlg"]["rougeL"] is None
    assert failed["probes"]["status"] == "recovered"


def test_a_damaged_capture_fails_alone_and_can_be_mended(here: Path) -> None:
    assert call("run", "small.toml")[0] == 0
    before = rows("leakage.jsonl")
    capture = Path("runs/small/captures/r0001-c01.safetensors")
    capture.write_bytes(capture.read_bytes()[:5000])
    Path("runs/small/reconstructions.jsonl").unlink()
    status, _, errors = call("attack", "runs/small")
    assert status == 1
    assert "2 of 4 answers failed" in errors
    assert "r0001-c01.safetensors is damaged" in errors
    outcomes = sorted((row["client"], row["status"]) for row in rows("reconstructions.jsonl"))
    assert outcomes == [(0, "recovered")] * 2 + [(1, "failed")] * 2
    # What was measured before it was damaged stays.
    assert [row["status"] for row in rows("leakage.jsonl")] == ["recovered"] * 4
    capture.unlink()
    assert call("run", "small.toml")[0] == 1  # captured again; the answers that failed are there
    assert call("attack", "runs/small", "--retry")[0] == 0
    mended = rows("leakage.jsonl")
    assert [row | {"seconds": 0} for row in mended] == [row | {"seconds": 0} for row in before]


def test_a_changed_experiment_is_refused_and_fresh_moves_the_old_run_aside(here: Path) -> None:
    assert call("run", "small.toml")[0] == 0
    status, _, errors = call("run", "small.toml", "--set", "seed=5")
    assert status == 2
    assert "seed: 0 -> 5" in errors
    assert call("run", "small.toml", "--set", "seed=5", "--fresh")[0] == 0
    assert len(list(Path("runs").iterdir())) == 2


def test_stored_captures_take_new_attacks_and_threat_models(here: Path) -> None:
    assert call("run", "small.toml")[0] == 0
    command = ["attack", "runs/small", "--set", 'threat.knows=["labels", "lengths"]', "--set"]
    status, _, errors = call(*command, 'attack=[{kind="dlg", steps=2}]')
    assert status == 2
    assert "give this one another name" in errors
    assert call(*command, 'attack=[{kind="dlg", name="dlg-told", steps=2}]')[0] == 0
    knows = {row["attack"]: row["knows"] for row in rows("leakage.jsonl")}
    assert "lengths" in knows["dlg-told"]
    assert "lengths" not in knows["dlg"]
    status, _, errors = call("attack", "runs/small", "--set", "federation.rounds=5")
    assert status == 2
    assert "only attack, threat and workers" in errors
