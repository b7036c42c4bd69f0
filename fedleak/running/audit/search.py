"""Finds the cheapest defense that keeps within the limits of [gate], by trying defenses.

    runs/<name>-defend/     an ordinary sweep, with a cell for each defense that was tried

Each defense of a fixed set is added to the setting of a finished audit whose limits are exceeded.
The new setting is trained, attacked and judged as the audit was. Defenses that leave the numbers
that are sent as they are come first. A cell ends as soon as a limit is exceeded, whatever its other
updates would show. Once such a free defense keeps within the limits and loses no utility, the
search ends: nothing can be cheaper.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial

from fedleak.attacks.clock import now
from fedleak.attacks.reconstruction import Status
from fedleak.audit import positive_control
from fedleak.audit.gate.check import Check, Outcome
from fedleak.audit.gate.control import STRONGEST
from fedleak.audit.gate.early import COUNTED, exceeded_already
from fedleak.audit.gate.judge import chosen, judge
from fedleak.audit.metrics import intervals
from fedleak.audit.positive_control import COPIES, is_undefended
from fedleak.config.experiment import Experiment
from fedleak.config.families import FAMILY
from fedleak.config.federation.lookup import captures_of, client_sizes, stored
from fedleak.config.federation.schedule import expected_captures
from fedleak.config.federation.workload import outline
from fedleak.config.tables import GateTable
from fedleak.report.words import counted
from fedleak.running import pipeline, preparation
from fedleak.running import sweep as sweeps
from fedleak.running.audit import defenses, plan
from fedleak.running.audit.begin import Opened
from fedleak.running.audit.defenses import Candidate
from fedleak.running.audit.plan import FEWEST_SECONDS, Costs
from fedleak.running.dispatch.dispatcher import Crew
from fedleak.running.dispatch.progress import RunProgress
from fedleak.running.forecast import duration
from fedleak.running.pipeline import Engine
from fedleak.running.sweep import Cell, Sweep
from fedleak.running.workers.process import Worker
from fedleak.store.audits import AUDIT, Advice, Timings, Trial, Tried
from fedleak.store.records import LEAKAGE
from fedleak.store.run import Run
from fedleak.store.shards import read_answers
from fedleak.store.summaries import SUMMARY, RunSummary
from fedleak.util.errors import ConfigError

ENDING = "-defend"
"""Follows the name of the run in the name of the sweep."""

CONTROL = "positive control"
"""The check of the gate that is left out if a setting leaves updates plain: see `_judged`."""

SHARE = 0.5
"""The share of a run's time that may go into checks whether a limit is exceeded."""

Watch = Callable[[str], AbstractContextManager[Callable[[RunProgress], None]]]


@dataclass
class Enough:
    """Whether the run of a defense may end: at its time, or once a limit is exceeded for good.

    Attributes:
        run: Of the defense.
        limits: Of the gate.
        ends: The moment at which it has to end.
        report: Called with its progress.
        exceeded: The check of the limit that it exceeds.
    """

    run: Run
    limits: GateTable
    ends: float
    report: Callable[[RunProgress], None]
    exceeded: Check | None = None
    _new: bool = field(default=False, init=False)
    _next: float = field(default=0.0, init=False)

    def noted(self, progress: RunProgress) -> None:
        """Looks at the answers that have come."""
        self.report(progress)
        self._new |= any(done.status == Status.RECOVERED for done in progress.finished)
        if self._new and self.exceeded is None and now() >= self._next:
            begun = now()
            self.exceeded = exceeded_already(self.run, self.limits)
            self._next, self._new = now() + (now() - begun) / SHARE, False

    def __call__(self) -> bool:
        """Whether it may end."""
        return self.exceeded is not None or now() > self.ends


