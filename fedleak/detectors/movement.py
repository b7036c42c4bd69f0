"""How far an honest server moves the model: bounds that follow from what clients agreed to."""

import math
from dataclasses import dataclass
from typing import Literal

BETA1, BETA2 = 0.9, 0.999
"""Adam's decay rates, the same everywhere."""

LONGEST = 7.28
"""The farthest that Adam moves a number in any step, in learning rates (`longest_step`)."""

COUNTED = 10_000
"""The most steps whose lengths are summed: the server states the round, and may state any."""


@dataclass(frozen=True, kw_only=True)
class Movement:
    """How an honest round moves the model.

    Attributes:
        optimiser: "sgd": the model moves by steps against mean gradients, of the server or of
            clients whose weights are averaged. "adam": every number moves by such steps of Adam or
            AdamW.
        rate: The learning rate of these steps.
        steps: How many there are in a round.
        anew: Adam's moments begin anew in each round, as those of clients do.
        weight_decay: Of SGD or AdamW.
        most: How far an update moves the model at most where clients clip it, its noise aside;
            None: nothing limits that.
        noise: Standard deviation of the noise in a round on each number of the model, at most;
            None: it is not known.
    """

    optimiser: Literal["sgd", "adam"] = "sgd"
    rate: float = 1.0
    steps: int = 1
    anew: bool = False
    weight_decay: float = 0.0
    most: float | None = None
    noise: float | None = 0.0

    @property
    def by_examples(self) -> bool:
        """Whether only the gradients of examples tell how far a round moves the model."""
        return self.optimiser == "sgd" and self.most is None and self.noise is not None

    def by_adam(self, first: int, last: int) -> float:
        """Returns how far one number moves at most from the broadcast of round `first` to `last`.

        Weight decay and rounding are not in it.
        """
        rounds = last - first
        if self.anew:
            return self.rate * rounds * sum(map(longest_step, range(1, self.steps + 1)))
        begin, made = (first - 1) * self.steps + 1, rounds * self.steps
        counted = min(made, COUNTED)
        summed = sum(map(longest_step, range(begin, begin + counted)))
        return self.rate * (summed + (made - counted) * LONGEST)

    def noise_norm(self, numbers: int) -> float | None:
        """Returns an L2 norm that the noise on so many numbers exceeds once in 60 million times.

        A Gaussian vector is longer than sqrt(n) + t standard deviations with a probability of at
        most exp(-t^2 / 2) (Boucheron, Lugosi and Massart 2013, theorem 5.6); t is 6.
        """
        return None if self.noise is None else self.noise * (math.sqrt(numbers) + 6.0)


def longest_step(step: int) -> float:
    """Returns how far Adam moves a number in its `step`-th step at most, in learning rates.

    By the inequality of Cauchy and Schwarz, |m_t| <= (1 - b1) sqrt(sum_i (b1^2 / b2)^i) sqrt(sum_i
    b2^i g_(t-i)^2), and the last root is that of v_t / (1 - b2); both moments are then divided by
    their bias (Kingma and Ba 2015, algorithm 1). It is 1 for the first step, 1.04 for the tenth and
    below 7.28 for all, whatever the gradients.
    """
    ratio = BETA1**2 / BETA2
    root = math.sqrt((1 - ratio**step) / (1 - ratio) / (1 - BETA2))
    return (1 - BETA1) * root * math.sqrt(1 - BETA2**step) / (1 - BETA1**step)
