import pytest
import torch

from fedleak.attacks.subspace.whitening import RIDGE, Spread, Weight, noise_variance, whitened


@pytest.mark.parametrize("signs", [True, False])
def test_whitened_rows_have_no_common_direction(signs):
    rng = torch.Generator().manual_seed(0)
    rows_ND = torch.randn(4000, 5, generator=rng) @ torch.randn(5, 5, generator=rng)
    spread = Spread.of(rows_ND, signs=signs)
    square_D = rows_ND.square().mean(0)
    ridged_DD = rows_ND.T @ rows_ND / 4000 + RIDGE * torch.diag(square_D)
    whiten_DD = spread.whitening()
    torch.testing.assert_close(whiten_DD.T @ ridged_DD @ whiten_DD, torch.eye(5), atol=1e-3, rtol=0)
    gradient_OD = torch.randn(3, 4000, generator=rng) @ rows_ND
    # Of signs the sizes of columns are lost.
    sent_OD = gradient_OD / square_D.sqrt() if signs else gradient_OD
    torch.testing.assert_close(
        spread.whitened(sent_OD), gradient_OD @ whiten_DD, rtol=1e-3, atol=1e-2
    )


@pytest.mark.parametrize("shape", [(96, 96), (64, 192), (192, 64)])
def test_the_noise_of_a_gradient_is_seen_beside_few_tokens(shape):
    rng = torch.Generator().manual_seed(1)
    signal_OI = torch.randn(shape[0], 6, generator=rng) @ torch.randn(6, shape[1], generator=rng)
    noise_OI = 0.3 * torch.randn(shape, generator=rng)
    assert noise_variance(signal_OI) < 1e-6
    assert noise_variance(noise_OI) == pytest.approx(0.09, rel=0.1)
    # Six large singular values move the middle one by three places.
    assert noise_variance(signal_OI + noise_OI) == pytest.approx(0.09, rel=0.2)


def of_weight(gradient_OI, rows_NO, rows_NI, noise):
    spreads = (Spread.of(rows_ND, signs=False) for rows_ND in (rows_NO, rows_NI))
    module = torch.nn.Linear(gradient_OI.shape[1], len(gradient_OI))
    return Weight("w", 0, module, gradient_OI, *spreads, noise)


def test_numbers_are_whitened_as_by_the_covariance_of_all_of_them():
    """Of d x^T and noise, written out as a matrix over all pairs of numbers."""
    rng = torch.Generator().manual_seed(2)
    rows_NO, rows_NI = (
        torch.randn(500, count, generator=rng) @ torch.randn(count, count, generator=rng)
        for count in (3, 4)
    )
    gradient_OI = 5 * torch.randn(3, 4, generator=rng)
    weight = of_weight(gradient_OI, rows_NO, rows_NI, noise=0.5)
    (layer,), count = whitened([weight])

    def ridged(rows_ND):
        square_D = rows_ND.square().mean(0)
        return rows_ND.T @ rows_ND / 500 + RIDGE * torch.diag(square_D)

    kron_XX = torch.kron(ridged(rows_NO), ridged(rows_NI))
    scale = (gradient_OI.square().sum() - 0.5 * 12) / kron_XX.trace()
    covariance_XX = scale * kron_XX + 0.5 * torch.eye(12)
    other_OI = torch.randn(3, 4, generator=rng)
    expected = gradient_OI.flatten() @ torch.linalg.solve(covariance_XX, other_OI.flatten())
    own_O1, own_I1 = torch.linalg.svd(other_OI)[::2]
    sizes = torch.linalg.svdvals(other_OI)
    # A gradient is a sum of products d x^T, as its singular vectors are.
    slopes_1TO, inputs_1TI = (own_O1[:, :3] * sizes).T[None], own_I1[:3][None]
    made_1OI = layer.whitened(slopes_1TO, inputs_1TI)
    assert float((made_1OI[0] * layer.sent_OI).sum()) == pytest.approx(float(expected), rel=1e-3)
    step = float((layer.step() * other_OI).sum())
    assert step == pytest.approx(float(expected), rel=1e-3)
    independent_XX = 0.1 * scale * kron_XX + 0.5 * torch.eye(12)
    numbers = float(torch.linalg.solve(covariance_XX, independent_XX).trace())
    assert count == pytest.approx(numbers, rel=1e-3)


def test_a_direction_that_no_row_has_is_divided_by_a_share_of_the_largest():
    rng = torch.Generator().manual_seed(3)
    rows_ND = torch.randn(200, 6, generator=rng) * torch.tensor([3.0, 1, 1, 1, 0, 0])
    spread = Spread.of(rows_ND, signs=False)
    assert float(spread.variance_D.min()) == pytest.approx(1e-9 * float(spread.variance_D.max()))
    weight = of_weight(torch.zeros(6, 6), rows_ND, rows_ND, noise=0.0)
    weight.gradient_OI[0, 0] = 1.0
    (layer,), _ = whitened([weight])
    assert layer.sent_OI.isfinite().all()
    assert layer.white_OI.isfinite().all()
