"""The strongest attack that a setting admits, without settings: an ensemble of fixed order.

What AutoAttack (Croce and Hein 2020) is for adversarial examples. The attacks of `ENSEMBLE` are
asked one after the other, the cheapest first, until a whole batch is proved. Each gets what the
others found: sequences that are proved are taken out of the update (`peeling`), likely tokens and
guesses are where gradient matching begins. At the end the batch is chosen from what all of them
read, by the observed gradient alone (`evidence`), so that a sequence of one attack can stand beside
another attack's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import AfterValidator, Field

from fedleak.attacks import AttackSetting, OneByOne, Progress, Step, certificate
from fedleak.attacks.auto import budget
from fedleak.attacks.auto.budget import Pace, Reserve
from fedleak.attacks.auto.chance import FEWEST, PLACEBOS, leaves_noise, noise_of, worth
from fedleak.attacks.auto.evidence import choose, compare
from fedleak.attacks.auto.peeling import occurrences, peel
from fedleak.attacks.auto.reading import Ids, Reading, read
from fedleak.attacks.auto.sharpening import Labelled, sharpened
from fedleak.attacks.clock import Clock
from fedleak.attacks.matching.batch_structure import Clues
from fedleak.attacks.matching.lamp import Lamp
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.attacks.subspace.dager import Dager
from fedleak.attacks.subspace.keyspan import Keyspan
from fedleak.models import LanguageModel, absolute
from fedleak.models import prior as priors
from fedleak.training.observation import Observation

Single = Keyspan | Dager | Lamp

ENSEMBLE: tuple[tuple[Single, str], ...] = (
    (Keyspan(), "reads sentences from the attention of layer 1, and proves them one by one"),
    (Dager(), "reads sequences from the spans of layers 1 and 2"),
    (Lamp(), "matches the gradient of what is left, beginning with what the others found"),
)
"""Cheapest first: the next is asked only where those before proved no whole batch."""

_CHOOSING = 0.5
"""Share of the time left that the choice among guesses may take."""

_READ = 2
"""Sequences of one attack that are compared with those of others, for each text of the batch."""


@dataclass(frozen=True)
class Findings:
    """What the attacks asked so far found.

    Attributes:
        read: For each sequence the attack that read it first, in the order of finding.
        members: Proved sequences, taken out of the update.
        tokens: Tokens beside which there are no others, as far as any of them knows.
        said: What each attack said, by its kind.
        whole: The rest of the batch, with repetitions, if the last attack proved it.
        scale: How many times its mean gradient the update is, as far as members tell.
    """

    read: dict[Ids, str] = field(default_factory=dict)
    members: tuple[certificate.Member, ...] = ()
    tokens: frozenset[int] = frozenset()
    said: dict[str, Reconstruction] = field(default_factory=dict)
    whole: tuple[Ids, ...] = ()
    scale: float = 1.0

    def and_(self, kind: str, reading: Reading) -> "Findings":
        """Returns the findings with what one more attack found."""
        return Findings(
            read={ids: kind for ids in reading.sequences if ids} | self.read,
            members=(*self.members, *reading.members),
            tokens=self.tokens.union(reading.tokens),
            said={**self.said, kind: reading.answer},
            whole=reading.sequences if reading.answer.verified else (),
            scale=self.scale * reading.scale,
        )

    def clues(self, most: int) -> Clues:
        """Returns what the next attack begins with, at most so many sequences of each attack."""
        return Clues(tuple(sorted(self.tokens)) or None, self.unproved(most))

    def unproved(self, most: int) -> tuple[Ids, ...]:
        """Returns the sequences that are not proved, at most so many of each attack."""
        proved = {member.ids for member in self.members}
        left = [ids for ids in self.read if ids not in proved]
        of_each = ([ids for ids in left if self.read[ids] == kind] for kind in reversed(self.said))
        return tuple(ids for some in of_each for ids in some[:most])


class Choice(NamedTuple):
    """The sequences that explain an update best.

    Attributes:
        batch: With labels and weights.
        evidence: Of each, best first: the residual as a share of what it is without the sequence.
        residual: What all of them leave, as a share of the gradient's square.
    """

    batch: tuple[Labelled, ...]
    evidence: dict[Ids, float]
    residual: float


NO_CHOICE = Choice((), {}, 1.0)


@dataclass(frozen=True, kw_only=True)
class Auto(OneByOne):
    """The strongest attack that the setting admits: all others in turn, until a batch is proved.

    Attributes:
        seconds: Time for one update, shared by all attacks; the best so far is the answer.
        prior: A causal language model (hub id, folder or built-in) that judges word orders; None:
            no prior.
        steps: Steps of gradient matching; None: as that attack has it.
    """

    kind: ClassVar[str] = "auto"
    version: ClassVar[int] = 3
    slow: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = Lamp.uses | {"noise_scale"}
    seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 120.0
    prior: Annotated[str, AfterValidator(absolute)] | None = None
    steps: Annotated[int, Field(ge=1)] | None = None

    def check_equipment(self) -> None:
        """Refuses a prior that cannot be loaded."""
        if self.prior is not None:
            priors.check(self.prior)

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Needs what any of its attacks can work on."""
        obstacles = [step.obstacle for step in self.plan(setting)]
        return obstacles[-1] if all(obstacles) else None

    def plan(self, setting: AttackSetting) -> tuple[Step, ...]:
        """Returns the attacks in the order in which they are asked, also those that cannot work."""
        return tuple(
            Step(attack.kind, purpose, attack.obstacle(setting)) for attack, purpose in ENSEMBLE
        )

    def __call__(
        self,
        seen: Observation,
        model: LanguageModel,
        *,
        rng: torch.Generator,
        on_progress: Callable[[Progress], None] = lambda progress: None,
    ) -> Reconstruction:
        """Returns the batch that explains the update best, of all that the attacks read."""
        clock, findings, pace = Clock(self.seconds), Findings(), Pace(seen, model)
        rest, most = seen, _READ * seen.update.num_examples
        setting = AttackSetting.of(seen, model)
        able = [attack for attack, _ in ENSEMBLE if attack.obstacle(setting) is None]
        clear = budget.spans_are_clear(seen, model)
        for number, attack in enumerate(able, 1):
            if findings.said and clock.up():
                break

            def tell(how: Progress, name: str = f"{attack.kind} ({number} of {len(able)})") -> None:
                on_progress(how._replace(phase=f"{name} {how.phase}".strip()))

            clues = findings.clues(most)
            timed = self._timed(attack, rest, clues, clock, pace, clear)
            if timed is None:
                break
            reading = read(timed, rest, model, clues, rng, tell)
            findings = findings.and_(attack.kind, reading)
            if reading.answer.verified and rest is seen:
                return self._proved(findings, model, clock)
            left = peel(seen, model, findings.members, findings.scale) if findings.members else seen
            if left is None or reading.answer.verified:
                return self._answer(findings, NO_CHOICE, seen, rest, model, rng, clock, pace)
            rest = left
            if noise_of(rest) is not None:
                choice = _choice(findings.unproved(most), rest, model, clock, pace)
                if leaves_noise(model, choice.batch, rest, rng, clock):
                    return self._answer(findings, choice, seen, rest, model, rng, clock, pace)

        def show(ids: Ids, fit: float) -> None:
            on_progress(Progress(len(able), len(able), 1 - fit, model.decode(ids), "mending"))

        choice = _mended(findings.unproved(most), rest, model, rng, clock, pace, show)
        return self._answer(findings, choice, seen, rest, model, rng, clock, pace)

    def _timed(
        self,
        attack: Single,
        seen: Observation,
        clues: Clues,
        clock: Clock,
        pace: Pace,
        clear: bool,
    ) -> Single | None:
        """Returns an attack with its time and the settings of this one; None: there is no time."""
        if not isinstance(attack, Lamp):
            return replace(attack, seconds=budget.on_spans(clock, clear))
        reserve = Reserve.of(pace, seen, clues.sequences)
        if clues.sequences and reserve.answer > clock.left():
            clock.rang = True  # the first step alone would make the answer late
            return None
        return replace(attack, seconds=reserve.before(clock), prior=self.prior, steps=self.steps)

    def _common_diagnostics(self, findings: Findings, clock: Clock) -> dict[str, Any]:
        """Returns the diagnostics of every answer."""
        # Who was asked last had all the time that was left.
        late = any(answer.diagnostics.get("time_up") for answer in [*findings.said.values()][-1:])
        return {
            "version": self.version,
            "asked": {kind: str(answer.status) for kind, answer in findings.said.items()},
            **({"time_up": True} if clock.rang or late else {}),
        }

    def _proved(self, findings: Findings, model: LanguageModel, clock: Clock) -> Reconstruction:
        """Returns the answer of the last attack, which proved the whole batch by itself."""
        *_, (kind, answer) = findings.said.items()
        sequences = tuple(certificate.close(model, ids) for ids in findings.whole)
        own = {"from": [kind] * len(sequences), "likely": [True] * len(sequences)}
        return replace(
            answer,
            sequences=sequences,
            tokens=tuple(sorted({token for ids in sequences for token in ids})),
            diagnostics={**answer.diagnostics, **own, **self._common_diagnostics(findings, clock)},
        )

    def _answer(
        self,
        findings: Findings,
        choice: Choice,
        seen: Observation,
        rest: Observation,
        model: LanguageModel,
        rng: torch.Generator,
        clock: Clock,
        pace: Pace,
    ) -> Reconstruction:
        """Returns what is proved, and beside it the choice that explains the rest best."""
        diagnostics: dict[str, Any] = {}
        repeats = occurrences(model, findings.members, seen.update.num_examples)
        proved = tuple(
            member.ids
            for member, n in zip(findings.members, repeats, strict=True)
            for _ in range(n)
        )
        certain = {*proved, *findings.whole}
        likely: set[Ids] = set()
        if choice.batch:
            observed = certificate.as_gradient(rest)
            diagnostics["residual"] = choice.residual
            reserve = Reserve.of(pace, rest, [guess.ids for guess in choice.batch])
            spare = reserve.gradients_in(clock.left()) - len(choice.batch)
            if spare < FEWEST:
                clock.rang, diagnostics["not_compared"] = True, True
            else:
                compared = worth(
                    model, choice.batch, observed, rng, noise_of(rest), min(spare, PLACEBOS)
                )
                likely = {
                    guess.ids
                    for guess, is_likely in zip(choice.batch, compared.likely, strict=True)
                    if is_likely
                }
                diagnostics["nats"] = list(compared.nats)
                diagnostics["nats_by_chance"] = list(compared.by_chance)
        stands = (
            certain
            or likely
            or any(answer.status == Status.RECOVERED for answer in findings.said.values())
        )
        batch = (*proved, *findings.whole, *choice.evidence)
        if not batch or not stands:
            reasons = "; ".join(
                f"{kind}: {answer.reason}" for kind, answer in findings.said.items()
            )
            common = self._common_diagnostics(findings, clock)
            return Reconstruction.none(Status.ABSTAINED, reasons, **diagnostics, **common)
        verdict = _verdict(batch, seen, model, clock)
        verified = verdict.verified
        if verified:
            batch = tuple(ids for ids, times in verdict.repeats.items() for _ in range(times))
        batch = batch[: seen.update.num_examples]
        diagnostics |= verdict.diagnostics()
        closed = [certificate.close(model, ids) for ids in batch]
        return Reconstruction(
            status=Status.RECOVERED,
            sequences=tuple(closed),
            evidence=tuple(0.0 if verified else choice.evidence.get(ids, 0.0) for ids in batch),
            tokens=tuple(sorted({token for ids in closed for token in ids})),
            diagnostics={
                **diagnostics,
                **self._common_diagnostics(findings, clock),
                "from": [findings.read.get(ids, self.kind) for ids in batch],
                "likely": [verified or ids in certain | likely for ids in batch],
            },
            verified=verified,
            reason=verdict.remark() if verified or proved else _NOT_PROVED[bool(likely)],
        )


