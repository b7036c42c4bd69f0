"""Runs with a malicious server from end to end: what is sent, captured, attacked, scored, said."""

import csv
import io
import math
import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from rich.console import Console
from tiny import Here, call

from fedleak import models
from fedleak.attacks import server_modes
from fedleak.attacks.server_modes import ServerMode
from fedleak.audit import scoring, vault
from fedleak.audit.comparison import compare
from fedleak.audit.handover import take_vaults
from fedleak.audit.positive_control import control_of, is_undefended
from fedleak.config.federation.assignment import Assignment
from fedleak.config.federation.schedule import expected_captures, malicious_server, target
from fedleak.config.loading import parse
from fedleak.flower.client import app as client
from fedleak.flower.client import masking
from fedleak.flower.engines import train
from fedleak.models import CAUSAL_LM, loading
from fedleak.report.tables.comparison import comparison_table
from fedleak.report.terminal.run import print_run
from fedleak.running import pipeline, preparation
from fedleak.running.dispatch import dispatcher
from fedleak.running.export import export
from fedleak.running.purge import purge
from fedleak.running.reports import report_run
from fedleak.store.captures import Captures
from fedleak.store.records import LEAKAGE
from fedleak.store.run import EVERYONE, Key, Run
from fedleak.store.summaries import SUMMARY
from fedleak.training.local import local_update_
from fedleak.training.observation import Example
from fedleak.util.errors import ConfigError, FedleakError

SUM = {"kind": "secure_sum"}
PROTOCOL = SUM | {"protocol": "secagg+", "clipping": 8.0, "max_weight": 4.0}
ONE_TARGET = {"mode": "inconsistent", "targets": [2]}
MODEL = {"name": "smaller than a built-in one: `folders`"}
CAUSAL = {"name": "and a causal one", "task": CAUSAL_LM}
TABLE = {
    "name": "mine",
    "seed": 3,
    "model": MODEL,
    "data": {"name": "builtin/notes", "samples": 10, "held_out": 4, "max_length": 6},
    "federation": {"clients": 4, "rounds": 1, "batch_size": 2, "learning_rate": 0.1},
    "defense": [SUM],
    "attack": [],
    "utility": {"rounds": []},
    "workers": {"devices": ["cpu"]},
}
FEDAVG = {"algorithm": "fedavg", "batch_size": 1, "local_epochs": 2}


@dataclass(frozen=True)
class Shift(ServerMode):
    """Sends all clients a model of which one matrix is shifted by what public texts say."""

    kind: ClassVar[str] = "shift"

    def changes(self) -> str:
        return "shifts the first matrix"

    def broadcast(self, model, *, targeted, public, rng):
        assert targeted
        assert public
        assert all(isinstance(example, Example) for example in public)
        name = model.family.attention_parameters(0)[0]
        value = model.parameters()[name]
        size = 0.01 * sum(len(example.ids) for example in public)
        return {name: value + size * torch.randn(value.shape, generator=rng)}


KINDS = {**server_modes.kinds(), "shift": Shift}


@pytest.fixture(autouse=True)
def _with_shift(monkeypatch):
    monkeypatch.setattr(server_modes, "kinds", lambda: KINDS)


@pytest.fixture(scope="module", autouse=True)
def folders(saved):
    """Makes models of the built-in ones' vocabulary that cost a tenth."""
    MODEL["name"], CAUSAL["name"] = saved("bert", layers=1), saved("llama", CAUSAL_LM)


def experiment_of(server, **tables):
    federation = TABLE["federation"] | tables.pop("federation", {})
    return parse(TABLE | {"server": server, "federation": federation} | tables)


def trained(folder, experiment):
    run = preparation.prepare(experiment, folder)
    train(run, experiment)
    return run


def carried_out(folder, experiment):
    run = preparation.prepare(experiment, folder)
    pipeline.carry_out(run, experiment, train)
    return run


def distance(tensors: Mapping[str, torch.Tensor], reference: Mapping[str, torch.Tensor]) -> float:
    """Returns the distance of tensors, relative to the second ones, in float64."""
    change = sum(
        float((tensors[name].double() - reference[name].double()).square().sum())
        for name in tensors
    )
    return math.sqrt(
        change / sum(float(reference[name].double().square().sum()) for name in tensors)
    )


