"""The positive control: can the attacks of a run read at all, and do their abstentions count?"""

from collections.abc import Collection, Mapping

from fedleak.attacks.reconstruction import Status
from fedleak.audit import positive_control
from fedleak.audit.gate.check import Check, Outcome, untold
from fedleak.audit.gate.evidence import NOTHING, Evidence, recounted
from fedleak.audit.gate.limits import LEAKS
from fedleak.config.components import listed_as
from fedleak.store.records import LeakageRow
from fedleak.store.summaries import CopiesRead, PositiveControl

STRONGEST = "auto"
"""The kind of the strongest attack here."""


def with_abstentions(
    evidence: Evidence, may_abstain: Collection[str], control: PositiveControl | None = None
) -> Evidence:
    """Returns the run with its abstentions counted as texts of which nothing was read.

    An attack that abstains found nothing that it stands by. That is no evidence: a search of row
    spaces abstains under any noise, however small. `auto` tries all that it can. If it reads
    undefended copies of the same batches, with the same settings, and abstains on the updates that
    were sent, the reason is what clients do for their privacy. The owner of the limits has to
    agree, too.

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


def control_checks(leaks: Mapping[str, float], evidence: Evidence) -> list[Check]:
    """Returns whether the attacks can read, and a remark on which attacks the limits hold for.

    Args:
        leaks: The limits on the worst case, by their names.
        evidence: The run.
    """
    return [_control(leaks, evidence), _attackers(evidence)]


def _control(leaks: Mapping[str, float], evidence: Evidence) -> Check:
    """Checks that each limit would have been exceeded if there had been no defense.

    A limit is compared with what all attacks together read of undefended copies, as for the run
    itself. One of the attacks that exceed it there by themselves must have answered here: if they
    only abstained, the run's figure is of attacks that cannot read.
    """
    name, copies, rows = "positive control", "undefended copies", evidence.rows.leakage
    control = evidence.summary.positive_control
    if positive_control.is_undefended(evidence.experiment):
        copies, control = "updates, none of them defended", positive_control.of_rows(rows)
    if control is None:
        return untold(name, [_why_none(evidence)])
    sentence = "; ".join(
        f"{attack} read a text of {reading.read} of {control.copies} {copies}"
        for attack, reading in control.attacks.items()
    )
    lacks = []
    for figure, limit in leaks.items():
        read = _read(control.together, figure)
        sentence += f"; {LEAKS[figure].says}: {read:.3g}, limit {limit:g}"
        if read <= limit:
            lacks.append(f"where nothing is in their way the attacks stay within {figure}, too")
            continue
        able = {
            attack for attack, reading in control.attacks.items() if _read(reading, figure) > limit
        }
        answered = {
            row.attack
            for row in rows
            if any(getattr(text, figure) is not None for text in row.texts or ())
        }
        if not able & answered:
            able_, rest = (", ".join(sorted(names)) for names in (able, answered))
            who = f"{able_ or 'no single attack'} exceeds it there"
            lacks.append(f"{figure} rests on {rest or 'no answer'} here, and {who}")
    return untold(name, [sentence, *lacks] if lacks else [], sentence)


def _read(reading: CopiesRead, figure: str) -> float:
    """Returns how much was read; 0 if there is no personal data to be read."""
    return getattr(reading, figure) or 0.0


def _why_none(evidence: Evidence) -> str:
    """Returns why there are no undefended copies, and what makes them."""
    if evidence.purged:
        return "no undefended copies were attacked before the private data was deleted"
    if not positive_control.chosen(evidence.run, evidence.experiment):
        return "no private batch is in the vault, so there is nothing to make undefended copies of"
    return (
        "no undefended copies were attacked, so these attacks may be unable to read anything: "
        f"`fedleak attack {evidence.run.path} --positive-control` tells"
    )


def _attackers(evidence: Evidence) -> Check:
    """Returns a remark on which attacks the limits hold for; it never closes the gate."""
    tried = ", ".join(sorted({row.attack for row in evidence.rows.leakage})) or "no attack"
    sentence = f"the limits hold for {tried}"
    if STRONGEST not in evidence.kinds.values():
        sentence += f" alone: {STRONGEST}, the strongest attacker here, is not among them"
    return Check("attackers", Outcome.WITHIN, sentence)
