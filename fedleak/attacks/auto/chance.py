"""What an answer without a proof is worth: more than random texts explain, or all but the noise.

Any text explains something of any update, because gradients of all texts have much in common. So
the yardstick of a guess is what placebos explain: random texts of the same lengths, with their best
labels, in the guess's place. A guess is likely if it makes the update likelier than the best
placebo does by more than chance could. Chance has two parts. Placebos differ among each other, and
a search goes further than a few of them: so the guess has to be as far from the best as that is
from the worst. And a search among all texts of T tokens from a vocabulary of V finds one that makes
mere noise likelier by up to T ln V nats (minimum description length; Rissanen 1978). No threshold
is learned from texts. A likely text need not be right in every word.

Where the noise's scale is known, a batch may leave exactly the noise: the squares of what is left
follow a chi-square distribution with as many degrees of freedom as there are numbers. That is
the end of a search, if noise of that size could not hide another word.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.auto.evidence import compare, nats
from fedleak.attacks.auto.peeling import gradient_of
from fedleak.attacks.auto.sharpening import Labelled
from fedleak.attacks.certificate import as_gradient, is_linear
from fedleak.attacks.matching.batch_structure import frame
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.observation import Observation, UpdateKind

PLACEBOS = 32
"""Random texts, shared by the guesses of a batch."""

_SIGMAS = 3.0
"""Standard deviations by which a sum of squares of noise may miss what is expected."""

Ids = tuple[int, ...]


class Worth(NamedTuple):
    """What guesses explain of an update.

    Attributes:
        nats: How much likelier each guess makes the update than the best placebo in its place.
        by_chance: By how much a search for a text of its length may do so by chance.
    """

    nats: tuple[float, ...]
    by_chance: tuple[float, ...]

    @property
    def likely(self) -> tuple[bool, ...]:
        """Which guesses explain more than chance does."""
        return tuple(a > b for a, b in zip(self.nats, self.by_chance, strict=True))


def worth(
    model: LanguageModel,
    batch: Sequence[Labelled],
    observed: Mapping[str, Tensor],
    rng: torch.Generator,
    noise: float | None = None,
) -> Worth:
    """Returns what each guess of a batch explains beyond what a random text does in its place.

    Args:
        model: At the broadcast weights.
        batch: The guesses.
        observed: The mean gradient by parameter name.
        rng: For placebos.
        noise: Its scale, if it is known.
    """
    sequences = [one.ids for one in batch]
    random = [placebo(model, sequences[i % len(batch)], rng) for i in range(PLACEBOS)]
    pairs = compare(model, [*sequences, *random], observed, noise)
    at = {pair: k for k, pair in enumerate(zip(pairs.sequence, pairs.label, strict=True))}
    picks = [at[i, one.label] for i, one in enumerate(batch)]
    gains, by_chance = [], []
    for i, ids in enumerate(sequences):
        rest = [*picks[:i], *picks[i + 1 :]]
        without = min(1.0, pairs.residual(rest))
        instead = dict.fromkeys(range(len(batch), len(batch) + len(random)), without)
        for k, sequence in enumerate(pairs.sequence):
            if sequence in instead:
                instead[sequence] = min(instead[sequence], pairs.residual([*rest, k]))
        found, best, worst = (
            nats(pairs, residual)
            for residual in (pairs.residual(picks), min(instead.values()), max(instead.values()))
        )
        gains.append(found - best)
        by_noise = len(_content(model, ids)) * math.log(len(model.tokenizer))
        by_chance.append(by_noise + best - worst)
    return Worth(tuple(gains), tuple(by_chance))


def _content(model: LanguageModel, ids: Ids) -> list[int]:
    """Returns the places of a sequence that no mark takes, as attacks on spans give sequences."""
    around = frame(model)
    end = len(around.last) if model.task == CLASSIFICATION else 0
    return list(range(len(around.first), len(ids) - end))


def placebo(model: LanguageModel, ids: Ids, rng: torch.Generator) -> Ids:
    """Returns a sequence with random tokens where no mark stands."""
    changed, special = list(ids), model.special_ids()
    for place in _content(model, ids):
        while (token := int(torch.randint(len(model.tokenizer), (), generator=rng))) in special:
            pass
        changed[place] = token
    return tuple(changed)


def noise_of(seen: Observation) -> float | None:
    """Returns the scale of the noise on a gradient, as `as_gradient` gives it; None: not known."""
    scale = seen.knowledge.noise_scale
    if not scale or not is_linear(seen):
        return None
    if seen.update.kind == UpdateKind.GRADIENT:
        return scale
    return scale / (seen.knowledge.learning_rate or 1.0)


def leaves_noise(
    model: LanguageModel, batch: Sequence[Labelled], seen: Observation, rng: torch.Generator
) -> bool:
    """Whether a batch leaves nothing of an update but noise of the known scale.

    False where the scale is not known, and where the noise would hide another word: of each word
    in turn, a random one is put in its place, and what that changes has to show.

    Args:
        model: At the broadcast weights.
        batch: All sequences, with labels and weights.
        seen: The update.
        rng: For other words.
    """
    noise = noise_of(seen)
    if noise is None or len(batch) < seen.update.num_examples:
        return False
    observed = as_gradient(seen)
    shared = {name: value != 0 for name, value in observed.items()}

    def gradient(one: Labelled, ids: Ids) -> dict[str, Tensor]:
        found = gradient_of(model, ids, one.label, list(observed))
        return {name: one.weight * value * shared[name] for name, value in found.items()}

    def squares(gradients: Mapping[str, Tensor]) -> float:
        return sum(float(g.double().square().sum()) for g in gradients.values()) / noise**2

    own = [gradient(one, one.ids) for one in batch]
    left = {name: value - sum(each[name] for each in own) for name, value in observed.items()}
    numbers = sum(int(mask.sum()) for mask in shared.values())
    margin = _SIGMAS * math.sqrt(2 * numbers)
    if abs(squares(left) - numbers) > margin:
        return False
    for one, mine in zip(batch, own, strict=True):
        other = placebo(model, one.ids, rng)
        for place in _content(model, one.ids):
            ids = (*one.ids[:place], other[place], *one.ids[place + 1 :])
            changed = gradient(one, ids)
            # Twice: what is left may be as far below what is expected as it may be above.
            if squares({n: changed[n] - mine[n] for n in changed}) < 2 * margin:
                return False
    return True
