"""A share of a run's attacks, for a process that may be on another machine.

    runs/<name>/
      shard-2of4/                 files that only the second of four shards writes
        shard.json                its attacks, and whether all of its answers are there
        reconstructions.jsonl     its answers, as in the run
        attempts.jsonl            its tries that crashed, as in the run
        damaged.jsonl log.txt     as in the run
        .lock

The run directory is the queue: shards share it, and each has a file of answers of its own, so that
no two machines append to one file. Readers read the answers of the run and of all shards.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeVar

from fedleak.attacks.reconstruction import Status
from fedleak.store.lines import Document, Lines, Record
from fedleak.store.records import ATTEMPTS, Answer, answers
from fedleak.store.run import Damaged, Key, Run
from fedleak.util.errors import ConfigError, FedleakError

T = TypeVar("T")

MOST = 10_000
"""Shards of a run."""

_FOLDER = re.compile(r"shard-(\d{1,5})of(\d{1,5})")


@dataclass(frozen=True, order=True)
class Shard:
    """One share of several.

    Attributes:
        count: How many shares there are.
        number: Which one, from 1.
    """

    count: int
    number: int

    @classmethod
    def parse(cls, text: str) -> "Shard":
        """Reads `i/n`.

        Raises:
            ConfigError: It is not that, or there is no such share.
        """
        match = re.fullmatch(r"(\d{1,5})/(\d{1,5})", text, re.ASCII)
        shard = cls(count=int(match[2]), number=int(match[1])) if match else None
        if shard is None or not 1 <= shard.number <= shard.count <= MOST:
            raise ConfigError(
                f"--shard {text!r}: give a number and how many there are, from 1/n to n/n (n is at "
                f"most {MOST:,}), such as 2/4"
            )
        return shard

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @property
    def folder(self) -> str:
        """The name of its folder, in the run directory."""
        return f"shard-{self.number}of{self.count}"

    def part(self, values: Sequence[T]) -> list[T]:
        """Returns every n-th value, so that all shards together have each value once."""
        return list(values[self.number - 1 :: self.count])

    def lines(self, lines: Lines[T]) -> Lines[T]:
        """Returns this shard's own file in place of the run's."""
        return replace(lines, name=f"{self.folder}/{lines.name}")


class Share(Record):
    """The work that a shard was last started with: its shard.json.

    Attributes:
        attacks: Names of the attacks.
        complete: Whether it has all of its answers.
    """

    attacks: tuple[str, ...]
    complete: bool


def share(shard: Shard) -> Document[Share]:
    """Returns the file that says whether a shard is complete."""
    remedy = f"`fedleak attack RUN --shard {shard}` makes it anew"
    return Document(f"{shard.folder}/shard.json", Share, remedy)


@contextmanager
def locked(run: Run, shard: Shard) -> Iterator[None]:
    """Holds a shard: meanwhile other shards go on, and nothing else can use the run.

    The shard's log keeps what this process logs.

    Raises:
        FedleakError: Another process has the shard, or all of the run.
    """
    with run.shared(), run.inside(shard.folder).lock():
        yield


def begun(run: Run) -> list[Shard]:
    """Returns the shards that have a folder, in order."""
    names = (_FOLDER.fullmatch(path.name) for path in run.path.glob("shard-*of*"))
    return sorted(Shard(count=int(m[2]), number=int(m[1])) for m in names if m)


def shares(run: Run) -> dict[Shard, Share | None]:
    """Returns the shares of the shards that have begun; None where shard.json cannot be read."""
    shares_by_shard: dict[Shard, Share | None] = {}
    for shard in begun(run):
        try:
            shares_by_shard[shard] = run.read_document(share(shard))
        except FedleakError:
            shares_by_shard[shard] = None
    return shares_by_shard


def attacks_in(run: Run, shard: Shard) -> list[str]:
    """Returns the names of the attacks that have an answer in a shard, whatever shard.json says."""
    given = run.readable(shard.lines(answers(run.fingerprint())))
    return sorted({answer.attack for answer in given})


def read_answers(run: Run, vocabulary: int | None = None) -> list[Answer]:
    """Returns the answers of a run, those of its shards too, one for each update and attack.

    Args:
        run: The run directory.
        vocabulary: How many token ids the model has; None: not known here.

    Raises:
        FedleakError: A line cannot be read.
    """
    return _merged(run, run.rows, vocabulary)


def salvage_answers(run: Run, vocabulary: int | None = None) -> list[Answer]:
    """Returns what can be read, as `read_answers` does, and moves the rest to damaged.jsonl.

    The caller holds the run's lock.
    """
    return _merged(run, run.salvage, vocabulary)


def readable_answers(run: Run) -> list[Answer]:
    """Returns what can be read, as `read_answers` does, while shards may be writing."""
    return _merged(run, run.readable)


def answers_for(run: Run, shard: Shard) -> list[Answer]:
    """Returns the answers that a shard need not give again, and changes nothing.

    A line that cannot be read is no answer. A failure counts only if it is the shard's own: another
    machine may do better.
    """
    own = run.readable(shard.lines(answers(run.fingerprint())))
    return own + [answer for answer in readable_answers(run) if answer.status != Status.FAILED]


def damaged(run: Run) -> list[Damaged]:
    """Returns the lines that were put aside, of the run and of its shards."""
    of_shards = [
        line.model_copy(update={"file": f"{shard.folder}/{line.file}"})
        for shard in begun(run)
        for line in run.inside(shard.folder).damaged()
    ]
    return run.damaged() + of_shards


def drop_failures(run: Run, shard: Shard | None = None) -> int:
    """Forgets failed answers, so that they are tried again; returns how many.

    Args:
        run: The run directory.
        shard: Forget the failures of this shard only; None: those of the run and of all shards.
    """
    places = [run.inside(chosen.folder) for chosen in (begun(run) if shard is None else [shard])]
    places += [run] if shard is None else []
    return sum(_drop_failures(answers(run.fingerprint()), place) for place in places)


def _drop_failures(lines: Lines[Answer], place: Run) -> int:
    place.salvage(ATTEMPTS)
    failed = {answer.id for answer in place.salvage(lines) if answer.status == Status.FAILED}
    if failed:
        place.keep(ATTEMPTS, lambda attempt: attempt.id not in failed)
        place.keep(lines, lambda answer: answer.id not in failed)
    return len(failed)


def _merged(
    run: Run, read: Callable[[Lines[Answer]], list[Answer]], vocabulary: int | None = None
) -> list[Answer]:
    """Returns one answer for each update and attack: of several, one that did not fail."""
    lines = answers(run.fingerprint(), vocabulary)
    given = chain(read(lines), *(read(shard.lines(lines)) for shard in begun(run)))
    merged: dict[tuple[Key, str], Answer] = {}
    for answer in given:
        if answer.id not in merged or merged[answer.id].status == Status.FAILED:
            merged[answer.id] = answer
    return list(merged.values())
