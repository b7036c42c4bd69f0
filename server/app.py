"""The ServerApp: resumes or starts a run, and, for `flwr run`, attacks it too."""

import os
import time
from collections.abc import Callable

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp

from fedleak import models, pipeline, preparation
from fedleak.audit import scoring
from fedleak.audit.gaps import refuse_gaps
from fedleak.config.experiment import Experiment
from fedleak.errors import FedleakError
from fedleak.federation.lookup import of_app
from fedleak.federation.schedule import expected_captures
from fedleak.metrics.utility import evaluate
from fedleak.models import LanguageModel, loading
from fedleak.report.tables import print_run
from fedleak.store.files import plain
from fedleak.store.records import UTILITY, Utility
from fedleak.store.run import Run
from server.replies import RefusedError, claimed_client, told
from server.strategy import CuriousServer
from server.tap import AT_ONCE, TapGrid

NODES_WITHIN_SECONDS = 60.0
ANSWER_WITHIN_SECONDS = 3600.0

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Runs an experiment.

    Run config: `experiment` is an experiment file or the run.json of a run, `run-dir` a folder
    or empty; `attack` asks for attacks and scores along with training (the command line does
    that itself, in its own process).
    """
    config = context.run_config
    experiment, run = of_app(config)
    if not config["attack"]:
        # By the command line, which does all but training; else by nobody.
        federate(grid, experiment, run, attacked=run.exists() and run.in_use())
        return
    run = preparation.prepare(experiment, run.path)
    with run.lock():
        with pipeline.under_way(run, experiment) as stop:
            federate(grid, experiment, run, stop, attacked=True)
        print_run(run, scoring.score_run(run))
    refuse_gaps(run)


def federate(
    grid: Grid,
    experiment: Experiment,
    run: Run,
    stop: Callable[[], bool] = lambda: False,
    *,
    attacked: bool,
) -> None:
    """Trains from the last complete round on, capturing what is attacked of the replies.

    Args:
        grid: Flower's.
        experiment: What was prepared.
        run: In this run directory.
        stop: Is asked now and then whether to end early.
        attacked: Whether captures are attacked meanwhile, so that it can wait for that.

    Raises:
        FedleakError: A client failed, there are fewer nodes than clients, or it is to `stop`.
    """
    torch.set_num_threads(1)
    first = first_open_round(experiment, run)
    model = loading.load(experiment.model_spec(run.info()["num_labels"]), weights=first == 1)
    if first > 1:
        models.load_parameters_(model, run.read_broadcast(first))
    else:
        run.update_info(model_fingerprint=models.fingerprint(dict(model.module.named_parameters())))
        run.write_broadcast(1, model.parameters())
    rounds = experiment.federation.rounds - first + 1
    if rounds < 1:
        return
    strategy = CuriousServer(experiment, run, model, first, find_nodes(grid, experiment))
    at_once = experiment.federation.at_once or max(AT_ONCE, os.cpu_count() or 1)
    waiting = experiment.audit.waiting if attacked else None

    def room(under_way: int) -> bool:
        """Whether the disk bears another capture: if not, the attacks are waited for."""
        return waiting is None or strategy.writing + run.waiting() + under_way < waiting

    try:
        strategy.start(
            grid=TapGrid(grid, strategy.on_reply, stop, at_once, room),
            initial_arrays=ArrayRecord(model.parameters()),
            num_rounds=rounds,
            timeout=ANSWER_WITHIN_SECONDS,
            evaluate_fn=evaluation(experiment, run, model, first - 1),
        )
    finally:
        strategy.finish()


def first_open_round(experiment: Experiment, run: Run) -> int:
    """Returns the first round that is not complete.

    A complete one has all captures that are kept of it, and a model that followed.
    """
    captured, broadcast = set(run.captures()), set(run.broadcasts())
    missing = [key.round for key in expected_captures(experiment) if key not in captured]
    first = min([*missing, max(broadcast, default=1)])
    while first > 1 and first not in broadcast:
        first -= 1
    return first


def find_nodes(grid: Grid, experiment: Experiment) -> dict[int, int]:
    """Asks every node which client's data it holds; returns the node of each client.

    Raises:
        FedleakError: Not every client has a node of its own.
    """
    wanted = experiment.federation.clients
    deadline = time.monotonic() + NODES_WITHIN_SECONDS
    nodes = list(grid.get_node_ids())
    while len(nodes) < wanted and time.monotonic() < deadline:
        time.sleep(0.5)
        nodes = list(grid.get_node_ids())
    if len(nodes) < wanted:
        raise FedleakError(
            f"federation.clients = {wanted}, but Flower has {len(nodes)} nodes: start it with "
            f"--federation-config 'num-supernodes={wanted}'"
        )
    questions = [
        Message(
            RecordDict({"config": ConfigRecord({})}), message_type="query.identity", dst_node_id=n
        )
        for n in nodes
    ]
    found: dict[int, int] = {}
    for reply in grid.send_and_receive(questions, timeout=ANSWER_WITHIN_SECONDS):
        node = reply.metadata.src_node_id
        if reply.has_error():
            raise FedleakError(f"a client cannot start: node {node}: {told(reply)}")
        try:
            client = claimed_client(reply)
        except RefusedError as error:
            raise FedleakError(f"node {node} does not say which client it is: {error}") from error
        if client in found:
            raise FedleakError(
                f"node {node} says that it holds the data of client {client}, but so says node "
                f"{found[client]}: give each node a partition-id of its own"
            )
        found[client] = node
    if missing := set(range(wanted)) - found.keys():
        raise FedleakError(f"no node holds the data of the clients {sorted(missing)}")
    return found


def evaluation(
    experiment: Experiment, run: Run, model: LanguageModel, offset: int
) -> Callable[[int, ArrayRecord], MetricRecord | None]:
    """Returns Flower's `evaluate_fn`: scores the global model on held-out data, once per round.

    Flower calls it before the first round as round 0, and again where a run is resumed.
    """
    held_out = run.read_json("held_out.json")
    written = {each.round for each in run.rows(UTILITY)}

    def evaluate_round(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
        round = server_round + offset
        if round in written or not held_out["sequences"] or not experiment.evaluated(round):
            return None
        models.load_parameters_(model, arrays.to_torch_state_dict())
        scores = evaluate(model, held_out["sequences"], held_out["labels"])
        run.append(UTILITY, Utility(round=round, **plain(scores)))
        return MetricRecord(dict(scores))

    return evaluate_round
