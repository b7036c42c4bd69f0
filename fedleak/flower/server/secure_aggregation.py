"""The server's side of secure aggregation, Flower's SecAgg+: the server sees only the sum."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import FitIns, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Stage
from flwr.common.secure_aggregation.secaggplus_constants import Key as ProtocolKey
from flwr.compat.common.parameter import bytes_to_ndarray
from flwr.compat.common.recorddict_compat import parameters_to_arrayrecord
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.serverapp import Grid

from fedleak.config.federation.lookup import most_examples, note_dropped_out
from fedleak.config.sent_parameters import sent_by
from fedleak.defenses import TrustedAggregator
from fedleak.defenses.secure_sum import MODULUS, SecureSum
from fedleak.detectors import REFUSED
from fedleak.flower.server.replies import RefusedError, client_error, whole_number
from fedleak.flower.server.strategy import CuriousServer, quoted
from fedleak.training.observation import ClientUpdate
from fedleak.util.errors import FedleakError

NOTHING = ndarrays_to_parameters([])

PAIRS: Mapping[str, tuple[str, str]] = {
    Stage.SHARE_KEYS: (ProtocolKey.DESTINATION_LIST, ProtocolKey.CIPHERTEXT_LIST),
    Stage.UNMASK: (ProtocolKey.NODE_ID_LIST, ProtocolKey.SHARE_LIST),
}
"""By stage, the keys under which an answer has nodes and the bytes for each."""


class SummingServer(CuriousServer):
    """A curious server that gets the sum of a round through SecAgg+, and no client's update.

    If a client is lost while it trains, or afterwards, the protocol leaves it out of the sum.
    Flower's protocol cannot go on without a client that is lost earlier: it begins anew with the
    others.

    Args:
        of_server: The arguments of `CuriousServer`.
        settings: The settings of the protocol.
        patience: Seconds to wait for the answers of each stage.
    """

    def __init__(self, *of_server: Any, settings: SecureSum, patience: float) -> None:
        super().__init__(*of_server)
        self._settings, self._patience = settings, patience

    def on_reply(self, reply: Message) -> RecordDict:
        """Leaves a reply as it is: it holds keys, shares, or numbers under a mask."""
        return reply.content

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Sums the updates of this round's clients, and leaves nothing to be sent.

        Raises:
            FedleakError: Too few clients answered, or the sum cannot be unmasked.
        """
        training_messages = list(super().configure_train(server_round, arrays, config, grid))
        self._clients, self._waiting_for = self._waiting_for, {}
        parameters = self._model.parameters()
        clients = list(self._clients.values())  # all send the same parameters
        self._names = sorted(sent_by(self._experiment, clients[0], self._model))
        held = (most_examples(self._experiment, self._run, client) for client in clients)
        stages = Stages(
            grid=grid,
            tasks={message.metadata.dst_node_id: message.content for message in training_messages},
            shapes=[tuple(parameters[name].shape) for name in self._names],
            most_examples=max(held),
        )
        self._total, self._refused = self._summed(stages), stages.refused
        return []

    def _summed(self, stages: "Stages") -> "Sum | None":
        """Runs the protocol, and again without the clients that were lost before training.

        Returns:
            The sum; None: so many clients refused the round that there is none.
        """
        left = list(self._clients)
        needed = self._settings.fewest(len(left))
        while len(left) >= needed:
            try:
                total = run_protocol(stages, left, self._settings, self._patience)
            except LostEarlyError:
                left = [node for node in left if node not in stages.problems]
                continue
            if total is None:
                break
            return total
        if stages.problems.keys() == stages.refused:
            return None
        lines = [f"{self._name(node)}: {why}" for node, why in stages.problems.items()]
        raise FedleakError(
            f"round {self._round}: SecAgg+ gave no sum: {len(stages.problems)} of "
            f"{len(self._clients)} clients were lost, and at least {needed} must answer: "
            f"{quoted(lines) or 'see the log of Flower'}"
        )

    def _combined(
        self, aggregator: TrustedAggregator, round: int, refusing: Sequence[int]
    ) -> ClientUpdate | None:
        """Returns the sum of the protocol, and notes who is not in it; None: there is none."""
        local, total = self._experiment.local_training, self._total
        refusing = [client for node, client in self._clients.items() if node in self._refused]
        if total is None:
            everyone = list(self._clients.values())
            note_dropped_out(self._run, round, everyone, refusing, skipped=True)
            return None
        parameters = self._model.parameters()
        means = zip(self._names, map(torch.from_numpy, total.mean), strict=True)
        tensors = {name: mean.to(parameters[name].dtype) for name, mean in means}
        self._examples = {self._clients[node]: count for node, count in total.examples.items()}
        absent = [c for node, c in self._clients.items() if node not in total.examples]
        note_dropped_out(self._run, round, absent, refusing)
        return ClientUpdate(local.kind, tensors, sum(total.examples.values()))


