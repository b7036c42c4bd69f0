"""The ladder of knowledge: what is run on each rung, and what each fact is worth."""

import itertools
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from scored import row
from tiny import DLG, Here, call, tables, toml

from fedleak.audit.comparison import compare
from fedleak.audit.estimates import Largest
from fedleak.audit.gate.check import Check, Outcome
from fedleak.audit.gate.evidence import Evidence, gather
from fedleak.audit.gate.limits import limit_checks
from fedleak.audit.ladder import ladder
from fedleak.config.components import NamedAttack, on_each_rung
from fedleak.config.experiment import Experiment
from fedleak.config.loading import parse
from fedleak.config.tables import GateTable
from fedleak.report.tables.attacks import attack_table
from fedleak.running.dispatch import dispatcher
from fedleak.store import records
from fedleak.store.records import LEAKAGE, LeakageRow
from fedleak.store.run import Run
from fedleak.store.summaries import SUMMARY, Direction, Ladder, PublishedFigure
from fedleak.training.observation import ThreatModel

BOTH = ("labels", "lengths")


def experiment(**changes: Any) -> Experiment:
    return parse(tables({"threat.ladder": True, "attack": [DLG], **changes}))


def told(parsed: Experiment) -> dict[str, tuple[str, ...]]:
    return {attack.name: tuple(sorted(attack.threat.knows)) for attack in parsed.attacks}


def test_each_fact_that_an_attack_uses_makes_a_rung() -> None:
    assert told(experiment(attack=[DLG, {"kind": "dager"}])) == {
        "probes": (), "dlg": (), "dlg+labels": ("labels",), "dlg+lengths": ("lengths",),
        "dlg+all": BOTH, "dager": (),
    }  # fmt: skip


def test_a_fact_that_there_is_not_makes_none() -> None:
    next_token = experiment(
        **{"model.name": "builtin/gpt2-tiny", "model.task": "causal-lm", "attack": [DLG]}
    )
    assert list(told(next_token)) == ["probes", "dlg", "dlg+lengths"]
    assert "causal-lm" in next_token.absent_facts["labels"]
    assert experiment().absent_facts == {"noise_scale": "no defense adds noise"}
    noise = {"kind": "gaussian_noise", "sigma": 0.1, "clients": [1]}
    assert experiment(defense=[noise]).absent_facts == {}
    relative = {"kind": "gaussian_noise", "relative": 0.3}
    assert "a scale in each" in experiment(defense=[relative, noise]).absent_facts["noise_scale"]
    uses = frozenset({"batch_size", "noise_scale", "nonsense"})
    attack: Any = SimpleNamespace(uses=uses)
    rungs = on_each_rung(NamedAttack("it", attack, ThreatModel()), {"batch_size", "labels"})
    assert [rung.name for rung in rungs] == ["it", "it+batch_size"]


def of_clients(
    name: str, granted: Sequence[str], scores: Sequence[float], knows: Sequence[str] | None = None
) -> list[LeakageRow]:
    """Returns a row of one text for each client; its score is its ROUGE-L."""
    return [
        row(
            name,
            client,
            (score == 100, score, score / 100),
            granted=tuple(granted),
            knows=tuple(granted if knows is None else knows),
        )
        for client, score in enumerate(scores)
    ]


def climbed(*parts: Sequence[LeakageRow]) -> Ladder:
    built_ladder = ladder(experiment(), list(itertools.chain(*parts)), {}, Largest())
    assert built_ladder is not None
    return built_ladder


def test_what_a_fact_is_worth_is_paired_with_nothing_told() -> None:
    built_ladder = climbed(
        of_clients("dlg", (), [10.0] * 10),
        of_clients("dlg+labels", ("labels",), [10.0] * 10),
        of_clients("dlg+lengths", ("lengths",), [100.0] * 10),
        of_clients("dlg+all", BOTH, [5.0] * 10),
        of_clients("dager", (), [50.0] * 10),
    )
    assert [rung.granted for rung in built_ladder.rungs] == [(), ("labels",), ("lengths",), BOTH]
    assert built_ladder.top.attacks == {"dlg": "dlg+all", "dager": "dager"}
    means = [rung.worst_case.rougeL.mean for rung in built_ladder.rungs if rung.worst_case]
    # No rung takes what another one read: with both facts dager's 50 is the best.
    assert means == [50.0, 50.0, 100.0, 50.0]
    worth = {
        (difference.attack, rung.granted): difference
        for rung in built_ladder.rungs
        for difference in rung.worth
        if difference.figure == "rougeL"
    }
    assert set(worth) == {(a, r.granted) for a in (None, "dlg") for r in built_ladder.rungs[1:]}
    assert {key: difference.mean for key, difference in worth.items() if key[0]} == {
        ("dlg", ("labels",)): 0.0, ("dlg", ("lengths",)): 90.0, ("dlg", BOTH): -5.0
    }  # fmt: skip
    assert worth["dlg", ("lengths",)].direction is Direction.WORSE
    assert worth[None, ("lengths",)].mean == 50.0
    assert worth[None, BOTH].mean == 0.0
    lengths = worth["dlg", ("lengths",)]
    assert lengths.p == pytest.approx(2 * 0.5**10)
    assert lengths.p < lengths.p_adjusted < 0.05
    assert built_ladder.left_out == {
        "batch_size": "used by none of dager, dlg", "noise_scale": "no defense adds noise"
    }  # fmt: skip


