"""Attacks side by side, over all updates of a run."""

from collections.abc import Mapping, Sequence

from fedleak.report.table import Table, cells, figures, words
from fedleak.report.words import (
    ANY_ATTACK,
    INTERVALS,
    NOT_MEASURED,
    interval,
    number,
    starred,
    warnings,
)
from fedleak.store.summaries import AttackSummary, Estimate, MeanOfClients, RunSummary, WorstCase
from fedleak.training.observation import GRANTABLE

FIGURES: Mapping[str, tuple[str, float]] = {
    "exact_match": ("texts exact, %", 100),
    "rouge1": ("ROUGE-1", 1),
    "rouge2": ("ROUGE-2", 1),
    "rougeL": ("ROUGE-L", 1),
    "control_rougeL": ("ROUGE-L, other update", 1),
    "guess_rougeL": ("ROUGE-L, no update", 1),
    "token_recall": ("tokens found, %", 100),
    "control_token_recall": ("tokens found, other update", 100),
    "guess_token_recall": ("tokens found, no update", 100),
    "token_precision": ("tokens right, %", 100),
    "personal_data": ("personal data read, %", 100),
    "control_personal_data": ("personal data, other update", 100),
}
"""By the name of a figure in a summary, its heading and what is shown for a value of 1."""

LIMITED = ("exact_match", "rougeL", "token_recall", "personal_data")
"""Figures that the gate limits, also with each client counted once."""


def attack_table(summary: RunSummary) -> Table:
    """Returns a column per attack, and one for all together: figures with intervals, controls."""
    attacks = summary.attacks
    summaries: list[AttackSummary | WorstCase] = [*attacks.values()]
    names = [starred(name, attack.warning) for name, attack in attacks.items()]
    if (worst := summary.worst_case) is not None and len(worst.attacks) > 1:
        summaries.append(worst)
        names.append(starred(ANY_ATTACK, worst.warning))
    facts = sorted({name for attack in attacks.values() for name in attack.facts})
    told_most = summary.ladder.top.granted_in_words if summary.ladder else ""
    once = [
        [f"{FIGURES[name][0]}, clients' mean", *(_of_clients(row, name) for row in summaries)]
        for name in LIMITED
        if any(_differs(getattr(row, name, None)) for row in summaries)
    ]
    rows = [
        ["was told", *(granted(attack.knows) for attack in attacks.values()), told_most],
        ["answers", *map(answers, attacks.values())],
        *(
            [FIGURES[name][0], *(shown(row, name) for row in summaries)]
            for name in FIGURES
            if "personal" not in name or any(row.personal for row in summaries)
        ),
        *(
            [f"{fact.replace('_', ' ')}, %", *(_fact(attack, fact) for attack in attacks.values())]
            for fact in facts
        ),
        *once,
        ["seconds", *(number(attack.seconds, 1) for attack in attacks.values())],
    ]
    optional = [
        ["an update", *(number(attack.seconds_per_update, 3) for attack in attacks.values())],
        ["batches proved", *map(_proved, attacks.values())],
        ["smallest margin", *(number(attack.margin, 1) for attack in attacks.values())],
        ["rank budget, %", *map(_budget, attacks.values())],
        ["candidates", *map(_candidates, attacks.values())],
    ]
    rows += [row for row in optional if set(row[1:]) != {NOT_MEASURED}]
    return Table(
        "in all: mean and 95 % interval over clients",
        [*words("figure"), *figures(*names)],
        cells([*row, ""][: 1 + len(names)] for row in rows),
        [*warnings([row.warning for row in summaries]), INTERVALS],
        kept=1,
    )


def shown(summary: AttackSummary | WorstCase | None, name: str) -> str:
    """Returns a figure of a summary with its interval, if it was measured."""
    return interval(getattr(summary, name, None), FIGURES[name][1])


def _differs(figure: Estimate | None) -> bool:
    """Returns whether the mean of clients is another than the mean of their texts."""
    return figure is not None and figure.of_clients not in (
        None,
        MeanOfClients(mean=figure.mean, low=figure.low, high=figure.high),
    )


def _of_clients(row: AttackSummary | WorstCase, name: str) -> str:
    """Returns a mean for which each client counts once."""
    figure: Estimate | None = getattr(row, name, None)
    return interval(figure and figure.of_clients, FIGURES[name][1])


def _fact(summary: AttackSummary, name: str) -> str:
    """Returns how often a fact that an attack read is right."""
    if name not in summary.facts:
        return NOT_MEASURED
    right = summary.facts[name]
    return "not compared" if right is None else interval(right, 100)


def answers(summary: AttackSummary) -> str:
    """Returns how many updates an attack has answers for, and how many of them are unscored."""
    unscored = f", {summary.unscored} unscored" if summary.unscored else ""
    return f"{summary.answers} of {summary.rows}{unscored}"


def _proved(summary: AttackSummary) -> str:
    """Returns how many whole batches an attack proved; one that checks nothing proves nothing."""
    checks = summary.verified or summary.candidates
    return f"{summary.verified} of {summary.rows}" if checks else NOT_MEASURED


def _budget(summary: AttackSummary) -> str:
    """Returns `mean (max ...)` of the shares used, and the number of rows if some have none."""
    used = summary.budget
    if used is None:
        return NOT_MEASURED
    few = "" if used.rows == summary.rows else f"; {used.rows} of {summary.rows}"
    return f"{100 * used.mean:.0f} (max {100 * used.max:.0f}{few})"


def _candidates(summary: AttackSummary) -> str:
    """Returns how many candidates an update had after each check, in the order of the checks."""
    counts = (summary.candidates or {}).values()
    return ">".join(number(count) for count in counts) or NOT_MEASURED


def granted(facts: Sequence[str]) -> str:
    """Returns the facts that were granted beyond what the server sets itself."""
    return ", ".join(fact for fact in facts if fact in GRANTABLE) or "nothing more"
