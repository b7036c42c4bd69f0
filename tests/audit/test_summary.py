"""The figures of a run, all of them, of rows that no attack made."""

from pathlib import Path
from typing import Any

import pytest
from built import run_of
from scored import row
from tiny import DLG, tables

from fedleak.attacks.reconstruction import Status
from fedleak.audit.estimates import Largest, estimate, largest_client, mean_over_clients, too_few
from fedleak.audit.gaps import Gaps
from fedleak.audit.metrics import intervals
from fedleak.audit.metrics.personal_data import looked_for
from fedleak.audit.score_files import Recorded
from fedleak.audit.summary import attack_summary, circumstances, summarise
from fedleak.audit.worst_case import worst_case
from fedleak.config.loading import parse
from fedleak.config.tables import AuditTable
from fedleak.store.records import UNSCORED, Fact, ScoredRows, Utility
from fedleak.store.run import EVERYONE, Key
from fedleak.store.summaries import AttackSummary, Baseline, RankBudget, RunSummary

pytestmark = pytest.mark.core

READ, MISSED = (True, 100.0, 1.0), (False, 10.0, 0.2)

FIGURES = {
    "rouge1": 100.0,
    "rouge2": 100.0,
    "rougeL": 100.0,
    "control_rougeL": 100.0,
    "guess_rougeL": 100.0,
    "token_recall": 1.0,
    "token_precision": 1.0,
    "control_token_recall": 1.0,
    "guess_token_recall": 1.0,
}
"""Each with the most that it can be."""


def test_an_attack_is_summed_up_over_its_rows() -> None:
    def figures(client: int) -> dict[str, float]:
        return {
            name: most * (client + 1) / (9 + i) for i, (name, most) in enumerate(FIGURES.items())
        }

    right, wrong = Fact(claimed=5, true=5), Fact(claimed=4, true=5)
    rows = [
        row(
            "dlg", 0, READ, MISSED, MISSED, **figures(0), exact_match=1 / 3, verified=True,
            margin=7.0, seconds=2.0, knows=("lengths", "labels"), facts={"longest": right},
            diagnostics={"budget": [1, 4], "candidates": {"pairs": 6, "passed": True}},
        ),
        row(
            "dlg", 1, READ, **figures(1), exact_match=1.0, margin=3.0, seconds=4.0,
            knows=("labels",), facts={"longest": wrong, "classes": Fact(claimed=1)},
            diagnostics={"budget": [3.0, 4.0], "candidates": {"pairs": 2, "odd": "many"}},
        ),
        row("dlg", 1, round=2, status=Status.FAILED, texts=None, diagnostics={"budget": [1, 0]}),
        row("dlg", 2, status=UNSCORED, texts=None, batch_size=None, diagnostics={"budget": 7}),
        row("dlg", 2, round=2, status=Status.FAILED, texts=None,
            diagnostics={"budget": [10**400, 1]}),
        row("dlg", 2, round=3, status=Status.FAILED, texts=None,
            diagnostics={"budget": [1e308, 1e-10]}),
    ]  # fmt: skip
    means = {
        name: mean_over_clients(
            [(leakage_row, figures(leakage_row.client)[name]) for leakage_row in rows[:2]],
            most,
            largest=0,
        )
        for name, most in FIGURES.items()
    }
    exact = estimate([1 / 3, 1.0], [0, 1], [3, 1], most=1.0, largest=0)
    assert attack_summary(rows, Largest()) == AttackSummary(
        rows=6,
        status={Status.RECOVERED: 2, Status.FAILED: 3, UNSCORED: 1},
        verified=1,
        knows=("labels", "lengths"),
        sequences=4,
        clients=2,
        exact_match=exact,
        **means,
        facts={
            "classes": None,
            "longest": mean_over_clients([(rows[0], 1.0), (rows[1], 0.0)], 1.0, largest=0),
        },
        budget=RankBudget(mean=0.5, max=0.75, rows=2),
        candidates={"pairs": 4.0, "passed": 1.0},
        margin=3.0,
        seconds=6.0,
        seconds_per_update=3.0,
        warning="fewer than 10 clients and fewer than 20 texts: an example, not a rate",
    )  # fmt: skip
    assert len({figure.mean for figure in means.values() if figure}) == len(FIGURES)


