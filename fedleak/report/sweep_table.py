"""A table of a sweep for the terminal: a line per cell and attack."""

from collections.abc import Callable

from rich import box
from rich.table import Table

from fedleak.privacy import NONE
from fedleak.report.tables import INTERVALS, NOT_MEASURED, decimal, interval, number, warnings
from fedleak.report.words import said, short_key
from fedleak.sanitise import markup
from fedleak.store.summaries import AttackSummary, CellSummary, Estimate, SweepSummary

UTILITIES = {"mcc": "MCC", "perplexity": "perplexity"}
"""The figure that stands for a model's use, of classifiers and of causal models; and its name."""


def table(collected: SweepSummary) -> Table:
    """Returns a line per cell and attack of a sweep."""
    axes = collected.axes
    summaries = [of for cell in collected.cells for of in cell.attacks.values()]
    notes = [*map(markup, warnings(summaries)), INTERVALS]
    if any(of.answers < of.rows for of in summaries):
        notes.append("answers that are missing: `fedleak score` of the cell's folder says why")
    of_cells = _cell_columns(collected)
    shown = Table(
        title=f"{markup(collected.name)}: mean and 95 % interval over clients",
        box=box.SIMPLE_HEAD,
        padding=(0, 0 if of_cells else 1, 0, 0),
        caption="\n".join(notes),
        title_justify="left",
        caption_justify="left",
    )
    for key in axes:
        shown.add_column(markup(short_key(key)).replace(" ", "\n"), overflow="fold")
    for heading in of_cells:
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("attack", overflow="fold")
    for heading in ("texts\nexact, %", "ROUGE-L"):
        shown.add_column(heading, justify="right", no_wrap=not of_cells, min_width=8)
    for heading in ("no\nupdate", "tokens\nfound,\n%", "seconds"):
        shown.add_column(heading, justify="right", no_wrap=True)
    for cell in collected.cells:
        values = [markup(said(cell.values[key])) for key in axes]
        values += [show(cell) for show in of_cells.values()]
        if not cell.attacks:
            shown.add_row(*values, f"[yellow]{markup(cell.status)}[/]")
        for i, (name, of) in enumerate(cell.attacks.items()):
            shown.add_row(
                *(values if i == 0 else [""] * len(values)),
                _attack(name, of),
                _unbroken(interval(of.exact_match, 100)),
                _unbroken(interval(of.rougeL)),
                _mean(of.guess_rougeL),
                _mean(of.token_recall, 100),
                f"{of.seconds:.1f}",
            )
        shown.add_section()
    return shown


def utility_measure(collected: SweepSummary) -> str | None:
    """Returns which figure stands for the utility of a sweep's cells; None if none does."""
    for measure in UTILITIES:
        if any(utility(cell, measure) is not None for cell in collected.cells):
            return measure
    return None


def utility(cell: CellSummary, measure: str) -> float | None:
    """Returns the utility of a cell's model, if it was measured."""
    return None if cell.utility is None else cell.utility.figures.get(measure)


def _cell_columns(collected: SweepSummary) -> dict[str, Callable[[CellSummary], str]]:
    """Returns the table's columns that are about whole cells, as far as one has such a figure."""
    measure = utility_measure(collected)
    columns: dict[str, Callable[[CellSummary], str]] = {}
    if measure is not None:
        heading, places = ("MCC", 2) if measure == "mcc" else ("perplex-\nity", 1)
        columns[heading] = lambda cell: decimal(utility(cell, measure), places)
    known = [cell.privacy for cell in collected.cells if cell.privacy is not None]
    if any(each.epsilon != NONE or each.noise_multiplier is not None for each in known):
        columns["epsilon"] = lambda cell: _digits(cell.privacy.epsilon if cell.privacy else None)
        columns["noise\nmulti-\nplier"] = lambda cell: _digits(
            cell.privacy.noise_multiplier if cell.privacy else None
        )
    return columns


def _unbroken(interval: str) -> str:
    """Returns `mean [low,high]`, which breaks before its bracket only, where room is short."""
    return interval.replace(", ", ",")


def _digits(value: float | str | None) -> str:
    """Returns three significant digits, or a word."""
    if value is None:
        return NOT_MEASURED
    return markup(value) if isinstance(value, str) else f"{value:.3g}"


def _attack(name: str, of: AttackSummary) -> str:
    """Returns an attack's name, with a mark for few texts, and its answers if some are missing."""
    text = markup(name) + (" *" if of.warning else "")
    return text if of.answers == of.rows else f"{text} [yellow]{of.answers} of {of.rows}[/]"


def _mean(value: Estimate | None, scale: float = 1) -> str:
    return number(None if value is None else scale * value.mean)
