"""A federation in deployment on 127.0.0.1, without containers.

    python experiments/deployment/federation.py FOLDER

It starts a SuperLink, a gateway and SuperNodes: what server.yml and node.yml put in containers.
Each has a folder with its own files. Nodes reach the gateway alone, and run only what the operator
has signed. Where the machine allows it, a mount namespace hides the other folders, a network
namespace hides the SuperLink, and a process namespace ends all that a process has started.
"""

import argparse
import ctypes
import json
import os
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import tomli_w
from credentials import VALID_DAYS, make_data, make_node_key, make_server, sign, write

from fedleak.flower.runs import tls_problem

APP = Path(__file__).parents[2]
EXPERIMENT = Path(__file__).with_name("federation.toml")
NODES = 4
NAME = "deployment"
"""Of the connection in Flower's configuration, and of the run."""

TRIES, ANSWER_SECONDS = 3, 300
"""On a busy machine a reply can be lost: Flower gives up a reply that its database is too busy for.

Then the round fails once the time for answers is up, and another run goes on from there.
"""

START_SECONDS = 60.0
SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>


class Federation:
    """A SuperLink, a gateway and SuperNodes on 127.0.0.1, each with a folder of its own.

    Attributes:
        folder: Of all: those of `credentials.make_server`, `server`, `node-0` and so on.
        nodes: How many nodes.
        server: The SuperLink's files.
        run: The run directory, which is the server's.
        apart: Whether namespaces keep the processes from each other's files, and strangers on this
            machine from the SuperLink.
    """

    def __init__(self, folder: Path, nodes: int = NODES, *, days: float = VALID_DAYS) -> None:
        self.folder, self.nodes = folder.absolute(), nodes
        self.server = self.folder / "server"
        self.run = self.server / "runs" / NAME
        self.apart = _can_be_apart()
        self._superlink, self._gateway, *self._ports = _free_ports(nodes + 2)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_server(self.folder, ["localhost"], days)
        for node in range(nodes):
            make_node_key(self.node(node) / "key")
            make_data(self.node(node) / "data.jsonl", node)
            (self.node(node) / "vault").mkdir(mode=0o700, exist_ok=True)
            for file in (self.folder / "nodes").iterdir():
                write(self.node(node) / file.name, file.read_bytes(), 0o644)
        connection = {
            "address": f"127.0.0.1:{self._superlink}",
            "root-certificates": str(self.operator / "ca.crt"),
        }
        config = tomli_w.dumps({"superlink": {"default": NAME, NAME: connection}})
        write(self.operator / "config.toml", config.encode())

    @property
    def operator(self) -> Path:
        """The operator's folder, with the key that signs apps."""
        return self.folder / "operator"

    @property
    def address(self) -> str:
        """Where nodes reach the gateway."""
        return f"127.0.0.1:{self._gateway}"

    def node(self, number: int) -> Path:
        """Returns the folder of a node."""
        return self.folder / f"node-{number}"

    def start_superlink(self, seconds: float = START_SECONDS) -> None:
        """Starts the SuperLink and the gateway, and waits until both answer, for so many seconds.

        Raises:
            SystemExit: They do not.
        """
        if not self.alive("gateway"):
            self._start_gateway()
        secrets = self.folder / "superlink"
        self._start(
            "superlink",
            [self.server, secrets],
            [
                "flower-superlink",
                "--host=127.0.0.1",
                f"--port={self._superlink}",
                f"--ssl-ca-certfile={secrets / 'ca.crt'}",
                f"--ssl-certfile={secrets / 'server.pem'}",
                f"--ssl-keyfile={secrets / 'server.key'}",
                "--enable-supernode-auth",
                "--disable-runtime-dependency-installation",
                f"--database={self.server / 'state.db'}",
            ],
            self._server_network(),
        )
        deadline = time.monotonic() + seconds
        while not self.healthy():
            if (problem := self._certificate_problem()) is not None:
                raise SystemExit(f"the gateway's certificate is refused: {problem}")
            if not self.alive("superlink") or time.monotonic() > deadline:
                raise SystemExit(f"the SuperLink did not start: {self.log('superlink')}")
            time.sleep(0.2)

    def _start_gateway(self) -> None:
        """Starts the gateway, whose network namespace the SuperLink and the operator share.

        It listens outside of it, on a socket made here: only so can nodes reach anything inside.
        """
        secrets = self.folder / "gateway"
        with socket.create_server(("127.0.0.1", self._gateway)) as listener:
            self._start(
                "gateway",
                [secrets],
                [
                    sys.executable,
                    str(Path(__file__).with_name("gateway.py")),
                    f"--superlink=127.0.0.1:{self._superlink}",
                    f"--secrets={secrets}",
                    f"--signatures={secrets / 'signatures'}",
                    f"--fd={listener.fileno()}",
                ],
                ["unshare", "--net"] if self.apart else [],
                listener.fileno(),
            )
        if self.apart:
            while os.readlink(self._network()) == os.readlink("/proc/self/ns/net"):
                time.sleep(0.01)
            subprocess.run([*self._server_network(), *_LOOPBACK_UP], check=True)

    def _network(self) -> str:
        return f"/proc/{self._processes['gateway'].pid}/ns/net"

    def _server_network(self) -> list[str]:
        """Returns what puts a command where it can reach the SuperLink."""
        return (
            ["nsenter", f"--net={self._network()}"] if self.alive("gateway") and self.apart else []
        )

    def healthy(self) -> bool:
        """Returns whether the SuperLink answers, and shows a certificate that holds."""
        context = ssl.create_default_context(cafile=str(self.operator / "ca.crt"))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with suppress(OSError):
            return bool(opener.open(f"https://{self.address}/health", timeout=5).status == 200)
        return False

    def _certificate_problem(self) -> str | None:
        with suppress(OSError):
            return tls_problem(self.address, self.operator / "ca.crt")
        return None

    def register(self, node: int) -> None:
        """Lets a node take part."""
        self.flwr("supernode", "register", str(self.node(node) / "key.pub"), NAME)

    def start_node(self, node: int) -> None:
        """Starts a SuperNode."""
        own = self.node(node)
        config = {
            "partition-id": str(node),
            "num-partitions": str(self.nodes),
            "data": json.dumps(str(own / "data.jsonl")),
            "vault": json.dumps(str(own / "vault")),
        }
        self._start(
            f"node-{node}",
            [own],
            [
                "flower-supernode",
                f"--superlink={self.address}",
                f"--root-certificates={own / 'ca.crt'}",
                f"--auth-supernode-private-key={own / 'key'}",
                f"--trusted-entities={own / 'trusted.yaml'}",
                f"--port={self._ports[node]}",
                "--node-config=" + " ".join(f"{key}={value}" for key, value in config.items()),
            ],
        )

    def alive(self, name: str) -> bool:
        """Returns whether the SuperLink or a node is running."""
        return name in self._processes and self._processes[name].poll() is None

    def kill(self, name: str) -> None:
        """Ends the SuperLink or a node with all that it has started, without a warning."""
        process = self._processes.pop(name)
        _end([psutil.Process(process.pid)] if process.poll() is None else [], signal.SIGKILL)
        process.wait()

    def submit(self, app: Path = APP, **settings: object) -> str:
        """Signs an app and starts a run of it; returns the run's id."""
        ours = {"experiment": str(EXPERIMENT), "run-dir": str(self.run)} if app == APP else {}
        sign(app, self.operator / "signing", self.folder / "gateway" / "signatures")
        return self.submit_unsigned(app, **(ours | settings))

    def submit_unsigned(self, app: Path, **settings: object) -> str:
        """Starts a run of an app as it is; returns the run's id."""
        chosen = " ".join(f"{key}={json.dumps(value)}" for key, value in settings.items())
        answer = self.flwr("run", str(app), NAME, "--run-config", chosen, "--format", "json")
        return str(json.loads(answer)["run-id"])

    def watch(self, number: str, patience: float = 60.0) -> tuple[int, str]:
        """Waits for the end of a run; returns the exit status, and the last line."""
        return self.fedleak("watch", NAME, "--run-id", number, "--patience", str(patience))

    def flwr(self, *arguments: str) -> str:
        """Calls `flwr` as the operator.

        Raises:
            SystemExit: It failed.
        """
        done = self._call(["flwr", *arguments])
        if done.returncode:
            raise SystemExit(f"`flwr {shlex.join(arguments)}` failed: {done.stdout}{done.stderr}")
        return done.stdout

    def fedleak(self, *arguments: str) -> tuple[int, str]:
        """Calls fedleak as the operator; returns its exit status and all that it says."""
        done = self._call([sys.executable, "-m", "fedleak", *arguments])
        return done.returncode, done.stdout + done.stderr

    def log(self, name: str) -> str:
        """Returns the end of what the SuperLink or a node has said."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]

    def end(self) -> None:
        """Ends all, nodes first, and what each has started."""
        for name in sorted(self._processes, reverse=True, key=lambda name: name.startswith("node")):
            process = self._processes[name]
            with suppress(psutil.NoSuchProcess):
                _end([psutil.Process(process.pid)], signal.SIGTERM)
            process.wait()
        self._processes.clear()
        _end(psutil.Process().children(), signal.SIGKILL)  # orphans, on Linux

    def _start(
        self,
        name: str,
        own: Sequence[Path],
        command: Sequence[str],
        network: Sequence[str] = (),
        *descriptors: int,
    ) -> None:
        """Starts a process that sees its own folders, and works in the first of them."""
        empty = own[0] / "empty"  # what lies in the current folder would shadow the app
        empty.mkdir(mode=0o700, parents=True, exist_ok=True)
        hidden = [path for path in self.folder.iterdir() if path.is_dir() and path not in own]
        with open(self.folder / f"{name}.log", "ab", opener=_private) as output:
            self._processes[name] = subprocess.Popen(
                [*network, *(_alone(command, hidden) if self.apart else command)],
                cwd=empty,
                env=_environment(own[0] / "home"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=descriptors,
                umask=0o077,
            )

    def _call(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self._server_network(), *command],
            cwd=self.folder,
            env={**_environment(self.operator), "PYTHONPATH": str(APP)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            umask=0o077,
        )


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _environment(home: Path) -> Mapping[str, str]:
    """Returns the variables of a process: it asks no other machine for anything."""
    return os.environ | {
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
        "FLWR_HOME": str(home),
        "FLWR_LOG_LEVEL": "INFO",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "no_proxy": "127.0.0.1,localhost",
    }


_ALONE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""Puts a command into namespaces of its own; all that it starts ends with it."""