def advise(
    opened: Opened,
    train: Engine,
    on: Sequence[Worker],
    watch: Watch,
    tell: Callable[[str], None],
) -> Advice:
    """Tries defenses on the setting of a finished audit, within the time of the command.

    Earlier findings under the same limits stay. audit.json is written after each defense, so that
    the search can be stopped at any time and continued.

    Args:
        opened: An audit whose limits are exceeded.
        train: The engine.
        on: Workers for the attacks.
        watch: Called with a defense's name; yields a function that is called with its progress.
        tell: Called with sentences on how many defenses there are, and how long one takes.

    Returns:
        What was tried, and what came of it.

    Raises:
        ConfigError: No defense could be judged here.
        FedleakError: A file of the run cannot be read.
    """
    run, experiment = opened.run, stored(opened.run)
    needed, audit = defenses.refuse_without_limits(experiment), run.read_document(AUDIT)
    model, before = outline(experiment, run.info()["num_labels"]), run.read_document(SUMMARY)
    wanted = defenses.candidates(experiment, model, min(client_sizes(run) or [0]))
    sweep = Sweep(experiment.name + ENDING, {FAMILY: [c.setting.value for c in wanted]}, cells=())
    figure, limits_in_words = utility_of(before), described(experiment)
    rows: dict[str, Tried] = {}
    if audit.advice is not None and audit.advice.limits == limits_in_words:
        settled = (Trial.WITHIN, Trial.EXCEEDED)
        rows = {row.name: row for row in audit.advice.tried if row.trial in settled}
    cells: dict[str, Experiment] = {}
    for candidate in wanted:
        try:
            made = defenses.defended(run, experiment, candidate.setting, model, needed)
            cells[candidate.name] = made
        except ConfigError as error:
            rows[candidate.name] = _not_run(candidate, Trial.IMPOSSIBLE, str(error))
    longest = partial(_longest, run, experiment, audit.timings, len(on))
    seconds = _seconds(longest, [*cells.values()], opened.time.ends - now())
    for sentence in _outlook(longest, [*cells.values()], seconds, opened.time.ends - now()):
        tell(sentence)

    def advice() -> Advice:
        return Advice(
            limits=limits_in_words,
            seconds=seconds,
            measure=figure and figure[0],
            utility=figure and figure[1],
            trained=has_learnt(before),
            held_out=before.held_out,
            rounds=experiment.federation.rounds,
            tried=tuple(rows[c.name] for c in wanted if c.name in rows),
        )

    with sweep.lock():
        for candidate in [candidate for candidate in wanted if candidate.name not in rows]:
            name = candidate.name
            if _ends_search(rows.values()):
                why = "one that is free keeps within the limits and loses no utility"
                rows[name] = _not_run(candidate, Trial.SKIPPED, why)
            elif now() + longest(cells[name], FEWEST_SECONDS) > opened.time.ends:
                rows[name] = _not_run(candidate, Trial.SKIPPED, "no time was left for it")
            else:
                values = {FAMILY: candidate.setting.value, "seconds": seconds}
                timed = plan.with_time(cells[name], seconds)
                cell = Cell(sweeps.cell_name(values), values, timed)
                sweep = replace(sweep, cells=(*sweep.cells, cell))
                with watch(name) as report:
                    enough = Enough(sweep.run(cell), timed.gate, opened.time.ends, report)
                    rows[name] = _tried(candidate, cell, enough, run, train, on)
                sweeps.collect(sweep)
            run.write(AUDIT, audit.model_copy(update={"advice": advice()}))
    return advice()


def described(experiment: Experiment) -> str:
    """Returns the limits that have to hold, in words."""
    return "; ".join(f"{name} {limit}" for name, limit in chosen(experiment.gate).items())


Longest = Callable[[Experiment, float], float]
"""The time of a defense that stops all attacks, by its experiment and an attack's seconds."""


def _longest(
    run: Run,
    before: Experiment,
    timings: Timings,
    workers: int,
    cell: Experiment,
    seconds: float,
) -> float:
    """Returns the time of a defense that stops all attacks which have a time limit.

    Args:
        run: The audit's run.
        before: Its experiment.
        timings: What its rehearsal measured.
        workers: Attacks that run at once.
        cell: The experiment with the defense.
        seconds: The time that such an attack gets for an update.
    """
    size = max(client_sizes(run) or [1])
    work = [e.local_training.steps(size) * e.federation.batch_size for e in (cell, before)]
    of_cell = timings.model_copy(
        update={
            "update": timings.update * max(1.0, work[0] / work[1]),
            "attacks": {named.name: timings.attacks.get(named.name, 0.0) for named in cell.attacks},
            "copies": timings.copies or timings.attacks,
            "late": [named.name for named in cell.attacks if hasattr(named.attack, "seconds")],
        }
    )
    copies = 0 if is_undefended(cell) else COPIES
    attacks = Costs(cell, of_cell).all(len(expected_captures(cell)), copies, seconds)
    return plan.training_seconds(cell, of_cell) + attacks / workers


def _seconds(longest: Longest, cells: Sequence[Experiment], room: float) -> float:
    """Returns the seconds that attacks get for an update.

    These are what the gate wants, if one defense that stops all attacks fits into the time; else
    as many as all defenses have on average.
    """
    wanted = cells[0].gate.seconds if cells else FEWEST_SECONDS
    if not cells or longest(cells[0], wanted) <= room:
        return wanted
    rest = longest(cells[0], 0.0)
    fits = (room / len(cells) - rest) / (longest(cells[0], 1.0) - rest or 1.0)
    return min(max(float(round(fits)), FEWEST_SECONDS), wanted)


