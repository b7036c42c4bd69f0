"""Did a change make the leak worse? Compares two runs, text by text.

It compares how much of each text was read, and how well attacks tell that the text was in.

A pair is the same text of the same batch of the same client and round in both runs. The difference
of a pair does not depend on how hard the text is, so it reveals smaller changes than two means do.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from pydantic import JsonValue

from fedleak.attacks import CALIBRATED
from fedleak.audit.estimates import Largest, estimate, largest_client
from fedleak.audit.kept_texts import candidates_file, read_candidates, read_held_out
from fedleak.audit.pairing import (
    AREA,
    CALIBRATED_AREA,
    CORRECTION,
    FIGURES,
    Text,
    best,
    corrected,
    difference,
)
from fedleak.audit.privacy.membership import shares_of_members
from fedleak.audit.vault import read_truth
from fedleak.config.components import listed_as
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import stored
from fedleak.config.federation.schedule import malicious_server
from fedleak.store.lines import Record
from fedleak.store.records import LEAKAGE, LEDGER, MEMBERSHIP, LeakageRow, text_counts
from fedleak.store.run import Key, Run
from fedleak.store.summaries import Difference, Estimate
from fedleak.util.errors import CaptureError, FedleakError
from fedleak.util.lists import grouped


class Means(Record):
    """A figure of two runs that have no text in common, over all texts of each.

    Attributes:
        attack: The attack; None: the best attack on each text.
        figure: Its name.
        before, after: The mean in the earlier and in the later run; None: the run has none.
    """

    attack: str | None = None
    figure: str
    before: Estimate | None
    after: Estimate | None


class Comparison(Record):
    """Two runs.

    Attributes:
        before, after: The folders.
        texts: Private texts that both runs have.
        unpaired: Reasons why texts of either run have no partner, each with the number of texts.
        servers: What the malicious server of the earlier and of the later run did; None: it was
            honest.
        settings: By key the values that differ between the experiments; null: left out.
        differences: One for each figure that both runs have.
        means: The figures of both, if other batches were drawn and no text is in both.
        correction: The method that corrects the p of all differences that are shown together.
        tests: The number of these differences.
    """

    before: str
    after: str
    texts: int
    unpaired: dict[str, int]
    servers: tuple[str | None, str | None]
    settings: dict[str, tuple[JsonValue, JsonValue]]
    differences: tuple[Difference, ...]
    means: tuple[Means, ...] = ()
    correction: str
    tests: int


def compare(before: Run, after: Sequence[Run]) -> list[Comparison]:
    """Compares later runs with an earlier one, text by text.

    The p of all differences are corrected together, as a reader looks at all of them.

    Raises:
        ConfigError: A folder is no run directory.
        FedleakError: A file is damaged, or not a single text can be paired.
    """
    comparisons = [_compare(before, run) for run in after]
    groups = corrected(comparison.differences for comparison in comparisons)
    tests = sum(map(len, groups))
    return [
        comparison.model_copy(update={"differences": differences, "tests": tests})
        for comparison, differences in zip(comparisons, groups, strict=True)
    ]


def _compare(before: Run, after: Run) -> Comparison:
    runs = before, after
    rows = [_rows(run) for run in runs]
    unpaired: Counter[str] = Counter()
    poisson = any(row.sampling == "Poisson" for run in runs for row in run.rows(LEDGER))
    otherwise = _OTHER_TEXTS + (_DRAWN if poisson else "")
    texts = list(_common_texts(runs, rows, otherwise, unpaired))
    if not texts and not (poisson and otherwise in unpaired):
        reasons = "; ".join(f"{count} texts: {reason}" for reason, count in unpaired.items())
        raise FedleakError(
            f"no text of {str(before.path)!r} is in {str(after.path)!r} ({reasons}): compare runs "
            "with the same data, seed and federation"
        )
    attacks = [{row.attack for row in run_rows} for run_rows in rows]
    common = sorted(attacks[0] & attacks[1])
    chosen = _most_granted(common, rows)
    for name in sorted(attacks[0] ^ attacks[1]):
        unpaired[f"attack {name} is in one run only"] += len(texts)
    earlier, later = map(stored, runs)
    largest = largest_client(before, earlier)
    differences = []
    alone: list[tuple[str | None, list[str]]] = [(name, [name]) for name in common]
    for attack, names in [(None, chosen), *alone]:
        for figure in FIGURES:
            old, new = (best(run_rows, figure, names) for run_rows in rows)
            both = [text for text in texts if text in old and text in new]
            if both:
                differences.append(difference(attack, figure, both, old, new, largest))
            lost = sum((text in old) != (text in new) for text in texts)
            if lost:
                why = f"{attack or 'all attacks'}: one run has no answer ({figure})"
                unpaired[why] += lost
    differences += _of_members(runs, texts, largest, unpaired)
    return Comparison(
        before=str(before.path),
        after=str(after.path),
        texts=len(texts),
        unpaired=dict(unpaired),
        servers=(malicious_server(earlier), malicious_server(later)),
        settings=_changed(earlier, later),
        differences=tuple(differences),
        means=() if texts else tuple(_means(runs, rows, chosen)),
        correction=CORRECTION,
        tests=len(differences),
    )


def _of_members(
    runs: Sequence[Run], texts: Sequence[Text], largest: Largest, unpaired: Counter[str]
) -> Iterator[Difference]:
    """Yields the differences of how well members of these texts are told from others."""
    keys = {text.key for text in texts}
    before, after = (_shares_of_members(run, keys) for run in runs)
    for attack, figure in sorted(before.keys() & after.keys()):
        old, new = before[attack, figure], after[attack, figure]
        members = sorted(old.keys() & new.keys())
        if not _have_one_list(runs, attack):
            unpaired[f"{attack}: the runs ask about other texts"] += len(old)
            continue
        if lost := len(old.keys() ^ new.keys()):
            unpaired[f"{attack}: one run has no answer ({figure})"] += lost
        if members:
            yield difference(attack, figure, members, old, new, largest)


def _shares_of_members(
    run: Run, keys: Collection[Key] | None = None
) -> dict[tuple[str, str], dict[Text, float]]:
    """Returns by attack and figure how well each text that was in is told from the others.

    Args:
        run: The run directory.
        keys: The updates that count; None: all of them.
    """
    counted = [row for row in run.rows(MEMBERSHIP) if keys is None or row.key in keys]
    shares = {}
    for attack, rows in grouped(counted, lambda row: row.attack).items():
        named = {AREA: next(iter(rows[0].scores)), CALIBRATED_AREA: CALIBRATED}
        for figure, score in named.items():
            scored = [row for row in rows if score in row.scores]
            won = shares_of_members(scored, score)
            if won:
                shares[attack, figure] = {Text(*at): share for at, share in won.items()}
    return shares


def _have_one_list(runs: Sequence[Run], attack: str) -> bool:
    """Whether an attack was asked about the same texts of the same updates in all of these runs."""
    made_of = []
    for run in runs:
        experiment, file = stored(run), run.path / candidates_file(attack)
        listed = read_candidates(run, attack) if file.exists() else None
        clients = experiment.federation.clients
        made_of.append((experiment.seed, clients, read_held_out(run), listed))
    return all(parts == made_of[0] for parts in made_of)


def _changed(before: Experiment, after: Experiment) -> dict[str, tuple[JsonValue, JsonValue]]:
    """Returns what differs between two experiments, by key; a default counts as left out."""
    old, new = dict(_settings(before)), dict(_settings(after))
    both = {key: (old.get(key), new.get(key)) for key in sorted(old.keys() | new.keys())}
    return {key: values for key, values in both.items() if values[0] != values[1]}


def _settings(experiment: Experiment) -> Iterator[tuple[str, JsonValue]]:
    """Yields the values of an experiment that are no defaults, by key; tables are taken apart."""
    table = experiment.model_dump(mode="json", exclude={"name", "workers"}, exclude_defaults=True)
    for name, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield name, value


def _means(
    runs: Sequence[Run], rows: Sequence[Sequence[LeakageRow]], attacks: Sequence[str]
) -> Iterator[Means]:
    """Yields the means of what these attacks read, and the areas of attacks on membership."""
    largest = [largest_client(run, stored(run)).texts for run in runs]
    for figure, most in FIGURES.items():
        scores = [best(run_rows, figure, attacks) for run_rows in rows]
        before, after = map(_mean, scores, [most, most], largest)
        if before or after:
            yield Means(figure=figure, before=before, after=after)
    shares = [_shares_of_members(run) for run in runs]
    for name in sorted(shares[0].keys() & shares[1].keys()):
        before, after = map(_mean, [of_run[name] for of_run in shares], [1.0, 1.0], largest)
        yield Means(attack=name[0], figure=name[1], before=before, after=after)


def _mean(scores: Mapping[Text, float], most: float, largest: int) -> Estimate | None:
    """Returns the mean of scores of texts; None: there are none."""
    clients = [text.key.client for text in scores]
    return estimate([*scores.values()], clients, most=most, largest=largest) if scores else None


def _most_granted(names: Sequence[str], rows: Sequence[Sequence[LeakageRow]]) -> list[str]:
    """Returns each attack once: on the rung of a ladder that grants the most facts."""
    granted = {row.attack: len(row.granted or ()) for run_rows in rows for row in run_rows}
    by_attack = {listed_as(name): name for name in sorted(names, key=lambda name: granted[name])}
    return sorted(by_attack.values())


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


_OTHER_TEXTS = "the batch has other texts or other tokens"

_DRAWN = ' (Poisson sampling drew others: dp_sgd with sampling = "fixed" keeps the batches)'


def _common_texts(
    runs: Sequence[Run],
    rows: Sequence[Sequence[LeakageRow]],
    otherwise: str,
    unpaired: Counter[str],
) -> Iterator[Text]:
    """Yields the texts of the batches that both runs have, and counts the others, with reasons.

    The reason for a batch with other texts is `otherwise`.
    """
    sizes = [text_counts(run_rows) for run_rows in rows]
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
            unpaired[otherwise] += sizes[0][key]
        else:
            yield from (Text(key, place) for place in range(sizes[0][key]))
