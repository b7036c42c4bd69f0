"""May this run pass? Its worst case against limits, and whether enough was measured to tell.

What is compared with a limit is the upper end of the interval, never the mean. A limit holds only
where the attacks were free to work: an attack that crashed, ran out of time or found nothing that
it stands by is no evidence that nothing can be read.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from fedleak.config.components import listed_as
from fedleak.config.tables import GateTable
from fedleak.errors import ConfigError, FedleakError, unknown
from fedleak.privacy import NONE
from fedleak.reconstruction import Status
from fedleak.store.records import LEAKAGE, LEDGER, UNSCORED, LeakageRow, text_counts
from fedleak.store.run import Run
from fedleak.store.summaries import (
    SUMMARY,
    CanarySummary,
    Estimate,
    Guarantee,
    RunSummary,
    WorstCase,
)


class Outcome(StrEnum):
    """How one check of the gate ended."""

    WITHIN = "within"
    """The limit holds, or enough was measured."""
    EXCEEDED = "exceeded"
    """The limit does not hold."""
    UNTOLD = "untold"
    """Too little was measured to tell."""


@dataclass(frozen=True)
class Check:
    """One check of the gate.

    Attributes:
        name: What is checked: a limit, such as `exact`, or what has to be measured for the limits.
        outcome: How it ended.
        said: What was found, in one line.
    """

    name: str
    outcome: Outcome
    said: str

    @property
    def passed(self) -> bool:
        """Whether the gate may open, as far as this check goes."""
        return self.outcome is Outcome.WITHIN


class Limited(NamedTuple):
    """A figure of the worst case that can be limited.

    Attributes:
        of: Its name in the worst case.
        says: What it counts, for a sentence.
        most: The largest that it can be.
    """

    of: str
    says: str
    most: float


LEAKS: Mapping[str, Limited] = {
    "exact": Limited("exact_match", "share of texts read word for word", 1.0),
    "rougeL": Limited("rougeL", "mean ROUGE-L of the texts", 100.0),
    "token_recall": Limited("token_recall", "share of a text's tokens found", 1.0),
}
"""Limits on the worst case over attacks, by their names."""


def judge(run: Run, limits: GateTable) -> list[Check]:
    """Returns a check for each limit, and for what has to be measured before limits say anything.

    Args:
        run: A run that was scored.
        limits: At least one limit, or something that has to be measured.

    Raises:
        ConfigError: This is no run directory, there is no limit, or an attack that may abstain has
            no row in this run.
    """
    info = run.info()
    leaks = {name: limit for name in LEAKS if (limit := getattr(limits, name)) is not None}
    if not leaks and limits.epsilon is None and not limits.require:
        raise ConfigError(
            "there is no limit: give --max exact=0.01, for example, or a [gate] in the experiment "
            f"file (limits: {', '.join([*LEAKS, 'epsilon'])})"
        )
    try:
        summary, rows = run.read(SUMMARY), run.rows(LEAKAGE)
    except FedleakError as error:
        return [Check("figures", Outcome.UNTOLD, str(error))]
    cases = _cases(summary)
    checks = [_limit(name, limit, cases) for name, limit in leaks.items()]
    if limits.epsilon is not None:
        checks.append(_epsilon(limits.epsilon, summary.privacy))
        if summary.canary is not None:
            checks.append(_bounded(limits.epsilon, summary.canary))
    if "canary" in limits.require:
        checks.append(_canary(summary.canary, {row.client for row in run.rows(LEDGER)}))
    checks.append(_complete(str(info["status"]), summary))
    if leaks:
        attacks = sorted({row.attack for row in rows})
        known = {*attacks, *map(listed_as, attacks)}
        for name in limits.may_abstain:
            if name not in known:
                raise ConfigError(f"gate.may_abstain: {unknown('attack', name, known)}")
        checks.append(_enough(cases, rows, leaks))
        for name in attacks:
            of_attack = [row for row in rows if row.attack == name]
            may = not {name, listed_as(name)}.isdisjoint(limits.may_abstain)
            checks.append(_attack(name, of_attack, may_abstain=may))
    return checks


class Case(NamedTuple):
    """A worst case that the limits hold for.

    Attributes:
        told: Stands before what is said of it: what the attacker is told; empty without a ladder.
        attacks: Names of its rows; None: of all rows.
        worst: The figures; None: no attack gave an answer.
    """

    told: str
    attacks: Container[str] | None
    worst: WorstCase | None


def _cases(summary: RunSummary) -> list[Case]:
    """Returns the worst case, or that of every rung of the ladder.

    Who is told a fact need not use it, so the rung with all facts is not always the highest.
    """
    if summary.ladder is None:
        return [Case("", None, summary.worst_case)]
    return [
        Case(f"told {rung.told}: ", set(rung.attacks.values()), rung.worst_case)
        for rung in summary.ladder.rungs
    ]


def _limit(name: str, limit: float, cases: Sequence[Case]) -> Check:
    """Compares the upper end of the interval of a figure, the highest of all cases, with a limit.

    A case of which nothing is known does not hide that another one exceeds the limit.
    """
    leak = LEAKS[name]
    found: list[tuple[str, Estimate]] = []
    untold = []
    for case in cases:
        figure = None if case.worst is None else getattr(case.worst, leak.of)
        if figure is None:
            untold.append(f"{case.told}no attack gave an answer that has a {leak.says}")
        else:
            found.append((case.told, figure))
    told, highest = max(found, key=lambda each: each[1].high, default=("", None))
    if highest is None or (untold and highest.high <= limit):
        return _untold(name, untold, "")
    said = (
        f"{told}{leak.says}: {highest.mean:.3g}, with its interval up to {highest.high:.3g}; "
        f"limit {limit:g}"
    )
    return Check(name, Outcome.WITHIN if highest.high <= limit else Outcome.EXCEEDED, said)


def _epsilon(limit: float, privacy: Guarantee | None) -> Check:
    """Compares the weakest client's epsilon with its limit; where nothing is guaranteed, none is.

    An epsilon is computed, not estimated, so it has no interval.
    """
    if privacy is None or privacy.epsilon == NONE:
        return Check("epsilon", Outcome.UNTOLD, f"nothing is guaranteed; limit {limit:g}")
    said = (
        f"epsilon {privacy.epsilon:.4g} at delta {privacy.delta:g}, of one {privacy.unit} by the "
        f"accountant {privacy.accountant}; limit {limit:g}"
    )
    within = float(privacy.epsilon) <= limit
    return Check("epsilon", Outcome.WITHIN if within else Outcome.EXCEEDED, said)


def _bounded(limit: float, canary: CanarySummary) -> Check:
    """Compares the largest lower bound on any client's epsilon with the limit of epsilon.

    Every kind of bound holds in all rows at once, so the largest row is no cherry that was picked.
    One below the limit shows nothing: it is the accounted epsilon that opens the gate.
    """
    kinds = {
        "if the noise is Gaussian": [row.gaussian or 0.0 for row in canary.bounds],
        "if the trade-off curve is Gaussian": [row.f_dp for row in canary.bounds],
        "assuming nothing": [row.epsilon_delta for row in canary.bounds],
    }
    assumed, largest = max(((kind, max(each)) for kind, each in kinds.items()), key=lambda k: k[1])
    said = f"canaries show {largest:.4g} or more ({assumed}); limit {limit:g}"
    within = largest <= limit
    return Check("epsilon by canaries", Outcome.WITHIN if within else Outcome.EXCEEDED, said)


def _canary(canary: CanarySummary | None, clients: set[int]) -> Check:
    """Checks that every client's privacy was measured by canaries, and that no ledger is wrong."""
    if canary is None:
        return Check("canary", Outcome.UNTOLD, "there are no canaries: the file has no [canary]")
    if canary.alarms:
        return Check("canary", Outcome.EXCEEDED, "; ".join(canary.alarms))
    if without := sorted(clients - {row.client for row in canary.bounds}):
        names = ", ".join(map(str, without[:10]))
        return Check("canary", Outcome.UNTOLD, f"clients without a scored canary: {names}")
    return Check("canary", Outcome.WITHIN, f"canaries of all {len(clients)} clients were scored")


