"""The positive control: what the same attacks read of undefended copies of the same batches.

That attacks read little shows something only if they can read. A copy is the plain gradient of all
trained parameters, at the model that a client was sent, on texts that the client trained on in that
round: no defense, no local steps, no dropout, in float32. The audit makes it from the vault; the
attack gets an observation of it as of any update, and only the facts that the run grants it.

The copies are captures of a second run, in a folder of the run.
"""

import json
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch

from fedleak import attacks, models
from fedleak.audit.pairing import FIGURES, best
from fedleak.audit.vault import read_truth, text_count
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import stored
from fedleak.config.federation.schedule import clients_of_round, target
from fedleak.config.loading import parse
from fedleak.models import loading
from fedleak.store.provenance import unsealed
from fedleak.store.records import Answer, LeakageRow, text_counts
from fedleak.store.run import Capture, Key, Run
from fedleak.store.summaries import CopiesRead, PositiveControl
from fedleak.training.local import local_update_
from fedleak.training.observation import QUESTIONS, Knowledge
from fedleak.training.truth import GroundTruth
from fedleak.util.errors import FedleakError
from fedleak.util.lists import grouped
from fedleak.util.rng import stream
from fedleak.util.versions import versions

FOLDER = "positive-control"

COPIES = 3
"""Clients whose batches are copied: an attack that proves what it reads needs no more."""


def control_of(run: Run) -> Run:
    """Returns the run that holds the copies of a run's batches, whether there are any or not.

    Raises:
        FedleakError: A link is in its place.
    """
    return run.inside(FOLDER)


def is_undefended(experiment: Experiment) -> bool:
    """Whether a copy would be what was sent, so that the run is its own positive control."""
    return undefended(experiment, []).fingerprint == experiment.fingerprint


def undefended(experiment: Experiment, keys: Sequence[Key]) -> Experiment:
    """Returns the experiment that the copies are captures of.

    It has no attacks on membership: they read no text.

    Args:
        experiment: The run's experiment, with the attacks to be tried.
        keys: The captures, all of one round; empty: all captures.
    """
    table = experiment.model_dump(mode="json")
    kinds = attacks.kinds()
    table |= {
        "preset": None,
        "client": {},
        "update": {"share": "all"},
        "defense": [],
        "canary": None,
        "published": None,
        "attack": [
            attack for attack in experiment.attack if not kinds[attack["kind"]].uses & QUESTIONS
        ],
        "audit": {"controls": False},
        "utility": {},
        "gate": {},
    }
    # Under FedSGD the server has the clients' learning rate, and another one is refused.
    plain = {"algorithm": "fedsgd", "dropout": False, "server_learning_rate": None}
    table["federation"] |= plain
    table["threat"] |= {
        "sees": None,
        "rounds": sorted({key.round for key in keys}) or None,
        "clients": [key.client for key in keys] or None,
    }
    if experiment.tapped is not None:
        table["tapped"] |= {"optimiser": "sgd"}
    return parse(table)


def copied(truth: GroundTruth, experiment: Experiment) -> GroundTruth:
    """Returns the batch of a copy: as many of a client's texts as one step takes."""
    size = experiment.federation.batch_size
    sequences = truth.sequences[:size]
    return GroundTruth(
        round=truth.round,
        client=truth.client,
        sequences=sequences,
        labels=truth.labels[:size],
        batch_size=len(sequences),
    )


def make_copies(run: Run, experiment: Experiment) -> Experiment | None:
    """Makes the copies that are not there yet; whoever calls this holds the lock of the run.

    Args:
        run: The run directory.
        experiment: What was prepared there, with the attacks to be tried.

    Returns:
        The experiment that the copies are captures of; None: there is no batch to copy.

    Raises:
        FedleakError: Something else is in the place of the copies.
        CaptureError: The model of the round is damaged.
    """
    keys = chosen(run, experiment)
    if not keys:
        return None
    control, plain, info = control_of(run), undefended(experiment, keys), run.info()
    content, mark = plain.model_dump(mode="json"), plain.fingerprint
    if not control.exists():
        control.create(
            experiment=content,
            fingerprint=mark,
            status="new",
            num_labels=info["num_labels"],
            examples={"training": len(keys), "held_out": 0},  # nothing is trained here
            versions=versions(),
            remarks=[],
        )
    check_copies(run, experiment)
    control.update_info(experiment=content, status="running")
    if missing := [key for key in keys if not control.captures.has(key)]:
        _make(run, control, plain, missing)
    return plain


