"""The compose files: their shape by the specification, their commands by Flower's parsers.

No container is started: machines that run these tests have no engine.
"""

import argparse
import importlib.resources
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from flwr.common.config import parse_config_args
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

ROOT = Path(__file__).parents[1]
DEPLOYMENT = ROOT / "experiments" / "deployment"
FILES = {
    path.name: yaml.safe_load(path.read_text())
    for path in (ROOT / "docker-compose.yml", *sorted(DEPLOYMENT.glob("*.yml")))
}
SERVER: dict[str, dict[str, Any]] = FILES["server.yml"]["services"]
NODE: dict[str, dict[str, Any]] = FILES["node.yml"]["services"]
IMAGE: dict[str, Any] = FILES["image.yml"]["services"]["image"]


def errors(compose: Any) -> list[str]:
    pytest.importorskip("check_jsonschema", reason="brings the schema of the compose specification")
    import jsonschema

    folder = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((folder / "compose-spec.json").read_text())
    validator = jsonschema.validators.validator_for(schema)(schema)
    return [error.message for error in validator.iter_errors(compose)]


def sources(service: dict[str, Any]) -> dict[str, str]:
    """Returns what a service mounts, by where."""
    mounts = {}
    for volume in service.get("volumes", ()):
        if isinstance(volume, str):
            source, target = volume.split(":")[:2]
            mounts[target] = source
        else:
            assert volume["bind"] == {"create_host_path": False}  # else it would be root's
            mounts[volume["target"]] = volume["source"]
    return mounts


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_shape_of_the_compose_specification(name: str) -> None:
    assert errors(FILES[name]) == []


@pytest.mark.parametrize(
    "wrong", [{"helthcheck": {}}, {"depends_on": {"gateway": {"condition": "service_well"}}}]
)
def test_the_schema_sees_mistakes(wrong: dict[str, Any]) -> None:
    services = SERVER | {"superlink": SERVER["superlink"] | wrong}
    assert errors(FILES["server.yml"] | {"services": services})


def test_every_container_is_of_one_image_without_rights() -> None:
    for name, compose in FILES.items():
        folder = ROOT if name == "docker-compose.yml" else DEPLOYMENT
        for service in compose["services"].values():
            if service is IMAGE:
                continue
            extended = service["extends"]
            assert (folder / extended["file"]).samefile(DEPLOYMENT / "image.yml")
            assert extended["service"] == "image"
            assert not service.keys() & {"user", "privileged", "cap_add", "pid", "read_only"}
            for limit in {"cpus", "pids_limit"} & service.keys():
                assert service[limit]
    assert IMAGE["user"] == "${FEDLEAK_UID:-1000}:${FEDLEAK_GID:-1000}"
    assert (IMAGE["cap_drop"], IMAGE["read_only"]) == (["ALL"], True)
    assert {"mem_limit", "cpus", "pids_limit"} <= IMAGE.keys()


def test_the_image_is_pinned_copies_what_it_may_and_runs_as_no_root() -> None:
    build = IMAGE["build"]
    dockerfile = (DEPLOYMENT / build["context"] / build["dockerfile"]).read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)", dockerfile, re.MULTILINE))
    assert {name: f"${{FEDLEAK_{name}:-{value}}}" for name, value in arguments.items()} == build[
        "args"
    ]
    assert re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+", arguments["BASE"])
    assert arguments["TORCH_INDEX"].endswith("/cpu")
    assert re.search(r"^USER (?!0|root)", dockerfile, re.MULTILINE)
    allowed = (ROOT / ".dockerignore").read_text()
    for line in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE):
        for name in line.split():
            assert (ROOT / name).exists()
            assert f"!{name}\n" in allowed
    # Volumes take their mode from the image.
    for compose in FILES.values():
        for service in compose["services"].values():
            for target, source in sources(service).items():
                assert source in (compose.get("volumes") or ()) or source[0] in ".$"
                if source[0] not in ".$":
                    assert f" {target}" in dockerfile


def parsed(parser: argparse.ArgumentParser, service: dict[str, Any], program: str) -> Any:
    command = service["command"]
    assert command[0] == program
    return parser.parse_args(command[1:])


