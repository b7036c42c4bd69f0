"""The verdict: sentences that figures support. None of them calls a setting safe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedleak.attacks.reconstruction import Status
from fedleak.audit.metrics.intervals import wilson
from fedleak.audit.privacy.ledger import CONTRADICTED
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import stored
from fedleak.config.federation.schedule import captures_made
from fedleak.report.html.page import Entry, Level, Verdict
from fedleak.report.tables.leakage import ReadShare, shares
from fedleak.report.tables.membership import who_was_in
from fedleak.report.tables.published import given_away
from fedleak.report.words import MALICIOUS, counted, few_digits, figure, listed, percent, share
from fedleak.store.records import LEDGER, UNSCORED, LeakageRow, LedgerRow
from fedleak.store.run import Key, Run
from fedleak.store.summaries import (
    NEARLY,
    SUMMARY,
    AttackSummary,
    MembershipSummary,
    RunSummary,
    WorstCase,
)
from fedleak.training.observation import GRANTABLE, Sight
from fedleak.training.privacy.accounting import NONE

WORDS_KNOWN, ORDER_UNKNOWN = 0.9, 0.5
"""Words are known if at least this share of tokens is found; their order is not if less than this
share of texts is read exactly."""


@dataclass(frozen=True)
class Strongest:
    """What was read in a run at worst, by one attack or by all together.

    Attributes:
        by: Who read it, such as `the attack dager`, or `2 attacks together (dager 5 and lamp 3)`.
        texts: How many texts the share of exact ones is over.
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

    @property
    def strength(self) -> tuple[float, ...]:
        """Shares of texts read, ROUGE-L, and the share of tokens found; -1: not measured."""
        estimates = (self.read.exact_match, self.read.rougeL, self.read.token_recall)
        return tuple(-1.0 if estimate is None else estimate.mean for estimate in estimates)


def strongest(worst: WorstCase | None, attacks: Mapping[str, AttackSummary]) -> Strongest | None:
    """Returns the worst case over attacks; without one the strongest attack's figures.

    None: no attack gave an answer, or none could be compared with what clients held.
    """
    if worst is not None:
        return Strongest(_readers(worst), worst.texts - worst.unattacked, worst.nearly, worst)
    alone = (
        Strongest(f"the attack {name}", row.sequences, 0, row) for name, row in attacks.items()
    )
    answered = [attack for attack in alone if max(attack.strength) >= 0]
    return max(answered, key=lambda attack: attack.strength, default=None)


def _readers(worst: WorstCase) -> str:
    """Returns which attacks read texts word for word; where none did, all that answered."""
    names = list(worst.first) or worst.attacks
    if len(names) == 1:
        return f"the attack {names[0]}"
    counts = listed([f"{name} {count:,}" for name, count in worst.first.items()] or names)
    return f"{len(names)} attacks together ({counts})"


SEEN: Mapping[Sight, tuple[str, str]] = {
    "updates": ("update", ""),
    "sum": ("sum", " of clients' updates"),
    "models": ("difference", " of successive models"),
}
"""What attacks are tried on: the noun that is counted, and the words that follow it."""


@dataclass(frozen=True, kw_only=True)
class Extent:
    """How much of a run was attacked.

    Attributes:
        attacked, sent: Updates that attacks were tried on, and updates that clients sent in all.
        unordered: Those of the late updates whose words are known and whose order is not.
        late: Updates on which the time of an attack was up and for which nothing is proved.
        granted: Facts that the attacker was told beyond the protocol.
        sees: What the attacker sees.
        adapters: Whether clients train LoRA adapters and not the model.
    """

    attacked: int
    sent: int
    unordered: int
    late: int = 0
    granted: Sequence[str]
    sees: Sight
    adapters: bool = False


@dataclass(frozen=True)
class Guaranteed:
    """What holds against every attack, also those that nobody has tried.

    Attributes:
        epsilon: The epsilon that holds against the attacker of this run; None: there is none.
        sentence: What holds for whom.
    """

    epsilon: float | None
    sentence: str


def verdict_of(run: Run, rows: Sequence[LeakageRow]) -> Verdict:
    """Returns the verdict on a run that was just scored.

    Raises:
        FedleakError: A file is missing or damaged.
    """
    experiment, summary = stored(run), informed(run.read_document(SUMMARY))
    read = shares([row for row in rows if row.attack in summary.attacks])
    extent = Extent(
        attacked=len(read),
        sent=len(captures_made(experiment)),
        unordered=unordered(rows, read),
        late=len(late(rows)),
        granted=granted(experiment, summary),
        sees=experiment.sees,
        adapters=experiment.model.lora is not None,
    )
    return run_verdict(summary, extent, _guaranteed(experiment, summary, run.rows(LEDGER)))


