"""Drawings of a sweep: along its first key, leakage against utility and epsilon, and its families.

If an attack has no answer, there is a mark below zero and no line: a line would show what nobody
measured. Lines join neighbours only on an axis to scale: between two defenses there is nothing.
"""

import textwrap
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

import numpy as np
from pydantic import JsonValue

from fedleak.config.families import FAMILY, UNDEFENDED
from fedleak.report.drawings import chart
from fedleak.report.drawings.chart import MEASURES, Chart, Measure, Row, Series
from fedleak.report.tables.sweep import UTILITIES, utility, utility_measure
from fedleak.report.words import in_words, short_key
from fedleak.store.summaries import AttackSummary, CellSummary, SweepSummary
from fedleak.training.privacy.accounting import NONE
from fedleak.util.sanitise import printable

APART = 0.5
"""The share of the room between two words that the points of all lines take, side by side."""

TOO_CLOSE = 0.04
"""Numbers nearer than this share of the axis are drawn evenly apart: their labels would overlap."""

WRAPPED = 24
"""The most characters of a line in the label of a cell."""

FEW_CELLS = 8
"""Up to so many cells are numbered, and the legend says which is which."""

COLUMNS = 3
"""Families side by side."""

UNTOUCHED = "undefended"
"""The word on the axis for the cell without a defense."""

SOME_UNATTACKED = "some texts: no attack answers"


def along_first_key(collected: SweepSummary) -> Chart | None:
    """Returns a panel per measured figure, with a line per attack and combination of other keys."""
    first, *further = collected.axes
    values = collected.axes[first]
    scale, places = axis_of(values)
    even = scale == "even"
    attacks = sorted({attack for cell in collected.cells for attack in cell.attacks})
    numbers_of: dict[str, int] = {}
    series: dict[str, Series] = {}
    table: list[tuple[Any, str, AttackSummary | None]] = []
    for cell in collected.cells:
        place = places[values.index(cell.values[first])]
        others = ", ".join(f"{short_key(key)} {in_words(cell.values[key])}" for key in further)
        number = numbers_of.setdefault(others, len(numbers_of))
        for colour, attack in enumerate(attacks):
            line = ", ".join(filter(None, (attack, others)))
            series[line] = Series.numbered(line, colour, number)
            table.append((place, line, cell.attacks.get(attack)))
    series[chart.NO_UPDATE] = Series(chart.NO_UPDATE, dash=(4, 4))
    rows = {m: _points(m, table, even) for m in MEASURES if any(m.value(s) for *_, s in table)}
    if not rows:
        return None
    size: Chart = {"height": 200} if even else {"height": 200, "width": 200}
    x = (
        chart.words(first, places)
        if even
        else chart.numbers(first, log=scale == "log", values=places)
    )
    shown = chart.present(series.values(), *rows.values())
    return chart.grid(
        [
            chart.panel(
                x,
                chart.PER_CENT | {"title": measure.heading},
                shown,
                points=points,
                lines=[row for row in points if row["series"] in series and not even],
                **size,
            )
            for measure, points in rows.items()
        ]
    )


def _points(
    measure: Measure, table: Sequence[tuple[Any, str, AttackSummary | None]], even: bool
) -> list[Row]:
    """Returns the rows of a panel: of lines that have a figure anywhere, and of their control."""
    lines = list(dict.fromkeys(line for _, line, summary in table if measure.value(summary)))
    guesses: dict[Any, list[float]] = {place: [] for place, *_ in table}
    rows: list[Row] = []
    for place, line, summary in table:
        if line not in lines:
            continue
        figure, guess = measure.value(summary), measure.beside(summary, "guess")
        shift = APART * ((lines.index(line) + 0.5) / len(lines) - 0.5) if even else 0.0
        row: Row = {"x": place, "shift": shift, "series": line}
        rows.append(row | chart.span(figure, measure.scale))
        if figure is None and summary is not None:
            rows.append(row | {"y": chart.NOWHERE, "series": chart.silent(line)})
        if figure is not None and guess is not None:
            guesses[place].append(guess)
    means = {place: mean(of_lines) if of_lines else None for place, of_lines in guesses.items()}
    return rows + [{"x": place, "y": y, "series": chart.NO_UPDATE} for place, y in means.items()]


