"""Gradient matching: what DLG, TAG and LAMP have in common, from observations to answers.

Several observations are optimised in one batch. Its rows are the victims, the shapes that their
batches may have, and random starts.

A step of all rows must be a small part of the time: a step of a row with sixteen texts takes
seconds. So one small step is made first, and its time determines how many shapes and starts are
optimised side by side.

Shapes: R rows, U victims, B sequences, T tokens.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedleak.attacks import AttackSetting, OnProgress, Progress
from fedleak.attacks.certificate import proves
from fedleak.attacks.clock import Clock, Seconds
from fedleak.attacks.matching.batch_structure import NO_CLUES, Clues, Shape
from fedleak.attacks.matching.gradient_distance import Loss
from fedleak.attacks.matching.objective import Objective, joint_objective
from fedleak.attacks.matching.optimizer import Descent, Found, MatchingConfig, Search, Watch
from fedleak.attacks.matching.victims import Victim, alike, victim_of
from fedleak.attacks.reconstruction import Ids, Reconstruction, Status, tokens_of
from fedleak.attacks.subspace.answer import Reading
from fedleak.models import LanguageModel
from fedleak.models import prior as priors
from fedleak.training.observation import Observation

Count = Annotated[int, Field(ge=1)]

Algorithm = Callable[[Search], list[Found]]
"""Search -> the best tokens of each victim."""


ANSWER = 1.5
"""The answer and its proof, after a search, take as long as so many steps of a row."""

_STEPS = 20
"""Steps that the time has to hold: with fewer, one row alone gets further than many."""

_LEAST = ANSWER + 2
"""Steps of one row that a search takes at least: a start, a look at it, a step, the answer."""

_STARTS = 0.25
"""Share of the time that random starts may take; scoring one takes half a step."""

_TOKENS = 64
"""Tokens of the small step, at most."""

_CHANCE = 0.5
"""Lengths that were only tried are believed below this share of a random text's distance."""


@dataclass(frozen=True)
class MatchingMethod:
    """How an attack matches gradients.

    Attributes:
        algorithm: The search for tokens.
        config: Its constants.
        free_config: Its constants where the tokens of the batch are not known.
        loss: The distance of gradients.
        scaled: Free embeddings start with the mean norm of the model's word embeddings; else as
            they are drawn.
        prior: A language model of text, by name; None goes without.
    """

    algorithm: Algorithm
    config: MatchingConfig
    free_config: MatchingConfig
    loss: Loss
    scaled: bool = False
    prior: str | None = None


