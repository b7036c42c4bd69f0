import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from cases import some

from fedleak.attacks import certificate, replay
from fedleak.attacks.adam_step import behind_adam
from fedleak.attacks.auto.attack import Auto
from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.attacks.listening import listening
from fedleak.attacks.subspace import dager, depth_search, sparse_bayes
from fedleak.attacks.subspace.answer import Judged
from fedleak.attacks.subspace.dager import Dager
from fedleak.attacks.subspace.depth_search import read_depths, spanned_layers
from fedleak.attacks.subspace.span import ACCEPT
from fedleak.attacks.subspace.sparse_bayes import sparse_tokens
from fedleak.attacks.subspace.update_evidence import log_probabilities
from fedleak.attacks.subspace.weighted_span import LowRank
from fedleak.models import CAUSAL_LM, CLASSIFICATION
from fedleak.models.lora import Lora, adapt_
from fedleak.training.observation import UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.util.rng import stream

CLIPPED = Recipe(optimiser="adamw", max_grad_norm=0.05)
BEYOND = 100
"""Tokens that need not pass: none is left out."""

TEXTS = ["she told us that", "nobody knows it all"]


def unheard(step, steps, best):
    """Progress that nobody asked for."""


@pytest.fixture
def adapted(small):
    """Returns a decoder with adapters, whose second matrices are zero in a first round."""

    def make(family="llama", *, first=False, rank=24, task=CAUSAL_LM, width=64):
        model = small(family, task, layers=4, width=width)
        adapt_(model.module, Lora(rank, 2.0 * rank), model.family.classifier)
        rng = stream(0, "adapters")
        for name, parameter in model.trained().items():
            if "lora_A" in name or ("lora_B" in name and not first):
                size = 0.1 if "lora_A" in name else 0.01
                parameter.data = size * torch.randn(parameter.shape, generator=rng)
        return model

    return make


@pytest.fixture
def sent(observe):
    """Returns the texts of a client, and what a server sees of its step on them."""

    def make(model, texts, recipe=CLIPPED):
        how = {"kind": UpdateKind.DELTA, "learning_rate": 2e-4, "recipe": recipe}
        with torch.enable_grad():
            observed = observe(model, texts, **how)
        return list(observed.sequences), observed.seen

    return make


@pytest.mark.parametrize(
    ("count", "first", "family"),
    some(product([2, 1], [False, True], ["llama", "gpt2"]), every=3),
)
def test_a_batch_is_read_from_adapters_behind_a_step_of_adam(adapted, sent, family, first, count):
    model = adapted(family, first=first)
    own, seen = sent(model, TEXTS[:count])
    answer = Dager()(seen, model, rng=stream(0, "attack"))
    closed = [certificate.close(model, ids) for ids in answer.sequences]
    assert sorted(closed) == sorted(own)
    assert replay.replay(model, closed, seen).verified


@pytest.mark.parametrize("count", [1, 2])
def test_an_encoders_tokens_are_more_than_its_adapters_have_rows(adapted, sent, count):
    model = adapted("bert", rank=2, width=128, task=CLASSIFICATION)
    own, seen = sent(model, TEXTS[:count])
    answer = Dager()(seen, model, rng=stream(0, "attack"))
    assert answer.diagnostics["rows"] == 4 < len(own[0])
    assert set(answer.tokens) == {token for ids in own for token in ids}
    assert sorted(answer.sequences) == sorted(own)
    assert replay.replay(model, answer.sequences, seen).verified


@pytest.mark.parametrize(
    ("family", "rows", "texts"),
    [
        pytest.param("llama", 4, TEXTS, marks=pytest.mark.slow),
        ("gpt2", 2, [TEXTS[0], "nobody knows it"]),
    ],
)
def test_a_decoders_tokens_are_more_than_its_adapters_have_rows(adapted, sent, family, rows, texts):
    model = adapted(family, rank=2, width=128)
    own, seen = sent(model, texts)
    answer = Dager(seconds=20.0)(seen, model, rng=stream(0, "attack"))
    assert answer.diagnostics["rows"] == rows
    assert set(answer.tokens) == {token for ids in own for token in ids[:-1]}
    closed = {certificate.close(model, ids) for ids in answer.sequences}
    named = Auto(seconds=20.0)(seen, model, rng=stream(0, "attack"))
    assert closed == set(own)
    assert named.verified