def axis_of(values: Sequence[JsonValue]) -> tuple[str, Sequence[Any]]:
    """Returns an axis of these values: to scale if all are numbers that lie well apart."""
    named = [textwrap.fill(in_words(v), WRAPPED, break_long_words=False) for v in values]
    figures = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(figures) < len(values):
        return "even", named
    log = min(figures) > 0 and max(figures) > chart.LOG_FROM * min(figures)
    on_axis = np.sort(np.log(figures) if log else np.array(figures, float))
    if (np.diff(on_axis) < TOO_CLOSE * np.ptp(on_axis)).any():
        return "even", named
    return "log" if log else "linear", figures


def tradeoff(collected: SweepSummary) -> Chart | None:
    """Returns leakage against utility and epsilon: in each panel a point per attack and cell.

    There is no panel for epsilon if no cell has a guarantee, and no drawing for fewer than two
    cells.
    """
    measure, cells = utility_measure(collected.cells), labels(collected.cells)
    summaries = [summary for cell in collected.cells for summary in cell.attacks.items()]
    attacks = sorted({attack for attack, summary in summaries if summary.rougeL})
    useful, guaranteed, free = list[Row](), list[Row](), list[Row]()
    for cell, label in zip(collected.cells, cells, strict=True):
        epsilon, score = cell.privacy and cell.privacy.epsilon, utility(cell, measure)
        useful += [] if score is None else _cell_points(cell, label, score, attacks)
        if epsilon:  # a client that was never asked has one of 0
            rows = free if epsilon == NONE else guaranteed
            rows += _cell_points(cell, label, epsilon, attacks)
    if len({row["cell"] for row in useful}) < 2 or measure is None:
        return None
    baselines = [cell.utility_reference for cell in collected.cells]
    references = {baseline.figures.get(measure) for baseline in baselines if baseline} - {None}
    down: list[Row] = [{"x": x, "series": chart.REFERENCE} for x in references]
    scores = [row["x"] for row in useful]
    log = measure == "perplexity" and max(scores) > chart.LOG_FROM * min(scores)
    parts: list[tuple[Chart, list[Row], Chart]] = [
        (chart.numbers(UTILITIES[measure], log=log), useful, {"down": down, "width": 260})
    ]
    if guaranteed:
        parts.append((chart.numbers("epsilon", log=True), guaranteed, {"width": 220}))
        parts += [(chart.words(), free, {})] if free else []
    names = [*dict.fromkeys(cells)] if len({*cells}) <= FEW_CELLS else []
    keys = textwrap.wrap(f"cells by {', '.join(map(short_key, collected.axes))}", WRAPPED)
    key = [*keys, *(f"{number}: {label}" for number, label in enumerate(names, 1))]
    series = [Series.numbered(attack, i, i) for i, attack in enumerate(attacks)]
    series += [Series(chart.NO_UPDATE), Series(chart.REFERENCE, chart.INK, "stroke", (2, 2))]
    shown = chart.present(series, down, *(rows for _, rows, _ in parts))
    return chart.grid(
        [
            chart.panel(
                x,
                chart.PER_CENT | {"title": "ROUGE-L"},
                shown,
                points=rows,
                texts=_numbers(rows, names),
                legend="\n".join(key).split("\n") if names else None,
                height=260,
                **more,
            )
            for x, rows, more in parts
        ]
    )


def _cell_points(
    cell: CellSummary, label: str, x: float | str, attacks: Collection[str]
) -> Iterator[Row]:
    """Yields what each attack on texts read in a cell, at the x of the cell."""
    rouge, at = MEASURES[1], {"x": x, "cell": label}
    for attack in cell.attacks.keys() & attacks:
        summary = cell.attacks[attack]
        figure, guess = rouge.value(summary), rouge.beside(summary, "guess")
        nothing = {"y": chart.NOWHERE, "series": chart.silent(attack)}
        yield at | (nothing if figure is None else {"series": attack, **chart.span(figure)})
        if guess is not None:
            yield at | {"y": guess, "series": chart.NO_UPDATE}


