"""Canary clients in somebody else's Flower app: a mod of its ClientApp.

app = ClientApp(mods=[fixedclipping_mod, canary_clients("canaries/mine", 64, norm=10.0)])
"""

import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MessageType
from numpy.typing import NDArray

from fedleak.store.files import naming, read_file, replace
from fedleak.tap.guard import Mod, Next, arrays
from fedleak.tap.recorder import round_of
from fedleak.training.privacy.own_training import directions, flip

NOTHING = 1e-4
"""Share of its norm that a canary keeps if it is out: mods that clip divide by the norm."""


def canary_clients(
    folder: str | os.PathLike[str],
    count: int,
    *,
    norm: float,
    seed: int = 0,
    signed: bool = False,
    sends: Literal["weights", "update"] = "weights",
) -> Mod:
    """Returns a mod that makes canaries of the first clients: what they send is made up.

    The client of partition i sends canary i in place of its update, or nothing, as its coin says.
    The coin is flipped once, so it is the same in all rounds (Andrew et al. 2024, "One-shot
    empirical privacy estimation for federated learning"). Other clients train as without the mod.
    Put this mod last in `mods`, so that what protects an update also protects the canary.

    Args:
        folder: Where clients keep their coins, which the server must not see. One per run.
        count: K, canary clients; the update needs 256 numbers for each.
        norm: L2 norm of a canary before anything clips it. Ten clipping norms show a missing clip.
        seed: The seed of the directions; the auditor needs it.
        signed: Whether a client whose coin says no sends the opposite, and not nothing.
        sends: Whether replies hold weights after training, or an update along which they move.
    """
    place = Path(folder).absolute()

    def mod(message: Message, context: Context, call_next: Next) -> Message:
        reply = call_next(message, context)
        client = int(context.node_config.get("partition-id", -1))
        training = message.metadata.message_type.split(".")[0] == MessageType.TRAIN
        if not (training and 0 <= client < count and reply.has_content()):
            return reply
        sent = floats(arrays(message.content)) if sends == "weights" else {}
        own = floats(arrays(reply.content))
        update = {name: np.zeros_like(value) for name, value in own.items()}
        canaries = directions(update, count, seed=seed, step=round_of(message) or 1)
        sizes_K = np.zeros(count, np.float32)
        sizes_K[client] = norm * (1.0 if _coin(place, client) else -1.0 if signed else NOTHING)
        canaries.add_(update, canaries.directions() * sizes_K)
        _send(reply, {name: value + sent.get(name, 0.0) for name, value in update.items()})
        return reply

    return mod


def coins(folder: str | os.PathLike[str], count: int) -> NDArray[np.bool_]:
    """Returns whether each canary client was in, or had the sign plus [K].

    Raises:
        FedleakError: A client has not flipped its coin.
    """
    return np.array([_kept(_file(Path(folder), client)) for client in range(count)])


def floats(values: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Returns the arrays that canaries can be in."""
    return {name: value for name, value in values.items() if value.dtype.kind == "f"}


def _coin(place: Path, client: int) -> bool:
    file = _file(place, client)
    if not file.exists():
        with naming(place):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace(file, b"in" if flip(1)[0] else b"out")
    return _kept(file)


def _kept(file: Path) -> bool:
    return read_file(file, 8) == b"in"


def _file(place: Path, client: int) -> Path:
    return place / f"c{client:05d}.coin"


def _send(reply: Message, values: dict[str, NDArray[Any]]) -> None:
    """Puts arrays in the place of those of a reply."""
    records = reply.content.array_records
    for record, own in list(records.items()):
        prefix = "" if len(records) == 1 else f"{record}/"
        new = {name: Array(values[prefix + name]) for name in own if prefix + name in values}
        # A new record: an app may answer with that of the message, which others still read.
        reply.content[record] = ArrayRecord({**own, **new})
