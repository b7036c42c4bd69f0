"""Flower mods: what happens to an update between training and the wire."""

from collections.abc import Callable

from flwr.app import ArrayRecord, Context, Message

from clients.workplace import workplace
from fedleak.config import Experiment
from fedleak.federation import of_app
from fedleak.observation import ClientUpdate
from fedleak.streams import stream
from fedleak.training import from_wire, to_wire
from fedleak.training import share as share_parameters

Next = Callable[[Message, Context], Message]
Step = Callable[[ClientUpdate, Experiment, int, int], ClientUpdate]


def defend(message: Message, context: Context, call_next: Next) -> Message:
    """Applies the experiment's defenses that this client uses, in their order."""
    return _on_update(message, context, call_next, _defend)


def share(message: Message, context: Context, call_next: Next) -> Message:
    """Drops the parameters that clients do not send."""
    return _on_update(message, context, call_next, _share)


def _defend(update: ClientUpdate, experiment: Experiment, client: int, round: int) -> ClientUpdate:
    for number, each in enumerate(experiment.defenses):
        if each.clients is None or client in each.clients:
            rng = stream(experiment.seed, "defense", number, client, round)
            update = each.defense(update, rng=rng)
    return update


def _share(update: ClientUpdate, experiment: Experiment, client: int, round: int) -> ClientUpdate:
    if experiment.update.share == "all":
        return update
    _, model, _ = workplace(experiment.model_dump_json())  # that of training, not loaded again
    return share_parameters(update, experiment.shared(model))


def _on_update(message: Message, context: Context, call_next: Next, step: Step) -> Message:
    """Passes the update of a reply through one step."""
    reply = call_next(message, context)
    if reply.has_error() or "update" not in reply.content.array_records:
        return reply
    experiment, _ = of_app(context.run_config)
    metrics = reply.content.metric_records["metrics"]
    update = ClientUpdate(
        experiment.local_training.kind,
        from_wire(reply.content.array_records["update"].to_torch_state_dict()),
        int(metrics["num-examples"]),  # type: ignore[arg-type]
    )
    update = step(update, experiment, int(metrics["client"]), int(metrics["round"]))  # type: ignore[arg-type]
    reply.content["update"] = ArrayRecord(to_wire(update.tensors))
    return reply
