"""Starts two raylets on loopback, attacks on them, and prints what was seen as JSON.

`test_on_ray` calls it in a network namespace that has nothing but loopback, and in a process
namespace, with which all ends that was started here.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
from patient import Patient

from fedleak.config.components import NamedAttack
from fedleak.config.loading import parse
from fedleak.config.tables import RayTable
from fedleak.running.workers.on_ray import ray_workers
from fedleak.running.workers.process import Job, workers
from fedleak.store.run import Key
from fedleak.training.observation import Knowledge

ADDRESS = "127.0.0.1:6479"


def hands():
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if any(part.startswith("ray::Hand") for part in process.cmdline()):
                processes.append(process)
    return processes


def attack(run, meanwhile=lambda process: None, **table):
    """Attacks a run with the command line; returns its exit status and what it printed."""
    named = {"address": ADDRESS} | table
    settings = ", ".join(f"{key} = {json.dumps(value)}" for key, value in named.items())
    wanted = f'workers={{engine="ray", at_once=1, ray={{{settings}}}}}'
    command = [sys.executable, "-m", "fedleak", "attack", str(run), "--set", wanted]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=run.parent
    ) as process:
        meanwhile(process)
        printed, _ = process.communicate()
    return {"status": process.returncode, "printed": printed}


def kill_one(run):
    """Returns what kills an actor once there is an answer, and so in the middle of another."""

    def kill(process):
        answers = run / "reconstructions.jsonl"
        while process.poll() is None and not (answers.is_file() and answers.stat().st_size):
            time.sleep(0.02)
        hands()[0].kill()

    return kill


def interrupt(process):
    while process.poll() is None and not hands():
        time.sleep(0.05)
    time.sleep(2)
    process.send_signal(2)


def wait(worker, watch=lambda: None):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        watch()
        if (outcome := worker.result()) is not None:
            return outcome
        time.sleep(0.05)
    raise AssertionError("no result")


def one_worker(run, folder):
    """Tries what a worker does: progress, time limits, an attack that raises."""
    experiment = parse(json.loads((run / "run.json").read_text())["experiment"] | {"workers": {}})

    def job(**settings):
        attack = Patient(str(folder / "calls"), **settings)
        return Job(
            run=run, key=Key(1, 0), attack=NamedAttack("patient", attack), knowledge=Knowledge(),
            model=experiment.model_spec(2), seed=0,
        )  # fmt: skip

    with ray_workers(RayTable(address=ADDRESS, slots=1, shared=False), 6) as (worker,):
        readings = {}
        while not worker.free:
            time.sleep(0.1)
        seen = []
        worker.submit([job(steps=8, pause=0.4)])
        (answer,) = wait(worker, lambda: seen.append(worker.progress()))
        readings["progress"] = [progress[0].step for progress in seen if progress]
        readings["sequences"] = answer.sequences
        worker.submit([job(poison=0)])
        readings["poisoned"] = repr(wait(worker))
        worker.submit([job(steps=1, pause=100)])
        start = time.monotonic()
        readings["late"] = repr(wait(worker))
        readings["late_after"] = time.monotonic() - start
        while not worker.free:
            time.sleep(0.1)
        worker.submit([job()])
        readings["afterwards"] = wait(worker)[0].sequences
    with workers(["cpu"], 60) as (local,):
        local.submit([job(steps=8, pause=0)])
        readings["local"] = wait(local)[0].sequences
    return readings


def main(folder: Path) -> None:
    """Prints one table."""
    short = tempfile.mkdtemp(prefix="flr", dir="/tmp")  # the names of sockets have a limit
    nodes = Path(short, "nodes")
    nodes.mkdir()
    os.environ |= {"RAY_TMPDIR": short, "RAY_USAGE_STATS_ENABLED": "0"}
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--num-cpus=1"]
    try:
        head = [*ray, "--head", "--node-ip-address=127.0.0.1", "--port=6479"]
        for command in ([*head, "--include-dashboard=false"], [*ray, f"--address={ADDRESS}"]):
            subprocess.run(
                command, check=True, stdout=subprocess.DEVNULL, timeout=120,
                env=os.environ | {"TMPDIR": str(nodes)},
            )  # fmt: skip
        outcomes = {
            "shared": attack(folder / "shared"),
            "sent": attack(folder / "sent", kill_one(folder / "sent"), shared=False),
            "interrupted": attack(folder / "interrupted", interrupt, shared=False),
        }
        time.sleep(5)
        outcomes["alive"] = len(hands())
        outcomes["again"] = attack(folder / "interrupted")
        outcomes["crowded"] = attack(folder / "crowded", slots=3)
        outcomes["worker"] = one_worker(folder / "crowded", folder)
        outcomes["left"] = [path.name for path in nodes.glob("fedleak-ray-*")]
    finally:
        shutil.rmtree(short, ignore_errors=True)
    sys.stdout.write(json.dumps(outcomes) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
