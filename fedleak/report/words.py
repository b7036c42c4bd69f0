"""Values of an experiment file, and figures, in few words, for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedleak.audit.metrics.intervals import Interval
from fedleak.store.summaries import Estimate, MeanOfClients
from fedleak.training.observation import Sight
from fedleak.util.sanitise import printable

NOT_MEASURED = "-"

MALICIOUS = "malicious server"
"""The words before the sentence on what a server changed."""

ANY_ATTACK = "any attack"
"""What all attacks together are called."""

INTERVALS = "intervals: for other clients like these, by Gaffke's method"

SEES: Mapping[Sight, str] = {
    "updates": "each client's update",
    "sum": "the sum of each round's updates",
    "models": "the models that the server publishes, and so how each round changed them",
}
"""What an attacker sees."""


def in_words(value: Any) -> str:
    """Returns a value of the file in few words, for people."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ", ".join(map(in_words, value)) or "none"
    if isinstance(value, dict):
        settings = (
            f"{printable(key)}={in_words(setting)}"
            for key, setting in value.items()
            if key != "kind"
        )
        return " ".join([*([in_words(value["kind"])] if "kind" in value else []), *settings])
    return printable(str(value))


def short_key(key: str) -> str:
    """Returns what a dotted key is called where there is little room."""
    return printable(key.rpartition(".")[2].replace("_", " "))


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


def percent(value: float | None) -> str:
    """Returns a share in per cent; only all is 100 %, and only nothing is 0 %.

    >>> percent(0.5), percent(0.999), percent(0.001)
    ('50 %', '99.9 %', '0.1 %')
    """
    if value is None:
        return NOT_MEASURED
    shown = f"{100 * value:.0f}"
    if shown in ("0", "100") and value not in (0.0, 1.0):
        if value < 0.001:
            return "under 0.1 %"
        return "over 99.9 %" if value > 0.999 else f"{100 * value:.1f} %"
    return f"{shown} %"


def share(value: Estimate | None) -> str:
    """Returns the ends of an interval of a share."""
    return f"{percent(value.low)} and {percent(value.high)}" if value else NOT_MEASURED


def interval(value: MeanOfClients | Interval | None, scale: float = 1, *, places: int = 0) -> str:
    """Returns `mean [low, high]` with so many decimals, or that it was not measured."""
    if value is None:
        return NOT_MEASURED
    mean, low, high = (number(scale * end, places) for end in (value.mean, value.low, value.high))
    return f"{mean} [{low}, {high}]"


def unbroken(value: Estimate | None, scale: float = 1) -> str:
    """Returns `mean [low,high]`, which breaks only before its bracket if room is short."""
    return interval(value, scale).replace(", ", ",")


def number(value: float | None, places: int = 0) -> str:
    """Returns a figure with so many decimals."""
    return NOT_MEASURED if value is None else f"{value:,.{places}f}"


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


def few_digits(value: float | str | None) -> str:
    """Returns a figure with three digits, or a word."""
    return f"{value:.3g}" if isinstance(value, int | float) else figure(value)


def starred(name: str, warning: str | None) -> str:
    """Returns a name with a star if its figures are examples and no rates."""
    return name if warning is None else f"{name} *"


def warnings(reasons: Sequence[str | None]) -> list[str]:
    """Returns why figures that are marked with a star are no rates, each reason once."""
    return [f"* {reason}" for reason in sorted({reason for reason in reasons if reason})]
