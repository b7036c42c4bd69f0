"""What rows say of a state, against the same from whole covariances."""

import pytest
import torch
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.nn import functional as F

from fedleak.attacks.subspace.state_blocks import StateBlocks
from fedleak.attacks.subspace.weighted_span import LowRank

ROWS, WIDTH, TOKENS, STATES = 6, 40, 5, 6


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def states(rng: torch.Generator) -> Tensor:
    """Returns states of tokens, which resemble each other if they are of one token."""
    token_N1D = torch.randn((TOKENS, 1, WIDTH), generator=rng)
    return token_N1D + 0.3 * torch.randn((TOKENS, STATES, WIDTH), generator=rng)


def rows_of(state_ND: Tensor, rng: torch.Generator, variance: float = 1e-4) -> LowRank:
    """Returns rows that are mixes of states, and little noise."""
    share_ON = torch.randn((ROWS, len(state_ND)), generator=rng)
    noise_OD = 0.01 * torch.randn((ROWS, WIDTH), generator=rng)
    value_OD = (share_ON @ state_ND + noise_OD).double()
    return LowRank.of(value_OD, torch.full_like(value_OD, variance))


def likelihood(rows_OD: Tensor, covariance_DD: Tensor) -> float:
    normal = MultivariateNormal(torch.zeros(WIDTH).double(), covariance_DD)
    return float(normal.log_prob(rows_OD).sum())


def test_nats_are_those_of_whole_covariances(rng):
    state_NKD = states(rng)
    matrix = rows_of(state_NKD[:, 0], rng)
    blocks = StateBlocks.learned(matrix, state_NKD)
    size = float(state_NKD.square().mean().sqrt())
    whiten_DD = blocks.whiten_DD.double() * size
    covariance_DD = torch.linalg.inv(whiten_DD @ whiten_DD.T)
    before = likelihood(matrix.value_OD, covariance_DD)
    tokens_N, none_1TD = torch.arange(TOKENS), torch.zeros(1, 0, WIDTH)
    white_1ND = blocks.beside(state_NKD[None, :, 1], none_1TD)
    for again in (False, True):
        nats_1N = blocks.nats(white_1ND, tokens_N, torch.full((1, TOKENS), again))
        for token in range(TOKENS):
            state_KD = state_NKD[token].double() / size
            block_DD = state_KD.T @ state_KD / STATES * (not again)
            variance = float(blocks.variance_N[token])
            changed_DD = torch.outer(state_KD[1], state_KD[1]) - block_DD
            after = likelihood(matrix.value_OD, covariance_DD + variance * changed_DD)
            assert float(nats_1N[0, token]) == pytest.approx(after - before, rel=1e-2, abs=0.02)


def test_variances_are_learned_as_by_whole_matrices(rng):
    state_NKD = states(rng).double()
    matrix = rows_of(state_NKD[:, 0].float(), rng)
    blocks = StateBlocks.learned(matrix, state_NKD)
    unit_NKD = state_NKD / state_NKD.square().mean().sqrt()
    block_NDD = [state_KD.T @ state_KD / STATES for state_KD in unit_NKD]
    variances, rest = [1 / TOKENS] * TOKENS, 0.1
    for _ in range(10):
        covariance_DD = rest * torch.eye(WIDTH).double()
        for variance, block_DD in zip(variances, block_NDD, strict=True):
            covariance_DD += variance * block_DD
        precision_DD = torch.linalg.inv(covariance_DD)
        along_OD = matrix.value_OD @ precision_DD
        for token, block_DD in enumerate(block_NDD):
            square = sum(float(along_D @ block_DD @ along_D) for along_D in along_OD) / ROWS
            variances[token] *= (square / float((precision_DD @ block_DD).trace())) ** 0.5
        rest *= float(along_OD.square().sum() / ROWS / precision_DD.trace()) ** 0.5
    assert blocks.variance_N.tolist() == pytest.approx(variances, rel=1e-4)


def test_the_right_state_of_each_token_speaks_most_for_it(rng):
    state_NKD = states(rng)
    blocks = StateBlocks.learned(rows_of(state_NKD[:, 0], rng), state_NKD[:, 1:])
    none_KTD = torch.zeros(STATES, 0, WIDTH)
    white_KND = blocks.beside(state_NKD.transpose(0, 1), none_KTD)
    never_KN = torch.zeros((STATES, TOKENS), dtype=torch.bool)
    nats_KN = blocks.nats(white_KND, torch.arange(TOKENS), never_KN)
    assert (nats_KN.argmax(0) == 0).all()
    assert (nats_KN[0] > 0).all()


def test_a_token_that_is_mixed_in_more_has_shares_of_more_variance(rng):
    state_NKD = states(rng)
    state_ND = state_NKD[:, 0].clone()
    state_ND[1:] *= 0.01
    variance_N = StateBlocks.learned(rows_of(state_ND, rng), state_NKD).variance_N
    assert variance_N[0] > 100 * variance_N[1:].max()


def test_what_states_of_a_prefix_explain_counts_once(rng):
    state_NKD = states(rng)
    blocks = StateBlocks.learned(rows_of(state_NKD[:, 0], rng), state_NKD)
    state_1ND = state_NKD[None, :1, 0]
    white_1ND = blocks.beside(state_1ND, torch.zeros(1, 0, WIDTH))
    part_1TD = F.normalize(white_1ND, dim=-1)
    again_1ND = blocks.beside(state_1ND, part_1TD)
    assert float(again_1ND.norm()) < 1e-3 * float(white_1ND.norm())
    nats_1N = blocks.nats(again_1ND, torch.arange(1), torch.ones((1, 1), dtype=torch.bool))
    assert abs(float(nats_1N)) < 0.1


def test_numbers_that_are_hardly_known_do_not_count(rng):
    state_NKD = states(rng)
    value_OD = rows_of(state_NKD[:, 0], rng).value_OD
    variance_OD = torch.full_like(value_OD, 1e-4)
    variance_OD[:, :3] = torch.inf
    first, second = (
        StateBlocks.learned(LowRank.of(came_OD, variance_OD), state_NKD)
        for came_OD in (value_OD, torch.cat([1000 + value_OD[:, :3], value_OD[:, 3:]], 1))
    )
    torch.testing.assert_close(first.row_OD, second.row_OD)
    # They are those that are likeliest beside the others.
    whiten_DD = first.whiten_DD.double() * float(state_NKD.square().mean().sqrt())
    covariance_DD = torch.linalg.inv(whiten_DD @ whiten_DD.T)
    filled_OD = first.row_OD.double() @ torch.linalg.inv(whiten_DD)
    expected_DK = covariance_DD[:3, 3:] @ torch.linalg.inv(covariance_DD[3:, 3:])
    torch.testing.assert_close(
        filled_OD[:, :3], filled_OD[:, 3:] @ expected_DK.T, rtol=1e-2, atol=1e-2
    )
