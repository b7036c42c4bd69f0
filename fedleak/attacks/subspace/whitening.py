"""Gradients in units of what is expected of them.

The gradient of a weight is a sum of products d x^T of few tokens, and some directions of inputs x
and of gradients d at outputs are common to all texts. Texts of the model itself show which.

- **Axes.** Numbers along the main axes of both vary as the product of the two variances (K-FAC,
  Martens and Grosse 2015; the axes: George et al. 2018). Divided by its standard deviation, each
  counts alike.
- **Noise** is as strong along all axes, so its variance is added. Else numbers along axes that
  gradients hardly have would be noise alone, and count as much as others. The gradient of few
  tokens has few large singular values, so the middle one is that of noise (Gavish and Donoho
  2014): no scale need be known. What masks, rounding and signs lose counts as noise, too.
- **Independent** are all numbers as far as they are noise, and otherwise few: what other texts
  leave is no noise.

Shapes: N rows, O outputs and I inputs of a weight, D either of them, T tokens.
"""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

RIDGE = 0.3
"""Of the mean square of each column, added to its variance."""

_FLAT = 1e-9
"""Share of the largest variance that every axis has at least."""

_INDEPENDENT = 0.1
"""Share of a gradient's numbers that count as independent, as far as they are no noise."""

_SIGNAL = 1e-3
"""Share of the square of a gradient that is expected of texts, at least."""

_SMALL = 1e-12
"""Added to sizes that may be zero."""


class Spread(NamedTuple):
    """How rows vary along their main axes.

    Attributes:
        unit_D: What the rows are divided by.
        axes_DD: The axes, in columns.
        variance_D: The variance along each, with a ridge.
    """

    unit_D: Tensor
    axes_DD: Tensor
    variance_D: Tensor

    @classmethod
    def of(cls, rows_ND: Tensor, *, signs: bool) -> "Spread":
        """Takes rows; signs have lost the sizes of columns, which are the units then."""
        size_D = rows_ND.square().mean(0).sqrt() + _SMALL
        unit_D = size_D if signs else torch.ones_like(size_D)
        scaled_ND = (rows_ND / unit_D).double()
        covariance_DD = scaled_ND.T @ scaled_ND / len(scaled_ND)
        covariance_DD += torch.diag(RIDGE * (size_D / unit_D).double().square())
        variance_D, axes_DD = torch.linalg.eigh(covariance_DD)
        variance_D = variance_D.clamp_min(_FLAT * float(variance_D[-1]))
        return cls(unit_D, axes_DD.to(rows_ND), variance_D.to(rows_ND))

    def columns(self) -> Tensor:
        """Returns the axes for rows that are not divided yet."""
        return self.axes_DD / self.unit_D[:, None]

    def whitening(self) -> Tensor:
        """Returns what whitens rows that are not divided yet, multiplied from the right."""
        return self.columns() * self.variance_D.rsqrt()

    def whitened(self, gradient_OD: Tensor) -> Tensor:
        """Returns the rows of a gradient, which are mixes of such rows, whitened."""
        return gradient_OD @ (self.axes_DD * self.variance_D.rsqrt())


class Weight(NamedTuple):
    """The gradient of a weight, and what gradients of it are like.

    Attributes:
        name: Of the weight.
        number: Of its layer.
        module: What multiplies by it.
        gradient_OI: The gradient.
        outputs, inputs: How gradients of outputs, and inputs, vary.
        noise: The variance of noise in the gradient.
    """

    name: str
    number: int
    module: nn.Module
    gradient_OI: Tensor
    outputs: Spread
    inputs: Spread
    noise: float

    def variance(self) -> Tensor:
        """Returns the variance of numbers along the main axes, up to one factor of all weights."""
        return self.outputs.variance_D[:, None] * self.inputs.variance_D


class Layer(NamedTuple):
    """A weight that an update changes.

    Attributes:
        module: What multiplies by it.
        sent_OI: The gradient that the update stands for, whitened.
        out_OO: Main axes of gradients of outputs, in columns.
        in_II: Main axes of inputs.
        white_OI: What whitens a gradient along these axes: a factor of each number.
    """

    module: nn.Module
    sent_OI: Tensor
    out_OO: Tensor
    in_II: Tensor
    white_OI: Tensor

    def whitened(self, slopes_NTO: Tensor, inputs_NTI: Tensor) -> Tensor:
        """Returns the gradients [N, O, I] of texts, whitened."""
        slopes_NTO, inputs_NTI = _times(slopes_NTO, self.out_OO), _times(inputs_NTI, self.in_II)
        return (slopes_NTO.mT @ inputs_NTI).mul_(self.white_OI)

    def step(self) -> Tensor:
        """Returns the step [O, I] along which the whitened gradient falls most."""
        return self.out_OO @ (self.sent_OI * self.white_OI) @ self.in_II.T


def whitened(weights: Sequence[Weight]) -> tuple[list[Layer], float]:
    """Returns gradients as layers, and how many of their numbers count as independent."""
    square = sum(float(weight.gradient_OI.square().sum()) for weight in weights)
    noise = sum(weight.noise * weight.gradient_OI.numel() for weight in weights)
    variance = sum(float(weight.variance().sum()) for weight in weights)
    scale = max(square - noise, _SIGNAL * square) / variance
    layers, count = [], 0.0
    for weight in weights:
        signal_OI = scale * weight.variance()
        white_OI = (signal_OI + weight.noise).rsqrt()
        along_OI = weight.outputs.axes_DD.T @ weight.gradient_OI @ weight.inputs.axes_DD
        out_OO, in_II = weight.outputs.columns(), weight.inputs.columns()
        layers.append(Layer(weight.module, along_OI * white_OI, out_OO, in_II, white_OI))
        independent_OI = weight.noise + _INDEPENDENT * signal_OI
        count += float((independent_OI * white_OI.square()).sum())
    return layers, count


def noise_variance(gradient_OI: Tensor) -> float:
    """Returns the variance of noise in a gradient that has fewer tokens than half its rows.

    It is that of the middle singular value.
    """
    wide = gradient_OI if len(gradient_OI) <= gradient_OI.shape[1] else gradient_OI.T
    return max(_middle_square(wide), 0.0) / _middle_square_of_noise(*wide.shape)


@cache
def _middle_square_of_noise(rows: int, columns: int) -> float:
    """Returns the square of the middle singular value of noise of variance 1."""
    return _middle_square(torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)))


def _middle_square(values_OI: Tensor) -> float:
    """Returns the square of the middle singular value of a matrix that is not taller than wide."""
    values_OI = values_OI.double()
    return float(torch.linalg.eigvalsh(values_OI @ values_OI.T)[len(values_OI) // 2])


def _times(rows_NTX: Tensor, matrix_XX: Tensor) -> Tensor:
    """Returns rows times a matrix, as a product of two matrices: several times faster."""
    return (rows_NTX.flatten(0, 1) @ matrix_XX).view(rows_NTX.shape)
