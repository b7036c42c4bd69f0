"""What the rows of a layer say of a token behind a prefix, by block sparse Bayesian learning.

The rows of a gradient are mixes of the layer's inputs, one of each token of the batch, and may be
fewer than these. In the first layer an input is one of the vocabulary's vectors (`sparse_bayes`).
Deeper it is a state that depends on all tokens before it. But states of a token resemble each
other. So each of the N tokens of the batch has a block B_n, the mean of h h^T over its states h
behind prefixes that the model writes with these tokens, and a row is Gaussian with covariance

    S = sum over n of y_n B_n + z I

where y_n is the variance of the token's shares, and z that of what no block has. Both are learned
as in `sparse_bayes`, a block in place of a vector (Zhang and Rao 2011):

    y_n <- y_n sqrt( mean over rows of g^T S^-1 B_n S^-1 g / tr(S^-1 B_n) )

Numbers of rows that are hardly known are those that S makes likeliest beside the others.

The state h of a token behind a right prefix stands in place of its block. That speaks for it by

    log N(rows; S - y_n B_n + y_n h h^T) - log N(rows; S)

nats, by Woodbury's identity from the K factors of each block. What the states of the prefix explain
is taken out first, and a token that the prefix has already has lost its block:
log N(rows; S + y_n h h^T) - log N(rows; S).

Shapes: O rows, D columns, N tokens, K states of a token or factors of its block, B prefixes,
T tokens of a prefix, X numbers of a block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedleak.attacks.subspace.weighted_span import LowRank

_TURNS = 10
"""Steps of learning."""

_FACTORS = 24
"""Factors of a block, at most."""

_BEGIN = 0.1
"""Variance of what no block has, at first; rows and states have a root mean square of 1."""

_HARDLY = 1e-2
"""A number is hardly known if its weight is below this."""


@dataclass(frozen=True)
class StateBlocks:
    """The rows of a layer, and the blocks of tokens that explain them.

    All is whitened: S is the identity.

    Attributes:
        whiten_DD: The matrix that whitens states, multiplied from the right.
        row_OD: The rows.
        variance_N: Of the shares of each token.
        factor_NDK: The blocks, times these variances, are products of these with themselves.
        inner_NKK: The inverse of the factors' inner products, taken from the identity.
        along_NOK: The rows' parts along the factors, times these inverses.
        without_N: Nats by which the rows are likelier without each block.
    """

    whiten_DD: Tensor
    row_OD: Tensor
    variance_N: Tensor
    factor_NDK: Tensor
    inner_NKK: Tensor
    along_NOK: Tensor
    without_N: Tensor

    @classmethod
    def learned(cls, matrix: LowRank, state_NKD: Tensor) -> "StateBlocks":
        """Takes the rows of a layer, and states of each token behind prefixes."""
        size = float(state_NKD.double().square().mean().sqrt())
        state_NKD = state_NKD.double() / size
        count, states, width = state_NKD.shape
        row_OD, hardly_OD = matrix.value_OD.clone(), matrix.weight_OD < _HARDLY
        block_NX = (state_NKD.mT @ state_NKD / states).flatten(1)
        variance_N = row_OD.new_full((count,), 1 / count)
        rest, eye_DD = row_OD.new_tensor(_BEGIN), torch.eye(width).to(row_OD)
        for turn in range(_TURNS + 1):
            covariance_DD = (variance_N @ block_NX).view(width, width) + rest * eye_DD
            precision_DD = torch.linalg.inv(covariance_DD)
            for value_D, hardly_D in zip(row_OD, hardly_OD, strict=True):
                if not turn % 5 and hardly_D.any():
                    seen_D = precision_DD[hardly_D][:, ~hardly_D] @ value_D[~hardly_D]
                    value_D[hardly_D] = -torch.linalg.solve(
                        precision_DD[hardly_D][:, hardly_D], seen_D
                    )
            if turn == _TURNS:
                break
            along_OD = row_OD @ precision_DD
            square_N = block_NX @ (along_OD.T @ along_OD).flatten()
            expected_N = len(row_OD) * (block_NX @ precision_DD.flatten())
            variance_N = variance_N * (square_N / expected_N).sqrt()
            expected = len(row_OD) * precision_DD.trace()
            rest = rest * (along_OD.square().sum() / expected).sqrt()
        whiten_DD = torch.linalg.inv(torch.linalg.cholesky(covariance_DD)).T
        row_OD = row_OD @ whiten_DD
        right_NKD = torch.linalg.svd(state_NKD, full_matrices=False)
        factor_NDK = (right_NKD.S[:, :_FACTORS, None] * right_NKD.Vh[:, :_FACTORS]) @ whiten_DD
        factor_NDK = factor_NDK.mT * (variance_N / states).sqrt()[:, None, None]
        left_NKK = torch.eye(factor_NDK.shape[2]).to(row_OD) - factor_NDK.mT @ factor_NDK
        inner_NKK = torch.linalg.inv(left_NKK)
        part_NOK = row_OD @ factor_NDK
        along_NOK = part_NOK @ inner_NKK
        square_N = (along_NOK * part_NOK).sum((1, 2))
        without_N = -(square_N + len(row_OD) * torch.linalg.slogdet(left_NKK).logabsdet) / 2
        made = whiten_DD / size, row_OD, variance_N, factor_NDK, inner_NKK, along_NOK, without_N
        return cls(*(value.float() for value in made))

    def beside(self, state_BND: Tensor, part_BTD: Tensor) -> Tensor:
        """Returns the states [B, N, D] of tokens behind prefixes, whitened, beside the prefixes'.

        Args:
            state_BND: The states.
            part_BTD: What each state of a prefix has beside those before it, of length 1.
        """
        white_BND = state_BND @ self.whiten_DD
        return white_BND - (white_BND @ part_BTD.mT) @ part_BTD

    def nats(self, white_BND: Tensor, tokens_N: Tensor, again_BN: Tensor) -> Tensor:
        """Returns the nats [B, N] that speak for tokens behind prefixes.

        Args:
            white_BND: What their states have beside those of the prefixes.
            tokens_N: Which of the tokens that have blocks.
            again_BN: The prefix has the token already.
        """
        variance_N1 = self.variance_N[tokens_N, None]
        part_BNO, square_BN = white_BND @ self.row_OD.T, white_BND.square().sum(-1)
        factor_NDK, inner_NKK = self.factor_NDK[tokens_N], self.inner_NKK[tokens_N]
        along_NBK = white_BND.transpose(0, 1) @ factor_NDK
        more_NBO = along_NBK @ self.along_NOK[tokens_N].mT
        more_BN = ((along_NBK @ inner_NKK) * along_NBK).sum(-1).T
        again = _gained(part_BNO, square_BN, variance_N1)
        first = _gained(part_BNO + more_NBO.transpose(0, 1), square_BN + more_BN, variance_N1)
        return again.where(again_BN, first + self.without_N[tokens_N])


def _gained(part_BNO: Tensor, square_BN: Tensor, variance_N1: Tensor) -> Tensor:
    """Returns by how many nats [B, N] rows are likelier with vectors of some variance.

    Args:
        part_BNO: The products of vectors and rows, whitened.
        square_BN: The squares of the vectors.
        variance_N1: Of their shares.
    """
    strength_BN1 = 1 + variance_N1 * square_BN[..., None]
    gained_BNO = variance_N1 * part_BNO.square() / strength_BN1 - strength_BN1.log()
    return gained_BNO.sum(-1) / 2
