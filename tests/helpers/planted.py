"""Canaries' rows, and bugs of DP-SGD, as more than one module of tests needs them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping

from fedleak.defenses.clip import clipped
from fedleak.defenses.dp_sgd import DpSgd
from fedleak.defenses.gaussian_noise import with_noise
from fedleak.defenses.local_dp import LocalDp
from fedleak.store.records import CanaryRow
from fedleak.training import private_steps
from fedleak.training.batches import round_batch
from fedleak.training.observation import ClientUpdate
from fedleak.training.planted import DUMMIES
from fedleak.training.privacy.accounting import Event

Plant = Callable[[pytest.MonkeyPatch], object]
Shapes = Mapping[str, torch.Size]
Noise = Callable[[Shapes, torch.Generator], dict[str, torch.Tensor]]


def canary_row(client: int, round: int = 1, **changes: Any) -> CanaryRow:
    """Returns a row of two canaries, of which the first is in."""
    row: dict[str, Any] = {
        "round": round,
        "client": client,
        "slot": 0,
        "audited_copy": False,
        "whole": False,
        "rate": None,
        "steps": 1,
        "uses": 1,
        "numbers": 100,
        "noise_share": 1.0,
        "inside": (True, False),
        "scores": (1.0, 0.0),
        "witnesses": (),
    }
    return CanaryRow(**row | changes)


def long_texts_clipped_less(patch: pytest.MonkeyPatch) -> None:
    """Lets a text of more than 14 tokens move a step by four clipping norms."""
    original = private_steps._clipped_records_

    def clipped_records_(model: Any, records: Any, *rest: Any) -> Any:
        most_R = torch.tensor([4.0 if len(text) > 14 else 1.0 for text in records[0]])
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                private_steps,
                "clipping_factors",
                lambda norms_R, most: (most_R * most / (norms_R + 1e-6)).clamp(max=1.0),
            )
            return original(model, records, *rest)

    patch.setattr(private_steps, "_clipped_records_", clipped_records_)


def clipping_of_the_mean(patch: pytest.MonkeyPatch) -> None:
    """Clips the mean of a batch, canaries and all, in place of each gradient.

    Frameworks without gradients of single examples do so.
    """

    def clipped_sum_(
        model: Any, batch: Any, planted: Any, hooks: Any, optimizer: Any, ghost: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(
                private_steps, "clipping_factors", lambda norms_R, most: torch.ones_like(norms_R)
            )
            norms, _ = private_steps._clipped_records_(model, batch, None, hooks, optimizer, ghost)
        sums = {name: p.summed_grad for name, p in model.trained().items()}
        records = len(norms)
        if planted is not None:
            records += int(planted.in_step.sum())
            planted.add_(sums, torch.ones(DUMMIES))
        whole = torch.stack([value.norm() for value in sums.values()]).norm()
        for value in sums.values():
            value *= min(1.0, optimizer.max_grad_norm * records / max(float(whole), 1e-30))
        return norms, whole

    patch.setattr(private_steps, "clipped_sum_", clipped_sum_)


def other_noise(noise: Noise) -> Plant:
    """Draws the noise of `gaussian_noise` and `local_dp` otherwise."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        def with_noise(update: ClientUpdate, sigma: float, rng: torch.Generator) -> ClientUpdate:
            noises = noise({name: value.shape for name, value in update.tensors.items()}, rng)
            noisy = {name: value + sigma * noises[name] for name, value in update.tensors.items()}
            return replace(update, tensors=noisy)

        patch.setattr("fedleak.defenses.gaussian_noise.with_noise", with_noise)
        patch.setattr("fedleak.defenses.local_dp.with_noise", with_noise)

    plant.__name__ = noise.__name__
    return plant


def other_sampler(patch: pytest.MonkeyPatch, sampler: Callable[..., list[int]]) -> None:
    """Draws the records of a round otherwise, in a run and in the check."""
    for module in ("fedleak.audit.defense_checks.sampling", "fedleak.flower.client.app"):
        patch.setattr(f"{module}.round_batch", sampler)


# --- ten bugs that were made up after all tests -------------------------------------------------


def after_noise(patch: pytest.MonkeyPatch, change: Callable[[Any], None]) -> None:
    """Lets something be done to an optimizer that has added noise."""
    for optimizer in (DPOptimizer, DPOptimizerFastGradientClipping):
        original = optimizer.add_noise

        def add_noise(self: Any, original: Callable[[Any], None] = original) -> None:
            original(self)
            change(self)

        patch.setattr(optimizer, "add_noise", add_noise)


