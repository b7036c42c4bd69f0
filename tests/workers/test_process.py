"""Attacks of several captures at once, how far they are, and what is shown of it."""

import io
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest
import torch
from patient import Patient
from rich.console import Console
from tiny import TABLES, Here

from fedleak import attacks
from fedleak.attacks import Batched, Progress
from fedleak.attacks.reconstruction import Status
from fedleak.cli import display
from fedleak.config.components import NamedAttack
from fedleak.config.loading import parse
from fedleak.flower import inline
from fedleak.running import preparation
from fedleak.running.dispatch import dispatcher
from fedleak.running.dispatch.progress import RunProgress, UnderWay
from fedleak.running.workers import process as workers
from fedleak.running.workers.process import Job, telling, work_together
from fedleak.store.lines import Lines
from fedleak.store.run import Key, Run
from fedleak.training.observation import Knowledge

CLIENTS, ROUNDS = 5, 2
TABLE = {
    "name": "together",
    "seed": 4,
    "model": TABLES["model"],
    "data": {"name": "builtin/notes", "samples": 12, "held_out": 2},
    "federation": {
        "clients": CLIENTS,
        "rounds": ROUNDS,
        "batch_size": 1,
        "learning_rate": 0.1,
    },
    "workers": {"devices": ["cpu"]},
}
PAIRS = [[[r, c] for c in pair] for r in (1, 2) for pair in ([0, 1], [2, 3], [4])]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    experiment = parse(TABLE)
    run = preparation.prepare(experiment, tmp_path_factory.mktemp("trained") / "run")
    inline.train(run, experiment)
    return run


@pytest.fixture
def run(trained, tmp_path):
    """Captures of a finished training, and no answers."""
    shutil.copytree(trained.path, tmp_path / "run")
    return Run(tmp_path / "run")


@pytest.fixture
def patient(tmp_path, monkeypatch):
    """Makes the attack that logs its calls; it can be named in experiments too."""
    kinds = {**attacks.kinds(), "patient": Patient}
    monkeypatch.setattr(attacks, "kinds", lambda: kinds)
    return lambda **settings: Patient(str(tmp_path / "calls"), **settings)


