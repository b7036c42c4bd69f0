"""Tests of one client's update: it differs from the raw one, and its defense's claims hold."""

import math
from collections.abc import Iterator, Sequence

import torch

from fedleak.audit.defense_checks.bench import (
    DEVIATIONS,
    EXAMPLES,
    ROUNDING,
    Bench,
    Test,
    all_numbers,
    dense,
    distance,
    random_texts,
    rounded,
    scaled,
    trained_on,
    zeroed,
)
from fedleak.audit.metrics import noise
from fedleak.defenses import root_mean_square
from fedleak.defenses.clip import norm_of
from fedleak.models import CLASSIFICATION
from fedleak.models.parameter_selection import select
from fedleak.training.observation import ClientUpdate
from fedleak.training.settings import LocalTraining
from fedleak.training.steps import Batch
from fedleak.util.rng import stream_seed

LENGTHS, NORMS, ALIKE = (3, 8, 15, 100), (0.5, 1.5, 30.0, 1e4), (3.0, 30.0)
"""Tokens of the texts of a batch; norms of their gradients, in clipping norms; and norms for
batches in which all gradients have the same norm."""

Scaled = tuple[Sequence[int], int, float]
"""A text, its class, and the factor of its gradient."""


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
            yield _left_out(bench, claims.example_norm)
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


def _left_out(bench: Bench, norm: float) -> Test:
    """Tests how far an example moves the update: compares a batch with it and without it.

    The texts have many lengths and their gradients many norms, each length with a small and a large
    norm. A classifier also gets one text with two classes, whose gradients are opposite.
    """
    most = norm * bench.local.batch_size
    made = random_texts(bench.model, bench.seed, LENGTHS)
    texts = list(zip(made.sequences, made.labels, strict=True))
    lengths = [norm_of(_trained(bench, [(*text, 1.0)], bench.plain)) for text in texts]

    def scale(place: int, norm: float) -> float:
        return norm * most / max(lengths[place], 1e-30)

    def batch(places: Sequence[int], norms: Sequence[float]) -> list[Scaled]:
        return [(*texts[i], scale(i, norm)) for i, norm in zip(places, norms, strict=True)]

    # Each step costs as much as one of training, so only two examples of a batch are left out.
    tried = [
        (batch(range(4), NORMS), [1, 3]),
        (batch(range(4), NORMS[2:] + NORMS[:2]), [0, 3]),
    ]
    # If the batch has one loss, the short texts weigh more in it without the long one.
    tried += [(batch([0, 0, 0, 3], [norm] * 4), [3]) for norm in ALIKE]
    if bench.model.task == CLASSIFICATION:
        tried.append(([(texts[1][0], label, scale(1, NORMS[2])) for label in (0, 1)], [0]))
    moved, where = 0.0, 0
    for examples, places in tried:
        whole = bench.defended(_trained(bench, examples))
        for place in places:
            others = [*examples[:place], *examples[place + 1 :]]
            rest = bench.defended(_trained(bench, others))
            by = distance(whole, rest) - rounded(whole, rest)
            if by > moved:
                moved, where = by, len(examples[place][0])
    return (
        f"no example of a batch moves the update by more than {norm:g}",
        moved <= norm * (1 + ROUNDING),
        f"the one that moves it most, of {where} tokens, by {moved:.4g}; texts of up to "
        f"{max(map(len, made.sequences))} tokens and gradients of {NORMS[0]:g} to {NORMS[-1]:g} "
        "times the limit are tried",
    )


def _trained(
    bench: Bench, examples: Sequence[Scaled], local: LocalTraining | None = None
) -> ClientUpdate:
    """Returns the update of a client with these examples, before the defense is applied."""
    sequences, labels, scales = zip(*examples, strict=True)
    model, texts = scaled(bench.model, scales), Batch(sequences, labels)
    return trained_on(model, texts, local or bench.local, seed=stream_seed(bench.seed, "check", 0))


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
