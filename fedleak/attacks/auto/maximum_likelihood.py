"""Maximum likelihood: texts of a classifier, sought by one probability of a blurred update.

What follows is for one text. Several texts under noise are read together (`joint_likelihood`).

Noise adds N(0, s^2) to each number of the gradient G of one text. No text uses most words, so the
median square of the word embedding's rows is s^2, and nothing need be granted. A text x has the log
probability prior(x) + rows(x) + head(x), up to a constant.

**Rows.** Let d_q be the gradient at the q-th token of what the embeddings add up (see
`position_marginals`). The row of position q is P_q = d_q + noise, that of a word is W_v = d_q +
noise if v stands at q alone. With d_q ~ N(0, t I), t taken from |P_q|^2, W_v given P_q is
N(a P_q, (s^2 + t s^2 / (t + s^2)) I) where v is at q, with a = t / (t + s^2), and N(0, same)
elsewhere. The log odds of word v at place q are thus a matched filter of two rows,
`(a <W_v, P_q> - a^2 |P_q|^2 / 2) / variance`. A word that wins by far is taken out of its row, so
that it does not hide the same word elsewhere (interference cancellation). Likewise |P_q|^2 gives
the log odds that place q is used, with t unknown over a grid: that gives the length.

**Head.** What stands behind the last layer (pooler, classifier) sees the text through one vector,
so it is computed by a forward pass alone, and it has most of the gradient's energy: 5.2 of 6.0 in
MiniLM. Up to a positive factor on the update, the misfit of a text with gradient g is
`E = (|G - w g|^2) / s^2 - n` with w = <G, g> / |g|^2, over the n numbers of the head. For the right
text and label, E + n follows a chi-square: E is 0, give or take sqrt(2 n). For a text with other
words wrong, E is no noise: if it is Gaussian of unknown size in k directions, its log probability
is `-k/2 log E`. So head(x) = -k/2 log(E + k + 3 sqrt(2 n)), which is also the white likelihood,
-E / 2 up to a factor, near the right text.

**Search.** A beam from left to right on prior and rows, over all lengths at once; then coordinate
ascent on all three from the best of it: each place gets other words, the end moves by a word. One
rule stops it: the chi-square accepts a text (E < 3 sqrt(2 n)). That text is `likely` if the test
also rejects, at twice the deviations, every other text that was tried, and the nearest by rows and
prior are tried at each place. That proves nothing: texts that were not tried may fit as well. After
a mask or pruning, the numbers that came are as they were, and prove a text (`certificate`).

**Other blur.** A number that was quantized, masked, pruned or cut down to its sign has known bounds
(`coarseness`). So E is the square of the part of a text's gradient outside these bounds, with
rounding as s, and a right text is expected to leave nothing. In the rows, what was lost counts as
noise. Rows of words in no text are zero, so a row that is not zero belongs to a word of the text: a
text is more probable by `_IN_TEXT` for each such word. Under a mask P_q and W_v are compared in the
numbers that came of both; a word whose row is all masked is in the text with the probability of
that. From 1 % of the numbers the rows give the words and hardly their places. So if no other word
helps, two stretches of the text are exchanged, and the head decides which order is right.

Without a prior all words are equally probable beforehand. Limits: one text, one gradient, no
dropout; noise that is Gaussian and of one size on the embeddings and the head, or one of the other
blurs, and no scale on the update where no number came as it was.

Shapes: V words, T places, D hidden size, N texts, C labels, X numbers of a tensor.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import AfterValidator
from torch import Tensor

from fedleak.attacks import AttackSetting, Progress, Show, certificate
from fedleak.attacks.analytic.facts import above_noise, label_counts
from fedleak.attacks.auto.evidence import gradients_of
from fedleak.attacks.auto.joint_likelihood import (
    AT_ONCE,
    MOST_TEXTS,
    Joint,
    Search,
    prior_nats,
    table,
)
from fedleak.attacks.auto.text_by_text import TextSearch
from fedleak.attacks.certificate import NOTHING_PROVED, PRECISION, as_gradient, is_linear
from fedleak.attacks.clock import Clock, Seconds
from fedleak.attacks.matching.factored_gradients import BatchGradients
from fedleak.attacks.matching.gradient_distance import Gradient
from fedleak.attacks.reconstruction import Ids
from fedleak.attacks.subspace.answer import Reader, Reading, answer_of
from fedleak.attacks.subspace.coarseness import EXACT, Coarseness, coarseness
from fedleak.attacks.subspace.pooled_span import SIGMAS, PooledSpan
from fedleak.models import CLASSIFICATION, Frame, LanguageModel, absolute, frame
from fedleak.models import prior as priors
from fedleak.models.prior import Prior
from fedleak.training.observation import Observation
from fedleak.util.rng import stream

_DIRECTIONS = 100.0
"""k: directions in which wrong words move the head's input."""

