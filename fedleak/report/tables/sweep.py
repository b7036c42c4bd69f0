"""The table of a sweep: a line per cell and attack."""

from collections import defaultdict
from collections.abc import Collection, Sequence

from fedleak.attacks import CALIBRATED
from fedleak.report.table import Cell, Row, Table, Tone, cells, figures, words
from fedleak.report.words import (
    INTERVALS,
    MALICIOUS,
    few_digits,
    in_words,
    interval,
    number,
    short_key,
    starred,
    unbroken,
    warnings,
)
from fedleak.store.summaries import AttackSummary, CellSummary, Estimate, SweepSummary
from fedleak.training.privacy.accounting import NONE
from fedleak.util.sanitise import printable

UTILITIES = {"mcc": "MCC", "perplexity": "perplexity"}
"""The figures that measure the utility of classifiers and of causal models, and their names."""


def utility_measure(cells: Sequence[CellSummary]) -> str | None:
    """Returns which figure stands for the utility of a sweep's cells; None if none does."""
    for measure in UTILITIES:
        if any(utility(cell, measure) is not None for cell in cells):
            return measure
    return None


def utility(cell: CellSummary, measure: str | None) -> float | None:
    """Returns the utility of a cell's model, if it was measured."""
    return None if cell.utility is None or measure is None else cell.utility.figures.get(measure)


def attacks_table(collected: SweepSummary) -> Table:
    """Returns a line per cell and attack of a sweep."""
    summaries = [summary for cell in collected.cells for summary in cell.attacks.values()]
    notes = [*warnings([summary.warning for summary in summaries]), INTERVALS]
    if any(summary.answers < summary.rows for summary in summaries):
        notes.append("answers that are missing: `fedleak score` of the cell's folder says why")
    notes += [f"{MALICIOUS}: {sentence}" for sentence in _servers(collected)]
    measure = utility_measure(collected.cells)
    known = [cell.privacy for cell in collected.cells if cell.privacy is not None]
    guaranteed = any(
        privacy.epsilon != NONE or privacy.noise_multiplier is not None for privacy in known
    )
    areas = _areas(collected)
    about_cells = [
        *words(*map(short_key, collected.axes)),
        *figures(*([UTILITIES[measure]] if measure else [])),
        *figures(*["epsilon", "noise multiplier"] * guaranteed),
    ]
    about_attacks = [
        *words("attack"),
        *figures("texts exact, %", "ROUGE-L", "no update", "tokens found, %"),
        *figures(*areas),
        *figures("seconds"),
    ]
    rows = []
    for cell in collected.cells:
        settings = [in_words(cell.values[key]) for key in collected.axes]
        if measure:
            settings.append(number(utility(cell, measure), 2 if measure == "mcc" else 1))
        if guaranteed:
            both = (getattr(cell.privacy, name, None) for name in ("epsilon", "noise_multiplier"))
            settings += map(few_digits, both)
        lines = [
            _attack_cells(cell, name, summary, areas.values())
            for name, summary in cell.attacks.items()
        ]
        nothing: Row = [Cell(cell.status, Tone.GAP), *[""] * (len(about_attacks) - 1)]
        rows += [[*settings, *line] for line in lines or [nothing]]
    return Table(
        f"{collected.name}: mean and 95 % interval over clients",
        [*about_cells, *about_attacks],
        cells(rows),
        notes,
        groups=len(about_cells),
    )


def _servers(collected: SweepSummary) -> list[str]:
    """Returns what malicious servers did, each with the cells where they did."""
    cells: dict[str, list[str]] = defaultdict(list)
    for cell in collected.cells:
        if cell.server is not None:
            cells[cell.server].append(cell.cell)
    all_cells = len(collected.cells)
    return [
        f"{'all cells' if len(names) == all_cells else ', '.join(names)}: {printable(sentence)}"
        for sentence, names in cells.items()
    ]


def _areas(collected: SweepSummary) -> dict[str, str | None]:
    """Returns the scores whose areas are shown, by heading; None: an attack's first score."""
    members = [cell.membership for cell in collected.cells if cell.membership is not None]
    areas: dict[str, str | None] = {"who was in, AUC": None} if members else {}
    if any(figures.score == CALIBRATED for summary in members for figures in summary.figures):
        areas["AUC, calibrated"] = CALIBRATED
    return areas


def _attack_cells(
    cell: CellSummary, name: str, summary: AttackSummary, scores: Collection[str | None]
) -> Row:
    missing = f" {summary.answers} of {summary.rows}" if summary.answers < summary.rows else ""
    who_was_in = [cell.membership and cell.membership.figures_of(name, score) for score in scores]
    return [
        Cell(starred(name, summary.warning) + missing, Tone.GAP if missing else Tone.PLAIN),
        unbroken(summary.exact_match, 100),
        unbroken(summary.rougeL),
        _mean(summary.guess_rougeL),
        _mean(summary.token_recall, 100),
        *(interval(figures.auc if figures else None, places=2) for figures in who_was_in),
        number(summary.seconds, 1),
    ]


def _mean(value: Estimate | None, scale: float = 1) -> str:
    return number(None if value is None else scale * value.mean)
