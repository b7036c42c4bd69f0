from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fedleak import models
from fedleak.attacks import Setting
from fedleak.attacks.dlg import Dlg, _lengths, gradient_of, l2_distance, nearest_tokens
from fedleak.models import CLASSIFICATION, ModelSpec, pad
from fedleak.models.lora import Lora
from fedleak.reconstruction import Status
from fedleak.streams import stream
from fedleak.training import share

FAMILIES = ["bert", "gpt2"]


@pytest.fixture(params=[*FAMILIES, "llama"])
def at_truth(request, small, observe):
    """The observed gradients, and the dummy inputs that are the true ones."""
    model = small(request.param)
    truth = observe(model, ["It is over.", "She told me that it is over.", "Nobody knows."])
    update = truth.seen.update.tensors
    names = [name for name in update if name != model.family.word_embedding]
    ids, mask = pad(truth.sequences, model.tokenizer.pad_token_id, model.device)
    embeds = model.module.get_parameter(model.family.word_embedding).detach()[ids]
    classes = F.one_hot(torch.tensor(truth.labels), model.num_labels).float()
    return (
        model,
        [update[name] for name in names],
        [model.module.get_parameter(name) for name in names],
        embeds,
        mask,
        classes,
    )


def distance(model, target, matched, embeds, mask, classes):
    return l2_distance(gradient_of(model, matched, embeds, mask, classes), target).detach()


def test_at_the_true_embeddings_the_gradient_is_the_client_s(at_truth):
    model, target, matched, embeds, mask, classes = at_truth
    found = gradient_of(model, matched, embeds, mask, classes)
    scale = max(float(t.abs().max()) for t in target)
    for ours, theirs in zip(found, target, strict=True):
        torch.testing.assert_close(ours / scale, theirs / scale, atol=1e-5, rtol=0)
    norm = l2_distance(target, [torch.zeros_like(t) for t in target])
    assert distance(*at_truth) < 1e-9 * norm


@pytest.mark.parametrize("what", ["embeds", "labels"])
def test_anywhere_else_the_distance_is_larger(at_truth, what):
    model, target, matched, embeds, mask, classes = at_truth
    rng = stream(0, "perturb")
    last = float(distance(*at_truth))
    for size in (0.01, 0.1, 0.5):
        if what == "embeds":
            moved = embeds + size * embeds.std() * torch.randn(embeds.shape, generator=rng)
            now = float(distance(model, target, matched, moved, mask, classes))
        else:
            soft = (1 - size) * classes + size / model.num_labels
            now = float(distance(model, target, matched, embeds, mask, soft))
        assert now > 2 * last
        last = now


def test_padding_of_the_dummy_does_not_count(at_truth):
    model, target, matched, embeds, mask, classes = at_truth
    assert (mask == 0).any()
    moved = embeds + (mask == 0)[..., None] * torch.randn_like(embeds)
    norm = l2_distance(target, [torch.zeros_like(t) for t in target])
    assert distance(model, target, matched, moved, mask, classes) < 1e-9 * norm


def test_the_slope_of_the_distance_is_that_of_finite_differences(at_truth):
    model, target, matched, embeds, mask, classes = at_truth
    if model.family.model_type == "llama":
        pytest.skip("transformers computes its RMSNorm in float32, whatever the weights are")
    model.module.double()
    target = [t.double() for t in target]
    rng = stream(0, "directions")
    here = (embeds + 0.3 * torch.randn(embeds.shape, generator=rng)).double()
    logits = torch.randn(classes.shape, generator=rng, dtype=torch.float64)

    def value(embeds, logits):
        return l2_distance(gradient_of(model, matched, embeds, mask, logits.softmax(-1)), target)

    here.requires_grad_()
    logits.requires_grad_()
    slopes = torch.autograd.grad(value(here, logits), [here, logits])
    for _ in range(3):
        along = [torch.randn(x.shape, generator=rng, dtype=torch.float64) for x in slopes]
        step = 1e-5
        ahead, behind = (
            float(value(here + s * along[0], logits + s * along[1]).detach()) for s in (step, -step)
        )
        exact = float(sum((a * b).sum() for a, b in zip(slopes, along, strict=True)))
        assert (ahead - behind) / (2 * step) == pytest.approx(exact, rel=1e-5)


def test_the_nearest_token_is_that_of_the_largest_cosine():
    rng = stream(0, "table")
    table = torch.randn(50, 8, generator=rng)
    ids = torch.randint(50, (2, 5), generator=rng)
    scaled = table[ids] * (0.1 + torch.rand(2, 5, 1, generator=rng))
    assert torch.equal(nearest_tokens(scaled, table), ids)
    x = torch.randn(2, 5, 8, generator=rng)
    slow = [
        [
            max(range(50), key=lambda v: float(F.cosine_similarity(one, table[v], dim=0)))
            for one in row
        ]
        for row in x
    ]
    assert nearest_tokens(x, table).tolist() == slow


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("granted", [(), ("lengths",), ("lengths", "labels")])
def test_lengths_are_the_granted_ones_or_the_longest_for_each(small, observe, family, granted):
    model = small(family)
    truth = observe(model, 3, granted=granted)
    lengths = tuple(map(len, truth.sequences))
    expected = lengths if granted else (max(lengths),) * 3
    assert _lengths(truth.seen, model) == expected
    answer = Dlg(steps=2)(truth.seen, model, rng=stream(0, "dlg"))
    assert tuple(map(len, answer.sequences)) == expected


def obstacle(model, seen, patterns):
    update = share(seen.update, patterns)
    return Dlg().obstacle(Setting.of(replace(seen, update=update), model))


def test_positions_are_asked_for_where_they_can_be_sent(small, observe):
    """An adapted model never sends them, whatever is shared, and a rotary one has none."""
    whole, rotary = small("bert"), small("llama")
    adapted = models.load(ModelSpec("builtin/bert-tiny", CLASSIFICATION, 2, lora=Lora(2, 4.0)))
    needed, position = "'lengths' to threat.knows", "position_embeddings.weight to update.share"
    for patterns in (["*"], ["classifier"], ["lora_"]):
        seen = observe(adapted, 1).seen
        assert obstacle(adapted, seen, patterns).endswith(needed)
        assert obstacle(adapted, observe(adapted, 1, granted=["lengths"]).seen, patterns) is None
    assert obstacle(rotary, observe(rotary, 1).seen, ["*"]).endswith(needed)
    assert obstacle(rotary, observe(rotary, 1, granted=["lengths"]).seen, ["*"]) is None
    said = obstacle(whole, observe(whole, 1).seen, ["classifier"])
    assert needed in said
    assert said.endswith(position)
    assert obstacle(whole, observe(whole, 1).seen, ["*"]) is None


def test_a_rotary_model_is_attacked_with_granted_lengths(small, observe):
    model = small("llama")
    truth = observe(model, 2, granted=("lengths",))
    answer = Dlg(steps=2)(truth.seen, model, rng=stream(0, "dlg"))
    assert tuple(map(len, answer.sequences)) == tuple(map(len, truth.sequences))


def test_more_steps_come_nearer_and_a_short_text_is_found(small, observe):
    model = small("bert")
    truth = observe(model, 1, granted=("lengths", "labels"), max_length=4)

    def after(steps):
        return Dlg(steps=steps, step_size=0.1)(truth.seen, model, rng=stream(0, "dlg"))

    few, many = after(1), after(250)
    assert many.status == Status.RECOVERED
    assert many.diagnostics["relative_loss"] < 0.1 * few.diagnostics["relative_loss"]
    assert many.sequences == tuple(truth.sequences)
