"""The curious server: aggregates honestly, and keeps each update exactly as it arrived."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedleak.config.experiment import Experiment
from fedleak.config.sent_parameters import sent_by
from fedleak.defenses import TrustedAggregator
from fedleak.errors import FedleakError
from fedleak.federation.lookup import examples
from fedleak.federation.schedule import clients_of_round
from fedleak.models import LanguageModel
from fedleak.observation import ClientUpdate, Knowledge, UpdateKind
from fedleak.store.run import EVERYONE, Capture, Key, Run
from fedleak.training.aggregation import aggregate
from server.assignments import assignment
from server.replies import RefusedError, take_update, told

NUM_ERRORS = 3
"""Problems that a failed round quotes."""


class CuriousServer(Strategy):
    """FedSGD and FedAvg (McMahan et al. 2017) with a copy of every update on disk.

    The sum over clients is taken from the captures in client order, one at a time: it does not
    depend on who answered first, and memory does not grow with the number of clients.

    Args:
        experiment: What is run.
        run: Where captures go. The model of the first round is there.
        model: Has the parameters that clients train.
        first_round: The round that this strategy's first one is; above 1 when a run resumes.
        nodes: The node that holds each client's data.
    """

    def __init__(
        self,
        experiment: Experiment,
        run: Run,
        model: LanguageModel,
        first_round: int,
        nodes: Mapping[int, int],
    ) -> None:
        self._experiment, self._run, self._model = experiment, run, model
        self._nodes, self._offset = nodes, first_round - 1
        self._round = first_round
        self._assignment = assignment(experiment, run)
        self._waiting_for: dict[int, int] = {}  # the client of each node that has not answered
        self._problems: list[str] = []

    def on_reply(self, reply: Message) -> RecordDict:
        """Captures a client's reply, if it is what was asked for; nothing is left of it."""
        node = reply.metadata.src_node_id
        try:
            self._capture(reply, self._client_that_was_asked(node))
        except RefusedError as error:
            self._problems.append(f"{self._name(node)}: its answer is refused: {error}")
        return RecordDict()

    def _client_that_was_asked(self, node: int) -> int:
        """Returns the client of a node, which has answered from now on."""
        if node not in self._waiting_for:
            raise RefusedError("it was not asked, or has answered already")
        return self._waiting_for.pop(node)

    def _capture(self, reply: Message, client: int) -> None:
        """Captures a reply under the client whose node has sent it."""
        experiment, key = self._experiment, Key(self._round, client)
        local = experiment.local_training
        parameters = self._model.parameters()
        expected = {name: parameters[name] for name in sent_by(experiment, client, self._model)}
        of_fedsgd = local.kind == UpdateKind.GRADIENT
        most = local.batch_size if of_fedsgd else examples(self._run).training
        update = take_update(reply, key, local.kind, expected, most)
        knowledge = Knowledge(
            learning_rate=local.learning_rate,
            local_steps=local.steps(update.num_examples),
            dropout=local.dropout,
        )
        capture = Capture(key, update, knowledge)
        if experiment.aggregator is None:
            self._run.write_capture(capture)
        else:
            self._run.hold(capture)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sends the global model to this round's clients."""
        round = self._round = server_round + self._offset
        clients = clients_of_round(self._experiment, round)
        self._waiting_for = {self._nodes[client]: client for client in clients}
        self._problems = []
        record = RecordDict(
            {
                "arrays": arrays,
                "config": ConfigRecord({"round": round}),
                "assignment": self._assignment,
            }
        )
        return [
            Message(record, message_type=MessageType.TRAIN, dst_node_id=node)
            for node in self._waiting_for
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, None]:
        """Returns the next global model.

        Raises:
            FedleakError: A client failed, did not answer, or gave an answer that was refused.
        """
        round = server_round + self._offset
        clients = clients_of_round(self._experiment, round)
        self._check_all_answered(reply for reply in replies if reply.has_error())
        if self._experiment.aggregator is not None:
            self._capture_combined(self._experiment.aggregator, round, clients)
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

    def _capture_combined(
        self, aggregator: TrustedAggregator, round: int, clients: Sequence[int]
    ) -> None:
        """Captures what the aggregator makes of the updates held, and deletes them."""
        knowledge: list[Knowledge] = []

        def one_by_one() -> Iterator[ClientUpdate]:
            for client in clients:
                held = self._run.held(Key(round, client))
                knowledge.append(held.knowledge)
                yield held.update

        update = aggregator.combined(one_by_one())
        # Who has most examples made most steps.
        most = max(knowledge, key=lambda known: known.local_steps or 0)
        self._run.write_capture(Capture(Key(round, EVERYONE), update, most))
        self._run.drop_held()

    def _check_all_answered(self, failed: Iterable[Message]) -> None:
        """Fails the round unless each client's update is there and nothing else came."""
        for reply in failed:
            node = reply.metadata.src_node_id
            self._problems.append(f"{self._name(node)}: {told(reply)}")
            self._waiting_for.pop(node, None)
        self._problems += [f"client {c}: did not answer" for c in self._waiting_for.values()]
        if not self._problems:
            return
        quoted, more = self._problems[:NUM_ERRORS], len(self._problems[NUM_ERRORS:])
        if more:
            quoted.append(f"and {more} more like these")
        raise FedleakError(f"round {self._round}: {'; '.join(quoted)}")

    def _name(self, node: int) -> str:
        """Returns what a node is called: by its client, if it has one."""
        client = {node: client for client, node in self._nodes.items()}.get(node)
        return f"node {node}" if client is None else f"client {client} (node {node})"
