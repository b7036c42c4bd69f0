import json
import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
import uuid
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name

import psutil
import pytest
import tomli_w
from tiny import TABLES

from fedleak.config.experiment import Experiment
from fedleak.config.loading import parse
from fedleak.flower import inline, simulation
from fedleak.flower.client.app import app as client_app
from fedleak.flower.runs import answer_of
from fedleak.flower.server.app import app as server_app
from fedleak.running import preparation
from fedleak.store.run import Run
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.nested import merged

TINY = {
    "name": "tiny",
    "seed": 1,
    "model": TABLES["model"],
    "data": {"name": "builtin/notes", "samples": 16, "held_out": 4},
    "federation": {"clients": 2, "rounds": 2, "batch_size": 2, "learning_rate": 0.5},
    "attack": [],
}


def tiny(**tables: dict[str, object]) -> Experiment:
    return parse(TINY | {name: TINY.get(name, {}) | table for name, table in tables.items()})


def wait_for(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {condition}"
        time.sleep(0.1)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def marked(name: str) -> list[psutil.Process]:
    """Returns the processes that have an environment variable of this name."""
    processes = []
    for process in psutil.process_iter():
        try:
            if name in process.environ():
                processes.append(process)
        except psutil.Error:  # ended meanwhile, or not ours
            continue
    return processes


# --- what Flower is told --------------------------------------------------------------------


def test_the_app_is_made_of_installed_packages_and_knows_where_the_run_is():
    written = tomllib.loads(tomli_w.dumps(simulation.thin_app(Path('/a b/"c"'))))
    app = written["tool"]["flwr"]["app"]
    assert resolve_name(app["components"]["serverapp"]) is server_app
    assert resolve_name(app["components"]["clientapp"]) is client_app
    assert app["config"] == {
        "experiment": '/a b/"c"/run.json',
        "run-dir": '/a b/"c"',
        "attack": False,
        "nodes-within": 60,
        "answers-within": 3600,
    }


def test_the_app_has_the_settings_that_the_repository_declares():
    ours = simulation.thin_app(Path("/run"))["tool"]["flwr"]["app"]
    pyproject = Path(simulation.__file__).parents[2] / "pyproject.toml"
    declared = tomllib.loads(pyproject.read_text())["tool"]["flwr"]["app"]
    assert ours["config"].keys() == declared["config"].keys()
    for name, component in ours["components"].items():
        assert resolve_name(component) is resolve_name(declared["components"][name])


def test_flower_stays_on_this_machine_and_in_its_folder():
    variables = simulation.environment(
        Path("/x"), Path("/runs/r"), {"PATH": "/bin", "NO_PROXY": "intranet"}
    )
    assert variables["FLWR_HOME"] == "/x/home"
    assert variables["FEDLEAK_VAULT"] == "/runs"
    assert variables["RAY_TMPDIR"] == "/x"
    assert variables["PATH"].endswith(f"{os.pathsep}/bin")
    assert variables["no_proxy"] == "intranet,127.0.0.1,localhost"


def test_programs_of_flower_that_are_not_here_are_named_before_anything_starts(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"'flower-superlink' is neither in .*: add the folder"):
        simulation.train(Run(tmp_path), tiny())
    assert list(tmp_path.iterdir()) == []


def test_ray_has_no_more_workers_than_clients_at_once_or_processors(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert simulation.federation(3, 3).endswith("init-args-num-cpus=3")
    assert simulation.federation(30, 2).endswith("init-args-num-cpus=2")
    assert simulation.federation(30, 30).endswith("init-args-num-cpus=8")
    assert simulation.federation(30, 2).startswith("num-supernodes=30 client-resources-num-cpus=1 ")


def test_a_port_is_free_until_somebody_listens():
    port = simulation.free_port()
    assert not simulation.listens(port)
    with socket.create_server(("127.0.0.1", port)):
        assert simulation.listens(port)


def test_an_answer_of_flwr_is_its_json():
    assert answer_of("ls", '{"success": true, "runs": []}')["runs"] == []


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("", "`flwr run` gave no answer: ''"),
        ("Usage: flwr", "`flwr run` gave no answer: 'Usage: flwr'"),
        (json.dumps({"success": False, "error-message": "no app"}), "`flwr run` failed: no app"),
    ],
)
def test_no_answer_of_flwr_is_an_error(output, message):
    with pytest.raises(FedleakError) as caught:
        answer_of("run", output)
    assert str(caught.value) == message


# --- the keeper -----------------------------------------------------------------------------