def _numbers(rows: Sequence[Row], names: Sequence[str]) -> Iterator[Row]:
    """Yields the number of each cell at its highest point."""
    for number, name in enumerate(names, 1):
        if own := [r for r in rows if r["cell"] == name and r["series"] != chart.NO_UPDATE]:
            yield max(own, key=lambda row: row["y"]) | {"text": str(number)}


def labels(cells: Sequence[CellSummary]) -> list[str]:
    """Returns a label for each cell, without settings that are the same in all cells."""
    values_by_key: dict[str, set[str]] = defaultdict(set)
    for cell in cells:
        for key, value in _settings(list(cell.values.values())):
            values_by_key[key].add(in_words(value))

    def differing(value: JsonValue) -> JsonValue:
        if isinstance(value, list):
            return [differing(element) for element in value]
        if isinstance(value, dict):
            return {k: v for k, v in value.items() if k == "kind" or len(values_by_key[k]) > 1}
        return value

    full = [list(cell.values.values()) for cell in cells]
    short = [", ".join(in_words(differing(value)) for value in values) for values in full]
    if len(set(short)) < len(short):
        short = [", ".join(map(in_words, values)) for values in full]
    return [textwrap.fill(label, WRAPPED) for label in short]


def _settings(value: JsonValue) -> Iterator[tuple[str, JsonValue]]:
    """Yields the keys and values of the tables in a value."""
    for element in value if isinstance(value, list) else []:
        yield from _settings(element)
    if isinstance(value, dict):
        yield from value.items()


def frontier(collected: SweepSummary) -> Chart | None:
    """Returns what leaks along the strengths of each family, and what it costs.

    A family has two panels, at the first value of each further key: above, the worst case over all
    attacks; below, the utility of the trained model. The strengths are in the file's order, from
    weak to strong, beside the undefended cell. Below a strength is its epsilon, if it has one.
    """
    families = _families(collected)
    undefended = [cell for _, cell in families.pop(UNDEFENDED, [])][:1]
    cells = [cell for family in families.values() for _, cell in family]
    if not any(cell.worst_case for cell in cells):
        return None
    cells += undefended
    measure = utility_measure(cells)
    heading = UTILITIES.get(measure or "", "")
    better = " (lower is better)" if measure == "perplexity" else ""
    trained, untouched = f"{heading} of the trained model{better}", f"{heading} without a defense"
    useful = [score for cell in cells if (score := utility(cell, measure)) is not None]
    cost = chart.words()
    if useful:
        low, high = min(useful), max(useful)
        log = measure == "perplexity" and 0 < chart.LOG_FROM * low < high
        margin = 0.0 if log else 0.1 * (high - low) or 0.1
        cost = chart.numbers(heading, (low - margin, high + margin), log=log)
    without = [score for cell in undefended if (score := utility(cell, measure)) is not None]
    series = [
        *(Series.numbered(measure.heading, i, i) for i, measure in enumerate(MEASURES)),
        Series(SOME_UNATTACKED, chart.COLOURS[0], chart.RING),
        *(Series(_control(MEASURES[i]), shape=shape) for i, shape in ((1, "cross"), (2, "stroke"))),
        Series(trained, chart.INK, "diamond"),
        Series(untouched, chart.INK, "stroke", (1, 3)),
    ]
    joined = {trained, *(measure.heading for measure in MEASURES)}
    across: list[Row] = [{"y": score, "series": untouched} for score in without]
    drawn = []
    for name, family in families.items():
        named = [(UNTOUCHED, cell) for cell in undefended]
        named += [("\n".join([_strength(s), *_epsilon(cell)]), cell) for s, cell in family]
        leaks = [row for word, cell in named for row in _leaks(word, cell)]
        costs = [{"x": w, "y": utility(cell, measure), "series": trained} for w, cell in named]
        below = ["(below: epsilon)"] * any(_epsilon(cell) for _, cell in family)
        under = " ".join([*filter(None, [collected.units.get(name)]), *below])
        to_scale = all(isinstance(strength, int | float) for strength, _ in family)
        drawn.append((name, under, [word for word, _ in named], to_scale, [leaks, costs]))
    shown = chart.present(series, across, *(rows for *_, both in drawn for rows in both))
    panels = []
    for number, (name, under, places, to_scale, both) in enumerate(drawn):
        looks: list[tuple[Chart, Chart]] = [
            (chart.PER_CENT | {"title": "worst case over attacks"}, {"height": 180}),
            (cost, {"height": 90, "across": across}),
        ]
        stacked = list[Chart]()
        for rows, (y, more) in list(zip(both, looks, strict=True))[: 2 if useful else 1]:
            lines = [r for r in rows if to_scale and r["series"] in joined and r["x"] != UNTOUCHED]
            last = len(stacked) == bool(useful)
            x = chart.words(under if last else "", places, labels=last)
            y = y | ({"title": ""} if number % COLUMNS else {})
            stacked.append(chart.panel(x, y, shown, points=rows, lines=lines, **more))
        stacked[0]["title"] = printable(name)
        panels.append({"vconcat": stacked, **chart.TOGETHER})
    return chart.grid(panels, COLUMNS)


