"""One run as one frozen, validated value, read from TOML.

Everything that can be refused is refused here, before training starts: in one line that names
the key, what was found and what would be right.
"""

import copy
import hashlib
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from fedleak import attacks, defenses
from fedleak.attacks import Attack, Equipped, Setting
from fedleak.defenses import Defense
from fedleak.defenses.dp_sgd import DpSgd
from fedleak.defenses.secure_sum import SecureSum
from fedleak.errors import ConfigError, unknown
from fedleak.models import CAUSAL_LM, LanguageModel, ModelSpec, absolute
from fedleak.models.lora import Lora
from fedleak.models.parameter_selection import select
from fedleak.observation import GRANTABLE, ThreatModel, UpdateKind
from fedleak.plugins import discover
from fedleak.privacy import Accountant
from fedleak.training.local import LocalTraining, freezing

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
LONGEST_NAME = 100
"""Characters of a name: it is part of file names, which have 255 bytes at most."""

MOST_UPDATES = 1_000_000
"""Updates that a run may have: at a tenth of a second each they take a day."""

LARGEST_SEED = 2**63 - 1
"""What random generators take."""

Positive = Annotated[int, Field(ge=1)]
Source = Annotated[str, AfterValidator(absolute)]
"""A hub id, a built-in, or a path."""


def _encoding(name: str) -> str:
    """Refuses the name of an encoding that there is not."""
    try:
        "".encode(name)
    except LookupError as error:
        raise ValueError(
            f"{name!r} is not an encoding of text that Python knows: write 'utf-16', 'cp1252' or "
            "'latin-1', for example"
        ) from error
    return name


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class LoraTable(_Table):
    """`[model.lora]`: low-rank adapters, trained and sent in place of the model."""

    rank: Positive = 8
    alpha: Annotated[float, Field(gt=0)] = 16.0
    targets: Annotated[list[str], Field(min_length=1)] | None = None
    """Linear layers by name; left out: the query and value projections."""


class ModelTable(_Table):
    """`[model]`: what is trained."""

    name: Source
    task: Literal["sequence-classification", "causal-lm"] = "sequence-classification"
    loss: Literal["cross-entropy", "squared"] = "cross-entropy"
    lora: LoraTable | None = None

    @model_validator(mode="after")
    def _loss_of_classes(self) -> "ModelTable":
        if self.task == CAUSAL_LM and self.loss == "squared":
            raise ValueError(
                f"loss = 'squared' is for classes and task = {CAUSAL_LM!r} has none: use "
                "'cross-entropy'"
            )
        return self


class DataTable(_Table):
    """`[data]`: what it is trained on."""

    name: Source
    split: str = "train"
    text: str | int | None = None
    label: str | int | None = None
    samples: Positive = 400
    held_out: Annotated[int, Field(ge=0)] = 100
    max_length: Annotated[int, Field(ge=3)] | None = None
    drop_empty: bool = False
    """Leave out rows without text, which are refused otherwise."""
    encoding: Annotated[str, AfterValidator(_encoding)] | None = None
    """Of a file; left out: UTF-8."""
    delimiter: Annotated[str, Field(pattern=r"^[\t !#-/:-@\[-`{-~]$")] | None = None
    """Of a csv or tsv file; left out: a comma or a tab."""


class FederationTable(_Table):
    """`[federation]`: who trains, how, and through which engine."""

    engine: Literal["inline", "simulation"] = "inline"
    algorithm: Literal["fedsgd", "fedavg"] = "fedsgd"
    clients: Positive = 4
    clients_per_round: Positive | None = None
    rounds: Positive = 3
    batch_size: Positive = 2
    local_epochs: Annotated[int, Field(ge=1, le=10_000)] = 1
    learning_rate: Annotated[float, Field(gt=0)] = 5e-5
    dropout: bool = False
    partition: Literal["iid", "dirichlet"] = "iid"
    alpha: Annotated[float, Field(gt=0)] = 0.5

    @model_validator(mode="after")
    def _enough_clients(self) -> "FederationTable":
        if self.clients_per_round is not None and self.clients_per_round > self.clients:
            raise ValueError(
                f"clients_per_round = {self.clients_per_round} is more than "
                f"clients = {self.clients}: lower it"
            )
        a_round = self.clients_per_round or self.clients
        if self.rounds * a_round > MOST_UPDATES:
            raise ValueError(
                f"rounds = {self.rounds:,} of {a_round:,} clients are {self.rounds * a_round:,} "
                f"updates, and a run has at most {MOST_UPDATES:,}: lower one of them"
            )
        return self