_ROUNDING = 1e-4
"""The noise is at least this share of the head's root mean square: rounding, with room."""

_VANISHING = 1e-15
"""Where no number of a table is larger, float32 loses digits of its squares, or all of them."""

_ENERGIES = tuple(0.02 * 10 ** (i / 2) for i in range(8))
"""Energies of a used row that are thought alike probable, in units of the noise's."""

_FAINT = 0.03
"""Energy of a row that noise hides, in the same units: at least this is assumed of a used row."""

_CLEAR = 12.0
"""Nats by which a word must beat all others to be taken out of its row."""

_LENGTHS = 8.0
"""Nats by which the rows may speak against a length that is tried."""

_APART = 30.0
"""Nats below the best word of a place at which other words are not tried."""

_BEAM, _STARTS, _STATES, _WORDS, _READ, _NEAREST = 32, 64, 4, 32, 12, 8
"""Texts of the beam; texts of it that are judged; texts improved side by side; words tried at a
place; such texts that the prior reads whole; words that must be rejected at each place."""

_LAST = 0.2
"""Share of the time of a search for several texts that is kept for judging which are likely."""

_FREE = 0.01
"""Share of the numbers that rounding may put outside their bounds, by its standard deviation."""

_IN_TEXT = 30.0
"""Nats by which a text is more probable with a word of which a row came, and less without it."""

_SHARED = 20.0
"""Nats by which a word's masked row speaks against a place, at most: it may be of several."""


class Rows(NamedTuple):
    """Gradients of the embeddings' rows, and the standard deviations of the noise in them.

    Attributes:
        word_VD, place_PD: Of words and of positions.
        word_noise, place_noise: Of their noise.
        kept: Share of their numbers that came; the others are zero.
        zeros: Rows of words in no text are zero.
    """

    word_VD: Tensor
    place_PD: Tensor
    word_noise: float
    place_noise: float
    kept: float = 1.0
    zeros: bool = False


class Evidence(NamedTuple):
    """What the word and position rows say about a text's places.

    Attributes:
        word_TV: Log odds of each word at each place.
        used_T: Log odds that a place is used.
        lengths: Tokens that the text may have.
        in_text_V: Log odds that each word of the text adds, once.
    """

    word_TV: Tensor
    used_T: Tensor
    lengths: range
    in_text_V: Tensor

    def __call__(self, ids: Ids) -> float:
        """Returns the log odds of a text."""
        places, words = range(len(ids)), list(set(ids))
        # Double: of a mask the odds of places are so large that float32 loses those of words.
        odds = self.used_T[: len(ids)].sum() + self.word_TV[places, list(ids)].double().sum()
        return float(odds + self.in_text_V[words].double().sum())

    def next(self, beginnings: Sequence[Ids], place: int) -> Tensor:
        """Returns the log odds [N, V] of each word behind some beginnings of one length."""
        new_NV = self.in_text_V.repeat(len(beginnings), 1)
        for n, ids in enumerate(beginnings):
            new_NV[n, list(ids)] = 0.0
        return self.word_TV[place] + new_NV


class Guess(NamedTuple):
    """A text that was judged.

    Attributes:
        score: Its log probability, up to a constant.
        ids: Its tokens.
        label: Its class.
        excess: The head's chi-square, in standard deviations from its mean.
    """

    score: float
    ids: Ids
    label: int
    excess: float


