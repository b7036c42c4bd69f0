"""Parts by the partial-gradient paper's names: which parameters, from whom, and which not."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BertConfig, BertForSequenceClassification

from fedleak import models
from fedleak.models import (
    CAUSAL_LM,
    CLASSIFICATION,
    LanguageModel,
    ModelSpec,
    batch_loss,
    loading,
    pad,
)
from fedleak.models.lora import Lora, adapt_
from fedleak.models.parameter_selection import is_part, matching, parameters_of
from fedleak.util.errors import ConfigError

pytestmark = pytest.mark.core

LAYERS = 11
FAMILIES = ("bert", "gpt2", "llama")

# The name of a layer, and what is below it.
LAYER = {"bert": "bert.encoder.layer", "gpt2": "transformer.h", "llama": "model.layers"}
WEIGHTS = {
    "bert": {
        "q": ["attention.self.query.weight"],
        "k": ["attention.self.key.weight"],
        "v": ["attention.self.value.weight"],
        "o": ["attention.output.dense.weight"],
        "f": ["intermediate.dense.weight"],
        "p": ["output.dense.weight"],
    },
    "gpt2": {
        "qkv": ["attn.c_attn.weight"],
        "o": ["attn.c_proj.weight"],
        "f": ["mlp.c_fc.weight"],
        "p": ["mlp.c_proj.weight"],
    },
    "llama": {
        "q": ["self_attn.q_proj.weight"],
        "k": ["self_attn.k_proj.weight"],
        "v": ["self_attn.v_proj.weight"],
        "o": ["self_attn.o_proj.weight"],
        "f": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "p": ["mlp.down_proj.weight"],
    },
}
BOTH = ("weight", "bias")
BIASES_AND_NORMS = {
    "bert": [
        *(f"attention.self.{part}.bias" for part in ("query", "key", "value")),
        *(f"{part}.dense.bias" for part in ("attention.output", "intermediate", "output")),
        *(f"{part}.LayerNorm.{wb}" for part in ("attention.output", "output") for wb in BOTH),
    ],
    "gpt2": [
        *(f"{part}.bias" for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")),
        *(f"{norm}.{wb}" for norm in ("ln_1", "ln_2") for wb in BOTH),
    ],
    "llama": ["input_layernorm.weight", "post_attention_layernorm.weight"],
}
WORDS = {
    "bert": {
        "embeddings": [
            "bert.embeddings.word_embeddings.weight",
            "bert.embeddings.position_embeddings.weight",
            "bert.embeddings.token_type_embeddings.weight",
            "bert.embeddings.LayerNorm.weight",
            "bert.embeddings.LayerNorm.bias",
        ],
        "classifier": ["classifier.weight", "classifier.bias"],
    },
    "gpt2": {
        "embeddings": ["transformer.wte.weight", "transformer.wpe.weight"],
        "classifier": ["score.weight"],
    },
    "llama": {"embeddings": ["model.embed_tokens.weight"], "classifier": ["score.weight"]},
}
IN_NO_PART = {
    "bert": {"bert.pooler.dense.weight", "bert.pooler.dense.bias"},
    "gpt2": {"transformer.ln_f.weight", "transformer.ln_f.bias"},
    "llama": {"model.norm.weight"},
}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, small):
    return small(request.param, layers=LAYERS, width=8)


def in_layers(family, below, layers):
    return {f"{LAYER[family]}.{layer}.{name}" for layer in layers for name in below}


def names_of(model, *parts):
    """The parameters of parts that are asked for together, which come in the model's order."""
    selected = parameters_of(model, parts)
    assert list(selected) == list(dict.fromkeys(parts))
    for names in selected.values():
        assert names == [name for name in model.parameters() if name in names]
    return {name for names in selected.values() for name in names}


@pytest.mark.parametrize("number", ["", "1", "2", str(LAYERS)])
def test_a_letter_is_a_weight_of_the_numbered_layer_or_of_all(model, number):
    family = model.family.model_type
    layers = [int(number) - 1] if number else range(LAYERS)
    for letters, below in WEIGHTS[family].items():
        parts = [letter + number for letter in letters]
        assert names_of(model, *parts) == in_layers(family, below, layers)
    whole = [*chain(*WEIGHTS[family].values()), *BIASES_AND_NORMS[family]]
    assert names_of(model, f"t{number}") == in_layers(family, whole, layers)


@pytest.mark.parametrize("word", ["embeddings", "classifier"])
def test_words_are_what_is_before_and_behind_the_layers(model, word):
    assert names_of(model, word) == set(WORDS[model.family.model_type][word])


def test_layers_embeddings_and_classifier_are_apart_and_all_but_what_is_told(model):
    parts = [*(f"t{number + 1}" for number in range(LAYERS)), "embeddings", "classifier"]
    selected = [name for names in parameters_of(model, parts).values() for name in names]
    assert len(selected) == len(set(selected))
    assert model.parameters().keys() - set(selected) == IN_NO_PART[model.family.model_type]


