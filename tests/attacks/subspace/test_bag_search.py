"""Texts are read one by one from the shares of the tokens of their batch."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fedleak.attacks import certificate
from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.attacks.listening import listening
from fedleak.attacks.measured_gradient import _TAKEN, measured
from fedleak.attacks.subspace import bag_search
from fedleak.attacks.subspace.answer import Judged
from fedleak.attacks.subspace.bag_search import (
    _BETTER,
    _EDITS,
    _ENDS,
    _LONGER,
    _MORE,
    _STARTS,
    _UNNAMED,
    _VAIN,
    _WORSE,
    _Search,
    texts_of_bag,
)
from fedleak.attacks.subspace.depth_search import adapters_of, layer_rows
from fedleak.attacks.subspace.own_shares import OwnShares
from fedleak.attacks.subspace.sparse_bayes import sparse_tokens
from fedleak.attacks.subspace.state_blocks import StateBlocks
from fedleak.attacks.subspace.text_shares import _ERROR, Checked, Shares
from fedleak.attacks.subspace.update_evidence import last_hidden
from fedleak.models import CAUSAL_LM
from fedleak.models.lora import Lora, adapt_
from fedleak.util.rng import stream

TEXTS = ["she told us that", "nobody knows it all"]


def unheard(step, steps, best):
    """Progress that nobody asked for."""


@pytest.fixture
def read(small, observe):
    """Returns a decoder with adapters of few rows, its texts, their gradient and tokens."""

    def make(family="llama", texts=TEXTS, rank=2):
        model = small(family, CAUSAL_LM, layers=4, width=128)
        adapt_(model.module, Lora(rank, 2.0 * rank), model.family.classifier)
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
    share_NO, all_NO = search._own.of_closed(own).sum(0), search._shares.all_NO
    factor = (share_NO * all_NO).sum() / share_NO.square().sum()
    torch.testing.assert_close(factor * share_NO, all_NO, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_gradients_of_texts_are_those_of_autograd(read):
    model, own, gradient, bag = read()
    search = _Search(model, gradient, bag)
    names = adapters_of(model, gradient, 0)
    for ids, gradient_OD in zip(own, search._own.gradients(own), strict=True):
        sent = certificate.mean_gradient(model, [(ids, 0)], names)
        slow_OD = torch.cat(sent) * (len(ids) - 1) / search._own._size_U[:, None]
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
    lacking = bag.only(stays_N)
    read_texts = texts_of_bag(model, gradient, lacking, UNLIMITED, unheard)
    assert {certificate.close(model, text.ids) for text in read_texts} <= {own[1]}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@torch.no_grad()
def test_some_tokens_of_a_bag_keep_their_vectors(read, family):
    _, _, _, bag = read(family)
    stays_N = torch.arange(len(bag.tokens_N)) % 2 == 1
    fewer = bag.only(stays_N)
    others = len(bag.axis_MD) - len(bag.tokens_N)
    assert fewer.tokens_N.tolist() == bag.tokens_N[1::2].tolist()
    assert torch.equal(fewer.axis_MD[:others], bag.axis_MD[:others])
    assert torch.equal(fewer.axis_MD[others:], bag.axis_MD[others:][1::2])
    for few, all_of_them in ((fewer.token_NO, bag.token_NO), (fewer.share_NO, bag.share_NO)):
        assert torch.equal(few, all_of_them[1::2])


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
def test_a_token_stands_in_other_texts_if_more_is_left_than_the_error_of_shares(read):
    model, _, gradient, bag = read()
    shares = _Search(model, gradient, bag)._shares
    for part, standing in ((1.5 * _ERROR, True), (0.5 * _ERROR, False)):
        left = shares._replace(left_NO=part * shares.all_NO)
        assert (left.standing == standing).all()


@pytest.fixture
def one_taken(read):
    """Returns a search that has taken the first of two texts, both, and their gradient."""
    with torch.no_grad():
        model, own, gradient, bag = read(rank=8)
        search = _Search(model, gradient, bag)
        (text,) = search._taken(search._with_shares(own[:1]), 2)
    assert certificate.close(model, text.ids) == own[0]
    return search, own, gradient


@torch.no_grad()
def test_without_a_text_the_gradient_is_that_of_the_others(one_taken):
    search, own, gradient = one_taken
    model, left = search._model, search._remainder()
    names = list(gradient.update.tensors)
    units = [certificate.units(model, [ids[:-1]], names)[0].gradients[0] for ids in own]
    for name, tensor in gradient.update.tensors.items():
        both = units[0][name] + units[1][name]
        factor = (tensor * both).sum() / both.square().sum()
        wrong = left.update.tensors[name] - factor * units[1][name]
        assert wrong.norm() < 1e-2 * tensor.norm()
        more = left.variance(model, name) - gradient.variance(model, name)
        error = (_TAKEN * factor * units[0][name]).double().square()
        torch.testing.assert_close(more, error, rtol=0.05, atol=1e-3 * float(error.max()))
    assert left.update.num_examples == gradient.update.num_examples - 1 == 1


@torch.no_grad()
def test_spans_tell_the_rest_of_a_batch(one_taken):
    search, own, _ = one_taken
    (text,) = search.rest(1, UNLIMITED)
    assert certificate.close(search._model, text.ids) == own[1]
    assert not search._shares.standing.any()
    assert [text.ids for text in search._ended] == own


@torch.no_grad()
def test_the_rest_of_a_batch_has_its_tokens_and_half_of_the_time(one_taken, monkeypatch):
    search, own, _ = one_taken
    wrong = Judged(own[1][:-2], 0.0, math.inf)
    depths = []
    monkeypatch.setattr(
        bag_search, "read_depths", lambda *given: depths.append((given, given[3].left())) or [wrong]
    )
    assert search.rest(1, Clock(1000.0)) == []
    ((_, left, bag, _, _), seconds) = depths.pop()
    without = search._remainder()
    for name, tensor in without.update.tensors.items():
        torch.testing.assert_close(left.update.tensors[name], tensor)
    assert left.update.num_examples == without.update.num_examples
    assert {*bag.tokens_N.tolist()} == {*own[1][:-1]}
    assert len(bag.tokens_N) < len(search._bag.tokens_N)
    assert seconds == pytest.approx(500, rel=0.05)
    # Of two texts with many more tokens than rows spans tell nothing.
    monkeypatch.setattr(bag_search, "BEYOND", -len(search._own.size_O))
    assert search.rest(2, UNLIMITED) == []
    assert not depths
    assert search.rest(1, UNLIMITED) == []
    assert depths


@torch.no_grad()
def test_once_a_text_is_read_spans_may_tell_the_others(read, monkeypatch):
    model, own, gradient, bag = read(rank=8)
    searched, steps = [], []

    def first_alone(search, width, most, clock):
        searched.append(most)
        return search._taken(search._with_shares(own[:1]), most) if most == 2 else []

    monkeypatch.setattr(_Search, "texts", first_alone)
    texts = texts_of_bag(model, gradient, bag, UNLIMITED, lambda *step: steps.append(step[:2]))
    assert [certificate.close(model, text.ids) for text in texts] == own
    assert searched == [2]
    assert steps == [(1, 2), (2, 2)]
    blurred = texts_of_bag(model, gradient, replace(bag, noise=0.1), UNLIMITED, unheard)
    assert [certificate.close(model, text.ids) for text in blurred] == own[:1]


@torch.no_grad()
def test_states_of_texts_that_were_read_are_known(read, monkeypatch):
    model, own, gradient, bag = read(texts=["she told us that she knows", "nobody knows"])
    search, learned = _Search(model, gradient, bag), []
    shares, share_NO = search._shares, search._own.of_closed(own)
    text = next(text for text in shares.read({own[0]: share_NO[0]})[0])
    search._shares, search._ended = shares.without(text), [text]
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
    shares, share_NO = search._shares, search._own.of_closed(own[:1])[0]
    text = shares.checked(own[0], share_NO)
    left = shares.without(text._replace(part_NO=0.98 * text.part_NO))
    assert not left.checked(own[0], share_NO).agrees


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
    search._ended = [search._shares.checked(own[0], search._own.of_closed(own[:1])[0])]
    search._shares = search._shares._replace(left_NO=0 * bag.share_NO)
    search.begin(0, Clock(0.0))
    assert search.texts(4, 1, UNLIMITED) == []


@torch.no_grad()
def test_layers_of_which_no_first_matrix_came_are_left_out(read):
    model, _, gradient, bag = read(rank=8)
    layers = len(_Search(model, gradient, bag)._rows)
    for name, value in gradient.update.tensors.items():
        if ".2." in name and "lora_A" in name:
            value.zero_()
    assert len(_Search(model, gradient, bag)._rows) == layers - 1
    texts_of_bag(model, gradient, bag, Clock(1.0), unheard)


def among(search, shares, *texts):
    """Returns which texts are read by their tokens' shares."""
    closed = dict(zip(texts, search._own.of_closed(texts), strict=True))
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
    shares, share_NO = search._shares, search._own.of_closed(own[:1])[0]
    first = share_NO.clone()
    first[bag.tokens_N == own[0][2]] *= -1
    closed = {(*own[0][:-1], own[0][-2], own[0][-1]): first, own[0]: share_NO}
    assert [shares.checked(*pair).agrees for pair in closed.items()] == [True, True]
    assert [text.ids for text in shares.read(closed)[0]] == [own[0]]


