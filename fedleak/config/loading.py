"""From an experiment file to an `Experiment`.

Everything that can be refused is refused here, before training starts: in one line that names
the key, what was found and what would be right.
"""

import copy
import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from fedleak.config.experiment import Experiment
from fedleak.config.tables import GateTable, WorkersTable
from fedleak.config.wording import checked
from fedleak.models import CAUSAL_LM
from fedleak.util.errors import ConfigError
from fedleak.util.lists import grouped
from fedleak.util.nested import mapped
from fedleak.util.plain_files import settings_text

RUN_JSON = ".json"
"""The ending of the run.json of a run, which may be a stranger's: nothing in it is expanded."""


def load(path: Path, overrides: Sequence[str] = ()) -> Experiment:
    """Reads an experiment file, or the `run.json` of a run.

    Args:
        path: A TOML file, or a `run.json`.
        overrides: `dotted.key=value` with the value in TOML; a bare word is a string.

    Raises:
        ConfigError: Anything about the file that is not right.
    """
    table = read_tables(path, overrides)
    if "sweep" in table:
        raise ConfigError(
            f"experiment file {str(path)!r} has a [sweep]: use `fedleak sweep {path}`"
        )
    return parse(table if path.suffix == RUN_JSON else expanded(table))


def with_defense(kind: str, overrides: Sequence[str] = ()) -> Experiment:
    """Returns a small experiment with one defense, as it is by default.

    Args:
        kind: The kind of the defense.
        overrides: As for `load`.

    Raises:
        ConfigError: The defense has a setting that must be given, or an override is not right.
    """
    table: dict[str, Any] = {
        "name": f"check-{kind}",
        "model": {"name": "builtin/bert-tiny"},
        "data": {"name": "builtin/notes"},
        "federation": {"clients": 4, "batch_size": 4},
        "defense": [{"kind": kind}],
    }
    override_(table, overrides)
    try:
        return parse(table)
    except ConfigError as error:
        if overrides:
            raise
        raise ConfigError(
            f"the defense {kind} needs settings ({error}): give them, such as --set "
            f"'defense=[{{kind=\"{kind}\", ...}}]', or an experiment file"
        ) from error


