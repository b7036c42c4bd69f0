"""Replay: whether a client's local steps on the texts of an answer, made again, give its update.

The server set how the client steps, so whoever has the model can make the same steps. That proves
answers where recomputing one gradient cannot: after several steps, and after Adam. Which texts
stood in which step, and their classes, may be unknown: they are searched by the cosine of the
update that was sent and the one that was made again.

Two computations of one update differ by rounding, and Adam makes whole steps of the rounding of
small gradients. So how far apart they may be is measured on the answer itself, without the update:
the steps are made again at weights that are moved by their own rounding, as in Monte Carlo
arithmetic (Parker 1997). And they are made again with one token changed, and without the gradient
of a text of which the model is sure, in whose place another such text could stand: a proof must be
so near that each of these neighbours would be refused.

After a mask or pruning, all of this compares only the numbers that came, and neighbours must be
farther away. For Adam's steps, which rounding blurs most, that proves nothing.

Shapes: X: all numbers of an update.
"""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.adam_step import behind_adam
from fedleak.attacks.certificate import (
    Proofs,
    as_gradient,
    close,
    flat,
    lacks_numbers,
    nearest_words,
    precision,
    units,
)
from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Ids
from fedleak.models import CLASSIFICATION, LanguageModel, example_losses, pad, target_counts
from fedleak.training.observation import Observation, UpdateKind
from fedleak.training.recipe import Recipe, copied_parameters, in_weights_of
from fedleak.training.steps import Batch, delta_, gradient

ROOM = 4.0
"""How far apart two computations may be, in units of the difference that rounding makes."""

NEIGHBOURS = 4
"""Answers with one token changed that a proof has to distinguish from the answer."""

SUREST = 2
"""Texts of which the model is the surest, each of which a proof has to miss if it is not there."""

_MARGIN = 20.0
"""Times the limit that these must be away from the answer where not all numbers came, in place of
two: of a row of which a part came, it may tell its word less than those that are tried."""

PROMISING = 0.5
"""Cosine below which no order of texts is searched, once classes are the best one by one."""

REPLAYS = 200
"""How often, at most, the steps are made to find which texts were in which step."""

_EQUATIONS = 2**26
"""Numbers of equations for classes that are in memory, at most."""

SECONDS = 60.0
"""Time for one answer, at most."""


class Replayed(NamedTuple):
    """What making the steps again shows about an answer.

    Attributes:
        cosine: Of the update that was sent and the one that was made again.
        apart: Their difference, relative to what was sent.
        limit: What it may be at most; None: not measured.
        verified: The texts, in some order, make this update, and neighbours of them do not.
        complete: The search for orders and classes ended before its time and replays did.
    """

    cosine: float
    apart: float
    limit: float | None
    verified: bool
    complete: bool

    def diagnostics(self) -> dict[str, float]:
        """Returns what an answer says of it."""
        measured = {} if self.limit is None else {"replay_limit": self.limit}
        return {"replay_cosine": self.cosine, "replay_difference": self.apart} | measured

    def remark(self) -> str:
        """Returns why the answer is proved or is not, in a sentence."""
        again = "the client's steps on these texts, made again,"
        if self.verified:
            return f"proved by replay: {again} give the update"
        if self.limit is None and self.apart <= PROMISING:
            return "no proof by replay: the update has too few numbers to prove so many tokens"
        if self.limit is not None and self.apart < self.limit:
            nearly = "with one token changed, they give nearly the same"
            return f"no proof by replay: {again} give the update, but {nearly}"
        early = "" if self.complete else "the search for an order ran out of time or replays; "
        allowed = "" if self.limit is None else f"; a proof allows {self.limit:.1g}"
        return (
            f"no proof by replay: {early}{again} differ from the update by {self.apart:.2g} of its "
            f"norm (cosine {self.cosine:.4f}){allowed}"
        )


_proofs: Proofs[Replayed] = Proofs()


def obstacle(seen: Observation) -> str | None:
    """Returns why the steps of a client cannot be made again, or None."""
    known = seen.knowledge
    if seen.client < 0:
        return "it is a sum over clients"
    if seen.update.kind == UpdateKind.GRADIENT or known.learning_rate is None:
        return "it is no update of known steps"
    if known.dropout is not False:
        return "dropout leaves out numbers that nobody knows"
    if known.own_head:
        return "the head is not known"
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


