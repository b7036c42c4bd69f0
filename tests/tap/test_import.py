"""`fedleak import` reads of a tap what clients sent, and refuses what they cannot have sent."""

import json
import os
from collections import OrderedDict
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
import tomli_w
import torch
from cases import some
from own_app import task
from transformers import AutoTokenizer, DataCollatorWithPadding

from fedleak.attacks.server_modes.imprint import Imprint
from fedleak.audit.vault import read_truth
from fedleak.config.federation.lookup import stored
from fedleak.config.federation.schedule import malicious_server
from fedleak.models import CLASSIFICATION, ModelSpec, loading
from fedleak.running.workers import hiring
from fedleak.store.run import EVERYONE, Key, Run
from fedleak.tap.about import load_about
from fedleak.tap.folder import KeptArrays, Problem, Tapped, TappedMessage
from fedleak.tap.importing import import_run
from fedleak.training.observation import Example, UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.util.errors import ConfigError, FedleakError
from fedleak.util.rng import stream

RATE = 0.5


MODEL = {"name": "smaller than builtin/bert-tiny: `model`"}


@pytest.fixture(scope="module", autouse=True)
def model(folder):
    """The checkpoint that clients start from."""
    MODEL["name"] = folder
    return loading.load(ModelSpec(name=folder, task=CLASSIFICATION, num_labels=2))


def about_file(path: Path, changes=None):
    """Writes an about.toml; `changes` are by dotted key, None leaves the key out."""
    table = {
        "model": {**MODEL},
        "training": {"learning_rate": RATE, "batch_size": 2, "dropout": False},
    }
    for key, value in (changes or {}).items():
        *names, last = key.split(".")
        at = table
        for name in names:
            at = at.setdefault(name, {})
        at[last] = value
    for section in table.values():
        if isinstance(section, dict):
            for key in [key for key, value in section.items() if value is None]:
                del section[key]
    path.write_text(tomli_w.dumps(table))
    return path


class Wire:
    """Writes the folder of a tap, message by message."""

    def __init__(self, path: Path):
        self.tapped, self.count = Tapped(path), 0
        self.tapped.create()

    def __call__(self, way, round, node, records, **numbers):
        kept = []
        for name, tensors in records.items():
            self.count += 1
            file = self.tapped.write_arrays(
                f"m{self.count}",
                {key: value.detach().contiguous().numpy() for key, value in tensors.items()},
            )
            kept.append(KeptArrays(record=name, file=file))
        self.tapped.append(
            TappedMessage(way=way, round=round, node=node, arrays=tuple(kept), numbers=numbers)
        )


@pytest.fixture(scope="module")
def step(folder, texts):
    """What one client does in plain PyTorch: the model before, gradient and weights after."""
    model = task.get_model(folder).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [{**tokenizer(texts[i]), "labels": i} for i in range(2)]
    model(**DataCollatorWithPadding(tokenizer)(rows)).loss.backward()
    gradient = {name: p.grad.clone() for name, p in model.named_parameters()}
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    after = {name: value.clone() for name, value in model.state_dict().items()}
    return SimpleNamespace(before=before, gradient=gradient, after=after, texts=list(texts[:2]))


@pytest.fixture
def wire(tmp_path):
    return Wire(tmp_path / "mine")


@pytest.fixture
def imported(tmp_path):
    """Imports the tap; what it says is left out is returned, too."""

    def run(changes=None, out="run"):
        about = load_about(about_file(tmp_path / "about.toml", changes))
        return import_run(Tapped(tmp_path / "mine"), about, tmp_path / out)

    return run


def update_of(outcome, key=None):
    return outcome.run.captures.read_capture(key or Key(1, 0)).update


def near(tensors, gradient):
    """Whether a delta is minus the rate times a gradient, up to the rounding of weights."""
    assert tensors.keys() <= gradient.keys()
    return all(
        torch.allclose(value, -RATE * gradient[name], rtol=1e-3, atol=3e-7)
        for name, value in tensors.items()
    )


METRICS = {"num-examples": 2}


