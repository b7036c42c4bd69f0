"""Whether a change made it easier to tell who was in, of two runs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny import call, trained_here, two_copies

from fedleak.attacks import CALIBRATED
from fedleak.audit import comparison
from fedleak.audit.comparison import Comparison
from fedleak.audit.pairing import AREA, CALIBRATED_AREA
from fedleak.report.tables.comparison import comparison_table
from fedleak.store.records import LEDGER, MEMBERSHIP, MembershipRow
from fedleak.store.run import Run
from fedleak.store.summaries import SUMMARY, Difference, Direction

pytestmark = pytest.mark.core

CLIENTS = 8
TABLES: dict[str, Any] = {
    "data": {"name": "builtin/notes", "samples": 4 * CLIENTS, "held_out": 40},
    "federation": {"clients": CLIENTS, "rounds": 2, "batch_size": 2},
    "attack": [{"kind": "membership"}],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, saved: Callable[..., str]) -> Path:
    model = {"name": saved("bert", layers=1)}  # one layer is enough for scores of texts
    return trained_here(tmp_path_factory.mktemp("trained"), TABLES | {"model": model})


@pytest.fixture
def runs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Run]:
    """Two copies of a run."""
    monkeypatch.chdir(tmp_path)
    return two_copies(trained, tmp_path)


def change(run: Run, score: Callable[[MembershipRow], tuple[float, ...]]) -> None:
    """Gives every list other scores."""
    rows = [
        row.model_copy(update={"scores": dict.fromkeys(row.scores, score(row))})
        for row in run.rows(MEMBERSHIP)
    ]
    run.write_rows(MEMBERSHIP, rows)


def compare(before: Run, after: Run) -> Comparison:
    (compared,) = comparison.compare(before, [after])
    return compared


def areas(compared: Comparison) -> dict[str, Difference]:
    lines = [line for line in compared.differences if line.attack == "membership"]
    return {line.figure: line for line in lines if line.figure in (AREA, CALIBRATED_AREA)}


def slow_area(rows: list[MembershipRow], score: str) -> float:
    """The chance that a text that was in scores higher than another one of its client."""
    by_text: dict[tuple[int, int], list[tuple[float, bool]]] = {}
    for row in rows:
        for number, value, inside in zip(row.texts, row.scores[score], row.inside, strict=True):
            by_text.setdefault((row.client, number), []).append((value, inside))
    texts = [
        (client, sum(value for value, _ in seen) / len(seen), any(inside for _, inside in seen))
        for (client, _), seen in by_text.items()
    ]
    shares = []
    for client, value, inside in texts:
        controls = [other for owner, other, was_in in texts if owner == client and not was_in]
        if inside:
            lower = sum((value > other) + (value == other) / 2 for other in controls)
            shares.append(lower / len(controls))
    return sum(shares) / len(shares)


def test_the_areas_are_those_of_the_run_and_do_not_differ_from_themselves(
    runs: tuple[Run, Run],
) -> None:
    for run in runs:
        rows = [
            row.model_copy(update={"scores": row.scores | {CALIBRATED: row.scores["loss_drop"]}})
            for row in run.rows(MEMBERSHIP)
        ]
        run.write_rows(MEMBERSHIP, rows)
    lines, of_run = areas(compare(*runs)), runs[0].read_document(SUMMARY).membership
    assert of_run is not None
    figures = of_run.figures_of("membership")
    assert figures is not None
    assert figures.auc is not None
    assert lines[AREA].before == pytest.approx(figures.auc.mean)
    assert lines[AREA].texts == figures.members
    assert lines.keys() == {AREA, CALIBRATED_AREA}
    rows = runs[0].rows(MEMBERSHIP)
    for figure, score in ((AREA, "residual"), (CALIBRATED_AREA, CALIBRATED)):
        line = lines[figure]
        assert line.before == pytest.approx(slow_area(rows, score))
        assert (line.mean, line.direction, line.clients) == (0.0, Direction.UNTOLD, CLIENTS)


def test_who_is_told_better_and_worse_is_said(runs: tuple[Run, Run]) -> None:
    change(runs[0], lambda row: tuple(map(float, row.inside)))
    change(runs[1], lambda row: (0.0,) * len(row.inside))
    for pair, sign, direction in ((runs, -1, Direction.BETTER), (runs[::-1], 1, Direction.WORSE)):
        compared = compare(*pair)
        line = areas(compared)[AREA]
        assert {line.before, line.after} == {1.0, 0.5}
        assert (line.mean, line.direction) == (0.5 * sign, direction)
        assert line.p == pytest.approx(2 * 0.5**CLIENTS)
        assert -1.0 <= line.low < line.mean < line.high <= 1.0
        assert compared.tests == len(compared.differences)
    assert call("compare", "a", "b")[0] == 0
    shown = [[cell.text for cell in row] for row in comparison_table(compare(*runs)).rows]
    (line_of_areas,) = [cells for cells in shown if cells[1] == "who was in, AUC"]
    assert line_of_areas[3:5] == ["1.00", "0.50"]
    assert line_of_areas[5].startswith("-0.50 [")


def test_lists_of_other_texts_are_not_paired_and_that_is_said(runs: tuple[Run, Run]) -> None:
    file = runs[1].path / "held_out.json"
    texts = json.loads(file.read_text())
    texts["sequences"] = texts["sequences"][::-1]
    file.write_text(json.dumps(texts))
    compared = compare(*runs)
    assert areas(compared) == {}
    assert compared.unpaired["membership: the runs ask about other texts"] > 0


def test_an_attack_of_one_run_only_is_not_compared(runs: tuple[Run, Run]) -> None:
    runs[1].write_rows(MEMBERSHIP, [])
    assert areas(compare(*runs)) == {}


def test_members_that_one_run_has_no_scores_of_are_counted(runs: tuple[Run, Run]) -> None:
    rows = runs[1].rows(MEMBERSHIP)
    runs[1].write_rows(MEMBERSHIP, [row for row in rows if row.client])
    compared = compare(*runs)
    lost = sum(sum(row.inside) for row in rows if not row.client)
    assert lost > 0
    assert compared.unpaired[f"membership: one run has no answer ({AREA})"] == lost
    assert areas(compared)[AREA].clients == CLIENTS - 1


def test_of_other_batches_the_areas_stand_side_by_side(runs: tuple[Run, Run]) -> None:
    for file in (runs[1].path / "vault").glob("*.json"):
        batch = json.loads(file.read_text())
        file.write_text(json.dumps(batch | {"sequences": batch["sequences"][::-1]}))
    drawn = [row.model_copy(update={"sampling": "Poisson"}) for row in runs[1].rows(LEDGER)]
    runs[1].write_rows(LEDGER, drawn)
    compared = compare(*runs)
    of_run = runs[0].read_document(SUMMARY).membership
    assert of_run is not None
    (means,) = [row for row in compared.means if row.figure == AREA]
    figures = of_run.figures_of("membership")
    assert figures is not None
    assert figures.auc is not None
    assert means.attack == "membership"
    assert means.before is not None
    assert means.before.mean == pytest.approx(figures.auc.mean)
    assert call("compare", "a", "b")[0] == 0
    assert "who was in, AUC (membership)" in {
        row[0].text for row in comparison_table(compared).rows
    }
