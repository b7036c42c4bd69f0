"""Orders of a sentence: which there are, and what they do to it."""

from collections import Counter
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedleak.attacks.matching import reorderings
from fedleak.attacks.matching.candidate_selection import stacked
from fedleak.attacks.matching.reorderings import orders_tensor, reordered

pytestmark = pytest.mark.core

LENGTHS = st.integers(0, 9)


@st.composite
def changes(draw):
    length = draw(st.integers(1, 9))
    return length, draw(st.integers(0, length - 1)), draw(st.integers(0, length - 1))


@st.composite
def blocks(draw):
    length = draw(st.integers(0, 9))
    start = draw(st.integers(0, length))
    stop = draw(st.integers(start, length))
    return length, start, stop, draw(st.integers(0, length - (stop - start)))


def is_swap(order):
    return sum(i != token for i, token in enumerate(order)) == 2


def is_move(order):
    """Whether two neighbouring blocks change places, by trying all of them."""
    n, now = len(order), tuple(range(len(order)))
    return any(
        order == now[:i] + now[j:k] + now[i:j] + now[k:]
        for i in range(n)
        for j in range(i + 1, n)
        for k in range(j + 1, n + 1)
    )


def every(length):
    """All orders that one change makes."""
    return reorderings.nearby(length, 10**6, torch.Generator())


def is_permutation(order, length):
    return sorted(order) == list(range(length))


@given(changes())
def test_a_swap_exchanges_two_tokens_and_is_its_own_inverse(change):
    length, i, j = change
    order = reorderings.swap(length, i, j)
    assert is_permutation(order, length)
    assert (order[i], order[j]) == (j, i)
    assert is_swap(order) or i == j
    assert tuple(order[place] for place in order) == tuple(range(length))


@given(blocks())
def test_a_move_keeps_the_order_of_the_block_and_of_the_rest(block):
    length, start, stop, to = block
    order = reorderings.move(length, start, stop, to)
    assert is_permutation(order, length)
    assert order[to : to + stop - start] == tuple(range(start, stop))
    rest = order[:to] + order[to + stop - start :]
    assert rest == tuple(range(start)) + tuple(range(stop, length))


@pytest.mark.parametrize("length", range(6))
def test_nearby_orders_are_what_one_swap_or_one_move_makes_and_nothing_else(length):
    orders = every(length)
    expected = {p for p in permutations(range(length)) if is_swap(p) or is_move(p)}
    assert len(orders) == len(expected)
    assert set(orders) == expected


@given(LENGTHS, st.integers(0, 60), st.integers(0, 10**6))
def test_of_many_nearby_orders_some_are_drawn(length, most, seed):
    orders = reorderings.nearby(length, most, torch.Generator().manual_seed(seed))
    assert len(orders) == len(set(orders)) == min(most, len(every(length)))
    assert set(orders) <= set(every(length))


def test_any_of_them_is_drawn_as_often():
    rng = torch.Generator().manual_seed(0)
    counts = Counter(order for _ in range(3000) for order in reorderings.nearby(5, 4, rng))
    expected = 3000 * 4 / len(every(5))
    assert len(counts) == len(every(5))
    assert max(abs(count - expected) for count in counts.values()) < 5 * expected**0.5


def test_the_orders_of_a_long_text_need_no_list_of_all():
    orders = reorderings.nearby(300, 50, torch.Generator().manual_seed(0))
    assert len(set(orders)) == 50
    assert all(is_permutation(order, 300) for order in orders)


@given(LENGTHS, st.integers(1, 60), st.integers(0, 10**6))
def test_drawn_orders_are_distinct_and_some_of_all(length, draws, seed):
    orders = reorderings.sampled(length, draws, torch.Generator().manual_seed(seed))
    assert orders[0] == tuple(range(length))
    assert len(orders) == len(set(orders)) <= draws
    assert set(orders[1:]) <= set(every(length))


@pytest.mark.parametrize("length", [2, 3, 4])
def test_enough_draws_find_every_order(length):
    orders = reorderings.sampled(length, 3000, torch.Generator().manual_seed(0))
    assert set(orders[1:]) == set(every(length))


@given(st.integers(2, 9), st.integers(0, 10**6))
def test_a_quarter_of_the_draws_each_is_of_a_kind(length, seed):
    now = tuple(range(length))
    drawn = [now, *reorderings.random_moves(length, 80, torch.Generator().manual_seed(seed))]
    assert len(drawn) == 80
    one_token = {reorderings.move(length, i, i + 1, to) for i in now for to in now}
    rotations = {now[i:] + now[:i] for i in now}
    for draw, order in enumerate(drawn):
        if draw % 4 == 0:
            assert order == now or is_swap(order)
        elif draw % 4 == 1:
            assert order in one_token
        elif draw % 4 == 2:
            assert order == now or is_move(order)
        else:
            assert order in rotations
    assert len({*drawn[3::4]}) > 1


@st.composite
def sentences(draw):
    """A sentence with tokens that stay, and orders of the others."""
    length = draw(st.integers(1, 10))
    places = sorted(draw(st.sets(st.integers(0, length - 1))))
    orders = draw(st.lists(st.permutations(range(len(places))), min_size=0, max_size=4))
    return length, places, orders


@given(sentences())
def test_an_order_moves_content_and_nothing_else(sentence):
    length, places, orders = sentence
    ids_T = torch.arange(100, 100 + length)
    order_KT = orders_tensor(orders, places, length)
    assert order_KT.shape == (len(orders), length)
    for order, moved_ids in zip(orders, ids_T[order_KT].tolist(), strict=True):
        expected = ids_T.tolist()
        for i, place in enumerate(places):
            expected[place] = 100 + places[order[i]]
        assert moved_ids == expected


def test_numbers_at_a_place_go_where_their_token_goes():
    variables_RBTF = torch.randn(2, 2, 4, 3, generator=torch.Generator().manual_seed(0))
    order_RBT = torch.tensor([[[0, 2, 1, 3], [3, 2, 1, 0]], [[0, 1, 2, 3], [1, 2, 3, 0]]])
    moved_RBTF = reordered(variables_RBTF, order_RBT)
    for r in range(2):
        for b in range(2):
            for t in range(4):
                assert torch.equal(moved_RBTF[r, b, t], variables_RBTF[r, b, order_RBT[r, b, t]])


def test_a_row_with_fewer_guesses_repeats_its_first():
    few, many = torch.tensor([[7, 8]]), torch.tensor([[1, 2], [3, 4], [5, 6]])
    assert stacked([few, many]).tolist() == [[[7, 8]] * 3, many.tolist()]
