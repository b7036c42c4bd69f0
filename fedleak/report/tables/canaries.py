"""What canaries measured of a run's privacy, in words that say what they assume."""

from fedleak.report.table import Table, cells, figures
from fedleak.report.words import few_digits, percent
from fedleak.store.run import EVERYONE
from fedleak.store.summaries import CanaryBound, CanarySummary

NOTHING = "nothing seen"
"""Stands for a bound of 0, which is no evidence of privacy."""

FIRST_CLIENTS = 20
"""Clients that are shown at once."""


def bound(epsilon: float) -> str:
    """Returns a lower bound on epsilon in words."""
    return few_digits(epsilon) if epsilon > 0 else NOTHING


def canary_table(summary: CanarySummary) -> Table:
    """Returns a line for all clients together, and one for each."""
    alone = [row for row in summary.bounds if row.client != EVERYONE]
    together = [row for row in summary.bounds if row.client == EVERYONE]
    headings = ("accounted epsilon", "if Gaussian", "f-DP", "assumes nothing", "canaries")
    notes = [
        f"Lower bounds on epsilon at delta {summary.delta:g}, from canaries in the updates. Each "
        f"column holds in all its lines at once with {percent(summary.confidence)} confidence.",
        "If Gaussian: the noise is Gaussian, and canaries are not sampled.",
        "f-DP: the trade-off between the two errors of a guess is that of Gaussian noise.",
        "Assumes nothing: only that coins are fair and independent.",
        f"{NOTHING.capitalize()}: with so many canaries; more of them may see something. It is no "
        "evidence of privacy.",
    ]
    if summary.step is not None:
        notes.append(
            f"A step without sampling: epsilon is at least {bound(summary.step)}, by the canaries "
            "that it drew, if the noise is Gaussian."
        )
    if any(row.in_copies for row in summary.bounds):
        notes.append(
            "Copies: the canaries are in audited copies of the updates, which were never sent."
        )
    return Table(
        "privacy as canaries measure it: epsilon is at least",
        figures("client", *headings),
        cells(map(_cells, [*together, *alone])),
        notes,
        first=len(together) + FIRST_CLIENTS,
    )


def _cells(row: CanaryBound) -> list[str]:
    return [
        f"all, by {row.unit}" if row.client == EVERYONE else str(row.client),
        few_digits(row.epsilon),
        "sampled" if row.gaussian is None else bound(row.gaussian),
        bound(row.f_dp),
        bound(row.epsilon_delta),
        f"{row.canaries:,}" + (" (copies)" if row.in_copies else ""),
    ]
