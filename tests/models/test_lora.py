"""Adapters: what is trained and travels, and that training is that of W + alpha / rank * B A."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D

from fedleak import models
from fedleak.attacks.subspace.dager import Dager
from fedleak.models import CAUSAL_LM, CLASSIFICATION, ModelSpec, loading, pad
from fedleak.models.lora import Lora, adapt_
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, Observation, UpdateKind
from fedleak.training.settings import LocalTraining
from fedleak.util.errors import ConfigError
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

RANK, ALPHA, RATE = 3, 12.0, 0.2
SMALL = [
    ("bert", CLASSIFICATION),
    ("gpt2", CLASSIFICATION),
    ("gpt2", CAUSAL_LM),
    ("llama", CLASSIFICATION),
    ("llama", CAUSAL_LM),
]
TARGETS = {"bert": ["query", "value"], "gpt2": ["c_attn"], "llama": ["q_proj", "v_proj"]}
TINY = [
    ("bert-tiny", CLASSIFICATION),
    ("gpt2-tiny", CLASSIFICATION),
    ("gpt2-tiny", CAUSAL_LM),
    ("llama-tiny", CAUSAL_LM),
]


def spec_of(name, task, seed=0, **lora):
    return ModelSpec(
        name=f"builtin/{name}", task=task, num_labels=2, seed=seed, lora=Lora(RANK, ALPHA, **lora)
    )


def named(model):
    return {name: p.detach() for name, p in model.module.named_parameters()}


def equal(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(left[name], right[name]) for name in left
    )


# --- training -------------------------------------------------------------------------------


def merged(plain, adapters):
    """Weights of the model without adapters that computes what the adapted one does."""
    weights = named(plain)
    for name, a_RI in adapters.items():
        stem, separator, _ = name.partition(".lora_A.")
        if separator:
            delta_OI = ALPHA / RANK * adapters[name.replace("lora_A", "lora_B")] @ a_RI
            # GPT-2 keeps its matrices transposed.
            fused = plain.family.model_type == "gpt2"
            weights[f"{stem}.weight"] = weights[f"{stem}.weight"] + (
                delta_OI.T if fused else delta_OI
            )
        elif ".lora_B." not in name:
            weights[name] = adapters[name]
    return weights


def oracle(plain, adapters, sequences, labels):
    """The gradient of transformers' own loss at merged weights, in what is trained."""
    ids, mask = pad(sequences, plain.tokenizer.pad_token_id, torch.device("cpu"))
    causal = plain.task == CAUSAL_LM
    targets = ids.masked_fill(mask == 0, -100) if causal else torch.tensor(labels)
    free = {name: value.clone().requires_grad_() for name, value in adapters.items()}
    batch = {"input_ids": ids, "attention_mask": mask, "labels": targets}
    loss = functional_call(plain.module, merged(plain, free), kwargs=batch).loss
    return dict(zip(free, torch.autograd.grad(loss, list(free.values())), strict=True))


def assert_near(actual, expected, tolerance):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        size = value.abs().max()
        assert size > 0, name
        torch.testing.assert_close(actual[name] / size, value / size, atol=tolerance, rtol=0)


@pytest.fixture(params=SMALL, ids=lambda kind: "-".join(kind))
def both(request, small):
    """A model, and the same with adapters whose B is not zero."""
    plain = small(*request.param)
    model = small(*request.param)
    trained = model.family.classifier if model.task == CLASSIFICATION else ()
    adapt_(model.module, Lora(RANK, ALPHA), trained)
    rng = torch.Generator().manual_seed(1)
    for parameter in model.parameters().values():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=rng))
    model.module.eval()
    return plain, model


@pytest.fixture
def batch(both, texts):
    sequences = [ids[: 4 + 3 * i] for i, ids in enumerate(both[0].encode(texts[:3]))]
    return sequences, [0, 2, 2]


def test_the_gradient_is_that_of_merged_weights(both, batch):
    plain, model = both
    how = LocalTraining(
        kind=UpdateKind.GRADIENT, batch_size=3, epochs=1, learning_rate=RATE, dropout=False
    )
    update = local_update_(model, *batch, how, seed=0)
    assert_near(update.tensors, oracle(plain, model.parameters(), *batch), 1e-4)


def test_the_delta_is_that_of_sgd_on_merged_weights(both, batch):
    plain, model = both
    how = LocalTraining(
        kind=UpdateKind.DELTA, batch_size=2, epochs=2, learning_rate=RATE, dropout=False
    )
    sequences, labels = batch
    adapters = copy.deepcopy(model.parameters())
    before = copy.deepcopy(named(model))
    shuffle = stream(5, "order")
    for _ in range(how.epochs):
        order = torch.randperm(3, generator=shuffle).tolist()
        for chosen in (order[:2], order[2:]):
            gradient = oracle(
                plain, adapters, [sequences[i] for i in chosen], [labels[i] for i in chosen]
            )
            adapters = {name: value - RATE * gradient[name] for name, value in adapters.items()}
    tensors = local_update_(model, sequences, labels, how, seed=5).tensors
    assert_near(tensors, {name: value - before[name] for name, value in adapters.items()}, 1e-3)
    after = named(model)
    assert equal(
        {n: before[n] for n in before if n not in tensors},
        {n: after[n] for n in before if n not in tensors},
    )


