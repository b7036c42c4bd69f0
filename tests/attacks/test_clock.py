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
    one = Clock(5)
    time.seconds = 105
    assert not one.up()
    assert not one.rang
    time.seconds = 105.1
    assert not one.rang
    assert one.up()
    assert one.rang


def test_without_a_number_of_seconds_it_never_rings(time):
    one, share = Clock(None), Clock(None).part(3)
    time.seconds = math.inf
    assert not one.up()
    assert not share.up()


def test_a_share_is_of_what_is_left(time):
    one = Clock(10)
    time.seconds = 104
    third = one.part(3)
    time.seconds = 106
    assert not third.up()
    time.seconds = 106.1
    assert third.up()
    assert not one.up()
    assert not one.rang
