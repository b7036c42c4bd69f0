"""Which victims go together, against every way to part them."""

from hypothesis import given
from hypothesis import strategies as st

from fedleak.attacks.matching.victims import Size, cost, parts


def every_way(items):
    """All partitions of a list."""
    if not items:
        yield []
        return
    first, *rest = items
    for way in every_way(rest):
        yield [[first], *way]
        for i, part in enumerate(way):
            yield [*way[:i], [first, *part], *way[i + 1 :]]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(0, 200))
def test_no_way_to_part_victims_of_one_kind_costs_less(lengths, a_pass):
    sizes = {10 + i: Size(length, 2, 3) for i, length in enumerate(lengths)}
    partition = parts(list(sizes), sizes, a_pass)
    assert sorted(i for part in partition for i in part) == list(sizes)

    def total(way):
        return sum(cost([sizes[i] for i in part], a_pass) for part in way)

    assert total(partition) == min(map(total, every_way(list(sizes))))


def test_an_outlier_goes_alone_and_the_others_together():
    sizes = {0: Size(10, 1, 1), 1: Size(90, 1, 1), 2: Size(12, 1, 1), 3: Size(11, 1, 1)}
    assert parts([0, 1, 2, 3], sizes, 32) == [[0, 2, 3], [1]]
    assert parts([0, 1, 2, 3], sizes, 10**6) == [[0, 1, 2, 3]]
    assert parts([0, 1, 2, 3], sizes, 0) == [[0], [3], [2], [1]]


def test_all_rows_of_a_victim_count_and_the_largest_batch():
    single, many = Size(10, 1, 1), Size(12, 4, 16)
    assert cost([single], 5) == 5 + 10
    assert cost([single, many], 5) == 5 + 12 * 4 * 17
