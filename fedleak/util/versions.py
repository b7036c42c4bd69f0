"""What results depend on: `fedleak --version` shows the versions, and run.json keeps all."""

from functools import cache

VERSION = "0.1.0"
"""The version of fedleak."""

PACKAGES = ("flwr", "torch", "transformers", "peft", "datasets", "rouge-score")


def versions() -> dict[str, str]:
    """Returns the versions of fedleak, Python and the packages, without importing any."""
    import platform  # `import fedleak` comes here, and is to take no time
    from importlib.metadata import PackageNotFoundError, version

    installed = {"fedleak": VERSION, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:  # installed under another name, as vendors of torch do
            installed[name] = "unknown"
    return installed


def now() -> str:
    """Returns the date and the time of day in UTC, to the minute."""
    from datetime import UTC, datetime

    return f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"


def made_by() -> dict[str, str | None]:
    """Returns when, by whom and on what machine something is made now, for run.json.

    The machine has no name here. LOGNAME names another user than the one of the system.
    """
    import getpass
    import os
    import platform

    import psutil

    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # in a container a user may have a number alone
        user = None
    memory = psutil.virtual_memory().total / 2**30
    machine = (
        f"{platform.system()} {platform.release()}, {_processor()}, {os.cpu_count()} cores, "
        f"{memory:.1f} GiB"
    )
    return {"begun": now(), "user": user, "machine": machine}


def _processor() -> str:
    """Returns what a processor is called; Python itself knows its architecture alone."""
    import platform
    from pathlib import Path

    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


@cache
def code() -> str:
    """Returns the version of the fedleak that is running, and a mark of its very files.

    Flower runs the copy of fedleak that an app brings, or an installed one where it brings none,
    so a version number alone does not tell whether two machines run the same.
    """
    import hashlib
    from pathlib import Path

    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    tables = (package / "config" / "presets.toml", package / "data" / "notes.toml")
    for path in sorted([*package.rglob("*.py"), *tables]):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"{VERSION} ({digest.hexdigest()[:12]})"