def test_weights_become_the_delta_of_a_step(wire, step, imported):
    wire("sent", 1, 77, {"arrays": step.before})
    wire("received", 1, 77, {"arrays": step.after}, metrics=METRICS)
    outcome = imported()
    update = update_of(outcome)
    assert (update.kind, update.num_examples) == (UpdateKind.DELTA, 2)
    assert near(update.tensors, step.gradient)
    # What is absent did not change.
    for name in step.gradient.keys() - update.tensors.keys():
        assert torch.equal(step.after[name], step.before[name])
    known = outcome.run.captures.about(Key(1, 0)).knowledge
    assert (known.learning_rate, known.local_steps, known.dropout) == (RATE, 1, False)
    assert known.recipe == Recipe()
    broadcast = outcome.run.models.read_model(1)
    assert all(torch.equal(broadcast[name], step.before[name]) for name in step.gradient)
    assert not outcome.left_out


@pytest.mark.parametrize("payload", ["delta", "gradient"])
def test_deltas_and_gradients_are_taken_as_they_are(payload, wire, step, imported):
    delta = {name: step.after[name] - step.before[name] for name in step.gradient}
    sent = step.gradient if payload == "gradient" else delta
    wire("sent", 1, 77, {"arrays": step.before})
    wire("received", 1, 77, {"update": sent}, metrics=METRICS)
    update = update_of(imported({"reply.payload": payload}))
    assert all(torch.equal(value, sent[name]) for name, value in update.tensors.items())
    if payload == "gradient":
        assert update.kind == UpdateKind.GRADIENT
        assert update.tensors.keys() == step.gradient.keys()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "base_model.model.", "net."])
def test_prefixes_are_taken_off(prefix, wire, step, imported):
    def named(tensors):
        return {prefix + name: value for name, value in tensors.items()}

    wire("sent", 1, 77, {"arrays": named(step.before)})
    wire("received", 1, 77, {"arrays": named(step.after)}, metrics=METRICS)
    assert near(update_of(imported()).tensors, step.gradient)


def test_a_list_of_arrays_is_in_the_order_of_the_state_dict(wire, step, imported):
    def listed(tensors):
        return {str(i): value for i, value in enumerate(tensors.values())}

    wire("sent", 1, 77, {"arrays": listed(step.before)})
    wire("received", 1, 77, {"arrays": listed(step.after)}, metrics=METRICS)
    assert near(update_of(imported()).tensors, step.gradient)


def test_several_records_are_one_model(wire, step, imported):
    def split(tensors):
        head = {n: v for n, v in tensors.items() if n.startswith("classifier")}
        return {"body": {n: v for n, v in tensors.items() if n not in head}, "head": head}

    wire("sent", 1, 77, split(step.before))
    wire("received", 1, 77, split(step.after), metrics=METRICS)
    assert near(update_of(imported()).tensors, step.gradient)


def test_a_parameter_in_two_records_is_refused_until_one_is_named(wire, step, imported):
    control = {name: torch.zeros_like(value) for name, value in step.before.items()}
    wire("sent", 1, 77, {"arrays": step.before})
    wire("received", 1, 77, {"arrays": step.after, "control": control}, metrics=METRICS)
    with pytest.raises(ConfigError, match=r"several of its array records: name .* reply\.records"):
        imported()
    assert near(update_of(imported({"reply.records": ["arrays"]})).tensors, step.gradient)


def test_two_models_are_told_apart_by_their_prefix(wire, step, imported):
    def both(tensors):
        teacher = {f"teacher.{n}": torch.zeros_like(v) for n, v in tensors.items()}
        return {f"student.{n}": v for n, v in tensors.items()} | teacher

    wire("sent", 1, 77, {"arrays": both(step.before)})
    wire("received", 1, 77, {"arrays": both(step.after)}, metrics=METRICS)
    update = update_of(imported({"reply.prefix": "student."}))
    assert near(update.tensors, step.gradient)


def test_an_own_head_is_not_the_models(wire, step, imported):
    """Under whatever name: `AutoModel` has no words before its own, and a head may have any."""

    def own(tensors):
        body = {n.removeprefix("bert."): v for n, v in tensors.items() if n.startswith("bert.")}
        return {**body, "classifier.weight": torch.ones(3, 7), "norm.bias": torch.ones(5)}

    wire("sent", 1, 77, {"arrays": own(step.before)})
    wire("received", 1, 77, {"arrays": own(step.after)}, metrics=METRICS)
    outcome = imported({"reply.own_head": True})
    update = update_of(outcome)
    assert near(update.tensors, step.gradient)
    assert all(name.startswith("bert.") for name in update.tensors)
    assert outcome.run.captures.about(Key(1, 0)).knowledge.own_head


