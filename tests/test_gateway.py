"""The parts of a federation in deployment that keep strangers out, without starting one."""

import asyncio
import hashlib
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import credentials
import federation
import gateway
import httpx
import pytest
import yaml
from flwr.cli.build import build_fab_from_disk
from flwr.common.serde import fab_from_proto
from flwr.proto.fab_pb2 import Fab as FabMessage
from flwr.proto.fab_pb2 import GetFabResponse
from flwr.supercore.routers.runtime import router as runtime
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.superlink.routers.control import router as control
from flwr.superlink.routers.fleet.router import router as fleet
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode
from flwr.supernode.start_client_internal import _verify_fab

APP = """
project = {name = "small", version = "1.0.0"}
tool.flwr.app = {publisher = "p", components = {serverapp = "app:server", clientapp = "app:client"}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a server machine."""
    folder = tmp_path_factory.mktemp("server") / "all"
    credentials.make_server(folder, ["server.example"])
    return folder


def answers(server: Path, method: str, paths: Iterable[str]) -> dict[str, httpx.Response]:
    """Returns what a node is answered, by path; the SuperLink behind the gateway is away."""
    app = gateway.gateway("127.0.0.1:1", server / "gateway" / "ca.crt", server)

    async def ask() -> dict[str, httpx.Response]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="https://gateway") as client:
            return {path: await client.request(method, path) for path in paths}

    return asyncio.run(ask())


def test_flowers_fleet_api_is_handed_on_and_nothing_else(server: Path) -> None:
    handed_on = answers(server, "POST", [route.path for route in fleet.routes])
    assert "/v1/fleet/pull-messages" in handed_on
    for answer in handed_on.values():
        assert (answer.status_code, answer.text[:30]) == (503, "the SuperLink does not answer:")
    others = [*control.routes, *runtime.routes]
    assert len(others) > 40
    refused = answers(server, "POST", [route.path for route in others])
    assert {answer.status_code for answer in refused.values()} == {404}


def test_no_spelling_of_a_path_leads_elsewhere(server: Path) -> None:
    spellings = [
        "/",
        "/docs",
        "/openapi.json",
        "//v1/control/list-nodes",
        "/v1/fleet/%2e%2e/control/list-nodes",
        "/v1/fleet/..%2fcontrol%2flist-nodes",
        "/v1/fleet/get-run%0a",
        "/v1/fleet/get-run/../../control/list-nodes",
        "/health/../v1/control/list-nodes",
        "/v1/control/list-nodes?/v1/fleet/get-run",
    ]
    refused = answers(server, "GET", spellings)
    assert [path for path in spellings if refused[path].status_code != 404] == []


@pytest.fixture
def app(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(APP)
    (folder / "app.py").write_text("client = server = None\n")
    return folder


def delivered(app: Path, signatures: Path) -> Any:
    """Returns an app as a node gets it through the gateway."""
    content = build_fab_from_disk(app)
    bundle = FabMessage(hash_str=hashlib.sha256(content).hexdigest(), content=content)
    answer = GetFabResponse(fab=bundle).SerializeToString()
    return fab_from_proto(GetFabResponse.FromString(gateway.signed(answer, signatures)).fab)


def test_a_node_takes_the_operators_app_and_no_other(
    server: Path, app: Path, tmp_path: Path
) -> None:
    trusted = yaml.safe_load((server / "nodes" / "trusted.yaml").read_text())
    assert not _verify_fab(delivered(app, tmp_path), trusted)
    credentials.make_signing_key(tmp_path / "strangers")
    credentials.sign(app, tmp_path / "strangers", tmp_path)
    assert not _verify_fab(delivered(app, tmp_path), trusted)
    file = credentials.sign(app, server / "operator" / "signing", tmp_path)
    assert _verify_fab(delivered(app, tmp_path), trusted)
    (app / "app.py").write_text("client = server = 'changed'\n")
    assert not _verify_fab(delivered(app, tmp_path), trusted)
    changed = hashlib.sha256(build_fab_from_disk(app)).hexdigest()
    file.rename(tmp_path / f"{changed}.json")
    assert not _verify_fab(delivered(app, tmp_path), trusted)


def test_each_process_has_what_it_needs_and_no_more(server: Path) -> None:
    files = {folder.name: {path.name for path in folder.iterdir()} for folder in server.iterdir()}
    assert files == {
        "ca": {"ca.key", "ca.crt"},
        "superlink": {"ca.crt", "server.pem", "server.key"},
        "gateway": {"ca.crt", "server.pem", "server.key"},
        "operator": {"ca.crt", "signing", "signing.pub"},
        "nodes": {"ca.crt", "trusted.yaml"},
    }
    keys = [server / "superlink" / "server.key", server / "gateway" / "server.key"]
    assert keys[0].read_bytes() != keys[1].read_bytes()


def test_private_files_are_their_owners_alone(server: Path) -> None:
    public = {"ca.crt", "server.pem", "signing.pub", "trusted.yaml"}
    for path in server.rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o644 if path.name in public else 0o600), path


def test_certificates_are_renewed_and_keys_stay(server: Path) -> None:
    before = {path: path.read_bytes() for path in server.rglob("*") if path.is_file()}
    credentials.make_server(server, ["server.example"])
    changed = {
        str(path.relative_to(server)) for path in before if path.read_bytes() != before[path]
    }
    assert changed == {
        f"{process}/{file}"
        for process in ("superlink", "gateway")
        for file in ("server.key", "server.pem")
    }


def test_every_process_is_told_what_keeps_strangers_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: dict[str, tuple[list[Path], list[str]]] = {}

    def start(self: Any, name: str, own: list[Path], command: list[str], *_: object) -> None:
        started[name] = own, command

    monkeypatch.setattr(federation, "_can_be_apart", lambda: False)
    monkeypatch.setattr(federation.Federation, "_start", start)
    monkeypatch.setattr(federation.Federation, "healthy", lambda self: True)
    parties = federation.Federation(tmp_path / "all", 2)
    parties.start_superlink()
    parties.start_node(1)
    superlink = _parse_args_run_superlink().parse_args(started["superlink"][1][1:])
    assert (superlink.host, superlink.enable_supernode_auth) == ("127.0.0.1", True)
    assert not superlink.insecure
    node = _parse_args_run_supernode().parse_args(started["node-1"][1][1:])
    assert node.superlink == parties.address != f"127.0.0.1:{superlink.port}"
    assert node.trusted_entities == parties.node(1) / "trusted.yaml"
    assert node.host == "127.0.0.1"
    for own, command in started.values():
        named = [Path(word.partition("=")[2]) for word in command if str(tmp_path) in word]
        assert all(
            any(path.is_relative_to(folder) for folder in own)
            for path in named
            if path.is_absolute()
        )
    for path in (parties.folder, *parties.folder.iterdir()):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for path in (parties.node(1) / "data.jsonl", parties.node(1) / "key"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
