"""A suite: settings that are fixed, and the attacks that are run on all of them.

A suite is a TOML file. `[experiment]` has the tables that all settings share, as in an experiment
file. Each `[[setting]]` has a `name`, a line `about` it, and the tables that are its own. Each
`[[attack]]` is a table as in an experiment file. `${FEDLEAK_ASSETS}` stands for the folder of
models and data that are not part of fedleak, which is given when the suite is run.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from fedleak.config import loading
from fedleak.config.components import LONGEST_NAME, NAME
from fedleak.config.experiment import Experiment
from fedleak.config.tables import Positive, Table
from fedleak.config.wording import checked
from fedleak.util.errors import ConfigError, about, unknown
from fedleak.util.nested import digest, mapped, merged
from fedleak.util.shipped import shipped

FOLDER = shipped("bench")
"""The folder of the suites that have a name."""

ASSETS = "${FEDLEAK_ASSETS}"

_AFTERWARDS = ("name", "attack", "workers", "gate")
"""Tables that a suite cannot have: what is done with the updates is not part of a setting."""

Name = Annotated[str, Field(pattern=f"^{NAME}$", max_length=LONGEST_NAME // 2)]


class Setting(Table):
    """`[[setting]]`: one federation whose updates are attacked."""

    name: Name
    """The name of its run, and of its lines in tables."""
    about: str
    """What is particular about it."""
    experiment: dict[str, Any] = {}
    """Its own tables, which override those of the suite."""

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the tables."""
        return digest(self.experiment)[:16]

    @property
    def needs_assets(self) -> bool:
        """Whether it is about models or data that are not part of fedleak."""
        return ASSETS in json.dumps(self.experiment)

    def with_attacks(self, attacks: Sequence[Mapping[str, Any]], assets: Path | None) -> Experiment:
        """Returns its experiment with these attacks.

        Raises:
            ConfigError: A table is not right.
        """
        tables = {**self.experiment, "name": self.name, "attack": list(attacks)}
        with about(f"setting {self.name!r}"):
            return loading.parse(loading.expanded(_filled(tables, assets)))


class Suite(Table):
    """A suite, as its file has it."""

    name: Name
    """Of the suite."""
    version: Positive
    """The version; every change that may change a result needs a new one."""
    about: str
    """What it is for, and what it takes."""
    experiment: dict[str, Any]
    """Tables that all settings share."""
    attack: list[dict[str, Any]]
    """The attacks that are run on every setting."""
    setting: Annotated[list[Setting], Field(min_length=1)]
    """The settings, in the order of the tables of results."""

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The settings, each with all of its tables."""
        whole = ((own, merged(self.experiment, own.experiment)) for own in self.setting)
        return tuple(own.model_copy(update={"experiment": tables}) for own, tables in whole)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of its settings: two that differ are not one suite, whatever the name."""
        return digest([(setting.name, setting.experiment) for setting in self.settings])[:16]


def load(suite: str) -> Suite:
    """Reads a suite.

    Args:
        suite: The name of one of fedleak's own, or the path of a file.

    Raises:
        ConfigError: There is none, or its file is not right.
    """
    path = FOLDER / f"{suite}.toml"
    if not path.is_file():
        path = Path(suite)
        if not path.is_file():
            known = [file.stem for file in FOLDER.glob("*.toml")]
            raise ConfigError(f"{unknown('suite', suite, known)}: or give the path of a file")
    table = checked(Suite, loading.read_tables(path), f"suite {str(path)!r}: ")
    names = [setting.name for setting in table.setting]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"suite {str(path)!r}: two settings are called {twice[0]!r}: rename one")
    for where in (table.experiment, *(setting.experiment for setting in table.setting)):
        if out_of_place := [key for key in _AFTERWARDS if key in where]:
            raise ConfigError(
                f"suite {str(path)!r}: {out_of_place[0]} is not part of a setting: leave it out"
            )
    return table


def entered(
    suite: Suite,
    kinds: Sequence[str],
    file: Path | None,
    command: str | None,
    *,
    only: bool,
) -> list[Mapping[str, Any]]:
    """Returns the attacks that are to be run: those of the suite, and others.

    Args:
        suite: What is run.
        kinds: Attacks with their default settings.
        file: A TOML file with `[[attack]]` tables.
        command: An outside program.
        only: Leave out those of the suite.

    Raises:
        ConfigError: The file has no attacks, or nothing is left.
    """
    attacks: list[Mapping[str, Any]] = [] if only else list(suite.attack)
    attacks += [{"kind": kind} for kind in kinds]
    if file is not None:
        tables = loading.read_tables(file)
        if set(tables) != {"attack"} or not isinstance(tables["attack"], list):
            raise ConfigError(f"--attacks {str(file)!r}: give a file with [[attack]] tables alone")
        attacks += tables["attack"]
    if command is not None:
        attacks.append({"kind": "command", "command": command})
    if not attacks:
        raise ConfigError("--only leaves out all attacks: name one by --attack or --command")
    return attacks


def _filled(tables: Any, assets: Path | None) -> Any:
    """Returns tables with the folder of models and data in place of `ASSETS`."""
    place = ASSETS if assets is None else str(assets.absolute())
    return mapped(tables, lambda v: v.replace(ASSETS, place) if isinstance(v, str) else v)
