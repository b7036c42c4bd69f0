"""How far a run is, and how long what is left may take."""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from fedleak import attacks
from fedleak.config.components import NamedAttack
from fedleak.store.run import Key


class UnderWay(NamedTuple):
    """What a worker is doing.

    Attributes:
        attack: Its name.
        round, clients: The captures it is attacking.
        progress: How far it is with a client, as far as the attack has said.
    """

    attack: str
    round: int
    clients: tuple[int, ...]
    progress: Mapping[int, attacks.Progress]


class Finished(NamedTuple):
    """An answer that has just come; `seconds`: of the attack alone, None if it was not called."""

    attack: str
    key: Key
    status: str
    seconds: float | None


class RunProgress(NamedTuple):
    """How far a run is, and what its busy workers are doing.

    Attributes:
        captures, captures_expected, answers, answers_expected: How many are here, of how many.
        under_way: What each busy worker does.
        finished: The answers since the last time.
        rounds, rounds_expected: How many rounds of training are complete, of how many.
        seconds_left: The estimated time of the attacks that are left; None: not known yet.
        seconds_most: The most time that those attacks among them with a time limit take.
    """

    captures: int
    captures_expected: int
    answers: int
    answers_expected: int
    under_way: tuple[UnderWay, ...] = ()
    finished: tuple[Finished, ...] = ()
    rounds: int = 0
    rounds_expected: int = 0
    seconds_left: float | None = None
    seconds_most: float = 0.0


class Pace:
    """How long attacks take, for an estimate of the time that is left.

    Args:
        named: The attacks.
        left: Captures and names of attacks that have no answer yet.
    """

    def __init__(self, named: Sequence[NamedAttack], left: Set[tuple[Key, str]]) -> None:
        limits = {entry.name: getattr(entry.attack, "seconds", None) for entry in named}
        self._limits = {n: limit for n, limit in limits.items() if isinstance(limit, int | float)}
        self._left = Counter(name for _, name in left)
        self._took: Counter[str] = Counter()
        self._count: Counter[str] = Counter()

    def answered(self, name: str, seconds: float) -> None:
        """Notes an answer."""
        self._left[name] -= 1
        self._count[name] += 1
        self._took[name] += seconds  # type: ignore[assignment]

    def seconds_left(self, num_workers: int) -> float | None:
        """Returns the estimate; None if an attack that is left has not answered once."""
        left = {name: count for name, count in self._left.items() if count > 0}
        if not left.keys() <= self._count.keys():
            return None
        seconds = (count * self._took[name] / self._count[name] for name, count in left.items())
        return sum(seconds) / max(1, num_workers)

    def seconds_most(self, num_workers: int) -> float:
        """Returns the most time that attacks take that are left and have a time limit."""
        most = sum(self._left[name] * limit for name, limit in self._limits.items())
        return most / max(1, num_workers)
