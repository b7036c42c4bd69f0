"""A table as a value, which `terminal.table` prints and a page shows.

Texts in it are as others wrote them: whoever shows it makes them printable and escapes them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum


class Tone(StrEnum):
    """How a cell stands out."""

    PLAIN = ""
    ALARM = "alarm"
    GAP = "gap"


@dataclass(frozen=True)
class Cell:
    """A text, with lines below it, or with a link to a file beside the page."""

    text: str
    tone: Tone = Tone.PLAIN
    below: Sequence[str] = ()
    address: str = ""

    @property
    def lines(self) -> Sequence[str]:
        """The text, and what is below it."""
        return [self.text, *self.below]


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        heading: What stands above it.
        words: It holds words, flush left, and not figures.
        page_only: A terminal, which has less room, leaves it out.
    """

    heading: str
    words: bool = False
    page_only: bool = False


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        title: What it shows.
        columns: The first column names the row.
        rows: Each has as many cells as there are columns.
        notes: What else a reader should know about the table.
        groups: How many columns name a group of neighbouring rows; a terminal shows them once.
        kept: How many columns each part repeats if the table is too wide; 0: it has no parts.
        first: How many rows are shown at once: a page folds the others away, and a terminal leaves
            them out; None: all.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    groups: int = 0
    kept: int = 0
    first: int | None = None

    def only(self, places: Iterable[int]) -> "Table":
        """Returns the table with the columns at these places."""
        places = list(places)
        return replace(
            self,
            columns=[self.columns[place] for place in places],
            rows=[[row[place] for place in places] for row in self.rows],
            groups=sum(place < self.groups for place in places),
            kept=sum(place < self.kept for place in places),
        )

    def parts(self, fits: Callable[["Table"], bool]) -> Iterator["Table"]:
        """Yields the table, or, if it does not fit, tables with fewer of its columns.

        The first part has the title, the last part the notes.
        """
        left = list(range(self.kept, len(self.columns)))
        if not self.kept or not left:
            yield self
            return
        title = self.title
        while left:
            count = len(left)
            while count > 1 and not fits(self.only([*range(self.kept), *left[:count]])):
                count -= 1
            part = self.only([*range(self.kept), *left[:count]])
            left = left[count:]
            yield replace(part, title=title, notes=() if left else self.notes)
            title = ""


def figures(*headings: str) -> list[Column]:
    """Returns columns of figures."""
    return [Column(heading) for heading in headings]


def words(*headings: str) -> list[Column]:
    """Returns columns of words."""
    return [Column(heading, words=True) for heading in headings]


Row = Sequence[Cell | str]
"""The cells of a row; a text is a cell that does not stand out."""


def cells(rows: Iterable[Row]) -> list[list[Cell]]:
    """Returns the rows of a table."""
    return [[cell if isinstance(cell, Cell) else Cell(cell) for cell in row] for row in rows]
