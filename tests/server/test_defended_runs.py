"""Defended runs from end to end: what the server gets, what is noted, and what it costs."""

import dataclasses
import functools
import io
import json
import math
import shutil
import stat
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import ClassVar

import pytest
import torch
from cases import some
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.serde import recorddict_to_proto
from rich.console import Console

from fedleak import defenses, models
from fedleak.audit import central_baseline, defense_checks, grants, scoring, vault
from fedleak.audit.metrics.utility import evaluate
from fedleak.config.federation.assignment import Assignment
from fedleak.config.federation.protection import protection
from fedleak.config.federation.schedule import clients_of_round, expected_captures
from fedleak.config.federation.workload import read_data
from fedleak.config.loading import parse
from fedleak.defenses import TrustedAggregator
from fedleak.flower.client.app import app as client_app
from fedleak.flower.engines import train
from fedleak.flower.inline import InlineGrid
from fedleak.flower.server.strategy import CuriousServer
from fedleak.models import CAUSAL_LM, CLASSIFICATION, loading
from fedleak.report.tables.leakage import leakage_table, shares
from fedleak.report.terminal.run import print_run
from fedleak.running import pipeline, preparation
from fedleak.running.dispatch.dispatcher import Crew
from fedleak.running.workers.process import work_together
from fedleak.store import records, seal
from fedleak.store.captures import Captures
from fedleak.store.lines import Lines
from fedleak.store.run import EVERYONE, Key, Run
from fedleak.training.batches import round_batch
from fedleak.training.local import local_update_
from fedleak.training.observation import ClientUpdate, ThreatModel, UpdateKind
from fedleak.training.privacy import accounting
from fedleak.training.privacy.accounting import Event
from fedleak.training.settings import LocalTraining, PrivateSteps
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.rng import stream, stream_seed

SEED = 11
BERT = {"name": "smaller than builtin/bert-tiny: `folders`"}
GPT2 = {"name": "and than builtin/gpt2-tiny", "task": CAUSAL_LM}
TABLE = {
    "name": "defended",
    "seed": SEED,
    "model": BERT,
    "data": {"name": "builtin/notes", "samples": 6, "held_out": 4},
    "federation": {"clients": 2, "rounds": 2, "batch_size": 2, "learning_rate": 0.1},
    "attack": [],
    "utility": {"rounds": []},
    "workers": {"devices": ["cpu"]},
}
DP_SGD = {"kind": "dp_sgd", "noise_multiplier": 1.0, "max_grad_norm": 0.5, "sampling": "fixed"}
POISSON = DP_SGD | {"sampling": "poisson"}
LOCAL_DP = {"kind": "local_dp", "max_norm": 0.5, "noise_multiplier": 0.4}
MASK = {"kind": "mask", "fraction": 0.5}
NOISE = {"kind": "gaussian_noise", "sigma": 0.01}
SECURE_SUM = {"kind": "secure_sum"}
TOGETHER = {
    "training": [
        DP_SGD,
        {"kind": "freeze", "parameters": ["t2"], "clients": [1]},
        {"kind": "cast", "dtype": "bfloat16"},
    ],
    "noise": [
        {"kind": "clip", "max_norm": 0.5},
        NOISE,
        {"kind": "laplace_noise", "scale": 1e-3, "clients": [0]},
        MASK,
        {"kind": "prune", "fraction": 0.8},
    ],
    "sum": [
        LOCAL_DP,
        {"kind": "quantize", "bits": 6, "stochastic": True},
        {"kind": "sign"},
        SECURE_SUM,
    ],
}
"""Every kind of defense, in as few runs as can be."""

pytestmark = pytest.mark.filterwarnings("ignore:Optimal order")


class Here:
    """A worker in this process."""

    def __init__(self):
        self.jobs = ()

    @property
    def free(self):
        return not self.jobs

    def submit(self, jobs):
        self.jobs = tuple(jobs)

    def result(self):
        jobs, self.jobs = self.jobs, ()
        return work_together(jobs, "cpu")

    def progress(self):
        return {}


@pytest.fixture(scope="module", autouse=True)
def folders(saved):
    """Makes models of the built-in ones' vocabularies that cost a tenth."""
    for table, family, task in [(BERT, "bert", CLASSIFICATION), (GPT2, "gpt2", CAUSAL_LM)]:
        table["name"] = saved(family, task)


@pytest.fixture(autouse=True)
def unchecked(monkeypatch):
    """Leaves out what tests/test_check.py tests."""
    monkeypatch.setattr(defense_checks, "refuse_broken", lambda *_: None)


def experiment_of(*defense, federation=(), **tables):
    federation = TABLE["federation"] | dict(federation)
    return parse(TABLE | tables | {"defense": list(defense), "federation": federation})