def calls(tmp_path):
    return [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


def attack(run, *others, no_more=lambda: True, on=None, **how):
    """Attacks what is captured, in this process, and returns the rows without times."""
    experiment = parse(
        TABLE | {"attack": [workers.settings(attack_instance) for attack_instance in others]}
    )
    crew = dispatcher.Crew([on or Here()], **how)
    dispatcher.attack_captures(run, experiment, crew, no_more=no_more)
    rows = [
        row | {"seconds": None, "seal": None}
        for row in run.rows(Lines("reconstructions.jsonl", dict))
    ]
    return sorted(rows, key=lambda row: (row["round"], row["client"], row["attack"]))


def of_patient(rows):
    return {(row["round"], row["client"]): row for row in rows if row["attack"] == "patient"}


def capture_file(run, round, client):
    return run.path / "captures" / f"{Key(round, client)}.safetensors"


def job_of(run, attack, client, round=1):
    spec = parse(TABLE).model_spec(2)
    named = NamedAttack("patient", attack)
    return Job(
        run=run.path,
        key=Key(round, client),
        attack=named,
        knowledge=Knowledge(),
        model=spec,
        seed=4,
    )


# --- which captures go together ---------------------------------------------------------------


def test_clients_of_a_round_go_together_in_order(run, patient, tmp_path):
    assert isinstance(patient(), Batched)
    rows = of_patient(attack(run, patient(at_once=2)))
    assert calls(tmp_path) == PAIRS
    assert [row["together"] for row in rows.values()] == [2, 2, 2, 2, 1] * ROUNDS


def test_each_answer_is_what_it_is_alone(run, patient, tmp_path):
    rows = of_patient(attack(run, patient(at_once=3)))
    for (round, client), row in rows.items():
        (alone,) = work_together([job_of(run, patient(at_once=3), client, round)], "cpu")
        assert alone.together == 1
        kept = json.loads(alone.model_dump_json(include={"sequences", "evidence", "status"}))
        assert kept == {name: row[name] for name in kept}


def test_a_plain_attack_takes_one_at_a_time_whatever_is_beside_it(run, trained, patient, tmp_path):
    assert not isinstance(attacks.kinds()["probes"](), Batched)
    beside = [row for row in attack(run, patient()) if row["attack"] == "probes"]
    shutil.copytree(trained.path, tmp_path / "plain")
    assert beside == attack(Run(tmp_path / "plain"))
    assert [row["together"] for row in beside] == [1] * CLIENTS * ROUNDS


def test_a_group_waits_until_its_captures_are_here(run, patient, tmp_path):
    late = capture_file(run, 1, 1)
    late.rename(tmp_path / "late")
    looks = []

    def no_more():
        looks.append(len(calls(tmp_path)) if (tmp_path / "calls").exists() else 0)
        if looks[-1] == len(PAIRS) - 1 and not late.exists():
            (tmp_path / "late").rename(late)
        return looks[-1] == len(PAIRS)

    attack(run, patient(), no_more=no_more)
    assert calls(tmp_path) == [*PAIRS[1:], PAIRS[0]]


def test_what_is_here_is_taken_when_no_more_come(run, patient, tmp_path):
    late = capture_file(run, 1, 1)
    late.rename(tmp_path / "late")
    attack(run, patient())
    assert calls(tmp_path) == [[[1, 0]], *PAIRS[1:]]
    (tmp_path / "late").rename(late)
    attack(run, patient())
    assert calls(tmp_path)[len(PAIRS) :] == [[[1, 1]]]


def test_slow_attacks_wait_until_quick_ones_have_answered(run, patient, monkeypatch):
    monkeypatch.setattr(type(patient()), "slow", True, raising=False)
    experiment = parse(TABLE | {"attack": [workers.settings(patient())]})
    dispatcher.attack_captures(run, experiment, dispatcher.Crew([Here()]), no_more=lambda: True)
    order = [row["attack"] for row in run.rows(Lines("reconstructions.jsonl", dict))]
    assert order == ["probes"] * CLIENTS * ROUNDS + ["patient"] * CLIENTS * ROUNDS


# --- what goes wrong ----------------------------------------------------------------------------


def test_after_a_failure_each_is_tried_alone(run, patient, tmp_path):
    rows = of_patient(attack(run, patient(at_once=3, poison=1)))
    of_first_round = [[c for _, c in call] for call in calls(tmp_path) if call[0][0] == 1]
    assert of_first_round[0] == [0, 1, 2]
    assert sorted(of_first_round[1:]) == [[0], [1], [1], [2], [3, 4]]
    status = [rows[1, client]["status"] for client in range(CLIENTS)]
    assert status == ["recovered", "failed", "recovered", "recovered", "recovered"]
    assert rows[1, 1]["reason"] == "RuntimeError: poisoned"
    assert [rows[1, client]["together"] for client in range(CLIENTS)] == [1, None, 1, 2, 2]
    attempts = [t["client"] for t in run.rows(Lines("attempts.jsonl", dict)) if t["round"] == 1]
    assert sorted(attempts) == [0, 1, 1, 1, 2]


def test_a_run_that_is_killed_after_a_failure_goes_on_alone(run, trained, patient, tmp_path):
    shutil.copytree(trained.path, tmp_path / "undisturbed")
    expected = attack(Run(tmp_path / "undisturbed"), patient(at_once=3, poison=1))
    (tmp_path / "calls").unlink()
    attack(
        run,
        patient(at_once=3, poison=1),
        enough=lambda: bool(run.rows(Lines("attempts.jsonl", dict))),
    )
    before = len(calls(tmp_path))
    assert attack(run, patient(at_once=3, poison=1)) == expected
    assert [[1, 0], [1, 1], [1, 2]] not in calls(tmp_path)[before:]


def test_a_damaged_or_infinite_capture_fails_alone(run, patient, tmp_path):
    unreadable = capture_file(run, 1, 0)
    unreadable.write_bytes(unreadable.read_bytes()[:3000])
    capture = run.captures.read_capture(Key(1, 1))
    tensors = {n: torch.full_like(t, math.inf) for n, t in capture.update.tensors.items()}
    run.captures.write(replace(capture, update=replace(capture.update, tensors=tensors)))
    rows = of_patient(attack(run, patient(at_once=CLIENTS)))
    status = [rows[1, client]["status"] for client in range(CLIENTS)]
    assert status == ["failed", "abstained", "recovered", "recovered", "recovered"]
    assert "is damaged" in rows[1, 0]["reason"]
    assert "not every number" in rows[1, 1]["reason"]
    assert [rows[1, client]["together"] for client in range(CLIENTS)] == [None, None, 3, 3, 3]
    assert calls(tmp_path)[0] == [[1, 2], [1, 3], [1, 4]]
    assert run.rows(Lines("attempts.jsonl", dict)) == []


def test_a_capture_that_vanishes_after_it_was_handed_out_fails_alone(run, patient):
    jobs = [job_of(run, patient(), client) for client in (0, 1)]
    capture_file(run, 1, 0).unlink()
    lost, answered = work_together(jobs, "cpu")
    assert (lost.status, answered.status) == (Status.FAILED, Status.RECOVERED)
    assert (lost.together, answered.together) == (None, 1)


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_writes_gives_the_same_rows(run, patient, tmp_path):
    expected = attack(run, patient(at_once=3))
    path = run.path / "reconstructions.jsonl"
    content = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    groups = sum(content[:end].endswith(b" \n") for end in ends)
    assert groups == ROUNDS * (2 + 1)  # of three and of two, without the last of each
    for cut in [0, ends[4], ends[5], ends[6] - 1, ends[7] - 2]:
        path.write_bytes(content[:cut])
        assert attack(run, patient(at_once=3)) == expected
    given = {tuple(map(tuple, call)) for call in calls(tmp_path)}
    assert given == {((r, 0), (r, 1), (r, 2)) for r in (1, 2)} | {((r, 3), (r, 4)) for r in (1, 2)}


# --- worker processes ---------------------------------------------------------------------------


def wait(worker, watch=lambda: None):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        watch()
        if (outcome := worker.result()) is not None:
            return outcome
        time.sleep(0.02)
    raise AssertionError("no result")


def test_a_worker_says_how_far_it_is_and_is_ended_when_its_time_is_up(run, patient):
    slow = patient(at_once=3, steps=14, pause=0.2)
    jobs = [job_of(run, slow, client) for client in (1, 0, 4)]
    with workers.workers(["cpu"], time_limit=60) as (worker,):
        seen = []
        worker.submit(jobs)
        answers = wait(worker, lambda: seen.append(worker.progress()))
        assert [(answer.client, answer.together) for answer in answers] == [(1, 3), (0, 3), (4, 3)]
        assert all(answer.seconds >= 2.8 / 3 for answer in answers)
        assert worker.jobs == ()
        assert seen[0] == {}
        assert set(seen[-1]) == {0, 1, 4}
        assert seen[-1][4] == Progress(seen[-1][4].step, 14, 0.5, "text 4")
        steps = {progress[4].step for progress in seen if 4 in progress}
        assert 2 <= len(steps) <= 6, "about once a second"
        process = psutil.Process(worker._pid.result())
        worker._time_limit = 0.1
        worker.submit(jobs[:1])
        assert worker.progress() == {}, "of an earlier try"
        error = wait(worker)
        assert isinstance(error, TimeoutError)
        assert str(error) == "took longer than workers.time_limit = 0.1 s"
        assert not process.is_running()
        assert worker.free


class Waiting(workers.Worker):
    """A worker that never answers, without a process."""

    free = True

    def submit(self, jobs):
        self.jobs = tuple(jobs)

    def progress(self):
        return {}

    def stop(self):
        pass

    def _start(self):
        self._ready = Future()
        self._ready.set_result(None)


@pytest.mark.parametrize(
    ("captures", "seconds", "words"), [(1, 2.0, ""), (3, 6.0, " for each of 3 captures")]
)
def test_a_try_has_its_time_for_each_capture(monkeypatch, captures, seconds, words):
    now = 10.0
    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: now))
    worker = Waiting(time_limit=2.0)
    worker.submit([None] * captures)
    assert worker.result() is None
    now += seconds
    assert worker.result() is None
    now += 0.1
    error = worker.result()
    assert isinstance(error, TimeoutError)
    assert str(error) == f"took longer than workers.time_limit = 2 s{words}"
    assert worker.jobs == ()


