"""Versions of what results depend on: `fedleak --version` shows them, and run.json keeps them."""

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
