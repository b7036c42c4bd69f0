"""The strongest attack that a setting admits, without settings: an ensemble of fixed order.

It is what AutoAttack (Croce and Hein 2020) is for adversarial examples. The attacks of `ENSEMBLE`
run one after the other, the cheapest first, until a whole batch is proved, or a single text is
determined in closed form, or leaves nothing but noise. Each gets what the others found: sequences
that are proved are taken out of the update (`peeling`), and gradient matching begins at likely
tokens and guesses. At the end the batch is chosen from what all of them read, by the observed
gradient alone (`evidence`), so that a sequence of one attack can stand beside another attack's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import AfterValidator, Field
from torch import Tensor

from fedleak.attacks import AttackSetting, OneByOne, Progress, Show, Step, certificate, replay
from fedleak.attacks import clock as timing
from fedleak.attacks.adam_step import BehindAdam, behind_adam
from fedleak.attacks.analytic.position_marginals import PositionMarginals
from fedleak.attacks.analytic.query_gradients import QueryGradients
from fedleak.attacks.auto.budget import OF_SPANS, Pace, Reserve
from fedleak.attacks.auto.chance import FEWEST, PLACEBOS, leaves_noise, noise_of, worth
from fedleak.attacks.auto.evidence import choose, compare, directions
from fedleak.attacks.auto.joint_likelihood import MOST_TEXTS
from fedleak.attacks.auto.maximum_likelihood import MaximumLikelihood, is_blurred
from fedleak.attacks.auto.peeling import occurrences, peel
from fedleak.attacks.auto.sharpening import Labelled, sharpened
from fedleak.attacks.clock import Clock, Seconds
from fedleak.attacks.matching.batch_structure import Clues
from fedleak.attacks.matching.lamp import Lamp
from fedleak.attacks.reconstruction import Ids, Reconstruction, Status, tokens_of
from fedleak.attacks.subspace.answer import Reading
from fedleak.attacks.subspace.coarseness import EXACT, coarseness
from fedleak.attacks.subspace.completion import completed
from fedleak.attacks.subspace.dager import Dager
from fedleak.attacks.subspace.keyspan import Keyspan
from fedleak.attacks.subspace.state_pursuit import StatePursuit
from fedleak.attacks.subspace.step_peeling import StepPeeling
from fedleak.models import CLASSIFICATION, LanguageModel, absolute
from fedleak.models import prior as priors
from fedleak.models.family import LORA_A
from fedleak.training.observation import Observation

Single = (
    PositionMarginals
    | MaximumLikelihood
    | Keyspan
    | QueryGradients
    | StepPeeling
    | Dager
    | StatePursuit
    | Lamp
)

ENSEMBLE: tuple[tuple[Single, str], ...] = (
    (PositionMarginals(), "reads a single text from both embeddings, in closed form"),
    (MaximumLikelihood(), "reads texts under noise, or one in few bits, by their likelihood"),
    (Keyspan(), "reads sentences from the attention of layer 1, and proves them one by one"),
    (QueryGradients(), "reads long texts of a batch, each from the gradient at one word's query"),
    (StepPeeling(), "reads a decoder's local steps of SGD, one after the other"),
    (Dager(), "reads sequences from the spans of layers 1 and 2"),
    (
        StatePursuit(),
        "reads a decoder's texts from adapters, from what Adam makes of gradients, and under noise",
    ),
    (Lamp(), "matches the gradient of what is left, beginning with what the others found"),
)
"""Cheapest first: the next runs only if those before proved no whole batch.

Of several texts of an encoder `keyspan` goes before `maximum_likelihood`, and `query_gradients`
before both if a text is longer than a head is wide: neither is cheap there. Of decoders `dager`
goes before `keyspan`, which is not cheap, but behind a mask, after a step of Adam, and in half
precision if the model is rotary. `state_pursuit` goes before both after several steps of Adam, and
where only signs or few bits came, but for few bits of a rotary model; of adapters `dager` goes
before it after one step of Adam.
"""

_CHOOSING = 0.5
"""Share of the time left that the choice among guesses may take."""

_NOISY = 0.75
"""Share of the time left that the likelihood of a single text under noise may take."""

_REPLAYING = 0.2
"""Share of the time that making a client's steps again may take, of all that is read."""