# --- inconsistent models under a secure sum ---------------------------------------------------


@pytest.mark.parametrize(
    ("model", "federation"),
    [
        ("classifier", {}),
        ("causal", FEDAVG),
        pytest.param("classifier", FEDAVG, marks=pytest.mark.slow),
        pytest.param("causal", {}, marks=pytest.mark.slow),
        pytest.param("adapters", FEDAVG, marks=pytest.mark.slow),
    ],
)
def test_a_sum_is_the_update_of_its_target(tmp_path, monkeypatch, model, federation):
    """The third client's two texts, among ten of four; it takes several steps with FedAvg."""
    monkeypatch.setattr(Captures, "drop", lambda captures: None)
    lora = {"rank": 2, "alpha": 4.0}
    table = {"classifier": MODEL, "causal": CAUSAL, "adapters": CAUSAL | {"lora": lora}}[model]
    experiment = experiment_of(
        ONE_TARGET | {"rounds": [2]}, model=table, federation=federation | {"rounds": 2}
    )
    run = trained(tmp_path / "run", experiment)
    assert run.captures.all_keys() == expected_captures(experiment) == [Key(1, -1), Key(2, 2)]
    assert run.sent_models.rounds() == []  # the target was sent the global model
    capture, own = run.captures.read_capture(Key(2, 2)), run.held.read_capture(Key(2, 2))
    assert capture.update.num_examples == own.update.num_examples
    assert capture.knowledge == replace(own.knowledge, server_mode="inconsistent")
    bias = own.update.tensors.keys() - capture.update.tensors.keys()
    assert bias == ({"classifier.bias"} if model == "classifier" else set())
    assert distance(capture.update.tensors, own.update.tensors) < 3e-7
    truth = vault.read_truth(run, Key(2, 2))
    assert (truth.client, len(truth.sequences)) == (2, own.update.num_examples)


def test_the_masked_sum_is_the_targets_update_but_for_rounding(tmp_path, monkeypatch):
    sent = {}
    monkeypatch.setattr(client, "local_update_", _keeping(sent))
    run = trained(tmp_path / "run", experiment_of(ONE_TARGET, defense=[PROTOCOL]))
    update = run.captures.read_capture(Key(1, 2)).update
    assert update.num_examples == 2
    # The third of four that trained; one step of the quantisation, at a weight of half.
    step = 2 * PROTOCOL["clipping"] / 2**22 / 0.5
    own = next(u for c, u in sent.items() if c == tuple(vault.read_truth(run, Key(1, 2)).sequences))
    for name, value in update.tensors.items():
        assert float((value - own.tensors[name]).abs().max()) <= 1.01 * step
    assert distance(update.tensors, own.tensors) < 1e-2


def _keeping(sent):
    """Returns a client's training that keeps its updates, by its texts."""

    def update_of(model, sequences, *args, **kwargs):
        update = local_update_(model, sequences, *args, **kwargs)
        sent[tuple(sequences)] = update
        return update

    return update_of


def test_a_target_that_drops_out_is_no_error_and_nothing_is_read(tmp_path, monkeypatch, in_process):
    """The protocol goes on without it, so there is nothing of it in the sum."""
    target_of_masks = masking.secaggplus_mod

    def mod(message, context, call_next):
        stage = message.content.config_records["secaggplus_configs"]["stage"]
        if context.node_config["partition-id"] == 2 and stage == "collect_masked_vectors":
            raise RuntimeError("it is gone")
        return target_of_masks(message, context, call_next)

    monkeypatch.setattr(masking, "secaggplus_mod", mod)
    experiment = experiment_of(ONE_TARGET, defense=[PROTOCOL])
    run = carried_out(tmp_path / "run", experiment)
    assert {row.status for row in run.rows(LEAKAGE)} == {"abstained"}
    assert "dropped out of the sum" in run.rows(LEAKAGE)[0].reason


