"""An app of others, tapped, from its messages to the report: in this process and in simulation."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import others
import pytest
import tiny
import tomli_w
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import (
    Code,
    FitIns,
    FitRes,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from flwr.compat.common.recorddict_compat import (
    fitres_to_recorddict,
    parameters_to_arrayrecord,
    recorddict_to_fitins,
)
from flwr.server import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.serverapp.strategy import FedAdam
from own_app import clipped, server_app, task

from fedleak.flower import simulation
from fedleak.flower.inline import NODE_ID, RUN_ID, InlineGrid
from fedleak.store.records import LEAKAGE
from fedleak.store.run import EVERYONE, Key, Run
from fedleak.store.summaries import SUMMARY
from fedleak.tap import tap
from fedleak.tap.about import load_about
from fedleak.tap.folder import Tapped
from fedleak.tap.importing import import_run
from fedleak.training.observation import UpdateKind

ROOT = Path(__file__).parents[2]


def about_file(tmp_path: Path, folder: str, **training) -> str:
    table = {
        "model": {"name": folder},
        "training": {"learning_rate_key": "lr", "batch_size": 2, "dropout": False, **training},
        "truth": {"file": str(tmp_path / "truth.jsonl")},
        "attack": [{"kind": "keyspan", "seconds": 30.0}],
    }
    path = tmp_path / "about.toml"
    path.write_text(tomli_w.dumps(table))
    return str(path)


def context_of(config):
    return Context(RUN_ID, NODE_ID, {}, RecordDict(), config)


def rows_of(run: Run, attack: str):
    return [row for row in run.rows(LEAKAGE) if row.attack == attack]


def test_stock_fedavg_is_read_and_reported(tmp_path, folder, config, grid_of, in_process):
    """The path of the docs: tap, import, attack, report, gate."""
    server_app.app(
        grid_of(lr=2.0), Context(RUN_ID, NODE_ID, {}, RecordDict(), config | {"lr": 2.0})
    )
    mine, run = str(tmp_path / "mine"), tmp_path / "mine-run"
    status, out, errors = tiny.call("import", mine, "--about", about_file(tmp_path, folder))
    assert (status, errors) == (0, "")
    assert "3 updates of 3 clients in 1 rounds, 3 with the truth" in out
    status, out, errors = tiny.call("attack", str(run))
    assert (status, errors) == (0, "")
    words = rows_of(Run(run), "probes")
    assert [row.token_recall for row in words] == [1.0] * 3
    assert [row.token_precision for row in words] == [1.0] * 3
    assert all(row.batch_size == 2 for row in rows_of(Run(run), "keyspan"))
    assert tiny.call("score", str(run))[0] == 0
    assert tiny.call("report", str(run))[0] == 0
    assert tiny.call("gate", str(run), "--set", "gate.token_recall=0.5")[0] == 3
    assert tiny.call("attack", str(run), "--positive-control")[0] == 0
    control = Run(run).read_document(SUMMARY).positive_control
    assert (control.copies, control.attacks["probes"].token_recall) == (3, 1.0)


def test_adams_first_step_keeps_the_words_and_loses_the_magnitudes(
    tmp_path, folder, config, grid_of, in_process
):
    changes = {"lr": 5e-5, "optimiser": "adamw", "weight-decay": 0.01}
    server_app.app(grid_of(**changes), Context(RUN_ID, NODE_ID, {}, RecordDict(), config | changes))
    about = load_about(Path(about_file(tmp_path, folder, optimiser="adamw", weight_decay=0.01)))
    run = import_run(Tapped(tmp_path / "mine"), about, tmp_path / "run").run
    update = run.captures.read_capture(Key(1, 0)).update
    rows = update.tensors["bert.embeddings.word_embeddings.weight"]
    changed = rows[rows != 0].abs() / 5e-5
    assert changed.median() == pytest.approx(1, abs=0.01)  # all numbers are of one size
    assert tiny.call("attack", str(run.path))[0] == 0
    assert [row.token_recall for row in rows_of(run, "probes")] == [1.0] * 3
    assert [row.token_precision for row in rows_of(run, "probes")] == [1.0] * 3
    assert not any(row.verified for row in rows_of(run, "keyspan"))
    facts = ("dropout", "learning_rate", "local_epochs", "local_steps", "recipe")
    assert run.rows(LEAKAGE)[0].knows == facts


def test_clipping_at_the_client_scales_what_is_read(tmp_path, folder, config):
    """Flower's DP with clipping at clients: noise comes after the tap, on the sum."""
    clipped.server(InlineGrid(clipped.client, 3, config), context_of(config))
    about = load_about(Path(about_file(tmp_path, folder)))
    run = import_run(Tapped(tmp_path / "mine"), about, tmp_path / "run").run
    for client in range(3):
        tensors = run.captures.read_capture(Key(1, client)).update.tensors
        norm = torch.stack([value.norm() for value in tensors.values()]).norm()
        assert float(norm) == pytest.approx(clipped.CLIPPING_NORM, rel=1e-2)


