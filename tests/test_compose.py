"""docker-compose.yml: its shape by the compose specification, its commands by Flower's parsers.

No container is started: machines that run these tests have no engine.
"""

import argparse
import importlib.resources
import json
import runpy
import shlex
import stat
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from flwr.common.config import parse_config_args
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

ROOT = Path(__file__).parents[1]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
NODES = [f"node-{number}" for number in range(4)]


@pytest.fixture(scope="module")
def federation() -> SimpleNamespace:
    return SimpleNamespace(
        **runpy.run_path(str(ROOT / "experiments" / "deployment" / "federation.py"))
    )


def schema() -> Any:
    pytest.importorskip("check_jsonschema", reason="brings the schema of the compose specification")
    folder = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    return json.loads((folder / "compose-spec.json").read_text())


def errors(compose: Any) -> list[str]:
    import jsonschema

    validator = jsonschema.validators.validator_for(schema())(schema())
    return [error.message for error in validator.iter_errors(compose)]


def test_the_file_has_the_shape_of_the_compose_specification() -> None:
    assert errors(COMPOSE) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"helthcheck": {}},
        {"depends_on": {"superlink": {"condition": "service_well"}}},
        {"volumes": "node-0"},
    ],
)
def test_the_schema_sees_mistakes(wrong: dict[str, Any]) -> None:
    services = SERVICES | {"node-0": SERVICES["node-0"] | wrong}
    assert errors(COMPOSE | {"services": services})


def parsed(parser: argparse.ArgumentParser, service: str, program: str) -> argparse.Namespace:
    command = SERVICES[service]["command"]
    assert command[0] == program
    return parser.parse_args(command[1:])


def test_flower_takes_the_command_of_the_superlink() -> None:
    given = parsed(_parse_args_run_superlink(), "superlink", "flower-superlink")
    assert (given.host, given.enable_supernode_auth) == ("0.0.0.0", True)
    assert given.ssl_certfile == "/secrets/server.pem"
    assert not given.insecure


@pytest.mark.parametrize("node", NODES)
def test_flower_takes_the_command_of_a_node_which_has_its_own_data_and_vault(node: str) -> None:
    given = parsed(_parse_args_run_supernode(), node, "flower-supernode")
    assert (given.superlink, given.insecure) == ("superlink:8000", None) or not given.insecure
    assert given.auth_supernode_private_key == "/node/key"
    assert parse_config_args([given.node_config]) == {
        "partition-id": int(node[-1]),
        "num-partitions": 4,
        "data": "/node/data.jsonl",
        "vault": "/node/vault",
    }
    assert SERVICES[node]["volumes"] == [f"{node}:/node"]


def test_the_parsers_see_mistakes() -> None:
    for parser, wrong in (
        (_parse_args_run_superlink(), "--enable-supernode-autentication"),
        (_parse_args_run_supernode(), "--plugin-type=x"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args([wrong])


def test_the_operator_sets_what_the_app_declares() -> None:
    shell = SERVICES["operator"]["command"][-1]
    submit, watch = (shlex.split(part) for part in shell.split("&&"))
    assert submit[:4] == ["flwr", "run", "/app", "deployment"]
    chosen = parse_config_args([submit[submit.index("--run-config") + 1]])
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert chosen.keys() <= declared.keys()
    assert (ROOT / str(chosen["experiment"]).removeprefix("/app/")).is_file()
    assert watch == ["fedleak", "watch", "deployment"]
    config = tomllib.loads(COMPOSE["configs"]["flower"]["content"])
    assert config["superlink"]["default"] == "deployment"


def test_every_volume_of_a_service_is_declared_and_no_other() -> None:
    used = {
        str(volume).partition(":")[0]
        for service in SERVICES.values()
        for volume in service.get("volumes", ())
    }
    named = {name for name in used if not name.startswith((".", "$"))}
    assert named == COMPOSE["volumes"].keys()


def test_only_who_must_sees_the_volume_of_a_node() -> None:
    for node in NODES:
        having = {
            name
            for name, service in SERVICES.items()
            if any(str(volume).startswith(f"{node}:") for volume in service.get("volumes", ()))
        }
        assert having == {node, "secrets", "handover"}


def test_services_that_stay_restart_reap_and_say_whether_they_are_well() -> None:
    for name in ("superlink", *NODES):
        service = SERVICES[name]
        assert (service["restart"], service["init"]) == ("unless-stopped", True)
        assert "healthcheck" in service
    assert "entrypoint" not in SERVICES["fedleak"]  # fedleak run, as ever


def test_secrets_are_whole_private_and_made_once(federation: Any, tmp_path: Path) -> None:
    federation.make_secrets(tmp_path, 2)
    files = {str(path.relative_to(tmp_path)): path for path in tmp_path.rglob("*.*")}
    assert {"superlink/ca.crt", "superlink/server.pem", "superlink/node-1.pub"} <= files.keys()
    for name in ("superlink/server.key", "node-0/key"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    assert not list((tmp_path / "superlink").glob("key"))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    federation.make_secrets(tmp_path, 2)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_no_two_nodes_have_the_same_texts(federation: Any, tmp_path: Path) -> None:
    texts = []
    for client in range(4):
        federation.make_data(tmp_path / f"{client}.jsonl", client)
        texts += (tmp_path / f"{client}.jsonl").read_text().splitlines()
    assert len({json.loads(text)["text"] for text in texts}) == len(texts) == 160
