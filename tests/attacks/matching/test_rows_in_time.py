"""How many rows and starts a search has follows from its time."""

from types import SimpleNamespace

import pytest
import torch

from fedleak.attacks import clock
from fedleak.attacks.clock import Clock
from fedleak.attacks.matching import gradient_matching
from fedleak.attacks.matching.batch_structure import Shape, Shapes
from fedleak.attacks.matching.dlg import Dlg
from fedleak.attacks.matching.gradient_matching import rows_in_time, starts_in_time
from fedleak.attacks.matching.relaxed_tokens import BEST_FREE
from fedleak.attacks.reconstruction import Status
from fedleak.util.rng import stream


@pytest.fixture(autouse=True)
def _still(monkeypatch):
    monkeypatch.setattr(clock, "now", lambda: 0.0)


def victim(shapes, lengths_known):
    possible_shapes = [Shape((length,), (0,)) for length in range(3, 3 + shapes)]
    return SimpleNamespace(shapes=Shapes(possible_shapes, lengths_known))


@pytest.mark.parametrize(
    ("seconds", "lengths_known", "rows"),
    [
        (None, False, range(16)),
        (1000, False, range(16)),
        (160, True, range(0, 16, 2)),  # one start of each shape
        (80, True, [0, 2, 4, 6]),  # the likeliest lengths
        (80, False, [0, 4, 8, 12]),  # lengths that are unlike
        (10, True, [0]),
        (2, True, []),
    ],
)
def test_a_search_has_as_many_rows_as_its_time_holds_steps_of(seconds, lengths_known, rows):
    assert rows_in_time([victim(8, lengths_known)], 2, 1.0, Clock(seconds)) == [*rows]


def test_victims_share_the_time():
    both = [victim(8, True), victim(1, True)]
    assert rows_in_time(both, 2, 1.0, Clock(160)) == [0, 2, 4, 6, 16, 17]


def test_random_starts_take_no_more_than_a_part_of_the_time():
    assert starts_in_time(BEST_FREE, 1.0, Clock(None)) == BEST_FREE
    assert starts_in_time(BEST_FREE, 1.0, Clock(80)).guesses == 20
    assert starts_in_time(BEST_FREE, 1.0, Clock(1)).guesses == 1


def test_a_step_is_measured_only_where_time_is_short(small, observe, monkeypatch):
    model = small("bert", width=16)
    seen = observe(model, ["she told us"]).seen
    measurements = []

    def measured(*arguments):
        measurements.append(arguments)
        return 1.0

    monkeypatch.setattr(gradient_matching, "seconds_of_step", measured)
    for seconds, calls in ((None, 0), (100.0, 1), (1.0, 2)):
        attack = Dlg(steps=1, starts=1, seconds=seconds)
        answer = attack(seen, model, rng=stream(0, "dlg"))
        assert len(measurements) == calls
    assert answer.status == Status.ABSTAINED
    assert answer.diagnostics == {"time_up": True}


def test_the_measured_step_is_that_of_the_largest_row(small, observe, monkeypatch):
    model = small("bert", width=16)
    seen = observe(model, ["she told us that it is over"] * 2, granted=("lengths",)).seen
    steps = iter(range(100))
    monkeypatch.setattr(clock, "now", lambda: float(next(steps)))
    step_seconds = []
    monkeypatch.setattr(
        gradient_matching, "rows_in_time", lambda _, starts, step, clock: step_seconds.append(step)
    )
    Dlg(steps=1, seconds=50.0)(seen, model, rng=torch.Generator())
    assert step_seconds == [1.0]
