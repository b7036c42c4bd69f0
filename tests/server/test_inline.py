import gc
import logging
import shutil
import weakref
from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from cases import some
from tiny import TABLES, Here

from fedleak import models
from fedleak.attacks.matching.dlg import Dlg
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.audit import scoring
from fedleak.config.components import NamedAttack
from fedleak.config.federation import lookup, workload
from fedleak.config.federation.schedule import expected_captures
from fedleak.config.loading import parse
from fedleak.config.sent_parameters import selected_parameters
from fedleak.flower import inline
from fedleak.flower.client import app as client_app
from fedleak.flower.client import outgoing
from fedleak.flower.server import replies
from fedleak.flower.server.strategy import CuriousServer
from fedleak.models import CAUSAL_LM, CLASSIFICATION, LanguageModel, ModelSpec, loading
from fedleak.running import pipeline, preparation
from fedleak.running.dispatch import dispatcher
from fedleak.running.workers.process import Job, work_together
from fedleak.store.lines import Lines
from fedleak.store.models import Models
from fedleak.store.records import LEAKAGE
from fedleak.store.run import Key, Run
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, UpdateKind
from fedleak.util.errors import CaptureError, ConfigError, FedleakError
from fedleak.util.rng import stream_seed

RATE = 0.5
TABLE = {
    "name": "inline",
    "seed": 11,
    "model": TABLES["model"],
    "data": {"name": "builtin/notes", "samples": 8, "held_out": 6},
    "federation": {"clients": 2, "rounds": 2, "batch_size": 1, "learning_rate": RATE},
    "attack": [{"kind": "dager"}],
    "workers": {"devices": ["cpu"]},
}
BERT = {"name": "smaller than builtin/bert-tiny: `folders`"}
GPT2 = {"name": "and than builtin/gpt2-tiny", "task": CAUSAL_LM}
CREW = dispatcher.Crew([Here()])
KEYS = [Key(1, 0), Key(1, 1), Key(2, 0), Key(2, 1)]


def experiment_of(attacks=TABLE["attack"], *, model=TABLE["model"], defense=(), **federation):
    federation = TABLE["federation"] | federation
    tables = {"federation": federation, "attack": attacks, "model": model, "defense": [*defense]}
    return parse(TABLE | tables)


def whole(path, experiment):
    """All that `fedleak run` does, with a worker in this process."""
    run = preparation.prepare(experiment, path)
    with run.lock():
        with pipeline.noting_status(run), dispatcher.attacking(run, experiment, CREW):
            inline.train(run, experiment)
        scoring.score_run(run)
    return run


def trained(path, experiment):
    run = preparation.prepare(experiment, path)
    with pipeline.noting_status(run):
        inline.train(run, experiment)
    return run


def content(run):
    return {
        str(path.relative_to(run.path)): path.read_bytes()
        for path in sorted(run.path.rglob("*"))
        if path.is_file() and path.name not in (".lock", "log.txt")
    }


@pytest.fixture(scope="module", autouse=True)
def folders(saved):
    """Makes models of the built-in ones' vocabularies and layers that cost a tenth."""
    names = {family: saved(family, layers=4) for family in ("bert", "gpt2", "llama")}
    BERT["name"], GPT2["name"] = names["bert"], names["gpt2"]
    return names


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return whole(tmp_path_factory.mktemp("inline") / "run", experiment_of())


@pytest.fixture
def copied(finished, tmp_path):
    shutil.copytree(finished.path, tmp_path / "run")
    return Run(tmp_path / "run")


# --- what a run leaves ----------------------------------------------------------------------


@pytest.mark.core
def test_every_capture_has_a_truth_an_answer_of_each_attack_and_a_score(finished):
    assert finished.captures.all_keys() == finished.vault.all_keys() == KEYS
    assert finished.models.rounds() == [1, 2, 3]
    expected = sorted((*key, name) for key in KEYS for name in ("dager", "probes"))
    for name in ("reconstructions.jsonl", "leakage.jsonl"):
        row_keys = [
            (row["round"], row["client"], row["attack"]) for row in finished.rows(Lines(name, dict))
        ]
        assert sorted(row_keys) == expected
    assert finished.rows(Lines("attempts.jsonl", dict)) == []
    assert [row["round"] for row in finished.rows(Lines("utility.jsonl", dict))] == [0, 1, 2]
    info, summary = finished.info(), finished.read_json("summary.json")
    assert info["status"] == "finished"
    assert (summary["captures"], summary["attacks"].keys()) == (4, {"dager", "probes"})
    last = finished.rows(Lines("utility.jsonl", dict))[-1]
    assert summary["utility"] == {name: figure for name, figure in last.items() if name != "seal"}
    leftovers = [path.name for path in finished.path.rglob(".*") if path.name != ".lock"]
    assert leftovers == []


