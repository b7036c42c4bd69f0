"""Makes the report of a sweep from its summary, with links to the reports of its cells."""

from collections.abc import Iterator, Mapping

from fedleak.report.drawings.chart import svg
from fedleak.report.drawings.sweeps import DRAWINGS
from fedleak.report.html.page import Entry, Picture, SweepPage
from fedleak.report.html.verdict import strongest, sweep_verdict
from fedleak.report.table import Cell, Column, Table, figures, plain, words
from fedleak.report.tables.sweep import UTILITIES, attacks_table, utility, utility_measure
from fedleak.report.words import INTERVALS, NOT_MEASURED, figure, in_words, interval, starred
from fedleak.store.summaries import CellSummary, SweepSummary
from fedleak.training.privacy import NONE


def sweep_page(
    collected: SweepSummary, reports: Mapping[str, str], *, redact: bool = False
) -> SweepPage:
    """Returns the report of a sweep.

    Args:
        collected: The sweep.
        reports: Addresses of the cells' own reports, as far as they exist, by the name of the cell.
        redact: Leave out what attacks and files say in words.
    """
    incomplete = {cell.cell: cell.missing for cell in collected.cells if cell.missing}
    return SweepPage(
        name=collected.name,
        redacted=redact,
        verdict=sweep_verdict(collected),
        missing=[
            f"{cell}: incomplete" if redact else f"{cell}: {'; '.join(missing)}"
            for cell, missing in incomplete.items()
        ],
        axes=[
            Entry(key, "; ".join(map(in_words, values))) for key, values in collected.axes.items()
        ],
        grid=_cells_table(collected, reports),
        pictures=[*_pictures(collected)],
        attack_table=attacks_table(collected),
        repeat=f"fedleak sweep {collected.name}.toml",
    )


def _cells_table(collected: SweepSummary, reports: Mapping[str, str]) -> Table:
    measure = utility_measure(collected)
    headings = ("texts exact, %", "ROUGE-L", "other update: ROUGE-L", "tokens found, %")
    rows = [
        [
            *plain(
                *(in_words(cell.values[key]) for key in collected.axes),
                *_leak_cells(cell),
                *([figure(utility(cell, measure))] if measure else []),
                figure(cell.privacy.epsilon) if cell.privacy else NOT_MEASURED,
            ),
            Cell("open", address=reports[cell.cell])
            if cell.cell in reports
            else Cell(NOT_MEASURED),
        ]
        for cell in collected.cells
    ]
    return Table(
        "What was read in each cell, and at what cost",
        [
            *words(*collected.axes, "read by"),
            *figures(*headings, *([UTILITIES[measure]] if measure else []), "epsilon"),
            Column("report", words=True),
        ],
        rows,
        [
            "Over all attacks, the best on each text. *: few texts or clients, so an example and "
            f"not a rate. Mean and 95 % {INTERVALS}. Epsilon {NONE}: nothing is guaranteed."
        ],
    )


def _leak_cells(cell: CellSummary) -> list[str]:
    leak = strongest(cell.worst_case, cell.attacks)
    if leak is None:
        return ["no answer" if cell.attacks else cell.status, *[NOT_MEASURED] * 4]
    return [
        starred(leak.by, leak.read.warning),
        interval(leak.read.exact_match, 100),
        interval(leak.read.rougeL),
        interval(leak.read.control_rougeL),
        interval(leak.read.token_recall, 100),
    ]


def _pictures(collected: SweepSummary) -> Iterator[Picture]:
    """Draws the sweep's drawings anew: files may have been changed by others."""
    instead = "The tables of this page have the figures that are drawn."
    for caption, chart in DRAWINGS.values():
        if (drawn := chart(collected)) is not None:
            yield Picture(caption, instead, svg(drawn, on_page=True), wide=True)
