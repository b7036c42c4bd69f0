"""Opens the run of an audit, or goes on with one that was stopped, and ends it with its page."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fedleak.attacks.clock import now
from fedleak.audit import defense_checks, positive_control
from fedleak.audit.answer_scores import Scored
from fedleak.audit.answered import answered
from fedleak.audit.defense_checks import Finding
from fedleak.audit.gate.judge import chosen, judge
from fedleak.audit.vault import text_count
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import captures_of, run_folder, stored
from fedleak.config.federation.workload import outline
from fedleak.config.loading import changed
from fedleak.config.tables import WorkersTable
from fedleak.report.html.page import Verdict
from fedleak.report.html.render import render
from fedleak.report.html.run_page import run_page
from fedleak.running import pipeline, preparation, reports
from fedleak.running.audit import plan
from fedleak.running.audit.plan import Time
from fedleak.running.audit.rehearsal import attack_timings, rehearse, timed
from fedleak.running.dispatch.dispatcher import Crew
from fedleak.running.dispatch.progress import RunProgress
from fedleak.running.pipeline import Engine
from fedleak.running.workers.process import Worker, devices
from fedleak.store.audits import AUDIT, REHEARSAL, Audit, AuditPage, AuditPart, Rehearsal, Timings
from fedleak.store.files import replace
from fedleak.store.run import Run
from fedleak.store.shards import read_answers
from fedleak.store.summaries import SUMMARY
from fedleak.util.errors import ConfigError
from fedleak.util.nested import digest

Report = Callable[[RunProgress], None]

ENDING = "-audit"
"""Ends the name of an audit's run, so that `fedleak run` of the same file is another run."""


@dataclass(frozen=True)
class Opened:
    """An audit that is planned, whether anything of it is done or not.

    Attributes:
        run: The run directory.
        experiment: What is run there, with its workers.
        audit: The plan.
        time: Of this command.
        trains: Whether clients train; if not, their updates are there.
        findings: Of the check of defenses, if it was made just now.
    """

    run: Run
    experiment: Experiment
    audit: Audit
    time: Time
    trains: bool = True
    findings: Sequence[Finding] | None = None

    def carry_out(self, train: Engine, report: Report, on: Sequence[Worker]) -> list[Scored]:
        """Trains, attacks and scores, as far as that is not done yet and there is time for it."""
        run, experiment, crew = self.run, self.experiment, Crew(on, report, self.time.is_up)
        control = not positive_control.is_undefended(experiment)
        if not self.trains:
            return pipeline.attack_again(run, experiment, crew, control=control)
        return pipeline.carry_out(
            run, experiment, train, crew, control=control, findings=self.findings
        )

    def finish(self, scored: Sequence[Scored]) -> tuple[Audit, Verdict]:
        """Checks the gate, and writes report.html and audit.json.

        Args:
            scored: What was read.

        Returns:
            The audit with its results, and the verdict of the page.

        Raises:
            FedleakError: A file is damaged, or cannot be written.
        """
        run, limits, audit = self.run, self.experiment.gate, self.audit
        checks = judge(run, limits).checks if chosen(limits) else ()
        took = audit.seconds
        if took is None and not audit.interrupted:
            took = now() - self.time.begun
        cut = self.time.is_up() and bool(run.read_document(SUMMARY).missing)
        audit = audit.model_copy(update={"seconds": took, "cut": cut, "checks": tuple(checks)})
        with run.lock():
            run.write(AUDIT, audit)
            page = run_page(run, scored)
            replace(run.path / reports.NAME, render(page))
            summed_up = AuditPage(
                level=str(page.verdict.level),
                headline=page.verdict.headline,
                paragraphs={entry.word: entry.value for entry in page.verdict.paragraphs},
            )
            audit = audit.model_copy(update={"page": summed_up})
            run.write(AUDIT, audit)
        return audit, page.verdict


