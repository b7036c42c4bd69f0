"""Which detector finds which planted bug of a private mechanism.

    python experiments/planted_bugs.py [--only WORD]

The bugs are those that tests plant, each in the code that a run uses: `BROKEN` of
tests/audit/test_defense_checks.py and `MISTAKES` of tests/audit/test_canaries.py. Detectors:

  check      what `fedleak check-defense` says, before anything is trained
  canaries   alarms of `[canary]` in a run of two clients, or of the ledger about drawn examples
  unit tests the first test that fails of those of the defense (`UNIT_TESTS`), which know neither
  honest     the last lines: the same without a bug, where a detector must be silent

A dash says that a detector is not for this defense: nothing is guaranteed, so there is no ledger,
or the noise is the server's. It needs pytest. Each line takes some seconds.
"""

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForSequenceClassification

from fedleak.audit import defense_checks
from fedleak.config.experiment import Experiment
from fedleak.config.loading import parse
from fedleak.models import loading

TESTS = Path(__file__).parents[1] / "tests"
sys.path += [str(TESTS / "audit"), str(TESTS / "helpers")]

# After the path to them is there.
test_canaries: Any = import_module("test_canaries")
test_defense_checks: Any = import_module("test_defense_checks")

Plant = Callable[[pytest.MonkeyPatch], object]

UNIT_TESTS = {
    "dp_sgd": "training/test_private_steps.py",
    "local_dp": "test_defenses.py",
    "gaussian_noise": "test_defenses.py",
    "central_dp": "test_central_dp.py",
}
"""Tests of each defense without a check, a canary or a run with either, below tests/."""

SEEN: dict[str, Any] = {
    "count": 256,
    "samples": 64,
    "federation": {"rounds": 8, "batch_size": 16},
}
"""A run that shows bugs of single steps; tests of canaries have others."""

SHOWN_BY: dict[str, dict[str, Any]] = {
    "a sampler that takes some twice as often": {
        "count": 8,
        "federation": {"clients": 1, "rounds": 200, "batch_size": 32},
    }
}
"""What shows a bug that so few steps do not show."""

CONTRADICTED = "the mechanism does not do what the ledger says"

GUARANTEED = ("dp_sgd", "local_dp")
AUDITED = (*GUARANTEED, "central_dp", "gaussian_noise")


def main() -> None:
    """Prints the table, a line as soon as it is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="bugs whose name has this in it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small_model(Path(folder, "model"))
        test_canaries.MODEL["name"] = test_defense_checks.SMALL["name"] = f"{folder}/model"
        print("| planted | defense | check | canaries | unit tests |\n|---|---|---|---|---|")
        for number, (name, table, plant, experiment) in enumerate(planted()):
            if args.only in name:
                found = (
                    checked(table, plant),
                    audited(Path(folder, str(number)), table, plant, experiment),
                    tested(table, plant),
                )
                print(f"| {name} | {table['kind']} | {' | '.join(found)} |", flush=True)


def small_model(folder: Path) -> None:
    """Saves a BERT of the built-in one's vocabulary that costs a tenth."""
    table = test_defense_checks.TABLE | {"model": {"name": "builtin/bert-tiny"}}
    model = loading.load(parse(table).model_spec(2))
    config: Any = model.module.config
    config.hidden_size, config.num_attention_heads, config.intermediate_size = 32, 2, 64
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)


def planted() -> Iterator[tuple[str, dict[str, Any], Plant, Experiment]]:
    """Yields each bug: its name, the defense, how it is planted, and a run that shows it."""
    mistakes = [getattr(mistake, "values", mistake)[0] for mistake in test_canaries.MISTAKES]
    for table, plant, _ in test_defense_checks.BROKEN:
        if table["kind"] in AUDITED and plant not in mistakes:  # a bug counts once
            settings = SEEN | SHOWN_BY.get(named(plant), {})
            if table["kind"] == "local_dp":
                settings |= {"count": 1}
            yield named(plant), table, plant, test_canaries.experiment_of(table, **settings)
    for mistake, name in zip(test_canaries.MISTAKES, test_canaries.NAMES, strict=True):
        shown = getattr(mistake, "values", mistake)
        yield name, shown[1], shown[0], test_canaries.showing(*shown)
    for table in (test_canaries.DP_SGD, test_canaries.POISSON, test_canaries.LOCAL_DP):
        settings = SEEN | ({"count": 1} if table["kind"] == "local_dp" else {})
        honest = test_canaries.experiment_of(table, **settings)
        yield "nothing: honest", table, lambda patch: None, honest


def named(plant: Plant) -> str:
    """Returns what a bug is called."""
    return str(getattr(plant, "__name__", plant)).replace("_", " ")


def checked(table: dict[str, Any], plant: Plant) -> str:
    """Returns what the check of defenses says, in short."""
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        findings = defense_checks.check(test_defense_checks.experiment_of(table))
    failed = [finding.claim for finding in findings if not finding.holds]
    return f"**found**: {failed[0]}" if failed else "not found"


def audited(folder: Path, table: dict[str, Any], plant: Plant, experiment: Experiment) -> str:
    """Returns whether a run with canaries contradicts the ledger."""
    if table["kind"] not in GUARANTEED:
        return "-"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defense_checks, "refuse_broken", lambda *_: None)
        test_canaries.client_context._protection.cache_clear()
        plant(patch)
        run = test_canaries.audited(folder, experiment)
    wrong = run.read_document(test_canaries.SUMMARY).wrong
    return "**found**" if any(CONTRADICTED in sentence for sentence in wrong) else "not found"


class Planting:
    """A plugin of pytest that plants a bug for each test, and keeps which fail.

    Args:
        plant: How it is planted.
    """

    def __init__(self, plant: Plant) -> None:
        self._plant = plant
        self.failed: list[str] = []

    @pytest.fixture(autouse=True)
    def planted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Plants the bug."""
        self._plant(monkeypatch)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keeps a failure."""
        if report.failed:
            self.failed.append(report.nodeid.rpartition("::")[2].partition("[")[0])


def tested(table: dict[str, Any], plant: Plant) -> str:
    """Returns the first unit test of a defense that fails."""
    planting = Planting(plant)
    options = ["-x", "-q", "-W", "ignore", "-p", "no:xdist", "-o", "addopts="]
    options += ["--import-mode=importlib", "-m", "not slow and not gpu"]
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([str(TESTS / UNIT_TESTS[table["kind"]]), *options], [planting])
    return f"**found**: {planting.failed[0]}" if planting.failed else "not found"


if __name__ == "__main__":
    main()
