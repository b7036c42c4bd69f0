"""The Python API: updates of one's own, in every form that a training loop has them."""

import copy
import doctest
import json
import subprocess
import sys
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import peft
import pytest
import torch
from tiny import DLG, tables, toml
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fedleak
from fedleak.attacks import replay
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.models import CAUSAL_LM, CLASSIFICATION, parameter_names
from fedleak.models.adoption import adopt
from fedleak.running import own_update
from fedleak.running.own_update import observing
from fedleak.store.records import LEAKAGE
from fedleak.store.run import Run

PEFT = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing. is deprecated:FutureWarning",
    "ignore:fan_in_fan_out is set to False:UserWarning",
)
"""What peft says of the transformers models that it wraps."""

LABELS = [1, 0]
NOTES = ["the patient has a fever", "my sister lost her job"]


@pytest.fixture(scope="module")
def own(small) -> SimpleNamespace:
    """A plain model, its tokenizer and a batch, before loss.backward()."""
    return plain(small("bert", num_labels=2, layers=3, width=64))


def plain(model: Any, texts: list[str] = NOTES) -> SimpleNamespace:
    """Returns what a user has of a model: a module and a tokenizer, and a loss of some texts."""
    module, tokenizer = copy.deepcopy(model.module), copy.deepcopy(model.tokenizer)
    end = tokenizer.eos_token if model.task == CAUSAL_LM else ""
    tokenizer.padding_side = "right"
    batch = tokenizer([text + end for text in texts], padding=True, return_tensors="pt")
    batch.pop("token_type_ids", None)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    labels = labels if model.task == CAUSAL_LM else torch.tensor(LABELS[: len(texts)])

    def loss(network: nn.Module = module) -> torch.Tensor:
        return network(**batch, labels=labels).loss

    return SimpleNamespace(module=module, tokenizer=tokenizer, batch=batch, loss=loss)


def gradients(own: SimpleNamespace, module: nn.Module | None = None) -> dict[str, torch.Tensor]:
    module = module or own.module
    module.zero_grad()
    own.loss(module).backward()
    grads = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return grads


def attack(own: SimpleNamespace, update: Any, **options: Any) -> fedleak.AttackResult:
    given = {"model": own.module, "tokenizer": own.tokenizer, "num_examples": 2, "kind": "keyspan"}
    given |= options
    facts = {name: given.pop(name) for name in given.keys() - signature(fedleak.attack).parameters}
    return fedleak.attack(update, **{"sent": fedleak.SentUpdate(**facts)} | given)