def test_noise_of_all_clients_is_on_the_targets_update(tmp_path, monkeypatch, in_process):
    monkeypatch.setattr(Captures, "drop", lambda captures: None)
    noise = {"kind": "gaussian_noise", "sigma": 0.01}
    run = carried_out(tmp_path / "run", experiment_of(ONE_TARGET, defense=[noise, SUM]))
    truths = [run.vault.read_note(Key(1, client)) for client in range(4)]
    weights = [min(2, len(truth["sequences"])) for truth in truths]
    scale = vault.read_truth(run, Key(1, 2)).noise_scale
    assert scale == pytest.approx(0.01 * math.hypot(*weights) / weights[2])
    (note,) = [note for note in run.read_document(SUMMARY).notes if "noise of all clients" in note]
    assert note.endswith(f"{scale:.3g}, {scale / 0.01:.3g} times that of its own")
    # What a client without data adds is that noise: the embedding rows of words of nobody.
    tensors = run.captures.read_capture(Key(1, 2)).update.tensors
    rows = tensors["bert.embeddings.word_embeddings.weight"]
    used = {token for truth in truths for ids in truth["sequences"] for token in ids}
    unused = [token for token in range(len(rows)) if token not in used]
    assert float(rows[unused].std()) == pytest.approx(scale, rel=0.02)


def test_the_batch_is_proved_as_if_there_were_no_sum(tmp_path, in_process):
    experiment = experiment_of(
        ONE_TARGET, model=CAUSAL, attack=[{"kind": "dager"}], audit={"controls": False}
    )
    run = carried_out(tmp_path / "run", experiment)
    (row,) = [row for row in run.rows(LEAKAGE) if row.attack == "dager"]
    assert (row.client, row.batch_size, row.exact_match, row.verified) == (2, 2, 1.0, True)
    assert "server_mode" in row.knows


def test_targets_take_turns(tmp_path):
    experiment = experiment_of(
        {"mode": "inconsistent", "targets": [3, 1]}, federation={"rounds": 4}
    )
    assert [target(experiment, round) for round in range(1, 5)] == [3, 1, 3, 1]
    drawn = experiment_of({"mode": "inconsistent"}, federation={"rounds": 40})
    assert {target(drawn, round) for round in range(1, 41)} == {0, 1, 2, 3}


# --- a mode that changes what all are sent ----------------------------------------------------


@pytest.fixture(scope="module")
def shifted(tmp_path_factory, folders):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_modes, "kinds", lambda: KINDS)
        experiment = experiment_of(
            {"mode": "shift", "rounds": [2]},
            model=CAUSAL,
            defense=[],
            federation={"rounds": 3},
            threat={"rounds": [2]},
        )
        return trained(tmp_path_factory.mktemp("shifted") / "run", experiment)


def test_what_was_sent_stands_beside_the_honest_model(shifted):
    assert shifted.sent_models.rounds() == [2]
    sent, honest = shifted.sent_models.read_model(2), shifted.models.read_model(2)
    assert sum(not torch.equal(sent[name], honest[name]) for name in honest) == 1
    # The updates, which are computed at what was sent, move the honest model.
    updates = [shifted.captures.read_capture(Key(2, c)).update for c in range(4)]
    total = sum(update.num_examples for update in updates)
    for name, value in shifted.models.read_model(3).items() if 3 in shifted.models.rounds() else ():
        mean = sum(u.num_examples * u.tensors[name] for u in updates) / total
        torch.testing.assert_close(value, honest[name] - 0.1 * mean)


def test_the_attack_sees_the_model_that_its_victim_was_sent(shifted):
    experiment = preparation.stored(shifted)
    model = loading.load(experiment.model_spec(2), weights=False)
    truth = vault.read_truth(shifted, Key(2, 0))
    sent = shifted.captures.read_capture(Key(2, 0)).update.tensors
    for read, same in ((shifted.model_sent(2), True), (shifted.models, False)):
        models.load_parameters_(model, read.read_model(2))
        update = local_update_(
            model, truth.sequences, truth.labels, experiment.local_training, seed=0
        )
        assert (distance(update.tensors, sent) < 1e-6) == same


