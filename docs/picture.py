"""Draws the picture in the README from a run directory, as the terminal shows the run.

    python docs/picture.py RUN [--out FILE]

It shows private texts, so give it a run on `builtin/notes`, whose texts are made up. Seconds are
not in it: the same results give the same file.
"""

import argparse
import io
import re
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import MONOKAI

from fedleak.audit import scoring
from fedleak.report.tables.leakage import leakage_table, shares
from fedleak.report.terminal.run import best_examples
from fedleak.report.terminal.table import print_table
from fedleak.store.records import LEDGER
from fedleak.store.run import Run
from fedleak.store.summaries import SUMMARY
from fedleak.util.sanitise import markup

WIDTH = 78
TEXTS = 3
PICTURE = Path(__file__).with_name("quickstart.svg")

# Without the fonts that Rich names: a page that shows the picture asks no other server for one.
_WITHOUT_FONTS = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
FORMAT = _WITHOUT_FONTS.replace("Fira Code", "ui-monospace, Menlo, Consolas")


def picture(run: Run) -> str:
    """Returns an SVG with some texts of a run beside what was read, and its table."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), emoji=False, highlight=False)
    with run.lock():
        scored = scoring.score_run(run)
    name = run.read_document(SUMMARY).name
    short = [example for example in best_examples(scored) if len(example[1].truth) < WIDTH - 11]
    console.print("some private texts, and what the server read\n", style="italic")
    for attack, pair in short[:TEXTS]:
        console.print(f"  [bold]private[/]  {markup(pair.truth)}")
        console.print(f"  [bold red]{markup(f'{attack:<7}')}[/]  {markup(pair.answer or '')}")
    console.print()
    rows = [answer.row for answer in scored]
    print_table(console, leakage_table(name, rows, shares(rows), run.rows(LEDGER)))
    return console.export_svg(
        title="fedleak run", theme=MONOKAI, code_format=FORMAT, unique_id="quickstart"
    )


def main() -> None:
    """Writes the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--out", type=Path, default=PICTURE, metavar="FILE")
    chosen = parser.parse_args()
    chosen.out.write_text(picture(Run(chosen.run)))


if __name__ == "__main__":
    main()
