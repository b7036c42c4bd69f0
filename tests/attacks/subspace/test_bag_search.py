"""Texts are read one by one from the shares of the tokens of their batch."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fedleak.attacks import certificate
from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.attacks.listening import listening
from fedleak.attacks.measured_gradient import measured
from fedleak.attacks.subspace.bag_search import _MORE, _Agreeing, _Search, _Shares, texts_of_bag
from fedleak.attacks.subspace.depth_search import adapters_of, layer_rows
from fedleak.attacks.subspace.sparse_bayes import sparse_tokens
from fedleak.attacks.subspace.state_blocks import StateBlocks
from fedleak.attacks.subspace.update_evidence import last_hidden
from fedleak.models import CAUSAL_LM
from fedleak.models.lora import Lora, adapt_
from fedleak.util.rng import stream

TEXTS = ["she told us that", "nobody knows it all"]


def unheard(step, steps, best):
    """Progress that nobody asked for."""


@pytest.fixture
def read(small, observe):
    """Returns a decoder with adapters of two rows each, its texts, their gradient and tokens."""

    def make(family="llama", texts=TEXTS):
        model = small(family, CAUSAL_LM, layers=4, width=128)
        adapt_(model.module, Lora(2, 4.0), model.family.classifier)
        rng = stream(0, "adapters")
        for name, parameter in model.trained().items():
            if "lora_" in name:
                size = 0.1 if "lora_A" in name else 0.01
                parameter.data = size * torch.randn(parameter.shape, generator=rng)
        with torch.enable_grad():
            observed = observe(model, texts)
        gradient = measured(observed.seen, observed.seen.update.tensors)
        with torch.no_grad():
            bag = sparse_tokens(model, layer_rows(model, gradient, 0)[0], UNLIMITED)
        return model, list(observed.sequences), gradient, bag

    return make


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_the_shares_of_texts_add_up_to_those_of_the_batch(read, family):
    model, own, gradient, bag = read(family)
    search = _Search(model, gradient, bag)
    share_NO, all_NO = search._own_shares(own).sum(0), search._shares.all_NO
    factor = (share_NO * all_NO).sum() / share_NO.square().sum()
    torch.testing.assert_close(factor * share_NO, all_NO, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_gradients_of_texts_are_those_of_autograd(read):
    model, own, gradient, bag = read()
    search = _Search(model, gradient, bag)
    names = adapters_of(model, gradient, 0)
    for ids, gradient_OD in zip(own, search._gradients(own), strict=True):
        sent = certificate.mean_gradient(model, [(ids, 0)], names)
        slow_OD = torch.cat(sent) * (len(ids) - 1) / search._size_U[:, None]
        torch.testing.assert_close(gradient_OD, slow_OD.double(), rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_the_texts_of_a_gradient_are_read(read):
    model, own, gradient, bag = read()
    read_texts = texts_of_bag(model, gradient, bag, UNLIMITED, unheard)
    assert {certificate.close(model, text.ids) for text in read_texts} == set(own)


@torch.no_grad()
def test_a_text_of_which_a_token_is_not_known_is_no_other_text(read):
    model, own, gradient, bag = read()
    stays_N = bag.tokens_N != own[0][2]
    stays_M = torch.ones(len(bag.axis_MD), dtype=torch.bool)
    stays_M[-len(stays_N) :] = stays_N
    lacking = replace(
        bag,
        tokens_N=bag.tokens_N[stays_N],
        token_NO=bag.token_NO[stays_N],
        share_NO=bag.share_NO[stays_N],
        axis_MD=bag.axis_MD[stays_M],
    )
    read_texts = texts_of_bag(model, gradient, lacking, UNLIMITED, unheard)
    assert {certificate.close(model, text.ids) for text in read_texts} <= {own[1]}


@torch.no_grad()
def test_a_text_that_is_read_leaves_no_shares(read):
    model, own, gradient, bag = read(texts=TEXTS[:1])
    search = _Search(model, gradient, bag)
    search.begin(0, UNLIMITED)
    (text,) = search.texts(12, 1, UNLIMITED)
    assert certificate.close(model, text.ids) == own[0]
    shares = search._shares
    assert shares.left_NO.norm() < 1e-3 * shares.all_NO.norm()
    assert not shares.standing.any()
    assert search.texts(12, 1, UNLIMITED) == []


@torch.no_grad()
def test_states_of_texts_that_were_read_are_known(read, monkeypatch):
    model, own, gradient, bag = read(texts=["she told us that she knows", "nobody knows"])
    search, learned = _Search(model, gradient, bag), []
    shares, share_NO = search._shares, search._own_shares(own)
    text = next(text for text in shares.read({own[0]: share_NO[0]})[0])
    search._shares, search._ended = shares.without(text), [own[0]]
    monkeypatch.setattr(StateBlocks, "learned", lambda _, state_NKD: learned.append(state_NKD))
    search.begin(0, UNLIMITED)
    with listening(search._inputs_of) as heard:
        last_hidden(model, torch.tensor([own[0][:-1]]))
    for state_NKD, module in zip(learned, search._inputs_of, strict=True):
        for row, token in enumerate(bag.tokens_N.tolist()):
            places = [place for place, word in enumerate(own[0][:-1]) if word == token]
            if token in own[1] or not places:
                continue
            for factor in range(state_NKD.shape[1]):
                place = places[factor % len(places)]
                torch.testing.assert_close(state_NKD[row, factor], heard[module][0][0, place])


@torch.no_grad()
def test_a_text_that_was_read_is_not_read_again(read):
    """What errors leave of its shares resembles them."""
    model, own, gradient, bag = read()
    search = _Search(model, gradient, bag)
    shares, share_NO = search._shares, search._own_shares(own[:1])[0]
    text = shares.agreeing(own[0], share_NO)
    left = shares.without(text._replace(part_NO=0.98 * text.part_NO))
    assert left.agreeing(own[0], share_NO) is None


@torch.no_grad()
def test_of_a_text_of_which_little_agrees_other_ends_are_tried(read):
    model, own, gradient, bag = read()
    search, rows_N = _Search(model, gradient, bag), torch.arange(len(bag.tokens_N))
    (*words, last, end) = own[0]
    for wrong in [(*words, end), (*words, words[-1], end), (*words, last, last, end)]:
        text = _Agreeing(wrong, 30.0, 0.4, bag.share_NO)
        ends = search._other_ends([text], rows_N, {})
        assert own[0] in ends
        assert own[0] not in search._other_ends([text], rows_N, dict.fromkeys(ends))
        assert search._other_ends([text._replace(share=0.6)], rows_N, {}) == []


@torch.no_grad()
def test_each_search_has_other_beginnings(read, monkeypatch):
    model, _, gradient, bag = read()
    written = []
    monkeypatch.setattr(
        _Search, "begin", lambda search, seed, _: written.append(search._written(seed))
    )
    monkeypatch.setattr(_Search, "texts", lambda *_: [])
    assert texts_of_bag(model, gradient, bag, UNLIMITED, unheard) == []
    longest = [prefixes[-1] for prefixes, _ in written]
    assert len(longest) > 1
    for one_CT, other_CT in pairwise(longest):
        assert not torch.equal(one_CT, other_CT)


@torch.no_grad()
def test_no_time_gives_no_text(read):
    model, own, gradient, bag = read()
    assert texts_of_bag(model, gradient, bag, Clock(0.0), unheard) == []
    search = _Search(model, gradient, bag)
    search._shares = search._shares._replace(left_NO=0 * bag.share_NO)
    search._ended = own[:1]
    search.begin(0, Clock(0.0))
    assert search.texts(4, 1, UNLIMITED) == []


def among(search, shares, *texts):
    """Returns which texts are read by their tokens' shares."""
    closed = dict(zip(texts, search._own_shares(texts), strict=True))
    return [text.ids for text in shares.read(closed)[0]]


