"""What `fedleak gate` asks of the judge, prints and writes, and how it exits: word for word."""

from pathlib import Path
from typing import Any

import pytest
from tiny import call, tables

from fedleak.audit.gate import judge
from fedleak.audit.gate.check import Check, Outcome
from fedleak.audit.gate.judge import Verdict
from fedleak.config.loading import parse
from fedleak.config.tables import GateTable
from fedleak.report import ci
from fedleak.store.run import Run

pytestmark = pytest.mark.core

WITHIN = Check("exact", Outcome.WITHIN, "at most 1 % [0, 4], of 10")
EXCEEDED = Check("rougeL", Outcome.EXCEEDED, "57.5: above 50, 100 %")
UNTOLD = Check("attack dager", Outcome.UNTOLD, "[b]failed[/b], 2 times")


@pytest.fixture
def judge_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A run in `runs/mine`, and what the judge is asked about it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    experiment = parse(tables({"gate": {"rougeL": 80.0}}))
    Run(Path("runs/mine")).create(
        experiment=experiment.model_dump(mode="json"),
        fingerprint=experiment.fingerprint,
        status="finished",
        num_labels=2,
    )
    return []


@pytest.fixture
def answers(judge_calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the judge answers."""

    def answer(*checks: Check, digest: str | None = "d1gest") -> None:
        def judged(run: Run, limits: GateTable, *, accept_purged: bool) -> Verdict:
            judge_calls.append((run, limits, accept_purged))
            return Verdict(checks, digest)

        monkeypatch.setattr(judge, "judge", judged)

    return answer


def test_an_open_gate_says_what_it_rests_on(judge_calls: list[Any], answers: Any) -> None:
    answers(WITHIN)
    status, text, errors = call("gate", "runs/mine", "--set", "gate.exact=0.5")
    assert (status, errors) == (0, "")
    first, limits, digest, last = text.splitlines()
    assert first == "within  exact: at most 1 % [0, 4], of 10"
    assert limits.startswith("limits: ")
    assert "exact 0.5 (command line)" in limits
    assert "rougeL 80.0 ([gate] of run.json)" in limits
    assert digest == "digest: d1gest (SHA-256 of limits and figures)"
    assert last == "the gate is open: these attacks read no more than the limits allow"
    ((run, table, accept_purged),) = judge_calls
    assert (run, table.exact, table.rougeL) == (Run(Path("runs/mine")), 0.5, 80.0)
    assert accept_purged is False


def test_every_option_reaches_the_judge(judge_calls: list[Any], answers: Any) -> None:
    answers(WITHIN)
    status, _, errors = call(
        "gate", "runs/mine", "--purged", "--set", "gate.rougeL=60", "--set", "gate.exact=0.2",
        "--set", "gate.coverage=0.75", "--set", 'gate.may_abstain=["probes"]',
        "--set", 'gate.require=["probes"]',
    )  # fmt: skip
    assert (status, errors) == (0, "")
    ((_, table, accept_purged),) = judge_calls
    assert (table.rougeL, table.exact, table.coverage) == (60.0, 0.2, 0.75)
    assert (table.may_abstain, table.require) == (["probes"], ["probes"])
    assert accept_purged is True


def test_a_closed_gate_names_what_closed_it_and_exits_with_3(
    judge_calls: list[Any], answers: Any
) -> None:
    answers(WITHIN, EXCEEDED, UNTOLD, digest=None)
    status, text, errors = call("gate", "runs/mine")
    assert status == 3
    assert errors == "fedleak: the gate is closed, because of: rougeL, attack dager\n"
    lines = text.splitlines()
    assert lines[:3] == [
        "within  exact: at most 1 % [0, 4], of 10",
        "EXCEEDED  rougeL: 57.5: above 50, 100 %",
        "NOT TOLD  attack dager: [b]failed[/b], 2 times",
    ]
    assert [line.partition(":")[0] for line in lines[3:]] == ["limits"]


def test_junit_and_annotations_are_there_also_of_an_open_gate(
    judge_calls: list[Any], answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(WITHIN)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    status, text, _ = call("gate", "runs/mine", "--junit", "gate.xml")
    assert status == 0
    assert "::error" not in text
    content = Path("gate.xml").read_text()
    assert '<testsuite name="mine" tests="1" failures="0" errors="0">' in content
    assert '<property name="digest" value="d1gest (SHA-256 of limits and figures)" />' in content
    monkeypatch.setenv("GITHUB_ACTIONS", "yes")
    answers(EXCEEDED)
    assert "::error" not in call("gate", "runs/mine")[1]


def test_github_gets_lines_that_it_does_not_misread(
    judge_calls: list[Any], answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(WITHIN, EXCEEDED, UNTOLD)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    _, text, _ = call("gate", "runs/mine")
    assert text.splitlines()[-2:] == [
        "::error title=fedleak gate%3A mine::rougeL: exceeded: 57.5: above 50, 100 %25",
        "::error title=fedleak gate%3A mine::attack dager: untold: [b]failed[/b], 2 times",
    ]
    (line,) = ci.annotations("a,b:c%", [UNTOLD])
    assert line.startswith("::error title=fedleak gate%3A a%2Cb%3Ac%25::attack dager: ")


def test_junit_is_this_word_for_word(tmp_path: Path) -> None:
    checks = [WITHIN, EXCEEDED, UNTOLD, UNTOLD]
    ci.write_junit("mine", checks, {"limits": "exact 0.5", "digest": "d1"}, tmp_path / "gate.xml")
    assert (tmp_path / "gate.xml").read_text().splitlines() == [
        "<?xml version='1.0' encoding='utf-8'?>",
        '<testsuites tests="4" failures="1" errors="2">',
        '  <testsuite name="mine" tests="4" failures="1" errors="2">',
        "    <properties>",
        '      <property name="limits" value="exact 0.5" />',
        '      <property name="digest" value="d1" />',
        "    </properties>",
        '    <testcase classname="fedleak.gate.mine" name="exact">',
        "      <system-out>at most 1 % [0, 4], of 10</system-out>",
        "    </testcase>",
        '    <testcase classname="fedleak.gate.mine" name="rougeL">',
        '      <failure type="exceeded" message="57.5: above 50, 100 %" />',
        "    </testcase>",
        *[
            '    <testcase classname="fedleak.gate.mine" name="attack dager">',
            '      <error type="untold" message="[b]failed[/b], 2 times" />',
            "    </testcase>",
        ]
        * 2,
        "  </testsuite>",
        "</testsuites>",
    ]


def test_what_is_no_run_has_no_gate(tmp_path: Path) -> None:
    status, text, errors = call("gate", str(tmp_path), "--set", "gate.exact=1")
    assert (status, text) == (2, "")
    assert errors == (
        f"fedleak: {str(tmp_path)!r} is not a run directory: it has no run.json: name the folder "
        "of a run, such as runs/NAME\n"
    )