def informed(summary: RunSummary) -> RunSummary:
    """Returns the summary; if there is a ladder, only with the attacks that are told all facts."""
    if summary.ladder is None:
        return summary
    names = summary.ladder.top.attacks.values()
    attacks = {name: attack for name, attack in summary.attacks.items() if name in names}
    return summary.model_copy(update={"attacks": attacks})


def granted(experiment: Experiment, summary: RunSummary) -> Sequence[str]:
    """Returns the facts that the best informed attacker is told."""
    return summary.ladder.top.granted if summary.ladder else sorted(experiment.threat.knows)


def late(rows: Sequence[LeakageRow]) -> frozenset[Key]:
    """Returns the updates on which an attack's time was up and for which nothing is proved."""
    up = {row.key for row in rows if row.diagnostics.get("time_up")}
    return frozenset(up - {row.key for row in rows if row.verified})


def unordered(rows: Sequence[LeakageRow], read: Mapping[Key, ReadShare]) -> int:
    """Counts the updates whose words are known and whose order more time may read."""
    unfinished = late(rows)
    return sum(
        (share.tokens or 0.0) >= WORDS_KNOWN and (share.exact or 0.0) < ORDER_UNKNOWN
        for key, share in read.items()
        if key in unfinished
    )


def _guaranteed(
    experiment: Experiment, summary: RunSummary, ledger: Sequence[LedgerRow]
) -> Guaranteed:
    held, aggregator = summary.privacy, experiment.aggregator
    if held is None:
        return Guaranteed(None, "No client has trained, so there is no ledger.")
    rounds = counted(max((row.round for row in ledger), default=0), "round")
    if held.epsilon == NONE:
        return Guaranteed(
            None, f"Nothing is guaranteed to every client: there is no epsilon after {rounds}."
        )
    sentence = (
        f"Every client has an epsilon of at most {figure(held.epsilon)} at delta "
        f"{figure(held.delta)} after {rounds} (unit: {held.unit}; neighbouring: "
        f"{held.neighbouring}; accountant: {held.accountant}; noise multiplier: "
        f"{figure(held.noise_multiplier)})."
    )
    if contradicting := _contradicting(summary):
        sentence += f" But {contradicting} contradict the ledger, so that none of it holds."
    if aggregator is None or aggregator.trust is None:
        return Guaranteed(float(held.epsilon), sentence)
    against = float(held.epsilon) if experiment.sees == "models" else None
    return Guaranteed(against, f"{sentence} Mind that {aggregator.trust}.")


UNMEASURED = "What can be read was not measured"
"""The headline where no attack gave an answer that could be compared."""

NO_TEXT_READ = "No text was read word for word in this test"


def run_verdict(summary: RunSummary, extent: Extent, guaranteed: Guaranteed) -> Verdict:
    """Returns the verdict on a run."""
    leakage = strongest(summary.worst_case, summary.attacks)
    members = _membership_sentence(summary.membership)
    level = _level(leakage, summary.attacks, members)
    by = f", by a {MALICIOUS}" if summary.server else ""
    certainty = (
        f"{_order_unknown(extent)}{_read_without_facts(summary)}{_read_of_copies(summary)}"
        f"{_certainty(leakage, summary, extent)}"
    )
    given = given_away(summary.published)
    return Verdict(
        level,
        _worst(summary, leakage, level, members) + by + _epsilon_clause(guaranteed, summary),
        (
            *([Entry("Server", f"It is malicious: {summary.server}.")] if summary.server else []),
            Entry("Read", _what_was_read(leakage, summary, extent) + _personal_data(leakage)),
            Entry("Who was in", members or _nobody_told(summary.membership)),
            *([Entry("Published model", f"{given}.")] if given else []),
            Entry("Guaranteed", guaranteed.sentence),
            Entry("Model", _worth(summary)),
            Entry("How sure", certainty),
            Entry("Not seen", _unmeasured(summary, extent)),
            Entry("Next", _next_step(summary, extent, guaranteed, members)),
        ),
    )