class Wrapper(nn.Module):
    """A module of somebody's own around a model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"backbone": module})


def test_the_examples_in_the_docstrings_are_true():
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    for module in (own_update, parameter_names):
        assert doctest.testmod(module, optionflags=flags).failed == 0


def test_importing_fedleak_imports_nothing_else():
    code = "import sys, fedleak; dir(fedleak); print(*{n.split('.')[0] for n in sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "numpy", "pydantic", "flwr"} & set(done.stdout.split())


def test_a_public_name_is_there_and_another_is_not():
    assert set(fedleak.__all__) <= set(dir(fedleak))
    assert all(getattr(fedleak, name) is not None for name in fedleak.__all__)
    with pytest.raises(AttributeError, match="no attribute 'atack'"):
        fedleak.atack  # noqa: B018


def forms(own: SimpleNamespace) -> dict[str, Any]:
    """The same gradient in the forms that training loops have it in."""
    named = gradients(own)
    whole = copy.deepcopy(own.module)
    for name, parameter in whole.named_parameters():
        parameter.grad = named[name]
    wrappers = {
        "DistributedDataParallel": "module.",
        "torch.compile": "_orig_mod.",
        "Opacus": "_module.",
        "compiled, then distributed": "module._orig_mod.",
        "peft": "base_model.model.",
        "a module of one's own": "net.backbone.",
    }
    inside = {
        n.replace(".layer.", "._checkpoint_wrapped_module.layer."): t for n, t in named.items()
    }
    return {
        "by name": named,
        "a module": whole,
        "in order": torch.autograd.grad(own.loss(), list(own.module.parameters())),
        "NumPy arrays": [tensor.numpy() for tensor in named.values()],
        "None where nothing was sent": named | {"classifier.bias": None},
        "names changed inside": inside,
        "half of a name": {f"client.7.{name}": tensor for name, tensor in named.items()},
        **{wrapper: {word + n: t for n, t in named.items()} for wrapper, word in wrappers.items()},
    }


def test_a_gradient_is_read_in_every_form(own):
    results = {name: attack(own, update) for name, update in forms(own).items()}
    for name, result in results.items():
        assert sorted(result.texts) == sorted(NOTES), name
        assert result.verified, name


@pytest.fixture
def distributed(tmp_path):
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield DistributedDataParallel
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_a_wrapped_model_is_found(own, distributed):
    update = gradients(own)
    for wrap in (torch.compile, distributed, Wrapper):
        result = attack(own, update, model=wrap(own.module))
        assert (sorted(result.texts), result.verified) == (sorted(NOTES), True)


def test_the_model_stays_as_it_is(own):
    module, tokenizer = own.module.train(), own.tokenizer
    module.bert.pooler.dense.bias.requires_grad_(False)
    own.loss().backward()
    handle = module.register_forward_hook(lambda *_: None)

    def state() -> list[Any]:
        parameters = [
            (n, p.detach().clone(), p.grad, p.requires_grad) for n, p in module.named_parameters()
        ]
        modes = [(n, submodule.training) for n, submodule in module.named_modules()]
        return [parameters, modes, copy.deepcopy(module.config.to_dict()), dict(vars(tokenizer))]

    before, random = state(), torch.get_rng_state()
    attack(own, module)
    after = state()
    for (name, value, grad, trained), (_, value2, grad2, trained2) in zip(
        before[0], after[0], strict=True
    ):
        assert torch.equal(value, value2), name
        assert grad is grad2, name
        assert trained == trained2, name
    assert before[1:3] == after[1:3]
    assert str(before[3]) == str(after[3])
    assert torch.equal(random, torch.get_rng_state())
    handle.remove()
    module.bert.pooler.dense.bias.requires_grad_(True)
    module.eval().zero_grad()


@PEFT
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
@pytest.mark.parametrize("adapted", [False, True])
def test_a_copy_computes_what_the_original_does(small, family, adapted):
    """Also with adapters that are at work, under a name of somebody's own."""
    model = small(family, layers=2)
    user = plain(model)
    module = user.module
    if adapted:
        settings = peft.LoraConfig(r=4, task_type="SEQ_CLS", init_lora_weights=False)
        module = peft.get_peft_model(module, settings, adapter_name="mine").eval()
    own = adopt(module, user.tokenizer)
    ids, mask = user.batch["input_ids"], user.batch["attention_mask"]
    logits = own.family.logits(own.module, mask, ids_BT=ids, embeds_BTD=None)
    expected = module(**user.batch).logits
    assert torch.allclose(logits, expected, atol=1e-5)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert sum(p.numel() for p in own.trained().values()) == trained


def test_no_weight_is_drawn_for_a_copy(own, monkeypatch):
    """To draw GPT-2's takes longer than a client's step."""
    for name in ("normal_", "uniform_"):
        monkeypatch.setattr(torch.Tensor, name, lambda *args, **kwargs: pytest.fail("drawn"))
    adopt(own.module, own.tokenizer)


@PEFT
def test_adapters_are_matched_under_every_name_that_peft_gives_them(small):
    user = plain(small("bert", layers=2))
    settings = peft.LoraConfig(r=4, task_type="SEQ_CLS", init_lora_weights=False)
    module = peft.get_peft_model(user.module, settings, adapter_name="mine").eval()
    trained = gradients(user, module)
    saved = peft.get_peft_model_state_dict(module, adapter_name="mine")
    own = adopt(module, user.tokenizer)
    for names in (trained, saved):
        assert set(parameter_names.matched(names, own.module).values()) == set(own.trained())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_and_not_proved(own, dtype):
    module = copy.deepcopy(own.module).to(dtype)
    result = attack(own, gradients(own, module), model=module)
    assert set(result.texts) & set(NOTES)
    assert not result.verified


