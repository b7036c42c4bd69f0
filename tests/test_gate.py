"""The gate: what opens it, what closes it, and that it cannot be opened by breaking the attacks."""

import os
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from cases import some
from tiny import DLG, Here, call, toml

from fedleak.audit import gate
from fedleak.audit.gate import Outcome
from fedleak.config.loading import limited
from fedleak.config.tables import GateTable
from fedleak.dispatch import dispatcher
from fedleak.reconstruction import Status
from fedleak.report import ci
from fedleak.store.records import LEAKAGE
from fedleak.store.run import Run
from fedleak.store.summaries import SUMMARY

ENOUGH = {
    "data": {"name": "builtin/notes", "samples": 20, "held_out": 4},
    "federation": {"clients": 10, "rounds": 1, "batch_size": 2},
    "threat": {"knows": ["labels", "lengths"]},
    "attack": [DLG],
}
"""Ten clients with two texts each, whom a weak attack reads nothing of."""

TWO = {
    "data": {"name": "builtin/notes", "samples": 4, "held_out": 4},
    "federation": {"clients": 2, "rounds": 1, "batch_size": 2},
}
"""Two clients, where it does not matter how many there are."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    return tmp_path


def trained(changes: Mapping[str, Any] | None = None, status: int = 0) -> None:
    """Runs the experiment with these changes, in the current folder."""
    Path("small.toml").write_text(toml(ENOUGH | dict(changes or {})))
    assert call("run", "small.toml", "--fresh")[0] == status


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with enough clients and texts."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(dispatcher, "hire", lambda *_: nullcontext([Here()]))
        trained()
    return folder


@pytest.fixture
def small(folder: Path, in_process: None, trained_once: Path) -> Path:
    shutil.copytree(trained_once, folder, dirs_exist_ok=True)
    return folder / "runs" / "small"


def judged(*limits: str, may_abstain: tuple[str, ...] = ()) -> dict[str, gate.Check]:
    table = limited(GateTable(), limits, may_abstain)
    return {one.name: one for one in gate.judge(Run(Path("runs/small")), table)}


def change_summary(run: Path, **changes: Any) -> None:
    summary = Run(run).read(SUMMARY)
    Run(run).write(SUMMARY, summary.model_copy(update=changes))


def change_rows(run: Path, change: Any) -> None:
    Run(run).write_rows(LEAKAGE, [change(row) for row in Run(run).rows(LEAKAGE)])


def test_the_upper_end_of_the_interval_decides(small: Path) -> None:
    exact = Run(small).read(SUMMARY).worst_case.exact_match
    assert exact.mean == 0 < exact.high < 1
    status, text, errors = call("gate", str(small), "--max", f"exact={exact.high + 0.001}")
    assert (status, errors) == (0, "")
    assert "within  exact: " in text
    assert "safe" not in text
    status, text, errors = call("gate", str(small), "--max", f"exact={exact.high - 0.001}")
    assert status == 3
    assert f"up to {exact.high:.3g}; limit" in text
    assert errors == "fedleak: the gate is closed, because of: exact\n"


def test_every_limit_is_compared(small: Path) -> None:
    found = judged("exact=0", "rougeL=0", "token_recall=0", "epsilon=8")
    assert {name: found[name].outcome for name in ("exact", "rougeL", "token_recall")} == {
        "exact": Outcome.EXCEEDED, "rougeL": Outcome.EXCEEDED, "token_recall": Outcome.EXCEEDED
    }  # fmt: skip
    assert found["epsilon"].outcome is Outcome.UNTOLD
    assert "nothing is guaranteed" in found["epsilon"].said
    assert found["complete"].passed
    assert found["texts"].passed
    assert found["attack dlg"].said == "it answered 10 of 10 updates"


def test_an_epsilon_alone_needs_no_attack(folder: Path, in_process: None) -> None:
    noise = {"kind": "local_dp", "epsilon": 6.0, "max_norm": 1.0}
    trained({"attack": [], "defense": [noise]})
    assert call("gate", "runs/small", "--max", "epsilon=8")[0] == 0
    status, text, _ = call("gate", "runs/small", "--max", "epsilon=2")
    assert status == 3
    assert "EXCEEDED  epsilon: epsilon 5.998 at delta 1e-05" in text


def test_limits_of_the_file_are_those_of_the_gate_and_may_change(small: Path) -> None:
    status, _, errors = call("gate", str(small))
    assert status == 2
    assert "there is no limit" in errors
    Path("small.toml").write_text(toml(ENOUGH | {"gate": {"exact": 0.9}}))
    assert call("run", "small.toml")[0] == 0
    assert call("gate", str(small))[0] == 0
    assert call("gate", str(small), "--max", "exact=0.001")[0] == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max", "exact"], "NAME=NUMBER"),
        (["--max", "exact=much"], "'much' is not a number"),
        (["--max", "exact=nan"], "finite number"),
        (["--max", "exact=20"], "less than or equal to 1"),
        (["--max", "exact=-1"], "greater than or equal to 0"),
        (["--max", "exatc=0.1"], "did you mean 'exact'?"),
        (["--max", "exact=0.1", "--may-abstain", "dagger"], "unknown attack 'dagger'"),
        (["--max", "exact=0.9", "--junit", "no/such/folder.xml"], "no/such/folder.xml"),
    ],
)
def test_a_wrong_limit_is_one_line(small: Path, arguments: list[str], says: str) -> None:
    status, _, errors = call("gate", str(small), *arguments)
    assert status == (1 if "--junit" in arguments else 2)
    assert says in errors
    assert errors.count("\n") == 1


# --- too little was measured to tell --------------------------------------------------------------


def test_few_texts_and_clients_close_it(folder: Path, in_process: None) -> None:
    trained(TWO)
    status, text, _ = call("gate", "runs/small", "--max", "exact=1")
    assert status == 3
    assert "NOT TOLD  texts: fewer than 10 clients and fewer than 20 texts" in text


@pytest.mark.parametrize("kind", some(["auto", "dlg", "keyspan", "dager", "tag", "lamp"], every=4))
def test_an_attack_without_time_closes_it(folder: Path, in_process: None, kind: str) -> None:
    """Also beside one that answers."""
    # The own search of dlg ends before it looks at its clock.
    preset = {"preset": "faithful"} if kind == "dlg" else {}
    hurried = {"kind": kind, "seconds": 0.001} | preset
    trained(TWO | {"attack": [DLG | {"name": "weak"}, hurried]})
    allowed = ["--may-abstain", kind] if kind in ("dager", "keyspan") else []
    status, text, _ = call("gate", "runs/small", "--max", "exact=1", *allowed)
    assert status == 3
    assert f"NOT TOLD  attack {kind}: its time (`seconds`) was up on 2 of 2 updates" in text, text


def test_attacks_whose_workers_are_killed_close_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    Path("sitecustomize.py").write_text(
        f"import sys\nif any('spawn_main' in each for each in sys.orig_argv):\n    {killed}\n"
    )
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    )
    trained(TWO, status=1)
    status, text, errors = call("gate", "runs/small", "--max", "exact=1")
    assert status == 3, text
    assert "NOT TOLD  attack dlg: it failed on 2 of 2 updates" in text
    assert "complete" in errors


@pytest.mark.slow
def test_a_time_limit_that_nobody_can_keep_closes_it(folder: Path) -> None:
    attack = {"kind": "dlg", "preset": "faithful", "steps": 100_000}
    limit = {"devices": ["cpu"], "time_limit": 0.001}
    trained(TWO | {"attack": [attack], "workers": limit}, status=1)
    assert call("gate", "runs/small", "--max", "exact=1")[0] == 3


def test_an_abstention_closes_it_unless_it_may(small: Path) -> None:
    def abstaining(row: Any) -> Any:
        nothing = {"status": Status.ABSTAINED, "texts": None, "rougeL": None}
        return row.model_copy(update=nothing if row.attack == "probes" else {})

    change_rows(small, abstaining)
    assert judged("exact=1")["attack probes"].outcome is Outcome.UNTOLD
    found = judged("exact=1", may_abstain=("probes",))
    assert all(one.passed for one in found.values())
    # Its tokens were all there was for this limit, but for those of the sequences.
    assert judged("token_recall=1", may_abstain=("probes",))["texts"].passed


def test_guesses_that_random_texts_equal_close_it_unless_it_may_abstain(small: Path) -> None:
    def guessing(likely: list[bool]) -> None:
        change_rows(small, lambda row: row.model_copy(update={"diagnostics": {"likely": likely}}))

    guessing([False, True])
    assert all(one.passed for one in judged("exact=1").values())
    guessing([False, False])
    found = judged("exact=1")["attack dlg"]
    assert found.outcome is Outcome.UNTOLD
    assert "it only guessed on" in found.said
    assert judged("exact=1", may_abstain=("dlg",))["attack dlg"].passed


def test_texts_without_an_answer_close_it(small: Path) -> None:
    worst = Run(small).read(SUMMARY).worst_case
    change_summary(small, worst_case=worst.model_copy(update={"unattacked": 2}))
    assert judged("exact=1")["texts"].said == "2 of 20 texts: no attack named sequences"
    assert judged("token_recall=1")["texts"].passed
    change_rows(small, lambda row: row.model_copy(update={"texts": None}))
    found = judged("token_recall=1")
    assert found["texts"].said == "20 of 20 texts: no attack named tokens"
    assert "`fedleak score` adds them" in found["attack dlg"].said


def test_a_run_that_is_not_complete_closes_it(small: Path) -> None:
    Run(small).update_info(status="interrupted")
    assert "the run is interrupted" in judged("exact=1")["complete"].said
    Run(small).update_info(status="finished")
    change_summary(small, unscored=3, missing=("a capture is missing",))
    found = judged("exact=1")["complete"]
    assert found.said == "a capture is missing; 3 answers have no score"
    change_summary(small, unscored=0, missing=(), worst_case=None)
    assert judged("exact=1")["exact"].outcome is Outcome.UNTOLD
    (small / "summary.json").unlink()
    status, text, _ = call("gate", str(small), "--max", "exact=1")
    assert status == 3
    assert "NOT TOLD  figures: " in text


def test_label_counts_are_an_answer_without_scores_of_texts(small: Path) -> None:
    nothing = {"texts": None, "token_recall": None, "rougeL": None}
    change_rows(small, lambda row: row.model_copy(update=nothing if row.attack == "probes" else {}))
    assert judged("exact=1")["attack probes"].passed


def test_probes_alone_say_nothing_of_whole_texts(folder: Path, in_process: None) -> None:
    trained({"attack": []})
    found = judged("exact=1", "token_recall=1")
    assert found["exact"].outcome is Outcome.UNTOLD
    assert found["token_recall"].outcome is Outcome.WITHIN
    assert found["texts"].outcome is Outcome.UNTOLD


# --- for continuous integration -------------------------------------------------------------------


def test_junit_has_a_case_for_every_check(small: Path) -> None:
    assert call("gate", str(small), "--max", "exact=0", "--junit", "gate.xml")[0] == 3
    suites = ElementTree.parse("gate.xml").getroot()
    (suite,) = suites
    assert (suites.tag, suite.tag, suite.get("name")) == ("testsuites", "testsuite", "small")
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("5", "1", "0")
    cases = {case.get("name"): [child.tag for child in case] for case in suite}
    assert cases["exact"] == ["failure"]
    assert cases["attack dlg"] == ["system-out"]


def test_what_others_wrote_is_inert_in_reports(tmp_path: Path) -> None:
    hostile = "x\x1b[31m\n::stop-commands::t\r %0A <b a='1'>&]]>\ud800\ufffe\u202e"
    checks = [gate.Check(hostile, Outcome.UNTOLD, hostile)]
    ci.write_junit(hostile, checks, tmp_path / "gate.xml")
    (suite,) = ElementTree.parse(tmp_path / "gate.xml").getroot()
    ((error,),) = suite
    assert "::stop-commands::" in error.get("message")
    assert "\n" not in error.get("message")
    (line,) = ci.annotations(hostile, checks)
    assert len(line.splitlines()) == 1
    assert line.startswith("::error title=fedleak gate%3A x")
    assert "%250A" in line


def test_github_gets_a_line_for_every_reason(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    _, text, _ = call("gate", str(small), "--max", "exact=0", "--max", "epsilon=8")
    found = [line for line in text.splitlines() if line.startswith("::error ")]
    assert [line.split("::")[2].split(":")[0] for line in found] == ["exact", "epsilon"]
