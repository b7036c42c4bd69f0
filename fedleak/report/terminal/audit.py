"""Prints the page of an audit: the verdict of the report, the gate, and how long it took."""

import textwrap

from rich.console import Console
from rich.text import Text

from fedleak.report.html.page import Level, Verdict
from fedleak.report.tables.audit import gate_tables, stopped
from fedleak.report.terminal.table import print_table
from fedleak.report.words import number
from fedleak.store.audits import Audit
from fedleak.util.sanitise import printable

STYLES = {Level.READ: "bold red", Level.PARTLY: "bold yellow", Level.UNKNOWN: "bold yellow"}

INDENT = "  "


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Prints what was found, the worst first."""
    console.print()
    console.print(Text(printable(f"{verdict.headline}."), style=STYLES[verdict.level]))
    for paragraph in verdict.paragraphs:
        console.print()
        console.print(Text(printable(paragraph.word), style="bold"))
        lines = textwrap.wrap(
            printable(paragraph.value), console.width - len(INDENT), break_on_hyphens=False
        )
        console.print(Text(textwrap.indent("\n".join(lines), INDENT)))
    console.print()


def print_audit(audit: Audit, verdict: Verdict, console: Console) -> None:
    """Prints the verdict on an audit, what the gate says, and how long it took."""
    print_verdict(verdict, console)
    for table in gate_tables(audit):
        print_table(console, table)
    ended = stopped(audit)
    if audit.seconds is not None:  # the plan itself was printed before
        planned = f"{number(audit.estimate)} s were planned for all of it"
        ended.append(f"{planned}, and it took {number(audit.seconds)} s.")
    for line in ended:
        console.print(line, highlight=False)
