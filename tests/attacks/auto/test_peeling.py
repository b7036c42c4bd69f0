"""What is left of an update when proved sequences are taken out."""

from dataclasses import replace

import pytest
import torch

from fedleak.attacks.auto.peeling import occurrences, peel
from fedleak.attacks.certificate import Member
from fedleak.models import CAUSAL_LM, CLASSIFICATION
from fedleak.training.observation import UpdateKind

pytestmark = pytest.mark.core

TEXTS = ("she told us that", "nobody knows it", "he pays for all of his old friends")
KINDS = [("bert", CLASSIFICATION), ("gpt2", CAUSAL_LM), ("llama", CAUSAL_LM)]


def members_of(model, truth, which):
    """Returns sequences of a batch as a certificate has them."""
    members = []
    targets = sum(len(ids) - 1 for ids in truth.sequences)
    for i in which:
        ids, label = truth.sequences[i], truth.labels[i]
        if model.task == CLASSIFICATION:
            counts = tuple(int(c == label) for c in range(model.num_labels))
            members.append(Member(ids, 1 / len(truth.sequences), counts))
        else:
            members.append(Member(ids[:-1], (len(ids) - 1) / targets, None))
    return members


@pytest.mark.parametrize("kind", list(UpdateKind))
@pytest.mark.parametrize("built", KINDS, ids="-".join)
def test_what_is_left_is_the_update_of_the_others(small, observe, built, kind):
    model = small(*built)
    labels = [0, 1, 2]
    granted = ("labels", "lengths", "batch_size")
    truth = observe(model, TEXTS, labels, granted=granted, kind=kind)
    left = peel(truth.seen, model, members_of(model, truth, [1]))
    others = [model.decode(truth.sequences[i]) for i in (0, 2)]
    alone = observe(model, others, [truth.labels[i] for i in (0, 2)], granted=granted)
    assert alone.sequences == [truth.sequences[i] for i in (0, 2)]
    assert left.update.num_examples == 2
    assert left.knowledge == alone.seen.knowledge
    for name, value in alone.seen.update.tensors.items():
        scale = max(float(value.norm()), 1e-3)
        assert float((left.update.tensors[name] - value).norm()) < 1e-3 * scale


def test_a_factor_on_the_update_is_none_on_what_is_left(small, observe):
    model = small("bert")
    truth = observe(model, TEXTS)
    tensors = {name: 0.3 * value for name, value in truth.seen.update.tensors.items()}
    seen = replace(truth.seen, update=replace(truth.seen.update, tensors=tensors))
    members = members_of(model, truth, [1])
    left, plain = peel(seen, model, members, 0.3), peel(truth.seen, model, members)
    for name, value in plain.update.tensors.items():
        assert torch.allclose(left.update.tensors[name], value, atol=1e-5)


def test_a_text_that_occurs_twice_is_taken_out_twice(small, observe):
    model = small("bert")
    truth = observe(model, [TEXTS[1], TEXTS[1], TEXTS[2]], [1, 0, 1])  # longest first
    twice = Member(truth.sequences[1], 2 / 3, (1, 1, 0))
    left = peel(truth.seen, model, [twice])
    alone = observe(model, [TEXTS[2]], [1])
    assert left.update.num_examples == 1
    for name, value in alone.seen.update.tensors.items():
        assert torch.allclose(left.update.tensors[name], value, atol=1e-5)


def test_nothing_is_left_of_a_batch_that_is_proved(small, observe):
    model = small("bert")
    truth = observe(model, TEXTS)
    assert peel(truth.seen, model, members_of(model, truth, [0, 1, 2])) is None


@pytest.mark.parametrize(("client", "times"), [(0, [2, 1, 1]), (-1, [1, 1, 1])])
def test_a_text_of_a_sum_that_weighs_more_than_others_occurs_once(small, observe, client, times):
    model = small("gpt2", CAUSAL_LM)
    truth = observe(model, ["on it", "at it", "by it"])
    texts = [ids[:-1] for ids in truth.sequences]
    assert len({len(ids) for ids in texts}) == 1
    shares = (1 / 2, 1 / 4, 1 / 4)
    members = [Member(ids, share, None) for ids, share in zip(texts, shares, strict=True)]
    assert occurrences(model, members, replace(truth.seen, client=client)) == times