@pytest.mark.parametrize(
    ("tokens", "deviations", "reads"),
    [(20, 2.5, False), (20, 30.0, True), (3, 3.2, False), (3, 30.0, True), (2, 30.0, False)],
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


@torch.no_grad()
def test_a_beam_goes_on_behind_a_text_that_agrees(read, monkeypatch):
    model, own, gradient, bag = read()
    search, lengths = _Search(model, gradient, bag), []
    text = Checked(own[0], 30.0, True, bag.share_NO[:, 0], bag.share_NO)

    def reading(shares, closed):
        lengths.append({*closed})
        return [text] if len(lengths) > 1 else [], shares

    monkeypatch.setattr(Shares, "read", reading)
    search.begin(0, UNLIMITED)
    search._closed(4, 5, torch.arange(len(bag.tokens_N)), UNLIMITED)
    assert len(lengths) == 1 + 1 + _MORE


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
    assert shares.checked(ids, share_NO).agrees
    share_NO[torch.isin(bag.tokens_N, torch.tensor(ids[-4:-1]))] *= -1
    assert not shares.checked(ids, share_NO).agrees


def wrong_by_a_word(ids):
    """Returns a text with a word in place of another one, one less, and one more."""
    first, second, third, *others = ids
    return [
        (first, third, third, *others),
        (first, third, *others),
        (first, second, others[0], third, *others),
    ]


def checked(search, texts):
    """Returns texts, compared with the shares of the batch."""
    return list(map(search._shares.checked, texts, search._own.of_closed(texts)))


@torch.no_grad()
def test_shares_of_a_nearer_text_agree_better(read):
    model, own, gradient, bag = read(rank=8)
    search = _Search(model, gradient, bag)
    for ids in own:
        for near in wrong_by_a_word(ids):
            far = (*near[:-2], near[1], near[-1])
            right, nearer, farther = checked(search, [ids, near, far])
            assert right.nats > nearer.nats > farther.nats
            assert right.nats == pytest.approx(float(right.nats_N.sum()))
            assert (right.agrees, nearer.agrees, farther.agrees) == (True, False, False)


@pytest.mark.parametrize("known", [True, False])
@torch.no_grad()
def test_edits_hold_the_right_text(read, monkeypatch, known):
    """The wrong word may be in place of one of which nothing is known."""
    model, own, gradient, bag = read()
    rows_N = torch.arange(len(bag.tokens_N))
    if not known:
        stays_N = bag.tokens_N != own[0][1]
        bag = bag.only(stays_N)
        rows_N = rows_N[:-1]
        monkeypatch.setattr(bag_search, "_UNNAMED", len(model.tokenizer))
    search = _Search(model, gradient, bag)
    search.begin(0, UNLIMITED)
    for wrong in checked(search, wrong_by_a_word(own[0])):
        edits = search._edits(wrong, rows_N)
        assert own[0] in edits
        assert wrong.ids not in edits
        assert len({*edits}) == len(edits)


@torch.no_grad()
def test_edits_are_texts_that_the_model_takes(read, monkeypatch):
    model, own, gradient, bag = read()
    search, rows_N = _Search(model, gradient, bag), torch.arange(len(bag.tokens_N))
    search.begin(0, UNLIMITED)
    monkeypatch.setattr(type(model), "max_length", len(own[0]))
    (longest, shortest) = checked(search, [own[0], (*own[0][:2], own[0][-1])])
    assert {len(ids) for ids in search._edits(longest, rows_N)} == {len(own[0]) - 1, len(own[0])}
    assert min(map(len, search._edits(shortest, rows_N))) == 3


@torch.no_grad()
def test_edits_begin_where_little_agrees(read):
    model, own, gradient, bag = read()
    search, rows_N = _Search(model, gradient, bag), torch.arange(len(bag.tokens_N))
    search.begin(0, UNLIMITED)
    ids = own[1]
    for place in (1, len(ids) - 2):
        nats_N = torch.where(bag.tokens_N == ids[place], 0.0, 1e3)
        text = Checked(ids, 1.0, False, nats_N, bag.share_NO)
        others = [edit for edit in search._edits(text, rows_N) if len(edit) == len(ids)]
        changed = [
            next(n for n, pair in enumerate(zip(edit, ids, strict=True)) if pair[0] != pair[1])
            for edit in others
        ]
        near = [abs(n - place) <= 1 for n in changed]
        assert near == sorted(near, reverse=True)
        assert 0 < sum(near) < len(near)


def scripted(monkeypatch, nats_of):
    """Lets texts have some nats, and agree with 100; each has all edits of the script."""
    monkeypatch.setattr(_Search, "_edits", lambda *_: list(nats_of))
    monkeypatch.setattr(
        Shares,
        "checked",
        lambda shares, ids, share_NO: Checked(
            ids, nats_of[ids], nats_of[ids] == 100, shares.left_NO[:, 0], share_NO
        ),
    )


@torch.no_grad()
def test_a_climb_goes_on_while_edits_are_better(read, monkeypatch):
    model, own, gradient, bag = read()
    search, rows_N = _Search(model, gradient, bag), torch.arange(len(bag.tokens_N))
    texts = [(*own[0][:-1], token, own[0][-1]) for token in range(10, 500)]
    heard, of_closed = [], OwnShares.of_closed

    def listening_shares(own_shares, some):
        heard.append(some)
        return of_closed(own_shares, some)

    monkeypatch.setattr(OwnShares, "of_closed", listening_shares)

    def climbed(nats_of):
        heard.clear()
        scripted(monkeypatch, nats_of)
        start = search._shares.checked(own[0], bag.share_NO)
        last = search._climbed(start, search._shares, rows_N, UNLIMITED)
        tried = [ids for some in heard for ids in some]
        assert len({*tried}) == len(tried)
        return last.ids, len(tried)

    small = dict.fromkeys(texts, 20.0 + _BETTER)
    in_vain = _VAIN * _EDITS
    assert climbed({**small, own[0]: 20.0}) == (own[0], in_vain)
    better = {**small, texts[_EDITS + 3]: 40.0, texts[_EDITS]: 35.0}
    assert climbed({**better, own[0]: 20.0}) == (texts[_EDITS + 3], in_vain + 2 * _EDITS)
    agrees = {**small, texts[0]: 100.0}
    assert climbed({**agrees, own[0]: 20.0}) == (texts[0], _EDITS)


@pytest.fixture
def starts(monkeypatch):
    """Returns the texts that climbs begin with, and the shares that these know; none leads on."""
    begun = []

    def climbed(search, text, shares, *rest):
        begun.append((text, shares))
        return text

    monkeypatch.setattr(_Search, "_climbed", climbed)
    monkeypatch.setattr(bag_search, "_BEGIN", 1.0)
    monkeypatch.setattr(bag_search, "_NEARLY", 0.0)
    return begun


@torch.no_grad()
def test_texts_to_begin_with_have_tokens_that_none_had_before(read, starts, monkeypatch):
    model, own, gradient, bag = read(rank=8)
    search = _Search(model, gradient, bag)
    near = [text for ids in own for text in wrong_by_a_word(ids)]
    closed = dict(zip(near, search._own.of_closed(near), strict=True))
    rows_N = torch.arange(len(bag.tokens_N))
    assert search._edited(closed, 2, rows_N, UNLIMITED) == {}
    assert 1 < len(starts) <= _STARTS
    for number, (text, _) in enumerate(starts):
        assert {*text.ids} - {token for before, _ in starts[:number] for token in before.ids}
    starts.clear()
    monkeypatch.setattr(bag_search, "_STARTS", 1)
    assert search._edited(closed, 2, rows_N, UNLIMITED) == {}
    assert len(starts) == 1
    starts.clear()
    assert search._edited(closed, 0, rows_N, UNLIMITED) == {}
    assert search._edited(closed, 2, rows_N, Clock(0.0)) == {}
    monkeypatch.setattr(bag_search, "_BEGIN", 1e3)
    assert search._edited(closed, 2, rows_N, UNLIMITED) == {}
    assert starts == []


@torch.no_grad()
def test_texts_far_from_any_that_was_in_the_batch_are_not_edited(read, starts, monkeypatch):
    """Each row and token speaks for a text that edits may mend."""
    model, own, gradient, bag = read(rank=8)
    search = _Search(model, gradient, bag)
    monkeypatch.setattr(bag_search, "_STARTS", 100)
    (near, *_), far = wrong_by_a_word(own[0]), (*own[1][:1], *own[0][:0:-1], own[1][-1])
    closed = {near: search._own.of_closed([near])[0], far: search._own.of_closed([far])[0]}
    rows, nats = len(bag.share_NO[0]), {}
    for ids, share_NO in closed.items():
        nats[ids] = search._shares.checked(ids, share_NO).nats / rows / len({*ids[:-1]})
    monkeypatch.setattr(bag_search, "_BEGIN", 0.0)
    assert 1.01 * nats[far] < nats[near]
    for nearly, begun in ((0.99 * nats[far], {near, far}), (1.01 * nats[far], {near})):
        starts.clear()
        monkeypatch.setattr(bag_search, "_NEARLY", nearly)
        assert search._edited(closed, 2, torch.arange(len(bag.tokens_N)), UNLIMITED) == {}
        assert {text.ids for text, _ in starts} == begun


@torch.no_grad()
def test_a_text_that_was_edited_is_read(read, monkeypatch):
    """No beam holds it."""
    model, own, gradient, bag = read(rank=8)
    search = _Search(model, gradient, bag)
    search.begin(0, UNLIMITED)
    near = wrong_by_a_word(own[0])[:1]
    closed = dict(zip(near, search._own.of_closed(near), strict=True))
    monkeypatch.setattr(_Search, "_closed", lambda *_: closed)
    monkeypatch.setattr(bag_search, "_BEGIN", 1.0)
    monkeypatch.setattr(bag_search, "_NEARLY", 0.0)
    edits = [(*own[0][:-1], own[0][1], own[0][-1]), own[0]]
    monkeypatch.setattr(_Search, "_edits", lambda *_: edits)
    (text,) = search.texts(4, 2, UNLIMITED)
    assert certificate.close(model, text.ids) == own[0]
    assert not search._shares.standing[torch.isin(bag.tokens_N, torch.tensor(own[0][1:-1]))].any()


@torch.no_grad()
def test_edits_begin_with_longer_texts_of_a_beam(read):
    model, own, gradient, bag = read()
    search, rows_N = _Search(model, gradient, bag), torch.arange(len(bag.tokens_N))
    search.begin(0, UNLIMITED)
    (*words, _, end) = own[0]
    (short,) = checked(search, [(*words, end)])
    beam = search._begun()
    for word in words[len(search._first) :]:
        beam, _ = search._longer(beam, torch.zeros(1).long(), torch.tensor([word]))
    longer = []
    for _ in range(_LONGER):
        beam = search._grown(beam, rows_N, _ENDS)
        longer += [(*ids, end) for ids in beam.ids]
    assert {*search._edits(short, rows_N)[: len(longer)]} == {*longer}


@pytest.mark.parametrize("most", [_UNNAMED, 10_000])
@torch.no_grad()
def test_words_that_are_not_known_come_behind_likely_ones(read, monkeypatch, most):
    model, own, gradient, bag = read()
    search, rows_N = _Search(model, gradient, bag), torch.arange(len(bag.tokens_N))
    search.begin(0, UNLIMITED)
    monkeypatch.setattr(bag_search, "_UNNAMED", most)
    beam, _ = search._longer(search._begun(), torch.zeros(1).long(), torch.tensor([own[0][1]]))
    ranks = search._likely(beam, rows_N)
    named = {token: ranks.pop(token) for token in bag.tokens_N.tolist()}
    _, nats_BN, both_BN = search._ranked(beam, rows_N)
    for token, nats, both in zip(named, nats_BN[0], both_BN[0], strict=True):
        assert named[token] == min((nats_BN[0] > nats).sum(), (both_BN[0] > both).sum())
    likely_V = search._log_probabilities(beam.hidden_BD)[0]
    likely_V[[*named, search._end]] = -torch.inf
    words = likely_V.argsort(descending=True).tolist()[: int(likely_V.isfinite().sum())][:most]
    assert [*ranks] == words
    assert [*ranks.values()] == [_WORSE + rank / 2 for rank in range(len(words))]


@torch.no_grad()
def test_texts_that_were_read_are_taken_out_before_others_are_edited(read, starts):
    model, own, gradient, bag = read(rank=8)
    search = _Search(model, gradient, bag)
    closed = [own[0], *wrong_by_a_word(own[0]), *wrong_by_a_word(own[1])]
    shares_BNO = search._own.of_closed(closed)
    closed = dict(zip(closed, shares_BNO, strict=True))
    search._edited(closed, 2, torch.arange(len(bag.tokens_N)), UNLIMITED)
    _, rest = search._shares.read({own[0]: shares_BNO[0]})
    for text, shares in starts:
        assert text.ids in wrong_by_a_word(own[1])
        torch.testing.assert_close(shares.left_NO, rest.left_NO)
        assert text.nats == rest.checked(text.ids, closed[text.ids]).nats
    assert starts
