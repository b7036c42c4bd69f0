"""What a shell offers after Tab: experiment files and run directories.

If nothing here fits, the shell offers files as it does for any command.
"""

from collections.abc import Iterator
from glob import escape, iglob
from pathlib import Path


def experiment_files(incomplete: str) -> Iterator[str]:
    """Yields TOML files that begin so, also those one folder down."""
    for pattern in ("*.toml", "*/*.toml"):
        yield from sorted(iglob(escape(incomplete) + pattern))


def run_directories(incomplete: str) -> Iterator[str]:
    """Yields run directories that begin so, also those in runs/ and in a sweep's folder."""
    for pattern in ("*/run.json", "*/*/run.json", "*/*/*/run.json"):
        for run_json in sorted(iglob(escape(incomplete) + pattern)):
            yield str(Path(run_json).parent)
