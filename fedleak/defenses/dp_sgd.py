"""DP-SGD: each example's gradient clipped, and noise on their sum."""

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from torch import nn

from fedleak.defenses import Budget, Claims, Defense
from fedleak.models import LanguageModel
from fedleak.training import privacy
from fedleak.training.batches import passes
from fedleak.training.observation import UpdateKind
from fedleak.training.privacy import Epsilon, Event, Noise
from fedleak.training.settings import LocalTraining, PrivateSteps
from fedleak.util.errors import ConfigError

Finite = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_SHARED_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)


@dataclass(frozen=True, kw_only=True)
class DpSgd(Defense):
    """Trains with DP-SGD (Abadi et al. 2016): (epsilon, delta) of each example.

    Under FedSGD a round is one noisy step, under FedAvg every local step is one.

    Attributes:
        noise_multiplier: Standard deviation of the noise on the sum, in clipping norms.
        epsilon: What all rounds together may spend; in place of a noise multiplier.
        max_grad_norm: L2 norm that an example's gradient is clipped to.
        sampling: "poisson" draws every example by itself, which amplifies the guarantee; "fixed"
            takes batches of a shuffled pass, for which no amplification is counted.
    """

    kind: ClassVar[str] = "dp_sgd"
    noisy: ClassVar[bool] = True
    exclusive: ClassVar[str | None] = "a step has one"
    reports_training: ClassVar[bool] = True
    noise_multiplier: Noise | None = None
    epsilon: Epsilon | None = None
    max_grad_norm: Finite = 1.0
    sampling: Literal["poisson", "fixed"] = "poisson"

    def __post_init__(self) -> None:
        if (self.noise_multiplier is None) == (self.epsilon is None):
            raise ConfigError("give either noise_multiplier or epsilon")

    def solved(self, local: LocalTraining, budget: Budget) -> "DpSgd":
        """Returns the defense with the noise that its epsilon takes."""
        if self.epsilon is None:
            return self
        unit = replace(self, noise_multiplier=1.0, epsilon=None)
        planned = [unit.event(local, budget.num_examples, round) for round in budget.rounds]
        noise = privacy.noise_multiplier(self.epsilon, planned, budget.delta, budget.accountant)
        return replace(unit, noise_multiplier=noise)

    def training(self, local: LocalTraining) -> LocalTraining:
        """Returns training with private steps."""
        # Only claims and obstacles are asked of one whose noise is not worked out yet.
        noise = self.noise_multiplier or math.nan
        return replace(local, private=PrivateSteps(noise, self.max_grad_norm, self.sampling))

    def claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns the noise on the update, and how far an example moves a FedSGD gradient."""
        assert self.noise_multiplier is not None
        moved = self.max_grad_norm / self._expected(local, num_examples)
        if local.kind == UpdateKind.GRADIENT:
            return Claims(noise_scale=self.noise_multiplier * moved, example_norm=moved)
        # Later steps start from weights that earlier noise has moved: this is the noise added.
        steps = math.sqrt(local.steps(num_examples))
        return Claims(noise_scale=local.learning_rate * steps * self.noise_multiplier * moved)

    def event(self, local: LocalTraining, num_examples: int, round: int) -> Event:
        """Returns a round's steps."""
        noise, size = self.noise_multiplier or 0.0, self._expected(local, num_examples)
        if self.sampling == "poisson":
            steps, rate = local.steps(num_examples), size / num_examples
            return Event(
                noise_multiplier=noise,
                sampling_rate=rate,
                steps=steps,
                unit="example",
                neighbouring="add or remove one",
                sampling="Poisson",
            )
        if local.kind == UpdateKind.DELTA:
            return Event(
                noise_multiplier=noise,
                sampling_rate=1.0,
                steps=local.epochs,
                unit="example",
                neighbouring="zero out one",
            )
        # An example is in one batch of a pass over the data.
        mark = (round - 1) // passes(num_examples, local)
        return Event(
            noise_multiplier=noise,
            sampling_rate=1.0,
            steps=1,
            unit="example",
            neighbouring="zero out one",
            disjoint=mark,
        )

    def obstacle(self, local: LocalTraining, model: LanguageModel) -> str | None:
        """Needs layers that treat examples apart."""
        for name, layer in model.module.named_modules():
            if isinstance(layer, _SHARED_STATISTICS):
                return (
                    f"layer {name!r} mixes the examples of a batch, so no example can be clipped "
                    "by itself: choose a model with LayerNorm in its place"
                )
        return None

    def _expected(self, local: LocalTraining, num_examples: int) -> int:
        return min(local.batch_size, num_examples)