class Fit(NamedTuple):
    """An arrangement whose steps are near to the update.

    Attributes:
        cosine: Of the update and these steps.
        arrangement: Of the texts.
        complete: The search ended before its time and replays did.
    """

    cosine: float
    arrangement: Arrangement
    complete: bool


def replay(
    model: LanguageModel,
    sequences: Sequence[Ids],
    seen: Observation,
    seconds: float = SECONDS,
    *,
    strict: bool = False,
) -> Replayed | None:
    """Makes a client's steps again on the texts of an answer; None if that cannot be done.

    Args:
        model: At the broadcast weights.
        sequences: The batch, each text as often as it occurs, with or without the last target of
            next-token training.
        seen: The update, without what weight decay alone did.
        seconds: For the search of orders and classes: the attack's own limit, if that is less than
            a minute.
        strict: Half of the time is for the search; return None, too, if it takes longer.
    """
    if obstacle(seen) is not None or not 0 < len(sequences) == seen.update.num_examples:
        return None
    end = close(model, ())
    closed = [ids if end and ids[-1:] == end else close(model, ids) for ids in sequences]
    # A text without a target says nothing, and a repeated one may stand in its place.
    hidden = bool(model.response_template) and len(set(closed)) < len(closed)
    if hidden or not all(target_counts(model, closed)):
        return None
    texts = Counter(closed)
    if (known := _proofs.get(model, seen, texts)) is not None:
        return known
    limit, sent_X = min(seconds, SECONDS), flat(seen.update.tensors)
    clock = Clock(limit / 2 if strict else limit)
    lacking_X = sent_X == 0 if lacks_numbers(seen.update.tensors.values()) else None

    def score(batches: Sequence[Batch]) -> float:
        again_X = _without(lacking_X, flat(steps_again(model, batches, seen)))
        return max(-1.0, cosine(sent_X, again_X))  # -1, too, if steps diverge

    best = _searched(model, closed, seen, score, clock)
    if best is None or (strict and clock.up()):
        return None
    # Rounding makes some numbers zero here and there alike: only where that is not all, they lack.
    made = _judged(model, closed, seen, best, None, 2.0)
    if lacking_X is not None and made is not None and not made.verified:
        made = _judged(model, closed, seen, best, lacking_X, _MARGIN)
    if made is not None and made.verified:
        _proofs.keep(model, seen, texts, made)
    return made


def _without(lacking_X: Tensor | None, value_X: Tensor) -> Tensor:
    """Returns numbers with zeros in place of those that did not come."""
    return value_X if lacking_X is None else value_X.masked_fill_(lacking_X, 0)


def _judged(
    model: LanguageModel,
    closed: Sequence[Ids],
    seen: Observation,
    best: Fit,
    lacking_X: Tensor | None,
    margin: float,
) -> Replayed | None:
    """Returns what the best arrangement of texts proves; None if no difference can be computed.

    Args:
        model: At the broadcast weights.
        closed: The texts.
        seen: The update.
        best: The arrangement.
        lacking_X: Numbers that did not come; None: all came.
        margin: Times the limit that answers with one token changed must be away.
    """
    alike, arrangement, complete = best
    sent_X = flat(seen.update.tensors)

    def again(
        sequences: Sequence[Sequence[int]],
        blur: torch.Generator | None = None,
        silent: Ids = (),
    ) -> Tensor:
        made = steps_again(model, arrangement.batches(sequences), seen, blur=blur, silent=silent)
        return _without(lacking_X, flat(made))

    own_X = again(closed)
    apart = float((sent_X - own_X).norm() / sent_X.norm())
    if not math.isfinite(apart):  # an update of zeros, or steps that diverge
        return None
    if apart > PROMISING or not can_tell(model, closed, seen):
        return Replayed(alike, apart, None, False, complete)
    blurred_X = again(closed, torch.Generator().manual_seed(0))
    size = own_X.norm()
    others = itertools.chain(
        (again(other) for other in _one_token_changed(model, closed, seen)),
        (again(closed, silent=ids) for ids in _surest(model, closed, arrangement.labels)),
    )
    changed = [float((other_X - own_X).norm() / size) for other_X in others]
    nearest = min(changed, default=0.0)
    limit = max(precision(seen), min(ROOM * float((blurred_X - own_X).norm() / size), nearest / 2))
    verified = apart < limit <= nearest / margin
    return Replayed(alike, apart, limit, verified, complete)


