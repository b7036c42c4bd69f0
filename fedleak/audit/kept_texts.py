"""Texts that the run directory keeps outside the vault: held-out texts, and lists of candidates."""

import re
from itertools import chain
from pathlib import Path

from pydantic import BaseModel, ValidationError

from fedleak.config.components import NAME, listed_as
from fedleak.store import records
from fedleak.store.run import Run
from fedleak.training.observation import Example
from fedleak.util.errors import FedleakError
from fedleak.util.sanitise import printable

REMEDY = "`fedleak run` with the experiment's file makes it anew, and nothing else is lost"


class KeptTexts(BaseModel):
    """Texts.

    Attributes:
        sequences: Their token ids.
        labels: Their classes; none in next-token training, or in a run of an older version.
    """

    sequences: list[tuple[int, ...]]
    labels: list[int] = []

    def examples(self, *, labelled: bool) -> list[Example]:
        """Returns the texts, with their classes if they are wanted and known."""
        classes = self.labels if labelled and self.labels else [None] * len(self.sequences)
        return [Example(ids, label) for ids, label in zip(self.sequences, classes, strict=True)]


def read_held_out(run: Run, vocabulary: int | None = None) -> KeptTexts:
    """Returns the texts that no client trains on.

    Args:
        run: The run directory.
        vocabulary: Token ids that the model has; None: not known here.

    Raises:
        FedleakError: The file is missing or damaged.
    """
    return _read_texts(run, Path("held_out.json"), vocabulary)


def read_candidates(run: Run, attack: str, vocabulary: int | None = None) -> KeptTexts:
    """Returns the list that an attack on membership got from a file.

    Args:
        run: The run directory.
        attack: Its name.
        vocabulary: Token ids that the model has; None: not known here.

    Raises:
        FedleakError: The copy of the file is missing or damaged.
    """
    return _read_texts(run, candidates_file(attack), vocabulary)


def candidates_file(attack: str) -> Path:
    """Returns the path in a run directory of the copy of an attack's list of candidates.

    Raises:
        FedleakError: The name, which may be a stranger's, is none that an attack can have.
    """
    name = listed_as(attack)
    if not re.fullmatch(NAME, name):
        raise FedleakError(f"{printable(repr(name))[:100]} is no name of an attack: {REMEDY}")
    return Path("candidates", f"{name}.json")


def _read_texts(run: Run, name: Path, vocabulary: int | None) -> KeptTexts:
    file = run.path / name
    try:
        texts = KeptTexts.model_validate(run.read_json(str(name)))
    except ValidationError as error:
        raise FedleakError(f"{file} is damaged (it has no list of texts): {REMEDY}") from error
    except FedleakError as error:
        raise FedleakError(f"{error}: {REMEDY}") from error
    if len(texts.labels) not in (0, len(texts.sequences)):
        raise FedleakError(f"{file} is damaged (not every text has a class): {REMEDY}")
    if vocabulary is not None and not records.within(chain(*texts.sequences), vocabulary):
        raise FedleakError(f"{file} is damaged (token ids outside the vocabulary): {REMEDY}")
    return texts
