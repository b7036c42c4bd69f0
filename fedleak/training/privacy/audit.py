"""An audit of a training loop that makes a gradient for each example, as Opacus does.

Shapes: T steps, K canaries, B records of a batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedleak.training.privacy.canaries import Canaries, Floats, Tensors
from fedleak.training.privacy.lower_bounds import Bounds, gaussian_bound, gaussian_epsilon
from fedleak.training.privacy.own_training import WithDummies, bounds, directions, flip
from fedleak.training.privacy.sampling import least_likely
from fedleak.util.errors import ConfigError

ALARM = 0.001
"""How often an alarm accuses a training that does what it announces."""

TESTS = 5
"""The error of an alarm is divided among the three bounds on the training, that on a step, and the
count of draws."""


@dataclass
class Audit:
    """The canaries of a training: put in before clipping, scored in what a step sends.

    Attributes:
        count: K, how many canaries.
        norm: L2 norm of a canary before it is clipped. Ten clipping norms show a missing clip.
        seed: Of places and directions.
        coins: Which canaries are in: the trainer's secret [K].
    """

    count: int
    norm: float
    seed: int = 0
    coins: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool), repr=False)
    _scores: list[Floats] = field(default_factory=list, repr=False)
    _drawn: list[NDArray[np.bool_]] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        """Flips the coins."""
        if not len(self.coins):
            self.coins = flip(self.count)
        self._taken = np.zeros(self.count, bool)

    def records(self, examples: Any) -> WithDummies:
        """Returns the data set with the dummy records: what the loader draws from."""
        return WithDummies(examples, self.count)

    def put_(self, gradients: Tensors, canary_of_record: Sequence[int]) -> None:
        """Puts canaries in the place of the dummies' gradients: after `backward`, before the step.

        Args:
            gradients: A gradient for each record of the batch, by parameter name [B, *shape].
            canary_of_record: The second half of the batch that the loader returned [B].
        """
        if any(len(value) != len(canary_of_record) for value in gradients.values()):
            raise ConfigError(
                f"gradients of a batch of {len(canary_of_record)} records have other lengths: give "
                "one for each record, as p.grad_sample holds them"
            )
        if len(canary_of_record):
            record = {name: value[0] for name, value in gradients.items()}
            canaries = self._canaries(record)
            canaries.put_(gradients, canary_of_record, self.coins.tolist(), self.norm)
            self._taken[[int(canary) for canary in canary_of_record if canary >= 0]] = True

    def score(self, update: Tensors) -> None:
        """Scores what a step sends: the noisy gradient, or weights before it minus those after."""
        self._scores.append(self._canaries(update).score(update))
        self._drawn.append(self._taken)
        self._taken = np.zeros(self.count, bool)

    def findings(
        self,
        *,
        epsilon: float,
        delta: float,
        noise_multiplier: float,
        sampling_rate: float = 1.0,
        confidence: float = 0.95,
    ) -> "Findings":
        """Returns what the canaries show beside what is announced.

        Args:
            epsilon: An accountant's epsilon of the whole training.
            delta: The delta of that epsilon and of the bounds.
            noise_multiplier: Standard deviation of the noise, in clipping norms.
            sampling_rate: Probability with which a step takes a record, where it is drawn by itself
                (Poisson sampling); 1: no amplification is announced.
            confidence: With which each bound that is shown holds.

        Raises:
            ConfigError: No step was scored, or an argument cannot be.
        """
        if not self._scores:
            raise ConfigError("no step was scored: call score after each step")
        scores_TK, drawn_TK = np.array(self._scores), np.array(self._drawn)

        def training(certain: float) -> Bounds:
            # Who takes part in which step is public only if no amplification is announced.
            seen_TK = scores_TK
            if sampling_rate == 1:
                uses_K = np.maximum(drawn_TK.sum(0), 1)
                seen_TK = scores_TK * drawn_TK * np.sqrt(len(scores_TK) / uses_K)
            return bounds(
                seen_TK,
                self.coins,
                delta=delta,
                noise_multiplier=noise_multiplier,
                sampling_rate=sampling_rate,
                confidence=certain,
            )

        inside = scores_TK[drawn_TK & self.coins].tolist()
        alarm = 1 - ALARM / TESTS
        return Findings(
            canaries=self.count,
            steps=len(scores_TK),
            training=training(confidence),
            step=gaussian_bound(inside, 1 - confidence, delta),
            draws=int(drawn_TK.sum()),
            expected_draws=drawn_TK.size * sampling_rate if sampling_rate < 1 else None,
            alarms=_alarms(
                (training(alarm).largest, epsilon, "the training"),
                (
                    gaussian_bound(inside, ALARM / TESTS, delta),
                    gaussian_epsilon(1 / noise_multiplier, delta),
                    "a step without sampling",
                ),
            )
            + _draw_alarms(drawn_TK, sampling_rate),
        )

    def _canaries(self, update: Tensors) -> Canaries:
        return directions(update, self.count, seed=self.seed, step=len(self._scores))


def _alarms(*compared: tuple[float, float, str]) -> tuple[str, ...]:
    return tuple(
        f"{unit} has an epsilon of at least {shown:.3g}, and {announced:.3g} is announced "
        f"(p < {ALARM:g})"
        for shown, announced, unit in compared
        if shown > announced
    )


def _draw_alarms(drawn_TK: NDArray[np.bool_], rate: float) -> tuple[str, ...]:
    """Returns a sentence if dummies were not drawn by the coins that are announced."""
    if rate == 1:
        return ()
    steps = [np.flatnonzero(drawn_K).tolist() for drawn_K in drawn_TK]
    drawn = least_likely(steps, drawn_TK.shape[1], rate)
    return (f"{drawn} (p < {ALARM:g})",) if drawn.p < ALARM / TESTS else ()


@dataclass(frozen=True)
class Findings:
    """What canaries show of a training.

    Attributes:
        canaries, steps: How many.
        training: Lower bounds on the epsilon of the whole training.
        step: The same of one step for a record that is in it, if the noise is Gaussian.
        draws: How often a dummy was drawn.
        expected_draws: How often it should have been; None: no sampling is announced.
        alarms: What contradicts what is announced. An honest training has one less than once in a
            thousand audits.
    """

    canaries: int
    steps: int
    training: Bounds
    step: float
    draws: int
    expected_draws: float | None
    alarms: tuple[str, ...]

    def __str__(self) -> str:
        """Returns it in lines."""
        whole, drawn = self.training, f"{self.draws:,} times"
        if self.expected_draws is not None:
            drawn += f" ({self.expected_draws:,.0f} expected)"
        gaussian = "" if whole.gaussian is None else f"{whole.gaussian:.3g} if Gaussian, "
        return "\n".join(
            [
                f"{self.canaries} canaries in {self.steps} steps, drawn {drawn}",
                f"a step without sampling: epsilon is at least {self.step:.3g} if Gaussian",
                f"the training: epsilon is at least {gaussian}{whole.f_dp:.3g} if f-DP, "
                f"{whole.epsilon_delta:.3g} if nothing is assumed",
                *(f"CONTRADICTED: {alarm}" for alarm in self.alarms),
            ]
        )
