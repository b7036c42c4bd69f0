"""The time that an attack may take."""

import math
import time

MOMENT = 1e-3
"""Seconds that are left of a time that is up: there is no search of no time."""


def now() -> float:
    """Returns the seconds since some moment: the time of all attacks."""
    return time.monotonic()


class Clock:
    """Tells an attack that its time is up; the attack then ends with what it has.

    Attributes:
        rang: An attack asked when time was up, so that its answer may lack something.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else now() + seconds
        self.rang = False

    def up(self) -> bool:
        """Whether time is up; never, without a number of seconds."""
        up = self._end is not None and now() > self._end
        self.rang |= up
        return up

    def left(self) -> float:
        """Returns the seconds left, infinite without a limit, and a moment if time is up."""
        return math.inf if self._end is None else max(self._end - now(), MOMENT)

    def part(self, parts: int) -> "Clock":
        """Returns a clock for one of so many equal parts of the time that is left."""
        return Clock(None if self._end is None else (self._end - now()) / parts)
