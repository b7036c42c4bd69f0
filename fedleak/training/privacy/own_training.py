"""An audit of anybody's training: made-up gradients go in by secret coins, and scores come out.

Shapes: T steps, K canaries.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedleak.training.privacy import canaries
from fedleak.training.privacy.canaries import Canaries, Floats
from fedleak.training.privacy.lower_bounds import UNBOUNDED_MU, Bounds, lower_bounds
from fedleak.util.errors import ConfigError
from fedleak.util.rng import stream_seed


def directions(parameters: Mapping[str, Any], count: int, *, seed: int, step: int = 0) -> Canaries:
    """Returns the canaries of one update: their places and directions.

    The auditor and the trainer call it with the same arguments. Each update needs directions of its
    own, so give its number as `step`.

    Args:
        parameters: What an update consists of: arrays or tensors by name, such as
            `dict(model.named_parameters())`. Names and shapes alone matter.
        count: K, how many canaries; each takes at least 256 numbers of the update.
        seed: Of the audit.
        step: Number of the update.

    Raises:
        ConfigError: The update has too few numbers.
    """
    sizes = {name: math.prod(value.shape) for name, value in parameters.items()}
    room = canaries.most_canaries(sum(sizes.values()))
    if not 1 <= count <= room:
        raise ConfigError(
            f"count = {count}: an update of {sum(sizes.values())} numbers has room for {room} "
            f"canaries of {canaries.FEWEST_NUMBERS} numbers: give 1 to {room}"
            if room
            else f"an update of {sum(sizes.values())} numbers has no room for a canary: it takes "
            f"{canaries.FEWEST_NUMBERS}"
        )
    return Canaries(sizes, count, stream_seed(seed, "canaries", step))


def flip(count: int) -> NDArray[np.bool_]:
    """Returns fair coins from the system's randomness, the trainer's secret [K]."""
    return np.random.default_rng(secrets.randbits(128)).random(count) < 0.5


@dataclass(frozen=True)
class WithDummies:
    """A data set with a dummy record for each canary behind it; torch's loaders take it.

    Its items are pairs: an item of the data set, and the number of the canary that it is a dummy
    of; -1 for an example. A dummy is a copy of an example, so it is processed like one.

    Attributes:
        examples: The data set.
        canaries: K.
    """

    examples: Any
    canaries: int

    def __len__(self) -> int:
        return len(self.examples) + self.canaries

    def __getitem__(self, record: int) -> tuple[Any, int]:
        if not 0 <= record < len(self):
            raise IndexError(record)
        canary = record - len(self.examples)
        if canary < 0:
            return self.examples[record], -1
        return self.examples[canary % len(self.examples)], canary


def bounds(
    scores: Sequence[Floats] | Floats,
    coins: Sequence[bool] | NDArray[np.bool_],
    *,
    delta: float,
    noise_multiplier: float | None = None,
    sampling_rate: float = 1.0,
    signed: bool = False,
    confidence: float = 0.95,
) -> Bounds:
    """Returns lower bounds on the epsilon of a whole training.

    What is announced about noise and sampling decides how scores of several steps are added and how
    many guesses are made. If this is wrong, the bounds are lower, and still hold.

    Args:
        scores: The scores of each step, from `Canaries.score` [T, K], or of one step [K].
        coins: Whether each canary is in; with `signed`, whether its sign is plus [K].
        delta: Of the epsilon.
        noise_multiplier: Announced: standard deviation of the noise, in sensitivities.
        sampling_rate: Announced: probability with which a step takes a record.
        signed: Whether a canary that is not in is the opposite of its direction, and not nothing.
            Then bounds are about replacing a unit; else about leaving it out.
        confidence: With which each bound holds, at least 0.5 and less than 1.

    Raises:
        ConfigError: The arguments do not fit.
    """
    scores_TK = np.atleast_2d(np.asarray(scores, dtype=np.float64))
    if scores_TK.ndim != 2 or scores_TK.shape[1] != len(coins):
        raise ConfigError(
            f"scores of shape {scores_TK.shape} for {len(coins)} coins: give a row for each step, "
            "with a score for each coin"
        )
    if not np.isfinite(scores_TK).all():
        raise ConfigError("scores: not every number is finite: look for overflow in the updates")
    if not (0 < delta < 1 and 0.5 <= confidence < 1 and 0 < sampling_rate <= 1):
        raise ConfigError(
            f"delta = {delta:g}, confidence = {confidence:g}, sampling_rate = {sampling_rate:g}: "
            "each is between 0 and 1, and the confidence at least 0.5"
        )
    if noise_multiplier is not None and noise_multiplier <= 0:
        raise ConfigError(f"noise_multiplier = {noise_multiplier:g}: give a number above 0")
    steps = len(scores_TK)
    mu = UNBOUNDED_MU if noise_multiplier is None else 1 / noise_multiplier
    sampled = sampling_rate < 1
    if sampled:
        of_step = partial(
            canaries.log_ratios, mu=mu, rate=sampling_rate, steps=1, numbers=canaries.MOST_NUMBERS
        )
        pooled_K = np.sum(list(map(of_step, scores_TK)), axis=0)
    else:
        pooled_K = scores_TK.sum(0) / math.sqrt(steps)
    return lower_bounds(
        pooled_K.tolist(),
        [bool(coin) for coin in coins],
        1 - confidence,
        delta,
        mu=math.sqrt(steps) * mu * sampling_rate,
        sampled=sampled,
        signed=signed,
    )
