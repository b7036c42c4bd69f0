"""The `simulation` engine: the same two apps under Flower's own simulation, which runs on Ray.

    fedleak -- keeper -- SuperLink -- SuperExec -- flwr-simulation -- Ray
                      -- flwr run, flwr log, flwr ls

Flower and Ray leave processes behind, in sessions of their own, when they are interrupted. So
fedleak starts one process only, a keeper, and the keeper starts the others. It holds the end of a
pipe from fedleak: once training ends, or fedleak does in whatever way (Ctrl-C, SIGTERM, SIGKILL),
it ends all that descends from it and removes their folder. On Linux, orphans become the keeper's
children, so that none can hide; on other systems, a process whose parent died early can outlive the
keeper.
"""

# Run and Experiment bring torch along, which the keeper has no use for.
from __future__ import annotations

import ctypes
import os
import select
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import psutil
import tomli_w

from fedleak.flower.runs import COMPLETED, answer_of, run_config, search_path
from fedleak.util.errors import ConfigError, FedleakError, StoppedError

if TYPE_CHECKING:
    from fedleak.config.experiment import Experiment
    from fedleak.store.run import Run

NAME = "fedleak"
"""The name of the connection to our SuperLink in Flower's configuration."""

PROGRAMS = ("flower-superlink", "flower-superexec", "flwr-simulation", "flwr")
"""What a simulation starts, all of which come with Flower."""

FAILED = "Simulation failed with exception: "  # how Flower begins the text of an exception
POLL_SECONDS = 0.1
GRACE_SECONDS = 3.0
SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>