_NOT_PROVED = {
    True: "nothing proved: the likeliest sequences",
    False: "nothing proved: guesses that explain no more than random texts do",
}


def _choice(
    pool: Sequence[Ids], rest: Observation, model: LanguageModel, clock: Clock, pace: Pace
) -> Choice:
    """Returns the sequences of a pool that explain an update best; out of time, the first ones.

    A long pool is cut to what can be compared in a part of the time that is left.
    """
    pool = [ids for ids in dict.fromkeys(pool) if not model.special_ids().issuperset(ids)]
    if not pool:
        return NO_CHOICE
    reserve, size = Reserve.of(pace, rest, pool), rest.update.num_examples
    most = reserve.gradients_in(_CHOOSING * clock.left()) // reserve.labels
    if most < min(size, len(pool)):
        clock.rang = True
        return Choice((), dict.fromkeys(pool[:size], 1.0), 1.0)
    pool = pool[:most]
    pairs = compare(model, pool, certificate.as_gradient(rest), noise_of(rest))
    picks = choose(pairs, rest.update.num_examples)
    weights = pairs.weights(picks)
    batch = [
        Labelled(pool[pairs.sequence[k]], pairs.label[k], float(weight))
        for k, weight in zip(picks, weights, strict=True)
    ]
    left = pairs.residual(picks)
    evidence: dict[Ids, float] = {}
    for pick, guess in zip(picks, batch, strict=True):
        without = pairs.residual([k for k in picks if k != pick])
        evidence[guess.ids] = min(left / without, evidence.get(guess.ids, 1.0))
    return Choice(tuple(batch), dict(sorted(evidence.items(), key=lambda pair: pair[1])), left)