def test_the_summary_of_a_finished_run_says_so(finished):
    assert finished.read_json("summary.json")["status"] == finished.info()["status"]


@pytest.mark.core
def test_captures_are_gradients_of_the_truth_at_the_broadcast_and_add_up(finished):
    experiment = experiment_of()
    model = loading.load(
        ModelSpec(name=TABLES["model"]["name"], task=CLASSIFICATION, num_labels=2, seed=11)
    )
    fingerprint = models.fingerprint(model.parameters())
    assert finished.info()["model_fingerprint"] == fingerprint
    assert models.fingerprint(finished.models.read_model(1)) == fingerprint
    for round in (1, 2):
        before, after = finished.models.read_model(round), finished.models.read_model(round + 1)
        updates = [finished.captures.read_capture(Key(round, client)) for client in (0, 1)]
        for client, capture in enumerate(updates):
            truth = finished.vault.read_note(Key(round, client))
            models.load_parameters_(model, before)
            again = local_update_(
                model,
                truth["sequences"],
                truth["labels"],
                experiment.local_training,
                seed=stream_seed(11, "local", round, client),
            )
            assert capture.update.num_examples == len(truth["sequences"]) == 1
            assert capture.knowledge.granted() == ("learning_rate", "local_steps", "dropout")
            assert (capture.knowledge.learning_rate, capture.knowledge.local_steps) == (RATE, 1)
            for name, value in again.tensors.items():
                assert torch.equal(capture.update.tensors[name], value)
        for name, value in before.items():
            mean = sum(client_capture.update.tensors[name] for client_capture in updates) / 2
            torch.testing.assert_close(after[name], value - RATE * mean, atol=1e-7, rtol=1e-6)


def test_the_attack_reads_the_texts_and_the_probes_the_facts(finished):
    for row in finished.rows(Lines("leakage.jsonl", dict)):
        assert row["status"] == "recovered"
        assert row["knows"] == ["dropout", "learning_rate", "local_steps"]
        if row["attack"] == "dager":
            assert (row["exact_match"], row["rougeL"]) == (1.0, 100.0)
            assert row["control_rougeL"] < 50
            assert row["guess_rougeL"] < 50
        else:
            assert row["token_recall"] == row["token_precision"] == 1.0
            assert all(fact["found"] == fact["true"] for fact in row["facts"].values())


# --- again ----------------------------------------------------------------------------------


def test_a_second_call_changes_nothing(copied, monkeypatch):
    def never(*args, **kwargs):
        raise AssertionError("trained again")

    before = content(copied)
    monkeypatch.setattr("fedleak.flower.client.app.local_update_", never)
    whole(copied.path, experiment_of())
    assert before == content(copied)


@pytest.mark.parametrize("lost", [["r0001-c01"], ["r0002-c00"], ["r0001-c00", "r0002-c01"]])
def test_a_lost_capture_is_made_again_bit_for_bit(copied, lost):
    before = content(copied)
    for name in lost:
        (copied.path / "captures" / f"{name}.safetensors").unlink()
    trained(copied.path, experiment_of())
    assert content(copied) == before


@pytest.mark.parametrize("federation", [{}, {"algorithm": "fedavg", "server_learning_rate": 0.01}])
def test_adam_of_the_server_goes_on_where_it_was(tmp_path, federation):
    adam = {"server_optimiser": "adam", "rounds": 3, "learning_rate": 0.01} | federation
    experiment = experiment_of(attacks=[], **adam)
    run = trained(tmp_path / "run", experiment)
    before = content(run)
    for name in ("captures/r0003-c01", "models/r0004"):
        (run.path / f"{name}.safetensors").unlink()
    trained(run.path, experiment)
    assert content(run) == before
    (run.path / "models" / "r0004.safetensors").unlink()
    (run.path / "models" / "moments-r0003.safetensors").unlink()
    with pytest.raises(CaptureError, match=r"moments-r0003\.safetensors"):
        trained(run.path, experiment)


