"""Follows runs of Flower by its `flwr` command, whose exit status does not tell how a run ended.

`flwr run --stream` ends with 0 whether a run was completed, failed or was stopped. `flwr ls` knows.
"""

import json
import os
import socket
import ssl
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedleak.util.errors import ConfigError, FedleakError, unknown

COMPLETED = "finished:completed"
POLL_SECONDS = 5.0


def run_config(path: Path, *, nodes_within: int) -> dict[str, bool | float | int | str]:
    """Returns the run config of our own engines: the ServerApp trains in a run directory, no more.

    Args:
        path: The run directory.
        nodes_within: Seconds that the ServerApp waits for nodes.
    """
    return {
        "experiment": str(path / "run.json"),
        "run-dir": str(path),
        "attack": False,
        "nodes-within": nodes_within,
        "answers-within": 3600,
    }


class FlowerRun(NamedTuple):
    """A run as `flwr ls` lists it.

    Attributes:
        number: Its id.
        status: Such as `running` or `finished:failed`.
        details: Why it failed, if it did.
    """

    number: str
    status: str
    details: str


def follow(
    superlink: str,
    number: str | None = None,
    report: Callable[[FlowerRun], None] = lambda run: None,
    patience: float = 60.0,
) -> FlowerRun:
    """Waits until a run has ended, and returns how.

    Args:
        superlink: Name of the connection in Flower's configuration.
        number: The number of the run; None: the newest run.
        report: Called with each new status.
        patience: Seconds for which the SuperLink may be unreachable, for example while it restarts.

    Raises:
        ConfigError: The patience is no number of seconds, or there is no such connection or run.
        FedleakError: There is no run, or the SuperLink does not answer.
    """
    if not patience >= 0:
        raise ConfigError(f"--patience {patience}: give seconds, 0 or more")
    reported: FlowerRun | None = None
    heard = time.monotonic()
    while True:
        try:
            current = newest(superlink, number)
        except SilentError as error:
            if (connections := _connections()) and superlink not in connections:
                name = unknown("connection", superlink, connections)
                raise ConfigError(f"{name}: Flower's configuration names them") from error
            if reported is None and number is not None and _answers(superlink):
                raise ConfigError(
                    f"the SuperLink {superlink!r} has no run {number!r}: `flwr ls {superlink}` "
                    "lists its runs"
                ) from error
            if (problem := certificate_problem(superlink)) is not None:
                raise FedleakError(
                    f"the certificate of the SuperLink {superlink!r} is refused ({problem}): give "
                    "it one that holds, and start it and the nodes again"
                ) from error
            if time.monotonic() - heard > patience:
                raise FedleakError(
                    f"the SuperLink {superlink!r} does not answer: {error}: start it again on the "
                    "same database, and give the same `flwr run` again: the run directory goes on "
                    "where it stopped"
                ) from error
        else:
            number, heard = current.number, time.monotonic()
            if current != reported:
                report(current)
            reported = current
            if current.status.startswith("finished"):
                return current
        time.sleep(POLL_SECONDS)


def newest(superlink: str, number: str | None = None) -> FlowerRun:
    """Returns a run; without a number the newest.

    Raises:
        SilentError: The SuperLink does not answer.
        FedleakError: It has no such run.
    """
    wanted = [] if number is None else ["--run-id", number]
    tables = flwr("ls", superlink, *wanted)["runs"]
    if not tables:
        raise FedleakError(f"the SuperLink {superlink!r} has no run: start one with `flwr run`")
    table = max(tables, key=lambda run: str(run.get("pending-at", "")))
    return FlowerRun(str(table["run-id"]), table["status"], table.get("status-details") or "")


class SilentError(FedleakError):
    """A `flwr` command that failed, or gave no answer."""


def _answers(superlink: str) -> bool:
    """Returns whether a SuperLink lists its runs."""
    try:
        flwr("ls", superlink)
    except SilentError:
        return False
    return True


def _connections() -> dict[str, Any]:
    """Returns the connections in Flower's configuration by name; none if it cannot be read."""
    home = Path(os.environ.get("FLWR_HOME", "~/.flwr")).expanduser()
    try:
        tables = tomllib.loads((home / "config.toml").read_text())["superlink"]
    except (OSError, ValueError, KeyError):
        return {}
    return {name: table for name, table in tables.items() if isinstance(table, dict)}


def certificate_problem(superlink: str) -> str | None:
    """Returns why the certificate of a SuperLink is refused, which `flwr` does not report.

    None: it is not refused, or nobody answers.
    """
    try:
        connection = _connections()[superlink]
        return tls_problem(connection["address"], Path(connection["root-certificates"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def tls_problem(address: str, authority: Path) -> str | None:
    """Returns why a certificate is refused; None: it is not.

    Args:
        address: `host:port`.
        authority: Certificates that it must be signed by.

    Raises:
        OSError: Nobody answers.
    """
    host, _, port = address.rpartition(":")
    context = ssl.create_default_context(cafile=authority)
    try:
        with (
            socket.create_connection((host, int(port)), timeout=5) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return None
    except ssl.SSLCertVerificationError as error:
        return error.verify_message


def flwr(*arguments: str) -> dict[str, Any]:
    """Runs a `flwr` command and returns its answer.

    Raises:
        SilentError: The command gives no answer, or reports that it failed.
    """
    try:
        done = subprocess.run(
            ["flwr", *arguments, "--format", "json"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=os.environ | {"PATH": search_path(os.environ)},
        )
    except OSError as error:
        raise SilentError(f"there is no `flwr` beside {sys.executable}") from error
    return answer_of(arguments[0], done.stdout or done.stderr)


def search_path(given: Mapping[str, str]) -> str:
    """Returns the folders of programs: that beside this Python before all others."""
    return os.pathsep.join([sysconfig.get_path("scripts"), given.get("PATH", os.defpath)])


def answer_of(command: str, output: str) -> dict[str, Any]:
    """Returns the JSON that a `flwr` command wrote.

    Raises:
        SilentError: There is no JSON, or it reports that the command failed.
    """
    try:
        answer: dict[str, Any] = json.loads(output)
    except json.JSONDecodeError as error:
        raise SilentError(f"`flwr {command}` gave no answer: {output[-200:]!r}") from error
    if not answer.get("success"):
        reason = answer.get("error-message", output[-200:])
        raise SilentError(f"`flwr {command}` failed: {reason}")
    return answer