def can_tell(model: LanguageModel, closed: Sequence[Sequence[int]], seen: Observation) -> bool:
    """Whether an update has enough numbers to prove so many tokens.

    Each number counts as a bit: of large ones a first step of Adam shows no more than the sign.
    """
    numbers = sum(int(tensor.count_nonzero()) for tensor in seen.update.tensors.values())
    return numbers >= sum(map(len, closed)) * math.log2(len(model.tokenizer))


def steps_again(
    model: LanguageModel,
    batches: Sequence[Batch],
    seen: Observation,
    *,
    blur: torch.Generator | None = None,
    silent: Ids = (),
) -> dict[str, Tensor]:
    """Returns the update that a client's steps on these batches make, as it is observed.

    The model is left as it is.

    Args:
        model: At the broadcast weights, without dropout.
        batches: Of each step.
        seen: Says how the client steps, and which tensors it sends.
        blur: Moves the weights by half a unit in their last place at most, at random.
        silent: A text that has no gradient; empty: none.
    """
    known = seen.knowledge
    recipe, rate = known.recipe or Recipe(), known.learning_rate or 1.0
    eps = torch.finfo(torch.float32 if recipe.precision == "float32" else torch.bfloat16).eps
    before = {name: p.detach() for name, p in model.trained().items()}
    with torch.enable_grad(), copied_parameters(model.module.parameters()):
        for parameter in model.module.parameters() if blur is not None else ():
            value = parameter.data
            noise = torch.rand(value.shape, generator=blur).to(value)
            value.mul_(1 + eps * (noise - 0.5))
        with in_weights_of(model.module, recipe.precision):
            gradients = (_gradient(model, batch, recipe, silent) for batch in batches)
            deltas = delta_(model, gradients, recipe, rate)
    return {
        name: recipe.without_decay(deltas[name], before[name], rate, len(batches))
        for name in seen.update.tensors
    }


def cosine(a_X: Tensor, b_X: Tensor) -> float:
    """Returns the cosine of two vectors, also where it differs from 1 by less than float32 tells.

    It is NaN if one of them is zero.
    """
    return 1 - float((a_X / a_X.norm() - b_X / b_X.norm()).norm()) ** 2 / 2


def arrangements(closed: Sequence[Sequence[int]], seen: Observation) -> Iterator[Arrangement]:
    """Yields an arrangement for each number of passes, and of texts per step, that steps admit."""
    known, count = seen.knowledge, len(closed)
    labels = [0] * count
    if known.labels is not None:  # they belong to the longest text first
        longest = sorted(range(count), key=lambda i: len(closed[i]), reverse=True)
        for place, label in zip(longest, known.labels, strict=True):
            labels[place] = label
    for passes, size in passes_and_sizes(seen, count):
        yield Arrangement((tuple(range(count)),) * passes, tuple(labels), size)


def _labels(
    model: LanguageModel, closed: Sequence[Sequence[int]], seen: Observation
) -> tuple[int, ...] | None:
    """Returns the classes of texts whose gradients explain an update best, if these are unknown.

    The gradient of a text with a class is a sum over logits, with a weight below zero for the class
    alone. So these weights are solved for, in the first layer, whose gradients differ most.
    """
    if model.task != CLASSIFICATION or seen.knowledge.labels is not None:
        return None
    sent = seen.update.tensors
    names = [name for name in model.family.attention_parameters(0) if name in sent]
    numbers = sum(sent[name].numel() for name in names)
    columns = len(closed) * model.num_labels
    if not columns <= numbers <= _EQUATIONS // columns:
        return None
    behind = as_gradient(behind_adam(seen, model) or seen)
    gradients = [g for unit in units(model, closed, names) for g in unit.gradients]
    system_XU = torch.stack([flat(g) for g in gradients], 1)
    target_X = flat({name: behind[name] for name in names})
    weights_U: Tensor = torch.linalg.lstsq(system_XU, target_X[:, None]).solution[:, 0]
    return tuple(weights_U.view(len(closed), -1).argmin(1).tolist())


