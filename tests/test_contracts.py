"""What may import what: the contracts in pyproject.toml hold, and each catches what it is for."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT = Path(sys.executable).with_name("lint-imports")
THIN = "the apps at the top are thin: the library carries what they need"
NO_FLOWER = "only the Flower side and the tap know Flower"
MESSAGES = "server and clients meet in messages only"
NO_TRUTH = "an attack cannot see the truth"
NO_FILES = "an attack reads no files"
NO_VAULT = "a report shows what scoring returned, and does not open the vault"
ROOMS = "attacks are few rooms, and each knows only those below it"
CONFIG = "from the tables of a file to an experiment, and from there to its model"
NO_CIRCLE = "training has no circle"
BY_KIND = "only auto imports an attack: it is found by its kind"
AUDIT = "the audit goes from a capture to a verdict"
RUNNING = "running goes from the worker to the sweep"
DOWN = "rooms depend on the rooms below them"

# A contract, a module or the package of a new module, and what the module imports.
FORBIDDEN = [
    (THIN, "fedleak", "server"),
    (THIN, "fedleak.report", "clients"),
    (THIN, "clients", "server"),
    (THIN, "fedleak.tap", "server"),
    (MESSAGES, "fedleak.flower.client", "fedleak.flower.server.app"),
    (NO_FLOWER, "fedleak.training", "flwr"),
    (NO_FLOWER, "fedleak.running.bench", "flwr"),
    (DOWN, "fedleak.running.reports", "fedleak.tap"),
    (DOWN, "fedleak.running", "fedleak.flower"),
    *(
        (NO_TRUTH, package, f"fedleak.{module}")
        for package in ("fedleak.attacks", "fedleak.attacks.matching", "fedleak.running.workers")
        for module in ("training.truth", "data", "audit")
    ),
    (NO_FILES, "fedleak.attacks.subspace", "fedleak.store"),
    (NO_FILES, "fedleak.attacks.analytic", "fedleak.config"),
    (NO_VAULT, "fedleak.report.html", "fedleak.audit.vault"),
    (NO_VAULT, "fedleak.report.html", "fedleak.training.truth"),
    (NO_VAULT, "fedleak.report.html", "fedleak.data"),
    (ROOMS, "fedleak.attacks.subspace", "fedleak.attacks.matching"),
    (ROOMS, "fedleak.attacks.subspace", "fedleak.attacks.analytic"),
    (ROOMS, "fedleak.attacks.analytic", "fedleak.attacks.matching"),
    (ROOMS, "fedleak.attacks.matching", "fedleak.attacks.auto.evidence"),
    (CONFIG, "fedleak.config.wording", "fedleak.config.loading"),
    (CONFIG, "fedleak.config.experiment", "fedleak.config.checks"),
    (NO_CIRCLE, "fedleak.training.batches", "fedleak.training.local"),
    (NO_CIRCLE, "fedleak.training.settings", "fedleak.training.private_steps"),
    (ROOMS, "fedleak.attacks.matching", "fedleak.attacks.outside"),
    (BY_KIND, "fedleak.running.bench", "fedleak.attacks.outside.command"),
    (RUNNING, "fedleak.running.sweep", "fedleak.running.bench"),
    (RUNNING, "fedleak.running.preparation", "fedleak.running.pipeline"),
    (AUDIT, "fedleak.audit.vault", "fedleak.audit.scoring"),
    (AUDIT, "fedleak.audit.metrics", "fedleak.audit.estimates"),
    (BY_KIND, "fedleak.attacks.matching", "fedleak.attacks.matching.lamp"),
    (BY_KIND, "fedleak.audit.metrics", "fedleak.attacks.subspace.dager"),
    (BY_KIND, "fedleak.running.workers", "fedleak.attacks.auto.attack"),
    (DOWN, "fedleak.models", "fedleak.training"),
    (DOWN, "fedleak.training", "fedleak.attacks"),
    (DOWN, "fedleak.attacks", "fedleak.running.workers.process"),
    (DOWN, "fedleak.store", "fedleak.audit.scoring"),
    (DOWN, "fedleak.store", "fedleak.cli"),
]

pytestmark = [
    pytest.mark.core,
    pytest.mark.skipif(not LINT.is_file(), reason="import-linter is not installed"),
]


def broken(folder: Path) -> dict[str, str]:
    """Returns, by name, what is said of each contract that the packages in a folder break."""
    done = subprocess.run(
        [LINT, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert "Contracts: " in done.stdout, done.stdout + done.stderr
    names = re.findall("^(.*) BROKEN", done.stdout, re.MULTILINE)
    parts = re.split(r"^(.+)\n-+\n", done.stdout, flags=re.MULTILINE)
    return {name: parts[parts.index(name) + 1] for name in names}


def copy(folder: Path) -> Path:
    """Copies the packages and the contracts."""
    for package in ("fedleak", "clients", "server"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, folder / package, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def importer_of(i: int, where: str) -> str:
    """Returns the module that is to import something."""
    return where if not (ROOT / where.replace(".", "/")).is_dir() else f"{where}.intruder_{i}"


@pytest.fixture(scope="module")
def broken_contracts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said of the packages with all those imports."""
    folder = copy(tmp_path_factory.mktemp("intruders"))
    for i, (_, where, imported) in enumerate(FORBIDDEN):
        importer = importer_of(i, where)
        with folder.joinpath(*importer.split(".")).with_suffix(".py").open("a") as file:
            print(f"import {imported}", file=file)
    return broken(folder)


def test_no_contract_is_broken(tmp_path):
    assert broken(copy(tmp_path)) == {}


@pytest.mark.parametrize(("i", "case"), list(enumerate(FORBIDDEN)))
def test_a_forbidden_import_breaks_its_contract(broken_contracts, i, case):
    contract, where, imported = case
    assert f"{importer_of(i, where)} -> {imported} (l." in broken_contracts[contract]


def test_every_contract_has_an_import_that_breaks_it():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    names = [contract["name"] for contract in settings["contracts"]]
    assert sorted({name for name, _, _ in FORBIDDEN}) == sorted(names)


def test_every_room_has_its_layer_and_is_kept_from_flower_unless_it_is_the_flower_side():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    contracts = {contract["name"]: contract for contract in settings["contracts"]}
    rooms = {f"fedleak.{path.parent.name}" for path in (ROOT / "fedleak").glob("*/__init__.py")}
    layers = {name for layer in contracts[DOWN]["layers"] for name in layer.split(" | ")}
    assert layers == rooms
    assert {*contracts[NO_FLOWER]["source_modules"], "fedleak.flower", "fedleak.tap"} == rooms


def test_nothing_lies_loose_in_the_house():
    assert {path.name for path in (ROOT / "fedleak").glob("*.py")} == {"__init__.py", "__main__.py"}
