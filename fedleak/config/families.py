"""`[[sweep.family]]`: a defense, or a setting that acts as one, from weak to strong.

A family is one key of a sweep that sets several keys at once:

    [[sweep.family]]
    name = "gaussian noise"
    unit = "sigma / rms"
    strengths = [0.3, 3, 30]
    set.defense = [{ kind = "gaussian_noise", relative = "<strength>" }]
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, JsonValue

from fedleak.config.tables import Table
from fedleak.config.wording import checked
from fedleak.util.errors import ConfigError
from fedleak.util.nested import flat, mapped

FAMILY = "family"
"""The swept key whose values set several keys at once."""

STRENGTH = "<strength>"
UNDEFENDED = "none"


class FamilyTable(Table):
    """`[[sweep.family]]`: settings that differ in a strength."""

    name: Annotated[str, Field(min_length=1, max_length=40)]
    """What it is called; `none` sets nothing, and the others are compared with it."""
    unit: str | None = None
    """What the strengths are numbers of."""
    strengths: Annotated[list[JsonValue], Field(min_length=1)] | None = None
    """From weak to strong, a cell for each; left out: one cell."""
    set: dict[str, Any] = {}
    """Keys of the experiment; the text `<strength>` in them stands for the strength."""
    without: list[str] = []
    """Names of attacks that cannot work on these updates: these cells lack them."""

    def _problems(self) -> Iterator[str]:
        """Yields what a family lacks, or has too much of."""
        if (self.name == UNDEFENDED) != (not self.set):
            yield f"the family {UNDEFENDED!r}, and no other, sets nothing"
        if (self.strengths is not None) != (_filled(self.set, None) != self.set):
            yield f"a family has strengths, and {STRENGTH!r} where they are set; or neither"


@dataclass(frozen=True)
class Setting:
    """One cell's value of the key `family`.

    Attributes:
        value: Its entry in sweep.json: its family as `kind`, and its `strength` if it has one.
        changes: The values that it sets, by dotted key.
        without: Names of attacks that the cell leaves out.
    """

    value: dict[str, Any]
    changes: Mapping[str, Any]
    without: tuple[str, ...]


def checked_families(tables: Any) -> list[FamilyTable]:
    """Checks the families of a sweep.

    Raises:
        ConfigError: The first thing that is not right.
    """
    if not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        raise ConfigError(f"sweep.family = {tables!r}: write each as a table [[sweep.family]]")
    return [
        checked(FamilyTable, table, f"sweep.family[{number}]: ")
        for number, table in enumerate(tables)
    ]


def settings(families: Sequence[FamilyTable]) -> list[Setting]:
    """Returns what each cell sets, in the file's order."""
    cells = []
    for family in families:
        for strength in family.strengths or [None]:
            value = {"kind": family.name, **({} if strength is None else {"strength": strength})}
            changes = dict(flat(_filled(family.set, strength)))
            cells.append(Setting(value, changes, tuple(family.without)))
    return cells


def _filled(value: Any, strength: Any) -> Any:
    """Returns the value with the strength where it is mentioned."""
    return mapped(value, lambda leaf: strength if leaf == STRENGTH else leaf)
