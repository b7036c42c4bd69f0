"""What the parts of `gpu` are told, and what they return."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

Value = float | str | bool | None


class Figure(NamedTuple):
    """What was measured of one thing.

    Attributes:
        what: Of what.
        size: Of the model and the input.
        seconds: What it took; None if something else was measured.
        beside: What it is compared with, in the same run.
        beside_seconds: What that took.
        values: Whatever else was found, by name.
    """

    what: str
    size: str
    seconds: float | None = None
    beside: str = ""
    beside_seconds: float | None = None
    values: Mapping[str, Value] = {}

    @property
    def ratio(self) -> float | None:
        """How many times longer that took."""
        if self.seconds and self.beside_seconds is not None:
            return self.beside_seconds / self.seconds
        return None


class Skip(Exception):  # noqa: N818 - it is no error
    """A part cannot run here; says why."""


@dataclass(frozen=True)
class Settings:
    """What all parts are told.

    Attributes:
        device: Where to measure.
        small: Sizes for a dry run.
        assets: Folder of real models and data, or None.
        seed: Of all random numbers.
        seconds: After which the part is cut.
    """

    device: str
    small: bool
    assets: Path | None
    seed: int
    seconds: float
