import json
import math

import pytest
import torch
from transformers import DistilBertConfig

from fedleak import models
from fedleak.errors import ConfigError
from fedleak.models import CAUSAL_LM, CLASSIFICATION, batch_loss, pad

KINDS = [("bert", CLASSIFICATION), ("gpt2", CLASSIFICATION), ("gpt2", CAUSAL_LM)]


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(kind))
def model(request, small):
    return small(*request.param, layers=3)


@pytest.fixture
def batch(model, texts):
    """Ids and mask of two sequences, 13 tokens in all: fewer than the width."""
    long, short = model.encode(texts[:2])
    return pad([long[:8], short[:5]], model.tokenizer.pad_token_id, model.device)


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
    loss = batch_loss(model, ids, mask, torch.arange(len(ids)))
    named = dict(model.module.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), materialize_grads=True)
    return dict(zip(named, found, strict=True))


def outside(rows, inputs):
    """The part of rows that no combination of inputs gives, by dense least squares."""
    rows, inputs = rows.double(), inputs.double()
    combination = torch.linalg.lstsq(inputs.T, rows.T, driver="gelsd").solution
    return float((rows.T - inputs.T @ combination).norm() / rows.norm())


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_rows_of_attention_gradients_are_combinations_of_inputs(model, batch, layer):
    ids, mask = batch
    tensors = gradients(model, ids, mask)
    name = model.family.attention_parameters(layer)[0]
    inputs = inputs_of(model, name, lambda: batch_loss(model, ids, mask, torch.arange(2)))
    real = inputs[mask.bool()]
    found = model.family.attention_gradients(tensors, layer)
    assert len(found) == 3
    for gradient in found:
        assert gradient.shape == (model.hidden_size, model.hidden_size)
        if gradient.norm() > 1e-9:  # of the last layer only the pooled token asks
            assert outside(gradient, real) < 1e-4
            assert outside(gradient.T, real) > 1e-2


def test_rows_of_the_output_gradient_are_combinations_of_mixed_values(model, batch):
    ids, mask = batch
    tensors = gradients(model, ids, mask)
    name = {
        "bert": "bert.encoder.layer.0.attention.output.dense.weight",
        "gpt2": "transformer.h.0.attn.c_proj.weight",
    }[model.family.model_type]
    mixed = inputs_of(model, name, lambda: batch_loss(model, ids, mask, torch.arange(2)))
    gradient = model.family.output_gradient(tensors, 0)
    assert outside(gradient, mixed[mask.bool()]) < 1e-4
    assert outside(gradient.T, mixed[mask.bool()]) > 1e-2
    assert model.family.output_gradient({}, 0) is None


def test_what_was_not_shared_is_not_there(model, batch):
    tensors = gradients(model, *batch)
    names = model.family.attention_parameters(1)
    assert model.family.attention_gradients({}, 1) == []
    kept = {names[-1]: tensors[names[-1]]}
    assert len(model.family.attention_gradients(kept, 1)) == 3 // len(names)
    assert model.family.attention_gradients(kept, 0) == []


@torch.no_grad()
def test_the_token_table_is_the_first_attention_input(model, batch):
    ids, mask = batch
    name = model.family.attention_parameters(0)[0]
    recorded = inputs_of(model, name, lambda: batch_loss(model, ids, mask, torch.arange(2)))
    table = model.family.token_table(model.module)
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    torch.testing.assert_close(table(ids, positions), recorded, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_first_block_in_parts_is_the_whole_first_block(model, batch):
    ids, mask = batch[0][:1], batch[1][:1]
    name = model.family.attention_parameters(1)[0]
    recorded = inputs_of(model, name, lambda: batch_loss(model, ids, mask, torch.arange(1)))[0]
    block = model.family.first_block(model.module)
    residual, x = block.enter(ids[0], torch.arange(len(ids[0])))
    q, k, v = (part.transpose(0, 1) for part in block.project(x))
    scores = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    if model.family.causal:
        scores += torch.full_like(scores, -torch.inf).triu(1)
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
    assert q.shape == (block.num_heads, len(ids[0]), model.hidden_size // block.num_heads)
    torch.testing.assert_close(block.leave(residual, mixed), recorded, atol=2e-5, rtol=1e-4)


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
    assert own[family.position_embedding].shape == (model.max_length, model.hidden_size)
    assert {n for layer in range(3) for n in family.attention_parameters(layer)} <= own.keys()
    if model.task == CLASSIFICATION:
        assert own[family.classifier[0]].shape == (model.num_labels, model.hidden_size)
        assert set(family.classifier) <= own.keys()
    assert models.families()[family.model_type] is family


def test_encoded_texts_have_the_marks_that_training_needs(model):
    text = "I told nobody"
    (ids,) = model.encode([text])
    tokenizer = model.tokenizer
    if model.family.model_type == "bert":
        assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
        text = text.lower()
    elif model.task == CAUSAL_LM:
        assert ids[-1] == tokenizer.eos_token_id
    assert model.decode(ids) == text
    assert model.decode([i for i in ids if i not in model.special_ids()]) == text


# --- loading --------------------------------------------------------------------------------


def test_a_model_filled_from_parameters_is_the_model(bert_tiny):
    empty = models.load("builtin/bert-tiny", CLASSIFICATION, 2, seed=0, weights=False)
    own = bert_tiny.parameters()
    assert models.fingerprint(empty.parameters()) != models.fingerprint(own)
    models.load_parameters_(empty, own)
    assert models.fingerprint(empty.parameters()) == models.fingerprint(own)
    with pytest.raises(ValueError, match=r"another model: \['classifier\.bias'\]"):
        models.load_parameters_(empty, {n: v for n, v in own.items() if n != "classifier.bias"})


def test_the_seed_decides_the_new_classifier(bert_tiny):
    one, same, other = (
        models.load("builtin/bert-tiny", CLASSIFICATION, 2, seed=s).parameters() for s in (3, 3, 4)
    )
    differ = {name for name in one if not torch.equal(one[name], other[name])}
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert "classifier.weight" in differ
    assert not [name for name in differ if "encoder" in name]


@pytest.mark.parametrize(
    ("name", "task", "words"),
    [
        ("builtin/bert-tiny", CAUSAL_LM, ["model.task", "causal-lm", "encoder", CLASSIFICATION]),
        ("builtin/bert-tyni", CLASSIFICATION, ["model.name", "bert-tyni", "'bert-tiny'"]),
        ("./no/such/folder", CLASSIFICATION, ["model.name", "./no/such/folder", "no such folder"]),
        ("nobody/no-model", CLASSIFICATION, ["model.name", "nobody/no-model", "builtin/bert-tiny"]),
    ],
)
def test_a_model_that_cannot_be_loaded_is_refused(name, task, words):
    with pytest.raises(ConfigError) as caught:
        models.load(name, task, 2, seed=0)
    assert [word for word in words if word not in str(caught.value)] == []
    assert "\n" not in str(caught.value)


def test_another_family_is_refused_by_name(tmp_path, bert_tiny):
    bert_tiny.tokenizer.save_pretrained(tmp_path)
    config = json.loads(DistilBertConfig().to_json_string())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"family 'distilbert': choose one of .*bert, gpt2"):
        models.load(str(tmp_path), CLASSIFICATION, 2, seed=0)


def test_damaged_weights_are_refused(tmp_path, bert_tiny):
    bert_tiny.tokenizer.save_pretrained(tmp_path)
    bert_tiny.module.config.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ConfigError, match=r"model\.name = .* weights that cannot be loaded"):
        models.load(str(tmp_path), CLASSIFICATION, 2, seed=0)
