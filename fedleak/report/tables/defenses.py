"""What defenses did to updates."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedleak.report.table import Table, cells, words
from fedleak.report.words import NOT_MEASURED, figure, in_words
from fedleak.store.records import DefenseFigures


def defense_tables(
    defenses: Sequence[Mapping[str, Any]], effects: Sequence[DefenseFigures]
) -> list[Table]:
    """Returns a line for each defense, with its settings; no table where there is none.

    Args:
        defenses: As in the experiment file.
        effects: The figures of the defenses that report what they did.
    """
    figures = {effect.defense: effect.figures for effect in effects}
    rows = [
        [
            f"{place}: {table['kind']}",
            in_words({key: value for key, value in table.items() if key != "kind"}) or "defaults",
            _in_words(figures.get(place, {})),
        ]
        for place, table in enumerate(defenses)
    ]
    note = (
        "An update is one client's: what rounding before a secure sum does is here, and what the "
        "sum itself hides is not."
    )
    title = "Defenses, and what they did to an update on average"
    return [Table(title, words("defense", "settings", "did"), cells(rows), [note])] if rows else []


def _in_words(figures: Mapping[str, float | None]) -> str:
    shown = [f"{name.replace('_', ' ')} {figure(value)}" for name, value in figures.items()]
    return ", ".join(shown) or NOT_MEASURED
