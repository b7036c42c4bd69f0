"""Figures in words."""

from collections.abc import Sequence

from fedleak.report.words import NOT_MEASURED, plain_interval
from fedleak.store.summaries import Estimate


def counted(count: int, noun: str) -> str:
    """Returns a number and what is counted.

    >>> counted(1, "text"), counted(2000, "text")
    ('1 text', '2,000 texts')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(words: Sequence[str], last: str = "and") -> str:
    """Returns words in a row.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    *most, end = words
    return f"{', '.join(most)} {last} {end}" if most else end


def percent(value: float) -> str:
    """Returns a share in per cent; only all is 100 %, and only nothing is 0 %.

    >>> percent(0.5), percent(0.999), percent(0.001)
    ('50 %', '99.9 %', '0.1 %')
    """
    shown = f"{100 * value:.0f}"
    if shown in ("0", "100") and value not in (0.0, 1.0):
        return "under 0.1 %" if value < 0.001 else "over 99.9 %" if value > 0.999 else _tenth(value)
    return f"{shown} %"


def _tenth(value: float) -> str:
    return f"{100 * value:.1f} %"


def share(value: Estimate | None) -> str:
    """Returns the ends of an interval of a share."""
    return f"{percent(value.low)} and {percent(value.high)}" if value else NOT_MEASURED


def interval(value: Estimate | None, scale: float = 1) -> str:
    """Returns `mean [low, high]`, or that it was not measured."""
    return NOT_MEASURED if value is None else plain_interval(value, scale)


def figure(value: float | str | None) -> str:
    """Returns a figure with four digits, or a word.

    >>> figure(1413.3), figure(0.83912)
    ('1,413', '0.8391')
    """
    if value is None:
        return NOT_MEASURED
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if 1_000 <= abs(value) < 1e9 else f"{value:.4g}"
