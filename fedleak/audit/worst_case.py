"""What all attacks together read: of each private text, what the best attack read of it.

An attacker is free to run every attack, so no single attack is the risk. Which attack is the best
for a text is decided with the truth, as no attacker could: the figure is an upper bound on what the
attacks of this run read. The controls beside it take the best attack in the same way.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from fedleak.audit.estimates import Largest, mean_over_clients, personal_data, too_few
from fedleak.store.records import LeakageRow, PersonalItem, TextScore, text_counts
from fedleak.store.run import Key
from fedleak.store.summaries import NEARLY, WorstCase


def worst_case(
    rows: Sequence[LeakageRow], finished: Mapping[tuple[Key, str], int], largest: Largest
) -> WorstCase | None:
    """Sums up all attacks over a run; None where no row has scores of single texts.

    Args:
        rows: Of leakage.jsonl.
        finished: The place of each answer in the order in which they came.
        largest: Of the federation's clients.
    """
    answered = [row for row in rows if row.texts is not None]
    if not answered:
        return None
    of_capture: dict[Key, list[LeakageRow]] = defaultdict(list)
    for row in sorted(answered, key=lambda row: finished.get(row.id, len(finished))):
        of_capture[row.key].append(row)
    exact: list[tuple[LeakageRow, float]] = []
    rouge: list[tuple[LeakageRow, float]] = []
    recall: list[tuple[LeakageRow, float]] = []
    nearly, first = 0, Counter[str]()
    for several in of_capture.values():
        for scores in zip(*(row.texts or () for row in several), strict=True):
            some = several[0]
            exact += _best(some, (score.exact for score in scores))
            rouge += _best(some, (score.rougeL for score in scores))
            alike = any((score.rougeL or 0.0) >= NEARLY for score in scores)
            nearly += alike and not any(score.exact for score in scores)
            recall += _best(some, (score.token_recall for score in scores))
            first.update(_first(several, scores))
    texts = text_counts(rows)
    captures = list(of_capture.values())
    control_rouge = [_best(rows[0], (row.control_rougeL for row in rows)) for rows in captures]
    control_recall = [
        _best(rows[0], (row.control_token_recall for row in rows)) for rows in captures
    ]
    return WorstCase(
        attacks=tuple(sorted({row.attack for row in answered})),
        texts=sum(texts.values()),
        clients=len({row.unit for row in rows if row.key in texts}),
        unattacked=sum(texts.values()) - len(exact),
        nearly=nearly,
        exact_match=mean_over_clients(exact, 1.0, largest=largest.texts),
        rougeL=mean_over_clients(rouge, 100.0, largest=largest.texts),
        token_recall=mean_over_clients(recall, 1.0, largest=largest.texts),
        control_rougeL=mean_over_clients(
            list(chain(*control_rouge)), 100.0, largest=largest.updates
        ),
        control_token_recall=mean_over_clients(
            list(chain(*control_recall)), 1.0, largest=largest.updates
        ),
        personal=personal_data(_personal(rows)),
        first=dict(sorted(first.items())),
        warning=too_few([rows[0] for rows in captures]),
    )


def _best(row: LeakageRow, scores: Iterable[float | None]) -> list[tuple[LeakageRow, float]]:
    """Returns the best score that was measured, with the row that it is about; or nothing."""
    measured = [float(score) for score in scores if score is not None]
    return [(row, max(measured))] if measured else []


def _personal(rows: Iterable[LeakageRow]) -> list[tuple[LeakageRow, PersonalItem]]:
    """Returns what was read of each piece of personal data, with a row that it is about."""
    of_capture: dict[Key, list[LeakageRow]] = defaultdict(list)
    for row in rows:
        of_capture[row.key].append(row)
    best = []
    for several in of_capture.values():
        # Rows whose answers are gone may have been scored when other things were looked for.
        alike = [row for row in several if len(row.personal) == len(several[-1].personal)]
        for of_piece in zip(*(row.personal for row in alike), strict=True):
            read, control = (
                max((value for value in values if value is not None), default=None)
                for values in zip(*((item.read, item.control) for item in of_piece), strict=True)
            )
            piece = of_piece[0].model_copy(update={"read": read, "control": control})
            best.append((several[0], piece))
    return best


def _first(rows: Sequence[LeakageRow], scores: Sequence[TextScore]) -> list[str]:
    """Returns the first attack that read a text exactly, or nothing."""
    return [row.attack for row, score in zip(rows, scores, strict=True) if score.exact][:1]