class Sum(NamedTuple):
    """What the protocol lets the server know.

    Attributes:
        mean: The mean of the updates, weighted by examples: an array of each parameter.
        examples: How many examples each node in the sum has; nodes send it in clear.
    """

    mean: Sequence[np.ndarray[Any, np.dtype[np.float64]]]
    examples: Mapping[int, int]


class LostEarlyError(FedleakError):
    """A client was lost before it was asked to train."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The part of a grid that Flower's workflow uses. It keeps what the workflow does not report.

    Attributes:
        grid: Flower's.
        tasks: What each node gets with the message that asks it to train.
        shapes: The shapes of the arrays that a client sends.
        most_examples: How many examples a client can have used at most.
        problems: Why a node was lost, by node.
        refused: The nodes among them that refused to train.
    """

    grid: Grid
    tasks: Mapping[int, RecordDict]
    shapes: Sequence[tuple[int, ...]]
    most_examples: int
    problems: dict[int, str] = field(default_factory=dict)
    refused: set[int] = field(default_factory=set)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Sends the messages of a stage and returns the replies that are right.

        Raises:
            LostEarlyError: A reply is missing or wrong in a stage before training.
        """
        messages = list(messages)
        stage = messages[0].content.config_records[RECORD_KEY_CONFIGS][ProtocolKey.STAGE]
        if stage == Stage.COLLECT_MASKED_VECTORS:
            for message in messages:
                of_protocol = message.content.config_records[RECORD_KEY_CONFIGS]
                task = self.tasks[message.metadata.dst_node_id]
                message.content = RecordDict({**task, RECORD_KEY_CONFIGS: of_protocol})
        waiting_for = {message.metadata.dst_node_id for message in messages}
        right = []
        for reply in self.grid.send_and_receive(messages, timeout=timeout):
            node = reply.metadata.src_node_id
            if node not in waiting_for:
                continue  # it has answered already, or was not asked
            waiting_for.remove(node)
            if reply.has_error():
                self.problems[node] = client_error(reply)
                if reply.error.code == REFUSED and stage == Stage.COLLECT_MASKED_VECTORS:
                    self.refused.add(node)
                continue
            try:
                self._check(str(stage), reply.content)
            except RefusedError as error:
                self.problems[node] = f"its answer is refused: {error}"
            else:
                right.append(reply)
        self.problems.update(dict.fromkeys(waiting_for, "did not answer"))
        if len(right) < len(messages) and stage in (Stage.SETUP, Stage.SHARE_KEYS):
            raise LostEarlyError("a client was lost before training")
        return right

    def _check(self, stage: str, content: RecordDict) -> None:
        """Refuses an answer that does not fit its stage, which the workflow does not check."""
        values = dict(content.config_records.get(RECORD_KEY_CONFIGS, {}))
        masked = values.get(ProtocolKey.MASKED_PARAMETERS)
        if stage == Stage.COLLECT_MASKED_VECTORS and isinstance(masked, list):
            self._check_masked(masked, content)
            return
        if stage == Stage.SETUP:
            keys = (ProtocolKey.PUBLIC_KEY_1, ProtocolKey.PUBLIC_KEY_2)
            right = all(type(values.get(key)) is bytes for key in keys)
        else:
            right = stage in PAIRS and _pairs(*(values.get(key) for key in PAIRS[stage]))
        if not right:
            raise RefusedError(f"it is no answer to the stage {stage!r} of SecAgg+")

    def _check_masked(self, masked: Sequence[Any], content: RecordDict) -> None:
        if any(content.array_records.values()):
            raise RefusedError("it holds numbers that nothing masks")
        metrics = content.metric_records.get("fitres.num_examples")
        count = metrics.get("num_examples") if metrics else None
        whole_number("num-examples", count, 1, self.most_examples)
        if len(masked) != 1 + len(self.shapes):
            raise RefusedError(f"it holds {len(masked)} arrays, and not {1 + len(self.shapes)}")
        for array, shape in zip(masked, [(1,), *self.shapes], strict=True):
            try:
                value = bytes_to_ndarray(array)
            except Exception as error:  # NumPy may raise anything on arbitrary bytes
                raise RefusedError(f"an array cannot be read ({type(error).__name__})") from error
            if value.shape != shape or value.dtype != np.int64:
                raise RefusedError("an array is not of the shape and type that was asked for")
            if value.size and not 0 <= value.min() <= value.max() < MODULUS:
                raise RefusedError("an array holds a number beyond the modulus")


def _pairs(nodes: Any, texts: Any) -> bool:
    """Returns whether each node has its bytes."""
    if not isinstance(nodes, list) or not isinstance(texts, list):
        return False
    return [*map(type, nodes), *map(type, texts)] == [int] * len(nodes) + [bytes] * len(nodes)


class _Result:
    """The part of a strategy that Flower's workflow uses."""

    def __init__(self) -> None:
        self.sum: Sum | None = None

    def configure_fit(self, round: int, parameters: Any, nodes: Any) -> list[tuple[Any, FitIns]]:
        """Returns who takes part; `Stages` adds the task of each node."""
        return [(SimpleNamespace(node_id=node), FitIns(NOTHING, {})) for node in nodes.all()]

    def aggregate_fit(self, round: int, results: Any, failures: Any) -> tuple[None, dict[str, Any]]:
        """Keeps the mean, which every result has, and the number of examples of each node in it."""
        mean = parameters_to_ndarrays(results[0][1].parameters)
        self.sum = Sum(mean, {client.node_id: result.num_examples for client, result in results})
        return None, {}


