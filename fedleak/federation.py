"""Who holds which data and trains when: what an experiment decides before anything is trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedleak import data, models
from fedleak.config import Experiment, load
from fedleak.errors import ConfigError
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.store import Key, Run
from fedleak.training import round_clients


@dataclass(frozen=True)
class Workload:
    """An experiment's data, tokenised and divided.

    Attributes:
        sequences, labels: The training examples.
        parts: For each client the indices of its examples.
        held_out, held_out_labels: Examples that no client has.
    """

    sequences: list[tuple[int, ...]]
    labels: tuple[int, ...]
    parts: list[list[int]]
    held_out: list[tuple[int, ...]]
    held_out_labels: tuple[int, ...]


def run_folder(name: str) -> Path:
    """Returns where an experiment of this name keeps its results."""
    return Path("runs", name).absolute()


def of_app(config: Mapping[str, object]) -> tuple[Experiment, Run]:
    """Returns the experiment and the run directory that an app's run config names.

    Flower unpacks an app far from where it was started: a relative `experiment` is in the app. A
    relative `run-dir` is below the folder that the SuperLink was started in.
    """
    experiment = load(Path(__file__).parents[1] / str(config["experiment"]))
    return experiment, Run(Path(str(config["run-dir"]) or run_folder(experiment.name)).absolute())


def read_data(experiment: Experiment) -> data.Split:
    """Reads what an experiment trains on.

    Raises:
        ConfigError: Data that cannot be read, or has no classes for a classifier.
    """
    table = experiment.data
    split = data.read(
        table.name,
        split=table.split,
        text=table.text,
        label=table.label,
        samples=table.samples,
        held_out=table.held_out,
        seed=experiment.seed,
    )
    if experiment.model.task == CLASSIFICATION and len(split.train.label_names) < 2:
        raise ConfigError(
            f"data.label is missing: name the column of {table.name!r} that holds the class"
        )
    return split


def outline(experiment: Experiment, num_labels: int) -> LanguageModel:
    """Returns the model with its tokenizer and names, but without weights."""
    return models.outline(experiment.model_spec(num_labels))


def divide(experiment: Experiment, split: data.Split, model: LanguageModel) -> Workload:
    """Tokenises the data and divides it among the clients.

    Raises:
        ConfigError: A text that is too long, or a client without data.
    """
    table, max_length = experiment.federation, experiment.data.max_length
    limit = model.max_length
    train, held_out = split
    return Workload(
        data.tokenise(train.texts, model.encode, limit=limit, max_length=max_length),
        train.labels,
        data.partition(
            train.labels,
            table.clients,
            how=table.partition,
            alpha=table.alpha,
            seed=experiment.seed,
        ),
        data.tokenise(held_out.texts, model.encode, limit=limit, max_length=max_length),
        held_out.labels,
    )


def clients_of_round(experiment: Experiment, round: int) -> list[int]:
    """Returns the clients that train in a round, in order."""
    return round_clients(
        experiment.federation.clients,
        experiment.clients_per_round,
        seed=experiment.seed,
        round=round,
    )


def expected_captures(experiment: Experiment) -> list[Key]:
    """Returns the captures that a complete run has."""
    return [
        Key(round, client)
        for round in range(1, experiment.federation.rounds + 1)
        for client in clients_of_round(experiment, round)
    ]
