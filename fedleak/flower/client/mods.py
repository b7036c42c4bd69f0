"""What happens to an update between training and the wire."""

import logging
import os
import re
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from flwr.app import Context, Error, Message
from torch import Generator

from fedleak.config.experiment import Experiment
from fedleak.config.sent_parameters import selected_parameters
from fedleak.detectors import REFUSED
from fedleak.flower.client.context import Work
from fedleak.flower.client.outgoing import Outgoing
from fedleak.store.files import plain
from fedleak.training.observation import ClientUpdate
from fedleak.training.wire import partial_update
from fedleak.util.errors import FedleakError, RoundRefusedError
from fedleak.util.rng import stream

Next = Callable[[Message, Context], Message]

CLIENT_FAILED = 2
"""Flower's code of an error in a client's app."""

TRAVELS = ("fedleak.flower.client", "fedleak.config.federation.assignment")
"""Modules whose errors the server may read: they quote neither a text nor what the server sent."""

OPENS = {"fedleak.data": "data", "fedleak.models.loading": "model"}
"""Modules that open what the server may have named, with the table that names it. An error reveals
only the table: its line or its kind would reveal which files and folders are here."""

_KEY = re.compile(rf"\[?((?:{'|'.join(Experiment.model_fields)})\b(?:\[\d+\])?(?:\.[a-z_]+)*)")
"""The key that the line of a wrong experiment begins with."""

_MORE = "the client's log says more"

_log = logging.getLogger(__name__)


def defend(work: Work, reply: Outgoing) -> None:
    """Applies the defenses that this client uses, in their order, and notes what they did."""
    experiment, key, protection = work.experiment, reply.key, work.protection

    def rng(number: int, *copy: int) -> Generator:
        return stream(experiment.seed, "defense", number, key.client, key.round, *copy)

    raw, private = reply.update, work.private
    reply.update, defense_notes = protection.defend(raw, rng)
    canaries = reply.canaries
    if canaries is not None and (canaries.coins.joined or not canaries.coins.copy):
        canaries = None  # they are in another update, or in this one
    if private is not None and canaries is not None:

        def defended(update: ClientUpdate, *copy: int) -> ClientUpdate:
            return protection.defend(update, lambda number: rng(number, *copy))[0]

        differences_SK = canaries.differences(raw, reply.update, defended)
        private.vault.write_differences(key, differences_SK)
    if defense_notes and private is not None:
        events = [asdict(event) for event in protection.events(key.round)]
        note: dict[str, Any] = {
            "fingerprint": experiment.fingerprint,
            "defenses": defense_notes,
            **reply.noted,
            "events": events,
        }
        private.defended.write(key, plain(note))


def select(work: Work, reply: Outgoing) -> None:
    """Keeps only the parameters of the update that clients send."""
    if work.experiment.update.share != "all":
        model, _ = work.model_and_data  # loaded for training already
        reply.update = partial_update(reply.update, selected_parameters(work.experiment, model))


def encode(message: Message, context: Context, call_next: Next) -> Message:
    """Encodes the update, once; mods outside of this one see what the server will see."""
    reply = call_next(message, context)
    return reply.encoded(message) if isinstance(reply, Outgoing) else reply


def report_errors(message: Message, context: Context, call_next: Next) -> Message:
    """Answers a crash with what the server may know; the client's log has all of it."""
    try:
        return call_next(message, context)
    except RoundRefusedError as error:
        return Message(Error(REFUSED, str(error)), reply_to=message)
    except Exception as error:  # noqa: BLE001 - any error's words may quote a text
        _log.exception("client %s failed", context.node_config.get("partition-id"))
        return Message(Error(CLIENT_FAILED, public(error)), reply_to=message)


def public(error: Exception) -> str:
    """Returns what the server may read of an error: its key or its place, and no value.

    The server chose the values of the experiment, so an error about a value would reveal what is on
    this machine; other errors may quote a text.
    """
    kind, place = type(error).__name__, _place(error)
    for module, table in OPENS.items():
        if place.startswith(module):
            return f"ConfigError: {table} is refused: {_MORE}"
    if isinstance(error, FedleakError):
        if place.startswith(TRAVELS):
            return f"{kind}: {error}"
        if key := _KEY.match(str(error)):
            return f"{kind}: {key[1]} is refused: {_MORE}"
    system = error if isinstance(error, OSError) else error.__cause__
    if isinstance(system, OSError) and system.errno is not None:
        kind += f" ({os.strerror(system.errno)})"
    return f"{kind} in {place}: {_MORE}"


def _place(error: Exception) -> str:
    """Returns the last module and line of this project that an error came through."""
    places = [
        f"{frame.f_globals['__name__']}:{line}"
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    return [place for place in places if place.startswith("fedleak.")][-1]
