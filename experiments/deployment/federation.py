"""A federation in deployment: a SuperLink with TLS, and SuperNodes that have to show a key.

    python experiments/deployment/federation.py run FOLDER            # all of it, on 127.0.0.1
    python experiments/deployment/federation.py secrets FOLDER NODES  # for docker-compose.yml
    python experiments/deployment/federation.py register SUPERLINK KEY.pub...

`run` starts the processes that docker-compose.yml puts in containers: each node has a folder with
its key, its data and its vault, and sees no other's. Where the machine allows it, a mount
namespace hides the others, and a process namespace ends all that a node has started.
"""

import argparse
import ctypes
import datetime
import ipaddress
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
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from fedleak.flower_runs import tls_problem
from fedleak.notes import notes

APP = Path(__file__).parents[2]
EXPERIMENT = Path(__file__).with_name("federation.toml")
NODES = 4
NAME = "deployment"
"""Of the connection in Flower's configuration, and of the run."""

CLASSES = ("other", "health")
TEXTS = 40
"""Private texts of a node."""

TRIES, ANSWER_SECONDS = 3, 300
"""On a busy machine a reply can be lost: Flower gives up a reply that its database is too busy for.

Then the round fails once the time for answers is up, and another run goes on from there.
"""

VALID_DAYS = 30
START_SECONDS = 60.0
SET_CHILD_SUBREAPER = 36  # from <linux/prctl.h>


# --- secrets --------------------------------------------------------------------------------


def make_certificates(folder: Path, hosts: Sequence[str], days: float = VALID_DAYS) -> None:
    """Writes ca.crt, server.pem and server.key for a SuperLink, if there are none.

    Args:
        folder: Where.
        hosts: Names and addresses by which it is reached.
        days: After which they expire; negative: they have expired.
    """
    if (folder / "server.pem").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    of_ca, of_server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    now = datetime.datetime.now(datetime.UTC)
    begin = now + datetime.timedelta(days=min(0.0, days) - 1)

    def certificate(
        subject: str, key: ec.EllipticCurvePublicKey, extensions: Sequence[x509.ExtensionType]
    ) -> bytes:
        issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fedleak CA")])
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, subject)]))
            .issuer_name(issuer)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(now + datetime.timedelta(days=days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(of_ca.public_key()),
                critical=False,
            )
        )
        for each in extensions:
            made = made.add_extension(each, critical=isinstance(each, x509.BasicConstraints))
        return made.sign(of_ca, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    names = [x509.DNSName(host) if not _is_address(host) else _address(host) for host in hosts]
    ca = [x509.BasicConstraints(ca=True, path_length=None), _usage(signs=True)]
    server: list[x509.ExtensionType] = [
        x509.BasicConstraints(ca=False, path_length=None),
        x509.SubjectAlternativeName(names),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        _usage(signs=False),
    ]
    _write(folder / "ca.crt", certificate("fedleak CA", of_ca.public_key(), ca), 0o644)
    _write(
        folder / "server.key",
        of_server.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        ),
    )
    # Last: what is there is whole.
    _write(folder / "server.pem", certificate("superlink", of_server.public_key(), server), 0o644)


