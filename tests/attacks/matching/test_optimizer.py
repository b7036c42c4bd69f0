"""Adam on many rows at once, against plain Adam on each."""

import pytest
import torch

from fedleak.attacks.matching.optimizer import (
    Descent,
    MatchingConfig,
    best_of_each,
    constant,
    cosine_to_zero,
    linear,
    stepwise,
)
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

SCHEDULES = {
    "constant": constant,
    "stepwise": stepwise(0.5, 3),
    "linear": linear(2.0),
    "cosine": cosine_to_zero,
}
FACTORS = {
    "constant": lambda step: 1.0,
    "stepwise": lambda step: 0.5 ** (step // 3),
    "linear": lambda step: 1 - step / 20,
    "cosine": lambda step: (1 + torch.tensor(torch.pi * step / 10).cos().item()) / 2,
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("clip", [None, 0.3])
def test_rows_together_go_where_each_goes_alone_under_plain_adam(schedule, clip):
    rng = stream(0, "descent")
    start = torch.randn(3, 2, 4, 5, generator=rng, dtype=torch.float64)
    matrix = torch.randn(3, 40, 40, generator=rng, dtype=torch.float64)

    def loss_of(x, r):
        return ((matrix[r] @ x.flatten()).tanh() ** 2).sum() * (1.0, 0.01, 3.0)[r]

    config = MatchingConfig(
        steps=10,
        step_size=0.1,
        schedule=SCHEDULES[schedule],
        clip=clip,
        weight_decay=0.02,
        epsilon=1e-6,
    )
    descent = Descent(start, config)
    losses = [
        descent.step(lambda x: torch.stack([loss_of(x[r], r) for r in range(3)])) for _ in range(10)
    ]
    for r in range(3):
        x = start[r].clone().requires_grad_()
        adam = torch.optim.AdamW([x], lr=1.0, eps=1e-6, weight_decay=0.02)
        for step in range(10):
            adam.param_groups[0]["lr"] = 0.1 * FACTORS[schedule](step)
            adam.zero_grad()
            loss = loss_of(x, r)
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_([x], clip)
            adam.step()
            torch.testing.assert_close(losses[step][r], loss.detach(), rtol=1e-6, atol=0)
        torch.testing.assert_close(descent.now()[r], x.detach(), rtol=1e-6, atol=1e-7)


def parabola(x):
    return x.square().flatten(1).sum(1)


def test_rows_that_go_on_keep_their_memory():
    start = torch.randn(4, 1, 2, 3, generator=stream(0, "start"), dtype=torch.float64)
    config, chosen = (
        MatchingConfig(steps=20, step_size=0.1, schedule=linear(1.0)),
        torch.tensor([3, 1]),
    )
    all_of, some = Descent(start, config), Descent(start, config)
    for _ in range(5):
        all_of.step(parabola)
        some.step(parabola)
    some.take_(chosen)
    assert torch.equal(some.now(), all_of.now()[chosen])
    for _ in range(5):
        all_of.step(parabola)
        some.step(parabola)
    assert torch.equal(some.now(), all_of.now()[chosen])


def test_a_changed_start_goes_on_with_the_memory_it_is_told():
    start = torch.ones(2, 1, 1, 2, dtype=torch.float64)
    config = MatchingConfig(steps=20, step_size=0.1, schedule=constant)
    kept, cleared = Descent(start, config), Descent(start, config)
    for descent in (kept, cleared):
        for _ in range(3):
            descent.step(parabola)
    before = kept.now().clone()
    kept.change_(lambda variables: variables + 1)
    assert torch.equal(kept.now(), before + 1)
    cleared.change_(lambda variables: variables + 1, torch.zeros_like)
    for descent in (kept, cleared):  # without a gradient, only memory moves it
        descent.step(lambda variables: 0 * parabola(variables))
    assert (kept.now() - before - 1).abs().min() > 1e-3
    assert torch.equal(cleared.now(), before + 1)


def test_a_row_whose_loss_is_not_a_number_takes_no_other_with_it():
    start = torch.ones(2, 1, 1, 2)
    alone, both = (
        Descent(start[1:], MatchingConfig(steps=9, step_size=0.1, schedule=constant)),
        Descent(start, MatchingConfig(steps=9, step_size=0.1, schedule=constant)),
    )
    for _ in range(3):
        alone.step(parabola)
        loss = both.step(lambda x: parabola(x) * torch.tensor([torch.nan, 1.0]))
    assert loss.isnan().tolist() == [True, False]
    assert torch.equal(both.now()[1], alone.now()[0])
    assert torch.equal(both.now()[0], start[0])


def test_the_best_row_of_each_victim_is_that_of_the_lowest_loss():
    ids = torch.arange(5)[:, None, None]
    loss = torch.tensor([3.0, torch.nan, 1.0, torch.inf, 2.0])
    best_rows = best_of_each(torch.tensor([0, 1, 0, 1, 1]), ids, loss)
    assert [(row.row_index, row.loss, int(row.ids_BT)) for row in best_rows] == [
        (2, 1.0, 2),
        (4, 2.0, 4),
    ]
    (nothing,) = best_of_each(torch.tensor([0, 0]), ids, torch.tensor([torch.nan, torch.inf]))
    assert nothing.row_index == 1
