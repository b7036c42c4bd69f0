"""The tap: sees each reply as it arrives, before anything else does, and frees its memory."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedleak.util.errors import StoppedError

POLL_SECONDS = 0.02

AT_ONCE = 16
"""How many messages may be under way, by default."""


def refuse_to_go_on(*, stop: bool) -> None:
    """Ends training that is to stop.

    Raises:
        StoppedError: `stop` is true.
    """
    if stop:
        raise StoppedError("training was stopped, as it was told to")


class CapturingGrid:
    """Hands every reply to `on_reply`, which returns what the strategy may keep.

    It has the methods of a grid that a strategy uses.

    A pull returns all that is ready, so each pull asks for one reply: no more than one update is
    pulled at a time, however many clients there are. The SuperLink holds the replies until then, so
    only some messages are under way at a time: as a reply is pulled, the next message goes out.

    Args:
        grid: What messages go through.
        on_reply: Takes what it wants of a reply, and returns what the strategy may keep.
        stop: Called before each pull; returns whether to end.
        at_once: How many messages may be under way.
        room: Called before each message with the number under way; returns whether it may go out.
    """

    def __init__(
        self,
        grid: Grid,
        on_reply: Callable[[Message], RecordDict],
        stop: Callable[[], bool] = lambda: False,
        at_once: int = AT_ONCE,
        room: Callable[[int], bool] = lambda under_way: True,
    ) -> None:
        self._grid, self._on_reply, self._stop = grid, on_reply, stop
        self._at_once, self._room = at_once, room

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Sends messages and returns the replies, stripped of what `on_reply` took.

        Args:
            messages: The messages, in the order in which they go out.
            timeout: Seconds to wait for each reply once the message is sent; None: no limit.
        """
        left, wait = deque(messages), math.inf if timeout is None else timeout
        deadlines: dict[str, float] = {}  # of the messages that are under way
        replies: list[Message] = []
        while True:
            while left and len(deadlines) < self._at_once and self._room(len(deadlines)):
                # None stands for a message that could not be sent; nobody answers it.
                sent = [name for name in self._grid.push_messages([left.popleft()]) if name]
                deadlines |= dict.fromkeys(sent, time.monotonic() + wait)
            if not (left or deadlines):
                return replies
            refuse_to_go_on(stop=self._stop())
            before = len(replies)
            for name, deadline in tuple(deadlines.items()):
                refuse_to_go_on(stop=self._stop())
                pulled = list(self._grid.pull_messages([name]))
                for reply in pulled:
                    if reply.has_content():
                        reply.content = self._on_reply(reply)
                replies += pulled
                if pulled or time.monotonic() >= deadline:
                    del deadlines[name]
            if len(replies) == before:
                time.sleep(POLL_SECONDS)