def make_key(path: Path) -> None:
    """Writes the key of a SuperNode and, beside it, its public half, if there is none."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    _write(path.with_suffix(".pub"), public + b"\n", 0o644)
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    _write(path, private)


def make_secrets(folder: Path, nodes: int) -> None:
    """Writes a folder of secrets for the SuperLink and one for each node; what is there stays."""
    make_certificates(folder / "superlink", ["superlink", "localhost", "127.0.0.1"])
    authority = (folder / "superlink" / "ca.crt").read_bytes()
    for node in range(nodes):
        make_key(folder / f"node-{node}" / "key")
        _write(folder / f"node-{node}" / "ca.crt", authority, 0o644)
        public = (folder / f"node-{node}" / "key.pub").read_bytes()
        _write(folder / "superlink" / f"node-{node}.pub", public, 0o644)


def make_data(path: Path, client: int) -> None:
    """Writes the private texts of a client, which no other has."""
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    # The server holds out the first of all notes.
    own = notes(1000)[200 + client * TEXTS :][:TEXTS]
    rows = [json.dumps({"text": note.text, "label": CLASSES[note.label]}) for note in own]
    _write(path, ("\n".join(rows) + "\n").encode())


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


def _address(host: str) -> x509.IPAddress:
    return x509.IPAddress(ipaddress.ip_address(host))


def _write(path: Path, content: bytes, mode: int = 0o600) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
        file.write(content)


# --- processes ------------------------------------------------------------------------------


class Federation:
    """A SuperLink and SuperNodes on 127.0.0.1, each with a folder of its own.

    Attributes:
        folder: Of all: `server`, `operator` and `node-0` and so on.
        nodes: How many nodes.
        run: The run directory, which is the server's.
    """

    def __init__(self, folder: Path, nodes: int = NODES, *, days: float = VALID_DAYS) -> None:
        self.folder, self.nodes = folder.absolute(), nodes
        self.server = self.folder / "server"
        self.run = self.server / "runs" / NAME
        self.apart = _can_be_apart()
        self._ports = _free_ports(nodes + 1)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        make_certificates(self.server / "secrets", ["localhost", "127.0.0.1"], days)
        authority = (self.server / "secrets" / "ca.crt").read_bytes()
        for node in range(nodes):
            make_key(self.node(node) / "key")
            make_data(self.node(node) / "data.jsonl", node)
            (self.node(node) / "vault").mkdir(mode=0o700, exist_ok=True)
            _write(self.node(node) / "ca.crt", authority, 0o644)
        home = self.folder / "operator"
        connection = {
            "address": f"127.0.0.1:{self._ports[0]}",
            "root-certificates": str(self.server / "secrets" / "ca.crt"),
        }
        _write(
            home / "config.toml",
            tomli_w.dumps({"superlink": {"default": NAME, NAME: connection}}).encode(),
        )

    def node(self, number: int) -> Path:
        """Returns the folder of a node."""
        return self.folder / f"node-{number}"

    def start_superlink(self, seconds: float = START_SECONDS) -> None:
        """Starts the SuperLink, and waits until it is healthy, for so many seconds.

        Raises:
            SystemExit: It is not.
        """
        secrets = self.server / "secrets"
        self._start(
            "superlink",
            self.server,
            [
                "flower-superlink",
                "--host=127.0.0.1",
                f"--port={self._ports[0]}",
                f"--ssl-ca-certfile={secrets / 'ca.crt'}",
                f"--ssl-certfile={secrets / 'server.pem'}",
                f"--ssl-keyfile={secrets / 'server.key'}",
                "--enable-supernode-auth",
                "--disable-runtime-dependency-installation",
                f"--database={self.server / 'state.db'}",
            ],
        )
        deadline = time.monotonic() + seconds
        while not self.healthy():
            if (problem := self._certificate_problem()) is not None:
                raise SystemExit(f"the SuperLink's certificate is refused: {problem}")
            if self._processes["superlink"].poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the SuperLink did not start: {self.log('superlink')}")
            time.sleep(0.2)

    def healthy(self) -> bool:
        """Returns whether the SuperLink answers, and shows a certificate that holds."""
        context = ssl.create_default_context(cafile=str(self.server / "secrets" / "ca.crt"))
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        with suppress(OSError):
            address = f"https://127.0.0.1:{self._ports[0]}/health"
            return bool(opener.open(address, timeout=5).status == 200)
        return False

    def _certificate_problem(self) -> str | None:
        with suppress(OSError):
            return tls_problem(f"127.0.0.1:{self._ports[0]}", self.server / "secrets" / "ca.crt")
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
            own,
            [
                "flower-supernode",
                f"--superlink=127.0.0.1:{self._ports[0]}",
                f"--root-certificates={own / 'ca.crt'}",
                f"--auth-supernode-private-key={own / 'key'}",
                f"--port={self._ports[1 + node]}",
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

    def submit(self, **settings: object) -> str:
        """Starts a run, and returns its id."""
        config = {"experiment": str(EXPERIMENT), "run-dir": str(self.run)} | settings
        chosen = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        done = self.flwr("run", str(APP), NAME, "--run-config", chosen, "--format", "json")
        return str(json.loads(done)["run-id"])

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
        """Ends all: nodes before the SuperLink, and what each has started."""
        for name in sorted(self._processes, key=lambda name: name == "superlink"):
            process = self._processes[name]
            with suppress(psutil.NoSuchProcess):
                _end([psutil.Process(process.pid)], signal.SIGTERM)
            process.wait()
        self._processes.clear()
        _end(psutil.Process().children(), signal.SIGKILL)  # orphans, on Linux

    def _start(self, name: str, own: Path, command: Sequence[str]) -> None:
        empty, log = own / "empty", self.folder / f"{name}.log"
        empty.mkdir(parents=True, exist_ok=True)  # what lies there would shadow the app
        hidden = [path for path in self._folders() if path != own]
        started = _alone(command, hidden) if self.apart else list(command)
        with open(log, "ab") as output:
            self._processes[name] = subprocess.Popen(
                started,
                cwd=empty,
                env=_environment(own / "home"),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _folders(self) -> Iterator[Path]:
        yield self.server
        yield self.folder / "operator"
        yield from (self.node(node) for node in range(self.nodes))

    def _call(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=self.folder,
            env={**_environment(self.folder / "operator"), "PYTHONPATH": str(APP)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )


def _environment(home: Path) -> Mapping[str, str]:
    """Returns the variables of a process: it asks no other machine for anything."""
    return os.environ | {
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "no_proxy": "127.0.0.1,localhost",
    }


_ALONE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
"""Puts a command into namespaces of its own; all that it starts ends with it."""


def _can_be_apart() -> bool:
    """Returns whether this machine lets us make namespaces."""
    with suppress(OSError):
        return subprocess.run([*_ALONE, "true"], capture_output=True, check=False).returncode == 0
    return False


def _alone(command: Sequence[str], hidden: Sequence[Path]) -> list[str]:
    """Returns a command that runs where these folders are empty."""
    cover = [
        shlex.join(["mount", "-t", "tmpfs", "-o", "ro,size=4k", "none", str(path)])
        for path in hidden
        if path.exists()
    ]
    return [*_ALONE, "sh", "-c", " && ".join([*cover, f"exec {shlex.join(command)}"])]


def _free_ports(count: int) -> list[int]:
    """Returns ports of the loopback interface that nobody listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _end(processes: Sequence[psutil.Process], how: signal.Signals, grace: float = 5.0) -> None:
    """Ends processes with all that descends from them."""
    all_of_them = list(processes)
    for each in processes:
        with suppress(psutil.NoSuchProcess):
            all_of_them += each.children(recursive=True)
    for each in all_of_them:
        with suppress(psutil.NoSuchProcess):
            each.send_signal(how)
    _, left = psutil.wait_procs(all_of_them, grace)
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(left, grace)