def workers_for(experiment: Experiment) -> WorkersTable:
    """Returns where attacks run: where the file says, else one for each two cores or each GPU."""
    table = experiment.workers
    if table.engine == "ray" or devices(table.devices) != ["cpu"] or table.devices is not None:
        return table
    cores = len(os.sched_getaffinity(0))
    return table.model_copy(update={"devices": ["cpu"] * max(1, cores // 2)})


def open_experiment(
    experiment: Experiment,
    time: Time,
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
        time: For all of it.
        train: The engine.
        on: Workers for the attacks.
        report: Called with the progress of the rehearsal.
        tell: Called with a line about the step that begins.
        fresh: Move an earlier audit of this name out of the way.

    Raises:
        ConfigError: The experiment cannot work, does not fit into the time, or another audit was
            made under its name.
        FedleakError: A defense does not do what it says.
    """
    preparation.refuse_data_on_nodes(experiment)
    named = changed(experiment, {"name": experiment.name + ENDING})
    run, source = Run(run_folder(named.name)), mark(named)
    if run.exists() and not fresh:
        audit = _planned_before(run, source, time)
        own = named.model_dump(mode="json", include={"gate", "workers"})
        planned = changed(stored(run), own)
        run = preparation.prepare(planned, run.path)
        return Opened(run, planned, audit, time)
    whole, left_out = plan.to_audit(named, outline(named, preparation.plan(named).num_labels))
    findings = None
    if whole.defense:
        tell("testing whether the defenses do what they say")
        findings = defense_checks.check(whole)
    folder = Run(run.path.with_name(f"{named.name}.rehearsal"))
    before = folder.read_document(REHEARSAL) if folder.has(REHEARSAL.name) else None
    timings = before.timings if before is not None and before.source == source else None
    if timings is None:  # else the plan was refused, and a rehearsal would measure the same
        tell("rehearsing with one client, which tells how long the rest takes")
        timings = rehearse(whole, folder.path, train, Crew(on, report, time.is_up))
        # Written now, so that it is not lost if the plan is refused.
        folder.write(REHEARSAL, Rehearsal(source=source, timings=timings))
    timings = timings.model_copy(update={"rehearsal": now() - time.begun})
    decided = plan.plan(whole, timings, time.minutes, len(on), share=time.share)
    run = preparation.prepare(decided.experiment, run.path, fresh=fresh)
    audit = Audit(
        source=source,
        minutes=time.minutes,
        attack=tuple(decided.experiment.attack),
        timings=timings,
        parts=decided.parts,
        left_out=(*left_out, *decided.left_out),
    )
    run.write(AUDIT, audit)
    shutil.rmtree(folder.path)
    return Opened(run, decided.experiment, audit, time, findings=findings)


def open_run(
    run: Run,
    time: Time,
    on: Sequence[Worker],
    report: Report,
    tell: Callable[[str], None],
) -> Opened:
    """Plans the audit of a trained or imported run, or goes on with an audit that was stopped.

    All of the run's updates are attacked, because figures of a part would not be figures of the
    run. The first update shows how long one takes.

    Args:
        run: The run directory.
        time: For all of it.
        on: Workers for the attacks.
        report: Called with the progress of the first update.
        tell: Called with a line about the step that begins.

    Raises:
        ConfigError: The run is not finished, or its updates do not fit into the time.
    """
    preparation.refuse_purged(run)
    experiment, source = stored(run), mark(stored(run))
    if run.info()["status"] != "finished":
        raise ConfigError(f"{str(run.path)!r} is not finished: the command that began it goes on")
    if (run.path / AUDIT.name).exists():
        audit = _planned_before(run, source, time)
        whole = changed(experiment, {"attack": [*audit.attack]})
        return Opened(run, whole, audit, time, trains=False)
    model = outline(experiment, run.info()["num_labels"])
    keys = captures_of(run, experiment)
    batches = all(text_count(run, key) for key in keys)
    whole, left_out = plan.to_audit(experiment, model, trained=True, batches=batches)
    room = plan.PLANNED * time.share * 60 * time.minutes * len(on)
    tries = len(keys) + positive_control.COPIES
    seconds = min(room // tries, plan.MOST_SECONDS)
    if seconds < plan.FEWEST_SECONDS:
        needed = plan.minutes_for(plan.FEWEST_SECONDS * tries / len(on) / time.share)
        raise ConfigError(
            f"{len(keys)} updates and {positive_control.COPIES} copies have {seconds:.0f} s each "
            f"in {time.minutes:g} minutes, which is too few: give --minutes {needed}"
        )
    # Attacks that the run lists may have answered already; they keep their time.
    own = len(experiment.attack)
    attack = [*experiment.attack, *timed(whole.attack[own:], seconds)]
    whole = changed(whole, {"attack": attack})
    preparation.prepare_attacks(run, whole)
    tell("attacking one update, which tells how long the rest takes")
    parts, timings = _first_update(run, whole, on, report, time.begun)
    audit = Audit(
        source=source,
        minutes=time.minutes,
        attack=tuple(attack),
        timings=timings,
        parts=parts,
        left_out=tuple(left_out),
    )
    run.write(AUDIT, audit)
    return Opened(run, whole, audit, time, trains=False)


def _first_update(
    run: Run, experiment: Experiment, on: Sequence[Worker], report: Report, begun: float
) -> tuple[tuple[AuditPart, ...], Timings]:
    """Attacks one update and its copy, and returns the parts of the audit and what it measured."""
    keys = positive_control.chosen(run, experiment) or captures_of(run, experiment)
    clients = [keys[0].client] if experiment.sees == "updates" else None
    first = plan.with_threat(experiment, [keys[0].round], clients)
    control = not positive_control.is_undefended(experiment)
    pipeline.attack_again(run, first, Crew(on, report), control=control)
    answers, copies = read_answers(run), positive_control.control_of(run)
    given = read_answers(copies) if copies.exists() else []
    timings = Timings(rehearsal=now() - begun, around=0.0, **attack_timings(answers, given))
    left = captures_of(run, experiment)
    done = answered(answers, experiment)
    names = [named.name for named in experiment.attacks]
    counts = {name: sum((key, name) not in done for key in left) for name in names}
    more = min(positive_control.COPIES, len(keys)) - 1 if given else 0
    parts = (
        AuditPart(
            what="the first update, which told how long the rest takes", seconds=timings.rehearsal
        ),
        *plan.attack_parts(timings.attacks, timings.copies, counts, more, len(on)),
        AuditPart(what="scores, page and gate", seconds=plan.REPORT_SECONDS),
    )
    return parts, timings


def _planned_before(run: Run, source: str, time: Time) -> Audit:
    """Returns the plan of an audit that was begun before, and notes that it was stopped.

    A search for a defense may have other minutes, those of its own command.

    Raises:
        ConfigError: The run has another audit, or none.
    """
    audit = run.read_document(AUDIT) if (run.path / AUDIT.name).exists() else None
    searches = time.share < 1 and audit is not None and audit.seconds is not None
    if audit is None or audit.source != source or not (audit.minutes == time.minutes or searches):
        there = "no audit" if audit is None else f"another audit, of {audit.minutes:g} minutes"
        raise ConfigError(
            f"{str(run.path)!r} holds {there}: the same file with the same --minutes goes on with "
            "an audit; give this one another name, or --fresh to move what is there aside"
        )
    if audit.seconds is None or audit.cut:
        audit = audit.model_copy(update={"interrupted": True, "seconds": None, "cut": False})
        run.write(AUDIT, audit)
    return audit


def mark(experiment: Experiment) -> str:
    """Returns a mark of what is audited, in 16 hex digits; limits and workers do not count."""
    return digest(experiment.model_dump(mode="json", exclude={"gate", "workers"}))[:16]
