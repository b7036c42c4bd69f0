"""A real federation on 127.0.0.1: from nothing to the report, and each way in which it can end.

SuperLink and SuperNodes are processes, with TLS and keys. Every wait is bounded, and `Federation`
ends all that it has started.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import credentials
import federation as deployment
import psutil
import pytest
import tomli_w
import torch
from means import mean_update

from fedleak import models
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import dropped_out, stored
from fedleak.defenses.secure_sum import SecureSum
from fedleak.models import builtin, loading
from fedleak.store.records import LEAKAGE
from fedleak.store.run import EVERYONE, Key, Run
from fedleak.training.local import local_update_
from fedleak.training.observation import ClientUpdate

ROOT = Path(__file__).parents[1]
OWN_APP = ROOT / "experiments" / "own_flower_app"
NODES = 2
ONE_ROUND = """
name = "deployment"
model = {name = "builtin/bert-tiny"}
data = {name = "builtin/notes", text = "text", label = "label", samples = 1, held_out = 4, on_nodes = true}
federation = {clients = 2, rounds = 2, batch_size = 1, learning_rate = 0.1}
workers = {devices = ["cpu"]}
"""  # noqa: E501

SUMMED = """
name = "deployment"
model = {name = "builtin/bert-tiny"}
data = {name = "builtin/notes", text = "text", label = "label", samples = 1, held_out = 4, on_nodes = true}
federation = {clients = 3, rounds = 1, batch_size = 2, learning_rate = 0.1}
defense = [{kind = "secure_sum", protocol = "secagg+", clipping = 0.5, max_weight = 4.0}]
attack = []
workers = {devices = ["cpu"]}
"""  # noqa: E501

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux gives orphans to who starts"),
]


def wait_for(condition: Callable[[], Any], seconds: float = 900) -> Any:
    deadline = time.monotonic() + seconds
    while not (outcome := condition()):
        assert time.monotonic() < deadline, f"waited {seconds} s"
        time.sleep(0.5)
    return outcome


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Any]:
    """A SuperLink and the folders of two nodes, which are registered and not yet started."""
    with deployment.federation(tmp_path / "all", NODES) as federation:
        federation.start_superlink()
        for node in range(NODES):
            federation.register(node)
        (federation.server / "small.toml").write_text(ONE_ROUND)
        yield federation


def submit(made: Any, **settings: object) -> str:
    quick = {"experiment": str(made.server / "small.toml"), "attack": False}
    return str(made.submit(deployment.APP, **quick | settings))


def first_capture(made: Any) -> Key:
    """Waits until an update is there; where the run has failed before, there will be none."""
    run = Run(made.run)

    def captures() -> list[Key]:
        assert not run.exists() or run.info()["status"] != "failed", made.log("superlink")
        return run.captures.all_keys()

    return Key(*wait_for(captures)[0])


def start_again(made: Any, node: int) -> None:
    """Starts a node that was killed, until Flower lets it: for a minute it takes it for alive."""

    def stays() -> bool:
        made.start_node(node)
        deadline = time.monotonic() + 60
        while made.alive(f"node-{node}") and time.monotonic() < deadline:
            time.sleep(0.5)
        return bool(made.alive(f"node-{node}"))

    wait_for(stays, 600)


def check_goes_on(made: Any) -> None:
    """The same run, given again, ends well, and no capture is lost or doubled.

    On a busy machine Flower can lose a reply. Then the run has to be given once more, as run.sh
    does; whatever else fails, fails each time.
    """
    output = ""
    for _ in range(deployment.TRIES):
        quick = {"answers-within": deployment.ANSWER_SECONDS}
        status, output = made.watch(submit(made, **quick), 300)
        if status == 0:
            return check_whole(made)
    pytest.fail(f"{output}\n{made.log('superlink')}")


def check_whole(made: Any) -> None:
    """Each client's update of each round is there once, of the model that the round was sent."""
    run = Run(made.run)
    keys = [Key(round, client) for round in (1, 2) for client in range(NODES)]
    assert run.captures.all_keys() == keys
    assert run.models.rounds() == [1, 2, 3]
    assert run.info()["status"] == "finished"
    files = [path.name for path in (run.path / "captures").iterdir()]
    assert sorted(files) == [f"{key}.safetensors" for key in keys]
    for client in range(NODES):
        vault = made.node(client) / "vault" / "deployment" / "vault"
        assert sorted(path.name for path in vault.iterdir()) == [
            f"r0001-c{client:02d}.json",
            f"r0002-c{client:02d}.json",
        ]
    # Scoring checks that what a client says it held has as many examples as it sent.
    vaults = [f"--vault={made.node(client) / 'vault'}" for client in range(NODES)]
    assert (
        "taken from vaults: 4 private batches" in made.fedleak("score", str(run.path), *vaults)[1]
    )


