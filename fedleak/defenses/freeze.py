"""Parameters that are not trained."""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from pydantic import Field

from fedleak.defenses import Claims, Defense
from fedleak.models import LanguageModel
from fedleak.models.parameter_selection import select
from fedleak.training.settings import LocalTraining
from fedleak.util.errors import ConfigError


@dataclass(frozen=True)
class Freeze(Defense):
    """Leaves parameters as they are, so nothing is sent about them. No privacy guarantee.

    Attributes:
        parameters: Parts (q1, t, embeddings, classifier) and patterns, as in `update.share`.
    """

    kind: ClassVar[str] = "freeze"
    parameters: Annotated[tuple[str, ...], Field(min_length=1)]

    def training(self, local: LocalTraining) -> LocalTraining:
        """Returns training without them."""
        return replace(local, frozen=(*local.frozen, *self.parameters))

    def update_claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns that they are absent."""
        return Claims(absent=self.parameters)

    def obstacle(self, local: LocalTraining, model: LanguageModel) -> str | None:
        """Needs parameters of these names, and others beside them."""
        try:
            frozen = select(model, self.parameters, "parameters")
        except ConfigError as error:
            return str(error)
        if len(frozen) == len(model.trained()):
            return "parameters: they are all that is trained: leave some out"
        return None