def _worst(summary: RunSummary, leakage: Strongest | None, level: Level, members: str) -> str:
    """Returns the worst that was found, in a few words."""
    if leakage is not None and leakage.exact_texts:
        were = "was" if leakage.exact_texts == 1 else "were"
        texts = counted(leakage.texts, "private text")
        return f"{leakage.exact_texts:,} of {texts} {were} read word for word"
    if level == Level.READ:
        return "Private texts were read: a proof confirms whole answers"
    if leakage is not None and leakage.nearly:
        were, texts = "was" if leakage.nearly == 1 else "were", counted(leakage.texts, "text")
        return f"{leakage.nearly:,} of {texts} {were} read nearly word for word"
    if (who := who_was_in(summary)) is not None:
        return who[0].upper() + who[1:]
    if leakage is not None and (share := _words_found(leakage)) is not None:
        amount = "All" if share == 1 else percent(share)
        return f"{amount} of the private texts' words were found"
    if members:
        return "It could be told which texts were in an update"
    attacks = summary.attacks.values()
    ended = {status for attack in attacks for status, count in attack.status.items() if count}
    # Where attacks abstained and none failed, that nothing was read is measured.
    silent = Status.ABSTAINED in ended and not ended & {Status.FAILED, UNSCORED}
    if leakage is None and not silent:
        return UNMEASURED
    if leakage is None or leakage.read.exact_match is None:
        return "No attack stands by a text that it read"
    return NO_TEXT_READ


def _words_found(leakage: Strongest) -> float | None:
    """Returns the share of words that was found; None: it is not more than chance finds."""
    recall, control = leakage.read.token_recall, leakage.read.control_token_recall
    if recall is None or recall.low <= (0.0 if control is None else control.mean):
        return None
    return recall.mean


def _worth(summary: RunSummary) -> str:
    """Returns what the trained model is worth on texts that nobody trained on."""
    if (after := summary.utility) is None:
        return "What it is worth was not measured."
    name = next((name for name in ("accuracy", "perplexity") if name in after.figures), None)
    if name is None or after.figures[name] is None:
        return f"After round {after.round} its utility was not measured."
    begun = summary.utility_before
    before = None if begun is None else begun.figures.get(name)
    value, interval, few = few_digits(after.figures[name]), "", ""
    if name == "accuracy":
        right = round((after.figures[name] or 0.0) * summary.held_out)
        _, low, high = wilson(right, summary.held_out)
        interval = f" (95 % interval {low:.2f} to {high:.2f})"
        if before is not None and low <= before <= high:
            few = " So few texts do not show that training changed it."
    earlier = "" if before is None else f"; before training it was {few_digits(before)}"
    if (central := summary.utility_reference) is not None:
        earlier += f"; trained centrally, without defenses: {few_digits(central.figures.get(name))}"
    texts = counted(summary.held_out, "held-out text")
    return f"After round {after.round} its {name} is {value}{interval} on {texts}{earlier}.{few}"


def _epsilon_clause(guaranteed: Guaranteed, summary: RunSummary) -> str:
    if (epsilon := guaranteed.epsilon) is None:
        return ""
    if contradicting := _contradicting(summary):
        return f"; {contradicting} contradict the epsilon of {figure(epsilon)}"
    return f"; an epsilon of {figure(epsilon)} holds"


def _contradicting(summary: RunSummary) -> str:
    """Returns what contradicts the ledger; empty: nothing does."""
    drawn = any(sentence.endswith(CONTRADICTED) for sentence in summary.missing)
    by_canaries = summary.canary is not None and summary.canary.alarms
    names = {"canaries": by_canaries, "the records that steps drew": drawn}
    return " and ".join(name for name, holds in names.items() if holds)


def _level(leakage: Strongest | None, attacks: Mapping[str, AttackSummary], members: str) -> Level:
    proved = leakage is None and any(attack.verified for attack in attacks.values())
    if proved or (leakage is not None and leakage.exact_texts):
        return Level.READ
    return Level.UNKNOWN if leakage is None and not members else Level.PARTLY


def _what_was_read(leakage: Strongest | None, summary: RunSummary, extent: Extent) -> str:
    who = "This server" if summary.server else "A server that follows the protocol"
    if extent.sees == "models":
        who = "An attacker who has the published models"
    who += f" and was told {listed(extent.granted).replace('_', ' ')}" if extent.granted else ""
    noun, source = SEEN[extent.sees]
    updates = counted(extent.attacked, noun) + source
    if leakage is None:
        why = f"no attack named a text or a word of any of {updates}"
        if any(attack.unscored for attack in summary.attacks.values()):
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
        return f"{who} could read {tokens} out of {updates}; no attack stands by a whole text."
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
    exact, by_attack = percent(control.together.exact), ""
    if len(control.attacks) > 1:
        figures = [f"{name} {percent(read.exact)}" for name, read in control.attacks.items()]
        by_attack = f" ({listed(figures)})"
    return f"Of {copies} the same attacks read {exact} of the texts word for word{by_attack}. "


