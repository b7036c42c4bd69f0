"""The best of what was tried, with and without a rough judge before the exact one."""

import pytest
import torch

from fedleak.attacks.clock import Clock
from fedleak.attacks.matching.candidate_selection import best_of_batch
from fedleak.attacks.matching.optimizer import UNWATCHED, Search, Watch

pytestmark = pytest.mark.core


class Judge:
    """An objective that knows the distance of each guess, and looks at a few at a time."""

    def __init__(self, apart_RK, rough=None):
        self.apart_RK, self.rough = apart_RK, rough

    def chunks(self, guesses, sequences):
        return (slice(i, i + 7) for i in range(0, guesses, 7))

    def scores_of_tokens(self, tried_RKBT):
        return self.apart_RK.gather(1, tried_RKBT[..., 0, 0])


def best(exact_RK, rough_RK, lm_penalty_RK, watch=UNWATCHED):
    """The best of guesses whose only token is their number."""
    tried_RKBT = torch.arange(exact_RK.shape[1]).repeat(len(exact_RK), 1)[..., None, None]
    objective = Judge(exact_RK, None if rough_RK is None else Judge(rough_RK))
    return best_of_batch(Search(objective, None, [], watch), tried_RKBT, lm_penalty_RK)


@pytest.mark.parametrize("rough", [False, True])
def test_the_least_sum_wins(rough):
    rng = torch.Generator().manual_seed(0)
    exact_RK, lm_penalty_RK = torch.rand(2, 3, 40, generator=rng)
    selection = best(exact_RK, exact_RK + 1e-3 if rough else None, lm_penalty_RK)
    at_R = (exact_RK + lm_penalty_RK).argmin(1)
    assert torch.equal(selection.chosen_RX[:, 0, 0], at_R)
    assert torch.equal(selection.apart_R, exact_RK.gather(1, at_R[:, None])[:, 0])
    assert torch.equal(selection.lm_penalty_R, lm_penalty_RK.gather(1, at_R[:, None])[:, 0])


def test_the_first_of_equals_wins():
    assert best(torch.zeros(1, 30), None, torch.zeros(1, 30)).chosen_RX.item() == 0


def test_what_there_is_now_is_kept_if_only_a_rough_judge_finds_others_better():
    exact_RK, rough_RK = torch.ones(1, 40), torch.zeros(1, 40)
    exact_RK[0, 0], rough_RK[0, 0] = 0.5, 9.0
    assert best(exact_RK, rough_RK, torch.zeros(1, 40)).chosen_RX.item() == 0


@pytest.mark.parametrize("rough", [False, True])
def test_out_of_time_the_best_of_what_was_looked_at_is_chosen(rough):
    exact_RK = torch.arange(40.0, 0, -1)[None]
    looked = []
    watch = Watch(Clock(None), lambda *shown: looked.append(shown))
    watch.up = lambda step=0.0: len(looked) >= 2
    selection = best(exact_RK, exact_RK if rough else None, torch.zeros(1, 40), watch)
    # Two chunks of seven by the first judge; by an exact one after it, its first, as always.
    assert selection.chosen_RX.item() == 13
    assert selection.apart_R.item() == 27
    assert looked[:2] == [(0, "changes 1/6", ()), (0, "changes 2/6", ())]
    assert len(looked) == (3 if rough else 2)


def test_what_there_is_now_is_kept_if_time_is_up_at_once():
    watch = Watch(Clock(-1.0))
    exact_RK = torch.arange(14.0, 0, -1)[None]
    exact_RK[0, 0] = 0.0
    assert best(exact_RK, exact_RK, torch.zeros(1, 14), watch).chosen_RX.item() == 0