def test_a_new_adapter_changes_nothing_and_its_a_has_no_gradient(small, texts):
    plain, model = small("bert"), small("bert")
    adapt_(model.module, Lora(RANK, ALPHA), model.family.classifier)
    model.module.eval()
    ids, mask = pad(model.encode(texts[:2]), model.tokenizer.pad_token_id, torch.device("cpu"))
    with torch.no_grad():
        logits = [
            variant.family.logits(variant.module, mask, ids_BT=ids, embeds_BTD=None)
            for variant in (plain, model)
        ]
    assert torch.equal(*logits)
    how = LocalTraining(
        kind=UpdateKind.GRADIENT, batch_size=2, epochs=1, learning_rate=RATE, dropout=False
    )
    for name, value in local_update_(
        model, model.encode(texts[:2]), [0, 2], how, seed=0
    ).tensors.items():
        assert bool(value.any()) == ("lora_A" not in name), name


# --- what travels ---------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "task"), TINY)
def test_adapters_and_the_classifier_travel_and_nothing_else(name, task):
    model = loading.load(spec_of(name, task))
    layers = {
        module_name
        for module_name, _ in model.module.named_modules()
        if module_name.endswith(tuple(TARGETS[name[:-5]]))
    }
    assert len(layers) == 4 * len(TARGETS[name[:-5]])
    adapters = {f"{layer}.lora_{ab}.default.weight" for layer in layers for ab in "AB"}
    classifier = model.family.classifier if task == CLASSIFICATION else ()
    assert model.parameters().keys() == adapters | set(classifier)
    assert {p.shape[0] for n, p in model.parameters().items() if "lora_A" in n} == {RANK}
    assert not any(p.any() for n, p in model.parameters().items() if "lora_B" in n)
    assert not model.module.training
    sketch = loading.outline(spec_of(name, task))
    assert list(sketch.parameters()) == list(model.parameters())
    assert {p.device.type for p in sketch.module.parameters()} == {"meta"}


@pytest.mark.parametrize("fill", [models.load_parameters_, models.lend_parameters_])
def test_a_broadcast_fills_what_is_trained_and_the_checkpoint_the_rest(fill):
    spec = spec_of("bert-tiny", CLASSIFICATION, 3)
    model, filled = loading.load(spec), loading.load(spec, weights=False)
    for parameter in model.parameters().values():
        parameter.add_(1.0)
    assert not equal(named(model), named(filled))
    fill(filled, model.parameters())
    assert equal(named(model), named(filled))
    with pytest.raises(ValueError, match="another model"):
        fill(filled, named(model))


def test_the_seed_decides_adapters_and_all_that_the_checkpoint_lacks(tmp_path, bert_tiny):
    bert_tiny.tokenizer.save_pretrained(tmp_path)
    weights = bert_tiny.module.state_dict()
    without = {name: value for name, value in weights.items() if "pooler" not in name}
    bert_tiny.module.save_pretrained(tmp_path, state_dict=without)

    def load(seed, **how):
        spec = ModelSpec(
            name=str(tmp_path), task=CLASSIFICATION, num_labels=2, seed=seed, lora=Lora(RANK, ALPHA)
        )
        return named(loading.load(spec, **how))

    state = torch.get_rng_state()
    first, same, other = load(1), load(1, weights=False), load(2)
    assert torch.equal(torch.get_rng_state(), state)
    # Whoever is filled from a broadcast has to have the same frozen pooler.
    assert equal(first, same)
    differ = {name for name in first if not torch.equal(first[name], other[name])}
    assert differ == {n for n in first if "lora_A" in n} | {"bert.pooler.dense.weight"}


# --- targets --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "targets", "adapted"),
    [
        ("bert", ("key",), ["attention.self.key"]),
        (
            "bert",
            ("layer.1.output.dense", "query"),
            ["attention.self.query", "layer.1.output.dense"],
        ),
        ("gpt2", ("c_attn", "mlp.c_proj"), ["attn.c_attn", "mlp.c_proj"]),
    ],
)
def test_targets_are_linear_layers_by_the_ends_of_their_names(small, family, targets, adapted):
    module = small(family).module
    adapt_(module, Lora(RANK, ALPHA, targets), ())
    owners = {n.partition(".lora_A.")[0] for n, _ in module.named_parameters() if "lora_A" in n}
    assert all(any(owner.endswith(end) for end in adapted) for owner in owners)
    assert all(any(owner.endswith(end) for owner in owners) for end in adapted)


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("quary", "did you mean 'query'?"),
        ("q_proj", "(known: dense, key, query, value)"),
        ("classifier", "(known: dense, key, query, value)"),  # trained whole
        ("attention", "known:"),
        ("word_embeddings", "known:"),
        ("LayerNorm", "known:"),
        ("", "known:"),
    ],
)
def test_a_target_that_is_no_linear_layer_is_refused(target, hint):
    spec = spec_of("bert-tiny", CLASSIFICATION, targets=("query", target))
    with pytest.raises(ConfigError) as caught:
        loading.outline(spec)
    message = str(caught.value)
    assert message.startswith(f"model.lora.targets: unknown linear layer {target!r}")
    assert hint in message
    assert "\n" not in message


