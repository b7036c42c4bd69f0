"""Shares the time of an update among the attacks, so that none eats what another needs.

Attacks on spans are cheap and sure where rounding is all that blurs an update, or local steps are.
Where noise does, they only guess, and gradient matching is what reads. So they get much time in the
one case, little in the other. What comes after gradient matching is reserved by the time that a
step of it takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fedleak.attacks import clock as timing
from fedleak.attacks.auto.chance import PLACEBOS
from fedleak.attacks.auto.sharpening import PROPOSED, trial
from fedleak.attacks.certificate import as_gradient, is_linear
from fedleak.attacks.clock import MOMENT, Clock
from fedleak.attacks.matching.batch_structure import frame
from fedleak.attacks.subspace.span import ACCEPT, row_space
from fedleak.attacks.subspace.token_bag import read_token_bag
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.observation import Observation

_CLEAR, _BLURRED = 0.75, 0.1
"""Shares of the time left that an attack on spans may take."""

_MOST = 0.5
"""Share of the time left that is reserved at most."""

_SWEEPS = 3
"""Times that each word of a batch is looked at, before no other word fits better."""

_CONTENT = 10
"""Tokens of a text, where nothing tells."""


def spans_are_clear(seen: Observation, model: LanguageModel, rng: torch.Generator) -> bool:
    """Whether the tokens of a batch stand out of the first layer's row space, as spans show them.

    True also of an update that is not one gradient: attacks on spans measure what local steps blur.

    Args:
        seen: Of the attention parameters of the first layer, or of others.
        model: At the broadcast weights.
        rng: For sketches.
    """
    if not is_linear(seen):
        return True
    gradients = model.family.attention_gradients(as_gradient(seen), 0)
    span = row_space(gradients) if gradients else None
    if span is None or span.exact:
        return span is not None
    bag = read_token_bag(model.family.token_table(model.module).directions(), span, rng)
    return bag is not None and bag.worst_accepted < ACCEPT < bag.best_rejected


def on_spans(clock: Clock, clear: bool) -> float:
    """Returns the seconds that an attack on spans may take."""
    return (_CLEAR if clear else _BLURRED) * clock.left()


@dataclass(frozen=True)
class Reserve:
    """Seconds that are kept for what comes after gradient matching.

    Attributes:
        mending: For words that fit better.
        answer: For the choice among all that was read, and its comparison with chance.
    """

    mending: float
    answer: float

    @classmethod
    def measured(
        cls, seen: Observation, model: LanguageModel, guesses: Sequence[tuple[int, ...]]
    ) -> "Reserve":
        """Returns what a batch takes, from the time that one step takes now.

        Args:
            seen: The update.
            model: At the broadcast weights.
            guesses: Sequences that were read, which tell lengths where these are not granted.
        """
        size = seen.update.num_examples
        around = frame(model)
        marks = len(around.first) + len(around.last)
        known = seen.knowledge.lengths or [len(ids) + marks for ids in guesses[:size]]
        lengths = [*known, *[_CONTENT + marks] * size][:size]
        longest = min(max(lengths), model.max_length)
        begin = timing.now()
        trial(model, longest, as_gradient(seen))
        step = timing.now() - begin
        labels = model.num_labels if model.task == CLASSIFICATION else 1
        return cls(
            mending=_SWEEPS * step * sum(lengths),
            answer=2 * step * labels * (2 * size + PLACEBOS) / (2 * PROPOSED),
        )

    def before(self, clock: Clock) -> float:
        """Returns the seconds that gradient matching may take."""
        return clock.left() - min(self.mending + self.answer, _MOST * clock.left())

    def mending_clock(self, clock: Clock) -> Clock:
        """Returns the clock of mending: it leaves time for the answer."""
        return Clock(max(clock.left() - min(self.answer, _MOST * clock.left()), MOMENT))
