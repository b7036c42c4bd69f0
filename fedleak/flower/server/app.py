"""The ServerApp: resumes or starts a run, and, for `flwr run`, attacks it too."""

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp

from fedleak import models
from fedleak.audit import scoring
from fedleak.audit.gaps import refuse_gaps
from fedleak.audit.metrics.utility import evaluate
from fedleak.config.experiment import Experiment
from fedleak.config.federation.assignment import Assignment
from fedleak.config.federation.lookup import captures_of, client_sizes, of_app
from fedleak.config.federation.protection import protection, protocol_of
from fedleak.flower.arrays import to_record
from fedleak.flower.server.capturing_grid import AT_ONCE, CapturingGrid
from fedleak.flower.server.replies import RefusedError, claimed_client, client_error
from fedleak.flower.server.secure_aggregation import SummingServer
from fedleak.flower.server.strategy import CuriousServer
from fedleak.models import LanguageModel, loading
from fedleak.report.terminal.run import print_run
from fedleak.running import pipeline, preparation
from fedleak.store.files import plain
from fedleak.store.records import UTILITY, Utility
from fedleak.store.run import Run
from fedleak.store.summaries import SUMMARY
from fedleak.util.errors import FedleakError

app = ServerApp()
logger = logging.getLogger("flwr")
"""Flower's, which `flwr log` shows."""


