"""Texts with labels: from the hub, from a file, or built in; their tokens; who gets which.

A data set is named by a hub id, the path of a csv, tsv, jsonl or parquet file, or
`builtin/notes`. tsv files are read without quoting (as GLUE's are), csv files with it.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from datasets import ClassLabel, Dataset, load_dataset
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner

from fedleak.errors import ConfigError
from fedleak.notes import notes
from fedleak.streams import stream, stream_seed

BUILTIN: Mapping[str, str] = {
    "notes": "invented private sentences (health or not), made here; any number up to 100,000"
}


class HubSet(NamedTuple):
    """Where a well-known data set is on the hub, and its columns."""

    path: str
    subset: str | None
    text: str
    label: str
    about: str


HUB: Mapping[str, HubSet] = {
    "glue/cola": HubSet("nyu-mll/glue", "cola", "sentence", "label", "grammatical or not"),
    "glue/sst2": HubSet("nyu-mll/glue", "sst2", "sentence", "label", "film reviews, short phrases"),
    "rotten_tomatoes": HubSet(
        "cornell-movie-review-data/rotten_tomatoes",
        None,
        "text",
        "label",
        "film reviews, sentences",
    ),
}


@dataclass(frozen=True)
class Corpus:
    """Texts, the class of each, and the names of the classes."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]
    label_names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: Sequence[int]) -> "Corpus":
        """Returns these examples, in this order."""
        return Corpus(
            tuple(self.texts[i] for i in indices),
            tuple(self.labels[i] for i in indices),
            self.label_names,
        )


class Split(NamedTuple):
    """What the clients train on, and what no client ever sees."""

    train: Corpus
    held_out: Corpus


def read(
    name: str,
    *,
    split: str,
    text: str | int | None,
    label: str | int | None,
    samples: int,
    held_out: int,
    seed: int,
) -> Split:
    """Reads a data set and draws disjoint training and held-out examples from it.

    Args:
        name: A hub id, a file, or `builtin/notes`.
        split: The hub split; a file is one split.
        text, label: Columns, by name, or by number (from 0) in a file without a header line.
        samples, held_out: How many examples of each.
        seed: Of the draw.

    Raises:
        ConfigError: No such data, a column that is missing, empty texts, or too few examples.
    """
    needed = samples + held_out
    if name.startswith("builtin/"):
        corpus = _builtin(name, needed)
    else:
        rows, text, label = _rows(name, split, text, label)
        corpus = _corpus(name, rows, text, label)
    if len(corpus) < needed:
        raise ConfigError(
            f"data.samples = {samples} and data.held_out = {held_out} need {needed} examples, but "
            f"{name!r} has {len(corpus)}: lower one of them"
        )
    order = torch.randperm(len(corpus), generator=stream(seed, "data")).tolist()
    return Split(corpus.take(order[:samples]), corpus.take(order[samples:needed]))


def partition(
    labels: Sequence[int], clients: int, *, how: str, alpha: float, seed: int
) -> list[list[int]]:
    """Returns the indices of each client's examples.

    Args:
        labels: The class of each example.
        clients: Number of clients.
        how: "iid" or "dirichlet" (over classes).
        alpha: Concentration of the Dirichlet distribution; small is uneven.
        seed: Of the draw.

    Raises:
        ConfigError: A client would have no data.
    """
    if clients > len(labels):
        raise ConfigError(
            f"federation.clients = {clients} leaves a client with no data: data.samples is only "
            f"{len(labels)}; raise it or use fewer clients"
        )
    table = Dataset.from_dict({"index": list(range(len(labels))), "label": list(labels)})
    partitioner = (
        IidPartitioner(clients)
        if how == "iid"
        else DirichletPartitioner(
            clients,
            partition_by="label",
            alpha=alpha,
            min_partition_size=1,
            seed=stream_seed(seed, "partition") % 2**32,
        )
    )
    partitioner.dataset = table
    try:
        return [list(partitioner.load_partition(client)["index"]) for client in range(clients)]
    except ValueError as error:
        raise ConfigError(
            f"federation.alpha = {alpha} leaves a client with no data among {clients}: raise it, "
            f"or data.samples, or use fewer clients"
        ) from error


def tokenise(
    texts: Sequence[str],
    encode: Callable[[Sequence[str]], list[list[int]]],
    *,
    limit: int,
    max_length: int | None,
) -> list[tuple[int, ...]]:
    """Returns each text's token ids.

    Args:
        texts: The texts.
        encode: The model's encoder.
        limit: Tokens that the model takes.
        max_length: Cut longer texts to this many tokens, keeping the last token (the end mark).

    Raises:
        ConfigError: A text is longer than the model takes and `max_length` does not cut it.
    """
    if max_length is not None and max_length > limit:
        raise ConfigError(
            f"data.max_length = {max_length} is more than the model takes: set {limit} or less"
        )
    sequences = []
    for text, ids in zip(texts, encode(texts) if texts else [], strict=True):
        if max_length is not None and len(ids) > max_length:
            ids = [*ids[: max_length - 1], ids[-1]]
        if len(ids) > limit:
            raise ConfigError(
                f"a text has {len(ids)} tokens and the model takes {limit} ({text[:40]!r}...): set "
                f"data.max_length = {limit} to cut such texts"
            )
        sequences.append(tuple(ids))
    return sequences