def test_a_mean_is_over_clients_and_bounded() -> None:
    rows = [row("dlg", client, READ) for client in (0, 0, 1)]
    values, weights = [0.5, 1.0, 0.25], [1.0, 2.0, 3.0]
    pairs = list(zip(rows, values, strict=True))
    for most in (1.0, 100.0):
        for weigh in (None, weights):
            expected = intervals.clustered_mean(values, [0, 0, 1], weigh, most=most, largest=9)
            first = 0.75 if weigh is None else 2.5 / 3
            once = intervals.clustered_mean([first, 0.25], [0, 1], most=most)
            mean = mean_over_clients(pairs, most, weigh, largest=9)
            assert mean is not None
            of_clients = {"of_clients": pytest.approx(once._asdict())}
            assert mean.model_dump() == expected._asdict() | of_clients
    assert mean_over_clients([], 1.0, largest=0) is None


DP_SGD = {"kind": "dp_sgd", "max_grad_norm": 1.0, "noise_multiplier": 1.0}


@pytest.mark.parametrize(
    ("changes", "sizes", "largest"),
    [
        ({}, [3, 5, 2, 4], Largest(3, 3)),
        ({"federation.batch_size": 4}, [3, 5, 2, 4], Largest(12, 3)),
        ({"federation.algorithm": "fedavg"}, [3, 5, 2, 4], Largest(15, 3)),
        ({"federation.algorithm": "fedavg", "threat.rounds": [2, 3]}, [3, 5, 2, 4], Largest(10, 2)),
        ({}, None, Largest(0, 3)),
        ({"defense": [DP_SGD | {"sampling": "fixed"}]}, [3, 5, 2, 4], Largest(3, 3)),
        ({"defense": [DP_SGD | {"clients": [3]}]}, [3, 5, 2, 4], Largest(15, 3)),
    ],
)
def test_the_largest_client_is_of_all_clients_in_the_rounds_that_are_attacked(
    tmp_path: Path, changes: dict[str, Any], sizes: list[int] | None, largest: Largest
) -> None:
    federation = {"federation.clients": 4, "federation.rounds": 3, "threat.clients": [2]}
    experiment = parse(tables(federation | changes))
    known = {} if sizes is None else {"node_examples": sizes}
    run = run_of(tmp_path / "run", experiment, **known)
    assert largest_client(run, experiment) == largest


@pytest.mark.parametrize(
    ("clients", "size", "few"),
    [
        ([], 30, None),
        ([EVERYONE] * 2, 10, "one group of clients"),
        ([3, 3], 10, "one client"),
        (range(9), 3, "fewer than 10 clients"),
        (range(10), 1, "fewer than 20 texts"),
        (range(2), 1, "fewer than 10 clients and fewer than 20 texts"),
        (range(10), 2, None),
    ],
)
def test_few_clients_and_texts_are_an_example(clients: Any, size: int, few: str | None) -> None:
    rows = [row("dlg", client, *[READ] * size) for client in clients]
    assert too_few(rows) == (few and f"{few}: an example, not a rate")


def test_what_is_in_the_way_of_an_attack_is_all_listed() -> None:
    plain = circumstances(parse(tables({"federation.batch_size": 2, "federation.dropout": True})))
    assert plain.defense == ()
    assert plain.settings == {
        "share": "all", "lora": None, "algorithm": "fedsgd", "batch_size": 2, "dropout": True
    }  # fmt: skip
    clip = {"kind": "clip", "max_norm": 1.0}
    changes = {
        "federation.algorithm": "fedavg", "federation.local_epochs": 3, "threat.sees": "models",
        "model.lora": {"rank": 4}, "defense": [clip],
    }  # fmt: skip
    protected = circumstances(parse(tables(changes)))
    assert protected.defense == (clip,)
    assert protected.settings == {
        "share": "all", "lora": {"rank": 4, "alpha": 16.0, "targets": None},
        "algorithm": "fedavg", "batch_size": 1, "local_epochs": 3, "dropout": False,
        "sees": "models",
    }  # fmt: skip


LARGEST = Largest(texts=2, updates=2)


