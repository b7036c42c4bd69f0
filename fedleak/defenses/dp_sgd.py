"""DP-SGD: each example's gradient clipped, and noise on their sum."""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import nn

from fedleak.defenses import Claims, NoiseOrEpsilon
from fedleak.models import LanguageModel
from fedleak.training.batches import passes
from fedleak.training.observation import UpdateKind
from fedleak.training.privacy.accounting import Epsilon, Event, Noise, Positive, Unit
from fedleak.training.settings import LocalTraining, PrivateSteps

_SHARED_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.SyncBatchNorm)


@dataclass(frozen=True, kw_only=True)
class DpSgd(NoiseOrEpsilon):
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
    unit: ClassVar[Unit] = "example"
    exclusive: ClassVar[str | None] = "a step has one"
    reports_training: ClassVar[bool] = True
    noise_multiplier: Noise | None = None
    epsilon: Epsilon | None = None
    max_grad_norm: Positive = 1.0
    sampling: Literal["poisson", "fixed"] = "poisson"

    def training(self, local: LocalTraining) -> LocalTraining:
        """Returns training with private steps."""
        # A defense whose noise is not worked out yet is only asked for claims and obstacles.
        noise = self.noise_multiplier or math.nan
        return replace(local, private=PrivateSteps(noise, self.max_grad_norm, self.sampling))

    def update_claims(self, local: LocalTraining, num_examples: int) -> Claims:
        """Returns the noise on the update, and how far an example moves a FedSGD gradient."""
        moved = self.max_grad_norm / self._expected(local, num_examples)
        if local.kind == UpdateKind.GRADIENT:
            return Claims(noise_scale=self._noise * moved, example_norm=moved)
        if not local.recipe.plain:
            return Claims()  # an optimiser scales the noise as it scales the gradient
        # Later steps start from weights that earlier noise has moved: this is the noise added.
        steps = math.sqrt(local.steps(num_examples))
        return Claims(noise_scale=local.learning_rate * steps * self._noise * moved)

    def event(self, local: LocalTraining, num_examples: int, round: int) -> Event:
        """Returns a round's steps."""
        event = super().event(local, num_examples, round)
        if self.sampling == "poisson":
            return replace(
                event,
                sampling_rate=self._expected(local, num_examples) / num_examples,
                steps=local.steps(num_examples),
                sampling="Poisson",
            )
        if local.kind == UpdateKind.DELTA:
            return replace(event, steps=local.epochs)
        # An example is in one batch of a pass over the data.
        return replace(event, disjoint=(round - 1) // passes(num_examples, local))

    def obstacle(self, local: LocalTraining, model: LanguageModel) -> str | None:
        """Needs layers that treat examples apart, in float32."""
        if local.recipe.precision != "float32":
            return (
                f"its noise is counted in float32, and client.precision = "
                f"{local.recipe.precision!r}: set client.precision = 'float32'"
            )
        if any(".lora_magnitude_vector." in name for name in model.trained()):
            return (
                "Opacus takes no gradients of single examples of DoRA: set model.lora.dora = false"
            )
        for name, layer in model.module.named_modules():
            if isinstance(layer, _SHARED_STATISTICS):
                return (
                    f"layer {name!r} mixes the examples of a batch, so no example can be clipped "
                    "by itself: choose a model with LayerNorm in its place"
                )
        return None

    def _expected(self, local: LocalTraining, num_examples: int) -> int:
        return min(local.batch_size, num_examples)