def test_adam_of_the_server_is_stepped_along_the_mean_of_what_was_captured(tmp_path):
    experiment = experiment_of(attacks=[], server_optimiser="adam", learning_rate=0.01, rounds=3)
    run = trained(tmp_path / "run", experiment)
    weights = {n: torch.nn.Parameter(v) for n, v in run.models.read_model(1).items()}
    optimiser = torch.optim.Adam(weights.values(), lr=0.01)
    for round in (1, 2, 3):
        sent = [run.captures.read_capture(Key(round, client)).update.tensors for client in (0, 1)]
        for name, value in weights.items():
            value.grad = (sent[0][name] + sent[1][name]) / 2
        optimiser.step()
        for name, value in run.models.read_model(round + 1).items():
            torch.testing.assert_close(value, weights[name].detach(), atol=1e-5, rtol=1e-5)


def test_moments_stay_no_longer_than_the_model_beside_them(tmp_path):
    tables = TABLE | {"attack": [], "threat": {"rounds": [2]}}
    federation = TABLE["federation"] | {"server_optimiser": "adam", "rounds": 4}
    run = trained(tmp_path / "run", parse(tables | {"federation": federation}))
    there = sorted(path.stem for path in (run.path / "models").iterdir())
    assert there == ["moments-r0002", "r0001", "r0002", "r0005"]


def test_a_lost_model_is_made_again_bit_for_bit(copied):
    before = content(copied)
    for round in (2, 3):
        (copied.path / "models" / f"r{round:04d}.safetensors").unlink()
    trained(copied.path, experiment_of())
    assert content(copied) == before


def test_a_changed_experiment_is_refused_or_starts_afresh(copied):
    with pytest.raises(ConfigError, match=r"federation\.learning_rate: 0\.5 -> 0\.1.*--fresh"):
        preparation.prepare(experiment_of(learning_rate=0.1), copied.path)
    fresh = preparation.prepare(experiment_of(learning_rate=0.1), copied.path, fresh=True)
    assert fresh.captures.all_keys() == []
    (aside,) = [path for path in copied.path.parent.iterdir() if path != copied.path]
    assert Run(aside).captures.all_keys() == KEYS


# --- when things go wrong -------------------------------------------------------------------


