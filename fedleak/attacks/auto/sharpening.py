"""Mends the tokens of guesses one by one, by the observed gradient: a descent over whole words.

Where noise hides the tokens of a batch, the best guesses have many words right. Of each sequence,
the others' gradients are taken out of the update; then the token at each place in turn is replaced
by the token, of the whole vocabulary, that fits the rest best, until none does. Tokens worth a try
are those for which the fit rises most to first order (as in HotFlip, Ebrahimi et al. 2018), and
those whose row of the word embedding's gradient points where a token at that place would have it
point. Other orders are tried, too.

Shapes: K guesses, T tokens, D hidden size, V vocabulary.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedleak.attacks.auto.evidence import fits, gradients_of, slopes, weights
from fedleak.attacks.auto.peeling import gradient_of
from fedleak.attacks.certificate import close
from fedleak.attacks.clock import Clock
from fedleak.attacks.matching import reorderings
from fedleak.attacks.matching.batch_structure import frame
from fedleak.attacks.matching.factored_gradients import BatchGradients
from fedleak.models import CLASSIFICATION, LanguageModel

PROPOSED = 8
"""Tokens that are tried at each place, by each of the two rules."""

_PROPOSING = 4
"""Gradients that take as long as finding the tokens that are worth a try."""

_ORDERS = 16
"""Other orders that are tried."""

_BETTER = 1 + 1e-5
"""A fit counts as better by more than rounding."""

Ids = tuple[int, ...]
Tell = Callable[[Ids, float], None]


class Labelled(NamedTuple):
    """A sequence, its label (0 in next-token training), and its weight in the gradient."""

    ids: Ids
    label: int
    weight: float


def sharpened(
    model: LanguageModel,
    batch: Sequence[Labelled],
    observed: Mapping[str, Tensor],
    rng: torch.Generator,
    clock: Clock,
    tell: Tell,
    noise: float | None = None,
    done: Callable[[Sequence[Labelled]], bool] = lambda batch: False,
    seconds: float = 0.0,
) -> list[Ids]:
    """Returns the sequences of a batch with the tokens that fit the observed gradient best.

    Args:
        model: At the broadcast weights.
        batch: The guesses.
        observed: The mean gradient by parameter name.
        rng: For the orders that are tried.
        clock: Looked at before some guesses are tried.
        tell: Is told tokens, and how well they fit what the other sequences leave, from 0 to 1.
        noise: The scale of the noise on the gradient, if it is known.
        done: Whether a batch cannot become better; asked after each sequence that did.
        seconds: What the gradient of a guess takes, as far as is known.
    """
    weight = weights(model, observed, noise)
    now, waiting = list(batch), list(range(len(batch)))
    while waiting and not clock.up((len(now) + _PROPOSING) * seconds):
        i = waiting.pop(0)
        others = [guess for j, guess in enumerate(now) if j != i]
        rest = {name: observed[name] for name in weight}
        for guess in others:
            for name, gradient in gradient_of(model, guess.ids, guess.label, list(weight)).items():
                rest[name] = rest[name] - guess.weight * gradient
        better = _mended(model, now[i], rest, weight, rng, clock, tell, seconds)
        if better != now[i].ids:
            # The others were mended beside a worse one.
            now[i] = now[i]._replace(ids=better)
            waiting = [] if done(now) else [j for j in range(len(now)) if j != i]
    return [guess.ids for guess in now]


def trial(model: LanguageModel, length: int, observed: Mapping[str, Tensor], guesses: int) -> None:
    """Does as much as trying so many guesses of a length does, for its time to be measured."""
    weight = weights(model, observed)
    if weight:
        some = [tuple(range(length))] * guesses
        _fits(model, some, 0, {name: observed[name] for name in weight}, weight)


def _mended(
    model: LanguageModel,
    guess: Labelled,
    rest: Mapping[str, Tensor],
    weight: Mapping[str, float],
    rng: torch.Generator,
    clock: Clock,
    tell: Tell,
    seconds: float,
) -> Ids:
    """Returns a sequence that no change tried makes fit better."""
    ids: Ids = guess.ids
    before: Ids = ()
    fit = float(_fits(model, [ids], guess.label, rest, weight)[0])
    while ids != before and not clock.up(_PROPOSING * seconds):
        before = ids
        proposed = _proposals(model, ids, guess.label, rest, weight)
        for tried in (*proposed.items(), None):
            if clock.up(2 * PROPOSED * seconds):
                break
            if tried is None:
                some = _orders(ids, proposed.keys(), rng)
            else:
                place, tokens = tried
                some = [(*ids[:place], token, *ids[place + 1 :]) for token in tokens]
            if not some:
                continue
            fit_K = _fits(model, some, guess.label, rest, weight)
            if float(fit_K.max()) > fit * _BETTER:
                ids, fit = some[int(fit_K.argmax())], float(fit_K.max())
                tell(ids, fit)
    return ids


def _proposals(
    model: LanguageModel,
    ids: Ids,
    label: int,
    rest: Mapping[str, Tensor],
    weight: Mapping[str, float],
) -> dict[int, list[int]]:
    """Returns for each place the tokens that are worth a try there."""
    slope_TD, delta_TD = slopes(model, close(model, ids), label, rest, weight)
    table_VD = model.module.get_parameter(model.family.word_embedding).detach()
    scores_TV = [slope_TD @ table_VD.T]
    if model.family.word_embedding in weight:
        scores_TV.append(delta_TD @ rest[model.family.word_embedding].T)
    around = frame(model)
    last = len(ids) - (len(around.last) if model.task == CLASSIFICATION else 0)
    proposed: dict[int, list[int]] = {}
    for place in range(len(around.first), last):
        likely = [score_TV[place].clone() for score_TV in scores_TV]
        for score_V in likely:
            score_V[[ids[place], *model.special_ids()]] = -torch.inf
        best = [score_V.topk(PROPOSED).indices.tolist() for score_V in likely]
        proposed[place] = list(dict.fromkeys(token for some in best for token in some))
    return proposed


def _orders(ids: Ids, places: Collection[int], rng: torch.Generator) -> list[Ids]:
    """Returns the sequence with what is at some places in other orders."""
    content = [ids[place] for place in places]
    first, last = min(places, default=0), max(places, default=-1) + 1
    return [
        (*ids[:first], *(content[i] for i in order), *ids[last:])
        for order in reorderings.nearby(len(content), _ORDERS, rng)
    ]


def _fits(
    model: LanguageModel,
    sequences: Sequence[Ids],
    label: int,
    rest: Mapping[str, Tensor],
    weight: Mapping[str, float],
) -> Tensor:
    """Returns how well the gradient of each sequence fits [K]."""
    words = model.family.word_embedding
    closed = [close(model, ids) for ids in sequences]
    words_M = torch.tensor(sorted({t for ids in closed for t in ids}), device=model.device)
    labels_N1 = torch.full((len(closed), 1), label, device=model.device)
    own = BatchGradients(model, list(weight))
    with own.ready():
        gradients = gradients_of(model, own, closed, labels_N1, words_M)
    target = {name: rest[name][words_M] if name == words else rest[name] for name in weight}
    return fits(gradients, target, weight)