def _builtin(name: str, needed: int) -> Corpus:
    if name.removeprefix("builtin/") not in BUILTIN:
        known = ", ".join("builtin/" + known for known in BUILTIN)
        raise ConfigError(f"data.name = {name!r}: there is only {known}")
    try:
        written = notes(needed)
    except ValueError as error:
        raise ConfigError(f"data.samples: {error}") from error
    return Corpus(
        tuple(n.text for n in written), tuple(n.label for n in written), ("other", "health")
    )


def _rows(
    name: str, split: str, text: str | int | None, label: str | int | None
) -> tuple[Dataset, str, str | None]:
    """Returns the table, and the names of its text and label columns."""
    path = Path(name).expanduser()
    if name in HUB and not path.exists():
        known = HUB[name]
        return _from_hub(name, known.path, known.subset, split), known.text, known.label
    if text is None:
        raise ConfigError(f"data.text is missing: name the column of {name!r} that holds the text")
    if path.suffix in _READERS:
        if not path.is_file():
            raise ConfigError(f"data.name = {name!r}: there is no such file")
        bare = isinstance(text, int) or isinstance(label, int)
        try:
            rows = _READERS[path.suffix](str(path), bare)
        except Exception as error:
            raise ConfigError(f"data.name = {name!r} cannot be read: {error}") from error
        return rows, str(text), None if label is None else str(label)
    if name.startswith((".", "/", "~")) or path.exists():
        raise ConfigError(
            f"data.name = {name!r} is not a {', '.join(sorted(_READERS))} file that exists"
        )
    return _from_hub(name, name, None, split), str(text), None if label is None else str(label)


def _from_hub(name: str, path: str, subset: str | None, split: str) -> Dataset:
    try:
        return load_dataset(path, subset, split=split)
    except Exception as error:
        raise ConfigError(
            f"data.name = {name!r}, split {split!r}, cannot be loaded from the hub "
            f"({type(error).__name__}: {' '.join(str(error).split())[:120]}): check the name, or "
            f"give a {', '.join(sorted(_READERS))} file, or builtin/notes"
        ) from error


def _from_table(path: str, bare: bool, **options: Any) -> Dataset:
    if bare:
        options |= {"header": None, "names": None}
    # "None" and "NA" are words like others.
    options |= {"keep_default_na": False}
    rows = Dataset.from_csv(path, keep_in_memory=True, **options)
    return rows.rename_columns({c: str(c) for c in rows.column_names if not isinstance(c, str)})


_READERS: Mapping[str, Callable[[str, bool], Dataset]] = {
    ".csv": lambda path, bare: _from_table(path, bare),
    ".tsv": lambda path, bare: _from_table(path, bare, sep="\t", quoting=csv.QUOTE_NONE),
    ".jsonl": lambda path, bare: Dataset.from_json(path, keep_in_memory=True),
    ".parquet": lambda path, bare: Dataset.from_parquet(path, keep_in_memory=True),
}


def _corpus(name: str, rows: Dataset, text: str, label: str | None) -> Corpus:
    for key, column in (("data.text", text), ("data.label", label)):
        if column is not None and column not in rows.column_names:
            raise ConfigError(
                f"{key} = {column!r} is not a column of {name!r}: it has "
                f"{', '.join(map(str, rows.column_names))}"
            )
    texts = rows[text][:]
    empty = [i for i, t in enumerate(texts) if not isinstance(t, str) or not t.strip()]
    if empty:
        raise ConfigError(
            f"data.name = {name!r}: {len(empty)} of {len(texts)} rows have no text in column "
            f"{text!r} (the first is row {empty[0] + 1}): remove them"
        )
    if label is None:
        return Corpus(tuple(texts), (0,) * len(texts), ("none",))
    values = rows[label][:]
    missing = [i for i, value in enumerate(values) if value is None or value == ""]
    if missing:
        raise ConfigError(
            f"data.label = {label!r}: {len(missing)} of {len(values)} rows of {name!r} have no "
            f"label (the first is row {missing[0] + 1}): remove them"
        )
    feature = rows.features[label]
    names = feature.names if isinstance(feature, ClassLabel) else sorted({str(v) for v in values})
    if isinstance(feature, ClassLabel):
        return Corpus(tuple(texts), tuple(values), tuple(names))
    if len(names) < 2 or len(names) > 1000:
        raise ConfigError(
            f"data.label = {label!r} has {len(names)} distinct values: a classifier needs 2 to 1000"
        )
    number = {value: i for i, value in enumerate(names)}
    return Corpus(tuple(texts), tuple(number[str(v)] for v in values), tuple(names))
