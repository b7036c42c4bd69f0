"""Tests of a client's sampler."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from fedleak.audit.defense_checks.bench import DEVIATIONS, Bench, Test
from fedleak.audit.metrics.noise import UNLIKELY
from fedleak.training.batches import passes, round_batch
from fedleak.training.observation import UpdateKind
from fedleak.training.privacy.sampling import least_likely
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream_seed

MOST_ROUNDS, MOST_DRAWS = 1000, 2_000_000
"""Uses of a sampler that are tried, and draws of single examples."""


def draws(bench: Bench) -> Iterator[Test]:
    """Tests the client's sampler against the event of its steps, by many draws."""
    local, held = replace(bench.local, kind=bench.sends), bench.num_examples
    event = bench.defense.event(local, held, 1)
    if event is None or event.unit != "example":
        return
    times = max(20, min(MOST_ROUNDS, MOST_DRAWS // held))
    steps = list(chain(*(_batches(local, held, bench.seed, time) for time in range(times))))
    if event.sampling == "Poisson":
        rate, draws = event.sampling_rate, len(steps) * held
        drawn = least_likely(steps, held, rate)
        rate_error = DEVIATIONS * math.sqrt(rate * (1 - rate) / draws)
        yield (
            f"each example is in a step with a probability of {rate:.3g}, by a coin of its own",
            drawn.p > UNLIKELY and len(steps) <= times * event.steps,
            f"{sum(map(len, steps)) / draws:.3g} of {len(steps):,} steps, of which "
            f"{times * event.steps:,} are counted, of {held:,} examples; "
            f"least likely: {drawn} (p {drawn.p:.1g}); it would see a rate that is "
            f"{rate_error:.2g} off",
        )
        return
    most = times * (event.steps if bench.sends == UpdateKind.DELTA else 1)
    often = max(Counter(chain(*steps)).values())
    yield (
        "no example is in more steps than the ledger counts",
        often <= most,
        f"in up to {often} of {len(steps):,} steps, and {most} are counted",
    )


def _batches(local: LocalTraining, held: int, seed: int, time: int) -> Iterator[Sequence[int]]:
    """Yields the batches of one use of the client's sampler, or of one pass of rounds."""
    if local.kind == UpdateKind.DELTA and local.private is not None:
        yield from local.batches(held, stream_seed(seed, "check", time))
        return
    rounds = 1 if local.poisson else passes(held, local)
    for round in range(1 + time * rounds, 1 + (time + 1) * rounds):
        yield round_batch(held, local, seed=seed, client=0, round=round)
