"""Who holds which data and trains when: what an experiment decides before anything is trained."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from fedleak import data, models, privacy
from fedleak.config.experiment import Experiment
from fedleak.config.loading import load, parse
from fedleak.defenses import Budget, Defense, measured
from fedleak.errors import ConfigError, FedleakError
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.observation import ClientUpdate
from fedleak.privacy import Event
from fedleak.store.run import EVERYONE, Key, Run
from fedleak.training.batches import round_clients
from fedleak.training.settings import LocalTraining

MOST_UNKNOWN = 0.5
"""Unknown tokens are all the same one, and finding it is finding nothing: above this share a figure
would be about them and not about words."""


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
    path = Path(__file__).parents[1] / str(config["experiment"])
    experiment = _loaded(path, _version(path))
    return experiment, Run(Path(str(config["run-dir"]) or run_folder(experiment.name)).absolute())


def stored(run: Run) -> Experiment:
    """Returns the experiment of a run; without its workers, who may be of another machine.

    Raises:
        ConfigError: There is no run here.
        FedleakError: The run.json is damaged, or its experiment was changed afterwards.
    """
    info, file = run.info(), run.path / "run.json"
    try:
        experiment = parse(
            {key: info["experiment"][key] for key in info["experiment"].keys() - {"workers"}}
        )
    except ConfigError as error:
        raise FedleakError(f"{file}: {error}: restore it from a copy") from error
    if experiment.fingerprint != info["fingerprint"]:
        raise FedleakError(
            f"{file}: its experiment was changed after its updates were captured (fingerprint "
            f"{experiment.fingerprint}, not {info['fingerprint']}): undo that, or run the changed "
            "experiment under another name"
        )
    return experiment


@lru_cache(maxsize=1)
def _loaded(path: Path, version: object) -> Experiment:
    """Reads and checks an experiment once per process, and again if its file is another."""
    return load(path)


def _version(path: Path) -> object:
    """Returns what is another when a file is replaced; None if there is none."""
    with suppress(OSError):
        found = path.stat()
        return found.st_ino, found.st_mtime_ns, found.st_size
    return None


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
        # Nobody uses the classes of texts that a causal model is trained on.
        label=table.label if experiment.model.task == CLASSIFICATION else None,
        samples=table.samples,
        held_out=table.held_out,
        seed=experiment.seed,
        drop_empty=table.drop_empty,
        encoding=table.encoding,
        delimiter=table.delimiter,
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
    train, held_out = split.train, split.held_out
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


def unknown_share(workload: Workload, model: LanguageModel) -> float:
    """Returns how much of the content of all texts is tokens that stand for unknown words.

    Raises:
        ConfigError: It is most of it, or a text has no content.
    """
    special, unknown = model.special_ids(), model.unknown_ids()
    sequences = [*workload.sequences, *workload.held_out]
    contents = [[token for token in ids if token not in special] for ids in sequences]
    if empty := contents.count([]):
        raise ConfigError(
            f"{empty} of {len(contents)} texts have no token: the tokenizer of model.name knows "
            "nothing in them: remove them, or choose another model"
        )
    count = sum(map(len, contents))
    share = sum(token in unknown for ids in contents for token in ids) / count
    if share > MOST_UNKNOWN:
        raise ConfigError(
            f"{share:.0%} of the {count:,} tokens of {len(contents):,} texts are unknown to the "
            "tokenizer of model.name: choose a model of the data's language and script"
        )
    return share


@dataclass(frozen=True)
class Protection:
    """What one client does for its privacy.

    Attributes:
        local: How it trains.
        defenses: What it does, by the place in the experiment file, with all noise worked out.
        num_examples: Examples that it has.
    """

    local: LocalTraining
    defenses: Mapping[int, Defense]
    num_examples: int

    def defend(
        self, update: ClientUpdate, rng: Callable[[int], torch.Generator]
    ) -> tuple[ClientUpdate, list[dict[str, Any]]]:
        """Returns the defended update, and what each defense did to it.

        Args:
            update: As training left it.
            rng: The random stream of each defense, by its place in the file.
        """
        told = []
        for number, defense in self.defenses.items():
            after = defense(update, rng=rng(number))
            # One that is about training has left the update as it is.
            did = {} if after is update else measured(update, after)
            told.append({"defense": number, "kind": defense.kind, **did})
            update = after
        return update, told

    def events(self, round: int) -> list[Event]:
        """Returns what a round adds to the ledger."""
        found = (d.event(self.local, self.num_examples, round) for d in self.defenses.values())
        return [event for event in found if event is not None]

    def noise_scale(self) -> float | None:
        """Returns the standard deviation of all noise on a number of the update; None without."""
        claims = (d.claims(self.local, self.num_examples) for d in self.defenses.values())
        scales = [claim.noise_scale for claim in claims if claim.noise_scale is not None]
        return math.hypot(*scales) if scales else None


def protection(experiment: Experiment, client: int, num_examples: int) -> Protection:
    """Returns what a client with so many examples does for its privacy.

    Raises:
        ConfigError: An epsilon that no noise reaches.
    """
    rounds = rounds_of_clients(experiment)[client]
    table, local = experiment.privacy, experiment.local_training
    local = replace(local, batch_size=min(local.batch_size, num_examples))
    # A client that never takes part spends nothing; its noise is that of one round.
    budget = Budget(table.delta, table.accountant, num_examples, rounds or [1])
    solved = {}
    for number, defense in experiment.defenses_of(client).items():
        try:
            solved[number] = defense.solved(local, budget)
        except ConfigError as error:
            raise ConfigError(f"defense[{number}] ({defense.kind}): {error}") from error
    for defense in solved.values():
        local = defense.training(local)
    found = Protection(local, solved, num_examples)
    # Refuses now what could not be counted after training.
    events = [event for round in budget.rounds for event in found.events(round)]
    privacy.compose(events, table.delta, table.accountant)
    return found


def clients_of_round(experiment: Experiment, round: int) -> list[int]:
    """Returns the clients that train in a round, in order."""
    return round_clients(
        experiment.federation.clients,
        experiment.clients_per_round,
        seed=experiment.seed,
        round=round,
    )


def rounds_of_clients(experiment: Experiment) -> Sequence[Sequence[int]]:
    """Returns for each client the rounds in which it trains."""
    table = experiment.federation
    return _rounds_of_clients(
        table.clients, experiment.clients_per_round, table.rounds, experiment.seed
    )


@lru_cache(maxsize=4)
def _rounds_of_clients(
    clients: int, per_round: int, rounds: int, seed: int
) -> Sequence[Sequence[int]]:
    found: list[list[int]] = [[] for _ in range(clients)]
    for round in range(1, rounds + 1):
        for client in round_clients(clients, per_round, seed=seed, round=round):
            found[client].append(round)
    return found


def expected_captures(experiment: Experiment) -> list[Key]:
    """Returns the captures that a complete run has: those of the rounds that are attacked."""
    return [key for key in captures_made(experiment) if experiment.attacked(key.round)]


def captures_made(experiment: Experiment) -> list[Key]:
    """Returns the captures that a run makes, also those that it does not keep."""
    rounds = range(1, experiment.federation.rounds + 1)
    if experiment.aggregator is not None:
        return [Key(round, EVERYONE) for round in rounds]
    return [
        Key(round, client) for round in rounds for client in clients_of_round(experiment, round)
    ]
