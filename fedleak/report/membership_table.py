"""How well texts that were in updates are told from others, in words that say what they assume."""

from rich import box
from rich.table import Table

from fedleak.report.canary_table import NOTHING
from fedleak.sanitise import markup
from fedleak.store.summaries import MembershipFigures, MembershipSummary

CAPTION = "membership: which texts were in an update"

COLUMNS = (
    "attack",
    "score",
    "AUC",
    "found at 1 %",
    "found at 0.1 %",
    "p",
    "epsilon at least",
    "texts in / not in",
    "AUC by round",
)

TOO_FEW = "too few"
"""Stands where there are fewer controls than a share of them needs."""

NO_BOUND = "no bound"

MOST_ROUNDS = 5
"""Rounds that are shown of each score; of more the first."""


def cells(row: MembershipFigures) -> tuple[str, ...]:
    """Returns what stands below `COLUMNS`.

    They are text, not markup.
    """
    low, high = row.auc.low, row.auc.high
    more = [f"and {len(row.rounds) - MOST_ROUNDS} more"] * (len(row.rounds) > MOST_ROUNDS)
    return (
        row.attack,
        row.score,
        f"{row.auc.mean:.3f} [{low:.2f}, {high:.2f}]",
        _share(row.found_at_1_percent),
        _share(row.found_at_01_percent),
        NO_BOUND if row.p is None else f"{row.p:.2g}",
        _bound(row.epsilon),
        f"{row.members:,} / {row.controls:,}",
        ", ".join([*(f"{each.auc:.2f}" for each in row.rounds[:MOST_ROUNDS]), *more]),
    )


def notes(summary: MembershipSummary) -> list[str]:
    """Returns what each column says and assumes."""
    certain = f"{summary.confidence:.0%}".replace("%", " %")
    said = [
        "AUC: the chance that a text of a batch scores higher than a held-out text of its class; "
        "0.5 is chance. The interval is for other clients like these; of one client, or of sums, "
        "for other updates.",
        "Found at 1 %, 0.1 %: the share of the texts of batches that are found where at most so "
        f"many others are accused; {TOO_FEW}: that takes 100, or 1,000, others.",
    ]
    if summary.no_bound is not None:
        return [*said, f"There is no p and no bound on epsilon: {summary.no_bound}."]
    return [
        *said,
        "p: how often chance tells pairs of a text of a batch and a held-out text apart so, "
        f"corrected for {len(summary.figures)} scores. Which of a pair was in was decided before "
        "training, with the seed, when texts were held out.",
        f"Epsilon at least: at delta {summary.delta:g}, for replacing a text by another, over all "
        f"rounds that are scored; all lines hold at once with {certain} confidence. It assumes "
        "nothing of the mechanism. A guarantee for adding or removing a text says up to twice its "
        "epsilon of that.",
        f"{NOTHING.capitalize()}: with so many pairs; more of them may see something. It is no "
        "evidence of privacy.",
    ]


def table(summary: MembershipSummary) -> Table:
    """Returns a line for each attack and score."""
    made = Table(
        title=CAPTION,
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        title_justify="left",
        caption_justify="left",
    )
    for heading in COLUMNS:
        made.add_column(heading.replace(" ", "\n", 1), overflow="fold")
    for row in summary.figures:
        made.add_row(*map(markup, cells(row)))
    return made


def _share(value: float | None) -> str:
    return TOO_FEW if value is None else f"{100 * value:.0f} %"


def _bound(epsilon: float | None) -> str:
    if epsilon is None:
        return NO_BOUND
    return f"{epsilon:.3g}" if epsilon > 0 else NOTHING
