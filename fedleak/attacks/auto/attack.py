"""The strongest attack that a setting admits, without settings: an ensemble of fixed order.

What AutoAttack (Croce and Hein 2020) is for adversarial examples. The attacks of `ENSEMBLE` are
asked one after the other, the cheapest first, until a whole batch is proved. Each gets what the
others found: sequences that are proved are taken out of the update (`peeling`), likely tokens and
guesses are where gradient matching begins. At the end the batch is chosen from what all of them
read, by the observed gradient alone (`evidence`), so that a sequence of one attack can stand beside
another attack's.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import AfterValidator, Field

from fedleak.attacks import AttackSetting, OneByOne, Progress, Step, certificate
from fedleak.attacks.auto.evidence import choose, compare, nats
from fedleak.attacks.auto.peeling import occurrences, peel
from fedleak.attacks.auto.reading import Ids, Reading, read
from fedleak.attacks.auto.sharpening import Labelled, sharpened
from fedleak.attacks.clock import Clock
from fedleak.attacks.matching.batch_structure import Clues
from fedleak.attacks.matching.lamp import Lamp
from fedleak.attacks.subspace.dager import Dager
from fedleak.attacks.subspace.keyspan import Keyspan
from fedleak.models import LanguageModel, absolute
from fedleak.models import prior as priors
from fedleak.observation import Observation
from fedleak.reconstruction import Reconstruction, Status

Single = Keyspan | Dager | Lamp

ENSEMBLE: tuple[tuple[Single, str], ...] = (
    (Keyspan(), "reads sentences from the attention of layer 1, and proves them one by one"),
    (Dager(), "reads sequences from the spans of layers 1 and 2"),
    (Lamp(), "matches the gradient of what is left, beginning with what the others found"),
)
"""Cheapest first: the next is asked only where those before proved no whole batch."""

_SHARE = 0.5
"""Share of the time left that an attack may take: something comes after each."""


@dataclass(frozen=True)
class Findings:
    """What the attacks asked so far found.

    Attributes:
        read: For each sequence the attack that read it first, in the order of finding.
        members: Proved sequences, taken out of the update.
        tokens: Tokens beside which there are no others, as far as any of them knows.
        said: What each attack said, by its kind.
        whole: The rest of the batch, with repetitions, if the last attack proved it.
    """

    read: dict[Ids, str] = field(default_factory=dict)
    members: tuple[certificate.Member, ...] = ()
    tokens: frozenset[int] = frozenset()
    said: dict[str, Reconstruction] = field(default_factory=dict)
    whole: tuple[Ids, ...] = ()

    def and_(self, kind: str, reading: Reading) -> "Findings":
        """Returns the findings with what one more attack found."""
        return Findings(
            read={ids: kind for ids in reading.sequences if ids} | self.read,
            members=(*self.members, *reading.members),
            tokens=self.tokens.union(reading.tokens),
            said={**self.said, kind: reading.answer},
            whole=reading.sequences if reading.answer.verified else (),
        )

    def clues(self) -> Clues:
        """Returns what the next attack begins with."""
        return Clues(tuple(sorted(self.tokens)) or None, self.unproved())

    def unproved(self) -> tuple[Ids, ...]:
        """Returns the sequences that are not proved."""
        proved = {one.ids for one in self.members}
        return tuple(ids for ids in self.read if ids not in proved)


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
    version: ClassVar[int] = 1
    slow: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = Lamp.uses
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
        clock, found = Clock(self.seconds), Findings()
        rest: Observation | None = seen
        setting = AttackSetting.of(seen, model)
        able = [attack for attack, _ in ENSEMBLE if attack.obstacle(setting) is None]
        for number, attack in enumerate(able, 1):
            if rest is None or (found.said and clock.up()):
                break

            def tell(how: Progress, of: str = f"{attack.kind} ({number} of {len(able)})") -> None:
                on_progress(how._replace(phase=f"{of} {how.phase}".strip()))

            timed = self._timed(attack, _SHARE * clock.left())
            reading = read(timed, rest, model, found.clues(), rng, tell)
            found = found.and_(attack.kind, reading)
            if reading.answer.verified:
                break
            rest = peel(seen, model, found.members) if found.members else seen
        if rest is not None and not found.whole and not clock.up():

            def mended(ids: Ids, fit: float) -> None:
                on_progress(Progress(len(able), len(able), 1 - fit, model.decode(ids), "mending"))

            better = _sharpened(found, rest, model, rng, clock, mended)
            found = replace(found, read=dict.fromkeys(better, self.kind) | found.read)
        return self._answer(found, seen, rest, model, clock)

    def _timed(self, attack: Single, seconds: float) -> Single:
        """Returns an attack with its time, and with the settings of this one."""
        if isinstance(attack, Lamp):
            return replace(attack, seconds=seconds, prior=self.prior, steps=self.steps)
        return replace(attack, seconds=seconds)

    def _answer(
        self,
        found: Findings,
        seen: Observation,
        left: Observation | None,
        model: LanguageModel,
        clock: Clock,
    ) -> Reconstruction:
        """Returns what is proved, and beside it the choice that explains the rest best."""
        diagnostics: dict[str, Any] = {
            "version": self.version,
            "asked": {kind: str(one.status) for kind, one in found.said.items()},
            **({"time_up": True} if clock.rang else {}),
        }
        repeats = occurrences(model, found.members, seen.update.num_examples)
        proved = tuple(
            one.ids for one, n in zip(found.members, repeats, strict=True) for _ in range(n)
        )
        chosen: dict[Ids, float] = {}
        likely = bool(proved or found.whole)
        if not found.whole and left is not None and (pool := found.unproved()):
            choice = _choice(pool, left, model)
            chosen = choice.evidence
            likely |= choice.nats > choice.nats_by_chance
            diagnostics |= {
                "residual": choice.residual,
                "nats": choice.nats,
                "nats_by_chance": choice.nats_by_chance,
            }
        stands = likely or any(one.status == Status.RECOVERED for one in found.said.values())
        batch = (*proved, *found.whole, *chosen)
        if not batch or not stands:
            reasons = "; ".join(f"{kind}: {one.reason}" for kind, one in found.said.items())
            return Reconstruction.none(Status.ABSTAINED, reasons, **diagnostics)
        verdict = _verdict(batch, seen, model, clock)
        verified = verdict.verified or (bool(found.whole) and not found.members)
        if verdict.verified:
            batch = tuple(ids for ids, times in verdict.repeats.items() for _ in range(times))
        if verdict.difference is not None:
            diagnostics["gradient_difference"] = verdict.difference
        evidence = [0.0 if verified else chosen.get(ids, 0.0) for ids in batch]
        closed = [certificate.close(model, ids) for ids in batch]
        return Reconstruction(
            status=Status.RECOVERED,
            sequences=tuple(closed),
            evidence=tuple(evidence),
            tokens=tuple(sorted({token for ids in closed for token in ids})),
            diagnostics={**diagnostics, "from": [found.read.get(ids, "") for ids in batch]},
            verified=verified,
            reason="" if verified or proved else "nothing proved: the likeliest sequences",
        )


class Choice(NamedTuple):
    """The sequences that explain an update best.

    Attributes:
        batch: With labels and weights.
        evidence: Of each, best first: the residual as a share of what it is without the sequence.
        residual: What all of them leave, as a share of the gradient's square.
        nats: How much likelier they make the update.
        nats_by_chance: How much likelier the best of all texts of this length would make mere noise
            (minimum description length). More than that proves no word: wrong texts explain what
            all texts have in common.
    """

    batch: list[Labelled]
    evidence: dict[Ids, float]
    residual: float
    nats: float
    nats_by_chance: float


def _choice(pool: Sequence[Ids], rest: Observation, model: LanguageModel) -> Choice:
    """Returns the sequences of a pool that explain an update best."""
    pairs = compare(model, pool, certificate.as_gradient(rest))
    picks = choose(pairs, rest.update.num_examples)
    weights = pairs.weights(picks)
    batch = [
        Labelled(pool[pairs.sequence[k]], pairs.label[k], float(weight))
        for k, weight in zip(picks, weights, strict=True)
    ]
    left = pairs.residual(picks)
    evidence: dict[Ids, float] = {}
    for pick, one in zip(picks, batch, strict=True):
        without = pairs.residual([k for k in picks if k != pick])
        evidence[one.ids] = min(left / without, evidence.get(one.ids, 1.0))
    return Choice(
        batch=batch,
        evidence=dict(sorted(evidence.items(), key=lambda one: one[1])),
        residual=left,
        nats=nats(pairs, left),
        nats_by_chance=sum(map(len, evidence)) * math.log(len(model.tokenizer)),
    )


def _sharpened(
    found: Findings,
    rest: Observation,
    model: LanguageModel,
    rng: torch.Generator,
    clock: Clock,
    tell: Callable[[Ids, float], None],
) -> tuple[Ids, ...]:
    """Returns the sequences that explain an update best, with words that do so better."""
    pool = found.unproved()
    if not pool:
        return ()
    observed = certificate.as_gradient(rest)
    batch = _choice(pool, rest, model).batch
    return tuple(sharpened(model, batch, observed, rng, clock, tell))


def _verdict(
    batch: Sequence[Ids], seen: Observation, model: LanguageModel, clock: Clock
) -> certificate.Verdict:
    """Returns what recomputing the gradient of a batch says, where that can be compared."""
    if not certificate.is_linear(seen):
        return certificate.Verdict({}, None, False)
    members = certificate.explain(model, list(dict.fromkeys(batch)), seen, clock)
    return certificate.verify(model, members, seen)