def _make(run: Run, control: Run, plain: Experiment, keys: Sequence[Key]) -> None:
    torch.set_num_threads(1)  # so that sums have one order
    round = keys[0].round
    broadcast, local = run.model_sent(round).read_model(round), plain.local_training
    mode = plain.mode_in(round)
    control.models.write(round, broadcast)
    model = loading.load(plain.model_spec(run.info()["num_labels"]), weights=False)
    models.load_parameters_(model, broadcast)
    for key in keys:
        truth = read_truth(run, key)
        assert truth is not None  # it was chosen
        batch = copied(truth, plain)
        update = local_update_(model, batch.sequences, batch.labels, local, seed=plain.seed)
        control.vault.write(key, batch.to_json())
        known = Knowledge(
            learning_rate=local.learning_rate,
            local_steps=local.steps(batch.batch_size),
            dropout=local.dropout,
            server_mode=None if mode is None else mode.kind,
        )
        control.captures.write(Capture(key, update, known))


def chosen(run: Run, experiment: Experiment) -> list[Key]:
    """Returns clients, drawn by the seed, of the first round that is attacked and has batches."""
    for round in range(1, experiment.federation.rounds + 1):
        client_of_mode = target(experiment, round)
        keys = [
            Key(round, client)
            for client in clients_of_round(experiment, round)
            if experiment.attacked(round, client) and client_of_mode in (None, client)
        ]
        there = [key for key in keys if text_count(run, key)]
        if there:
            order = torch.randperm(len(there), generator=stream(experiment.seed, FOLDER))
            return sorted(there[i] for i in order[:COPIES].tolist())
    return []


def unsealed_copies(run: Run) -> list[str]:
    """Returns the names of the copies' files that carry no seal of this machine, or a wrong one."""
    with suppress(FedleakError):
        return [f"{FOLDER}/{name}" for name in unsealed(control_of(run))]
    return [FOLDER]  # it cannot be read


def check_copies(run: Run, experiment: Experiment) -> None:
    """Refuses copies that are not of this run's batches.

    Raises:
        FedleakError: They are copies of other batches, or the run's own batches are missing.
    """
    control = control_of(run)
    truths = {
        key: (read_truth(run, key), read_truth(control, key)) for key in control.captures.all_keys()
    }
    same = all(of_run and copied(of_run, experiment) == copy for of_run, copy in truths.values())
    if stored(control).fingerprint != undefended(experiment, []).fingerprint or not same:
        raise FedleakError(
            f"{str(control.path)!r} holds no copies of this run's batches: delete it, and "
            f"`fedleak attack {run.path} --positive-control` makes them"
        )


def summarised(
    rows: Iterable[LeakageRow], answers: Iterable[Answer], of_run: Iterable[Answer]
) -> PositiveControl | None:
    """Sums up what attacks read of undefended copies; None where none was attacked.

    An attack counts only if it also answered for the run's own updates, with the same settings and
    the same granted facts.

    Args:
        rows: Scored answers for copies.
        answers: These answers.
        of_run: The answers for the run's own updates.
    """
    tried = {_attacker(answer) for answer in of_run}
    same = {answer.id for answer in answers if _attacker(answer) in tried}
    return of_rows([row for row in rows if row.id in same])


def of_rows(rows: Sequence[LeakageRow]) -> PositiveControl | None:
    """Sums up what attacks read of undefended updates; None where no truth is known."""
    by_attack = grouped(rows, lambda row: row.attack)
    texts = sum(text_counts(rows).values())
    if not texts:
        return None
    return PositiveControl(
        copies=len({row.key for row in rows}),
        texts=texts,
        together=_reading(rows, texts),
        attacks={name: _reading(some, texts) for name, some in sorted(by_attack.items())},
    )


def _attacker(answer: Answer) -> tuple[str, str, tuple[str, ...]]:
    """Returns who answered: the attack, its settings, and the facts that it was granted."""
    return answer.attack, json.dumps(answer.settings, sort_keys=True), tuple(sorted(answer.granted))


def _reading(rows: Sequence[LeakageRow], texts: int) -> CopiesRead:
    """Returns the means over texts of the best score of rows; a text without a score counts 0."""
    with_personal = len({(row.key, item.text) for row in rows for item in row.personal})
    counts = dict.fromkeys(FIGURES, texts) | {"personal_data": with_personal}
    means = {n: sum(best(rows, n).values()) / count for n, count in counts.items() if count}
    return CopiesRead(read=len({row.key for row in rows if row.exact_match}), **means)
