"""Texts with labels: from the hub, from a file, or built in; their tokens; who gets which.

A data set is named by a hub id, the path of a csv, tsv, jsonl or parquet file (`data.files`), or
`builtin/notes`. tsv files are read without quoting (as GLUE's are), csv files with it. Texts are
private: no refusal quotes one.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fedleak.data import files
from fedleak.data.notes import notes
from fedleak.util.errors import ConfigError
from fedleak.util.lists import first_of
from fedleak.util.rng import stream, stream_seed
from fedleak.util.sanitise import is_whole

if TYPE_CHECKING:
    from datasets import Dataset

BUILTIN: Mapping[str, str] = {
    "notes": "invented private sentences (health or not), made here; any number up to 100,000"
}


class HubSet(NamedTuple):
    """Where a well-known data set is on the hub; its column `label` has the classes."""

    path: str
    subset: str | None
    text: str
    about: str


HUB: Mapping[str, HubSet] = {
    "glue/cola": HubSet("nyu-mll/glue", "cola", "sentence", "grammatical or not"),
    "glue/sst2": HubSet("nyu-mll/glue", "sst2", "sentence", "film reviews, short phrases"),
    "rotten_tomatoes": HubSet(
        "cornell-movie-review-data/rotten_tomatoes", None, "text", "film reviews, sentences"
    ),
}


_TEXT_COLUMNS = {"body", "comment", "content", "message", "note", "review", "sentence", "text"}
"""Usual names of text columns; no text consists of one of these words alone."""

_ENOUGH_ROWS = 10
"""In at least so many rows, a class that only the first row has is the name of the column."""


HELD_OUT_SHARE, MOST_HELD_OUT = 0.2, 100
"""Examples that are held out by default: this share of all, and at most so many."""


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
    """What the clients train on, and what no client ever sees.

    Attributes:
        train, held_out: The examples.
        dropped: Rows without text, which were left out.
    """

    train: Corpus
    held_out: Corpus
    dropped: int = 0


def read_split(
    name: str,
    *,
    split: str,
    text: str | int | None,
    label: str | int | None,
    samples: int | None,
    held_out: int | float | None,
    seed: int,
    classes: bool = True,
    drop_empty: bool = False,
    encoding: str | None = None,
    delimiter: str | None = None,
) -> Split:
    """Reads a data set and draws disjoint training and held-out examples from it.

    Args:
        name: A hub id, a file, or `builtin/notes`.
        split: The hub split; a file is one split.
        text, label: Columns, by name, or by number (from 0) in a file without a header line; or a
            template of the text, with names of columns in braces.
        samples: Training examples; None: all that are not held out.
        held_out: How many, or a share of all examples; None: a default.
        seed: Of the draw.
        classes: Whether anybody uses the classes; else labels are not looked at.
        drop_empty: Leave out rows without text, which are refused otherwise.
        encoding: Of a file; None: UTF-8.
        delimiter: Of a csv or tsv file; None: a comma, or a tab.

    Raises:
        ConfigError: No such data, a column that is missing, empty texts, or too few examples.
    """
    dropped = 0
    if name.startswith("builtin/"):
        _refuse_format(name, encoding, delimiter)
        if samples is None or held_out is None:
            raise ConfigError(
                f"data.name = {name!r} has as many examples as are asked for: set data.samples and "
                "data.held_out"
            )
        corpus = _builtin(name, sum(_sizes(samples, held_out, 0)), text)
    else:
        wanted = label if classes else None
        rows, text, label_column = _rows(name, split, text, wanted, encoding, delimiter)
        corpus, dropped = _corpus(name, rows, text, label_column if classes else None, drop_empty)
    training, kept = _sizes(samples, held_out, len(corpus))
    if samples is None and training < 1:
        raise ConfigError(
            f"data.held_out = {held_out} leaves nothing to train on, because {name!r} has "
            f"{len(corpus)} examples: lower it"
        )
    if len(corpus) < training + kept:
        raise ConfigError(
            f"data.samples = {samples} and data.held_out = {held_out} need {training + kept} "
            f"examples, but {name!r} has {len(corpus)}: lower one of them, or leave out "
            "data.samples to use all"
        )
    order = torch.randperm(len(corpus), generator=stream(seed, "data")).tolist()
    used, held_back = order[:training], order[training : training + kept]
    return Split(corpus.take(used), corpus.take(held_back), dropped)


def read_own(
    path: Path,
    *,
    text: str | int | None,
    label: str | int | None,
    classes: Sequence[str] | None,
    drop_empty: bool = False,
    encoding: str | None = None,
    delimiter: str | None = None,
    what: str = "the node's data",
) -> Corpus:
    """Reads a whole file, such as one node's, whose class names are given.

    Args:
        path: The file.
        text, label: Columns, as for `read_split`.
        classes: Names of the classes, in the order of their numbers; None: nobody uses them.
        drop_empty, encoding, delimiter: As for `read_split`.
        what: What a refusal calls the file.

    Raises:
        ConfigError: No such file, a column that is missing, empty texts, or another class.
    """
    if not files.TableFile(path=path).known:
        raise ConfigError(f"{what} {str(path)!r} is not a {files.KNOWN} file: give one")
    if classes is not None and label is None:
        raise ConfigError("data.label is missing: name the column of the nodes' files")
    wanted = None if classes is None else label
    rows, text, label_column = _rows(str(path), "train", text, wanted, encoding, delimiter)
    corpus, _ = _corpus(str(path), rows, text, label_column, drop_empty, classes)
    if not len(corpus):
        raise ConfigError(f"{what} {str(path)!r} has no rows: give a file with some")
    return corpus


def _sizes(samples: int | None, held_out: int | float | None, there: int) -> tuple[int, int]:
    """Returns how many examples train and how many are held out, of those that are there."""
    if held_out is None:
        held_out = min(MOST_HELD_OUT, round(HELD_OUT_SHARE * there))
    elif isinstance(held_out, float):
        # A share of the examples used: of all, if the number that train is not given.
        used = there if samples is None else samples / (1 - held_out)
        held_out = max(1, round(held_out * used))
    return there - held_out if samples is None else samples, held_out


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
    if how == "iid":  # the order is random already
        return [part.tolist() for part in np.array_split(np.arange(len(labels)), clients)]
    from datasets import Dataset  # both here, because they take two seconds
    from flwr_datasets.partitioner import DirichletPartitioner

    partitioner = DirichletPartitioner(
        clients,
        partition_by="label",
        alpha=alpha,
        min_partition_size=1,
        seed=stream_seed(seed, "partition") % 2**32,
    )
    columns = {"index": list(range(len(labels))), "label": list(labels)}
    partitioner.dataset = Dataset.from_dict(columns)
    try:
        return [list(partitioner.load_partition(client)["index"]) for client in range(clients)]
    except ValueError as error:
        raise ConfigError(
            f"federation.alpha = {alpha} leaves a client with no data among {clients}: raise it, "
            f"or data.samples, or use fewer clients"
        ) from error


_NAMED = 10
"""Classes that an error names."""


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
    try:
        sequences = [tuple(ids) for ids in encode(texts)] if texts else []
    except Exception as error:  # whatever a tokenizer of others raises
        if damaged := [number for number, text in enumerate(texts, 1) if not is_whole(text)]:
            raise ConfigError(
                f"text {damaged[0]} of {len(texts)} is damaged: it has half of a character (a lone "
                "surrogate): write it again"
            ) from error
        raise ConfigError(
            f"the tokenizer of model.name fails on the data ({type(error).__name__}): save the one "
            "that the model was trained with beside it"
        ) from error
    if max_length is not None:
        sequences = [
            ids if len(ids) <= max_length else (*ids[: max_length - 1], ids[-1])
            for ids in sequences
        ]
    if too_long := [len(ids) for ids in sequences if len(ids) > limit]:
        raise ConfigError(
            f"{len(too_long)} of {len(sequences)} texts have more than the {limit} tokens that the "
            f"model takes (the longest has {max(too_long)}): set data.max_length = {limit} to cut "
            "them"
        )
    return sequences


def _pieces(template: str) -> list[tuple[str, str | None]]:
    """Returns the words of a template, each with the column behind them; None: there is none.

    Raises:
        ConfigError: A brace that nothing closes, or more than a name in braces.
    """
    try:
        pieces = list(Formatter().parse(template))
        if any(name == "" or more or conversion for _, name, more, conversion in pieces):
            raise ValueError
    except ValueError as error:
        raise ConfigError(
            f"data.text = {template!r}: write the names of columns in braces, as in "
            "'{instruction} {response}', and other braces twice"
        ) from error
    return [(words, name) for words, name, _, _ in pieces]


def _filled(text: str, row: Mapping[str, str]) -> str:
    """Returns the text of a row: its only column, or the template with its columns."""
    if text in row:
        return row[text]
    return "".join(words + ("" if name is None else row[name]) for words, name in _pieces(text))


def _columns(text: str, names: Sequence[str]) -> list[str]:
    """Returns the columns that a text is made of: that of this name, or those of a template."""
    if text in names:
        return [text]
    return list(dict.fromkeys(name for _, name in _pieces(text) if name is not None)) or [text]


def _builtin(name: str, needed: int, text: str | int | None) -> Corpus:
    if name.removeprefix("builtin/") not in BUILTIN:
        known = ", ".join("builtin/" + known for known in BUILTIN)
        raise ConfigError(f"data.name = {name!r}: there is only {known}")
    try:
        written = notes(needed)
    except ValueError as error:
        raise ConfigError(f"data.samples: {error}") from error
    labels, names = tuple(note.label for note in written), ("other", "health")
    instructions = ("Write down a note.", "Write down a note about health.")
    rows = [
        {"text": note.text, "instruction": instructions[note.label], "response": note.text}
        for note in written
    ]
    template = "text" if text is None else str(text)
    if unknown_names := sorted({*_columns(template, list(rows[0]))} - rows[0].keys()):
        raise ConfigError(
            f"data.text = {template!r}: {name!r} has no column {unknown_names[0]!r}: it has "
            f"{', '.join(rows[0])}"
        )
    return Corpus(tuple(_filled(template, row) for row in rows), labels, names)


def _rows(
    name: str,
    split: str,
    text: str | int | None,
    label: str | int | None,
    encoding: str | None,
    delimiter: str | None,
) -> "tuple[Dataset, str, str | None]":
    """Returns the table, and the names of its text and label columns."""
    path = Path(os.path.expanduser(name))
    if name in HUB and not path.exists():
        known = HUB[name]
        _refuse_format(name, encoding, delimiter)
        rows = _from_hub(name, known.path, known.subset, split)
        return rows, known.text if text is None else str(text), "label"
    if text is None:
        raise ConfigError(f"data.text is missing: name the column of {name!r} that holds the text")
    bare = isinstance(text, int) or isinstance(label, int)
    file = files.TableFile(path=path, bare=bare, encoding=encoding, delimiter=delimiter)
    text, label = str(text), None if label is None else str(label)
    if not file.known:
        if name.startswith((".", "/", "~")) or path.exists():
            raise ConfigError(
                f"data.name = {name!r} is not a {files.KNOWN} file that exists: give one"
            )
        _refuse_format(name, encoding, delimiter)
        rows = _from_hub(name, name, None, split)
    elif path.is_file():
        rows = file.read_dataset()
    else:
        raise ConfigError(f"data.name = {name!r}: there is no such file: check the path")
    columns = [("data.text", column) for column in _columns(text, rows.column_names)]
    for key, column in [*columns, *([] if label is None else [("data.label", label)])]:
        _check_column(name, key, column, rows, file)
    if bare and _begins_with_header(rows, text, label):
        raise ConfigError(
            f"data.text = {text}: columns of a file without a header line go by number, and the "
            f"first line of {name!r} looks like one: name the columns, or remove that line"
        )
    return rows, text, label


def _from_hub(name: str, path: str, subset: str | None, split: str) -> "Dataset":
    from datasets import load_dataset

    try:
        return load_dataset(path, subset, split=split)
    except Exception as error:
        raise ConfigError(
            f"data.name = {name!r}, split {split!r}, cannot be loaded from the hub "
            f"({type(error).__name__}: {' '.join(str(error).split())[:120]}): check the name, or "
            f"give a {files.KNOWN} file, or builtin/notes"
        ) from error


def _refuse_format(name: str, encoding: str | None, delimiter: str | None) -> None:
    """Refuses an encoding or a delimiter if the data is not a file."""
    for key, value in (("data.encoding", encoding), ("data.delimiter", delimiter)):
        if value is not None:
            raise ConfigError(f"{key} = {value!r} is for files, and {name!r} is none: leave it out")


def _check_column(name: str, key: str, column: str, rows: "Dataset", file: files.TableFile) -> None:
    """Refuses a column that is not there, or is there twice."""
    names = [str(column_name) for column_name in rows.column_names]
    if column not in names and file.bare and not column.isdigit():
        raise ConfigError(
            f"{key} = {column!r} is a name, and the other column of {name!r} is a number, as in a "
            "file without a header line: give two names or two numbers"
        )
    if column not in names:
        wanted = "choose one"
        if file.separated and (mark := files.hidden_delimiter(names)):
            wanted += f", or set data.delimiter = {mark!r}"
        raise ConfigError(
            f"{key} = {column!r} is not a column of {name!r}: it has {files.shown(names)}: {wanted}"
        )
    if file.separated and not file.bare and file.header().count(column) > 1:
        raise ConfigError(
            f"{key} = {column!r} is the name of two columns of {name!r}: rename one of them"
        )


def _begins_with_header(rows: "Dataset", text: str, label: str | None) -> bool:
    """Whether the first row of a file that should have no header line is one.

    Its text is a usual name of a text column, or it is the only row with a class that no other has.
    """
    if str(rows[text][0]).strip().lower() in _TEXT_COLUMNS:
        return True
    if label is None:
        return False
    alone = [value for value, count in Counter(rows[label][:]).items() if count == 1]
    return len(rows) >= _ENOUGH_ROWS and alone == [rows[label][0]]


def _corpus(
    name: str,
    rows: "Dataset",
    text: str,
    label: str | None,
    drop_empty: bool,
    classes: Sequence[str] | None = None,
) -> tuple[Corpus, int]:
    """Returns what is in the columns of a table, and how many rows without text were left out."""
    columns = _columns(text, rows.column_names)
    cells = {column: [_as_text(value) for value in rows[column][:]] for column in columns}
    for column, values in cells.items():
        for number, value in enumerate(values, start=1):
            if value is None:
                raise ConfigError(
                    f"data.text = {column!r} holds no text in row {number} of {name!r} but a list "
                    "or a table: name another column"
                )
            if "\0" in value:
                raise ConfigError(
                    f"data.text = {column!r} has a NUL character in row {number} of {name!r}: the "
                    "file is damaged, or data.encoding is another: remove that character"
                )
    kept = [i for i in range(len(rows)) if any((v[i] or "").strip() for v in cells.values())]
    empty = len(rows) - len(kept)
    if empty and not drop_empty:
        first = next(i for i, j in enumerate([*kept, -1]) if i != j)
        raise ConfigError(
            f"data.name = {name!r}: {empty} of {len(rows)} rows have no text in column {text!r} "
            f"(the first is row {first + 1}): remove them, or set data.drop_empty = true"
        )
    texts = tuple(_filled(text, {c: values[i] or "" for c, values in cells.items()}) for i in kept)
    if label is None:
        return Corpus(texts, (0,) * len(texts), ("none",)), empty
    labels, names = _classes(name, rows, label, kept, classes)
    return Corpus(texts, labels, names), empty


def _as_text(value: Any) -> str | None:
    """Returns a cell as text, a number by its digits; None if it is neither text nor number."""
    if _absent(value):
        return ""
    return str(value) if isinstance(value, str | int | float) else None


def _absent(value: Any) -> bool:
    """Whether a cell is empty."""
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _classes(
    name: str,
    rows: "Dataset",
    label: str,
    kept: Sequence[int],
    known: Sequence[str] | None = None,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Returns the class of each row that is kept, and the names of the classes.

    The names are those in `known`; if it is None, those that the rows have.
    """
    from datasets import ClassLabel

    feature, column = rows.features[label], rows[label][:]
    numbered = isinstance(feature, ClassLabel)
    values: list[Any] = [value.strip() if isinstance(value, str) else value for value in column]
    missing = [i for i in kept if _absent(values[i]) or (numbered and values[i] < 0)]
    if missing:
        raise ConfigError(
            f"data.label = {label!r}: {len(missing)} of {len(kept)} rows of {name!r} have no "
            f"label (the first is row {missing[0] + 1}): remove them"
        )
    if isinstance(feature, ClassLabel):
        if known is None:
            return tuple(values[i] for i in kept), tuple(feature.names)
        values = [value if _absent(value) else feature.names[value] for value in values]
    names = sorted({str(values[i]) for i in kept}) if known is None else list(known)
    if unnamed := [str(values[i]) for i in kept if str(values[i]) not in names]:
        known_ones = first_of(map(repr, names), _NAMED, more=", ...")
        raise ConfigError(
            f"column {label!r} of {name!r} has a class in {len(unnamed)} of {len(kept)} rows that "
            f"the experiment does not know, such as {unnamed[0]!r}: its classes are {known_ones}"
        )
    if len(names) < 2 or len(names) > 1000:
        raise ConfigError(
            f"data.label = {label!r} has {len(names)} distinct values: a classifier needs 2 to 1000"
        )
    number = {value: i for i, value in enumerate(names)}
    return tuple(number[str(values[i])] for i in kept), tuple(names)
