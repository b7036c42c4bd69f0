"""Tests of the update that is captured in place of several clients' updates."""

import math
from collections.abc import Iterator
from dataclasses import replace

import torch

from fedleak.audit.defense_checks.bench import (
    DEVIATIONS,
    EXAMPLES,
    ROUNDING,
    Bench,
    Test,
    all_numbers,
    distance,
    rounded,
    zeroed,
)
from fedleak.audit.defense_checks.sent_update import noise_tests
from fedleak.defenses.clip import norm_of
from fedleak.training.observation import ClientUpdate

NORMS = 1000
"""Rounds whose clipping norm is tested, if it depends on the round before."""

ROUNDS = 6
"""Rounds that are tested, if noise depends on the noise of earlier rounds."""


def combines(bench: Bench) -> Iterator[Test]:
    """Tests the update that is captured in place of two clients' updates."""
    first, second = bench.sent(range(1)), bench.sent(range(1, EXAMPLES))
    total = bench.combined([first, second])
    if bench.claims.step is not None:
        yield from _rounds(bench)
    apart = min(
        distance(total, update) / max(norm_of(update), 1e-300) for update in (first, second)
    )
    yield (
        "the capture is neither of two updates",
        apart > ROUNDING,
        f"{apart:.2g} of an update away from it",
    )
    if bench.claims.mean_of_clients:
        mean = {
            name: (value * first.num_examples + second.tensors[name] * second.num_examples)
            / (first.num_examples + second.num_examples)
            for name, value in first.tensors.items()
        }
        off = distance(total, replace(first, tensors=mean)) / max(norm_of(total), 1e-300)
        yield "the capture is the weighted mean of two updates", off < ROUNDING, f"{off:.1g} off"
    if bench.claims.client_norm is not None:
        yield _client_bounded(bench, bench.claims.client_norm, second)
    if scale := bench.aggregator.noise_on_mean(2):
        again = bench.combined([first, second], noise=1)
        yield from noise_tests(total, again, scale)
        if bench.claims.norm_noise is not None:
            yield _norm_follows(bench, bench.claims.norm_noise)
        if bench.claims.carried:
            first, again = (_fresh(bench, 1 + number * ROUNDS) for number in range(2))
            yield from noise_tests(first, again, scale)


def _fresh(bench: Bench, begin: int) -> ClientUpdate:
    """Returns what should be fresh noise, from rounds in which two clients send zeros."""
    nothing, rounds = zeroed(bench.raw()), range(begin, begin + ROUNDS)
    total = nothing.changed(torch.clone)
    for coefficient, round in zip(bench.claims.carried, reversed(rounds), strict=False):
        earlier = [bench.combining(before) for before in range(begin, round)]
        seen = bench.aggregator.corrected(bench.combined([nothing] * 2, round), earlier, 2, {})
        for name, value in total.tensors.items():
            value.add_(seen.tensors[name], alpha=coefficient)
    return total


def _norm_follows(bench: Bench, deviation: float) -> Test:
    """Tests the noise on the clipping norm of the next round, by two clients that send a zero."""
    nothing = [ClientUpdate(bench.sends, {"": torch.zeros(1)}, 1)] * 2
    rounds = (bench.aggregator.after(nothing, rng=bench.combining(n)) for n in range(NORMS))
    norms = [after.update_claims(bench.local, 1).client_norm or 0.0 for after in rounds]
    measured = float(torch.tensor(norms, dtype=torch.float64).log().std())
    off = ((measured / deviation) ** 2 - 1) / math.sqrt(2 / (NORMS - 1))
    return (
        f"the logarithm of the next clipping norm has noise of standard deviation {deviation:.4g}",
        abs(off) < DEVIATIONS,
        f"{measured:.4g} in {NORMS} rounds, {off:+.1f} deviations off",
    )


def _client_bounded(bench: Bench, norm: float, other: ClientUpdate) -> Test:
    """Tests how far a loud client moves the sum of two, compared with one that sends zeros."""
    loud = bench.sent(loud=True)
    there, gone = bench.combined([other, loud]), bench.combined([other, zeroed(loud)])
    moved = 2 * distance(there, gone)
    return (
        f"a loud client moves the sum of updates by no more than {norm:g}",
        moved <= norm * (1 + ROUNDING) + 2 * rounded(there, gone),
        f"by {moved:.4g}, of {norm_of(loud):.2g} before",
    )


def _rounds(bench: Bench) -> Iterator[Test]:
    """Tests the rounding of one client's update, before it is added to others.

    The figures have the error relative to the update: rounding that loses the update hides it too.
    """
    raw = bench.trained()
    before, after = all_numbers(raw).double(), all_numbers(bench.defended(raw)).double()
    claims = bench.defense.update_claims(bench.local, raw.num_examples)
    assert claims.step is not None
    assert claims.largest_number is not None
    inside = before.clamp(-claims.largest_number, claims.largest_number)
    moved = float((after - inside).abs().max())
    float32 = torch.finfo(torch.float32).eps * float(after.abs().max())
    size, error = (float(numbers.square().mean().sqrt()) for numbers in (before, after - before))
    lost = (after == 0) & (before != 0)
    yield (
        f"each number is cut off at {claims.largest_number:.3g} and moves by less than a step of "
        f"{claims.step:.3g}",
        moved <= claims.step + float32,
        f"by up to {moved:.3g}; the error is {error / size:.3g} of the update's root mean square, "
        f"{100 * float(lost.double().mean()):.3g} % of the numbers become zero and "
        f"{100 * float((before != inside).double().mean()):.3g} % are cut off",
    )
