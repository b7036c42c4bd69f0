"""What all attacks together read: of each private text, what the best attack read of it.

An attacker is free to run every attack, so no single attack is the risk. The best attack for a text
is chosen with the truth, which no attacker has: the figure is an upper bound on what the attacks of
this run read. The controls beside it take the best attack in the same way.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from fedleak.audit.estimates import Largest, mean_over_clients, personal_data, too_few
from fedleak.audit.pairing import FIGURES, Text, best
from fedleak.store.records import LeakageRow, PersonalItem, text_counts
from fedleak.store.run import Key
from fedleak.store.summaries import NEARLY, Estimate, WorstCase
from fedleak.util.lists import grouped


def worst_case(
    rows: Sequence[LeakageRow], finished: Mapping[tuple[Key, str], int], largest: Largest
) -> WorstCase | None:
    """Sums up all attacks over a run; None where no row has scores of single texts.

    Args:
        rows: Rows of leakage.jsonl.
        finished: The place of each answer in the order in which they came.
        largest: The most texts and updates of a client of the federation.
    """
    answered = [row for row in rows if row.texts is not None]
    if not answered:
        return None
    answered.sort(key=lambda row: finished.get(row.id, len(finished)))
    captures = grouped(answered, lambda row: row.key)
    best_scores = {figure: best(answered, figure) for figure in FIGURES}
    exact, rouge = best_scores["exact"], best_scores["rougeL"]
    texts = [
        Text(key, place)
        for key, of_capture in captures.items()
        for place in range(max(len(row.texts or ()) for row in of_capture))
    ]
    read_first: dict[Text, str] = {}
    for row in answered:
        for place, score in enumerate(row.texts or ()):
            if score.exact:
                read_first.setdefault(Text(row.key, place), row.attack)

    def mean_of(figure: str) -> Estimate | None:
        scores = best_scores[figure]
        measured = [(captures[text.key][0], scores[text]) for text in texts if text in scores]
        return mean_over_clients(measured, FIGURES[figure], largest=largest.texts)

    def control(figure: str) -> Estimate | None:
        measured = []
        for of_capture in captures.values():
            values = [getattr(row, f"control_{figure}") for row in of_capture]
            if known := [value for value in values if value is not None]:
                measured.append((of_capture[0], max(known)))
        return mean_over_clients(measured, FIGURES[figure], largest=largest.updates)

    sizes = text_counts(rows)
    return WorstCase(
        attacks=tuple(sorted({row.attack for row in answered})),
        texts=sum(sizes.values()),
        clients=len({row.unit for row in rows if row.key in sizes}),
        unattacked=sum(sizes.values()) - len(exact),
        nearly=sum(rouge.get(text, 0.0) >= NEARLY and not exact.get(text) for text in texts),
        exact_match=mean_of("exact"),
        rougeL=mean_of("rougeL"),
        token_recall=mean_of("token_recall"),
        control_rougeL=control("rougeL"),
        control_token_recall=control("token_recall"),
        personal=personal_data(_personal(rows)),
        first=dict(sorted(Counter(read_first.values()).items())),
        warning=too_few([of_capture[0] for of_capture in captures.values()]),
    )


def _personal(rows: Iterable[LeakageRow]) -> list[tuple[LeakageRow, PersonalItem]]:
    """Returns what was read of each piece of personal data, with a row that it is about."""
    pieces = []
    for several in grouped(rows, lambda row: row.key).values():
        # Rows whose answers are gone may have been scored when other things were looked for.
        alike = [row for row in several if len(row.personal) == len(several[-1].personal)]
        for of_piece in zip(*(row.personal for row in alike), strict=True):
            read, control = (
                max((value for value in values if value is not None), default=None)
                for values in zip(*((item.read, item.control) for item in of_piece), strict=True)
            )
            piece = of_piece[0].model_copy(update={"read": read, "control": control})
            pieces.append((several[0], piece))
    return pieces
