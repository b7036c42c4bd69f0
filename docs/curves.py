"""Draws the pictures of figures in the docs from the tables of their pages.

    python docs/curves.py            writes all of them

A number stands in its table and nowhere else. Below each picture stands a hash of what was drawn,
so a test knows which pictures are not those of the tables any more.
"""

import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, JsonValue

from fedleak.config.families import FAMILY, UNDEFENDED
from fedleak.report.drawings import chart, sweeps
from fedleak.report.drawings.chart import (
    COLOURS,
    INK,
    MEASURES,
    NO_ANSWER,
    NOWHERE,
    PER_CENT,
    Chart,
    Row,
    Series,
)
from fedleak.report.tables.sweep import UTILITIES
from fedleak.store.records import Guarantee, Utility
from fedleak.store.summaries import (
    AttackSummary,
    CellSummary,
    Estimate,
    SweepSummary,
    WorstCase,
)

ROOT = Path(__file__).parents[1]
DOCS, EXPERIMENTS = ROOT / "docs", ROOT / "experiments"

Cells = Mapping[str, str]
"""A row of a table: its cells by their headings."""

FIGURE = re.compile(
    r"(?P<y>-?\d[\d,.]*(e[+-]?\d+)?)( \[(?P<low>[\d.]+), (?P<high>[\d.]+)\])?"
    r"( \((?P<control>[\d.]+)\))?( \*)?"
)
READS = [Series.numbered(measure.heading, i, i) for i, measure in enumerate(MEASURES)]
READ, ROUGE, _ = READS


