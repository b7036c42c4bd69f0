"""What is shown while a command works: bars on a terminal, lines elsewhere."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import Progress as RichProgress
from rich.text import Text

from fedleak.util.sanitise import markup, printable

if TYPE_CHECKING:
    from fedleak.models.prior_training import PriorProgress
    from fedleak.running.dispatch.progress import RunProgress, UnderWay

console = Console(emoji=False)  # texts are printed as they are

TURN_SECONDS = 3
"""How long the text of one client is shown if several clients are attacked together."""


def remark(remarks: Iterable[str]) -> None:
    """Prints each remark once."""
    for text in dict.fromkeys(remarks):
        console.print(f"[yellow]note:[/] {markup(text)}")


class Bars(RichProgress):
    """Bars with lines below them."""

    lines: Sequence[Text] = ()

    def get_renderables(self) -> Iterator[RenderableType]:
        """Returns what is shown."""
        yield from super().get_renderables()
        yield from self.lines


def line(doing: "UnderWay", now: float) -> Text:
    """Returns what a worker is doing, in one line; of several clients, one at a time.

    A `Text`, so that no markup in what was read is interpreted.
    """
    if doing.progress:
        turns = sorted(doing.progress.items())
        client, at = turns[int(now / TURN_SECONDS) % len(turns)]
        state = f"client {client}: {at.step}/{at.steps} {at.phase}".rstrip()
        if not math.isnan(at.loss):
            state += f", loss {at.loss:.3g}, {at.text}"
    else:
        state = _clients(doing.clients)
    shown = printable(f"{doing.attack:>9} round {doing.round}, {state}")
    return Text(shown, style="dim", no_wrap=True, overflow="ellipsis")


def _clients(clients: Sequence[int]) -> str:
    """Names the clients of captures; a sum has no single client."""
    if min(clients) < 0:
        return "all clients"
    return f"{'client' if len(clients) == 1 else 'clients'} {', '.join(map(str, clients))}"


@contextmanager
def progress(console: Console) -> Iterator[Callable[..., None]]:
    """Shows the progress of training and attacks, and yields the function that takes it.

    A terminal gets two bars, and below them a line for each busy worker. Elsewhere there is a line
    for each round and answer, without private text.

    Args:
        console: Where to print.
    """
    from fedleak.running.forecast import duration

    if not console.is_terminal:
        yield PlainLines(console)
        return
    limits = PlainLines(console, answers=False)
    with Bars(*_columns("updates"), TextColumn("{task.fields[left]}"), console=console) as bars:
        training, attacks = (
            bars.add_task(name, total=None, left="") for name in ("training", "attacks")
        )

        def show(at: "RunProgress") -> None:
            limits(at)
            known = at.seconds_left is not None and at.answers < at.answers_expected
            left = f"about {duration(at.seconds_left or 0)} left" if known else ""
            bars.update(training, completed=at.captures, total=at.captures_expected)
            bars.update(attacks, completed=at.answers, total=at.answers_expected, left=left)
            if console.file.isatty():  # what is read is private: never for a log
                bars.lines = [line(doing, time.monotonic()) for doing in at.under_way]

        try:
            yield show
        finally:
            bars.lines = ()


class CellProgress:
    """Prints which of several runs is going on; runs to come have the last numbers.

    Args:
        names: Names of the runs to come, in their order.
        total: How many runs there are, with finished ones; None: there are only these.
    """

    def __init__(self, names: Sequence[str], total: int | None = None) -> None:
        self._total = len(names) if total is None else total
        self._numbers = dict(zip(names, count(self._total - len(names) + 1), strict=False))

    def tell(self, name: str, event: str = "") -> None:
        """Prints what has happened to a run; without an event, that it begins."""
        about = f"{self._numbers[name]} of {self._total} {event}".rstrip()
        console.print(f"{about}: {markup(name)}")

    @contextmanager
    def watch(self, name: str) -> Iterator[Callable[..., None]]:
        """Shows the progress of a run, and yields the function that takes it."""
        self.tell(name)
        with progress(console) as show:
            yield show


class PlainLines:
    """Prints a line for each round and answer, and one about time if it is long.

    Args:
        console: Where to print.
        answers: Whether rounds and answers get lines; if not, only the time does.
    """

    def __init__(self, console: Console, *, answers: bool = True) -> None:
        self._console = console
        self._answers = answers
        self._rounds: int | None = None

    def __call__(self, at: "RunProgress") -> None:
        """Prints what is new."""
        from fedleak.running.forecast import WORTH_SAYING_SECONDS, duration

        before, self._rounds = self._rounds, at.rounds
        if before is None and at.seconds_most >= WORTH_SAYING_SECONDS:
            self._print(f"attacks with a time limit take at most {duration(at.seconds_most)}")
        if not self._answers:
            return
        if before is not None and at.rounds > before:
            updates = f"{at.captures} of {at.captures_expected} updates"
            self._print(f"training: round {at.rounds} of {at.rounds_expected}, {updates}")
        about = "" if at.seconds_left is None else f", about {duration(at.seconds_left)}"
        left = at.answers_expected - at.answers + len(at.finished)
        for answer in at.finished:
            left -= 1
            took = "" if answer.seconds is None else f" in {answer.seconds:.1f} s"
            key = f"round {answer.key.round} {_clients((answer.key.client,))}"
            self._print(f"{answer.attack} {key}: {answer.status}{took}; {left} left{about}")

    def _print(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


def _columns(counted: str) -> tuple[ProgressColumn, ...]:
    """Returns the columns of a bar, and what it counts."""
    named, unit = TextColumn("{task.description:>9}"), TextColumn(counted)
    return named, BarColumn(), MofNCompleteColumn(), unit, TimeElapsedColumn()


@contextmanager
def prior_progress(console: Console) -> Iterator[Callable[..., None]]:
    """Shows a bar for the training of a prior, and yields the function that moves it."""
    columns = _columns("steps, {task.fields[loss]:.2f} nats per token")
    with RichProgress(*columns, console=console) as bars:
        training = bars.add_task("training", total=None, loss=math.nan)

        def show(at: "PriorProgress") -> None:
            bars.update(training, completed=at.step, total=at.steps, loss=at.loss)

        yield show
