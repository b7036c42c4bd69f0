"""How a run of Flower really ended: `fedleak watch`, with a made-up `flwr`."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from tiny import call

from fedleak.flower import runs as flower_runs
from fedleak.flower.runs import FlowerRun, SilentError, follow
from fedleak.util.errors import FedleakError

Tells = Callable[..., None]


def run(
    status: str, details: str = "", number: str = "7", at: str = "2026-01-01"
) -> dict[str, Any]:
    return {"run-id": number, "status": status, "status-details": details, "pending-at": at}


@pytest.fixture
def tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Tells:
    """Lets `flwr ls` give these answers, the last one for ever; None: it is silent."""

    monkeypatch.setenv("FLWR_HOME", str(tmp_path))

    def tell(*answers: Iterable[dict[str, Any]] | None) -> None:
        left = itertools.chain(answers, itertools.repeat(answers[-1]))

        def answer(*arguments: str) -> dict[str, Any]:
            listed_runs = next(left)
            if listed_runs is None:
                raise SilentError("connection refused")
            number = arguments[3] if "--run-id" in arguments else None
            return {
                "runs": [
                    listed_run
                    for listed_run in listed_runs
                    if number in (None, listed_run["run-id"])
                ]
            }

        monkeypatch.setattr(flower_runs, "flwr", answer)
        monkeypatch.setattr(flower_runs, "POLL_SECONDS", 0.0)

    return tell


def test_a_completed_run_is_exit_status_0_and_each_status_is_told_once(tells: Tells) -> None:
    tells([run("pending")], [run("running")], [run("running")], [run("finished:completed")])
    status, text, errors = call("watch", "tls")
    assert (status, errors) == (0, "")
    assert text.split("\n")[:-1] == [
        "run 7: pending",
        "run 7: running",
        "run 7: finished:completed",
    ]


@pytest.mark.parametrize("status", ["finished:failed", "finished:stopped", "finished:new word"])
def test_any_other_end_is_exit_status_1_with_its_reason(status: str, tells: Tells) -> None:
    tells([run(status, "round 1: client 3: did\x1b[31m not answer")])
    ended, _, errors = call("watch", "tls")
    assert ended == 1
    assert errors == (
        f"fedleak: run 7 ended as {status}: round 1: client 3: did\\x1b[31m not answer\n"
    )


def test_the_newest_run_is_followed_and_then_no_other(tells: Tells) -> None:
    old = run("finished:failed", number="3")
    new = [run(status, number="9", at="2026-01-02") for status in ("running", "finished:completed")]
    later = run("running", number="11", at="2026-01-03")
    tells([old, new[0]], [old, later, new[1]])
    assert follow("tls") == FlowerRun("9", "finished:completed", "")
    assert follow("tls", "3").status == "finished:failed"


def test_a_superlink_that_is_away_for_a_while_is_waited_for(tells: Tells) -> None:
    tells([run("running")], None, None, [run("finished:completed")])
    assert follow("tls").status == "finished:completed"


def test_a_superlink_that_does_not_come_back_is_an_error(tells: Tells) -> None:
    tells([run("running")], None)
    with pytest.raises(FedleakError, match=r"'tls' does not answer: connection refused: start it"):
        follow("tls", patience=0.0)


def test_without_a_run_there_is_nothing_to_watch(tells: Tells) -> None:
    tells([])
    assert call("watch", "tls")[0] == 1


def test_a_patience_that_is_no_time_is_refused(tells: Tells) -> None:
    tells(None)
    status, _, errors = call("watch", "tls", "--patience", "nan")
    assert (status, errors) == (2, "fedleak: --patience nan: give seconds, 0 or more\n")


def test_a_connection_that_flower_does_not_know_is_named_at_once(
    tells: Tells, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text('[superlink.tsl]\naddress = "127.0.0.1:1"\n')
    tells(None)
    status, _, errors = call("watch", "tls")
    assert status == 2
    assert errors.startswith("fedleak: unknown connection 'tls': did you mean 'tsl'?")


def test_a_run_that_a_superlink_does_not_have_is_named_at_once(tells: Tells) -> None:
    tells(None, [run("running")])
    status, _, errors = call("watch", "tls", "--run-id", "8")
    assert (status, "has no run '8': `flwr ls tls` lists its runs" in errors) == (2, True)


def test_a_machine_without_flwr_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flower_runs.sysconfig, "get_path", lambda name: "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SilentError, match="there is no `flwr` beside"):
        flower_runs.flwr("ls", "tls")