def carried_out(path, experiment):
    run = preparation.prepare(experiment, path)
    pipeline.carry_out(run, experiment, train, Crew([Here()]))
    return run


def printed(run):
    text = io.StringIO()
    console = Console(file=text, width=120)
    print_run(run, scoring.score_run(run), console)
    return " ".join(text.getvalue().split())


def content(run, *but):
    return {
        str(path.relative_to(run.path)): path.read_bytes()
        for path in sorted(run.path.rglob("*"))
        if path.is_file() and path.name not in (".lock", "log.txt", *but)
    }


@cache
def model_of(name, task):
    return loading.load(models.ModelSpec(name=name, task=task, num_labels=2, seed=SEED))


def updates_by_hand(run, experiment, key):
    """What a client's training gives, and after it each of its defenses, in their order."""
    truth = run.vault.read_note(key)
    model = model_of(experiment.model.name, experiment.model.task)
    models.load_parameters_(model, run.models.read_model(key.round))
    of_client = protection(experiment, key.client, 3)  # of six samples
    seed = stream_seed(SEED, "local", key.round, key.client)
    labels = truth["labels"] or [0] * len(truth["sequences"])
    figures = {}
    update = local_update_(
        model, truth["sequences"], labels, of_client.local, seed=seed, report=figures.update
    )
    stages = [update]
    for number, defense in of_client.defenses.items():
        rng = stream(SEED, "defense", number, key.client, key.round)
        stages.append(defense(stages[-1], rng=rng))
    return of_client, stages, figures


def flat(update, names=None):
    return torch.cat([update.tensors[n].double().flatten() for n in names or update.tensors])


def mean_by_hand(updates):
    """The mean over those who sent a parameter, weighted by examples."""
    means = {}
    for name in dict.fromkeys(n for update in updates for n in update.tensors):
        sent = [(u.tensors[name].double(), u.num_examples) for u in updates if name in u.tensors]
        means[name] = sum(value * n for value, n in sent) / sum(n for _, n in sent)
    return means


def assert_same(update, expected):
    assert update.tensors.keys() == expected.tensors.keys()
    for name, value in expected.tensors.items():
        assert update.tensors[name].dtype == value.dtype
        assert torch.equal(update.tensors[name], value), name


# --- every defense, in every setting --------------------------------------------------------


def test_every_kind_is_in_one_of_the_runs():
    kinds = {table["kind"] for group in TOGETHER.values() for table in group}
    # A run has one aggregator; tests/test_central_dp.py has runs with the other one.
    assert kinds | {"adaptive_clipping", "central_dp", "dp_ftrl"} == set(defenses.kinds())


@pytest.mark.parametrize(
    ("group", "model", "algorithm"),
    some(product(TOGETHER, [BERT, GPT2], ["fedsgd", "fedavg"]), every=3),
)
def test_what_arrives_is_what_the_defenses_left_and_no_word_beside_it(
    tmp_path, monkeypatch, group, model, algorithm
):
    experiment = experiment_of(*TOGETHER[group], model=model, federation={"algorithm": algorithm})
    on_reply, wire = CuriousServer.on_reply, []

    def tap(self, reply):
        if "update" in reply.content.array_records:
            metrics = {name: dict(record) for name, record in reply.content.metric_records.items()}
            wire.append((list(reply.content), metrics))
        return on_reply(self, reply)

    monkeypatch.setattr(CuriousServer, "on_reply", tap)
    run = carried_out(tmp_path / "run", experiment)
    keys = [Key(round, client) for round in (1, 2) for client in (0, 1)]
    assert run.captures.all_keys() == expected_captures(experiment)
    assert run.vault.all_keys() == keys
    rows = {key: [] for key in keys}
    for row in run.rows(Lines("defenses.jsonl", dict)):
        rows[row["round"], row["client"]].append(row)
    sent = {}
    for key in keys:
        of_client, stages, figures = updates_by_hand(run, experiment, key)
        sent[key] = stages[-1]
        applied = zip(of_client.defenses.items(), stages[:-1], stages[1:], strict=True)
        assert len(rows[key]) == len(of_client.defenses)
        for row, ((_, defense), before, after) in zip(rows[key], applied, strict=True):
            assert row["kind"] == defense.kind
            if after is before:
                assert "norm_before" not in row
            else:
                flat_before, flat_after = flat(before), flat(after)
                assert row["norm_before"] == pytest.approx(float(flat_before.norm()), rel=1e-5)
                assert row["norm_after"] == pytest.approx(float(flat_after.norm()), rel=1e-5)
                assert row["change_norm"] == pytest.approx(
                    float((flat_after - flat_before).norm()), rel=1e-5
                )
                dropped = float(((flat_after == 0) & (flat_before != 0)).double().mean())
                assert row["zeroed"] == pytest.approx(dropped)
            if defense.kind == "dp_sgd":
                figures.pop("drawn")
                assert figures.keys() <= row.keys()
                assert {name: row[name] for name in figures} == pytest.approx(figures, rel=1e-5)
                assert row["examples"] == (2 if algorithm == "fedsgd" else 3)
        if experiment.aggregator is None:
            capture = run.captures.read_capture(key)
            assert_same(capture.update, sent[key])
            assert capture.update.num_examples == sent[key].num_examples
    # Beside the update there are three numbers, whatever the defenses.
    assert wire == [
        (
            ["update", "metrics"],
            {
                "metrics": {
                    "num-examples": sent[key].num_examples,
                    "client": key.client,
                    "round": key.round,
                }
            },
        )
        for key in keys
    ]
    for round in (1, 2):
        mean = mean_by_hand([sent[Key(round, client)] for client in (0, 1)])
        before, after = run.models.read_model(round), run.models.read_model(round + 1)
        scale = 1.0 if algorithm == "fedavg" else -0.1
        for name, value in before.items():
            expected = value + scale * mean[name].float() if name in mean else value
            torch.testing.assert_close(after[name], expected, atol=1e-6, rtol=1e-5)
        if experiment.aggregator is not None:
            capture = run.captures.read_capture(Key(round, EVERYONE))
            assert capture.update.num_examples == sum(
                sent[Key(round, c)].num_examples for c in (0, 1)
            )
            for name, value in mean.items():
                torch.testing.assert_close(
                    capture.update.tensors[name], value.float(), atol=1e-7, rtol=1e-5
                )
    text = printed(run)
    for table in TOGETHER[group]:
        assert table["kind"] in text
    statuses = {row["status"] for row in run.rows(Lines("leakage.jsonl", dict))}
    assert statuses <= {"recovered", "abstained"}
    assert len(run.rows(Lines("leakage.jsonl", dict))) == len(run.captures.all_keys())
    assert run.info()["status"] == "finished"


