"""Texts of a classifier are read from the shares of tokens and positions."""

from collections import Counter

import pytest
import torch

from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.attacks.measured_gradient import measured
from fedleak.attacks.subspace import placed_texts
from fedleak.attacks.subspace.dager import Dager
from fedleak.attacks.subspace.depth_search import layer_rows
from fedleak.attacks.subspace.own_shares import OwnShares
from fedleak.attacks.subspace.placed_texts import _NO_END, _Draft, _Search, texts_of_places
from fedleak.attacks.subspace.sparse_bayes import sparse_tokens
from fedleak.models import CLASSIFICATION
from fedleak.models.lora import Lora, adapt_
from fedleak.util.rng import stream

TEXTS = ["she told us that", "nobody knows it all"]
SHARING = ["we told her that story", "nobody told us all that"]


def unheard(step, steps, best):
    """Progress that nobody asked for."""


@pytest.fixture
def read(small, observe):
    """Returns a classifier with adapters, what a server sees of texts, and their tokens."""

    def make(family="bert", texts=TEXTS, labels=(0, 2)):
        model = small(family, CLASSIFICATION, layers=3, width=64)
        adapt_(model.module, Lora(8, 16.0), model.family.classifier)
        rng = stream(0, "adapters")
        for name, parameter in model.trained().items():
            if "lora_" in name:
                parameter.data = 0.1 * torch.randn(parameter.shape, generator=rng)
        with torch.enable_grad():
            observed = observe(model, texts, list(labels))
        gradient = measured(observed.seen, observed.seen.update.tensors)
        with torch.no_grad():
            bag = sparse_tokens(model, layer_rows(model, gradient, 0)[0], UNLIMITED)
        return model, observed, gradient, bag

    return make


@torch.no_grad()
@pytest.mark.parametrize("family", ["bert", "gpt2"])
@pytest.mark.parametrize("texts", [TEXTS, SHARING])
def test_texts_of_a_batch_are_read(read, family, texts):
    model, observed, gradient, bag = read(family, texts)
    heard = []
    read_texts = texts_of_places(model, gradient, bag, UNLIMITED, lambda *how: heard.append(how))
    assert Counter(text.ids for text in read_texts) == Counter(map(tuple, observed.sequences))
    assert heard == [(1, 2, read_texts[0]), (2, 2, read_texts[1])]


def test_dager_proves_a_batch_of_more_tokens_than_rows(read):
    model, observed, _, _ = read(texts=[*TEXTS, "please call the doctor now"], labels=(0, 2, 1))
    answer = Dager()(observed.seen, model, rng=stream(0, "dager"))
    assert answer.verified
    assert Counter(answer.sequences) == Counter(map(tuple, observed.sequences))


def test_a_text_that_occurs_twice_is_proved_twice(read):
    model, observed, _, _ = read(texts=[TEXTS[0], TEXTS[0]], labels=(0, 0))
    answer = Dager()(observed.seen, model, rng=stream(0, "dager"))
    assert answer.verified
    assert [*answer.sequences] == [*map(tuple, observed.sequences)]


