"""The `inline` engine: ServerApp and ClientApp in this process, over a small grid.

Messages are copied on their way to a client, so no app can change what another app still holds. The
bytes of arrays are immutable and not copied. A client runs when its reply is pulled, so one update
is in memory at a time.
"""

import copy
import itertools
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

# Flower keeps this to itself: a message cannot be made without it.
from flwr.supercore.task_identity import TaskIdentity

from fedleak.config.experiment import Experiment
from fedleak.flower.client.app import app as client_app
from fedleak.flower.runs import run_config
from fedleak.flower.server.app import app as server_app
from fedleak.flower.server.capturing_grid import refuse_to_go_on
from fedleak.store.run import Run

RUN_ID = NODE_ID = TASK_ID = 1

_NOWHERE = logging.NullHandler()


class InlineGrid:
    """The part of Flower's grid that is used here; its nodes are calls of one ClientApp.

    Args:
        client_app: The app that the nodes run.
        num_clients: The number of nodes.
        run_config: Settings that the submitter of a run may choose.
        vault: The folder in which each node keeps what it trained on; None: they keep nothing.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_clients: int,
        run_config: Mapping[str, bool | float | int | str],
        *,
        vault: Path | None = None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = RUN_ID, NODE_ID, TASK_ID
        self._app, self._stop = client_app, stop
        own: dict[str, str] = {} if vault is None else {"vault": str(vault)}
        self._contexts = {
            NODE_ID + 1 + client: Context(
                run_id=RUN_ID,
                node_id=NODE_ID + 1 + client,
                node_config={"partition-id": client, "num-partitions": num_clients, **own},
                state=RecordDict(),
                run_config=dict(run_config),
            )
            for client in range(num_clients)
        }
        self._numbers = itertools.count()
        self._waiting: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        """Returns a node per client."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queues messages."""
        names = []
        for message in messages:
            name = message.metadata.__dict__["_message_id"] = f"m{next(self._numbers)}"
            names.append(name)
            self._waiting[name] = message
        return names

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Runs the clients of these queued messages and returns their replies."""
        refuse_to_go_on(stop=self._stop())
        names = [name for name in message_ids if name in self._waiting]
        return [self._answer(self._waiting.pop(name)) for name in names]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Sends messages and returns all replies."""
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        return self._app(copy.deepcopy(message), self._contexts[message.metadata.dst_node_id])


def train(run: Run, experiment: Experiment, stop: Callable[[], bool] = lambda: False) -> None:
    """Trains `experiment` in this process.

    Args:
        run: The run directory.
        experiment: The experiment that was prepared there.
        stop: Called before each client trains; returns whether training is to end early.

    Raises:
        FedleakError: A client failed, or training was to stop.
    """
    config = run_config(run.path, nodes_within=0)
    # Flower's own lines would tear the progress bars; what went wrong comes back as an error.
    logging.getLogger("flwr").setLevel(logging.ERROR)
    # A client's log may quote its texts, so it must not reach the terminal, where Python writes if
    # a log has no handler.
    logging.getLogger("clients").addHandler(_NOWHERE)
    clients, vault = experiment.federation.clients, run.path.absolute().parent
    grid = InlineGrid(client_app, clients, config, vault=vault, stop=stop)
    context = Context(RUN_ID, NODE_ID, {}, RecordDict(), config)
    server_app(grid, context)  # type: ignore[arg-type]
