"""Replay: whether a client's local steps on the texts of an answer, made again, give its update.

The server set how the client steps, so whoever has the model can make the same steps. That proves
answers where recomputing one gradient cannot: after several steps, and after Adam. What is not
known is searched by the cosine of the update that was sent and the one that was made again: which
texts stood in which step, and their classes.

Two computations of one update differ by rounding, and Adam makes whole steps of the rounding of
small gradients. So how far apart they may be is measured on the answer itself, without the update:
the steps are made again at weights that are moved by their own rounding, as in Monte Carlo
arithmetic (Parker 1997). And they are made again with one token changed: what is proved must be so
near that each of these neighbours would be refused.

Shapes: X: all numbers of an update.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.certificate import close, nearest_words, precision
from fedleak.attacks.clock import Clock
from fedleak.models import CLASSIFICATION, LanguageModel, target_counts
from fedleak.training.observation import Observation, UpdateKind
from fedleak.training.recipe import Recipe, copied_parameters, in_weights_of
from fedleak.training.steps import Batch, gradient, moved, steps_

ROOM = 4.0
"""How many times what rounding makes of an answer two computations may be apart."""

NEIGHBOURS = 4
"""Answers with one token changed that a proof has to tell from the answer."""

PROMISING = 0.5
"""Cosine below which no order of texts is searched, once classes are the best one by one."""

REPLAYS = 200
"""Times at most that the steps are made to find which texts were in which."""

SECONDS = 60.0
"""Time for one answer, at most."""


class Replayed(NamedTuple):
    """What making the steps again says of an answer.

    Attributes:
        cosine: Of the update that was sent and the one that was made again.
        apart: Their difference, relative to what was sent.
        limit: What it may be at most; None: not measured.
        verified: The texts, in some order, make this update, and neighbours of them do not.
    """

    cosine: float
    apart: float
    limit: float | None
    verified: bool

    def diagnostics(self) -> dict[str, float]:
        """Returns what an answer says of it."""
        measured = {} if self.limit is None else {"replay_limit": self.limit}
        return {"replay_cosine": self.cosine, "replay_difference": self.apart} | measured


def obstacle(seen: Observation) -> str | None:
    """Returns why the steps of a client cannot be made again, or None."""
    known = seen.knowledge
    if seen.client < 0:
        return "it is a sum over clients"
    if seen.update.kind == UpdateKind.GRADIENT or known.learning_rate is None:
        return "it is no update of known steps"
    if known.dropout is not False:
        return "dropout leaves out numbers that nobody knows"
    if known.noise_scale:
        return "there is noise on it"
    if known.recipe is not None and known.recipe.optimiser == "other":
        return "its optimiser is not known"
    return None


@dataclass(frozen=True)
class Arrangement:
    """Which texts are in which step, and the class of each.

    Attributes:
        passes: The texts in their order, once for each pass over them.
        labels: Their classes.
        size: Texts in a step.
    """

    passes: tuple[tuple[int, ...], ...]
    labels: tuple[int, ...]
    size: int

    def batches(self, sequences: Sequence[Sequence[int]]) -> list[Batch]:
        """Returns the batches of the steps."""
        texts = Batch(sequences, self.labels)
        return [
            texts.of(order[start : start + self.size])
            for order in self.passes
            for start in range(0, len(order), self.size)
        ]

    def neighbours(self, classes: int) -> Iterator["Arrangement"]:
        """Yields arrangements with two texts in each other's step, or one text of another class."""
        for number, order in enumerate(self.passes):
            for i in range(len(order)):
                # Within a step the order does not count.
                for j in range((i // self.size + 1) * self.size, len(order)):
                    swapped = list(order)
                    swapped[i], swapped[j] = order[j], order[i]
                    passes = (*self.passes[:number], tuple(swapped), *self.passes[number + 1 :])
                    yield replace(self, passes=passes)
        for i in range(len(self.labels)):
            yield from self.relabelled(i, classes)

    def relabelled(self, i: int, classes: int) -> Iterator["Arrangement"]:
        """Yields arrangements with one text of another class."""
        for other in range(classes):
            if other != self.labels[i]:
                yield replace(self, labels=(*self.labels[:i], other, *self.labels[i + 1 :]))


def replay(
    model: LanguageModel,
    sequences: Sequence[tuple[int, ...]],
    seen: Observation,
    seconds: float = SECONDS,
) -> Replayed | None:
    """Makes a client's steps again on the texts of an answer; None if that cannot be done.

    Args:
        model: At the broadcast weights.
        sequences: The batch, each text as often as it occurs, with or without the last target of
            next-token training.
        seen: The update, without what weight decay alone did.
        seconds: For the search of orders and classes: the attack's own limit, if that is less than
            a minute.
    """
    if obstacle(seen) is not None or not 0 < len(sequences) == seen.update.num_examples:
        return None
    end = close(model, ())
    closed = [ids if end and ids[-1:] == end else close(model, ids) for ids in sequences]
    # A text without a target says nothing, and a repeated one may stand in its place.
    hidden = bool(model.response_template) and len(set(closed)) < len(closed)
    if hidden or not all(target_counts(model, closed)):
        return None
    clock, sent_X = Clock(min(seconds, SECONDS)), flat(seen.update.tensors)
    best: tuple[float, Arrangement] | None = None
    for start in _starts(model, closed, seen):
        climbed = _climbed(model, closed, seen, sent_X, start, clock)
        best = climbed if best is None else max(best, climbed, key=lambda pair: pair[0])
    if best is None:
        return None
    cosine, arrangement = best
    own_X = flat(steps_again(model, arrangement.batches(closed), seen))
    apart = float((sent_X - own_X).norm() / sent_X.norm())
    if not math.isfinite(apart):  # an update of zeros, or steps that diverge
        return None
    if apart > PROMISING or not can_tell(model, closed, seen):
        return Replayed(cosine, apart, None, False)
    rng = torch.Generator().manual_seed(0)
    blurred_X = flat(steps_again(model, arrangement.batches(closed), seen, blur=rng))
    size = own_X.norm()
    changed = [
        float((flat(steps_again(model, arrangement.batches(other), seen)) - own_X).norm() / size)
        for other in _one_token_changed(model, closed)
    ]
    nearest = min(changed, default=0.0)
    limit = max(precision(seen), min(ROOM * float((blurred_X - own_X).norm() / size), nearest / 2))
    return Replayed(cosine, apart, limit, apart < limit <= nearest / 2)


def can_tell(model: LanguageModel, closed: Sequence[Sequence[int]], seen: Observation) -> bool:
    """Whether an update has enough numbers to prove so many tokens.

    Of a first step of Adam each number is little more than a sign: one bit.
    """
    numbers = sum(int(tensor.count_nonzero()) for tensor in seen.update.tensors.values())
    return numbers >= sum(map(len, closed)) * math.log2(len(model.tokenizer))


def steps_again(
    model: LanguageModel,
    batches: Sequence[Batch],
    seen: Observation,
    *,
    blur: torch.Generator | None = None,
) -> dict[str, Tensor]:
    """Returns the update that a client's steps on these batches make, as it is observed.

    The model is left as it is.

    Args:
        model: At the broadcast weights, without dropout.
        batches: Of each step.
        seen: Says how the client steps, and which tensors it sends.
        blur: Moves the weights by half a unit in their last place at most, at random.
    """
    known = seen.knowledge
    recipe, rate = known.recipe or Recipe(), known.learning_rate or 1.0
    eps = torch.finfo(torch.float32 if recipe.precision == "float32" else torch.bfloat16).eps
    with torch.enable_grad(), copied_parameters(model.module.parameters()):
        before = {name: p.detach().clone() for name, p in model.trained().items()}
        for parameter in model.module.parameters() if blur is not None else ():
            value = parameter.data
            noise = torch.rand(value.shape, generator=blur).to(value)
            value.mul_(1 + eps * (noise - 0.5))
        with in_weights_of(model.module, recipe.precision):
            start = {name: p.detach().clone() for name, p in model.trained().items()}
            gradients = (gradient(model, batch, recipe) for batch in batches)
            steps_(model, gradients, recipe, rate)
            deltas = moved(start, model.parameters())
    return {
        name: recipe.without_decay(deltas[name], before[name], rate, len(batches))
        for name in seen.update.tensors
    }


def flat(tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns all numbers of an update as one vector, float64 [X]."""
    return torch.cat([value.flatten() for value in tensors.values()]).double()


def _starts(
    model: LanguageModel, closed: Sequence[Sequence[int]], seen: Observation
) -> Iterator[Arrangement]:
    """Yields an arrangement of each number of texts in a step that the number of steps admits."""
    known, count = seen.knowledge, len(closed)
    epochs, steps = known.local_epochs or 1, known.local_steps or 1
    sizes = [known.batch_size] if known.batch_size else range(1, count + 1)
    labels = [0] * count
    if known.labels is not None:  # they belong to the longest text first
        longest = sorted(range(count), key=lambda i: len(closed[i]), reverse=True)
        for place, label in zip(longest, known.labels, strict=True):
            labels[place] = label
    for size in sizes:
        if epochs * -(-count // size) == steps:
            yield Arrangement((tuple(range(count)),) * epochs, tuple(labels), size)


def _climbed(
    model: LanguageModel,
    closed: Sequence[Sequence[int]],
    seen: Observation,
    sent_X: Tensor,
    start: Arrangement,
    clock: Clock,
) -> tuple[float, Arrangement]:
    """Returns the arrangement of the largest cosine that single changes lead to."""
    classes = model.num_labels if model.task == CLASSIFICATION else 0
    best, left, better = (-math.inf, start), REPLAYS, True

    def improves(changed: Arrangement) -> bool:
        nonlocal best, left
        left -= 1
        own_X = flat(steps_again(model, changed.batches(closed), seen))
        cosine = float(torch.cosine_similarity(sent_X, own_X, 0))
        if cosine > best[0]:
            best = (cosine, changed)
            return True
        return False

    def ended() -> bool:
        return clock.up() or left <= 0 or 1 - best[0] < precision(seen) ** 2 / 2

    improves(start)
    for i in range(len(closed) if classes else 0):
        for changed in best[1].relabelled(i, classes):
            if ended():
                return best
            improves(changed)
    while better and best[0] > PROMISING:
        better = False
        for changed in best[1].neighbours(classes):
            if ended():
                return best
            if better := improves(changed):
                break
    return best


def _one_token_changed(
    model: LanguageModel, closed: Sequence[tuple[int, ...]]
) -> Iterator[list[tuple[int, ...]]]:
    """Yields answers of which one word is another one: those that are the hardest to tell apart."""
    special = model.special_ids()
    places = [
        (number, place)
        for number, ids in enumerate(closed)
        for place, token in enumerate(ids)
        if token not in special
    ]
    if not places:
        return
    others_N, apart_N = nearest_words(model, [closed[number][place] for number, place in places])
    for i in apart_N.argsort()[:NEIGHBOURS].tolist():
        number, place = places[i]
        changed = (*closed[number][:place], int(others_N[i]), *closed[number][place + 1 :])
        yield [*closed[:number], changed, *closed[number + 1 :]]