def test_attack_and_certificate_use_the_model_that_was_sent(shifted, in_process):
    experiment = preparation.stored(shifted).model_copy(update={"attack": [{"kind": "dager"}]})
    experiment = parse(experiment.model_dump(mode="json"))
    pipeline.attack_again(shifted, experiment, control=True)
    rows = [row for row in shifted.rows(LEAKAGE) if row.attack == "dager"]
    assert [row.verified for row in rows] == [True] * 4
    # Without defenses a run is its own positive control, which copies at the same model.
    control = control_of(shifted)
    assert is_undefended(experiment)
    assert distance(control.models.read_model(2), shifted.sent_models.read_model(2)) == 0
    assert shifted.read_document(SUMMARY).positive_control.together.exact == 1
    known = {control.captures.about(key).knowledge.server_mode for key in control.captures.stored()}
    assert known == {"shift"}


def test_a_malicious_round_that_was_cut_short_gives_the_same_again(shifted, tmp_path):
    """As if it had been killed while its clients trained."""
    run = trained(tmp_path / "run", preparation.stored(shifted))
    keys = [Key(2, 1), Key(2, 3)]
    before = {key: run.captures.read_capture(key).update.tensors for key in keys}
    last = run.models.read_model(4)
    for key in keys:
        run.captures.delete(key)
    run.sent_models.delete(2)
    for round in (3, 4):
        run.models.delete(round)
    train(run, preparation.stored(shifted))
    assert distance(run.sent_models.read_model(2), shifted.sent_models.read_model(2)) == 0
    for key in keys:
        assert distance(run.captures.read_capture(key).update.tensors, before[key]) == 0
    assert distance(run.models.read_model(4), last) == 0


def test_a_malicious_round_can_be_left_out_of_the_model(tmp_path):
    server = {"mode": "shift", "rounds": [2], "aggregate": False}
    run = trained(tmp_path / "run", experiment_of(server, defense=[], federation={"rounds": 2}))
    assert distance(run.models.read_model(2), run.models.read_model(1)) > 0
    assert distance(run.models.read_model(3), run.models.read_model(2)) == 0


# --- honest servers, and what clients are told ------------------------------------------------


def test_an_honest_server_is_what_no_table_is(tmp_path):
    plain, named = experiment_of({}), experiment_of({"mode": "honest", "rounds": [1]})
    assert plain.fingerprint == named.fingerprint
    assert plain.fingerprint != experiment_of(ONE_TARGET).fingerprint
    runs = [trained(tmp_path / str(i), experiment) for i, experiment in enumerate((plain, named))]
    plain_sum, named_sum = (
        run.captures.read_capture(Key(1, EVERYONE)).update.tensors for run in runs
    )
    assert all(torch.equal(plain_sum[name], named_sum[name]) for name in plain_sum)
    assert not runs[1].sent_models.rounds()
    assert malicious_server(named) is None


def test_clients_are_not_told_and_their_vaults_are_taken_all_the_same(tmp_path):
    experiment = experiment_of(ONE_TARGET)
    values = Assignment(experiment, "run").to_values()
    assert "inconsistent" not in str(values)
    run = trained(tmp_path / "run", experiment)
    bare = tmp_path / "node" / "run"
    bare.mkdir(parents=True)
    (run.path / "vault").rename(bare / "vault")
    assert vault.read_truth(run, Key(1, 2)) is None
    assert Key(1, 2) in take_vaults(run, [tmp_path / "node"]).truths


# --- what is said -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory, folders):
    """An honest run and a malicious one, attacked and scored."""
    folder = tmp_path_factory.mktemp("pair")
    honest = trained(folder / "honest", experiment_of({}, defense=[]))
    server = ONE_TARGET | {"rounds": [2]}
    bad = trained(folder / "bad", experiment_of(server, federation={"rounds": 2}))
    for run in (honest, bad):
        attacked(run)
    return honest, bad


