import json
import math
import sys

import pytest
import torch
from transformers import DistilBertConfig

from fedleak import models
from fedleak.models import CAUSAL_LM, CLASSIFICATION, ModelSpec, batch_loss, loading, pad
from fedleak.models.family import lora_a
from fedleak.models.lora import Lora, adapt_
from fedleak.util.errors import ConfigError

pytestmark = pytest.mark.core

FAMILIES = ("bert", "gpt2", "llama")
OUTPUT = {
    "bert": "bert.encoder.layer.0.attention.output.dense.weight",
    "gpt2": "transformer.h.0.attn.c_proj.weight",
    "llama": "model.layers.0.self_attn.o_proj.weight",
}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
KINDS = {
    "bert": ("bert", CLASSIFICATION, {}),
    "gpt2": ("gpt2", CLASSIFICATION, {}),
    "gpt2-lm": ("gpt2", CAUSAL_LM, {"activation_function": "relu"}),
    "llama": ("llama", CLASSIFICATION, {}),
    "llama-lm": ("llama", CAUSAL_LM, {"kv_heads": 1}),
    "llama-lm-other": (
        "llama",
        CAUSAL_LM,
        {
            "kv_heads": 4,
            "head_dim": 12,  # 4 heads are wider than the residual stream
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,  # scales cosine and sine
        },
    ),
}
RANK = 4


def with_adapters_(model):
    """Adds LoRA adapters, B not zero, to every attention projection."""
    targets = {
        "bert": ("query", "key", "value", "attention.output.dense"),
        "gpt2": ("c_attn", "attn.c_proj"),
        "llama": ("q_proj", "k_proj", "v_proj", "o_proj"),
    }
    rng = torch.Generator().manual_seed(0)
    adapt_(model.module, Lora(RANK, 8.0, targets[model.family.model_type]), ())
    for parameter in model.parameters().values():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=rng))
    model.module.eval()


@pytest.fixture(params=KINDS)
def plain(request, small):
    family, task, options = KINDS[request.param]
    return small(family, task, layers=3, **options)


@pytest.fixture(params=["plain", "lora"])
def model(request, plain):
    if request.param == "lora":
        with_adapters_(plain)
    return plain


@pytest.fixture
def batch(plain, texts):
    """Ids and mask of two sequences, 13 tokens in all: fewer than the width."""
    long, short = plain.encode(texts[:2])
    return pad([long[:8], short[:5]], plain.tokenizer.pad_token_id, plain.device)


def adapted(model):
    return any("lora_A" in name for name, _ in model.module.named_parameters())


def inputs_of(model, name, run):
    """Returns what entered the module that owns a parameter while `run()` ran."""
    seen = []
    owner = model.module.get_submodule(name.rpartition(".")[0])
    hook = owner.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    run()
    hook.remove()
    assert len(seen) == 1
    return seen[0]


def gradients(model, ids, mask):
    """Gradients of what is trained: with adapters, of those alone."""
    loss = batch_loss(model, ids, mask, torch.arange(len(ids)))
    named = model.trained()
    slopes = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    return dict(zip(named, slopes, strict=True))


def outside(rows, inputs):
    """The part of rows that no combination of inputs gives, by dense least squares."""
    rows, inputs = rows.double(), inputs.double()
    combination = torch.linalg.lstsq(inputs.T, rows.T, driver="gelsd").solution
    return float((rows.T - inputs.T @ combination).norm() / rows.norm())


