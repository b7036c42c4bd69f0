import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from fedleak.attacks.analytic.facts import class_shares, rounded_to_sum
from fedleak.attacks.analytic.probes import Probes
from fedleak.attacks.reconstruction import Status
from fedleak.models import CAUSAL_LM, CLASSIFICATION, squared_error
from fedleak.training.observation import UpdateKind
from fedleak.training.wire import partial_update
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

KINDS = [("bert", CLASSIFICATION), ("gpt2", CLASSIFICATION), ("gpt2", CAUSAL_LM)]


def probe(model, seen):
    return Probes()(seen, model, rng=stream(0, "probes"))


@pytest.mark.parametrize("kind", UpdateKind)
@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize(("family", "task"), KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_and_the_longest_sequence_are_exact(
    small, observe, family, task, batch, kind, dropout
):
    model = small(family, task)
    truth = observe(model, batch, kind=kind, dropout=dropout)
    answer = probe(model, truth.seen)
    tokens = {token for ids in truth.sequences for token in ids}
    longest = max(map(len, truth.sequences))
    if task != CAUSAL_LM:  # else tied to the output layer, so that every row moves
        assert set(answer.tokens) == tokens
        assert answer.diagnostics["token_gap"] == "infinite"
    assert answer.facts["longest_sequence"] == longest


@pytest.mark.parametrize("batch", [1, 2, 4])
def test_used_tokens_stand_out_where_the_output_layer_moves_every_row(
    gpt2_tiny, observe, texts, batch
):
    truth = observe(gpt2_tiny, texts[30 : 30 + batch])
    answer = probe(gpt2_tiny, truth.seen)
    assert set(answer.tokens) == {token for ids in truth.sequences for token in ids}
    assert answer.diagnostics["token_gap"] > 3


@pytest.mark.parametrize("label", [0, 1, 2])
@pytest.mark.parametrize("patterns", [["classifier.bias"], ["classifier.weight"], ["classifier"]])
def test_the_label_of_one_example_is_exact(small, observe, texts, label, patterns):
    model = small("bert")
    for text in texts[:5]:
        seen = observe(model, [text], [label]).seen
        answer = probe(model, replace(seen, update=partial_update(seen.update, patterns)))
        assert answer.facts == {"label_counts": [int(c == label) for c in range(3)]}
        assert answer.tokens is None


def test_the_label_of_one_example_is_exact_without_a_bias(small, observe, texts):
    """Of one example, only the row of its class points away from the others."""
    model = small("gpt2")
    for text, label in itertools.product(texts[:10], range(3)):
        answer = probe(model, observe(model, [text], [label]).seen)
        assert answer.facts["label_counts"] == [int(c == label) for c in range(3)]


def test_label_counts_of_a_batch_are_exact_at_a_bias(small, observe, texts):
    """With p nearly the same for every input, p - mean(p - y) is the share of each class."""
    model = small("bert")
    model.module.classifier.weight.data *= 0.01
    for labels in ([0, 0, 0, 0], [0, 1, 2, 2], [2, 1, 2, 2, 2, 1]):
        answer = probe(model, observe(model, texts[: len(labels)], labels).seen)
        assert answer.facts["label_counts"] == [labels.count(c) for c in range(3)]


def test_label_counts_are_exact_of_a_model_for_short_texts(small, observe, texts):
    model = small("bert", longest=12)
    model.module.classifier.weight.data *= 0.01
    short = [" ".join(text.split()[:2]) for text in texts[:3]]
    answer = probe(model, observe(model, short, [2, 1, 2]).seen)
    assert answer.facts["label_counts"] == [0, 1, 2]


@pytest.mark.parametrize("labels", [[0, 0, 0, 0], [0, 1, 2, 2], [2, 1, 2, 2, 2, 1]])
def test_label_counts_are_exact_under_the_squared_error_too(small, observe, texts, labels):
    model = replace(small("bert"), class_loss=squared_error)
    model.module.classifier.weight.data *= 0.01
    seen = observe(model, texts[: len(labels)], labels).seen
    bias = model.module.classifier.bias.detach()
    counts = [labels.count(c) for c in range(3)]
    # The logits are all but the bias, so this is what the gradient must hold.
    expected = 2 / 3 * (bias - torch.tensor(counts) / len(labels))
    torch.testing.assert_close(seen.update.tensors["classifier.bias"], expected, atol=0.01, rtol=0)
    assert probe(model, seen).facts["label_counts"] == counts


@given(
    st.sampled_from([F.cross_entropy, squared_error]),
    st.integers(2, 5),
    st.integers(1, 6),
    st.integers(0, 10**6),
)
def test_shares_of_classes_are_those_of_the_formula_of_each_loss(bert_tiny, loss, c, b, seed):
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(b, c, generator=rng, dtype=torch.float64).requires_grad_()
    labels = torch.randint(c, (b,), generator=rng)
    model = replace(bert_tiny, module=SimpleNamespace(config=SimpleNamespace(num_labels=c)))
    model = replace(model, class_loss=loss)
    pull = torch.autograd.grad(loss(logits, labels), logits)[0].sum(0)
    shares = class_shares(model, logits.detach(), pull)
    mean = logits.softmax(-1).mean(0) if loss is F.cross_entropy else logits.mean(0)
    formula = mean - pull if loss is F.cross_entropy else mean - c / 2 * pull
    torch.testing.assert_close(shares, formula.detach())
    torch.testing.assert_close(shares, F.one_hot(labels, c).double().mean(0))


def test_one_label_without_a_bias_is_told_under_cross_entropy_alone(small, observe, texts):
    """Under the squared error the rows of several classes may point away from the others."""
    model = replace(small("gpt2"), class_loss=squared_error)
    for text, label in itertools.product(texts[:3], range(3)):
        assert "label_counts" not in probe(model, observe(model, [text], [label]).seen).facts


@pytest.mark.parametrize("batch", [1, 3])
def test_rotary_positions_tell_no_length(small, observe, batch):
    model = small("llama")
    truth = observe(model, batch)
    answer = probe(model, truth.seen)
    assert set(answer.tokens) == {token for ids in truth.sequences for token in ids}
    assert "longest_sequence" not in answer.facts


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_the_budget_is_the_rank_used_and_the_rank_there_is(small, observe, family, task):
    model = small(family, task, width=48)
    truth = observe(model, 2, max_length=7)
    counted = [ids[:-1] if task == CAUSAL_LM else ids for ids in truth.sequences]
    pairs = {pair for ids in counted for pair in enumerate(ids)}
    assert probe(model, truth.seen).diagnostics["budget"] == [len(pairs), 48]
    many = observe(model, 4)
    assert probe(model, many.seen).diagnostics["budget"] == [None, 48]


def test_no_classes_are_counted_where_there_are_none(small, observe):
    for model, kind in [
        (small("gpt2", CAUSAL_LM), UpdateKind.GRADIENT),
        (small("bert"), UpdateKind.DELTA),
    ]:
        assert "label_counts" not in probe(model, observe(model, 2, kind=kind).seen).facts


def test_with_nothing_that_stands_out_it_abstains(small, observe):
    model = small("bert")
    seen = observe(model, 2).seen
    answer = probe(model, replace(seen, update=partial_update(seen.update, ["query"])))
    assert answer.status == Status.ABSTAINED
    assert answer.reason


@given(
    st.lists(st.floats(-2, 2), min_size=1, max_size=6).filter(lambda shares: max(shares) > 1e-6),
    st.integers(1, 30),
)
def test_rounded_counts_have_the_total_and_are_near_the_shares(shares, total):
    counts = rounded_to_sum(shares, total)
    assert sum(counts) == total
    assert min(counts) >= 0
    positive = torch.tensor(shares, dtype=torch.float64).clamp_min(0)
    exact = positive * total / positive.sum()
    assert ((torch.tensor(counts) - exact).abs() < 1 + 1e-6).all()


def test_counts_have_the_total_or_are_not_told_where_no_class_has_a_share(small, observe):
    model = small("bert")
    seen = observe(model, 7).seen
    bias = {"classifier.bias": torch.ones(3)}
    answer = probe(model, replace(seen, update=replace(seen.update, tensors=bias)))
    assert sum(answer.facts.get("label_counts", [7])) == 7
