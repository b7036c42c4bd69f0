"""The sequences that a search on spans has judged, and the answer that they make."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedleak.attacks import AttackSetting, OneByOne, Progress, Show
from fedleak.attacks.certificate import NOTHING_PROVED, Member, Verdict
from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Ids, Reconstruction, Status, tokens_of
from fedleak.attacks.subspace.span import ACCEPT, LayerSpans, margin
from fedleak.models import CLASSIFICATION, LanguageModel
from fedleak.models.family import FirstBlock, with_adapters
from fedleak.training.observation import Observation


@dataclass(frozen=True)
class Judged:
    """A sequence and how far it is from the spans.

    Attributes:
        ids: Its tokens.
        excess: Its residual in units of the noise: below a threshold it passed.
        rejected: The smallest residual of a sequence that did not pass in its place.
    """

    ids: Ids
    excess: float
    rejected: float


class Reading(NamedTuple):
    """What an attack found, for another attack that builds on it.

    Attributes:
        answer: Its own answer for the batch.
        sequences: What it read, best first, even if it does not trust it.
        members: Sequences that are proved one by one, even if the whole batch is not.
        tokens: Tokens that are, as it finds, the only ones in the batch.
        named: Tokens that are, as it finds, in the batch, whatever its texts are.
        scale: The update over the mean gradient of its batch, as far as members determine it.
        stepped: Sequences of local steps that were made again, and taken out of the update.
        settled: No other attack need run. The answer is the whole batch by what the update adds up
            to, or leaves nothing of the update but noise, or other attacks read no more.
    """

    answer: Reconstruction
    sequences: tuple[Ids, ...] = ()
    members: tuple[Member, ...] = ()
    tokens: tuple[int, ...] = ()
    named: tuple[int, ...] = ()
    scale: float = 1.0
    stepped: tuple[Ids, ...] = ()
    settled: bool = False

    @classmethod
    def of(cls, answer: Reconstruction, **certain: Any) -> "Reading":
        """Returns what an attack found whose answer holds all that it read."""
        return cls(answer, answer.sequences or (), **certain)

    @classmethod
    def none(cls, reason: str, **diagnostics: Any) -> "Reading":
        """Returns that nothing was found, and why."""
        return cls(Reconstruction.abstained(reason, **diagnostics))


class Reader(OneByOne):
    """Base class of an attack that other attacks build on: its answer is that of its reading."""

    @abstractmethod
    def reading(
        self, seen: Observation, model: LanguageModel, rng: torch.Generator, on_progress: Show
    ) -> Reading:
        """Returns the answer, and what of it is certain. Arguments: as in a call."""

    def __call__(
        self,
        seen: Observation,
        model: LanguageModel,
        *,
        rng: torch.Generator,
        on_progress: Show = lambda progress: None,
    ) -> Reconstruction:
        """Returns the answer of the reading."""
        return self.reading(seen, model, rng, on_progress).answer


OnJudged = Callable[[int, int, Judged], None]
"""(steps of a search that are done, all steps, the nearest sequence so far) -> None."""


def telling(on_progress: Show, model: LanguageModel) -> OnJudged:
    """Returns a function that passes sequences to `on_progress` as text."""

    def tell(step: int, steps: int, nearest: Judged) -> None:
        on_progress(Progress(step, steps, nearest.excess, model.decode(nearest.ids)))

    return tell


class SpanSearch(NamedTuple):
    """A search for the sentences whose every token passes the checks of both layers.

    Attributes:
        slots: Tokens that may stand at each position.
        block: The first block.
        spans: The checks: `mixed`, where there is one, then `second`.
        wanted: Sentences in the batch: if noise leaves none in the span, so many are kept. 0: what
            is not in the span is none.
        rng: For sketches, starts and kicks.
        clock: Shared by all positions and lengths.
        tell: Called with the number of positions or lengths done, and the nearest sentence.
        accept: Largest excess of an input.
    """

    slots: list[Tensor]
    block: FirstBlock
    spans: LayerSpans
    wanted: int
    rng: torch.Generator
    clock: Clock
    tell: OnJudged
    accept: float = ACCEPT


def lacks_two_layers(setting: AttackSetting) -> str | None:
    """Returns why a setting does not give the spans of the first two layers, or None."""
    # In a classifier's last layer only the pooled token's query counts: its span is too small.
    needed = 3 if setting.task == CLASSIFICATION else 2
    if setting.num_layers < needed:
        return (
            f"needs {needed} layers for task = {setting.task!r}, and the model has "
            f"{setting.num_layers}: choose another model.name"
        )
    for layer in (0, 1):
        names = setting.family.attention_parameters(layer)
        if not setting.shared & with_adapters(names):
            return (
                f"needs one of {', '.join(names)}, or adapters of one, and clients send none: "
                "see update.share and model.lora.targets"
            )
    return None


def by_excess(sequence: Judged) -> float:
    """The order of sequences: nearest first."""
    return sequence.excess


def ranked(sequences: Iterable[Judged], verdict: Verdict, most: int) -> list[Judged]:
    """Returns at most so many sequences nearest first, each as often as it is in the batch.

    A sequence of unknown repetitions is left out if the batch is verified, and else occurs once.
    All repetitions are unknown if they are too many for the batch.
    """
    unknown = 0 if verdict.verified else 1
    repeats = verdict.repeats if sum(verdict.repeats.values()) <= most else {}
    every = [
        sequence
        for sequence in sorted(sequences, key=by_excess)
        for _ in range(repeats.get(sequence.ids, unknown))
    ]
    return every[:most]


def distinct(nearest: Sequence[Judged], passed: Sequence[Judged]) -> list[Judged]:
    """Returns the nearest sentences, without those that repeat most of a better sentence."""
    kept: list[Judged] = []
    for sentence in nearest:
        others = (set(enumerate(other.ids)) for other in (*passed, *kept))
        own = set(enumerate(sentence.ids))
        if all(2 * len(own & other) <= len(own) for other in others):
            kept.append(sentence)
    return kept


def likeliest(
    passed: Sequence[Judged], nearest: Sequence[Judged], verdict: Verdict, most: int
) -> list[Judged]:
    """Returns at most so many sequences: those that passed, then the nearest of the others.

    Of a verified batch all is known, so nothing else follows.
    """
    best = ranked(passed, verdict, most)
    return best if verdict.verified else [*best, *distinct(nearest, passed)][:most]


def recovered(
    sequences: Sequence[Judged],
    verdict: Verdict,
    *,
    tokens: Iterable[int] | None = None,
    diagnostics: Mapping[str, Any],
    reason: str,
) -> Reconstruction:
    """Returns the answer that consists of sequences, in their order.

    Args:
        sequences: Best first.
        verdict: Of the batch that they make up.
        tokens: The token bag, in rising order; None: the tokens of the sequences.
        diagnostics: How it went, without the verdict.
        reason: Why nothing is proved, if nothing is.
    """
    return answer_of(
        [sequence.ids for sequence in sequences],
        [sequence.excess for sequence in sequences],
        verdict,
        margins=[margin(sequence.excess, sequence.rejected) for sequence in sequences],
        tokens=tokens,
        diagnostics=diagnostics,
        reason=reason,
    )


def answer_of(
    sequences: Sequence[Ids],
    evidence: Iterable[float],
    verdict: Verdict = NOTHING_PROVED,
    *,
    margins: Iterable[float | None] = (),
    tokens: Iterable[int] | None = None,
    diagnostics: Mapping[str, Any],
    reason: str,
) -> Reconstruction:
    """Returns the answer that consists of sequences.

    Args:
        sequences: Best first.
        evidence, margins: Of each, as in a `Reconstruction`.
        verdict: Of the batch that they make up.
        tokens: The token bag, in rising order; None: the tokens of the sequences.
        diagnostics: How it went, without the verdict.
        reason: Why nothing is proved, if nothing is.
    """
    return Reconstruction(
        status=Status.RECOVERED,
        sequences=tuple(sequences),
        evidence=tuple(evidence),
        margins=tuple(margins),
        tokens=tokens_of(sequences) if tokens is None else tuple(tokens),
        diagnostics={**diagnostics, **verdict.diagnostics()},
        verified=verdict.verified,
        reason=verdict.remark() if verdict.verified else reason,
    )
