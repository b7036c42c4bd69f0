"""Tables in tables and lists, as TOML and JSON have them."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns tables and lists in which all that is no table or list is changed."""
    if isinstance(value, Mapping):
        return {key: mapped(inner, change) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [mapped(inner, change) for inner in value]
    return change(value)


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns tables with others over them, key by key.

    >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
    {'a': {'b': 1, 'c': 3}}
    """
    both = {**below, **above}
    for key in below.keys() & above.keys():
        if isinstance(below[key], Mapping) and isinstance(above[key], Mapping):
            both[key] = merged(below[key], above[key])
    return both


def digest(value: Any) -> str:
    """Returns the SHA-256 of what JSON can hold, in hex digits, whatever the order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def flat(table: Mapping[str, Any], inside: str = "") -> Iterator[tuple[str, Any]]:
    """Yields each value with its dotted key; an empty table is a value."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{inside}{key}.")
        else:
            yield f"{inside}{key}", value
