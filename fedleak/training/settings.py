"""How a client trains, as values."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from fedleak.training.observation import UpdateKind

OnFigures = Callable[[Mapping[str, float]], None]
"""Receives figures about the training, which the client keeps to itself."""


@dataclass(frozen=True)
class PrivateSteps:
    """DP-SGD's part of a step (Abadi et al. 2016, algorithm 1).

    Attributes:
        noise_multiplier: Standard deviation of the noise on the sum, in clipping norms.
        max_grad_norm: The L2 norm that an example's gradient is clipped to.
        sampling: "poisson" draws each example by itself; "fixed" takes the usual batches.
    """

    noise_multiplier: float
    max_grad_norm: float
    sampling: Literal["poisson", "fixed"]


class ServerOptimiser(NamedTuple):
    """How the server moves the global model along the mean of its clients' updates.

    Attributes:
        kind: "sgd" steps against a mean gradient, or takes a mean difference as it is; "adam" is
            FedAdam (Reddi et al. 2021).
        learning_rate: Of the step; a mean difference taken as it is needs none.
    """

    kind: Literal["sgd", "adam"]
    learning_rate: float


@dataclass(frozen=True, kw_only=True)
class LocalTraining:
    """How a client trains.

    Attributes:
        kind: GRADIENT sends the gradient of one batch; DELTA trains and sends the difference.
        batch_size: Examples in a step.
        epochs: Passes over the client's data in a round, for DELTA.
        learning_rate: Of plain SGD.
        dropout: Train with the model's dropout on.
        frozen: Parameters that are not trained: parts and patterns, as in
            `fedleak.models.parameter_selection`.
        private: Each step is one of DP-SGD; None: plain.
    """

    kind: UpdateKind
    batch_size: int
    epochs: int
    learning_rate: float
    dropout: bool
    frozen: tuple[str, ...] = ()
    private: PrivateSteps | None = None

    def steps(self, num_examples: int) -> int:
        """Returns the number of SGD steps over `num_examples` examples."""
        if self.kind == UpdateKind.GRADIENT:
            return 1
        return self.epochs * -(-num_examples // self.batch_size)
