"""Batches with dropout: the masks of inputs, repeated words, whole texts, and what ends it."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from fedleak.attacks import certificate
from fedleak.attacks.auto.attack import Auto
from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.attacks.reconstruction import Status
from fedleak.attacks.subspace import dropped_inputs
from fedleak.attacks.subspace.dropped_inputs import find_inputs, kept, read_dropped
from fedleak.attacks.subspace.keyspan import Keyspan
from fedleak.attacks.subspace.span import row_space
from fedleak.util.rng import stream

TEXTS = ("the old man sold it", "the children left it here", "she told the man")
"""Some words stand at one place in several texts, some at several places."""


@pytest.fixture
def model(small):
    return small("bert", width=192, layers=2)


@pytest.fixture
def truth(model, observe):
    return observe(model, TEXTS, dropout=True)


def with_dropout(x_ND, rate=0.1):
    mask_ND = (torch.rand(x_ND.shape, generator=stream(0, "masks")) > rate).double()
    return x_ND * mask_ND / (1 - rate), mask_ND


def span_of(x_ND):
    rng = stream(0, "weights")
    return row_space([torch.randn(96, len(x_ND), generator=rng, dtype=torch.float64) @ x_ND])


def test_masks_are_told_to_the_last_number():
    x_ND = torch.randn(40, 128, generator=stream(0, "inputs"), dtype=torch.float64)
    dropped_ND, mask_ND = with_dropout(x_ND)
    kept_ND, inside_N = kept(x_ND, span_of(dropped_ND[:20]), torch.ones_like(x_ND))
    assert inside_N.tolist() == [True] * 20 + [False] * 20
    assert torch.equal(kept_ND[:20], mask_ND[:20])


def test_a_number_in_which_all_inputs_are_large_is_told_as_well():
    x_ND = torch.randn(20, 128, generator=stream(0, "inputs"), dtype=torch.float64)
    x_ND[:, 7] *= 100
    dropped_ND, mask_ND = with_dropout(x_ND)
    assert 0 < mask_ND[:, 7].sum() < 20
    kept_ND, inside_N = kept(x_ND, span_of(dropped_ND), torch.ones_like(x_ND))
    assert inside_N.all()
    assert torch.equal(kept_ND, mask_ND)


def test_all_inputs_of_a_batch_are_found_as_often_as_they_are_there(model, truth):
    observed, family = certificate.as_gradient(truth.seen), model.family
    span = row_space([observed[name] for name in family.attention_parameters(0)])
    words_V = observed[family.word_embedding].any(1).nonzero()[:, 0]
    longest = max(map(len, truth.sequences))
    with torch.no_grad():
        inputs = find_inputs(model, words_V, longest, span, len(TEXTS), UNLIMITED)
    pair_counts = Counter(zip(inputs.ids_N.tolist(), inputs.place_N.tolist(), strict=True))
    there = Counter((token, place) for ids in truth.sequences for place, token in enumerate(ids))
    assert max(there.values()) == len(TEXTS)
    assert pair_counts == there


@pytest.mark.parametrize("known", [True, None])
def test_a_batch_is_determined_and_not_proved(model, truth, known):
    """It need not be told that there is dropout."""
    seen = replace(truth.seen, knowledge=replace(truth.seen.knowledge, dropout=known))
    answer = Keyspan()(seen, model, rng=stream(0, "attack"))
    assert sorted(answer.sequences) == sorted(truth.sequences)
    assert answer.diagnostics["determined"]
    assert not answer.verified
    assert max(answer.evidence) < 1
    assert min(answer.margins) > 100
    assert answer.tokens == tuple(sorted({token for ids in truth.sequences for token in ids}))


def test_auto_asks_nobody_else(model, truth):
    answer = Auto()(truth.seen, model, rng=stream(0, "attack"))
    assert sorted(answer.sequences) == sorted(truth.sequences)
    assert answer.diagnostics["likely"] == [True] * len(TEXTS)
    assert [*answer.diagnostics["asked"]] == ["keyspan"]


def test_a_batch_of_another_size_is_not_determined(model, truth):
    """A text that is missing would leave inputs; one too many has none."""
    observed = certificate.as_gradient(truth.seen)
    with torch.no_grad():
        batch = read_dropped(model, observed, 4, 8, UNLIMITED, lambda *_: None)
    assert sorted(batch.sequences) == sorted(truth.sequences)
    assert not batch.settled


def test_a_gradient_that_does_not_agree_determines_nothing(model, truth):
    """The words' gradients at queries are mixed up, in the same span of inputs."""
    name, *_ = model.family.attention_parameters(0)
    tensors = dict(truth.seen.update.tensors)
    mixed = torch.linalg.qr(torch.randn(192, 192, generator=stream(0, "mix")))[0]
    tensors[name] = mixed @ tensors[name]
    seen = replace(truth.seen, update=replace(truth.seen.update, tensors=tensors))
    answer = Keyspan()(seen, model, rng=stream(0, "attack"))
    assert not answer.diagnostics.get("determined")


def test_without_rows_of_words_it_abstains(model, truth):
    names = model.family.attention_parameters(0)
    tensors = {name: truth.seen.update.tensors[name] for name in names}
    seen = replace(truth.seen, update=replace(truth.seen.update, tensors=tensors))
    assert Keyspan()(seen, model, rng=stream(0, "attack")).status == Status.ABSTAINED


def test_it_stops_when_time_is_up(model, truth, monkeypatch):
    monkeypatch.setattr(dropped_inputs, "_AT_ONCE", 1)
    observed = certificate.as_gradient(truth.seen)
    clock = Clock(1e-9)
    with torch.no_grad():
        assert read_dropped(model, observed, 3, 8, clock, lambda *_: None) is None
    assert clock.rang
