"""Opens the run of an audit, or goes on with one that was stopped."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fedleak.attacks.clock import now
from fedleak.audit import defense_checks, positive_control
from fedleak.audit.answer_scores import Scored
from fedleak.audit.answered import answered
from fedleak.audit.defense_checks import Finding
from fedleak.audit.vault import text_count
from fedleak.config.experiment import Experiment
from fedleak.config.loading import parse
from fedleak.config.tables import WorkersTable
from fedleak.federation.lookup import captures_of, run_folder, stored
from fedleak.federation.workload import outline
from fedleak.running import pipeline, preparation
from fedleak.running.audit.plan import (
    FEWEST_SECONDS,
    MOST_SECONDS,
    PLANNED,
    REPORT_SECONDS,
    attack_parts,
    plan,
    to_audit,
    with_threat,
)
from fedleak.running.audit.rehearsal import Timings, attack_timings, rehearse, timed
from fedleak.running.dispatch.progress import RunProgress
from fedleak.running.pipeline import Engine
from fedleak.running.workers.process import Worker, devices
from fedleak.store.audits import AUDIT, Audit, AuditPart
from fedleak.store.run import Run
from fedleak.store.shards import read_answers
from fedleak.util.errors import ConfigError

Report = Callable[[RunProgress], None]

ENDING = "-audit"
"""Of the name of an audit's run, so that `fedleak run` of the same file is another run."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An audit that is planned, whether anything of it is done or not.

    Attributes:
        run: The run directory.
        experiment: What is run there, with its workers.
        audit: The plan.
        findings: Of the check of defenses, if it was made just now.
        trains: Whether clients train; if not, their updates are there.
        begun: When this command began to work on it.
    """

    run: Run
    experiment: Experiment
    audit: Audit
    findings: Sequence[Finding] | None = None
    trains: bool
    begun: float

    def carry_out(self, train: Engine, report: Report, on: Sequence[Worker]) -> list[Scored]:
        """Trains, attacks and scores, as far as that is not done yet."""
        run, experiment = self.run, self.experiment
        control = not positive_control.is_undefended(experiment)
        if not self.trains:
            return pipeline.attack_again(run, experiment, control=control, report=report, on=on)
        return pipeline.carry_out(
            run, experiment, train, report, on, control=control, findings=self.findings
        )


def workers_for(experiment: Experiment) -> WorkersTable:
    """Returns where attacks run: where the file says, else one for each two cores or each GPU."""
    table = experiment.workers
    if table.engine == "ray" or devices(table.devices) != ["cpu"] or table.devices is not None:
        return table
    cores = len(os.sched_getaffinity(0))
    return table.model_copy(update={"devices": ["cpu"] * max(1, cores // 2)})


def open_experiment(
    experiment: Experiment,
    minutes: float,
    train: Engine,
    on: Sequence[Worker],
    report: Report,
    tell: Callable[[str], None],
    *,
    fresh: bool = False,
) -> Opened:
    """Plans the audit of an experiment and opens its run; or goes on with one that was stopped.

    Args:
        experiment: As its file says.
        minutes: For all of it.
        train: The engine.
        on: Workers for the attacks.
        report: Is told how far the rehearsal is.
        tell: Is told what begins, in a line.
        fresh: Move an earlier audit of this name out of the way.

    Raises:
        ConfigError: The experiment cannot work, does not fit into the time, or another audit was
            made under its name.
        FedleakError: A defense does not do what it says.
    """
    preparation.refuse_data_on_nodes(experiment)
    named = parse(experiment.model_dump(mode="json") | {"name": experiment.name + ENDING})
    run, source = Run(run_folder(named.name)), mark(named)
    if run.exists() and not fresh:
        audit = _planned_before(run, source, minutes)
        table = named.model_dump(mode="json", include={"gate", "workers"})
        planned = parse(stored(run).model_dump(mode="json") | table)
        run = preparation.prepare(planned, run.path)
        return Opened(run=run, experiment=planned, audit=audit, trains=True, begun=now())
    begun = now()
    whole, left_out = to_audit(named, outline(named, preparation.plan(named).num_labels))
    findings = None
    if whole.defense:
        tell("testing whether the defenses do what they say")
        findings = defense_checks.check(whole)
    tell("rehearsing with one client, which tells how long the rest takes")
    timings = rehearse(whole, run.path.with_name(f"{named.name}.rehearsal"), train, on, report)
    timings = replace(timings, rehearsal=now() - begun)
    decided = plan(whole, timings, minutes, len(on))
    run = preparation.prepare(decided.experiment, run.path, fresh=fresh)
    audit = Audit(
        source=source,
        minutes=minutes,
        attack=tuple(decided.experiment.attack),
        parts=decided.parts,
        left_out=(*left_out, *decided.left_out),
    )
    run.write(AUDIT, audit)
    return Opened(
        run=run,
        experiment=decided.experiment,
        audit=audit,
        findings=findings,
        trains=True,
        begun=begun,
    )


def open_run(
    run: Run,
    minutes: float,
    on: Sequence[Worker],
    report: Report,
    tell: Callable[[str], None],
) -> Opened:
    """Plans the audit of a run that is trained, or of an imported one; or goes on with one.

    All of its updates are attacked, because figures of a part would not be the run's. How long one
    takes is measured with the first of them.

    Args:
        run: The run directory.
        minutes: For all of it.
        on: Workers for the attacks.
        report: Is told how far the first update is.
        tell: Is told what begins, in a line.

    Raises:
        ConfigError: The run is not finished, or its updates do not fit into the time.
    """
    preparation.refuse_purged(run)
    experiment, source = stored(run), mark(stored(run))
    if run.info()["status"] != "finished":
        raise ConfigError(f"{str(run.path)!r} is not finished: the command that began it goes on")
    begun = now()
    if (run.path / AUDIT.name).exists():
        audit = _planned_before(run, source, minutes)
        whole = parse(experiment.model_dump(mode="json") | {"attack": [*audit.attack]})
        return Opened(run=run, experiment=whole, audit=audit, trains=False, begun=begun)
    model = outline(experiment, run.info()["num_labels"])
    keys = captures_of(run, experiment)
    batches = all(text_count(run, key) for key in keys)
    whole, left_out = to_audit(experiment, model, trained=True, batches=batches)
    room = PLANNED * 60 * minutes * len(on)
    tries = len(keys) + positive_control.COPIES
    seconds = min(room // tries, MOST_SECONDS)
    if seconds < FEWEST_SECONDS:
        needed = math.ceil(FEWEST_SECONDS * tries / len(on) / PLANNED / 60)
        raise ConfigError(
            f"{len(keys)} updates and {positive_control.COPIES} copies have {seconds:.0f} s each "
            f"in {minutes:g} minutes, which is too few: give --minutes {needed}"
        )
    # What the run lists may have answered already, and keeps its time.
    own = len(experiment.attack)
    attack = [*experiment.attack, *timed(whole.attack[own:], seconds)]
    whole = parse(whole.model_dump(mode="json") | {"attack": attack})
    preparation.prepare_attacks(run, whole)
    tell("attacking one update, which tells how long the rest takes")
    parts = _first_update(run, whole, on, report, begun)
    audit = Audit(
        source=source,
        minutes=minutes,
        attack=tuple(attack),
        parts=parts,
        left_out=tuple(left_out),
    )
    run.write(AUDIT, audit)
    return Opened(run=run, experiment=whole, audit=audit, trains=False, begun=begun)


def _first_update(
    run: Run, experiment: Experiment, on: Sequence[Worker], report: Report, begun: float
) -> tuple[AuditPart, ...]:
    """Attacks one update and its copy, and returns from that how long all of them take."""
    keys = positive_control.chosen(run, experiment) or captures_of(run, experiment)
    clients = [keys[0].client] if experiment.sees == "updates" else None
    first = with_threat(experiment, [keys[0].round], clients)
    control = not positive_control.is_undefended(experiment)
    pipeline.attack_again(run, first, control=control, report=report, on=on)
    answers, copies = read_answers(run), positive_control.control_of(run)
    given = read_answers(copies) if copies.exists() else []
    timings = Timings(rehearsal=now() - begun, around=0.0, **attack_timings(answers, given))
    left = captures_of(run, experiment)
    done = answered(answers, experiment)
    counts = {
        named.name: sum((key, named.name) not in done for key in left)
        for named in experiment.attacks
    }
    more = min(positive_control.COPIES, len(keys)) - 1 if given else 0
    return (
        AuditPart(
            what="the first update, which told how long the rest takes", seconds=timings.rehearsal
        ),
        *attack_parts(timings.attacks, timings.copies, counts, more, len(on)),
        AuditPart(what="scores, page and gate", seconds=REPORT_SECONDS),
    )


def _planned_before(run: Run, source: str, minutes: float) -> Audit:
    """Returns the plan of an audit that was begun before, and notes that it was stopped.

    Raises:
        ConfigError: It is another audit, or none.
    """
    audit = run.read_document(AUDIT) if (run.path / AUDIT.name).exists() else None
    if audit is None or (audit.source, audit.minutes) != (source, minutes):
        there = "no audit" if audit is None else f"another audit, of {audit.minutes:g} minutes"
        raise ConfigError(
            f"{str(run.path)!r} holds {there}: the same file with the same --minutes goes on with "
            "an audit; give this one another name, or --fresh to move what is there aside"
        )
    if audit.seconds is None and not audit.interrupted:
        audit = audit.model_copy(update={"interrupted": True})
        run.write(AUDIT, audit)
    return audit


def mark(experiment: Experiment) -> str:
    """Returns a mark of what is audited, in 16 hex digits; limits and workers do not count."""
    table = experiment.model_dump(mode="json", exclude={"gate", "workers"})
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:16]
