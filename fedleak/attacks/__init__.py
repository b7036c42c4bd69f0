"""What an attacker does with one observation: one file per attack.

An attack is a frozen dataclass of its hyper-parameters with a `kind`, called as
`attack(observation, model, rng=generator)` with the model at the broadcast weights. It returns a
`Reconstruction` and changes neither observation nor weights. It cannot import the truth, the
data, the metrics or the run directory (import-linter checks that). So all that an attack scores
comes from the update and the granted facts. Nothing checks the imports of an attack that another
package brings, so lists and reports name its package. `fedleak list` prints the docstring's first
line. An attack that takes several observations at once is `Batched`. An attack that takes minutes,
not seconds, has `slow = True`: the others go first. An attack that takes milliseconds and belongs
to every run has `always = True`. An attack that reads few tensors is `Selective`. An attack that
runs an outside program has `outside = True`: no import contract holds that program.
"""

import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch

from fedleak.attacks.reconstruction import Reconstruction
from fedleak.models import LanguageModel
from fedleak.models.family import ModelFamily
from fedleak.training.observation import Observation, UpdateKind
from fedleak.util.plugins import discover, no_dataclass_of

CALIBRATED = "calibrated"
"""A score of membership that an update has only if its round has another update."""


@dataclass(frozen=True, kw_only=True)
class AttackSetting:
    """What is known before an attack sees an update: enough to refuse the attack early.

    Attributes:
        update: Gradient or delta.
        shared: Names of the parameters in the update.
        knows: Names of the facts that the attacker has.
        family: The architecture.
        num_layers: Its transformer blocks.
        task: "sequence-classification" or "causal-lm".
        server_mode: The kind of the malicious server's mode; None: the server is honest.
        response: The loss counts the tokens of responses alone.
    """

    update: UpdateKind
    shared: frozenset[str]
    knows: frozenset[str]
    family: ModelFamily
    num_layers: int
    task: str
    server_mode: str | None = None
    response: bool = False

    @classmethod
    def of(cls, seen: Observation, model: LanguageModel) -> "AttackSetting":
        """Returns the setting of an observation."""
        return cls(
            update=seen.update.kind,
            shared=frozenset(seen.update.tensors),
            knows=frozenset(seen.knowledge.granted()),
            family=model.family,
            num_layers=model.num_layers,
            task=model.task,
            server_mode=seen.knowledge.server_mode,
            response=bool(model.response_template),
        )

    @property
    def tables(self) -> frozenset[str]:
        """Names of the embeddings of words and of positions; positions may be rotary."""
        both = (self.family.word_embedding, self.family.position_embedding)
        return frozenset(name for name in both if name is not None)

    def lacks(self, *needed: str) -> str | None:
        """Returns an obstacle if parameters are not shared, or None."""
        missing = sorted(set(needed) - self.shared)
        if not missing:
            return None
        return f"needs {' and '.join(missing)}, and clients send none: see update.share"


class Attack(Protocol):
    """What every attack has.

    Attributes:
        kind: Its name in experiment files.
        uses: Grantable facts that it makes use of where they are granted.
    """

    kind: ClassVar[str]
    uses: ClassVar[frozenset[str]]

    def obstacle(self, setting: AttackSetting) -> str | None:
        """Returns why the attack cannot work in this setting and what would mend it, or None."""
        ...

    def __call__(
        self, seen: Observation, model: LanguageModel, *, rng: torch.Generator
    ) -> Reconstruction:
        """Returns what the attack reads out of the observation."""
        ...


class Progress(NamedTuple):
    """How far an iterative attack is with one observation.

    Attributes:
        step, steps: Steps done, and in all.
        loss: The value that it minimises; not a number before the first one is known.
        text: The best text so far.
        phase: What is under way, such as "starts 3/64".
    """

    step: int
    steps: int
    loss: float
    text: str
    phase: str = ""


OnProgress = Callable[[int, Progress], None]
"""(index of the observation, how far the attack is with it) -> None."""

Show = Callable[[Progress], None]
"""How far an attack is with its only observation -> None."""


@runtime_checkable
class Equipped(Attack, Protocol):
    """An attack that needs something that may be missing, such as a language model."""

    def check_equipment(self) -> None:
        """Refuses equipment that is missing or of no use. Called once, before anything is trained.

        Raises:
            ConfigError: What is wrong, and what to do.
        """
        ...


@runtime_checkable
class Selective(Attack, Protocol):
    """An attack that reads few tensors of an update, and names them."""

    def reads(self, setting: AttackSetting) -> frozenset[str]:
        """Returns the names of the parameters that it reads; it works as well without the others.

        A proof recomputes every tensor that it is given, so it covers only the tensors named here.
        """
        ...


@runtime_checkable
class Asked(Attack, Protocol):
    """An attack that scores the texts of a list: `Knowledge.candidates`.

    The audit makes the list, so that the attack sees no more of it than an attacker would.
    """

    @property
    def candidates(self) -> str | None:
        """The file that the audit reads the list from; None: it makes one for each update."""
        ...


