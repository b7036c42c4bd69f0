"""What leaves a client: the defended, shared update and nothing else."""

import copy
import stat

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.serde import recorddict_to_proto

from fedleak import models
from fedleak.config.federation.assignment import Assignment
from fedleak.config.loading import parse
from fedleak.flower.client.app import app as client_app
from fedleak.flower.inline import InlineGrid
from fedleak.models import loading
from fedleak.models.parameter_selection import matching
from fedleak.running import preparation
from fedleak.store.run import Key
from fedleak.training.local import local_update_
from fedleak.training.wire import from_wire
from fedleak.util.rng import stream_seed

TABLE = {
    "name": "wire",
    "seed": 3,
    "model": {"name": "smaller than builtin/bert-tiny: `folders`"},
    "data": {"name": "builtin/notes", "samples": 12, "held_out": 2},
    "federation": {"clients": 2, "batch_size": 2},
}
NOISE = {"kind": "gaussian_noise", "sigma": 0.01}


@pytest.fixture(scope="module", autouse=True)
def folders(saved):
    """The folders of models that cost a tenth of the built-in ones, with as many layers."""
    named = {family: saved(family, layers=4) for family in ("bert", "gpt2", "llama")}
    TABLE["model"] = {"name": named["bert"]}
    return named


@pytest.fixture(scope="module")
def bert(folders):
    spec = models.ModelSpec(name=folders["bert"], task=models.CLASSIFICATION, num_labels=2)
    return loading.load(spec)


@pytest.fixture
def reply_of(tmp_path, bert):
    """Sends a model to a client of an experiment and returns its reply."""

    def ask(client=0, *, round=1, vault=False, **tables):
        experiment = parse(TABLE | tables)
        spec = experiment.model_spec(2)
        model = loading.load(spec) if "model" in tables else bert
        name = f"run{len(list(tmp_path.iterdir()))}"
        run = preparation.prepare(experiment, tmp_path / name)
        config = {
            "experiment": str(run.path / "run.json"),
            "run-dir": str(run.path),
            "attack": False,
        }
        folder = tmp_path if vault else None
        grid = InlineGrid(client_app, experiment.federation.clients, config, vault=folder)
        content = RecordDict(
            {
                "arrays": ArrayRecord(model.parameters()),
                "config": ConfigRecord({"round": round}),
                "assignment": ConfigRecord(Assignment.of(experiment, run).to_values()),
            }
        )
        node = list(grid.get_node_ids())[client]
        message = Message(content, message_type="train", dst_node_id=node)
        (reply,) = grid.send_and_receive([message])
        assert not reply.has_error(), reply.error.reason
        return reply.content, run

    return ask


def tensors(content):
    return content.array_records["update"].to_torch_state_dict()


def equal(actual, expected):
    return actual.keys() == expected.keys() and all(
        torch.equal(actual[name], expected[name]) for name in actual
    )


def wire_bytes(content):
    return recorddict_to_proto(content).SerializeToString(deterministic=True)


@pytest.mark.parametrize("algorithm", ["fedsgd", "fedavg"])
def test_the_vault_changes_no_byte_of_a_reply(reply_of, algorithm):
    federation = TABLE["federation"] | {"algorithm": algorithm, "dropout": True}
    tables = {"federation": federation, "defense": [NOISE]}
    without, run_without = reply_of(1, vault=False, **tables)
    with_vault, run_with = reply_of(1, vault=True, **tables)
    assert wire_bytes(without) == wire_bytes(with_vault)
    assert not (run_without.path / "vault").exists()
    (path,) = (run_with.path / "vault").iterdir()
    assert path.name == "r0001-c01.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_beside_the_update_there_are_three_numbers(reply_of, bert):
    content, _ = reply_of(1, round=2)
    assert {name: dict(metrics) for name, metrics in content.metric_records.items()} == {
        "metrics": {"num-examples": 2, "client": 1, "round": 2}
    }
    assert not content.config_records
    assert list(content.array_records) == ["update"]
    sent, own = tensors(content), bert.parameters()
    assert {name: t.shape for name, t in sent.items()} == {n: p.shape for n, p in own.items()}


@pytest.mark.parametrize("round", [1, 2])
def test_the_vault_holds_what_the_update_was_made_of(reply_of, bert, round):
    content, run = reply_of(1, round=round, vault=True)
    truth = run.vault.read_note(Key(round, 1))
    experiment = parse(TABLE)
    again = local_update_(
        copy.deepcopy(bert),
        truth["sequences"],
        truth["labels"],
        experiment.local_training,
        seed=stream_seed(3, "local", round, 1),
    )
    assert equal(tensors(content), dict(again.tensors))
    assert (truth["round"], truth["client"], truth["batch_size"]) == (round, 1, 2)
    assert truth["noise_scale"] is None


def test_clients_and_rounds_train_on_different_texts(reply_of):
    held = []
    for client, round in [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]:
        _, run = reply_of(client, round=round, vault=True)
        held += map(tuple, run.vault.read_note(Key(round, client))["sequences"])
    assert len(set(held)) == len(held) == 12


# --- share and defenses ---------------------------------------------------------------------


def test_only_what_is_shared_is_sent_as_it_would_have_been_among_all(reply_of):
    everything = tensors(reply_of(defense=[NOISE])[0])
    patterns = ["layer.1.*.query", "classifier"]
    some = tensors(reply_of(defense=[NOISE], update={"share": patterns})[0])
    assert list(some) == matching(everything, patterns)
    assert 0 < len(some) < len(everything)
    assert equal(some, {name: everything[name] for name in some})


BERT = "bert.encoder.layer.{}.attention.self"
GPT2 = "transformer.h.{}"
LLAMA = "model.layers.{}"


