"""Attacks of others: answers that are none, and changed models."""

import io
import json
import math
import shutil
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

import pytest
import torch
from cases import some
from hostile import ANSWERS, CHANGES, Few, Forecaster, Hostile
from rich.console import Console
from tiny import tables

from fedleak import attacks, models
from fedleak.attacks.analytic.probes import Probes
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.audit import scoring
from fedleak.config.components import NamedAttack
from fedleak.config.loading import parse
from fedleak.flower import inline
from fedleak.models import loading
from fedleak.report.terminal.run import print_run
from fedleak.running import preparation
from fedleak.running.dispatch import dispatcher
from fedleak.running.workers import answers
from fedleak.running.workers.model_state import changed, state
from fedleak.running.workers.process import Job, work_together
from fedleak.store.lines import Lines
from fedleak.store.run import Key, Run
from fedleak.training.observation import Knowledge

TABLE = tables()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    experiment = parse(TABLE)
    run = preparation.prepare(experiment, tmp_path_factory.mktemp("trained") / "run")
    inline.train(run, experiment)
    return run


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained.path, tmp_path / "run")
    return Run(tmp_path / "run")


def job_of(run, attack, client=0):
    spec = parse(TABLE).model_spec(2)
    named = NamedAttack(attack.kind, attack)
    return Job(
        run=run.path,
        key=Key(1, client),
        attack=named,
        knowledge=Knowledge(),
        model=spec,
        seed=4,
    )


@dataclass
class Witness:
    """An attack that keeps the model that it is given."""

    kind: ClassVar[str] = "witness"
    uses: ClassVar[frozenset[str]] = frozenset()

    def obstacle(self, setting):
        return None

    def __call__(self, seen, model, *, rng):
        self.model = model
        return Reconstruction.none(Status.ABSTAINED, "it only looks")


def model_given(run):
    """Returns the model that an attack is given now."""
    witness = Witness()
    work_together([job_of(run, witness)], "cpu")
    return witness.model


def timeless(answer):
    return answer.model_copy(update={"seconds": None})


# --- answers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_is_none_is_the_attacks_failure(trained, answer):
    row = work_together([job_of(trained, Hostile(answer))], "cpu")[0]
    assert row.status == Status.FAILED
    assert row.reason.startswith("the attack's answer is invalid: ")
    assert row.sequences is None
    assert row.seconds is not None
    json.dumps(row.model_dump(), allow_nan=False)


def test_too_few_answers_are_a_failure_of_all(trained):
    rows = work_together([job_of(trained, Few(), client) for client in (0, 1)], "cpu")
    assert [row.status for row in rows] == [Status.FAILED] * 2
    assert rows[0].reason == "the attack returned 1 answers for 2 observations"


def test_a_good_answer_is_kept_and_what_is_not_finite_is_null(trained):
    row = work_together([job_of(trained, Hostile())], "cpu")[0]
    assert (row.status, row.sequences) == (Status.RECOVERED, ((5, 6),))
    assert (row.evidence, row.margins) == ((None,), (None,))


def test_a_reason_is_one_line_of_bounded_length_that_nothing_obeys():
    reconstruction = Reconstruction.none(Status.ABSTAINED, "\x1b[2Jno\nrow " + "\u202ex" * 10**6)
    reason = answers.checked(reconstruction, vocabulary=9, longest=9, examples=1).reason
    assert reason.startswith("\\x1b[2Jno row \\u202ex")
    assert reason.isprintable()
    assert len(reason) <= 8 * answers.LONGEST_REASON


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_in_facts_and_diagnostics_are_finite_or_null(value):
    reconstruction = Reconstruction(
        status=Status.RECOVERED,
        facts={"longest_sequence": value},
        diagnostics={"a": [{"b": value}]},
    )
    answer = answers.checked(reconstruction, vocabulary=9, longest=9, examples=1)
    assert (answer.facts, answer.diagnostics) == ({"longest_sequence": None}, {"a": [{"b": None}]})