def test_a_row_says_which_defense_of_the_file_it_is_about(tmp_path):
    defense = [{"kind": "sign", "clients": [0]}, MASK]
    run = carried_out(tmp_path / "run", experiment_of(*defense, federation={"rounds": 1}))
    rows = run.rows(Lines("defenses.jsonl", dict))
    assert [(row["client"], row["defense"], row["kind"]) for row in rows] == [
        (0, 0, "sign"),
        (0, 1, "mask"),
        (1, 1, "mask"),
    ]


# --- some clients, and no others ------------------------------------------------------------


def test_only_the_clients_that_are_named_use_a_defense(tmp_path):
    defense = [MASK | {"clients": [1]}, LOCAL_DP | {"clients": [1]}]
    run = carried_out(tmp_path / "run", experiment_of(*defense))
    plain = experiment_of()
    for round in (1, 2):
        for client in (0, 1):
            key = Key(round, client)
            _, (raw,), _ = updates_by_hand(run, plain, key)
            captured = run.captures.read_capture(key).update
            if client == 0:
                assert_same(captured, raw)
            else:
                assert not any(torch.equal(captured.tensors[n], v) for n, v in raw.tensors.items())
    assert run.defended.all_keys() == [Key(1, 1), Key(2, 1)]
    assert {row["client"] for row in run.rows(Lines("defenses.jsonl", dict))} == {1}
    assert [row["client"] for row in run.rows(Lines("privacy.jsonl", dict))] == [0, 1, 0, 1]
    assert [row["epsilon"] == "none" for row in run.rows(Lines("privacy.jsonl", dict))] == [
        True,
        False,
    ] * 2
    assert run.vault.read_note(Key(1, 0))["noise_scale"] is None
    assert run.vault.read_note(Key(1, 1))["noise_scale"] == pytest.approx(2 * 0.5 * 0.4)
    # Client 0 has nothing, so to all nothing is guaranteed.
    assert run.read_json("summary.json")["privacy"]["epsilon"] == "none"
    assert "there is no epsilon after 2 rounds" in printed(run)