@dataclass(frozen=True, kw_only=True)
class MaximumLikelihood(Reader):
    """Texts under noise, or one in few bits, by their likelihood.

    Attributes:
        seconds: After which the most probable text so far is the answer; None: no limit.
        prior: A causal language model (hub id, folder or built-in) in the victim's vocabulary;
            None: no prior.
    """

    kind: ClassVar[str] = "maximum_likelihood"
    version: ClassVar[int] = 3
    slow: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = frozenset({"labels", "lengths"})
    seconds: Seconds | None = 30.0
    prior: Annotated[str, AfterValidator(absolute)] | None = None

    def check_equipment(self) -> None:
        """Refuses a prior that cannot be loaded."""
        if self.prior is not None:
            priors.check(self.prior)

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs a classifier, and the gradients of its weights and both embeddings."""
        family = setting.family
        if setting.task != CLASSIFICATION:
            return "reads updates of classifiers: choose model.task = sequence-classification"
        if family.position_embedding is None:
            return "reads rows of positions, and the model's are rotary: choose another model.name"
        return setting.lacks(*setting.tables, family.classifier[0])

    @torch.no_grad()
    def reading(
        self,
        seen: Observation,
        model: LanguageModel,
        rng: torch.Generator,
        on_progress: Show,
        others_read: Sequence[Ids] = (),
    ) -> Reading:
        """Returns the most probable text, and whether nothing but noise is left beside it.

        Args:
            seen, model, rng, on_progress: As in a call.
            others_read: Texts that other attacks read of a batch.
        """
        clock = Clock(self.seconds)
        observed, around = as_gradient(seen), frame(model)
        names, size = behind_layers(seen, model), seen.update.num_examples
        behind = {name: observed[name] for name in names}
        noise = noise_scale(observed[model.family.word_embedding], [*behind.values()])
        if not is_linear(seen):
            noise = "it reads one gradient without dropout, and this is none"
        elif size > MOST_TEXTS:
            noise = f"it reads at most {MOST_TEXTS} texts together, and this is of {size}"
        if isinstance(noise, str):
            return Reading.none(noise)
        coarse = coarseness(seen, names)
        if size > 1:
            return self._batch(seen, model, noise, coarse, on_progress, others_read, clock)
        known = seen.knowledge.lengths
        rows = evidence_of(
            rows_of(model, observed, noise, coarse), around, known[0] if known else None
        )
        if rows is None:
            reason = f"no position's row stands out of the noise, of {noise:.2g}"
            return Reading.none(reason, noise_scale=noise)
        head = Head(model, behind, noise, coarse)
        prior = None if self.prior is None else priors.load(self.prior, model)
        labels = seen.knowledge.labels or tuple(range(model.num_labels))
        search = _Search(model, around, rows, head, prior, labels, clock)
        best = search.run(on_progress)
        numbers: dict[str, Any] = {"noise_scale": noise, "time_up": search.clock.rang}
        if best is None:
            reason = "time was up before a text was complete: raise seconds"
            return Reading.none(reason, **numbers)
        others = [guess.excess for ids, guess in search.judged.items() if ids != best.ids]
        nearest = min(others, default=None)
        accepted = best.excess < SIGMAS
        # Twice: what is left may be as far below what is expected as it may be above.
        clear = nearest is not None and nearest > 2 * SIGMAS + max(best.excess, 0.0)
        # Numbers that came as they were prove a text, however few they are.
        verdict = certificate.judge(model, (best.ids,), seen) if accepted else NOTHING_PROVED
        likely = verdict.verified or (accepted and search.compared and clear)
        answer = answer_of(
            [best.ids],
            [0.0 if verdict.verified else max(best.excess, 0.0)],
            verdict,
            diagnostics=numbers
            | {"likely": [likely], "excess": best.excess, "nearest": nearest}
            | {"label": best.label, "tried": len(others) + 1},
            reason=_REASONS[likely, accepted],
        )
        return Reading.of(answer, settled=likely)

    def _batch(
        self,
        seen: Observation,
        model: LanguageModel,
        noise: float,
        coarse: Coarseness,
        on_progress: Show,
        others_read: Sequence[Ids],
        clock: Clock,
    ) -> Reading:
        """Returns the texts of a batch."""
        observed, known = as_gradient(seen), seen.knowledge
        labels = known.labels or _labels(seen, model)
        placed = None
        if coarse is not EXACT:
            reason = "of several texts it reads whole numbers under noise, and these are not whole"
        elif labels is None or len(labels) != seen.update.num_examples:
            reason = "the classes of the texts cannot be told: grant labels"
        else:
            joint = Joint(model, observed, noise, labels)
            placed = table(model, joint.word_VD, joint.place_PD)
            reason = f"no position's row stands out of the noise, of {noise:.2g}"
        if placed is None:
            return Reading.none(reason, noise_scale=noise)
        prior = None if self.prior is None else priors.load(self.prior, model)
        span = PooledSpan(model, observed, noise, seen.update.num_examples)
        half = clock.part(2)
        alone = TextSearch(model, joint, span, placed, known.lengths, prior, half)
        texts = alone.run(on_progress, others_read)
        likely = alone.likely(texts, clock)
        if not all(likely) and not clock.up():
            until = clock.before(_LAST * clock.left())
            together = Search(model, joint, span, placed, known.lengths, prior, until)
            texts = together.run(texts, on_progress)
            likely = alone.likely(texts, clock)
        judgement = joint(texts)
        answer = answer_of(
            texts,
            [max(judgement.excess, 0.0)] * len(texts),
            diagnostics={
                "noise_scale": noise,
                "time_up": clock.rang or half.rang,
                "likely": likely,
                "excess": judgement.excess,
                "score": judgement.score,
                "placed": len(placed.variance),
            },
            reason=_REASONS[all(likely), judgement.excess < SIGMAS],
        )
        # Nobody else reads more of it, or tells what is likely.
        return Reading.of(answer, settled=True)


def behind_layers(seen: Observation, model: LanguageModel) -> list[str]:
    """Returns the parameters behind the last layer that are shared, sorted."""
    family = model.family
    behind = (name for name in seen.update.tensors if not name.startswith(family.layers))
    return sorted(name for name in behind if name not in family.embeddings)


def _labels(seen: Observation, model: LanguageModel) -> tuple[int, ...] | None:
    """Returns the classes of a batch, as its gradient tells them."""
    counts = label_counts(seen, model, stream(0, "labels"))
    if counts is None:
        return None
    return tuple(label for label, count in enumerate(counts) for _ in range(count))


_REASONS = {
    (True, True): "nothing proved: it leaves all but noise, and no other text that was tried does",
    (False, True): "nothing proved: it leaves all but noise, and so do others, or none were tried",
    (False, False): "nothing proved: a guess, which leaves more than noise",
}


def noise_scale(word_VD: Tensor, head: Sequence[Tensor]) -> float | str:
    """Returns the noise's standard deviation, from rows of words in no text; or why it is unknown.

    Without noise it is rounding.

    Args:
        word_VD: Gradient of the word embedding.
        head: Gradients of what stands behind the layers.
    """
    exact = torch.float64 if float(word_VD.abs().max()) < _VANISHING else torch.float32
    squares_V, width = word_VD.to(exact).square().sum(1).double(), word_VD.shape[1]
    # The median of a chi-square (Wilson and Hilferty 1931).
    noise = math.sqrt(float(squares_V.median()) / (width * (1 - 2 / (9 * width)) ** 3))
    if noise and not above_noise(squares_V, width).any():
        return "rows of words that no text has are not Gaussian noise of one size"
    energy = sum(float(tensor.double().square().sum()) for tensor in head)
    numbers = sum(tensor.numel() for tensor in head) or 1
    rounding = _ROUNDING * math.sqrt(energy / numbers)
    return max(noise, rounding) or "the classifier's gradient is zero"


def rows_of(
    model: LanguageModel, observed: Mapping[str, Tensor], noise: float, coarse: Coarseness
) -> Rows:
    """Returns the gradients of both embeddings, and the noise in them.

    Args:
        model: At the broadcast weights.
        observed: The gradient by parameter name.
        noise: Standard deviation of the noise, or of rounding.
        coarse: What else was done to the numbers.
    """
    family = model.family
    word_VD, of_words = coarse.as_noise(observed[family.word_embedding])
    place_PD, of_places = coarse.as_noise(observed[family.position_embedding or ""])
    noises = max(of_words, noise), max(of_places, noise)
    return Rows(word_VD, place_PD, *noises, kept=coarse.kept, zeros=coarse is not EXACT)


def is_blurred(seen: Observation, model: LanguageModel) -> bool:
    """Whether an update lacks numbers, or is blurred more than a proof admits."""
    if coarseness(seen, behind_layers(seen, model)) is not EXACT:
        return True
    observed = as_gradient(seen)
    noise = noise_scale(observed[model.family.word_embedding], [])
    energy = sum(float(value.double().square().sum()) for value in observed.values())
    numbers = sum(value.numel() for value in observed.values())
    return not isinstance(noise, str) and noise**2 * numbers > PRECISION**2 * energy


def evidence_of(rows: Rows, around: Frame, length: int | None) -> Evidence | None:
    """Returns what word and position rows say of places; None if noise hides all of them.

    Args:
        rows: Gradients of the embeddings.
        around: Marks that begin and end the text.
        length: Of the text, if it is known.
    """
    word_VD, place_PD = rows.word_VD, rows.place_PD
    width, first, last = word_VD.shape[1], around.first, around.last
    odds = word_odds if rows.kept == 1 else masked_odds
    used_P = used_odds(place_PD.double().square().sum(1) / rows.place_noise**2, width)
    ends_P = used_P.cumsum(0)
    if last:
        ends_P += odds(rows._replace(word_VD=word_VD[[last[-1]]]))[:, 0]
    ends_P[: len(first) + len(last)] = -math.inf
    if float(ends_P.max()) < math.log(len(place_PD)):
        return None
    possible = (ends_P > ends_P.max() - _LENGTHS).nonzero()[:, 0] + 1
    lengths = range(int(possible[0]), int(possible[-1]) + 1)
    if length is not None:
        lengths = range(length, length + 1)
    some = rows._replace(place_PD=place_PD[: lengths[-1]].float())
    word_TV = clear_odds(some, first) if rows.kept == 1 else masked_odds(some)
    in_text_V = torch.zeros(len(word_VD))
    if rows.zeros:
        in_text_V += _IN_TEXT if rows.kept == 1 else width * math.log(1 - rows.kept)
        in_text_V[word_VD.any(1)] = _IN_TEXT
    return Evidence(word_TV, used_P[: lengths[-1]], lengths, in_text_V)


def clear_odds(rows: Rows, first: Ids) -> Tensor:
    """Returns the log odds [T, V] of words at places, clear words taken out of their rows.

    Args:
        rows: Gradients of words and places.
        first: Marks that begin the text.
    """
    rest_VD, place_TD, clear = rows.word_VD.float().clone(), rows.place_PD, dict[int, int]()

    def at(place: int, rest_VD: Tensor) -> Tensor:
        return word_odds(rows._replace(word_VD=rest_VD, place_PD=place_TD[[place]]))[0]

    for place, word in enumerate(first):
        clear[place] = word
        rest_VD[word] -= place_TD[place]
    strongest_first = place_TD[len(first) :].norm(dim=1).argsort(descending=True) + len(first)
    for place in strongest_first.tolist() * 2:
        if place in clear:
            rest_VD[clear.pop(place)] += place_TD[place]
        best = at(place, rest_VD).topk(2)
        if best.values[0] - best.values[1] > _CLEAR:
            clear[place] = int(best.indices[0])
            rest_VD[clear[place]] -= place_TD[place]
    word_TV = word_odds(rows._replace(word_VD=rest_VD))
    for place, word in clear.items():
        word_TV[place, word] = at(place, rest_VD[[word]] + place_TD[place])[0]
    return word_TV


def used_odds(energy_P: Tensor, width: int) -> Tensor:
    """Returns the log odds [P] that rows are used, by their squares in units of the noise's."""
    ratio_E = energy_P.new_tensor(_ENERGIES)
    gain_PE = 0.5 * energy_P[:, None] * ratio_E / (1 + ratio_E) - 0.5 * width * ratio_E.log1p()
    return gain_PE.logsumexp(1) - math.log(len(_ENERGIES))


