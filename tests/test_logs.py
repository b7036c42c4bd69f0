"""What is kept when something goes wrong: logs, tracebacks, failures; and what is shown of it."""

import json
import logging
import os
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from hostile import Hostile
from tiny import call, tables, toml

from fedleak.audit import scoring
from fedleak.config.loading import parse
from fedleak.flower import inline
from fedleak.running import pipeline, preparation
from fedleak.running.dispatch import dispatcher
from fedleak.running.workers import answers
from fedleak.running.workers import process as workers
from fedleak.store.lines import Lines
from fedleak.store.run import Run
from fedleak.util import logs, processes
from fedleak.util.errors import FedleakError

EXPERIMENT = {"federation.rounds": 2}
RUN = Path("runs/small")


@pytest.fixture
def here(tmp_path, monkeypatch, in_process):
    (tmp_path / "small.toml").write_text(toml(EXPERIMENT))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def no_space(*_, **__):
    private = "the patient"
    raise OSError(28, "No space left on device" if private else "")


# --- a run --------------------------------------------------------------------------------------


def test_each_command_is_in_the_log_which_only_its_owner_can_read(here):
    umask = os.umask(0o022)
    try:
        status, printed, errors = call("run", "small.toml")
    finally:
        os.umask(umask)
    assert (status, errors) == (0, "")
    log = RUN / "log.txt"
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    text = log.read_text()
    assert "probes on r0001-c00: recovered in" in text
    assert text.count("INFO    fedleak.util.logs: done") == 1
    assert "fedleak.util.logs" not in printed
    assert call("score", str(RUN))[0] == 0
    assert log.read_text().startswith(text)
    assert log.read_text().count("done") == 2


def test_an_unexpected_error_is_one_line_and_its_traceback_is_kept(here, in_process, monkeypatch):
    with monkeypatch.context() as full:
        full.setattr(dispatcher, "knowledge", no_space)
        status, _, errors = call("run", "small.toml")
    assert status == 1
    assert errors.count("\n") == 1
    assert errors.startswith("fedleak: unexpected error: OSError: [Errno 28] No space left on dev")
    assert "runs/small/log.txt" in errors
    assert "fedleak --debug" in errors
    info = json.loads((RUN / "run.json").read_text())
    assert info["status"] == "failed"
    assert info["failure"]["reason"] == "OSError: [Errno 28] No space left on device"
    for kept in (info["failure"]["traceback"], (RUN / "log.txt").read_text()):
        assert "in no_space" in kept
        assert "in attack_captures" in kept
        assert "the patient" not in kept, "the values of variables are private"
    assert call("run", "small.toml")[0] == 0
    info = json.loads((RUN / "run.json").read_text())
    assert (info["status"], info["failure"]) == ("finished", None)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), FedleakError("no vault")]
)
def test_debug_shows_the_traceback_on_stderr(here, monkeypatch, error):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(scoring, "score_run", fail)
    status, _, errors = call("--debug", "run", "small.toml")
    assert status == 1
    assert errors.count("Traceback (most recent call last)") == 1
    assert "in fail" in errors
    assert "probes on r0001-c00" in errors
    status, _, errors = call("score", str(RUN))
    assert status == 1
    assert errors.count("\n") == 1
    assert "Traceback" not in errors


def test_an_error_without_a_run_has_its_traceback_with_debug(here, monkeypatch):
    from fedleak.config import loading

    monkeypatch.setattr(loading, "load", no_space)
    status, _, errors = call("run", "small.toml")
    assert (status, errors.count("\n")) == (1, 1)
    assert "`fedleak --debug" in errors
    assert "in no_space" in call("--debug", "run", "small.toml")[2]


def test_a_full_disk_does_not_hide_why_a_run_failed(here, monkeypatch):
    experiment = parse(tables())
    run = preparation.prepare(experiment, here / "run")

    def write(*_, **__):
        raise OSError(28, "No space left on device")

    def fail():
        with pipeline.noting_status(run):
            monkeypatch.setattr(Run, "write_json", write)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()


def test_a_log_that_cannot_be_written_disturbs_nothing(tmp_path, capfd):
    (tmp_path / "log.txt").mkdir()
    with logs.logged(tmp_path):
        logging.getLogger("fedleak.anything").warning("said")
    assert capfd.readouterr() == ("", "")


def test_what_is_noted_does_not_reach_what_a_library_made_of_the_root_logger(tmp_path, caplog):
    with logs.logged(tmp_path):
        logging.getLogger("fedleak.anything").warning("said")
    assert caplog.records == []
    logging.getLogger("fedleak.anything").warning("said to whoever uses the library")
    assert len(caplog.records) == 1


def test_what_is_noted_is_shown_to_nobody_who_did_not_ask(tmp_path):
    code = "import logging, fedleak; logging.getLogger('fedleak.x').error('noted')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_nothing_in_the_log_is_obeyed(tmp_path):
    with logs.logged(tmp_path):
        logging.getLogger("fedleak.x").warning("\x1b[2J %s", "a\x9b31mb\u202e")
    text = (tmp_path / "log.txt").read_text()
    assert r"\x1b[2J a\x9b31mb\u202e" in text
    assert all(line.isprintable() for line in text.splitlines())


# --- attacks that fail --------------------------------------------------------------------------


def test_a_try_that_failed_keeps_its_traceback_from_the_worker_process(here, monkeypatch):
    from fedleak import attacks

    kinds = {**attacks.kinds(), "hostile": Hostile}
    monkeypatch.setattr(attacks, "kinds", lambda: kinds)
    experiment = parse(tables({"attack": [{"kind": "hostile", "crash": True}]}))
    run = preparation.prepare(experiment, here / "run")
    inline.train(run, experiment)
    with run.lock():
        dispatcher.attack_captures(run, experiment, no_more=lambda: True)
    tries = run.rows(Lines("attempts.jsonl", dict))
    assert len(tries) == 2 * dispatcher.TRIES
    for attempt in tries:
        assert attempt["reason"] == "RuntimeError: crashed"
        assert "hostile.py" in attempt["traceback"]
        assert 'raise RuntimeError("crashed")' in attempt["traceback"]
    log = (run.path / "log.txt").read_text()
    assert log.count("hostile failed on r0001-c00") == dispatcher.TRIES
    assert 'raise RuntimeError("crashed")' in log


def test_a_traceback_is_of_bounded_length():
    def deeper(left):
        if left:
            return deeper(left - 1) + deeper(left - 2)
        raise ValueError("x" * 10**6)

    with pytest.raises(ValueError, match="xxx") as caught:
        deeper(100)
    assert len(workers.trace(caught.value)) == workers.LONGEST_TRACE
    assert len(workers.failure(caught.value)) <= answers.LONGEST_REASON


def test_a_call_in_a_process_of_its_own_says_why_it_failed(capfd):
    ended = {}
    processes.side_by_side({"bad": partial(divmod, 1)}, 1, lambda name: None, ended.__setitem__)
    assert ended == {"bad": "ZeroDivisionError: integer division or modulo by zero"}
    assert "Traceback" not in capfd.readouterr().err