class DyingPool:
    """A pool whose process dies as soon as it is there."""

    def __init__(self, *_, **__):
        self.died = False

    def submit(self, *_):
        if self.died:
            raise BrokenProcessPool("died")
        self.died, answer = True, Future()
        answer.set_exception(BrokenProcessPool("died"))
        return answer

    def shutdown(self, **_):
        pass


def test_a_process_that_dies_at_once_fails_each_try(monkeypatch):
    monkeypatch.setattr(workers, "ProcessPoolExecutor", DyingPool)
    with workers.workers(["cpu"], 60) as (worker,):
        for _ in range(2):
            worker.submit([None])
            assert isinstance(worker.result(), BrokenProcessPool)
            assert worker.free


def test_the_progress_is_told_now_and_then(monkeypatch):
    def told(count):
        sent = []
        report = telling(lambda progress: sent.append(pickle.dumps(progress)))
        for step in range(count):
            report(step % 2, Progress(step, count, math.nan, "\udc80 text"))
        return [pickle.loads(progress) for progress in sent]

    monkeypatch.setattr(workers, "NOTE_SECONDS", 1000)
    ((client, progress),) = [*told(1000)[0].items()]
    assert (client, progress.step) == (0, 0)
    monkeypatch.setattr(workers, "NOTE_SECONDS", 0)
    assert {client: progress.step for client, progress in told(1000)[-1].items()} == {
        0: 998,
        1: 999,
    }


