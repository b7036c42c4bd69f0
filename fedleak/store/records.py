"""The lines of a run's files, checked when they are read back: a damaged one is not a wrong score.

A check says what is wrong and where, without what stands there, which may be private.
"""

from collections.abc import Iterable
from itertools import chain
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from fedleak.reconstruction import Status
from fedleak.store.run import Parse, json_object


class _Line(BaseModel):
    """A line that may have other fields too."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    round: int
    client: int


class _Answer(_Line):
    """A line of reconstructions.jsonl, as far as it is read again."""

    attack: str
    settings: dict[str, Any]
    granted: list[str]
    knows: list[str]
    seconds: float | None
    device: str | None
    status: Status
    sequences: list[list[int]] | None
    margins: list[float | None]
    tokens: list[int] | None
    facts: dict[str, Any]
    diagnostics: dict[str, Any]
    verified: bool
    reason: str
    fingerprint: str


class _Attempt(_Line):
    """A line of attempts.jsonl."""

    attack: str
    reason: str


class _Utility(BaseModel):
    """A line of utility.jsonl."""

    round: int


class _Spent(_Line):
    """A line of privacy.jsonl."""

    epsilon: float | str
    delta: float | None
    accountant: str
    unit: str
    neighbouring: str
    sampling: str
    sampling_rate: float | None
    steps: int | None
    noise_multiplier: float | None


class _Defended(_Line):
    """A line of defenses.jsonl."""

    defense: int
    kind: str


def of_shape(shape: type) -> Parse:
    """Returns what reads a line that holds the fields of a class; it may hold others."""
    adapter: TypeAdapter[Any] = TypeAdapter(shape)

    def parse(line: bytes) -> dict[str, Any]:
        try:
            adapter.validate_json(line, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            message = first["msg"]
            raise ValueError(f"{where}: {message}" if where else message) from None
        return json_object(line)

    return parse


ATTEMPT, UTILITY = of_shape(_Attempt), of_shape(_Utility)
SPENT, DEFENDED = of_shape(_Spent), of_shape(_Defended)
_ANSWER = of_shape(_Answer)


def answer(fingerprint: str | None, vocabulary: int | None = None) -> Parse:
    """Returns what reads a line of reconstructions.jsonl.

    Args:
        fingerprint: Of the experiment: answers of another are refused.
        vocabulary: Token ids that the model has; None: not known here.
    """

    def parse(line: bytes) -> dict[str, Any]:
        row = _ANSWER(line)
        if row["fingerprint"] != fingerprint:
            raise ValueError("it answers for another experiment")
        ids = chain(row["tokens"] or (), *(row["sequences"] or ()))
        if vocabulary is not None and not within(ids, vocabulary):
            raise ValueError(f"it has token ids outside the vocabulary of {vocabulary}")
        return row

    return parse


def within(ids: Iterable[int], vocabulary: int) -> bool:
    """Returns whether all are ids of a vocabulary of this size."""
    return all(0 <= each < vocabulary for each in ids)
