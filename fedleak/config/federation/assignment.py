"""What a server sends to a node: the experiment itself, and not the path of its file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from fedleak.config.experiment import Experiment
from fedleak.config.loading import parse
from fedleak.store.run import Run
from fedleak.util.errors import ConfigError

NOT_FOR_CLIENTS = frozenset({"attack", "threat", "gate", "audit", "utility", "workers", "server"})
"""Tables about what the server does, including a malicious one: clients do not receive them."""


def client_fingerprint(experiment: Experiment) -> str:
    """Returns the fingerprint of the tables that clients receive; their vaults store it."""
    return parse(experiment.model_dump(mode="json", exclude=set(NOT_FOR_CLIENTS))).fingerprint


@dataclass(frozen=True)
class Assignment:
    """What a client is asked to train.

    Attributes:
        experiment: The experiment, without the tables that are not for clients.
        run_name: The name of the server's run directory, and of the run's folder in the vault.
        classes: Names of the classes, in the order of the model's outputs; a node with its own data
            cannot know them otherwise.
    """

    experiment: Experiment
    run_name: str
    classes: tuple[str, ...] = ()

    @classmethod
    def of(cls, experiment: Experiment, run: Run) -> "Assignment":
        """Returns what the clients of a run are asked to train."""
        classes = run.info().get("classes", []) if experiment.data.on_nodes else []
        return cls(experiment, run.path.name, tuple(classes))

    def to_values(self) -> dict[str, Any]:
        """Returns values for a record of a message, which nodes need in place of any file."""
        text = self.experiment.model_dump_json(exclude=set(NOT_FOR_CLIENTS))
        return {"experiment": text, "run": self.run_name, "classes": list(self.classes)}

    @classmethod
    def from_values(cls, values: Mapping[str, object]) -> "Assignment":
        """Reads what `to_values` gave.

        Raises:
            ConfigError: The values are no assignment, or this fedleak refuses the experiment.
        """
        match values:
            case {"experiment": str(text), "run": str(name), "classes": [*classes]}:
                return cls(_experiment(text), name, tuple(map(str, classes)))
        raise ConfigError("the server did not say which experiment: use the same fedleak there")


@lru_cache(maxsize=1)
def _experiment(text: str) -> Experiment:
    """Reads and checks an experiment once per process."""
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError("the experiment that the server sent is not JSON") from error
    if not isinstance(table, dict):
        raise ConfigError("the experiment that the server sent is no table")
    if tables := sorted(NOT_FOR_CLIENTS & table.keys()):
        raise ConfigError(f"the server sent what is not for clients: {', '.join(tables)}")
    return parse(table)