_SORTING = 0.5
"""Share of the time left in which signs may sort a batch, if the gradient behind them is known."""

_LONG_TEXTS = 0.5
"""Share of the time of an attack on spans that the attack on query gradients may take."""

_BESIDE_MATCHING = 0.1
"""Share of the time left that `keyspan` may take before gradient matching, if that has time enough.

Only where `dager` proved nothing: then something blurs spans, or the batch fills them.
"""

_READ = 2
"""Sequences of one attack that are compared with those of others, for each text of the batch."""


@dataclass(frozen=True)
class Findings:
    """What the attacks asked so far found.

    Attributes:
        read: For each sequence the attack that read it first, in the order of finding.
        members: Proved sequences, taken out of the update.
        tokens: The only tokens of the batch, as far as any of the attacks knows.
        named: Tokens of the batch, whatever its texts are.
        answers: The answer of each attack, by its kind.
        whole: The rest of the batch, with repetitions, if the last attack proved or settled it.
        scale: The update over its mean gradient, as far as members determine it.
        stepped: Sequences of local steps that were made again.
    """

    read: dict[Ids, str] = field(default_factory=dict)
    members: tuple[certificate.Member, ...] = ()
    tokens: frozenset[int] = frozenset()
    named: frozenset[int] = frozenset()
    answers: dict[str, Reconstruction] = field(default_factory=dict)
    whole: tuple[Ids, ...] = ()
    scale: float = 1.0
    stepped: tuple[Ids, ...] = ()

    def and_(self, kind: str, reading: Reading) -> "Findings":
        """Returns the findings with what one more attack found."""
        return Findings(
            read={ids: kind for ids in reading.sequences if ids} | self.read,
            members=(*self.members, *reading.members),
            tokens=self.tokens.union(reading.tokens),
            named=self.named.union(reading.named),
            answers={**self.answers, kind: reading.answer},
            whole=reading.sequences if reading.answer.verified or reading.settled else (),
            scale=self.scale * reading.scale,
            stepped=(*self.stepped, *reading.stepped),
        )

    def unproved(self, most: int) -> tuple[Ids, ...]:
        """Returns the sequences that are not proved, at most so many of each attack."""
        proved = {member.ids for member in self.members}
        left = [ids for ids in self.read if ids not in proved]
        of_each = (
            [ids for ids in left if self.read[ids] == kind] for kind in reversed(self.answers)
        )
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
    version: ClassVar[int] = 40
    slow: ClassVar[bool] = True
    uses: ClassVar[frozenset[str]] = Lamp.uses | {"noise_scale"}
    seconds: Seconds = 120.0
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
        """Returns the attacks in the order in which they run, also those that cannot work."""
        return tuple(
            Step(attack.kind, purpose, attack.obstacle(setting)) for attack, purpose in ENSEMBLE
        )

    def __call__(
        self,
        seen: Observation,
        model: LanguageModel,
        *,
        rng: torch.Generator,
        on_progress: Show = lambda progress: None,
    ) -> Reconstruction:
        """Returns the batch that explains the update best, of all that the attacks read."""
        attempt = _Attempt(self, seen, model, rng, on_progress)
        choice = attempt.ask_all()
        # The last attack may have settled the whole batch by itself.
        by_itself = choice is None and attempt.rest is attempt.whole
        return attempt.settled() if by_itself else attempt.answer(choice or NO_CHOICE)


