"""Plans what an audit does in its time: which clients and rounds, and how long each attack takes.

Plain functions of what a rehearsal measured. The plan names all that does not fit.
"""

import math
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedleak.attacks.clock import now
from fedleak.audit.positive_control import COPIES, is_undefended
from fedleak.config import checks, components
from fedleak.config.components import listed_as
from fedleak.config.experiment import Experiment
from fedleak.config.federation.schedule import expected_captures
from fedleak.config.loading import changed
from fedleak.models import LanguageModel
from fedleak.report.words import counted, listed
from fedleak.running.audit.rehearsal import timed
from fedleak.running.forecast import duration
from fedleak.store.audits import AuditPart, Timings
from fedleak.util.errors import ConfigError

PLANNED, STOPPED = 0.9, 0.95
"""The share of the time that is planned, as no estimate is exact; and the share after which an
audit is stopped, as scores and page take the rest."""

GOOD_SECONDS, FEWEST_SECONDS, MOST_SECONDS = 60.0, 5.0, 300.0
"""The time of an attack on an update: the first, or that of the gate, if it is longer; the second
if the first leaves no time for one client; up to the last if time is left over."""

REPORT_SECONDS = 10.0
"""The time of the page and of the gate."""


@dataclass(frozen=True)
class Time:
    """The time of a command.

    Attributes:
        minutes: All of it.
        share: The share of the audit; the rest is for the search for a defense.
        begun: The moment at which it began.
    """

    minutes: float
    share: float = 1.0
    begun: float = field(default_factory=now)

    @property
    def ends(self) -> float:
        """The moment at which attacks end, even if some are left, so that the page has time."""
        return self.begun + STOPPED * 60 * self.minutes - REPORT_SECONDS

    def is_up(self) -> bool:
        """Whether that moment has passed."""
        return now() > self.ends


@dataclass(frozen=True)
class Plan:
    """What an audit does.

    Attributes:
        experiment: What is run, with all attacks.
        parts: What takes time.
        left_out: Sentences on what the audit does not do.
    """

    experiment: Experiment
    parts: tuple[AuditPart, ...]
    left_out: tuple[str, ...]


class Costs:
    """What attacks take, in seconds of one worker.

    Args:
        experiment: The attacks, before they are given any time that its file does not give them.
        timings: What a rehearsal measured.
    """

    def __init__(self, experiment: Experiment, timings: Timings) -> None:
        self.timings = timings
        tables = {str(table.get("name", table["kind"])): table for table in experiment.attack}
        names = [named.name for named in experiment.attacks]
        self._limits = {name: tables.get(listed_as(name), {}).get("seconds") for name in names}

    def of_updates(self, seconds: float) -> dict[str, float]:
        """Returns what each attack takes for an update, if those without a time get `seconds`."""
        return self._each(self.timings.attacks, self.timings.late, seconds)

    def of_copies(self, seconds: float) -> dict[str, float]:
        """Returns the same for an undefended copy."""
        return self._each(self.timings.copies, self.timings.late_copies, seconds)

    def all(self, updates: int, copies: int, seconds: float) -> float:
        """Returns what all attacks on so many updates and copies take, one after the other."""
        of_updates, of_copies = self.of_updates(seconds), self.of_copies(seconds)
        return updates * sum(of_updates.values()) + copies * sum(of_copies.values())

    def _each(
        self, took: Mapping[str, float], late: Container[str], seconds: float
    ) -> dict[str, float]:
        """Returns seconds by attack; one whose time was up in the rehearsal takes all it gets."""
        return {
            name: float(self._limits.get(name) or seconds) if name in late else measured
            for name, measured in took.items()
        }


def to_audit(
    experiment: Experiment,
    model: LanguageModel,
    *,
    trained: bool = False,
    batches: bool = True,
) -> tuple[Experiment, list[str]]:
    """Returns an experiment with what every audit has, and a sentence for each part it cannot have.

    Every audit has the attacks `auto`, `membership` and the one that reads what a malicious server
    planted, and canaries if clients add noise.

    Args:
        experiment: As its file says.
        model: With its parameters' names; no weights are needed.
        trained: Whether training is over: clients take in canaries while they train.
        batches: Whether the clients' batches are here: `membership` is asked about them.
    """
    left_out: list[str] = []
    kinds = {named.attack.kind for named in experiment.attacks}
    every = ("auto", "membership", *components.reading_planted(experiment.server))
    wanted = [kind for kind in every if kind not in kinds]
    if not batches and "membership" in wanted:
        wanted.remove("membership")
        left_out.append(
            "membership: what clients trained on is not here, so there is nothing to ask about"
        )
    noisy = any(placed.part.noisy for placed in experiment.defenses)
    if experiment.canary is None and noisy:
        if trained:
            left_out.append("canaries: clients take them in while they train, and that is over")
        else:
            wanted.append("canaries")
    for name in wanted:
        tables: dict[str, Any] = {"attack": [*experiment.attack, {"kind": name}]}
        if name == "canaries":
            tables = {"canary": {}}
        try:
            more = changed(experiment, tables)
            checks.check_attacks(more, model)
            checks.check_canaries(more, model)
        except ConfigError as error:
            left_out.append(f"{name}: {error}")
        else:
            experiment = more
    return experiment, left_out