def read_tables(path: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the tables of an experiment file, as `load` does, but as they are written there."""
    named, text = f"experiment file {str(path)!r}", ""
    try:
        text = settings_text(path)
        table = json.loads(text) if path.suffix == RUN_JSON else tomllib.loads(text)
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
        json_in_toml = path.suffix != RUN_JSON and text.lstrip().startswith("{")
        problem = "is JSON: write it as TOML" if json_in_toml else f"cannot be read: {error}"
        raise ConfigError(f"{named} {problem}") from error
    if path.suffix == RUN_JSON:
        table = table.get("experiment") if isinstance(table, dict) else None
        if not isinstance(table, dict):
            raise ConfigError(
                f"{named} is not the run.json of a run, which has an 'experiment': give a TOML file"
            )
    override_(table, overrides)
    return table


def parse(table: Mapping[str, Any]) -> Experiment:
    """Validates the tables of an experiment file.

    `${NAME}` is not expanded here, because tables may come from anybody: a server, or a stranger's
    run.json.

    Raises:
        ConfigError: The first thing that is not right.
    """
    experiment = checked(Experiment, copy.deepcopy(dict(table)))
    # Building them is what checks their settings.
    _ = experiment.attacks, experiment.defenses, experiment.detectors, experiment.server_built
    _check_workers(experiment.workers)
    _check_rounds(experiment)
    _check_clients(experiment)
    _check_kept(experiment)
    _check_exclusive(experiment)
    _check_sight(experiment)
    _check_nodes(experiment)
    _check_client(experiment)
    if experiment.model.task == CAUSAL_LM and experiment.federation.partition == "dirichlet":
        raise ConfigError(
            "federation.partition = 'dirichlet' divides by class and causal-lm has none: use 'iid'"
        )
    return experiment


def changed(experiment: Experiment, changes: Mapping[str, Any]) -> Experiment:
    """Returns an experiment with other values, by dotted key, as checked as one from a file.

    Raises:
        ConfigError: The first thing that is not right.
    """
    table = experiment.model_dump(mode="json")
    for key, value in changes.items():
        set_(table, key, value, key)
    return parse(table)


def _check_client(experiment: Experiment) -> None:
    """Refuses steps that nobody makes, or that something else cannot follow."""
    changed = next(iter(experiment.client.changed), None)
    absent = {} if experiment.client.recipe.plain else experiment.absent_facts
    if changed and experiment.federation.algorithm == "fedsgd":
        raise ConfigError(
            f"client.{changed} is about a client's steps, and under fedsgd a client makes none: "
            "leave it out, or set federation.algorithm = 'fedavg'"
        )
    first, last = experiment.federation.learning_rate, experiment.client.final_learning_rate
    # What another app trained with is what it is.
    if last > first and experiment.tapped is None:
        raise ConfigError(
            f"client.final_learning_rate = {last:g}: a schedule falls, and "
            f"federation.learning_rate = {first:g}: set it to that or less"
        )
    if "noise_scale" in experiment.threat.knows and "noise_scale" in absent:
        raise ConfigError(
            f"threat.knows has noise_scale, and {absent['noise_scale']}: do not grant it"
        )
    if changed and experiment.utility.reference:
        raise ConfigError(
            f"utility.reference trains by plain SGD, and clients do not (client.{changed}): "
            "leave one of them out"
        )


def _check_nodes(experiment: Experiment) -> None:
    """Refuses settings that make no sense if each node has data of its own."""
    if not experiment.data.on_nodes:
        return
    if experiment.federation.partition != "iid":
        raise ConfigError(
            "federation.partition divides one data set, and data.on_nodes says that each node has "
            "its own: leave one of them out"
        )
    if experiment.utility.reference:
        raise ConfigError(
            "utility.reference trains on all data in one place, and data.on_nodes says that each "
            "node keeps its own: leave one of them out"
        )


class _Limits(BaseModel):
    """The only table that the command of a gate may change."""

    gate: GateTable


def limited(gate: GateTable, changes: Sequence[str]) -> GateTable:
    """Returns the limits of a gate with others from the command line.

    Args:
        gate: The gate of the experiment.
        changes: `gate.key=value` each, as for `load`.

    Raises:
        ConfigError: No such limit, or a value that it cannot have.
    """
    tables: dict[str, Any] = {"gate": gate.model_dump()}
    for change in changes:
        if not change.startswith("gate."):
            raise ConfigError(f"--set {change!r}: only gate can change here")
    override_(tables, changes)
    return checked(_Limits, tables).gate


def _check_exclusive(experiment: Experiment) -> None:
    for client in experiment.unlike_clients:
        used = experiment.defenses_of(client).values()
        for reason, rivals in grouped(used, lambda defense: defense.exclusive).items():
            if reason is not None and len(rivals) > 1:
                kinds = " and ".join(rival.kind for rival in rivals)
                raise ConfigError(f"defense: client {client} has {kinds}: {reason}: keep one")


def _check_sight(experiment: Experiment) -> None:
    aggregator, possible = experiment.aggregator, experiment.possible_sights
    if experiment.sees not in possible:
        under = "without a defense such as secure_sum"
        if aggregator is not None:
            under = f"with {aggregator.kind}"
        raise ConfigError(
            f"threat.sees = {experiment.sees!r}, but {under} an attacker sees "
            f"{' or '.join(map(repr, possible))}: choose from these, or change the defenses"
        )
    if experiment.sees == "models" and experiment.server_optimiser.kind == "adam":
        raise ConfigError(
            "federation.server_optimiser = 'adam', but an attacker who sees models alone cannot "
            "tell the update from Adam's step: use 'sgd', or another threat.sees or defense"
        )


def _check_rounds(experiment: Experiment) -> None:
    last, utility = experiment.federation.rounds, experiment.utility.rounds
    chosen = {
        "threat.rounds": experiment.threat.rounds or (),
        "utility.rounds": () if utility == "all" else utility,
        "server.rounds": experiment.server_built.rounds or (),
    }
    for key, rounds in chosen.items():
        if beyond := [round for round in rounds if round > last]:
            raise ConfigError(
                f"{key} has {beyond[0]}, but federation.rounds = {last}: choose from 1 to {last}"
            )


def _check_clients(experiment: Experiment) -> None:
    clients, last = experiment.threat.clients, experiment.federation.clients - 1
    for key in ("threat", "canary", "published"):
        chosen = getattr(getattr(experiment, key), "clients", None) or ()
        if beyond := [client for client in chosen if client > last]:
            raise ConfigError(
                f"{key}.clients has {beyond[0]}, but federation.clients = {last + 1}: choose from "
                f"0 to {last}"
            )
    if (tapped := experiment.tapped) is not None:
        rounds, highest = len(tapped.clients), max(chain.from_iterable(tapped.clients), default=0)
        if rounds != experiment.federation.rounds or highest > last:
            raise ConfigError(
                f"tapped.clients has {rounds} rounds and the client {highest}, but federation has "
                f"{experiment.federation.rounds} rounds and clients up to {last}: `fedleak import` "
                "writes it anew"
            )
    if clients is not None and experiment.sees != "updates":
        raise ConfigError(
            f"threat.clients = {clients}, but what an attacker sees is of all clients of a round: "
            "leave threat.clients out"
        )


def _check_kept(experiment: Experiment) -> None:
    if experiment.canary is not None and experiment.audit.keep != "all":
        raise ConfigError(
            f"audit.keep = {experiment.audit.keep!r} deletes captures, but canaries are scored in "
            "them at the end of the run: leave keep or the table canary out"
        )
    if experiment.canary is not None and experiment.audit.store != "all":
        raise ConfigError(
            f"audit.store = {experiment.audit.store!r} stores parts of updates, but canaries are "
            "scored in whole ones: leave store or the table canary out"
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


def expanded(value: Any) -> Any:
    """Returns what a user's file says, with the environment's value for every `${NAME}`.

    Raises:
        ConfigError: A variable is not set.
    """

    def in_text(leaf: Any) -> Any:
        if not isinstance(leaf, str) or "${" not in leaf:
            return leaf
        if "${" in (text := os.path.expandvars(leaf)):
            raise ConfigError(f"{leaf!r} names an environment variable that is not set: set it")
        return text

    return mapped(value, in_text)


def table_of(changes: Sequence[str], option: str = "--set") -> dict[str, Any]:
    """Returns what `key=value` options say, by key.

    Raises:
        ConfigError: An option has another form.
    """
    table: dict[str, Any] = {}
    override_(table, changes, option)
    return table


def override_(table: dict[str, Any], overrides: Sequence[str], option: str = "--set") -> None:
    """Sets what options of the command line say, one after the other.

    Args:
        table: The tables of an experiment file, or any other table.
        overrides: `dotted.key=value` with the value in TOML; a bare word is a string.
        option: The name of the option, for messages.

    Raises:
        ConfigError: A text has another form.
    """
    for override in overrides:
        origin = f"{option} {override!r}"
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{origin}: write it as dotted.key=value")
        try:
            parsed = tomllib.loads(f"value = {text}")
        except (tomllib.TOMLDecodeError, RecursionError):
            parsed = {"value": text.strip()}
        if len(parsed) > 1:
            raise ConfigError(f"{origin}: it sets one key: give another {option} for the next")
        set_(table, key.strip(), parsed["value"], origin)


def set_(table: dict[str, Any], key: str, value: Any, origin: str) -> None:
    """Sets a dotted key, and makes the tables on the way to it.

    Args:
        table: The tables of an experiment file.
        key: The dotted key.
        value: Its new value.
        origin: Who sets it, for messages.

    Raises:
        ConfigError: The way leads through something that is not a table.
    """
    *path, last = key.split(".")
    for part in path:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{origin}: {part!r} is not a table")
    table[last] = value
