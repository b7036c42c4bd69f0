"""An update of somebody's own training: from a gradient, a delta or weights to an observation.

Others made the update, and it may be read from a file. So it is checked before it is used: names,
shapes, types of numbers, and then the numbers.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedleak.config.sent_update import Payload, SentUpdate
from fedleak.models import LanguageModel
from fedleak.models.parameter_names import matched
from fedleak.training.observation import ClientUpdate, Observation, UpdateKind
from fedleak.util.errors import ConfigError
from fedleak.util.finite import all_finite
from fedleak.util.sanitise import printable

Tensors = nn.Module | Mapping[str, Any] | Sequence[Any]
"""A module stands for the gradients or weights that it holds; else tensors or arrays by name, or in
the order of `parameters()`, with None for a parameter that was not sent."""


NEAR = 0.1
"""Local training moves weights by less than this share of their norm, and no gradient is so near to
the weights."""

_LONGEST = 200
"""Characters of a name that are repeated in an error."""


def observe(
    update: Tensors, model: LanguageModel, sent: SentUpdate, order: nn.Module | None = None
) -> Observation:
    """Returns what a server sees of a client that sends this update.

    Args:
        update: Tensors of any floating-point type, which they keep.
        model: The model at the weights that training started from.
        sent: What the server knows of the update. The weight decay in it is removed from a delta.
        order: The module that gives the order of a sequence; None: the model's own.

    Raises:
        ConfigError: Something about the update is not right.
    """
    payload, kind = sent.payload, UpdateKind.DELTA
    named = _by_name(update, payload, order or model.module)
    tensors = _checked(named, model, sent)
    own = {name: value.detach() for name, value in model.module.named_parameters()}
    if payload != "weights" and _near(tensors, own):
        raise ConfigError(
            f"the {payload} is nearly the weights of the model themselves: where it is the weights "
            f"after training, call it weights; else give the {payload}"
        )
    if payload == "weights":
        tensors = {name: value.float() - own[name] for name, value in tensors.items()}
    if payload == "gradient":
        kind = UpdateKind.GRADIENT
    else:
        tensors = {name: sent.without_decay(t, own[name]) for name, t in tensors.items()}
        # A parameter that was not trained did not change, not even by decay: its zeros are dropped.
        trained = model.trained()
        tensors = {n: t for n, t in tensors.items() if n in trained or bool(t.any())}
    if not any(bool(tensor.any()) for tensor in tensors.values()):
        raise ConfigError(f"the {payload} is zero everywhere: there is nothing to attack")
    return Observation(
        round=1,
        client=0,
        update=ClientUpdate(kind, tensors, sent.num_examples),
        knowledge=sent.knowledge(),
    )


def _near(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
    """Whether tensors differ from weights of the same names by less than a tenth of their norm."""
    length, size = (
        math.hypot(*(float(values[name].float().norm()) for name in tensors))
        for values in (tensors, weights)
    )
    if abs(length - size) >= NEAR * size:
        return False  # most often a gradient; the difference would need a copy
    difference = (float((value.float() - weights[name]).norm()) for name, value in tensors.items())
    return math.hypot(*difference) < NEAR * size


def _by_name(update: Tensors, payload: Payload, order: nn.Module) -> dict[str, Any]:
    """Returns the tensors that were sent, under the names that they have in the update."""
    if isinstance(update, nn.Module):
        if payload == "delta":
            raise ConfigError(
                "a module holds gradients or weights, not their difference: give "
                "payload='weights', or the differences by name"
            )
        parameters = update.named_parameters()
        tensors = {n: p.grad if payload == "gradient" else p.detach() for n, p in parameters}
        if all(value is None for value in tensors.values()):
            raise ConfigError(
                "no parameter of the module has a gradient: call loss.backward() first, and "
                "attack before optimizer.zero_grad()"
            )
    elif isinstance(update, Mapping):
        tensors = dict(update)
    elif isinstance(update, Sequence) and not isinstance(update, str | bytes):
        tensors = _in_order(update, order)
    else:
        raise ConfigError(
            f"the update is {printable(type(update).__name__)}: give tensors by parameter name, "
            "tensors in the order of model.parameters(), or the module that holds them"
        )
    return {name: value for name, value in tensors.items() if value is not None}


def _in_order(update: Sequence[Any], module: nn.Module) -> dict[str, Any]:
    """Names tensors that stand in the order of the parameters, or of the state_dict."""
    parameters = dict(module.named_parameters())
    orders = {
        "parameters": list(parameters),
        "trained parameters": [name for name, p in parameters.items() if p.requires_grad],
        "entries of its state_dict": list(module.state_dict()),
    }
    for names in orders.values():
        if len(names) == len(update):
            return dict(zip(names, update, strict=True))
    counts = ", ".join(f"{len(names)} {order}" for order, names in orders.items())
    raise ConfigError(
        f"the update has {len(update)} tensors, and the model has {counts}: name them"
    )


def _checked(named: Mapping[str, Any], model: LanguageModel, sent: SentUpdate) -> dict[str, Tensor]:
    """Returns tensors on the model's device by the model's own names.

    Shapes are checked before numbers are looked at: a file can claim any shape.
    """
    payload = sent.payload
    if strange := [name for name in named if not isinstance(name, str)]:
        raise ConfigError(
            f"the {payload} has a name that is {type(strange[0]).__name__}, not a text"
        )
    own = dict(model.module.named_parameters())
    tensors: dict[str, Tensor] = {}
    for given, name in matched(named, model.module, sent.names, sent.own_head).items():
        shown = printable(repr(given))[:_LONGEST]
        tensor = _tensor(shown, named[given], own[name])
        if name in tensors and not torch.equal(tensors[name], tensor):
            raise ConfigError(
                f"two names of the {payload} mean {name}, and {shown} is the second: give one"
            )
        tensors[name] = tensor
    if not tensors:
        raise ConfigError(
            f"the {payload} holds no parameter of the model: give some of its tensors"
        )
    return {name: tensors[name] for name in own if name in tensors}


def _tensor(shown: str, value: Any, parameter: Tensor) -> Tensor:
    """Returns a value as a tensor, with the shape and the device of its parameter.

    Flower clients send arrays of NumPy, whose bytes and numbers may be in any order.
    """
    tensor = value
    if type(value).__module__ == "numpy" and hasattr(value, "dtype"):
        _check_shape(shown, value.shape, parameter)
        try:
            native = value.astype(value.dtype.newbyteorder("="), order="C", copy=False)
            tensor = torch.as_tensor(native)
        except TypeError as error:  # texts, objects, and types of numbers that torch lacks
            words = f"{shown} is of {printable(str(value.dtype))}: give floating-point numbers"
            raise ConfigError(words) from error
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{shown} is {printable(type(value).__name__)}, not a tensor")
    if (kind := _no_plain_tensor(tensor)) is not None:
        raise ConfigError(f"{shown} is {kind}: give a tensor of all of its numbers")
    _check_shape(shown, tensor.shape, parameter)
    if not tensor.is_floating_point():
        raise ConfigError(f"{shown} is of {tensor.dtype}: give floating-point numbers")
    detached = tensor.detach()
    if not all_finite(detached):
        raise ConfigError(
            f"not every number of {shown} is finite: training diverged, or a cast overflowed"
        )
    return detached.to(parameter.device).contiguous()  # it may be an expanded tensor


def _check_shape(shown: str, shape: Sequence[int], parameter: Tensor) -> None:
    if tuple(shape) != tuple(parameter.shape):
        raise ConfigError(
            f"{shown} has the shape {list(shape)}, and the model's parameter has "
            f"{list(parameter.shape)}: give the model that it is of"
        )


def _no_plain_tensor(tensor: Tensor) -> str | None:
    """Returns the kind of a tensor that does not hold each of its numbers once; else None.

    Indices of a sparse tensor may point out of its memory, and the shape of a tensor without
    numbers cannot be trusted. None of these checks reads a number.
    """
    kinds = {
        "a nested tensor": tensor.is_nested,
        "a sparse tensor": tensor.layout != torch.strided,
        "a meta tensor": tensor.is_meta,
        "quantised": tensor.is_quantized,
    }
    return next((kind for kind, holds in kinds.items() if holds), None)