def plan(
    experiment: Experiment,
    timings: Timings,
    minutes: float,
    workers: int = 1,
    *,
    share: float = 1.0,
) -> Plan:
    """Returns the part of an audit that fits into its time.

    Args:
        experiment: What `to_audit` returned.
        timings: What the rehearsal measured.
        minutes: For all of the audit, with its rehearsal, and for what follows it.
        workers: Attacks that run at once.
        share: The share of the minutes for the audit; the rest is for what follows it.

    Raises:
        ConfigError: No update can be attacked in the time.
    """
    training, last = training_seconds(experiment, timings), experiment.federation.rounds
    around = timings.rehearsal + timings.around + REPORT_SECONDS
    room = (PLANNED * 60 * minutes * share - around - training) * workers
    costs, fewest = Costs(experiment, timings), 0.0
    choices = [experiment.threat.rounds] if experiment.threat.rounds else [[1, last], [1]]
    for rounds in choices:
        in_rounds = with_threat(experiment, rounds, experiment.threat.clients)
        chosen = _fitted(in_rounds, costs, room)
        if chosen is not None:
            break
        one_each = len({key.round for key in expected_captures(in_rounds)})
        fewest = costs.all(one_each, _copies(in_rounds, timings), FEWEST_SECONDS)
    else:
        raise ConfigError(
            f"no update can be attacked in {minutes:g} minutes, of which training takes about "
            f"{duration(training)}: give --minutes "
            f"{minutes_for((fewest / workers + training + around) / share)}, or train less (--set "
            "federation.rounds=...)"
        )
    final, seconds = chosen
    parts = (
        AuditPart(what="rehearsal, which told how long the rest takes", seconds=timings.rehearsal),
        AuditPart(
            what=f"training: {counted(last, 'round')} of "
            f"{counted(experiment.clients_per_round, 'client')}",
            seconds=training,
        ),
        *attack_parts(
            costs.of_updates(seconds),
            costs.of_copies(seconds),
            dict.fromkeys(timings.attacks, len(expected_captures(final))),
            _copies(final, timings),
            workers,
        ),
        AuditPart(what="workers, scores, page and gate", seconds=timings.around + REPORT_SECONDS),
    )
    all_clients = with_threat(final, final.threat.rounds, experiment.threat.clients)
    everything = costs.all(len(expected_captures(all_clients)), _copies(final, timings), seconds)
    needed = minutes_for((everything / workers + training + around) / share)
    left_out = _not_attacked(final, all_clients, choices[0], seconds, needed)
    return Plan(final, parts, tuple(left_out))


def attack_parts(
    of_updates: Mapping[str, float],
    of_copies: Mapping[str, float],
    counts: Mapping[str, int],
    copies: int,
    workers: int,
) -> Iterator[AuditPart]:
    """Yields a part for each attack, on updates and on undefended copies of some.

    Args:
        of_updates, of_copies: The seconds of each attack, by name, on one.
        counts: How many updates each attack is tried on, by name.
        copies: How many copies.
        workers: Attacks that run at once.
    """
    for name, seconds in of_updates.items():
        title = f"{name} on {counted(counts[name], 'update')}, {seconds:.1f} s each"
        yield AuditPart(what=title, seconds=counts[name] * seconds / workers)
    for name, seconds in of_copies.items() if copies else ():
        title = f"{name} on undefended copies of {copies}, {seconds:.1f} s each"
        yield AuditPart(what=title, seconds=copies * seconds / workers)


