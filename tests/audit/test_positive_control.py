"""The positive control: undefended copies of a run's batches, and what attacks read of them."""

import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from built import answer_of, run_of, truth_of
from scored import row
from tiny import DLG, Here, call, tables, toml

from fedleak import models
from fedleak.attacks.reconstruction import Status
from fedleak.audit import positive_control
from fedleak.audit.gate.check import Check, Outcome
from fedleak.audit.gate.control import control_checks
from fedleak.audit.gate.evidence import gather, genuine
from fedleak.audit.positive_control import (
    COPIES,
    chosen,
    control_of,
    copied,
    make_copies,
    of_rows,
    summarised,
    undefended,
)
from fedleak.audit.vault import read_truth
from fedleak.config.experiment import Experiment
from fedleak.config.federation.lookup import stored
from fedleak.config.federation.schedule import expected_captures
from fedleak.config.loading import parse
from fedleak.models import loading
from fedleak.running.dispatch import dispatcher
from fedleak.running.pipeline import finished, wants_control
from fedleak.store.records import answers
from fedleak.store.run import Capture, Key, Run
from fedleak.store.summaries import SUMMARY, CopiesRead, PositiveControl
from fedleak.training.local import local_update_
from fedleak.training.observation import ClientUpdate, Knowledge, UpdateKind
from fedleak.util.versions import versions

NOISE = {"kind": "gaussian_noise", "sigma": 1.0}

DEFENDED = {
    "data": {"name": "builtin/notes", "samples": 12, "held_out": 4, "max_length": 6},
    "federation": {"clients": 4, "rounds": 2, "batch_size": 2, "learning_rate": 1e-4},
    "threat": {"knows": ["labels", "lengths", "noise_scale"], "rounds": [2]},
    "defense": [NOISE],
    "attack": [{"kind": "keyspan"}, DLG],
    "gate": {"exact": 0.5},
}
"""Noise hides all; without it keyspan reads all, and the short search of dlg nothing."""