def passes_and_sizes(seen: Observation, count: int) -> Iterator[tuple[int, int]]:
    """Yields the numbers of passes over so many texts, and of texts in a step, that steps admit."""
    known, steps = seen.knowledge, seen.knowledge.local_steps or 1
    passes = [known.local_epochs] if known.local_epochs else range(1, steps + 1)
    sizes = [known.batch_size] if known.batch_size else range(1, count + 1)
    for epochs, size in itertools.product(passes, sizes):
        if epochs * -(-count // size) == steps:
            yield epochs, size


def _searched(
    model: LanguageModel,
    closed: Sequence[tuple[int, ...]],
    seen: Observation,
    score: Callable[[Sequence[Batch]], float],
    clock: Clock,
) -> Fit | None:
    """Returns the arrangement of the largest cosine, None if there is none, by best-first search.

    The best arrangement is changed, and once none of its changes is left, the next best (Pearl
    1984). So a local optimum does not end the search, and few arrangements are all tried.
    """
    starts, explained = list(arrangements(closed, seen)), _labels(model, closed, seen)
    # Granted classes belong to lengths: they may only be those of other texts of the same length.
    granted = seen.knowledge.labels is not None and len({*map(len, closed)}) == len(closed)
    classes = 0 if granted or model.task != CLASSIFICATION else model.num_labels
    best: Fit | None = None
    tried: set[object] = set()
    queue: list[tuple[float, int, Arrangement, Iterator[Arrangement]]] = []

    def candidates() -> Iterator[Arrangement]:
        for start in starts:
            before = len(tried)
            if explained is not None:
                yield replace(start, labels=explained)
            yield start
            if seen.knowledge.labels is None:
                # Most texts may be of one class, and none of the first.
                for label in range(1, classes):
                    yield replace(start, labels=(label,) * len(closed))
            for i in range(len(closed) if classes else 0):
                nearest = min(entry for entry in queue if entry[1] > before)
                yield from nearest[2].relabelled(i, classes)
        while queue and best is not None and best.cosine > PROMISING:
            changed = next(queue[0][3], None)
            if changed is not None:
                yield changed
            else:
                heappop(queue)

    for arrangement in candidates():
        batches = arrangement.batches(closed)
        # Within a step the order does not count.
        steps = tuple(tuple(sorted(zip(*batch, strict=True))) for batch in batches)
        if steps in tried:
            continue
        if best is not None and (clock.up() or len(tried) >= REPLAYS * len(starts)):
            return best._replace(complete=False)
        tried.add(steps)
        now = score(batches)
        heappush(queue, (-now, len(tried), arrangement, arrangement.neighbours(classes)))
        if best is None or now > best.cosine:
            best = Fit(now, arrangement, True)
        if 1 - now < precision(seen) ** 2 / 2:
            break
    return best


def _gradient(model: LanguageModel, batch: Batch, recipe: Recipe, silent: Ids) -> dict[str, Tensor]:
    """Returns the gradient of a batch's mean loss, as if one text of it had none."""
    total = gradient(model, batch, recipe)
    counts = target_counts(model, batch.sequences)
    for ids, label, count in zip(*batch, counts, strict=True):
        if ids == silent:
            own = gradient(model, Batch([ids], [label]), recipe)
            for name, value in own.items():
                total[name].sub_(value, alpha=count / sum(counts))
    return total


def _surest(model: LanguageModel, closed: Sequence[Ids], labels: Sequence[int]) -> list[Ids]:
    """Returns the texts of which the model is the surest; none of a single text."""
    if len(closed) == 1:
        return []
    losses = []
    for ids, label in zip(closed, labels, strict=True):
        ids_1T, mask_1T = pad([ids], model.tokenizer.pad_token_id, model.device)
        label_1 = torch.tensor([label], device=model.device)
        with torch.no_grad():
            losses.append(float(example_losses(model, ids_1T, mask_1T, label_1)))
    by_loss = sorted(zip(losses, closed, strict=True))
    return [ids for _, ids in by_loss[:SUREST]]


def _one_token_changed(
    model: LanguageModel, closed: Sequence[Ids], seen: Observation
) -> Iterator[list[Ids]]:
    """Yields answers of which one word is another one: those that are the hardest to tell apart.

    These are the nearest words, and the nearest of those of which no row came.
    """
    special = model.special_ids()
    places = [
        (number, place)
        for number, ids in enumerate(closed)
        for place, token in enumerate(ids)
        if token not in special
    ]
    if not places:
        return
    words = [closed[number][place] for number, place in places]
    others_N, apart_N = nearest_words(model, words)
    nearest = apart_N.argsort().tolist()
    rows_VD = seen.update.tensors.get(model.family.word_embedding)
    used_V = None if rows_VD is None else rows_VD.any(1)
    untold = [i for i in nearest if used_V is not None and not used_V[words[i]]]
    for i in dict.fromkeys(nearest[:NEIGHBOURS] + untold[:NEIGHBOURS]):
        number, place = places[i]
        changed = (*closed[number][:place], int(others_N[i]), *closed[number][place + 1 :])
        yield [*closed[:number], changed, *closed[number + 1 :]]