@contextmanager
def federation(
    folder: Path, nodes: int = NODES, *, days: float = VALID_DAYS
) -> Iterator[Federation]:
    """Yields a federation of which nothing runs yet; ends all of it afterwards."""
    if sys.platform == "linux":  # orphans become our children, so that we can end them
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    made = Federation(folder, nodes, days=days)
    try:
        yield made
    finally:
        # Whoever asks once more must not cut this short.
        asked = {
            each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGTERM)
        }
        made.end()
        for each, handler in asked.items():
            signal.signal(each, handler)


# --- commands -------------------------------------------------------------------------------


def run(folder: Path) -> int:
    """Trains, attacks, scores and reports; returns an exit status."""
    if folder.exists():
        print(f"{str(folder)!r} exists: name a folder that does not", file=sys.stderr)
        return 2
    began = time.monotonic()

    def say(what: str) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {what}", flush=True)

    with federation(folder) as made:
        kept = "mount and process namespaces" if made.apart else "separate folders only"
        say(f"certificates, {made.nodes} keys and {made.nodes} data files: {made.folder} ({kept})")
        made.start_superlink()
        say("the SuperLink listens on 127.0.0.1 with TLS")
        for node in range(made.nodes):
            made.register(node)
            made.start_node(node)
        say(f"{made.nodes} SuperNodes with registered keys")
        for _ in range(TRIES):
            number = made.submit(**{"answers-within": ANSWER_SECONDS})
            say(f"run {number}: training and attacks")
            _, told = made.watch(number)
            print(told, end="")
            if finished := _finished(made.run):
                break
            say("that failed; the same again goes on where it stopped")
        if not finished:
            return 1
        say("the run is finished, and the truth is in the nodes' vaults: their owners hand it over")
        vaults = [f"--vault={made.node(node) / 'vault'}" for node in range(made.nodes)]
        status, told = made.fedleak("score", str(made.run), *vaults)
        print(told, end="")
        if status:
            return status
        status, told = made.fedleak("report", str(made.run))
        print(told, end="")
        say("done")
        return status


def _finished(run: Path) -> bool:
    file = run / "run.json"
    return file.exists() and bool(json.loads(file.read_text())["status"] == "finished")


def register(superlink: str, keys: Sequence[Path]) -> int:
    """Registers public keys with a SuperLink; those that are registered stay so."""
    for key in keys:
        done = subprocess.run(
            ["flwr", "supernode", "register", str(key), superlink],
            capture_output=True,
            text=True,
            check=False,
        )
        told = done.stdout + done.stderr
        if done.returncode and "already" not in told:
            print(f"{key}: {told}", file=sys.stderr)
            return 1
        print(f"{key}: registered")
    return 0


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    whole = commands.add_parser("run")
    whole.add_argument("folder", type=Path)
    secrets = commands.add_parser("secrets")
    secrets.add_argument("folder", type=Path)
    secrets.add_argument("nodes", type=int)
    registering = commands.add_parser("register")
    registering.add_argument("superlink")
    registering.add_argument("keys", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "secrets":
        make_secrets(given.folder, given.nodes)
        for node in range(given.nodes):
            make_data(given.folder / f"node-{node}" / "data.jsonl", node)
        return 0
    if given.command == "register":
        return register(given.superlink, given.keys)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return run(given.folder)


if __name__ == "__main__":
    sys.exit(main())
