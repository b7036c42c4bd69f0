import pytest
from hypothesis import given
from hypothesis import strategies as st
from scored import row

from fedleak.attacks.reconstruction import Status
from fedleak.audit.estimates import Largest
from fedleak.audit.worst_case import worst_case
from fedleak.store.records import LEAKAGE

pytestmark = pytest.mark.core


def abstained(attack, client, size, round=1):
    return row(attack, client, round=round, status=Status.ABSTAINED, batch_size=size, texts=None)


def test_a_text_is_read_if_any_attack_read_it():
    rows = [
        row(
            "a",
            0,
            (True, 100.0, 1.0),
            (False, 20.0, 0.5),
            control_rougeL=7.0,
            control_token_recall=0.3,
        ),
        row(
            "b",
            0,
            (False, 30.0, 0.2),
            (True, 100.0, 1.0),
            control_rougeL=9.0,
            control_token_recall=0.1,
        ),
        row("a", 1, (False, 10.0, 0.1)),
        abstained("b", 1, 1),
    ]
    worst = worst_case(
        rows, {leakage_row.id: place for place, leakage_row in enumerate(rows)}, Largest()
    )
    assert (worst.attacks, worst.texts, worst.clients) == (("a", "b"), 3, 2)
    assert worst.exact_match.mean == pytest.approx(2 / 3)
    assert worst.rougeL.mean == pytest.approx(210 / 3)
    assert worst.token_recall.mean == pytest.approx(2.1 / 3)
    assert worst.control_rougeL.mean == 9.0
    assert worst.control_token_recall.mean == 0.3
    assert worst.unattacked == 0
    assert worst.nearly == 0
    assert "fewer than 10 clients" in worst.warning


def test_a_text_is_nearly_read_if_its_best_answer_is_and_none_is_exact():
    rows = [
        row("a", 0, (False, 90.0, 1.0), (False, 89.9, 1.0), (False, 95.0, 1.0), (None, None, 1.0)),
        row("b", 0, (False, 10.0, 0.1), (False, 10.0, 0.1), (True, 100.0, 1.0), (None, None, 1.0)),
    ]
    assert worst_case(rows, {}, Largest()).nearly == 1


def test_rows_of_one_update_that_count_other_texts_are_summed_up():
    rows = [row("a", 0, (True, 100.0, 1.0)), row("b", 0, (False, 9.0, 0.1), (True, 100.0, 1.0))]
    worst = worst_case(rows, {}, Largest())
    assert worst.exact_match.mean == 1.0
    assert worst.first == {"a": 1, "b": 1}


def test_who_answered_first_read_it_first():
    quick = row("quick", 0, (True, 100.0, 1.0), (False, 0.0, 0.0))
    slow = row("slow", 0, (True, 100.0, 1.0), (True, 100.0, 1.0))
    assert worst_case([quick, slow], {quick.id: 0, slow.id: 1}, Largest()).first == {
        "quick": 1,
        "slow": 1,
    }
    assert worst_case([quick, slow], {quick.id: 1, slow.id: 0}, Largest()).first == {"slow": 2}


def test_what_no_attack_named_is_not_taken_for_unread():
    bags = row("probes", 0, (None, None, 0.9), (None, None, 0.7))
    worst = worst_case([bags, abstained("dager", 0, 2), abstained("dager", 1, 3)], {}, Largest())
    assert (worst.texts, worst.unattacked) == (5, 5)
    assert worst.exact_match is None
    assert worst.rougeL is None
    assert worst.token_recall.mean == pytest.approx(0.8)


def test_without_scores_of_texts_there_is_none():
    assert worst_case([], {}, Largest()) is None
    assert worst_case([abstained("dager", 0, 2)], {}, Largest()) is None


SCORES = st.tuples(st.booleans(), st.floats(0, 100), st.floats(0, 1))


@given(st.lists(st.lists(SCORES, min_size=2, max_size=2), min_size=2, max_size=4))
def test_it_is_no_better_than_the_best_attack_and_no_worse_than_any(batches):
    rows = [row(f"a{i}", 0, *texts) for i, texts in enumerate(batches)]
    worst = worst_case(rows, {}, Largest())
    for part, values in (
        (worst.exact_match, [[e for e, _, _ in texts] for texts in batches]),
        (worst.rougeL, [[r for _, r, _ in texts] for texts in batches]),
        (worst.token_recall, [[t for _, _, t in texts] for texts in batches]),
    ):
        assert part.mean >= max(sum(scores) / len(scores) for scores in values) - 1e-9
        assert part.mean <= max(max(scores) for scores in values) + 1e-9
        assert part.low <= part.mean <= part.high


def test_a_row_whose_texts_do_not_fit_is_damaged():
    line = LEAKAGE.written(row("a", 0, (True, 100.0, 1.0))).encode()
    assert LEAKAGE.parse_line(line).texts[0].exact
    with pytest.raises(ValueError, match="texts: 1 for a batch of 2"):
        LEAKAGE.parse_line(line.replace(b'"batch_size": 1', b'"batch_size": 2'))