@pytest.mark.parametrize("sent", ["delta", "weights"])
def test_one_step_of_training_is_read(own, sent):
    after = copy.deepcopy(own.module)
    own.loss(after).backward()
    torch.optim.SGD(after.parameters(), lr=0.1).step()
    before = own.module.state_dict()
    delta = {name: value - before[name] for name, value in after.state_dict().items()}
    update = delta if sent == "delta" else after
    result = attack(own, update, payload=sent, learning_rate=0.1)
    assert sorted(result.texts) == sorted(NOTES)


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_decay_is_taken_out_of_a_delta(own, optimiser, dtype):
    kinds = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    after = copy.deepcopy(own.module)
    step = kinds[optimiser](after.parameters(), lr=1e-3, weight_decay=0.1)
    for _ in range(2):
        step.zero_grad()
        own.loss(after).backward()
        step.step()
    before = own.module.state_dict()
    delta = {n: (value - before[n]).to(dtype) for n, value in after.state_dict().items()}
    options = {"payload": "delta", "learning_rate": 1e-3, "local_steps": 2, "kind": "probes"}
    used = {word for text in NOTES for word in text.split()}
    with_decay = attack(own, delta, optimiser=optimiser, weight_decay=0.1, **options)
    assert used <= set(with_decay.words)
    assert len(with_decay.words) < 2 * len(used)
    without_decay = attack(own, delta, optimiser=optimiser, **options)
    assert len(without_decay.words) > 10 * len(used), "every row has moved"
    if optimiser == "adamw":
        facts = ("dropout", "learning_rate", "local_epochs", "local_steps", "recipe")
        assert with_decay.answer.knows == facts


def test_what_was_not_trained_did_not_decay(own):
    parameters = dict(own.module.named_parameters())
    delta = {
        "bert.pooler.dense.weight": torch.zeros_like(parameters["bert.pooler.dense.weight"]),
        "classifier.bias": torch.ones_like(parameters["classifier.bias"]),
    }
    seen = observing.observe(
        delta,
        adopt(own.module, own.tokenizer),
        fedleak.SentUpdate(
            num_examples=1,
            payload="delta",
            learning_rate=0.1,
            optimiser="adamw",
            weight_decay=0.1,
        ),
    )
    assert not seen.update.tensors["bert.pooler.dense.weight"].any()


def test_after_adam_nothing_is_proved(own):
    after = copy.deepcopy(own.module)
    own.loss(after).backward()
    torch.optim.Adam(after.parameters(), lr=1e5, eps=1e6).step()  # nearly plain SGD
    before = own.module.state_dict()
    delta = {name: value - before[name] for name, value in after.state_dict().items()}
    options = {"payload": "delta", "learning_rate": 0.1}
    assert sorted(attack(own, delta, **options).texts) == sorted(NOTES)
    assert not attack(own, delta, optimiser="adam", **options).verified


@PEFT
def test_steps_are_made_again_in_the_words_of_an_experiment(small):
    """The loop of a user: adapters, epochs, momentum, a schedule, clipping, autocast, responses."""
    texts = ["Q: who?\nA: my sister", "Q: why?\nA: nobody knows it"]
    own = plain(small("llama", CAUSAL_LM), texts)
    module = peft.get_peft_model(own.module, peft.LoraConfig(r=4, init_lora_weights=False)).eval()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    labels = own.batch["input_ids"].masked_fill(own.batch["attention_mask"] == 0, -100)
    (template,) = {tuple(own.tokenizer.encode("\nA:", add_special_tokens=False)[2:])}
    for row in labels:
        places = row.unfold(0, len(template), 1).eq(torch.tensor(template)).all(1).nonzero()
        row[: int(places[-1]) + len(template)] = -100
    trained = [p for p in module.parameters() if p.requires_grad]
    optimiser = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    for step, row in enumerate((1, 0, 0, 1)):
        batch = {name: values[row : row + 1] for name, values in own.batch.items()}
        optimiser.param_groups[0]["lr"] = 0.05 * (1 - step / 4)
        with torch.autocast("cpu", torch.bfloat16):
            loss = module(**batch, labels=labels[row : row + 1]).loss
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimiser.step()
    delta = {
        name: value - before[name] for name, value in module.state_dict().items() if "lora" in name
    }
    module.load_state_dict(before)
    sent = {"num_examples": 2, "payload": "delta", "learning_rate": 0.05, "batch_size": 1}
    sent |= {"local_steps": 4, "local_epochs": 2, "momentum": 0.9, "max_grad_norm": 0.5}
    sent |= {
        "schedule": "linear",
        "precision": "bfloat16-mixed",
        "response_template": "A:",
        "dropout": False,
    }

    def proved(**other):
        sent_update = fedleak.SentUpdate(**sent | other)
        learned = {"response_template": sent_update.response_template}
        model = adopt(module, own.tokenizer, **learned)
        ids = [tuple(ids) for ids in model.encode(texts)]
        return replay.replay(model, ids, observing.observe(delta, model, sent_update)).verified

    assert proved()
    for wrong in (
        {"momentum": 0.5},
        {"schedule": "constant"},
        {"response_template": ""},
        {"max_grad_norm": None},
    ):
        assert not proved(**wrong), wrong


