"""Pictures of a report, whose colours follow the page."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import mean

from fedleak.report.drawings import chart
from fedleak.report.drawings.chart import MEASURES, Chart, Row, Series
from fedleak.report.html.page import Picture
from fedleak.report.tables.attacks import shown
from fedleak.report.tables.leakage import ReadShare, client_name
from fedleak.report.words import listed, number
from fedleak.store.records import LedgerRow, Utility
from fedleak.store.run import Key
from fedleak.store.summaries import AttackSummary, MembershipSummary
from fedleak.util.lists import grouped
from fedleak.util.sanitise import printable

WIDTH = 330
"""Pixels of a panel: two pictures lie side by side on a desk's screen, and one is legible on a
phone's."""

NUMBERED_UP_TO = 130
"""The most cells of a heat map that show numbers; numbers of more cells would overlap."""

MOST_CELLS = 60
"""The most cells on a side of a heat map; with more clients or rounds, a cell averages several."""

SHADES = ("#d5dbe2", "#e58a6d", "#b3261e")
"""Colours for nothing read, half and all."""

_KEY: Chart = {"orient": "bottom", "title": "% read; empty: no answer", "values": [0, 50, 100]}
"""The legend of the shades."""

OTHER_UPDATE, ATTACKED = "other update", "attacked"


def leakage(read: Mapping[Key, ReadShare]) -> Iterator[Picture]:
    """Yields heat maps of rounds x clients: texts read word for word, and tokens found."""
    for measure, field in {"texts read word for word": "exact", "tokens found": "tokens"}.items():
        values = {key: getattr(share, field) for key, share in read.items()}
        if not (measured := [value for value in values.values() if value is not None]):
            continue
        yield Picture(
            f"{measure[0].upper()}{measure[1:]}, % of each update",
            f"Share of {measure} by the best attack on each text, for {len(read):,} updates: from "
            f"{100 * min(measured):.0f} to {100 * max(measured):.0f} %, on average "
            f"{100 * sum(measured) / len(measured):.0f} %; {len(read) - len(measured):,} have no "
            "answer. The table below has each figure.",
            _drawn(_heat_map(values)),
        )


def _heat_map(values: Mapping[Key, float | None]) -> Chart:
    rounds = _places(sorted({key.round for key in values}), str)
    clients = _places(sorted({key.client for key in values}), client_name)
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    for key, value in values.items():
        cells[rounds[key.round], clients[key.client]] += [] if value is None else [100 * value]
    rows = []
    for (round, client), shares in cells.items():
        read = mean(shares) if shares else None
        rows.append({"round": round, "client": client, "read": read, "number": number(read)})
    many: Chart = {"labelOverlap": True, "labelAngle": 0, "ticks": False, "domain": False}
    names = {"round": rounds.values(), "client": clients.values()}
    # The longer side is horizontal, so that one round of many clients is a row and not a column.
    lying = sorted(names, key=lambda side: len({*names[side]}), reverse=True)
    sides = {
        axis: {"field": side, **chart.words(side, [*dict.fromkeys(names[side])], **many)}
        for axis, side in zip("xy", lying, strict=True)
    }
    scale = {"domain": [0, 100], "range": SHADES, "interpolate": "rgb"}
    shades = {"field": "read", "type": "quantitative", "scale": scale, "legend": _KEY}
    layers: list[Chart] = [{"mark": {"type": "rect"}, "encoding": {"color": shades}}]
    if len(cells) <= NUMBERED_UP_TO:
        ink = {"condition": {"test": "datum.read > 70", "value": "#fff"}, "value": "#111"}
        numbered = {"text": {"field": "number"}, "color": ink}
        layers.append({"mark": {"type": "text"}, "encoding": numbered})
    table = {"data": {"values": rows}, "encoding": sides, "layer": layers}
    return table | {"view": {"fill": chart.EMPTY}, "width": WIDTH, "height": {"step": 18}}


def _drawn(picture: Chart) -> bytes:
    return chart.svg(picture, on_page=True, orient="bottom", columns=3)


def _places(ids: Sequence[int], name: Callable[[int], str]) -> dict[int, str]:
    """Returns the label of each round or client; if there are many, several share one."""
    size = math.ceil(len(ids) / MOST_CELLS)
    groups = [ids[i : i + size] for i in range(0, len(ids), size)]
    return {i: "-".join(map(name, dict.fromkeys((g[0], g[-1])))) for g in groups for i in g}


