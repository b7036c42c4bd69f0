"""The curious server: aggregates honestly, and keeps each update exactly as it arrived."""

from collections.abc import Iterable, Iterator, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedleak.config import Experiment
from fedleak.errors import FedleakError
from fedleak.federation import clients_of_round
from fedleak.observation import ClientUpdate, Knowledge
from fedleak.store import EVERYONE, Capture, Key, Run
from fedleak.training import aggregate, from_wire, mean_update

NUM_ERRORS = 3
"""Client errors that a failed round quotes."""


class CuriousServer(Strategy):
    """FedSGD and FedAvg (McMahan et al. 2017) with a copy of every update on disk.

    The sum over clients is taken from the captures in client order, one at a time: it does not
    depend on who answered first, and memory does not grow with the number of clients.

    Args:
        experiment: What is run.
        run: Where captures go.
        first_round: The round that this strategy's first one is; above 1 when a run resumes.
        nodes: The node that holds each client's data.
    """

    def __init__(
        self, experiment: Experiment, run: Run, first_round: int, nodes: dict[int, int]
    ) -> None:
        self._experiment, self._run, self._nodes = experiment, run, nodes
        self._offset = first_round - 1

    def on_reply(self, reply: Message) -> RecordDict:
        """Captures a reply of a client and returns what is left of it: the metrics."""
        if "update" not in reply.content.array_records:
            return reply.content
        metrics = reply.content.metric_records["metrics"]
        num_examples, client, round = (
            int(metrics[name])  # type: ignore[arg-type]
            for name in ("num-examples", "client", "round")
        )
        local = self._experiment.local_training
        tensors = from_wire(reply.content.array_records["update"].to_torch_state_dict())
        knowledge = Knowledge(
            learning_rate=local.learning_rate,
            local_steps=local.steps(num_examples),
            dropout=local.dropout,
        )
        update = ClientUpdate(local.kind, tensors, num_examples)
        capture = Capture(Key(round, client), update, knowledge)
        if self._experiment.secure_sum:
            self._run.hold(capture)
        else:
            self._run.write_capture(capture)
        return RecordDict({"metrics": metrics})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sends the global model to this round's clients."""
        round = server_round + self._offset
        self._run.write_broadcast(round, arrays.to_torch_state_dict())
        record = RecordDict({"arrays": arrays, "config": ConfigRecord({"round": round})})
        return [
            Message(record, message_type=MessageType.TRAIN, dst_node_id=self._nodes[client])
            for client in clients_of_round(self._experiment, round)
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, None]:
        """Returns the next global model.

        Raises:
            FedleakError: A client failed or did not answer.
        """
        round = server_round + self._offset
        replies = list(replies)
        clients = clients_of_round(self._experiment, round)
        failed = [reply for reply in replies if reply.has_error()]
        if failed or len(replies) < len(clients):
            raise FedleakError(self._failure(round, failed, len(clients) - len(replies)))
        if self._experiment.secure_sum:
            self._reveal_sum(round, clients)
            clients = [EVERYONE]
        updates = (self._run.read_capture(Key(round, client)).update for client in clients)
        rate = self._experiment.federation.learning_rate
        following = aggregate(self._run.read_broadcast(round), updates, rate)
        self._run.write_broadcast(round + 1, following)
        if not self._experiment.attacked(round):
            self._run.forget(round)
        return ArrayRecord(following), None

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Asks nothing of clients: the server evaluates on held-out data."""
        return []

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Has nothing to aggregate."""
        return None

    def summary(self) -> None:
        """Logs nothing: the run directory says it all."""

    def _reveal_sum(self, round: int, clients: Sequence[int]) -> None:
        """Captures the sum of what is held, and forgets what it is of."""
        knowledge: list[Knowledge] = []

        def one_by_one() -> Iterator[ClientUpdate]:
            for client in clients:
                held = self._run.held(Key(round, client))
                knowledge.append(held.knowledge)
                yield held.update

        update = mean_update(one_by_one())
        # Who has most examples made most steps.
        most = max(knowledge, key=lambda known: known.local_steps or 0)
        self._run.write_capture(Capture(Key(round, EVERYONE), update, most))
        self._run.release()

    def _failure(self, round: int, failed: list[Message], silent: int) -> str:
        client_of = {node: client for client, node in self._nodes.items()}
        reasons = [
            f"client {client_of.get(reply.metadata.src_node_id, '?')}: "
            f"{_reason(reply.error.reason or 'no reason')}"
            for reply in failed[:NUM_ERRORS]
        ]
        if silent:
            reasons.append(f"{silent} did not answer")
        return f"round {round}: {len(failed) + silent} clients failed; {'; '.join(reasons)}"


def _reason(text: str) -> str:
    """Returns what a client's error says, without the traces that Ray puts around it."""
    told = text.rpartition("occurred. Message: ")[2].removesuffix("'>")
    return " ".join(told.split())[-400:]
