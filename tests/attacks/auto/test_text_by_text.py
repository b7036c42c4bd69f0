"""Texts of a batch sought one by one: what is taken, what a text is changed to, who is likely."""

from dataclasses import replace

import pytest

from fedleak.attacks.auto.joint_likelihood import Joint, Judgement, table
from fedleak.attacks.auto.text_by_text import TextSearch
from fedleak.attacks.certificate import as_gradient
from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.attacks.subspace.pooled_span import Fit, PooledSpan
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.models import CLASSIFICATION
from fedleak.util.rng import stream

TEXTS = ["he pays for all of his old friends", "the doctor saw a green house", "nobody knows it"]
LABELS = [0, 1, 1]
SIGMA = 3e-4


def search(small, observe, texts=TEXTS, labels=LABELS, family="bert", span=True):
    """A search, and the texts in the order of their labels."""
    model = small(family, CLASSIFICATION, layers=2, width=48)
    truth = observe(model, texts, labels)
    update = GaussianNoise(sigma=SIGMA)(truth.seen.update, rng=stream(0, "noise"))
    observed = as_gradient(replace(truth.seen, update=update))
    joint = Joint(model, observed, SIGMA, labels)
    placed = table(model, joint.word_VD, joint.place_PD)
    assert placed is not None
    tells = PooledSpan(model, observed if span else {}, SIGMA, len(texts))
    made = TextSearch(model, joint, tells, placed, None, None, UNLIMITED)
    return made, tuple(map(tuple, model.encode(texts)))


@pytest.mark.parametrize("family", ["bert", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_three_texts_are_read_and_each_is_likely(small, observe, family):
    made, texts = search(small, observe, family=family)
    state = made.run(lambda progress: None)
    assert sorted(state) == sorted(texts)
    assert made.likely(state, UNLIMITED) == [True] * 3


def test_what_others_read_is_taken_if_it_is_right_and_else_a_guess(small, observe, monkeypatch):
    made, texts = search(small, observe)
    wrong = (*texts[1][:2], texts[0][2], *texts[1][3:])
    climbs = []
    monkeypatch.setattr(made, "_climbed", lambda ids, number: climbs.append(ids) or texts[1])
    assert made.run(lambda progress: None, [wrong, texts[0], texts[2]]) == texts
    assert len(climbs) == 1


def test_a_text_that_is_there_twice_ends_the_search_too(small, observe):
    made, texts = search(small, observe, [TEXTS[0], TEXTS[1], TEXTS[1]])
    assert made.run(lambda progress: None) == texts


@pytest.mark.parametrize("span", [True, False])
def test_beside_a_wrong_text_none_is_likely(small, observe, span):
    made, texts = search(small, observe, span=span)
    assert made.likely(texts, UNLIMITED) == [True] * 3
    wrong = (*texts[1][:2], texts[0][2], *texts[1][3:])
    assert made.likely((texts[0], wrong, texts[2]), UNLIMITED) == [False] * 3


@pytest.mark.parametrize(("alone", "beside"), [(0.0, 0.0), (5.0, 5.0), (0.0, 7.0), (7.0, 0.0)])
def test_a_text_is_likely_if_other_words_leave_more(small, observe, monkeypatch, alone, beside):
    made, texts = search(small, observe)

    def fits(candidates):
        return [Fit(0.0, 0.0 if ids in texts else alone) for ids in candidates]

    def judged(state):
        return Judgement(0.0, 0.0 if state == texts else beside)

    monkeypatch.setattr(made.span, "of", fits)
    monkeypatch.setattr(made.joint, "_judge", judged)
    assert made.likely(texts, UNLIMITED) == [max(alone, beside) > 6] * 3


def test_without_a_span_there_is_a_text_for_each(small, observe):
    made, texts = search(small, observe, span=False)
    assert len(made.run(lambda progress: None)) == len(texts)


def test_who_is_taken_goes_out_of_the_table_at_a_number_of_its_class(small, observe):
    made, texts = search(small, observe)
    own = {(word, place) for place, word in enumerate(texts[0]) if 0 < place < len(texts[0]) - 1}
    assert own <= set(made.placed.variance)
    made._take(texts[0])
    assert made.taken == {0: texts[0]}
    assert not own & set(made.placed.variance)
    others = {(word, place) for ids in texts[1:] for place, word in enumerate(ids[1:-1], 1)}
    assert others <= set(made.placed.variance)


def test_changes_keep_the_marks_and_known_lengths(small, observe):
    made, texts = search(small, observe)
    known, special = replace(made, lengths=[len(ids) for ids in texts]), made.model.special_ids()
    for ids in texts:
        for place in range(1, len(ids)):
            for other in (*made._at(ids, place, 12), *made._pairs(ids), *made._pointed(ids)):
                assert other != ids or place == 0 or other in made._pointed(ids)
                assert (other[0], other[-1]) == (ids[0], ids[-1])
                assert not {*other[1:-1]} & special
            assert all(len(other) == len(ids) for other in known._at(ids, place, 12))


def test_the_best_of_all_changes_is_taken(small, observe):
    made, texts = search(small, observe)
    wrong = (*texts[0][:3], texts[1][3], *texts[0][4:])
    changed = [other for place in range(1, len(wrong)) for other in made._at(wrong, place, 4)]
    best = max([wrong, *changed], key=lambda ids: made._total(ids))
    assert made._better(wrong, changed) == best == texts[0]
    assert made._better(texts[0], [wrong]) == texts[0]


def test_nothing_is_likely_if_there_is_no_time_for_a_table(small, observe, monkeypatch):
    made, texts = search(small, observe)
    assert made.likely(texts, Clock(60.0)) == [True] * 3
    assert 0 < made.table_seconds < 60
    made.table_seconds, clock = 120.0, Clock(60.0)
    monkeypatch.setattr(made, "_beside", lambda taken: pytest.fail("it makes a table"))
    assert made.likely(texts, clock) == [False] * 3
    assert clock.rang
