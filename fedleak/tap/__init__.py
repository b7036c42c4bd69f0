"""Keeps what the server of any Flower app receives, for `fedleak import`.

One line of a ServerApp changes:

    strategy.start(grid=tap(grid, "runs/mine"), ...)
"""

from fedleak.tap.grid import tap

__all__ = ["tap"]