@dataclass(frozen=True, kw_only=True)
class GradientMatching(ABC):
    """The base of all attacks that match gradients.

    Attributes:
        preset: "best", or "faithful" to the authors' code.
        size: With "faithful", "large" takes the authors' constants for BERT-large.
        steps: Steps of Adam; None: as the preset has it.
        precision: "mixed" ranks guesses and makes most steps in bfloat16. It is faster on GPUs and
            CPUs with units for it, and slower on others. It may change the answer.
        starts: Random starts that are optimised side by side; "faithful" has one.
        shapes: Lengths and labels that are tried at most, where they are not known.
        seconds: Time for one update, after which the best so far is the answer; None: no limit. If
            it is short, fewer starts and shapes are tried.
    """

    uses: ClassVar[frozenset[str]] = frozenset({"labels", "lengths"})
    slow: ClassVar[bool] = True
    at_once: ClassVar[int] = 8
    preset: Literal["best", "faithful"] = "best"
    size: Literal["base", "large"] = "base"
    steps: Count | None = None
    precision: Literal["float32", "mixed"] = "float32"
    starts: Count = 2
    shapes: Count = 16
    seconds: Seconds | None = None

    @property
    def faithful(self) -> bool:
        """Whether it is the authors' attack."""
        return self.preset == "faithful"

    @property
    def starts_of_each(self) -> int:
        """Random starts that are optimised of each shape."""
        return 1 if self.faithful else self.starts

    @abstractmethod
    def method(self) -> MatchingMethod:
        """Returns how this attack matches gradients."""

    def check_equipment(self) -> None:
        """Refuses a prior that cannot be loaded."""
        prior = self.method().prior
        if prior is not None:
            priors.check(prior)

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs a loss on all tokens, and a parameter beside the word embedding."""
        if setting.response:
            return (
                "weighs all tokens alike, and the loss counts responses alone: use kind = 'dager', "
                "or leave model.response_template out"
            )
        if "own_head" in setting.knows:
            return "computes gradients through the head, which is not known: use kind = 'auto'"
        if not setting.shared - {setting.family.word_embedding}:
            return "needs a parameter beside the word embedding: add one to update.share"
        return None

    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        """Returns the texts whose gradient is nearest to the observed one."""
        (reconstruction,) = self.many([seen], model, rngs=[rng], report=lambda i, how: None)
        return reconstruction

    def many(
        self,
        seen: Sequence[Observation],
        model: LanguageModel,
        *,
        rngs: Sequence[torch.Generator],
        report: OnProgress,
    ) -> list[Reconstruction]:
        """Returns, for each observation, the texts whose gradient is nearest to it."""
        matches = self.matches(seen, model, rngs=rngs, report=report, clues=[NO_CLUES] * len(seen))
        return [match.answer for match in matches]

    def matches(
        self,
        seen: Sequence[Observation],
        model: LanguageModel,
        *,
        rngs: Sequence[torch.Generator],
        report: OnProgress,
        clues: Sequence[Clues],
    ) -> list[Reading]:
        """Returns, for each observation, the batch whose gradient is nearest to it.

        Args:
            seen, model, rngs, report: As in `many`.
            clues: What other searches found out about each batch.
        """
        clock = Clock(None if self.seconds is None else self.seconds * len(seen))
        answers: dict[int, Reading] = {}
        victims: dict[int, Victim] = {}
        steps = self.method().config.steps
        for i, (observation, rng, clue) in enumerate(zip(seen, rngs, clues, strict=True)):
            report(i, Progress(0, steps, math.nan, "", "what the update tells"))
            victim = victim_of(
                observation, model, rng, most_shapes=self.shapes, faithful=self.faithful, clues=clue
            )
            if victim.observed:
                victims[i] = victim
            else:
                answers[i] = Reading.none("every tensor of the update is zero: nothing to match")
        waiting = len(victims)
        for group in alike(victims, self.starts_of_each, model.device):
            chosen = {i: victims[i] for i in group}
            own = clock.part(waiting / len(group))
            answers |= self._together(chosen, model, [rngs[i] for i in group], report, own)
            waiting -= len(group)
        return [answers[i] for i in range(len(seen))]

    def _together(
        self,
        victims: Mapping[int, Victim],
        model: LanguageModel,
        rngs: Sequence[torch.Generator],
        report: OnProgress,
        clock: Clock,
    ) -> dict[int, Reading]:
        """Returns what is found for victims that are alike, by their number."""
        group = list(victims.values())
        method = self.method()
        config = method.free_config if group[0].bag_M is None else method.config
        latest = dict.fromkeys(victims, Progress(0, config.steps, math.nan, ""))

        def look(step: int, phase: str, guesses: Sequence[Found]) -> None:
            for number, guess in zip(latest, guesses, strict=False):
                texts = objective.rows.sequences(guess.row_index, guess.ids_BT)
                text = " / ".join(model.decode(ids) for ids in texts)
                latest[number] = latest[number]._replace(loss=guess.loss, text=text)
            for number, so_far in latest.items():
                report(number, so_far._replace(step=step, phase=phase))

        of_row = [
            # Only one start of several begins with a guess.
            (u, shape if start == 0 else replace(shape, begin=()))
            for u, victim in enumerate(group)
            for shape in victim.shapes.each
            for start in range(self.starts_of_each)
        ]
        # A random stream for each row, so that it does not matter who else is in the batch.
        rng_R = [
            torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=rngs[u])))
            for u, _ in of_row
        ]
        make = partial(
            joint_objective,
            model=model,
            loss=method.loss,
            scaled=method.scaled,
            faithful=self.faithful,
            mixed=self.precision == "mixed",
        )
        step = 0.0
        if math.isfinite(clock.left()):
            step = seconds_of_step(group[0], make, config, model.max_length)
        rows = rows_in_time(group, self.starts_of_each, step, clock)
        if not rows:
            reason = f"no step of the search ends in seconds = {self.seconds:g}: give it more"
            return dict.fromkeys(victims, Reading.none(reason, time_up=True))
        of_row, rng_R = [of_row[r] for r in rows], [rng_R[r] for r in rows]
        prior = None if method.prior is None else priors.load(method.prior, model)
        config = starts_in_time(config, step * len(rows), clock)
        watch = Watch(clock.before(ANSWER * step), look)
        objective = make(group, of_row=of_row, prior=prior)
        with objective.ready():
            guesses = method.algorithm(Search(objective, config, rng_R, watch))
            apart_U = distances(objective, guesses)
            chance_U = distances(objective, by_chance(objective, len(group)))
        matches: dict[int, Reading] = {}
        for (number, victim), best, apart, chance in zip(
            victims.items(), guesses, apart_U, chance_U, strict=True
        ):
            sequences = tuple(objective.rows.sequences(best.row_index, best.ids_BT))
            reconstruction = answer(victim, model, sequences, float(apart), float(chance), clock)
            late = watch.late() | clock.late()
            matches[number] = Reading(reconstruction.with_diagnostics(**late), sequences)
        return matches


def seconds_of_step(
    victim: Victim, make: Callable[..., Objective], config: MatchingConfig, longest: int
) -> float:
    """Returns the seconds that a step of a victim's largest row takes now, from a smaller one.

    Args:
        victim: The victim.
        make: Makes the objective of victims for rows (`joint_objective`).
        config: How the search steps.
        longest: Tokens that the model can read.
    """
    at_once = min(_TOKENS, longest)
    tokens = max(len(shape.lengths) * max(shape.lengths) for shape in victim.shapes.each)
    small = Shape((min(tokens, at_once),), victim.shapes.each[0].labels[:1])
    objective = make([victim], of_row=[(0, small)], prior=None)
    with objective.ready():
        start_RBTF = objective.space.random(objective.rows, [torch.Generator().manual_seed(0)])
        descent = Descent(start_RBTF, config)
        descent.step(config.loss(objective, 0))
    return descent.seconds * max(1.0, tokens / at_once)


def rows_in_time(victims: Sequence[Victim], starts: int, step: float, clock: Clock) -> list[int]:
    """Returns the rows for which the time left is enough; none if it is too short for one row.

    Args:
        victims: Each has a row for each start of each of its shapes, in this order.
        starts: Random starts of each shape.
        step: Seconds of a step of one row.
        clock: The time of all of them.
    """
    left = clock.left() / len(victims)  # infinite without a limit
    if left < _LEAST * step:
        return []
    rows: list[int] = []
    first = 0
    for victim in victims:
        shapes = len(victim.shapes.each)
        most = int(max(1.0, min(left / (_STEPS * step or 1e-9), shapes * starts)))
        if most >= shapes:
            chosen, of_each = [*range(shapes)], most // shapes
        else:
            # The likeliest lengths come first; lengths that are only tried should be unlike.
            spread = 1 if victim.shapes.lengths_known else shapes / most
            chosen, of_each = [int(i * spread) for i in range(most)], 1
        rows += [first + shape * starts + start for shape in chosen for start in range(of_each)]
        first += shapes * starts
    return rows


def starts_in_time(config: MatchingConfig, step: float, clock: Clock) -> MatchingConfig:
    """Returns the constants of a search with no more random starts than a part of its time holds.

    Args:
        config: The constants without a limit.
        step: Seconds of a step of all rows.
        clock: The time of the search.
    """
    most = max(1.0, min(_STARTS * clock.left() / (step or 1e-9), config.guesses))
    return replace(config, guesses=int(most))


def distances(objective: Objective, guesses: Sequence[Found]) -> Tensor:
    """Returns the distance [U] of each victim's tokens."""
    rows_U = torch.tensor([guess.row_index for guess in guesses], device=objective.victim_R.device)
    of_each = objective.take(rows_U)
    ids_UBT = torch.stack([guess.ids_BT for guess in guesses])
    apart_U = of_each.scores_of_tokens(ids_UBT[:, None])[:, 0]
    return apart_U.clamp_min(0)  # of equal gradients rounding may leave less


