"""What may import what: the contracts in pyproject.toml hold, and catch what they are for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINT = Path(sys.executable).with_name("lint-imports")


def broken_contracts(folder):
    done = subprocess.run(
        [LINT, "--no-cache"], cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    lines = done.stdout.splitlines()
    return [line.partition(" BROKEN")[0] for line in lines if " BROKEN" in line]


@pytest.fixture
def copy(tmp_path):
    for package in ("fedleak", "clients", "server"):
        shutil.copytree(ROOT / package, tmp_path / package)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.skipif(not LINT.is_file(), reason="import-linter is not installed")
@pytest.mark.parametrize("module", ["fedleak.notes", "fedleak.data"])
@pytest.mark.parametrize("file", ["attacks/matching/dlg.py", "workers/process.py"])
def test_an_attack_that_imports_private_texts_breaks_a_contract(copy, module, file):
    assert broken_contracts(copy) == []
    path = copy / "fedleak" / file
    path.write_text(f"{path.read_text()}\nimport {module}\n")
    assert "an attack cannot see the truth" in broken_contracts(copy)