def test_a_client_that_has_no_such_fact_is_not_counted() -> None:
    some = of_clients("dlg+lengths", ("lengths",), [90.0] * 4)
    some[0] = some[0].model_copy(update={"knows": ()})
    (_, _, rung, _) = climbed(of_clients("dlg", (), [10.0] * 4), some).rungs
    assert {difference.clients for difference in rung.worth} == {3}
    assert {difference.mean for difference in rung.worth if difference.figure == "rougeL"} == {80.0}


def test_without_rungs_there_is_no_ladder() -> None:
    plain = experiment(**{"threat.ladder": False})
    assert ladder(plain, of_clients("dlg", BOTH, [1.0]), {}, Largest()) is None
    unanswered = ladder(experiment(), of_clients("dager", (), [1.0]), {}, Largest())
    assert unanswered is not None
    # They were asked for, and none has an answer yet.
    assert [rung.attacks for rung in unanswered.rungs] == [{"dager": "dager"}] * 4
    assert [len(rung.worth) for rung in unanswered.rungs] == [0] * 4


CHANGES: dict[str, Any] = {"federation.batch_size": 2, "attack": [DLG]}


@pytest.fixture(scope="module")
def ran_once(tmp_path_factory: pytest.TempPathFactory, saved: Callable[..., str]) -> Path:
    """A run with a ladder, and runs of the same clients with nothing and with all told."""
    folder = tmp_path_factory.mktemp("ran")
    CHANGES["model"] = {"name": saved("bert", layers=1)}
    runs = {
        "rungs": {"threat.ladder": True},
        "nothing": {},
        "all": {"threat.knows": [*BOTH]},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(dispatcher, "hire", lambda *_: nullcontext([Here()]))
        for name, changes in runs.items():
            Path(f"{name}.toml").write_text(toml(CHANGES | {"name": name} | changes))
            assert call("run", f"{name}.toml")[0] == 0
    return folder


@pytest.fixture
def ran(ran_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None) -> Path:
    shutil.copytree(ran_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


def answers(run: Path, attack: str) -> list[Any]:
    """Returns what an attack answered, apart from its name and its seconds."""
    all_answers = Run(run).rows(records.answers(Run(run).fingerprint()))
    return [
        answer.model_dump(exclude={"attack", "seconds"})
        for answer in all_answers
        if answer.attack == attack
    ]


def test_a_rung_is_what_a_run_with_these_facts_is(ran: Path) -> None:
    for name, rung in (("nothing", "dlg"), ("all", "dlg+all")):
        assert answers(ran / name, "dlg") == answers(ran / "rungs", rung) != []
    assert answers(ran / "rungs", "dlg") != answers(ran / "rungs", "dlg+lengths")
    summary, plain = (Run(ran / name).read_document(SUMMARY) for name in ("rungs", "all"))
    assert summary.worst_case == summary.ladder.top.worst_case
    for figure in ("exact_match", "rougeL", "token_recall", "control_rougeL"):
        assert getattr(summary.worst_case, figure) == getattr(plain.worst_case, figure)
    assert {row.granted for row in Run(ran / "rungs").rows(LEAKAGE)} == {
        (), ("labels",), ("lengths",), BOTH
    }  # fmt: skip


def test_a_run_without_a_ladder_gets_one_from_the_same_captures(ran: Path) -> None:
    before = answers(ran / "nothing", "dlg")
    status, text, errors = call("attack", "runs/nothing", "--set", "threat.ladder=true")
    assert (status, errors) == (0, "")
    assert "what each fact is worth" in text
    assert answers(ran / "nothing", "dlg") == before
    assert answers(ran / "nothing", "dlg+all") == answers(ran / "rungs", "dlg+all")
    ladders = [Run(ran / name).read_document(SUMMARY).ladder for name in ("nothing", "rungs")]
    assert ladders[0] == ladders[1]
    Path("nothing.toml").write_text(toml(CHANGES | {"name": "nothing", "threat.ladder": True}))
    status, _, errors = call("run", "nothing.toml")
    assert status == 2
    assert "--set threat.ladder=true" in errors
    status, _, errors = call("attack", "runs/all", "--set", "threat.ladder=true")
    assert status == 2
    assert "keep one of them" in errors


def test_it_is_shown_on_a_terminal_and_in_a_report(ran: Path) -> None:
    status, text, _ = call("score", "runs/rungs")
    assert status == 0
    shown = text[text.index("what each fact is worth") :].splitlines()
    last = next(i for i, line in enumerate(shown) if line.startswith("Below a figure"))
    assert max(map(len, shown[:last])) <= 80
    assert "noise_scale is on no rung: no defense adds noise." in shown
    *_, any_attack = attack_table(Run(ran / "rungs").read_document(SUMMARY)).rows[0]
    assert any_attack.text == "labels, lengths"
    assert call("report", "runs/rungs", "--redact")[0] == 0
    page = (ran / "rungs" / "report-redacted.html").read_text()
    assert "<caption>what each fact is worth to the server</caption>" in page
    assert "A server that follows the protocol and was told labels and lengths" in page
    assert "Told nothing more than the protocol tells, it could read 0 word for word." in page


def test_the_gate_takes_the_rung_that_reads_most(ran: Path) -> None:
    run = Run(ran / "rungs")
    summary = run.read_document(SUMMARY)
    most = max(rung.worst_case.rougeL.high for rung in summary.ladder.rungs)
    evidence = gather(run)

    def check(limit: float, evidence: Evidence) -> Check:
        (limit_check,) = limit_checks(GateTable(rougeL=limit), evidence)
        return limit_check

    exceeded = check(most - 0.01, evidence)
    assert exceeded.outcome is Outcome.EXCEEDED
    assert exceeded.sentence.startswith("told ")
    assert check(most, evidence).outcome is Outcome.WITHIN
    first, *others = summary.ladder.rungs
    silent = summary.ladder.model_copy(
        update={"rungs": (first.model_copy(update={"worst_case": None}), *others)}
    )
    without = replace(evidence, summary=summary.model_copy(update={"ladder": silent}))
    assert check(most, without).outcome is Outcome.UNTOLD
    assert check(0.0, without).outcome is Outcome.EXCEEDED


def test_runs_with_ladders_are_compared_rung_by_rung(ran: Path) -> None:
    run = Run(ran / "rungs")
    everything = row("", 0, (True, 100.0, 1.0), (True, 100.0, 1.0)).texts
    rows = [
        leakage_row.model_copy(update={"texts": everything})
        if leakage_row.attack == "dlg+labels"
        else leakage_row
        for leakage_row in run.rows(LEAKAGE)
    ]
    run.write_rows(LEAKAGE, rows)
    (compared,) = compare(run, [run])
    assert {difference.attack for difference in compared.differences} == {
        None, "dlg", "dlg+labels", "dlg+lengths", "dlg+all", "probes"
    }  # fmt: skip
    best = next(
        difference
        for difference in compared.differences
        if (difference.attack, difference.figure) == (None, "rougeL")
    )
    assert best.before == pytest.approx(
        run.read_document(SUMMARY).ladder.top.worst_case.rougeL.mean
    )
    # Another rung reads more, and is another attacker.
    rungs = [
        difference.before
        for difference in compared.differences
        if difference.attack and difference.figure == "rougeL"
    ]
    assert best.before < max(rungs) == 100.0


def test_the_plan_names_the_rungs(ran: Path) -> None:
    status, text, _ = call("explain", "rungs.toml")
    assert status == 0
    assert "dlg+lengths" in text
    assert "no rung for noise_scale: no defense adds noise" in text


def test_a_ladder_without_a_rung_and_a_figure_of_no_round_are_none() -> None:
    with pytest.raises(ValidationError, match="at least 1 item"):
        Ladder(rungs=(), left_out={}, correction="none")
    with pytest.raises(ValidationError, match="at least 1 item"):
        PublishedFigure(count=1, measure="exposure", by="likelihood", secrets=1, rounds=())