@pytest.mark.parametrize(("noise", "known"), [(0.0, False), (0.02, False), (0.1, True)])
@torch.no_grad()
def test_shares_agree_of_right_texts_alone(read, noise, known):
    """Errors of some hundredths need not be known."""
    model, own, gradient, bag = read()
    search = _Search(model, gradient, bag)
    shares, size_N1 = search._shares, noise * search._shares.all_NO.norm(dim=1, keepdim=True)
    drawn_NO = size_N1 * torch.randn(shares.all_NO.shape, generator=stream(3, "noise"))
    blurred = shares._replace(
        left_NO=shares.left_NO + drawn_NO,
        variance_NO=shares.variance_NO + known * size_N1.square(),
    )
    for ids in own:
        (*words, last, end) = ids
        exchanged = (*words[:-2], words[-1], words[-2], last, end)
        wrong = [(*words, end), (*words, own[0][2], end), (*words, last, last, end), exchanged]
        wrong = [text for text in wrong if text not in own]
        assert among(search, blurred, *wrong, ids) == [ids]
    assert {*among(search, blurred, *own)} == {*own}


@torch.no_grad()
def test_the_text_with_the_most_nats_is_taken_first(read):
    model, own, gradient, bag = read()
    search = _Search(model, gradient, bag)
    shares, share_NO = search._shares, search._own_shares(own[:1])[0]
    first = share_NO.clone()
    first[bag.tokens_N == own[0][2]] *= -1
    closed = {(*own[0][:-1], own[0][-2], own[0][-1]): first, own[0]: share_NO}
    assert [shares.agreeing(*pair) is not None for pair in closed.items()] == [True, True]
    assert [text.ids for text in shares.read(closed)[0]] == [own[0]]


