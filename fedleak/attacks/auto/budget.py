"""Shares the time of an update among the attacks, so that none takes what another needs.

Attacks on spans may take most of it: if something blurs spans so much that they read nothing, they
end early by themselves. The time for what comes after gradient matching is reserved, by the time
that a small step takes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import mean

from fedleak.attacks import clock as timing
from fedleak.attacks.auto.chance import PLACEBOS
from fedleak.attacks.auto.evidence import directions
from fedleak.attacks.auto.sharpening import PROPOSED, trial
from fedleak.attacks.certificate import as_gradient
from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Ids
from fedleak.models import LanguageModel, frame
from fedleak.training.observation import Observation

OF_SPANS = 0.75
"""Share of the time left that an attack on spans may take."""

_MOST = 0.5
"""Share of the time left that is reserved at most."""

_LEAST = 0.08
"""Share of the time left that is reserved at least: it may take longer than is expected."""

_PROOF = 3
"""Gradients of a text that its proof takes as long as."""

_ROOM = 1.5
"""How much longer than expected the choice and the comparison with chance may take."""

_GRADIENTS = 10_000
"""Gradients that are compared with each other, at most."""

_TRIED = 32
"""Tokens of each text of the small step."""

_SWEEPS = 3
"""Times that each word of a batch is looked at, before no other word fits better."""

_MATCHED = 1_000
"""Gradients of each text after which gradient matching has come near, whatever blurs the update."""

_PURSUED = 2_500
"""Gradients of tokens that what `state_pursuit` must know of the model takes as long as."""

_CONTENT = 10
"""Tokens of a text, if its length is unknown."""


@dataclass(frozen=True)
class Pace:
    """How long gradients of guesses take now, measured at the first use.

    Attributes:
        seen: The update.
        model: At the broadcast weights.
    """

    seen: Observation
    model: LanguageModel

    @cached_property
    def seconds(self) -> tuple[float, float]:
        """What a pass over the model takes, however short, and what each token adds."""
        observed, moments = as_gradient(self.seen), [timing.now()]
        length = min(_TRIED, self.model.max_length)
        for guesses in (1, PROPOSED):
            trial(self.model, length, observed, guesses)
            moments.append(timing.now())
        alone, together = moments[1] - moments[0], moments[2] - moments[1]
        return alone, max(together - alone, 0.0) / ((PROPOSED - 1) * length)


@dataclass(frozen=True)
class Reserve:
    """Seconds that are kept for what comes after gradient matching, by the time of a small step.

    Attributes:
        pace: How long gradients take.
        seen: What is left of the update.
        guesses: Sequences that were read, which tell lengths where these are not granted.
    """

    pace: Pace
    seen: Observation
    guesses: Sequence[Ids]

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of the texts of the batch, as far as they are known."""
        marks, size = sum(map(len, frame(self.pace.model))), self.seen.update.num_examples
        known = self.seen.knowledge.lengths or [len(ids) + marks for ids in self.guesses[:size]]
        return [*known, *[_CONTENT + marks] * size][:size]

    @property
    def gradient(self) -> float:
        """Seconds of one more guess's gradient, with one label."""
        longest = max([*self.lengths, *map(len, self.guesses)])
        return self.pace.seconds[1] * min(longest, self.pace.model.max_length)

    @property
    def matching(self) -> float:
        """Seconds in which gradient matching comes near."""
        return _MATCHED * self.gradient * len(self.lengths)

    @property
    def pursuit(self) -> float:
        """Seconds before `state_pursuit` begins its search."""
        return _PURSUED * self.pace.seconds[1]

    @property
    def mending(self) -> float:
        """Seconds for words that fit better."""
        if self.seen.knowledge.dropout:  # right words do not fit much better than others then
            return 0.0
        return _SWEEPS * 2 * PROPOSED * self.gradient * sum(self.lengths)

    @property
    def answer(self) -> float:
        """Seconds for the choice among guesses, the comparison with chance, and the proof."""
        size = len(self.lengths)
        return (
            _ROOM * self._products(directions(self.pace.model) * 2 * size)
            + _ROOM * self._products(size + PLACEBOS)
            + _PROOF * size * self.gradient
        )

    def before_choice(self, clock: Clock) -> float:
        """Returns the seconds for an attack that runs after others read something."""
        return _without(self.answer, clock.left())

    def before(self, clock: Clock) -> float:
        """Returns the seconds that gradient matching may take."""
        return _without(self.mending + self.answer, clock.left())

    def gradients_in(self, seconds: float) -> int:
        """Returns how many gradients can be compared with each other in some seconds."""
        return bisect_right(range(_GRADIENTS), seconds, key=self._products) - 1

    def _products(self, gradients: int) -> float:
        """Returns the seconds that so many gradients and their inner products take."""
        # By factors, or by the gradients themselves: whichever is less (`evidence`).
        tokens = gradients * mean(self.lengths)
        factors = tokens / (2 * self.pace.model.hidden_size)
        formed = (1 + gradients**2 / (tokens or 1)) / 3
        fixed, token = self.pace.seconds
        return fixed + token * tokens * (1 + min(factors, formed))


def _without(reserved: float, left: float) -> float:
    """Returns the seconds left without those that are reserved, within the shares for that."""
    return left - min(max(reserved, _LEAST * left), _MOST * left)