@pytest.mark.parametrize("own_head", [False, True])
def test_membership_is_asked_where_the_truth_and_the_head_are_known(tmp_path, own_head):
    for name in ("truth.jsonl", "others.txt"):
        (tmp_path / name).write_text("")
    changes = {"truth.file": str(tmp_path / "truth.jsonl"), "reply.own_head": own_head}
    changes["truth.held_out"] = str(tmp_path / "others.txt")
    about = load_about(about_file(tmp_path / "about.toml", changes))
    kinds = [table["kind"] for table in about.attack]
    assert kinds == (["auto"] if own_head else ["auto", "membership"])


def test_a_head_of_another_name_is_the_models_if_it_is_called_so(wire, step, imported):
    def own(tensors):
        return {n.replace("classifier.", "head."): v for n, v in tensors.items()}

    wire("sent", 1, 77, {"arrays": own(step.before)})
    wire("received", 1, 77, {"arrays": own(step.after)}, metrics=METRICS)
    names = {f"head.{end}": f"classifier.{end}" for end in ("weight", "bias")}
    assert near(update_of(imported({"reply.names": names})).tensors, step.gradient)


def test_what_is_not_sent_stays_as_in_the_checkpoint(wire, step, imported, model):
    some = [name for name in step.gradient if "classifier" in name or "layer.1" in name]
    wire("sent", 1, 77, {"arrays": {name: step.before[name] for name in some}})
    wire("received", 1, 77, {"arrays": {name: step.after[name] for name in some}}, metrics=METRICS)
    outcome = imported({"attack": []})
    assert update_of(outcome).tensors.keys() <= set(some)
    assert near(update_of(outcome).tensors, step.gradient)
    word = model.family.word_embedding
    assert torch.equal(outcome.run.models.read_model(1)[word], model.parameters()[word])
    assert set(stored(outcome.run).update.share) == set(update_of(outcome).tensors)


