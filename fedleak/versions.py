"""Versions of what results depend on: `fedleak --version` shows them, and run.json keeps them."""

import platform
from importlib.metadata import PackageNotFoundError, version

from fedleak import __version__

PACKAGES = ("flwr", "torch", "transformers", "peft", "datasets", "rouge-score")


def versions() -> dict[str, str]:
    """Returns the versions of fedleak, Python and the packages, without importing any."""
    found = {"fedleak": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # installed under another name, as vendors of torch do
            found[name] = "unknown"
    return found
