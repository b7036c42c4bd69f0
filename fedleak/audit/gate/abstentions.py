"""When an abstention is an answer: nothing was read.

An attack that abstains says that it found nothing it stands by. That is no evidence: a search of
row spaces abstains under any noise, however small. `auto` tries all that it can. Where it reads
undefended copies of the same batches, with the same settings, and abstains on what was sent, what
stands between is what clients do for their privacy. Who owns the limits has to agree, too.
"""

from collections.abc import Collection
from dataclasses import replace

from fedleak.attacks.reconstruction import Status
from fedleak.audit.gate.control import STRONGEST
from fedleak.audit.gate.evidence import Evidence
from fedleak.audit.worst_case import worst_case
from fedleak.config.components import listed_as
from fedleak.store.records import LeakageRow, TextScore

NOTHING = TextScore(exact=False, rougeL=0.0, token_recall=0.0)


def with_abstentions(evidence: Evidence, may_abstain: Collection[str]) -> Evidence:
    """Returns a run whose abstentions count as texts of which nothing was read.

    That holds for attacks of the strongest kind that may abstain and that read a text of every
    undefended copy word for word. The worst cases are then taken over all rows.

    Args:
        evidence: The run.
        may_abstain: Names of attacks.
    """
    control = evidence.summary.positive_control
    if control is None:
        return evidence
    able = {
        name
        for name, reading in control.attacks.items()
        if reading.read == control.copies and evidence.kinds.get(name) == STRONGEST
    }

    def counted(row: LeakageRow) -> LeakageRow:
        may = row.attack in able and not {row.attack, listed_as(row.attack)}.isdisjoint(may_abstain)
        if not may or row.status != Status.ABSTAINED or row.batch_size is None:
            return row
        unread = tuple(item.model_copy(update={"read": False}) for item in row.personal)
        texts = (NOTHING,) * row.batch_size
        return row.model_copy(update={"texts": texts, "personal": unread})

    rows = [counted(row) for row in evidence.rows.leakage]
    if rows == list(evidence.rows.leakage):
        return evidence
    finished = {answer.id: place for place, answer in enumerate(evidence.answers)}
    summary = evidence.summary.model_copy(
        update={"worst_case": worst_case(rows, finished, evidence.largest)}
    )
    if summary.ladder is not None:
        rungs = []
        for rung in summary.ladder.rungs:
            names = {*rung.attacks.values()}
            of_rung = worst_case(
                [row for row in rows if row.attack in names], finished, evidence.largest
            )
            rungs.append(rung.model_copy(update={"worst_case": of_rung}))
        ladder = summary.ladder.model_copy(update={"rungs": tuple(rungs)})
        summary = summary.model_copy(update={"ladder": ladder})
    return replace(evidence, rows=replace(evidence.rows, leakage=rows), summary=summary)