@pytest.mark.parametrize(
    ("tokens", "deviations", "reads"),
    [(20, 2.5, False), (20, 30.0, True), (2, 3.2, False), (2, 30.0, True), (1, 30.0, False)],
)
@torch.no_grad()
def test_noise_of_which_shares_are_lost_leaves_no_text(read, tokens, deviations, reads):
    """Of a text's last tokens, so many, the noise is known to be small."""
    model, own, gradient, bag = read()
    search, ids = _Search(model, gradient, bag), own[0]
    shares, clear_N = search._shares, torch.isin(bag.tokens_N, torch.tensor(ids[:-1][-tokens:]))
    size_N1 = shares.all_NO.square().mean(1, keepdim=True)
    variance_N1 = (size_N1 / deviations**2).where(clear_N[:, None], 100 * size_N1)
    noisy = shares._replace(variance_NO=variance_N1.expand_as(shares.all_NO))
    assert (among(search, noisy, ids) != []) is reads


@pytest.mark.parametrize("share", [0.4, 0.6])
@torch.no_grad()
def test_a_beam_goes_on_behind_a_text_that_agrees(read, monkeypatch, share):
    """Other ends are tried where little agrees."""
    model, own, gradient, bag = read()
    search, lengths = _Search(model, gradient, bag), []
    text = _Agreeing((*own[0][:-2], own[0][-1]), 30.0, share, bag.share_NO)

    def reading(shares, closed):
        lengths.append({*closed})
        return [text] if len(lengths) > 1 else [], shares

    monkeypatch.setattr(_Shares, "read", reading)
    search.begin(0, UNLIMITED)
    search.texts(4, 5, UNLIMITED)
    assert len(lengths) == 1 + 1 + _MORE + (share < 0.5)
    ends = lengths[-1] - lengths[1 + _MORE]
    assert (len(ends) > len(bag.tokens_N)) is (share < 0.5)


@torch.no_grad()
def test_a_beam_says_of_its_prefixes_what_whole_prefixes_say(read):
    model, _, gradient, bag = read()
    search = _Search(model, gradient, bag)
    search.begin(0, UNLIMITED)
    beam, rows_N = search._begun(), torch.arange(len(bag.tokens_N))
    for _ in range(3):
        beam = search._grown(beam, rows_N, 4)
    for row, ids in enumerate(beam.ids):
        hidden_TD = last_hidden(model, torch.tensor([ids]))[0]
        torch.testing.assert_close(beam.hidden_BD[row], hidden_TD[-1], rtol=1e-3, atol=1e-3)
        again = search._begun()
        for token in ids[len(again.ids[0]) :]:
            again, _ = search._longer(again, torch.zeros(1).long(), torch.tensor([token]))
        for part, slow in zip(beam.parts, again.parts, strict=True):
            torch.testing.assert_close(part[row], slow[0], rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_the_beginning_of_a_text_is_not_enough(read):
    """Its shares lack nothing but what later tokens give, which may be little."""
    model, own, gradient, bag = read()
    shares, ids = _Search(model, gradient, bag)._shares, max(own, key=len)
    share_NO = shares.left_NO.clone()
    share_NO[bag.tokens_N == ids[1]] *= -1
    assert shares.agreeing(ids, share_NO) is not None
    share_NO[torch.isin(bag.tokens_N, torch.tensor(ids[-4:-1]))] *= -1
    assert shares.agreeing(ids, share_NO) is None
