"""Attacks, defenses, detectors and the server's mode in an experiment file, from its tables."""

import json
import re
from collections.abc import Iterable, Set
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from types import ModuleType
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from fedleak import attacks
from fedleak.attacks import Asked, Attack, Equipped, server_modes
from fedleak.attacks.server_modes import ServerMode
from fedleak.attacks.server_modes.honest import Honest
from fedleak.config.tables import ServerTable
from fedleak.config.wording import checked, one_line
from fedleak.defenses import Defense, TrustedAggregator
from fedleak.detectors import Detector
from fedleak.training.observation import QUESTIONS, ThreatModel
from fedleak.util.errors import ConfigError, UnknownKindError, about, unknown
from fedleak.util.plugins import discover

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
LONGEST_NAME = 100
"""Characters of a name: it is part of file names, which have 255 bytes at most."""

RUNG = "+"
"""Joins attack and facts in the names of a rung's rows; no other name has it."""

ALL_FACTS = "all"
"""Stands in such a name for all facts that the attack uses."""


@dataclass(frozen=True)
class NamedAttack:
    """An attack, the name that its rows carry, and the facts that are granted."""

    name: str
    attack: Attack
    threat: ThreatModel = field(default_factory=ThreatModel)

    @property
    def listed_as(self) -> str:
        """Its name in the experiment: the same on all rungs of the ladder."""
        return listed_as(self.name)

    @property
    def candidates(self) -> str | None:
        """The file with the texts that it is asked about; None: no such file."""
        return self.attack.candidates if isinstance(self.attack, Asked) else None

    def check_equipment(self) -> None:
        """Refuses the attack where something that it needs is not on this machine.

        Raises:
            ConfigError: What it lacks.
        """
        if isinstance(self.attack, Equipped):
            with about(f"attack {self.name!r}"):
                self.attack.check_equipment()


T = TypeVar("T", bound=Defense | Detector)


@dataclass(frozen=True)
class Placed(Generic[T]):
    """A defense or a detector, and the clients that use it; None is every client."""

    part: T
    clients: tuple[int, ...] | None


def used_by(client: int, placed: Iterable[Placed[T]]) -> dict[int, T]:
    """Returns what a client uses, by its place in the file."""
    return {
        number: entry.part
        for number, entry in enumerate(placed)
        if entry.clients is None or client in entry.clients
    }


@dataclass(frozen=True)
class Server:
    """What the server does to the model that it sends, and when.

    Attributes:
        mode: What it does.
        rounds: In which rounds; None: in all.
        aggregate: Whether the updates of such a round move the global model.
    """

    mode: ServerMode
    rounds: tuple[int, ...] | None
    aggregate: bool

    @property
    def malicious(self) -> bool:
        """Whether it changes anything in any round."""
        return not isinstance(self.mode, Honest)


def build_server(table: dict[str, Any]) -> Server:
    """Builds what `[server]` says.

    Raises:
        ConfigError: Its mode or a setting is not right.
    """
    names = ServerTable.model_fields
    common = checked(ServerTable, {k: v for k, v in table.items() if k in names}, "server.")
    cls = _class("server", {"mode": common.mode}, server_modes, "mode")
    own = {key: value for key, value in table.items() if key not in names}
    mode = build("server", cls, own)
    return Server(mode, None if common.rounds is None else tuple(common.rounds), common.aggregate)


def build_attack(index: int, table: dict[str, Any]) -> NamedAttack:
    """Builds the attack of the `index`-th `[[attack]]`.

    Raises:
        ConfigError: Its kind, its name or a setting is not right.
    """
    settings = dict(table)
    where = f"attack[{index}]"
    cls = _class(where, settings, attacks)
    name = settings.pop("name", cls.kind)
    if not isinstance(name, str) or not re.fullmatch(NAME, name) or len(name) > LONGEST_NAME:
        raise ConfigError(
            f"{where}.name = {name!r}: give it a word of letters, digits and . _ -, at most "
            f"{LONGEST_NAME} of them, a letter or digit first"
        )
    attack = build(where, cls, settings)
    return NamedAttack(name, attack, ThreatModel(attack.uses & QUESTIONS))


