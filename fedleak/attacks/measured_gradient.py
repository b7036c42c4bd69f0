"""A gradient whose numbers each have noise of their own."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from fedleak.models import LanguageModel
from fedleak.training.observation import Observation, UpdateKind

_ROUNDING = 1e-5
"""Error of a number, at least, as a share of the root mean square of its parameter."""

_EPS = 2.0**-24
"""Error of a float32, at most, as a share of it."""

_TAKEN = 5e-3
"""Error of a text's part of a gradient, as a share of it."""


class MeasuredGradient(Observation):
    """A gradient, or a sum of gradients, of whose numbers the noise is known."""

    def variance(self, model: LanguageModel, name: str) -> Tensor:
        """Returns the variance of each number of a parameter: here that of rounding.

        Args:
            model: At the broadcast weights.
            name: Of the parameter.
        """
        gradient_X, known = self.update.tensors[name].double(), self.knowledge
        variance_X = (_ROUNDING**2 * gradient_X.square().mean()).expand_as(gradient_X)
        if not known.learning_rate:
            return variance_X
        # Weights that a client changed were rounded after each step, and so is their difference.
        weight_X = model.module.get_parameter(name).detach().double()
        ulp_X = weight_X.abs() * _EPS / known.learning_rate
        return variance_X + (known.local_steps or 1) * ulp_X.square() / 3

    @property
    def divided(self) -> bool:
        """Whether numbers were divided by their sizes, as Adam does, so that most are alike."""
        recipe = self.knowledge.recipe
        return recipe is not None and recipe.optimiser in ("adam", "adamw")

    def without(self, part: Mapping[str, Tensor]) -> "MeasuredGradient":
        """Returns what is left without the part of one text.

        Args:
            part: The text's gradient, in the units of this one; of tensors that it lacks nothing
                is taken.
        """
        tensors = dict(self.update.tensors)
        for name, part_X in part.items():
            tensors[name] = tensors[name] - part_X
        update = replace(self.update, tensors=tensors, num_examples=self.update.num_examples - 1)
        return _Remainder(
            round=self.round,
            client=self.client,
            update=update,
            knowledge=self.knowledge,
            whole=self,
            part=part,
        )


@dataclass(frozen=True, kw_only=True)
class _Remainder(MeasuredGradient):
    """What a text leaves of a gradient.

    Attributes:
        whole: The gradient.
        part: Of the text.
    """

    whole: MeasuredGradient
    part: Mapping[str, Tensor]

    def variance(self, model: LanguageModel, name: str) -> Tensor:
        """Returns the variance of each number of a parameter: also that of the text's part."""
        variance_X = self.whole.variance(model, name)
        if name not in self.part:
            return variance_X
        return variance_X + (_TAKEN * self.part[name].double()).square()


def measured(seen: Observation, gradients: Mapping[str, Tensor]) -> MeasuredGradient:
    """Returns what an update has of a gradient, or of a sum of gradients.

    Args:
        seen: The update.
        gradients: The same as a gradient, by parameter name.
    """
    known = seen.knowledge
    if seen.update.kind == UpdateKind.GRADIENT:  # No weight was rounded.
        known = replace(known, learning_rate=None)
    update = replace(seen.update, kind=UpdateKind.GRADIENT, tensors=dict(gradients))
    return MeasuredGradient(round=seen.round, client=seen.client, update=update, knowledge=known)
