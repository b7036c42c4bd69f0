"""One check of the gate, and how it ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How one check of the gate ended."""

    WITHIN = "within"
    """The limit holds, or enough was measured."""
    EXCEEDED = "exceeded"
    """The limit does not hold."""
    UNTOLD = "untold"
    """Too little was measured to tell."""


@dataclass(frozen=True)
class Check:
    """One check of the gate.

    Attributes:
        name: What is checked: a limit, such as `exact`, or what has to be measured for the limits.
        outcome: How it ended.
        sentence: What was found, in one line.
    """

    name: str
    outcome: Outcome
    sentence: str

    @property
    def passed(self) -> bool:
        """Whether the gate may open, as far as this check goes."""
        return self.outcome is Outcome.WITHIN


def compared(name: str, sentence: str, *, holds: bool) -> Check:
    """Returns the check of a limit on what was measured."""
    return Check(name, Outcome.WITHIN if holds else Outcome.EXCEEDED, sentence)


def untold(name: str, lacks: Sequence[str], sentence: str) -> Check:
    """Returns a check that fails if anything is lacking.

    Args:
        name: Of the check.
        lacks: What was not measured, in sentences.
        sentence: What is said if nothing is lacking.
    """
    return Check(name, Outcome.UNTOLD if lacks else Outcome.WITHIN, "; ".join(lacks) or sentence)