class Patience(NamedTuple):
    """How long the server waits, in seconds.

    Attributes:
        nodes: For as many nodes as there are clients.
        answers: For the answers of a round.
    """

    nodes: float = 60.0
    answers: float = 3600.0


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs an experiment.

    Run config: `experiment` is an experiment file or the run.json of a run, `run-dir` a folder
    or empty; `attack` asks for attacks and scores along with training; `nodes-within` and
    `answers-within` are how many seconds the server waits. The command line trains through this,
    too, and attacks in its own process.
    """
    config = context.run_config
    experiment, run = of_app(config)
    wait = Patience(float(config["nodes-within"]), float(config["answers-within"]))
    if run.exists() and run.in_use():  # by the command line, which does all but training
        nodes = find_nodes(grid, experiment, run, wait)
        federate(grid, experiment, run, nodes, wait, attacked=True)
        return
    run = preparation.prepare(experiment, run.path)
    with run.lock():
        with pipeline.noting_status(run):
            nodes = find_nodes(grid, experiment, run, wait)
            if not config["attack"]:
                federate(grid, experiment, run, nodes, wait)
                return
        with pipeline.under_way(run, experiment) as stop:
            federate(grid, experiment, run, nodes, wait, stop, attacked=True)
        print_run(run, scoring.score_run(run))
    awaited = run.read_document(SUMMARY).awaited
    refuse_gaps(run, besides=awaited)
    for sentence in awaited:  # a good end, as nodes keep their vaults
        logger.info("the run is complete, and its scores wait for the nodes' vaults: %s", sentence)


def federate(
    grid: Grid,
    experiment: Experiment,
    run: Run,
    nodes: Mapping[int, int],
    wait: Patience,
    stop: Callable[[], bool] = lambda: False,
    *,
    attacked: bool = False,
) -> None:
    """Trains from the first incomplete round on, and captures the replies that are attacked.

    Args:
        grid: Flower's.
        experiment: The experiment that was prepared.
        run: The run directory.
        nodes: The node of each client.
        wait: How long for answers.
        stop: Called now and then; returns whether to end early.
        attacked: Whether captures are attacked meanwhile; then training can wait for the attacks.

    Raises:
        FedleakError: A client failed, or `stop` returned true.
    """
    torch.set_num_threads(1)
    first = first_open_round(experiment, run)
    model = loading.load(experiment.model_spec(run.info()["num_labels"]), weights=first == 1)
    if first == 1:
        run.update_info(model_fingerprint=models.fingerprint(dict(model.module.named_parameters())))
        run.models.write(1, model.parameters())
    # Mapped from its file, it takes no memory beside the model that clients are sent.
    models.lend_parameters_(model, run.models.read_model(first))
    rounds = experiment.federation.rounds - first + 1
    if rounds < 1:
        return
    settings, of_server = protocol_of(experiment), (experiment, run, model, first, nodes)
    if settings is None:
        strategy = CuriousServer(*of_server)
    else:
        strategy = SummingServer(*of_server, settings=settings, patience=wait.answers)
    at_once = experiment.federation.at_once or max(AT_ONCE, os.cpu_count() or 1)
    waiting = experiment.audit.waiting if attacked else None

    def room(under_way: int) -> bool:
        """Whether another capture may wait for its attacks; if not, training waits."""
        writing = strategy.beside.busy
        return waiting is None or writing + run.captures.waiting() + under_way < waiting

    try:
        strategy.start(
            grid=CapturingGrid(grid, strategy.on_reply, stop, at_once, room),  # type: ignore[arg-type]
            initial_arrays=to_record(model.parameters()),
            num_rounds=rounds,
            timeout=wait.answers,
            evaluate_fn=evaluation(experiment, run, model, first - 1),
        )
    finally:
        strategy.beside.finish()


def first_open_round(experiment: Experiment, run: Run) -> int:
    """Returns the first round that is not complete.

    A complete round has all of its captures that are kept, and the model of the next round.
    """
    captured, broadcast = set(run.captures.all_keys()), set(run.models.rounds())
    missing = [key.round for key in captures_of(run, experiment) if key not in captured]
    first = min([*missing, max(broadcast, default=1)])
    while first > 1 and first not in broadcast:
        first -= 1
    return first


def find_nodes(grid: Grid, experiment: Experiment, run: Run, wait: Patience) -> dict[int, int]:
    """Asks every node which client's data it holds; returns the node of each client.

    If nodes have data of their own, the number of examples of each is noted in run.json.

    Raises:
        FedleakError: Not every client has a node of its own, a node runs another fedleak, or has
            not as many examples as when the run began.
    """
    wanted = experiment.federation.clients
    deadline = time.monotonic() + wait.nodes
    while len(nodes := list(grid.get_node_ids())) < wanted and time.monotonic() < deadline:
        time.sleep(0.5)
    if len(nodes) < wanted:
        raise FedleakError(
            f"federation.clients = {wanted}, but Flower has {len(nodes)} nodes after "
            f"{wait.nodes:.0f} s: start the other SuperNodes, or a simulation with "
            f"--federation-config 'num-supernodes={wanted}'; the same command again goes on"
        )
    record = ConfigRecord(Assignment.of(experiment, run).to_values())
    questions = [
        Message(RecordDict({"assignment": record}), message_type="query.identity", dst_node_id=node)
        for node in nodes
    ]
    node_of_client: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for reply in grid.send_and_receive(questions, timeout=wait.answers):
        node = reply.metadata.src_node_id
        if reply.has_error():
            raise FedleakError(f"a client cannot start: node {node}: {client_error(reply)}")
        try:
            client, size = claimed_client(reply, own_file=experiment.data.on_nodes)
        except RefusedError as error:
            raise FedleakError(f"node {node} cannot take part: {error}") from error
        if client in node_of_client:
            raise FedleakError(
                f"node {node} says that it holds the data of client {client}, but so says node "
                f"{node_of_client[client]}: give each node a partition-id of its own"
            )
        node_of_client[client] = node
        if size is not None:
            sizes[client] = size
    silent = [node for node in nodes if node not in node_of_client.values()]
    if missing := set(range(wanted)) - node_of_client.keys():
        more = f"; {len(silent)} nodes did not answer" if silent else ""
        raise FedleakError(f"no node holds the data of the clients {sorted(missing)}{more}")
    if sizes:
        note_sizes(experiment, run, [sizes[client] for client in range(wanted)])
    return node_of_client


def note_sizes(experiment: Experiment, run: Run, sizes: Sequence[int]) -> None:
    """Notes how many examples each client has; a resumed run refuses other numbers.

    Raises:
        FedleakError: A client has more or fewer than before, or too few for its defenses.
    """
    before = client_sizes(run)
    for client, size in enumerate(sizes):
        if before is not None and before[client] != size:
            raise FedleakError(
                f"client {client} has {size} examples, and had {before[client]} when the run "
                "began: restore its data, or give the run another run-dir"
            )
        protection(experiment, client, size)  # refuses an epsilon out of reach
    run.update_info(node_examples=list(sizes))


def evaluation(
    experiment: Experiment, run: Run, model: LanguageModel, offset: int
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Returns Flower's `evaluate_fn`: scores the global model on held-out data, once per round.

    Flower calls it before the first round as round 0, and again when a run is resumed.
    """
    held_out = run.read_json("held_out.json")
    written = {row.round for row in run.rows(UTILITY)}

    def evaluate_round(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        round = server_round + offset
        if round in written or not held_out["sequences"] or not experiment.evaluated(round):
            return None
        models.lend_parameters_(model, run.models.read_model(round + 1))
        scores = evaluate(model, held_out["sequences"], held_out["labels"])
        run.append(UTILITY, Utility(round=round, **plain(scores)))
        return MetricRecord(dict(scores))

    return evaluate_round
