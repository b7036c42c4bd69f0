"""Which defense is the cheapest that keeps within the limits of [gate]? Tried, not reckoned.

    runs/<name>-defend/     an ordinary sweep, with a cell for each defense that was tried

Each of a fixed set is put on the setting of a finished run whose limits are exceeded, and trained,
attacked and judged as that was, on the same texts. What leaves the numbers that are sent as they
are comes first. As soon as one of these keeps within the limits and no utility is lost, nothing can
be cheaper, and the search ends.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from fedleak.audit.gate.check import Check, Outcome
from fedleak.audit.gate.judge import chosen, judge
from fedleak.audit.gate.limits import LEAKS
from fedleak.audit.metrics import intervals
from fedleak.audit.positive_control import is_undefended
from fedleak.config import checks, families, loading
from fedleak.config.experiment import Experiment
from fedleak.config.families import FAMILY, FamilyTable, Setting
from fedleak.config.loading import parse
from fedleak.federation.lookup import captures_of, client_sizes, stored
from fedleak.federation.workload import outline
from fedleak.models import LanguageModel
from fedleak.report.words import in_words
from fedleak.running import pipeline, preparation
from fedleak.running import sweep as sweeps
from fedleak.running.dispatch.progress import Pace, RunProgress
from fedleak.running.forecast import duration
from fedleak.running.pipeline import Engine
from fedleak.running.sweep import Cell, Sweep
from fedleak.store.advice import ADVICE, Advice, Trial, Tried
from fedleak.store.run import Run
from fedleak.store.summaries import SUMMARY, RunSummary
from fedleak.util.errors import ConfigError

ENDING = "-defend"
"""Of the name of the sweep, behind the name of the run."""

CONTROL = "positive control"
"""The check of the gate that the run itself stands for, where a setting leaves updates plain."""


def _family(name: str, strengths: Sequence[Any] | None = None, **changes: Any) -> FamilyTable:
    values = None if strengths is None else [*strengths]
    return FamilyTable(name=name, strengths=values, set=changes)


def free_families(experiment: Experiment, model: LanguageModel) -> list[FamilyTable]:
    """Returns what adds nothing to an update and takes no more away than a part that is frozen."""
    size = experiment.federation.batch_size
    epochs = experiment.federation.local_epochs if _of_weights(experiment) else 1
    positions = filter(None, [model.family.position_embedding])  # rotations have none
    several = {"algorithm": "fedavg", "local_epochs": families.STRENGTH}
    return [
        *(_family("frozen position rows", defense=[_frozen(name)]) for name in positions),
        _family("frozen embeddings", defense=[_frozen("embeddings")]),
        _family("frozen embeddings and first layer", defense=[_frozen("embeddings", "t1")]),
        _family("secure sum", defense=[{"kind": "secure_sum"}]),
        _family("texts in a batch", [4 * size, 16 * size], federation={"batch_size": "<strength>"}),
        _family("local epochs", [2 * epochs, 4 * epochs], federation=several),
    ]


COSTLY = [
    _family("Gaussian noise, sigma / rms", [0.3, 3.0], defense=[
        {"kind": "gaussian_noise", "relative": families.STRENGTH},
    ]),
    _family("random mask, share set to 0", [0.9, 0.99], defense=[
        {"kind": "mask", "fraction": families.STRENGTH},
    ]),
    # Fixed batches are those of the run, which Poisson sampling would not draw.
    _family("DP-SGD, epsilon", [8.0, 1.0], defense=[
        {"kind": "dp_sgd", "epsilon": families.STRENGTH, "sampling": "fixed"},
    ]),
]  # fmt: skip
"""What makes updates worse: by its kind dearer than all that is free."""


def _frozen(*parameters: str) -> dict[str, Any]:
    return {"kind": "freeze", "parameters": [*parameters]}


def _of_weights(experiment: Experiment) -> bool:
    return experiment.federation.algorithm == "fedavg"


@dataclass(frozen=True)
class Candidate:
    """A defense on the setting of a run.

    Attributes:
        setting: What it sets.
        free: As in `Tried`.
    """

    setting: Setting
    free: bool

    @property
    def name(self) -> str:
        """What it is, with its strength."""
        strength = self.setting.value.get("strength")
        kind = str(self.setting.value["kind"])
        return kind if strength is None else f"{kind} {in_words(strength)}"


def candidates(experiment: Experiment, model: LanguageModel) -> list[Candidate]:
    """Returns the defenses to try, the cheaper ones first."""
    return [
        Candidate(setting, free)
        for of_kind, free in ((free_families(experiment, model), True), (COSTLY, False))
        for setting in families.settings(of_kind)
    ]


def advise(
    run: Run,
    train: Engine,
    watch: Callable[[str], AbstractContextManager[Callable[[RunProgress], None]]],
    tell: Callable[[str], None],
) -> Advice:
    """Tries defenses on the setting of a finished run, and writes advice.json into it.

    Cells that are finished are not run again.

    Args:
        run: A run whose limits are exceeded.
        train: The engine.
        watch: Called with the name of a cell; what it yields is told how far its run is.
        tell: Is told how long all of it takes at most.

    Raises:
        ConfigError: No defense could be judged here, or none is needed.
        FedleakError: A file of the run cannot be read.
    """
    experiment = stored(run)
    refuse_without_leak(run, experiment)
    summary, model = run.read_document(SUMMARY), outline(experiment, run.info()["num_labels"])
    smallest, wanted = min(client_sizes(run) or [0]), candidates(experiment, model)
    tell(_longest(run, experiment, len(wanted)))
    values = [candidate.setting.value for candidate in wanted]
    sweep, tried = Sweep(experiment.name + ENDING, {FAMILY: values}, cells=()), list[Tried]()
    with sweep.lock():
        for candidate in wanted:
            if _ends_search(tried):
                why = "one that is free keeps within the limits and loses no utility"
                tried.append(_not_run(candidate, Trial.SKIPPED, why))
                continue
            try:
                cell = _cell(experiment, candidate.setting, model, smallest)
                plan = preparation.plan(cell.experiment)
                finished = pipeline.finished(sweep.run(cell), cell.experiment)
            except ConfigError as error:
                tried.append(_not_run(candidate, Trial.IMPOSSIBLE, str(error)))
                continue
            sweep = replace(sweep, cells=(*sweep.cells, cell))
            alone, plans = replace(sweep, cells=(cell,)), {} if finished else {cell.name: plan}
            failures = sweeps.carry_out(alone, plans, train, watch, lambda failures: None)
            sweeps.collect(sweep)
            tried.append(_judged(candidate, sweep.run(cell), summary, failures.get(cell.name)))
    figure = utility_of(summary)
    advice = Advice(
        limits="; ".join(f"{name} {limit}" for name, limit in chosen(experiment.gate).items()),
        measure=figure and figure[0],
        utility=figure and figure[1],
        held_out=summary.held_out,
        rounds=experiment.federation.rounds,
        tried=tuple(tried),
    )
    run.write(ADVICE, advice)
    return advice


def _longest(run: Run, experiment: Experiment, tries: int) -> str:
    """Returns how long the attacks take at most: one that a defense stops uses all of its time."""
    left = {
        (key, named.name) for key in captures_of(run, experiment) for named in experiment.attacks
    }
    seconds = Pace(experiment.attacks, left).seconds_most(1)
    return (
        f"up to {tries} defenses are tried; attacks with a time limit take at most "
        f"{duration(seconds)} for each and {duration(tries * seconds)} in all on one worker, or "
        "less if the file gives auto fewer seconds. The same command goes on where it was stopped"
    )


def refuse_without_limits(experiment: Experiment) -> Mapping[str, float]:
    """Returns the limits on what is read, and refuses an experiment that cannot be trained again.

    Raises:
        ConfigError: It has no such limits, or its clients are not here.
    """
    preparation.refuse_data_on_nodes(experiment)
    if experiment.tapped is not None:
        raise ConfigError(
            f"{experiment.name!r} was trained by another app, and defenses are tried by training "
            "again: describe its setting in an experiment file"
        )
    limits = {
        name: limit for name in LEAKS if (limit := getattr(experiment.gate, name)) is not None
    }
    if not limits:
        raise ConfigError(
            "there is no limit that a defense has to keep: add [gate], such as exact = 0.3 "
            f"({', '.join(LEAKS)})"
        )
    return limits


def refuse_without_leak(run: Run, experiment: Experiment) -> None:
    """Refuses a run that no defense can be judged against, before hours are spent on it.

    Raises:
        ConfigError: There is no limit that it exceeds, it cannot be trained again, or so few
            clients were attacked that not even reading nothing keeps within a limit.
    """
    limits = refuse_without_limits(experiment)
    verdict = {check.name: check for check in judge(run, experiment.gate).checks}
    texts = verdict.get("texts")
    if texts is not None and not texts.passed:
        raise ConfigError(f"no defense could be judged here: {texts.sentence}")
    if not any(verdict[name].outcome is Outcome.EXCEEDED for name in limits):
        sentences = "; ".join(f"{name}: {verdict[name].sentence}" for name in limits)
        raise ConfigError(f"{str(run.path)!r} exceeds no limit on what is read ({sentences})")
    clients = len({row.client for row in run.captures.all_keys()})
    upper_end = intervals.clustered_mean([0.0] * clients, range(clients), most=1.0).high
    for name, limit in limits.items():
        reached = 100 * upper_end if name == "rougeL" else upper_end
        if limit < reached:
            raise ConfigError(
                f"{name} = {limit:g} cannot be kept: where nothing is read of {clients} clients, "
                f"its interval still reaches {reached:.3g}: attack more clients, or raise the limit"
            )


def _cell(experiment: Experiment, setting: Setting, model: LanguageModel, smallest: int) -> Cell:
    """Returns the experiment with a defense, and without attacks that cannot work on its updates.

    Raises:
        ConfigError: They do not go together, no attack is left, or a batch has more texts than the
            smallest client.
    """
    table = experiment.model_dump(mode="json") | {"preset": None}
    for key, value in setting.changes.items():
        added = [*table["defense"], *value] if key == "defense" else value
        loading.set_(table, key, added, "audit --defend")
    changed = parse(table)
    if changed.federation.batch_size > max(smallest, experiment.federation.batch_size):
        raise ConfigError(f"a client has only {smallest} texts")
    obstacles = [_obstacle(table, attack, model) for attack in changed.attack]
    if changed.attack and all(obstacles):
        raise ConfigError(obstacles[0])
    able = zip(changed.attack, obstacles, strict=True)
    table["attack"] = [attack for attack, obstacle in able if obstacle is None]
    names = {named.name for named in parse(table | {"gate": {}}).attacks}
    table["gate"]["may_abstain"] = [name for name in experiment.gate.may_abstain if name in names]
    values = {FAMILY: setting.value}
    return Cell(sweeps.cell_name(values), values, parse(table))


def _obstacle(
    table: Mapping[str, Any], attack: Mapping[str, Any], model: LanguageModel
) -> str | None:
    """Returns why an attack cannot work on the updates of an experiment."""
    try:
        checks.check_attacks(parse({**table, "attack": [attack], "gate": {}}), model)
    except ConfigError as error:
        return str(error)
    return None


def _not_run(candidate: Candidate, trial: Trial, why: str) -> Tried:
    return Tried(name=candidate.name, free=candidate.free, trial=trial, why=why)


def _ends_search(tried: Sequence[Tried]) -> bool:
    """Whether one that is free keeps within the limits, and no utility is lost."""
    return any(row.free and row.trial is Trial.WITHIN and row.lost == 0 for row in tried)


def _judged(candidate: Candidate, run: Run, before: RunSummary, failure: str | None) -> Tried:
    """Returns what came of a candidate whose run has ended."""
    if failure is not None:
        return _not_run(candidate, Trial.UNTOLD, failure)
    experiment = stored(run)
    plain = is_undefended(experiment)
    failed = [
        check
        for check in judge(run, experiment.gate).checks
        if not check.passed and not (plain and check.name == CONTROL)
    ]
    failed.sort(key=lambda check: check.outcome is not Outcome.EXCEEDED)
    summary = run.read_document(SUMMARY)
    worst, figure, privacy = summary.worst_case, utility_of(summary), summary.privacy
    return Tried(
        name=candidate.name,
        free=candidate.free,
        trial=_trial(failed),
        why=f"{failed[0].name}: {failed[0].sentence}" if failed else "",
        exact=None if worst is None else worst.exact_match,
        utility=figure and figure[1],
        lost=utility_lost(before, summary),
        epsilon=None if privacy is None else privacy.epsilon,
    )


def _trial(failed: Sequence[Check]) -> Trial:
    """Returns how a try ended, from checks that did not pass, the exceeded ones first."""
    if not failed:
        return Trial.WITHIN
    return Trial.EXCEEDED if failed[0].outcome is Outcome.EXCEEDED else Trial.UNTOLD


def utility_of(summary: RunSummary) -> tuple[str, float] | None:
    """Returns the figure that stands for a model's utility, and its name."""
    for name in ("accuracy", "perplexity"):
        value = summary.utility.figures.get(name) if summary.utility else None
        if value is not None:
            return name, value
    return None


def utility_lost(before: RunSummary, after: RunSummary) -> float | None:
    """Returns how much less useful a model is; None: nobody measured it.

    Of an accuracy the loss is the difference, and 0 within the 95 % interval (Wilson) of the
    earlier one on as many texts; of a perplexity it is the growth, as a share. A better model loses
    0.
    """
    old, new = utility_of(before), utility_of(after)
    if old is None or new is None:
        return None
    if old[0] == "perplexity":
        return max(0.0, new[1] / old[1] - 1)
    low = intervals.wilson(round(old[1] * before.held_out), before.held_out).low
    return 0.0 if new[1] >= low else old[1] - new[1]
