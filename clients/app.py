"""The ClientApp. Training is the library's; this turns messages into calls and back.

The order on the way out is train, defend, select, encode: `mods` wrap training from the inside out.
What a client finds out about its own defenses goes to a file beside the vault and to nobody else.
"""

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from clients.client_context import client_of, model_and_data, protection_of, vault
from clients.mods import defend, encode, report_errors, select
from clients.outgoing import Outgoing
from fedleak import models
from fedleak.federation.lookup import of_app
from fedleak.rng import stream_seed
from fedleak.store.run import Key
from fedleak.training.batches import round_batch
from fedleak.training.local import local_update_
from fedleak.truth import GroundTruth

app = ClientApp(mods=[report_errors, encode, select, defend])


@app.query("identity")
def identity(message: Message, context: Context) -> Message:
    """Says which part of the data this node holds."""
    config = ConfigRecord({"client": client_of(context)})
    return Message(RecordDict({"identity": config}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Trains on this round's examples and returns the update."""
    experiment, run = of_app(context.run_config)
    model, workload = model_and_data(experiment)
    client = client_of(context)
    round = int(message.content.config_records["config"]["round"])  # type: ignore[arg-type]
    models.load_parameters_(model, message.content.array_records["arrays"].to_torch_state_dict())
    protection = protection_of(experiment, client)
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
    key = Key(round, client)
    if (private := vault(context, run)) is not None:
        truth = GroundTruth(
            round=round,
            client=client,
            sequences=tuple(sequences),
            labels=tuple(labels) if experiment.model.task == models.CLASSIFICATION else (),
            batch_size=min(local.batch_size, len(part)),
            noise_scale=protection.noise_scale(),
        )
        private.write_truth(key, {"fingerprint": experiment.fingerprint, **truth.to_json()})
    return Outgoing(key, update, figures, reply_to=message)
