"""A comparison of two runs."""

from typing import NamedTuple

from fedleak.audit.comparison import Comparison
from fedleak.audit.pairing import AREA, CALIBRATED_AREA
from fedleak.report.table import Table, cells, figures, words
from fedleak.report.words import ANY_ATTACK, INTERVALS, MALICIOUS, in_words, interval
from fedleak.store.summaries import Difference


class Shown(NamedTuple):
    """How a figure is shown.

    Attributes:
        heading: What it is called.
        scale: What is shown for 1.
        places: Decimals of a mean by itself; beside a difference it has one at least.
    """

    heading: str
    scale: float
    places: int = 0


SHOWN = {
    "exact": Shown("exact, %", 100),
    "rougeL": Shown("ROUGE-L", 1),
    "token_recall": Shown("tokens, %", 100),
    "personal_data": Shown("personal data, %", 100),
    AREA: Shown("who was in, AUC", 1, 2),
    CALIBRATED_AREA: Shown("AUC, calibrated", 1, 2),
}
"""By the names of figures."""


def comparison_table(comparison: Comparison) -> Table:
    """Returns a line for each attack and figure, or for each figure if the runs differ in texts."""
    if not comparison.texts:
        return _means_table(comparison)
    rows = []
    for change in comparison.differences:
        heading, scale, places = SHOWN[change.figure]
        before, after = (f"{end * scale:.{places or 1}f}" for end in (change.before, change.after))
        about = [change.attack or ANY_ATTACK, heading, str(change.texts), before, after]
        rows.append([*about, difference(change), f"{change.p_adjusted:.2g}", change.direction])
    return Table(
        f"{comparison.after} against {comparison.before}: {comparison.texts} texts",
        [
            *words("attack", "figure"),
            *figures("texts", "before", "after", "difference", "p"),
            *words("server"),
        ],
        cells(rows),
        [
            "difference: mean over texts, 95 % interval for other clients like these; p: sign-flip "
            "test over these clients, corrected for "
            f"{comparison.tests} lines ({comparison.correction})",
            *_unlike(comparison),
        ],
        groups=1,
    )


def _means_table(comparison: Comparison) -> Table:
    """Returns the figures of two runs with other texts side by side; nothing is tested."""
    rows = []
    for row in comparison.means:
        heading, scale, places = SHOWN[row.figure]
        means = (interval(end, scale, places=places) for end in (row.before, row.after))
        rows.append([heading + (f" ({row.attack})" if row.attack else ""), *means])
    return Table(
        f"{comparison.after} beside {comparison.before}: other texts, so nothing is tested",
        [*words("figure"), *figures("before", "after")],
        cells(rows),
        [f"of the best attack on each text; mean and 95 % {INTERVALS}", *_unlike(comparison)],
    )


def _unlike(comparison: Comparison) -> list[str]:
    """Returns what both servers did, if one is malicious, and how the experiments differ."""
    runs = zip((comparison.before, comparison.after), comparison.servers, strict=True)
    servers = [
        f"{run}: {f'{MALICIOUS}: {server}' if server else 'honest server'}" for run, server in runs
    ]
    changed = [
        f"{key}: {' -> '.join('default' if value is None else in_words(value) for value in both)}"
        for key, both in comparison.settings.items()
    ]
    return [*servers, *changed] if any(comparison.servers) else changed


def difference(change: Difference) -> str:
    """Returns `mean [low,high]`."""
    _, scale, places = SHOWN[change.figure]
    mean, low, high = (
        f"{end * scale:+.{places or 1}f}" for end in (change.mean, change.low, change.high)
    )
    return f"{mean} [{low},{high}]"
