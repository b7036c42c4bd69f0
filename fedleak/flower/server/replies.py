"""Checks a client's reply before any of it is used: it may be hostile."""

from collections.abc import Mapping

import torch
from flwr.app import Message
from torch import Tensor

from fedleak.config.tables import MOST_EXAMPLES
from fedleak.flower.arrays import taken_tensors
from fedleak.store.run import Key
from fedleak.training.observation import ClientUpdate, UpdateKind
from fedleak.training.wire import from_wire
from fedleak.util.errors import FedleakError
from fedleak.util.finite import all_finite
from fedleak.util.sanitise import printable
from fedleak.util.versions import code

HALF = (torch.float16, torch.bfloat16)
"""The types that an update may be cast to on its way."""

LONGEST = 400
"""Characters of a client's error that are quoted."""


class RefusedError(FedleakError):
    """A reply that is not what its node was asked for."""


def claimed_client(reply: Message, *, own_file: bool) -> tuple[int, int | None]:
    """Returns the client whose data a node says it holds, and how many examples its own file has.

    Args:
        reply: The answer of the node.
        own_file: Whether it has one; if not, the node has the client's part of the experiment's
            data.

    Raises:
        RefusedError: The reply lacks a whole number, or the node runs another fedleak.
    """
    identity: Mapping[str, object] = reply.content.config_records.get("identity") or {}
    client = whole_number("client", identity.get("client"), 0)
    if (theirs := identity.get("fedleak")) != code():
        raise RefusedError(
            f"it runs fedleak {_quoted(theirs)} and the server {code()}: install the same on both, "
            "or start `flwr run` in a checkout, which brings its own"
        )
    if not own_file:
        return client, None
    return client, whole_number("examples", identity.get("examples"), 1, MOST_EXAMPLES)


def take_update(
    reply: Message, key: Key, kind: UpdateKind, expected: Mapping[str, Tensor], most_examples: int
) -> ClientUpdate:
    """Returns the update in a reply, whose encoded form is freed on the way.

    Args:
        reply: The reply of the node that holds the client's data.
        key: The round that was asked for, and the client. What the reply states of them must agree.
        kind: What was asked for.
        expected: Tensors of the shapes and types that the client sends, by parameter name.
        most_examples: How many examples the client can have used at most.

    Raises:
        RefusedError: Something in the reply is not right.
    """
    update = reply.content.array_records.get("update")
    metrics = reply.content.metric_records.get("metrics")
    if update is None or metrics is None:
        raise RefusedError("it holds no update")
    for name, value in key._asdict().items():
        if metrics.get(name, value) != value:
            raise RefusedError(f"it says {name} {_quoted(metrics[name])}, but is of {name} {value}")
    examples = whole_number("num-examples", metrics.get("num-examples"), 1, most_examples)
    if unexpected := sorted(update.keys() ^ expected.keys()):
        problem = "lacks" if unexpected[0] in expected else "holds a parameter"
        raise RefusedError(f"it {problem} {_quoted(unexpected[0])}")
    try:
        tensors = from_wire(taken_tensors(update))
    except Exception as error:  # NumPy may raise anything on arbitrary bytes
        raise RefusedError(f"its update cannot be read ({type(error).__name__})") from error
    for name, tensor in tensors.items():
        _check(name, tensor, expected[name])
    return ClientUpdate(kind, tensors, examples)


def client_error(reply: Message) -> str:
    """Returns what a client's error says, without the traces that Ray puts around it."""
    reason = reply.error.reason or "no reason"
    words = reason.rpartition("occurred. Message: ")[2].removesuffix("'>").split()
    return printable(" ".join(words))[-LONGEST:]


def _check(name: str, tensor: Tensor, like: Tensor) -> None:
    """Refuses a tensor that does not fit its parameter, or is not finite."""
    if tensor.shape != like.shape:
        shapes = f"{list(tensor.shape)}, but the parameter {list(like.shape)}"
        raise RefusedError(f"{name!r} has the shape {shapes}")
    if tensor.dtype not in (like.dtype, *HALF):
        raise RefusedError(f"{name!r} is of {tensor.dtype}, but the parameter of {like.dtype}")
    if not all_finite(tensor):
        raise RefusedError(
            f"not every number of {name!r} is finite: training diverged, or a cast overflowed; "
            "lower federation.learning_rate, or cast to bfloat16"
        )


def whole_number(name: str, value: object, lowest: int, highest: int | None = None) -> int:
    """Returns a number that a client reports, checked.

    Raises:
        RefusedError: It is no whole number from `lowest` to `highest`.
    """
    if type(value) is not int or value < lowest or (highest is not None and value > highest):
        bounds = f"{lowest} or more" if highest is None else f"{lowest} to {highest}"
        raise RefusedError(f"its {name} is {_quoted(value)} and not a whole number, {bounds}")
    return value


def _quoted(value: object) -> str:
    return printable(repr(value))[:100]
