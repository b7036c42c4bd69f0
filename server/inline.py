"""The `inline` engine: ServerApp and ClientApp in this process, over a small grid.

Messages are pickled on their way to a client, so nobody can change what another still holds,
and a client runs when its reply is pulled, so one update is in memory at a time.
"""

import importlib
import itertools
import logging
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

# Flower keeps these two to itself: a message cannot be made, nor a grid, without them.
from flwr.supercore.run import Run as FlowerRun
from flwr.supercore.task_identity import TaskIdentity

from fedleak.config import Experiment
from fedleak.store import Run
from server.tap import refuse_to_go_on

CLIENT_FAILED = 2
RUN_ID = NODE_ID = TASK_ID = 1


class InlineGrid(Grid):
    """A grid whose nodes are calls of one ClientApp."""

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        run_config: Mapping[str, bool | float | int | str],
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_ID, NODE_ID, TASK_ID
        self._app, self._stop = client_app, stop
        self._run = FlowerRun.create_empty(RUN_ID)
        self._contexts = {
            NODE_ID + 1 + client: Context(
                run_id=RUN_ID,
                node_id=NODE_ID + 1 + client,
                node_config={"partition-id": client, "num-partitions": num_clients},
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for client in range(num_clients)
        }
        self._numbers = itertools.count()
        self._waiting: deque[Message] = deque()

    def set_run(self, run: FlowerRun) -> None:
        """Keeps the run."""
        self._run = run

    @property
    def run(self) -> FlowerRun:
        """The run."""
        return self._run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Makes a message."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Returns a node per client."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queues messages."""
        names = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"m{next(self._numbers)}"
            names.append(message.metadata.message_id)
            self._waiting.append(message)
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Runs the client of one queued message and returns its reply."""
        refuse_to_go_on(stop=self._stop())
        return [self._answer(self._waiting.popleft())] if self._waiting else []

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Sends messages and returns all replies."""
        names = self.push_messages(messages)
        return [reply for _ in names for reply in self.pull_messages(names)]

    def _answer(self, message: Message) -> Message:
        received = pickle.loads(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))
        try:
            return self._app(received, self._contexts[message.metadata.dst_node_id])
        except Exception as error:  # noqa: BLE001 - a client's crash is a reply, as on a network
            reason = "".join(traceback.format_exception_only(error)).strip()
            return Message(Error(CLIENT_FAILED, reason), reply_to=message)


def train(run: Run, experiment: Experiment, stop: Callable[[], bool] = lambda: False) -> None:
    """Trains `experiment` in this process.

    Args:
        run: The run directory.
        experiment: What was prepared there.
        stop: Is asked before each client trains.

    Raises:
        FedleakError: A client failed, or training was to stop.
    """
    config: dict[str, bool | float | int | str] = {
        "experiment": str(run.path / "run.json"),
        "run-dir": str(run.path),
        "attack": False,
        "vault": True,
    }
    # Flower's own lines would tear the progress bars; what went wrong comes back as an error.
    logging.getLogger("flwr").setLevel(logging.ERROR)
    client_app = importlib.import_module("clients.app").app
    server_app = importlib.import_module("server.app").app
    grid = InlineGrid(client_app, experiment.federation.clients, config, stop)
    context = Context(RUN_ID, NODE_ID, {}, RecordDict(), config)
    server_app(grid, context)
