"""Run directories in which a file is damaged: nothing is lost, nothing is silent, no traceback."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

DAMAGE: dict[str, Callable[[bytes], bytes | None]] = {
    "gone": lambda old: None,
    "empty": lambda old: b"",
    "cut": lambda old: old[: len(old) // 2],
    "cut at the end": lambda old: old[:-3],
    "garbage": lambda old: os.urandom(len(old)),
    "object": lambda old: b"{}\n",
    "list": lambda old: b"[]\n",
    "null": lambda old: b"null\n",
    "bad line first": lambda old: b'{"round" 1}\n' + old,
    "binary in the middle": lambda old: old[: len(old) // 2] + b"\xff\xfe\0" + old[len(old) // 2 :],
}

FILES = (
    "run.json",
    "held_out.json",
    "reconstructions.jsonl",
    "leakage.jsonl",
    "privacy.jsonl",
    "defenses.jsonl",
    "utility.jsonl",
    "summary.json",
    "captures/r0001-c01.safetensors",
    "models/r0001.safetensors",
    "models/r0002.safetensors",
    "vault/r0001-c01.json",
    "defended/r0001-c01.json",
)

COMMANDS: dict[str, tuple[str, ...]] = {
    "score": ("score", "runs/b"),
    "attack": ("attack", "runs/b"),
    "run": ("run", "e.toml"),
    "new attack": ("attack", "runs/b", "--set", 'attack=[{kind="keyspan", name="again", beam=2}]'),
    "purge": ("purge", "runs/b"),
}

MADE_BY_SCORE = {"leakage.jsonl", "privacy.jsonl", "defenses.jsonl", "summary.json"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, fedleak, experiment) -> Path:
    """A folder in which a run has finished."""
    made = tmp_path_factory.mktemp("finished")
    before = Path.cwd()
    os.chdir(made)
    try:
        (made / "e.toml").write_text(
            experiment({"defense": [{"kind": "gaussian_noise", "sigma": 1e-6}]})
        )
        done = fedleak("run", "e.toml")
        assert done.status == 0, done.err
    finally:
        os.chdir(before)
    return made


def scored(folder: Path) -> list[dict[str, Any]]:
    """Returns the rows of the first attacks, without what differs between two tries."""
    path = folder / "runs/b/leakage.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [
        {key: value for key, value in row.items() if key not in ("seconds", "diagnostics")}
        for row in rows
        if row["attack"] != "again"
    ]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("file", FILES)
def test_a_damaged_file(
    fedleak, refused, finished: Path, folder: Path, file: str, damage: str, command: str
) -> None:
    shutil.copytree(finished, folder, dirs_exist_ok=True)
    path, before = folder / "runs/b" / file, scored(finished)
    changed = DAMAGE[damage](path.read_bytes())
    if changed is None:
        path.unlink()
    else:
        path.write_bytes(changed)
    outcome = fedleak(*COMMANDS[command])
    assert not outcome.crash, outcome.crash
    assert outcome.status in (0, 1, 2)
    if outcome.status == 0:
        # All is there, as it was, and can be read again.
        assert scored(folder) == before
        if command != "purge":  # which promises no more than that rows stay
            assert fedleak("score", "runs/b").status == 0
        return
    refused(outcome, status=outcome.status)
    # The file, or what was in it and the command that makes it anew.
    assert file.split("/")[-1].split(".")[0] in outcome.err or "`fedleak " in outcome.err, (
        outcome.err
    )
    if file != "leakage.jsonl" and damage != "gone":
        kept = scored(folder)
        assert all(row in before or row["status"] == "failed" for row in kept)


def test_another_experiment_s_captures_are_never_adopted(
    fedleak, experiment, refused, finished: Path, folder: Path
) -> None:
    shutil.copytree(finished, folder, dirs_exist_ok=True)
    (folder / "runs/b/run.json").unlink()
    (folder / "e.toml").write_text(experiment({"seed": 5}))
    refused(fedleak("run", "e.toml"), "runs/b", "run.json", "--fresh")


def test_a_capture_of_another_run_is_not_attacked(
    fedleak, experiment, finished: Path, folder: Path
) -> None:
    (folder / "e.toml").write_text(experiment({"seed": 5}))
    assert fedleak("run", "e.toml").status == 0
    other = finished / "runs/b/captures/r0001-c01.safetensors"
    shutil.copy(other, folder / "runs/b/captures/r0001-c01.safetensors")
    outcome = fedleak(
        "attack", "runs/b", "--set", 'attack=[{kind="keyspan", name="again", beam=2}]'
    )
    assert outcome.status == 1
    assert "r0001-c01" in outcome.err
