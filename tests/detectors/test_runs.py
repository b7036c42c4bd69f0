"""Detectors of clients in runs: what is noted, who is absent, and what the server makes of it."""

import json
import shutil

import pytest
import torch
from means import mean_update
from rich.console import Console

from fedleak.audit import gaps, scoring
from fedleak.audit.detection import detection_rows
from fedleak.audit.gate.check import Outcome
from fedleak.audit.gate.judge import judge
from fedleak.audit.handover import take_vaults
from fedleak.config.federation.lookup import absent, captures_of, dropped_out, stored
from fedleak.config.federation.protection import protection
from fedleak.config.loading import parse
from fedleak.config.tables import GateTable
from fedleak.detectors import Finding, digest, named
from fedleak.detectors.settings import Settings
from fedleak.flower.client.watching import movement
from fedleak.flower.engines import train
from fedleak.report.html.run_page import run_page
from fedleak.report.terminal.run import print_run
from fedleak.running import preparation
from fedleak.running.dispatch.dispatcher import attack_captures
from fedleak.running.tracking import _alarms
from fedleak.store.memory import Memory
from fedleak.store.records import DETECTIONS, LEDGER
from fedleak.store.run import EVERYONE, Key, Run
from fedleak.training.aggregation import WeightedSum, aggregate
from fedleak.util.errors import ConfigError, FedleakError

CLIENTS = 4
MODEL = {"name": "a small one: `folder`"}
RATE = 0.1
PROTOCOL = {"kind": "secure_sum", "clipping": 0.5, "max_weight": 4.0, "protocol": "secagg+"}


@pytest.fixture(scope="module", autouse=True)
def folder(saved):
    MODEL["name"] = saved("bert", layers=1)


def experiment_of(**tables):
    federation = {"clients": CLIENTS, "rounds": 2, "batch_size": 2, "learning_rate": RATE}
    table = {
        "name": "watched",
        "seed": 5,
        "model": MODEL,
        "data": {"name": "builtin/notes", "samples": 16, "held_out": 2},
        "federation": federation | tables.pop("federation", {}),
        "utility": {"rounds": []},
        "attack": [],
        "workers": {"devices": ["cpu"]},
    }
    return parse(table | tables)


def trained(folder, **tables):
    experiment = experiment_of(**tables)
    run = preparation.prepare(experiment, folder)
    train(run, experiment)
    run.update_info(status="finished")
    return run


def all_kinds(action="warn"):
    kinds = ("same_model", "shapes", "jump", "adam_bound", "zeros", "rank", "parallel_rows")
    kinds += ("gradient_norm", "loss", "d_snr", "settings")
    return [{"kind": kind, "action": action} for kind in kinds]


def findings(run, round, client):
    note = run.detected.read_note(Key(round, client))
    return {finding["detector"]: finding for finding in note["findings"]}


@pytest.fixture
def refuse(monkeypatch):
    """Lets the clients of the table with `settings` refuse rounds."""

    def of(*rounds, clients=None):
        def call(detector, seen):
            return Finding("it is a bad day", float(seen.now.round in rounds), 0.0)

        monkeypatch.setattr(Settings, "__call__", call)
        chosen = {} if clients is None else {"clients": list(clients)}
        return [{"kind": "settings", "action": "refuse", **chosen}]

    return of


# --- honest rounds --------------------------------------------------------------------------


HONEST = {
    "fedavg": {"federation": {"algorithm": "fedavg", "local_epochs": 2}},
    "adamw": {
        "federation": {"algorithm": "fedavg", "local_epochs": 2, "learning_rate": 1e-3},
        "client": {"optimiser": "adamw", "weight_decay": 0.01},
    },
    "adam": {"federation": {"server_optimiser": "adam", "learning_rate": 1e-3}},
    "lora": {"model": {"lora": {"rank": 2}}},
    "clipped": {"defense": [{"kind": "local_dp", "max_norm": 1.0, "noise_multiplier": 1.0}]},
    "dp_sgd": {"defense": [{"kind": "dp_sgd", "noise_multiplier": 1.0}]},
    "summed": {"defense": [{"kind": "secure_sum"}]},
}
# Plain federated averaging is watched as "adamw" is, and plain steps as "lora" is.
SLOW = ("fedavg", "clipped", "dp_sgd", "summed")


