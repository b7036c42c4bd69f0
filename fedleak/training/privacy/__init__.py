"""Audit the differential privacy of any training with canaries; `docs/own-privacy.md` shows it.

It needs NumPy, and SciPy for `bounds`. What trains may be Opacus, Flower or anything else that lets
an update be changed.

>>> import numpy as np
>>> from fedleak.training import privacy
>>> coins = privacy.flip(64)
>>> update = {"weights": np.random.normal(size=100_000)}  # noise of standard deviation 1
>>> canaries = privacy.directions(update, 64, seed=1)
>>> canaries.add_(update, 5.0 * coins * canaries.directions())
>>> shown = privacy.bounds(canaries.score(update), coins, delta=1e-5, noise_multiplier=1.0)
>>> bool(shown.largest > 4.38)  # what noise of 1 spends, if nothing is longer than 1
True
"""

from fedleak.training.privacy.audit import Audit, Findings
from fedleak.training.privacy.canaries import Canaries
from fedleak.training.privacy.lower_bounds import Bounds
from fedleak.training.privacy.own_training import WithDummies, bounds, directions, flip

__all__ = [
    "Audit",
    "Bounds",
    "Canaries",
    "Findings",
    "WithDummies",
    "bounds",
    "directions",
    "flip",
]
