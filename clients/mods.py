"""Flower mods: what happens to an update between training and the wire."""

from collections.abc import Callable
from typing import Any

from flwr.app import ArrayRecord, Context, Message, MetricRecord

from clients.workplace import protected, workplace
from fedleak.federation import of_app
from fedleak.observation import ClientUpdate
from fedleak.store import Key
from fedleak.streams import stream
from fedleak.training import from_wire, to_wire
from fedleak.training import share as share_parameters

Next = Callable[[Message, Context], Message]


def defend(message: Message, context: Context, call_next: Next) -> Message:
    """Applies the defenses that this client uses, in their order, and notes what they did."""
    reply = call_next(message, context)
    if (update := _update(reply, context)) is None:
        return reply
    experiment, run = of_app(context.run_config)
    trained = dict(reply.content.pop("trained"))
    key = _key(reply)
    protection = protected(experiment.model_dump_json(), key.client)
    update, told = protection.defend(
        update, lambda number: stream(experiment.seed, "defense", number, key.client, key.round)
    )
    if context.run_config["vault"] and told:
        events = [event.to_json() for event in protection.events(key.round)]
        note: dict[str, Any] = {"defenses": told, "training": trained, "events": events}
        run.write_defended(key, note)
    return _with(reply, update)


def share(message: Message, context: Context, call_next: Next) -> Message:
    """Drops the parameters that clients do not send."""
    reply = call_next(message, context)
    experiment, _ = of_app(context.run_config)
    if experiment.update.share == "all" or (update := _update(reply, context)) is None:
        return reply
    _, model, _ = workplace(experiment.model_dump_json())  # that of training, not loaded again
    return _with(reply, share_parameters(update, experiment.shared(model)))


def _update(reply: Message, context: Context) -> ClientUpdate | None:
    """Returns the update in a reply; None if it has none."""
    if reply.has_error() or "update" not in reply.content.array_records:
        return None
    experiment, _ = of_app(context.run_config)
    return ClientUpdate(
        experiment.local_training.kind,
        from_wire(reply.content.array_records["update"].to_torch_state_dict()),
        int(_metrics(reply)["num-examples"]),  # type: ignore[arg-type]
    )


def _key(reply: Message) -> Key:
    metrics = _metrics(reply)
    return Key(int(metrics["round"]), int(metrics["client"]))  # type: ignore[arg-type]


def _metrics(reply: Message) -> MetricRecord:
    return reply.content.metric_records["metrics"]


def _with(reply: Message, update: ClientUpdate) -> Message:
    """Returns the reply with another update."""
    reply.content["update"] = ArrayRecord(to_wire(update.tensors))
    return reply