def noise_that_cancels_over_local_steps(patch: pytest.MonkeyPatch) -> None:
    """Takes the noise of the step before out again: of all steps the noise of the last is left."""
    before: dict[torch.Generator, list[torch.Tensor]] = {}

    def change(optimizer: Any) -> None:
        noises = [p.grad - p.summed_grad for p in optimizer.params]
        for p, less in zip(optimizer.params, before.get(optimizer.generator, []), strict=False):
            p.grad -= less
        before[optimizer.generator] = noises

    after_noise(patch, change)


def no_noise_on_the_smallest_tensor(patch: pytest.MonkeyPatch) -> None:
    """As where a layer was added to the model and not to the optimizer."""

    def change(optimizer: Any) -> None:
        smallest = min(optimizer.params, key=torch.Tensor.numel)
        smallest.grad = smallest.summed_grad.clone()

    after_noise(patch, change)


def clipping_to_the_median_of_a_batch(patch: pytest.MonkeyPatch) -> None:
    """Where the median is longer than what is announced."""

    def clipping_factors(norms_R: torch.Tensor, most: float) -> torch.Tensor:
        return (max(most, float(norms_R.median())) / (norms_R + 1e-6)).clamp(max=1.0)

    patch.setattr(private_steps, "clipping_factors", clipping_factors)


def a_mean_over_those_who_were_drawn(patch: pytest.MonkeyPatch) -> None:
    """Divides by how many were drawn, which is private."""
    original = private_steps.private_gradient

    def private_gradient(model: Any, batch: Any, expected: int, *rest: Any, **more: Any) -> Any:
        return original(model, batch, max(1, len(batch.sequences)), *rest, **more)

    patch.setattr(private_steps, "private_gradient", private_gradient)


def the_same_batch_in_every_round(patch: pytest.MonkeyPatch) -> None:
    """As with a generator that is seeded anew."""
    other_sampler(patch, lambda *args, **which: round_batch(*args, **which | {"round": 1}))


def a_record_twice_in_a_step(patch: pytest.MonkeyPatch) -> None:
    """As with a list of files that names one of them twice."""

    def sampler(*args: Any, **which: Any) -> list[int]:
        drawn = round_batch(*args, **which)
        return drawn[:1] + drawn

    other_sampler(patch, sampler)


def a_step_more_than_is_counted(patch: pytest.MonkeyPatch) -> None:
    """As where the last batch is rounded down."""
    original = DpSgd.event

    def event(self: Any, *about: Any) -> Event:
        counted = original(self, *about)
        return replace(counted, steps=max(1, counted.steps - 1))

    patch.setattr(DpSgd, "event", event)


def noise_before_clipping(patch: pytest.MonkeyPatch) -> None:
    """Clips what is noisy already."""

    def call(self: Any, update: ClientUpdate, *, rng: torch.Generator) -> ClientUpdate:
        return clipped(with_noise(update, self._sigma, rng), self.max_norm)

    patch.setattr(LocalDp, "__call__", call)


def twelve_uniform_numbers(shapes: Shapes, rng: torch.Generator) -> dict[str, torch.Tensor]:
    """Draws the sum of twelve uniform numbers, the normal distribution of old libraries."""
    return {
        name: torch.rand((12, *shape), generator=rng).sum(0) - 6 for name, shape in shapes.items()
    }


def every_second_number_is_minus_the_first(
    shapes: Shapes, rng: torch.Generator
) -> dict[str, torch.Tensor]:
    """Draws pairs of opposite numbers."""
    noises = {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    for value in noises.values():
        pairs = value.view(-1)[: value.numel() // 2 * 2].view(-1, 2)
        pairs[:, 1] = -pairs[:, 0]
    return noises


DP_SGD = {"kind": "dp_sgd", "noise_multiplier": 1.0, "max_grad_norm": 0.5}
LOCAL_DP = {"kind": "local_dp", "max_norm": 0.5, "noise_multiplier": 0.01}
LOCAL_STEPS = {"federation": {"algorithm": "fedavg", "rounds": 4, "batch_size": 8}}
FRESH: list[tuple[dict[str, Any], Plant, dict[str, Any]]] = [
    (DP_SGD, noise_that_cancels_over_local_steps, LOCAL_STEPS),
    (DP_SGD, no_noise_on_the_smallest_tensor, {}),
    (DP_SGD, clipping_to_the_median_of_a_batch, {}),
    (DP_SGD, a_mean_over_those_who_were_drawn, {}),
    (DP_SGD, the_same_batch_in_every_round, {}),
    (DP_SGD, a_record_twice_in_a_step, {}),
    (DP_SGD, a_step_more_than_is_counted, LOCAL_STEPS),
    (LOCAL_DP, noise_before_clipping, {}),
    (LOCAL_DP, other_noise(twelve_uniform_numbers), {}),
    (LOCAL_DP, other_noise(every_second_number_is_minus_the_first), {}),
]
"""Each with its defense, and what a run that shows it has beside the others."""