def test_what_defenses_did_is_readable_by_its_owner_alone(tmp_path):
    run = carried_out(tmp_path / "run", experiment_of(MASK, DP_SGD, federation={"rounds": 1}))
    for key in (Key(1, 0), Key(1, 1)):
        path = run.path / "defended" / f"{key}.json"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        noted = json.loads(path.read_text())
        assert [defense["kind"] for defense in noted["defenses"]] == ["mask", "dp_sgd"]
        assert noted["events"] == [
            dataclasses.asdict(
                Event(
                    noise_multiplier=1.0,
                    sampling_rate=1.0,
                    steps=1,
                    unit="example",
                    neighbouring="zero out one",
                    disjoint=0,
                )
            )
        ]


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_a_note_of_private_steps_changes_no_byte_of_the_reply(tmp_path, algorithm):
    experiment = experiment_of(DP_SGD, NOISE, federation={"algorithm": algorithm})
    replies = {}
    for kept in (False, True):
        run = preparation.prepare(experiment, tmp_path / str(kept))
        config = {
            "experiment": str(run.path / "run.json"),
            "run-dir": str(run.path),
            "attack": False,
        }
        grid = InlineGrid(client_app, 2, config, vault=tmp_path if kept else None)
        weights = ArrayRecord(model_of(**BERT, task=CLASSIFICATION).parameters())
        message = Message(
            RecordDict(
                {
                    "arrays": weights,
                    "config": ConfigRecord({"round": 1}),
                    "assignment": ConfigRecord(Assignment.of(experiment, run).to_values()),
                }
            ),
            message_type="train",
            dst_node_id=list(grid.get_node_ids())[1],
        )
        (reply,) = grid.send_and_receive([message])
        assert not reply.has_error(), reply.error.reason
        assert set(reply.content) == {"update", "metrics"}
        assert set(reply.content["metrics"]) == {"num-examples", "client", "round"}
        replies[kept] = recorddict_to_proto(reply.content).SerializeToString(deterministic=True)
        assert (run.path / "defended").exists() == (run.path / "vault").exists() == kept
    assert replies[False] == replies[True]


# --- the sum of all -------------------------------------------------------------------------


SUMMED = {"clients": 3, "algorithm": "fedavg"}
SEVEN = {"data": TABLE["data"] | {"samples": 7}}


@pytest.fixture(scope="module")
def summed(folders, tmp_path_factory):
    """Three clients with 3, 2 and 2 texts, of whom the server sees the sum."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defense_checks, "refuse_broken", lambda *_: None)
        experiment = experiment_of(NOISE, SECURE_SUM, federation=SUMMED, **SEVEN)
        return carried_out(tmp_path_factory.mktemp("summed") / "run", experiment)


def test_the_server_gets_the_sum_and_nothing_of_a_single_client(summed, tmp_path):
    names = sorted(path.name for path in (summed.path / "captures").iterdir())
    assert names == ["r0001-all.safetensors", "r0002-all.safetensors"]
    assert not (summed.path / "held").exists()
    assert summed.captures.all_keys() == [Key(1, EVERYONE), Key(2, EVERYONE)]
    # The first round is that of the same clients without a sum.
    apart = carried_out(tmp_path / "apart", experiment_of(NOISE, federation=SUMMED, **SEVEN))
    single = [apart.captures.read_capture(Key(1, client)).update for client in range(3)]
    assert sorted(update.num_examples for update in single) == [2, 2, 3]
    captured = summed.captures.read_capture(Key(1, EVERYONE))
    assert captured.update.num_examples == 7
    # Two steps for three texts, one for two: the server knows of the most.
    assert captured.knowledge.local_steps == 2
    for name, value in mean_by_hand(single).items():
        torch.testing.assert_close(
            captured.update.tensors[name], value.float(), atol=1e-7, rtol=1e-5
        )
    for round in (2,):
        summed_model, apart_model = summed.models.read_model(round), apart.models.read_model(round)
        for name, value in summed_model.items():
            torch.testing.assert_close(value, apart_model[name], atol=1e-6, rtol=1e-5)


def test_answers_on_a_sum_are_scored_against_the_texts_of_all(summed):
    assert summed.vault.all_keys() == [
        Key(round, client) for round in (1, 2) for client in range(3)
    ]
    for round in (1, 2):
        truth = vault.read_truth(summed, Key(round, EVERYONE))
        alone = [summed.vault.read_note(Key(round, client)) for client in range(3)]
        texts = [list(ids) for note in alone for ids in note["sequences"]]
        assert [list(ids) for ids in truth.sequences] == texts
        assert list(truth.labels) == [label for note in alone for label in note["labels"]]
        assert len(texts) == 7
        weights = [len(note["sequences"]) for note in alone]
        assert truth.noise_scale == pytest.approx(0.01 * math.hypot(*weights) / 7)
    rows = summed.rows(Lines("leakage.jsonl", dict))
    assert [(row["round"], row["client"], row["batch_size"]) for row in rows] == [
        (1, EVERYONE, 7),
        (2, EVERYONE, 7),
    ]
    assert " 1 all 7 " in printed(summed)


def test_what_is_granted_of_a_sum_is_of_all_clients(summed):
    threat = ThreatModel(frozenset({"labels", "lengths", "batch_size", "noise_scale"}))
    known = grants.knowledge(summed, Key(1, EVERYONE), threat)
    truth = vault.read_truth(summed, Key(1, EVERYONE))
    longest_first = sorted(map(len, truth.sequences), reverse=True)
    assert known.lengths == tuple(longest_first)
    pairs = [(len(s), label) for s, label in zip(truth.sequences, truth.labels, strict=True)]
    assert sorted(zip(known.lengths, known.labels, strict=True)) == sorted(pairs)
    assert known.batch_size == 6
    assert known.noise_scale == truth.noise_scale


@dataclass(frozen=True)
class Largest(TrustedAggregator):
    """Shows the server the largest of the clients' numbers."""

    kind: ClassVar[str] = "largest"

    def combined(self, updates, *, rng):
        return functools.reduce(
            lambda largest, update: dataclasses.replace(
                largest,
                tensors={
                    n: torch.maximum(v, update.tensors[n]) for n, v in largest.tensors.items()
                },
            ),
            updates,
        )