def tables(text: str) -> Iterator[list[Cells]]:
    """Yields the tables of a page; what looks like a row and does not begin with | is prose."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        split = (re.split(r"(?<!\\)\|", line)[1:-1] for line in block.splitlines())
        headings, _, *rows = ([cell.strip() for cell in cells] for cells in split)
        yield [dict(zip(headings, row, strict=False)) for row in rows]  # a row may be shorter


def table(text: str, first: str) -> list[Cells]:
    """Returns the rows of the table whose first heading is this; none where there is none."""
    return next((rows for rows in tables(text) if rows and next(iter(rows[0])) == first), [])


def figures(cell: str) -> Row:
    """Returns the figure of a cell, its interval and the control in brackets, if it has them."""
    match = FIGURE.fullmatch(cell)
    ends = {} if match is None else match.groupdict()
    return {end: float(shown.replace(",", "")) for end, shown in ends.items() if shown}


# One text under noise.

BLURRED = {
    "Gaussian noise: sigma": r"noise (\S+)",
    "DP-SGD: accounted epsilon": r"DP-SGD \S+, epsilon (\S+)",
    "share masked at random": r"(\S+) masked",
    "share pruned, the smallest": r"(\S+) pruned",
    "bits of a number": r"(\d bits|signs)",
}
"""What a panel says, and the first cells of its rows with their strength."""

LAMP = "LAMP"
"""The heading of a column that only tables of one text have."""


def one_text(text: str) -> Chart:
    """Draws what is read of one text with a prior, a panel for each way to blur an update."""
    rows = [
        row for rows in tables(text) for row in rows if LAMP in row and row.get("prior") != "no"
    ]
    columns = {
        "ROUGE-L": ROUGE,
        "another update's": Series("ROUGE-L of another update's answer"),
        LAMP: Series.numbered("ROUGE-L that LAMP published, of BERT-base", 3, 3),
    }
    series, panels = [READ, *columns.values()], []
    for heading, pattern in BLURRED.items():
        points = list[Row]()
        for row in rows:
            if strength := re.fullmatch(pattern, row["sent"]):
                points += _of_one_text(strength[1], row, columns)
        x = chart.words(heading, list(dict.fromkeys(point["x"] for point in points)))
        lines = [point for point in points if point["series"] in (READ.name, ROUGE.name)]
        panels.append(chart.panel(x, PER_CENT, series, points=points, lines=lines, height=180))
    return chart.grid(panels, columns=3)


def _of_one_text(strength: str, row: Cells, columns: Mapping[str, Series]) -> Iterator[Row]:
    """Yields the points of a row, whose share of exact texts stands as 9/10 [60, 98]."""
    exact, texts, low, high = map(int, re.findall(r"\d+", row["exact"]))
    share = {"y": 100 * exact / texts, "low": low, "high": high}
    yield {"x": strength, "series": READ.name, **share}
    for heading, series in columns.items():
        if read := figures(row[heading]):
            yield {"x": strength, "series": series.name, **read}


# The sweeps on MiniLM.

SWEPT = "What is left of it: sweeps on MiniLM"
"""The section whose tables are drawn, each in a panel."""


def sweeps_minilm(text: str) -> Chart:
    """Draws what is read along each swept setting; lines join numbers only."""
    section = text.partition(f"\n## {SWEPT}\n")[2].partition("\n## ")[0]
    panels = []
    for rows in tables(section):
        heading = next(iter(rows[0]))
        points: list[Row] = [
            {"x": row[heading], "series": series.name, "shift": 0.2 * (number - 1)}
            | figures(row[series.name])
            for row in rows
            for number, series in enumerate(READS)
        ]
        lines = [point for point in points if isinstance(_value(point["x"]), int | float)]
        x = chart.words(heading, [row[heading] for row in rows])
        panels.append(chart.panel(x, PER_CENT, READS, points=points, lines=lines, height=180))
    return chart.grid(panels, columns=3)


def _value(word: str) -> JsonValue:
    """Returns what a cell says: a number, or a word."""
    try:
        value: JsonValue = json.loads(word)
    except ValueError:
        return word
    return value


# The frontiers.

R = TypeVar("R", bound=BaseModel)


def frontier(name: str, text: str) -> Chart | None:
    """Draws a frontier as its sweep does, from the table whose first heading is its name."""
    tables_of_file = tomllib.loads((EXPERIMENTS / f"{name}.toml").read_text(encoding="utf-8"))
    families = tables_of_file["sweep"]["family"]
    cells = tuple(_cell(row[name], row) for row in table(text, name))
    return sweeps.frontier(
        SweepSummary(
            name=name,
            axes={FAMILY: [cell.values[FAMILY] for cell in cells]},
            cells=cells,
            units={family["name"]: family["unit"] for family in families if "unit" in family},
        )
    )


def _cell(family: str, row: Cells) -> CellSummary:
    """Returns the part of a cell that a frontier draws."""
    strength = {} if row["strength"] == "-" else {"strength": _value(row["strength"])}
    useful = {
        measure: figures(row[heading])["y"]
        for measure, heading in UTILITIES.items()
        if heading in row
    }
    epsilon = figures(row["epsilon"]).get("y")
    return CellSummary(
        cell=f"{family} {row['strength']}",
        values={FAMILY: {"kind": family, **strength}},
        status="finished",
        attacks={"auto": _partly(AttackSummary)},  # else no answer is no mark
        worst_case=_worst_case(row),
        utility=_partly(Utility, **useful),
        privacy=None if epsilon is None else _partly(Guarantee, epsilon=epsilon),
    )


def _partly(record: type[R], **fields: Any) -> R:
    """Returns a record with those of its fields that a drawing reads."""
    return record.model_construct(**fields)


def _worst_case(row: Cells) -> WorstCase:
    """Returns what was read in a cell; a star says that no attack answers for some texts."""
    estimates = {}
    for measure in MEASURES:
        read = {
            end: figure / measure.scale for end, figure in figures(row[measure.heading]).items()
        }
        if "y" in read:
            mean = Estimate(mean=read["y"], low=read["low"], high=read["high"])
            estimates[measure.name] = mean
        if "control" in read:
            estimates[f"control_{measure.name}"] = _partly(Estimate, mean=read["control"])
    unattacked = int(row[READ.name].endswith("*"))
    return _partly(WorstCase, unattacked=unattacked, **estimates)


# Where each dies.

NO_NOISE = 1e-7
"""Where the row without a defense is drawn: a log axis has no 0."""

LEAST = 0.01
"""Epsilon at which "nothing seen" is drawn: a log axis has no 0."""

OTHER_CLIENT = "ROUGE-L with another client's update"
AREA = "AUC of the score residual"
ACCOUNTED = "accounted: at most"
BOUNDS = {
    "canaries: if Gaussian": "canaries: at least, if the noise is Gaussian",
    "f-DP": "canaries: at least, f-DP",
    "assumes nothing": "canaries: at least, assuming nothing",
}
"""Headings of lower bounds, and what the drawing calls them."""


def where_each_dies(text: str) -> Chart | None:
    """Draws three panels above each other, with one axis of noise; None: there is nothing yet."""
    read, areas, bounds = list[Row](), list[Row](), list[Row]()
    for row in table(text, "noise multiplier"):
        multiplier = row["noise multiplier"]
        x = NO_NOISE if multiplier == UNDEFENDED else float(multiplier)
        read += ({"x": x, **point} for point in _read(row))
        areas += ({"x": x, **point} for point in _who_was_in(row))
        bounds += ({"x": x, **point} for point in _epsilons(row))
    if not read or not bounds:
        return None
    chance = [{"y": 0.5, "series": "chance"}]
    shown = chart.present(_along_noise(), read, areas, chance, bounds)
    joined = {READ.name, ROUGE.name, AREA, ACCOUNTED, *BOUNDS.values()}
    ends = [NO_NOISE, max(point["x"] for point in (*read, *bounds))]
    named = f"datum.value < {2 * NO_NOISE} ? '{UNDEFENDED}' : datum.label"
    x_axis = chart.numbers(
        "noise multiplier of DP-SGD", ends, log=True, format="~g", labelExpr=named
    )
    epsilons = chart.numbers("epsilon, at delta 1e-5", log=True, format="~e")
    panels: list[tuple[Chart, list[Row], list[Row]]] = [
        (PER_CENT | {"title": "what was read, worst case over attacks"}, read, []),
        (chart.numbers("who was in", [0, 1.05]), areas, chance),
        (epsilons, bounds, []),
    ]
    return {
        "vconcat": [
            chart.panel(
                x_axis,
                y_axis,
                shown,
                points=points,
                lines=[point for point in points if point["series"] in joined],
                across=across,
                width=420,
                height=220,
            )
            for y_axis, points, across in panels
        ],
        **chart.TOGETHER,
    }


def _along_noise() -> list[Series]:
    """Returns what may be drawn along the noise, in the order of the legend."""
    return [
        READ,
        ROUGE,
        Series(OTHER_CLIENT),
        Series(NO_ANSWER, shape="triangle-down"),
        Series.numbered(AREA, 2, 2),
        Series("chance", shape="stroke", dash=(2, 2)),
        Series(ACCOUNTED, INK, "stroke"),
        *(Series.numbered(name, 3 + i, 3 + i) for i, name in enumerate(BOUNDS.values())),
        *(
            Series(_unseen(name), COLOURS[3 + i], "triangle-down")
            for i, name in enumerate(BOUNDS.values())
        ),
    ]


def _read(row: Cells) -> Iterator[Row]:
    exact, rouge = figures(row[READ.name]), figures(row["ROUGE-L (another client's update)"])
    control = rouge.pop("control", None)
    if exact:
        yield {"series": READ.name, **exact}
        yield {"series": ROUGE.name, **rouge}
    if control is not None:
        yield {"series": OTHER_CLIENT, "y": control}
    if row[READ.name] == NO_ANSWER:
        yield {"series": NO_ANSWER, "y": NOWHERE}


def _who_was_in(row: Cells) -> Iterator[Row]:
    if area := figures(row["membership: AUC"]):
        yield {"series": AREA, **area}


def _epsilons(row: Cells) -> Iterator[Row]:
    if accounted := figures(row["accounted epsilon"]):
        yield {"series": ACCOUNTED, **accounted}
    for heading, name in BOUNDS.items():
        if bound := figures(row[heading]):
            yield {"series": name, **bound}
        elif row[heading] != "-":
            yield {"series": _unseen(name), "y": LEAST}


def _unseen(name: str) -> str:
    """Returns what the legend calls a bound where canaries show nothing."""
    return f"{name}: nothing seen"


# Attackers that know the detectors.


def detectors(text: str) -> Chart | None:
    """Draws what such an attacker reads and who notices, along what it leaves; None: nobody ran."""
    rows = table(text, "attacker")
    if not rows:
        return None
    kinds = [heading for heading in rows[0] if heading.startswith("`")]
    series = {"texts read": Series("texts read", INK)} | {
        kind: Series.numbered(f"alarms of {kind.strip('`')}", i, i) for i, kind in enumerate(kinds)
    }
    panels = []
    for attacker in dict.fromkeys(row["attacker"] for row in rows):
        of_attacker = [row for row in rows if row["attacker"] == attacker]
        points = [
            {"x": row["left"], "series": look.name, "shift": 0.09 * (number - len(kinds) / 2)}
            | figures(row[heading])
            for row in of_attacker
            for number, (heading, look) in enumerate(series.items())
        ]
        x = chart.words(
            "share left of what the server would set to zero", [row["left"] for row in of_attacker]
        )
        panels.append(
            chart.panel(
                x,
                PER_CENT | {"title": "%"},
                list(series.values()),
                points=points,
                lines=[point for point in points if point["series"] == "texts read"],
                title=attacker,
                width={"step": 110},
            )
        )
    return chart.grid(panels, columns=1)


# All of them.

PICTURES: Mapping[Path, tuple[Path, Callable[[str], Chart | None]]] = {
    EXPERIMENTS / "figures" / "one-text.svg": (EXPERIMENTS / "README.md", one_text),
    EXPERIMENTS / "figures" / "sweeps-minilm.svg": (EXPERIMENTS / "README.md", sweeps_minilm),
    **{
        DOCS / f"{name}.svg": (DOCS / "defenses.md", partial(frontier, name))
        for name in ("frontier-gpt2", "frontier-llama", "frontier-minilm")
    },
    DOCS / "where-each-dies.svg": (DOCS / "where-each-dies.md", where_each_dies),
    DOCS / "detectors.svg": (DOCS / "detectors.md", detectors),
}
"""Pictures, with the page of each, and what makes a chart of the page's text."""


def write(drawn: Chart | None, picture: Path) -> None:
    """Writes a picture and its hash; where there is nothing to draw, it removes an earlier one."""
    chart.write(drawn, picture)
    if drawn is not None:
        with picture.open("a", encoding="utf-8") as file:
            file.write(stamp(drawn))


def stamp(drawn: Chart | None) -> str:
    """Returns the end of a picture: a hash of what it draws, which no font changes."""
    specification = json.dumps(drawn, sort_keys=True).encode()
    return f"\n<!-- specification: {hashlib.sha256(specification).hexdigest()} -->\n"


if __name__ == "__main__":
    for picture, (page, draw) in PICTURES.items():
        write(draw(page.read_text(encoding="utf-8")), picture)