def _complete(status: str, summary: RunSummary) -> Check:
    """Checks that the run is finished, was scored afterwards, and lacks nothing."""
    lacks = [*summary.missing]
    if not status == summary.status == "finished":
        lacks.append(
            f"the run is {status} and its figures are of a run that was {summary.status}: "
            "`fedleak run` with the experiment's file finishes both"
        )
    if summary.unscored:
        lacks.append(f"{summary.unscored} answers have no score")
    return _untold("complete", lacks, "the run is finished and nothing is missing")


def _enough(cases: Sequence[Case], rows: Sequence[LeakageRow], leaks: Mapping[str, float]) -> Check:
    """Checks that each worst case is about enough clients and texts, and about all of them."""
    lacks = [f"{case.told}{lack}" for case in cases for lack in _lacks(case, rows, leaks)]
    worst = cases[-1].worst
    if worst is None:
        return _untold("texts", lacks, "")
    said = f"{worst.texts} texts of {worst.clients} clients, by {', '.join(worst.attacks)}"
    return _untold("texts", lacks, said)


def _lacks(case: Case, rows: Sequence[LeakageRow], leaks: Mapping[str, float]) -> list[str]:
    """Returns what a worst case lacks."""
    if (worst := case.worst) is None:
        return ["no attack gave an answer with scores of single texts"]
    rows = [row for row in rows if case.attacks is None or row.attack in case.attacks]
    lacks = [worst.warning] if worst.warning is not None else []
    if worst.unattacked and leaks.keys() & {"exact", "rougeL"}:
        lacks.append(f"{worst.unattacked} of {worst.texts} texts: no attack named sequences")
    searched = {
        row.key for row in rows if any(text.token_recall is not None for text in row.texts or ())
    }
    unsearched = sum(size for key, size in text_counts(rows).items() if key not in searched)
    if unsearched and "token_recall" in leaks:
        lacks.append(f"{unsearched} of {worst.texts} texts: no attack named tokens")
    return lacks


