"""One new attack, defense or model family is one new file: this finds it."""

import importlib
import pkgutil
import traceback
from collections import defaultdict
from functools import cache
from types import ModuleType
from typing import NamedTuple

from fedleak.sanitise import printable


class Found(NamedTuple):
    """What the files of a package define.

    Attributes:
        kinds: The classes by their kind.
        broken: Why files cannot be used, in one line each, by the name of the module.
    """

    kinds: dict[str, type]
    broken: dict[str, str]


@cache
def discover(package: ModuleType, key: str = "kind") -> Found:
    """Returns the classes that the modules of `package` define, by their attribute `key`.

    A file that cannot be imported is one of many: the others are found nevertheless. So are kinds
    that two files define, which are nobody's.
    """
    defined: dict[str, list[type]] = defaultdict(list)
    broken: dict[str, str] = {}
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            module = importlib.import_module(info.name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it may be anybody's file
            broken[info.name] = _reason(error)
            continue
        for thing in vars(module).values():
            if not isinstance(thing, type) or thing.__module__ != module.__name__:
                continue
            kind = vars(thing).get(key)
            if isinstance(kind, str):
                defined[kind].append(thing)
    for kind, classes in defined.items():
        if len(classes) > 1:
            names = " and ".join(f"{cls.__module__}.{cls.__qualname__}" for cls in classes)
            broken |= {cls.__module__: f"{names} have one {key}: {kind!r}" for cls in classes}
    return Found({kind: found[0] for kind, found in defined.items() if len(found) == 1}, broken)


def _reason(error: BaseException) -> str:
    """Returns an error and the line of the file that it arose in."""
    where = traceback.extract_tb(error.__traceback__)[-1:]
    if isinstance(error, SyntaxError):
        where = []  # its message has the line
    places = "".join(f" ({each.filename}, line {each.lineno})" for each in where)
    return printable(f"{type(error).__name__}: {error}{places}")[:500]