def test_the_squared_loss_is_one_of_fedleaks(own):
    logits = own.module(**own.batch).logits
    loss = nn.functional.mse_loss(logits, nn.functional.one_hot(torch.tensor(LABELS)).float())
    update = torch.autograd.grad(loss, list(own.module.parameters()))
    assert attack(own, update, loss="squared").verified
    assert not attack(own, update).verified


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_next_token_training_is_read(family, gpt2_tiny, llama_tiny):
    user = plain({"gpt2": gpt2_tiny, "llama": llama_tiny}[family])
    update = gradients(user)
    if family == "gpt2":  # a state_dict has the tied layer under both of its names
        update["lm_head.weight"] = update["transformer.wte.weight"]
    result = attack(user, update, kind="dager")
    assert (sorted(result.texts), result.verified) == (sorted(NOTES), True)


def test_what_was_frozen_since_can_be_recomputed(own):
    update = gradients(own)
    module = copy.deepcopy(own.module).requires_grad_(False)
    assert attack(own, update, model=module).verified


def test_dropout_is_what_the_module_does_now(own):
    update = gradients(own)
    assert attack(own, update).verified
    module = copy.deepcopy(own.module).train()
    assert not attack(own, update, model=module).verified
    assert attack(own, update, model=module, dropout=False).verified


def test_granted_facts_are_in_the_order_of_an_observation(own, monkeypatch):
    seen: list[Any] = []

    def look(self: object, observation: Any, *_: Any, **__: Any) -> Reconstruction:
        seen.append(observation.knowledge)
        return Reconstruction.none(Status.ABSTAINED, "looked only")

    monkeypatch.setattr("fedleak.attacks.subspace.keyspan.Keyspan.__call__", look)
    knows = {"lengths": [5, 9], "labels": [0, 1], "batch_size": 2}
    result = attack(own, gradients(own), **knows)
    assert (seen[0].lengths, seen[0].labels) == ((9, 5), (1, 0))
    assert result.answer.granted == ("batch_size", "labels", "lengths")
    assert str(result).splitlines()[1] == "  looked only"


def test_a_crash_is_an_answer(own, monkeypatch):
    def crash(*_: object, **__: object) -> None:
        raise RuntimeError("no \x1b[31mluck")

    monkeypatch.setattr("fedleak.attacks.subspace.keyspan.Keyspan.__call__", crash)
    result = attack(own, gradients(own))
    assert result.status == Status.FAILED
    assert result.reason == "RuntimeError: no \\x1b[31mluck"
    assert result.texts == ()


