"""Makes the report of a sweep from its summary, with links to the reports of its cells."""

from collections.abc import Iterator, Mapping

from fedleak.report.drawings.chart import svg
from fedleak.report.drawings.sweeps import DRAWINGS
from fedleak.report.html.page import Entry, Level, Picture, SweepPage, Verdict
from fedleak.report.html.verdict import NO_TEXT_READ, UNMEASURED, not_seen, strongest
from fedleak.report.table import Cell, Table, cells, figures, words
from fedleak.report.tables.attacks import FIGURES, shown
from fedleak.report.tables.sweep import UTILITIES, attacks_table, utility, utility_measure
from fedleak.report.words import (
    INTERVALS,
    MALICIOUS,
    NOT_MEASURED,
    counted,
    figure,
    in_words,
    percent,
    share,
    starred,
)
from fedleak.store.summaries import CellSummary, SweepSummary
from fedleak.training.privacy.accounting import NONE

READ = ("exact_match", "rougeL", "control_rougeL", "token_recall")
"""Figures of what was read in a cell."""


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
    measure = utility_measure(collected.cells)
    headings = (FIGURES[name][0] for name in READ)
    rows = [
        [
            *(in_words(cell.values[key]) for key in collected.axes),
            *_leak_cells(cell),
            *([figure(utility(cell, measure))] if measure else []),
            figure(cell.privacy.epsilon if cell.privacy else None),
            Cell("open", address=reports[cell.cell]) if cell.cell in reports else NOT_MEASURED,
        ]
        for cell in collected.cells
    ]
    return Table(
        "What was read in each cell, and at what cost",
        [
            *words(*collected.axes, "read by"),
            *figures(*headings, *([UTILITIES[measure]] if measure else []), "epsilon"),
            *words("report"),
        ],
        cells(rows),
        [
            "Over all attacks, the best on each text. *: few texts or clients, so an example and "
            f"not a rate. Mean and 95 % {INTERVALS}. Epsilon {NONE}: nothing is guaranteed."
        ],
    )


def _leak_cells(cell: CellSummary) -> list[str]:
    leak = strongest(cell.worst_case, cell.attacks)
    if leak is None:
        return ["no answer" if cell.attacks else cell.status, *[NOT_MEASURED] * len(READ)]
    return [starred(leak.by, leak.read.warning), *(shown(leak.read, name) for name in READ)]


def _pictures(collected: SweepSummary) -> Iterator[Picture]:
    """Draws the sweep's drawings anew: files may have been changed by others."""
    instead = "The tables of this page have the figures that are drawn."
    for caption, chart in DRAWINGS.values():
        if (drawn := chart(collected)) is not None:
            yield Picture(caption, instead, svg(drawn, on_page=True), wide=True)


def sweep_verdict(collected: SweepSummary) -> Verdict:
    """Returns the verdict on a sweep."""
    measured = [(cell, strongest(cell.worst_case, cell.attacks)) for cell in collected.cells]
    answered = [(cell, leakage) for cell, leakage in measured if leakage is not None]
    exact = [(cell, leakage) for cell, leakage in answered if leakage.exact_texts]
    cells = counted(len(measured), "cell")
    malicious = sum(cell.server is not None for cell in collected.cells)
    who = "An attacker who follows the protocol"
    if malicious:
        who = f"An attacker (a {MALICIOUS} in {malicious} of {cells})"
    if not answered:
        level, headline = Level.UNKNOWN, UNMEASURED
        read = f"How much an attacker could read was not measured in any of {cells}."
        sure = "Where no attack has an answer, nothing is known."
    elif exact:
        level, headline = Level.READ, "Private texts were read"
        cell, most = max(exact, key=lambda pair: pair[1].strength[0])
        read = (
            f"{who} could read private texts word for word in {len(exact)} of {cells}, most in the "
            f"cell {cell.cell}: {most.exact_texts:,} of {counted(most.texts, 'text')}."
        )
        sure = (
            f"There the share is between {share(most.read.exact_match)} for other clients like "
            f"these (95 % interval over {counted(most.read.clients, 'client')})."
        )
    else:
        level, headline = Level.PARTLY, NO_TEXT_READ
        read = (
            f"{who} could read no private text word for word in {cells}, but attacks answered in "
            f"{len(answered)} of them."
        )
        sure = "What they read in part is in the table below."
        shares = (leakage.read.exact_match for _, leakage in answered)
        highest = max((exact_match.high for exact_match in shares if exact_match), default=None)
        if highest is not None:
            sure = (
                "For other clients like these the share of texts read word for word may still be "
                f"up to {percent(highest)} in a cell (upper end of the 95 % interval)."
            )
    if any(leakage.read.warning for _, leakage in answered):
        sure = f"{sure[:-1]}; cells with few texts or clients are examples and not rates."
    without = len(measured) - len(answered)
    gaps = [f"{counted(without, 'cell')} without an answer"] if without else []
    unseen = not_seen([*gaps, "settings between the cells"])
    entries = Entry("Read", read), Entry("How sure", sure), Entry("Not seen", unseen)
    return Verdict(level, headline, entries)
