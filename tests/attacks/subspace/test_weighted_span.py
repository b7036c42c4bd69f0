import pytest
import torch
from scipy.optimize import minimize

from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.attacks.subspace.span import ACCEPT
from fedleak.attacks.subspace.weighted_span import LowRank
from fedleak.util.rng import stream


def noisy(rank=5, rows=20, columns=60, missing=0.05):
    """A matrix of low rank, known the worse the larger a number is, and what spans its rows."""
    rng = stream(0, "rows")
    axes_RD = torch.randn(rank, columns, generator=rng, dtype=torch.float64)
    value_OD = torch.randn(rows, rank, generator=rng, dtype=torch.float64) @ axes_RD
    deviation_OD = 0.02 * value_OD.square() + 1e-3
    noise_OD = deviation_OD * torch.randn(rows, columns, generator=rng, dtype=torch.float64)
    variance_OD = deviation_OD.square()
    largest = value_OD.abs() > value_OD.abs().quantile(1 - missing)
    most = value_OD.abs()[~largest].max()  # All that is known of the largest is that they are.
    value_OD = torch.where(largest, most * value_OD.sign(), value_OD + noise_OD)
    return value_OD, variance_OD.masked_fill(largest, torch.inf), axes_RD


def mixes(axes_RD, count=200):
    return torch.randn(count, len(axes_RD), generator=stream(1, "mixes")).double() @ axes_RD


def unit(x_ND):
    return torch.nn.functional.normalize(x_ND.double())


def others(value_OD):
    return unit(torch.randn(200, value_OD.shape[1], generator=stream(2, "others")))


def test_the_rank_is_found_and_tells_mixes_from_other_vectors():
    value_OD, variance_OD, axes_RD = noisy()
    fit = LowRank.of(value_OD, variance_OD).fitted(1, UNLIMITED)
    assert fit.rank == len(axes_RD)
    span = fit.span()
    right_N, other_N = span.excess(unit(mixes(axes_RD))), span.excess(others(value_OD))
    assert right_N.square().mean().sqrt() == pytest.approx(1, abs=0.3)
    assert right_N.max() < 2 < 10 < other_N.min()


def test_each_number_counts_by_its_own_noise():
    """As if all were alike, the span is several times as far from the right one."""
    value_OD, variance_OD, axes_RD = noisy(missing=0.0)
    x_ND = unit(mixes(axes_RD))

    def left(axis_RD):
        return float((x_ND - x_ND @ axis_RD.T @ axis_RD).norm())

    fit = LowRank.of(value_OD, variance_OD).wider(len(axes_RD))
    plain_RD = torch.linalg.svd(value_OD)[2][: len(axes_RD)]
    assert left(fit.axis_RD) < left(plain_RD) / 3


@pytest.mark.parametrize("known", [0, 2])
def test_the_excess_is_that_of_a_minimum_over_all_mixes(known):
    value_OD, variance_OD, axes_RD = noisy()
    span = LowRank.of(value_OD, variance_OD).wider(len(axes_RD)).span()
    beside_KD = torch.randn(known, value_OD.shape[1], generator=stream(3, "known")).double()
    span = span.beside(beside_KD)
    axes_RD = torch.cat([axes_RD, beside_KD])
    x_D = unit(mixes(axes_RD, 1))[0]

    def square(part_R):
        part_R = torch.from_numpy(part_R)
        total = 0.0
        for x, axis_R, covariance_RR in zip(x_D, span.axis_RD.T, span.covariance_DRR, strict=True):
            noise = part_R @ covariance_RR @ part_R + (2e-6) ** 2 / len(x_D)
            total += float((x - part_R @ axis_R) ** 2 / noise)
        return total

    start_R = torch.linalg.lstsq(span.axis_RD.T, x_D).solution.numpy()
    smallest = minimize(square, start_R, method="Powell").fun / (len(x_D) - len(axes_RD))
    assert float(span.excess(x_D[None])) == pytest.approx(smallest**0.5, rel=0.02)


def test_a_matrix_of_as_many_dimensions_as_rows_has_no_span():
    value_OD, variance_OD, _ = noisy(rank=25)
    assert LowRank.of(value_OD, variance_OD).fitted(1, UNLIMITED) is None


def test_there_is_no_fit_without_time():
    value_OD, variance_OD, _ = noisy()
    assert LowRank.of(value_OD, variance_OD).fitted(1, Clock(1e-9)) is None


def test_columns_without_a_number_say_nothing():
    value_OD, variance_OD, axes_RD = noisy()
    variance_OD[:, :10] = torch.inf
    span = LowRank.of(value_OD, variance_OD).wider(len(axes_RD)).span()
    x_ND = mixes(axes_RD)
    x_ND[:, :10] = 0
    assert span.excess(unit(x_ND)).max() < 2 < 10 < span.excess(others(value_OD)).min()


def test_rows_hold_more_vectors_than_they_are_beside_those_that_are_known():
    """Of 25 vectors 20 rows are mixes: beside six of them they hold the others."""
    value_OD, variance_OD, axes_RD = noisy(rank=25, columns=240, missing=0.01)
    rows, others_ND = LowRank.of(value_OD, variance_OD).rows(), unit(axes_RD[6:])
    beside = rows.beside(unit(axes_RD[:6]))
    assert beside.excess(others_ND).max() < ACCEPT < 4 < beside.excess(others(value_OD)).min()
    assert rows.excess(others_ND).median() > 1.5 * beside.excess(others_ND).median()
