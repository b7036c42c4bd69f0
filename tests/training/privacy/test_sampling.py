"""Counts of draws: a fair sampler is seldom accused, and each kind of wrong one is."""

import numpy as np
import pytest

from fedleak.training.privacy.sampling import least_likely

pytestmark = pytest.mark.core

STEPS, RECORDS, RATE = 20, 40, 0.25


def fair(rng, steps=STEPS, records=RECORDS, rate=RATE):
    return [np.flatnonzero(rng.random(records) < rate).tolist() for _ in range(steps)]


def test_a_fair_sampler_is_accused_as_seldom_as_p_says():
    rng = np.random.default_rng(0)
    p = []
    for _ in range(400):
        about = int(rng.integers(1, 12)), int(rng.integers(2, 60)), float(rng.choice([0.05, 0.5]))
        p.append(least_likely(fair(rng, *about), *about[1:]).p)
    assert np.mean(np.array(p) < 0.1) < 0.1
    assert min(p) > 1e-4


def pass_of_batches(rng):
    return [part.tolist() for part in np.array_split(rng.permutation(RECORDS), 4)]


@pytest.mark.parametrize(
    ("draw", "seen"),
    [
        (lambda rng: fair(rng, rate=0.5), "draws took a record"),
        (lambda rng: [[*step, *step[:1]] for step in fair(rng)], "draws took a record once more"),
        (lambda rng: [sorted({0, *step}) for step in fair(rng)], "steps took one record"),
        (lambda rng: [*fair(rng), range(RECORDS)], "records were in one step"),
        (lambda rng: fair(rng, steps=1) * STEPS, "20 of 20 steps took both of two records"),
        (lambda rng: [rng.permutation(RECORDS)[:10].tolist() for _ in range(STEPS)], "10 records"),
        (lambda rng: [part for _ in range(5) for part in pass_of_batches(rng)], "neither more"),
        (
            lambda rng: [[*step, *(20 + i for i in step)] for step in fair(rng, 80, 20)],
            "steps took both of two records",
        ),
    ],
    ids=["twice", "again", "favoured", "all once", "repeated", "sized", "passes", "together"],
)
def test_a_sampler_that_is_not_fair_is_seen(draw, seen):
    drawn = least_likely(draw(np.random.default_rng(1)), RECORDS, RATE)
    assert drawn.p < 1e-6, drawn
    assert seen in str(drawn) or drawn.p == 0