class _Attempt:
    """One update under attack: which attacks ran, what was found, and the time that is left.

    Attributes:
        findings: What the attacks asked so far found.
        whole: The update, or the gradient behind it, if it is a step of Adam.
        rest: The same without the sequences that are proved.
    """

    def __init__(
        self,
        settings: Auto,
        seen: Observation,
        model: LanguageModel,
        rng: torch.Generator,
        on_progress: Show,
    ) -> None:
        self._clock, self._settings = Clock(settings.seconds), settings
        self._seen, self._model, self._rng, self._on_progress = seen, model, rng, on_progress
        self._replaying = _REPLAYING * settings.seconds
        self._pace, self._most = Pace(seen, model), _READ * seen.update.num_examples
        self.whole, self._complete = self._completed()
        self.findings, self.rest = Findings(), self.whole

    @cached_property
    def _behind(self) -> BehindAdam | None:
        """The gradient behind a step of Adam; None: the update is no such step."""
        return behind_adam(self._seen, self._model)

    def _completed(self) -> tuple[Observation, Mapping[str, Tensor] | None]:
        """Returns the gradient behind a batch's step, and all of that of the first attention.

        It is the update itself, and None, if it is no step of Adam, and where signs tell as much:
        of a single text, of decoders, and where no gradient can be completed, as by dropout.
        """
        seen, model = self._seen, self._model
        several = seen.update.num_examples > 1 and not seen.knowledge.dropout
        behind = self._behind if several and model.task == CLASSIFICATION else None
        if behind is None:
            return seen, None
        tensors = behind.update.tensors
        names = [name for name in model.family.attention_parameters(0) if name in tensors]
        complete = completed(model, behind, tensors, names) if names else None
        return (seen, None) if complete is None else (behind, complete.gradients)

    def ask_all(self) -> Choice | None:
        """Runs the attacks in turn; returns the choice that explains what none of them proved.

        None: nothing is left to explain.
        """
        seen, model, clock = self.whole, self._model, self._clock
        setting = AttackSetting.of(self._seen, model)
        able = [attack for attack, _ in ENSEMBLE if attack.obstacle(setting) is None]
        if model.family.causal:
            # DAGER reads a decoder's texts of any length, one token after the other, and cheaply.
            late: tuple[type[Single], ...] = (Keyspan, StatePursuit, Lamp)
            if self._is_masked() or self._behind is not None:
                late = (PositionMarginals, StatePursuit, Dager, Lamp)
                if self._has_adapters():
                    late = (PositionMarginals, Dager, StatePursuit, Lamp)
            elif self._is_rotary() and certificate.were_cast(seen.update.tensors.values()):
                late = (Dager, StatePursuit, Lamp)  # `keyspan` reads more through half precision
            elif self._has_no_span():
                late = (Dager, Keyspan, Lamp)
            able.sort(key=lambda attack: isinstance(attack, late) and 1 + late.index(type(attack)))
        elif seen.update.num_examples > 1 and seen.knowledge.adds_up:
            # The likelihood tests quickly what spans read under noise, and goes on from there.
            early: list[type[Single]] = [Keyspan, MaximumLikelihood]
            early.insert(0 if self._is_long() else 2, QueryGradients)
            able.sort(key=lambda attack: [*early, type(attack)].index(type(attack)))
        for number, attack in enumerate(able, 1):
            if self.findings.answers and clock.up():
                break
            if not self._suits(attack):  # looked at last: it goes through the whole update
                continue

            def tell(how: Progress, name: str = f"{attack.kind} ({number} of {len(able)})") -> None:
                self._on_progress(how._replace(phase=f"{name} {how.phase}".strip()))

            clues = self._clues(attack)
            timed = self._timed(attack, clues)
            if timed is None:
                break
            rest = self._seen_by(attack)
            reading = self._made_again(read_with(timed, rest, model, clues, self._rng, tell))
            self.findings = self.findings.and_(attack.kind, reading)
            if reading.answer.verified or reading.settled:
                return None
            if self.findings.members:
                left = peel(seen, model, self.findings.members, self.findings.scale)
                if left is None:
                    return NO_CHOICE
                self.rest = left
            if noise_of(self.rest) is not None:
                choice = self._choice(self.findings.unproved(self._most))
                if leaves_noise(model, choice.batch, self.rest, self._rng, clock):
                    return choice

        def show(ids: Ids, fit: float) -> None:
            text = model.decode(ids)
            self._on_progress(Progress(len(able), len(able), 1 - fit, text, "mending"))

        return self._mended(self.findings.unproved(self._most), show)

    def _seen_by(self, attack: Single) -> Observation:
        """Returns what is left of the update, in the form that tells an attack most."""
        if isinstance(attack, PositionMarginals):
            # Rows of embeddings have large numbers, of which a step of Adam shows signs alone.
            return self._seen
        first = isinstance(attack, Keyspan) and self.rest is self._seen
        return (self._behind or self.rest) if first else self.rest

    def _clues(self, attack: Single) -> Clues:
        """Returns what the attacks before found, the best guesses first for gradient matching.

        It takes the lengths of the first guesses, and begins with them.
        """
        guesses = self.findings.unproved(self._most)
        if isinstance(attack, Lamp) and len(guesses) > self._seen.update.num_examples:
            best = [guess.ids for guess in self._choice(guesses).batch]
            guesses = tuple(dict.fromkeys([*best, *guesses]))
        return Clues(tuple(sorted(self.findings.tokens)) or None, guesses)

    def _made_again(self, reading: Reading) -> Reading:
        """Returns a reading, as proved if the client's steps, made again on its texts, prove it."""
        seen, model = self._seen, self._model
        batch = reading.sequences[: seen.update.num_examples]
        able = self._replaying > 0 and self.rest is self.whole and replay.obstacle(seen) is None
        if reading.answer.verified or not able or self._clock.up():
            return reading
        begun = timing.now()
        seconds = min(self._replaying, self._clock.left())
        made = replay.replay(model, batch, seen, seconds, strict=True)
        self._replaying -= timing.now() - begun
        if made is None or not made.verified:
            return reading
        # The attack may not have stood by what it read.
        answer = replace(
            reading.answer.with_diagnostics(**made.diagnostics()),
            status=Status.RECOVERED,
            sequences=tuple(certificate.close(model, ids) for ids in batch),
            evidence=(0.0,) * len(batch),
            margins=(),
            tokens=tokens_of(batch),
            verified=True,
            reason="",
        )
        return reading._replace(answer=answer, sequences=batch)

    def _suits(self, attack: Single) -> bool:
        """Whether an attack that can work may read more than the others do."""
        single = self._seen.update.num_examples == 1
        if isinstance(attack, PositionMarginals):
            # Of a batch it guesses which words belong together: others do it better, but for Adam.
            return single or not self._seen.knowledge.adds_up
        if isinstance(attack, QueryGradients):
            return not single  # the closed form reads one text, and proves it
        if isinstance(attack, StepPeeling):
            several = (self._seen.knowledge.local_steps or 1) > 1 and self.rest is self.whole
            return several and self._seen.knowledge.adds_up
        if isinstance(attack, StatePursuit):
            # A gradient of whole matrices has a span, with dropout, too, which tells more. Where no
            # text is proved by it, something blurs it, or the batch fills it. With dropout, and
            # where numbers are missing, matching reads more of decoders with a table of positions.
            undropped = replace(self.whole.knowledge, dropout=False)
            spans = (
                certificate.is_linear(replace(self.whole, knowledge=undropped))
                and not self._has_adapters()
            )
            complete = certificate.is_linear(self.whole) and not self._lacks_numbers()
            more = self.rest is self.whole and (self._is_rotary() or complete)
            return (not spans or more) and self._is_pursued_in_time()
        if isinstance(attack, MaximumLikelihood):
            # Where there is no noise the others prove what they read.
            known = certificate.is_linear(self.whole)
            few = self._seen.update.num_examples <= MOST_TEXTS
            return few and known and is_blurred(self.whole, self._model)
        return True

    def _has_adapters(self) -> bool:
        """Whether adapters were trained."""
        return any(name.endswith(LORA_A) for name in self._seen.update.tensors)

    def _has_no_span(self) -> bool:
        """Whether rows are not mixes of hidden states: signs, or rounded or missing numbers.

        Missing ones count of rotary models alone, of which `state_pursuit` reads more then, and
        numbers of few bits of the others alone: `dager` reads more of rotary models.
        """
        seen, of_layers = self.whole, self._of_layers()
        if not seen.knowledge.adds_up:
            return True
        coarse = coarseness(seen, of_layers) if of_layers else EXACT
        if coarse is EXACT:
            return False
        return not coarse.few_bits if self._is_rotary() else not self._lacks_numbers()

    def _is_rotary(self) -> bool:
        """Whether the model has no table of positions."""
        return self._model.family.position_embedding is None

    def _of_layers(self) -> list[str]:
        """Returns the names of the tensors of layers."""
        layers = self._model.family.layers
        return [name for name in self._seen.update.tensors if name.startswith(layers)]

    def _is_masked(self) -> bool:
        """Whether a part of the numbers of layers came as they were, and zeros for the others."""
        of_layers = self._of_layers()
        return bool(of_layers) and coarseness(self.whole, of_layers).kept < 1

    def _lacks_numbers(self) -> bool:
        """Whether numbers of layers are missing."""
        tensors = self._seen.update.tensors
        return certificate.lacks_numbers(tensors[name] for name in self._of_layers())

    def _is_long(self) -> bool:
        """Whether a text is longer than a head is wide, as far as rows of positions show."""
        model = self._model
        rows_PD = self._seen.update.tensors.get(model.family.position_embedding or "")
        if rows_PD is None:
            return False
        width = model.hidden_size // model.family.first_block(model.module).num_heads
        return int(rows_PD.any(1).sum()) > width

    def _timed(self, attack: Single, clues: Clues) -> Single | None:
        """Returns an attack with its time and the settings of this one; None: there is no time."""
        left = self._clock.left()
        if isinstance(attack, PositionMarginals):
            # Others, too, read batches whose gradient is known.
            share = 1.0 if self.whole is self._seen else _SORTING
            return replace(attack, seconds=share * left)
        if isinstance(attack, Lamp):
            return self._timed_lamp(attack, clues)
        if clues.sequences:
            # What was read is worth nothing if there is no time to choose from it.
            left = Reserve(self._pace, self.rest, clues.sequences).before_choice(self._clock)
        if isinstance(attack, MaximumLikelihood):
            single = self._seen.update.num_examples == 1
            seconds = (_NOISY if single else 1.0) * left
            return replace(attack, seconds=seconds, prior=self._settings.prior)
        of_spans = OF_SPANS
        if isinstance(attack, QueryGradients):
            of_spans *= _LONG_TEXTS
        elif isinstance(attack, Keyspan) and self._is_matched_better():
            of_spans = _BESIDE_MATCHING
        return replace(attack, seconds=of_spans * left)

    def _is_pursued_in_time(self) -> bool:
        """Whether `state_pursuit` can begin before what was read must be chosen from."""
        if not self.findings.read:
            return True  # an answer that is late is better than none
        reserve = Reserve(self._pace, self.rest, self.findings.unproved(self._most))
        late = reserve.pursuit > reserve.before_choice(self._clock)
        self._clock.rang |= late
        return not late

    def _is_matched_better(self) -> bool:
        """Whether gradient matching is likely to read more than `keyspan` does."""
        # Of a rotary model matching reads few words.
        causal = self._model.family.causal and not self._is_rotary()
        unproved = causal and Dager.kind in self.findings.answers
        # Looked at last: it is measured.
        return unproved and Reserve(self._pace, self.rest, ()).matching <= self._clock.left()

    def _timed_lamp(self, attack: Lamp, clues: Clues) -> Lamp | None:
        """Returns gradient matching with its time and settings; None: there is no time."""
        reserve = Reserve(self._pace, self.rest, clues.sequences)
        if clues.sequences and reserve.answer > self._clock.left():
            self._clock.rang = True  # the first step alone would make the answer late
            return None
        own = self._settings
        seconds = reserve.before(self._clock)
        return replace(attack, seconds=seconds, prior=own.prior, steps=own.steps)

    def _observed(self) -> Mapping[str, Tensor]:
        """Returns the gradient that sequences are compared by: what is known well of it."""
        complete = self._complete if self.rest is self.whole else None
        return complete or certificate.as_gradient(self.rest)

    def _choice(self, pool: Sequence[Ids]) -> Choice:
        """Returns the sequences of a pool that explain what is left best.

        A long pool is cut to what can be compared in a part of the time that is left. Out of time,
        it is what was read first: attacks that came late had the least time. Without a known head
        no gradient can be compared, and it is what most attacks read.
        """
        special, rest = self._model.special_ids(), self.rest
        pool = [ids for ids in dict.fromkeys(pool) if not special.issuperset(ids)]
        if not pool:
            return NO_CHOICE
        if self._seen.knowledge.own_head:
            answers = [answer.sequences or () for answer in self.findings.answers.values()]
            votes = {ids: sum(ids in sequences for sequences in answers) for ids in pool}
            pool = sorted(pool, key=votes.__getitem__, reverse=True)
            return Choice((), dict.fromkeys(pool[: rest.update.num_examples], 1.0), 1.0)
        reserve, size = Reserve(self._pace, rest, pool), rest.update.num_examples
        most = reserve.gradients_in(_CHOOSING * self._clock.left()) // directions(self._model)
        if most < min(size, len(pool)):
            self._clock.rang = True
            kinds = [*self.findings.answers, None]
            pool = sorted(pool, key=lambda ids: kinds.index(self.findings.read.get(ids)))
            return Choice((), dict.fromkeys(pool[:size], 1.0), 1.0)
        pool = pool[:most]
        pairs = compare(self._model, pool, self._observed(), noise_of(rest))
        until = Clock(_CHOOSING * self._clock.left())
        picks = choose(pairs, size, until)
        self._clock.rang |= until.rang
        batch = [
            Labelled(pool[pairs.sequence[k]], pairs.label[k], weight)
            for k, weight in zip(picks, pairs.weights(picks).tolist(), strict=True)
        ]
        left = pairs.residual(picks)
        evidence: dict[Ids, float] = {}
        for pick, guess in zip(picks, batch, strict=True):
            without = pairs.residual([k for k in picks if k != pick])
            evidence[guess.ids] = min(left / without, evidence.get(guess.ids, 1.0))
        return Choice(tuple(batch), dict(sorted(evidence.items(), key=lambda pair: pair[1])), left)

    def _mended(self, pool: Sequence[Ids], show: Callable[[Ids, float], None]) -> Choice:
        """Returns the choice of a pool, with words that explain what is left better."""
        choice, model, rest = self._choice(pool), self._model, self.rest
        if not choice.batch or self._clock.up():
            return choice
        reserve = Reserve(self._pace, rest, pool)
        until = self._clock.before(reserve.answer)  # it leaves time for the answer
        better = sharpened(
            model,
            choice.batch,
            self._observed(),
            self._rng,
            until,
            show,
            noise_of(rest),
            lambda batch: leaves_noise(model, batch, rest, self._rng, until),
            reserve.gradient,
        )
        self._clock.rang |= until.rang
        before = [guess.ids for guess in choice.batch]
        if {*better} == {*before}:
            return choice
        again = self._choice([*better, *before])
        return again if again.batch else choice

    def settled(self) -> Reconstruction:
        """Returns the answer of the last attack, which settled the whole batch by itself."""
        *_, (kind, answer) = self.findings.answers.items()
        sequences = tuple(certificate.close(self._model, ids) for ids in self.findings.whole)
        likely = [True] * len(sequences)
        if not answer.verified:
            likely = answer.diagnostics.get("likely", likely)
        own = {"from": [kind] * len(sequences), "likely": likely}
        answer = answer.with_diagnostics(**own, **self._common_diagnostics())
        return replace(answer, sequences=sequences, tokens=tokens_of(sequences))

    def answer(self, choice: Choice) -> Reconstruction:
        """Returns what is proved, and beside it the choice that explains the rest best."""
        findings, size = self.findings, self._seen.update.num_examples
        repeats = occurrences(self._model, findings.members, self._seen)
        members = zip(findings.members, repeats, strict=True)
        proved = tuple(member.ids for member, n in members for _ in range(n))
        certain = {*proved, *findings.whole, *findings.stepped}
        likely, diagnostics = self._likely(choice)
        recovered = (answer.status == Status.RECOVERED for answer in findings.answers.values())
        others = (ids for ids in choice.evidence if ids not in findings.stepped)
        batch = (*proved, *findings.whole, *findings.stepped, *others)
        if not (batch or findings.named) or not (certain or likely or any(recovered)):
            reasons = "; ".join(
                f"{kind}: {answer.reason}" for kind, answer in findings.answers.items()
            )
            diagnostics |= self._common_diagnostics()
            return Reconstruction.abstained(reasons, **diagnostics)
        verdict = self._verdict(batch)
        verified = verdict.verified
        if verified:
            batch = tuple(ids for ids, times in verdict.repeats.items() for _ in range(times))
        batch = batch[:size]
        closed = tuple(certificate.close(self._model, ids) for ids in batch)
        return Reconstruction(
            status=Status.RECOVERED,
            sequences=closed or None,
            evidence=tuple(0.0 if verified else choice.evidence.get(ids, 0.0) for ids in batch),
            tokens=tokens_of(
                closed if verified or not findings.named else [findings.named, *certain]
            ),
            diagnostics={
                **diagnostics,
                **verdict.diagnostics(),
                **self._common_diagnostics(),
                "from": [findings.read.get(ids, Auto.kind) for ids in batch],
                "likely": [verified or ids in certain | likely for ids in batch],
            },
            verified=verified,
            reason=verdict.remark()
            if verified or proved
            else self._not_proved(batch, bool(likely)),
        )

    def _not_proved(self, batch: Sequence[Ids], likely: bool) -> str:
        """Returns what an answer of which nothing is proved is."""
        if not batch:
            return "nothing proved: tokens of the batch, without their order"
        if self._seen.knowledge.own_head:
            return "nothing proved, because the head is not known: what most attacks read"
        if likely:
            return "nothing proved: the likeliest sequences"
        return "nothing proved: guesses that explain no more than random texts do"

    def _likely(self, choice: Choice) -> tuple[set[Ids], dict[str, Any]]:
        """Returns the guesses that explain more than chance does, and what was compared."""
        if not choice.batch:
            return set(), {}
        batch, residual = choice.batch, {"residual": choice.residual}
        reserve = Reserve(self._pace, self.rest, [guess.ids for guess in batch])
        spare = reserve.gradients_in(self._clock.left()) - len(batch)
        if spare < FEWEST:
            self._clock.rang = True
            return set(), {**residual, "not_compared": True}
        observed, noise = self._observed(), noise_of(self.rest)
        compared = worth(self._model, batch, observed, self._rng, noise, min(spare, PLACEBOS))
        likely = {guess.ids for guess, good in zip(batch, compared.likely, strict=True) if good}
        nats = {"nats": list(compared.nats), "nats_by_chance": list(compared.by_chance)}
        return likely, residual | nats

    def _common_diagnostics(self) -> dict[str, Any]:
        """Returns the diagnostics of every answer."""
        answers = self.findings.answers
        # The last attack had all the time that was left.
        late = any(answer.diagnostics.get("time_up") for answer in [*answers.values()][-1:])
        return {
            "version": Auto.version,
            "asked": {kind: str(answer.status) for kind, answer in answers.items()},
            **({"time_up": True} if self._clock.rang or late else {}),
        }

    def _verdict(self, batch: Sequence[Ids]) -> certificate.Verdict:
        """Returns what recomputing the gradient of a batch proves, if it can be compared."""
        if noise_of(self._seen) is not None:
            return certificate.NOTHING_PROVED
        return certificate.judge(self._model, batch, self._seen, self._clock)


def read_with(
    attack: Single,
    seen: Observation,
    model: LanguageModel,
    clues: Clues,
    rng: torch.Generator,
    on_progress: Show,
) -> Reading:
    """Runs an attack of the ensemble.

    Sequences go from attack to attack in one form: that of attacks on spans, which do not see the
    last target of next-token training (`certificate.close` puts it back).

    Args:
        attack: With the time that it may take.
        seen: What is left of the update.
        model: At the broadcast weights.
        clues: What the attacks before it found.
        rng: A random stream.
        on_progress: Called with the progress.
    """
    if isinstance(attack, MaximumLikelihood):
        return attack.reading(seen, model, rng, on_progress, clues.sequences)
    if not isinstance(attack, Lamp):
        return attack.reading(seen, model, rng, on_progress)
    whole = replace(
        clues, sequences=tuple(certificate.close(model, ids) for ids in clues.sequences)
    )
    (match,) = attack.matches(
        [seen], model, rngs=[rng], report=lambda _, how: on_progress(how), clues=[whole]
    )
    opened = tuple(certificate.opened(model, ids) for ids in match.sequences)
    return match._replace(sequences=opened)
