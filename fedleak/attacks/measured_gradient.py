"""A gradient whose numbers each have noise of their own."""

from dataclasses import replace

from torch import Tensor

from fedleak.attacks import certificate
from fedleak.models import LanguageModel
from fedleak.training.observation import Observation, UpdateKind

_ROUNDING = 1e-5
"""Error of a number, at least, as a share of the root mean square of its parameter."""


class MeasuredGradient(Observation):
    """A gradient, or a sum of gradients, of whose numbers the noise is known."""

    def variance(self, model: LanguageModel, name: str) -> Tensor:
        """Returns the variance of each number of a parameter: here that of rounding.

        Args:
            model: At the broadcast weights.
            name: Of the parameter.
        """
        gradient_X = self.update.tensors[name].double()
        return (_ROUNDING**2 * gradient_X.square().mean()).expand_as(gradient_X)


def measured(seen: Observation) -> MeasuredGradient | None:
    """Returns the sum of gradients that an update is; None if it is none, or noise is added."""
    known = seen.knowledge
    if not known.adds_up or known.dropout or known.noise_scale:
        return None
    tensors = certificate.as_gradient(seen)
    update = replace(seen.update, kind=UpdateKind.GRADIENT, tensors=tensors)
    return MeasuredGradient(
        round=seen.round, client=seen.client, update=update, knowledge=seen.knowledge
    )