def summed_up(
    folder: Path, rows: Any = (), utility: Any = (), reference: str | None = None, **info: Any
) -> tuple[RunSummary, Gaps]:
    changes = {"federation.rounds": 2, "attack": [DLG]}
    about = {
        "examples": {"training": 8, "held_out": 4},
        "node_examples": [5, 3],
        "model_fingerprint": "abc",
    }
    run = run_of(folder, parse(tables(changes)), captures=[Key(1, 0)], **about | info)
    if reference is not None:
        (run.path / "reference.json").write_text(reference)
    gaps = Gaps(missing=["m"], awaited=["a"], notes=["n"], unscored=2)
    # In the order of their answers, of which no more is needed.
    recorded = Recorded(parse(tables(changes)), None, rows, utility, (), ScoredRows())
    return summarise(run, recorded, gaps, ScoredRows(leakage=rows), None), gaps


def test_a_run_is_summed_up(tmp_path: Path) -> None:
    rows = [row("dlg", 0, READ), row("tag", 0, READ), row("dlg", 1, MISSED)]
    utility = [Utility(round=number, accuracy=number / 4) for number in (0, 1, 2)]
    summary, _ = summed_up(tmp_path / "run", rows, utility, '{"steps": 3, "accuracy": 0.5}')
    assert summary.model_dump(exclude={"attacks", "worst_case", "defenses"}) == {
        "name": "small", "status": "finished", "server": None, "fedleak": "0",
        "model_fingerprint": "abc",
        "captures": 1, "ladder": None, "defended": (), "privacy": None, "canary": None,
        "membership": None, "published": None, "positive_control": None, "detections": None,
        "utility_before": utility[0].model_dump(),
        "utility": utility[2].model_dump(), "held_out": 4,
        "utility_reference": Baseline(steps=3, accuracy=0.5).model_dump(), "missing": ("m",),
        "awaited": ("a",), "looked_for": looked_for(AuditTable()), "notes": ("n",), "unscored": 2,
    }  # fmt: skip
    assert list(summary.attacks) == ["dlg", "tag"]
    assert summary.attacks["dlg"] == attack_summary([rows[0], rows[2]], LARGEST)
    # Who finished first is decided by the order of answers.
    assert summary.worst_case == worst_case(
        rows, {leakage_row.id: i for i, leakage_row in enumerate(rows)}, LARGEST
    )
    later, _ = summed_up(tmp_path / "later", rows, utility[1:])
    assert (later.utility_before, later.utility) == (None, utility[2])
    assert later.utility_reference is None
    without, _ = summed_up(tmp_path / "without", rows, versions={})
    assert (without.fedleak, without.utility, without.utility_before) == (None, None, None)


def test_rounds_whose_utility_is_lost_are_named(tmp_path: Path) -> None:
    utility = [Utility(round=1, accuracy=0.5)]
    summary, _ = summed_up(tmp_path / "run", utility=utility)
    lost = (
        f"{tmp_path / 'run' / 'utility.jsonl'} lacks the rounds [0, 2]: only `fedleak run FILE "
        "--fresh` measures them again"
    )
    assert summary.missing == ("m", lost)
    running, _ = summed_up(tmp_path / "running", utility=utility, status="running")
    nobody = {"training": 8, "held_out": 0}
    unmeasured, _ = summed_up(tmp_path / "none", utility=utility, examples=nobody)
    assert running.missing == unmeasured.missing == ("m",)


@pytest.mark.parametrize(
    ("content", "why"), [("[]", "is damaged (it is no table of figures)"), ("{", None)]
)
def test_a_damaged_baseline_is_named(tmp_path: Path, content: str, why: str | None) -> None:
    utility = [Utility(round=number, accuracy=0.5) for number in (0, 1, 2)]
    summary, _ = summed_up(tmp_path / "run", utility=utility, reference=content)
    assert summary.utility_reference is None
    _, damaged = summary.missing
    file = str(tmp_path / "run" / "reference.json")
    ends = ": delete it, and `fedleak run` with the experiment's file makes it anew"
    assert file in damaged
    assert damaged.endswith(ends)
    assert why is None or damaged == f"{file} {why}{ends}"