WRONG = {
    "a name": ({"bert.pooler.dense.wieght": torch.ones(1)}, {}, "bert.pooler.dense.weight, "),
    "control characters": ({"a\x1b[31m\n": torch.ones(1)}, {}, r"no parameter 'a\x1b[31m\n'"),
    "a name of 10,000 characters": ({"x" * 10**4: torch.ones(1)}, {}, "no parameter 'xxx"),
    "a number for a name": ({5: torch.ones(1)}, {}, "a name that is int"),
    "a shape": ({"classifier.bias": torch.ones(3)}, {}, "has the shape [3], and"),
    "a huge shape": ({"classifier.bias": torch.ones(1).expand(10**9, 10**9)}, {}, "the shape ["),
    "whole numbers": ({"classifier.bias": torch.ones(2, dtype=int)}, {}, "floating-point"),
    "not a number": ({"classifier.bias": torch.tensor([0, torch.nan])}, {}, "is finite"),
    "no numbers": ({"classifier.bias": torch.ones(2, device="meta")}, {}, "meta tensor"),
    "a list in a dict": ({"classifier.bias": [1.0, 2.0]}, {}, "is list, not a tensor"),
    "zeros": ({"classifier.bias": torch.zeros(2)}, {}, "zero everywhere"),
    "nothing": ({}, {}, "holds no parameter"),
    "a text": ("update", {}, "the update is str"),
    "too few tensors": ([torch.ones(2)], {}, "has 1 tensors, and the model has 57 parameters"),
    "a module before backward": (nn.Linear(2, 2), {}, "call loss.backward() first"),
    "a module as delta": (
        nn.Linear(2, 2),
        {"payload": "delta", "learning_rate": 1.0},
        "give payload='weights'",
    ),
    "twice the same": (
        {"classifier.bias": torch.ones(2), "module.classifier.bias": torch.zeros(2)},
        {},
        "two names",
    ),
    "a kind of update": ({}, {"payload": "dleta"}, "did you mean 'delta'?"),
    "no rate": (
        {"classifier.bias": torch.ones(2)},
        {"payload": "delta"},
        "learning_rate is missing",
    ),
    "a rate": (
        {"classifier.bias": torch.ones(2)},
        {"payload": "delta", "learning_rate": -1.0},
        "learning_rate = -1.0: input should be greater than 0",
    ),
    "an attack": ({}, {"kind": "dagr"}, "did you mean 'dager'?"),
    "a setting": ({}, {"settings": {"beem": 4}}, "did you mean 'beam'?"),
    "a rate in words": (
        {"classifier.bias": torch.ones(2)},
        {"payload": "delta", "learning_rate": "0.1"},
        "learning_rate = '0.1'",
    ),
    "an optimiser": ({}, {"optimiser": "adamm"}, "unknown optimiser 'adamm': did you mean 'adam"),
    "an optimiser before it steps": (
        {"classifier.bias": torch.ones(2)},
        {"optimiser": "adam"},
        "a gradient is what the optimiser gets",
    ),
    "texts that no step saw": (
        {"classifier.bias": torch.ones(2)},
        {"payload": "delta", "learning_rate": 0.1, "num_examples": 9, "batch_size": 2},
        "num_examples = 9, and the local_steps = 1 of batch_size = 2 see 2 at most",
    ),
    "a weight decay": (
        {"classifier.bias": torch.ones(2)},
        {"payload": "delta", "learning_rate": 0.1, "weight_decay": -0.1},
        "weight_decay = -0.1",
    ),
    "half a step": (
        {"classifier.bias": torch.ones(2)},
        {"payload": "delta", "learning_rate": 0.1, "local_steps": 1.5},
        "local_steps = 1.5",
    ),
    "no examples": ({}, {"num_examples": 0}, "num_examples = 0"),
    "half an example": ({}, {"num_examples": 2.5}, "num_examples = 2.5"),
    "examples in words": ({}, {"num_examples": "2"}, "num_examples = '2'"),
    "a fact": ({}, {"label": [1]}, "did you mean 'labels'?"),
    "too few labels": ({}, {"labels": [1]}, "labels has 1 numbers"),
    "one label": ({}, {"labels": 1}, "labels: give a list of whole numbers"),
    "labels in words": ({}, {"labels": ["a", "b"]}, "labels: give a list of whole"),
    "half a batch": ({}, {"batch_size": 0.5}, "batch_size = 0.5"),
    "noise below zero": ({}, {"noise_scale": -1.0}, "noise_scale = -1.0"),
    "labels that there are not": ({}, {"labels": [1, 2]}, "not from 0 to 1"),
    "a loss": ({}, {"loss": "hinge"}, "unknown loss 'hinge'"),
    "a rate that is no number": ({}, {"learning_rate": float("nan")}, "learning_rate = nan"),
    "steps below zero": ({}, {"local_steps": -1}, "local_steps = -1"),
    "dropout in words": ({}, {"dropout": "no"}, "dropout = 'no'"),
    "a seed in words": ({}, {"seed": "x"}, "seed = 'x'"),
    "settings in a list": ({}, {"settings": [1]}, "settings = [1]"),
    "settings in a tensor": ({}, {"settings": torch.ones(2, 2)}, "settings = tensor("),
    "another attack in the settings": ({}, {"settings": {"kind": "dlg"}}, "is the attack itself"),
    "something for what was sent": ({}, {"sent": 2}, "sent = 2"),
    "a number for what was sent": ({}, {"sent": 2}, "sent = 2"),
    "a kind in a list": ({}, {"kind": ["dager"]}, "kind = ['dager']"),
    "a loss in a list": ({}, {"loss": []}, "loss = []"),
    "nobody to tell": ({}, {"on_progress": 5}, "on_progress = 5"),
    "a text for a tokenizer": ({}, {"tokenizer": "bert"}, "the tokenizer is str: give the"),
    "an array of texts": (
        {"classifier.bias": np.array(["a", "b"])},
        {},
        "is of <U1: give",
    ),
    "an array of things": (
        {"classifier.bias": np.array([None, 1])},
        {},
        "is of object: give",
    ),
    "no tokenizer": ({}, {"tokenizer": None}, "tokenizer is missing"),
    "no model": ({}, {"model": nn.Linear(2, 2)}, "holds no transformers model"),
    "something for a model": ({}, {"model": 5}, "not a torch module"),
    "a task beside a module": ({}, {"task": CAUSAL_LM}, "leave it out"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_said_in_one_line(own, name):
    update, options, says = WRONG[name]
    with pytest.raises(fedleak.ConfigError) as error:
        attack(own, update, **options)
    assert says in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 700


class Headed(nn.Module):
    """A user's own classifier on a model as `AutoModel` makes it."""

    def __init__(self, own: SimpleNamespace, other: bool) -> None:
        super().__init__()
        self.encoder = copy.deepcopy(own.module.bert)
        self.head = copy.deepcopy(own.module.classifier)
        self.norm = nn.LayerNorm(self.head.in_features) if other else nn.Identity()

    def forward(self, labels: torch.Tensor, **batch: torch.Tensor) -> Any:
        logits = self.head(self.norm(self.encoder(**batch).pooler_output))
        return SimpleNamespace(loss=nn.functional.cross_entropy(logits, labels))


HEAD = {"head.weight": "classifier.weight", "head.bias": "classifier.bias"}


@pytest.mark.parametrize("kind", ["auto", "dager", "keyspan", "probes"])
def test_an_own_head_is_not_needed(own, kind):
    headed = Headed(own, other=True).eval()
    update = gradients(own, headed)
    result = attack(own, update, model=headed, own_head=True, kind=kind)
    assert result.status == Status.RECOVERED
    assert not result.verified
    if kind == "probes":
        assert {"fever", "sister"} <= {*result.words}
    else:
        assert sorted(result.texts) == sorted(NOTES)
    alone = {name.removeprefix("encoder."): value for name, value in update.items()}
    again = attack(own, alone, model=headed.encoder, own_head=True, kind=kind)
    assert again.texts == result.texts
    with pytest.raises(fedleak.ConfigError, match="say own_head = true, or what its parameters"):
        attack(own, update, model=headed, kind=kind)


def test_an_own_head_that_is_the_models_has_its_names(own):
    headed = Headed(own, other=False).eval()
    update = gradients(own, headed)
    result = attack(own, update, model=headed, names=HEAD, kind="dager")
    assert result.verified
    assert sorted(result.texts) == sorted(NOTES)
    assert attack(own, [*update.values()], model=headed, names=HEAD, kind="dager").verified
    with pytest.raises(fedleak.ConfigError, match=r"no name for classifier\.bias"):
        attack(own, update, model=headed, names={"head.weight": "classifier.weight"})
    with pytest.raises(fedleak.ConfigError, match=r"no name for classifier\.bias"):
        attack(own, update, model=headed, names={"hed.weight": "classifier.weight"})
    headed.head = nn.Linear(headed.head.in_features, 1)
    with pytest.raises(fedleak.ConfigError, match="has 1 labels"):
        attack(own, update, model=headed, names=HEAD)
    with pytest.raises(fedleak.ConfigError, match="leave it out, or names"):
        attack(own, update, model=headed, names=HEAD, own_head=True)


@pytest.mark.parametrize("kind", ["lamp", "membership"])
def test_what_needs_the_head_does_not_guess_one(own, kind):
    headed = Headed(own, other=True).eval()
    result = attack(own, gradients(own, headed), model=headed, own_head=True, kind=kind)
    assert result.status == Status.INADMISSIBLE


@PEFT
def test_models_that_cannot_be_attacked_are_refused(own, small, bert_tiny):
    headless = own.module.bert
    regression = small("bert", num_labels=1).module
    multi = copy.deepcopy(own.module)
    multi.config.problem_type = "multi_label_classification"
    diverged = copy.deepcopy(own.module)
    diverged.classifier.bias.data[0] = torch.inf
    two = nn.ModuleList([own.module, copy.deepcopy(own.module)])
    prompts = peft.get_peft_model(copy.deepcopy(own.module), peft.IA3Config(task_type="SEQ_CLS"))
    other = copy.deepcopy(small("bert").module)
    other.bert.pooler.dense.extra = nn.Parameter(torch.ones(1))
    for module, says in (
        (headless, "has no head"),
        (regression, "two or more classes"),
        (multi, "one of which is right"),
        (diverged, "not finite"),
        (two, "several transformers models"),
        (prompts, "one LoRA adapter"),
        (other, "such as bert.pooler.dense.extra"),
    ):
        with pytest.raises(fedleak.ConfigError, match=says):
            adopt(module, own.tokenizer)


def test_scores_stand_beside_chance_and_another_update(own):
    result = attack(own, gradients(own))
    like = SimpleNamespace(module=own.module, tokenizer=own.tokenizer, task=CLASSIFICATION)
    strangers = plain(like, ["we sold the house", "a dog barked at night"])
    other = attack(own, gradients(strangers, own.module))
    scored = fedleak.score(result, NOTES, labels=LABELS, other=other)
    row = scored.row
    assert (row.exact_match, row.rougeL, row.token_recall) == (1.0, 100.0, 1.0)
    assert row.control_rougeL < 50
    assert 0 < row.guess_rougeL < 50
    assert [(pair.truth, pair.answer) for pair in scored.pairs] == [(text, text) for text in NOTES]
    alike = fedleak.score(result, NOTES, held_out=["the patient has a cough", *NOTES])
    assert 25 < alike.row.guess_rougeL < 100, "the private texts themselves are not drawn"


def test_facts_are_compared_where_they_are_known(own):
    result = attack(own, gradients(own), kind="probes")
    assert fedleak.score(result, NOTES, labels=LABELS).row.facts["label_counts"].right is True
    assert fedleak.score(result, NOTES, labels=[1, 1]).row.facts["label_counts"].right is False
    assert fedleak.score(result, NOTES).row.facts["label_counts"].right is None
    assert set(result.words) == {word for text in NOTES for word in text.split()}
    assert "words: " in str(result)


def test_scores_can_be_of_token_ids(own):
    result = attack(own, gradients(own))
    ids = [own.tokenizer(text)["input_ids"] for text in NOTES]
    assert fedleak.score(result, ids).row == fedleak.score(result, NOTES).row


def test_weights_are_no_gradient_and_no_delta(own):
    weights = {name: 1.01 * p.detach() for name, p in own.module.named_parameters()}
    for options in ({}, {"payload": "delta", "learning_rate": 0.1}):
        with pytest.raises(fedleak.ConfigError, match="is nearly the weights of the model"):
            attack(own, weights, **options)


def test_numbers_may_be_of_any_library_and_order(own, monkeypatch):
    def same(update, **options):
        result = attack(own, update, kind="probes", **options)
        return result.answer.model_copy(update={"seconds": None})

    kept = gradients(own)
    right = same(kept)
    big_endian = {name: value.numpy().astype(">f4") for name, value in kept.items()}
    reversed_ = {name: value.numpy()[::-1].copy()[::-1] for name, value in kept.items()}
    assert same(big_endian) == same(reversed_) == right
    counts = {"num_examples": np.int64(2), "seed": torch.tensor(0), "local_steps": np.int32(1)}
    assert same(kept, **counts) == right
    result = attack(own, kept, kind="probes")
    rows = [
        fedleak.score(result, NOTES, labels=labels).row
        for labels in (LABELS, torch.tensor(LABELS), np.array(LABELS))
    ]
    assert rows[0] == rows[1] == rows[2]


NO_SCORES = {
    "no texts": ({"texts": 5}, "texts is int: give a list of texts"),
    "half of a character": ({"texts": [NOTES[0], "a \ud83d"]}, "texts[1] is damaged"),
    "labels in words": ({"labels": ["a", "b"]}, "labels: give a list of whole numbers"),
    "labels that there are not": ({"labels": [0, 2]}, "labels has 2, a number that is not from"),
    "a row for an answer": ({"result": "x"}, "result = 'x'"),
    "texts for an answer": ({"other": NOTES}, "other = ["),
    "a seed": ({"seed": -1}, "seed = -1"),
}


@pytest.mark.parametrize("case", NO_SCORES)
def test_what_cannot_be_scored_is_said_in_one_line(own, case, monkeypatch):
    changes, says = NO_SCORES[case]
    given = {"result": attack(own, gradients(own), kind="probes"), "texts": NOTES} | changes
    with pytest.raises(fedleak.ConfigError) as error:
        fedleak.score(given.pop("result"), given.pop("texts"), **given)
    assert says in str(error.value)
    assert str(error.value).isprintable()


NO_TEXTS = {
    "nothing": ([], "there are 0, but the attack was told num_examples = 2"),
    "some of them": (NOTES[:1], "there are 1, but"),
    "one text": (NOTES[0], "is one text: give a list"),
    "a blank": ([NOTES[0], " "], r"texts[1] is empty"),
    "no tokens": ([[1, 2], []], r"texts[1] is empty"),
    "a token that there is not": ([[1, 2], [10**9]], "texts[1] has 1000000000, a number"),
    "numbers": ([1, 2], "texts[0]: give a list of whole numbers"),
}


@pytest.mark.parametrize("case", NO_TEXTS)
def test_scores_are_of_all_texts_of_the_update(own, case):
    texts, says = NO_TEXTS[case]
    result = attack(own, gradients(own))
    with pytest.raises(fedleak.ConfigError) as error:
        fedleak.score(result, texts)
    assert says in str(error.value)


def test_a_run_is_run_and_read(tmp_path, monkeypatch, in_process):
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(toml({"attack": [DLG]}))
    results = fedleak.run("small.toml")
    at = Run(Path("runs/small"))
    assert results.rows == tuple(at.rows(LEAKAGE))
    assert results.summary.status == "finished"
    table = fedleak.read_results("runs/small").to_pandas()
    lines = [json.loads(line) for line in Path("runs/small/leakage.jsonl").read_text().splitlines()]
    assert len(table) == len(lines) == 4
    for name in ("round", "client", "attack", "status"):
        assert list(table[name]) == [line[name] for line in lines]
    expected = np.array([line["token_recall"] for line in lines], dtype=float)
    assert np.array_equal(table["token_recall"].to_numpy(dtype=float), expected, equal_nan=True)
    report = results.write_report(redact=True)
    assert report.read_text().startswith("<!doctype html>")


def test_an_update_of_a_run_is_scored_as_the_run_scores_it(tmp_path, in_process):
    """The same model, update and texts through both doors."""
    attacks = [{"kind": "keyspan"}]
    results = fedleak.run(tables({"attack": attacks}), folder=tmp_path / "run")
    assert results.path == tmp_path / "run"
    run = Run(tmp_path / "run")
    key = run.captures.all_keys()[0]
    model = adopt(*of_run(run))
    result = fedleak.attack(
        run.captures.read_capture(key).update.tensors,
        model.module,
        model.tokenizer,
        sent=fedleak.SentUpdate(num_examples=1),
        kind="keyspan",
    )
    truth = run.vault.read_note(key)
    scored = fedleak.score(result, truth["sequences"], labels=truth["labels"]).row
    (row,) = [row for row in results.rows if row.key == key and row.attack == "keyspan"]
    same = (
        "exact_match",
        "rougeL",
        "token_recall",
        "token_precision",
        "verified",
        "margin",
        "facts",
    )
    assert [getattr(scored, name) for name in same] == [getattr(row, name) for name in same]


def of_run(run: Run) -> tuple[nn.Module, Any]:
    """Returns the model that the first round of a run starts from, and its tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = run.info()["experiment"]["model"]["name"]
    module = AutoModelForSequenceClassification.from_pretrained(folder)
    module.load_state_dict(run.models.read_model(1))
    return module, AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "call",
    [
        lambda: fedleak.read_results(5),
        lambda: fedleak.run(None),
        lambda: fedleak.run([]),
        lambda: fedleak.builtin_model(None),
    ],
)
def test_what_is_no_path_is_refused(call):
    with pytest.raises(fedleak.ConfigError, match=r"give a path|unknown built-in model"):
        call()


def test_reading_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(fedleak.ConfigError, match="not a run directory"):
        fedleak.read_results(tmp_path)
    with pytest.raises(fedleak.ConfigError, match="did you mean 'bert-tiny'"):
        fedleak.builtin_model("bert-tinny")
