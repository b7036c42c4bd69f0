"""A table of a sweep for the terminal: a line per cell and attack."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedleak.report.terminal.membership_table import area
from fedleak.report.terminal.tables import INTERVALS, decimal, number, warnings
from fedleak.report.words import NOT_MEASURED, interval, said, short_key
from fedleak.store.summaries import AttackSummary, CellSummary, Estimate, SweepSummary
from fedleak.training.privacy import NONE
from fedleak.util.sanitise import markup

LONGEST_WORD = 24
"""Characters of a word that is not broken, however narrow the terminal is."""

UTILITIES = {"mcc": "MCC", "perplexity": "perplexity"}
"""The figures that stand for the utility of classifiers and of causal models, and their names."""


def table(collected: SweepSummary, width: int | None = None) -> Table:
    """Returns a line per cell and attack of a sweep.

    Args:
        collected: The cells and their figures.
        width: Characters of a line. Where words would have to be broken to fit, all that is about
            a whole cell stands in one column, below each other. None: no limit.
    """
    wide = _table(collected, stacked=False)
    if width is None:
        return wide
    anywhere = Console(width=10_000, force_terminal=False)
    fits = Measurement.get(anywhere, anywhere.options, wide).minimum <= width
    return wide if fits else _table(collected, stacked=True)


def _table(collected: SweepSummary, *, stacked: bool) -> Table:
    """Returns the table; where it is stacked, a cell's settings and figures are one column."""
    axes = collected.axes
    summaries = [summary for cell in collected.cells for summary in cell.attacks.values()]
    notes = [*map(markup, warnings(summaries)), INTERVALS]
    if any(summary.answers < summary.rows for summary in summaries):
        notes.append("answers that are missing: `fedleak score` of the cell's folder says why")
    of_cells = _cell_columns(collected)
    shown = Table(
        title=f"{markup(collected.name)}: mean and 95 % interval over clients",
        box=box.SIMPLE_HEAD,
        padding=(0, 0 if of_cells and not stacked else 1, 0, 0),
        caption="\n".join(notes),
        title_justify="left",
        caption_justify="left",
    )
    lines = [_cell_values(cell, axes, of_cells) for cell in collected.cells]
    if stacked:
        lines = [[_stacked(line, [*map(short_key, axes)], [*of_cells])] for line in lines]
        _add_words(shown, "cell", [first for first, *_ in lines])
    else:
        for i, key in enumerate(axes):
            heading = markup(short_key(key)).replace(" ", "\n")
            _add_words(shown, heading, [line[i] for line in lines])
        for heading in of_cells:
            shown.add_column(heading, justify="right", no_wrap=True)
    names = [
        _attack_name(name, summary)
        for cell in collected.cells
        for name, summary in cell.attacks.items()
    ]
    _add_words(shown, "attack", names)
    for heading in ("texts\nexact, %", "ROUGE-L"):
        shown.add_column(heading, justify="right", no_wrap=not of_cells, min_width=8)
    with_membership = any(cell.membership is not None for cell in collected.cells)
    for heading in (
        "no\nupdate",
        "tokens\nfound,\n%",
        *["who\nwas in,\nAUC"] * with_membership,
        "seconds",
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    for cell, values in zip(collected.cells, lines, strict=True):
        if not cell.attacks:
            shown.add_row(*values, f"[yellow]{markup(cell.status)}[/]")
        for i, (name, summary) in enumerate(cell.attacks.items()):
            shown.add_row(
                *(values if i == 0 else [""] * len(values)),
                _attack_name(name, summary),
                _unbroken(interval(summary.exact_match, 100)),
                _unbroken(interval(summary.rougeL)),
                _mean(summary.guess_rougeL),
                _mean(summary.token_recall, 100),
                *[markup(membership(cell, name))] * with_membership,
                f"{summary.seconds:.1f}",
            )
        shown.add_section()
    return shown


def _cell_values(
    cell: CellSummary, keys: Iterable[str], figures: Mapping[str, Callable[[CellSummary], str]]
) -> list[str]:
    """Returns a cell's value of each swept key, and its figures."""
    values = [markup(said(cell.values[key])) for key in keys]
    return values + [show(cell) for show in figures.values()]


def _stacked(values: Sequence[str], keys: Sequence[str], figures: Sequence[str]) -> str:
    """Returns what is about a cell, a line each; where one key is swept, its name says nothing."""
    names = [markup(key) if len(keys) > 1 else "" for key in keys]
    names += [heading.replace("-\n", "").replace("\n", " ") for heading in figures]
    return "\n".join(f"{name} {value}".strip() for name, value in zip(names, values, strict=True))


def _add_words(shown: Table, heading: str, cells: Sequence[str]) -> None:
    """Adds a column of words, none of which is broken unless it is very long."""
    words = [word for text in (heading, *cells) for word in Text.from_markup(text).plain.split()]
    longest = max((cell_len(word) for word in words), default=0)
    shown.add_column(heading, overflow="fold", min_width=min(longest, LONGEST_WORD))


def utility_measure(collected: SweepSummary) -> str | None:
    """Returns which figure stands for the utility of a sweep's cells; None if none does."""
    for measure in UTILITIES:
        if any(utility(cell, measure) is not None for cell in collected.cells):
            return measure
    return None


def utility(cell: CellSummary, measure: str) -> float | None:
    """Returns the utility of a cell's model, if it was measured."""
    return None if cell.utility is None else cell.utility.figures.get(measure)


def membership(cell: CellSummary, attack: str) -> str:
    """Returns how well an attack tells in a cell which texts were in, by the score it names first.

    It is text, not markup.
    """
    figures = None if cell.membership is None else cell.membership.main(attack)
    return NOT_MEASURED if figures is None else area(figures.auc)


def _cell_columns(collected: SweepSummary) -> dict[str, Callable[[CellSummary], str]]:
    """Returns the columns about whole cells; a figure that no cell has gets none."""
    measure = utility_measure(collected)
    columns: dict[str, Callable[[CellSummary], str]] = {}
    if measure is not None:
        heading, places = ("MCC", 2) if measure == "mcc" else ("perplex-\nity", 1)
        columns[heading] = lambda cell: decimal(utility(cell, measure), places)
    known = [cell.privacy for cell in collected.cells if cell.privacy is not None]
    if any(
        guarantee.epsilon != NONE or guarantee.noise_multiplier is not None for guarantee in known
    ):
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


def _attack_name(name: str, summary: AttackSummary) -> str:
    """Returns an attack's name, with a mark for few texts, and its answers if some are missing."""
    text = markup(name) + (" *" if summary.warning else "")
    return (
        text
        if summary.answers == summary.rows
        else f"{text} [yellow]{summary.answers} of {summary.rows}[/]"
    )


def _mean(value: Estimate | None, scale: float = 1) -> str:
    return number(None if value is None else scale * value.mean)
