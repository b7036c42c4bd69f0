"""What becomes of the updates of a round: some are captured, all are summed."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from fedleak.store.run import Capture, Key, Run
from fedleak.training.aggregation import WeightedSum


class RoundSum:
    """The sum over a round's clients in their order, whoever answers first.

    So the sum is the same to the last bit. An update that comes early is held on disk until its
    turn. The sum is lost with the process: a round that was cut short is trained again.

    Args:
        run: The run directory.
        round: The round.
        clients: The clients whose updates are summed, in this order.
        broadcast: The model of the round; sums have its types.
    """

    def __init__(
        self, run: Run, round: int, clients: Sequence[int], broadcast: Mapping[str, Tensor]
    ) -> None:
        self._run, self._round = run, round
        self._awaited = list(reversed(clients))
        self._early: set[int] = set()
        dtypes = {name: value.dtype for name, value in broadcast.items()}
        self.total = WeightedSum(dtypes.__getitem__)

    def is_next(self, client: int) -> bool:
        """Returns whether it is a client's turn."""
        return self._awaited[-1] == client

    def held(self, client: int) -> None:
        """Notes that the update of a client is held."""
        self._early.add(client)

    def add_(self, capture: Capture) -> None:
        """Adds the update of the client whose turn it is, and the held updates that follow it."""
        assert self.is_next(capture.key.client)
        self.total.add_(capture.update)
        self._awaited.pop()
        self._add_held_()

    def leave_out_(self, clients: Collection[int]) -> None:
        """Stops waiting for clients, and adds the held updates that follow theirs."""
        self._awaited = [client for client in self._awaited if client not in clients]
        self._add_held_()

    def _add_held_(self) -> None:
        while self._awaited and self._awaited[-1] in self._early:
            key = Key(self._round, self._awaited.pop())
            self.total.add_(self._run.held.read_capture(key).update)
            self._run.held.delete(key)


class Beside:
    """Does one task beside its caller, and waits for its end before it begins the next one.

    So captures are written while the next client trains, and at most two updates are in memory.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "captures")
        self._last: Future[None] | None = None

    def do(self, task: Callable[[], None]) -> None:
        """Begins a task; raises the error of the last one."""
        self.finish()
        self._last = self._thread.submit(task)

    @property
    def busy(self) -> bool:
        """Whether a task is running."""
        return self._last is not None and not self._last.done()

    def finish(self) -> None:
        """Waits for the last task, and raises its error."""
        last, self._last = self._last, None
        if last is not None:
            last.result()
