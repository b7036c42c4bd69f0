"""The time that an attack may take.

`seconds` is a promise. So an attack reads its clock before each long part of its work, with the
time that the part will take as far as known, and does not begin a part that would end too late.
"""

import math
import time
from collections.abc import Iterable, Iterator
from typing import Annotated, TypeVar

from pydantic import Field

Part = TypeVar("Part")

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A limit of time that an attack may be given."""

MOMENT = 1e-3
"""Seconds left on a clock whose time is up: no search has a limit of zero."""


def now() -> float:
    """Returns the seconds since some moment: the time of all attacks."""
    return time.monotonic()


class Clock:
    """Tells an attack that its time is up; the attack then ends with what it has.

    Attributes:
        rang: The clock was read when time was up, so the answer may lack something.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else now() + seconds
        self.rang = False

    def up(self, step: float = 0.0) -> bool:
        """Whether time is up, or would be before the end of a step of so many seconds.

        Without a limit it never is.
        """
        up = self._end is not None and now() + step > self._end
        self.rang |= up
        return up

    def late(self) -> dict[str, bool]:
        """Returns the diagnostics of an answer that may lack something."""
        return {"time_up": True} if self.rang else {}

    def left(self) -> float:
        """Returns the seconds left, infinite without a limit, and a moment if time is up."""
        return math.inf if self._end is None else max(self._end - now(), MOMENT)

    def part(self, parts: float) -> "Clock":
        """Returns a clock for one of so many equal parts of the time that is left."""
        return Clock(None if self._end is None else (self._end - now()) / parts)

    def before(self, seconds: float) -> "Clock":
        """Returns a clock that rings so many seconds earlier."""
        return Clock(None if self._end is None else self._end - now() - seconds)

    def paced(self, parts: Iterable[Part], least: int = 0) -> Iterator[Part]:
        """Yields parts of the work while another part as long as the longest so far ends in time.

        Args:
            parts: The time of a part ends when the next one is requested.
            least: The number of parts that are yielded in any case.
        """
        longest = 0.0
        for number, part in enumerate(parts):
            if number >= least and self.up(longest):
                return
            begin = now()
            yield part
            longest = max(longest, now() - begin)


UNLIMITED = Clock(None)
"""Never rings."""