class Step(NamedTuple):
    """An attack that is part of another attack, in a setting.

    Attributes:
        kind: Its name.
        purpose: Its task there.
        obstacle: Why it does not take part; None: it does.
    """

    kind: str
    purpose: str
    obstacle: str | None


@runtime_checkable
class Planned(Attack, Protocol):
    """An attack that runs other attacks, and lists them beforehand."""

    def plan(self, setting: AttackSetting) -> Sequence[Step]:
        """Returns the other attacks in the order in which they run, also those that cannot work."""
        ...


@runtime_checkable
class Batched(Attack, Protocol):
    """An attack that takes several observations of one round and model at once.

    Each answer is the same as for its observation alone, and calling the attack is `many` with one
    observation. The exception is a score of `membership` that compares the updates of a call: a
    server that sees one update of a round sees the others.
    """

    @property
    def at_once(self) -> int:
        """How many observations one call takes at most.

        A `ClassVar` will do. It is no setting of the attack, because answers depend on it only by
        rounding; `workers.at_once` lowers it if memory is short.
        """
        ...

    def many(
        self,
        seen: Sequence[Observation],
        model: LanguageModel,
        *,
        rngs: Sequence[torch.Generator],
        report: OnProgress,
    ) -> list[Reconstruction]:
        """Returns what the attack reads out of each observation.

        Args:
            seen: At most `at_once` observations of one round.
            model: At the weights of that round.
            rngs: The random stream of each observation.
            report: Takes the progress. It costs next to nothing, so it may be called at every step.
        """
        ...


class OneByOne(ABC):
    """Base class of an attack on one observation that reports its progress: makes it `Batched`."""

    at_once: ClassVar[int] = 1

    @abstractmethod
    def __call__(
        self,
        seen: Observation,
        model: LanguageModel,
        *,
        rng: torch.Generator,
        on_progress: Show = lambda progress: None,
    ) -> Reconstruction:
        """Returns what the attack reads out of the observation."""

    def many(
        self,
        seen: Sequence[Observation],
        model: LanguageModel,
        *,
        rngs: Sequence[torch.Generator],
        report: OnProgress,
    ) -> list[Reconstruction]:
        """Returns what the attack reads out of each observation, one after the other."""
        return [
            self(observation, model, rng=rng, on_progress=partial(report, number))
            for number, (observation, rng) in enumerate(zip(seen, rngs, strict=True))
        ]


def flaw(cls: type) -> str | None:
    """Returns why a class is no attack, and what it lacks; None if it is one."""
    if reason := no_dataclass_of(object, cls):
        return reason
    if not isinstance(getattr(cls, "uses", None), Set):
        return "it does not say which facts it uses: give it `uses: ClassVar = frozenset()`"
    # Each class has the `__call__` that makes an instance.
    methods = {name for base in cls.__mro__ for name in vars(base)}
    missing = sorted({"obstacle", "__call__"} - methods)
    return f"it has no method {missing[0]}: see Attack in fedleak.attacks" if missing else None


def read_by(attack: Attack, setting: AttackSetting) -> frozenset[str]:
    """Returns the names of the shared parameters that an attack reads: all, if it does not say."""
    if isinstance(attack, Selective):
        return setting.shared & frozenset(attack.reads(setting))
    return setting.shared


def is_slow(attack: Attack) -> bool:
    """Returns whether an attack takes minutes: it waits until the others have answered."""
    return bool(getattr(attack, "slow", False))


def always_on() -> list[str]:
    """Returns the kinds that are on in every run: cheap attacks with `always = True`.

    Attacks of other packages are left out: a run must not depend on what else is installed.
    """
    own = kinds().keys() - discover(sys.modules[__name__]).foreign().keys()
    return sorted(kind for kind in own if getattr(kinds()[kind], "always", False))


@cache
def kinds() -> Mapping[str, type[Attack]]:
    """Returns the attacks, fedleak's own and those of others, by kind."""
    return discover(sys.modules[__name__]).kinds


def settings(attack: Attack) -> dict[str, Any]:
    """Returns an attack's kind and hyper-parameters, as they are read back from JSON."""
    table = {"kind": attack.kind} | asdict(attack)  # type: ignore[call-overload]
    read_back: dict[str, Any] = json.loads(json.dumps(table, default=str))
    return read_back


def unchecked(kinds: Iterable[str]) -> list[str]:
    """Returns a sentence for each kind that no import contract holds: it is the work of others."""
    foreign = discover(sys.modules[__name__]).foreign()
    return [
        f"{kind} {origin}: fedleak's import contract does not cover it, so nothing here rules out "
        "that it read the truth from the disk"
        for kind in sorted(set(kinds))
        if (origin := _origin(kind, foreign)) is not None
    ]


def _origin(kind: str, foreign: Mapping[str, str]) -> str | None:
    """Returns who does the work of an attack that is not fedleak's own, or None."""
    if kind in foreign:
        return f"comes from {foreign[kind]}"
    return "runs an outside program" if getattr(kinds().get(kind), "outside", False) else None
