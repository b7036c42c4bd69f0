"""The gradient behind a first step of Adam, from the digits that rounding leaves of the step.

Adam's first step (Kingma and Ba 2015, algorithm 1) moves a weight against its gradient g by

    rate |g| / (|g| + eps)          with eps = 1e-8 in torch

That is taken for a sign, because eps is small. But with y = |step| / rate the gradient is

    |g| = eps y / (1 - y)

and weights in float32 show 1 - y with an error h: half a unit in the last place of the weight w
over the rate, 4e-5 for a weight of .05 and a rate of 5e-5. So g is known within
d = h (|g| + eps)^2 / eps: a number of 1e-5 within 4 %, one of 1e-4 within 40 %, and one above
eps / h not at all. Most numbers of a batch's gradient are small, the more of a model that is large,
and clipping to a norm makes them smaller. A weight that begins at zero, as the second matrix of an
adapter does, has a last place as small as the step's, and shows numbers up to some hundredths.

Rounding is uniform, so that d^2 / 3 is the variance of each number. Weighted by it, few unknowns
are fitted far better than one number is known: of MiniLM's first queries, keys and values 20 % of
the norm is wrong after a step on four texts, and 0.1 % once they are fitted (`completion`).

Nothing is granted: steps are on the grid of the weights' last places, and no longer than the rate,
or nothing is said of them. So noise, quantization, sums over clients, a wrong rate and weights in
half precision are told from a step. Limits: one step; no decay within Adam's gradient; known eps.

Shapes: X: any axes.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fedleak.attacks import certificate
from fedleak.attacks.measured_gradient import MeasuredGradient
from fedleak.models import LanguageModel
from fedleak.training.observation import Observation, UpdateKind

_EPSILON = 1e-8
"""What torch adds to Adam's divisor."""

_ARITHMETIC = 4.0
"""Rounding of Adam's own arithmetic, in halves of the last place of a step."""

_EPS, _EXPONENT = torch.finfo(torch.float32).eps, 0x7F800000
"""The last place of 1, and the bits of an exponent."""

_KNOWN = 0.5
"""A number is known if it is below this share of the gradient whose step lacks as much as rounding
may move it."""

_OFF_GRID = 0.2
"""Share of steps that may be off the grid: decay moves some weights to where the grid is another,
of small ones, as adapters have, a tenth. Of steps that carry noise nearly all are off it."""


class BehindAdam(MeasuredGradient):
    """The gradient behind a step of Adam, as a gradient that came, but for rounding of the step."""

    def variance(self, model: LanguageModel, name: str) -> Tensor:
        """Returns the variance of each number of a parameter; infinite where nothing is known.

        Args:
            model: At the broadcast weights.
            name: Of the parameter.
        """
        gradient_X = self.update.tensors[name].double().abs()
        error_X = _error(model.module.get_parameter(name).detach(), self._rate).double()
        variance_X: Tensor = (error_X * (gradient_X + _EPSILON).square() / _EPSILON).square() / 3
        return variance_X.masked_fill(gradient_X > _KNOWN * _EPSILON / error_X, torch.inf)

    def lacks(self, model: LanguageModel, name: str) -> bool:
        """Whether a parameter did not come, or a number of it is not known."""
        return name not in self.update.tensors or bool(self.variance(model, name).isinf().any())

    @property
    def _rate(self) -> float:
        return self.knowledge.learning_rate or 1.0


def behind_adam(seen: Observation, model: LanguageModel) -> BehindAdam | None:
    """Returns the gradient behind an update; None if it is no first step of Adam.

    Args:
        seen: The update, without the decay of weights.
        model: At the broadcast weights.
    """
    known, recipe, update = seen.knowledge, seen.knowledge.recipe, seen.update
    if recipe is None or recipe.optimiser not in ("adam", "adamw") or not known.learning_rate:
        return None
    one_step = known.local_steps == 1 and update.kind == UpdateKind.DELTA and seen.client >= 0
    coupled = recipe.optimiser == "adam" and recipe.weight_decay
    if not one_step or coupled or recipe.precision == "bfloat16" or known.noise_scale:
        return None
    if certificate.were_cast(update.tensors.values()):
        return None
    gradients, off = {}, 0
    for name, step_X in update.tensors.items():
        before_X = model.module.get_parameter(name).detach()
        if {before_X.dtype, step_X.dtype} != {torch.float32}:
            return None
        off += int(((before_X + step_X) - before_X != step_X).sum())
        error_X, share_X = _error(before_X, known.learning_rate), step_X.abs() / known.learning_rate
        if bool((share_X > 1 + 2 * error_X).any()):
            return None
        size_X = _EPSILON * share_X / (1 - share_X).maximum(error_X)
        gradients[name] = -step_X.sign() * size_X
    if off > _OFF_GRID * sum(map(torch.numel, update.tensors.values())):
        return None
    plain = replace(recipe, optimiser="sgd", weight_decay=0.0)
    return BehindAdam(
        round=seen.round,
        client=seen.client,
        update=replace(update, kind=UpdateKind.GRADIENT, tensors=gradients),
        knowledge=replace(known, recipe=plain),
    )


def _error(before_X: Tensor, rate: float) -> Tensor:
    """Returns by how much rounding may have moved each step, as a share of the rate."""
    # The largest power of two in a weight, which moves by the rate at most, has no mantissa.
    bits_X = (before_X.abs() + rate).view(torch.int32)
    power_X = bits_X.bitwise_and_(_EXPONENT).view(torch.float32)
    return power_X * (_EPS / 2 / rate) + _ARITHMETIC * _EPS / 2
