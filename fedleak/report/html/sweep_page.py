"""Makes the report of a sweep from its summary, with links to the reports of its cells."""

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from fedleak.report.drawings import figures as sweep_figures
from fedleak.report.drawings import frontier, tradeoff
from fedleak.report.html.page import Drawing, Entry, Link, Picture, SweepPage, Table
from fedleak.report.html.verdict import figures, sweep_verdict
from fedleak.report.html.wording import figure, interval
from fedleak.report.terminal import sweep_table
from fedleak.report.terminal.tables import INTERVALS
from fedleak.report.words import NOT_MEASURED, said
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
            Entry(key, "; ".join(said(value) for value in values))
            for key, values in collected.axes.items()
        ],
        grid=_grid(collected, reports),
        pictures=_pictures(collected),
        attack_table=_attacks(collected),
        repeat=f"fedleak sweep {collected.name}.toml",
    )


def _grid(collected: SweepSummary, reports: Mapping[str, str]) -> Table:
    measure = sweep_table.utility_measure(collected)
    further = [measure] if measure else []
    return Table(
        "What was read in each cell, and at what cost",
        (
            *collected.axes,
            "read by",
            "texts exact, %",
            "ROUGE-L",
            "other update: ROUGE-L",
            "tokens found, %",
            *(sweep_table.UTILITIES[utility] for utility in further),
            "epsilon",
            "report",
        ),
        [
            (
                *(said(cell.values[key]) for key in collected.axes),
                *_leakage_cells(cell),
                *(figure(sweep_table.utility(cell, utility)) for utility in further),
                figure(cell.privacy.epsilon) if cell.privacy else NOT_MEASURED,
                _report_link(cell, reports),
            )
            for cell in collected.cells
        ],
        "Over all attacks, the best on each text. *: few texts or clients, so an example and not a "
        f"rate. Mean and 95 % {INTERVALS}. Epsilon {NONE}: "
        "nothing is guaranteed.",
    )


def _leakage_cells(cell: CellSummary) -> tuple[str, ...]:
    leakage = figures(cell.worst_case, cell.attacks)
    if leakage is None:
        why = "no answer" if cell.attacks else cell.status
        return (why, *[NOT_MEASURED] * 4)
    return (
        leakage.by + (" *" if leakage.warning else ""),
        interval(leakage.exact, 100),
        interval(leakage.rougeL),
        interval(leakage.control_rougeL),
        interval(leakage.recall, 100),
    )


def _report_link(cell: CellSummary, reports: Mapping[str, str]) -> str | Link:
    address = reports.get(cell.cell)
    return NOT_MEASURED if address is None else Link("open", address)


def _attacks(collected: SweepSummary) -> Table | None:
    with_membership = any(cell.membership is not None for cell in collected.cells)
    lines = [
        (
            ", ".join(said(cell.values[key]) for key in collected.axes),
            name + (" *" if attack.warning else ""),
            f"{attack.answers} of {attack.rows}",
            interval(attack.exact_match, 100),
            interval(attack.rougeL),
            interval(attack.guess_rougeL),
            interval(attack.token_recall, 100),
            *[sweep_table.membership(cell, name)] * with_membership,
            f"{attack.seconds:,.1f}",
        )
        for cell in collected.cells
        for name, attack in cell.attacks.items()
    ]
    if not lines:
        return None
    return Table(
        "Each attack in each cell",
        (
            "cell",
            "attack",
            "answers",
            "texts exact, %",
            "ROUGE-L",
            "no update: ROUGE-L",
            "tokens found, %",
            *["who was in: AUC"] * with_membership,
            "seconds",
        ),
        lines,
        "*: few texts or clients, so an example and not a rate.",
    )


def _pictures(collected: SweepSummary) -> list[Picture]:
    """Draws the sweep's drawings anew: files may have been changed by others."""
    kinds: list[tuple[str, Callable[[SweepSummary, Path], None]]] = [
        ("What each attack read along the first key", sweep_figures.draw),
        ("Leakage against utility and epsilon", tradeoff.draw_tradeoff),
        ("Where each kind of leak ends, and what it costs", frontier.draw_frontier),
    ]
    pictures = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (caption, draw) in enumerate(kinds):
            path = Path(folder, f"{number}.svg")
            draw(collected, path)
            if path.is_file():
                words = "The tables of this page have the figures that are drawn."
                pictures.append(Picture(caption, words, Drawing(path.read_bytes())))
    return pictures