WRONG = {
    "a shape": (lambda t: t | {"classifier.bias": torch.zeros(3)}, "has the shape [3], but"),
    "not finite": (lambda t: t | {"classifier.bias": torch.tensor([1.0, float("nan")])}, "finite"),
    "whole numbers": (lambda t: {n: v.long() for n, v in t.items()}, "reply.payload = 'sum'"),
    "a name": (lambda t: t | {"clasifier.bias": torch.zeros(2)}, "nearest"),
    "nothing": (lambda t: {}, "it holds no parameter"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_reply_that_is_no_update_is_left_out(case, wire, step, imported):
    change, complaint = WRONG[case]
    for node in (77, 78):
        wire("sent", 1, node, {"arrays": step.before})
    # What was sent alike is one file, as the tap has it.
    _share_files(wire.tapped)
    wire("received", 1, 77, {"arrays": step.after}, metrics=METRICS)
    wire("received", 1, 78, {"arrays": change(step.after)}, metrics=METRICS)
    outcome = imported()
    assert outcome.updates == 1
    (reason,) = outcome.left_out
    assert reason.startswith("round 1, node 78: ")
    assert complaint in reason
    with pytest.raises(FedleakError, match="1 left out of the run: round 1, node 78"):
        outcome.refuse_gaps()


def _share_files(tapped):
    """Makes what was sent in each round the file of the first message of the round."""
    path = tapped.path / "messages.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first = {}
    for line in lines:
        if line["way"] == "sent":
            line["arrays"] = first.setdefault(line["round"], line["arrays"])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize("count", some([None, 0, -1, 2.5, 1e18, "2", True], every=3))
def test_a_number_of_examples_is_checked(count, wire, step, imported):
    metrics = {"examples": 2, "num-examples": count} if count is not None else {"examples": 2}
    wire("sent", 1, 77, {"arrays": step.before})
    wire("received", 1, 77, {"arrays": step.after}, metrics=metrics)
    with pytest.raises(ConfigError, match="is no number of examples in it, which has examples"):
        imported()
    assert update_of(imported({"reply.examples_key": "examples"})).num_examples == 2
    assert update_of(imported({"reply.examples": 5}, out="other")).num_examples == 5


def test_a_learning_rate_comes_from_a_config(wire, step, imported):
    wire("sent", 1, 77, {"arrays": step.before}, config={"lr": RATE})
    wire("received", 1, 77, {"arrays": step.after}, metrics=METRICS)
    keyed = {"training.learning_rate": None, "training.learning_rate_key": "lr"}
    assert imported(keyed).run.captures.about(Key(1, 0)).knowledge.learning_rate == RATE
    with pytest.raises(ConfigError, match="'eta' is no number above 0"):
        imported(keyed | {"training.learning_rate_key": "eta"}, out="other")


def test_steps_are_counted_from_examples_epochs_and_accumulation(wire, step, imported):
    wire("sent", 1, 77, {"arrays": step.before})
    wire("received", 1, 77, {"arrays": step.after}, metrics={"num-examples": 9})
    outcome = imported({"training.local_epochs": 3, "training.accumulate": 2})
    # 5 batches make 3 steps.
    assert outcome.run.captures.about(Key(1, 0)).knowledge.local_steps == 9
    assert stored(outcome.run).local_training.batch_size == 4
    outcome = imported({"training.local_steps": 7}, out="other")
    assert outcome.run.captures.about(Key(1, 0)).knowledge.local_steps == 7


def test_training_is_said_in_the_words_of_an_experiment(wire, step, imported, tmp_path):
    wire("sent", 1, 77, {"arrays": step.before})
    wire("received", 1, 77, {"arrays": step.after}, metrics=METRICS)
    words = {"momentum": 0.5, "max_grad_norm": 1.0, "precision": "bfloat16", "local_epochs": 2}
    words |= {"schedule": "cosine", "schedule_rounds": 2}  # half of the rate in the first round
    held_out = tmp_path / "others.jsonl"
    held_out.write_text(json.dumps({"text": "a text\nof two lines"}) + "\n")
    changes = {f"training.{name}": value for name, value in words.items()}
    outcome = imported(changes | {"truth.held_out": str(held_out)})
    known = outcome.run.captures.about(Key(1, 0)).knowledge
    recipe = Recipe(momentum=0.5, max_grad_norm=1.0, precision="bfloat16")
    assert (known.recipe, known.local_epochs) == (recipe, 2)
    assert known.learning_rate == pytest.approx(RATE / 2)
    assert stored(outcome.run).local_training.recipe == recipe
    assert len(outcome.run.read_json("held_out.json")["sequences"]) == 1


@pytest.mark.parametrize(
    ("optimiser", "steps", "payload"),
    some(product(["sgd", "adamw"], [1, 4], ["weights", "delta"]), every=3),
)
def test_weight_decay_is_taken_out_to_the_last_bit(
    optimiser, steps, payload, wire, imported, folder, texts
):
    kind = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[optimiser]
    model = task.get_model(folder).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = DataCollatorWithPadding(tokenizer)([{**tokenizer(texts[0]), "labels": 1}])
    model.bert.pooler.dense.weight.requires_grad_(False)  # what is not trained does not decay
    stepper = kind(model.parameters(), lr=0.01, weight_decay=0.1)
    for _ in range(steps):
        stepper.zero_grad()
        model(**batch).loss.backward()
        stepper.step()
    after = model.state_dict()
    if payload == "delta":
        after = {name: value - before[name] for name, value in after.items()}
    wire("sent", 1, 77, {"arrays": before})
    wire("received", 1, 77, {"arrays": after}, metrics={"num-examples": 1})
    outcome = imported(
        {
            "training.optimiser": optimiser,
            "training.learning_rate": 0.01,
            "training.weight_decay": 0.1,
            "training.local_steps": steps,
            "reply.payload": payload,
        }
    )
    assert "bert.pooler.dense.weight" not in update_of(outcome).tensors
    rows = update_of(outcome).tensors["bert.embeddings.word_embeddings.weight"]
    used = set(batch["input_ids"].flatten().tolist())
    assert set(rows.any(1).nonzero().flatten().tolist()) == used
    assert outcome.run.captures.about(Key(1, 0)).knowledge.recipe == Recipe(
        optimiser=optimiser, weight_decay=0.1
    )


def truth_file(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_truth_can_be_added_later(wire, step, imported, tmp_path, model):
    wire("sent", 1, 77, {"arrays": step.before})
    wire("received", 1, 77, {"arrays": step.after}, metrics=METRICS)
    first = imported()
    assert first.truths == 0
    assert any("no truth" in remark for remark in first.remarks)
    before = (first.run.path / "captures" / "r0001-c00.safetensors").stat().st_mtime_ns
    line = {"round": 1, "node": 77, "texts": step.texts, "labels": [0, 1]}
    other = {"round": 9, "node": 77, "texts": step.texts, "labels": [0, 1]}
    file = truth_file(tmp_path / "truth.jsonl", line, other)
    held_out = tmp_path / "others.txt"
    held_out.write_text("a text that nobody has\n\n")
    again = imported({"truth.file": file, "truth.max_length": 6, "truth.held_out": str(held_out)})
    assert again.truths == 1
    assert "1 lines of" in " ".join(again.remarks)
    truth = read_truth(again.run, Key(1, 0))
    ids = model.encode(step.texts)
    assert truth.sequences == tuple((*text_ids[:5], text_ids[-1]) for text_ids in ids)
    assert truth.labels == (0, 1)
    (held,) = again.run.read_json("held_out.json")["sequences"]
    assert held[:5] == model.encode(["a text that nobody has"])[0][:5]
    assert (first.run.path / "captures" / "r0001-c00.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("scored", [True, False])
def test_the_folder_of_a_tap_is_audited_in_one_command(wire, step, tmp_path, monkeypatch, scored):
    monkeypatch.setattr(hiring, "hire", lambda *_: nullcontext([tiny.Here()]))
    wire("sent", 1, 77, {"arrays": step.before})
    wire("received", 1, 77, {"arrays": step.after}, metrics=METRICS)
    line = {"round": 1, "node": 77, "texts": step.texts, "labels": [0, 1]}
    attack = {"attack": [{"kind": "auto", "seconds": 2.0}]}
    truth = {"truth.file": truth_file(tmp_path / "truth.jsonl", line)} if scored else {}
    about_file(tmp_path / "mine" / "about.toml", attack | truth)
    status, text, errors = tiny.call("audit", str(tmp_path / "mine"))
    assert ("What can be read was not measured" in text) is not scored
    assert ("membership: what clients trained on is not here" in text) is not scored
    if scored:
        assert (status, errors) == (0, "")
    else:
        assert (status, errors.count("\n")) == (1, 1)
        assert "name it in truth.file" in errors
    assert (tmp_path / "mine-run" / "report.html").exists()


def test_the_server_of_an_app_can_be_malicious(wire, step, imported, model):
    """Its user says so; attacks that read what was planted are tried then."""
    public = [Example(tuple(ids), 0) for ids in model.encode([f"note {i}" for i in range(9)])]
    changes = Imprint().broadcast(model, targeted=True, public=public, rng=stream(0))
    wire("sent", 1, 77, {"arrays": {**step.before, **changes}})
    wire("received", 1, 77, {"arrays": step.gradient}, metrics=METRICS)
    settings = {"reply.payload": "gradient", "attack": [{"kind": "imprint"}]}
    with pytest.raises(ConfigError, match="needs a model that was imprinted"):
        imported(settings)
    run = imported(settings | {"server": {"mode": "imprint", "rounds": [1]}}).run
    assert run.captures.read_capture(Key(1, 0)).knowledge.server_mode == "imprint"
    assert malicious_server(stored(run)).endswith("says its user")
    with pytest.raises(ConfigError, match="inconsistent"):
        imported(settings | {"server": {"mode": "inconsistent"}}, out="other")


TRUTHS = {
    "no table": (["[1]"], "line 1"),
    "no json": (["{"], "is not JSON"),
    "a label too large": ([{"labels": [0, 2]}], "a label from 0 to 1"),
    "too few labels": ([{"labels": [0]}], "1 labels for 2 texts"),
    "too few texts": ([{"texts": ["a"], "labels": [0]}], "1 texts, but its 'num-examples' is 2"),
    "no labels": ([{"labels": []}], "give each text a label"),
    "an empty text": ([{"texts": [" ", "a"]}], "a text is empty"),
    "half of a character": ([{"texts": ["a \ud83d", "b"]}], "line 1: "),
    "both": ([{"client": 0}], "one of node and client"),
    "twice": ([{}, {}], "two lines are of round 1 and client 0"),
}


@pytest.mark.parametrize("case", TRUTHS)
def test_truth_that_is_none_is_refused_without_its_texts(case, wire, step, imported, tmp_path):
    lines, complaint = TRUTHS[case]
    wire("sent", 1, 77, {"arrays": step.before})
    wire("received", 1, 77, {"arrays": step.after}, metrics=METRICS)
    right = {"round": 1, "node": 77, "texts": ["my secret", "another"], "labels": [0, 1]}
    file = tmp_path / "truth.jsonl"
    text = [line if isinstance(line, str) else json.dumps(right | line) for line in lines]
    file.write_text("\n".join(text))
    with pytest.raises(ConfigError) as refused:
        imported({"truth.file": str(file)})
    assert complaint in str(refused.value)
    assert "secret" not in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_count_of_batches_is_mended_with_the_number_of_texts(wire, step, imported, tmp_path):
    """As in Flower's examples, whose `num-examples` is len(trainloader)."""
    wire("sent", 1, 77, {"arrays": step.before})
    wire("received", 1, 77, {"arrays": step.after}, metrics={"num-examples": 1})
    line = {"round": 1, "node": 77, "texts": step.texts, "labels": [0, 1]}
    file = truth_file(tmp_path / "truth.jsonl", line)
    with pytest.raises(ConfigError, match=r"2 texts, but its 'num-examples' is 1: .* set reply"):
        imported({"truth.file": file})
    outcome = imported({"truth.file": file, "reply.examples": 2})
    assert (outcome.truths, update_of(outcome).num_examples) == (1, 2)


def test_another_run_is_not_written_over(wire, step, imported):
    wire("sent", 1, 77, {"arrays": step.before})
    wire("received", 1, 77, {"arrays": step.after}, metrics=METRICS)
    imported()
    with pytest.raises(ConfigError, match="holds another run"):
        imported({"training.learning_rate": 0.1})


def test_clients_can_say_their_number(wire, step, imported):
    for node in (77, 78):
        wire("sent", 1, node, {"arrays": step.before})
    _share_files(wire.tapped)
    for node, client in ((77, 5), (78, 2)):
        wire("received", 1, node, {"arrays": step.after}, metrics=METRICS | {"id": client})
    outcome = imported({"reply.client_key": "id"})
    assert outcome.run.captures.all_keys() == [Key(1, 2), Key(1, 5)]
    assert outcome.run.info()["nodes"] == {"5": "77", "2": "78"}
    with pytest.raises(ConfigError, match="no number of a client"):
        imported({"reply.client_key": "name"}, out="other")


BAD_CLIENTS = {
    "a fraction": (1.5, "is no number of a client, from 0 to 999,999, in it", 3),
    "negative": (-1, "is no number of a client, from 0 to", 3),
    "too large": (10**6, "is no number of a client, from 0 to", 3),
    "no number": ("x", "is no number of a client, from 0 to", 3),
    "another's": (0, "makes each of the nodes 70, 73 client 0: leave the key out", 2),
}


@pytest.mark.parametrize("case", some(BAD_CLIENTS, every=2))
def test_a_node_that_says_a_wrong_client_is_left_out_and_the_others_stay(
    case, wire, step, imported
):
    stated_client, reason, updates = BAD_CLIENTS[case]
    for node in range(70, 74):
        wire("sent", 1, node, {"arrays": step.before})
    _share_files(wire.tapped)
    for node, client in ((70, 0), (71, 1), (72, 2), (73, stated_client)):
        wire("received", 1, node, {"arrays": step.after}, metrics=METRICS | {"id": client})
    outcome = imported({"reply.client_key": "id"})
    assert outcome.updates == updates
    assert f"round 1, node 73: reply.client_key = 'id' {reason}" in outcome.left_out[-1]
    assert len(outcome.left_out) == 4 - updates


def test_a_reply_counted_otherwise_than_its_truth_is_left_out_and_the_others_stay(
    wire, step, imported, tmp_path
):
    for node in (77, 78):
        wire("sent", 1, node, {"arrays": step.before})
    _share_files(wire.tapped)
    for node, count in ((77, 2), (78, 10_000)):
        wire("received", 1, node, {"arrays": step.after}, metrics={"num-examples": count})
    lines = [{"round": 1, "node": n, "texts": step.texts, "labels": [0, 1]} for n in (77, 78)]
    outcome = imported({"truth.file": truth_file(tmp_path / "truth.jsonl", *lines)})
    assert (outcome.updates, outcome.truths) == (1, 1)
    (reason,) = outcome.left_out
    assert reason.startswith("round 1, node 78: in ")
    assert "there are 2 texts, but its 'num-examples' is 10000" in reason


@pytest.mark.parametrize(
    "changes", [{"training.local_steps": 8}, {"reply.payload": "gradient"}], ids=str
)
def test_no_client_trains_on_more_than_its_steps_have_room_for(changes, wire, step, imported):
    most = 2 * changes.get("training.local_steps", 1)
    for node in (77, 78):
        wire("sent", 1, node, {"arrays": step.before})
    _share_files(wire.tapped)
    for node, count in ((77, most), (78, most + 1)):
        wire("received", 1, node, {"arrays": step.gradient}, metrics={"num-examples": count})
    outcome = imported({"attack": [], **changes})
    assert update_of(outcome).num_examples == most
    assert f"steps of 2 have {most} at most: set reply.examples" in outcome.left_out[0]


def test_two_spellings_of_a_parameter_have_one_value(wire, step, imported):
    other = {"module.classifier.bias": torch.ones(2)}
    for node in (77, 78):
        wire("sent", 1, node, {"arrays": step.before})
    _share_files(wire.tapped)
    same = {"module.classifier.bias": step.after["classifier.bias"]}
    wire("received", 1, 77, {"arrays": {**step.after, **same}}, metrics=METRICS)
    wire("received", 1, 78, {"arrays": {**step.after, **other}}, metrics=METRICS)
    outcome = imported()
    assert near(update_of(outcome).tensors, step.gradient)
    assert outcome.left_out == [
        "round 1, node 78: 'classifier.bias' and 'module.classifier.bias' both mean "
        "classifier.bias, and differ"
    ]


def test_a_round_beyond_all_rounds_is_a_damaged_line(wire, step, imported):
    wire("sent", 1, 77, {"arrays": step.before})
    wire("received", 1, 77, {"arrays": step.after}, metrics=METRICS)
    path = wire.tapped.path / "messages.jsonl"
    lines = path.read_text().splitlines()
    late = [line.replace('"round": 1', f'"round": {10**6}') for line in lines]
    assert late != lines
    path.write_text("".join(line + "\n" for line in [*lines, *late]))
    outcome = imported()
    assert outcome.run.captures.all_keys() == [Key(1, 0)]
    assert [line.partition(" (")[0] for line in outcome.left_out] == [
        "line 3 of messages.jsonl is damaged",
        "line 4 of messages.jsonl is damaged",
    ]


@pytest.mark.parametrize("key", ["truth.file", "truth.held_out"])
def test_a_pipe_that_a_stranger_names_is_not_waited_for(wire, step, imported, tmp_path, key):
    wire("sent", 1, 77, {"arrays": step.before})
    wire("received", 1, 77, {"arrays": step.after}, metrics=METRICS)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FedleakError, match="it is a pipe, and no plain file"):
        imported({key: str(tmp_path / "pipe")})
    os.mkfifo(tmp_path / "mine" / "about.toml")
    with pytest.raises(ConfigError, match="it is a pipe, and no plain file"):
        load_about(tmp_path / "mine" / "about.toml")


def test_held_out_texts_that_are_not_utf_8_are_refused_in_a_line(wire, step, imported, tmp_path):
    wire("sent", 1, 77, {"arrays": step.before})
    wire("received", 1, 77, {"arrays": step.after}, metrics=METRICS)
    (tmp_path / "others.txt").write_bytes("é".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"truth\.held_out = '.*' is not UTF-8: save it as UTF-8"):
        imported({"truth.held_out": str(tmp_path / "others.txt")})


def test_rounds_and_clients_may_be_missing(wire, step, imported, tmp_path):
    for round, node in ((1, 77), (1, 78), (3, 78), (3, 79)):
        wire("sent", round, node, {"arrays": step.before})
    _share_files(wire.tapped)
    for round, node in ((1, 77), (3, 78), (3, 78)):
        wire("received", round, node, {"arrays": step.after}, metrics=METRICS)
    wire.tapped.complain(Problem(round=3, node=79, reason="the client failed: \x1b[31m"))
    with (tmp_path / "mine" / "messages.jsonl").open("ab") as file:
        file.write(b"{torn}\n")
    outcome = imported()
    assert outcome.run.captures.all_keys() == [Key(1, 0), Key(3, 1)]
    left_out = "\n".join(outcome.left_out)
    assert "line 8 of messages.jsonl is damaged" in left_out
    assert "round 3, node 79: the client failed: \\x1b[31m" in left_out
    assert "round 3, node 78: it is a second one" in left_out
    assert "round 1, node 78: no answer came" in left_out
    assert len(outcome.left_out) == 4


def test_a_model_of_its_own_is_left_out(wire, step, imported):
    for node, model in ((77, step.before), (78, step.after)):
        wire("sent", 1, node, {"arrays": model})
        wire("received", 1, node, {"arrays": step.after}, metrics=METRICS)
    assert "sent another model" in imported().left_out[0]


def test_clients_of_secure_aggregation_answer_each_stage(wire, step, imported):
    """Flower's SecAgg+ asks a client four times; one answer says how much it has."""
    secret, examples = {"pk1": {"base64": ""}}, {"num_examples": 2}
    wire("sent", 1, 77, {"arrays": step.before})
    wire("received", 1, 77, {}, secaggplus_configs=secret)
    wire("received", 1, 77, {"fitres.parameters": {}}, **{"fitres.num_examples": examples})
    wire("received", 1, 77, {}, secaggplus_configs=secret)
    wire("sent", 2, 77, {"arrays": step.after})
    with pytest.raises(ConfigError, match=r"masked by secure aggregation .*payload = 'sum'"):
        imported()
    outcome = imported({"reply.payload": "sum", "reply.examples_key": "num_examples"})
    assert update_of(outcome, Key(1, EVERYONE)).num_examples == 2
    assert near(update_of(outcome, Key(1, EVERYONE)).tensors, step.gradient)


def test_a_sum_is_how_a_round_changed_the_model(wire, step, imported):
    masked = {"masked": {"0": torch.zeros(5, dtype=torch.long)}}
    for node in (77, 78):
        wire("sent", 1, node, {"arrays": step.before})
    for node in (77, 78):
        wire("received", 1, node, masked, metrics=METRICS)
    wire("evaluated", 1, 77, {"arrays": step.after})
    outcome = imported({"reply.payload": "sum"})
    assert outcome.run.captures.all_keys() == [Key(1, EVERYONE)]
    update = update_of(outcome, Key(1, EVERYONE))
    assert near(update.tensors, step.gradient)
    assert update.num_examples == 4
    assert not outcome.left_out


def test_a_sum_whose_model_nobody_got_is_left_out(wire, step, imported):
    wire("sent", 1, 77, {"arrays": step.before})
    wire("received", 1, 77, {}, metrics=METRICS)
    with pytest.raises(ConfigError, match="was sent to nobody"):
        imported({"reply.payload": "sum"})


ABOUTS = {
    "training.learning_rate": (None, "one of learning_rate and learning_rate_key"),
    "training.batch_size": (None, "training.batch_size is missing"),
    "training.optimizer": ("adam", r"\[training\] unknown key 'optimizer': did you mean 'optimis"),
    "reply.payload": ("weight", "reply.payload = 'weight'"),
    "model.name": (None, "model.name is missing"),
}


@pytest.mark.parametrize("key", ABOUTS)
def test_a_file_that_is_wrong_is_refused_in_one_line(key, tmp_path):
    value, complaint = ABOUTS[key]
    with pytest.raises(ConfigError, match=complaint) as refused:
        load_about(about_file(tmp_path / "about.toml", {key: value}))
    assert "\n" not in str(refused.value)


def test_another_model_is_refused_with_the_nearest_names(wire, step, imported):
    wire("sent", 1, 77, {"arrays": OrderedDict({"transformer.wte.weight": torch.zeros(3, 2)})})
    with pytest.raises(ConfigError, match=r"'transformer\.wte\.weight'.*nearest|names are like"):
        imported()


def test_the_command_says_what_it_made_and_exits_by_what_is_missing(wire, step, tmp_path):
    wire("sent", 1, 77, {"arrays": step.before})
    wire("sent", 1, 78, {"arrays": step.before})
    _share_files(wire.tapped)
    wire("received", 1, 77, {"arrays": step.after}, metrics=METRICS)
    about_file(tmp_path / "mine" / "about.toml")
    status, out, errors = tiny.call("import", str(tmp_path / "mine"))
    assert status == 1
    assert out.startswith("1 updates of 1 clients in 1 rounds, 0 with the truth: ")
    assert "1 left out of the run: round 1, node 78: no answer came" in errors
    assert Run(tmp_path / "mine-run").exists()
    status, _, errors = tiny.call("run", str(tmp_path / "mine-run" / "run.json"))
    assert (status, "was imported" in errors) == (2, True)
    status, out, _ = tiny.call("explain", str(tmp_path / "mine-run" / "run.json"))
    assert (status, "can work" in out) == (0, True)
