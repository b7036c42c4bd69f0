"""The ClientApp. Training is the library's; this turns messages into calls and back.

The order on the way out is train, defend, share: `mods` wrap training from the inside out. What a
client finds out about its own defenses (`trained`, which the mods take out of the reply) goes to a
file beside the vault and to nobody else.
"""

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.mods import defend, share
from clients.workplace import protected, workplace
from fedleak import models
from fedleak.federation import of_app
from fedleak.store import Key
from fedleak.streams import stream_seed
from fedleak.training import local_update_, round_batch
from fedleak.truth import GroundTruth

app = ClientApp(mods=[share, defend])


@app.query("identity")
def identity(message: Message, context: Context) -> Message:
    """Says which part of the data this node holds."""
    config = ConfigRecord({"client": int(context.node_config["partition-id"])})
    return Message(RecordDict({"identity": config}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Trains on this round's examples and returns the update."""
    stored, run = of_app(context.run_config)
    experiment, model, workload = workplace(stored.model_dump_json())
    client = int(context.node_config["partition-id"])
    round = int(message.content.config_records["config"]["round"])  # type: ignore[arg-type]
    models.load_parameters_(model, message.content.array_records["arrays"].to_torch_state_dict())
    protection = protected(stored.model_dump_json(), client)
    seed, local, part = experiment.seed, protection.local, workload.parts[client]
    chosen = round_batch(len(part), local, seed=seed, client=client, round=round)
    sequences = [workload.sequences[part[i]] for i in chosen]
    labels = [workload.labels[part[i]] for i in chosen]
    figures: dict[str, float] = {}
    update = local_update_(
        model,
        sequences,
        labels,
        local,
        seed=stream_seed(seed, "local", round, client),
        report=figures.update,
    )
    if context.run_config["vault"]:
        truth = GroundTruth(
            round,
            client,
            tuple(sequences),
            tuple(labels) if experiment.model.task == models.CLASSIFICATION else (),
            min(local.batch_size, len(part)),
            protection.noise_scale(),
        )
        run.write_truth(Key(round, client), truth.to_json())
    content = RecordDict(
        {
            "update": ArrayRecord(dict(update.tensors)),
            "metrics": MetricRecord(
                {"num-examples": update.num_examples, "client": client, "round": round}
            ),
            "trained": MetricRecord(dict(figures)),
        }
    )
    return Message(content, reply_to=message)
