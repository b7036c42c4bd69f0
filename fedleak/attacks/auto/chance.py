"""What an answer without a proof is worth: more than any text explains by chance, or all but noise.

Any text explains something of any update, because gradients of all texts have much in common. So
guesses stand beside placebos: random texts of the same lengths. A regression of the update on the
gradients of all of them gives a guess the t statistic of its coefficient, up to scale: what it
explains that none of the others do. A placebo's statistic, without that guess, is chance, so the
spread of the placebos is the unit.

Tables with a row for each token are left out: the rows of random texts say nothing about the rows
of other tokens, and one row may be larger than all that 32 texts ever saw.

A guess was sought among many texts, and placebos were not. The largest of n normal numbers exceeds
`sqrt(2 ln(n / p))` with probability p at most. A search among all texts of T tokens from a
vocabulary of V, with each of C labels, looks at no more than n = C V^T. So a guess is likely if its
statistic is larger than that, in units of the placebos' spread, whoever sought it and however long.
No threshold is learned from texts. A likely text need not be right in every word.

Where the noise's scale is known, a batch may leave exactly the noise: the squares of what is left
follow a chi-square distribution with as many degrees of freedom as there are numbers. That is
the end of a search, if noise of that size could not hide another word.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.auto.evidence import Pairs, compare_labelled, weights
from fedleak.attacks.auto.peeling import gradient_of
from fedleak.attacks.auto.sharpening import Labelled, content
from fedleak.attacks.certificate import as_gradient, close, is_linear
from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.pooled_span import SIGMAS
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.training.observation import Observation, UpdateKind

PLACEBOS = 32
"""Random texts, shared by the guesses of a batch."""

FEWEST = 16
"""With fewer random texts no guess is judged: their spread would be a guess itself."""

_RISK = 0.05
"""Probability that the best of all texts of a length is called likely by chance, at most."""

_RIDGE = 1e-6
"""Added to the square of each gradient, of unit size: the rounding of float32."""

_TINY = 1e-150
"""Norms are no smaller than this."""


class Worth(NamedTuple):
    """What guesses explain of an update.

    Attributes:
        nats: Half the square of each guess's statistic, in units of the placebos' spread: how much
            likelier it makes the update. 0 if it explains less than they do.
        by_chance: What the best of all texts of its length may reach by chance.
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
    placebos: int = PLACEBOS,
) -> Worth:
    """Returns what each guess of a batch explains, and what any text does by chance.

    Args:
        model: At the broadcast weights.
        batch: The guesses.
        observed: The mean gradient by parameter name.
        rng: For placebos.
        noise: Its scale, if it is known.
        placebos: How many random texts there are.
    """
    instead = [batch[i % len(batch)] for i in range(placebos)]
    random = [guess._replace(ids=placebo(model, guess.ids, rng)) for guess in instead]
    every = [*batch, *random]
    labels_N1 = torch.tensor([[guess.label] for guess in every], device=model.device)
    closed = [close(model, guess.ids) for guess in every]
    above_B = torch.zeros(len(batch))
    vocabulary = len(model.module.get_parameter(model.family.word_embedding))
    dense = {name: value for name, value in observed.items() if len(value) != vocabulary}
    if weights(model, dense):
        pairs = compare_labelled(model, closed, labels_N1, dense, noise)
        t_N = statistics(pairs, range(len(every)))
        for i in range(len(batch)):
            # A guess that was fitted to an update leaves the others nothing to explain.
            without = [k for k in range(len(every)) if k != i]
            chance_P = statistics(pairs, without)[-placebos:]
            above_B[i] = (t_N[i] - chance_P.mean()) / chance_P.std()
    above_B = above_B.clamp_min(0)
    labels = model.num_labels if model.task == CLASSIFICATION else 1
    by_chance = [
        len(content(model, guess.ids)) * math.log(len(model.tokenizer)) + math.log(labels / _RISK)
        for guess in batch
    ]
    return Worth(tuple((above_B.square() / 2).tolist()), tuple(by_chance))


def statistics(pairs: Pairs, chosen: Sequence[int]) -> Tensor:
    """Returns the t statistics [K] of pairs in a regression on these alone, up to scale.

    The statistic of a gradient that the others make up is about 0.
    """
    picked_K = torch.tensor([*chosen])
    gram_KK = pairs.gram_KK[picked_K[:, None], picked_K]
    size_K = gram_KK.diagonal().sqrt().clamp_min(_TINY)
    unit_KK = gram_KK / (size_K[:, None] * size_K)
    inverse_KK = torch.linalg.inv(unit_KK + _RIDGE * torch.eye(len(size_K), dtype=torch.float64))
    inner_K = pairs.observed_K[picked_K] / size_K
    t_K: Tensor = inverse_KK @ inner_K / inverse_KK.diagonal().sqrt()
    return t_K


def placebo(model: LanguageModel, ids: Ids, rng: torch.Generator) -> Ids:
    """Returns a sequence with random tokens where no mark stands."""
    changed, special = list(ids), model.special_ids()
    for place in content(model, ids):
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
    model: LanguageModel,
    batch: Sequence[Labelled],
    seen: Observation,
    rng: torch.Generator,
    clock: Clock = UNLIMITED,
) -> bool:
    """Whether a batch leaves nothing of an update but noise of the known scale.

    False if the scale is not known, if the noise would hide another word, or if time is up before
    that is known: each word in turn is replaced by a random one, and the change has to show.

    Args:
        model: At the broadcast weights.
        batch: All sequences, with labels and weights.
        seen: The update.
        rng: For other words.
        clock: Looked at before each word.
    """
    noise = noise_of(seen)
    if noise is None or len(batch) < seen.update.num_examples:
        return False
    observed = as_gradient(seen)
    shared = {name: value != 0 for name, value in observed.items()}

    def gradient(guess: Labelled, ids: Ids) -> dict[str, Tensor]:
        gradients = gradient_of(model, ids, guess.label, list(observed))
        return {name: guess.weight * value * shared[name] for name, value in gradients.items()}

    def squares(gradients: Mapping[str, Tensor]) -> float:
        return sum(float(g.double().square().sum()) for g in gradients.values()) / noise**2

    own = [gradient(guess, guess.ids) for guess in clock.paced(batch)]
    if len(own) < len(batch):
        return False
    left = {name: value - sum(part[name] for part in own) for name, value in observed.items()}
    numbers = sum(int(mask.sum()) for mask in shared.values())
    margin = SIGMAS * math.sqrt(2 * numbers)
    if abs(squares(left) - numbers) > margin:
        return False
    changes = [
        (guess, mine, place, other[place])
        for guess, mine in zip(batch, own, strict=True)
        for other in [placebo(model, guess.ids, rng)]
        for place in content(model, guess.ids)
    ]
    tried = 0
    for guess, mine, place, word in clock.paced(changes):
        changed = gradient(guess, (*guess.ids[:place], word, *guess.ids[place + 1 :]))
        # Twice: what is left may be as far below what is expected as it may be above.
        if squares({n: changed[n] - mine[n] for n in changed}) < 2 * margin:
            return False
        tried += 1
    return tried == len(changes)
