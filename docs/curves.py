"""Draws what `maximum_likelihood` reads of one text along the strengths of what blurs an update.

    python docs/curves.py            writes experiments/figures/one-text.svg

It draws lines of tables in experiments/README.md whose first cell is a strength. Behind
`exact/texts [low, high]` they have ROUGE-L and that of another update's answer; the last cell is
the ROUGE-L that LAMP published. Lines without a prior are left out.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from fedleak.report.drawings import chart
from fedleak.report.drawings.chart import PER_CENT, Chart, Row, Series

ROOT = Path(__file__).parents[1]
TABLES = ROOT / "experiments" / "README.md"
PICTURE = ROOT / "experiments" / "figures" / "one-text.svg"
PANELS = {
    "Gaussian noise: sigma": r"noise (\S+)",
    "DP-SGD: accounted epsilon": r"DP-SGD \S+, epsilon (\S+)",
    "share masked at random": r"(\S+) masked",
    "share pruned, the smallest": r"(\S+) pruned",
    "bits of a number": r"(\d bits|signs)",
}
EXACT = re.compile(r"(\d+)/(\d+) \[(\d+), (\d+)\]")
READ = Series.numbered("texts exact, %", 0, 0)
ROUGE = Series.numbered("ROUGE-L", 1, 1)
OTHER = Series("ROUGE-L of another update's answer")
LAMP = Series.numbered("ROUGE-L that LAMP published, of BERT-base", 3, 3)


def rows(text: str, pattern: str) -> Iterator[Row]:
    """Yields what is drawn of the lines whose first cell matches."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        strength = re.fullmatch(pattern, cells[0])
        if strength is None or "no" in cells:
            continue
        place = next(number for number, cell in enumerate(cells) if EXACT.fullmatch(cell))
        exact, texts, low, high = map(float, EXACT.findall(cells[place])[0])
        share = {"y": 100 * exact / texts, "low": low, "high": high}
        yield {"x": strength[1], "series": READ.name, **share}
        figures = (ROUGE, cells[place + 1]), (OTHER, cells[place + 2]), (LAMP, cells[-1])
        for series, figure in figures:
            if figure != "-":
                yield {"x": strength[1], "series": series.name, "y": float(figure)}


def curves(text: str) -> Chart:
    """Returns a panel for each way to blur an update."""
    series, panels = [READ, ROUGE, OTHER, LAMP], []
    for heading, pattern in PANELS.items():
        drawn = list(rows(text, pattern))
        places = list(dict.fromkeys(row["x"] for row in drawn))
        joined = [row for row in drawn if row["series"] in (READ.name, ROUGE.name)]
        x = chart.words(heading, places)
        panels.append(chart.panel(x, PER_CENT, series, points=drawn, lines=joined, height=180))
    return chart.grid(panels, columns=3)


if __name__ == "__main__":
    chart.write(curves(TABLES.read_text(encoding="utf-8")), PICTURE)