@pytest.mark.slow
def test_any_strategy_may_aggregate(tmp_path, folder, grid_of):
    others.serve(tap(grid_of(), tmp_path / "mine"), folder, rounds=2, strategy=FedAdam)
    about = load_about(Path(about_file(tmp_path, folder)))
    outcome = import_run(Tapped(tmp_path / "mine"), about, tmp_path / "run")
    assert (outcome.updates, outcome.clients, outcome.rounds, outcome.left_out) == (6, 3, 2, [])


def test_masked_replies_are_said_and_the_sum_is_read(tmp_path, folder, grid_of):
    """As secure aggregation has it: replies are masked whole numbers, the server gets the sum."""
    weights = []

    def mask(content, context):
        arrays = content["arrays"].to_torch_state_dict()
        weights.append(arrays)
        masked = {name: (value * 1e6).long() for name, value in arrays.items()}
        content["arrays"] = ArrayRecord(masked)
        return content

    class Unmasks(others.Lenient):
        def aggregate_train(self, server_round, replies):
            for reply, true in zip(list(replies), weights, strict=True):
                reply.content["arrays"] = ArrayRecord(true)
            return super().aggregate_train(server_round, replies)

    grid = grid_of(mods=[others.changing(mask)])
    others.serve(tap(grid, tmp_path / "mine"), folder, strategy=Unmasks)
    path = about_file(tmp_path, folder)
    status, _, errors = tiny.call("import", str(tmp_path / "mine"), "--about", path)
    assert status == 2
    assert "where clients use secure aggregation, set reply.payload = 'sum'" in errors
    Path(path).write_text(Path(path).read_text() + '\n[reply]\npayload = "sum"\n')
    outcome = import_run(Tapped(tmp_path / "mine"), load_about(Path(path)), tmp_path / "run")
    update = outcome.run.captures.read_capture(Key(1, EVERYONE)).update
    before = outcome.run.models.read_model(1)
    for name, value in update.tensors.items():
        mean = sum(client_weights[name] for client_weights in weights) / 3
        assert torch.allclose(value, mean - before[name], atol=2e-7), name
    assert (update.kind, update.num_examples) == (UpdateKind.DELTA, 6)
    assert outcome.truths == 3


class Hold:
    """All of a strategy that Flower's workflow of SecAgg+ asks for."""

    def configure_fit(self, _, parameters, manager):
        return [(SimpleNamespace(node_id=n), FitIns(parameters, {"lr": 2.0})) for n in manager.all]

    def aggregate_fit(self, _, results, failures):
        self.sum = results[0][1].parameters
        return self.sum, {}