def _attack(name: str, rows: Sequence[LeakageRow], *, may_abstain: bool) -> Check:
    """Checks that an attack was free to work on every update that it was for."""
    ended = Counter(row.status for row in rows)
    late = sum(bool(row.diagnostics.get("time_up")) for row in rows)
    # Label counts alone, for example, are an answer without a score of any text.
    old = sum(
        row.status == Status.RECOVERED
        and row.texts is None
        and (row.rougeL is not None or row.token_recall is not None)
        for row in rows
    )
    of = f"of {len(rows)} updates"
    lacks = []
    if failed := ended[Status.FAILED]:
        lacks.append(f"it failed on {failed} {of}")
    if unscored := ended[UNSCORED]:
        lacks.append(f"its answers for {unscored} {of} are unscored: the truth is not here")
    if late:
        lacks.append(f"its time (`seconds`) was up on {late} {of}: give it more")
    for number, what in ((ended[Status.ABSTAINED], "abstained"), (_guesses(rows), "only guessed")):
        if number and not may_abstain:
            lacks.append(
                f"it {what} on {number} {of}, which is no evidence that nothing can be read: where "
                "the other attacks are enough for you, let it (--may-abstain, gate.may_abstain)"
            )
    if old:
        lacks.append(f"{old} {of} have no scores of single texts: `fedleak score` adds them")
    answered = f"it answered {ended[Status.RECOVERED]} {of}"
    return _untold(f"attack {name}", lacks, answered)


def _guesses(rows: Sequence[LeakageRow]) -> int:
    """Returns how many answers are sequences that explain no more than random texts do."""
    likely = (row.diagnostics.get("likely") for row in rows if row.status == Status.RECOVERED)
    return sum(isinstance(each, list) and not any(each) for each in likely)


def _untold(name: str, lacks: Sequence[str], said: str) -> Check:
    """Returns a check that fails if anything is lacking."""
    return Check(name, Outcome.UNTOLD if lacks else Outcome.WITHIN, "; ".join(lacks) or said)