class UpdateTable(_Table):
    """`[update]`: which parameters a client sends."""

    share: Literal["all"] | Annotated[list[str], Field(min_length=1)] = "all"
    """All, or parts (`fedleak.models.parameter_selection`) and patterns on parameter names."""


class ThreatTable(_Table):
    """`[threat]`: what the attacker is told beyond the protocol, and which updates it keeps."""

    knows: list[str] = []
    rounds: Annotated[list[Positive], Field(min_length=1)] | None = None
    """Those that are attacked; of others neither updates nor models are kept. None: every round."""

    @model_validator(mode="after")
    def _known_facts(self) -> "ThreatTable":
        for fact in self.knows:
            if fact not in GRANTABLE:
                raise ValueError(unknown("fact", fact, GRANTABLE))
        return self


class PrivacyTable(_Table):
    """`[privacy]`: how the ledger counts."""

    delta: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    accountant: Accountant = "rdp"


class UtilityTable(_Table):
    """`[utility]`: when the global model is scored on held-out data."""

    rounds: Literal["all"] | list[Annotated[int, Field(ge=0)]] = "all"
    """After which rounds, besides the last; 0 is before training."""
    reference: bool = False
    """Also train one model centrally and without defenses, on as many examples."""


class WorkersTable(_Table):
    """`[workers]`: where attacks run."""

    engine: Literal["local"] = "local"
    devices: Annotated[list[str], Field(min_length=1)] | None = None
    time_limit: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds that one try of an attack may take."""


class AuditTable(_Table):
    """`[audit]`: how answers are scored."""

    controls: bool = True


@dataclass(frozen=True)
class NamedAttack:
    """An attack and the name that its rows carry."""

    name: str
    attack: Attack


@dataclass(frozen=True)
class PlacedDefense:
    """A defense and the clients that use it; None is every client."""

    defense: Defense
    clients: tuple[int, ...] | None


class Experiment(_Table):
    """One run. The tables are those of the experiment file."""

    name: Annotated[str, Field(pattern=f"^{NAME}$", max_length=LONGEST_NAME)]
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0
    model: ModelTable
    data: DataTable
    federation: FederationTable = FederationTable()
    update: UpdateTable = UpdateTable()
    defense: list[dict[str, Any]] = []
    threat: ThreatTable = ThreatTable()
    attack: list[dict[str, Any]] = [{"kind": "probes"}]
    privacy: PrivacyTable = PrivacyTable()
    utility: UtilityTable = UtilityTable()
    workers: WorkersTable = WorkersTable()
    audit: AuditTable = AuditTable()

    def __hash__(self) -> int:
        """Lets an experiment be the key of a cache; equal ones have equal names and seeds."""
        return hash((self.name, self.seed))

    @cached_property
    def attacks(self) -> tuple[NamedAttack, ...]:
        """The attacks, built. `probes` cost milliseconds and are on in every run."""
        built = [_attack(i, table) for i, table in enumerate(self.attack)]
        if not any(each.attack.kind == "probes" for each in built):
            built.insert(0, _attack(0, {"kind": "probes"}))
        names = [each.name for each in built]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(
                    f"attack: two are called {name!r}: give one of them another name = ..."
                )
        return tuple(built)

    @cached_property
    def defenses(self) -> tuple[PlacedDefense, ...]:
        """The defenses, built, in the order in which a client applies them."""
        return tuple(
            _defense(i, table, self.federation.clients) for i, table in enumerate(self.defense)
        )

    @property
    def fingerprint(self) -> str:
        """The mark of what these clients send, in 16 hex digits.

        It depends on the seed and the tables model, data, federation, update, defense and privacy
        (whose delta decides how much noise an epsilon takes), and not on what is done with updates
        afterwards, nor on the engine: every one gives the same. A setting left out and its default
        are the same.
        """
        others = dict.fromkeys(["name", "attack", "threat", "utility", "audit", "workers"], True)
        exclude: dict[str, Any] = {**others, "federation": {"engine"}}
        table = self.model_dump(mode="json", exclude=exclude, exclude_defaults=True)
        return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def secure_sum(self) -> bool:
        """Whether the server sees only the sum of a round's updates."""
        return any(isinstance(each.defense, SecureSum) for each in self.defenses)

    def defenses_of(self, client: int) -> dict[int, Defense]:
        """Returns the defenses that a client uses, by their place in the file."""
        return {
            number: each.defense
            for number, each in enumerate(self.defenses)
            if each.clients is None or client in each.clients
        }

    @property
    def unlike_clients(self) -> list[int]:
        """A client of each group that uses the same defenses."""
        named = {client for each in self.defenses for client in each.clients or ()}
        others = (c for c in range(self.federation.clients) if c not in named)
        found = {tuple(self.defenses_of(c)): c for c in sorted({*named, *islice(others, 1)})[::-1]}
        return sorted(found.values())

    def local_training_of(self, client: int) -> LocalTraining:
        """Returns how a client trains, with its defenses."""
        local = self.local_training
        for defense in self.defenses_of(client).values():
            local = defense.training(local)
        return local

    def attacked(self, round: int) -> bool:
        """Whether the updates of a round are kept and attacked."""
        return self.threat.rounds is None or round in self.threat.rounds

    def evaluated(self, round: int) -> bool:
        """Whether the global model is scored after a round."""
        chosen = self.utility.rounds
        return chosen == "all" or round in chosen or round == self.federation.rounds

    @property
    def clients_per_round(self) -> int:
        """How many clients train in a round."""
        return self.federation.clients_per_round or self.federation.clients

    def model_spec(self, num_labels: int) -> ModelSpec:
        """Returns what server, clients and attackers load their model from."""
        table, adapters = self.model, self.model.lora
        lora = None
        if adapters is not None:
            targets = None if adapters.targets is None else tuple(adapters.targets)
            lora = Lora(adapters.rank, adapters.alpha, targets)
        return ModelSpec(table.name, table.task, num_labels, self.seed, table.loss, lora)

    @property
    def local_training(self) -> LocalTraining:
        """How a client trains."""
        table = self.federation
        kind = UpdateKind.GRADIENT if table.algorithm == "fedsgd" else UpdateKind.DELTA
        return LocalTraining(
            kind, table.batch_size, table.local_epochs, table.learning_rate, table.dropout
        )

    @property
    def threat_model(self) -> ThreatModel:
        """What the attacker is told."""
        return ThreatModel(frozenset(self.threat.knows))

    @property
    def server_facts(self) -> frozenset[str]:
        """Facts that the server set itself, so every observation of it has them."""
        return frozenset({"learning_rate", "local_steps", "dropout"})

    def shared(self, model: LanguageModel) -> list[str]:
        """Returns the parameters that a client without defenses sends, in the model's order.

        Raises:
            ConfigError: `update.share` names something that the model does not train, or that
                cannot be sent alone.
        """
        if self.update.share == "all":
            return list(model.trained())
        return select(model, self.update.share, "update.share")

    def sent_by(self, client: int, model: LanguageModel) -> frozenset[str]:
        """Returns the parameters that a client sends: what it shares and does not freeze."""
        shared = self.shared(model)
        with freezing(model, self.local_training_of(client).frozen):
            trained = model.trained()
        return frozenset(name for name in shared if name in trained)

    def sent(self, model: LanguageModel) -> list[frozenset[str]]:
        """Returns the sets of parameters that captures have, each once: defenses may differ.

        Raises:
            ConfigError: What `shared` raises, or a client has nothing left to send.
        """
        found = []
        for client in self.unlike_clients:
            found.append(self.sent_by(client, model))
            if not found[-1]:
                raise ConfigError(
                    f"update.share: all that client {client} shares is frozen: share or train "
                    "something else"
                )
        if self.secure_sum:
            return [frozenset().union(*found)]
        return list(dict.fromkeys(found))

    def check_defenses(self, model: LanguageModel) -> None:
        """Refuses defenses that cannot work on this model.

        Raises:
            ConfigError: The first of them, with the reason.
        """
        for number, each in enumerate(self.defenses):
            obstacle = each.defense.obstacle(self.local_training, model)
            if obstacle is not None:
                raise ConfigError(f"defense[{number}] ({each.defense.kind}): {obstacle}")
        for client in self.unlike_clients:
            with freezing(model, self.local_training_of(client).frozen):
                if not model.trained():
                    raise ConfigError(
                        f"defense: client {client} has nothing left to train: freeze less"
                    )

    def check_attacks(self, model: LanguageModel) -> None:
        """Refuses attacks that can work on no update that this experiment lets the server see.

        Raises:
            ConfigError: An attack with an obstacle or without its equipment, or what `sent` raises.
        """
        names = frozenset(model.parameters())
        settings = [
            Setting(
                self.local_training.kind,
                sent,
                self.threat_model.knows | self.server_facts,
                model.family,
                model.num_layers,
                model.task,
                names,
            )
            for sent in self.sent(model)
        ]
        for each in self.attacks:
            if isinstance(each.attack, Equipped):
                try:
                    each.attack.check_equipment()
                except ConfigError as error:
                    raise ConfigError(f"attack {each.name!r}: {error}") from error
            obstacles = [each.attack.obstacle(setting) for setting in settings]
            # Where it works on some clients, the others' updates are inadmissible.
            if all(obstacles):
                raise ConfigError(f"attack {each.name!r}: {obstacles[0]}")