ORPHANS = """
import subprocess, sys
from pathlib import Path
from pkgutil import resolve_name
from fedleak.flower.runs import answer_of
from fedleak.flower import simulation

def simulate(folder, run_path, clients, at_once):
    # A child that goes away and leaves a child of its own, in another session and deaf to SIGTERM.
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    child = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {deaf!r}], " \\
        "start_new_session=True, stdout=subprocess.DEVNULL)"
    subprocess.run([sys.executable, "-c", child], stdout=subprocess.DEVNULL)
    (run_path / "folder").write_text(str(folder))
    simulation.wait_until(lambda: (run_path / "enough").exists())

simulation.simulate = simulate
simulation.keep(Path(sys.argv[1]), 1, 1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to the keeper")
# What it ends with is the same: the one that is told to stop is tried each time.
@pytest.mark.parametrize("how", ["stopped", pytest.param("finished", marks=pytest.mark.slow)])
def test_the_keeper_ends_orphans_and_removes_its_folder(tmp_path, monkeypatch, how):
    marker = f"FEDLEAK_TEST_{uuid.uuid4().hex}"
    monkeypatch.setenv(marker, "1")
    command = [sys.executable, "-c", ORPHANS, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as keeper:
        assert keeper.stdin is not None
        wait_for((tmp_path / "folder").exists, 20)
        assert len(marked(marker)) == 2
        if how == "finished":
            (tmp_path / "enough").touch()
        else:
            keeper.stdin.close()
        assert keeper.wait(20) == (0 if how == "finished" else 1)
    assert marked(marker) == []
    assert not Path((tmp_path / "folder").read_text()).exists()


# --- the whole ------------------------------------------------------------------------------

RESPONSES = {
    "model": {"name": "builtin/gpt2-tiny", "task": "causal-lm", "response_template": "A:"},
    "data": {"name": "builtin/notes", "samples": 8, "text": "{instruction}\nA: {response}"},
}


AS_PEOPLE_TRAIN = {
    "model": {"lora": {"rank": 2, "dropout": 0.2}},
    "federation": {"algorithm": "fedavg", "learning_rate": 1e-3, "dropout": True},
    "client": {"optimiser": "adamw", "weight_decay": 0.1, "accumulate": 2}
    | {"precision": "bfloat16-mixed"},
}


@pytest.mark.parametrize(
    "tables",
    [
        # One after the other: each of Ray's workers takes as long to start as the rest of it.
        {"federation": {"at_once": 1}},
        pytest.param(AS_PEOPLE_TRAIN, marks=pytest.mark.slow),
        pytest.param(RESPONSES, marks=pytest.mark.slow),
    ],
    ids=["whole", "adapters", "responses"],
)
def test_captures_and_models_are_those_of_the_inline_engine_to_the_bit(tmp_path, capfd, tables):
    runs = {}
    for engine in (inline, simulation):
        federation = {"federation": {"engine": engine.__name__.rpartition(".")[2]}}
        experiment = tiny(**merged(federation, tables))
        runs[engine] = preparation.prepare(experiment, tmp_path / engine.__name__)
        capfd.readouterr()
        engine.train(runs[engine], experiment)
    assert capfd.readouterr() == ("", "")
    files = [
        {
            path.relative_to(run.path): path.read_bytes()
            for folder in ("captures", "models", "vault")
            for path in (run.path / folder).iterdir()
        }
        for run in runs.values()
    ]
    assert len(files[0]) == 4 + 3 + 4
    assert files[0] == files[1]
    assert "Strategy execution finished" in (runs[simulation].path / "flower.log").read_text()


@pytest.mark.slow
def test_a_client_that_fails_fails_the_run_with_its_reason(tmp_path):
    file = tmp_path / "texts.csv"
    file.write_text("text,label\n" + "".join(f"note {i} is short,{i % 2}\n" for i in range(20)))
    experiment = tiny(data={"name": str(file), "text": "text", "label": "label"})
    run = preparation.prepare(experiment, tmp_path / "run")
    file.unlink()
    log = run.path / "flower.log"
    with pytest.raises(FedleakError, match=r"^round 1: client . \(node \d+\): ") as caught:
        simulation.train(run, experiment)
    assert "ConfigError: data is refused: " in str(caught.value)
    assert str(log) in str(caught.value)
    assert "\n" not in str(caught.value)
    # What is about data does not leave the client, whose log this is.
    assert str(file) not in str(caught.value)
    assert f"{str(file)!r}: there is no such file" in log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_fedleak(tmp_path, how):
    file = tmp_path / "tiny.toml"
    table = TINY | {"federation": {**TINY["federation"], "engine": "simulation", "rounds": 500}}
    file.write_text(tomli_w.dumps(table))
    marker = f"FEDLEAK_TEST_{uuid.uuid4().hex}"
    # Short, because Ray's sockets are in there; and ours, to see that nothing stays.
    with tempfile.TemporaryDirectory(prefix="t-") as folder, (tmp_path / "out").open("w") as out:
        fedleak = subprocess.Popen(
            [sys.executable, "-c", "from fedleak.cli import app; app()", "run", str(file)],
            cwd=tmp_path,
            env=os.environ | {marker: "1", "TMPDIR": folder},
            stdout=out,
            stderr=out,
        )
        # Two names, because Ray's agents overwrite their environment.
        started: list[psutil.Process] = []
        try:
            wait_for((tmp_path / "runs/tiny/captures/r0002-c01.safetensors").exists, 120)
            started = psutil.Process(fedleak.pid).children(recursive=True)
            names = {process.name() for process in started}
            assert {"raylet", "gcs_server", "flower-superlin"} <= names
            fedleak.send_signal(how)
            assert fedleak.wait(30) == (130 if how == signal.SIGINT else -how)
            wait_for(lambda: not marked(marker) and not any(map(alive, started)), 20)
            wait_for(lambda: not list(Path(folder).glob("fl-*")), 5)
        finally:
            for process in filter(alive, {*started, *marked(marker)}):
                process.kill()
    if how == signal.SIGINT:
        assert "the same command again finishes the rest" in (tmp_path / "out").read_text()