@pytest.mark.parametrize("layer", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_rows_of_attention_gradients_are_combinations_of_inputs(model, batch, layer):
    ids, mask = batch
    tensors = gradients(model, ids, mask)
    names = model.family.attention_parameters(layer)
    inputs = inputs_of(model, names[0], lambda: batch_loss(model, ids, mask, torch.arange(2)))
    real = inputs[mask.bool()]
    attention_gradients = model.family.attention_gradients(tensors, layer)
    assert len(attention_gradients) == (len(names) if adapted(model) else 3)
    for gradient in attention_gradients:
        assert gradient.shape[1] == model.hidden_size
        assert outside(gradient, real) < 1e-4
        assert outside(gradient, real[1:7]) > 1e-2  # without the pooled tokens


@pytest.mark.parametrize("layer", [0, 2])
def test_projections_are_the_gradients_of_queries_keys_and_values(plain, batch, layer):
    ids, mask = batch
    inputs, outputs, hooks = [], [], []

    def record(_, args, output):
        inputs.append(args[0])
        outputs.append(output)

    for name in plain.family.attention_parameters(layer):
        owner = plain.module.get_submodule(name.rpartition(".")[0])
        hooks.append(owner.register_forward_hook(record))
    loss = batch_loss(plain, ids, mask, torch.arange(2))
    for hook in hooks:
        hook.remove()
    slopes = torch.autograd.grad(loss, outputs, retain_graph=True)
    expected = [
        torch.einsum("bto,bti->oi", slope, x.detach())
        for slope, x in zip(slopes, inputs, strict=True)
    ]
    if plain.family.model_type == "gpt2":  # one layer makes all three, in this order
        width = plain.hidden_size
        expected = [expected[0][at : at + width] for at in (0, width, 2 * width)]
    projections = plain.family.projections(gradients(plain, ids, mask), layer)
    assert list(projections) == ["query", "key", "value"]
    for gradient, other in zip(projections.values(), expected, strict=True):
        assert other.norm() > 1e-9
        torch.testing.assert_close(gradient, other, atol=1e-4 * other.norm().item(), rtol=1e-4)


def test_rows_of_the_output_gradient_are_combinations_of_mixed_values(model, batch):
    ids, mask = batch
    tensors = gradients(model, ids, mask)
    name = OUTPUT[model.family.model_type]
    mixed = inputs_of(model, name, lambda: batch_loss(model, ids, mask, torch.arange(2)))
    real = mixed[mask.bool()]
    gradient = model.family.output_gradient(tensors, 0)
    assert gradient.shape == (RANK if adapted(model) else model.hidden_size, mixed.shape[-1])
    assert outside(gradient, real) < 1e-4
    assert outside(gradient, real[:6]) > 1e-2
    assert model.family.output_gradient({}, 0) is None


def test_what_was_not_shared_is_not_there(model, batch):
    tensors = gradients(model, *batch)
    family = model.family
    assert family.attention_gradients({}, 1) == []
    assert family.projections({}, 1) == {}
    names = family.attention_parameters(1)
    shared = lora_a(names[-1]) if adapted(model) else names[-1]
    kept = {shared: tensors[shared]}
    assert family.attention_gradients(kept, 0) == []
    assert family.projections(kept, 0) == {}
    parts = ["query", "key", "value"] if len(names) == 1 else ["value"]
    if adapted(model):
        assert family.projections(kept, 1) == {}
        (gradient,) = family.attention_gradients(kept, 1)
        assert gradient is tensors[shared]
        assert gradient.shape == (RANK, model.hidden_size)
    else:
        assert list(family.projections(kept, 1)) == parts
        assert len(family.attention_gradients(kept, 1)) == len(parts)


@torch.no_grad()
def test_the_token_table_is_the_first_attention_input(model, batch):
    ids, mask = batch
    name = model.family.attention_parameters(0)[0]
    recorded = inputs_of(model, name, lambda: batch_loss(model, ids, mask, torch.arange(2)))
    table = model.family.token_table(model.module)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    torch.testing.assert_close(table(ids, positions), recorded, atol=1e-5, rtol=1e-4)


# So large an eps that one forgotten, or taken from elsewhere, shows.
EPS = {"bert": "layer_norm_eps", "gpt2": "layer_norm_epsilon", "llama": "rms_norm_eps"}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_directions_over_scale_are_the_first_attention_input(small, family):
    model = small(family, **{EPS[family]: 1e-2})
    ids = torch.arange(3 * 64) + 5
    positions = torch.arange(64).repeat(3)
    table = model.family.token_table(model.module)
    token, position, constant = table.directions()
    assert len(token) == len(model.tokenizer)
    rows = token[ids] + (position[positions] if len(position) else 0)
    sigma = table.scale(ids, positions)
    assert sigma.shape == ids.shape
    torch.testing.assert_close(
        rows / sigma[:, None] + constant.sum(0), table(ids, positions), atol=1e-5, rtol=1e-5
    )
    assert len(position) == (0 if family == "llama" else model.max_length)
    assert len(constant) == (0 if family == "llama" else 1)
    for name, parameter in table.norm.named_parameters():
        if name == "bias":
            parameter.zero_()
    assert table.directions().constant_CD.shape == (0, model.hidden_size)
    assert not any(part.requires_grad for part in table.directions())


def attended(model, ids, mask, monkeypatch):
    """Returns first-layer queries, keys and values [B, T, H, K] of the model's own code."""
    modeling = sys.modules[type(model.module).__module__]
    whole, seen = modeling.eager_attention_forward, []

    def record(module, query, key, value, *args, **kwargs):
        seen.append((query, key, value))
        return whole(module, query, key, value, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(modeling, "eager_attention_forward", record)
        batch_loss(model, ids, mask, torch.arange(len(ids)))
    num_heads = seen[0][0].shape[1]
    return [x.repeat_interleave(num_heads // x.shape[1], 1).transpose(1, 2) for x in seen[0]]


@torch.no_grad()
def test_queries_keys_and_values_are_those_of_the_module(model, batch, monkeypatch):
    ids, mask = batch
    real = mask.bool()
    positions = torch.arange(ids.shape[1]).expand_as(ids)[real]
    block = model.family.first_block(model.module)
    _, x = block.enter(ids[real], positions)
    own = attended(model, ids, mask, monkeypatch)
    for ours, theirs in zip(block.project(x, positions), own, strict=True):
        assert ours.shape[1] == block.num_heads
        torch.testing.assert_close(ours, theirs[real], atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_first_block_in_parts_is_the_whole_first_block(model, batch):
    ids, mask = batch
    name = model.family.attention_parameters(1)[0]
    recorded = inputs_of(model, name, lambda: batch_loss(model, ids, mask, torch.arange(2)))
    block = model.family.first_block(model.module)
    for row, length in enumerate(mask.sum(1).tolist()):
        positions = torch.arange(length)
        residual, x = block.enter(ids[row, :length], positions)
        q, k, v = (part.transpose(0, 1) for part in block.project(x, positions))
        scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        if model.family.causal:
            scores += torch.full_like(scores, -torch.inf).triu(1)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        second = block.leave(residual, mixed)
        torch.testing.assert_close(second, recorded[row, :length], atol=2e-5, rtol=1e-4)


@torch.no_grad()
def test_rotary_scores_know_positions_by_their_difference_alone(plain):
    if plain.family.position_embedding is not None:
        pytest.skip("learned positions")
    block = plain.family.first_block(plain.module)
    ids, positions = torch.arange(5, 25), torch.arange(20)
    x = plain.family.token_table(plain.module)(ids, positions)
    q, k, _ = block.project(x, positions)
    still, _, _ = block.project(x, torch.zeros_like(positions))
    assert (q[1:] - still[1:]).flatten(1).norm(dim=1).min() > 1e-2
    later_q, later_k, _ = block.project(x, positions + 7)
    scores, later = (torch.einsum("nhk,mhk->nmh", *pair) for pair in ((q, k), (later_q, later_k)))
    torch.testing.assert_close(later, scores, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_embeddings_give_the_logits_of_their_ids(model, batch):
    ids, mask = batch
    embeds = model.module.get_parameter(model.family.word_embedding)[ids]
    by_ids = model.family.logits(model.module, mask, ids_BT=ids, embeds_BTD=None)
    by_embeds = model.family.logits(model.module, mask, ids_BT=None, embeds_BTD=embeds)
    torch.testing.assert_close(by_ids, by_embeds)


@torch.no_grad()
def test_logits_are_those_of_transformers_and_padding_does_not_change_them(model, batch):
    ids, mask = batch
    ours = model.family.logits(model.module, mask, ids_BT=ids, embeds_BTD=None)
    theirs = model.module(input_ids=ids, attention_mask=mask).logits
    torch.testing.assert_close(
        ours[mask.bool()] if ours.dim() == 3 else ours,
        theirs[mask.bool()] if ours.dim() == 3 else theirs,
    )
    alone = model.family.logits(model.module, mask[1:, :5], ids_BT=ids[1:, :5], embeds_BTD=None)
    padded = ours[1:, :5] if ours.dim() == 3 else ours[1:]
    torch.testing.assert_close(padded, alone, atol=1e-5, rtol=1e-4)


def test_named_parameters_exist(model):
    family, own = model.family, dict(model.module.named_parameters())
    assert own[family.word_embedding].shape == (len(model.tokenizer), model.hidden_size)
    if family.position_embedding is None:
        assert not [name for name in own if "position" in name]
    else:
        assert own[family.position_embedding].shape == (model.max_length, model.hidden_size)
    names = {n for layer in range(3) for n in family.attention_parameters(layer)}
    if adapted(model):
        names = set(map(lora_a, names))
        assert {own[name].shape for name in names} == {(RANK, model.hidden_size)}
    assert names <= own.keys()
    if model.task == CLASSIFICATION:
        assert own[family.classifier[0]].shape == (model.num_labels, model.hidden_size)
        assert set(family.classifier) <= own.keys()
    assert models.families()[family.model_type] is family


def test_encoded_texts_have_the_marks_that_training_needs(plain):
    text = "I told nobody"
    (ids,) = plain.encode([text])
    tokenizer, family = plain.tokenizer, plain.family.model_type
    content = [i for i in ids if i not in plain.special_ids()]
    starts = {"bert": [tokenizer.cls_token_id], "gpt2": [], "llama": [tokenizer.bos_token_id]}
    ends = {"bert": [tokenizer.sep_token_id], "gpt2": [], "llama": []}
    end = [tokenizer.eos_token_id] if plain.task == CAUSAL_LM else ends[family]
    assert ids == [*starts[family], *content, *end]
    expected = text.lower() if family == "bert" else text
    assert plain.decode(ids) == plain.decode(content) == expected


# --- loading --------------------------------------------------------------------------------


@pytest.mark.parametrize("fill", [models.load_parameters_, models.lend_parameters_])
def test_a_model_filled_from_parameters_is_the_model(bert_tiny, fill):
    empty = loading.load(
        ModelSpec(name="builtin/bert-tiny", task=CLASSIFICATION, num_labels=2), weights=False
    )
    own = bert_tiny.parameters()
    assert models.fingerprint(empty.parameters()) != models.fingerprint(own)
    fill(empty, own)
    assert models.fingerprint(empty.parameters()) == models.fingerprint(own)
    with pytest.raises(ValueError, match=r"another model: \['classifier\.bias'\]"):
        fill(empty, {n: v for n, v in own.items() if n != "classifier.bias"})


def test_the_seed_decides_the_new_classifier(bert_tiny):
    first, same, other = (
        loading.load(
            ModelSpec(name="builtin/bert-tiny", task=CLASSIFICATION, num_labels=2, seed=s)
        ).parameters()
        for s in (3, 3, 4)
    )
    differ = {name for name in first if not torch.equal(first[name], other[name])}
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert "classifier.weight" in differ
    assert not [name for name in differ if "encoder" in name]


@pytest.mark.parametrize(
    ("name", "task", "words"),
    [
        (
            "builtin/bert-tiny",
            CAUSAL_LM,
            ["model.task", CLASSIFICATION, "encoder", "gpt2 or llama"],
        ),
        ("builtin/bert-tyni", CLASSIFICATION, ["model.name", "bert-tyni", "'bert-tiny'"]),
        ("./no/such/folder", CLASSIFICATION, ["model.name", "./no/such/folder", "no such folder"]),
        ("nobody/no-model", CLASSIFICATION, ["model.name", "nobody/no-model", "builtin/bert-tiny"]),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused(name, task, words):
    with pytest.raises(ConfigError) as caught:
        loading.load(ModelSpec(name=name, task=task, num_labels=2))
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_another_family_is_refused_by_name(tmp_path, bert_tiny):
    bert_tiny.tokenizer.save_pretrained(tmp_path)
    config = json.loads(DistilBertConfig().to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"'distilbert': choose one of .*bert, gpt2, llama"):
        loading.load(ModelSpec(name=str(tmp_path), task=CLASSIFICATION, num_labels=2))


def test_damaged_weights_are_refused(tmp_path, bert_tiny):
    bert_tiny.tokenizer.save_pretrained(tmp_path)
    bert_tiny.module.config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ConfigError, match=r"model\.name = .* weights that cannot be loaded"):
        loading.load(ModelSpec(name=str(tmp_path), task=CLASSIFICATION, num_labels=2))
