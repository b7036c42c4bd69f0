"""Attacks never mix devices, shown without a second one.

A tensor "elsewhere" has its numbers in ordinary memory and says that it is on another device. An
operation that takes one from here and one from there raises as it would on a GPU, where only
numbers without dimensions and indices may come from the CPU. The answers are those of the CPU.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_flatten, tree_map

from fedleak.attacks import Attack
from fedleak.attacks.analytic.probes import Probes
from fedleak.attacks.matching.dlg import Dlg, Tag
from fedleak.attacks.matching.gradient_matching import GradientMatching
from fedleak.attacks.matching.lamp import Lamp
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.attacks.subspace.dager import Dager
from fedleak.attacks.subspace.keyspan import Keyspan
from fedleak.models import CAUSAL_LM, CLASSIFICATION, LanguageModel
from fedleak.training.observation import Observation
from fedleak.util.rng import stream

ELSEWHERE = torch.device("meta")
"""What such a tensor says: the one device that PyTorch knows everywhere and computes nothing on."""

_aten = torch.ops.aten
_INDEXING = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
_COPYING = {_aten._to_copy.default, _aten.copy_.default}


class Elsewhere(Tensor):
    """A tensor on another device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: Tensor, requires_grad: bool = False) -> "Elsewhere":
        return Tensor._make_wrapper_subclass(
            cls,
            here.shape,
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=ELSEWHERE,
            requires_grad=requires_grad,
        )

    def __init__(self, here: Tensor, requires_grad: bool = False) -> None:
        self.here = here

    def __deepcopy__(self, memo: dict[int, Any]) -> "Elsewhere":
        copied = Elsewhere(self.here.clone())
        return nn.Parameter(copied, self.requires_grad) if hasattr(self, "_is_param") else copied

    def tolist(self) -> Any:
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Runs an operation in ordinary memory, if all that it takes is on one device."""
    tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, Elsewhere)]
    here = [tensor for tensor in tensors if not isinstance(tensor, Elsewhere)]
    assert not any(tensor.is_meta for tensor in here), (
        f"{func} on a tensor that this test cannot follow"
    )
    mixed = there and any(tensor.dim() for tensor in here) and func not in _COPYING
    if mixed and not (func in _INDEXING and isinstance(args[0], Elsewhere)):
        raise RuntimeError(f"{func} mixes devices: {[tuple(tensor.shape) for tensor in tensors]}")
    goes_there = bool(there)
    if func is _aten.copy_.default:
        goes_there = isinstance(args[0], Elsewhere)
    if kwargs.get("device") is not None:
        goes_there = torch.device(kwargs["device"]) == ELSEWHERE
        kwargs = {**kwargs, "device": torch.device("cpu")}
    if goes_there and kwargs.get("generator") is not None:
        raise RuntimeError(f"{func} draws elsewhere with a generator of the CPU")
    own_args, own_kwargs = tree_map(
        lambda leaf: leaf.here if isinstance(leaf, Elsewhere) else leaf, (args, dict(kwargs))
    )
    out = func(*own_args, **own_kwargs)
    if not goes_there:
        return out
    out = tree_map(lambda leaf: Elsewhere(leaf) if isinstance(leaf, Tensor) else leaf, out)
    return return_and_correct_aliasing(func, args, kwargs, out)


class _Operations(TorchDispatchMode):
    """Looks at operations that have no tensor elsewhere among what they take, too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Lists(TorchFunctionMode):
    """Moves what is made of Python's lists: PyTorch would make it elsewhere, without numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu") == ELSEWHERE:
            del kwargs["device"]
            return torch.tensor(*args, **kwargs).to(ELSEWHERE)
        if func is Tensor.new_tensor and isinstance(args[0], Elsewhere):
            return torch.tensor(args[1], dtype=args[0].dtype).to(ELSEWHERE)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(
                torch.tensor(part, dtype=None if part else torch.long)
                if isinstance(part, list)
                else part
                for part in index
            )
            args = (args[0], index, *args[2:])
        return func(*args, **kwargs)


@contextmanager
def _watching(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # Tensors of inference mode cannot be wrapped, nor can a parameter's numbers be exchanged.
    monkeypatch.setattr(torch, "inference_mode", torch.no_grad)
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with _Lists(), _Operations():
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def _moved(module: nn.Module) -> nn.Module:
    """Returns a copy of a module elsewhere; what was tied still is."""
    module, moved = copy.deepcopy(module), {}
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                other = nn.Parameter(Elsewhere(value.detach()), value.requires_grad)
                part._parameters[name] = moved.setdefault(id(value), other)
        for name, value in part._buffers.items():
            part._buffers[name] = None if value is None else Elsewhere(value)
    return module


def _answers(
    attack: Attack, seen: Observation, model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> tuple[Reconstruction, Reconstruction]:
    """Returns the answer on the CPU and the one elsewhere."""
    expected = attack(seen, model, rng=stream(0, "attack"))
    tensors = {name: Elsewhere(value) for name, value in seen.update.tensors.items()}
    seen = replace(seen, update=replace(seen.update, tensors=tensors))
    with _watching(monkeypatch):
        there = replace(model, module=_moved(model.module))
        return expected, attack(seen, there, rng=stream(0, "attack"))


PRIOR = "builtin/gpt2-tiny"
FAITHFUL = {"preset": "faithful", "steps": 3, "precision": "mixed"}
NOISE = 1e-3


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("attack", "family", "task", "noise"),
    [
        (Probes(), "bert", CLASSIFICATION, 0.0),
        (Dager(enumerate_up_to=1), "bert", CLASSIFICATION, 0.0),
        (Dager(), "gpt2", CAUSAL_LM, 0.0),
        (Dager(), "llama", CAUSAL_LM, NOISE),
        (Keyspan(), "bert", CLASSIFICATION, 0.0),
        (Keyspan(), "gpt2", CAUSAL_LM, NOISE),
        (Lamp(steps=2, starts=1, guesses=4, orders=4, prior=PRIOR), "bert", CLASSIFICATION, 0.0),
        slow(Lamp(steps=2, starts=1, orders=4), "gpt2", CAUSAL_LM, 0.0),
        slow(Lamp(**FAITHFUL, guesses=2, orders=4, prior=PRIOR), "bert", CLASSIFICATION, NOISE),
        (Dlg(steps=2, starts=1), "llama", CLASSIFICATION, 0.0),
        (Tag(**FAITHFUL), "gpt2", CLASSIFICATION, 0.0),
    ],
    ids=lambda value: getattr(value, "kind", None),
)
def test_an_attack_stays_on_the_device_of_the_model(
    small, observe, monkeypatch, attack, family, task, noise
):
    # Spans need more dimensions than there are tokens; whoever matches gradients needs neither.
    matches = isinstance(attack, GradientMatching)
    model = small(family, task, width=32 if matches else 96, layers=1 if matches else 3)
    seen = observe(model, 2, max_length=6, granted=("labels", "lengths")).seen
    rng = torch.Generator().manual_seed(0)
    tensors = {
        name: value + noise * value.abs().mean() * torch.randn(value.shape, generator=rng)
        for name, value in seen.update.tensors.items()
    }
    seen = replace(seen, update=replace(seen.update, tensors=tensors))
    here, there = _answers(attack, seen, model, monkeypatch)
    assert here.status == Status.RECOVERED
    assert (there.sequences, there.tokens, there.facts) == (
        here.sequences,
        here.tokens,
        here.facts,
    )
    assert there.verified == here.verified


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(2),
        lambda x: torch.ones(2)[x.long()],
        lambda x: torch.cat([x, torch.zeros(1)]),
        lambda x: torch.randn(2, generator=torch.Generator(), device=x.device),
    ],
    ids=["sum", "index", "cat", "generator"],
)
def test_what_would_fail_on_a_gpu_fails_here(monkeypatch, mix):
    refused = pytest.raises(RuntimeError, match=r"mixes devices|draws elsewhere")
    with _watching(monkeypatch), refused:
        mix(torch.zeros(2).to(ELSEWHERE))
