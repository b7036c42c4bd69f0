"""The table of planted bugs in docs/canaries.md: whole, and true of detectors today.

What the check finds of the other bugs is tested in tests/audit/test_defense_checks.py, and what
canaries find in tests/audit/test_canaries.py.
"""

import runpy
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from planted import FRESH

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "experiments" / "planted_bugs.py"
PAGE = (ROOT / "docs" / "canaries.md").read_text()
HEADER = "| planted | defense | check | canaries | unit tests |"
FOUND = "**found**"


def rows_of(text: str) -> list[tuple[str, ...]]:
    """Returns the cells of the table's rows."""
    lines = text.partition(HEADER)[2].splitlines()[2:]
    rows = takewhile(lambda line: line.startswith("|"), lines)
    return [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in rows]


ROWS = rows_of(PAGE)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The names of the experiment, with its small model."""
    path = list(sys.path)
    names = runpy.run_path(str(SCRIPT))
    sys.path[:] = path
    folder = tmp_path_factory.mktemp("small")
    names["small_model"](folder)
    for table in (names["test_canaries"].MODEL, names["test_defense_checks"].SMALL):
        table["name"] = str(folder)
    return names


def test_the_table_has_each_bug_and_something_finds_it(experiment: dict[str, Any]) -> None:
    assert [row[:2] for row in ROWS] == [(bug.name, bug.kind) for bug in experiment["planted"]()]
    for name, _, *cells in ROWS:
        detected = any(cell.startswith(FOUND) for cell in cells)
        assert detected != name.startswith(experiment["NONE"]), name
    assert experiment["summed_up"](ROWS) in " ".join(PAGE.split())


QUICK = {
    *("clipping_to_the_median_of_a_batch", "a_mean_over_those_who_were_drawn"),
    *("a_record_twice_in_a_step", "noise_before_clipping"),
    "every_second_number_is_minus_the_first",
}
"""Bugs of each defense that each detector finds; the others' runs take seconds."""


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            number, id=plant.__name__, marks=[] if plant.__name__ in QUICK else [pytest.mark.slow]
        )
        for number, (_, plant, _) in enumerate(FRESH)
    ],
)
def test_a_bug_that_was_made_up_last_is_found_by_the_same_detector(
    experiment: dict[str, Any], number: int, tmp_path: Path
) -> None:
    bugs = list(experiment["planted"]())
    place = len(bugs) - sum(row[0].startswith(experiment["NONE"]) for row in ROWS) - len(FRESH)
    bug, row = bugs[place + number], ROWS[place + number]
    assert experiment["checked"](bug) == row[2]
    if row[3].startswith(FOUND) and not row[2].startswith(FOUND):
        assert experiment["audited"](tmp_path, bug) == row[3]


@pytest.mark.slow
def test_the_table_is_what_the_command_prints() -> None:
    printed = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, check=True
    ).stdout
    assert rows_of(printed) == ROWS