def _not_attacked(
    experiment: Experiment,
    all_clients: Experiment,
    rounds: Sequence[int],
    seconds: float,
    needed: int,
) -> Iterator[str]:
    """Yields what is not attacked, and what will close the gate.

    Args:
        experiment: What is run.
        all_clients: The same with all clients in these rounds.
        rounds: The rounds that were to be attacked.
        seconds: The time that attacks get for an update.
        needed: Minutes in which all clients can be attacked.
    """
    attacked, last = expected_captures(experiment), experiment.federation.rounds
    if more := len(expected_captures(all_clients)) - len(attacked):
        clients = len({key.client for key in attacked})
        yield (
            f"{counted(more, 'update')} of clients in these rounds: there is time for "
            f"{counted(clients, 'client')} (--minutes {needed} has time for all)"
        )
    here = sorted({key.round for key in attacked})
    for round in sorted({*rounds} - {*here}):
        yield f"round {round}: there is no time for it (--minutes {needed + 1})"
    if len(here) < last:
        named = listed([str(round) for round in here[:12]])
        yield (
            f"{counted(last - len(here), 'round')} of {last}: "
            f"attacked {'is' if len(here) == 1 else 'are'} {named} (threat.rounds chooses others)"
        )
    if is_undefended(experiment):
        yield "undefended copies: the updates are undefended, so they are their own control"
    limits = experiment.gate
    if limits.limits_leaks and seconds < limits.seconds:
        yield (
            f"what [gate] asks for: attacks get {seconds:.0f} s for an update, and it wants "
            f"{limits.seconds:g} s of those whose time is up (gate.seconds)"
        )


def minutes_for(seconds: float) -> int:
    """Returns how many minutes leave so many seconds to plan."""
    return math.ceil(seconds / 60 / PLANNED)


def training_seconds(experiment: Experiment, timings: Timings) -> float:
    """Returns what all rounds of training take."""
    rounds = experiment.federation.rounds
    scored = sum(map(experiment.evaluated, range(rounds + 1)))
    updates = rounds * experiment.clients_per_round
    return timings.training + timings.update * updates + timings.utility * scored


def with_threat(
    experiment: Experiment, rounds: Sequence[int] | None, clients: Sequence[int] | None
) -> Experiment:
    """Returns an experiment in which these rounds and clients are attacked; None: all."""
    threat = {
        "threat.rounds": None if rounds is None else sorted({*rounds}),
        "threat.clients": None if clients is None else sorted(clients),
    }
    return changed(experiment, threat)


def with_time(experiment: Experiment, seconds: float) -> Experiment:
    """Returns an experiment whose attacks have so much time, unless its file gives them one."""
    return changed(experiment, {"attack": timed(experiment.attack, seconds)})


def _fitted(experiment: Experiment, costs: Costs, room: float) -> tuple[Experiment, float] | None:
    """Returns an experiment with the clients that fit, and the time of an attack on an update.

    Args:
        experiment: With its rounds.
        costs: Of its attacks.
        room: Seconds of all workers together.

    Returns:
        None: not one client of each round can be attacked.
    """
    copies = _copies(experiment, costs.timings)
    wanted = experiment.gate.seconds if experiment.gate.limits_leaks else 0.0
    good = max(GOOD_SECONDS, wanted)
    for seconds in (good, FEWEST_SECONDS):
        updates = _chosen(experiment, costs, room, seconds)
        if updates is not None:
            break
    else:
        return None
    count = len(expected_captures(updates))
    # One second more per attack costs one second for each try that uses all its time.
    grows = costs.all(count, copies, seconds + 1) - costs.all(count, copies, seconds)
    spare = room - costs.all(count, copies, seconds)
    if grows:
        seconds = min(seconds + spare // grows, max(good, MOST_SECONDS))
    return with_time(updates, seconds), seconds


def _chosen(experiment: Experiment, costs: Costs, room: float, seconds: float) -> Experiment | None:
    """Returns an experiment with as many clients as there is time for; None: not for one.

    One client of each group with the same defenses comes before all others.
    """
    keys, copies = expected_captures(experiment), _copies(experiment, costs.timings)
    if costs.all(len(keys), copies, seconds) <= room:
        return experiment
    by_client = Counter(key.client for key in keys)
    clients: list[int] = []
    for client in sorted(by_client, key=lambda c: (c not in experiment.unlike_clients, c)):
        count = sum(by_client[c] for c in [*clients, client])
        if costs.all(count, copies, seconds) <= room:
            clients.append(client)
    rounds = {key.round for key in keys if key.client in clients}
    if experiment.sees != "updates" or rounds != {key.round for key in keys}:
        return None
    return with_threat(experiment, experiment.threat.rounds, clients)


def _copies(experiment: Experiment, timings: Timings) -> int:
    """Returns how many undefended copies are attacked."""
    keys = expected_captures(experiment)
    of_first = sum(key.round == keys[0].round for key in keys)
    return min(COPIES, of_first) if timings.copies else 0