def _leaks(word: str, cell: CellSummary) -> Iterator[Row]:
    """Yields the worst case over all attacks in a cell, for each measure, and its control."""
    worst = cell.worst_case
    for number, measure in enumerate(MEASURES):
        figure, control = measure.value(worst), measure.beside(worst, "control")
        row: Row = {"x": word, "shift": 0.2 * (number - 1)}
        leak = row | {"series": measure.heading} | chart.span(figure, measure.scale)
        yield leak
        if figure is None and cell.status == "finished" and cell.attacks:
            yield row | {"y": chart.NOWHERE, "series": chart.silent(measure.heading)}
        if worst is not None and worst.unattacked and figure is not None and number == 0:
            yield row | {"y": leak["y"], "series": SOME_UNATTACKED}
        if control is not None:
            yield row | {"y": control, "series": _control(measure)}


def _control(measure: Measure) -> str:
    return f"another client's update: {measure.heading}"


def _families(collected: SweepSummary) -> dict[str, list[tuple[JsonValue, CellSummary]]]:
    """Returns the strengths of each family, with their cells at the first value of other keys."""
    first = {key: values[0] for key, values in collected.axes.items() if key != FAMILY}
    families: dict[str, list[tuple[JsonValue, CellSummary]]] = defaultdict(list)
    for cell in collected.cells:
        value = cell.values.get(FAMILY)
        if isinstance(value, dict) and all(cell.values[key] == first[key] for key in first):
            families[str(value.get("kind"))].append((value.get("strength"), cell))
    return families


def _strength(strength: JsonValue) -> str:
    return textwrap.fill("on" if strength is None else in_words(strength), WRAPPED // 2)


def _epsilon(cell: CellSummary) -> list[str]:
    """Returns the epsilon in few digits; empty if nothing is guaranteed, or not finished."""
    epsilon = None if cell.privacy is None else cell.privacy.epsilon
    if not isinstance(epsilon, int | float):
        return []
    return [f"{epsilon:.0f}" if 10 <= epsilon < 1000 else f"{epsilon:.2g}".replace("e+0", "e")]


DRAWINGS: Mapping[str, tuple[str, Callable[[SweepSummary], Chart | None]]] = {
    "sweep": ("What each attack read along the first key", along_first_key),
    "tradeoff": ("Leakage against utility and epsilon", tradeoff),
    "frontier": ("Where each kind of leak ends, and what it costs", frontier),
}
"""By the names of their files: what each shows, and the function that makes it."""
