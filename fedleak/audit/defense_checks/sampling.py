"""Tests of a client's sampler."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import torch

from fedleak.audit.defense_checks.bench import Bench, Test
from fedleak.audit.metrics.noise import UNLIKELY
from fedleak.training.batches import passes, round_batch
from fedleak.training.observation import UpdateKind
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream_seed

MOST_ROUNDS, MOST_DRAWS = 1000, 2_000_000
"""Uses of a sampler that are tried, and draws of single examples."""

DEVIATIONS = 5.0
"""Standard deviations by which a rate is seen to be off."""


def draws(bench: Bench) -> Iterator[Test]:
    """Tests the client's sampler against the event of its steps, by many draws."""
    from scipy.stats import binom

    local, held = replace(bench.local, kind=bench.sends), bench.num_examples
    event = bench.defense.event(local, held, 1)
    if event is None or event.unit != "example":
        return
    times = max(20, min(MOST_ROUNDS, MOST_DRAWS // held))
    steps = list(chain(*(_batches(local, held, bench.seed, time) for time in range(times))))
    drawn_N = torch.zeros(held, dtype=torch.long)
    for chosen in steps:
        drawn_N += torch.bincount(torch.tensor(chosen, dtype=torch.long), minlength=held)
    if event.sampling == "Poisson":
        rate, uses = event.sampling_rate, len(steps)
        tails = [
            min(float(binom.cdf(count, draws, rate)), float(binom.sf(count - 1, draws, rate)))
            for count, draws in [
                (int(drawn_N.sum()), uses * held),
                *((int(n), uses) for n in drawn_N),
            ]
        ]
        p = min(1.0, 2 * len(tails) * min(tails))
        rate_error = DEVIATIONS * math.sqrt(rate * (1 - rate) / (uses * held))
        yield (
            f"each example is in a step with a probability of {rate:.3g}",
            p > UNLIKELY,
            f"{float(drawn_N.sum()) / (uses * held):.3g} of {uses:,} steps of {held:,} examples (p "
            f"{p:.1g}); it would see a rate that is {rate_error:.2g} off",
        )
        return
    most = times * (event.steps if bench.sends == UpdateKind.DELTA else 1)
    yield (
        "no example is in more steps than the ledger counts",
        int(drawn_N.max()) <= most,
        f"in up to {int(drawn_N.max())} of {len(steps):,} steps, and {most} are counted",
    )


def _batches(local: LocalTraining, held: int, seed: int, time: int) -> Iterator[Sequence[int]]:
    """Yields the batches of one use of the client's sampler, or of one pass of rounds."""
    if local.kind == UpdateKind.DELTA and local.private is not None:
        from fedleak.training import private_steps  # it takes seconds to import

        yield from private_steps.local_batches(
            held, local, local.private, stream_seed(seed, "check", time)
        )
        return
    poisson = local.private is not None and local.private.sampling == "poisson"
    rounds = 1 if poisson else passes(held, local)
    for round in range(1 + time * rounds, 1 + (time + 1) * rounds):
        yield round_batch(held, local, seed=seed, client=0, round=round)
