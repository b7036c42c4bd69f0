"""A comparison of two runs for the terminal."""

from rich import box
from rich.table import Table

from fedleak.audit.comparison import Comparison
from fedleak.report.words import ANY_ATTACK
from fedleak.sanitise import markup
from fedleak.store.summaries import Difference

SCALE = {"exact": 100.0, "rougeL": 1.0, "token_recall": 100.0}
"""What is shown of 1, by figure."""

SAYS = {"exact": "exact, %", "rougeL": "ROUGE-L", "token_recall": "tokens, %"}
"""Headings, by figure."""


def table(found: Comparison) -> Table:
    """Returns a line for each attack and figure."""
    shown = Table(
        title=f"{markup(found.after)} against {markup(found.before)}: {found.texts} texts",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="difference: mean over texts, 95 % interval by a bootstrap over clients; "
        f"p: sign test over clients, corrected for {found.tests} lines ({found.correction})",
        title_justify="left",
        caption_justify="left",
    )
    shown.add_column("attack", overflow="fold")
    shown.add_column("figure", no_wrap=True)
    for heading in ("texts", "before", "after", "difference", "p"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("server", no_wrap=True)
    for one in found.differences:
        scale = SCALE[one.figure]
        shown.add_row(
            markup(one.attack or ANY_ATTACK),
            SAYS[one.figure],
            str(one.texts),
            f"{one.before * scale:.1f}",
            f"{one.after * scale:.1f}",
            difference(one).replace("[", r"\["),
            f"{one.p_adjusted:.2g}",
            one.direction,
        )
    return shown


def difference(one: Difference) -> str:
    """Returns `mean [low,high]`, without markup."""
    scale = SCALE[one.figure]
    mean = f"{one.mean * scale:+.1f}"
    if one.low is None or one.high is None:
        return mean
    return f"{mean} [{one.low * scale:+.1f},{one.high * scale:+.1f}]"
