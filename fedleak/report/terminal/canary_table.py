"""What canaries measured of a run's privacy, in words that say what they assume."""

from rich import box
from rich.table import Table

from fedleak.store.run import EVERYONE
from fedleak.store.summaries import CanaryBound, CanarySummary
from fedleak.training.privacy import NONE
from fedleak.util.sanitise import markup

NOTHING = "nothing seen"
"""Stands for a bound of 0, which is no evidence of privacy."""

COLUMNS = ("accounted epsilon", "if Gaussian", "f-DP", "assumes nothing", "canaries")

MOST_CLIENTS = 20
"""Clients that a terminal shows at most: the first ones."""


def cells(row: CanaryBound) -> tuple[str, ...]:
    """Returns the cells below the headings `COLUMNS`.

    They are text, not markup.
    """
    gaussian = "sampled" if row.gaussian is None else _bound(row.gaussian)
    return (
        NONE if row.epsilon == NONE else f"{row.epsilon:.3g}",
        gaussian,
        _bound(row.f_dp),
        _bound(row.epsilon_delta),
        f"{row.canaries:,}" + (" (copies)" if row.in_copies else ""),
    )


def name(row: CanaryBound) -> str:
    """Returns whom a line is about."""
    return f"all, by {row.unit}" if row.client == EVERYONE else str(row.client)


def notes(summary: CanarySummary) -> list[str]:
    """Returns what each column says and assumes."""
    sentences = [
        f"Lower bounds on epsilon at delta {summary.delta:g}, from canaries in the updates. Each "
        f"column holds in all its lines at once with {summary.confidence:.0%} confidence.".replace(
            "%", " %"
        ),
        "If Gaussian: the noise is Gaussian, and canaries are not sampled.",
        "f-DP: the trade-off between the two errors of a guess is that of Gaussian noise.",
        "Assumes nothing: only that coins are fair and independent.",
        f"{NOTHING.capitalize()}: with so many canaries; more of them may see something. It is no "
        "evidence of privacy.",
    ]
    if any(row.in_copies for row in summary.bounds):
        sentences.append(
            "Copies: the canaries are in audited copies of the updates, which were never sent."
        )
    return sentences


def table(summary: CanarySummary) -> Table:
    """Returns a line for all clients together, and one for each."""
    made = Table(
        title="privacy as canaries measure it: epsilon is at least",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    for heading in ("client", *COLUMNS):
        made.add_column(heading.replace(" ", "\n", 1), justify="right", overflow="fold")
    alone = [row for row in summary.bounds if row.client != EVERYONE]
    together = [row for row in summary.bounds if row.client == EVERYONE]
    for row in [*together, *alone[:MOST_CLIENTS]]:
        made.add_row(markup(name(row)), *map(markup, cells(row)))
    if (more := len(alone) - MOST_CLIENTS) > 0:
        made.caption = f"{more:,} more clients are in summary.json"
    return made


def _bound(epsilon: float) -> str:
    return f"{epsilon:.3g}" if epsilon > 0 else NOTHING