def word_odds(rows: Rows) -> Tensor:
    """Returns the log odds [T, V] that a word's row contains the gradient of a place."""
    place_TD, noise = rows.place_PD, rows.place_noise
    square_T = place_TD.square().sum(1)
    energy_T = (square_T / place_TD.shape[1] - noise**2).clamp_min(_FAINT * noise**2)
    share_T = energy_T / (energy_T + noise**2)
    variance_T = rows.word_noise**2 + share_T * noise**2
    inner_TV = place_TD @ rows.word_VD.to(place_TD.dtype).T
    odds_TV = share_T[:, None] * inner_TV - 0.5 * (share_T.square() * square_T)[:, None]
    return (odds_TV / variance_T[:, None]).float()


def masked_odds(rows: Rows) -> Tensor:
    """Returns the same of masked rows, by the numbers of which word and place both came.

    They are equal but for rounding, or of different words. A word of several places equals none.
    """
    used_U = rows.word_VD.any(1).nonzero()[:, 0]
    word_UD = rows.word_VD[used_U]
    odds_TV = rows.place_PD.new_zeros(len(rows.place_PD), len(rows.word_VD))
    spread = max(float(word_UD[word_UD != 0].square().mean().sqrt()), rows.word_noise)
    for place, place_D in enumerate(rows.place_PD):
        apart_UD = ((word_UD - place_D) / rows.word_noise).square() - (word_UD / spread).square()
        gain_UD = math.log(spread / rows.word_noise) - 0.5 * apart_UD
        both_UD = (word_UD != 0) & (place_D != 0)
        odds_TV[place, used_U] = (gain_UD * both_UD).sum(1).clamp_min(-_SHARED)
    return odds_TV