@torch.no_grad()
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_own_shares_are_those_of_the_batch(read, family):
    model, observed, gradient, bag = read(family)
    own, texts = OwnShares(model, gradient, bag), list(map(tuple, observed.sequences))
    shares_CBMO = own.of_classes(texts, range(3))
    share_MO = (shares_CBMO[0, 0] + shares_CBMO[2, 1]) / 2
    count, places = len(bag.tokens_N), max(map(len, texts))
    torch.testing.assert_close(share_MO[-count:], bag.share_NO / own.size_O, rtol=0.01, atol=0.01)
    place_PO = bag.position_PO * bag.error_O / own.size_O
    torch.testing.assert_close(share_MO[:places], place_PO[:places], rtol=0.01, atol=0.01)
    single = own.of_classes(texts[1:], [2])[0, 0]  # the first has another length
    torch.testing.assert_close(single, shares_CBMO[2, 1], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_the_table_has_tokens_at_their_places(read):
    model, observed, gradient, bag = read()
    search = _Search(model, gradient, bag)
    search._learn()
    assert len(search._table_PN) == max(map(len, observed.sequences))
    for place in range(1, 5):
        words = {ids[place] for ids in observed.sequences}
        likely = search._table_PN[place].topk(2)
        assert {search._words[n] for n in likely.indices} == words
        torch.testing.assert_close(likely.values, torch.ones(2).double(), rtol=0, atol=0.05)


@torch.no_grad()
def test_a_text_that_was_read_is_taken_out_of_tokens_and_positions(read):
    model, observed, gradient, bag = read()
    search, own = _Search(model, gradient, bag), OwnShares(model, gradient, bag)
    text = search.text(UNLIMITED)
    ((other, label),) = (
        (ids, label)
        for ids, label in zip(map(tuple, observed.sequences), (0, 2), strict=True)
        if ids != text.ids
    )
    left_MO = own.of_classes([other], [label])[0, 0] / 2
    places = len(search._place_PO)
    torch.testing.assert_close(search._place_PO, left_MO[:places], rtol=0.02, atol=0.02)
    left_NO = left_MO[-len(bag.tokens_N) :]
    torch.testing.assert_close(search._shares.left_NO, left_NO, rtol=0.02, atol=0.02)
    assert not search._known


@torch.no_grad()
def test_a_draft_is_tried_for_each_class_and_not_twice(read, monkeypatch):
    model, observed, gradient, bag = read()
    search, heard, of_classes = _Search(model, gradient, bag), [], OwnShares.of_classes

    def listening(own, texts, labels):
        heard.append((len(texts), [*labels]))
        return of_classes(own, texts, labels)

    monkeypatch.setattr(OwnShares, "of_classes", listening)
    ids = observed.sequences[1]
    right = _Draft((*ids, *[ids[1]] * (len(search._place_PO) - len(ids))), len(ids))
    wrong = right._replace(tokens=(*right.tokens[:1], right.tokens[2], *right.tokens[2:]))
    tried, worse = search._try([right, wrong])
    assert (tried.label, tried.draft) == (2, right)
    assert tried.checked.agrees
    assert tried.checked.nats > worse.checked.nats
    assert tried.checked.ids == (*ids[1:-1], _NO_END)
    assert search._try([wrong, right], [2])[1].checked.nats == tried.checked.nats
    assert heard == [(2, [0, 1, 2])]


@torch.no_grad()
def test_a_climb_finds_the_length_and_keeps_to_a_class(read, monkeypatch):
    model, observed, gradient, bag = read()
    search, heard, of_classes = _Search(model, gradient, bag), [], OwnShares.of_classes
    search._learn()
    ids = observed.sequences[1]
    short = _Draft((*ids, *[ids[1]] * (len(search._place_PO) - len(ids))), len(ids) - 1)
    (tried,) = search._try([short])

    def listening(own, texts, labels):
        heard.append([*labels])
        return of_classes(own, texts, labels)

    monkeypatch.setattr(OwnShares, "of_classes", listening)
    climbed = search._climbed(tried, UNLIMITED)
    assert search._ids(climbed.draft) == tuple(ids)
    assert climbed.label == 2
    assert heard[0] == [0, 1, 2]
    search._known.clear()
    heard.clear()
    search._climbed(climbed, UNLIMITED)
    assert {*map(tuple, heard)} == {(0, 1, 2)}  # nothing is better, so one look is enough
    heard.clear()
    worse = climbed.draft._replace(tokens=(*ids[:2], *climbed.draft.tokens[1:2], *ids[3:]))
    (tried,) = search._try([worse._replace(tokens=worse.tokens[: len(search._place_PO)])])
    search._known.clear()
    heard.clear()
    search._climbed(tried, UNLIMITED)
    assert [2] in heard
    assert [0] not in heard


@torch.no_grad()
def test_a_near_text_is_mended_by_tokens_that_the_table_does_not_have(read):
    model, observed, gradient, bag = read(texts=["she told us that the doctor called", TEXTS[1]])
    search = _Search(model, gradient, bag)
    search._learn()
    ids = observed.sequences[0]
    token = ids[2]
    search._table_PN[:, search._words.index(token)] = 0  # no place has it
    wrong = next(word for word in search._words if word not in ids)
    draft = _Draft((*ids[:2], wrong, *ids[3:]), len(ids))
    draft = draft._replace(tokens=draft.tokens[: len(search._place_PO)])
    (tried,) = search._try([draft])
    assert not tried.checked.agrees
    assert search._climbed(tried, UNLIMITED).draft.tokens[2] != token
    mended = search._mended(tried, UNLIMITED)
    assert search._ids(mended.draft) == tuple(ids)


@torch.no_grad()
def test_nothing_is_sought_without_positions(read):
    model, _, gradient, bag = read("llama")
    assert texts_of_places(model, gradient, bag, UNLIMITED, unheard) == []


@torch.no_grad()
def test_what_is_too_large_or_too_late_is_not_sought(read, monkeypatch):
    model, _, gradient, bag = read()
    late = Clock(1e-9)
    assert texts_of_places(model, gradient, bag, late, unheard) == []
    assert late.rang
    monkeypatch.setattr(placed_texts, "_CELLS", 10)
    assert texts_of_places(model, gradient, bag, UNLIMITED, unheard) == []


@torch.no_grad()
def test_the_search_ends_where_no_text_agrees(read, monkeypatch):
    model, _, gradient, bag = read()
    monkeypatch.setattr(placed_texts, "_DRAWN", 2)
    wrong = bag.share_NO[torch.arange(len(bag.tokens_N) - 1, -1, -1)]
    begun, text = [], _Search.text
    monkeypatch.setattr(_Search, "text", lambda *given: begun.append(text(*given)) or begun[-1])
    bag.share_NO.copy_(wrong)
    assert texts_of_places(model, gradient, bag, UNLIMITED, unheard) == []
    assert begun == [None, None]
