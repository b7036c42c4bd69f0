"""Quiet and offline; the fixtures of all tests are in helpers/shared_fixtures.py."""

import gc
import os
from pathlib import Path

import pytest

# Before numpy is imported: OpenBLAS otherwise has a thread for each core in each of the processes,
# and they wait for each other at full speed.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("FLWR_LOG_LEVEL", "ERROR")
# A key of the tests' own: none is made in the home of whoever runs them.
os.environ["FEDLEAK_SEAL_KEY"] = str(Path(__file__).with_name("helpers") / "seal.key")


def pytest_configure(config: pytest.Config) -> None:
    """Imports the fixtures where tests run.

    With `-n`, the first process hands out tests and runs none: it would take seconds to import
    torch and transformers, for which all others would wait.
    """
    only_hands_out = config.getoption("tx", None) and not hasattr(config, "workerinput")
    if not only_hands_out:
        gc.disable()  # what is made by imports and for thousands of tests stays
        config.pluginmanager.import_plugin("shared_fixtures")


def pytest_collection_finish() -> None:
    """What was made until here is not looked through for garbage again and again."""
    gc.freeze()
    gc.enable()