class Head:
    """How well texts explain the gradient behind the last layer.

    Args:
        model: At the broadcast weights.
        observed: The gradient there by parameter name.
        noise: Its standard deviation.
        coarse: What else was done to the numbers.
    """

    def __init__(
        self,
        model: LanguageModel,
        observed: Mapping[str, Tensor],
        noise: float,
        coarse: Coarseness = EXACT,
    ) -> None:
        self._model, self._own = model, BatchGradients(model, list(observed))
        low_and_high = [coarse.bounds(value) for value in observed.values()]
        self._low_X, self._high_X = (
            torch.cat([value.flatten() for value in some]) / noise
            for some in zip(*low_and_high, strict=True)
        )
        exact_X = (self._low_X == self._high_X) & (self._low_X != 0)
        self._exact_X, self._target_X = exact_X.float(), self._low_X.where(exact_X, 0.0)
        self._names, self._noise, self._coarse = list(observed), noise, coarse is not EXACT
        known = float((self._low_X.isfinite() | self._high_X.isfinite()).sum())
        # Nothing is expected outside of bounds but rounding.
        self._expected = 0.0 if self._coarse else known
        self.spread = math.sqrt(2 * (1 + _FREE * known if self._coarse else known))

    def excess(self, texts: Sequence[Ids], labels: Sequence[int]) -> Tensor:
        """Returns the chi-square [N, C], in standard deviations from its mean.

        A gradient that points the other way explains nothing.
        """
        parts = [texts[i : i + AT_ONCE] for i in range(0, len(texts), AT_ONCE)]
        return torch.cat([self._excess(part, labels) for part in parts])

    def _excess(self, texts: Sequence[Ids], labels: Sequence[int]) -> Tensor:
        labels_NC = torch.tensor([list(labels)] * len(texts), device=self._model.device)
        with self._own.ready():
            gradients = gradients_of(self._model, self._own, texts, labels_NC)
        formed_KX = torch.cat([_formed(gradients[name]) for name in self._names], 1)
        factor_K = formed_KX.new_full((len(formed_KX),), 1 / self._noise)
        if self._exact_X.any():
            # The numbers that came as they were give the factor on the update.
            square_K = formed_KX.square() @ self._exact_X
            factor_K = (formed_KX @ self._target_X).clamp_min(0) / square_K.clamp_min(1e-30)
        scaled_KX = factor_K[:, None] * formed_KX
        nearest_X = scaled_KX.clamp(self._low_X, self._high_X) if self._coarse else self._target_X
        left_KX = scaled_KX - nearest_X
        excess_K = (left_KX.double().square().sum(1) - self._expected) / self.spread
        return excess_K.view(labels_NC.shape).cpu()

    def log_probability(self, excess: float) -> float:
        """Returns the log probability of a text by its chi-square, if other words may be wrong."""
        misfit = max(excess, 0.0) * self.spread
        return -_DIRECTIONS / 2 * math.log(misfit + _DIRECTIONS + SIGMAS * self.spread)


