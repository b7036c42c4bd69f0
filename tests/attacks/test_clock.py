import math
from types import SimpleNamespace

import pytest

from fedleak.attacks import clock
from fedleak.attacks.clock import Clock


@pytest.fixture
def time(monkeypatch):
    """What the clock reads, to be set."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(clock, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    return now


def test_a_clock_rings_when_its_seconds_are_over_and_says_that_it_was_heard(time):
    timer = Clock(5)
    time.seconds = 105
    assert not timer.up()
    assert not timer.rang
    time.seconds = 105.1
    assert not timer.rang
    assert timer.up()
    assert timer.rang


def test_without_a_number_of_seconds_it_never_rings(time):
    timer, share = Clock(None), Clock(None).part(3)
    time.seconds = math.inf
    assert not timer.up()
    assert not share.up()


def test_a_share_is_of_what_is_left(time):
    timer = Clock(10)
    time.seconds = 104
    third = timer.part(3)
    time.seconds = 106
    assert not third.up()
    time.seconds = 106.1
    assert third.up()
    assert not timer.up()
    assert not timer.rang


def test_a_step_that_would_end_too_late_is_not_begun(time):
    timer = Clock(10)
    assert not timer.up(10)
    assert timer.up(10.1)
    assert timer.rang
    assert timer.before(4).left() == 6


@pytest.mark.parametrize(("minimum", "done"), [(0, 2), (3, 3)])
def test_parts_are_done_while_one_as_long_as_the_longest_ends_in_time(time, minimum, done):
    timer, parts = Clock(10), []
    for seconds in timer.paced([3, 4, 2, 1], minimum):
        parts.append(seconds)
        time.seconds += seconds
    assert len(parts) == done  # after seven of ten seconds another four would end too late
    assert timer.rang


def test_no_part_is_missing_if_the_last_one_ends_late(time):
    timer, parts = Clock(10), []
    for seconds in timer.paced([4, 7]):
        parts.append(seconds)
        time.seconds += seconds
    assert parts == [4, 7]
    assert not timer.rang
