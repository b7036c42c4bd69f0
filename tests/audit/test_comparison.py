import itertools
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny import DLG, call, tables, trained_here, two_copies

from fedleak.audit import comparison
from fedleak.audit.comparison import Comparison
from fedleak.audit.metrics import intervals
from fedleak.audit.pairing import corrected
from fedleak.config.loading import parse
from fedleak.report.tables.trends import Dated, trend_tables
from fedleak.store.records import LEAKAGE, LEDGER
from fedleak.store.run import Run
from fedleak.store.summaries import SUMMARY, Difference, Direction
from fedleak.util.errors import FedleakError

CLIENTS = 8
TABLES: dict[str, Any] = {
    "data": {"name": "builtin/notes", "samples": 2 * CLIENTS, "held_out": 4},
    "federation": {"clients": CLIENTS, "rounds": 1, "batch_size": 2},
    "threat": {"knows": ["labels", "lengths"]},
    "attack": [DLG],
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, saved: Callable[..., str]) -> Path:
    model = {"name": saved("bert", layers=1)}
    return trained_here(tmp_path_factory.mktemp("trained"), TABLES | {"model": model})


@pytest.fixture
def runs(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Run, Run]:
    """Two copies of a run."""
    monkeypatch.chdir(tmp_path)
    return two_copies(trained, tmp_path)


def compare(before: Run, after: Run) -> Comparison:
    (compared,) = comparison.compare(before, [after])
    return compared


def change(run: Run, attack: str, **scores: Any) -> None:
    """Gives every text of an attack these scores."""
    run.write_rows(
        LEAKAGE,
        [
            row.model_copy(
                update={"texts": tuple(t.model_copy(update=scores) for t in row.texts or ())}
                if row.attack == attack
                else {}
            )
            for row in run.rows(LEAKAGE)
        ],
    )


def test_a_run_does_not_differ_from_itself(runs: tuple[Run, Run]) -> None:
    compared = compare(*runs)
    assert (compared.texts, compared.unpaired) == (2 * CLIENTS, {})
    sizes = runs[0].info()["node_examples"]
    assert (len(sizes), sum(sizes)) == (CLIENTS, runs[0].info()["examples"]["training"])
    assert {
        (difference.mean, difference.p, difference.direction) for difference in compared.differences
    } == {(0.0, 1.0, Direction.UNTOLD)}
    assert {difference.attack for difference in compared.differences} == {None, "dlg", "probes"}


def test_who_reads_more_and_less_is_told(runs: tuple[Run, Run]) -> None:
    change(runs[0], "dlg", exact=False, rougeL=10.0)
    change(runs[1], "dlg", exact=True, rougeL=100.0)
    for pair, direction, sign in ((runs, Direction.WORSE, 1), (runs[::-1], Direction.BETTER, -1)):
        differences = {
            (difference.attack, difference.figure): difference
            for difference in compare(*pair).differences
        }
        worst = differences[None, "rougeL"]
        assert (worst.mean, worst.direction) == (sign * 90.0, direction)
        assert -100.0 <= worst.low < worst.mean < worst.high <= 100.0
        assert worst.p == pytest.approx(2 * 0.5**CLIENTS)
        assert (worst.texts, worst.clients) == (2 * CLIENTS, CLIENTS)
        assert differences["dlg", "exact"].mean == sign


def test_what_is_not_the_same_is_not_paired_and_said(runs: tuple[Run, Run]) -> None:
    gone, other = sorted(runs[1].captures.all_keys())[:2]
    rows = [row for row in runs[1].rows(LEAKAGE) if row.key != gone]
    rows = [
        row.model_copy(update={"texts": None, "rougeL": None, "status": rows[0].status})
        if row.attack == "dlg" and row.client == CLIENTS - 1
        else row
        for row in rows
    ]
    runs[1].write_rows(LEAKAGE, rows)
    vault = runs[1].path / "vault"
    foreign = json.loads((vault / f"{other}.json").read_text())
    foreign["sequences"] = foreign["sequences"][::-1]
    (vault / f"{other}.json").write_text(json.dumps(foreign))
    compared = compare(*runs)
    assert compared.texts == 2 * (CLIENTS - 2)
    assert compared.unpaired["the round and client are in one run only"] == 2
    assert compared.unpaired["the batch has other texts or other tokens"] == 2
    assert compared.unpaired["dlg: one run has no answer (rougeL)"] == 2
    drawn = [row.model_copy(update={"sampling": "Poisson"}) for row in runs[1].rows(LEDGER)]
    runs[1].write_rows(LEDGER, drawn)
    assert (
        "the batch has other texts or other tokens (Poisson sampling drew others: dp_sgd with "
        'sampling = "fixed" keeps the batches)'
    ) in compare(*runs).unpaired
    (vault / f"{other}.json").unlink()
    assert compare(*runs).unpaired["the private batch is not in the vault of both runs"] == 2
    shutil.rmtree(vault)
    with pytest.raises(FedleakError, match="not in the vault of both runs"):
        compare(*runs)


