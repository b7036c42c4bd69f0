"""Which detector finds which planted bug of a private mechanism.

    python experiments/planted_bugs.py [--only WORD] [--honest SEEDS]

The bugs are those that tests plant, each in the code that a run uses: `BROKEN` of
tests/audit/test_defense_checks.py, `MISTAKES` of tests/audit/test_canaries.py and `FRESH` of
tests/helpers/planted.py, which were made up last. Detectors:

  check      what `fedleak check-defense` says, before anything is trained
  canaries   alarms of `[canary]` in a run of two clients, or of the ledger about drawn examples
  unit tests the first test that fails of those of the defense (`UNIT_TESTS`), which know neither
  honest     the last lines: the same without a bug, where a detector must be silent

A dash says that canaries are not for this defense: nothing is guaranteed, so there is no ledger, or
noise is correlated over rounds. It needs pytest. Each line takes some seconds.

With --honest nothing is planted, and the table says how often each detector accuses mechanisms that
do what they say: a run and a check for each seed.
"""

import argparse
import contextlib
import io
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from scipy.stats import binomtest
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
FRESH: Any = import_module("planted").FRESH
LOCAL_STEPS: Any = import_module("planted").LOCAL_STEPS

Plant = Callable[[pytest.MonkeyPatch], object]

UNIT_TESTS = {
    "dp_sgd": "training/test_private_steps.py",
    "local_dp": "test_defenses.py",
    "gaussian_noise": "test_defenses.py",
    "central_dp": "test_central_dp.py",
    "dp_ftrl": "test_dp_ftrl.py",
    "adaptive_clipping": "test_adaptive_clipping.py",
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

NONE = "nothing: "
"""How the names of lines begin in which nothing is planted."""

CONTRADICTED = "the mechanism does not do what the ledger says"

GUARANTEED = ("dp_sgd", "local_dp", "central_dp", "adaptive_clipping")
AUDITED = UNIT_TESTS.keys()


def main() -> None:
    """Prints the table, a line as soon as it is known."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="bugs, or mechanisms, whose name has this")
    parser.add_argument("--honest", type=int, default=0, help="seeds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        small_model(Path(folder, "model"))
        test_canaries.MODEL["name"] = test_defense_checks.SMALL["name"] = f"{folder}/model"
        if args.honest:
            for line in honest(Path(folder), args.honest, args.only):
                print(line, flush=True)
            return
        print("| planted | defense | check | canaries | unit tests |\n|---|---|---|---|---|")
        rows = []
        for number, bug in enumerate(planted()):
            if args.only in bug.name:
                cells = checked(bug), audited(Path(folder, str(number)), bug), tested(bug)
                rows.append((bug.name, bug.kind, *cells))
                print(f"| {' | '.join(rows[-1])} |", flush=True)
    print(f"\n{summed_up(rows)}")


def summed_up(rows: Sequence[Sequence[str]]) -> str:
    """Returns how many bugs each detector finds, of the cells of the table."""
    bugs = [row for row in rows if not row[0].startswith(NONE)]
    check, canaries, unit_tests = (
        sum(row[column].startswith("**found**") for row in bugs) for column in (2, 3, 4)
    )
    guaranteed = sum(row[3] != "-" for row in bugs)
    return (
        f"Of {len(bugs)} bugs the check finds {check} and the unit tests {unit_tests}; canaries "
        f"find {canaries} of {guaranteed}."
    )


def small_model(folder: Path) -> None:
    """Saves a BERT of the built-in one's vocabulary that costs a tenth."""
    table = test_defense_checks.TABLE | {"model": {"name": "builtin/bert-tiny"}}
    model = loading.load(parse(table).model_spec(2))
    config: Any = model.module.config
    config.hidden_size, config.num_attention_heads, config.intermediate_size = 32, 2, 64
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    model.tokenizer.save_pretrained(folder)


class Bug(NamedTuple):
    """A bug.

    Attributes:
        name: What it is called.
        kind: Of its defense.
        plant: How it is planted.
        checked: What is checked.
        run: What shows it to canaries.
    """

    name: str
    kind: str
    plant: Plant
    checked: Experiment
    run: Experiment


def planted() -> Iterator[Bug]:
    """Yields each bug once, and then none."""
    mistakes = [mistake[0] for mistake in test_canaries.MISTAKES]
    for table, plant, _ in test_defense_checks.BROKEN:
        if table["kind"] in AUDITED and plant not in mistakes:
            yield _bug(table, plant, SHOWN_BY.get(named(plant), {}))
    for mistake, name in zip(test_canaries.MISTAKES, test_canaries.NAMES, strict=True):
        experiment = test_canaries.showing(*mistake)
        yield Bug(name, mistake[1]["kind"], mistake[0], experiment, experiment)
    for table, plant, settings in FRESH:
        yield _bug(table, plant, settings)
    whole = test_canaries.LOCAL_DP, test_defense_checks.CENTRAL_DP
    for table in (test_canaries.DP_SGD, test_canaries.POISSON, *whole):
        yield _bug(table, nothing__honest, {})


def _bug(table: dict[str, Any], plant: Plant, settings: dict[str, Any]) -> Bug:
    # Of an update each, so that each has many numbers of this small model.
    copies = {} if table["kind"] == "dp_sgd" else {"count": 16}
    shown = test_canaries.experiment_of(table, **SEEN | copies | settings)
    federation = test_defense_checks.TABLE["federation"]
    federation = federation | {"algorithm": shown.federation.algorithm}
    checked = test_defense_checks.experiment_of(table, federation=federation)
    return Bug(named(plant), table["kind"], plant, checked, shown)


def nothing__honest(patch: pytest.MonkeyPatch) -> None:
    """Plants nothing."""


def honest(folder: Path, seeds: int, only: str) -> Iterator[str]:
    """Yields how often a mechanism without a bug is accused."""
    yield "| mechanism | runs accused | checks that fail | of | at most, with 95 % confidence |"
    yield "|---|---|---|---|---|"
    fixed, poisson, whole = test_canaries.DP_SGD, test_canaries.POISSON, test_canaries.LOCAL_DP
    for name, table, federation in (
        ("dp_sgd, fixed batches", fixed, {}),
        ("dp_sgd, Poisson sampling", poisson, {}),
        ("dp_sgd, Poisson sampling, local steps", poisson, LOCAL_STEPS["federation"]),
        ("local_dp", whole, {}),
        ("central_dp", test_defense_checks.CENTRAL_DP | {"noise_multiplier": 1.0}, {}),
    ):
        if only not in name:
            continue
        accused = failed = 0
        for seed in range(seeds):
            settings = {"seed": seed, "count": 32, "samples": 16}
            federation = {"rounds": 3, "batch_size": 4, **federation}
            run = test_canaries.experiment_of(table, federation=federation, **settings)
            bug = Bug(name, table["kind"], nothing__honest, run, run)
            accused += "found**" in audited(folder / f"{name}-{seed}", bug)
            failed += "found**" in checked(bug)
        most = binomtest(max(accused, failed), seeds).proportion_ci(0.9, "exact").high
        yield f"| {name} | {accused} | {failed} | {seeds} | {100 * most:.2g} % |"


def named(plant: Plant) -> str:
    """Returns what a bug is called."""
    return str(getattr(plant, "__name__", plant)).replace("__", ": ").replace("_", " ")


def checked(bug: Bug) -> str:
    """Returns what the check of defenses says, in short."""
    with pytest.MonkeyPatch.context() as patch:
        bug.plant(patch)
        findings = defense_checks.check(bug.checked)
    failed = [finding.claim for finding in findings if not finding.holds]
    return f"**found**: {failed[0]}" if failed else "not found"


def audited(folder: Path, bug: Bug) -> str:
    """Returns whether a run with canaries contradicts the ledger."""
    if bug.kind not in GUARANTEED:
        return "-"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defense_checks, "refuse_broken", lambda *_: None)
        test_canaries.client_context._protection.cache_clear()
        bug.plant(patch)
        run = test_canaries.audited(folder, bug.run)
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


def tested(bug: Bug) -> str:
    """Returns the first unit test of a defense that fails."""
    planting = Planting(bug.plant)
    options = ["-x", "-q", "-W", "ignore", "-p", "no:xdist", "-o", "addopts="]
    options += ["--import-mode=importlib", "-m", "not slow and not gpu"]
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([str(TESTS / UNIT_TESTS[bug.kind]), *options], [planting])
    return f"**found**: {planting.failed[0]}" if planting.failed else "not found"


if __name__ == "__main__":
    main()
