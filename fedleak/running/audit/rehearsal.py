"""Measures how long an audit takes, with a small experiment of one client a round."""

import itertools
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from fedleak.attacks.clock import now
from fedleak.audit.positive_control import control_of, is_undefended
from fedleak.config.components import build_attack
from fedleak.config.experiment import Experiment
from fedleak.config.loading import changed
from fedleak.running import pipeline
from fedleak.running.dispatch.dispatcher import Crew
from fedleak.running.pipeline import Engine
from fedleak.running.preparation import prepare
from fedleak.store.audits import Timings
from fedleak.store.records import Answer
from fedleak.store.run import Run
from fedleak.store.shards import read_answers
from fedleak.util.errors import ConfigError
from fedleak.util.lists import grouped

ROUNDS = 3
"""Rounds of a rehearsal: the first pays for what is loaded once, and the last for the end."""

SECONDS = 10.0
"""The time that an attack gets for an update in a rehearsal."""


def rehearse(experiment: Experiment, folder: Path, train: Engine, crew: Crew) -> Timings:
    """Runs an experiment in small, attacks one update and its undefended copy, and deletes it all.

    Args:
        experiment: What is to be audited, with its attacks.
        folder: The folder to use, beside the run: it holds private texts.
        train: The engine.
        crew: Attacks the update; stops when all of the audit's time is up.

    Raises:
        ConfigError: The time is up.
    """
    small, begin = in_small(experiment), now()
    shutil.rmtree(folder, ignore_errors=True)
    moments: list[float] = []

    def watched(run: Run, experiment: Experiment, stop: Callable[[], bool]) -> None:
        def asked_before_each_client() -> bool:
            moments.append(now())
            return stop()

        moments.append(now())
        train(run, experiment, asked_before_each_client)
        moments.append(now())

    try:
        run, control = prepare(small, folder / small.name), not is_undefended(small)
        pipeline.carry_out(run, small, watched, crew, control=control, findings=())
        if crew.enough():
            raise ConfigError("a rehearsal with one client takes longer: give more --minutes")
        given, copies = read_answers(run), read_answers(control_of(run)) if control else []
    except (KeyboardInterrupt, SystemExit, ConfigError):  # after another error its log says more
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
    return timings_of(now() - begin, moments, given, copies, small)


def in_small(experiment: Experiment) -> Experiment:
    """Returns an experiment with one client a round, in which all attacks try the last update.

    A sum needs all of its clients. The last round is attacked and not the first, because the first
    gradients of adapters are not like the others.
    """
    rounds = min(ROUNDS, experiment.federation.rounds)
    changes: dict[str, Any] = {"federation.rounds": rounds, "federation.engine": "inline"}
    if experiment.aggregator is None:
        changes["federation.clients_per_round"] = 1
    if experiment.server_built.malicious:
        changes["server.rounds"] = [rounds]
    changes |= {"threat.rounds": [rounds], "threat.clients": None, "utility": {"rounds": [0]}}
    attack = timed(experiment.attack, SECONDS, at_most=True)
    return changed(experiment, changes | {"gate": {}, "audit": {}, "attack": attack})


def timed(
    attacks: Sequence[Mapping[str, Any]], seconds: float, *, at_most: bool = False
) -> list[dict[str, Any]]:
    """Returns attacks with so much time for an update, unless the file gives them a time.

    Args:
        attacks: As in an experiment file.
        seconds: The time for an update.
        at_most: Whether to cut a longer time of the file, too.
    """
    tables = []
    for number, table in enumerate(attacks):
        own = table.get("seconds")
        is_timed = hasattr(build_attack(number, dict(table)).attack, "seconds")
        changes = is_timed and (own is None or (at_most and own > seconds))
        tables.append({**table, **({"seconds": seconds} if changes else {})})
    return tables


def timings_of(
    whole: float,
    moments: Sequence[float],
    answers: Sequence[Answer],
    of_copies: Sequence[Answer],
    small: Experiment,
) -> Timings:
    """Returns what a rehearsal measured.

    Args:
        whole: Seconds of all of it.
        moments: When training began, when each client was asked, and when training ended.
        answers, of_copies: Answers of the attacks, on an update and on its copy.
        small: What was run.
    """
    begin, *asked_at, end = moments
    apart = [after - before for before, after in itertools.pairwise(asked_at)]
    update = mean(apart[1:] or apart) if apart else end - asked_at[0]
    scored = sum(map(small.evaluated, range(small.federation.rounds + 1)))
    utility = max(0.0, end - asked_at[-1] - update)
    attacking = sum(answer.seconds or 0.0 for answer in (*answers, *of_copies))
    return Timings(
        rehearsal=whole,
        around=max(0.0, whole - (end - begin) - attacking),
        training=max(0.0, end - begin - update * len(asked_at) - utility * scored),
        update=update,
        utility=utility,
        **attack_timings(answers, of_copies),
    )


def attack_timings(answers: Sequence[Answer], of_copies: Sequence[Answer]) -> dict[str, Any]:
    """Returns the fields of `Timings` that are about attacks."""
    return {
        "attacks": _means(answers),
        "copies": _means(of_copies),
        "late": _late(answers),
        "late_copies": _late(of_copies),
    }


def _means(answers: Sequence[Answer]) -> dict[str, float]:
    by_attack = grouped(answers, lambda answer: answer.attack)
    return {name: mean(a.seconds or 0.0 for a in own) for name, own in by_attack.items()}


def _late(answers: Sequence[Answer]) -> tuple[str, ...]:
    return tuple({answer.attack for answer in answers if answer.diagnostics.get("time_up")})
