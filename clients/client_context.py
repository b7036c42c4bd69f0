"""The model and data that clients need, loaded once per process, and the vault of a node."""

import os
from functools import cache, lru_cache
from pathlib import Path

import torch
from flwr.app import Context

from fedleak.config.experiment import Experiment
from fedleak.errors import ConfigError
from fedleak.federation.protection import Protection, protection
from fedleak.federation.workload import Workload, divide, read_data
from fedleak.models import LanguageModel, loading
from fedleak.store.run import Run


@lru_cache(maxsize=1)
def model_and_data(experiment: Experiment) -> tuple[LanguageModel, Workload]:
    """Loads the model and divides the data, once per process."""
    # One thread, so that sums come out bit for bit the same under every engine.
    torch.set_num_threads(1)
    split = read_data(experiment)
    model = loading.load(experiment.model_spec(len(split.train.label_names)), weights=False)
    return model, divide(experiment, split, model)


@cache
def protection_of(experiment: Experiment, client: int) -> Protection:
    """Works out what a client does for its privacy, once per process."""
    _, workload = model_and_data(experiment)
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


def vault(context: Context, run: Run) -> Run | None:
    """Returns where this node keeps what it trained on; None if it keeps nothing.

    Only the node decides: by `vault` in its node config, or by FEDLEAK_VAULT in its environment,
    because Flower's simulation gives nodes no config of their own. The vault is a folder with a
    folder for each run. Who submits a run chooses the name of the run's folder, not its place.

    Raises:
        ConfigError: The vault is not an absolute path.
    """
    folder = context.node_config.get("vault", os.environ.get("FEDLEAK_VAULT", ""))
    if folder in ("", False):
        return None
    if not isinstance(folder, str) or not os.path.isabs(folder):
        raise ConfigError(f"the node's vault = {folder!r}: give the absolute path of a folder")
    return Run(Path(folder, os.path.basename(os.path.normpath(run.path))))