def _mended(
    pool: Sequence[Ids],
    rest: Observation,
    model: LanguageModel,
    rng: torch.Generator,
    clock: Clock,
    pace: Pace,
    tell: Callable[[Ids, float], None],
) -> Choice:
    """Returns the sequences that explain an update best, with words that do so better."""
    choice = _choice(pool, rest, model, clock, pace)
    if not choice.batch or clock.up():
        return choice
    reserve = Reserve.of(pace, rest, pool)
    until = reserve.mending_clock(clock)
    better = sharpened(
        model,
        choice.batch,
        certificate.as_gradient(rest),
        rng,
        until,
        tell,
        noise_of(rest),
        lambda batch: leaves_noise(model, batch, rest, rng, until),
        reserve.gradient,
    )
    clock.rang |= until.rang
    if {*better} == {guess.ids for guess in choice.batch}:
        return choice
    again = _choice([*better, *(guess.ids for guess in choice.batch)], rest, model, clock, pace)
    return again if again.batch else choice


def _verdict(
    batch: Sequence[Ids], seen: Observation, model: LanguageModel, clock: Clock
) -> certificate.Verdict:
    """Returns what recomputing the gradient of a batch says, where that can be compared."""
    if not certificate.is_linear(seen) or noise_of(seen) is not None:
        return certificate.Verdict({}, None, False)  # not one gradient, or blurred
    members = certificate.explain(model, list(dict.fromkeys(batch)), seen, clock)
    return certificate.verify(model, members, seen, clock)