def test_a_new_aggregator_is_one_class(tmp_path, monkeypatch):
    """Nothing else knows which defense stands between clients and server."""
    kinds = {**defenses.kinds(), "largest": Largest}
    monkeypatch.setattr(defenses, "kinds", lambda: kinds)
    once = {"rounds": 1}
    apart = carried_out(tmp_path / "apart", experiment_of(federation=once))
    updates = [apart.captures.read_capture(key).update for key in apart.captures.all_keys()]
    run = carried_out(tmp_path / "run", experiment_of({"kind": "largest"}, federation=once))
    assert run.captures.all_keys() == [Key(1, EVERYONE)]
    seen = run.captures.read_capture(Key(1, EVERYONE)).update
    for name, value in seen.tensors.items():
        assert torch.equal(value, torch.stack([update.tensors[name] for update in updates]).amax(0))
    findings = defense_checks.check(experiment_of({"kind": "largest"}))
    assert all(finding.holds for finding in findings)
    refused = r"largest and secure_sum: the server sees one update of a round: keep one"
    with pytest.raises(ConfigError, match=refused):
        experiment_of({"kind": "largest"}, SECURE_SUM)


def test_probes_read_the_words_of_all_clients_in_a_sum_without_noise(tmp_path):
    run = carried_out(tmp_path / "run", experiment_of(SECURE_SUM, federation={"rounds": 1}))
    (row,) = run.rows(Lines("leakage.jsonl", dict))
    assert (row["status"], row["client"], row["batch_size"]) == ("recovered", EVERYONE, 4)
    assert row["token_recall"] == row["token_precision"] == 1
    truth = vault.read_truth(run, Key(1, EVERYONE))
    assert row["facts"]["longest_sequence"]["found"] == max(map(len, truth.sequences))
    assert run.rows(Lines("privacy.jsonl", dict))[0]["epsilon"] == "none"


def test_a_run_that_was_stopped_within_a_sum_goes_on_and_gives_the_same(summed, tmp_path):
    run = Run(tmp_path / "run")
    shutil.copytree(summed.path, run.path)
    experiment = experiment_of(NOISE, SECURE_SUM, federation=SUMMED, **SEVEN)
    expected = content(summed)
    for lost in ("captures/r0002-all.safetensors", "models/r0003.safetensors"):
        (run.path / lost).unlink()
    with pytest.MonkeyPatch.context() as patch:
        calls = []

        def crash(*args, **kwargs):
            calls.append(1)
            if len(calls) == 2:
                raise FedleakError("the power is off")
            return local_update_(*args, **kwargs)

        patch.setattr("fedleak.flower.client.app.local_update_", crash)
        with pytest.raises(FedleakError, match="the power is off"):
            carried_out(run.path, experiment)
    # What had come is kept from the server's eyes, and no capture is made of it.
    held = {path.name for path in (run.path / "held").iterdir()}
    assert "r0002-c00.safetensors" in held
    assert held <= {f"r0002-c0{client}.safetensors" for client in (0, 2)}
    assert run.captures.all_keys() == [Key(1, EVERYONE)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Captures, "drop", crash_once(Captures.drop))
        with pytest.raises(RuntimeError, match="once"):
            carried_out(run.path, experiment)
        carried_out(run.path, experiment)
    assert content(run, "flower.log") == {n: b for n, b in expected.items() if n != "flower.log"}
    assert not (run.path / "held").exists()


def crash_once(function):
    calls = []

    def once(*args):
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("once")
        return function(*args)

    return once


# --- Poisson sampling -----------------------------------------------------------------------


def sizes_of(seed):
    """How many of their three examples two clients draw in two rounds, of batches of one."""
    how = LocalTraining(
        kind=UpdateKind.GRADIENT,
        batch_size=1,
        epochs=1,
        learning_rate=0.1,
        dropout=False,
        private=PrivateSteps(1.0, 0.5, "poisson"),
    )
    return [
        [len(round_batch(3, how, seed=seed, client=client, round=r)) for client in (0, 1)]
        for r in (1, 2)
    ]