@pytest.mark.parametrize(
    "setting",
    [
        *("adam", "adamw", "lora"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW),
    ],
)
def test_nothing_is_noticed_where_nothing_is_wrong_and_nothing_changes(setting, tmp_path):
    tables = {
        key: dict(value) if key == "model" else value for key, value in HONEST[setting].items()
    }
    tables |= {"model": MODEL | tables["model"]} if "model" in tables else {}
    tables["data"] = {"name": "builtin/notes", "samples": 2 * CLIENTS, "held_out": 2}
    watched = trained(tmp_path / "watched", detector=all_kinds("refuse"), **tables)
    without = trained(tmp_path / "without", **tables)
    for round in (1, 2):
        for client in range(CLIENTS):
            noted = findings(watched, round, client)
            assert len(noted) == 11
            assert not any(finding["alarm"] for finding in noted.values()), noted
            assert noted["jump"]["limit"] is not None
            assert (noted["adam_bound"]["limit"] is not None) == (setting in ("adam", "adamw"))
            assert noted["same_model"]["statistic"] == 0 or (round, client) == (1, 0)
    first, second = watched.models.read_model(3), without.models.read_model(3)
    assert all(torch.equal(first[name], second[name]) for name in second)
    assert absent(watched) == frozenset()


def test_a_client_remembers_what_it_was_sent_last(tmp_path):
    run = trained(tmp_path / "run", detector=[{"kind": "jump"}])
    memory = Memory(run.path / "kept" / "c03")
    kept, sent = memory.broadcast(), run.models.read_model(2)
    assert kept.round == 2
    assert all((kept.parameters[name] == value.numpy()).all() for name, value in sent.items())
    known = memory.remembered()
    assert known.hashes == {2: digest(kept.parameters)}
    assert known.longest > 0
    (memory.folder / "client.json").write_text("{")
    with pytest.raises(FedleakError, match="the client begins anew"):
        memory.remembered()


# --- a malicious server ---------------------------------------------------------------------


INCONSISTENT = {"mode": "inconsistent", "targets": [2], "rounds": [2]}


