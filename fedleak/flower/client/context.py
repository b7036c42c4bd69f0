"""The task of a node, the data that it uses, and where it keeps what it trained on.

The experiment comes with the message. The node's own configuration decides which file it reads and
which folder it writes to.
"""

import os
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message

from fedleak.config.experiment import Experiment
from fedleak.config.federation.assignment import Assignment
from fedleak.config.federation.protection import Protection, protection
from fedleak.config.federation.workload import Workload, divide, own_workload, read_data
from fedleak.models import LanguageModel, loading
from fedleak.store.run import Key, Run
from fedleak.util.errors import ConfigError


@dataclass(frozen=True)
class OwnFile:
    """A file of one node, which holds the data of one client.

    Attributes:
        path: The file.
        client: The client whose data it holds.
        classes: Names of the classes, in the order of the model's outputs.
    """

    path: Path
    client: int
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """What a node is asked to do, and with which data.

    Attributes:
        experiment: What is trained.
        client: The client whose data this node holds.
        own: The node's own file; None: it uses the client's part of the experiment's data.
        private: Where the node keeps what it trained on; None: nowhere.
        board: Where it publishes hashes beside other clients; None: in `private`.
    """

    experiment: Experiment
    client: int
    own: OwnFile | None
    private: Run | None
    board: Run | None = None

    @property
    def model_and_data(self) -> tuple[LanguageModel, Workload]:
        """The model and the data, loaded once per process."""
        return _model_and_data(self.experiment, self.own)

    @property
    def protection(self) -> Protection:
        """What the client does for its privacy, worked out once per process."""
        return _protection(self.experiment, self.own, self.client)


def work_of(message: Message, context: Context) -> Work:
    """Returns what a message asks of this node.

    Raises:
        ConfigError: The message has no assignment, or the node's configuration lacks something.
    """
    values = message.content.config_records.get("assignment", ConfigRecord())
    assignment = Assignment.from_values(values)
    client = client_of(context)
    return Work(
        assignment.experiment,
        client,
        _own_file(context, assignment, client),
        vault(context, assignment.run_name),
        _folder(context, "board", assignment.run_name),
    )


@lru_cache(maxsize=1)
def _model_and_data(experiment: Experiment, own: OwnFile | None) -> tuple[LanguageModel, Workload]:
    # One thread, so that sums come out bit for bit the same under every engine.
    torch.set_num_threads(1)
    if own is not None:
        model = loading.load(experiment.model_spec(len(own.classes)), weights=False)
        return model, own_workload(experiment, own.path, own.classes, own.client, model)
    split = read_data(experiment)
    model = loading.load(experiment.model_spec(len(split.train.label_names)), weights=False)
    return model, divide(experiment, split, model)


@cache
def _protection(experiment: Experiment, own: OwnFile | None, client: int) -> Protection:
    _, workload = _model_and_data(experiment, own)
    return protection(experiment, client, len(workload.parts[client]))


def client_of(context: Context) -> int:
    """Returns the client whose data this node holds.

    Raises:
        ConfigError: The node config does not say.
    """
    number = context.node_config.get("partition-id")
    if not isinstance(number, int):
        raise ConfigError(f"the node's partition-id = {number!r}: give the number of its client")
    return number


def _own_file(context: Context, assignment: Assignment, client: int) -> OwnFile | None:
    """Returns the file that this node trains on; None: its part of the experiment's data.

    A node that has a file of its own reads no other, whatever the server asks for.
    """
    path, wanted = context.node_config.get("data", ""), assignment.experiment.data.on_nodes
    if not path and not wanted:
        return None
    if not path:
        raise ConfigError(
            "data.on_nodes is set, but this node's configuration names no file: add "
            'data="/absolute/path" to its --node-config'
        )
    if not wanted:
        raise ConfigError(
            "this node reads its own file only: set data.on_nodes = true in the experiment"
        )
    if not isinstance(path, str) or not os.path.isabs(path):
        raise ConfigError("the node's data is not the absolute path of a file: give one")
    if not 0 <= client < assignment.experiment.federation.clients:
        raise ConfigError(
            f"the node's partition-id = {client}, but federation.clients = "
            f"{assignment.experiment.federation.clients}"
        )
    return OwnFile(Path(path), client, assignment.classes)


def vault(context: Context, run_name: str) -> Run | None:
    """Returns where this node keeps what it trained on; None if it keeps nothing.

    Only the node decides: by `vault` in its node config, or by FEDLEAK_VAULT in its environment,
    because Flower's simulation gives nodes no config of their own. The vault is a folder with a
    folder for each run. The server chooses the name of the run's folder, not its place.

    Raises:
        ConfigError: The vault is not an absolute path.
    """
    return _folder(context, "vault", run_name, os.environ.get("FEDLEAK_VAULT", ""))


def _folder(context: Context, key: str, run_name: str, default: str = "") -> Run | None:
    """Returns a run's folder inside a folder of the node's configuration; None: there is none.

    Raises:
        ConfigError: That is not an absolute path.
    """
    folder = context.node_config.get(key, default)
    if folder in ("", False):
        return None
    if not isinstance(folder, str) or not os.path.isabs(folder):
        raise ConfigError(f"the node's {key} = {folder!r}: give the absolute path of a folder")
    return Run(Path(folder, os.path.basename(os.path.normpath(f"/{run_name}"))))


def refuse_another_run(private: Run, key: Key, fingerprint: str) -> None:
    """Refuses to overwrite what the client trained on in an earlier run.

    The server chooses the folder's name, so it could make the node overwrite an older run's texts.

    Raises:
        ConfigError: The vault has a private batch of another experiment there.
    """
    kept = private.vault.read_note(key)
    if kept is not None and kept.get("fingerprint") != fingerprint:
        raise ConfigError(
            f"this node's vault has another run called {private.path.name!r}, and what it trained "
            "on: give this run another run-dir, or move that folder out of the vault"
        )
