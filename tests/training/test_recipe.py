"""Clients as people run them: each step is the one that torch and transformers make."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from fedleak.models import CAUSAL_LM, CLASSIFICATION, pad
from fedleak.training.batches import round_batch
from fedleak.training.local import local_update_
from fedleak.training.observation import UpdateKind
from fedleak.training.private_steps import Seen, private_gradient
from fedleak.training.recipe import Recipe, Schedule
from fedleak.training.settings import LocalTraining, PrivateSteps
from fedleak.training.steps import Batch, gradient
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

FEDAVG = LocalTraining(
    kind=UpdateKind.DELTA, batch_size=2, epochs=2, learning_rate=0.01, dropout=False
)
LABELS = [0, 1, 2, 2, 0]
RECIPES = {
    "momentum": (Recipe(momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9)),
    "sgd-decay": (Recipe(weight_decay=0.1), lambda p: torch.optim.SGD(p, 0.01, weight_decay=0.1)),
    "adam": (Recipe(optimiser="adam"), lambda p: torch.optim.Adam(p, lr=0.01)),
    "adamw": (
        Recipe(optimiser="adamw", weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    ),
}


def batches(steps):
    """The examples of two passes of five, drawn as a client draws them."""
    order = stream(5, "order")
    passes = [torch.randperm(5, generator=order).tolist() for _ in range(2)]
    return [p[start : start + 2] for p in passes for start in (0, 2, 4)][:steps]


def own_loop(model, sequences, made, *, clip=None, steps=6, rates=None, precision="float32"):
    """What the loop of a user does, with transformers' own loss."""
    weights = torch.bfloat16 if precision == "bfloat16" else torch.float32
    module, mixed = copy.deepcopy(model.module).to(weights), precision == "bfloat16-mixed"
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimiser = made(module.parameters())
    for number, chosen in enumerate(batches(steps)):
        ids, mask = pad([sequences[i] for i in chosen], model.tokenizer.pad_token_id, model.device)
        causal = model.task == CAUSAL_LM
        targets = torch.tensor([LABELS[i] for i in chosen])
        targets = ids.masked_fill(mask == 0, -100) if causal else targets
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = module(input_ids=ids, attention_mask=mask, labels=targets).loss
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        for group in optimiser.param_groups:
            group["lr"] = group["lr"] if rates is None else rates[number]
        optimiser.step()
    return {name: p.detach().float() - before[name] for name, p in module.named_parameters()}


def assert_same_way(tensors, expected, min_cosine=1 - 1e-4, apart=1e-3):
    """Adam makes whole steps of the rounding of small gradients, so directions are compared.

    A key's bias has no other gradient than rounding.
    """
    assert tensors.keys() == expected.keys()
    names = [name for name in tensors if not name.endswith("c_attn.bias")]
    own, other = (torch.cat([t[name].flatten() for name in names]) for t in (tensors, expected))
    assert torch.cosine_similarity(own, other, 0) > min_cosine
    assert math.isclose(own.norm(), other.norm(), rel_tol=apart)


@pytest.mark.parametrize("task", [CLASSIFICATION, CAUSAL_LM])
@pytest.mark.parametrize("name", RECIPES)
def test_steps_are_those_of_torch(small, texts, name, task):
    model = small("gpt2", task)
    sequences = [ids[: 4 + 2 * i] for i, ids in enumerate(model.encode(texts[:5]))]
    recipe, made = RECIPES[name]
    expected = own_loop(model, sequences, made)
    update = local_update_(model, sequences, LABELS, replace(FEDAVG, recipe=recipe), seed=5)
    assert_same_way(update.tensors, expected)


def test_clipping_schedule_and_fewer_steps_are_those_of_a_trainer(small, texts):
    model = small("gpt2", CLASSIFICATION)
    sequences = model.encode(texts[:5])
    made = RECIPES["adamw"][1]
    rates = [0.01 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(4)]
    training = replace(
        FEDAVG,
        recipe=replace(RECIPES["adamw"][0], max_grad_norm=0.05),
        schedule=Schedule(shape="cosine"),
        max_steps=4,
    ).in_round(1, 5)
    assert training.steps(5) == 4
    assert math.isclose(training.learning_rate, sum(rates) / 4)
    expected = own_loop(model, sequences, made, clip=0.05, steps=4, rates=rates)
    update = local_update_(model, sequences, LABELS, training, seed=5)
    assert_same_way(update.tensors, expected)


