"""The ClientApp. Training is the library's; this turns messages into calls and back.

The order on the way out is train, defend, share: `mods` wrap training from the inside out.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.mods import defend, share
from fedleak import data, models, pipeline
from fedleak.config import Experiment, load, parse
from fedleak.models import LanguageModel
from fedleak.store import Key, Run
from fedleak.streams import stream_seed
from fedleak.training import local_update_, round_batch
from fedleak.truth import GroundTruth

app = ClientApp(mods=[share, defend])


@dataclass(frozen=True)
class Workplace:
    """What every client of one process shares: the architecture and the divided data."""

    experiment: Experiment
    model: LanguageModel
    sequences: list[tuple[int, ...]]
    labels: tuple[int, ...]
    parts: list[list[int]]


@lru_cache(maxsize=1)
def workplace(experiment_json: str) -> Workplace:
    """Loads what an experiment's clients need, once per process."""
    # One thread, so that sums come out bit for bit the same under every engine.
    torch.set_num_threads(1)
    experiment = parse(json.loads(experiment_json))
    table, federation = experiment.data, experiment.federation
    train = pipeline.read_data(experiment).train
    model = models.load(
        experiment.model.name,
        experiment.model.task,
        len(train.label_names),
        seed=experiment.seed,
        weights=False,
    )
    sequences = data.tokenise(
        train.texts, model.encode, limit=model.max_length, max_length=table.max_length
    )
    parts = data.partition(
        train.labels,
        federation.clients,
        how=federation.partition,
        alpha=federation.alpha,
        seed=experiment.seed,
    )
    return Workplace(experiment, model, sequences, train.labels, parts)


@app.query("identity")
def identity(message: Message, context: Context) -> Message:
    """Says which part of the data this node holds."""
    config = ConfigRecord({"client": int(context.node_config["partition-id"])})
    return Message(RecordDict({"identity": config}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Trains on this round's examples and returns the update."""
    at = workplace(load(Path(str(context.run_config["experiment"]))).model_dump_json())
    experiment, seed = at.experiment, at.experiment.seed
    client = int(context.node_config["partition-id"])
    round = int(message.content.config_records["config"]["round"])  # type: ignore[arg-type]
    models.load_parameters_(
        at.model, message.content.array_records["arrays"].to_torch_state_dict()
    )
    part = at.parts[client]
    local = experiment.local_training
    chosen = round_batch(len(part), local, seed=seed, client=client, round=round)
    sequences = [at.sequences[part[i]] for i in chosen]
    labels = [at.labels[part[i]] for i in chosen]
    update = local_update_(
        at.model, sequences, labels, local, seed=stream_seed(seed, "local", round, client)
    )
    if context.run_config["vault"]:
        noise = [
            each.defense.noise_scale
            for each in experiment.defenses
            if each.defense.noise_scale and (each.clients is None or client in each.clients)
        ]
        truth = GroundTruth(
            round,
            client,
            tuple(sequences),
            tuple(labels) if experiment.model.task == models.CLASSIFICATION else (),
            min(local.batch_size, len(part)),
            sum(scale**2 for scale in noise) ** 0.5 if noise else None,
        )
        Run(Path(str(context.run_config["run-dir"]))).write_truth(
            Key(round, client), truth.to_json()
        )
    content = RecordDict(
        {
            "update": ArrayRecord(dict(update.tensors)),
            "metrics": MetricRecord(
                {"num-examples": update.num_examples, "client": client, "round": round}
            ),
        }
    )
    return Message(content, reply_to=message)
