"""What each fact is worth to the server that is told it: `[threat] ladder`.

A rung is what an attacker reads with the same facts about every batch: nothing, one fact alone, or
all of them. Each attack is on a rung once, with those of the rung's facts that it uses, so a rung
shows what a run with these facts in `threat.knows` shows. A rung never takes the best of several
rungs: the best of two tries is better than one try, even if the facts are worth nothing.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from fedleak.audit.estimates import Largest
from fedleak.audit.pairing import CORRECTION, FIGURES, best, corrected, difference
from fedleak.audit.worst_case import worst_case
from fedleak.config.components import RUNG, listed_as
from fedleak.config.experiment import Experiment
from fedleak.store.records import LeakageRow
from fedleak.store.run import Key
from fedleak.store.summaries import Difference, Ladder, Rung
from fedleak.training.observation import GRANTABLE


def ladder(
    experiment: Experiment,
    rows: Sequence[LeakageRow],
    finished: Mapping[tuple[Key, str], int],
    largest: Largest,
) -> Ladder | None:
    """Returns what each fact is worth; None: the experiment has no ladder, and no row has a rung.

    Args:
        experiment: What was prepared.
        rows: Rows of leakage.jsonl.
        finished: The place of each answer in the order in which they came.
        largest: The most texts and updates of a client of the federation.
    """
    climbed = [row for row in rows if RUNG in row.attack]
    if not (experiment.threat.ladder or climbed):
        return None
    facts = {fact for row in climbed for fact in row.granted or ()}
    if experiment.threat.ladder:
        facts |= {fact for setting in experiment.attacks for fact in setting.threat.knows}
    rungs: list[tuple[str, ...]] = [(), *((fact,) for fact in sorted(facts))]
    if len(facts) > 1:
        rungs.append(tuple(sorted(facts)))
    named = [_attacks(rows, frozenset(granted)) for granted in rungs]
    # A reader looks at all rungs together, so their p are corrected together.
    worth = corrected(
        _worth(rows, named[0], of_rung, set(granted), largest)
        for granted, of_rung in zip(rungs, named, strict=True)
    )
    return Ladder(
        rungs=tuple(
            Rung(
                granted=granted,
                attacks=dict(of_rung),
                worst_case=worst_case(rows_of(rows, of_rung.values()), finished, largest),
                worth=differences,
            )
            for granted, of_rung, differences in zip(rungs, named, worth, strict=True)
        ),
        left_out=_left_out(experiment, rows, facts),
        correction=CORRECTION,
    )


def _attacks(rows: Sequence[LeakageRow], granted: Set[str]) -> dict[str, str]:
    """Returns for each attack the name of its rows on the rung with these facts."""
    names: dict[str, dict[frozenset[str], str]] = defaultdict(dict)
    for row in rows:
        names[listed_as(row.attack)][frozenset(row.granted or ())] = row.attack
    chosen = {}
    for attack, of_attack in sorted(names.items()):
        used = frozenset().union(*of_attack)
        if (name := of_attack.get(used & granted)) is not None:
            chosen[attack] = name
    return chosen


def _worth(
    rows: Sequence[LeakageRow],
    nothing: Mapping[str, str],
    rung: Mapping[str, str],
    granted: Set[str],
    largest: Largest,
) -> Iterator[Difference]:
    """Yields the differences of a rung to the rung without facts."""
    # A client without noise, for example, has no noise scale that could be told.
    there = {row.key for row in rows_of(rows, rung.values()) if granted & set(row.knows)}
    both = [name for name in rung if name in nothing]
    changed = [name for name in both if rung[name] != nothing[name]]
    if not changed:
        return
    compared: list[tuple[str | None, list[str]]] = [
        (None, both),
        *((name, [name]) for name in changed),
    ]
    for attack, chosen in compared:
        for figure in FIGURES:
            old, new = (
                best(rows, figure, {of_rung[name] for name in chosen})
                for of_rung in (nothing, rung)
            )
            if pairs := [text for text in old if text in new and text.key in there]:
                yield difference(attack, figure, pairs, old, new, largest)


def rows_of(rows: Sequence[LeakageRow], names: Iterable[str]) -> list[LeakageRow]:
    """Returns the rows of attacks with these names."""
    wanted = set(names)
    return [row for row in rows if row.attack in wanted]


def _left_out(
    experiment: Experiment, rows: Sequence[LeakageRow], facts: Set[str]
) -> dict[str, str]:
    """Returns why a fact is on no rung."""
    attacks = ", ".join(sorted({listed_as(row.attack) for row in rows}))
    return {
        fact: experiment.absent_facts.get(fact, f"used by none of {attacks}")
        for fact in sorted(GRANTABLE - facts)
    }
