"""When an abstention counts as an answer: nothing was read.

An attack that abstains found nothing that it stands by. That is no evidence: a search of row spaces
abstains under any noise, however small. `auto` tries all that it can. If it reads undefended copies
of the same batches, with the same settings, and abstains on the updates that were sent, the reason
is what clients do for their privacy. The owner of the limits has to agree, too.
"""

from collections.abc import Collection

from fedleak.attacks.reconstruction import Status
from fedleak.audit.gate.control import STRONGEST
from fedleak.audit.gate.evidence import NOTHING, Evidence, recounted
from fedleak.config.components import listed_as
from fedleak.store.records import LeakageRow
from fedleak.store.summaries import PositiveControl


def with_abstentions(
    evidence: Evidence, may_abstain: Collection[str], control: PositiveControl | None = None
) -> Evidence:
    """Returns the run with its abstentions counted as texts of which nothing was read.

    Only attacks of the strongest kind count so, if they may abstain and read a text of every
    undefended copy word for word. The worst cases are then taken over all rows.

    Args:
        evidence: The run.
        may_abstain: Names of attacks.
        control: As in `judge`.
    """
    control = control or evidence.summary.positive_control
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
    return evidence if rows == list(evidence.rows.leakage) else recounted(evidence, rows)
