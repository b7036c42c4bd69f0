"""A comparison of two runs."""

from fedleak.audit.comparison import Comparison
from fedleak.audit.pairing import AREA, CALIBRATED_AREA
from fedleak.report.table import Table, figures, plain, words
from fedleak.report.words import ANY_ATTACK, INTERVALS, MALICIOUS, in_words, interval
from fedleak.store.summaries import Difference

SCALE = {
    "exact": 100.0,
    "rougeL": 1.0,
    "token_recall": 100.0,
    "personal_data": 100.0,
    AREA: 1.0,
    CALIBRATED_AREA: 1.0,
}
"""What is shown for a figure of 1, by its name."""

HEADINGS = {
    "exact": "exact, %",
    "rougeL": "ROUGE-L",
    "token_recall": "tokens, %",
    "personal_data": "personal data, %",
    AREA: "who was in, AUC",
    CALIBRATED_AREA: "AUC, calibrated",
}
"""Headings, by figure."""


def comparison_table(comparison: Comparison) -> Table:
    """Returns a line for each attack and figure, or for each figure if the runs differ in texts."""
    if not comparison.texts:
        return _means_table(comparison)
    rows = []
    for change in comparison.differences:
        scale, decimals = SCALE[change.figure], _places(change.figure)
        rows.append(
            plain(
                change.attack or ANY_ATTACK,
                HEADINGS[change.figure],
                str(change.texts),
                f"{change.before * scale:.{decimals}f}",
                f"{change.after * scale:.{decimals}f}",
                difference(change),
                f"{change.p_adjusted:.2g}",
                change.direction,
            )
        )
    return Table(
        f"{comparison.after} against {comparison.before}: {comparison.texts} texts",
        [
            *words("attack", "figure"),
            *figures("texts", "before", "after", "difference", "p"),
            *words("server"),
        ],
        rows,
        [
            "difference: mean over texts, 95 % interval for other clients like these; p: sign-flip "
            "test over these clients, corrected for "
            f"{comparison.tests} lines ({comparison.correction})",
            *_servers(comparison),
            *_changed(comparison),
        ],
        groups=1,
    )


def _means_table(comparison: Comparison) -> Table:
    """Returns the figures of two runs with other texts side by side; nothing is tested."""
    rows = [
        plain(
            HEADINGS[row.figure] + (f" ({row.attack})" if row.attack else ""),
            *(interval(end, SCALE[row.figure], places=_places(row.figure, 0)) for end in ends),
        )
        for row in comparison.means
        for ends in [(row.before, row.after)]
    ]
    return Table(
        f"{comparison.after} beside {comparison.before}: other texts, so nothing is tested",
        [*words("figure"), *figures("before", "after")],
        rows,
        [
            f"of the best attack on each text; mean and 95 % {INTERVALS}",
            *_servers(comparison),
            *_changed(comparison),
        ],
    )


def _changed(comparison: Comparison) -> list[str]:
    """Returns what differs between the experiments."""
    return [
        f"{key}: {' -> '.join('default' if value is None else in_words(value) for value in both)}"
        for key, both in comparison.settings.items()
    ]


def _servers(comparison: Comparison) -> list[str]:
    """Returns what the servers of both runs did, if one of them is malicious."""
    if not any(comparison.servers):
        return []
    runs = zip((comparison.before, comparison.after), comparison.servers, strict=True)
    return [
        f"{run}: {f'{MALICIOUS}: {server}' if server else 'honest server'}" for run, server in runs
    ]


def difference(change: Difference) -> str:
    """Returns `mean [low,high]`."""
    scale, decimals = SCALE[change.figure], _places(change.figure)
    mean, low, high = (
        f"{end * scale:+.{decimals}f}" for end in (change.mean, change.low, change.high)
    )
    return f"{mean} [{low},{high}]"


def _places(figure: str, usually: int = 1) -> int:
    """Returns the decimals that are shown."""
    return 2 if figure in (AREA, CALIBRATED_AREA) else usually