def test_flower_takes_the_command_of_the_superlink() -> None:
    given = parsed(_parse_args_run_superlink(), SERVER["superlink"], "flower-superlink")
    assert given.enable_supernode_auth
    assert given.ssl_certfile == "/secrets/superlink/server.pem"
    assert not given.insecure


def test_flower_takes_the_command_of_a_node_which_trusts_the_operator_alone() -> None:
    given = parsed(_parse_args_run_supernode(), NODE["node"], "flower-supernode")
    assert not given.insecure
    assert given.auth_supernode_private_key == "/node/key"
    assert given.trusted_entities == Path("/node/trusted.yaml")
    config = re.sub(r"\$\{FEDLEAK_CLIENTS?:\?[^}]*\}", "4", given.node_config)
    assert parse_config_args([config]) == {
        "partition-id": 4,
        "num-partitions": 4,
        "data": "/node/data.jsonl",
        "vault": "/vault",
    }


def test_the_parsers_see_mistakes() -> None:
    for parser, wrong in (
        (_parse_args_run_superlink(), "--enable-supernode-autentication"),
        (_parse_args_run_supernode(), "--plugin-type=x"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args([wrong])


def test_the_operator_signs_and_sets_what_the_app_declares() -> None:
    shell = SERVER["operator"]["command"][-1]
    signs, submits, watches = (shlex.split(part) for part in shell.split("&&"))
    assert signs[2:] == ["sign", "/app", "/secrets/operator/signing", "/signatures"]
    assert submits[:4] == ["flwr", "run", "/app", "deployment"]
    chosen = parse_config_args([submits[submits.index("--run-config") + 1]])
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert chosen.keys() <= declared.keys()
    default = re.fullmatch(r"\$\{FEDLEAK_EXPERIMENT:-/app/(.+)\}", str(chosen["experiment"]))
    assert default is not None
    assert (ROOT / default[1]).is_file()
    assert watches == ["fedleak", "watch", "deployment"]
    home = SERVER["operator"]["environment"]["FLWR_HOME"].replace("/app", str(ROOT))
    connections = tomllib.loads((Path(home) / "config.toml").read_text())["superlink"]
    assert connections["default"] == "deployment"
    authority = Path(connections["deployment"]["root-certificates"])
    assert str(authority.parent) in sources(SERVER["operator"])


def test_nodes_share_no_network_with_the_superlink() -> None:
    networks = {
        name: service.get("networks", service.get("network_mode"))
        for name, service in (SERVER | NODE).items()
    }
    assert networks == {
        "secrets": "none",
        "superlink": ["control"],
        "gateway": ["control", "fleet"],
        "register": ["control"],
        "operator": ["control"],
        "score": "none",
        "node": ["fleet"],
        "key": "none",
        "handover": "none",
    }
    assert FILES["server.yml"]["networks"]["control"] == {"internal": True}
    assert [name for name, service in (SERVER | NODE).items() if "ports" in service] == ["gateway"]


def test_every_secret_is_with_who_needs_it() -> None:
    holders = {
        volume: {name for name, service in SERVER.items() if volume in sources(service).values()}
        for volume in FILES["server.yml"]["volumes"]
    }
    assert holders == {
        "ca": {"secrets"},
        "superlink": {"secrets", "superlink"},
        "gateway": {"secrets", "gateway"},
        "operator": {"secrets", "operator"},
        "signatures": {"gateway", "operator"},
        "state": {"superlink"},
    }
    assert set(sources(SERVER["register"])) == {"/secrets/nodes", "/keys"}
    assert {name for name, service in NODE.items() if "vault" in sources(service).values()} == {
        "node",
        "handover",
    }


def test_services_that_stay_restart_and_say_whether_they_are_well() -> None:
    for service in (SERVER["gateway"], NODE["node"]):
        assert service["restart"] == "unless-stopped"
        assert "healthcheck" in service
    assert SERVER["superlink"]["restart"] == "unless-stopped"  # the gateway asks for its health
    assert "entrypoint" not in FILES["docker-compose.yml"]["services"]["fedleak"]


def test_no_two_nodes_have_the_same_texts(tmp_path: Path) -> None:
    from credentials import make_data

    texts = []
    for client in range(4):
        make_data(tmp_path / f"{client}.jsonl", client)
        texts += (tmp_path / f"{client}.jsonl").read_text().splitlines()
    assert len({json.loads(text)["text"] for text in texts}) == len(texts) == 160
