"""A comparison of two runs for the terminal."""

from itertools import groupby

from rich import box
from rich.table import Table

from fedleak.audit.comparison import Comparison
from fedleak.report.words import ANY_ATTACK
from fedleak.store.summaries import Difference
from fedleak.util.sanitise import markup

SCALE = {"exact": 100.0, "rougeL": 1.0, "token_recall": 100.0}
"""What is shown for a figure of 1, by its name."""

SAYS = {"exact": "exact, %", "rougeL": "ROUGE-L", "token_recall": "tokens, %"}
"""Headings, by figure."""


def table(comparison: Comparison) -> Table:
    """Returns the name of each attack, and below it a line for each figure."""
    shown = Table(
        title=f"{markup(comparison.after)} against {markup(comparison.before)}: "
        f"{comparison.texts} texts",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="difference: mean over texts, 95 % interval by a bootstrap over clients; "
        f"p: sign test over clients, corrected for {comparison.tests} lines "
        f"({comparison.correction})",
        title_justify="left",
        caption_justify="left",
    )
    shown.add_column("attack", overflow="fold")
    for heading in ("texts", "before", "after", "difference", "p"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("server", no_wrap=True)
    for attack, lines in groupby(comparison.differences, key=lambda line: line.attack):
        shown.add_row(markup(attack or ANY_ATTACK))
        for line in lines:
            scale = SCALE[line.figure]
            shown.add_row(
                f"  {SAYS[line.figure]}",
                str(line.texts),
                f"{line.before * scale:.1f}",
                f"{line.after * scale:.1f}",
                difference(line).replace("[", r"\["),
                f"{line.p_adjusted:.2g}",
                line.direction,
            )
    return shown


def difference(change: Difference) -> str:
    """Returns `mean [low,high]`, without markup."""
    scale = SCALE[change.figure]
    mean = f"{change.mean * scale:+.1f}"
    if change.low is None or change.high is None:
        return mean
    return f"{mean} [{change.low * scale:+.1f},{change.high * scale:+.1f}]"
