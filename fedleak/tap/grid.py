"""The tap: a grid around a grid, which hands on all messages and keeps those of training.

The app trains as it would without the tap. An error in the tap, such as a full disk or a damaged
reply, is reported on stderr and in problems.jsonl, and does not reach the app. An error in the
app's own grid reaches the app as usual.
"""

import os
import time
from collections.abc import Iterable
from typing import Any, cast

from flwr.app import Message
from flwr.serverapp import Grid

from fedleak.tap.recorder import Recorder, recorder

POLL_SECONDS = 0.1


def tap(grid: Grid, folder: str | os.PathLike[str]) -> Grid:
    """Returns a grid that hands on all messages and keeps those of training.

    Args:
        grid: The grid of the ServerApp.
        folder: Where they are kept; below the working folder of the ServerApp if it is relative. If
            it is not empty, the next free name with a number is taken.
    """
    kept = recorder(folder)
    return grid if kept is None else cast(Grid, RecordingGrid(grid, kept))


@Grid.register
class RecordingGrid:
    """A grid that shows a recorder what passes, and passes on all else that a grid has.

    Replies are pulled one by one, because a pull returns all that is ready.
    """

    def __init__(self, grid: Grid, kept: Recorder) -> None:
        self._grid, self._kept = grid, kept
        self._asked: dict[str, int] = {}  # the round of each message that has no reply yet

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Sends messages."""
        messages = list(messages)
        rounds = self._kept.send(messages)
        names = list(self._grid.push_messages(messages))
        # A grid may leave out, or name None, what could not be sent; all write down the names.
        for message, round in zip(messages, rounds, strict=True):
            if round is not None:
                self._asked[message.metadata.message_id] = round
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Returns the replies that are ready."""
        replies: list[Message] = []
        for name in message_ids:
            for reply in self._grid.pull_messages([name]):
                if (round := self._asked.pop(name, None)) is not None:
                    self._kept.receive(reply, round)
                replies.append(reply)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Sends messages and waits for the replies."""
        # None stands for a message that could not be sent; nobody answers it.
        waiting = [name for name in self.push_messages(messages) if name]
        del messages
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while waiting and (deadline is None or time.monotonic() < deadline):
            before = len(waiting)
            for name in tuple(waiting):
                if arrived := list(self.pull_messages([name])):
                    replies += arrived
                    waiting.remove(name)
            if len(waiting) == before:
                time.sleep(POLL_SECONDS)
        return replies

    def __getattr__(self, name: str) -> Any:
        """Passes on what is not recorded."""
        return getattr(self._grid, name)