@pytest.mark.parametrize("lora", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_inconsistent_models_are_noticed_by_all_but_the_target(lora, tmp_path):
    run = trained(
        tmp_path / "run",
        detector=all_kinds(),
        server=INCONSISTENT,
        defense=[{"kind": "secure_sum"}],
        model=MODEL | ({"lora": {"rank": 2}} if lora else {}),
        federation={"rounds": 3},
    )
    for client in range(CLIENTS):
        target = client == 2
        noted = findings(run, 2, client)
        for kind in ("zeros", "rank"):
            assert noted[kind]["alarm"] == (not target), (client, kind, noted[kind])
        # The first to be asked sees no other hash of the round, and learns of it in the next.
        assert noted["same_model"]["alarm"] == (client >= 2)
        later = findings(run, 3, client)
        assert later["same_model"]["alarm"]
        assert not any(finding["alarm"] for kind, finding in later.items() if kind != "same_model")
    assert {run.detected.read_note(Key(2, c))["hash"] for c in (0, 1, 3)} != {
        run.detected.read_note(Key(2, 2))["hash"]
    }


# --- refusals -------------------------------------------------------------------------------


def next_model(run, round, clients, rate=RATE):
    """The model after a round of these clients alone."""
    broadcast = run.models.read_model(round)
    total = WeightedSum(lambda name: broadcast[name].dtype)
    for client in clients:
        total.add_(run.captures.read_capture(Key(round, client)).update)
    return aggregate(broadcast, total, run_optimiser(rate), {})[0]


def run_optimiser(rate):
    return experiment_of(federation={"learning_rate": rate}).server_optimiser


def equal(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def test_a_client_that_refuses_is_absent_and_the_others_are_summed(refuse, tmp_path):
    run = trained(tmp_path / "run", detector=refuse(2, clients=[0, 2]))
    assert absent(run) == {Key(2, 0), Key(2, 2)}
    assert run.info()["refused"]["2"] == [0, 2]
    assert [key for key in captures_of(run, experiment_of()) if key.round == 2] == [
        Key(2, 1),
        Key(2, 3),
    ]
    assert equal(run.models.read_model(3), next_model(run, 2, [1, 3]))
    for client in range(CLIENTS):
        assert (run.vault.read_note(Key(2, client)) is None) == (client in (0, 2)), "it trained"
    assert not any(run.held.all_keys())


@pytest.mark.slow
def test_what_is_left_is_attacked_and_scored_and_the_run_is_complete(refuse, tmp_path):
    tables = {"detector": refuse(1, clients=[1])}
    run = trained(tmp_path / "run", **tables)
    with run.lock():
        attack_captures(run, experiment_of(**tables), no_more=lambda: True)
        scored = scoring.score_run(run)
    assert sorted(answer.row.key for answer in scored) == captures_of(run, experiment_of(**tables))
    summary = run.read_document(scoring.SUMMARY)
    assert summary.missing == ()
    assert any("refused what they were sent (1 in round 1)" in note for note in summary.notes)
    assert Key(1, 1) not in {row.key for row in run.rows(LEDGER)}, "nothing left the client"


@pytest.mark.parametrize("optimiser", [pytest.param("sgd", marks=pytest.mark.slow), "adam"])
def test_a_round_that_all_refuse_is_skipped(optimiser, refuse, tmp_path):
    federation = {"server_optimiser": optimiser, "rounds": 3}
    run = trained(tmp_path / "run", detector=refuse(1), federation=federation)
    assert equal(run.models.read_model(2), run.models.read_model(1))
    assert not equal(run.models.read_model(3), run.models.read_model(2))
    assert run.info()["skipped"] == [1]
    assert any("were skipped" in sentence for sentence in gaps.absences(run))


@pytest.fixture(scope="module")
def first_mean(folder, tmp_path_factory):
    """The mean of the updates of the first round, in which nobody refuses anything."""
    alone = trained(tmp_path_factory.mktemp("alone") / "run", federation={"rounds": 1})
    return mean_update(
        [alone.captures.read_capture(Key(1, client)).update for client in range(CLIENTS)]
    )


@pytest.mark.parametrize("defense", [{"kind": "secure_sum"}, PROTOCOL])
def test_a_secure_sum_goes_over_those_who_answered(defense, refuse, first_mean, tmp_path):
    run = trained(tmp_path / "run", defense=[defense], detector=refuse(2, clients=[3]))
    assert dropped_out(run, 2) == {3}
    assert run.info()["refused"] == {"2": [3]}
    capture = run.captures.read_capture(Key(2, EVERYONE))
    assert capture.update.num_examples == 6
    for name, value in run.captures.read_capture(Key(1, EVERYONE)).update.tensors.items():
        torch.testing.assert_close(value, first_mean.tensors[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    "defense", [pytest.param({"kind": "secure_sum"}, marks=pytest.mark.slow), PROTOCOL]
)
def test_no_sum_is_made_of_one_client_that_is_left(defense, refuse, tmp_path):
    run = trained(tmp_path / "run", defense=[defense], detector=refuse(2, clients=[0, 1, 2]))
    assert not run.captures.has(Key(2, EVERYONE))
    assert run.info()["skipped"] == [2]
    assert dropped_out(run, 2) == set(range(CLIENTS))
    assert equal(run.models.read_model(3), run.models.read_model(2))
    assert not any(run.held.all_keys())


def test_who_refuses_inconsistent_models_leaves_no_sum(tmp_path):
    """All but the target notice: what would be left is the target's own update."""
    run = trained(
        tmp_path / "run",
        detector=[{"kind": "zeros", "action": "refuse"}],
        server=INCONSISTENT,
        defense=[{"kind": "secure_sum"}],
    )
    assert run.info()["refused"] == {"2": [0, 1, 3]}
    assert not run.captures.has(Key(2, 2))
    assert {key.round for key in captures_of(run, stored(run))} == {1}


# --- what is agreed -------------------------------------------------------------------------


def moved_by(**tables):
    experiment = experiment_of(**tables)
    return movement(experiment, protection(experiment, 0, 4))


def test_the_contract_says_how_far_an_honest_round_goes():
    plain = moved_by()
    assert (plain.optimiser, plain.rate, plain.steps, plain.most) == ("sgd", RATE, 1, None)
    averaged = moved_by(federation={"algorithm": "fedavg", "local_epochs": 3})
    # Of four examples two steps a pass; another client may have one example more.
    assert (averaged.rate, averaged.steps) == (RATE, 9)
    clip, noise = {"kind": "clip", "max_norm": 2.0}, {"kind": "gaussian_noise", "sigma": 0.5}
    clipped = moved_by(defense=[clip, noise])
    assert (clipped.most, clipped.noise) == (RATE * 2.0, RATE * 0.5)
    assert moved_by(defense=[clip | {"clients": [1]}]).most is None
    assert moved_by(defense=[clip, {"kind": "sign"}]).most is None
    assert moved_by(defense=[{"kind": "gaussian_noise", "relative": 0.1}]).noise is None
    central = moved_by(defense=[{"kind": "central_dp", "max_norm": 2.0, "noise_multiplier": 3.0}])
    assert (central.most, central.noise) == (RATE * 2.0, pytest.approx(RATE * 6.0))
    adam = moved_by(federation={"server_optimiser": "adam"})
    assert (adam.optimiser, adam.rate) == ("adam", RATE)


def of_client(*defense, **client):
    fedavg = {"algorithm": "fedavg", "local_epochs": 3}
    return moved_by(federation=fedavg, client=client, defense=list(defense))


def test_the_contract_knows_how_clients_step():
    adamw = of_client(optimiser="adamw", weight_decay=0.1, max_steps=4)
    assert (adamw.optimiser, adamw.rate, adamw.steps, adamw.anew) == ("adam", RATE, 4, True)
    assert adamw.weight_decay == 0.1
    assert of_client(momentum=0.9).rate == pytest.approx(10 * RATE)
    assert of_client(max_grad_norm=0.5, max_steps=4).most == pytest.approx(4 * RATE * 0.5)
    noise = {"kind": "gaussian_noise", "sigma": 0.5}
    assert of_client(noise, optimiser="adam").noise is None, "noise comes after Adam"
    assert of_client(optimiser="adam", precision="bfloat16").noise is None
    clip = {"kind": "clip", "max_norm": 2.0}
    assert of_client(clip, noise, optimiser="adam").most == 2.0


# --- what is said of it ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def scored(folder, tmp_path_factory):
    """A malicious run that was scored, without attacks: who warned, and who refused."""
    run = trained(
        tmp_path_factory.mktemp("scored") / "run",
        server=INCONSISTENT,
        defense=[{"kind": "secure_sum"}],
        detector=[
            {"kind": "rank"},
            {"kind": "zeros", "action": "refuse", "clients": [0]},
            {"kind": "loss"},
        ],
        federation={"rounds": 3},
    )
    with run.lock():
        scoring.score_run(run)
    return run


def test_the_summary_says_who_warned_and_who_refused_and_when(scored):
    detections = scored.read_document(scoring.SUMMARY).detections
    rank, zeros, loss = detections.detectors
    assert rank.alarms == {2: (0, 1, 3)}
    assert (rank.looked, zeros.looked) == (12, 3)
    assert zeros.alarms == detections.refused == {2: (0,)}
    assert (loss.alarms, loss.has_limit) == ({}, False)
    assert detections.unequal == (2,)
    assert detections.alarms == 3
    assert len(scored.rows(DETECTIONS)) == 12 + 3 + 12


def test_table_report_and_trackers_say_it_too(scored):
    console = Console(record=True, width=150)
    print_run(scored, [], console)
    shown = console.export_text()
    assert "what clients noticed of the server" in shown
    assert "0, 1, 3 in round 2" in shown
    assert "Refused, and took no part: 0 in round 2." in shown
    assert "Clients were sent different models, by the hashes that they noted: round 2." in shown
    page = run_page(scored, [], redact=False)
    assert any("what clients noticed" in table.title for table in page.defenses)
    metrics = {(m.name, m.round): m.value for m in _alarms(scored.read_document(scoring.SUMMARY))}
    assert metrics == {("alarms/rank", 2): 3, ("alarms/zeros", 2): 1, ("refused", 2): 1}


@pytest.mark.parametrize(("limit", "outcome"), [(2, Outcome.EXCEEDED), (3, Outcome.WITHIN)])
def test_the_gate_limits_alarms(limit, outcome, scored):
    verdict = judge(scored, GateTable(alarms=limit))
    (check,) = [check for check in verdict.checks if check.name == "alarms"]
    assert check.outcome == outcome
    assert check.sentence == f"detectors alarmed in 3 rounds of a client; limit {limit}"


@pytest.mark.parametrize(("limit", "outcome"), [(2, Outcome.EXCEEDED), (3, Outcome.UNTOLD)])
def test_alarms_of_a_client_whose_notes_are_not_here_are_not_told(limit, outcome, scored, tmp_path):
    run = Run(shutil.copytree(scored.path, tmp_path / scored.path.name))
    (run.path / "detected" / "r0003-c01.json").unlink()
    (run.path / DETECTIONS.name).unlink()
    verdict = judge(run, GateTable(alarms=limit))
    (check,) = [check for check in verdict.checks if check.name == "alarms"]
    assert check.outcome == outcome
    lack = "of 1 of 12 rounds of a client no note of its detectors is here"
    assert check.sentence.endswith(f"; {lack}") == (outcome == Outcome.UNTOLD)


def test_notes_come_from_the_vault_of_a_node_and_wrong_ones_are_refused(scored, tmp_path):
    name = scored.path.name
    shutil.copytree(scored.path, tmp_path / "vault" / name)
    shutil.copytree(scored.path, tmp_path / "here" / name)
    here, path = Run(tmp_path / "here" / name), tmp_path / "vault" / name / "detected"
    shutil.rmtree(here.path / "detected")
    take_vaults(here, [tmp_path / "vault"])
    assert here.detected.read_note(Key(2, 1)) == scored.detected.read_note(Key(2, 1))
    note = json.loads((path / "r0002-c01.json").read_text())
    note["findings"][0]["detector"] = "jump"
    (path / "r0002-c01.json").write_text(json.dumps(note))
    with pytest.raises(FedleakError, match="client 1 has other detectors in this run"):
        take_vaults(here, [tmp_path / "vault"])


def test_a_damaged_note_is_said_and_what_was_counted_stays(scored):
    before = scored.rows(DETECTIONS)
    path = scored.detected.path(Key(2, 0))
    content = path.read_bytes()
    path.write_text("{}")
    try:
        noted = gaps.Gaps()
        assert detection_rows(scored, noted, before) == before
        assert "is damaged" in noted.missing[0]
    finally:
        path.write_bytes(content)


def test_a_table_of_a_detector_is_checked():
    for table, message in [
        ({"kind": "jumb"}, r"detector\[0\].kind: unknown kind 'jumb': did you mean 'jump'"),
        ({"kind": "jump", "factor": 0.5}, r"detector\[0\].factor"),
        ({"kind": "jump", "action": "shout"}, r"detector\[0\].action"),
        (
            {"kind": "jump", "clients": [4]},
            r"detector\[0\].clients = \[4\]: list clients from 0 to 3",
        ),
        ({"kind": "zeros", "factor": 2.0}, r"detector\[0\]: unknown key 'factor'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            experiment_of(detector=[table])
    experiment = experiment_of(detector=[{"kind": "jump", "clients": [1]}, {"kind": "zeros"}])
    assert experiment.detectors_of(0) == {1: named("zeros")}
    assert experiment.detectors_of(1) == {0: named("jump"), 1: named("zeros")}
    assert experiment.fingerprint != experiment_of().fingerprint
