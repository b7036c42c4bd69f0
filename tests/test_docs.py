"""The README's commands are those that CI runs, and its example file is right."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedleak import sweep
from fedleak.cli import QUICKSTART, app
from fedleak.config.loading import load
from fedleak.metrics import intervals

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_ci_runs_the_readme_test_command() -> None:
    commands = re.findall(r"```sh\n(python3 -m venv .*)\n```", README)
    assert len(commands) == 2
    assert commands[1] in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments").glob("*.toml")), ids=lambda p: p.stem
)
def test_every_experiment_file_is_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLEAK_ASSETS", "assets")
    swept = "[sweep]" in path.read_text()
    assert (sweep.load(path) if swept else load(path)).name == path.stem


def test_the_readme_examples_are_valid(tmp_path: Path) -> None:
    example, swept, matching = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "example.toml"
    path.write_text(example.replace('devices = ["cuda:0"]', 'devices = ["cpu"]'))
    assert load(path).clients_per_round == 4
    path.write_text(path.read_text() + matching)
    assert [each.name for each in load(path).attacks] == ["probes", "dager", "lamp"]
    path.write_text(path.read_text() + swept)
    assert "federation.batch_size=4,defense=none,seed=1" in {
        cell.name for cell in sweep.load(path).cells
    }


@pytest.mark.slow
@pytest.mark.parametrize("path", QUICKSTART, ids=lambda path: path.stem)
def test_the_model_of_a_quickstart_learns(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a reader asks whether such updates are those of a real training."""
    monkeypatch.chdir(tmp_path)
    settings = ("--set", "name=learns", "--set", "attack=[]")
    assert CliRunner().invoke(app, ["run", str(path), *settings]).exit_code == 0
    summary = json.loads((tmp_path / "runs" / "learns" / "summary.json").read_text())
    before, after = summary["utility_before"], summary["utility"]
    if "accuracy" in after:
        right = round(after["accuracy"] * summary["held_out"])
        assert intervals.share(right, summary["held_out"]).low > 0.5
    else:
        assert after["perplexity"] < before["perplexity"] / 2
