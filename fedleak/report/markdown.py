"""Tables in Markdown. Texts may be anybody's, so they are escaped before they come here."""

import re
from collections.abc import Iterator, Sequence

from fedleak.util.sanitise import printable


def escaped(text: str) -> str:
    """Returns Markdown that shows a text as it is."""
    return re.sub(r"([\\`*_\[\]<>|#!&~$])", r"\\\1", printable(text))


def code(text: str) -> str:
    """Returns a text between backticks, in a table too."""
    shown = printable(text).replace("`", "'").replace("|", r"\|")
    return f"`{shown}`"


def lines(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yields the lines of a table, whose cells are Markdown."""
    for row in (headings, ["---"] * len(headings), *rows):
        yield f"| {' | '.join(row)} |"