def _outlook(
    longest: Longest, cells: Sequence[Experiment], seconds: float, room: float
) -> Iterator[str]:
    """Yields sentences on what will be tried, and on what the search will not show."""
    most = [longest(cell, seconds) for cell in cells]
    fit = sum(total <= room for total in itertools.accumulate(most))
    yield (
        f"{counted(len(cells), 'defense')} can be tried in the {duration(room)} that are left, "
        f"those that cost nothing first: one that stops all attacks takes from "
        f"{duration(min(most, default=0.0))} to {duration(max(most, default=0.0))}, one that "
        f"exceeds a limit ends as soon as that is certain; there is time for {fit} or more"
    )
    if cells and STRONGEST not in cells[0].gate.may_abstain:
        yield (
            f"{STRONGEST} abstains where a defense leaves it nothing, and then too little is told: "
            f'gate.may_abstain = ["{STRONGEST}"] takes that as nothing read, where it '
            "reads undefended updates"
        )
    if cells and seconds < (wanted := cells[0].gate.seconds):
        yield (
            f"no defense can be shown to keep within the limits in that time: attacks get "
            f"{seconds:g} s for an update, and gate.seconds asks for {wanted:g}. --defend with "
            f"--minutes {plan.minutes_for(longest(cells[0], wanted))} goes on with time for one, "
            "or set gate.seconds"
        )


def _tried(
    candidate: Candidate,
    cell: Cell,
    enough: Enough,
    before: Run,
    train: Engine,
    on: Sequence[Worker],
) -> Tried:
    """Runs a defense as far as that is not done yet, and returns what came of it."""
    run = enough.run
    try:
        preparation.prepare(cell.experiment, run.path)
        if not pipeline.finished(run, cell.experiment):
            pipeline.carry_out(run, cell.experiment, train, Crew(on, enough.noted, enough))
    except ConfigError as error:
        return _not_run(candidate, Trial.IMPOSSIBLE, str(error))
    except Exception as error:  # noqa: BLE001 - others can still be tried
        return _not_run(candidate, Trial.UNTOLD, sweeps.failure(cell.name, error))
    if (check := enough.exceeded) is not None:
        why = f"{check.name}: {check.sentence}, if nothing else were read"
        return _not_run(candidate, Trial.EXCEEDED, why)
    if enough() and not pipeline.finished(run, cell.experiment):
        wanted = len(captures_of(run, cell.experiment)) * len(cell.experiment.attacks)
        why = f"time was up after {len(read_answers(run))} of {wanted} answers"
        return _not_run(candidate, Trial.UNTOLD, why)
    return _judged(candidate, run, before)


def _not_run(candidate: Candidate, trial: Trial, why: str) -> Tried:
    return Tried(name=candidate.name, free=candidate.free, trial=trial, why=why)


def _ends_search(tried: Iterable[Tried]) -> bool:
    """Whether a free defense keeps within the limits and loses no utility."""
    return any(row.free and row.trial is Trial.WITHIN and row.lost == 0 for row in tried)


def _judged(candidate: Candidate, run: Run, before: Run) -> Tried:
    """Returns what came of a defense whose run is complete.

    For updates that stay plain, the run of the audit is the control. A limit counts as untold if
    only too few answers exceed it, because attacks abstained.
    """
    experiment, summary = stored(run), run.read_document(SUMMARY)
    plain, certain = is_undefended(experiment), exceeded_already(run, experiment.gate)
    control = positive_control.of_rows(before.rows(LEAKAGE)) if plain else None
    failed = [
        check if certain or check.name not in COUNTED else replace(check, outcome=Outcome.UNTOLD)
        for check in judge(run, experiment.gate, control=control).checks
        if not check.passed and not (plain and check.name == CONTROL)
    ]
    failed.sort(key=lambda check: check.outcome is not Outcome.EXCEEDED)
    worst, figure, privacy = summary.worst_case, utility_of(summary), summary.privacy
    return Tried(
        name=candidate.name,
        free=candidate.free,
        # It ends as its worst check did, under the same name.
        trial=Trial[failed[0].outcome.name] if failed else Trial.WITHIN,
        why="; ".join(f"{check.name}: {check.sentence}" for check in failed),
        exact=None if worst is None else worst.exact_match,
        utility=figure and figure[1],
        lost=utility_lost(before.read_document(SUMMARY), summary),
        epsilon=None if privacy is None else privacy.epsilon,
    )


def utility_of(summary: RunSummary) -> tuple[str, float] | None:
    """Returns the figure that stands for a model's utility, and its name."""
    for name in ("accuracy", "perplexity"):
        value = summary.utility.figures.get(name) if summary.utility else None
        if value is not None:
            return name, value
    return None


def has_learnt(summary: RunSummary) -> bool:
    """Whether training made a model more useful than it was before, beyond chance."""
    begun = summary.model_copy(update={"utility": summary.utility_before})
    lost = utility_lost(summary, begun)
    return lost is not None and lost > 0


def utility_lost(before: RunSummary, after: RunSummary) -> float | None:
    """Returns how much less useful a model is; None: nobody measured it.

    For accuracy, the loss is the difference, and 0 within the 95 % interval (Wilson) of the earlier
    accuracy on as many texts. For perplexity, it is the growth, as a share. A better model loses 0.
    """
    old, new = utility_of(before), utility_of(after)
    if old is None or new is None:
        return None
    if old[0] == "perplexity":
        return max(0.0, new[1] / old[1] - 1)
    low = intervals.wilson(round(old[1] * before.held_out), before.held_out).low
    return 0.0 if new[1] >= low else old[1] - new[1]
