"""Finds attacks, defenses, detectors and model families: files in the tree, and packages of others.

One new attack, defense or model family is one new file in its package. An installed distribution
adds its own with an entry point, whose group is the name of that package and whose value is the
name of a module, or of a package of modules:

    [project.entry-points."fedleak.attacks"]
    anything = "acme_attacks"
"""

import importlib
import pkgutil
import traceback
from collections import defaultdict
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import NamedTuple

from fedleak.util.sanitise import printable
from fedleak.util.versions import VERSION

OWN = f"fedleak {VERSION}"
"""The origin of what is in the tree."""


class Discovered(NamedTuple):
    """What is there of one sort: attacks, defenses or model families.

    Attributes:
        kinds: The classes by their kind.
        origins: Name and version of the distribution that each kind comes from, or `OWN`.
        broken: Why modules and entry points cannot be used, in one line each, by their name.
    """

    kinds: dict[str, type]
    origins: dict[str, str]
    broken: dict[str, str]

    def foreign(self) -> dict[str, str]:
        """Returns the origins of the kinds that are not fedleak's own."""
        return {kind: origin for kind, origin in self.origins.items() if origin != OWN}

    def cannot_be_used(self) -> str:
        """Returns the end of a message about an unknown kind; empty if nothing is broken."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.broken.items())
        return f"; cannot be used: {reasons}" if reasons else ""


def no_dataclass_of(base: type, cls: type, options: str = "frozen=True") -> str | None:
    """Returns why a class is no dataclass of a base class, and what it lacks; None if it is one."""
    if not issubclass(cls, base):
        return f"it is no {base.__name__}: let it inherit from {base.__module__}.{base.__name__}"
    return None if is_dataclass(cls) else f"it is no dataclass: put @dataclass({options}) above it"


@cache
def discover(package: ModuleType, key: str = "kind") -> Discovered:
    """Returns the classes that the modules of `package`, and of others for it, define by `key`.

    A module that cannot be imported is broken, and the others are found nevertheless. If two
    classes have the same kind, neither gets it, unless one of them is fedleak's own: what runs
    under its kind must not depend on what else is installed. A class is broken, too, if the package
    has a function `flaw` that says what is wrong with it. A package inside, with a `flaw` of its
    own, holds another sort: nothing of it is among these.

    Args:
        package: The package; its name is also the group of the entry points.
        key: The attribute of a class that names its kind.
    """
    flaw: Callable[[type], str | None] = getattr(package, "flaw", lambda cls: None)
    broken: dict[str, str] = {}
    walked: set[str] = set()
    defined: dict[str, list[tuple[type, str]]] = defaultdict(list)

    def walk(name: str, origin: str) -> int:
        """Imports a module and all that are in it, each once; returns how many classes there are.

        Notes those classes, and what cannot be imported or used.
        """
        if name in walked:
            return 0
        walked.add(name)
        try:
            module = importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it may be anybody's file
            broken[_with_origin(name, origin)] = _reason(error)
            return 0
        if origin == OWN and module is not package and hasattr(module, "flaw"):
            return 0  # it holds another sort
        classes = _classes(module, key)
        for cls in classes:
            if reason := flaw(cls):
                broken[_named(cls, origin)] = reason
            else:
                defined[vars(cls)[key]].append((cls, origin))
        inner = pkgutil.iter_modules(getattr(module, "__path__", ()), f"{name}.")
        names = [info.name for info in inner if not info.name.endswith(".__main__")]  # a program
        return len(classes) + sum(walk(within, origin) for within in names)

    walk(package.__name__, OWN)
    for point in _installed(package.__name__, broken):
        origin, before = _origin(point), len(broken)
        if not all(part.isidentifier() for part in point.value.split(".")):
            reason = (
                f"the entry point {printable(point.name)!r} must name a module, without a colon"
            )
            broken[_with_origin(point.value, origin)] = reason
        elif point.value not in walked and not walk(point.value, origin) and len(broken) == before:
            broken[_with_origin(point.value, origin)] = f"it defines no class that has a {key}"
    kinds: dict[str, type] = {}
    origins: dict[str, str] = {}
    for kind, definitions in defined.items():
        rightful = [definition for definition in definitions if definition[1] == OWN] or definitions
        if len(rightful) == 1:
            kinds[kind], origins[kind] = rightful[0]
        if len(definitions) > 1:
            names = " and ".join(_named(cls, origin) for cls, origin in definitions)
            broken |= {
                _with_origin(cls.__module__, origin): printable(f"{names} have one {key}: {kind!r}")
                for cls, origin in definitions
                if len(rightful) > 1 or (cls, origin) not in rightful
            }
    return Discovered(kinds, origins, broken)


def _classes(module: ModuleType, key: str) -> list[type]:
    """Returns the classes that a module itself defines and gives a kind."""
    return [
        member
        for member in vars(module).values()
        if isinstance(member, type)
        and member.__module__ == module.__name__
        and isinstance(vars(member).get(key), str)
    ]


def _installed(group: str, broken: dict[str, str]) -> list[EntryPoint]:
    """Returns the entry points of all installed distributions, in the order of their names."""
    try:
        return sorted(entry_points(group=group), key=lambda point: (_origin(point), point.name))
    except Exception as error:  # noqa: BLE001 - any distribution's file may be damaged
        broken[f"entry points of {group}"] = _reason(error)
        return []


def _origin(point: EntryPoint) -> str:
    """Returns name and version of the distribution that an entry point belongs to."""
    return printable(f"{point.dist.name} {point.dist.version}" if point.dist else "unknown")


def _named(cls: type, origin: str) -> str:
    return _with_origin(f"{cls.__module__}.{cls.__qualname__}", origin)


def _with_origin(name: str, origin: str) -> str:
    """Returns the name of a module or class, with its origin if it is not fedleak's own."""
    return printable(name if origin == OWN else f"{name} ({origin})")


def _reason(error: BaseException) -> str:
    """Returns an error and the line of the file that it arose in."""
    where = traceback.extract_tb(error.__traceback__)[-1:]
    if isinstance(error, SyntaxError):
        where = []  # its message has the line
    places = "".join(f" ({frame.filename}, line {frame.lineno})" for frame in where)
    return printable(f"{type(error).__name__}: {error}{places}")[:500]