def test_a_worker_that_is_still_starting_can_be_stopped(run, patient, workers_of):
    with workers.workers(["cpu"], 60) as (worker,):
        worker.submit([job_of(run, patient(steps=2, pause=60), client=0)])
        time.sleep(0.5)  # until the job has left the calls that a pool can cancel
        started = workers_of(os.getpid())
    assert started
    _, alive = psutil.wait_procs(started, timeout=20)
    assert not alive


@pytest.mark.parametrize("training", [True, False])
def test_ctrl_c_waits_for_the_thread_that_hands_out_captures(run, monkeypatch, training):
    heard = []

    def hand_out(run, experiment, crew, no_more):
        while not (no_more() or training):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        while not crew.enough():
            time.sleep(0.01)
        time.sleep(0.5)
        heard.append(True)

    monkeypatch.setattr(dispatcher, "attack_captures", hand_out)
    with pytest.raises(KeyboardInterrupt), dispatcher.attacking(run, parse(TABLE)):
        time.sleep(60 if training else 0)
    assert heard


ORPHAN = """
import time
from fedleak.running.workers.process import workers
if __name__ == "__main__":
    with workers(["cpu"], 60) as (worker,):
        print(worker._pid.result(), flush=True)
        time.sleep(60)
"""


@pytest.mark.slow
def test_a_worker_does_not_outlive_a_killed_command(tmp_path):
    (tmp_path / "orphan.py").write_text(ORPHAN)
    command = [sys.executable, str(tmp_path / "orphan.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        worker = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
    assert not psutil.wait_procs([worker], timeout=20)[1]


UNTIDY = """
import multiprocessing
from fedleak.running.workers.process import workers
kept = []
def keep():
    kept.append(multiprocessing.get_context("spawn").RLock())
if __name__ == "__main__":
    with workers(["cpu"], 60) as (worker,):
        worker._pool.submit(keep).result()
"""


@pytest.mark.slow
def test_nothing_is_said_of_what_an_ended_worker_leaves(tmp_path):
    (tmp_path / "untidy.py").write_text(UNTIDY)
    command = [sys.executable, str(tmp_path / "untidy.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr == ""


IMPATIENT = """
import os, signal, time
from fedleak.running.workers.process import workers
if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: None)
    with workers(["cpu"], 60) as (worker,):
        while not worker._ready.done():
            os.killpg(0, signal.SIGINT)
            time.sleep(0.02)
        worker._ready.result()
"""


@pytest.mark.slow
def test_a_worker_leaves_ctrl_c_to_the_command_from_its_first_moment(tmp_path):
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "impatient.py")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        start_new_session=True,
    )
    assert done.stderr == ""


# --- what is shown --------------------------------------------------------------------------------

PRIVATE = "[red]the [/] patient\x1b[2J\nsaid"
SHOWN = r"[red]the [/] patient\x1b[2J\nsaid"
DOING = UnderWay(
    "lamp", 2, (0, 3), {0: Progress(5, 90, 0.1234, PRIVATE), 3: Progress(6, 90, 7e-5, "so")}
)


@pytest.mark.parametrize(
    ("doing", "now", "shown"),
    [
        (
            DOING,
            0,
            "     lamp round 2, client 0: 5/90, loss 0.123, " + SHOWN,
        ),
        (DOING, display.TURN_SECONDS, "     lamp round 2, client 3: 6/90, loss 7e-05, so"),
        (
            UnderWay("lamp", 1, (4,), {4: Progress(0, 90, math.nan, "", "starts 3/64")}),
            0,
            "     lamp round 1, client 4: 0/90 starts 3/64",
        ),
        (
            UnderWay("lamp", 1, (4,), {4: Progress(9, 90, 0.5, "so", "descent")}),
            0,
            "     lamp round 1, client 4: 9/90 descent, loss 0.5, so",
        ),
        (UnderWay("dager", 1, (4,), {}), 0, "    dager round 1, client 4"),
        (UnderWay("tag", 1, (4, 5), {}), 0, "      tag round 1, clients 4, 5"),
    ],
)
def test_a_line_says_what_a_worker_does_and_obeys_nothing_in_it(doing, now, shown):
    assert display.line(doing, now).plain == shown


class Screen(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_busy_workers_are_shown_on_a_terminal_and_cut_to_its_width(terminal):
    file = Screen() if terminal else io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=60, height=20)
    deadline = time.monotonic() + (20 if terminal else 0.3)
    with display.progress(console) as show:
        show(RunProgress(1, 2, 3, 4, (DOING._replace(progress={0: DOING.progress[0]}),)))
        while "round 2" not in console.file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.05)
    printed = console.file.getvalue()
    assert ("round 2, client 0" in printed) == terminal
    assert ("…" in printed) == terminal
    assert "\x1b[2J" not in printed
    assert ("attacks" in printed) == terminal


def test_a_run_tells_what_is_under_way(run, patient):
    class Busy(Here):
        answer = Future()

        def result(self):
            return super().result() if reports and reports[-1].under_way else None

        def progress(self):
            return {self.jobs[0].key.client: Progress(1, 3, 0.5, "text")}

    reports = []
    attack(run, patient(), on=Busy(), report=reports.append)
    doing = [task for report in reports for task in report.under_way]
    names = ["patient", "patient", "patient", *["probes"] * CLIENTS] * ROUNDS
    assert sorted(task.attack for task in doing) == sorted(names)
    pairs = [task for task in doing if task.attack == "patient"]
    assert [[[task.round, client] for client in task.clients] for task in pairs] == PAIRS
    assert pairs[1].progress == {2: Progress(1, 3, 0.5, "text")}
    last = reports[-1]
    assert last[:4] == (10, 10, 20, 20)
    assert (last.rounds, last.rounds_expected, last.seconds_left) == (ROUNDS, ROUNDS, 0)
    finished = [(answer.attack, answer.key) for report in reports for answer in report.finished]
    assert len(finished) == len(set(finished)) == 20
    assert reports[0].seconds_left is None, "nothing has been measured"


@pytest.mark.slow
def test_a_worker_is_ready_when_what_is_slow_is_imported():
    """The time limit is counted from there."""
    code = (
        "import sys; from fedleak.running.workers.process import prepare; prepare('cpu'); "
        "from fedleak.models import ModelSpec; from fedleak.models.loading import outline; "
        "before = set(sys.modules); "
        "spec = {'name': 'builtin/bert-tiny', 'task': 'sequence-classification', 'num_labels': 2}; "
        "outline(ModelSpec(**spec)); "
        "print(*(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    late = {
        name for name in done.stdout.split() if not name.startswith(("fedleak", "transformers"))
    }
    assert len(late) < 20, sorted(late)