def train(run: Run, experiment: Experiment, stop: Callable[[], bool] = lambda: False) -> None:
    """Trains `experiment` in Flower's simulation; its log is flower.log in the run directory.

    Args:
        run: The run directory.
        experiment: The experiment that was prepared there.
        stop: Called now and then; if it returns true, the simulation is ended.

    Raises:
        ConfigError: Flower's programs are not here.
        FedleakError: A client or Flower failed, or training was to stop.
    """
    from fedleak.util.plain_files import opened

    refuse_missing_programs(search_path(os.environ))
    path = run.path.absolute()
    log = path / "flower.log"
    # -P: a `server` package in the current folder must not stand in for this one.
    command = [sys.executable, "-P", "-m", "fedleak.flower.simulation"]
    clients = experiment.federation.clients
    at_once = min(clients, experiment.federation.at_once or clients)
    with (
        open(log, "wb", opener=opened) as output,
        subprocess.Popen(
            [*command, str(path), str(clients), str(at_once)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,  # Ctrl-C reaches it through the pipe, and only so
        ) as keeper,
    ):
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        try:
            while not select.select([keeper.stdout], [], [], POLL_SECONDS)[0]:
                if stop():
                    raise StoppedError("training was stopped, as it was told to")
            failure = keeper.stdout.read()
        finally:
            keeper.stdin.close()
            keeper.wait()
    if keeper.returncode:
        reason = " ".join(failure.split()) or "Flower's simulation was cut short"
        raise FedleakError(f"{reason}; Flower's log is {str(log)!r}")


def refuse_missing_programs(path: str) -> None:
    """Refuses to simulate without Flower's programs.

    Args:
        path: The folders that they are looked for in.

    Raises:
        ConfigError: Some are not there; the message names them.
    """
    if missing := [program for program in PROGRAMS if shutil.which(program, path=path) is None]:
        raise ConfigError(
            f"federation.engine = 'simulation' starts programs of Flower, and {missing[0]!r} is "
            f"neither in {sysconfig.get_path('scripts')!r} nor in PATH: add the folder that flwr's "
            "programs were installed into to PATH, or set federation.engine = 'inline'"
        )


# --- the keeper -----------------------------------------------------------------------------


def keep(run_path: Path, clients: int, at_once: int) -> None:
    """Simulates, and leaves nothing behind.

    Args:
        run_path: The run directory.
        clients: Of the federation.
        at_once: How many of them train at a time, at most.

    Raises:
        FedleakError: The simulation failed.
        SystemExit: The fedleak process has ended, or wants to stop.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    with tempfile.TemporaryDirectory(prefix="fl-", ignore_cleanup_errors=True) as folder:
        try:
            simulate(Path(folder), run_path, clients, at_once)
        finally:
            end_descendants()


def simulate(folder: Path, run_path: Path, clients: int, at_once: int) -> None:
    """Trains a run with a SuperLink of its own, all of whose files are in `folder`."""
    home, app, empty = folder / "home", folder / "app", folder / "empty"
    for directory in (home, app, empty):
        directory.mkdir()
    port = free_port()
    (home / "config.toml").write_text(tomli_w.dumps(connection(port)))
    (app / "pyproject.toml").write_text(tomli_w.dumps(thin_app(run_path)))
    os.environ.update(environment(folder, run_path, os.environ))
    os.chdir(empty)  # Ray's workers import from here first
    command = ["flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1"]
    superlink = subprocess.Popen(
        [*command, "--port", str(port), "--disable-runtime-dependency-installation"],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
    )
    wait_until(lambda: superlink.poll() is not None or listens(port))
    settings = federation(clients, at_once)
    number = str(flwr("run", str(app), NAME, "--federation-config", settings)["run-id"])
    status = details = ""
    while not status.startswith("finished"):
        call("flwr", "log", number, NAME, output=sys.stderr)  # until the run ends
        # Exit codes do not tell whether it failed; this does.
        [flower_run] = flwr("ls", NAME, "--run-id", number)["runs"]
        status, details = flower_run["status"], flower_run["status-details"]
    if status != COMPLETED:
        raise FedleakError(details.removeprefix(FAILED) or status)


def end_descendants() -> None:
    """Ends all that descends from this process, whichever session it is in."""
    keeper = psutil.Process()
    descendants = keeper.children(recursive=True)
    for process in descendants:
        with suppress(psutil.NoSuchProcess):
            process.terminate()
    psutil.wait_procs(descendants, GRACE_SECONDS)
    while left := keeper.children(recursive=True):
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, POLL_SECONDS)


def flwr(*arguments: str) -> dict[str, Any]:
    """Runs a `flwr` command and returns its answer.

    Raises:
        FedleakError: The command gives no answer, or reports that it failed.
    """
    with tempfile.TemporaryFile("w+") as output:
        call("flwr", *arguments, "--format", "json", output=output)
        output.seek(0)
        return answer_of(arguments[0], output.read())


def call(*command: str, output: IO[str]) -> None:
    """Runs a command to its end."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output)
    wait_until(lambda: process.poll() is not None)


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits; ends this process if the fedleak process closes the pipe first."""
    while not condition():
        if select.select([sys.stdin], [], [], POLL_SECONDS)[0]:
            raise SystemExit(1)


def free_port() -> int:
    """Returns a port of the loopback interface that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def listens(port: int) -> bool:
    """Returns whether somebody listens on a port of the loopback interface."""
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


# --- what Flower is told --------------------------------------------------------------------


def connection(port: int) -> dict[str, Any]:
    """Returns the content of Flower's config.toml."""
    address = {"address": f"127.0.0.1:{port}", "insecure": True}
    return {"superlink": {"default": NAME, NAME: address}}


def thin_app(run_path: Path) -> dict[str, Any]:
    """Returns the content of the pyproject.toml of an app that is made of installed packages."""
    app = {
        "publisher": "fedleak",
        "components": {
            "serverapp": "fedleak.flower.server.app:app",
            "clientapp": "fedleak.flower.client.app:app",
        },
        "config": run_config(run_path, nodes_within=60),
    }
    project = {"name": "fedleak-run", "version": "1", "dependencies": ["flwr>=1.41"]}
    return {"project": project, "tool": {"flwr": {"app": app}}}


def federation(clients: int, at_once: int) -> str:
    """Returns Flower's federation settings: no more Ray workers than can have work."""
    workers = min(at_once, os.cpu_count() or 1)
    return f"num-supernodes={clients} client-resources-num-cpus=1 init-args-num-cpus={workers}"


def environment(folder: Path, run_path: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that keep Flower and Ray to this machine and this folder.

    One more is for the clients, which run on this machine too: where they keep what they trained
    on.
    """
    direct = [given.get("no_proxy", given.get("NO_PROXY", "")), "127.0.0.1", "localhost"]
    return {
        "PATH": search_path(given),
        "FEDLEAK_VAULT": str(run_path.parent),  # fedleak.flower.client.context
        "FLWR_HOME": str(folder / "home"),
        "FLWR_LOG_LEVEL": "INFO",
        "PYTHONUNBUFFERED": "1",  # or the log lacks its end when something is killed
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_ADDRESS": "local",  # or it joins a cluster that it finds on this machine
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on Linux too: Ray listens on loopback only
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # or clients cannot see a GPU
        "no_proxy": ",".join(filter(None, direct)),
    }


if __name__ == "__main__":
    try:
        keep(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    except FedleakError as problem:
        sys.stdout.write(str(problem))
        sys.exit(1)