def test_an_architecture_that_peft_does_not_know_needs_targets(small):
    module = small("bert").module
    module.config.model_type = "new"
    with pytest.raises(ConfigError, match=r"model\.lora\.targets is missing.*'new'.*key, query"):
        adapt_(module, Lora(RANK, ALPHA), ())
    adapt_(module, Lora(RANK, ALPHA, ("query",)), ())


# --- variants -------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "task"), TINY)
def test_all_linear_is_every_linear_layer_but_the_last(name, task):
    model = loading.load(spec_of(name, task, targets="all-linear"))
    adapted = {n.partition(".lora_A.")[0] for n in model.trained() if ".lora_A." in n}
    last = model.module.get_output_embeddings()
    linear = {
        n.removesuffix(".base_layer")
        for n, layer in model.module.named_modules()
        if isinstance(layer, (torch.nn.Linear, Conv1D)) and ".lora_" not in n
        if layer is not last and not n.startswith(("score", "classifier"))
    }
    assert adapted == linear
    assert len(adapted) >= 4 * model.num_layers


def test_rslora_scales_by_the_root_of_the_rank():
    plain, rooted = (
        loading.load(spec_of("llama-tiny", CAUSAL_LM, rslora=rslora)) for rslora in (False, True)
    )
    for model, scale in ((plain, ALPHA / RANK), (rooted, ALPHA / RANK**0.5)):
        layer = model.module.get_submodule("model.layers.0.self_attn.q_proj")
        layer.lora_B["default"].weight.data.fill_(0.5)
        x = torch.ones(1, layer.in_features)
        low = x @ layer.lora_A["default"].weight.T @ layer.lora_B["default"].weight.T
        torch.testing.assert_close(layer(x) - layer.base_layer(x), scale * low)


def test_dora_trains_the_norms_too_and_dager_reads_its_adapters(texts):
    spec = replace(spec_of("llama-tiny", CAUSAL_LM), lora=Lora(48, ALPHA, dora=True))
    model = loading.load(spec)
    norms = [name for name in model.trained() if ".lora_magnitude_vector." in name]
    assert len(norms) == 2 * model.num_layers
    for name, parameter in model.trained().items():
        if ".lora_B." in name:  # as after a round
            parameter.data.normal_(0, 0.1, generator=stream(0, name))
    sequences = model.encode(texts[:1])
    how = LocalTraining(
        kind=UpdateKind.GRADIENT, batch_size=1, epochs=1, learning_rate=RATE, dropout=False
    )
    update = local_update_(model, sequences, [0], how, seed=0)
    seen = Observation(round=2, client=0, update=update, knowledge=Knowledge(local_steps=1))
    answer = Dager()(seen, model, rng=stream(0, "attack"))
    assert answer.verified
    assert answer.sequences == (tuple(sequences[0][:-1]),)


def test_dropout_of_adapters_is_on_where_that_of_the_model_is(texts):
    sequences = loading.load(spec_of("llama-tiny", CAUSAL_LM)).encode(texts[:2])

    def update(on, p):
        model = loading.load(spec_of("llama-tiny", CAUSAL_LM, dropout=p))
        how = LocalTraining(
            kind=UpdateKind.GRADIENT, batch_size=2, epochs=1, learning_rate=RATE, dropout=on
        )
        return local_update_(model, sequences, [0, 0], how, seed=0).tensors

    assert equal(update(False, 0.5), update(False, 0.0))
    assert not equal(update(True, 0.5), update(True, 0.0))


@pytest.mark.parametrize(
    ("family", "options", "dropout"),
    [
        ("bert", {}, True),
        ("gpt2", {}, True),
        ("llama", {}, False),
        ("llama", {"attention_dropout": 0.1}, True),
    ],
)
def test_a_model_has_dropout_if_a_layer_or_its_config_has(small, family, options, dropout):
    assert models.has_dropout(small(family, CAUSAL_LM, **options).module) == dropout


def test_a_model_has_the_dropout_of_its_adapters():
    has_dropout = [
        models.has_dropout(loading.load(spec_of("llama-tiny", CAUSAL_LM, dropout=p)).module)
        for p in (0.0, 0.1)
    ]
    assert has_dropout == [False, True]