@pytest.mark.parametrize(
    ("name", "lora", "shared", "expected"),
    [
        ("bert", None, ["q1"], [f"{BERT.format(0)}.query.weight"]),
        (
            "bert",
            None,
            ["classifier", "p4", "layer.0.attention.self.key.w"],  # patterns beside parts
            [
                f"{BERT.format(0)}.key.weight",
                "bert.encoder.layer.3.output.dense.weight",
                "classifier.weight",
                "classifier.bias",
            ],
        ),
        ("bert", {"rank": 2}, ["v3"], [f"{BERT.format(2)}.value.lora_{ab}" for ab in "AB"]),
        ("gpt2", None, ["k2", "v2", "q2"], [f"{GPT2.format(1)}.attn.c_attn.weight"]),
        ("gpt2", None, ["o"], [f"{GPT2.format(i)}.attn.c_proj.weight" for i in range(4)]),
        ("gpt2", None, ["embeddings"], ["transformer.wte.weight", "transformer.wpe.weight"]),
        (
            "llama",
            None,
            ["f2", "q1"],
            [
                f"{LLAMA.format(0)}.self_attn.q_proj.weight",
                *(f"{LLAMA.format(1)}.mlp.{part}_proj.weight" for part in ("gate", "up")),
            ],
        ),
    ],
)
def test_a_part_of_the_model_is_sent_and_nothing_else(
    reply_of, folders, name, lora, shared, expected
):
    table = {"name": folders[name]} | ({} if lora is None else {"lora": lora})
    content, run = reply_of(model=table, update={"share": shared})
    sent = tensors(content)
    if lora is not None:
        expected = [f"{stem}.default.weight" for stem in expected]
    assert list(sent) == expected
    everything = tensors(reply_of(model=table)[0])
    assert equal(sent, {parameter: everything[parameter] for parameter in expected})
    # As it is written, also for whoever reads the run later.
    assert run.info()["experiment"]["update"] == {"share": shared}


def test_a_defended_part_is_as_it_would_have_been_among_all(reply_of):
    everything = tensors(reply_of(1, defense=[NOISE])[0])
    some = tensors(reply_of(1, defense=[NOISE], update={"share": ["t2"]})[0])
    assert list(some) == [name for name in everything if "encoder.layer.1." in name]
    assert equal(some, {name: everything[name] for name in some})


def test_a_defense_is_of_the_clients_that_it_names(reply_of):
    mask = {"kind": "mask", "fraction": 0.5, "clients": [1]}
    name = "bert.encoder.layer.0.attention.self.query.weight"
    for client in (0, 1):
        plain = tensors(reply_of(client)[0])
        masked = tensors(reply_of(client, defense=[mask])[0])
        if client == 0:
            assert equal(plain, masked)
        else:
            zeros = (masked[name] == 0).float().mean()
            assert 0.45 < zeros < 0.55
            kept = masked[name] != 0
            assert torch.equal(masked[name][kept], plain[name][kept])


def test_noise_differs_between_clients_rounds_and_defenses(reply_of):
    def noise(client, round, defense):
        plain = tensors(reply_of(client, round=round)[0])
        noisy = tensors(reply_of(client, round=round, defense=defense)[0])
        name = "classifier.weight"
        return (noisy[name] - plain[name]).flatten()

    drawn = [noise(0, 1, [NOISE]), noise(1, 1, [NOISE]), noise(0, 2, [NOISE])]
    drawn.append(noise(0, 1, [NOISE, NOISE]) - drawn[0])
    for i, sample in enumerate(drawn):
        assert 0.005 < sample.std() < 0.015
        for earlier in drawn[:i]:
            assert abs(torch.corrcoef(torch.stack([sample, earlier]))[0, 1]) < 0.4


def test_the_order_of_defenses_is_that_of_the_file(reply_of):
    mask = {"kind": "mask", "fraction": 0.5}
    first = tensors(reply_of(defense=[mask, NOISE])[0])["classifier.weight"]
    last = tensors(reply_of(defense=[NOISE, mask])[0])["classifier.weight"]
    assert not (first == 0).any()
    assert (last == 0).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_cast_update_takes_half_the_bytes_and_arrives_rounded(reply_of, dtype):
    plain = reply_of()[0]
    content = reply_of(defense=[{"kind": "cast", "dtype": dtype}], update={"share": ["layer.1"]})[0]
    half = from_wire(tensors(content))
    assert list(half) == matching(tensors(plain), ["layer.1"])
    assert equal(half, {n: tensors(plain)[n].to(getattr(torch, dtype)) for n in half})
    name = "bert.encoder.layer.1.attention.self.query.weight"
    arrays = [records.array_records["update"][name] for records in (content, plain)]
    header = 128  # numpy's
    assert 2 * (len(arrays[0].data) - header) == len(arrays[1].data) - header == 4 * 32**2


def test_noise_after_a_cast_is_in_its_precision_and_before_it_too(reply_of):
    cast, name = {"kind": "cast", "dtype": "bfloat16"}, "classifier.weight"
    plain = tensors(reply_of()[0])[name]
    for defense in ([cast, NOISE], [NOISE, cast]):
        noisy = from_wire(tensors(reply_of(defense=defense)[0]))[name]
        assert noisy.dtype == torch.bfloat16
        assert 0.005 < (noisy.float() - plain).std() < 0.015


def test_the_vault_knows_the_scale_of_all_noise_together(reply_of):
    defense = [NOISE | {"sigma": 0.3}, {"kind": "mask", "fraction": 0.1}, NOISE | {"sigma": 0.4}]
    defense.append(NOISE | {"sigma": 9.0, "clients": [1]})
    _, run = reply_of(0, vault=True, defense=defense)
    assert run.vault.read_note(Key(1, 0))["noise_scale"] == pytest.approx(0.5)
