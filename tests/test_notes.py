import inspect
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from itertools import pairwise

import pytest
from cases import some
from hypothesis import given
from hypothesis import strategies as st

from fedleak.data.notes import _GRAMMAR, HEALTH, LIMIT, OTHER, Note, notes


@cache
def many() -> list[Note]:
    return notes(20_000)


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


@pytest.mark.parametrize("seed", some([0, 1], every=2))
def test_every_note_is_different_even_in_lower_case(seed):
    assert len({note.text.lower() for note in notes(20_000, seed)}) == 20_000


@given(few=st.integers(0, 60), more=st.integers(0, 60), seed=st.integers(0, 2**32))
def test_fewer_notes_are_the_beginning_of_more(few, more, seed):
    assert notes(few + more, seed)[:few] == notes(few, seed)


def test_another_seed_writes_other_notes():
    first, second = ({note.text for note in notes(2_000, seed)} for seed in (0, 1))
    assert len(first & second) < 100


def test_another_process_writes_the_same_notes():
    # Strings hash differently there, so that the order of a set would show.
    code = f"import runpy; notes = runpy.run_path({inspect.getfile(notes)!r})['notes']; "
    code += "print('\\n'.join(n.text for n in notes(300)))"
    written = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert written == [note.text for note in many()[:300]]


@pytest.mark.parametrize("count", [0, 1, 2, 7, 20_000])
def test_labels_are_balanced_within_one(count):
    labels = Counter(note.label for note in many()[:count])
    assert abs(labels[HEALTH] - labels[OTHER]) <= 1
    assert labels.total() == count


def test_labels_tell_what_a_note_is_about():
    clinical = re.compile(r"\bDr\.|\d mg\b|diagnosed|specialist|surgeon|infected|pregnant")
    about = Counter(note.label for note in many() if clinical.search(note.text))
    assert about[HEALTH] > 1_500
    assert about[OTHER] == 0


def test_notes_are_sentences_of_6_to_18_words():
    for text, _ in many():
        assert 6 <= len(text.split()) <= 18, text
        assert re.fullmatch(r"[A-Z0-9].*[^ .][.?]", text), text
        assert text.isascii(), text


def test_nothing_of_the_grammar_is_left_in_a_note():
    for text, _ in many():
        assert not re.search(r"[{}|#^\\\n]|  | [,.;:]", text), text


def test_no_word_comes_twice_in_a_row():
    for text, _ in many():
        assert all(a.lower() != b.lower() for a, b in pairwise(text.split())), text


def test_articles_fit_their_nouns():
    for text, _ in many():
        assert not re.search(r"\b[Aa] [aeiou]", text), text
        assert not re.search(r"\b[Aa]n [bcdfgjklmnpqrstvwxyz]", text), text


def test_phone_numbers_are_kept_free_for_fiction():
    numbers = [n for text, _ in many() for n in re.findall(r"\b\d{3}-\d{4}\b(?!-)", text)]
    assert len(numbers) > 300
    assert all(re.fullmatch(r"555-01\d\d", number) for number in numbers)


def test_words_are_many_and_only_those_of_grammar_are_everywhere():
    counts = Counter(word for text, _ in many()[:5_000] for word in set(words(text)))
    assert len(counts) > 1_500
    grammar = re.compile("a|and|at|before|for|from|i|in|is|it|my|of|on|s|the|to|was")
    assert [w for w, count in counts.items() if count > 500 and not grammar.fullmatch(w)] == []


def test_no_run_of_six_words_is_in_more_than_one_note_of_a_hundred():
    runs: Counter[tuple[str, ...]] = Counter()
    for text, _ in many()[:5_000]:
        split = text.split()
        runs.update({tuple(split[i : i + 6]) for i in range(len(split) - 5)})
    [(run, count)] = runs.most_common(1)
    assert count <= 50, run


def test_every_template_and_slot_is_used():
    health, other, slots = _GRAMMAR["health"], _GRAMMAR["other"], _GRAMMAR["slots"]
    grammar = " ".join((*health, *other, *(p for phrases in slots.values() for p in phrases)))
    assert set(re.findall(r"\{([a-z]+)\}", grammar)) == slots.keys()
    assert all(len(set(phrases)) == len(phrases) for phrases in (health, other))
    assert [name for name, phrases in slots.items() if len(set(phrases)) < len(phrases)] == [
        "street"  # twice as many streets are named after trees as after crafts
    ]


@pytest.mark.parametrize("count", [-1, LIMIT + 1])
def test_a_count_that_cannot_be_written_is_refused(count):
    with pytest.raises(ValueError, match=f"asked for {count} notes, can write 0 to {LIMIT}"):
        notes(count)


@pytest.mark.slow
def test_the_limit_can_be_written():
    assert len({note.text for note in notes(LIMIT)}) == LIMIT