def by_chance(objective: Objective, victims: int) -> list[Found]:
    """Returns random tokens for each of so many victims."""
    rows = [int((objective.victim_R == u).nonzero()[0]) for u in range(victims)]
    of_each = objective.take(torch.tensor(rows, device=objective.victim_R.device))
    rng = [torch.Generator().manual_seed(0) for _ in rows]
    # Not a start, which may follow the update's hint.
    ids_UBT = of_each.nearest_tokens(of_each.space.random(of_each.rows, rng))
    return [Found(row, ids_BT, 0.0) for row, ids_BT in zip(rows, ids_UBT, strict=True)]


def answer(
    victim: Victim,
    model: LanguageModel,
    sequences: Sequence[Ids],
    apart: float,
    chance: float,
    clock: Clock,
) -> Reconstruction:
    """Returns the answer for a victim.

    Args:
        victim: The victim.
        model: The model that it trained.
        sequences: The tokens found.
        apart: The distance of their gradient to the observed one.
        chance: The distance that random tokens have.
        clock: Of the proof.
    """
    if not victim.shapes.lengths_known and not apart < _CHANCE * chance:
        reason = "lengths are not known, and none of those tried comes near the update"
        return Reconstruction.abstained(reason, distance=apart)
    return Reconstruction(
        status=Status.RECOVERED,
        sequences=tuple(sequences),
        evidence=(apart,) * len(sequences),
        tokens=tokens_of(sequences),
        diagnostics={
            "distance": apart,
            "distance_by_chance": chance,
            "left_out": victim.left_out,
            "candidates": {"shapes": len(victim.shapes.each)}
            | ({} if victim.bag_M is None else {"tokens": len(victim.bag_M)}),
        },
        verified=proves(model, sequences, victim.seen, clock),
    )