@pytest.mark.parametrize("precision", ["bfloat16", "bfloat16-mixed"])
@pytest.mark.parametrize("task", [CLASSIFICATION, CAUSAL_LM])
def test_half_precision_is_that_of_torch(small, texts, task, precision):
    model = small("gpt2", task)
    sequences = model.encode(texts[:5])
    before = {name: p.detach().clone() for name, p in model.module.named_parameters()}
    full = own_loop(model, sequences, lambda p: torch.optim.SGD(p, lr=0.1))
    expected = own_loop(model, sequences, lambda p: torch.optim.SGD(p, lr=0.1), precision=precision)
    training = replace(FEDAVG, learning_rate=0.1, recipe=Recipe(precision=precision))
    tensors = local_update_(model, sequences, LABELS, training, seed=5).tensors
    assert all(value.dtype == torch.float32 for value in tensors.values())
    # A sum in bfloat16 has no one order.
    assert_same_way(tensors, expected, min_cosine=0.99, apart=0.02)
    assert not all(torch.equal(tensors[name], full[name]) for name in full)
    if precision == "bfloat16":  # what was trained were copies
        for name, value in model.module.named_parameters():
            assert torch.equal(value, before[name]), name
            assert value.dtype == torch.float32


@pytest.mark.parametrize("task", [CLASSIFICATION, CAUSAL_LM])
def test_accumulated_passes_make_the_gradient_of_the_whole_step(small, texts, task):
    model = small("gpt2", task)
    sequences = [ids[: 4 + 2 * i] for i, ids in enumerate(model.encode(texts[:5]))]
    whole, parts = (gradient(model, Batch(sequences, LABELS), Recipe(accumulate=n)) for n in (1, 3))
    assert_same_way(parts, whole, min_cosine=1 - 1e-6)


def test_a_schedule_falls_over_rounds_as_flowertune_has_it():
    schedule = Schedule(shape="cosine", final=1e-6, rounds=200)
    for round in (1, 37, 200):
        rate = 1e-6 + 0.5 * (5e-5 - 1e-6) * (1 + math.cos(math.pi * round / 200))
        assert schedule.in_round(5e-5, 3, round, Recipe()) == (pytest.approx(rate), Recipe())
    line = Schedule(shape="linear", final=0.2)
    mean, recipe = line.in_round(1.0, 4, 9, Recipe())
    assert recipe.rates == pytest.approx((1.0, 0.8, 0.6, 0.4))
    assert mean == pytest.approx(0.7)


def test_with_fewer_steps_than_data_a_client_trains_on_other_texts_in_each_round():
    training = replace(FEDAVG, epochs=1, max_steps=3)
    drawn = [round_batch(20, training, seed=0, client=1, round=round) for round in (1, 2)]
    assert [len(set(chosen)) for chosen in drawn] == [6, 6]
    assert drawn[0] != drawn[1]
    assert training.steps(6) == training.steps(20) == 3
    assert round_batch(5, training, seed=0, client=1, round=1) == [0, 1, 2, 3, 4]
    private = replace(training, private=PrivateSteps(1.0, 1.0, "poisson"))
    assert round_batch(20, private, seed=0, client=1, round=1) == list(range(20))


def test_private_gradients_go_through_the_optimiser(small, texts):
    model = small("bert", CLASSIFICATION)
    sequences = model.encode(texts[:5])
    training = replace(
        FEDAVG,
        private=PrivateSteps(0.5, 1.0, "fixed"),
        recipe=Recipe(optimiser="adamw"),
        max_steps=3,
    )
    replica = replace(model, module=copy.deepcopy(model.module))
    before, noise, seen = replica.parameters(), stream(5, "private"), Seen()
    before = {name: value.clone() for name, value in before.items()}
    optimiser = torch.optim.AdamW(replica.trained().values(), lr=0.01, weight_decay=0)
    for chosen in training.batches(5, 5):
        batch = Batch(sequences, LABELS).of(chosen)
        step = private_gradient(replica, batch, 2, training.private, noise, seen)
        for name, parameter in replica.trained().items():
            parameter.grad = step[name]
        optimiser.step()
    tensors = local_update_(model, sequences, LABELS, training, seed=5).tensors
    assert seen.steps == 3
    for name, value in replica.parameters().items():
        assert torch.equal(tensors[name], value - before[name])
