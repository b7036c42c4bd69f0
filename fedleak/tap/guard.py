"""What a client of somebody else's Flower app can notice of its server: a mod of its ClientApp.

app = ClientApp(mods=[guard("guard/mine")])
"""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import Context, Error, Message, MessageType, RecordDict
from numpy.typing import NDArray

from fedleak.config.federation.watching import Watched, remember_sent, watch
from fedleak.detectors import REFUSAL, REFUSED, Broadcast, Detector, Movement, Weights, kinds, named
from fedleak.store.files import append_together, plain
from fedleak.store.memory import Board, Memory
from fedleak.tap.recorder import decoded, plain_numbers, round_of, say

Next = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Next], Message]

ROUND_KEYS = ("server-round", "server_round", "round")
"""Keys of a config that change from round to round in any app."""

FINDINGS = "findings.jsonl"


def guard(
    folder: str | os.PathLike[str],
    *detectors: Detector,
    movement: Movement | None = None,
    checkpoint: Callable[[], Weights] | None = None,
    sends: Literal["weights", "update"] = "weights",
    board: str | os.PathLike[str] | None = None,
) -> Mod:
    """Returns a mod that looks at each model before the app trains on it.

    What it finds is in `findings.jsonl` of a folder for each node, and alarms are on stderr. A
    client that refuses answers with a Flower error, which strategies leave out of the round.

    Args:
        folder: What the client keeps: the contract, and a copy of the last model. One per run.
        detectors: Made by `fedleak.detectors.named`; none: all that look at no more than what the
            server sends, and warn. Those that need the client's own loss or gradient are silent.
        movement: How an honest round moves the model; None: by the mean of the clients' updates.
        checkpoint: Returns the public model that training starts from, with the names that arrays
            have in messages; None: the first broadcast is believed.
        sends: Whether replies hold weights after training, or an update.
        board: A folder that clients share and the server cannot write to, for hashes.
    """
    others = (kind for kind, cls in sorted(kinds().items()) if cls.reads != "own")
    chosen = detectors or tuple(map(named, others))
    how = movement or Movement()
    place, shared = Path(folder).absolute(), None if board is None else Path(board).absolute()

    def mod(message: Message, context: Context, call_next: Next) -> Message:
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return call_next(message, context)
        memory = Memory(place / f"n{context.node_id}")
        watched = sent = None
        try:
            sent = arrays(message.content)
            round = round_of(message) or 1
            watched = watch(
                memory,
                chosen,
                Broadcast(round, sent),
                settings=_settings(message.content),
                movement=how,
                checkpoint=checkpoint,
                board=None if shared is None else Board(shared, f"n{context.node_id}"),
            )
            _note(memory, round, watched)
            refuses = watched.refuses
        except Exception as error:  # noqa: BLE001 - what the server sent may be anything
            refuses = any(detector.action == "refuse" for detector in chosen)
            say(f"NOT CHECKED: {type(error).__name__}: {error}", "guard")
        if refuses:
            return Message(Error(REFUSED, REFUSAL), reply_to=message)
        reply = call_next(message, context)
        if watched is not None and sent is not None and not watched.alarms and reply.has_content():
            try:
                before = sent if sends == "weights" else {}
                remember_sent(memory, _length(arrays(reply.content), before))
            except Exception as error:  # noqa: BLE001 - a reply that was trained for must not get lost
                say(f"NOT REMEMBERED: {type(error).__name__}: {error}", "guard")
        return reply

    return mod


def arrays(content: RecordDict) -> dict[str, NDArray[Any]]:
    """Returns the arrays of a message by name, with that of their record if there are several."""
    records = content.array_records
    return {
        name if len(records) == 1 else f"{record}/{name}": value
        for record, values in records.items()
        for name, value in decoded(values).items()
    }


def _settings(content: RecordDict) -> dict[str, Any]:
    """Returns the configs of a message, without the keys of the round."""
    configs = plain_numbers(RecordDict(dict(content.config_records)))
    return {
        f"{record}.{key}": value
        for record, config in configs.items()
        for key, value in config.items()
        if key not in ROUND_KEYS
    }


def _length(update: Weights, before: Weights) -> float:
    """Returns the L2 norm of an update, or of weights minus those before."""
    squares = 0.0
    for name, value in update.items():
        if value.dtype.kind == "f":
            moved = value.astype(np.float64) - before.get(name, 0.0)
            squares += float((moved**2).sum())
    return math.sqrt(squares)


def _note(memory: Memory, round: int, watched: Watched) -> None:
    lines = [json.dumps(plain({"round": round, **finding})) for finding in watched.to_json()]
    append_together(memory.folder / FINDINGS, lines)
    for detector, finding in watched.alarms:
        action = "refused" if watched.refuses else "warning"
        say(f"round {round}: {action}: {detector.kind}: {finding.sentence}", "guard")