_LOOPBACK_UP = ["ip", "link", "set", "lo", "up"]


def _can_be_apart() -> bool:
    """Returns whether this machine lets us make namespaces."""
    with suppress(OSError):
        command = [*_ALONE, "--net", *_LOOPBACK_UP]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    return False


def _alone(command: Sequence[str], hidden: Sequence[Path]) -> list[str]:
    """Returns a command that runs where these folders are empty."""
    cover = [
        shlex.join(["mount", "-t", "tmpfs", "-o", "ro,size=4k", "none", str(path)])
        for path in hidden
    ]
    return [*_ALONE, "sh", "-c", " && ".join([*cover, f"exec {shlex.join(command)}"])]


def _free_ports(count: int) -> list[int]:
    """Returns ports of the loopback interface that nobody listens on."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def _end(processes: Sequence[psutil.Process], how: signal.Signals, grace: float = 5.0) -> None:
    """Ends processes with all that descends from them."""
    family = list(processes)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            family += process.children(recursive=True)
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(how)
    _, left = psutil.wait_procs(family, grace)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, grace)


@contextmanager
def federation(
    folder: Path, nodes: int = NODES, *, days: float = VALID_DAYS
) -> Iterator[Federation]:
    """Yields a federation of which nothing runs yet; ends all of it afterwards."""
    if sys.platform == "linux":  # orphans become our children, so that we can end them
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    parties = Federation(folder, nodes, days=days)
    try:
        yield parties
    finally:
        # Whoever asks once more must not cut this short.
        handlers = {
            number: signal.signal(number, signal.SIG_IGN)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        parties.end()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def run(folder: Path) -> int:
    """Trains, attacks, scores and reports; returns an exit status."""
    if folder.exists():
        print(f"{str(folder)!r} exists: name a folder that does not", file=sys.stderr)
        return 2
    began = time.monotonic()

    def say(sentence: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {sentence}", flush=True)

    with federation(folder) as parties:
        say(f"certificates, {parties.nodes} keys and {parties.nodes} data files: {parties.folder}")
        if not parties.apart:
            say("no namespaces here: whoever has an account on this machine reaches the SuperLink")
        parties.start_superlink()
        say(f"the SuperLink is up; nodes reach it at {parties.address}, with TLS")
        for node in range(parties.nodes):
            parties.register(node)
            parties.start_node(node)
        say(f"{parties.nodes} SuperNodes with registered keys")
        for _ in range(TRIES):
            number = parties.submit(APP, **{"answers-within": ANSWER_SECONDS})
            say(f"run {number}: training and attacks")
            _, output = parties.watch(number)
            print(output, end="")
            if finished := _finished(parties.run):
                break
            say("that failed; the same again goes on where it stopped")
        if not finished:
            return 1
        say("the run is finished, and the truth is in the nodes' vaults: their owners hand it over")
        vaults = [f"--vault={parties.node(node) / 'vault'}" for node in range(parties.nodes)]
        for command in (["score", str(parties.run), *vaults], ["report", str(parties.run)]):
            status, output = parties.fedleak(*command)
            print(output, end="")
            if status:
                return status
        say("done")
        return 0


def _finished(run: Path) -> bool:
    file = run / "run.json"
    return file.exists() and bool(json.loads(file.read_text())["status"] == "finished")


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return run(parser.parse_args().folder)


if __name__ == "__main__":
    sys.exit(main())
