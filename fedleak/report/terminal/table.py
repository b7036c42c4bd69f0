"""Prints a table on a terminal. Whatever is in it is made printable, and none of it is markup."""

import textwrap
from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from fedleak.report.table import Cell, Column, Table, Tone
from fedleak.util.sanitise import markup, printable

LONGEST_WORD = 24
"""The most characters of a word that is never broken, however narrow the terminal is."""

STYLES = {Tone.PLAIN: "", Tone.ALARM: "red", Tone.GAP: "yellow"}


def print_table(console: Console, table: Table) -> None:
    """Prints a table, in parts where it is too wide, and its notes."""
    table = table.only(place for place, col in enumerate(table.columns) if not col.page_only)
    first_rows = table.rows[: table.first]
    if left_out := len(table.rows) - len(first_rows):
        more = f"{left_out:,} more are in the report of the run."
        table = replace(table, rows=first_rows, notes=[*table.notes, more])
    for part in table.parts(lambda part: least_width(part) <= console.width):
        breaks, pieces = least_width(part) > console.width, [part]
        if breaks and table.groups and least_width(part, breaks=True) > console.width:
            stacked = _stacked(part)
            pieces = [*stacked.parts(lambda p: least_width(p, breaks=True) <= console.width)]
        for piece in pieces:
            shown = _rich_table(piece, breaks=breaks)
            _share_room(shown, console.width - least_width(piece, breaks=breaks))
            console.print(shown)
    for note in table.notes:
        console.print(f"[dim]{markup(note)}[/]")


def least_width(table: Table, *, breaks: bool = False) -> int:
    """Returns the width below which Rich breaks words, or cuts off what is not to be broken.

    To have Rich measure it takes most of the time of printing a run.
    """
    columns = _measured(table)
    needed = [longest if breaks or col.words else widest for col, longest, widest in columns]
    return sum(needed) + 2 * len(needed) + 1  # a space behind each, and one beside it or the edge


def _measured(table: Table) -> Iterator[tuple[Column, int, int]]:
    """Yields each column with the widths of its longest word and of its longest line."""
    for place, column in enumerate(table.columns):
        lines = [line for row in table.rows for line in row[place].lines]
        words = [word for line in (printable(column.heading), *lines) for word in line.split()]
        longest = max(map(cell_len, words), default=0)
        yield column, longest, max([longest, *map(cell_len, lines)])


def _share_room(shown: RichTable, room: int) -> None:
    """Sets the widths of columns: Rich may cut off the last one although all have room."""
    columns = shown.columns
    widths, most = ([getattr(c, f"{end}_width") or 0 for c in columns] for end in ("min", "max"))
    for _ in range(room):
        short = [place for place, width in enumerate(widths) if width < most[place]]
        if not short:
            return
        widths[min(short, key=lambda place: widths[place] / most[place])] += 1
    for column, width in zip(columns, widths, strict=True):
        column.width = width


def _rich_table(table: Table, *, breaks: bool = False) -> RichTable:
    """Returns a table to print; with `breaks`, figures may stand in several lines, too."""
    shown = RichTable(
        title=markup(table.title) if table.title else None,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
    )
    for column, longest, widest in _measured(table):
        # No word is broken unless it is very long.
        in_lines = breaks or column.words
        shown.add_column(
            Text(textwrap.fill(printable(column.heading), max(widest, 1))),
            justify="left" if column.words else "right",
            overflow="fold",
            no_wrap=not in_lines or widest <= longest,
            min_width=min(longest, LONGEST_WORD) if in_lines else widest,
            max_width=widest,
        )
    for number, (named, rows) in enumerate(groupby(table.rows, lambda row: row[: table.groups])):
        if number:
            shown.add_section()
        for row in rows:
            shown.add_row(*(_text(cell) for cell in [*named, *row[table.groups :]]))
            named = [Cell("")] * table.groups
    return shown


def _text(cell: Cell) -> Text:
    text = Text("\n".join(map(printable, cell.lines)), style=STYLES[cell.tone])
    text.highlight_regex(r"[\[(][^\])]*[\])]$", "dim")
    return text


def _stacked(table: Table) -> Table:
    """Returns a table with one column in place of those that name a group, with a line for each.

    If even that is too wide, its parts repeat the group and the column behind it.
    """
    headings = [column.heading for column in table.columns[: table.groups]]
    rows = []
    for row in table.rows:
        named = zip(headings, row, strict=False)
        first, *below = [f"{heading} {cell.text}" for heading, cell in named]
        rows.append([Cell(first, below=below), *row[table.groups :]])
    columns = [Column("", words=True), *table.columns[table.groups :]]
    return replace(table, columns=columns, rows=rows, groups=1, kept=2)