def trained(changes: Mapping[str, Any] | None = None) -> Run:
    """Runs the experiment with these changes, in the current folder."""
    Path("small.toml").write_text(toml(DEFENDED | dict(changes or {})))
    status, _, errors = call("run", "small.toml")
    assert (status, errors) == (0, "")
    return Run(Path("runs/small").absolute())


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory, saved: Any) -> Path:
    folder = tmp_path_factory.mktemp("controlled")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(dispatcher, "hire", lambda *_: nullcontext([Here()]))
        trained({"model": {"name": saved("bert")}})
    return folder


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_process: None, trained_once: Path
) -> Run:
    """A run that has a positive control."""
    shutil.copytree(trained_once, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return Run(tmp_path / "runs" / "small")


def rescored(run: Run) -> Any:
    status, _, errors = call("score", str(run.path))
    return run.read_document(SUMMARY).positive_control, status, errors


def test_it_tells_attacks_that_can_read_from_those_that_cannot(run: Run) -> None:
    control = run.read_document(SUMMARY).positive_control
    assert (control.copies, control.texts) == (COPIES, 2 * COPIES)
    assert (control.attacks["keyspan"].read, control.attacks["keyspan"].exact) == (COPIES, 1.0)
    assert control.attacks["dlg"].read == 0
    assert control.attacks["probes"].token_recall == 1.0
    assert control.together.rougeL == 100.0
    assert run.read_document(SUMMARY).attacks["keyspan"].answers == 0
    _, shown, _ = call("score", str(run.path))
    text = " ".join(shown.split())
    assert "Of 3 plain gradients of these batches, without any defense, the same attacks" in text
    assert "read 100 % of the texts word for word (" in text
    assert "keyspan 100 %" in text


def test_a_copy_is_the_plain_gradient_of_the_clients_first_texts(run: Run) -> None:
    experiment, control = stored(run), control_of(run)
    fedavg = {"algorithm": "fedavg", "dropout": True}
    other = experiment.model_dump(mode="json")
    plain = undefended(
        type(experiment).model_validate(
            other
            | {
                "federation": other["federation"] | fedavg,
                "update": {"share": ["bert.encoder.*"]},
                "threat": other["threat"] | {"sees": "models"},
            }
        ),
        control.captures.all_keys(),
    )
    assert expected_captures(plain) == control.captures.all_keys()
    assert plain.local_training == stored(control).local_training
    model = loading.load(plain.model_spec(run.info()["num_labels"]))
    models.load_parameters_(model, run.models.read_model(2))
    for key in control.captures.all_keys():
        truth, capture = read_truth(run, key), control.captures.read_capture(key)
        assert read_truth(control, key).sequences == truth.sequences[:2]
        assert read_truth(control, key).noise_scale is None
        expected = local_update_(
            model, truth.sequences[:2], truth.labels[:2], plain.local_training, seed=0
        )
        assert capture.update.kind is UpdateKind.GRADIENT
        assert capture.update.tensors.keys() == model.parameters().keys()
        for name, value in expected.tensors.items():
            assert torch.equal(value, capture.update.tensors[name])


def test_it_is_made_where_the_gate_limits_what_is_read_or_somebody_asks(run: Run) -> None:
    made = run.read_document(SUMMARY).positive_control
    shutil.rmtree(control_of(run).path)
    run.update_info(experiment=run.info()["experiment"] | {"gate": {"epsilon": 8.0}})
    assert rescored(run)[0] is None
    assert call("attack", str(run.path))[0] == 0
    assert run.read_document(SUMMARY).positive_control is None
    assert call("attack", str(run.path), "--positive-control")[0] == 0
    assert run.read_document(SUMMARY).positive_control == made


@pytest.mark.parametrize(
    "protected",
    [
        {"defense": [NOISE]},
        {"update.share": ["bert.encoder.*"]},
        {"federation.dropout": True},
        {"federation.algorithm": "fedavg"},
        {"threat.sees": "models"},
    ],
)
def test_a_run_is_its_own_where_nothing_protects_updates(protected: dict[str, Any]) -> None:
    plain = {"gate.exact": 0.5, "federation.server_optimiser": "adam"}
    assert not wants_control(parse(tables(plain)))
    assert wants_control(parse(tables({"gate.exact": 0.5, **protected})))
    assert not wants_control(parse(tables({"gate.epsilon": 8.0, **protected})))


def test_what_is_missing_is_made_again(run: Run) -> None:
    control, before = control_of(run), run.read_document(SUMMARY).positive_control
    lost = control.captures.all_keys()[1]
    (control.path / "captures" / f"{lost}.safetensors").unlink()
    (control.path / "reconstructions.jsonl").unlink()
    control.update_info(status="running")
    assert rescored(run)[0] is None
    assert not finished(run, stored(run))
    status, shown, _ = call("run", "small.toml")
    assert status == 0
    assert f"copy: keyspan round 2 client {lost.client}: recovered" in shown
    assert finished(run, stored(run))
    assert run.read_document(SUMMARY).positive_control == before


def test_an_attack_on_copies_alone_does_not_count(run: Run) -> None:
    control = control_of(run).path
    attacks = '[{kind="keyspan", name="other"}, {kind="dlg", steps=3, name="longer"}]'
    assert call("attack", str(control), "--set", f"attack={attacks}")[0] == 0
    rescored_control, _, _ = rescored(run)
    assert set(rescored_control.attacks) == {"probes", "keyspan", "dlg"}


def test_an_attack_that_failed_on_copies_is_tried_again(run: Run) -> None:
    control = control_of(run)
    lines = answers(control.fingerprint())
    failed = [
        answer.model_copy(update={"status": Status.FAILED, "reason": "crashed"})
        if answer.attack == "keyspan"
        else answer
        for answer in control.rows(lines)
    ]
    control.write_rows(lines, failed)
    rescored_control, status, errors = rescored(run)
    assert (rescored_control.attacks["keyspan"].read, status) == (0, 1)
    assert "positive control: 3 of 9 answers failed (keyspan: crashed)" in errors
    assert call("attack", str(run.path), "--retry")[0] == 0
    assert run.read_document(SUMMARY).positive_control.attacks["keyspan"].read == COPIES


def test_copies_of_other_batches_do_not_count(run: Run) -> None:
    vault = run.path / "vault"
    first, second = (vault / f"{key}.json" for key in control_of(run).captures.all_keys()[:2])
    first.write_text(second.read_text().replace('"client": 1', '"client": 0'))
    rescored_control, status, errors = rescored(run)
    assert (rescored_control, status) == (None, 1)
    assert "holds no copies of this run's batches" in errors


def test_purge_deletes_the_copies_and_keeps_the_figures(run: Run) -> None:
    before = run.read_document(SUMMARY).positive_control
    assert call("purge", str(run.path))[0] == 0
    assert not control_of(run).path.exists()
    assert run.read_document(SUMMARY).positive_control == before


def test_a_link_in_its_place_is_not_followed(run: Run, tmp_path: Path) -> None:
    shutil.move(control_of(run).path, tmp_path / "elsewhere")
    control_of(run).path.symlink_to(tmp_path / "elsewhere")
    rescored_control, status, errors = rescored(run)
    assert (rescored_control, status) == (None, 1)
    assert "positive-control" in errors
    assert call("attack", str(run.path))[0] == 1


def test_without_a_vault_there_is_none(run: Run) -> None:
    shutil.rmtree(run.path / "vault")
    assert make_copies(run, stored(run)) is None


# --- of runs that nobody trained ------------------------------------------------------------------


def test_copies_are_of_an_experiment_without_anything_in_the_way() -> None:
    changes = {
        "attack": [DLG, {"kind": "membership"}],
        "federation": {
            "clients": 4, "rounds": 3, "batch_size": 2, "algorithm": "fedavg", "dropout": True,
            "local_epochs": 2, "server_learning_rate": 0.5, "server_optimiser": "adam",
        },
        "update.share": ["bert.encoder.*"],
        "threat": {"sees": "updates", "knows": ["labels"], "rounds": [1, 2]},
        "defense": [NOISE],
        "audit.controls": True,
        "utility.rounds": [1],
        "gate.exact": 0.5,
    }  # fmt: skip
    before = parse(tables(changes))
    table = before.model_dump(mode="json")
    plain = undefended(before, [Key(2, 3), Key(2, 1)]).model_dump(mode="json")
    changed = {
        "attack": [DLG], "update": {"share": "all"}, "defense": [], "canary": None,
        "audit": table["audit"] | {"controls": False},
        "utility": parse(tables()).model_dump(mode="json")["utility"],
        "gate": parse(tables()).model_dump(mode="json")["gate"],
        "federation": table["federation"]
        | {"algorithm": "fedsgd", "dropout": False, "server_learning_rate": None},
        "threat": table["threat"] | {"sees": None, "rounds": [2], "clients": [3, 1]},
    }  # fmt: skip
    assert plain == table | changed
    assert plain["threat"]["knows"] == ["labels"]
    everything = undefended(before, []).threat
    assert (everything.rounds, everything.clients) == (None, None)


def test_a_copy_has_as_many_texts_as_one_step_takes() -> None:
    texts = [(2, 5, 3), (2, 6, 3), (2, 7, 3)]
    truth = truth_of(2, 1, texts, labels=(0, 1, 1), batch_size=3, noise_scale=0.5)
    two = parse(tables({"federation.batch_size": 2}))
    assert copied(truth, two) == truth_of(2, 1, texts[:2], labels=(0, 1))
    many = parse(tables({"federation.batch_size": 8}))
    assert copied(truth, many) == truth_of(2, 1, texts, labels=(0, 1, 1))


def test_batches_to_copy_are_drawn_from_the_first_round_that_has_some(tmp_path: Path) -> None:
    changes = {"federation.clients": 8, "federation.rounds": 3, "threat.clients": [*range(7)]}
    experiment = parse(tables(changes))
    truths = [truth_of(2, client, [(2, 5, 3)]) for client in range(8)]
    truths += [truth_of(1, 0, []), truth_of(3, 0, [(2, 5, 3)])]
    run = run_of(tmp_path / "run", experiment, truths)
    (run.path / "vault" / "r0002-c00.json").write_text("{")
    keys = chosen(run, experiment)
    assert len(keys) == COPIES
    assert keys == sorted(keys)
    assert {*keys} < {Key(2, client) for client in range(1, 7)}
    others = [chosen(run, parse(tables(changes | {"seed": seed}))) for seed in range(1, 5)]
    assert any(other != keys for other in others)
    for client in range(8):
        (run.path / "vault" / f"r0002-c0{client}.json").unlink()
    assert chosen(run, experiment) == [Key(3, 0)]
    (run.path / "vault" / "r0003-c00.json").unlink()
    assert chosen(run, experiment) == []


def test_copies_are_made_once_in_a_run_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = parse(tables({"federation.clients": 2}))
    truths = [truth_of(1, client, [(2, 5, 3)]) for client in range(2)]
    run = run_of(tmp_path / "run", experiment, truths, num_labels=5)
    requested: list[list[Key]] = []

    def make(source: Run, control: Run, plain: Experiment, keys: Sequence[Key]) -> None:
        assert (source.path, control.path) == (run.path, control_of(run).path)
        assert plain == undefended(experiment, [Key(1, 0), Key(1, 1)])
        requested.append([*keys])
        for key in keys[:1]:
            known = Knowledge(learning_rate=0.1, local_steps=1, dropout=False)
            update = ClientUpdate(UpdateKind.GRADIENT, {"a": torch.zeros(1)}, 1)
            control.captures.write(Capture(key, update, known))
            control.vault.write(key, copied(truths[key.client], experiment).to_json())

    monkeypatch.setattr(positive_control, "_make", make)
    for _ in range(3):
        plain = make_copies(run, experiment)
    assert plain == undefended(experiment, [Key(1, 0), Key(1, 1)])
    assert requested == [[Key(1, 0), Key(1, 1)], [Key(1, 1)]]
    info = control_of(run).info()
    assert info["experiment"] == plain.model_dump(mode="json")
    assert (info["fingerprint"], info["status"]) == (plain.fingerprint, "running")
    assert (info["num_labels"], info["examples"]) == (5, {"training": 2, "held_out": 0})
    assert (info["versions"], info["remarks"]) == (versions(), [])


def test_a_copy_takes_the_steps_of_its_own_texts(tmp_path: Path) -> None:
    changes = {"federation.algorithm": "fedavg", "federation.local_epochs": 2}
    experiment = parse(tables({"federation.clients": 1} | changes))
    batch_size = experiment.local_training.batch_size
    sequences = [(2, 5 + i, 3) for i in range(2 * batch_size)]
    run = run_of(tmp_path / "run", experiment, [truth_of(1, 0, sequences)], num_labels=2)
    model = loading.load(experiment.model_spec(2))
    run.models.write(1, model.parameters())
    torch.set_num_threads(2)
    plain = make_copies(run, experiment)
    assert torch.get_num_threads() == 1
    knowledge = control_of(run).captures.about(Key(1, 0)).knowledge
    copy = read_truth(control_of(run), Key(1, 0))
    assert copy is not None
    assert knowledge.local_steps == plain.local_training.steps(len(copy.sequences))


def test_what_was_read_of_copies_is_the_best_of_each_text() -> None:
    rows = [
        row("tag", 0, (True, 100.0, 0.5), (False, 20.0, 0.0), exact_match=0.5),
        row("dlg", 0, (False, 40.0, 1.0), (False, 60.0, 0.5), exact_match=0.0),
        row("dlg", 1, (True, 100.0, 1.0), exact_match=1.0),
        row("tag", 1, batch_size=1, texts=None),
    ]
    assert of_rows(rows) == PositiveControl(
        copies=2,
        texts=3,
        together=CopiesRead(read=2, exact=2 / 3, rougeL=260 / 3, token_recall=2.5 / 3),
        attacks={
            "dlg": CopiesRead(read=1, exact=1 / 3, rougeL=200 / 3, token_recall=2.5 / 3),
            "tag": CopiesRead(read=1, exact=1 / 3, rougeL=40.0, token_recall=0.5 / 3),
        },
    )
    assert of_rows([]) is None
    assert of_rows([row("dlg", 0, texts=None, batch_size=None)]) is None


@pytest.mark.parametrize(
    "changes",
    [{}, {"attack": "tag"}, {"settings": {"kind": "dager", "b": 1}}, {"granted": ("labels",)}],
)
def test_what_was_tried_on_the_run_in_the_same_way_counts(changes: Mapping[str, Any]) -> None:
    settings = {"a": 1, "kind": "dager"}
    facts = ("labels", "lengths")
    answer = answer_of(1, 0, settings=settings, granted=facts, attack="dager")
    of_run = answer_of(
        1, 5, **{"settings": {"kind": "dager", "a": 1}, "granted": facts[::-1]} | changes
    )
    rows = [row("dager", 0, (True, 100.0, 1.0)), row("dager", 1, (False, 0.0, 0.0))]
    control = summarised(rows, [answer], [of_run])
    assert control == (None if changes else of_rows(rows[:1]))


# --- the gate -------------------------------------------------------------------------------------


def checked(run: Run, **limits: float) -> dict[str, Check]:
    return {check.name: check for check in control_checks(limits, gather(run))}


def test_the_gate_wants_each_limit_exceeded_where_nothing_is_defended(run: Run) -> None:
    limits = {"exact": 0.99, "rougeL": 99.0, "token_recall": 0.99}
    # As if keyspan had answered for the noisy updates, too.
    answered = replace(gather(run), rows=gather(control_of(run)).rows)
    control, attackers = control_checks(limits, answered)
    assert control.outcome is Outcome.WITHIN
    assert "keyspan read a text of 3 of 3 undefended copies" in control.sentence
    assert "dlg read a text of 0 of 3 undefended copies" in control.sentence
    assert "for dlg, keyspan, probes alone: auto, the strongest" in attackers.sentence
    # Nothing can exceed such a limit, so no attack can show that it means something.
    assert control_checks({"exact": 1.0}, answered)[0].outcome is Outcome.UNTOLD


def test_an_attack_that_abstained_does_not_vouch_for_one_that_cannot_read(run: Run) -> None:
    control = checked(run, exact=0.5)["positive control"]
    assert control.outcome is Outcome.UNTOLD
    assert "exact rests on dlg here, and keyspan exceeds it there" in control.sentence


def test_attacks_that_read_no_copy_close_the_gate(run: Run) -> None:
    """As those that answer anything at all; other figures are not their concern."""
    lines = answers(run.fingerprint())
    of_run = [answer for answer in run.rows(lines) if answer.attack != "keyspan"]
    run.write_rows(lines, of_run)
    control = checked(run, exact=0.0)["positive control"]
    assert control.outcome is Outcome.UNTOLD
    assert "dlg read a text of 0 of 3 undefended copies" in control.sentence
    assert "the attacks stay within exact, too" in control.sentence


def test_without_copies_the_gate_is_closed_and_says_why(run: Run) -> None:
    shutil.rmtree(control_of(run).path)
    status, shown, _ = call("gate", str(run.path))
    assert status == 3
    assert f"fedleak attack {run.path} --positive-control" in shown.replace("\n", "")
    shutil.rmtree(run.path / "vault")
    assert (
        "no private batch is in the vault" in checked(run, exact=0.5)["positive control"].sentence
    )


def test_an_undefended_run_is_judged_by_its_own_updates(run: Run) -> None:
    control = checked(control_of(run), exact=0.99)["positive control"]
    assert control.outcome is Outcome.WITHIN
    assert "keyspan read a text of 3 of 3 updates, none of them defended" in control.sentence


def test_answers_for_copies_that_nobody_here_wrote_close_the_gate(run: Run) -> None:
    assert genuine(gather(run)).passed
    file = control_of(run).path / "reconstructions.jsonl"
    file.write_text(file.read_text().replace("dlg", "gld"))
    check = genuine(gather(run))
    assert not check.passed
    assert "positive-control/reconstructions.jsonl, line" in check.sentence
