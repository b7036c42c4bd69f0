"""Prints a table on a terminal. Whatever is in it is made printable, and none of it is markup."""

import textwrap
from collections.abc import Sequence
from dataclasses import replace

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
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
    for part in table.parts(lambda part: _fits(_rich_table(part), console)):
        shown = [_rich_table(part)]
        if not _fits(shown[0], console):
            shown = [_rich_table(part, breaks=True)]
        if table.groups and not _fits(shown[0], console):
            stacked = _stacked(part).parts(lambda p: _fits(_rich_table(p, breaks=True), console))
            shown = [_rich_table(piece, breaks=True) for piece in stacked]
        for piece in shown:
            _share_room(piece, console)
            console.print(piece)
    for note in table.notes:
        console.print(f"[dim]{markup(note)}[/]")


def _fits(shown: RichTable, console: Console) -> bool:
    return _least_width(shown) <= console.width


def _least_width(shown: RichTable) -> int:
    anywhere = Console(width=10_000, force_terminal=False)
    return Measurement.get(anywhere, anywhere.options, shown).minimum


def _share_room(shown: RichTable, console: Console) -> None:
    """Sets the widths of columns: Rich may cut off the last one although all have room."""
    columns = shown.columns
    widths, most = ([getattr(c, f"{end}_width") or 0 for c in columns] for end in ("min", "max"))
    for _ in range(console.width - _least_width(shown)):
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
    for place, column in enumerate(table.columns):
        lines = [line for row in table.rows for line in row[place].lines]
        _add_column(shown, column, lines, breaks or column.words)
    last: Sequence[Cell] | None = None
    for row in table.rows:
        group = row[: table.groups]
        repeated = table.groups > 0 and group == last
        if last is not None and not repeated and table.groups:
            shown.add_section()
        named = [Cell("")] * table.groups if repeated else group
        shown.add_row(*(_text(cell) for cell in [*named, *row[table.groups :]]))
        last = group
    return shown


def _add_column(shown: RichTable, column: Column, lines: Sequence[str], breaks: bool) -> None:
    """Adds a column in which no word is broken unless it is very long."""
    heading = printable(column.heading)
    words = [word for line in (heading, *lines) for word in line.split()]
    longest = max(map(cell_len, words), default=0)
    widest = max([longest, *map(cell_len, lines)])
    shown.add_column(
        Text(textwrap.fill(heading, max(widest, 1))),
        justify="left" if column.words else "right",
        overflow="fold",
        no_wrap=not breaks or widest <= longest,
        min_width=min(longest, LONGEST_WORD) if breaks else widest,
        max_width=widest,
    )


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