def test_a_sum_over_clients_shows_the_tokens_of_all(adapted, observe):
    model = adapted("bert", rank=2, width=128, task=CLASSIFICATION)
    seen = [observe(model, [text]).seen for text in TEXTS]
    tensors = {
        name: sum(client.update.tensors[name] for client in seen) for name in seen[0].update.tensors
    }
    update = replace(seen[0].update, tensors=tensors, num_examples=2)
    answer = Dager()(replace(seen[0], update=update, client=-1), model, rng=stream(0, "attack"))
    assert set(answer.tokens) == {token for ids in model.encode(TEXTS) for token in ids}


def test_positions_give_the_order_of_one_text(adapted, sent):
    model = adapted("gpt2", rank=4, width=128)
    (own,), seen = sent(model, ["she told us that nobody knows it all, she told us that"])
    (text,) = Dager()(seen, model, rng=stream(0, "attack")).sequences
    assert certificate.close(model, text) == own


@pytest.mark.parametrize(
    ("count", "how"),
    [
        (1, {"kind": UpdateKind.GRADIENT}),
        (2, {"kind": UpdateKind.GRADIENT}),
        pytest.param(2, {"kind": UpdateKind.DELTA, "batch_size": 1}, marks=pytest.mark.slow),
    ],
    ids=["text", "batch", "steps of SGD"],
)
def test_sums_of_gradients_show_as_much_as_a_step_of_adam(adapted, observe, count, how):
    model = adapted("bert", rank=2, width=128, task=CLASSIFICATION)
    observed = observe(model, TEXTS[:count], **how)
    answer = Dager()(observed.seen, model, rng=stream(0, "attack"))
    assert set(answer.tokens) == {token for ids in observed.sequences for token in ids}
    one_gradient = how["kind"] == UpdateKind.GRADIENT
    assert {*answer.sequences} <= {*map(tuple, observed.sequences)}
    assert len(answer.sequences) == count or not one_gradient
    assert answer.verified == one_gradient


def test_a_decoders_gradient_shows_more_tokens_than_rows(adapted, observe):
    model = adapted(rank=4, width=128)
    observed = observe(model, TEXTS)
    answer = Dager()(observed.seen, model, rng=stream(0, "attack"))
    inputs = {token for ids in observed.sequences for token in ids[:-1]}
    assert answer.diagnostics["rows"] < len(inputs)
    assert set(answer.tokens) == inputs


@torch.no_grad()
def test_numbers_that_adam_divided_count_by_the_size_of_inputs(adapted, monkeypatch):
    rng = torch.Generator().manual_seed(3)
    model = adapted("bert", rank=8, width=128, task=CLASSIFICATION)
    norm = model.module.get_submodule("bert.embeddings.LayerNorm")
    norm.weight.copy_(10 ** torch.randn(128, generator=rng).clamp(-1, 1))
    token_VD, _, _ = model.family.token_table(model.module).directions()
    own = torch.randperm(model.vocabulary, generator=rng)[:8]
    rows_OD = (torch.randn((8, 8), generator=rng) @ token_VD[own]).sign()
    matrix = LowRank.of(rows_OD, torch.zeros_like(rows_OD))
    right, searches, support = {*own.tolist()}, [], sparse_bayes.sparse_support
    monkeypatch.setattr(
        sparse_bayes,
        "sparse_support",
        lambda *given, **how: searches.append(how) or support(*given, **how),
    )
    bag = sparse_tokens(model, matrix, UNLIMITED, divided=True)
    assert searches == [{"divided": True}]
    assert {*bag.tokens_N.tolist()} <= right
    assert len(bag.tokens_N) >= 4
    plain = sparse_tokens(model, matrix, UNLIMITED)
    assert plain is None or len({*plain.tokens_N.tolist()} & right) < len(bag.tokens_N)


