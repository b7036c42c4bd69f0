"""Pages that are written by hand above a marker, and by a command below it."""

from pathlib import Path

from fedleak.util.errors import ConfigError


def above(page: Path, marker: str, option: str = "--out") -> str:
    """Returns the text of a page down to its marker; for a new page, the marker alone.

    Raises:
        ConfigError: The page has no marker, so the command did not write it.
    """
    if not page.exists():
        return marker
    written, separator, _ = page.read_text(encoding="utf-8").partition(marker)
    if not separator:
        raise ConfigError(f"{option} {str(page)!r} has no line {marker.strip()!r}: give a new file")
    return written + marker
