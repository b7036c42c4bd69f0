"""How each attack of the ensemble is asked, and what it tells the others.

Sequences go from attack to attack in one form: that of attacks on spans, which do not see the last
target of next-token training (`certificate.close` puts it back).
"""

from collections.abc import Callable
from dataclasses import replace
from functools import singledispatch
from typing import NamedTuple

import torch

from fedleak.attacks import Progress
from fedleak.attacks.certificate import Member, close
from fedleak.attacks.matching.batch_structure import Clues, frame
from fedleak.attacks.matching.lamp import Lamp
from fedleak.attacks.reconstruction import Reconstruction
from fedleak.attacks.subspace.dager import Dager
from fedleak.attacks.subspace.keyspan import Keyspan
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.training.observation import Observation

Ids = tuple[int, ...]
OnProgress = Callable[[Progress], None]


class Reading(NamedTuple):
    """What an attack of the ensemble found.

    Attributes:
        answer: What it says of the batch by itself.
        sequences: What it read, best first, even where it does not stand by it.
        members: Sequences that it proved, one by one.
        tokens: Tokens beside which it says there are no others.
        scale: How many times its mean gradient the update is, as far as members tell.
    """

    answer: Reconstruction
    sequences: tuple[Ids, ...]
    members: tuple[Member, ...] = ()
    tokens: tuple[int, ...] = ()
    scale: float = 1.0


@singledispatch
def read(
    attack: object,
    seen: Observation,
    model: LanguageModel,
    clues: Clues,
    rng: torch.Generator,
    on_progress: OnProgress,
) -> Reading:
    """Asks an attack.

    Args:
        attack: With the time that it may take.
        seen: What is left of the update.
        model: At the broadcast weights.
        clues: What the attacks before it found.
        rng: A random stream.
        on_progress: Is told how far it is.
    """
    raise TypeError(f"{type(attack).__name__} is not in the ensemble")


@read.register
def _(
    attack: Keyspan,
    seen: Observation,
    model: LanguageModel,
    clues: Clues,
    rng: torch.Generator,
    on_progress: OnProgress,
) -> Reading:
    answer, members, scale = attack.read(seen, model, rng=rng, on_progress=on_progress)
    # Noise blurs the bag; where a sentence stands out, so does it.
    tokens = (answer.tokens or ()) if answer.verified or not answer.reason else ()
    return Reading(answer, answer.sequences or (), members, tokens, scale)


@read.register
def _(
    attack: Dager,
    seen: Observation,
    model: LanguageModel,
    clues: Clues,
    rng: torch.Generator,
    on_progress: OnProgress,
) -> Reading:
    answer = attack(seen, model, rng=rng, on_progress=on_progress)
    return Reading(answer, answer.sequences or ())


@read.register
def _(
    attack: Lamp,
    seen: Observation,
    model: LanguageModel,
    clues: Clues,
    rng: torch.Generator,
    on_progress: OnProgress,
) -> Reading:
    whole = replace(clues, sequences=tuple(close(model, ids) for ids in clues.sequences))
    (match,) = attack.matches(
        [seen], model, rngs=[rng], report=lambda _, how: on_progress(how), clues=[whole]
    )
    end = 0 if model.task == CLASSIFICATION else len(frame(model).last)
    return Reading(match.answer, tuple(ids[: len(ids) - end] for ids in match.sequences))
