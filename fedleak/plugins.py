"""One new attack, defense or model family is one new file: this finds it."""

import importlib
import pkgutil
from types import ModuleType


def discover(package: ModuleType, key: str = "kind") -> dict[str, type]:
    """Returns the classes that the modules of `package` define, by their attribute `key`."""
    found: dict[str, type] = {}
    for info in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        module = importlib.import_module(info.name)
        for thing in vars(module).values():
            if not isinstance(thing, type) or thing.__module__ != module.__name__:
                continue
            kind = vars(thing).get(key)
            if isinstance(kind, str):
                if kind in found:
                    raise TypeError(f"{found[kind]} and {thing} are both of {key} {kind!r}")
                found[kind] = thing
    return found