def test_runs_whose_sampling_drew_other_batches_stand_side_by_side(
    runs: tuple[Run, Run],
) -> None:
    change(runs[1], "dlg", exact=True)
    for file in (runs[1].path / "vault").glob("*.json"):
        batch = json.loads(file.read_text())
        file.write_text(json.dumps(batch | {"sequences": batch["sequences"][::-1]}))
    with pytest.raises(FedleakError, match="other texts or other tokens"):
        compare(*runs)
    drawn = [row.model_copy(update={"sampling": "Poisson"}) for row in runs[1].rows(LEDGER)]
    runs[1].write_rows(LEDGER, drawn)
    compared = compare(*runs)
    assert (compared.texts, compared.differences) == (0, ())
    exact = {row.figure: (row.before, row.after) for row in compared.means}["exact"]
    summaries = [run.read_document(SUMMARY).attacks["dlg"] for run in runs]
    assert exact[0] is not None
    assert exact[0].mean == pytest.approx(summaries[0].exact_match.mean)
    assert exact[1] is not None
    assert exact[1].mean == 1.0
    status, text, _ = call("compare", "a", "b")
    shown = " ".join(text.split())
    assert status == 0
    assert "b beside a: other texts, so nothing is tested" in shown
    assert "not compared: 16 texts: the batch has other texts" in shown
    assert 'dp_sgd with sampling = "fixed" keeps the batches' in shown
    assert '"means": [' in call("compare", "a", "b", "--json")[1]


def test_what_differs_between_two_experiments_is_said() -> None:
    before = parse(tables({"seed": 1, "federation.batch_size": 3}))
    defense = [{"kind": "clip", "max_norm": 1.0}]
    after = parse(tables({"seed": 1, "federation.batch_size": 4, "defense": defense}))
    assert comparison._changed(before, after) == {
        "defense": (None, defense),
        "federation.batch_size": (3, 4),
    }
    assert comparison._changed(before, before) == {}


