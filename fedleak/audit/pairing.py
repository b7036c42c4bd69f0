"""Differences between two sets of answers, over pairs of the same text.

The difference of a pair does not depend on how hard the text is, so it reveals smaller changes than
two means do. Of many differences shown together, some are large by chance: see `corrected`.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from fedleak.audit.estimates import Largest
from fedleak.audit.metrics import intervals
from fedleak.store.records import LeakageRow
from fedleak.store.run import Key
from fedleak.store.summaries import Difference
from fedleak.util.lists import grouped

FIGURES = {"exact": 1.0, "rougeL": 100.0, "token_recall": 1.0, "personal_data": 1.0}
"""The figures that are compared for each text, and the largest value of each."""

AREA, CALIBRATED_AREA = "auc", "auc_calibrated"
"""Membership: of a client's texts that were not in, the share that scores below one that was.

The first is by the score that an attack names first, the second by the calibrated score.
"""

_MOST = FIGURES | {AREA: 1.0, CALIBRATED_AREA: 1.0}

CORRECTION = "Benjamini-Hochberg"
"""The method that corrects the p of differences that are shown together."""


class Text(NamedTuple):
    """A private text: its capture, and its place in the batch."""

    key: Key
    place: int


def best(
    rows: Iterable[LeakageRow], figure: str, attacks: Collection[str] | None = None
) -> Mapping[Text, float]:
    """Returns the best score of each text over rows; texts without an answer are left out.

    Args:
        rows: Rows of leakage.jsonl.
        figure: Its name.
        attacks: The attacks whose rows count; None: all of them.
    """
    best_scores: dict[Text, float] = {}
    for row in rows:
        if attacks is not None and row.attack not in attacks:
            continue
        for place, text_score in enumerate(row.texts or ()):
            if (score := getattr(text_score, figure)) is not None:
                text, value = Text(row.key, place), float(score)
                best_scores[text] = max(value, best_scores.get(text, value))
    return best_scores


def difference(
    attack: str | None,
    figure: str,
    texts: Sequence[Text],
    old: Mapping[Text, float],
    new: Mapping[Text, float],
    largest: Largest,
) -> Difference:
    """Returns the mean difference of `new` to `old` over texts that both have, at least one."""
    clients, most = [text.key.client for text in texts], _MOST[figure]
    differences = [new[text] - old[text] for text in texts]
    by_client = grouped(texts, lambda text: text.key.client).values()
    ends = intervals.clustered_mean(
        differences, clients, most=most, least=-most, largest=largest.texts
    )
    before, after = (sum(scores[text] for text in texts) / len(texts) for scores in (old, new))
    p = intervals.sign_flip_test([math.fsum(new[t] - old[t] for t in own) for own in by_client])
    return Difference(
        attack=attack,
        figure=figure,
        texts=len(texts),
        clients=len(by_client),
        before=before,
        after=after,
        mean=after - before,
        low=ends.low,
        high=ends.high,
        p=p,
        p_adjusted=p,
    )


def corrected(groups: Iterable[Iterable[Difference]]) -> list[tuple[Difference, ...]]:
    """Returns groups of differences, with p corrected for the number of differences in all groups.

    The method is Benjamini and Hochberg's (1995): of all differences whose corrected p is at most
    0.05, at most 5 % are expected to be chance. That holds if tests are independent or depend on
    each other positively, as figures and attacks on the same texts do.
    """
    from scipy.stats import false_discovery_control

    groups = [list(group) for group in groups]
    ps = [line.p for group in groups for line in group]
    adjusted = iter(false_discovery_control(ps).tolist() if ps else [])
    return [
        tuple(line.model_copy(update={"p_adjusted": next(adjusted)}) for line in group)
        for group in groups
    ]