def test_the_output_layer_of_a_next_token_model_is_in_no_part(small):
    for family, rest in (("gpt2", []), ("llama", ["lm_head.weight"])):  # GPT-2's is tied
        model = small(family, CAUSAL_LM)
        left = model.parameters().keys() - names_of(model, "t", "embeddings", "classifier")
        assert left == {*IN_NO_PART[family], *rest}
        assert parameters_of(model, ["classifier"]) == {"classifier": []}


PARTS = st.lists(
    st.sampled_from(["embeddings", "classifier", "t", "t2", "t10", "o", "o1", "f3", "p", "p10"])
    | st.sampled_from([("q", "k", "v"), ("q3", "k3", "v3"), ("k", "q2", "v")]),
    max_size=4,
)


@given(PARTS)
def test_what_is_asked_for_together_is_what_is_asked_for_one_by_one(model, drawn):
    groups = [(part,) if isinstance(part, str) else part for part in drawn]
    if model.family.model_type == "gpt2":
        groups = [group for group in groups if group != ("k", "q2", "v")]
    alone = [names_of(model, *group) for group in groups]
    assert names_of(model, *chain(*groups)) == set().union(*alone)


def test_the_paper_has_these_numbers_of_parameters():
    with torch.device("meta"):
        module = BertForSequenceClassification(BertConfig())
    model = LanguageModel(
        module=module, tokenizer=None, family=models.families()["bert"], task=CLASSIFICATION
    )

    def size(part):
        return sum(model.parameters()[name].numel() for name in names_of(model, part))

    whole = sum(p.numel() for p in model.parameters().values())
    assert (size("q1"), size("f7"), size("t1")) == (589_824, 2_359_296, 7_087_872)
    assert size("p12") == 2_359_296  # with the attention output matrix, as theirs is: 2,949,120
    assert size("t") == 12 * size("t1") == 85_054_464
    assert round(100 * size("q1") / whole, 2) == 0.54
    assert round(100 * size("p1") / whole, 2) == 2.15


@pytest.mark.parametrize("bias", [False, True])
def test_biases_are_only_of_whole_layers(small, bias):
    model = small("llama", attention_bias=bias, mlp_bias=bias)
    letters = parameters_of(model, list("qkvofp"))
    assert not [name for names in letters.values() for name in names if "bias" in name]
    assert sum("bias" in name for name in names_of(model, "t2")) == 7 * bias


# --- what cannot be had ---------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 3, 10])
@pytest.mark.parametrize("letter", ["q", "p", "t"])
def test_a_layer_that_is_not_there_is_refused_with_how_many_are(small, letter, number):
    with pytest.raises(ConfigError) as caught:
        parameters_of(small("bert", layers=2), [f"{letter}2", f"{letter}{number}"])
    assert str(caught.value) == (
        f"update.share: '{letter}{number}' is of layer {number}, but the model has 2 layers: count "
        "them from 1 to 2"
    )


ONE = "transformer.h.0.attn.c_attn"


@pytest.mark.parametrize(
    ("parts", "first", "together", "pattern"),
    [
        (["q"], "q", ["q", "k", "v"], "transformer.h.*.attn.c_attn"),
        (["q1"], "q1", ["q1", "k1", "v1"], ONE),
        (["o1", "k1", "v1"], "k1", ["q1", "k1", "v1"], ONE),
        (["v1", "q1", "k2"], "v1", ["q1", "k1", "v1"], ONE),
        (["q", "k", "v1"], "q", ["q", "k", "v"], "transformer.h.*.attn.c_attn"),
        (["t2", "q1"], "q1", ["q1", "k1", "v1"], ONE),
    ],
)
def test_a_part_of_a_fused_parameter_is_refused_alone(small, parts, first, together, pattern):
    model = small("gpt2")
    with pytest.raises(ConfigError) as caught:
        parameters_of(model, parts)
    assert str(caught.value) == (
        f"update.share: {first!r} cannot be had alone, because gpt2 keeps q, k, v of a layer in "
        f"one parameter: name all of {together}, or {pattern!r}"
    )
    # What it says works.
    layers = [0] if first[1:] else [0, 1]
    of_layer = {ONE.replace("0", f"{layer}") + ".weight" for layer in layers}
    assert names_of(model, *together) == of_layer
    biases = {name.replace("weight", "bias") for name in of_layer}
    assert set(matching(model.parameters(), [pattern])) == of_layer | biases


@pytest.mark.parametrize("parts", [["q1", "k", "v1"], ["q", "k", "v"], ["t1", "q1"], ["t", "v"]])
def test_a_part_of_a_fused_parameter_comes_with_the_others_however_they_are_asked_for(small, parts):
    model = small("gpt2", layers=1)
    assert f"{ONE}.weight" in names_of(model, *parts)


@pytest.mark.parametrize("name", ["q", "k12", "v1", "o", "f3", "p6", "t", "embeddings"])
def test_names_of_parts(name):
    assert is_part(name)


