"""Mends the tokens of guesses one by one, by the observed gradient: a descent over whole words.

If noise hides the tokens of a batch, the best guesses have many words right. For each sequence, the
gradients of the other sequences are taken out of the update. Then the token at each place in turn
is replaced by the token, of the whole vocabulary, that fits the rest best, until none fits better.
Tokens worth a try are those for which the fit rises most to first order (as in HotFlip, Ebrahimi et
al. 2018), and those whose row of the word embedding's gradient points where a token at that place
would have it point. Other orders are tried, too.

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
from fedleak.attacks.matching.factored_gradients import BatchGradients
from fedleak.attacks.reconstruction import Ids, tokens_of
from fedleak.models import CLASSIFICATION, LanguageModel, frame

PROPOSED = 8
"""Tokens that are tried at each place, by each of the two rules."""

_PROPOSING = 4
"""Gradients that take as long as finding the tokens that are worth a try."""

_ORDERS = 16
"""Other orders that are tried."""

_BETTER = 1 + 1e-5
"""A fit counts as better by more than rounding."""

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
        tell: Called with tokens, and how well they fit what the other sequences leave, from 0 to 1.
        noise: The scale of the noise on the gradient, if it is known.
        done: Whether a batch cannot become better; called after each sequence that became better.
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
        better = _Fit(model, now[i].label, rest, weight).mended(
            now[i].ids, rng, clock, tell, seconds
        )
        if better != now[i].ids:
            # The others were mended beside a worse one.
            now[i] = now[i]._replace(ids=better)
            waiting = [] if done(now) else [j for j in range(len(now)) if j != i]
    return [guess.ids for guess in now]


def trial(model: LanguageModel, length: int, observed: Mapping[str, Tensor], guesses: int) -> None:
    """Does as much as trying so many guesses of a length does, for its time to be measured."""
    weight = weights(model, observed)
    if weight:
        rest = {name: observed[name] for name in weight}
        _Fit(model, 0, rest, weight)([tuple(range(length))] * guesses)


class _Fit(NamedTuple):
    """How well sequences fit what the others leave of an update.

    Attributes:
        model: At the broadcast weights.
        label: Of the sequence that is mended.
        rest: What the others leave, by parameter name.
        weight: What the square of a number counts, by parameter name.
    """

    model: LanguageModel
    label: int
    rest: Mapping[str, Tensor]
    weight: Mapping[str, float]

    def __call__(self, sequences: Sequence[Ids]) -> Tensor:
        """Returns how well the gradient of each sequence fits [K]."""
        model, words = self.model, self.model.family.word_embedding
        closed = [close(model, ids) for ids in sequences]
        words_M = torch.tensor(tokens_of(closed), device=model.device)
        labels_N1 = torch.full((len(closed), 1), self.label, device=model.device)
        own = BatchGradients(model, list(self.weight))
        with own.ready():
            gradients = gradients_of(model, own, closed, labels_N1, words_M)
        target = {n: value[words_M] if n == words else value for n, value in self.rest.items()}
        return fits(gradients, target, self.weight)

    def mended(
        self, ids: Ids, rng: torch.Generator, clock: Clock, tell: Tell, seconds: float
    ) -> Ids:
        """Returns a sequence that no change tried makes fit better."""
        before: Ids = ()
        fit = float(self([ids])[0])
        while ids != before and not clock.up(_PROPOSING * seconds):
            before = ids
            proposed = self._proposals(ids)
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
                fit_K = self(some)
                if float(fit_K.max()) > fit * _BETTER:
                    ids, fit = some[int(fit_K.argmax())], float(fit_K.max())
                    tell(ids, fit)
        return ids

    def _proposals(self, ids: Ids) -> dict[int, list[int]]:
        """Returns for each place the tokens that are worth a try there."""
        model, words = self.model, self.model.family.word_embedding
        slope_TD, delta_TD = slopes(model, close(model, ids), self.label, self.rest, self.weight)
        scores_TV = [slope_TD @ model.module.get_parameter(words).detach().T]
        if words in self.weight:
            scores_TV.append(delta_TD @ self.rest[words].T)
        proposed: dict[int, list[int]] = {}
        for place in content(model, ids):
            likely = [score_TV[place].clone() for score_TV in scores_TV]
            for score_V in likely:
                score_V[[ids[place], *model.special_ids()]] = -torch.inf
            best = [score_V.topk(PROPOSED).indices.tolist() for score_V in likely]
            proposed[place] = list(dict.fromkeys(token for some in best for token in some))
        return proposed


def content(model: LanguageModel, ids: Ids) -> range:
    """Returns the places of a sequence that no mark takes, as attacks on spans give sequences."""
    around = frame(model)
    end = len(around.last) if model.task == CLASSIFICATION else 0
    return range(len(around.first), len(ids) - end)


def _orders(ids: Ids, places: Collection[int], rng: torch.Generator) -> list[Ids]:
    """Returns the sequence with what is at some places in other orders."""
    tokens = [ids[place] for place in places]
    first, last = min(places, default=0), max(places, default=-1) + 1
    return [
        (*ids[:first], *(tokens[i] for i in order), *ids[last:])
        for order in reorderings.nearby(len(tokens), _ORDERS, rng)
    ]