def _exchanged(ids: Ids, place: int, other: int) -> Ids:
    """Returns a text with the words of two places exchanged."""
    words = [*ids]
    words[place], words[other] = words[other], words[place]
    return tuple(words)


def _moved(ids: Ids, place: int, last: int) -> set[Ids]:
    """Returns texts with the words from a place on exchanged with those behind them.

    Args:
        ids: A text.
        place: Where the first of the two stretches begins.
        last: Marks that end the text.
    """
    cuts = combinations(range(place + 1, len(ids) - last + 1), 2)
    return {(*ids[:place], *ids[i:j], *ids[place:i], *ids[j:]) for i, j in cuts}


def _formed(gradient: Gradient) -> Tensor:
    """Returns the numbers [K, X] of the gradients of K guesses."""
    if isinstance(gradient, Tensor):
        return gradient.flatten(0, 1).flatten(1)
    left, right = (torch.cat(side, 2).flatten(0, 1) for side in zip(*gradient, strict=True))
    return (left.mT @ right).flatten(1)


@dataclass
class _Search:
    """One update under attack.

    Attributes:
        judged: The guesses so far by their tokens.
        compared: The nearest texts of the answer were judged, too.
    """

    model: LanguageModel
    around: Frame
    rows: Evidence
    head: Head
    prior: Prior | None
    labels: Sequence[int]
    clock: Clock
    judged: dict[Ids, Guess] = field(default_factory=dict)
    compared: bool = False

    def run(self, on_progress: Show) -> Guess | None:
        """Returns the most probable text; None: there was no time for any."""
        states = self._best_of(self._begun())[-_STATES:]
        if not states:
            return None
        self.labels = [states[-1].label]
        before: list[Guess] = []
        end, sweep = self.rows.lengths[-1] - len(self.around.last), 0
        while states != before and not self._accepted(states):
            before, sweep = states, sweep + 1
            order = torch.randperm(end + 1, generator=stream(sweep, "places")).tolist()
            for step, place in enumerate(self.clock.paced(order)):
                if place < len(self.around.first) or self._accepted(states):
                    continue
                near = {ids for state in states for ids in self._near(state.ids, place, _WORDS)}
                states = sorted({*states, *self._best_of(near)})[-_STATES:]
                text = self.model.decode(states[-1].ids)
                on_progress(Progress(step, end, states[-1].excess, text, f"sweep {sweep}"))
            if states == before and self.rows.in_text_V.any():
                # Only the order may be wrong.
                for place in self.clock.paced(range(len(self.around.first), end)):
                    if self._accepted(states):
                        break
                    moved = _moved(states[-1].ids, place, len(self.around.last))
                    states = sorted({*states, *self._best_of(moved)})[-_STATES:]
        best = self._accepted(states) or states[-1]
        if self._accepted(states):
            places = range(len(self.around.first), end + 1)
            near_each = [
                self._near(best.ids, place, _NEAREST) for place in self.clock.paced(places)
            ]
            self._judge({ids for near in near_each for ids in near})
            self.compared = len(near_each) == len(places)
        return best

    def _accepted(self, states: Iterable[Guess]) -> Guess | None:
        """Returns the best state whose chi-square is that of noise; None if there is none."""
        fitting = [state for state in states if state.excess < SIGMAS]
        return max(fitting, default=None)

    def _begun(self) -> set[Ids]:
        """Returns texts of all lengths that are probable by prior and rows, from left to right."""
        first, last, lengths = *self.around, self.rows.lengths
        beam, texts = [(0.0, first)], set[Ids]()
        for place in self.clock.paced(range(len(first), lengths[-1] - len(last))):
            score_N = torch.tensor([score for score, _ in beam])
            score_NV = score_N[:, None] + self._words([ids for _, ids in beam], place)
            best = score_NV.flatten().topk(min(_BEAM, score_NV.numel()))
            pairs = [divmod(int(i), score_NV.shape[1]) for i in best.indices]
            beam = [
                (float(score), (*beam[n][1], word))
                for score, (n, word) in zip(best.values, pairs, strict=True)
                if score > -math.inf
            ]
            if place + 1 + len(last) in lengths:
                texts |= {(*ids, *last) for _, ids in beam}
        return texts

    def _words(self, beginnings: Sequence[Ids], place: int) -> Tensor:
        """Returns the log probability [N, V] of the next word after beginnings of one length."""
        odds_NV = self.rows.next(beginnings, place)
        odds_NV[:, [*self.model.special_ids()]] = -math.inf
        if self.prior is None or not place:
            return odds_NV
        next_NV = self.prior.next_token(torch.tensor(beginnings, device=self.prior.device))
        return odds_NV + next_NV.to(odds_NV.device)

    def _near(self, ids: Ids, place: int, most: int) -> set[Ids]:
        """Returns texts with another word at a place, or at the end with a word more or less."""
        end = len(ids) - len(self.around.last)
        if place > end or (place == end and len(ids) + 1 not in self.rows.lengths):
            longer = set[Ids]()
        else:
            odds_V = self._words([ids[:place]], place)[0]
            # A word that stands behind this place is in the text already.
            behind = list({*ids[place + 1 :]} - {*ids[:place]})
            odds_V[behind] -= self.rows.in_text_V[behind]
            best = odds_V.topk(min(most, len(odds_V)))
            words = best.indices[best.values > best.values[0] - _APART].tolist()
            longer = {(*ids[:place], word, *ids[place + (place < end) :]) for word in words}
            if place < end and self.rows.in_text_V.any():
                # If rows show which words there are, two of them may change places.
                others = range(len(self.around.first), place)
                longer |= {_exchanged(ids, place, other) for other in others}
        if place == end and len(ids) - 1 in self.rows.lengths:
            longer.add((*ids[: end - 1], *ids[end:]))
        return longer - {ids}

    def _best_of(self, texts: Iterable[Ids]) -> list[Guess]:
        """Judges texts; returns the most probable ones, in rising order."""
        guesses = sorted(self._judge(texts))[-_READ:]
        if self.prior is not None and guesses:
            read = prior_nats(self.prior, self.model, [guess.ids for guess in guesses])
            guesses = [
                g._replace(score=g.score - nats) for g, nats in zip(guesses, read, strict=True)
            ]
        return sorted(guesses)[-_STATES:]

    def _judge(self, texts: Iterable[Ids]) -> list[Guess]:
        """Returns texts that are new with their best label, by rows and head alone."""
        some = sorted({*texts} - self.judged.keys(), key=lambda ids: (len(ids), ids))
        if not some:
            return []
        excess_N, label_N = self.head.excess(some, self.labels).min(1)
        guesses = [
            Guess(self.rows(ids) + self.head.log_probability(excess), ids, self.labels[c], excess)
            for ids, excess, c in zip(some, excess_N.tolist(), label_N.tolist(), strict=True)
        ]
        self.judged |= {guess.ids: guess for guess in guesses}
        return guesses