def test_one_command_goes_from_nothing_to_the_report(tmp_path: Path) -> None:
    folder = tmp_path / "all"
    done = subprocess.run(
        [ROOT / "experiments" / "deployment" / "run.sh", folder],
        env=os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(folder / "server" / "runs" / "deployment")
    assert "finished:completed" in done.stdout
    rows = [json.loads(line) for line in (run.path / "leakage.jsonl").read_text().splitlines()]
    assert len(rows) == 4 * 2
    assert "unscored" not in {row["status"] for row in rows}
    assert sum(row["verified"] for row in rows if row["attack"] == "dager") > 0
    assert (run.path / "report.html").is_file()
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if str(folder) in str(process.info)
    ]
    again = subprocess.run(
        [sys.executable, deployment.__file__, folder], capture_output=True, text=True, check=False
    )
    assert again.returncode == 2
    assert "exists: name a folder that does not" in again.stderr


def test_an_app_of_others_is_tapped_and_attacked(made: Any, tmp_path: Path) -> None:
    """A Hugging Face classifier: stock FedAvg, and Flower's DP with clipping at the clients."""
    for node in range(NODES):
        made.start_node(node)

    def online() -> int:
        listed = made.flwr("supernode", "list", deployment.NAME, "--format", "json")
        return sum(supernode["status"] == "online" for supernode in json.loads(listed)["nodes"])

    wait_for(lambda: online() == NODES)
    clipped = tmp_path / "clipped"
    shutil.copytree(OWN_APP, clipped, ignore=shutil.ignore_patterns("__pycache__"))
    file = clipped / "pyproject.toml"
    file.write_text(
        file.read_text()
        .replace("own_app.server_app:app", "own_app.clipped:server")
        .replace("own_app.client_app:app", "own_app.clipped:client")
    )
    for app in (OWN_APP, clipped):
        check_is_tapped_and_attacked(made, app)


def check_is_tapped_and_attacked(made: Any, app: Path) -> None:
    """Runs an app, imports what its tap kept, attacks it, and finds every word."""
    model, truth = str(builtin.folder("bert-tiny")), made.folder / f"{app.name}.jsonl"
    tapped = made.server / app.name
    config = {"model": model, "tapped": str(tapped), "truth": str(truth), "lr": 2.0, "rounds": 2}
    status, output = made.watch(made.submit(app, **config), 300)
    assert status == 0, output
    about = made.folder / f"{app.name}.toml"
    training = {"learning_rate_key": "lr", "batch_size": 2, "dropout": False}
    table = {"model": {"name": model}, "training": training, "truth": {"file": str(truth)}}
    about.write_text(tomli_w.dumps(table | {"attack": [{"kind": "keyspan", "seconds": 60.0}]}))
    status, output = made.fedleak("import", str(tapped), "--about", str(about))
    assert status == 0, output
    assert (
        f"{2 * NODES} updates of {NODES} clients in 2 rounds, {2 * NODES} with the truth" in output
    )
    run = str(tapped.with_name(f"{app.name}-run"))
    assert made.fedleak("attack", run)[0] == 0
    rows = [row for row in Run(Path(run)).rows(LEAKAGE) if row.attack == "probes"]
    assert [row.token_recall for row in rows] == [1.0] * 2 * NODES


def test_nodes_see_no_other_folder_where_the_machine_allows_it(made: Any) -> None:
    if not made.apart:
        pytest.skip("this machine makes no namespaces")
    made.start_node(1)
    process = wait_for(lambda: psutil.Process(made._processes["node-1"].pid).children())[0]
    seen = Path(f"/proc/{process.pid}/root")
    wait_for(lambda: not any((seen / str(made.node(0))[1:]).iterdir()), 30)
    for name in ("server", "superlink", "gateway", "operator", "ca"):
        assert not any((seen / str(made.folder / name)[1:]).iterdir())
    assert (seen / str(made.node(1))[1:] / "data.jsonl").is_file()


THIEF = """
import pathlib
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

client = ClientApp()
server = ServerApp()


@client.query()
def read(message: Message, context: Context) -> Message:
    text = pathlib.Path(context.node_config["data"]).read_text()
    return Message(RecordDict({"read": ConfigRecord({"text": text})}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    asked = [
        Message(RecordDict(), message_type="query", dst_node_id=node)
        for node in grid.get_node_ids()
    ]
    for reply in grid.send_and_receive(asked, timeout=120):
        print(reply.error if reply.has_error() else reply.content["read"]["text"], flush=True)
"""