@pytest.fixture(scope="module")
def sampled(folders, tmp_path_factory):
    """A run with an empty batch, in a round in which the other client's has two texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defense_checks, "refuse_broken", lambda *_: None)
        seed = next(s for s in range(10**4) if sizes_of(s) == [[0, 2], [1, 1]])
        runs = {}
        for name, defense in {"apart": [POISSON], "sum": [POISSON, SECURE_SUM]}.items():
            experiment = experiment_of(*defense, federation={"batch_size": 1}, seed=seed)
            runs[name] = carried_out(tmp_path_factory.mktemp(name) / "run", experiment)
        return runs


def test_a_client_that_drew_nobody_looks_like_any_other_to_the_server(sampled):
    run = sampled["apart"]
    assert run.captures.all_keys() == [Key(1, 0), Key(1, 1), Key(2, 0), Key(2, 1)]
    assert {
        run.captures.read_capture(key).update.num_examples for key in run.captures.all_keys()
    } == {1}
    assert run.vault.read_note(Key(1, 0))["sequences"] == []
    lengths = [
        float(flat(run.captures.read_capture(key).update).norm()) for key in run.captures.all_keys()
    ]
    assert max(lengths) < 1.05 * min(lengths)
    noted = run.defended.read_note(Key(1, 0))
    assert (noted["training"]["examples"], noted["training"]["signal_norm"]) == (0, 0.0)
    # There is nothing to score an answer against.
    texts = {
        (row["round"], row["client"]): row["batch_size"]
        for row in run.rows(Lines("leakage.jsonl", dict))
    }
    assert texts.pop((1, 0)) == 0 < min(texts.values())
    assert "dp_sgd" in printed(run)
    # It has spent as much as one that drew somebody.
    spent = {
        (row["round"], row["client"]): row["epsilon"]
        for row in run.rows(Lines("privacy.jsonl", dict))
    }
    assert spent[1, 0] == spent[1, 1] < spent[2, 0] == spent[2, 1]


def test_who_drew_nobody_has_a_weight_in_the_sum_all_the_same(sampled):
    run = sampled["sum"]
    assert run.captures.read_capture(Key(1, EVERYONE)).update.num_examples == 2
    truth = vault.read_truth(run, Key(1, EVERYONE))
    assert len(truth.sequences) == 2
    (row,) = [row for row in run.rows(Lines("leakage.jsonl", dict)) if row["round"] == 1]
    assert row["batch_size"] == 2
    assert "all" in printed(run)


def test_the_scale_of_the_noise_in_a_sum_is_that_of_the_weights_it_was_made_with(sampled):
    run = sampled["sum"]
    # Two clients, one expected example each: half of each, of noise 1.0 * 0.5 / 1.
    expected = math.hypot(0.25, 0.25)
    quiet = flat(run.captures.read_capture(Key(1, EVERYONE)).update)
    assert float(quiet.square().mean().sqrt()) == pytest.approx(expected, rel=0.02)
    assert vault.read_truth(run, Key(1, EVERYONE)).noise_scale == pytest.approx(expected)


# --- the ledger -----------------------------------------------------------------------------


LEDGER = [
    POISSON | {"clients": [0]},
    LOCAL_DP | {"clients": [1]},
    DP_SGD | {"clients": [1]},
    NOISE | {"clients": [0, 2]},
]
PRIVACY = {"delta": 1e-4, "accountant": "rdp"}


def with_ledger():
    federation = {"clients": 4, "clients_per_round": 3, "rounds": 3, "batch_size": 1}
    data = TABLE["data"] | {"samples": 12}
    return experiment_of(*LEDGER, federation=federation, privacy=PRIVACY, data=data)


@pytest.fixture(scope="module")
def ledgered(folders, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defense_checks, "refuse_broken", lambda *_: None)
        return carried_out(tmp_path_factory.mktemp("ledger") / "run", with_ledger())


def test_the_ledger_composes_all_rounds_of_each_client(ledgered):
    experiment = with_ledger()
    poisson = Event(
        noise_multiplier=1.0,
        sampling_rate=1 / 3,
        steps=1,
        unit="example",
        neighbouring="zero out one",
        sampling="Poisson",
    )
    of_client = Event(
        noise_multiplier=0.4,
        sampling_rate=1.0,
        steps=1,
        unit="client",
        neighbouring="replace one, given n",
    )
    fixed = Event(
        noise_multiplier=1.0,
        sampling_rate=1.0,
        steps=1,
        unit="example",
        neighbouring="zero out one",
        disjoint=0,
    )
    rounds = {
        client: [r for r in (1, 2, 3) if client in clients_of_round(experiment, r)]
        for client in range(4)
    }
    assert {len(trained_in) for trained_in in rounds.values()} > {2}, "another seed"
    expected = []
    for round in (1, 2, 3):
        for client in clients_of_round(experiment, round):
            times = rounds[client].index(round) + 1
            events = {0: [poisson] * times, 1: [of_client, fixed] * times}.get(client, [])
            spent = accounting.compose(events, 1e-4, "rdp")
            epsilons = {statement.of.unit: statement.epsilon for statement in spent} or {
                "none": "none"
            }
            expected += [(round, client, unit, eps) for unit, eps in sorted(epsilons.items())]
    rows = ledgered.rows(Lines("privacy.jsonl", dict))
    assert [(row["round"], row["client"], row["unit"], row["epsilon"]) for row in rows] == expected
    for row in rows:
        if row["client"] > 1:
            assert row.pop("uses") == []
            assert set(row.values()) <= {"none", None, row["round"], row["client"]}
            continue
        times = rounds[row["client"]].index(row["round"]) + 1
        assert (row["delta"], row["accountant"], row["steps"]) == (1e-4, "rdp", times)
        assert row["noise_multiplier"] == (0.4 if row["unit"] == "client" else 1.0)
        poisson_rows = row["client"] == 0
        assert row["sampling"] == ("Poisson" if poisson_rows else "none")
        assert row["sampling_rate"] == pytest.approx(1 / 3 if poisson_rows else 1)
    assert ledgered.read_json("summary.json")["privacy"]["epsilon"] == "none"


def test_the_report_prints_what_each_client_has_spent(ledgered):
    rows = ledgered.rows(Lines("privacy.jsonl", dict))
    last = {}
    for row in rows:
        if row["client"] < 2:
            last.setdefault((row["round"], row["client"]), []).append(row["epsilon"])
    assert "epsilon" in printed(ledgered)
    scored = ledgered.rows(records.LEAKAGE)
    table = leakage_table("run", scored, shares(scored), ledgered.rows(records.LEDGER))
    headings = [column.heading for column in table.columns]
    places = [headings.index(name) for name in ("round", "client", "epsilon")]
    shown = {tuple(row[place].text for place in places) for row in table.rows}
    assert len(shown) == len(table.rows) > 0
    for round, client, epsilon in shown:
        # A client that drew nobody has no line.
        expected = last.get((int(round), int(client)))
        assert epsilon == (f"{min(expected):.3g}" if expected else "none")


def test_a_run_that_was_stopped_spends_no_more_than_one_that_was_not(ledgered, tmp_path):
    experiment, run = with_ledger(), Run(tmp_path / "run")
    calls = []

    def crash(*args, **kwargs):
        calls.append(1)
        if len(calls) in (2, 7):
            raise FedleakError("the power is off")
        return local_update_(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedleak.flower.client.app.local_update_", crash)
        for _ in range(2):
            with pytest.raises(FedleakError, match="the power is off"):
                carried_out(run.path, experiment)
            scoring.score_run(run)  # a look at what there is
            assert len(run.rows(Lines("privacy.jsonl", dict))) < len(
                ledgered.rows(Lines("privacy.jsonl", dict))
            )
        carried_out(run.path, experiment)
    for name in ("privacy.jsonl", "defenses.jsonl"):
        assert (run.path / name).read_bytes() == (ledgered.path / name).read_bytes()
    for key in ledgered.captures.all_keys():
        assert_same(
            run.captures.read_capture(key).update, ledgered.captures.read_capture(key).update
        )
    for key in ledgered.defended.all_keys():
        assert run.defended.read_note(key) == ledgered.defended.read_note(key)


def test_the_weakest_client_is_the_guarantee_of_a_run(tmp_path):
    weak, strong = LOCAL_DP | {"clients": [0]}, LOCAL_DP | {"noise_multiplier": 4.0, "clients": [1]}
    run = carried_out(tmp_path / "run", experiment_of(weak, strong))
    rows = {
        (row["round"], row["client"]): row["epsilon"]
        for row in run.rows(Lines("privacy.jsonl", dict))
    }
    guarantee = run.read_json("summary.json")["privacy"]
    assert rows[2, 1] < rows[2, 0] == guarantee["epsilon"]
    assert (guarantee["unit"], guarantee["noise_multiplier"]) == ("client", 0.4)
    assert f"epsilon of at most {guarantee['epsilon']:.4g} at delta 1e-05" in printed(run)
    assert "noise multiplier: 0.4)" in printed(run)


def test_an_epsilon_is_spent_by_the_end_and_the_noise_is_sent(tmp_path):
    settings = {"kind": "local_dp", "max_norm": 0.5, "epsilon": 20.0}
    run = carried_out(tmp_path / "run", experiment_of(settings))
    last = [row for row in run.rows(Lines("privacy.jsonl", dict)) if row["round"] == 2]
    assert all(0.99 * 20 <= row["epsilon"] <= 20 for row in last)
    scale = 2 * 0.5 * last[0]["noise_multiplier"]
    assert run.vault.read_note(Key(1, 0))["noise_scale"] == pytest.approx(scale)
    sent = flat(run.captures.read_capture(Key(1, 0)).update)
    # On tens of thousands of numbers, beside a signal of norm 0.5.
    assert float(sent.square().mean().sqrt()) == pytest.approx(scale, rel=0.02)


# --- utility --------------------------------------------------------------------------------


def test_utility_is_taken_after_the_rounds_that_were_chosen_and_the_last(tmp_path, monkeypatch):
    experiment = experiment_of(
        MASK, federation={"rounds": 3}, utility={"rounds": [0, 2], "reference": True}
    )
    run = carried_out(tmp_path / "run", experiment)
    rows = [seal.without(row) for row in run.rows(Lines("utility.jsonl", dict))]
    assert [row["round"] for row in rows] == [0, 2, 3]
    assert rows[0].keys() == {"round", "loss", "accuracy", "f1", "mcc"}
    noted = run.read_json("reference.json")
    # One step a client and round.
    assert noted["steps"] == 6
    assert noted.keys() - {"steps"} == rows[0].keys() - {"round"}
    summary = run.read_json("summary.json")
    assert (summary["utility"], summary["utility_reference"]) == (rows[-1], noted)
    assert "trained centrally" in printed(run)

    def never(*args):
        raise AssertionError("trained again")

    monkeypatch.setattr(central_baseline, "central", never)
    before = content(run)
    carried_out(run.path, experiment)
    assert content(run) == before


@pytest.mark.parametrize(
    ("federation", "steps", "optimiser"),
    [
        # Two epochs of two steps on three texts, of two clients, in two rounds.
        ({"algorithm": "fedavg", "local_epochs": 2}, 2 * 2 * 2 * 2, torch.optim.SGD),
        ({"algorithm": "fedsgd"}, 2 * 2, torch.optim.SGD),
        ({"algorithm": "fedsgd", "server_optimiser": "adam"}, 2 * 2, torch.optim.Adam),
    ],
)
def test_the_reference_trains_on_everybody_s_texts(tmp_path, federation, steps, optimiser):
    defended = experiment_of(MASK, federation=federation)
    run = preparation.prepare(defended, tmp_path / "run")
    start = model_of(**BERT, task=CLASSIFICATION)
    fresh = loading.load(defended.model_spec(2)).parameters()
    run.models.write(1, fresh)
    baseline = central_baseline.central(defended, run)
    assert baseline.steps == steps
    assert central_baseline.central(defended, run) == baseline
    assert central_baseline.central(experiment_of(DP_SGD, federation=federation), run) == baseline
    held_out = preparation.plan(defended).held_out
    models.load_parameters_(start, fresh)
    assert baseline.figures["loss"] != loss_of(start, held_out)
    # The same loop by hand.
    split = read_data(defended)
    texts = start.encode(split.train.texts)
    order = stream(SEED, "reference")
    trained = list(start.trained().values())
    by_hand = optimiser(trained, lr=0.1)
    for _ in range(steps):
        chosen = torch.randperm(6, generator=order)[:2].tolist()
        ids, mask = models.pad(
            [texts[i] for i in chosen], start.tokenizer.pad_token_id, start.device
        )
        labels = torch.tensor([split.train.labels[i] for i in chosen])
        loss = models.batch_loss(start, ids, mask, labels)
        for p, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
            p.grad = gradient
        by_hand.step()
    assert baseline.figures["loss"] == pytest.approx(loss_of(start, held_out), rel=1e-4)


def loss_of(model, held_out):
    return evaluate(model, held_out["sequences"], held_out["labels"])["loss"]


@pytest.mark.parametrize("defense", [MASK, DP_SGD])
def test_defended_training_that_diverges_is_said(tmp_path, defense):
    with pytest.raises(FedleakError, match=r"^round 2: client 0 .* is finite: training diverged"):
        carried_out(tmp_path / "run", experiment_of(defense, federation={"learning_rate": 1e30}))
    assert Run(tmp_path / "run").captures.all_keys() == [Key(1, 0), Key(1, 1)]


def test_an_update_is_not_changed_by_what_is_noted_of_it():
    update = ClientUpdate(UpdateKind.GRADIENT, {"a": torch.tensor([1.0, 2.0])}, 1)
    figures = defenses.measured(update, update)
    assert figures["change_norm"] == figures["zeroed"] == 0