def test_a_client_s_error_ends_the_run_and_is_placed(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's
    experiment = experiment_of()
    calls = []

    def crash(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("the disk\nis full")
        return local_update_(*args, **kwargs)

    monkeypatch.setattr("fedleak.flower.client.app.local_update_", crash)
    with pytest.raises(FedleakError) as caught:
        trained(tmp_path / "run", experiment)
    message = str(caught.value)
    assert message.startswith(
        "round 1: client 1 (node 3): RuntimeError in fedleak.flower.client.app:"
    )
    # It might have been a text.
    assert "the disk" not in message
    assert "the disk" not in capfd.readouterr().err
    run = Run(tmp_path / "run")
    assert run.info()["status"] == "failed"
    assert run.captures.all_keys() == [Key(1, 0)]
    # What was there is kept, and the same command finishes the rest.
    monkeypatch.undo()
    assert trained(tmp_path / "run", experiment).captures.all_keys() == KEYS
    assert run.info()["status"] == "finished"


def test_training_that_diverges_fails_with_the_client_and_the_parameter(tmp_path):
    with pytest.raises(FedleakError) as caught:
        trained(tmp_path / "run", experiment_of(learning_rate=1e30))
    message = str(caught.value)
    assert message.startswith("round 2: client 0 (node 2): its answer is refused: not every number")
    assert "'bert.embeddings.word_embeddings.weight' is finite: training diverged" in message
    assert "; client 1 (node 3): " in message
    run = Run(tmp_path / "run")
    assert run.captures.all_keys() == KEYS[:2]
    assert run.info()["status"] == "failed"


# --- FedAvg, and memory ---------------------------------------------------------------------


def test_fedavg_with_some_of_the_clients(tmp_path):
    experiment = experiment_of(
        [], algorithm="fedavg", clients=3, clients_per_round=2, local_epochs=2, learning_rate=0.1
    )
    run = trained(tmp_path / "run", experiment)
    keys = expected_captures(experiment)
    assert run.captures.all_keys() == run.vault.all_keys() == keys
    assert [key.round for key in keys] == [1, 1, 2, 2]
    for round in (1, 2):
        before, after = run.models.read_model(round), run.models.read_model(round + 1)
        captures = [run.captures.read_capture(key) for key in keys if key.round == round]
        counts = [capture.update.num_examples for capture in captures]
        assert all(capture.update.kind == UpdateKind.DELTA for capture in captures)
        assert [capture.knowledge.local_steps for capture in captures] == [2 * n for n in counts]
        for name, value in before.items():
            deltas = [
                capture.update.tensors[name] * n
                for capture, n in zip(captures, counts, strict=True)
            ]
            expected = value + sum(deltas) / sum(counts)
            torch.testing.assert_close(after[name], expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_parts_of_the_model_arrive_as_attacks_are_told_and_only_they_change(
    tmp_path, folders, name
):
    tables = {"model": {"name": folders[name]}, "attack": [{"kind": "probes"}]}
    share = {"share": ["q1", "k1", "v1", "t3", "classifier"]}
    experiment = parse(TABLE | tables | {"update": share})
    run = trained(tmp_path / "run", experiment)
    selected = selected_parameters(experiment, loading.outline(experiment.model_spec(2)))
    expected = {
        *models.families()[name].attention_parameters(0),
        *models.families()[name].classifier,
        *(parameter for parameter in run.models.read_model(1) if ".2." in parameter),
    }
    assert set(selected) == expected
    for key in KEYS:
        assert run.captures.read_capture(key).update.tensors.keys() == expected
    before, after = run.models.read_model(1), run.models.read_model(3)
    changed = {
        parameter for parameter in before if not torch.equal(before[parameter], after[parameter])
    }
    null = models.families()[name].null_parameters(expected)
    assert expected - null <= changed <= expected


def test_one_update_is_in_memory_at_a_time(tmp_path, monkeypatch):
    earlier, alive = [], []
    on_reply = CuriousServer.on_reply

    def watch(self, reply):
        gc.collect()
        alive.append(sum(reference() is not None for reference in earlier))
        kept = on_reply(self, reply)
        if "update" in reply.content.array_records:
            earlier.append(weakref.ref(reply.content.array_records["update"]))
        return kept

    monkeypatch.setattr(CuriousServer, "on_reply", watch)
    trained(tmp_path / "run", experiment_of(clients=4, rounds=1))
    assert len(earlier) == 4
    assert set(alive) == {0}


def test_each_thing_is_read_decoded_and_written_once(tmp_path, monkeypatch):
    counts = Counter()

    def counting(owner, name):
        original = getattr(owner, name)

        def counted(*args, **kwargs):
            counts[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    experiment = experiment_of(rounds=3, defense=[{"kind": "sign"}])
    run = preparation.prepare(experiment, tmp_path / "run")
    counting(Models, "write")
    counting(client_app, "taken_tensors")
    counting(replies, "taken_tensors")
    counting(lookup, "load")
    counting(workload, "read_data")
    monkeypatch.setattr("fedleak.flower.client.context.read_data", workload.read_data)
    counting(outgoing, "to_wire")
    with run.lock():  # as the command line does, which has prepared the run
        inline.train(run, experiment)
    sent = 3 * 2
    assert run.models.rounds() == [1, 2, 3, 4]
    assert counts == {
        "write": 4,
        "load": 1,  # clients read what comes with the message
        "read_data": 1,
        "to_wire": sent,
        # The client decodes the model, and the server the update.
        "taken_tensors": 2 * sent,
    }


# --- adapters, and updates of half precision ------------------------------------------------


def assert_followed(run, experiment, model, defend=lambda client, update: update):
    """Checks every capture against training on the truth, and every model against the mean."""
    rate = experiment.federation.learning_rate
    for round in range(1, experiment.federation.rounds + 1):
        before, after = run.models.read_model(round), run.models.read_model(round + 1)
        captures = {
            k: run.captures.read_capture(k).update
            for k in run.captures.all_keys()
            if k.round == round
        }
        for key, update in captures.items():
            truth = run.vault.read_note(key)
            models.load_parameters_(model, before)
            again = local_update_(
                model,
                truth["sequences"],
                truth["labels"] or [0] * len(truth["sequences"]),
                experiment.local_training,
                seed=stream_seed(11, "local", *key),
            )
            assert update.tensors.keys() == before.keys() == after.keys()
            for name, value in defend(key.client, again).tensors.items():
                assert update.tensors[name].dtype == value.dtype
                assert torch.equal(update.tensors[name], value)
        total = sum(update.num_examples for update in captures.values())
        for name, value in before.items():
            mean = sum(u.tensors[name].float() * u.num_examples for u in captures.values()) / total
            step = mean if experiment.federation.algorithm == "fedavg" else -rate * mean
            torch.testing.assert_close(after[name], value + step, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    ("model", "more", "algorithm"),
    some(
        [
            (BERT, {}, "fedsgd"),
            (BERT, {"loss": "squared"}, "fedavg"),
            (GPT2, {}, "fedsgd"),
            (GPT2, {}, "fedavg"),
        ],
        every=3,
    ),
)
def test_with_adapters_only_they_and_the_classifier_are_sent(tmp_path, model, more, algorithm):
    adapted = model | more | {"lora": {"rank": 4}}
    experiment = experiment_of([], model=adapted, algorithm=algorithm, rounds=2, learning_rate=0.1)
    run = trained(tmp_path / "run", experiment)
    fresh = loading.load(experiment.model_spec(2))
    names = fresh.parameters().keys()
    assert all("lora_" in name or name.startswith("classifier.") for name in names)
    assert models.fingerprint(run.models.read_model(1)) == models.fingerprint(fresh.parameters())
    # What was adapted does not travel, and decides the result all the same.
    whole = models.fingerprint(dict(fresh.module.named_parameters()))
    assert run.info()["model_fingerprint"] == whole
    assert_followed(run, experiment, fresh)
    for key in run.captures.all_keys():
        for name, value in run.captures.read_capture(key).update.tensors.items():
            # B is zero before the first step, and A learns nothing through it.
            still = algorithm == "fedsgd" and key.round == 1 and "lora_A" in name
            assert bool(value.any()) != still
    before = content(run)
    for lost in ("captures/r0002-c00.safetensors", "models/r0003.safetensors"):
        (run.path / lost).unlink()
    assert content(trained(run.path, experiment)) == before


def test_the_attacks_know_a_model_with_adapters(tmp_path):
    model = BERT | {"loss": "squared", "lora": {"rank": 4}}
    experiment = experiment_of([], model=model)
    run = trained(tmp_path / "run", experiment)
    looked: list[LanguageModel] = []

    @dataclass(frozen=True)
    class Look:
        kind: ClassVar[str] = "look"
        uses: ClassVar[frozenset[str]] = frozenset()

        def obstacle(self, setting):
            assert setting.shared == run.models.read_model(1).keys()

        def __call__(self, seen, model, *, rng):
            looked.append(model)
            return Reconstruction.none(Status.ABSTAINED, "")

    def row_of(attack, knowledge):
        named = NamedAttack("it", attack)
        spec = experiment.model_spec(2)
        job = Job(
            run=run.path,
            key=Key(2, 1),
            attack=named,
            knowledge=knowledge,
            model=spec,
            seed=0,
        )
        return work_together([job], "cpu")[0]

    row_of(Look(), Knowledge())
    expected = loading.load(experiment.model_spec(2))
    models.load_parameters_(expected, run.models.read_model(2))
    parameters = dict(looked[0].module.named_parameters())
    for name, value in expected.module.named_parameters():
        assert torch.equal(parameters[name], value)
    assert looked[0].class_loss is expected.class_loss is models.CLASS_LOSSES["squared"]
    row = row_of(Dlg(steps=2), Knowledge(lengths=(8,)))
    assert (row.status, len(row.sequences[0])) == (Status.RECOVERED, 8)


def test_dropout_of_a_model_that_has_none_hides_no_proof(tmp_path):
    model = {"name": "builtin/llama-tiny", "task": CAUSAL_LM}
    run = whole(tmp_path / "run", experiment_of(model=model, dropout=True, rounds=1))
    assert [row.verified for row in run.rows(LEAKAGE) if row.attack == "dager"] == [True, True]


def test_a_cast_is_captured_as_it_is_and_summed_in_float32(tmp_path):
    dtypes = {0: "bfloat16", 1: "float16"}
    defense = [{"kind": "cast", "dtype": d, "clients": [client]} for client, d in dtypes.items()]
    experiment = experiment_of([], defense=defense)
    run = trained(tmp_path / "run", experiment)

    def defend(client, update):
        dtype = getattr(torch, dtypes[client])
        return replace(update, tensors={n: t.to(dtype) for n, t in update.tensors.items()})

    assert_followed(run, experiment, loading.load(experiment.model_spec(2)), defend)
    assert {value.dtype for value in run.models.read_model(3).values()} == {torch.float32}
