"""Attacks on a Ray cluster: the answers of local workers, and clear words where it is not there."""

import builtins
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny import DLG, call, toml

from fedleak.config.loading import load, parse
from fedleak.flower import inline
from fedleak.running import pipeline, preparation
from fedleak.running.dispatch.dispatcher import Crew
from fedleak.running.workers import on_ray
from fedleak.running.workers.process import workers
from fedleak.store.run import Run
from fedleak.store.shards import read_answers
from fedleak.util.errors import ConfigError

NAMED = [DLG | {"steps": 40}, DLG | {"name": "dlg-other", "steps": 60}]
ON_RAY = 'workers={{engine="ray", ray={{address="127.0.0.1:{}"}}}}'


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run that is trained and not attacked."""
    folder = tmp_path_factory.mktemp("trained")
    changes = {"attack": NAMED, "federation.clients": 3, "data.samples": 12}
    (folder / "small.toml").write_text(toml(changes))
    experiment = load(folder / "small.toml")
    run = preparation.prepare(experiment, folder / "runs" / "small")
    with pipeline.noting_status(run):
        inline.train(run, experiment)
    return folder


@pytest.fixture
def here(trained, tmp_path, monkeypatch):
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ({"engine": "ray"}, "set workers.ray.address"),
        ({"engine": "ray", "ray": {}}, "workers.ray.address"),
        ({"engine": "ray", "ray": {"address": "here"}}, "is not host:port"),
        ({"engine": "ray", "ray": {"address": "ray://host:1"}}, "is not host:port"),
        ({"engine": "ray", "ray": {"address": "host:70000"}}, "is not host:port"),
        ({"engine": "ray", "ray": {"address": "a:1", "slots": 0}}, "workers.ray.slots"),
        ({"engine": "ray", "ray": {"address": "a:1"}, "devices": ["cpu"]}, "leave devices out"),
        ({"engine": "slurm"}, "workers.engine"),
    ],
)
def test_a_wrong_table_is_refused(workers, words):
    table = {"name": "x", "model": {"name": "builtin/bert-tiny"}, "data": {"name": "builtin/notes"}}
    with pytest.raises(ConfigError, match=words):
        parse(table | {"workers": workers})


def test_no_cluster_at_the_address_is_a_line_in_seconds(here):
    start = time.monotonic()
    status, _, errors = call("attack", "runs/small", "--set", ON_RAY.format(free_port()))
    assert time.monotonic() - start < 20
    assert status == 1
    assert "no Ray cluster answers at workers.ray.address = '127.0.0.1:" in errors
    assert errors.count("\n") == 1
    assert not (here / "runs" / "small" / "reconstructions.jsonl").exists()


def test_without_ray_the_extra_is_named(here, monkeypatch):
    original_import = builtins.__import__

    def without(name, *rest):
        if name.partition(".")[0] == "ray":
            raise ImportError(name)
        return original_import(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    status, _, errors = call("attack", "runs/small", "--set", ON_RAY.format(1))
    assert status == 2
    assert "pip install 'fedleak[ray]'" in errors


def test_cells_on_a_cluster_run_one_after_the_other(here, monkeypatch):
    text = toml({"workers": None, "name": "grid"}) + "[sweep]\nseed = [0, 1]\n"
    Path("grid.toml").write_text(text)
    settings = ("--set", ON_RAY.format(free_port()))
    status, _, errors = call("sweep", "grid.toml", "--jobs", "2", *settings)
    assert status == 2
    assert "leave --jobs out" in errors
    status, _, errors = call("sweep", "grid.toml", *settings)
    assert status == 1
    assert errors.count("no Ray cluster answers") == 2


def test_what_a_killed_actor_has_left_is_removed_by_the_next(tmp_path, monkeypatch):
    monkeypatch.setattr(on_ray.tempfile, "gettempdir", lambda: str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    for name in (f"{ended.pid}-abc", f"{os.getpid()}-abc", "x-abc"):
        (tmp_path / f"fedleak-ray-{name}" / "run").mkdir(parents=True)
    on_ray._remove_left()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f"fedleak-ray-{os.getpid()}-abc", "fedleak-ray-x-abc"]


def answers(run):
    given = (row.model_copy(update={"seconds": None}) for row in read_answers(run))
    return sorted(given, key=lambda row: row.id)


ALONE = ["unshare", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
"""Nothing but loopback, which Ray would otherwise replace by the machine's own address."""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_raylets_on_loopback_give_the_local_answers(trained, tmp_path):
    probe = [*ALONE, "ip", "link", "set", "lo", "up"]
    if not shutil.which("unshare") or subprocess.run(probe, check=False).returncode:
        pytest.skip("no network namespace can be made here")
    for name in ("local", "shared", "sent", "interrupted", "crowded"):
        shutil.copytree(trained / "runs" / "small", tmp_path / name)
    local = Run(tmp_path / "local")
    with workers(["cpu"], 600) as hands:
        pipeline.carry_out(local, load(trained / "small.toml"), inline.train, Crew(hands))
    script = Path(__file__).with_name("ray_on_loopback.py")
    paths = [str(script.parents[2]), str(script.parents[1] / "helpers")]
    done = subprocess.run(
        [*ALONE, "bash", "-c", 'ip link set lo up && exec "$@"', "_", sys.executable, str(script),
         str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True, text=True, timeout=1700, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert len(answers(local)) == 9
    for name in ("shared", "sent"):
        assert outcomes[name]["status"] == 0, outcomes[name]["printed"]
        assert answers(Run(tmp_path / name)) == answers(local)
    tries = (tmp_path / "sent" / "attempts.jsonl").read_text().splitlines()
    assert {json.loads(line)["reason"] for line in tries} == {"the worker process died"}
    assert outcomes["interrupted"]["status"] == 130
    assert "stopped; the same command again finishes the rest" in outcomes["interrupted"]["printed"]
    assert outcomes["alive"] == 0
    assert outcomes["again"]["status"] == 0, outcomes["again"]["printed"]
    assert answers(Run(tmp_path / "interrupted")) == answers(local)
    assert outcomes["crowded"]["status"] == 1
    assert "has 2 CPUs free, and 3 workers need 3" in outcomes["crowded"]["printed"]
    worker = outcomes["worker"]
    assert worker["sequences"] == worker["afterwards"] == worker["local"]
    assert worker["progress"] == sorted(worker["progress"])
    assert len(set(worker["progress"])) >= 2
    assert worker["poisoned"] == "RuntimeError('poisoned')"
    assert worker["late"] == "TimeoutError('took longer than workers.time_limit = 6 s')"
    assert 6 <= worker["late_after"] < 12
    assert outcomes["left"] == []
