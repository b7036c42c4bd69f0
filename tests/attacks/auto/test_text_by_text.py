"""Texts of a batch sought one by one: what is taken, what a text is changed to, who is likely."""

from dataclasses import replace

import pytest

from fedleak.attacks.auto.joint_likelihood import Joint, Judgement, table
from fedleak.attacks.auto.text_by_text import TextSearch
from fedleak.attacks.auto.text_evidence import TextEvidence
from fedleak.attacks.certificate import as_gradient
from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.models import CLASSIFICATION
from fedleak.util.rng import stream

TEXTS = ["he pays for all of his old friends", "the doctor saw a green house", "nobody knows it"]
LABELS = [0, 1, 1]
SIGMA = 3e-4
RIGHT = Judgement(0.0, 0.0, 0.0)


def search(small, observe, texts=TEXTS, labels=LABELS, family="bert", clock=UNLIMITED):
    """A search, and the texts in the order of their labels."""
    model = small(family, CLASSIFICATION, layers=2, width=48)
    truth = observe(model, texts, labels)
    update = GaussianNoise(sigma=SIGMA)(truth.seen.update, rng=stream(0, "noise"))
    observed = as_gradient(replace(truth.seen, update=update))
    joint = Joint(model, observed, SIGMA, labels)
    placed = table(model, joint.word_VD, joint.place_PD)
    assert placed is not None
    evidence = TextEvidence(model, observed, SIGMA, joint, stream(0, "evidence"))
    made = TextSearch(model, joint, evidence, placed, None, None, clock)
    return made, tuple(map(tuple, model.encode(texts)))


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_three_texts_are_read_and_each_is_likely(small, observe, family):
    made, texts = search(small, observe, family=family)
    state = made.run(lambda progress: None)
    assert sorted(state) == sorted(texts)
    assert made.likely(state, UNLIMITED) == [True] * 3


def test_a_text_that_is_there_twice_ends_the_search_too(small, observe):
    made, texts = search(small, observe, [TEXTS[0], TEXTS[1], TEXTS[1]])
    assert made.run(lambda progress: None) == texts


def test_what_others_read_is_begun_with(small, observe, monkeypatch):
    made, texts = search(small, observe)
    begun = []
    monkeypatch.setattr(made, "_begun", lambda *_: [])
    monkeypatch.setattr(made, "_climbed", lambda ids, *_: begun.append(ids) or ids)
    wrong = (*texts[1][:2], texts[0][2], *texts[1][3:])
    assert sorted(made.run(lambda progress: None, [*texts, wrong])) == sorted(texts)
    assert sorted(begun) == sorted(texts)


def test_beside_a_wrong_text_none_is_likely(small, observe):
    made, texts = search(small, observe)
    assert made.likely(texts, UNLIMITED) == [True] * 3
    wrong = (*texts[1][:2], texts[0][2], *texts[1][3:])
    assert made.likely((texts[0], wrong, texts[2]), UNLIMITED) == [False] * 3


@pytest.mark.parametrize(("excess", "worst"), [(5.9, 9.9), (6.1, 0.0), (0.0, 10.1)])
def test_a_text_is_likely_if_each_change_leaves_clearly_more(
    small, observe, monkeypatch, excess, worst
):
    made, texts = search(small, observe)
    changed = Judgement(0.0, excess, worst)
    monkeypatch.setattr(made.joint, "_judge", lambda state: RIGHT if state == texts else changed)
    assert made.likely(texts, UNLIMITED) == [excess > 6 or worst > 10] * 3


def test_who_is_taken_goes_out_of_the_table(small, observe):
    made, texts = search(small, observe)
    own = {(word, place) for place, word in enumerate(texts[0]) if 0 < place < len(texts[0]) - 1}
    assert own <= set(made.placed.variance)
    made.take({0: texts[0]})
    assert not own & set(made.placed.variance)
    others = {(word, place) for ids in texts[1:] for place, word in enumerate(ids[1:-1], 1)}
    assert others <= set(made.placed.variance)


def test_changes_keep_the_marks_and_known_lengths(small, observe):
    made, texts = search(small, observe)
    known, special = replace(made, lengths=[len(ids) for ids in texts]), made.model.special_ids()
    for searching in (made, known):
        searching.take({})
        for ids, label in zip(texts, LABELS, strict=True):
            nexts_TV, lengths = searching._nexts(ids), set()
            for kind in (0, 2):
                for place in range(1, len(ids)):
                    for other in searching._at(ids, label, place, nexts_TV, kind):
                        assert other != ids
                        assert (other[0], other[-1]) == (ids[0], ids[-1])
                        assert not {*other[1:-1]} & special
                        lengths.add(len(other) - len(ids))
            assert lengths == ({0} if searching is known else lengths | {-1, 0, 1})


def test_words_are_moved_and_all_stay(small, observe):
    made, texts = search(small, observe)
    moved = made._moved(texts[0])
    assert all(sorted(other) == sorted(texts[0]) and other != texts[0] for other in moved)
    assert len({*moved}) == len(moved)
    a, b, c = texts[0][1:4]
    rest = texts[0][4:]
    for begun in ([b, a, c], [c, b, a], [b, c, a], [c, a, b]):
        assert (texts[0][0], *begun, *rest) in moved


def test_the_best_of_all_changes_is_taken(small, observe):
    made, texts = search(small, observe)
    made.take({1: texts[1], 2: texts[2]})
    wrong = (*texts[0][:3], texts[1][3], *texts[0][4:])
    assert made._climbed(wrong, 0, 0) == texts[0]
    exchanged = (*texts[0][:2], texts[0][5], *texts[0][3:5], texts[0][2], *texts[0][6:])
    assert made._climbed(exchanged, 0, 1) == texts[0]
    assert made._climbed(texts[0], 0, 2) == texts[0]


def test_texts_that_are_right_but_for_one_are_mended_there(small, observe):
    made, texts = search(small, observe)
    made.take({})
    wrong = (*texts[1][:2], texts[0][2], *texts[1][3:])
    doubts = made._doubts((texts[0], wrong, texts[2]))
    assert max(doubts) == doubts[1]
    assert made._mended((texts[0], wrong, texts[2]), lambda progress: None) == texts


def test_out_of_time_there_is_a_text_for_each(small, observe):
    made, texts = search(small, observe, clock=Clock(1e-9))
    assert len(made.run(lambda progress: None)) == len(texts)


def test_nothing_is_likely_if_there_is_no_time_for_a_table(small, observe, monkeypatch):
    made, texts = search(small, observe)
    assert made.likely(texts, Clock(60.0)) == [True] * 3
    assert 0 < made.table_seconds < 60
    made.table_seconds, clock = 120.0, Clock(60.0)
    monkeypatch.setattr(made, "take", lambda taken: pytest.fail("it makes a table"))
    assert made.likely(texts, clock) == [False] * 3
    assert clock.rang
