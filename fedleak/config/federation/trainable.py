"""What can be trained: an experiment whose data, model, clients and defenses go together.

`fedleak run` trains it and `fedleak explain` explains it: both refuse the same.
"""

from typing import NamedTuple

from fedleak import data
from fedleak.config import checks
from fedleak.config.experiment import Experiment
from fedleak.config.federation.protection import protection
from fedleak.config.federation.schedule import clients_of_round, expected_captures, target
from fedleak.config.federation.workload import (
    Workload,
    divide,
    outline,
    read_data,
    unknown_fraction,
)
from fedleak.models import LanguageModel
from fedleak.util.errors import ConfigError


class Trainable(NamedTuple):
    """What an experiment trains.

    Attributes:
        split: Its data.
        model: Its model, without weights.
        workload: The data, tokenised and divided.
        unknown: The share of tokens that stand for unknown words.
    """

    split: data.Split
    model: LanguageModel
    workload: Workload
    unknown: float


def trainable(experiment: Experiment) -> Trainable:
    """Reads the data, looks at the model, and refuses what cannot be trained.

    What attacks cannot do is not looked at, nor the weights of the model.

    Raises:
        ConfigError: The reason.
    """
    split = read_data(experiment)
    model = outline(experiment, len(split.train.label_names))
    if experiment.threat.clients is not None and not expected_captures(experiment):
        raise ConfigError(
            f"threat.clients = {experiment.threat.clients}, but none of them trains in a round "
            "that is attacked: choose others, or other threat.rounds"
        )
    checks.check_dropout(experiment)
    checks.check_defenses(experiment, model)
    checks.check_canaries(experiment, model)
    checks.check_published(experiment)
    checks.check_server(experiment, model)
    _check_targets(experiment, model)
    checks.check_waiting(experiment)
    names = [named.name for named in experiment.attacks]
    checks.check_gate(experiment.gate, names, [named.attack.kind for named in experiment.attacks])
    workload = divide(experiment, split, model)
    unknown = unknown_fraction(workload, model)
    for client, part in [] if experiment.data.on_nodes else enumerate(workload.parts):
        protection(experiment, client, len(part))  # refuses an epsilon out of reach
    return Trainable(split, model, workload, unknown)


def _check_targets(experiment: Experiment, model: LanguageModel) -> None:
    """Refuses a malicious server if none of its targets trains in one of its rounds.

    Raises:
        ConfigError: There is such a round; the message names the first.
    """
    mode = experiment.server_built.mode
    if mode.isolated(model.trained(), model) is None:
        return
    for round in range(1, experiment.federation.rounds + 1):
        if experiment.mode_in(round) is not None and target(experiment, round) is None:
            raise ConfigError(
                f"server.mode = {mode.kind!r} has no target in round {round}, in which the clients "
                f"{clients_of_round(experiment, round)} train: choose others, or other "
                "server.rounds"
            )