def test_a_fact_that_nobody_knows_is_kept_and_not_compared(run, monkeypatch, in_process):
    kinds = {**attacks.kinds(), "forecaster": Forecaster}
    monkeypatch.setattr(attacks, "kinds", lambda: kinds)
    experiment = parse(TABLE | {"attack": [{"kind": "forecaster"}]})
    dispatcher.attack_captures(run, experiment, no_more=lambda: True)
    scored = scoring.score_run(run)
    forecaster_facts = [
        scored_answer.row.facts
        for scored_answer in scored
        if scored_answer.row.attack == "forecaster"
    ]
    assert [facts["weather"].claimed for facts in forecaster_facts] == [["rain", 1]] * 2
    assert [facts["weather"].right for facts in forecaster_facts] == [None] * 2
    assert [facts["longest_sequence"].right for facts in forecaster_facts] == [False] * 2
    console = Console(file=io.StringIO(), width=400)
    print_run(run, scored, console)
    shown = {
        line.partition(", %")[0].strip(): line for line in console.file.getvalue().splitlines()
    }
    assert "not compared" in shown["weather"]
    assert "0 [" in shown["longest sequence"]


def test_a_run_with_hostile_attacks_is_attacked_scored_and_shown(run, monkeypatch, in_process):
    kinds = {**attacks.kinds(), "hostile": Hostile}
    monkeypatch.setattr(attacks, "kinds", lambda: kinds)
    bad = [{"kind": "hostile", "name": f"bad-{i}", "answers": a} for i, a in enumerate(ANSWERS)]
    experiment = parse(TABLE | {"attack": bad})
    dispatcher.attack_captures(run, experiment, no_more=lambda: True)
    rows = run.rows(Lines("reconstructions.jsonl", dict))
    assert len(rows) == 2 * (len(ANSWERS) + 1)
    assert {row["status"] for row in rows if row["attack"] != "probes"} == {"failed"}
    assert run.rows(Lines("attempts.jsonl", dict)) == [], (
        "they are not tried again: they would answer alike"
    )
    scored = scoring.score_run(run)
    print_run(run, scored, Console(file=io.StringIO(), width=400))
    assert len(scored) == len(rows)


# --- the model and the update -------------------------------------------------------------------


@pytest.mark.parametrize(("change", "crash"), some(product(CHANGES, [False, True]), every=3))
def test_a_changed_model_is_noted_and_the_next_attack_answers_as_if_alone(trained, change, crash):
    honest = job_of(trained, Probes())
    expected = timeless(work_together([honest], "cpu")[0])
    spoiler = job_of(trained, Hostile(changes=change, crash=crash))
    if crash:
        with pytest.raises(RuntimeError, match="crashed"):
            work_together([spoiler], "cpu")
    else:
        row = work_together([spoiler], "cpu")[0]
        assert row.status == Status.FAILED
        assert "the attack changed the model (" in row.reason
        assert change.partition(":")[0] in row.reason
        assert row.sequences is None
    fresh = loading.load(honest.model)
    models.load_parameters_(fresh, trained.models.read_model(1))
    assert changed(model_given(trained), state(fresh)) == []
    assert timeless(work_together([honest], "cpu")[0]) == expected


def test_an_attack_that_leaves_the_model_alone_keeps_it_loaded(trained):
    model = model_given(trained)
    work_together([job_of(trained, Probes())], "cpu")
    assert model_given(trained) is model


def test_a_state_is_that_of_the_values_not_of_the_objects(bert_tiny):
    before = state(bert_tiny)
    weight = bert_tiny.module.get_parameter("classifier.weight")
    kept = weight.data.clone()
    weight.data.mul_(-1)
    assert changed(bert_tiny, before) == ["weights"]
    weight.data = kept
    assert changed(bert_tiny, before) == []


@pytest.mark.parametrize("how", ["write", "replace", "clear"])
def test_what_an_attack_writes_into_the_update_no_other_sees(trained, how):
    path = trained.path / "captures" / f"{Key(1, 0)}.safetensors"
    content = path.read_bytes()
    expected = timeless(work_together([job_of(trained, Probes())], "cpu")[0])
    row = work_together([job_of(trained, Hostile(update=how))], "cpu")[0]
    assert row.status == Status.FAILED
    assert "the attack changed the update" in row.reason
    assert path.read_bytes() == content
    assert timeless(work_together([job_of(trained, Probes())], "cpu")[0]) == expected
    update = trained.captures.read_capture(Key(1, 0)).update
    assert all(torch.count_nonzero(t) for t in update.tensors.values())
