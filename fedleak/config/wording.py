"""What is wrong with an experiment file, said in one line."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from fedleak.util.errors import ConfigError, unknown

M = TypeVar("M", bound=BaseModel)


def difference(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Returns a line `key: old -> new` for each setting that differs between two JSON tables."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in sorted(old.keys() | new.keys()):
            lines += difference(old.get(key), new.get(key), f"{prefix}{key}.")
        return lines
    return [] if old == new else [f"{prefix.removesuffix('.')}: {old!r} -> {new!r}"]


def checked(model: type[M], table: Any, where: str = "") -> M:
    """Returns a table of a file as a value.

    Args:
        model: What it has to be.
        table: What the file says.
        where: Stands before the key in a refusal.

    Raises:
        ConfigError: The first thing that is not right.
    """
    try:
        return model.model_validate(table)
    except ValidationError as error:
        raise ConfigError(f"{where}{one_line(error, model)}") from error


def one_line(error: ValidationError, model: type[BaseModel] | None) -> str:
    """Returns the first problem of a validation as `key = found: what would be right`.

    The other keys that are wrong follow in brackets.
    """
    errors = error.errors(include_url=False)
    key = _key(errors[0])
    # A value that may be of several types has a problem with each; the deepest is the nearest.
    same = [problem for problem in errors if f"{_key(problem)}.".startswith(f"{key}.")]
    deepest = max(same, key=lambda problem: len(_key(problem)))
    alike = [problem for problem in same if _key(problem) == _key(deepest)]
    others = dict.fromkeys(_key(problem) for problem in errors if problem not in same)
    more = f" (wrong as well: {', '.join(others)})" if others else ""
    return _problem(deepest, alike, model) + more


def _key(error: Mapping[str, Any]) -> str:
    """Returns the dotted key that a problem is about."""
    # Pydantic adds which member of a union it tried; a key of ours is a plain word or a number.
    parts = [str(part) for part in error["loc"] if str(part) not in ("str", "int")]
    return ".".join(part for part in parts if part.isidentifier() or part.isdigit())


def _problem(
    first: Mapping[str, Any], alike: Sequence[Mapping[str, Any]], model: type[BaseModel] | None
) -> str:
    """Returns one problem of a validation, with every value that the alike problems would take."""
    where = _key(first)
    if first["type"] == "extra_forbidden":
        table: Any = model
        for part in first["loc"][:-1]:
            table = table.model_fields[part].annotation
            # A table that may be left out is `Table | None`.
            table = next((member for member in get_args(table) if member is not type(None)), table)
        known = list(table.model_fields)
        inside = ".".join(map(str, first["loc"][:-1]))
        return (f"[{inside}] " if inside else "") + unknown("key", str(first["loc"][-1]), known)
    if first["type"] == "missing":
        return f"{where} is missing: set it"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{where}: {message}" if where else message
    wanted = dict.fromkeys(f"{problem['msg'][0].lower()}{problem['msg'][1:]}" for problem in alike)
    return f"{where} = {first['input']!r}: {', or '.join(wanted)}"