@pytest.mark.parametrize(
    ("how", "share"),
    [
        ({"recipe": Recipe(precision="bfloat16-mixed")}, 1.0),
        (
            {
                "kind": UpdateKind.DELTA,
                "batch_size": 1,
                "learning_rate": 1e-4,
                "recipe": Recipe(optimiser="adamw"),
            },
            0.3,
        ),
    ],
    ids=["half precision", "steps of Adam"],
)
def test_what_blurs_rows_leaves_the_strongest_tokens(adapted, observe, how, share):
    model = adapted("bert", rank=8, width=128, task=CLASSIFICATION)
    observed = observe(model, TEXTS, **how)
    answer = Dager()(observed.seen, model, rng=stream(0, "attack"))
    tokens = {token for ids in observed.sequences for token in ids}
    assert set(answer.tokens) <= tokens
    assert len(answer.tokens) >= share * len(tokens)
    assert not answer.verified
    assert 0 < answer.diagnostics["noise"] < 1


@pytest.mark.parametrize(
    ("recipe", "part"), [(Recipe(optimiser="adamw"), 1.0), (Recipe(), 0.25)], ids=["Adam", "SGD"]
)
def test_behind_steps_of_adam_nothing_else_needs_the_time(
    adapted, observe, monkeypatch, recipe, part
):
    how = {"kind": UpdateKind.DELTA, "batch_size": 1, "learning_rate": 1e-4, "recipe": recipe}
    model, left = adapted("bert", rank=8, task=CLASSIFICATION), []
    observed = observe(model, TEXTS, **how)
    monkeypatch.setattr(dager, "sparse_tokens", lambda *given, **_: left.append(given[2].left()))
    Dager(seconds=1000.0)(observed.seen, model, rng=stream(0, "attack"))
    assert left[0] == pytest.approx(1000 * part, rel=0.05)


def test_words_of_a_search_that_ran_out_of_time_may_be_too_few(adapted, observe, monkeypatch):
    model = adapted("bert", rank=8, width=128, task=CLASSIFICATION)
    observed = observe(model, TEXTS, recipe=Recipe(precision="bfloat16-mixed"))

    def late(model, matrix, clock, **how):
        clock.rang = True
        return sparse_tokens(model, matrix, UNLIMITED, **how)

    monkeypatch.setattr(dager, "sparse_tokens", late)
    answer = Dager(seconds=1000.0)(observed.seen, model, rng=stream(0, "attack"))
    assert answer.tokens
    assert answer.diagnostics["time_up"]


@torch.no_grad()
def test_words_that_no_vector_tells_apart_are_tried_by_their_likelihood(adapted, sent):
    model = adapted(rank=8, width=128)
    (own,), seen = sent(model, ["she told us that nobody knows it all"])
    word, others = own[4], [300, 301, 302]
    embedding = model.module.get_input_embeddings().weight
    embedding[others] = embedding[word].clone()
    behind = behind_adam(seen, model)
    matrix, _, _ = depth_search.layer_rows(model, behind, 0)
    bag = sparse_tokens(model, matrix, UNLIMITED)
    assert {*bag.alike_A.tolist()} == {word, *others}
    assert {*bag.told_apart} == {*own[:-1]} - {word}
    assert {*bag.candidates} == {*own[:-1], *others}
    layers = next(spanned_layers(model, behind, UNLIMITED))
    slot = list(depth_search._slots(model, layers[0], bag))[5]
    assert {*slot.tokens_N.tolist()} == {*bag.candidates}
    assert {*slot.tokens_N[: slot.nearest].tolist()} == {*bag.tokens_N.tolist()}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_of_a_classifier_the_best_prefixes_are_the_answer(adapted, sent, family):
    """Its labels are not known, so that no gradient tells where a text ends."""
    model = adapted(family, task=CLASSIFICATION)
    own, seen = sent(model, TEXTS)
    answer = Dager()(seen, model, rng=stream(0, "attack"))
    assert sorted(answer.sequences) == sorted(own)
    assert not answer.verified


def test_auto_proves_it_before_slower_attacks_run(adapted, sent):
    model = adapted()
    own, seen = sent(model, TEXTS)
    answer = Auto(seconds=60.0)(seen, model, rng=stream(0, "attack"))
    assert sorted(answer.sequences) == sorted(own)
    assert answer.verified
    assert [*answer.diagnostics["asked"]][-1] == "dager"
    assert "state_pursuit" not in answer.diagnostics["asked"]


