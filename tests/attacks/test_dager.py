import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedleak.attacks.dager import Dager, Sentences, Spans, attend_next
from fedleak.attacks.subspace import ACCEPT, row_space, tokens_in_span
from fedleak.models import CAUSAL_LM, CLASSIFICATION
from fedleak.reconstruction import Status
from fedleak.streams import stream
from fedleak.training import share

KINDS = [("bert", CLASSIFICATION), ("gpt2", CLASSIFICATION), ("gpt2", CAUSAL_LM)]


def answer_of(model, seen, attack=None):
    return (attack or Dager())(seen, model, rng=stream(0, "dager"))


def with_tensors(seen, change):
    tensors = {name: change(value) for name, value in seen.update.tensors.items()}
    return replace(seen, update=replace(seen.update, tensors=tensors))


def noisy(seen, sigma, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return with_tensors(seen, lambda value: value + sigma * torch.randn(value.shape, generator=rng))


@given(
    st.integers(0, 4), st.integers(1, 3), st.integers(1, 4), st.sampled_from([1, 2]), st.integers(0)
)
def test_attending_with_shared_keys_is_full_softmax_attention(past, prefixes, candidates, h, seed):
    rng = torch.Generator().manual_seed(seed % 2**40)
    q, k, v = (torch.randn(candidates, h, 5, generator=rng) for _ in range(3))
    past_k, past_v = (torch.randn(prefixes, past, h, 5, generator=rng) for _ in range(2))
    found = attend_next(q, k, v, past_k, past_v)
    assert found.shape == (prefixes, candidates, h * 5)
    for b, n in itertools.product(range(prefixes), range(candidates)):
        for head in range(h):
            keys = torch.cat([past_k[b, :, head], k[n, head][None]])
            values = torch.cat([past_v[b, :, head], v[n, head][None]])
            weights = torch.softmax(keys @ q[n, head] / math.sqrt(5), 0)
            expected = weights @ values
            torch.testing.assert_close(found[b, n, head * 5 : head * 5 + 5], expected)


@pytest.fixture
def sentences(small, observe):
    """The candidates of one short sentence, widened so that there is something to search."""
    model = small("bert", width=48, layers=3)
    truth = observe(model, 1, max_length=6)
    tensors = truth.seen.update.tensors
    first, second = (row_space(model.family.attention_gradients(tensors, n)) for n in (0, 1))
    mixed = row_space([model.family.output_gradient(tensors, 0)])
    slots = tokens_in_span(model.family.token_table(model.module), first, stream(0, "sketch"))
    assert [ids.tolist() for ids in slots] == [[token] for token in truth.sequences[0]]
    slots = [torch.cat([ids, torch.tensor([11, 12])]) for ids in slots]

    def make(mixed=mixed):
        block = model.family.first_block(model.module)
        with torch.no_grad():
            return Sentences(slots, block, Spans(second, mixed), stream(0, "null"))

    return make, model, truth.sequences[0]


@torch.no_grad()
def test_sentences_in_parts_give_the_second_attention_input_of_the_model(sentences):
    make, model, _ = sentences
    found = make()
    picks = found.all()
    assert len(picks) == found.count == 3**6 == len(set(map(tuple, picks.tolist())))
    name = model.family.attention_parameters(1)[0].rpartition(".")[0]
    recorded = []
    hook = model.module.get_submodule(name).register_forward_pre_hook(
        lambda _, inputs: recorded.append(inputs[0])
    )
    ids = torch.tensor([found.ids(one) for one in picks[::50]])
    model.family.logits(model.module, torch.ones_like(ids), ids_BT=ids, embeds_BTD=None)
    hook.remove()
    torch.testing.assert_close(found.second_inputs(picks[::50]), recorded[0], atol=2e-5, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("pruned", [True, False])
def test_only_the_true_sentence_of_all_passes_and_a_descent_finds_it(sentences, pruned):
    make, _, truth = sentences
    found = make() if pruned else make(mixed=None)
    passed, answers = found.passing(found.all())
    assert [one.ids for one in answers] == [truth]
    assert int(passed.sum()) == 1
    cost = found.cost(found.all())
    assert found.ids(found.all()[cost.argmin()]) == truth
    start = found.start([], 6, stream(0, "start"))
    picks, arrived = found.descend(start, stream(0, "descend"))
    assert (arrived <= found.cost(start)).all()
    torch.testing.assert_close(arrived, found.cost(picks))
    for r, t, c in itertools.product(range(6), range(6), range(3)):
        other = picks[r].clone()
        other[t] = c
        assert found.cost(other[None])[0] >= arrived[r] * (1 - 1e-4)
    assert truth in [found.ids(one) for one in picks]


def test_searching_finds_what_trying_all_finds(small, observe):
    model = small("bert", width=64, layers=3)
    truth = observe(model, 2, max_length=9)
    tried = answer_of(model, truth.seen, Dager(enumerate_up_to=10**6))
    searched = answer_of(model, truth.seen, Dager(enumerate_up_to=1))
    assert set(tried.sequences) == set(searched.sequences) >= set(truth.sequences)


# --- whole attacks --------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_gpt2_is_read_exactly_but_for_the_last_token_that_has_no_target(
    gpt2_tiny, observe, texts, batch
):
    truth = observe(gpt2_tiny, texts[10 : 10 + batch])
    answer = answer_of(gpt2_tiny, truth.seen)
    assert set(answer.sequences) == {one[:-1] for one in truth.sequences}
    assert max(answer.evidence) < ACCEPT


@pytest.mark.parametrize("batch", [1, 2])
def test_bert_is_read_exactly(bert_tiny, observe, texts, batch):
    truth = observe(bert_tiny, texts[20 : 20 + batch])
    answer = answer_of(bert_tiny, truth.seen)
    assert set(answer.sequences) == set(truth.sequences)
    assert answer.tokens == tuple(sorted({t for one in truth.sequences for t in one}))


@pytest.mark.parametrize(
    "patterns", [["query.weight", "c_attn.weight"], ["value.weight", "output.dense", "attn"]]
)
@pytest.mark.parametrize(("family", "task"), KINDS)
def test_part_of_the_attention_is_enough(small, observe, family, task, patterns):
    model = small(family, task, width=64, layers=3)
    truth = observe(model, 2, max_length=8)
    answer = answer_of(model, replace(truth.seen, update=share(truth.seen.update, patterns)))
    end = -1 if task == CAUSAL_LM else None
    assert set(answer.sequences) == {one[:end] for one in truth.sequences}


@pytest.mark.parametrize(("family", "task"), KINDS)
@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_the_scale_of_the_update_changes_nothing(small, observe, texts, family, task, scale):
    model = small(family, task, width=64, layers=3)
    truth = observe(model, texts[:1])
    plain = answer_of(model, truth.seen)
    scaled = answer_of(model, with_tensors(truth.seen, lambda value: scale * value))
    assert plain.status == Status.RECOVERED
    assert scaled.sequences == plain.sequences


@pytest.mark.parametrize(("family", "task"), KINDS)
@pytest.mark.parametrize("sigma", [1e-5, 1e-3, 1.0])
def test_noise_makes_it_abstain(small, observe, family, task, sigma):
    model = small(family, task, width=64, layers=3)
    answer = answer_of(model, noisy(observe(model, 1).seen, sigma))
    assert answer.status == Status.ABSTAINED
    assert "noise" in answer.reason


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_dropout_makes_it_abstain(small, observe, family, task):
    model = small(family, task, width=64, layers=3)
    answer = answer_of(model, observe(model, 1, dropout=True).seen)
    assert answer.status == Status.ABSTAINED


@pytest.mark.parametrize(("family", "task"), KINDS)
@pytest.mark.parametrize("batch", [2, 3, 4, 6])
def test_more_tokens_than_dimensions_are_never_garbage(small, observe, family, task, batch):
    model = small(family, task, width=32, layers=3)
    truth = observe(model, batch)
    assert sum(map(len, truth.sequences)) > 32
    answer = answer_of(model, truth.seen)
    assert answer.status == Status.ABSTAINED
    assert "hidden size (32)" in answer.reason
