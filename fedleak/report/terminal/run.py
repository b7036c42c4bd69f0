"""Prints a run: what leaked per round and client, the verdict, and examples beside the truth.

Whatever others wrote, names too, is put through `markup` or `printable` where it is printed.
"""

from collections.abc import Sequence
from itertools import chain

from rich.console import Console

from fedleak.attacks.reconstruction import Status
from fedleak.audit.answer_scores import Scored, TextPair
from fedleak.report.html.verdict import verdict_of
from fedleak.report.tables.leakage import leakage_table, shares
from fedleak.report.tables.run import run_tables
from fedleak.report.terminal.audit import print_verdict
from fedleak.report.terminal.table import print_table
from fedleak.store.records import LEDGER
from fedleak.store.run import Run
from fedleak.store.summaries import SUMMARY
from fedleak.util.sanitise import markup

EXAMPLES = 4
"""The most recovered texts that are printed."""


def print_run(
    run: Run, scored: Sequence[Scored], console: Console | None = None, *, texts: bool = False
) -> None:
    """Prints a run's tables, the verdict on it and some recovered texts.

    Args:
        run: The run directory.
        scored: Its scores.
        console: Where to print; left out: standard output.
        texts: Print private texts to a pipe or file, too; a terminal always shows some.
    """
    console = console or Console(emoji=False)
    summary = run.read_document(SUMMARY)
    rows = [answer.row for answer in scored]
    if not rows:
        console.print(f"nothing scored yet in {markup(run.path)}")
    else:
        of_models = summary.defenses.settings.get("sees") == "models"
        ledger = run.rows(LEDGER)
        print_table(console, leakage_table(summary.name, rows, shares(rows), ledger, of_models))
    for table in chain(*run_tables(summary, summary.defenses.defense).values()):
        print_table(console, table)
    print_verdict(verdict_of(run, rows), console)
    examples = best_examples(scored)
    # Not `console.is_terminal`, which an environment can force: a log must not be taken for one.
    if examples and (texts or console.file.isatty()):
        console.print("some private texts, and what was read")
        for name, pair in examples:
            console.print(f"  [bold]private[/]    {markup(pair.truth)}")
            console.print(
                f"  [bold]{markup(f'{name:<10}')}[/] {markup(pair.answer or '')}  "
                f"[dim]ROUGE-L {pair.rougeL:.0f}[/]"
            )
    elif examples:
        console.print(
            "private texts are printed on a terminal only, or with --texts: "
            f"`fedleak score {markup(run.path)} --texts`",
            soft_wrap=True,
        )
    to_read = [row for row in rows if not row.of_no_text]
    for attack, status, reason in sorted({(row.attack, row.status, row.reason) for row in to_read}):
        if status != Status.RECOVERED:
            why = reason or "what the client trained on is not here"
            console.print(f"  [yellow]{markup(f'{attack} {status}')}[/]: {markup(why)}")
    for note in summary.notes:  # what is missing is said at the end of the command
        console.print(f"[yellow]note[/]: {markup(note)}", soft_wrap=True)
    console.print(f"results: {markup(run.path)}")


def best_examples(scored: Sequence[Scored]) -> list[tuple[str, TextPair]]:
    """Returns the best answers, at most one per private text, best first."""
    best: dict[str, tuple[str, TextPair]] = {}
    for answer in scored:
        for pair in answer.pairs:
            held = best.get(pair.truth)
            if pair.answer is not None and (held is None or pair.rougeL > held[1].rougeL):
                best[pair.truth] = (answer.row.attack, pair)
    return sorted(best.values(), key=lambda example: -example[1].rougeL)[:EXAMPLES]
