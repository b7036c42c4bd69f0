"""Pages that are written by hand above a marker, and by a command below it."""

from pathlib import Path

from fedleak.util.errors import ConfigError


def above(page: Path, marker: str) -> str:
    """Returns what a page says above its marker, with the marker; of a new one, the marker.

    Raises:
        ConfigError: The page has no marker, so that it is not one of the command.
    """
    if not page.exists():
        return marker
    written, found, _ = page.read_text(encoding="utf-8").partition(marker)
    if not found:
        raise ConfigError(f"--out {str(page)!r} has no line {marker.strip()!r}: give a new file")
    return written + marker
