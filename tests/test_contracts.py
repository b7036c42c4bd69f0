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
APART = "the apps use the library, never the other way round, and not each other"
NO_FLOWER = "the library does not know Flower"
NO_TRUTH = "an attack cannot see the truth"
NO_FILES = "an attack reads no files"
NO_VAULT = "a report shows what scoring returned, and does not open the vault"
ROOMS = "attacks are few rooms, and each knows only those below it"
CONFIG = "from the tables of a file to an experiment, and from there to its model"
NO_CIRCLE = "training has no circle"
BY_KIND = "only auto imports an attack: it is found by its kind"
DOWN = "dependencies point down"

# A contract, a module or the package of a new module, and what the module imports.
FORBIDDEN = [
    (APART, "fedleak", "server"),
    (APART, "fedleak.report", "clients"),
    (APART, "clients", "server"),
    (APART, "fedleak.tap", "server"),
    (DOWN, "fedleak.reports", "fedleak.tap"),
    (NO_FLOWER, "fedleak", "flwr"),
    (NO_FLOWER, "fedleak.training", "flwr"),
    *(
        (NO_TRUTH, package, f"fedleak.{module}")
        for package in ("fedleak.attacks", "fedleak.attacks.matching", "fedleak.workers")
        for module in ("truth", "metrics", "data", "audit", "notes")
    ),
    (NO_FILES, "fedleak.attacks.subspace", "fedleak.store"),
    (NO_FILES, "fedleak.attacks.analytic", "fedleak.config"),
    (NO_VAULT, "fedleak.report.html", "fedleak.audit.vault"),
    (NO_VAULT, "fedleak.report.html", "fedleak.truth"),
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
    (BY_KIND, "fedleak.bench", "fedleak.attacks.outside.command"),
    (DOWN, "fedleak.sweep", "fedleak.bench"),
    (BY_KIND, "fedleak.attacks.matching", "fedleak.attacks.matching.lamp"),
    (BY_KIND, "fedleak.metrics", "fedleak.attacks.subspace.dager"),
    (BY_KIND, "fedleak.workers", "fedleak.attacks.auto.attack"),
    (DOWN, "fedleak.models", "fedleak.training"),
    (DOWN, "fedleak.training", "fedleak.attacks"),
    (DOWN, "fedleak.attacks", "fedleak.workers.process"),
    (DOWN, "fedleak.store", "fedleak.audit.scoring"),
    (DOWN, "fedleak.store", "fedleak.cli"),
]

pytestmark = pytest.mark.skipif(not LINT.is_file(), reason="import-linter is not installed")


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
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
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
def test_a_forbidden_import_breaks_its_contract(told, i, case):
    contract, where, imported = case
    assert f"{importer_of(i, where)} -> {imported} (l." in told[contract]


def test_every_contract_has_an_import_that_breaks_it():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    names = [contract["name"] for contract in settings["contracts"]]
    assert sorted({name for name, _, _ in FORBIDDEN}) == sorted(names)


def test_every_module_that_imports_anything_has_its_layer():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = [each for each in settings["contracts"] if each["name"] == DOWN]
    layers = tuple(f"{name}." for layer in contract["layers"] for name in layer.split(" | "))
    without = []
    for path in (ROOT / "fedleak").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        imports = re.search(r"^(from|import) ", path.read_text(), re.MULTILINE)
        if imports and not f"{name}.".startswith(layers):
            without.append(name)
    assert set(without) <= {"fedleak", "fedleak.__main__"}