def _membership_sentence(membership: MembershipSummary | None) -> str:
    """Returns how well an attacker tells which texts were in an update; empty if it cannot."""
    surest = membership.clearest if membership else None
    if surest is None or surest.auc is None:
        return ""
    return (
        "An attacker could tell which of the texts that it has already were in an update: by the "
        f"score {surest.score} of {surest.attack} one that was in ranks above one that was not in "
        f"{percent(surest.auc.mean)} of the pairs (p = {surest.p:.1g} for chance, over all scores)."
    )


def _nobody_told(membership: MembershipSummary | None) -> str:
    """Returns that no attack told which texts were in an update, or that none tried."""
    if membership is None or not membership.figures:
        return "Whether it can be told which texts were in an update was not measured."
    figures = max(membership.figures, key=lambda row: row.members + row.controls)
    return (
        f"No score told texts that were in an update from others so well that chance would rarely "
        f"do it ({figures.members:,} that were in, {figures.controls:,} that were not)."
    )


def _certainty(leakage: Strongest | None, summary: RunSummary, extent: Extent) -> str:
    surest = max(summary.attacks.values(), key=lambda attack: attack.verified, default=None)
    proved, rows = (surest.verified, surest.rows) if surest else (0, 0)
    if leakage is None and proved:
        return (
            f"But a proof confirms the whole answer for {proved:,} of {rows:,} updates, so that "
            "the attacker knows these batches."
        )
    if leakage is None:
        return (
            "Where an attack has no answer, nothing is known: another attack may read what this "
            "one did not."
        )
    read = leakage.read
    over, others = counted(read.clients, "client"), "other clients like these"
    if extent.sees != "updates":
        over = "the sums of one group of clients"
        if read.clients > 1:
            over = f"{read.clients} sums of different texts"
            others = "other rounds of these clients"
    sure, others = "", f"For {others}"
    if read.warning:
        sure = f"This is an example and not a rate ({read.warning.partition(':')[0]})"
        others = f"{sure}: {others.lower()}"
    if read.exact_match is not None:
        sure = (
            f"{others} the share of texts read word for word is between {share(read.exact_match)} "
            f"(95 % interval over {over})"
        )
    elif read.token_recall is not None:
        sure = f"{others} that share is between {share(read.token_recall)}"
    if not proved:
        return f"{sure}, and no answer is proved, so an attacker would not be certain of them."
    return (
        f"{sure}, and a proof confirms the whole answer for {proved:,} of {rows:,} updates, so "
        "that the attacker knows it too."
    )


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
    incomplete = "The results are incomplete (see below). " if summary.missing else ""
    return incomplete + not_seen([*gaps, "a server that departs from the protocol"])


def not_seen(gaps: Sequence[str]) -> str:
    """Returns what was not measured, and what follows from that."""
    unmeasured = listed([*gaps, "attacks other than those named here"])
    return (
        f"Not measured: {unmeasured}; so this report can show that texts leak, and cannot show "
        "that they do not."
    )


def _next_step(summary: RunSummary, extent: Extent, guaranteed: Guaranteed, members: str) -> str:
    """Returns what to try next, in an order in which it can be done."""
    leakage = strongest(summary.worst_case, summary.attacks)
    control, defended = summary.positive_control, bool(summary.defenses.defense)
    read = leakage is not None and (leakage.exact_texts or leakage.nearly)
    leaks = read or members or (leakage is not None and _words_found(leakage) is not None)
    steps = {
        "complete the results, as said below": summary.missing,
        "give the attacks more time (--minutes, or seconds of an attack): on "
        f"{counted(extent.late, SEEN[extent.sees][0])} it was up": (
            extent.late and guaranteed.epsilon is None  # noise is no lack of time
        ),
        "find settings with which the attacks read the undefended copies: before that, reading "
        "nothing says nothing": control is not None and not control.together.exact and not read,
        "make these defenses stronger, or use others": leaks and defended,
        "change how clients train: larger batches, more local steps, "
        f"{'' if extent.adapters else 'adapters, frozen embeddings, '}"
        "secure_sum, or noise (`fedleak list` names the defenses)": leaks and not defended,
        "attack more clients: so few are an example": (
            extent.attacked < extent.sent if leakage is None else leakage.read.warning
        ),
        "add a defense that guarantees an epsilon (dp_sgd, local_dp): other attacks may read what "
        "these did not": guaranteed.epsilon is None,
    }
    wanted = [step for step, holds in steps.items() if holds]
    if not wanted:
        return "Audit again whenever the model, the batches or the defenses change."
    first = wanted[0][0].upper() + wanted[0][1:]
    return f"{'; '.join([first, *wanted[1:]])}. Then audit again."
