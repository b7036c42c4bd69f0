"""Which word stands where: against the likelihood that dense matrices give, and on rows made up."""

import pytest
import torch

from fedleak.attacks.analytic.placed_words import _Rows, placed_words

WIDTH = 96
PAIRS = ((3, 0), (7, 0), (3, 1), (11, 2), (12, 2), (5, 3), (7, 4))


def rows(strength):
    rng = torch.Generator().manual_seed(1)
    word_VD = torch.randn(40, WIDTH, generator=rng)
    place_TD = torch.randn(6, WIDTH, generator=rng)
    for word, place in PAIRS:
        both_D = strength * torch.randn(WIDTH, generator=rng)
        word_VD[word] += both_D
        place_TD[place] += both_D
    return word_VD, place_TD


def nats(word_VD, place_TD, variance):
    """The log likelihood of all rows under Gaussian pairs, of the whole covariance."""
    words, places = len(word_VD), len(place_TD)
    covariance = torch.eye(words + places, dtype=torch.float64)
    for (word, place), value in variance.items():
        column = torch.zeros(words + places, dtype=torch.float64)
        column[word] = column[words + place] = 1
        covariance += value * torch.outer(column, column)
    together = torch.cat([word_VD, place_TD]).double()
    explained = (together * torch.linalg.solve(covariance, together)).sum()
    return float(-0.5 * WIDTH * torch.logdet(covariance) - 0.5 * explained)


@pytest.mark.parametrize("strength", [2.0, 5.0, 1e3, 1e9])
def test_the_pairs_of_a_batch_are_read(strength):
    placed = placed_words(*rows(strength), never=())
    assert set(placed.variance) == set(PAIRS)
    assert placed.at(2) == [11, 12]
    assert max(placed.variance.values()) == pytest.approx(strength**2, rel=0.6)


def test_words_that_stand_nowhere_are_at_no_place():
    placed = placed_words(*rows(3.0), never=(3,))
    assert not [pair for pair in placed.variance if pair[0] == 3]
    assert not placed.gain_VT[3].any()


def test_rows_of_noise_have_no_words():
    assert not placed_words(*rows(0.0), never=()).variance


def best_of(word_VD, place_TD, variance, pair):
    """The largest likelihood over a fine grid of a pair's variances."""
    grid = (10 ** (i / 40) for i in range(-40, 80))
    return max(nats(word_VD, place_TD, variance | {pair: value}) for value in grid)


def test_what_a_pair_adds_is_the_difference_of_likelihoods():
    word_VD, place_TD = (value.double() for value in rows(2.0))
    variance = {(3, 0): 2.0, (11, 2): 5.0, (7, 4): 0.5}
    now = nats(word_VD, place_TD, variance)
    made = _Rows(word_VD, place_TD, variance)
    gain_VT = made.gains(never=())
    for pair in [(7, 0), (3, 1), (12, 2), (5, 3)]:
        best = max(
            nats(word_VD, place_TD, variance | {pair: 10 ** (i / 40)}) for i in range(-40, 80)
        )
        assert float(gain_VT[pair]) == pytest.approx(best - now, rel=0.01)
    without = {pair: value for pair, value in variance.items() if pair != (11, 2)}
    best = best_of(word_VD, place_TD, without, (11, 2))
    rest = nats(word_VD, place_TD, without)
    assert float(gain_VT[11, 2]) == pytest.approx(best - rest, rel=0.01)


def test_a_pair_that_explains_nothing_is_taken_out():
    word_VD, place_TD = (value.double() for value in rows(0.0))
    gain_VT = _Rows(word_VD, place_TD, {}).gains(never=())
    pair = divmod(int(gain_VT.argmin()), gain_VT.shape[1])
    assert _Rows(word_VD, place_TD, {pair: 4.0}).best_step(never=()) == (pair, 0.0)
