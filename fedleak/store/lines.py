"""Typed values in JSON: `Lines` are a JSONL file with one value a line, a `Document` is one value.

Every value is checked when it is read back, so that a damaged file cannot cause a wrong score. The
error says what is wrong and where, but does not quote the value, which may be private.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from fedleak.store.files import complete_lines, one_line, parse_json, read_file
from fedleak.store.seal import sealed, without
from fedleak.util.errors import FedleakError

SCHEMA_VERSION = 2
"""The version of run.json and the files beside it: 2 has the experiment's fingerprint."""


class Record(BaseModel):
    """A value that a file of a run holds; the file may hold other fields too."""

    model_config = ConfigDict(strict=True, frozen=True, allow_inf_nan=False)


class Measured(Record):
    """A record with further fields, each a figure with a name of its own."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float | None] = Field(init=False)

    @property
    def figures(self) -> Mapping[str, float | None]:
        """The figures by name; None: not a finite number."""
        return self.__pydantic_extra__


T = TypeVar("T")


@dataclass(frozen=True)
class Lines(Generic[T]):
    """A JSONL file of a run.

    Attributes:
        name: The name of the file.
        value_type: What a line holds.
        mark: Fields that every line has beside the value. Lines with another mark are refused.
        check: Raises ValueError for a value that cannot belong here.
        sealed: Whether each line carries a seal.
    """

    name: str
    value_type: type[T]
    mark: Mapping[str, str | None] = field(default_factory=dict)
    check: Callable[[T], None] = lambda value: None
    sealed: bool = False

    def parse_line(self, line: bytes) -> T:
        """Reads a line.

        Raises:
            ValueError: It does not hold such a value.
        """
        table = parse_json(line)
        if not isinstance(table, dict):
            raise ValueError(f"a table was expected, not a {type(table).__name__}")
        if self.sealed:
            line = json.dumps(without(table)).encode()
        value = validated(self.value_type, line)
        if any(table.get(key) != mark for key, mark in self.mark.items()):
            raise ValueError("it is of another experiment")
        self.check(value)
        return value

    def read(self, path: Path) -> tuple[list[tuple[T, bytes]], list[tuple[int, bytes, str]]]:
        """Returns the values of a file with their lines; damaged lines with number and reason.

        There are none if there is no file.
        """
        rows: list[tuple[T, bytes]] = []
        damaged: list[tuple[int, bytes, str]] = []
        for number, line in enumerate(complete_lines(path), 1):
            try:
                rows.append((self.parse_line(line), line))
            except ValueError as error:
                damaged.append((number, line, one_line(error)))
        return rows, damaged

    def written(self, value: T, place: str | None = None) -> str:
        """Returns a value as a line, without the newline.

        Args:
            value: What the line holds.
            place: Where the line belongs, for its seal; None: it gets no seal.

        Raises:
            ValueError: JSON cannot hold it.
        """
        table = {**_adapter(self.value_type).dump_python(value), **self.mark}  # type: ignore[arg-type]
        return json.dumps(table if place is None else sealed(place, table), allow_nan=False)


@dataclass(frozen=True)
class Document(Generic[T]):
    """A JSON file of one value, with the version of its fields.

    Attributes:
        name: The name of the file.
        value_type: What it holds.
        remedy: What to do if it cannot be read.
    """

    name: str
    value_type: type[T]
    remedy: str

    def parse(self, content: bytes) -> T:
        """Reads the content of the file.

        Raises:
            ValueError: It does not hold such a value, or another version of it.
        """
        table = parse_json(content)
        if not isinstance(table, dict):
            raise ValueError(f"it holds a {type(table).__name__}, not a table")
        if (version := table.get("schema_version")) != SCHEMA_VERSION:
            raise ValueError(
                f"it has schema_version {version!r}, and this fedleak reads {SCHEMA_VERSION}"
            )
        return validated(self.value_type, content)

    def read(self, path: Path) -> T:
        """Reads the file.

        Raises:
            FedleakError: It is missing, damaged, or of another version of fedleak.
        """
        content = read_file(path)
        try:
            return self.parse(content)
        except ValueError as error:
            reason = one_line(error)
            raise FedleakError(f"{path} cannot be read ({reason}): {self.remedy}") from error

    def written(self, value: T) -> bytes:
        """Returns the content of the file."""
        table = {"schema_version": SCHEMA_VERSION, **_adapter(self.value_type).dump_python(value)}  # type: ignore[arg-type]
        return (json.dumps(table, indent=1, allow_nan=False) + "\n").encode()


def validated(expected_type: type[T], content: bytes) -> T:
    """Reads a value from JSON.

    Raises:
        ValueError: It is not of the type; the message quotes nothing of the content.
    """
    try:
        value: T = _adapter(expected_type).validate_json(content, strict=True)  # type: ignore[arg-type]
        return value
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        message = first["msg"]
        raise ValueError(f"{where}: {message}" if where else message) from None


@cache
def _adapter(expected_type: Any) -> TypeAdapter[Any]:
    """Returns the adapter that checks values of a type; making it takes a hundredth of a second."""
    return TypeAdapter(expected_type)