@pytest.mark.parametrize(
    "name",
    [
        *["", "query", "q1.", "Q1", "q-1", "q1 ", "q1\n", "t*", "layer.1", "qk", "1", "q\u0661"],
        *["embedding", "word_embeddings", "classifier.weight", "x1"],
    ],
)
def test_all_else_is_a_pattern(name):
    assert not is_part(name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_whole_name_is_a_pattern_of_no_other(small, family):
    model = small(family, layers=LAYERS, width=8)
    for adapted in (False, True):
        if adapted:
            adapt_(model.module, Lora(2, 2.0), model.family.classifier)
        names = list(model.parameters())
        assert [matching(names, [name]) for name in names] == [[name] for name in names]


# --- adapters -------------------------------------------------------------------------------


def adapters(*stems):
    return {f"{stem}.lora_{ab}.default.weight" for stem in stems for ab in "AB"}


@pytest.mark.parametrize(
    ("family", "targets", "parts", "below"),
    [
        ("bert", None, "q2", ["attention.self.query"]),
        ("bert", None, "k2", []),
        ("bert", None, "t2", ["attention.self.query", "attention.self.value"]),
        ("bert", ["dense"], "p2", ["output.dense"]),
        ("bert", ["dense"], "o2", ["attention.output.dense"]),
        ("gpt2", None, "q2 k2 v2", ["attn.c_attn"]),
        ("gpt2", None, "t2", ["attn.c_attn"]),
        ("gpt2", ["c_proj"], "q2 k2 v2", []),
        ("gpt2", ["c_proj"], "p2", ["mlp.c_proj"]),
        ("llama", None, "v2", ["self_attn.v_proj"]),
        ("llama", ["up_proj", "down_proj"], "f2", ["mlp.up_proj"]),
        ("llama", ["gate_proj", "up_proj"], "f2", ["mlp.gate_proj", "mlp.up_proj"]),
    ],
)
def test_with_adapters_a_part_is_those_of_its_weights(small, family, targets, parts, below):
    model = small(family)
    lora = Lora(2, 2.0, None if targets is None else tuple(targets))
    adapt_(model.module, lora, model.family.classifier)
    stems = [f"{LAYER[family]}.1.{name}" for name in below]
    assert names_of(model, *parts.split()) == adapters(*stems)
    letters = [part[0] for part in parts.split()]
    every = [stem.replace(".1.", f".{layer}.") for stem in stems for layer in (0, 1)]
    assert names_of(model, *letters) == adapters(*every)
    assert names_of(model, "classifier") == set(WORDS[family]["classifier"])
    assert names_of(model, "embeddings") == set()


def test_the_adapters_of_a_fused_parameter_are_refused_alone():
    spec = ModelSpec(name="builtin/gpt2-tiny", task=CAUSAL_LM, num_labels=2, lora=Lora(2, 2.0))
    model = loading.outline(spec)
    with pytest.raises(ConfigError, match=f"'k1' cannot be had alone, .*, or '{ONE}'$"):
        parameters_of(model, ["k1"])
    assert set(matching(model.parameters(), [ONE])) == adapters(ONE)


# --- what has no gradient -------------------------------------------------------------------

KINDS = {
    "bert": ("bert", CLASSIFICATION, {}),
    "gpt2": ("gpt2", CLASSIFICATION, {}),
    "gpt2-lm": ("gpt2", CAUSAL_LM, {}),
    "llama": ("llama", CLASSIFICATION, {}),
    "llama-lm": ("llama", CAUSAL_LM, {"attention_bias": True, "mlp_bias": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_null_parameters_have_no_gradient(small, texts, kind):
    family, task, options = KINDS[kind]
    model = small(family, task, layers=2, **options)
    model.module.double()
    sequences = [ids[:9] for ids in model.encode(texts[:3])]
    sequences[1] = sequences[1][:5]
    ids, mask = pad(sequences, model.tokenizer.pad_token_id, model.device)
    loss = batch_loss(model, ids, mask, torch.arange(3))
    named = model.trained()
    gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
    of_key = model.family.projections(gradients, 0)["key"].abs().max()
    sizes = {name: float(gradient.abs().max() / of_key) for name, gradient in gradients.items()}
    null = model.family.null_parameters(named)
    biases = {f"{LAYER['bert']}.{layer}.attention.self.key.bias" for layer in (0, 1)}
    assert null == (biases if family == "bert" else set())
    assert all(sizes[name] < 1e-12 for name in null)
    assert all(sizes[name] > 1e-3 for name in named.keys() - null)
    assert model.family.null_parameters(["bert.pooler.dense.bias", *null]) == null
    assert model.family.null_parameters([]) == frozenset()
    if family == "gpt2":  # a third of a parameter is not a parameter
        query, key, value = gradients[f"{ONE}.bias"].chunk(3)
        assert key.abs().max() < 1e-12 * of_key
        assert min(query.abs().max(), value.abs().max()) > 1e-3 * of_key