@pytest.mark.parametrize(
    "arguments",
    [
        ["score", "a"],
        ["compare", "a", "b"],
        ["compare", "."],
        ["explain", "a"],
        ["check-defense", "clip"],
        ["list"],
        ["gate", "a", "--set", "gate.exact=1.0"],
    ],
    ids=" ".join,
)
def test_what_a_command_prints_is_whole_at_80_columns(
    runs: tuple[Run, Run], monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    change(runs[1], "dlg", exact=True, rougeL=100.0)
    words = {}
    for width in (80, 1000):
        monkeypatch.setenv("COLUMNS", str(width))
        words[width] = set(call(*arguments)[1].split())
    broken = {word for word in words[80] - words[1000] if "─" not in word}
    assert broken == set()


def test_a_folder_of_runs_is_shown_over_dates_and_rounds(
    runs: tuple[Run, Run], tmp_path: Path
) -> None:
    change(runs[1], "dlg", exact=True)
    runs[1].update_info(begun="2020-02-03T04:05:06+00:00", git_commit="0123456789abcdef")
    (tmp_path / "no-run").mkdir()
    over_runs, over_rounds = trend_tables([Dated.read(run) for run in runs])
    assert [row[0].text for row in over_runs.rows] == ["b *", "a *"]
    assert [cell.text for cell in over_runs.rows[0][1:3]] == ["2020-02-03", "01234567"]
    before = runs[0].read_document(SUMMARY).worst_case
    assert before is not None
    assert before.exact_match is not None
    read = f"{100 * before.exact_match.mean:.0f}"
    assert [[cell.text for cell in row] for row in over_rounds.rows] == [["1", "100", read]]
    status, text, _ = call("compare", ".")
    assert status == 0
    assert "2020-02-03" in text
    assert "no-run" not in text
    page = Path("trends.html").read_text()
    assert "In the first run (b, 2020-02-03) 0 [" in page
    assert all(table.title in page for table in (over_runs, over_rounds))
    assert "no-run" not in page


def test_the_command_prints_tables_or_json(runs: tuple[Run, Run]) -> None:
    change(runs[0], "dlg", exact=False, rougeL=0.0)
    change(runs[1], "dlg", exact=True, rougeL=100.0)
    status, text, errors = call("compare", "a", "b", "a")
    assert (status, errors) == (0, "")
    assert text.count("against a: 16 texts") == 2
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(len(line) for line in lines if not line.startswith("difference:")) <= 80
    assert all(figure in text for figure in ("any attack", "ROUGE-L", "exact", "tokens"))
    assert "reads more" in " ".join(text.split())
    status, text, _ = call("compare", "a", "b", "--json")
    (compared,) = json.loads(text)
    assert compared["differences"][0]["direction"] == "reads more"
    assert (compared["correction"], compared["tests"]) == (
        "Benjamini-Hochberg",
        len(compared["differences"]),
    )


@pytest.mark.parametrize(
    ("arguments", "says"), [(["a"], "name two or more"), (["a", "nowhere"], "not a run directory")]
)
def test_what_cannot_be_compared_is_one_line(
    runs: tuple[Run, Run], arguments: list[str], says: str
) -> None:
    status, _, errors = call("compare", *arguments)
    assert status == 2
    assert says in errors


def test_few_clients_that_agree_show_nothing() -> None:
    assert intervals.sign_test([1.0] * 5) > 0.05 > intervals.sign_test([1.0] * 6)
    assert intervals.sign_test([0.0, 0.0]) == 1.0
    assert intervals.sign_flip_test([1.0] * 5) > 0.05 > intervals.sign_flip_test([1.0] * 6)
    assert intervals.sign_flip_test([0.0, 0.0]) == 1.0
    assert intervals.sign_flip_test([3.0]) == 1.0


def test_a_sign_flip_test_tries_all_signs() -> None:
    differences = [0.5, -0.2, 0.9, 0.4, 0.0, 0.7]
    means = [
        abs(sum(sign * apart for sign, apart in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(differences))
    ]
    expected = sum(mean >= abs(sum(differences)) - 1e-9 for mean in means) / len(means)
    assert intervals.sign_flip_test(differences) == pytest.approx(expected)
    # Of many, random signs are near it: here sums are of two binomial numbers.
    expected = sum(
        math.comb(10, a) * math.comb(10, b) / 2**20
        for a in range(11)
        for b in range(11)
        if abs((2 * a - 10) + 0.5 * (2 * b - 10)) >= 5
    )
    assert intervals.sign_flip_test([1.0, -0.5] * 10) == pytest.approx(expected, abs=0.02)


def slowly_corrected(ps: list[float]) -> list[float]:
    """Benjamini and Hochberg's, word by word: the smallest level at which each one is rejected."""

    def rejected(level: float) -> float:
        ranked = sorted(ps)
        within = [p for k, p in enumerate(ranked, 1) if p <= k / len(ps) * level + 1e-15]
        return max(within, default=-1.0)

    levels = sorted(p * len(ps) / k for p in ps for k in range(1, len(ps) + 1))
    return [min(1.0, next(at for at in levels if p <= rejected(at))) for p in ps]


@given(st.lists(st.sampled_from([0.001, 0.01, 0.03, 0.04, 0.2, 0.7, 1.0]), min_size=1, max_size=7))
def test_p_are_corrected_for_how_many_they_are(ps: list[float]) -> None:
    lines = [
        Difference(
            attack=None, figure="exact", texts=2, clients=2, before=0.0, after=1.0, mean=1.0,
            low=0.5, high=1.0, p=p, p_adjusted=p,
        )
        for p in ps
    ]  # fmt: skip
    (adjusted,) = corrected([lines])
    assert [difference.p for difference in adjusted] == ps
    assert [difference.p_adjusted for difference in adjusted] == pytest.approx(slowly_corrected(ps))
    worse = [difference.direction is Direction.WORSE for difference in adjusted]
    assert worse == [difference.p_adjusted <= 0.05 for difference in adjusted]


def test_all_runs_of_a_command_are_corrected_together(runs: tuple[Run, Run]) -> None:
    change(runs[0], "dlg", exact=False, rougeL=10.0)
    change(runs[1], "dlg", exact=True, rougeL=100.0)
    (alone,) = comparison.compare(runs[0], [runs[1]])
    beside, same = comparison.compare(runs[0], [runs[1], runs[0]])
    assert beside.tests == same.tests == 2 * alone.tests
    ps = [difference.p_adjusted for difference in alone.differences]
    assert all(p <= q.p_adjusted for p, q in zip(ps, beside.differences, strict=True))
    assert ps != [difference.p_adjusted for difference in beside.differences]
