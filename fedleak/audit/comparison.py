"""Did a change make it worse? Two runs, text by text.

Only what is the same is paired: the same text of the same batch of the same client and round. The
difference of a pair does not depend on how hard the text is, so it shows less than two means do.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from fedleak.audit.vault import read_truth
from fedleak.errors import CaptureError, FedleakError
from fedleak.metrics import intervals
from fedleak.store.lines import Record
from fedleak.store.records import LEAKAGE, LeakageRow, TextScore, text_counts
from fedleak.store.run import Key, Run

FIGURES = ("exact", "rougeL", "token_recall")
"""What is compared of each text."""

SURE = 0.05
"""The largest p of a difference that is called one."""


class Direction(StrEnum):
    """What a difference says of the second run."""

    WORSE = "reads more"
    BETTER = "reads less"
    UNTOLD = "not told"


class Difference(Record):
    """The second run's figure minus the first one's, over pairs of the same text.

    Attributes:
        attack: The attack; None: the best of all attacks that both runs have, text by text.
        figure: exact, rougeL or token_recall.
        texts, clients: Pairs, and the clients that they are of.
        before, after: The means of both runs, over these pairs.
        mean: Of the differences.
        low, high: Its 95 % interval, by a bootstrap over clients; None: there is one client.
        p: Of a sign test over clients; small: clients would rarely agree so by chance.
    """

    attack: str | None
    figure: str
    texts: int
    clients: int
    before: float
    after: float
    mean: float
    low: float | None
    high: float | None
    p: float

    @property
    def direction(self) -> Direction:
        """What it says: nothing, unless the interval leaves out 0 and the clients agree."""
        if self.low is None or self.high is None or self.p > SURE or self.low <= 0 <= self.high:
            return Direction.UNTOLD
        return Direction.WORSE if self.low > 0 else Direction.BETTER


class Comparison(Record):
    """Two runs.

    Attributes:
        before, after: The folders.
        texts: Private texts that both runs have.
        unpaired: Why texts of either run have no partner, and how many they are.
        differences: Of each figure that both have.
    """

    before: str
    after: str
    texts: int
    unpaired: dict[str, int]
    differences: tuple[Difference, ...]


class _Text(NamedTuple):
    """A text of a capture."""

    key: Key
    place: int


def compare(before: Run, after: Run) -> Comparison:
    """Compares two runs text by text.

    Raises:
        ConfigError: One is no run directory.
        FedleakError: A file is damaged, or not a single text can be paired.
    """
    runs = before, after
    rows = [_rows(run) for run in runs]
    unpaired: Counter[str] = Counter()
    texts = list(_same(runs, rows, unpaired))
    if not texts:
        reasons = "; ".join(f"{count} texts: {reason}" for reason, count in unpaired.items())
        raise FedleakError(
            f"no text of {str(before.path)!r} is in {str(after.path)!r} ({reasons}): compare runs "
            "with the same data, seed and federation"
        )
    attacks = [sorted({row.attack for row in each}) for each in rows]
    common = [name for name in attacks[0] if name in attacks[1]]
    for name in sorted({*attacks[0], *attacks[1]} - {*common}):
        unpaired[f"attack {name} is in one run only"] += len(texts)
    found = []
    of_each: list[tuple[str | None, list[str]]] = [(one, [one]) for one in common]
    for attack, chosen in [(None, common), *of_each]:
        for figure in FIGURES:
            old, new = (_best(each, chosen, figure) for each in rows)
            both = [text for text in texts if text in old and text in new]
            if both:
                found.append(_difference(attack, figure, both, old, new))
            lost = sum((text in old) != (text in new) for text in texts)
            if lost:
                said = f"{attack or 'all attacks'}: one run has no answer ({figure})"
                unpaired[said] += lost
    return Comparison(
        before=str(before.path),
        after=str(after.path),
        texts=len(texts),
        unpaired=dict(unpaired),
        differences=tuple(found),
    )


def _rows(run: Run) -> list[LeakageRow]:
    run.info()  # refuses a folder that is no run
    rows = run.rows(LEAKAGE)
    old = [row for row in rows if row.texts is None and row.rougeL is not None]
    if old or not rows:
        raise FedleakError(
            f"{str(run.path)!r} has no scores of single texts: `fedleak score {run.path}` makes "
            "them"
        )
    return rows


def _same(
    runs: tuple[Run, Run], rows: Sequence[Sequence[LeakageRow]], unpaired: Counter[str]
) -> Iterator[_Text]:
    """Yields the texts of the batches that both runs have, and counts the others."""
    sizes = [text_counts(each) for each in rows]
    for key in sorted({*sizes[0], *sizes[1]}):
        if key not in sizes[0] or key not in sizes[1]:
            unpaired["the round and client are in one run only"] += sum(
                s.get(key, 0) for s in sizes
            )
            continue
        try:
            truths = [read_truth(run, key) for run in runs]
        except CaptureError:
            truths = [None]
        if None in truths:
            unpaired["the private batch is not in the vault of both runs"] += sizes[0][key]
        elif len({tuple(map(tuple, truth.sequences)) for truth in truths if truth}) > 1:
            unpaired["the batch has other texts or other tokens"] += sizes[0][key]
        else:
            yield from (_Text(key, place) for place in range(sizes[0][key]))


def _best(rows: Sequence[LeakageRow], attacks: Sequence[str], figure: str) -> Mapping[_Text, float]:
    """Returns what the best of these attacks has of each text, as far as one has an answer."""
    found: dict[_Text, float] = {}
    for row in rows:
        for place, one in enumerate(row.texts or ()):
            if row.attack in attacks and (score := _score(one, figure)) is not None:
                text = _Text(row.key, place)
                found[text] = max(score, found.get(text, score))
    return found


def _score(text: TextScore, figure: str) -> float | None:
    value = getattr(text, figure)
    return None if value is None else float(value)


def _difference(
    attack: str | None,
    figure: str,
    texts: Sequence[_Text],
    old: Mapping[_Text, float],
    new: Mapping[_Text, float],
) -> Difference:
    of_client: dict[int, list[float]] = defaultdict(list)
    for text in texts:
        of_client[text.key.client].append(new[text] - old[text])
    differences = list(of_client.values())
    ends = intervals.bootstrapped(differences) if len(differences) > 1 else None
    before, after = (sum(each[text] for text in texts) / len(texts) for each in (old, new))
    return Difference(
        attack=attack,
        figure=figure,
        texts=len(texts),
        clients=len(of_client),
        before=before,
        after=after,
        mean=after - before,
        low=None if ends is None else ends.low,
        high=None if ends is None else ends.high,
        p=intervals.sign_test([sum(each) for each in differences]),
    )
