"""What goes into the modules of a model, and comes out of them, in a forward pass."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

Heard = dict[nn.Module, tuple[Tensor, Tensor]]
"""The first input and the output of modules, in the order of their calls."""


class AllHeardError(Exception):
    """All modules were called: nothing else of the forward pass is needed."""


@contextmanager
def listening(modules: Collection[nn.Module], *, stop: bool = False) -> Iterator[Heard]:
    """Keeps what goes into and comes out of modules within the block.

    Args:
        modules: Each is called once.
        stop: End the forward pass with `AllHeardError` once all were called.
    """
    heard: Heard = {}

    def hear(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        heard[module] = inputs[0], output
        if stop and len(heard) == len(modules):
            raise AllHeardError

    handles = [module.register_forward_hook(hear) for module in modules]
    try:
        yield heard
    finally:
        for handle in handles:
            handle.remove()
