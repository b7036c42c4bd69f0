"""Whether an attack left the model as it found it: the next one in the process uses it too."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedleak.models import LanguageModel

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def state(model: LanguageModel) -> Mapping[str, object]:
    """Returns what an attack must not change, by name, as values that can be compared.

    It costs a quarter of a cryptographic hash of the weights. That matters because it is taken
    after every call of an attack, and some calls take milliseconds.
    """
    module = model.module
    parameters = dict(module.named_parameters())
    modules = dict(module.named_modules())
    return {
        "weights": _digest(parameters.items()),
        "buffers": _digest(module.named_buffers()),
        "layers": [(name, type(layer)) for name, layer in modules.items()],
        "train mode": [name for name, layer in modules.items() if layer.training],
        "requires_grad": [
            name for name, parameter in parameters.items() if parameter.requires_grad
        ],
        "gradients": [name for name, parameter in parameters.items() if parameter.grad is not None],
        "hooks": [
            sum(len(getattr(layer, hooks)) for hooks in _HOOKS) for layer in modules.values()
        ],
    }


def changed(model: LanguageModel, before: Mapping[str, object]) -> list[str]:
    """Returns the names of what has changed in a model since an earlier `state`."""
    try:
        after = state(model)
    except Exception:  # noqa: BLE001 - it is not even a model any more
        return ["layers"]
    return [name for name in before if before[name] != after[name]]


def _digest(named: Iterable[tuple[str, Tensor]]) -> str:
    """Returns a hash of names, shapes and values, which are summed up on their own device."""
    digest = hashlib.sha256()
    sums: dict[torch.device, list[Tensor]] = {}
    for name, tensor in named:
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        sums.setdefault(tensor.device, []).extend(_sums(tensor.detach()))
    for device_sums in sums.values():
        digest.update(torch.cat(device_sums).cpu().numpy().tobytes())
    return digest.hexdigest()


def _sums(tensor: Tensor) -> list[Tensor]:
    """Returns whole numbers that differ once a tensor was changed; they overflow without an error.

    A matrix's bits are added up along its rows and along its columns, so that swapped numbers show;
    of anything else each byte counts by itself.
    """
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if tensor.dim() < 2 or not flat.numel() or flat.numel() % (8 * tensor.shape[0]):
        return [flat.long()]
    words = flat.view(torch.int64).view(tensor.shape[0], -1)
    return [words.sum(0), words.sum(1)]
