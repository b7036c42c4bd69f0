"""The ClientApp. Training is the library's; this turns messages into calls and back.

The order on the way out is train, defend, select, mask, encode. Before a client trains, its
detectors look at the broadcast, and an alarm can end the round for the client. Their findings, and
what its defenses did, go to files beside the vault and to nobody else.
"""

from dataclasses import replace
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedleak import models
from fedleak.config.federation.canaries import client_canaries
from fedleak.flower.arrays import taken_tensors
from fedleak.flower.client.context import refuse_another_run, work_of
from fedleak.flower.client.masking import mask
from fedleak.flower.client.mods import defend, encode, report_errors, select
from fedleak.flower.client.outgoing import Outgoing
from fedleak.flower.client.watching import refuse_suspect
from fedleak.store.run import Key
from fedleak.training.batches import Records, round_batch
from fedleak.training.local import local_update_
from fedleak.training.steps import Batch
from fedleak.training.truth import GroundTruth
from fedleak.util.rng import stream_seed
from fedleak.util.versions import code

app = ClientApp(mods=[report_errors, encode, mask])


@app.query("identity")
def identity(message: Message, context: Context) -> Message:
    """Returns the client, the version of fedleak, and how many examples the node's own file has."""
    work = work_of(message, context)
    config = ConfigRecord({"client": work.client, "fedleak": code()})
    if work.own is not None:
        _, workload = work.model_and_data
        config["examples"] = len(workload.sequences)
    return Message(RecordDict({"identity": config}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Trains on this round's examples and returns the update."""
    work = work_of(message, context)
    experiment, client = work.experiment, work.client
    model, workload = work.model_and_data
    round = int(message.content.config_records["config"]["round"])  # type: ignore[arg-type]
    sent = taken_tensors(message.content.array_records["arrays"])
    key = Key(round, client)
    if work.private is not None:
        refuse_another_run(work.private, key, experiment.fingerprint)
    protection = work.protection
    seed, local, part = experiment.seed, protection.local, workload.parts[client]
    own = Batch(workload.sequences, workload.labels).of(part)
    canaries = planted = None
    if work.private is not None:  # without a vault nobody could know later which were in
        canaries = client_canaries(experiment, protection, client, round, model, own)
        planted = canaries.planted if canaries else None
    records = planted.records if planted else Records(len(part), 0, False)
    of_records = records.training(local)
    drawn = round_batch(records.count, of_records, seed=seed, client=client, round=round)
    chosen = records.drawn_examples(drawn)
    if planted is not None and planted.drawn_K is None:
        planted = replace(planted, drawn_K=records.drawn_canaries(drawn))
    sequences, labels = own.of(chosen)
    in_step = slice(min(local.batch_size, len(part)))
    refuse_suspect(work, key, sent, Batch(sequences[in_step], labels[in_step]))
    models.load_parameters_(model, sent)
    figures: dict[str, Any] = {}
    update = local_update_(
        model,
        sequences,
        labels,
        local.in_round(round, len(chosen)),
        seed=stream_seed(seed, "local", round, client),
        report=figures.update,
        planted=planted,
    )
    steps = figures.pop("drawn", None) or [drawn]
    noted = {"training": figures, "records": records.count, "drawn": steps if figures else []}
    if canaries is not None:
        canaries = canaries.drawn_in(steps)
    if work.private is not None:
        truth = GroundTruth(
            round=round,
            client=client,
            sequences=tuple(map(tuple, sequences)),
            labels=tuple(labels) if experiment.model.task == models.CLASSIFICATION else (),
            batch_size=min(local.batch_size, len(part)),
            noise_scale=protection.noise_scale(),
            canaries=canaries.coins if canaries else None,
        )
        marked = {"fingerprint": experiment.fingerprint, **truth.to_json()}
        work.private.vault.write(key, marked)
    reply = Outgoing(key, update, noted, canaries, reply_to=message)
    defend(work, reply)
    select(work, reply)
    return reply
