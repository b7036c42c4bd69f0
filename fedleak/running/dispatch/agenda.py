"""What is left to attack, kept up to date: nothing here looks through a whole run twice."""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Sequence, Set
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from fedleak.attacks import Batched, is_slow
from fedleak.config.components import NamedAttack
from fedleak.config.federation.lookup import absent
from fedleak.store.run import Key, Run
from fedleak.store.shards import Shard

LOOKS = 100
"""Captures that are looked for at a time. They come in the order of rounds, if not of clients."""


class Work(NamedTuple):
    """An attack and the captures that it takes together."""

    attack: NamedAttack
    keys: list[Key]


@dataclass(slots=True)
class _Awaited:
    place: int
    work: Work
    missing: set[Key]


class Agenda:
    """The work that is left, in the order in which it is handed out.

    Quick attacks go before slow ones, and earlier captures before later ones. Captures that an
    attack takes together are ready once all of them are here. A try that failed is repeated
    capture by capture: another capture may have been the reason.

    Args:
        work: All that there is to do, as `groups` returns it.
        answered: Captures and names of attacks that need no work.
        failed: Captures and names of attacks of which at least one try has failed.
    """

    def __init__(
        self,
        work: Sequence[Work],
        answered: Set[tuple[Key, str]],
        failed: Set[tuple[Key, str]],
    ) -> None:
        self._ready: list[tuple[bool, Key, int, Work]] = []
        self._awaited: dict[Key, list[_Awaited]] = defaultdict(list)
        self._quick_left: set[tuple[Key, str]] = set()
        self._places = itertools.count()
        for attack, group in work:
            left = [key for key in group if (key, attack.name) not in answered]
            if not is_slow(attack.attack):
                self._quick_left |= {(key, attack.name) for key in left}
            alone = [[key] for key in left if (key, attack.name) in failed]
            together = [key for key in left if (key, attack.name) not in failed]
            for keys in [*alone, together]:
                awaited = _Awaited(next(self._places), Work(attack, keys), set(keys))
                for key in keys:
                    self._awaited[key].append(awaited)

    def arrived(self, key: Key) -> None:
        """Notes that a capture is here."""
        for awaited in self._awaited.pop(key, ()):
            awaited.missing.discard(key)
            if not awaited.missing:
                self._add(awaited.place, awaited.work)

    def absent(self, key: Key) -> None:
        """Notes that a capture will not come: work that waited for it goes on without it."""
        for awaited in self._awaited.pop(key, ()):
            self._quick_left.discard((key, awaited.work.attack.name))
            awaited.missing.discard(key)
            awaited.work.keys.remove(key)
            if awaited.work.keys and not awaited.missing:
                self._add(awaited.place, awaited.work)

    def close(self) -> None:
        """Notes that no more captures come: incomplete groups are ready without the rest."""
        for key in [*self._awaited]:
            self.absent(key)

    def again(self, attack: NamedAttack, key: Key) -> None:
        """Notes that a try failed and is to be repeated."""
        self._add(next(self._places), Work(attack, [key]))

    def answered(self, key: Key, name: str) -> None:
        """Notes that there is an answer."""
        self._quick_left.discard((key, name))

    @property
    def quick_left(self) -> bool:
        """Whether answers of quick attacks are still to come."""
        return bool(self._quick_left)

    @property
    def ready(self) -> bool:
        """Whether there is something to hand out."""
        return bool(self._ready)

    def take(self, *, slow: bool) -> Work | None:
        """Returns the next work, and forgets it; a slow attack only if `slow`."""
        may = self._ready and (slow or not self._ready[0][0])
        return heapq.heappop(self._ready)[-1] if may else None

    def _add(self, place: int, work: Work) -> None:
        slow = is_slow(work.attack.attack)  # the quick ones come first
        heapq.heappush(self._ready, (slow, work.keys[0], place, work))


class Arrivals:
    """Which captures and models have come; it costs a few looks, however many there are.

    Args:
        run: The run directory.
        expected: The captures that a complete run has, in order.
    """

    def __init__(self, run: Run, expected: Sequence[Key]) -> None:
        self._run, self._kept = run, {key.round for key in expected}
        captured = set(run.captures.all_keys())
        self.here = sum(key in captured for key in expected)
        self._awaited = dict.fromkeys(key for key in expected if key not in captured)
        self._first = [key for key in expected if key in captured]
        self._latest = 1
        self.round()

    def new(self, *, everywhere: bool = False) -> list[Key]:
        """Returns the captures that have come since the last call, in order.

        Args:
            everywhere: Look for all captures, not only for the next in the order of rounds.
        """
        if everywhere:
            of_now = set(self._run.captures.all_keys()) if self._awaited else set()
            arrivals = [key for key in self._awaited if key in of_now]
        else:
            next_ones = itertools.islice(self._awaited, LOOKS)
            arrivals = [key for key in next_ones if self._run.captures.has(key)]
        for key in arrivals:
            del self._awaited[key]
        self.here += len(arrivals)
        first, self._first = self._first, []
        return first + arrivals

    def absent(self) -> list[Key]:
        """Returns captures that will not come, as became known since the last call."""
        gone = [key for key in sorted(absent(self._run)) if key in self._awaited]
        for key in gone:
            del self._awaited[key]
        return gone

    def round(self) -> int:
        """Returns the round in training; once all are trained, one more than their number."""
        latest = self._latest
        while self._run.models.has(latest + 1):
            latest += 1
        # A round that is not kept loses its model too, perhaps before anybody looked for it.
        if not {latest, latest + 1} <= self._kept:
            latest = max([latest, *self._run.models.rounds()])
        self._latest = latest
        return latest


def groups(
    named: Sequence[NamedAttack], expected: Sequence[Key], at_once: int | None = None
) -> list[Work]:
    """Returns which captures of a round go to which attack together, in the order of captures.

    A group has at most as many captures as the attack takes in one call, and at most `at_once`. It
    depends on the experiment alone, so a run that was killed makes the same groups again.
    """
    batches = []
    for _, of_round in itertools.groupby(expected, key=lambda key: key.round):
        keys = list(of_round)
        for named_attack in named:
            size = named_attack.attack.at_once if isinstance(named_attack.attack, Batched) else 1
            size = size if at_once is None else min(size, at_once)
            size = ceil(len(keys) / ceil(len(keys) / size))  # nearly equal: no capture is alone
            batches += [Work(named_attack, keys[i : i + size]) for i in range(0, len(keys), size)]
    return sorted(batches, key=lambda work: work.keys[0])


def part_of(work: Sequence[Work], shard: Shard | None) -> list[Work]:
    """Returns a shard's part of the work, in its order; for None all of it.

    The work of each attack is divided among all shards, so that no shard gets all of a slow one.
    """
    if shard is None:
        return list(work)
    own = shard.part(sorted(work, key=lambda task: task.attack.name))
    return sorted(own, key=lambda task: task.keys[0])
