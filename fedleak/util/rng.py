"""Named random streams: each use of chance draws from its own stream, so none disturbs another."""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def stream_seed(seed: int, *names: str | int) -> int:
    """Returns a 63-bit seed for the stream called `names` of an experiment's `seed`."""
    key = "/".join(map(str, (seed, *names))).encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8]) >> 1


def stream(seed: int, *names: str | int) -> "torch.Generator":
    """Returns a CPU generator for the stream called `names` of an experiment's `seed`."""
    import torch  # here: canaries are drawn where it is not installed, too

    return torch.Generator().manual_seed(stream_seed(seed, *names))
