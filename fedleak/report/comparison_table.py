"""A comparison of two runs for the terminal."""

from rich import box
from rich.table import Table

from fedleak.audit.comparison import Comparison, Difference
from fedleak.sanitise import markup

_SCALE = {"exact": 100.0, "rougeL": 1.0, "token_recall": 100.0}
_SAYS = {"exact": "exact, %", "rougeL": "ROUGE-L", "token_recall": "tokens, %"}


def table(found: Comparison) -> Table:
    """Returns a line for each attack and figure."""
    shown = Table(
        title=f"{markup(found.after)} against {markup(found.before)}: {found.texts} texts",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        caption="difference: mean over texts, 95 % interval by a bootstrap over clients; "
        "p: sign test over clients",
        title_justify="left",
        caption_justify="left",
    )
    shown.add_column("attack", overflow="fold")
    shown.add_column("figure", no_wrap=True)
    for heading in ("texts", "before", "after", "difference", "p"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("server", no_wrap=True)
    for one in found.differences:
        scale = _SCALE[one.figure]
        shown.add_row(
            markup(one.attack or "any attack"),
            _SAYS[one.figure],
            str(one.texts),
            f"{one.before * scale:.1f}",
            f"{one.after * scale:.1f}",
            _interval(one, scale),
            f"{one.p:.2g}",
            one.direction,
        )
    return shown


def _interval(one: Difference, scale: float) -> str:
    mean = f"{one.mean * scale:+.3g}"
    if one.low is None or one.high is None:
        return mean
    return f"{mean} [{one.low * scale:+.3g},{one.high * scale:+.3g}]".replace("[", r"\[")
