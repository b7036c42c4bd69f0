"""Where canaries are, what they score, and how they enter steps."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleHooksFastGradientClipping,
)
from scipy.stats import kstest

from fedleak.models import CLASSIFICATION
from fedleak.training import private_steps
from fedleak.training.batches import Records, round_batch
from fedleak.training.observation import UpdateKind
from fedleak.training.planted import Planted
from fedleak.training.privacy.canaries import Canaries, scores
from fedleak.training.private_steps import Seen, private_gradient
from fedleak.training.settings import LocalTraining, PrivateSteps
from fedleak.training.steps import Batch
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

SIZES = {"a": 77, "b": 5000, "c": 3, "d": 40001, "e": 1}


def zeros():
    return {name: torch.zeros(size) for name, size in SIZES.items()}


@pytest.mark.parametrize("count", [1, 3, 10, 150])
def test_every_canary_has_numbers_of_its_own_all_over_the_update(count):
    canaries = Canaries(SIZES, count, seed=5)
    values_SK = np.arange(1, canaries.numbers * count + 1, dtype=np.float32).reshape(-1, count)
    update = zeros()
    canaries.add_(update, values_SK)
    assert np.array_equal(canaries.taken(update), values_SK)
    flat_update = torch.cat([update[name] for name in sorted(SIZES)])
    assert sorted(flat_update[flat_update != 0].tolist()) == values_SK.reshape(-1).tolist()
    places = flat_update.nonzero()[:, 0]
    assert int(places[-1] - places[0]) > 0.5 * len(flat_update) - count


def test_a_transposed_tensor_takes_them_too():
    canaries = Canaries({"a": 600}, 2, seed=0)
    turned = torch.zeros(20, 30).mT
    values_SK = canaries.directions()
    canaries.add_({"a": turned}, values_SK)
    assert np.array_equal(canaries.taken({"a": turned}), values_SK)


def test_directions_have_norm_1_and_depend_on_the_seed_alone():
    directions, same, other = (Canaries(SIZES, 20, seed).directions() for seed in (1, 1, 2))
    assert np.allclose(np.linalg.norm(directions, axis=0), 1)
    assert np.array_equal(directions, same)
    assert not np.array_equal(directions, other)


def test_out_scores_are_normal_whatever_the_update_is():
    """Heavy tails and zeros, as gradients have them."""
    rng = torch.Generator().manual_seed(0)
    out_scores = []
    for seed in range(20):
        canaries = Canaries({"a": 100_000}, 100, seed)
        heavy = torch.randn(100_000, generator=rng) / torch.rand(100_000, generator=rng)
        heavy[torch.rand(100_000, generator=rng) < 0.3] = 0.0
        out_scores += canaries.score({"a": heavy}).tolist()
    assert kstest(out_scores, "norm").pvalue > 0.01
    assert abs(np.std(out_scores) - 1) < 4 / math.sqrt(2 * len(out_scores))


def test_a_score_is_the_cosine_on_the_numbers_that_are_left():
    values_SK = np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 0.0], [-1.0, 0.0]])
    directions_SK = np.array([[0.5, 1.0], [0.5, 0.0], [0.5, 0.0], [0.5, 0.0]])
    expected = math.sqrt(3) * (2 * 0.5) / (math.sqrt(6) * math.sqrt(0.75))
    assert scores(values_SK, directions_SK).tolist() == pytest.approx([expected, 0.0])


DUMMIES = Batch([[7, 8], [5, 6, 7, 8, 9, 10]], [1, 0])


def planted_in(model, *, norms=(5.0, 2.0), count=8):
    sizes = {name: value.numel() for name, value in model.parameters().items()}
    coins_K = torch.tensor([True, True, False, False] * (count // 4))
    records = Records(2, count, False)
    return Planted(Canaries(sizes, count, seed=3), coins_K, DUMMIES, norms, records)


def step_with(model, batch, planted, takes_part_K, most, ghost):
    private, seen = PrivateSteps(0.0, most, "fixed"), Seen()
    in_step = planted and replace(planted, drawn_K=takes_part_K)
    gradient = private_gradient(
        model, batch, 2, private, stream(0, "noise"), seen, ghost=ghost, planted=in_step
    )
    return gradient, seen.figures()


@pytest.mark.parametrize("ghost", [False, True])
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_canary_is_clipped_and_summed_as_one_more_example(small, family, ghost):
    model = small(family, CLASSIFICATION)
    batch = Batch([[5, 6, 7], [8, 9]], [0, 1])
    planted, takes_part_K = planted_in(model), torch.tensor([True] * 4 + [False] * 4)
    most = 0.5
    with_canaries, seen = step_with(model, batch, planted, takes_part_K, most, ghost)
    without, seen_without = step_with(model, batch, None, None, most, ghost)
    expected = {name: torch.zeros_like(value) for name, value in without.items()}
    in_and_there = np.array([1.0, 1, 0, 0, 0, 0, 0, 0])
    planted.canaries.add_(expected, planted.canaries.directions() * in_and_there * most / 2)
    for name, value in with_canaries.items():
        assert torch.allclose(value - without[name], expected[name], atol=1e-6)
    assert seen == pytest.approx(seen_without), "the client's own figures are about its examples"


def test_no_clipping_shows_the_norms(small, monkeypatch):
    model = small("bert", CLASSIFICATION)
    planted, all_K = planted_in(model), torch.ones(8, dtype=torch.bool)
    monkeypatch.setattr(private_steps, "clipping_factors", lambda norms, most: norms / norms)
    gradient, _ = step_with(model, Batch([], []), planted, all_K, 0.5, False)
    norms_K = np.linalg.norm(planted.canaries.taken(gradient), axis=0)
    assert norms_K.tolist() == pytest.approx([2.5, 1.0, 0, 0] * 2, abs=1e-5)


@pytest.mark.parametrize("ghost", [False, True])
def test_a_norm_that_leaves_out_the_embedding_is_seen(small, monkeypatch, ghost):
    """The norm of a canary is taken where that of an example is."""
    model = small("bert", CLASSIFICATION)
    planted, all_K = planted_in(model), torch.ones(8, dtype=torch.bool)
    embedding = model.module.get_input_embeddings().weight
    if ghost:
        original = GradSampleHooksFastGradientClipping.get_norm_sample

        def get_norm_sample(hooks):
            embedding._norm_sample.zero_()
            return original(hooks)

        monkeypatch.setattr(GradSampleHooksFastGradientClipping, "get_norm_sample", get_norm_sample)
    else:
        put = Planted.put_

        def put_(self, gradients):
            put(self, gradients)
            embedding.grad_sample[-2:] *= 1e-3

        monkeypatch.setattr(Planted, "put_", put_)
    gradient, _ = step_with(model, Batch([[5, 6]], [0]), planted, all_K, 0.5, ghost)
    without, _ = step_with(model, Batch([[5, 6]], [0]), None, None, 0.5, ghost)
    apart = {name: value - without[name] for name, value in gradient.items()}
    norms_K = np.linalg.norm(planted.canaries.taken(apart), axis=0)
    assert min(norms_K[:2]) > 0.3, "0.25 is what clipping leaves of each"


def test_an_empty_batch_has_canaries_still(small):
    model = small("bert", CLASSIFICATION)
    planted, all_K = planted_in(model), torch.ones(8, dtype=torch.bool)
    gradient, _ = step_with(model, Batch([], []), planted, all_K, 0.5, True)
    norms_K = np.linalg.norm(planted.canaries.taken(gradient), axis=0)
    assert norms_K.tolist() == pytest.approx([0.25, 0.25, 0, 0] * 2, abs=1e-6)


def test_canaries_of_local_steps_are_drawn_as_examples_are():
    """With batches of a pass each is in one step of it; sampled, in as many as an example is."""
    plain = LocalTraining(
        kind=UpdateKind.DELTA, batch_size=3, epochs=400, learning_rate=0.1, dropout=False
    )
    for sampling in ("fixed", "poisson"):
        private = replace(plain, private=PrivateSteps(1.0, 1.0, sampling))
        records = Records(6, 10, private.poisson)
        steps = list(records.training(private).batches(records.count, seed=0))
        assert len(steps) == plain.steps(6) == 800
        examples = torch.zeros(800, 6)
        for step, drawn in enumerate(steps):
            examples[step, records.drawn_examples(drawn)] = 1
        canaries = torch.stack([records.drawn_canaries(drawn) for drawn in steps]).float()
        if sampling == "fixed":
            assert canaries.view(400, 2, 10).sum(1).eq(1).all()
            assert torch.equal(canaries[:, :6], examples)
            assert examples.sum(1).eq(3).all(), "batches are as large as without canaries"
            continue
        for shares in (canaries.mean(0), examples.mean(0)):
            assert float((shares - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(800)
        apart = torch.corrcoef(torch.cat([canaries, examples], dim=1).T) - torch.eye(16)
        assert float(apart.abs().max()) < 5 / math.sqrt(800), "each by itself"


def test_examples_of_a_round_are_the_same_with_canaries():
    sampled = LocalTraining(
        kind=UpdateKind.GRADIENT,
        batch_size=3,
        epochs=1,
        learning_rate=0.1,
        dropout=False,
        private=PrivateSteps(1.0, 1.0, "poisson"),
    )
    records = Records(10, 64, True)
    for round in range(1, 40):
        which = {"seed": 3, "client": 1, "round": round}
        drawn = round_batch(records.count, records.training(sampled), **which)
        assert records.drawn_examples(drawn) == round_batch(10, sampled, **which)