@pytest.mark.slow
def test_flowers_own_secure_aggregation_is_tapped_and_its_sum_is_read(tmp_path, folder, grid_of):
    """SecAgg+, mod and workflow, which send vectors as bytes in configs."""
    names = list(task.get_model(folder).state_dict())

    def as_legacy(message, context, call_next):
        """Gives the app the records that it knows, and the outer mod those that it knows."""
        arrays = parameters_to_ndarrays(recorddict_to_fitins(message.content, True).parameters)
        tensors = dict(zip(names, map(torch.tensor, arrays), strict=True))
        config = ConfigRecord({"lr": 2.0, "server-round": int(message.metadata.group_id)})
        message.content = RecordDict({"arrays": ArrayRecord(tensors), "config": config})
        reply = call_next(message, context).content
        values = reply.array_records["arrays"].to_torch_state_dict().values()
        parameters = ndarrays_to_parameters([value.numpy() for value in values])
        held = int(reply.metric_records["metrics"]["num-examples"])
        answer = FitRes(Status(Code.OK, ""), parameters, held, {})
        return Message(fitres_to_recorddict(answer, False), reply_to=message)

    grid = tap(grid_of(mods=[secaggplus_mod, as_legacy]), tmp_path / "mine")
    nodes = list(grid.get_node_ids())
    manager = SimpleNamespace(all=nodes, num_available=lambda: len(nodes))
    hold = Hold()
    hold.sum = ndarrays_to_parameters(
        [v.numpy() for v in task.get_model(folder).state_dict().values()]
    )
    for round in (1, 2):
        context = LegacyContext(context_of({}), strategy=hold, client_manager=manager)
        context.state.config_records[MAIN_CONFIGS_RECORD] = ConfigRecord({"current_round": round})
        context.state.array_records[MAIN_PARAMS_RECORD] = parameters_to_arrayrecord(hold.sum, True)
        SecAggPlusWorkflow(num_shares=1.0, reconstruction_threshold=0.5, max_weight=8)(
            grid, context
        )
    assert not Tapped(tmp_path / "mine").problems()
    path = Path(about_file(tmp_path, folder, learning_rate_key="lr"))
    path.write_text(
        f'{path.read_text()}\n[reply]\npayload = "sum"\nexamples_key = "num_examples"\n'
    )
    outcome = import_run(Tapped(tmp_path / "mine"), load_about(path), tmp_path / "run")
    assert (outcome.updates, outcome.clients, outcome.truths) == (1, 3, 3)
    assert outcome.left_out == [
        "round 2: its model was sent to nobody, so what changed it is not here"
    ]
    assert outcome.run.captures.read_capture(Key(1, EVERYONE)).update.num_examples == 6


SIMULATED = """
import sys
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation
from own_app import client_app, server_app

CONFIG = {config!r}


def configured(message, context, call_next):
    own, context.run_config = context.run_config, CONFIG
    try:
        return call_next(message, context)
    finally:
        context.run_config = own


app = ServerApp()


@app.main()
def main(grid, context):
    context.run_config = CONFIG
    server_app.app(grid, context)


run_simulation(app, client_app.make([configured]), 3)
"""


@pytest.mark.slow
def test_the_app_in_flowers_simulation(tmp_path, folder, config, in_process):
    """Ray runs the clients; the grid is Flower's own."""
    script = tmp_path / "simulated.py"
    script.write_text(SIMULATED.format(config=config | {"rounds": 2, "lr": 2.0}))
    paths = [str(ROOT), str(others.APP), os.environ.get("PYTHONPATH", "")]
    with tempfile.TemporaryDirectory(prefix="fl-") as short:  # Ray's sockets need a short path
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=tmp_path,
            env={
                **os.environ,
                **simulation.environment(Path(short), tmp_path, os.environ),
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            },
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "every update is kept in" in done.stderr
    about = about_file(tmp_path, folder)
    outcome = import_run(Tapped(tmp_path / "mine"), load_about(Path(about)), tmp_path / "run")
    assert (outcome.updates, outcome.clients, outcome.rounds) == (6, 3, 2)
    assert (outcome.truths, outcome.left_out) == (6, [])
    assert tiny.call("attack", str(outcome.run.path))[0] == 0
    assert [row.token_recall for row in rows_of(outcome.run, "probes")] == [1.0] * 6