def reading_planted(server: object) -> list[str]:
    """Returns the kind of the attack that reads what a server plants, which has its mode's name.

    Args:
        server: The table `[server]`, as it was read; an attack of no mode reads none.
    """
    mode = server.get("mode") if isinstance(server, dict) else None
    return [mode] if isinstance(mode, str) and mode in attacks.kinds() else []


def listed_as(name: str) -> str:
    """Returns the name in the experiment of the attack whose rows carry a name.

    >>> listed_as("lamp+lengths"), listed_as("lamp")
    ('lamp', 'lamp')
    """
    return name.partition(RUNG)[0]


def on_each_rung(named: NamedAttack, facts: Set[str]) -> list[NamedAttack]:
    """Returns an attack told nothing, told each fact that it uses alone, and told all of them.

    Args:
        named: The attack.
        facts: The facts that can be granted.
    """
    used = sorted(named.attack.uses & facts)
    rungs = {named.name: frozenset[str]()}
    rungs |= {f"{named.name}{RUNG}{fact}": frozenset({fact}) for fact in used}
    if len(used) > 1:
        rungs[f"{named.name}{RUNG}{ALL_FACTS}"] = frozenset(used)
    questions = named.attack.uses & QUESTIONS
    return [
        replace(named, name=name, threat=ThreatModel(questions | knows))
        for name, knows in rungs.items()
    ]


def build_placed(
    section: str, package: ModuleType, tables: Iterable[dict[str, Any]], num_clients: int
) -> tuple[Placed[Any], ...]:
    """Builds the defense or detector of each `[[section]]`, and says who uses it.

    Raises:
        ConfigError: A kind, its clients or a setting is not right.
    """
    parts = []
    for index, table in enumerate(tables):
        settings, where = dict(table), f"{section}[{index}]"
        cls = _class(where, settings, package)
        clients = _clients(where, settings, num_clients)
        part = build(where, cls, settings)
        if isinstance(part, TrustedAggregator) and clients is not None:
            raise ConfigError(f"{where}.clients: {part.kind} is of all clients: leave the key out")
        parts.append(Placed(part, clients))
    return tuple(parts)


def _clients(where: str, settings: dict[str, Any], num_clients: int) -> tuple[int, ...] | None:
    """Takes the clients that use a defense or a detector out of its settings; None: all."""
    clients = settings.pop("clients", None)
    if clients is None:
        return None
    right = isinstance(clients, list) and all(
        isinstance(c, int) and 0 <= c < num_clients for c in clients or [None]
    )
    if not right:
        raise ConfigError(
            f"{where}.clients = {clients!r}: list clients from 0 to {num_clients - 1}"
        )
    return tuple(clients)


def _class(where: str, settings: dict[str, Any], package: ModuleType, key: str = "kind") -> Any:
    """Takes the kind out of some settings, and returns its class."""
    known = package.kinds()
    kind = settings.pop(key, None)
    if kind is None:
        raise ConfigError(f"{where}.{key} is missing: one of {', '.join(sorted(known))}")
    if not isinstance(kind, str) or kind not in known:
        raise UnknownKindError(
            f"{where}.{key}: {unknown(key, str(kind), known)}" + discover(package).cannot_be_used()
        )
    return known[kind]


def build(where: str, cls: type[Any], settings: dict[str, Any]) -> Any:
    """Makes a validated dataclass from its settings.

    Raises:
        ConfigError: A key that does not exist, or a value that is not allowed.
    """
    names = [f.name for f in fields(cls)]
    for key in settings:
        if key not in names:
            raise ConfigError(f"{where}: {unknown('key', key, names)}")
    try:
        # As JSON, because strict Python values would have to be of the class already.
        adapter = _adapter(cls)  # type: ignore[arg-type]  # mypy: a class may have no hash
        return adapter.validate_json(json.dumps(settings, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{where}.{one_line(error, None)}") from error
    except ConfigError as error:  # what fields together must satisfy
        raise ConfigError(f"{where}: {error}") from error


@lru_cache(maxsize=128)
def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    """Returns what builds a class from its settings; it takes much longer to make than to use."""
    return TypeAdapter(cls)
