"""The data of an experiment: read, tokenised, and divided among the clients."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedleak import data
from fedleak.config.components import NamedAttack
from fedleak.config.experiment import Experiment
from fedleak.config.federation.secrets import secrets
from fedleak.models import CLASSIFICATION, LanguageModel, loading, target_counts
from fedleak.util.errors import ConfigError

MOST_UNKNOWN = 0.5
"""The largest fraction of unknown tokens. All unknown words are one token, which reveals no word:
above this fraction, scores would be about this token and not about words."""

MOST_CANDIDATES = 10_000
"""The most candidates of an attack on membership: its answer has some numbers for each."""


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


def read_data(experiment: Experiment) -> data.Split:
    """Reads what an experiment trains on.

    Raises:
        ConfigError: Data that cannot be read, or has no classes for a classifier.
    """
    if experiment.tapped is not None:
        raise ConfigError(
            f"{experiment.name!r} was imported, and fedleak does not have the data of its clients: "
            "there is nothing to train; `fedleak attack RUN` attacks it"
        )
    table = experiment.data
    split = data.read_split(
        **table.model_dump(exclude={"max_length", "on_nodes"}),
        seed=experiment.seed,
        # Nobody uses the classes of texts that a causal model is trained on.
        classes=experiment.model.task == CLASSIFICATION,
    )
    if experiment.model.task == CLASSIFICATION and len(split.train.label_names) < 2:
        raise ConfigError(
            f"data.label is missing: name the column of {table.name!r} that holds the class"
        )
    if table.on_nodes:
        nobody = data.Corpus((), (), split.train.label_names)
        return data.Split(nobody, split.held_out, split.dropped)
    return split


def own_workload(
    experiment: Experiment, path: Path, classes: Sequence[str], client: int, model: LanguageModel
) -> Workload:
    """Reads and tokenises the file of a node, which holds the data of one client.

    Raises:
        ConfigError: A file that cannot be read, or a text that is too long.
    """
    table = experiment.data
    form = {"text", "label", "drop_empty", "encoding", "delimiter"}
    used = classes if experiment.model.task == CLASSIFICATION else None
    corpus = data.read_own(path, **table.model_dump(include=form), classes=used)
    sequences = _tokenised(corpus.texts, model, table.max_length)
    parts: list[list[int]] = [[] for _ in range(experiment.federation.clients)]
    parts[client] = list(range(len(sequences)))
    return Workload(sequences, corpus.labels, parts, [], ())


def candidates(
    experiment: Experiment, attack: NamedAttack, classes: Sequence[str], model: LanguageModel
) -> dict[str, Sequence[Any]] | None:
    """Reads and tokenises the texts that an attack on membership is asked about.

    Args:
        experiment: What is run.
        attack: One of its attacks.
        classes: Names of the classes, in the order of their numbers.
        model: With its tokenizer.

    Returns:
        The texts and their classes, as `sequences` and `labels`; None: the attack has no file of
        them.

    Raises:
        ConfigError: The file cannot be read, or has too many, equal or too long texts.
    """
    if attack.candidates is None:
        return None
    classifies, file = experiment.model.task == CLASSIFICATION, attack.candidates
    try:
        corpus = data.read_own(
            Path(file),
            text="text",
            label="label" if classifies else None,
            classes=classes if classifies else None,
            what="the file",
        )
        sequences = _tokenised(corpus.texts, model, experiment.data.max_length)
    except ConfigError as error:
        columns = "columns text and label" if classifies else "a column text"
        raise ConfigError(f"attack {attack.name!r}: candidates ({columns}): {error}") from error
    if len(sequences) > MOST_CANDIDATES:
        raise ConfigError(
            f"attack {attack.name!r}: candidates: {file!r} has {len(sequences):,} texts: give at "
            f"most {MOST_CANDIDATES:,}"
        )
    first_row: dict[tuple[int, ...], int] = {}
    for row, ids in enumerate(sequences, start=1):
        if first_row.setdefault(ids, row) != row:
            raise ConfigError(
                f"attack {attack.name!r}: candidates: rows {first_row[ids]} and {row} of {file!r} "
                "have the same text to the model: remove one"
            )
    return {"sequences": sequences, "labels": corpus.labels if classifies else ()}


def outline(experiment: Experiment, num_labels: int) -> LanguageModel:
    """Returns the model with its tokenizer and names, but without weights."""
    return loading.outline(experiment.model_spec(num_labels))


def divide(experiment: Experiment, split: data.Split, model: LanguageModel) -> Workload:
    """Tokenises the data, divides it among the clients, and plants secrets among their texts.

    Raises:
        ConfigError: A text that is too long, a client without data, or secrets that cannot be made.
    """
    table, max_length = experiment.federation, experiment.data.max_length
    train, held_out = split.train, split.held_out
    sequences = _tokenised(train.texts, model, max_length)
    parts: list[list[int]] = [[] for _ in range(table.clients)]
    if not experiment.data.on_nodes:
        parts = data.partition(
            train.labels,
            table.clients,
            how=table.partition,
            alpha=table.alpha,
            seed=experiment.seed,
        )
    kept = _tokenised(held_out.texts, model, max_length)
    for secret in secrets(experiment, kept, model):
        if secret.count:
            parts[secret.client] += range(len(sequences), len(sequences) + secret.count)
            sequences += [secret.ids] * secret.count
    return Workload(
        sequences=sequences,
        labels=(*train.labels, *[0] * (len(sequences) - len(train.labels))),
        parts=parts,
        held_out=kept,
        held_out_labels=held_out.labels,
    )


def _tokenised(
    texts: Sequence[str], model: LanguageModel, max_length: int | None
) -> list[tuple[int, ...]]:
    """Returns the tokens of each text; the loss counts at least one of them.

    Raises:
        ConfigError: A text that is too long, or has no response.
    """
    limit = model.max_length
    sequences = data.tokenise(texts, model.encode, limit=limit, max_length=max_length)
    if without := target_counts(model, sequences).count(0):
        words = model.decode(model.response_template)
        raise ConfigError(
            f"{without} of {len(sequences)} texts have nothing behind model.response_template = "
            f"{words!r}, or less than data.max_length leaves: let data.text be a template that has "
            "it, raise data.max_length, or set model.response_template = ''"
        )
    return sequences


def unknown_fraction(workload: Workload, model: LanguageModel) -> float:
    """Returns the share of the content tokens of all texts that stand for unknown words.

    Raises:
        ConfigError: The share is above `MOST_UNKNOWN`, or a text has no content.
    """
    unknown = model.unknown_ids()
    contents = [model.content(ids) for ids in (*workload.sequences, *workload.held_out)]
    if empty := contents.count(()):
        raise ConfigError(
            f"{empty} of {len(contents)} texts have no token: the tokenizer of model.name knows "
            "nothing in them: remove them, or choose another model"
        )
    count = sum(map(len, contents))
    if not count:  # all texts are on nodes
        return 0.0
    fraction = sum(token in unknown for ids in contents for token in ids) / count
    if fraction > MOST_UNKNOWN:
        raise ConfigError(
            f"{fraction:.0%} of the {count:,} tokens of {len(contents):,} texts are unknown to the "
            "tokenizer of model.name: choose a model of the data's language and script"
        )
    return fraction