THIEFS_PROJECT = """
project = {name = "thief", version = "1.0.0"}
tool.flwr.app = {publisher = "stranger", components = {serverapp = "thief:server", clientapp = "thief:client"}, config = {x = 0}}
"""  # noqa: E501


def test_a_stranger_with_the_files_of_a_node_gets_nothing(made: Any, tmp_path: Path) -> None:
    """It has what node 0 has, and Flower's commands; node 1 has a file that it is after."""
    made.start_node(1)
    secret = (made.node(1) / "data.jsonl").read_text().splitlines()[0]
    home, app = tmp_path / "stranger", tmp_path / "thief"
    shutil.copytree(made.node(0), home)
    address = {"address": made.address, "root-certificates": str(home / "ca.crt")}
    (home / "config.toml").write_text(tomli_w.dumps({"superlink": {"to": address}}))
    credentials.make_node_key(home / "rogue")
    app.mkdir()
    (app / "thief.py").write_text(THIEF)
    (app / "pyproject.toml").write_text(THIEFS_PROJECT)

    for command in (
        ["supernode", "list", "to"],
        ["supernode", "register", str(home / "rogue.pub"), "to"],
        ["run", str(app), "to"],
        ["ls", "to"],
    ):
        done = subprocess.run(
            ["flwr", *command],
            env={**deployment._environment(home), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode, (command, done.stdout)
        assert "404" in done.stderr, (command, done.stderr)
    if made.apart:  # nor is the SuperLink itself within reach
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", made._superlink))
    nodes = json.loads(made.flwr("supernode", "list", deployment.NAME, "--format", "json"))
    assert len(nodes["nodes"]) == NODES
    assert json.loads(made.flwr("ls", deployment.NAME, "--format", "json"))["runs"] == []

    # Even by the operator's way the node runs nothing that the operator has not signed.
    wait_for(lambda: "SuperNode ID" in made.log("node-1"))
    assert secret not in printed(made, made.submit_unsigned(app, x=1))
    assert "FAB verification failed" in made.log("node-1")
    # The thief works: once it is signed, it reads what the operator can read.
    assert secret in printed(made, made.submit(app, x=2))


def printed(made: Any, number: str) -> str:
    """Returns what the ServerApp of a run printed, which ended well."""
    status, output = made.watch(number, 300)
    assert status == 0, output
    return str(made.flwr("log", number, deployment.NAME, "--show"))


@pytest.mark.parametrize("kind", ["another key", "no key"])
def test_a_node_without_a_registered_key_ends_with_a_line(kind: str, made: Any) -> None:
    key = made.node(0) / "key"
    key.unlink()
    if kind == "another key":
        credentials.make_node_key(key)
    made.start_node(0)
    wait_for(lambda: not made.alive("node-0"), 120)
    says = "Failed to activate SuperNode" if kind == "another key" else "key"
    assert says in made.log("node-0")


def test_an_expired_certificate_ends_all_in_a_line(tmp_path: Path) -> None:
    with deployment.federation(tmp_path / "all", 1, days=-1) as federation:
        with pytest.raises(SystemExit, match="certificate is refused: certificate has expired"):
            federation.start_superlink()
        federation.start_node(0)
        wait_for(lambda: not federation.alive("node-0"), 120)
        assert "certificate has expired" in federation.log("node-0")
        status, output = federation.fedleak("watch", "deployment")
        assert status == 1, output
        assert "the certificate of the SuperLink 'deployment' is refused" in output


def test_a_node_that_comes_late_takes_part_and_one_that_never_comes_is_missed(made: Any) -> None:
    made.start_node(0)
    number = submit(made, **{"nodes-within": 5})
    status, output = made.watch(number)
    assert status == 1, output
    assert "federation.clients = 2, but Flower has 1 nodes after 5 s" in output
    assert Run(made.run).captures.all_keys() == []
    number = submit(made, **{"nodes-within": 300})
    time.sleep(10)
    made.start_node(1)
    status, output = made.watch(number, 300)
    assert status == 0, output
    check_whole(made)


def test_a_node_that_is_killed_in_a_round_fails_it_and_the_run_goes_on_afterwards(
    made: Any,
) -> None:
    for node in range(NODES):
        made.start_node(node)
    number = submit(made, **{"answers-within": 120})
    other = 1 - first_capture(made).client
    made.kill(f"node-{other}")
    status, output = made.watch(number, 300)
    assert status == 1, output
    assert f"client {other}" in output
    start_again(made, other)
    check_goes_on(made)


def test_a_node_that_never_answers_is_waited_for_as_long_as_was_said(made: Any) -> None:
    for node in range(NODES):
        made.start_node(node)
    number = submit(made, **{"answers-within": 90})
    silent = 1 - first_capture(made).client
    stopped = psutil.Process(made._processes[f"node-{silent}"].pid)
    for process in [stopped, *stopped.children(recursive=True)]:
        process.send_signal(signal.SIGSTOP)
    status, output = made.watch(number, 300)
    assert status == 1, output
    assert f"client {silent}" in output


def test_a_superlink_that_is_killed_ends_the_run_and_starts_again_where_it_was(made: Any) -> None:
    for node in range(NODES):
        made.start_node(node)
    number = submit(made)
    first_capture(made)
    made.kill("superlink")
    status, output = made.watch(number, 0)
    assert status == 1, output
    assert "does not answer" in output
    made.start_superlink()
    status, output = made.watch(number, 300)
    assert status == 1, output
    assert "finished:failed" in output, output
    check_goes_on(made)


@pytest.fixture
def summing(tmp_path: Path) -> Iterator[Any]:
    """A federation of three nodes that take part in Flower's SecAgg+."""
    with deployment.federation(tmp_path / "all", 3) as made:
        made.start_superlink()
        for node in range(3):
            made.register(node)
            made.start_node(node)
        (made.server / "small.toml").write_text(SUMMED)
        yield made


def test_a_secure_sum_between_machines_is_that_of_the_model(summing: Any) -> None:
    status, output = summing.watch(submit(summing), 600)
    assert status == 0, output
    assert not dropped_out(Run(summing.run), 1)
    check_sum(summing, range(3))


def test_a_secure_sum_does_without_a_node_that_leaves_within_the_round(summing: Any) -> None:
    """It is killed while it trains, once another one has trained."""
    number, nodes = submit(summing), range(3)

    def trained() -> list[int]:
        vaults = {node: summing.node(node) / "vault" / "deployment" / "vault" for node in nodes}
        return [node for node in nodes if (vaults[node] / f"{Key(1, node)}.json").is_file()]

    there = wait_for(trained, 1200)
    lost = next(node for node in nodes if node not in there)
    summing.kill(f"node-{lost}")
    status, output = summing.watch(number, 600)
    assert status == 0, output
    assert dropped_out(Run(summing.run), 1) == {lost}
    check_sum(summing, [node for node in nodes if node != lost])


def check_sum(made: Any, nodes: Iterable[int]) -> None:
    """The server got the mean gradient of these nodes' texts, but for less than a step."""
    run = Run(made.run)
    experiment = stored(run)
    assert run.captures.all_keys() == [Key(1, EVERYONE)]
    assert isinstance(experiment.aggregator, SecureSum)
    step = experiment.aggregator.update_claims(experiment.local_training, 2).step
    assert step is not None
    expected = mean_update(gradient(made, experiment, Key(1, node)) for node in nodes)
    update = run.captures.read_capture(Key(1, EVERYONE)).update
    assert update.num_examples == expected.num_examples
    for name, value in expected.tensors.items():
        torch.testing.assert_close(update.tensors[name], value, rtol=1e-4, atol=step)


def gradient(made: Any, experiment: Experiment, key: Key) -> ClientUpdate:
    """Returns the gradient of what a node says that it trained on."""
    vault = Run(made.node(key.client) / "vault" / "deployment")
    truth = vault.read_truth(key)
    assert truth is not None
    model = loading.load(experiment.model_spec(2))
    models.load_parameters_(model, Run(made.run).models.read_model(key.round))
    local = experiment.local_training
    return local_update_(model, truth["sequences"], truth["labels"], local, seed=0)


def test_a_full_disk_at_the_server_is_a_line_and_what_is_written_stays(
    made: Any, tmp_path: Path
) -> None:
    """The run directory is on a disk that fills up while clients train."""
    if os.geteuid() != 0 or not made.apart:
        pytest.skip("mounting a small disk needs root")
    for node in range(NODES):
        made.start_node(node)
    made.run.mkdir(parents=True)
    small = ["mount", "-t", "tmpfs", "-o", "size=200m", "none", str(made.run)]
    if subprocess.run(small, check=False, capture_output=True).returncode:
        pytest.skip("this machine mounts no disk")
    try:
        made.kill("superlink")
        made.start_superlink()  # which sees the disk from now on
        filler = made.run / ".filler"
        number = submit(made)
        wait_for(lambda: (made.run / "captures").is_dir())
        with suppress(OSError):  # which is what it is for
            filler.write_bytes(bytes(200 * 2**20))
        status, output = made.watch(number, 300)
        assert status == 1, output
        assert "No space left on device" in output
        filler.unlink()
        check_goes_on(made)
    finally:
        made.end()
        subprocess.run(["umount", "-l", str(made.run)], check=False)
