"""The verdict: sentences that stand on figures. None of them calls a setting safe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fedleak.report.html.page import Level, Verdict
from fedleak.report.words import MALICIOUS, counted, figure, listed, percent, share
from fedleak.store.summaries import (
    NEARLY,
    AttackSummary,
    CanarySummary,
    CellSummary,
    MembershipSummary,
    RunSummary,
    SweepSummary,
    WorstCase,
)
from fedleak.training.observation import GRANTABLE, Sight


@dataclass(frozen=True)
class Strongest:
    """What was read in a run at worst, by one attack or by all together.

    Attributes:
        by: Who read it, such as `the attack dager`, or `2 attacks together (dager 5 and lamp 3)`.
        texts: How many texts the share of exact ones is the mean of.
        nearly: Texts that were not read word for word, but nearly.
        read: The figures.
    """

    by: str
    texts: int
    nearly: int
    read: WorstCase | AttackSummary

    @property
    def exact_texts(self) -> int:
        """How many texts were read word for word."""
        return round(self.read.exact_match.mean * self.texts) if self.read.exact_match else 0


def strongest(worst: WorstCase | None, attacks: Mapping[str, AttackSummary]) -> Strongest | None:
    """Returns the worst case over attacks; without one the strongest attack's figures.

    None: no attack gave an answer, or none could be compared with what clients held.
    """
    if worst is not None:
        return Strongest(_readers(worst), worst.texts - worst.unattacked, worst.nearly, worst)
    answered = {name: attack for name, attack in attacks.items() if max(_strength(attack)) >= 0}
    if not answered:
        return None
    name, attack = max(answered.items(), key=lambda named: _strength(named[1]))
    return Strongest(f"the attack {name}", attack.sequences, 0, attack)


def _readers(worst: WorstCase) -> str:
    """Returns which attacks read texts word for word; where none did, all that answered."""
    names = list(worst.first) or worst.attacks
    if len(names) == 1:
        return f"the attack {names[0]}"
    counts = listed([f"{name} {count:,}" for name, count in worst.first.items()] or names)
    return f"{len(names)} attacks together ({counts})"


def _strength(attack: AttackSummary | WorstCase) -> tuple[float, ...]:
    estimates = (attack.exact_match, attack.rougeL, attack.token_recall)
    return tuple(-1.0 if estimate is None else estimate.mean for estimate in estimates)


SEEN: Mapping[Sight, tuple[str, str]] = {
    "updates": ("update", ""),
    "sum": ("sum", " of clients' updates"),
    "models": ("difference", " of successive models"),
}
"""What an attack is tried on: the word for one, and what follows it."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much of a run was attacked.

    Attributes:
        attacked, sent: Updates that attacks were tried on, and that clients sent in all.
        unordered: Updates whose words are known and whose order is not, where the time of an
            attack was up and nothing is proved.
        granted: Facts that the attacker was told beyond the protocol.
        sees: What the attacker sees.
        malicious: Whether the server changed the model that it sent.
    """

    attacked: int
    sent: int
    unordered: int
    granted: Sequence[str]
    sees: Sight
    malicious: bool = False


@dataclass(frozen=True)
class Guaranteed:
    """What holds against every attack, also those that nobody has tried.

    Attributes:
        epsilon: The one that holds against the attacker of this run; None: none does.
        sentence: What holds for whom.
    """

    epsilon: float | None
    sentence: str


HEADLINES: Mapping[Level, str] = {
    Level.READ: "Private texts were read",
    Level.PARTLY: "No text was read word for word in this test",
    Level.UNKNOWN: "What can be read was not measured",
}


def run_verdict(summary: RunSummary, extent: Extent, guaranteed: Guaranteed) -> Verdict:
    """Returns the verdict on a run."""
    leakage = strongest(summary.worst_case, summary.attacks)
    extent = replace(extent, malicious=summary.server is not None)
    attacks, membership = summary.attacks, _membership_sentence(summary.membership)
    level = _level(leakage, attacks)
    level = Level.PARTLY if membership and level == Level.UNKNOWN else level
    by = f", by a {MALICIOUS}" if summary.server else ""
    return Verdict(
        level,
        HEADLINES[level] + by + _epsilon_clause(guaranteed.epsilon, summary.canary),
        (
            *([f"The server is malicious: {summary.server}."] if summary.server else []),
            _what_was_read(leakage, attacks, extent) + _personal_data(leakage),
            guaranteed.sentence,
            f"{_order_unknown(extent)}{_read_without_facts(summary)}{_read_of_copies(summary)}"
            f"{membership}{_certainty(leakage, attacks, extent)}",
            _unmeasured(summary, extent),
        ),
    )


def _epsilon_clause(epsilon: float | None, canary: CanarySummary | None) -> str:
    if epsilon is None:
        return ""
    if canary is not None and canary.alarms:
        return f"; canaries contradict the epsilon of {figure(epsilon)}"
    return f"; an epsilon of {figure(epsilon)} holds"


def _level(leakage: Strongest | None, attacks: Mapping[str, AttackSummary]) -> Level:
    if leakage is None:
        return Level.READ if any(attack.verified for attack in attacks.values()) else Level.UNKNOWN
    return Level.READ if leakage.exact_texts else Level.PARTLY


def _what_was_read(
    leakage: Strongest | None, attacks: Mapping[str, AttackSummary], extent: Extent
) -> str:
    who = "This server" if extent.malicious else "A server that follows the protocol"
    if extent.sees == "models":
        who = "An attacker who has the published models"
    who += f" and was told {listed(extent.granted).replace('_', ' ')}" if extent.granted else ""
    noun, source = SEEN[extent.sees]
    updates = counted(extent.attacked, noun) + source
    if leakage is None:
        why = f"no attack gave an answer for any of {updates}"
        if any(attack.unscored for attack in attacks.values()):
            why = f"attacks gave answers for {updates}, but what clients trained on is not here"
        return f"How much {who[0].lower()}{who[1:]} could read was not measured: {why}."
    tokens = "parts of the private texts"
    recall, control = leakage.read.token_recall, leakage.read.control_token_recall
    if recall is not None:
        amount = "all" if recall.mean == 1 else percent(recall.mean)
        tokens = f"{amount} of the distinct words and word parts of the private texts"
        if control is not None:
            tokens += f" (an answer for another client has {percent(control.mean)})"
    if leakage.read.exact_match is None:
        return f"{who} could read {tokens} out of {updates}."
    exact = f"{leakage.exact_texts:,}" if leakage.exact_texts else "none"
    nearly = f", and {leakage.nearly:,} nearly (ROUGE-L of {NEARLY:g} or more)"
    nearly = nearly if leakage.nearly else ""
    by = f", by {leakage.by}" if leakage.exact_texts else ""
    return (
        f"{who} could read {exact} of {counted(leakage.texts, 'private text')} word for "
        f"word{nearly} out of {updates}{by}. It could find {tokens}."
    )


def _personal_data(leakage: Strongest | None) -> str:
    """Returns how much personal data was read; empty where there is none, or no text was named."""
    personal = leakage.read.personal if leakage else None
    if personal is None or personal.read is None:
        return ""
    kinds = personal.kinds.values()
    items, read = (sum(getattr(kind, name) for kind in kinds) for name in ("items", "read"))
    pieces = counted(items, "piece") + " of personal data in these texts"
    sentence = f" Of {pieces} it could read {read:,} whole"
    if personal.control is not None:
        sentence += f" (an answer for another client has {percent(personal.control.mean)})"
    return f"{sentence}."


def _order_unknown(extent: Extent) -> str:
    """Returns that more time may read the order of known words, if that is so."""
    if not extent.unordered:
        return ""
    return (
        f"Of {counted(extent.unordered, SEEN[extent.sees][0])} the words are known, their order is "
        "not, and an attack's time was up: more time may read it. "
    )


def _read_without_facts(summary: RunSummary) -> str:
    """Returns what is read without granted facts, if there is a ladder."""
    rungs = summary.ladder.rungs if summary.ladder else ()
    leakage = strongest(rungs[0].worst_case, {}) if len(rungs) > 1 else None
    if leakage is None or not leakage.read.exact_match:
        return ""
    return (
        f"Told nothing more than the protocol tells, it could read {leakage.exact_texts:,} word "
        "for word. "
    )


def _read_of_copies(summary: RunSummary) -> str:
    """Returns what the same attacks read of undefended copies, if there are any."""
    if (control := summary.positive_control) is None:
        return ""
    copies = f"{counted(control.copies, 'plain gradient')} of these batches, without any defense,"
    if not control.together.exact:
        return (
            f"Of {copies} the same attacks read no text word for word, so that they read none here "
            "shows little. "
        )
    exact = percent(control.together.exact)
    return f"Of {copies} the same attacks read {exact} of the texts word for word. "


def _membership_sentence(membership: MembershipSummary | None) -> str:
    """Returns how well an attacker tells which texts were in an update; empty if it cannot."""
    figures = () if membership is None else membership.figures
    clear = [
        (row.p, -row.auc.mean, row)
        for row in figures
        if row.p is not None and row.p < 0.05 and row.auc is not None and row.auc.mean > 0.5
    ]
    if not clear:
        return ""
    p, area, surest = min(clear, key=lambda ranked: ranked[:2])
    return (
        f"It could tell which of the texts that it has already were in an update: by the score "
        f"{surest.score} of {surest.attack} one that was in ranks above one that was not in "
        f"{percent(-area)} of the pairs (p = {p:.1g} for chance, over all scores). "
    )


def _certainty(
    leakage: Strongest | None, attacks: Mapping[str, AttackSummary], extent: Extent
) -> str:
    surest = max(attacks.values(), key=lambda attack: attack.verified, default=None)
    if leakage is None and surest is not None and surest.verified:
        return (
            f"But a proof confirms the whole answer for {surest.verified:,} of {surest.rows:,} "
            "updates, so that the attacker knows these batches."
        )
    if leakage is None:
        return (
            "Where an attack has no answer, nothing is known: another attack may read what this "
            "one did not."
        )
    sums = extent.sees != "updates"
    over = counted(leakage.read.clients, "group" if sums else "client")
    over += " of clients" if sums else ""
    example = ""
    if leakage.read.warning:
        reason = leakage.read.warning.partition(":")[0]
        example = f"This is an example and not a rate ({reason})"
    sure = example
    others = f"{example}: for" if example else "For"
    if leakage.read.exact_match is not None:
        sure = (
            f"{others} other clients like these the share of texts read word for word is between "
            f"{share(leakage.read.exact_match)} (95 % interval over {over})"
        )
    elif leakage.read.token_recall is not None:
        between = share(leakage.read.token_recall)
        sure = f"{others} other clients like these that share is between {between}"
    proved, rows = (surest.verified, surest.rows) if surest else (0, 0)
    sure += (
        f", and a proof confirms the whole answer for {proved:,} of {rows:,} updates, so that "
        "the attacker knows it too."
        if proved
        else ", and no answer is proved, so an attacker would not be certain of them."
    )
    return sure


def _unmeasured(summary: RunSummary, extent: Extent) -> str:
    gaps = []
    if extent.sent > extent.attacked:
        gaps.append(f"{extent.sent - extent.attacked:,} of {extent.sent:,} updates")
    silent = [name for name, attack in summary.attacks.items() if attack.answers < attack.rows]
    if silent:
        gaps.append(f"updates for which {listed(silent)} had no answer")
    if unscored := sum(attack.unscored for attack in summary.attacks.values()):
        gaps.append(f"how right {counted(unscored, 'unscored answer')} are")
    worst = summary.worst_case
    if worst is not None and worst.unattacked:
        gaps.append(f"{counted(worst.unattacked, 'text')} of which no attack named a sequence")
    if untold := sorted(GRANTABLE - set(extent.granted)):
        gaps.append(f"an attacker who is told {listed(untold, 'or').replace('_', ' ')}")
    if extent.sees == "models":
        gaps.append("the server itself, which has more than the models")
    gaps += ["a server that departs from the protocol", "attacks other than those below"]
    incomplete = "The results are incomplete (see below). " if summary.missing else ""
    return (
        f"{incomplete}Not measured: {listed(gaps)}; so this report can show that texts leak, and "
        "cannot show that they do not."
    )


def sweep_verdict(collected: SweepSummary) -> Verdict:
    """Returns the verdict on a sweep."""
    measured = [(cell, strongest(cell.worst_case, cell.attacks)) for cell in collected.cells]
    answered = [(cell, leakage) for cell, leakage in measured if leakage is not None]
    cells = counted(len(collected.cells), "cell")
    without = len(collected.cells) - len(answered)
    if not answered:
        first = f"How much an attacker could read was not measured in any of {cells}."
        second = "Where no attack has an answer, nothing is known."
        return Verdict(
            Level.UNKNOWN, HEADLINES[Level.UNKNOWN], (first, second, _gaps_of_sweep(without))
        )
    exact = [(cell, leakage) for cell, leakage in answered if leakage.exact_texts]
    malicious = sum(cell.server is not None for cell in collected.cells)
    who = "An attacker who follows the protocol"
    if malicious:
        who = f"An attacker (a {MALICIOUS} in {malicious} of {cells})"
    if exact:
        cell, leakage = max(exact, key=lambda pair: _strength(pair[1].read)[0])
        first = (
            f"{who} could read private texts word for word in "
            f"{len(exact)} of {cells}, most in {_cell(cell)}: {leakage.exact_texts:,} of "
            f"{counted(leakage.texts, 'text')}."
        )
        second = (
            f"There the share is between {share(leakage.read.exact_match)} for other clients like "
            f"these (95 % interval over {counted(leakage.read.clients, 'client')})."
        )
    else:
        first = (
            f"{who} could read no private text word for word in "
            f"{cells}, but attacks answered in {len(answered)} of them."
        )
        shares = [leakage.read.exact_match for _, leakage in answered]
        highest = max((exact_match.high for exact_match in shares if exact_match), default=None)
        second = "What they read in part is in the table below."
        if highest is not None:
            second = (
                "For other clients like these the share of texts read word for word may still be "
                f"up to {percent(highest)} in a cell (upper end of the 95 % interval)."
            )
    if any(leakage.read.warning for _, leakage in answered):
        second = f"{second[:-1]}; cells with few texts or clients are examples and not rates."
    level = Level.READ if exact else Level.PARTLY
    return Verdict(level, HEADLINES[level], (first, second, _gaps_of_sweep(without)))


def _gaps_of_sweep(without: int) -> str:
    gaps = [f"{counted(without, 'cell')} without an answer"] if without else []
    gaps += ["settings between the cells", "attacks other than those below"]
    return (
        f"Not measured: {listed(gaps)}; so this report can show that texts leak, and cannot show "
        "that they do not."
    )


def _cell(cell: CellSummary) -> str:
    return f"the cell {cell.cell}"
