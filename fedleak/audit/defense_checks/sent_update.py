"""Tests of one client's update: it differs from the raw one, and its defense's claims hold."""

import math
from collections.abc import Iterator

import torch

from fedleak.audit.defense_checks.bench import (
    EXAMPLES,
    ROUNDING,
    Bench,
    Test,
    all_numbers,
    dense,
    distance,
    rounded,
    zeroed,
)
from fedleak.audit.defense_checks.examples import left_out
from fedleak.audit.metrics import noise
from fedleak.defenses import root_mean_square
from fedleak.defenses.clip import norm_of
from fedleak.models.parameter_selection import select
from fedleak.training.observation import ClientUpdate

DEVIATIONS = 5.0
"""Standard deviations by which a figure that chance decides may be off: once in two million."""


def changes(bench: Bench) -> Iterator[Test]:
    """Tests that what is captured is not what was computed."""
    raw, sent = bench.raw(loud=True), bench.sent(loud=True)
    missing = raw.tensors.keys() - sent.tensors.keys()
    if not missing and distance(sent, raw) == 0:
        # A defense may leave a short or sparse update as it is: try a long one without zeros.
        raw = dense(raw, 10 * (bench.claims.max_norm or 1.0), bench.seed)
        sent = bench.defended(raw)
    moved = distance(sent, raw) / norm_of(raw)
    yield (
        "the captured update differs from the raw one",
        bool(missing) or moved > 0,
        f"by {moved:.2g} of its norm; {len(missing)} of {len(raw.tensors)} tensors are missing",
    )


def keeps(bench: Bench) -> Iterator[Test]:
    """Tests the defense's own claims."""
    claims = bench.claims
    if claims.max_norm is not None:
        loud = bench.trained(loud=True)
        sent, nothing = bench.defended(loud), bench.defended(zeroed(loud))
        moved = distance(sent, nothing)
        yield (
            f"the update is no longer than {claims.max_norm:g}, its noise aside",
            moved <= claims.max_norm * (1 + ROUNDING) + rounded(sent, nothing),
            f"{moved:.4g}, of {norm_of(loud):.2g} before",
        )
    if claims.example_norm is not None:
        sent, without = bench.sent(loud=True), bench.sent(range(1, EXAMPLES))
        moved = distance(sent, without)
        holds = moved <= claims.example_norm * (1 + ROUNDING) + rounded(sent, without)
        yield (
            f"a loud example moves the update by no more than {claims.example_norm:g}",
            holds,
            f"by {moved:.4g}; a raw one by {distance(bench.raw(loud=True), bench.raw()):.2g}",
        )
        if holds:
            yield left_out(bench, claims.example_norm)
    scale = claims.noise_scale
    if claims.relative_noise is not None:
        scale = claims.relative_noise * root_mean_square(bench.trained())
    if scale is not None:
        yield from noise_tests(bench.sent(), bench.sent(noise=1), scale, laplace=claims.laplace)
    if claims.masked is not None:
        yield _masked(bench, claims.masked)
    if claims.zeros is not None:
        yield _zeros(bench, claims.zeros)
    if claims.levels is not None:
        most = max(len(torch.unique(value)) for value in bench.sent().tensors.values())
        yield (f"no more than {claims.levels} numbers a tensor", most <= claims.levels, f"{most}")
    if claims.absent:
        names = select(bench.model, claims.absent, "parameters")
        there = [name for name in names if name in bench.sent().tensors]
        yield (f"{len(names)} tensors are not sent", not there, f"{len(there)} were sent")


def noise_tests(
    first: ClientUpdate, second: ClientUpdate, scale: float, *, laplace: bool = False
) -> Iterator[Test]:
    """Tests the noise, by two updates that differ in nothing else: its variance, then the rest.

    For normal noise, the sum of n squared differences over 2 scale^2 is chi-square with n degrees
    of freedom; the deviation of their mean is estimated from the numbers, which is right for any
    distribution.
    """
    ratio_N = (all_numbers(first).double() - all_numbers(second).double()).square() / (2 * scale**2)
    mean, deviation = float(ratio_N.mean()), float(ratio_N.std()) / math.sqrt(len(ratio_N))
    off = (mean - 1) / deviation if deviation else math.copysign(math.inf, mean - 1)
    yield (
        f"the noise has standard deviation {scale:.4g}",
        abs(off) < DEVIATIONS,
        f"{scale * math.sqrt(mean):.4g} on {len(ratio_N):,} numbers, {off:+.1f} deviations off",
    )
    if abs(off) >= DEVIATIONS:
        return
    apart = {name: value - second.tensors[name] for name, value in first.tensors.items()}
    tested = list(noise.tests(apart, noise.laplace if laplace else noise.normal))
    wrong = [test for test in tested if test.p < noise.UNLIKELY]
    yield (
        f"the noise is {'Laplace' if laplace else 'normal'}, and independent from number to number",
        not wrong,
        "not by the test of " + ", ".join(f"{test.name} (p {test.p:.1g})" for test in wrong)
        if wrong
        else "each test sees: " + ", ".join(f"{test.name}, {test.sees}" for test in tested),
    )


def _masked(bench: Bench, fraction: float) -> Test:
    """Tests a mask on the numbers that were not zero before."""
    before, after = all_numbers(bench.raw()), all_numbers(bench.sent())
    used = before != 0
    dropped, numbers = float((after[used] == 0).double().mean()), int(used.sum())
    deviation = math.sqrt(fraction * (1 - fraction) / numbers)
    kept = torch.equal(after[after != 0], before[after != 0])
    return (
        f"{100 * fraction:g} % of the numbers are set to zero, the others stay",
        abs(dropped - fraction) < DEVIATIONS * deviation + 1 / numbers and kept,
        f"{100 * dropped:.4g} % of {numbers:,}",
    )


def _zeros(bench: Bench, fraction: float) -> Test:
    """Tests how many numbers are zero, and that they were the smallest."""
    before, after = all_numbers(bench.raw()), all_numbers(bench.sent())
    zero = after == 0
    share = float(zero.double().mean())
    largest = float(before[zero].abs().max()) if zero.any() else 0.0
    smallest = float(after[~zero].abs().min()) if not zero.all() else math.inf
    kept = torch.equal(after[~zero], before[~zero])
    return (
        f"{100 * fraction:g} % of the numbers are zero, the smallest; the others stay",
        share >= fraction - 1 / len(after) and largest <= smallest and kept,
        f"{100 * share:.4g} % of {len(after):,}, up to {largest:.2g}; others from {smallest:.2g}",
    )
