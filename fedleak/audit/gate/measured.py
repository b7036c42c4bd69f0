"""Checks whether enough was measured for the limits to mean anything."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from fedleak.attacks.reconstruction import Status
from fedleak.audit.gate.check import Check, compared, untold
from fedleak.audit.gate.evidence import Evidence
from fedleak.audit.gate.limits import NAMED, SEQUENCES, Case, worst_cases
from fedleak.audit.metrics import intervals
from fedleak.audit.vault import text_count
from fedleak.config.components import listed_as
from fedleak.config.federation.lookup import absent, captures_of
from fedleak.config.federation.schedule import captures_made
from fedleak.config.tables import CANARY_OF_EVERY_CLIENT, GateTable
from fedleak.store.records import UNSCORED, LeakageRow, text_counts
from fedleak.store.run import EVERYONE, Key
from fedleak.store.summaries import SURE
from fedleak.util.lists import first_of, grouped

FOUND_ALL, MOST_WRONG = 1.0, 0.5
"""Tokens count as found if all of them are named, and at most half of the named are wrong."""

READ_FEW = 0.5
"""Sequences that hold less than this share of the tokens that were found leave much unread."""


def measured_checks(limits: GateTable, evidence: Evidence, leaks: Collection[str]) -> list[Check]:
    """Returns checks that enough was measured for limits on attacks.

    Args:
        limits: Of the gate.
        evidence: The run.
        leaks: Names of the limits on the worst case.
    """
    rows, checks = evidence.rows.leakage, [_clients(evidence)]
    if limits.coverage is not None:
        checks.append(_coverage(limits.coverage, evidence))
    if leaks:
        checks.append(_texts(evidence, leaks))
        checks.append(_alarms(rows, leaks))
    names = {*(row.attack for row in rows), *(named.name for named in evidence.experiment.attacks)}
    for name in sorted(names):
        may = not {name, listed_as(name)}.isdisjoint(limits.may_abstain)
        checks.append(_attack(name, evidence, limits.seconds, may_abstain=may))
    return checks


def required_checks(limits: GateTable, evidence: Evidence) -> list[Check]:
    """Returns a check for each thing that has to be measured."""
    wanted = list(dict.fromkeys(limits.require))
    if limits.canary is not None and CANARY_OF_EVERY_CLIENT not in wanted:
        wanted.append(CANARY_OF_EVERY_CLIENT)
    return [_required(requirement, evidence) for requirement in wanted]


def _clients(evidence: Evidence) -> Check:
    """Checks that every client, or one with the same defenses, was attacked."""
    experiment = evidence.experiment
    attacked = {key.client for key in captures_of(evidence.run, experiment)}
    trained = {key.client for key in _made(evidence)}

    def defenses(client: int) -> tuple[int, ...]:
        return tuple(experiment.defenses_of(client))

    known = set(map(defenses, attacked))
    lacks = []
    for places, clients in grouped(sorted(trained - attacked), defenses).items():
        if places in known:
            continue
        kinds = [experiment.defenses_of(clients[0])[place].kind for place in places]
        used = " and ".join(kinds) or "no defense"
        lacks.append(
            f"clients {first_of(clients, NAMED)} use {used} and were never attacked, and no client "
            "like them was: add one to threat.clients"
        )
    sentence = f"every client was attacked, or one with the same defenses: {len(attacked)} of them"
    if EVERYONE in attacked:
        sentence = "what was attacked is of all clients of a round"
    return untold("clients", lacks, sentence)


def _coverage(limit: float, evidence: Evidence) -> Check:
    """Compares a limit with the share of private texts whose updates an attack answered for."""
    rows = evidence.rows.leakage
    answered = {row.key for row in rows if _has_answered(row)}
    sizes = {key: text_count(evidence.run, key) for key in _made(evidence)}
    known = {key: size for key, size in sizes.items() if size is not None}
    unknown, everywhere = len(sizes) - len(known), sum(known.values())
    here = sum(size for key, size in known.items() if key in answered)
    if unknown or not everywhere:
        return untold("coverage", [f"{unknown} updates have no truth in the vault"])
    sentence = f"an attack answered for {here} of {everywhere} private texts; limit {limit:g}"
    return compared("coverage", sentence, holds=here >= limit * everywhere)


def _made(evidence: Evidence) -> list[Key]:
    """Returns the captures that the run made, kept or not."""
    gone = absent(evidence.run)
    return [key for key in captures_made(evidence.experiment) if key not in gone]


def _has_answered(row: LeakageRow) -> bool:
    """Whether a row is an answer, also one without scores of texts, such as label counts."""
    return row.status == Status.RECOVERED or row.texts is not None


def _texts(evidence: Evidence, leaks: Collection[str]) -> Check:
    """Checks that each worst case is about enough clients and texts, and about all of them."""
    cases, rows = worst_cases(evidence.summary), evidence.rows.leakage
    lacks = [f"{case.prefix}{lack}" for case in cases for lack in _lacks(case, rows, leaks)]
    worst = cases[-1].worst
    if worst is None:
        return untold("texts", lacks)
    sums = any(row.apart for row in rows)
    units = "sums of different texts" if sums else "clients"
    sentence = f"{worst.texts} texts of {worst.clients} {units}, by {', '.join(worst.attacks)}"
    if sums:
        sentence += "; it holds for other rounds of these clients, all of them in each sum"
    elif most := evidence.largest.texts:
        sentence += f"; it holds for clients who have at most {most} texts, as all have here"
    return untold("texts", lacks, sentence)


def _lacks(case: Case, rows: Sequence[LeakageRow], leaks: Collection[str]) -> list[str]:
    """Returns what a worst case lacks."""
    if (worst := case.worst) is None:
        return ["no attack gave an answer with scores of single texts"]
    rows = [row for row in rows if case.attacks is None or row.attack in case.attacks]
    lacks = [worst.warning] if worst.warning is not None else []
    if worst.unattacked and SEQUENCES & {*leaks}:
        lacks.append(f"{worst.unattacked} of {worst.texts} texts: no attack named sequences")
    searched = {
        row.key for row in rows if any(text.token_recall is not None for text in row.texts or ())
    }
    unsearched = sum(size for key, size in text_counts(rows).items() if key not in searched)
    if unsearched and "token_recall" in leaks:
        lacks.append(f"{unsearched} of {worst.texts} texts: no attack named tokens")
    return lacks


def _alarms(rows: Sequence[LeakageRow], leaks: Collection[str]) -> Check:
    """Checks that no row of the run shows that the figures are too low."""
    alarms = [*_below_control(rows)]
    if SEQUENCES & {*leaks}:
        alarms += _tokens_unread(rows)
    return untold("alarms", alarms, "no other row of the run says that more was to be read")


def _below_control(rows: Sequence[LeakageRow]) -> Iterator[str]:
    """Yields the attacks whose answers fit the updates of other clients better than their own."""
    with_control = (row for row in rows if None not in (row.rougeL, row.control_rougeL))
    by_attack = grouped(with_control, lambda row: row.attack)
    for attack, of_attack in sorted(by_attack.items()):
        differences = [
            sum((row.rougeL or 0.0) - (row.control_rougeL or 0.0) for row in own) / len(own)
            for own in grouped(of_attack, lambda row: row.client).values()
        ]
        below = sum(difference < 0 for difference in differences)
        above = sum(difference > 0 for difference in differences)
        if below > above and len(by_attack) * intervals.sign_test(differences) <= SURE:
            yield (
                f"{attack} reads less of an update than its answer for another client's update "
                f"holds, for {below} of {len(differences)} clients: its answers are not of the "
                "updates that they are said to be of"
            )


def _tokens_unread(rows: Sequence[LeakageRow]) -> Iterator[str]:
    """Yields a sentence for each attack that found tokens which mostly are in no named sequence."""
    searched = (row for row in rows if row.token_recall is not None)
    by_update = grouped(searched, lambda row: row.key)
    finders: Counter[str] = Counter()
    for of_update in by_update.values():
        sequences = [row.token_recall or 0.0 for row in of_update if row.rougeL is not None]
        for row in of_update:
            found_all = (row.token_recall or 0.0) >= FOUND_ALL
            if row.rougeL is None and found_all and (row.token_precision or 0.0) >= MOST_WRONG:
                finders[row.attack] += bool(sequences) and max(sequences) < READ_FEW
    for attack, count in sorted(finders.items()):
        if count:
            yield (
                f"{attack} found every token of {count} of {len(by_update)} updates, and the "
                "attacks that name sequences found less than half of them: they left unread what "
                "was there"
            )


def _attack(name: str, evidence: Evidence, least_seconds: float, *, may_abstain: bool) -> Check:
    """Checks that an attack was free to work on every update that it should attack."""
    rows = [row for row in evidence.rows.leakage if row.attack == name]
    expected = captures_of(evidence.run, evidence.experiment)
    with_texts = [row for row in rows if not row.of_no_text]  # else nothing can be read
    ended = Counter(row.status for row in with_texts)
    # Label counts alone, for example, are an answer without a score of any text.
    old = sum(
        row.status == Status.RECOVERED
        and row.texts is None
        and (row.rougeL is not None or row.token_recall is not None)
        for row in rows
    )
    of_all = f"of {len(expected)} updates"
    without = len({*expected} - {row.key for row in rows})
    failed, unscored, abstained = (ended[s] for s in (Status.FAILED, UNSCORED, Status.ABSTAINED))
    late = sum(bool(row.diagnostics.get("time_up")) for row in with_texts)
    agreed = _seconds(name, evidence)
    had = "" if agreed is None else f"after {agreed:g} s "
    lacking = {
        f"it has no answer for {without} {of_all}": without,
        f"it failed on {failed} {of_all}": failed,
        f"its answers for {unscored} {of_all} are unscored: the truth is not here": unscored,
        f"its time (`seconds`) was up {had}on {late} {of_all}: the gate asks for "
        f"{least_seconds:g} s (gate.seconds)": late and (agreed is None or agreed < least_seconds),
        f"it abstained on {abstained} {of_all}, which is no evidence that nothing can be read: "
        "where the other attacks are enough for you, name it in gate.may_abstain": (
            abstained and not may_abstain
        ),
        f"{old} {of_all} have no scores of single texts: `fedleak score` adds them": old,
    }
    lacks = [sentence for sentence, holds in lacking.items() if holds]
    answered = f"it answered {ended[Status.RECOVERED]} {of_all}"
    if late and agreed is not None:
        answered += f", {late} of them with all of the {agreed:g} s that were agreed"
    if empty := len(rows) - len(with_texts):
        answered += f"; {empty} have no text"
    return untold(f"attack {name}", lacks, answered)


def _seconds(name: str, evidence: Evidence) -> float | None:
    """Returns the shortest time for one update that an attack was allowed; None: no limit."""
    settings = [answer.settings for answer in evidence.answers if answer.attack == name]
    given = [table.get("seconds") for table in settings] or [
        getattr(attack.attack, "seconds", None)
        for attack in evidence.experiment.attacks
        if attack.name == name
    ]
    return min(
        (float(seconds) for seconds in given if isinstance(seconds, int | float)), default=None
    )


def _required(kind: str, evidence: Evidence) -> Check:
    """Checks that canaries, or an attack of a kind for every update attacked, have measured."""
    if kind == CANARY_OF_EVERY_CLIENT:
        return _canary(evidence)
    expected = {*captures_of(evidence.run, evidence.experiment)}
    kinds = evidence.kinds
    answered = {
        row.key
        for row in evidence.rows.leakage
        if kinds.get(row.attack) == kind and (_has_answered(row) or row.of_no_text)
    }
    lacks = []
    if without := len(expected - answered):
        lacks.append(f"no attack of this kind answered for {without} of {len(expected)} updates")
    return untold(f"required {kind}", lacks, f"it answered for all {len(expected)} updates")


def _canary(evidence: Evidence) -> Check:
    """Checks that every client's privacy was measured by canaries, and that no ledger is wrong."""
    canary, clients = evidence.summary.canary, {row.client for row in evidence.rows.ledger}
    name = "canaries of clients"
    if canary is None:
        return untold(name, ["there are no canaries: the file has no [canary]"])
    if canary.alarms:
        return compared(name, "; ".join(canary.alarms), holds=False)
    without = sorted(clients - {row.client for row in canary.bounds})
    lacks = [f"clients without a scored canary: {first_of(without, NAMED)}"]
    return untold(
        name, lacks if without else (), f"canaries of all {len(clients)} clients were scored"
    )