def training(
    utility: Sequence[Utility], ledger: Sequence[LedgerRow], attacked: Sequence[int]
) -> Iterator[Picture]:
    """Yields utility and epsilon by round, as far as they were measured.

    Args:
        utility: Scores of the model, by round.
        ledger: The ledger of all clients.
        attacked: Rounds that are marked.
    """
    for measure in ("accuracy", "perplexity", "mcc", "loss"):
        figures = [(row.round, row.figures.get(measure)) for row in utility]
        points = [(round, figure) for round, figure in figures if figure is not None]
        if points:
            yield Picture(
                f"Utility: {measure} by round",
                f"{measure} of the model on held-out texts: {points[0][1]:.3g} at round "
                f"{points[0][0]}, {points[-1][1]:.3g} at round {points[-1][0]}.",
                _by_round(measure, {measure: points}, attacked),
            )
            break
    spent: dict[int, list[float]] = defaultdict(list)
    for row in ledger:
        if isinstance(row.epsilon, float):
            spent[row.round].append(row.epsilon)
    if spent:
        by_round = sorted(spent.items())
        highest = [(round, max(epsilons)) for round, epsilons in by_round]
        lowest = [(round, min(epsilons)) for round, epsilons in by_round]
        yield Picture(
            "Epsilon spent by round, of the client with the most and the least",
            f"Epsilon that clients have spent: at most {highest[0][1]:.3g} by round "
            f"{highest[0][0]} and {highest[-1][1]:.3g} by round {highest[-1][0]}.",
            _by_round("epsilon", {"the most": highest, "the least": lowest}, attacked),
        )


def _by_round(
    heading: str, lines: Mapping[str, Sequence[tuple[int, float]]], attacked: Sequence[int]
) -> bytes:
    rows: list[Row] = [
        {"x": round, "y": figure, "series": name}
        for name, points in lines.items()
        for round, figure in points
    ]
    rounds = sorted({row["x"] for row in rows})
    marked = [{"x": round, "series": ATTACKED} for round in attacked if len(attacked) <= 20]
    series = [Series.numbered(name, number, number) for number, name in enumerate(lines)]
    series.append(Series(ATTACKED, shape="stroke", dash=(2, 2)))
    drawn = chart.panel(
        chart.numbers("round", values=rounds[:: math.ceil(len(rounds) / 10)]),
        chart.numbers(heading),
        chart.present(series, rows, marked),
        points=rows,
        lines=rows,
        down=marked,
        width=WIDTH,
        height=130,
    )
    return _drawn(drawn)


def attacks(summaries: Mapping[str, AttackSummary]) -> Iterator[Picture]:
    """Yields attacks side by side: three figures with intervals, and both controls."""
    if not any(summary.answers for summary in summaries.values()):
        return
    series = [
        Series("attack, with its 95 % interval", chart.COLOURS[1], "circle"),
        Series(OTHER_UPDATE, shape="square"),
        Series(chart.NO_UPDATE),
    ]
    panels = []
    for measure in MEASURES:
        rows, texts = list[Row](), list[Row]()
        for attack, summary in summaries.items():
            if (figure := measure.value(summary)) is None:
                texts.append({"x": attack, "y": 0, "text": "not measured"})
                continue
            rows.append(
                {"x": attack, "series": series[0].name, **chart.span(figure, measure.scale)}
            )
            for kind, look in zip(("control", "guess"), series[1:], strict=True):
                if (control := measure.beside(summary, kind)) is not None:
                    rows.append({"x": attack, "series": look.name, "y": control})
        panels.append(
            chart.panel(
                chart.words("", [*summaries], labelAngle=0, labelLimit=120),
                chart.PER_CENT,
                series,
                points=rows,
                texts=texts,
                lying=True,
                title=measure.heading,
                width=WIDTH,
                height={"step": 24},
            )
        )
    yield Picture(
        "Each attack with its interval, and its controls",
        "; ".join(f"{name}: {_in_words(row)}" for name, row in summaries.items()),
        _drawn(chart.grid(panels, 1)),
    )


def _in_words(summary: AttackSummary) -> str:
    measured = [
        f"{measure.heading} {shown(summary, measure.name)}"
        for measure in MEASURES
        if measure.value(summary) is not None
    ]
    return listed(measured or ["no answer"])


def membership(summary: MembershipSummary | None) -> Iterator[Picture]:
    """Yields the ROC curves of attacks on membership, a picture for each attack."""
    rows = [row for row in summary.figures if row.roc] if summary else []
    for attack, curves in grouped(rows, lambda row: row.attack).items():
        words = "; ".join(
            f"{row.score} {'-' if row.auc is None else f'{row.auc.mean:.2f}'}" for row in curves
        )
        chance = [{"x": end, "y": end, "series": "chance"} for end in (0, 100)]
        panels = []
        for row in curves:
            curve = [
                {"x": 100 * point.accused, "series": "found", **chart.span(point.found, 100)}
                for point in row.roc
            ]
            panels.append(
                chart.panel(
                    chart.numbers("accused of the others, %", (0, 100), values=[0, 50, 100]),
                    chart.numbers("found, %", (0, 100), values=[0, 50, 100]),
                    [Series("found", chart.COLOURS[0]), Series("chance", dash=(2, 2))],
                    lines=[*curve, *chance],
                    bands=curve,
                    title=printable(row.score),
                    width=100,
                    height=100,
                )
            )
        yield Picture(
            f"{printable(attack)}: the share of texts that were in and are found, against the "
            "share of others that are accused, over all rounds; shaded: 95 % interval at each "
            "threshold",
            f"Areas under the curves: {words}. The table below has the intervals.",
            _drawn(chart.grid(panels, 2)),
        )
