"""Writes into experiments/README.md when the figures of each section were measured.

    python docs/dates.py

A figure is as old as the commit that wrote its line: `git blame` knows it. A section counts if a
command of `experiments/` or `fedleak` stands in it, and a table or a list with figures.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "experiments" / "README.md"
BELOW = "<!-- Below this line everything is written by `python docs/dates.py`. -->"
COMMAND = re.compile(r"python experiments/|fedleak (sweep|run|bench) ")
FIGURES = re.compile(r"^(\|.*\d[\d.,]*.*\||- .*\d)")
LINE = re.compile(r"^\^?(\w+) .*?\(.*?(\d{4}-\d\d-\d\d) +\d+\) ?(.*)$")


def sections(path: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yields each heading that has figures of a command, with date and commit of each figure."""
    blamed = subprocess.run(
        ["git", "blame", "--date=short", path], cwd=ROOT, check=True, capture_output=True, text=True
    )
    heading, lines, in_code = "", list[tuple[str, str, str]](), False
    for line in [*blamed.stdout.splitlines(), "0 (0 0000-00-00 0) # end"]:
        match = LINE.match(line)
        assert match is not None, line
        commit, date, text = match.groups()
        in_code ^= text.startswith("```")
        if text.startswith("#") and not in_code:
            figures = [(date, commit) for date, commit, text in lines if FIGURES.match(text)]
            if figures and any(COMMAND.search(text) for _, _, text in lines):
                yield heading, sorted(figures)
            heading, lines = text.lstrip("# "), []
        lines.append((date, commit, text))


def main() -> None:
    """Writes the table."""
    rows = []
    for path in [TABLE, *sorted((ROOT / "docs").glob("*.md"))]:
        name = path.relative_to(ROOT)
        for heading, figures in sections(path):
            (oldest, _), (newest, commit) = figures[0], figures[-1]
            when = oldest if oldest == newest else f"{oldest} to {newest}"
            rows.append(f"| {name} | {heading} | {when} | {commit} |")
    head = ["| page | section | figures of | newest commit |", "|---|---|---|---|"]
    above = TABLE.read_text().partition(BELOW)[0]
    TABLE.write_text("\n".join([f"{above}{BELOW}", "", *head, *rows, ""]))


if __name__ == "__main__":
    main()
