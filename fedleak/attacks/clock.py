"""The time that an attack may take."""

import time


class Clock:
    """Tells an attack that its time is up; the attack then ends with what it has.

    Attributes:
        rang: An attack asked when time was up, so that its answer may lack something.
    """

    def __init__(self, seconds: float | None) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self.rang = False

    def up(self) -> bool:
        """Whether time is up; never, without a number of seconds."""
        up = self._end is not None and time.monotonic() > self._end
        self.rang |= up
        return up

    def part(self, parts: int) -> "Clock":
        """Returns a clock for one of so many equal parts of the time that is left."""
        return Clock(None if self._end is None else (self._end - time.monotonic()) / parts)