@torch.no_grad()
def test_each_state_counts_by_what_those_before_it_do_not_explain(adapted, sent):
    model = adapted()
    (own,), seen = sent(model, TEXTS[:1])
    layers = next(spanned_layers(model, behind_adam(seen, model), UNLIMITED))
    beam = depth_search._Beam.empty(layers)
    for token in own[:-1]:
        beam = depth_search._grown(model, beam, torch.tensor([[token]]), layers, 1, BEYOND)
    assert beam.ids == [own[:-1]]
    with listening([layer.module for layer in layers]) as heard:
        model.module.base_model(input_ids=torch.tensor([own[:-1]]))
    for layer, (known_TD,) in zip(layers, beam.known, strict=True):
        torch.testing.assert_close(known_TD @ known_TD.T, torch.eye(len(own) - 1).double())
        (states_TD,) = heard[layer.module][0].double()
        torch.testing.assert_close(states_TD @ known_TD.T @ known_TD, states_TD, atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm", [0.05, 5.0], ids=["known", "large numbers not known"])
def test_a_batch_is_chosen_by_the_gradients_of_whole_texts(adapted, sent, norm):
    """Whatever spans say of them: the wrong texts here seem to be better."""
    model = adapted()
    own, seen = sent(model, TEXTS, replace(CLIPPED, max_grad_norm=norm))
    right = [ids[:-1] for ids in own]
    wrong = [*((*ids, ids[-1]) for ids in right), right[0][:-1], (*right[0][:2], *right[1][2:])]
    judged = [Judged(ids, -9.0, math.inf) for ids in wrong]
    judged += [Judged(ids, -1.0, math.inf) for ids in right]
    behind = behind_adam(seen, model)
    chosen = depth_search._batch(model, behind, judged, True, UNLIMITED)
    assert sorted(text.ids for text in chosen.texts) == sorted(right)


def test_texts_that_explain_less_than_half_of_a_gradient_are_none_of_its_batch(adapted, sent):
    model = adapted()
    _, seen = sent(model, TEXTS[:1])
    (other,) = map(tuple, model.encode(TEXTS[1:]))
    judged = [Judged(other[:-1], -9.0, math.inf)]
    assert depth_search._batch(model, behind_adam(seen, model), judged, True, UNLIMITED).texts == []


@pytest.mark.parametrize(
    ("family", "rank"), [("llama", 4), pytest.param("gpt2", 8, marks=pytest.mark.slow)]
)
def test_a_text_of_more_tokens_than_rows_is_read(adapted, sent, family, rank):
    """The states of its beginning are known and stand beside the rows."""
    model = adapted(family, rank=rank, width=128)
    (own,), seen = sent(model, ["she told us that nobody knows it all"])
    behind = behind_adam(seen, model)
    (layers,) = spanned_layers(model, behind, UNLIMITED)
    rows = len(layers[0].span.axis_RD)
    assert len(own) - 1 > rows
    (text,) = read_depths(model, behind, None, UNLIMITED, unheard)
    assert certificate.close(model, text.ids) == own


@pytest.mark.parametrize(
    ("of_fits", "of_rows", "chosen"),
    [(1.0, 0.5, "fits"), (10.0, 1.0, "rows"), (10.0, 20.0, "fits")],
)
def test_rows_are_tried_where_texts_of_the_fits_leave_too_much(
    adapted, sent, monkeypatch, of_fits, of_rows, chosen
):
    model = adapted(rank=8, width=128)
    _, seen = sent(model, TEXTS[:1])

    def batch(model, behind, prefixes, whole, clock):
        return (
            depth_search._Batch(["fits"], of_fits)
            if whole
            else depth_search._Batch(["rows"], of_rows)
        )

    monkeypatch.setattr(depth_search, "_batch", batch)
    monkeypatch.setattr(depth_search, "_prefixes", lambda *_: [])
    assert read_depths(model, behind_adam(seen, model), None, UNLIMITED, unheard) == [chosen]


def test_behind_rows_a_text_may_end_long_before_its_prefixes(adapted, sent):
    model = adapted()
    (own,), seen = sent(model, TEXTS[:1])
    longer = (*own[:-1], *range(300, 308))
    judged = [Judged(longer[: n + 1], -float(n), math.inf) for n in range(len(longer))]
    behind = behind_adam(seen, model)
    (text,) = depth_search._batch(model, behind, judged, False, UNLIMITED).texts
    assert text.ids == own[:-1]
    assert depth_search._batch(model, behind, judged, True, UNLIMITED).texts[0].ids != own[:-1]


@torch.no_grad()
def test_next_tokens_are_the_nearest_and_the_likeliest_of_those_that_pass(adapted, sent):
    model = adapted(rank=2, width=128)
    (own,), seen = sent(model, ["she told us that nobody knows it all"])
    (layers,) = spanned_layers(model, behind_adam(seen, model), UNLIMITED)
    beam = depth_search._Beam.empty(layers)
    for token in own[:5]:
        beam = depth_search._grown(model, beam, torch.tensor([[token]]), layers, 1, BEYOND)
    slot = list(depth_search._slots(model, layers[0], None))[5]
    slot = replace(slot, nearest=4, likeliest=4)
    (proposed,) = depth_search._proposed(model, beam, slot).tolist()
    excess_V = layers[0].span.beside(beam.known[0][0]).estimate(slot.x_VD)
    nearest = excess_V.argsort().tolist()
    likely_V = log_probabilities(model, torch.tensor([own[:5]]))[0, -1]
    passed = [token for token in nearest[4:] if excess_V[token] < ACCEPT]
    assert 4 < len(passed) < model.vocabulary / 2
    assert proposed == nearest[:4] + sorted(passed, key=likely_V.tolist().__getitem__)[:-5:-1]
    classifier = replace(model, task=CLASSIFICATION)  # It has no likeliest tokens.
    assert depth_search._proposed(classifier, beam, slot).tolist() == [nearest[:8]]


def test_without_time_no_span_is_fitted_and_in_a_first_round_there_is_none(adapted, sent):
    model = adapted()
    _, seen = sent(model, TEXTS[:1])
    of_rows = list(spanned_layers(model, behind_adam(seen, model), Clock(1e-9)))
    assert [layer.whole for layer in of_rows[0]] == [False] * 4
    narrow = adapted(rank=2, first=True)
    _, seen = sent(narrow, TEXTS[:1])
    assert read_depths(narrow, behind_adam(seen, narrow), None, UNLIMITED, unheard) is None


def test_layers_whose_adapters_were_not_sent_are_left_out(adapted, sent):
    model = adapted()
    _, seen = sent(model, TEXTS[:1])
    kept = {name: value for name, value in seen.update.tensors.items() if ".2." not in name}
    behind = behind_adam(replace(seen, update=replace(seen.update, tensors=kept)), model)
    layers = next(spanned_layers(model, behind, UNLIMITED))
    assert [layer.number for layer in layers] == [0, 1, 3]
    first = {name: value for name, value in kept.items() if ".0." not in name}
    behind = behind_adam(replace(seen, update=replace(seen.update, tensors=first)), model)
    assert list(spanned_layers(model, behind, UNLIMITED)) == []


def test_the_decay_of_small_weights_hides_no_step(adapted, sent):
    """It moves a part of them to where float32 has another grid."""
    model = adapted("bert", rank=2, width=128, task=CLASSIFICATION)
    for name, weight in model.trained().items():
        weight.data = weight.data / 20 if "lora_B" in name else weight.data
    own, seen = sent(model, TEXTS[:1], replace(CLIPPED, weight_decay=0.01))
    before = {name: value.detach() for name, value in model.trained().items()}
    steps = {
        name: seen.knowledge.recipe.without_decay(value, before[name], 2e-4, 1)
        for name, value in seen.update.tensors.items()
    }
    seen = replace(seen, update=replace(seen.update, tensors=steps))
    (text,) = Dager()(seen, model, rng=stream(0, "attack")).sequences
    assert text == own[0]
