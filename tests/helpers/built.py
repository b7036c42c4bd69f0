"""Runs that nobody trained and nobody attacked: what is in them is written down."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tiny import tables

from fedleak.attacks.reconstruction import Status
from fedleak.audit.estimates import Largest
from fedleak.audit.gate.evidence import Evidence
from fedleak.audit.worst_case import worst_case
from fedleak.config.experiment import Experiment
from fedleak.config.loading import parse
from fedleak.store import records
from fedleak.store.records import Answer, LeakageRow, ScoredRows
from fedleak.store.run import Capture, Key, Run
from fedleak.store.summaries import Circumstances, RunSummary
from fedleak.training.observation import ClientUpdate, Knowledge, UpdateKind
from fedleak.training.truth import GroundTruth


def truth_of(
    round: int, client: int, sequences: Iterable[Sequence[int]], **more: Any
) -> GroundTruth:
    """Returns the private batch of a client, all of class 1."""
    texts = tuple(map(tuple, sequences))
    about = {"labels": (1,) * len(texts), "batch_size": len(texts)} | more
    return GroundTruth(round=round, client=client, sequences=texts, **about)


def answer_of(
    round: int,
    client: int,
    sequences: Iterable[Sequence[int]] | None = None,
    *,
    tokens: Iterable[int] | None = None,
    status: str = "recovered",
    **more: Any,
) -> Answer:
    """Returns what an attack answered for an update."""
    about = {
        "round": round,
        "client": client,
        "attack": "dager",
        "settings": {"kind": "dager"},
        "granted": (),
        "knows": (),
        "seconds": 1.0,
        "device": "cpu",
        "status": Status(status),
        "sequences": None if sequences is None else tuple(map(tuple, sequences)),
        "margins": (),
        "tokens": None if tokens is None else tuple(tokens),
        "facts": {},
        "diagnostics": {},
        "verified": False,
        "reason": "",
    }
    return Answer(**about | more)


def run_of(
    folder: Path,
    experiment: Experiment,
    truths: Iterable[GroundTruth] = (),
    answers: Iterable[Answer] = (),
    captures: Iterable[Key] = (),
    **info: Any,
) -> Run:
    """Writes a run as training and attacks leave it."""
    run = Run(folder)
    about: dict[str, Any] = {"status": "finished", "num_labels": 2, "versions": {"fedleak": "0"}}
    data = experiment.data  # on nodes its counts are not known
    about["examples"] = {"training": data.samples or 0, "held_out": data.held_out or 0}
    run.create(
        experiment=experiment.model_dump(mode="json"),
        fingerprint=experiment.fingerprint,
        **about | info,
    )
    for truth in truths:
        run.vault.write(Key(truth.round, truth.client), truth.to_json())
    known = Knowledge(learning_rate=0.1, local_steps=1, dropout=False)
    update = ClientUpdate(UpdateKind.GRADIENT, {"a": torch.zeros(1)}, 2)
    for key in captures:
        run.captures.write(Capture(key, update, known))
    run.append(records.answers(run.fingerprint()), *answers)
    return run


def summary_of(**figures: Any) -> RunSummary:
    """Returns the figures of a run in which there is nothing but these."""
    unmeasured = ("privacy", "utility_before", "utility", "utility_reference")
    nothing = dict.fromkeys(["fedleak", "model_fingerprint", *unmeasured])
    about = {
        "name": "built",
        "status": "finished",
        "captures": 0,
        "attacks": {},
        "defenses": Circumstances(defense=()),
        "defended": (),
        "held_out": 0,
        "missing": (),
        "notes": (),
        "unscored": 0,
    }
    return RunSummary(**nothing | about | figures)


def evidence_of(
    changes: Mapping[str, Any],
    rows: Sequence[LeakageRow] = (),
    answers: Sequence[Answer] = (),
    *,
    folder: Path = Path("nowhere"),
    purged: str | None = None,
    others: Mapping[str, Any] = MappingProxyType({}),
    **figures: Any,
) -> Evidence:
    """Returns what the gate judges, of a run of which no file is there.

    Args:
        changes: Of the tiny experiment.
        rows: Of leakage.jsonl.
        answers: That they are made of.
        folder: Where the run would be.
        purged: When its private data was deleted.
        others: Rows of the other files.
        figures: Of the summary; left out, the worst case is that of the rows.
    """
    return Evidence(
        Run(folder),
        parse(tables(changes)),
        purged,
        answers,
        ScoredRows(leakage=rows, **others),
        summary_of(**{"worst_case": worst_case(rows, {}, Largest())} | figures),
        Largest(),
    )
