"""The tap: sees each reply as it arrives, before anything else does, and frees its memory."""

import time
from collections.abc import Callable, Iterable

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedleak.errors import StoppedError

POLL_SECONDS = 0.02


def refuse_to_go_on(*, stop: bool) -> None:
    """Ends training that is to stop.

    Raises:
        StoppedError: It is.
    """
    if stop:
        raise StoppedError("training was stopped: what goes on beside it has failed")


class TapGrid(Grid):
    """A grid that hands every reply to `on_reply`, which returns what the strategy may keep.

    A pull hands over all that is ready, so each asks for one reply: no more than one update is ever
    in memory, however many clients there are.
    """

    def __init__(
        self,
        grid: Grid,
        on_reply: Callable[[Message], RecordDict],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self._grid, self._on_reply, self._stop = grid, on_reply, stop

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Sends messages and returns the replies, stripped of what `on_reply` took."""
        # None stands for a message that could not be sent; nobody answers it.
        waiting = [name for name in self._grid.push_messages(messages) if name]
        deadline = None if timeout is None else time.monotonic() + timeout
        replies: list[Message] = []
        while waiting and (deadline is None or time.monotonic() < deadline):
            before = len(waiting)
            for name in tuple(waiting):
                refuse_to_go_on(stop=self._stop())
                for reply in self._grid.pull_messages([name]):
                    if reply.has_content():
                        reply.content = self._on_reply(reply)
                    replies.append(reply)
                    if name in waiting:
                        waiting.remove(name)
            if len(waiting) == before:
                time.sleep(POLL_SECONDS)
        return replies

    def set_run(self, run: object) -> None:
        """Passes on."""
        self._grid.set_run(run)  # type: ignore[arg-type]

    @property
    def run(self) -> object:  # type: ignore[override]
        """Passes on."""
        return self._grid.run

    def create_message(self, *args: object, **kwargs: object) -> Message:
        """Passes on."""
        return self._grid.create_message(*args, **kwargs)  # type: ignore[arg-type]

    def get_node_ids(self) -> Iterable[int]:
        """Passes on."""
        return self._grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Passes on."""
        return self._grid.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Passes on."""
        return self._grid.pull_messages(message_ids)
