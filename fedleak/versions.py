"""Versions of what results depend on: `fedleak --version` shows them, and run.json keeps them."""

from functools import cache

VERSION = "0.1.0"
"""Of fedleak."""

PACKAGES = ("flwr", "torch", "transformers", "peft", "datasets", "rouge-score")


def versions() -> dict[str, str]:
    """Returns the versions of fedleak, Python and the packages, without importing any."""
    import platform  # `import fedleak` comes here, and is to take no time
    from importlib.metadata import PackageNotFoundError, version

    found = {"fedleak": VERSION, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # installed under another name, as vendors of torch do
            found[name] = "unknown"
    return found


@cache
def code() -> str:
    """Returns the version of the fedleak that is running, and a mark of its very files.

    Flower runs the copy of fedleak that an app brings, or an installed one where it brings none,
    so a version number alone does not tell whether two machines run the same.
    """
    import hashlib
    from pathlib import Path

    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for package in ("clients", "fedleak"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{VERSION} ({digest.hexdigest()[:12]})"