def run_protocol(
    stages: Stages, nodes: Sequence[int], settings: SecureSum, patience: float
) -> Sum | None:
    """Runs SecAgg+ with these nodes; every one is the neighbour of every other.

    Returns:
        The sum; None if too few nodes answered.

    Raises:
        LostEarlyError: A node was lost before training.
        FedleakError: The answers cannot be unmasked.
    """
    assert settings.clipping is not None
    assert settings.max_weight is not None
    workflow = SecAggPlusWorkflow(
        num_shares=1.0,
        reconstruction_threshold=settings.threshold,
        max_weight=settings.max_weight,
        clipping_range=settings.clipping,
        quantization_range=settings.levels,
        modulus_range=MODULUS,
        timeout=patience,
    )
    result = _Result()
    manager = SimpleNamespace(all=lambda: nodes, num_available=lambda: len(nodes))
    context = LegacyContext(
        Context(0, 0, {}, RecordDict(), {}),
        strategy=result,  # type: ignore[arg-type]
        client_manager=manager,  # type: ignore[arg-type]
    )
    context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})
    context.state.array_records[MAIN_PARAMS_RECORD] = parameters_to_arrayrecord(NOTHING, True)
    try:
        workflow(stages, context)  # type: ignore[arg-type]
    except FedleakError:
        raise
    except Exception as error:  # Flower may raise anything on wrong shares
        raise FedleakError(
            f"SecAgg+ cannot unmask the sum ({type(error).__name__}): a client's share is wrong"
        ) from error
    if (total := result.sum) is None:
        return None
    # Masks that do not cancel leave numbers that no sum of clipped numbers has.
    weight = sum(total.examples.values()) / len(total.examples) / settings.max_weight
    largest = 1.01 * settings.clipping / weight
    if not all(bool((np.abs(array) <= largest).all()) for array in total.mean):
        raise FedleakError("SecAgg+ gave a sum that no updates have: a client's share is wrong")
    return total