def attacked(run):
    """Attacks the captures of a run in this process, and scores what that gives."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "hire", lambda *_: nullcontext([Here()]))
        run.update_info(status="finished")
        pipeline.attack_again(run, preparation.stored(run))
    return run


SAID = ("in round 2 the server (inconsistent) sends every client but one", "client 2 in round 2")


def printed(run: Run) -> str:
    file = io.StringIO()
    print_run(run, scoring.score_run(run), Console(file=file, width=300, emoji=False))
    return file.getvalue()


def test_a_malicious_run_cannot_be_mistaken_for_an_honest_one(pair, tmp_path):
    honest, bad = pair
    assert honest.read_document(SUMMARY).server is None
    assert all(words in bad.read_document(SUMMARY).server for words in SAID)
    assert "is trained on what clients send then" in bad.read_document(SUMMARY).server
    for text in (printed(bad), report_run(bad, None).read_text()):
        assert all(words in text for words in SAID)
        assert "alicious server" in text
        assert "changed" in text
    assert "alicious" not in printed(honest)
    table = tmp_path / "rows.csv"
    export(bad, table)
    modes = {row["round"]: row["server"] for row in csv.DictReader(table.open())}
    assert modes == {"1": "honest", "2": "inconsistent"}
    notes = bad.info()["remarks"]
    assert any(note.startswith("malicious server: in round 2") for note in notes)


def test_the_gate_and_explain_say_it(pair, tmp_path, monkeypatch):
    _, bad = pair
    status, text, _ = call("gate", str(bad.path), "--set", "gate.exact=1")
    assert status in (0, 3)
    assert f"malicious server: {SAID[0]}" in text
    experiment = bad.path / "run.json"
    status, text, _ = call("explain", str(experiment))
    assert status == 0
    assert text.startswith(f"malicious server: {SAID[0]}")


def test_a_comparison_says_whose_server_is_malicious(pair, tmp_path):
    _, bad = pair
    alone = experiment_of({}, defense=[], federation={"rounds": 2})
    twin = attacked(trained(tmp_path / "twin", alone))
    (comparison,) = compare(twin, [bad])
    assert comparison.servers == (None, bad.read_document(SUMMARY).server)
    assert any(
        "malicious server: in round 2" in note for note in comparison_table(comparison).notes
    )


def test_purge_deletes_what_was_sent_and_keeps_what_was_said(shifted, tmp_path):
    shutil.copytree(shifted.path, tmp_path / "run")
    run = attacked(Run(tmp_path / "run"))
    with run.lock():
        run.update_info(status="finished")
        scoring.score_run(run)
        purge(run)
    assert not (run.path / "models").exists()
    assert "(shift) shifts the first matrix" in run.read_document(SUMMARY).server


# --- what is refused --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "tables", "message"),
    [
        (ONE_TARGET, {"defense": []}, r"the server sees 'updates', and this mode takes one"),
        (ONE_TARGET, {"threat": {"sees": "models"}}, r"choose one of both"),
        (ONE_TARGET, {"canary": {"count": 2}}, r"\[canary\] measures whole sums"),
        (ONE_TARGET, {"update": {"share": ["classifier.bias"]}}, "send more than the classifier"),
        (
            ONE_TARGET,
            {"federation": {"clients_per_round": 1}},
            r"has no target in round 1, in which the clients \[\d\] train",
        ),
    ],
)
def test_what_a_mode_cannot_do_is_refused_before_training(tmp_path, server, tables, message):
    experiment = experiment_of(server, **tables)
    with pytest.raises(ConfigError, match=message):
        preparation.prepare(experiment, tmp_path / "run")


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"mode": "inconsistnt"}, "server.mode: unknown mode 'inconsistnt'"),
        ({"mode": 3}, "server.mode"),
        ({"rounds": [2]}, r"server.rounds has 2, but federation.rounds = 1"),
        ({"mode": "honest", "targets": [1]}, "server: unknown key 'targets'"),
        (ONE_TARGET | {"targets": [-1]}, r"server.targets"),
        (ONE_TARGET | {"aggregate": 1}, r"server.aggregate"),
    ],
)
def test_a_table_that_is_not_right_is_refused(server, message):
    with pytest.raises(ConfigError, match=message):
        experiment_of(server)


@dataclass(frozen=True)
class Broken(ServerMode):
    """Sends another model."""

    kind: ClassVar[str] = "broken"

    def changes(self) -> str:
        return "does something else"

    def broadcast(self, model, *, targeted, public, rng):
        return {"other": torch.zeros(1)}


def test_a_mode_that_sends_no_model_of_this_shape_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(server_modes, "kinds", lambda: {**KINDS, "broken": Broken})
    experiment = experiment_of({"mode": "broken"}, defense=[])
    with pytest.raises(FedleakError, match=r"server\.mode = 'broken' sends 'other', which nobody"):
        trained(tmp_path / "run", experiment)
