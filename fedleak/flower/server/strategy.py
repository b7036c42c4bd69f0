"""The curious or malicious server: sums updates, and keeps those that are attacked."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedleak import models
from fedleak.attacks.server_modes import ServerMode, changed_state
from fedleak.audit.kept_texts import read_held_out
from fedleak.config.experiment import Experiment
from fedleak.config.federation import lookup
from fedleak.config.federation.assignment import Assignment
from fedleak.config.federation.canaries import differences_of_sum
from fedleak.config.federation.protection import aggregator_of
from fedleak.config.federation.schedule import clients_of_round, key_of_sum, rounds_attacked, target
from fedleak.config.sent_parameters import sent_by
from fedleak.config.stored_parameters import stored_parameters
from fedleak.defenses import Noises, TrustedAggregator
from fedleak.detectors import REFUSED
from fedleak.flower.arrays import to_array, to_record
from fedleak.flower.server.replies import RefusedError, client_error, take_update
from fedleak.flower.server.round_sum import Beside, RoundSum
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.store.run import Capture, Key, Run
from fedleak.training.aggregation import WeightedSum, aggregate, difference
from fedleak.training.observation import ClientUpdate, Knowledge, UpdateKind
from fedleak.util.errors import FedleakError, blaming
from fedleak.util.lists import first_of
from fedleak.util.rng import stream

NUM_ERRORS = 3
"""How many problems the error of a failed round quotes."""


def quoted(problems: list[str]) -> str:
    """Returns the first problems of a failed round, and how many more there are."""
    return first_of(problems, NUM_ERRORS, "; ", "; and {} more like these")


class CuriousServer(Strategy):
    """FedSGD and FedAvg (McMahan et al. 2017) with a copy of every update on disk.

    Updates are summed as they come, in the order of the clients, so the sum does not depend on who
    answers first. Memory does not grow with the number of clients: an update is in memory while it
    is summed, and while it is written, beside the training of the next client. Updates that are not
    attacked never reach the disk.

    A malicious server sends what its mode makes of the global model, and keeps the global model
    aside. The updates that answer it are summed as usual, and move the global model unless the
    experiment forbids it.

    Args:
        experiment: What is run.
        run: Where captures go. The model of the first round is there.
        model: Has the parameters that clients train.
        first_round: The first round of this strategy; above 1 when a run resumes.
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
        self._assignment = ConfigRecord(Assignment.of(experiment, run).to_values())
        self._waiting_for: dict[int, int] = {}  # the client of each node that has not answered
        self._problems: list[str] = []
        self._aggregator = aggregator_of(experiment)
        self._noises: Noises = {}  # of the aggregator, in earlier rounds
        self._arrays = ArrayRecord()
        self._sum: RoundSum | None = None  # None: an aggregator has the updates of a round
        self._mode: ServerMode | None = None  # of the round
        self._target: int | None = None  # of the mode
        self._examples: dict[int, int] = {}  # that clients of the round report
        self.beside = Beside()  # writes what was received

    def on_reply(self, reply: Message) -> RecordDict:
        """Captures a client's reply if it is right, and returns an empty record in its place."""
        node = reply.metadata.src_node_id
        try:
            if node not in self._waiting_for:
                raise RefusedError("it was not asked, or has answered already")
            self._capture(reply, self._waiting_for.pop(node))
        except RefusedError as error:
            self._problems.append(f"{self._name(node)}: its answer is refused: {error}")
        return RecordDict()

    def _capture(self, reply: Message, client: int) -> None:
        """Captures a reply under the client whose node has sent it."""
        experiment, key = self._experiment, Key(self._round, client)
        local = experiment.local_training
        parameters = self._model.parameters()
        expected = {name: parameters[name] for name in sent_by(experiment, client, self._model)}
        most = lookup.most_examples(experiment, self._run, client)
        update = take_update(reply, key, local.kind, expected, most)
        self._examples[client] = update.num_examples
        capture = Capture(key, update, self._knowledge(update.num_examples))
        if self._sum is None:
            self._run.held.write(capture)
        else:
            self._capture_and_add(capture, self._sum)

    def _capture_and_add(self, capture: Capture, total: RoundSum) -> None:
        """Adds an update to the sum of its round, and captures it if it is attacked."""
        run, key = self._run, capture.key
        is_next = total.is_next(key.client)
        seen = self._experiment.sees == "updates" and self._experiment.attacked(*key)
        seen = seen and self._target in (None, key.client)
        kept = seen and not run.captures.is_closed(key)

        def write() -> None:
            if not is_next:
                run.held.write(capture)
            if not kept:
                return
            stored = self._stored(capture)
            if stored is capture and not is_next:
                run.captures.admit(key, run.held)
            else:
                run.captures.write(stored)

        self.beside.do(write)
        if is_next:
            total.add_(capture)
        else:
            total.held(key.client)

    def _stored(self, capture: Capture) -> Capture:
        """Returns the part of a capture that is stored: all, or what the attacks of the run read.

        Everybody can compute what weight decay alone did to the weights, so it is taken out.
        """
        tensors, known = capture.update.tensors, capture.knowledge
        if known.recipe is not None and known.recipe.weight_decay:
            before = self._run.model_sent(self._round).read_model(self._round)
            rate, steps = known.learning_rate or 0.0, known.local_steps or 1
            tensors = {
                name: known.recipe.without_decay(value, before[name], rate, steps)
                for name, value in tensors.items()
            }
            capture = replace(capture, update=replace(capture.update, tensors=tensors))
        names = stored_parameters(self._experiment, frozenset(tensors), self._model, self._mode)
        if len(names) == len(tensors):
            return capture
        read = {name: value for name, value in tensors.items() if name in names}
        return replace(capture, update=replace(capture.update, tensors=read))

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sends this round's clients the global model, or what a malicious server makes of it."""
        round = self._round = server_round + self._offset
        clients = clients_of_round(self._experiment, round)
        self._waiting_for = {self._nodes[client]: client for client in clients}
        self._problems, self._examples = [], {}
        self._mode, self._target = self._experiment.mode_in(round), target(self._experiment, round)
        self._arrays = arrays
        self._run.held.drop()  # left by a process that was killed in this round
        if self._aggregator is None:
            self._sum = RoundSum(self._run, round, clients, self._model.parameters())
        about = {"config": ConfigRecord({"round": round}), "assignment": self._assignment}
        sent_to = self._sent(round, arrays)
        return [
            Message(
                RecordDict({"arrays": sent_to(client), **about}),
                message_type=MessageType.TRAIN,
                dst_node_id=node,
            )
            for node, client in self._waiting_for.items()
        ]

    def _sent(self, round: int, arrays: ArrayRecord) -> Callable[[int], ArrayRecord]:
        """Returns the model for each client, and keeps the one for a malicious server's target.

        Raises:
            FedleakError: The mode failed, or its model has other names, shapes or types.
        """
        if (mode := self._mode) is None:
            return lambda client: arrays
        state = self._run.models.read_model(round)
        models.lend_parameters_(self._model, state)
        labelled = self._experiment.model.task == CLASSIFICATION
        public = read_held_out(self._run).examples(labelled=labelled)

        def changed(*, targeted: bool) -> ArrayRecord:
            rng = stream(self._experiment.seed, "server", round)
            with blaming(f"round {round}: server.mode = {mode.kind!r} failed"):
                changes = mode.broadcast(self._model, targeted=targeted, public=public, rng=rng)
            if not changes:
                return arrays
            sent = changed_state(state, changes, mode.kind)
            if targeted:
                self._run.sent_models.write(round, sent)
            return to_record(sent)

        to_target = changed(targeted=True)
        to_others = to_target if self._target is None else changed(targeted=False)
        return lambda client: to_target if self._target in (None, client) else to_others

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, None]:
        """Returns the next global model; with too few updates it is the one before.

        Raises:
            FedleakError: A client failed, did not answer, or gave an answer that was refused.
        """
        round = server_round + self._offset
        self.beside.finish()
        refusing = self._take_answers(reply for reply in replies if reply.has_error())
        broadcast, combined = self._run.models.read_model(round), None
        if self._sum is not None:
            self._sum.leave_out_(refusing)
            total, self._sum = self._sum.total, None
            skipped = not total.tensors
            lookup.note_dropped_out(self._run, round, refusing, refusing, skipped=skipped)
        else:
            total = WeightedSum(lambda name: broadcast[name].dtype)
            aggregator = lookup.aggregator_in(self._run, self._experiment, round)
            assert aggregator is not None
            combined = self._combined(aggregator, round, refusing)
            if combined is not None:
                total.add_(combined)
        optimiser = self._experiment.server_optimiser
        adam = optimiser.kind == "adam"
        moments = self._run.moments.read_model(round) if adam and round > 1 else {}
        if self._mode is None or self._experiment.server_built.aggregate:
            following, moments = aggregate(broadcast, total, optimiser, moments)
        else:
            following = broadcast
        key = key_of_sum(self._experiment, round)
        if self._experiment.sees == "models" and total.tensors:
            rate = optimiser.learning_rate
            self._capture_of_all(key, difference(broadcast, following, total, rate))
        elif combined is not None and key not in lookup.absent(self._run):
            self._capture_of_all(key, self._seen_of_sum(combined))
        if self._aggregator is not None:
            self._run.held.drop()
        if adam and round < self._experiment.federation.rounds:
            self._run.moments.write(round + 1, moments)
        self._run.models.write(round + 1, following)
        if round not in rounds_attacked(self._experiment):
            self._run.forget(round, model=self._experiment.published is None)
        # The same record is used again: Flower holds the first one to the end, beside each new one.
        for name, value in following.items():
            self._arrays[name] = to_array(value)
        return self._arrays, None

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

    def _combined(
        self, aggregator: TrustedAggregator, round: int, refusing: Sequence[int]
    ) -> ClientUpdate | None:
        """Returns the aggregate of the held updates; None: too few of them are left."""
        clients = clients_of_round(self._experiment, round)
        left = [client for client in clients if client not in refusing]
        if refusing and len(left) < aggregator.fewest(len(clients)):
            lookup.note_dropped_out(self._run, round, clients, refusing, skipped=True)
            return None
        lookup.note_dropped_out(self._run, round, refusing, refusing)

        def held() -> Iterator[ClientUpdate]:
            return (self._run.held.read_capture(Key(round, client)).update for client in left)

        seed = self._experiment.seed
        *earlier, rng = (stream(seed, "combined", number) for number in range(1, round + 1))
        combined = aggregator.combined(held(), rng=rng)
        if aggregator.noisy and round in rounds_attacked(self._experiment):
            for client, differences_SK in differences_of_sum(
                self._experiment, aggregator, round, self._model, combined, left, held()
            ):
                self._run.vault.write_differences(Key(round, client), differences_SK)
        after = aggregator.after(held(), rng=stream(seed, "after", round))
        if after != aggregator:
            lookup.note_aggregator(self._run, round + 1, after)
        return aggregator.corrected(combined, earlier, len(left), self._noises)

    def _seen_of_sum(self, combined: ClientUpdate) -> ClientUpdate:
        """Returns what is captured of a sum: all of it, or the target's update."""
        if self._mode is None or self._target is None:
            return combined
        if (names := self._mode.isolated(combined.tensors, self._model)) is None:
            return combined
        assert self._aggregator is not None
        weights: dict[str, dict[int, int]] = {name: {} for name in names}
        for client, examples in self._examples.items():
            for name in names & sent_by(self._experiment, client, self._model):
                weights[name][client] = self._aggregator.weight(examples)
        own = self._examples.get(self._target, 0)  # none if it dropped out
        tensors = {}
        for name in sorted(names & combined.tensors.keys()):
            # The mean over all that sent a parameter, to which nobody but the target contributed.
            weight, whole = weights[name].get(self._target, 0), sum(weights[name].values())
            tensors[name] = combined.tensors[name] * (whole / weight if weight else 0.0)
        return ClientUpdate(combined.kind, tensors, own)

    def _capture_of_all(self, key: Key, update: ClientUpdate) -> None:
        """Captures the update of a round: of all its clients, or of the target in the sum."""
        # The client with most examples made most steps; a target's update has fewer examples.
        examples = min(update.num_examples, max(self._examples.values()))
        capture = Capture(key, update, self._knowledge(examples))
        self._run.captures.write(self._stored(capture))

    def _knowledge(self, num_examples: int) -> Knowledge:
        """Returns the facts that the server itself set for a client in this round."""
        local = self._experiment.local_training.in_round(self._round, num_examples)
        known = Knowledge(
            learning_rate=local.learning_rate,
            local_steps=local.steps(num_examples),
            dropout=local.dropout,
            server_mode=None if self._mode is None else self._mode.kind,
        )
        if local.kind == UpdateKind.GRADIENT:
            return known
        return replace(known, local_epochs=local.epochs, recipe=local.recipe)

    def _take_answers(self, failed: Iterable[Message]) -> list[int]:
        """Returns the clients that refused the round.

        Raises:
            FedleakError: A client that did not refuse sent no update, or an answer was refused.
        """
        refusing = []
        for reply in failed:
            node = reply.metadata.src_node_id
            client = self._waiting_for.pop(node, None)
            if client is not None and reply.error.code == REFUSED:
                refusing.append(client)
            else:
                self._problems.append(f"{self._name(node)}: {client_error(reply)}")
        self._problems += [f"client {c}: did not answer" for c in self._waiting_for.values()]
        if self._problems:
            raise FedleakError(f"round {self._round}: {quoted(self._problems)}")
        return sorted(refusing)

    def _name(self, node: int) -> str:
        """Returns the name of a node for messages, with its client if it has one."""
        client = {node: client for client, node in self._nodes.items()}.get(node)
        return f"node {node}" if client is None else f"client {client} (node {node})"
