"""Commands called wrongly."""

from pathlib import Path

import pytest

WRONG: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "attack no run": (("attack", "nope"), ("'nope'",)),
    "score no run": (("score", "nope"), ("'nope'",)),
    "purge no run": (("purge", "nope"), ("'nope'",)),
    "attack a file": (("attack", "e.toml"), ("'e.toml'",)),
    "score a file": (("score", "e.toml"), ("'e.toml'",)),
    "score this folder": (("score", "."), ("'.'",)),
    "score an escape": (("score", "\x1b[2Jx"), ("\\x1b",)),
    "check no defense": (("check-defense", "e.toml"), ("e.toml", "[[defense]]")),
    "check no file": (("check-defense", "nope.toml"), ("nope.toml",)),
    "run a run.json of nothing": (("run", "run.json"), ("run.json",)),
    "prior without text": (
        ("train-prior", "--text", "nope.txt", "--tokenizer", "builtin/bert-tiny"),
        ("nope.txt",),
    ),
    "prior of an empty text": (
        ("train-prior", "--text", "t.txt", "--tokenizer", "builtin/bert-tiny"),
        ("t.txt", "sentences"),
    ),
    "prior of no width": (
        ("train-prior", "--text", "t.txt", "--tokenizer", "builtin/bert-tiny", "--set", "width=7"),
        ("width = 7",),
    ),
    "prior of negative steps": (
        ("train-prior", "--text", "t.txt", "--tokenizer", "builtin/bert-tiny", "--set", "steps=-3"),
        ("steps = -3",),
    ),
    "prior over something": (
        ("train-prior", "--text", "t.txt", "--tokenizer", "builtin/bert-tiny", "--out", "there"),
        ("there",),
    ),
    "prior on no device": (
        ("train-prior", "--text", "t.txt", "--tokenizer", "builtin/bert-tiny", "--device", "tpu"),
        ("tpu",),
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_command_called_wrongly(fedleak, refused, experiment, folder: Path, case: str) -> None:
    (folder / "e.toml").write_text(experiment({}))
    if "run.json" in WRONG[case][0]:
        (folder / "run.json").write_text("{}")
    (folder / "t.txt").write_text("")
    (folder / "there").mkdir()
    arguments, says = WRONG[case]
    refused(fedleak(*arguments), *says)


USAGE = [
    (),
    ("nope",),
    ("run", "--nope"),
    ("sweep",),
    ("sweep", "e.toml", "--jobs", "0"),
    ("sweep", "e.toml", "--jobs", "two"),
    ("attack",),
    ("score",),
    ("score", "a", "b"),
    ("check-defense",),
    ("train-prior",),
    ("list", "attacks"),
    ("purge",),
]


@pytest.mark.parametrize("arguments", USAGE, ids=" ".join)
def test_usage(fedleak, folder: Path, arguments: tuple[str, ...]) -> None:
    outcome = fedleak(*arguments)
    assert not outcome.crash
    assert outcome.status == 2
    assert "Usage" in outcome.err + outcome.out


def test_runs_is_a_file(run, refused, folder: Path) -> None:
    (folder / "runs").write_text("mine")
    refused(run({}), "runs", "Not a directory", status=1)
    assert (folder / "runs").read_text() == "mine"


def test_a_folder_with_something_else_in_it(run, refused, folder: Path) -> None:
    (folder / "runs/b").mkdir(parents=True)
    (folder / "runs/b/notes.txt").write_text("mine")
    refused(run({}), "runs/b", "notes.txt")
    assert [path.name for path in (folder / "runs/b").iterdir()] == ["notes.txt"]