def load(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Reads an experiment file, or the `run.json` of a run.

    Args:
        path: A TOML file, or a `run.json`.
        overrides: `dotted.key=value` with the value in TOML; a bare word is a string.

    Raises:
        ConfigError: Anything about the file that is not right.
    """
    table = read(path, overrides)
    if "sweep" in table:
        raise ConfigError(
            f"experiment file {str(path)!r} has a [sweep]: use `fedleak sweep {path}`"
        )
    return parse(table)


def read(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the tables of an experiment file, as `load` does, but as they are written there."""
    named, text = f"experiment file {str(path)!r}", ""
    try:
        text = path.read_text(encoding="utf-8-sig")
        table = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{named}: {error.strerror}: give a TOML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{named} is not UTF-8 (byte 0x{error.object[error.start]:02x} at {error.start}): save "
            "it as UTF-8"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{named} is nested too deep: give a TOML file") from error
    except ValueError as error:
        json_in_toml = path.suffix != ".json" and text.lstrip().startswith("{")
        said = "is JSON: write it as TOML" if json_in_toml else f"cannot be read: {error}"
        raise ConfigError(f"{named} {said}") from error
    if path.suffix == ".json":
        table = table.get("experiment") if isinstance(table, dict) else None
        if not isinstance(table, dict):
            raise ConfigError(
                f"{named} is not the run.json of a run, which has an 'experiment': give a TOML file"
            )
    for override in overrides:
        _override_(table, override)
    return table


def parse(table: Mapping[str, Any]) -> Experiment:
    """Validates the tables of an experiment file.

    Raises:
        ConfigError: The first thing that is not right.
    """
    try:
        experiment = Experiment.model_validate(_expand(copy.deepcopy(dict(table))))
    except ValidationError as error:
        raise ConfigError(_one_line(error, Experiment)) from error
    # Building them is what checks their settings.
    _ = experiment.attacks, experiment.defenses
    _check_workers(experiment.workers)
    _check_rounds(experiment)
    for client in experiment.unlike_clients:
        used = experiment.defenses_of(client).values()
        if sum(isinstance(defense, DpSgd) for defense in used) > 1:
            raise ConfigError(f"defense: client {client} has two dp_sgd: a step has one: keep one")
    if experiment.model.task == CAUSAL_LM and experiment.federation.partition == "dirichlet":
        raise ConfigError(
            "federation.partition = 'dirichlet' divides by class and causal-lm has none: use 'iid'"
        )
    return experiment


def difference(old: Any, new: Any, prefix: str = "") -> list[str]:
    """Returns a line `key: old -> new` for each setting that differs between two JSON tables."""
    if isinstance(old, dict) and isinstance(new, dict):
        lines = []
        for key in sorted(old.keys() | new.keys()):
            lines += difference(old.get(key), new.get(key), f"{prefix}{key}.")
        return lines
    return [] if old == new else [f"{prefix.removesuffix('.')}: {old!r} -> {new!r}"]


def _attack(index: int, table: dict[str, Any]) -> NamedAttack:
    settings = dict(table)
    where = f"attack[{index}]"
    kind = _kind(where, settings, attacks)
    name = settings.pop("name", kind)
    if not isinstance(name, str) or not re.fullmatch(NAME, name) or len(name) > LONGEST_NAME:
        raise ConfigError(
            f"{where}.name = {name!r}: give it a word of letters, digits and . _ -, at most "
            f"{LONGEST_NAME} of them, a letter or digit first"
        )
    return NamedAttack(name, _build(where, attacks.kinds()[kind], settings))


def _defense(index: int, table: dict[str, Any], num_clients: int) -> PlacedDefense:
    settings = dict(table)
    where = f"defense[{index}]"
    kind = _kind(where, settings, defenses)
    clients = settings.pop("clients", None)
    if clients is not None:
        right = isinstance(clients, list) and all(
            isinstance(c, int) and 0 <= c < num_clients for c in clients or [None]
        )
        if not right:
            raise ConfigError(
                f"{where}.clients = {clients!r}: list clients from 0 to {num_clients - 1}"
            )
        clients = tuple(clients)
    defense = _build(where, defenses.kinds()[kind], settings)
    if isinstance(defense, SecureSum) and clients is not None:
        raise ConfigError(f"{where}.clients: secure_sum is of all clients: leave the key out")
    return PlacedDefense(defense, clients)


def _kind(where: str, settings: dict[str, Any], package: ModuleType) -> str:
    known = package.kinds()
    kind = settings.pop("kind", None)
    if kind is None:
        raise ConfigError(f"{where}.kind is missing: one of {', '.join(sorted(known))}")
    if not isinstance(kind, str) or kind not in known:
        raise ConfigError(
            f"{where}.kind: {unknown('kind', str(kind), known)}"
            + discover(package).cannot_be_used()
        )
    return str(kind)


def _build(where: str, cls: type[Any], settings: dict[str, Any]) -> Any:
    """Makes a validated dataclass from its settings."""
    names = [f.name for f in fields(cls)]
    for key in settings:
        if key not in names:
            raise ConfigError(f"{where}: {unknown('key', key, names)}")
    try:
        # As JSON, because strict Python values would have to be of the class already.
        return TypeAdapter(cls).validate_json(json.dumps(settings, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError(f"{where}.{_one_line(error, None)}") from error
    except ConfigError as error:  # what fields together must satisfy
        raise ConfigError(f"{where}: {error}") from error


def _check_rounds(experiment: Experiment) -> None:
    last, utility = experiment.federation.rounds, experiment.utility.rounds
    chosen = {"threat.rounds": experiment.threat.rounds or []}
    chosen["utility.rounds"] = [] if utility == "all" else utility
    for key, rounds in chosen.items():
        if beyond := [round for round in rounds if round > last]:
            raise ConfigError(
                f"{key} has {beyond[0]}, but federation.rounds = {last}: choose from 1 to {last}"
            )


def _check_workers(workers: WorkersTable) -> None:
    for device in workers.devices or ():
        try:
            kind = torch.device(device)
        except RuntimeError as error:
            raise ConfigError(f"workers.devices: {device!r} is not a torch device") from error
        if kind.type == "cpu":
            continue
        if kind.type != "cuda" or (kind.index or 0) >= torch.cuda.device_count():
            raise ConfigError(
                f"workers.devices: {device!r} is not on this machine, which has "
                f"{torch.cuda.device_count()} CUDA devices: leave the key out to use what is there"
            )


def _expand(value: Any) -> Any:
    """Replaces ${NAME} by the environment's value in every string."""
    if isinstance(value, dict):
        return {key: _expand(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_expand(each) for each in value]
    if isinstance(value, str) and "${" in value:
        expanded = os.path.expandvars(value)
        if "${" in expanded:
            raise ConfigError(f"{value!r} names an environment variable that is not set: set it")
        return expanded
    return value


def _override_(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {override!r}: write it as dotted.key=value")
    try:
        found = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        found = {"value": text.strip()}
    if len(found) > 1:
        raise ConfigError(f"--set {override!r}: it sets one key: give another --set for the next")
    set_(table, key.strip(), found["value"], f"--set {override!r}")


def set_(table: dict[str, Any], key: str, value: Any, said: str) -> None:
    """Sets a dotted key, and makes the tables on the way to it.

    Args:
        table: Of an experiment file.
        key: Where.
        value: What.
        said: Who wants it, for the message.

    Raises:
        ConfigError: The way leads through something that is not a table.
    """
    *path, last = key.split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{said}: {part!r} is not a table")
    table[last] = value


def _one_line(error: ValidationError, model: type[BaseModel] | None) -> str:
    """Returns the first problem of a validation as `key = found: what would be right`.

    Behind it stand the other keys that are wrong.
    """
    errors = error.errors(include_url=False)
    key = _key(errors[0])
    # A value that may be of several types has a problem with each; the deepest is the nearest.
    same = [each for each in errors if f"{_key(each)}.".startswith(f"{key}.")]
    deepest = max(same, key=lambda each: len(_key(each)))
    alike = [each for each in same if _key(each) == _key(deepest)]
    others = dict.fromkeys(_key(each) for each in errors if each not in same)
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
    """Returns one problem of a validation, with what all those that are alike would take."""
    where = _key(first)
    if first["type"] == "extra_forbidden":
        table: Any = model
        for part in first["loc"][:-1]:
            table = table.model_fields[part].annotation
            # A table that may be left out is `Table | None`.
            table = next((one for one in get_args(table) if one is not type(None)), table)
        known = list(table.model_fields)
        inside = ".".join(map(str, first["loc"][:-1]))
        return (f"[{inside}] " if inside else "") + unknown("key", str(first["loc"][-1]), known)
    if first["type"] == "missing":
        return f"{where} is missing: set it"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{where}: {message}"
    wanted = dict.fromkeys(f"{each['msg'][0].lower()}{each['msg'][1:]}" for each in alike)
    return f"{where} = {first['input']!r}: {', or '.join(wanted)}"
