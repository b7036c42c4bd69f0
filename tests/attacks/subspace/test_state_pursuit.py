import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedleak.attacks import certificate, replay
from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Status
from fedleak.attacks.subspace import state_pursuit, update_evidence
from fedleak.attacks.subspace.answer import Judged
from fedleak.attacks.subspace.state_pursuit import StatePursuit
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.defenses.mask import Mask
from fedleak.defenses.quantize import Quantize
from fedleak.defenses.sign import Sign
from fedleak.models import CAUSAL_LM, ModelSpec, load_parameters_, loading
from fedleak.models.lora import Lora, adapt_
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, Observation, UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream

STORIES = Path(os.environ.get("FEDLEAK_ASSETS", "/nowhere")) / "models" / "stories15m"
ADAMW = LocalTraining(
    kind=UpdateKind.DELTA,
    batch_size=4,
    epochs=1,
    learning_rate=1e-4,
    dropout=False,
    recipe=Recipe(optimiser="adamw"),
)


def sent(model, sequences, batch_size=4):
    """The update of a client that makes steps of AdamW; the model stays as it is."""
    before = {name: value.clone() for name, value in model.parameters().items()}
    how = replace(ADAMW, batch_size=batch_size)
    with torch.enable_grad():
        update = local_update_(model, sequences, [0] * len(sequences), how, seed=3)
    load_parameters_(model, before)
    known = Knowledge(
        learning_rate=how.learning_rate,
        local_steps=how.steps(len(sequences)),
        dropout=False,
        recipe=how.recipe,
    )
    return Observation(round=2, client=0, update=update, knowledge=known)


@pytest.fixture
def adapted(small):
    """A random decoder whose adapters were trained in earlier rounds."""
    model = small("llama", CAUSAL_LM, layers=3, width=48)
    adapt_(model.module, Lora(6, 12.0), model.family.classifier)
    rng = torch.Generator().manual_seed(0)
    for name, parameter in model.trained().items():
        if "lora_" in name:  # peft draws the first matrix from torch's own generator.
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=rng)
    return model


@torch.no_grad()
def searched(model, seen, beside=(), several=False):
    update = update_evidence.UpdateEvidence(model, seen, stream(0, "texts"))
    search = state_pursuit._Search(model, update, beside, 30, not several, lambda ids: False)
    return update, search


@torch.no_grad()
def score(search, ids):
    """What a closed text explains, and its log probability."""
    return float(search._scores([ids]))


def test_of_signs_a_right_text_explains_more_than_another(adapted):
    own, other = map(tuple, adapted.encode(["she told us that", "nobody knows it all"]))
    _, search = searched(adapted, sent(adapted, [own]))
    assert score(search, own) > score(search, other) + 20


def test_after_adam_numbers_count_by_what_gradients_are_like(adapted):
    (own,) = map(tuple, adapted.encode(["she told us that"]))
    seen = sent(adapted, [own])
    undivided = replace(seen, knowledge=replace(seen.knowledge, recipe=None))
    _, search = searched(adapted, seen)
    _, as_it_is = searched(adapted, undivided)
    assert score(search, own) > score(as_it_is, own)


def test_gradients_are_those_of_autograd_whitened(adapted):
    texts = [tuple(ids) for ids in adapted.encode(["she told us that", "nobody knows"])]
    update, _ = searched(adapted, sent(adapted, texts))
    prior_N, gradients = update.gradients(texts)
    for number, ids in enumerate(texts):
        ids_1T = torch.tensor([ids])
        logits_TV = adapted.module(input_ids=ids_1T).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits_TV, ids_1T[0, 1:], reduction="sum")
        weights = [layer.module.weight for layer in update.layers]
        assert float(prior_N[number]) == pytest.approx(-loss.item(), rel=1e-4)
        whole = torch.autograd.grad(loss, weights)
        for layer, own_OI, made_NOI in zip(update.layers, whole, gradients, strict=True):
            white_OI = layer.white_OI * (layer.out_OO.T @ own_OI @ layer.in_II)
            torch.testing.assert_close(made_NOI[number], white_OI, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_a_right_text_explains_much_of_noise_and_chance_little(small, observe, monkeypatch):
    """Nats are those of normal numbers: of noise alone a text explains half of one, on average."""
    model = small("llama", CAUSAL_LM, layers=3, width=48)
    own, other = map(tuple, model.encode(["she told us that nobody knows", "they sold all of it"]))
    with torch.enable_grad():
        seen = observe(model, ["she told us that nobody knows"]).seen
    noisy = GaussianNoise(relative=10.0)(seen.update, rng=stream(0, "noise"))
    update, _ = searched(model, replace(seen, update=noisy))
    own_nats, other_nats = (update.nats(update.gradients([ids])[1]) for ids in (own, other))
    variance = float(noisy.tensors["model.layers.0.self_attn.q_proj.weight"].square().mean())
    square = sum(
        float(seen.update.tensors[name].square().sum())
        for name in seen.update.tensors
        if "self_attn" in name
    )
    # The most that any test of it can find: half of the gradient's square, in variances of noise.
    most = square / variance / 2
    assert 0.5 * most < float(own_nats) < 1.1 * most
    assert float(other_nats) < 0.5 * float(own_nats)
    with monkeypatch.context() as patch:
        patch.setattr(update_evidence, "noise_variance", lambda gradient_OI: 0.0)
        unaware, _ = searched(model, replace(seen, update=noisy))
    assert unaware.nats(unaware.gradients([own])[1]) < 0.2 * own_nats
    nothing = replace(seen.update, tensors={k: 0 * v for k, v in seen.update.tensors.items()})
    drawn = {
        name: torch.randn(value.shape, generator=stream(0, name))
        for name, value in nothing.tensors.items()
    }
    update, _ = searched(model, replace(seen, update=replace(nothing, tensors=drawn)))
    texts = [own, other, own[:4], other[:4]]
    by_chance = [float(update.nats(update.gradients([ids])[1])) for ids in texts]
    assert max(by_chance) < 8


def test_part_of_what_a_token_explains_anywhere_is_taken_off(adapted):
    update, search = searched(adapted, sent(adapted, [tuple(adapted.encode(["she told us"])[0])]))
    update.most_V[[2, 5]] = torch.tensor([10.0, 20.0])
    assert not search._worth([(1, 2, 3), (4, 5, 6)]).any()
    search._anywhere = 0.6
    worth = search._worth([(1, 2, 2), (2, 5, 6)]).tolist()
    assert worth == pytest.approx([0.6 * 20, 0.6 * 30])


@torch.no_grad()
def test_an_update_makes_likelier_what_it_was_trained_on(adapted):
    (own,) = map(tuple, adapted.encode(["she told us that nobody knows it all"]))
    update, _ = searched(adapted, sent(adapted, [own]))
    hints_TV = update.hints(torch.tensor([own[:-1]]))[0]
    places = [
        float((hints_V < hints_V[token]).float().mean())
        for hints_V, token in zip(hints_TV, own[1:-1], strict=False)
    ]
    # By chance places are uniform: three deviations of their mean.
    assert sum(places) / len(places) > 0.5 + 3 * (12 * len(places)) ** -0.5


@torch.no_grad()
@pytest.mark.parametrize("adam", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_output_layer_names_the_next_token_of_a_right_prefix(small, observe, family, adam):
    """Its rows are signs of sums of states after Adam; else these sums."""
    model = small(family, CAUSAL_LM, layers=3, width=48)
    words = ["she told us that nobody knows it all"]
    (own,) = map(tuple, model.encode(words))
    with torch.enable_grad():
        seen = sent(model, [own]) if adam else observe(model, words).seen
    update, _ = searched(model, seen)
    states_TD = update_evidence.last_hidden(model, torch.tensor([own[:-1]]))[0]
    named_TV = update.head.names(states_TD)
    places = (named_TV > named_TV.gather(1, torch.tensor(own[1:])[:, None])).sum(1)
    assert len({*own}) == len(own)  # A repeated token has a row of several states.
    # The rows are those of the word embedding, too.
    assert places.tolist().count(0) > 0.7 * len(places)
    # Behind a wrong prefix the same rows say less.
    other_TV = update.head.names(states_TD.roll(1, 0))
    assert other_TV.gather(1, torch.tensor(own[1:])[:, None]).mean() < named_TV.max(1).values.mean()


def test_adapters_alone_say_nothing_of_the_output_layer(adapted):
    (own,) = map(tuple, adapted.encode(["she told us that"]))
    update, search = searched(adapted, sent(adapted, [own]))
    assert update.head is None
    assert search._effort == state_pursuit._BY_STATES


def test_a_batch_is_read_from_a_step_of_adamw_on_all_weights_and_proved(small):
    model = small("llama", CAUSAL_LM, layers=3, width=48)
    own = [tuple(ids) for ids in model.encode(["she told us that", "nobody knows it all"])]
    seen = sent(model, own)
    answer = StatePursuit(width=4, longest=8)(seen, model, rng=stream(0, "a"))
    assert {*answer.sequences} == {*own}
    assert replay.replay(model, answer.sequences, seen).verified


@torch.no_grad()
def test_the_first_layer_says_what_is_left_of_rows_and_inputs_without_known_tokens(small):
    """Token by token, by least squares."""
    model = small("llama", CAUSAL_LM, width=48)
    rng = torch.Generator().manual_seed(0)
    whiten_DD = torch.randn(48, 48, generator=rng)
    ids_V = torch.arange(model.vocabulary)
    states_VD = model.family.token_table(model.module)(ids_V, ids_V) @ whiten_DD
    states_VD = states_VD / states_VD.norm(dim=1, keepdim=True).clamp_min(1e-9)
    tokens, known = [20, 30, 40], (30, 50)
    rows = [torch.randn(5, 3, generator=rng) @ states_VD[tokens] for _ in range(2)]
    mixed = update_evidence.LayerInputs.of_rows(0, torch.nn.Linear(48, 5), rows, whiten_DD)
    (nats_V,) = update_evidence.FirstLayer(model, mixed).nats([known])

    rows_AD = torch.cat(rows)
    rows_AD = rows_AD / rows_AD.norm(dim=1, keepdim=True)

    def left(vectors_ND):
        known_DK = states_VD[list(known)].T
        return vectors_ND - (known_DK @ torch.linalg.lstsq(known_DK, vectors_ND.T).solution).T

    rows_AD, expected = left(rows_AD), []
    for token in range(model.vocabulary):
        (state_D,) = left(states_VD[token : token + 1])
        if token in known:
            expected.append(0.0)
            continue
        square = rows_AD.square().sum() * state_D.square().sum().clamp_min(1e-9)
        share = (rows_AD @ state_D).square().sum() / square
        expected.append(float(-10 / 2 * (46 * torch.log1p(-share) + 1)))
    expected_V = torch.tensor(expected)
    expected_V = (expected_V - expected_V.median()).clamp_min(0)
    said_V = torch.ones(model.vocabulary, dtype=torch.bool)
    said_V[update_evidence.unsaid(model)] = False
    torch.testing.assert_close(nats_V[said_V], expected_V[said_V], rtol=0.02, atol=0.3)
    assert (nats_V[~said_V] < -1000).all()
    assert set(nats_V.topk(2).indices.tolist()) == {20, 40}


def test_inputs_together_explain_what_least_squares_explains_of_rows():
    rng = torch.Generator().manual_seed(0)
    inputs_TD, whiten_DD = (torch.randn(count, 48, generator=rng) for count in (4, 48))
    white_TD = inputs_TD @ whiten_DD
    rows = [torch.randn(5, 4, generator=rng) @ white_TD for _ in range(2)]
    rows = [rows_AD + torch.randn(5, 48, generator=rng) * rows_AD.std() for rows_AD in rows]
    layer = update_evidence.LayerInputs.of_rows(0, torch.nn.Linear(48, 5), rows, whiten_DD)

    rows_DA = torch.nn.functional.normalize(torch.cat(rows)).T
    left_DA = rows_DA - white_TD.T @ torch.linalg.lstsq(white_TD.T, rows_DA).solution
    share = 1 - left_DA.square().sum() / rows_DA.square().sum()
    expected = -10 / 2 * (48 * torch.log1p(-share) + 4)
    torch.testing.assert_close(layer.nats(inputs_TD[None])[0], expected, rtol=0.02, atol=0.5)


def test_inputs_explain_the_same_one_after_another_and_together():
    rng = torch.Generator().manual_seed(0)
    inputs_NTD = torch.randn(2, 4, 48, generator=rng)
    inputs_NTD[1, 3] = inputs_NTD[1, 2]  # which explains no more
    rows = [torch.randn(5, 48, generator=rng) for _ in range(2)]
    whiten_DD = torch.randn(48, 48, generator=rng)
    layer = update_evidence.LayerInputs.of_rows(0, torch.nn.Linear(48, 5), rows, whiten_DD)
    parts_NKD, share_N = torch.zeros(2, 0, 48), torch.zeros(2)
    for count, inputs_ND in enumerate(inputs_NTD.unbind(1), 1):
        part_ND, more_N = layer.more(inputs_ND, parts_NKD)
        parts_NKD, share_N = torch.cat([parts_NKD, part_ND[:, None]], 1), share_N + more_N
        together_N = layer.nats(inputs_NTD[:, :count])
        torch.testing.assert_close(layer.nats_of(share_N, count), together_N, rtol=1e-3, atol=0.02)
    assert float(more_N[0]) > 100 * float(more_N[1])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@torch.no_grad()
def test_a_beam_says_of_its_prefixes_what_whole_prefixes_say(small, observe, family, monkeypatch):
    """Though a token goes through the model alone, beside what earlier ones left in its caches."""
    monkeypatch.setattr(state_pursuit, "_BEGINNINGS", 10**6)
    model = small(family, CAUSAL_LM, layers=3, width=48)
    own, other = (tuple(ids) for ids in model.encode(["she told us that", "nobody knows it all"]))
    with torch.enable_grad():
        seen = observe(model, ["she told us that"]).seen
    update, search = searched(model, seen)
    beam, last = search._begun(), torch.tensor([0, 0])
    if not update_evidence.first_tokens(model):  # Every token may be the first one.
        last = torch.tensor([beam.ids.index(ids[:1]) for ids in (own, other)])
    for place in range(len(beam.ids[0]), 4):
        tokens_N = torch.tensor([own[place], other[place]])
        beam = search._grown(beam, last, tokens_N, torch.zeros(2))
        last = torch.tensor([1, 0])  # They change places.
        own, other = other, own
    prefixes = [other[:4], own[:4]]
    assert beam.ids == prefixes
    hints_NTV = update.hints(torch.tensor(prefixes))
    torch.testing.assert_close(beam.hints_NV, hints_NTV[:, -1], rtol=0, atol=0.05)
    nats_NL = search._explained(prefixes, Clock(None))
    for layer, share_N, nats_N in zip(update.mixed, beam.share_LN, nats_NL.T, strict=True):
        torch.testing.assert_close(layer.nats_of(share_N, 4), nats_N, rtol=0.01, atol=0.1)


@pytest.mark.parametrize("size", [1.0, 1e-5])
@torch.no_grad()
def test_what_an_update_makes_likelier_does_not_drown_in_rounding(adapted, size):
    """The smaller the weights of adapters, the smaller is a step that is a share of them."""
    for name, parameter in adapted.trained().items():
        if "lora_B" in name:
            parameter.data *= size
    (own,) = map(tuple, adapted.encode(["she told us that nobody knows it all"]))
    with torch.enable_grad():
        seen = sent(adapted, [own])
    update, _ = searched(adapted, seen)
    ids_1T = torch.tensor([own[:-1]])
    hints_TV = update.hints(ids_1T)[0]
    update._step = {name: value / 2 for name, value in update._step.items()}
    likely = hints_TV > update_evidence.NEVER / 2
    halved_TV = update.hints(ids_1T)[0]
    torch.testing.assert_close(halved_TV[likely], hints_TV[likely], rtol=0, atol=0.1)


@torch.no_grad()
def test_the_inputs_of_the_first_layers_are_those_of_a_whole_forward_pass(adapted):
    texts = [tuple(ids[:5]) for ids in adapted.encode(["she told us that", "nobody knows it all"])]
    update, _ = searched(adapted, sent(adapted, texts))
    hidden = adapted.module(input_ids=torch.tensor(texts), output_hidden_states=True).hidden_states
    reached = []
    handle = adapted.module.base_model.layers[2].register_forward_hook(
        lambda *_: reached.append(True)
    )
    given = update.inputs(torch.tensor(texts), update.mixed[:2])
    handle.remove()
    assert not reached  # Deeper layers are not computed.
    assert len(given) == 2
    for number, inputs_NTD in enumerate(given):
        norm = adapted.module.base_model.layers[number].input_layernorm
        torch.testing.assert_close(inputs_NTD, norm(hidden[number]))


@torch.no_grad()
def test_after_adam_right_states_explain_more_in_each_layer_than_other_orders_and_tokens(adapted):
    (own,) = map(tuple, adapted.encode(["she told us that nobody knows it all"]))
    _, search = searched(adapted, sent(adapted, [own]))
    own = own[:5]
    exchanged, other = (*own[:2], own[3], own[2], own[4]), (*own[:-1], own[-1] + 1)
    right_L, exchanged_L, other_L = search._explained([own, exchanged, other], Clock(None))
    # The first layer sees no order.
    assert float(right_L[0]) == pytest.approx(float(exchanged_L[0]), rel=0.01)
    for wrong_L in (exchanged_L[1:], other_L):
        more_L = right_L[-len(wrong_L) :] - wrong_L
        assert (more_L > 0).all()
        assert float(more_L.sum()) > 15


@pytest.mark.parametrize("several", [True, False])
@torch.no_grad()
def test_a_beam_that_keeps_few_prefixes_finds_a_text(small, observe, monkeypatch, several):
    monkeypatch.setattr(state_pursuit, "_EARLY", 3)
    model = small("llama", CAUSAL_LM, layers=3, width=48)
    (own,) = map(tuple, model.encode(["she told us that"]))
    with torch.enable_grad():
        seen = observe(model, ["she told us that"]).seen
    _, search = searched(model, seen, several=several)
    assert search.best(3, Clock(None)) == own


@pytest.mark.parametrize("adam", [True, False])
def test_a_search_ends_at_a_proof(adapted, small, observe, monkeypatch, adam):
    """By replay after Adam; of one gradient by the gradient itself."""
    model = adapted if adam else small("llama", CAUSAL_LM, layers=3, width=48)
    (own,) = map(tuple, model.encode(["she told us that"]))
    seen = sent(model, [own]) if adam else observe(model, ["she told us that"]).seen
    lengths, grown = [], state_pursuit._Search._grown

    def noted(search, beam, *kept):
        lengths.append(len(beam.ids[0]) + 1)
        return grown(search, beam, *kept)

    monkeypatch.setattr(state_pursuit._Search, "_grown", noted)
    monkeypatch.setattr(state_pursuit._Search, "_changed", None)  # Nothing is left to mend.
    answer = StatePursuit(width=4)(seen, model, rng=stream(0, "a"))
    assert answer.sequences == (own,)
    assert lengths == list(range(1, len(own)))
    made = replay.replay(model, answer.sequences, seen)
    assert answer.verified or made.verified


def test_a_quarter_of_the_tokens_that_are_tried_are_those_of_the_first_layer():
    hints_NV = torch.arange(12.0)[None]
    table_NV = torch.zeros(1, 12).index_fill(1, torch.tensor([2, 11]), 30.0)
    tried = state_pursuit._tried(hints_NV, table_NV, 8)[0].tolist()
    assert sorted(tried) == [2, 5, 6, 7, 8, 9, 10, 11]


@torch.no_grad()
def test_without_the_first_layer_it_says_nothing_of_a_token(small):
    model = small("llama", CAUSAL_LM, width=48)
    nats_NV = update_evidence.FirstLayer(model, None).nats([{20}, ()])
    assert nats_NV.shape == (2, model.vocabulary)
    assert not nats_NV.clamp_min(0).any()


@pytest.mark.parametrize(("family", "several"), [("llama", True), ("gpt2", False)])
@torch.no_grad()
def test_a_wrong_word_a_missing_one_one_more_and_one_elsewhere_are_mended(
    small, observe, family, several
):
    model = small(family, CAUSAL_LM, layers=3, width=48)
    (own,) = map(tuple, model.encode(["she told us that"]))
    with torch.enable_grad():
        seen = observe(model, ["she told us that"]).seen  # of one exact gradient
    _, search = searched(model, seen, several=several)
    # Where no token begins all texts, as in GPT-2, the first word can be mended, too.
    for place in {2, len(update_evidence.first_tokens(model))}:
        before, behind = own[:place], own[place + 1 :]
        wrong, missing = (*before, own[place] + 1, *behind), before + behind
        one_more = (*before, own[place] + 1, *own[place:])
        elsewhere = (*before, *behind[:2], own[place], *behind[2:])
        for ids in (wrong, missing, one_more, elsewhere):
            text = search.mended(ids, Clock(None))
            assert text.ids == own
            assert -text.excess == pytest.approx(score(search, own), abs=0.1)


@torch.no_grad()
def test_of_a_single_text_up_to_three_tokens_are_moved_together(small, observe):
    model = small("llama", CAUSAL_LM, layers=3, width=48)
    (own,) = map(tuple, model.encode(["she told us that nobody knows it all"]))
    with torch.enable_grad():
        seen = observe(model, ["she told us that nobody knows it all"]).seen
    _, search = searched(model, seen)
    moved = (*own[:2], *own[5:7], *own[2:5], *own[7:])
    assert len({*own}) == len(own)
    assert search.mended(moved, Clock(None)).ids == own
    changes = list(search._changed(own))
    assert all(ids[0] == own[0] and ids[-1] == own[-1] for ids in changes)
    assert sum(sorted(ids) == sorted(own) for ids in changes) > 60
    _, search = searched(model, seen, several=True)
    apart = [ids for ids in search._changed(own) if sorted(ids) == sorted(own)]
    assert moved not in apart
    assert (*own[:1], own[6], *own[1:6], *own[7:]) in apart


@torch.no_grad()
def test_a_text_that_is_known_is_given_up_for_a_better_one_alone(small, observe):
    model = small("llama", CAUSAL_LM, layers=3, width=48)
    own, other = map(tuple, model.encode(["she told us that", "nobody knows it all"]))
    with torch.enable_grad():
        seen = observe(model, ["she told us that"]).seen
    _, search = searched(model, seen, several=True)
    assert search.best(3, Clock(None), other) == own
    search._longest = 3  # A beam cannot find it.
    assert search.best(3, Clock(None)) != own
    assert search.best(3, Clock(None), own) == own


@torch.no_grad()
def test_what_begins_a_known_text_stays_in_the_beam(small, observe, monkeypatch):
    monkeypatch.setattr(state_pursuit, "_EARLY", 1)
    model = small("llama", CAUSAL_LM, layers=3, width=48)
    _, other = map(tuple, model.encode(["she told us that", "nobody knows it all"]))
    with torch.enable_grad():
        seen = observe(model, ["she told us that"]).seen
    _, search = searched(model, seen, several=True)
    beams, grown = [], state_pursuit._Search._grown

    def noted(search, beam, *kept):
        beams.append(grown(search, beam, *kept))
        return beams[-1]

    monkeypatch.setattr(state_pursuit._Search, "_grown", noted)
    kept = []
    for known in ((), (other,)):
        beams.clear()
        search.best(1, Clock(None), *known)
        kept.append([other[: len(beam.ids[0])] in beam.ids for beam in beams[1:-1]][: len(other)])
    assert not any(kept[0])
    assert all(kept[1][: len(other) - 3])
    assert all(len({*beam.ids}) == len(beam.ids) for beam in beams)


@pytest.mark.parametrize("proof", [True, False])
def test_texts_of_a_batch_are_sought_again_until_there_is_a_proof(
    small, observe, monkeypatch, proof
):
    model = small("llama", CAUSAL_LM, layers=3, width=48)
    own = [tuple(ids) for ids in model.encode(["she told us", "he knows"])]
    seen = observe(model, ["she told us", "he knows"]).seen
    if not proof:
        monkeypatch.setattr(state_pursuit, "_ends", lambda *given: False)
    searches, best = [], state_pursuit._Search.best

    def noted(search, width, clock, *known):
        searches.append(known)
        return best(search, width, clock, *known)

    monkeypatch.setattr(state_pursuit._Search, "best", noted)
    answer = StatePursuit(width=4, longest=6)(seen, model, rng=stream(0, "a"))
    assert {*answer.sequences} == {*own}
    assert searches[:2] == [(), ()]
    # Without a proof each is sought once more, beside itself, and nothing changes.
    assert sorted(searches[2:]) == ([] if proof else sorted((ids,) for ids in own))


@pytest.mark.parametrize("steps", [1, 2])
def test_few_tokens_are_tried_where_the_output_layer_was_trained_in_one_step(small, steps):
    model = small("llama", CAUSAL_LM)
    own = [tuple(ids) for ids in model.encode(["she told us that", "nobody knows it all"])]
    _, search = searched(model, sent(model, own, batch_size=2 // steps))
    named = search._effort == state_pursuit._BY_HEAD
    assert named == (steps == 1)


@pytest.mark.parametrize(("defense", "sharp"), [(Sign(), False), (Quantize(bits=8), True)])
def test_fewer_are_tried_where_word_rows_tell_what_is_absent(small, observe, defense, sharp):
    model = small("llama", CAUSAL_LM)
    seen = observe(model, ["she told us that"]).seen
    seen = replace(seen, update=defense(seen.update, rng=stream(0, "defense")))
    _, search = searched(model, seen)
    assert search._effort == (state_pursuit._BY_ROWS if sharp else state_pursuit._BY_HEAD)


def test_the_more_rows_are_as_long_the_more_speaks_against_a_token():
    rows_VD = torch.zeros(1000, 24)
    rows_VD[:4] = torch.tensor([4.0, 1.0, 3.0, 2.0])[:, None]
    against_V = update_evidence.absence(rows_VD, 2)
    expected_V = 2 * torch.tensor([1.0, 4 / 2, 2 / 2, 3 / 2]).log()
    torch.testing.assert_close(against_V[:4], expected_V)
    torch.testing.assert_close(against_V[4:], torch.full((996,), 2 * math.log(1000 / 2)))
    # Rows of signs have one length.
    assert not update_evidence.absence(rows_VD.new_ones(1000, 24), 2).any()


@torch.no_grad()
def test_what_speaks_for_a_token_before_its_gradient_is_known(small, observe):
    model = small("llama", CAUSAL_LM)
    with torch.enable_grad():
        seen = observe(model, ["she told us that"]).seen
    evidence = update_evidence.UpdateEvidence(model, seen, stream(0, "a"))
    ids_NT = torch.tensor([[5, 6, 7]])
    hidden_NTD, before_NTV, more_NTV = evidence._likelier(ids_NT)
    deviation_NTV = (more_NTV - more_NTV.mean(-1, keepdim=True)) / more_NTV.std(-1, keepdim=True)
    gained_NTV = (1 - before_NTV.exp()) * update_evidence._LIKELIER * deviation_NTV
    named_NTV = update_evidence._NAMED * evidence.head.names(hidden_NTD)
    expected_NTV = before_NTV + gained_NTV + named_NTV - evidence.absent_V
    torch.testing.assert_close(evidence.hints(ids_NT), expected_NTV, rtol=1e-4, atol=1e-3)
    # Of a text whose gradient is known, too; what pads a shorter one counts nothing.
    prior_N, _ = evidence.gradients([(5, 6, 7), (5, 6)])
    likely_N = torch.stack([before_NTV[0, 0, 6] + before_NTV[0, 1, 7], before_NTV[0, 0, 6]])
    absent_N = evidence.absent_V[ids_NT[0]].cumsum(0)[[2, 1]]
    torch.testing.assert_close(prior_N, likely_N - absent_N, rtol=1e-4, atol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("defense", [None, Mask(fraction=0.5), Sign()])
def test_the_gradient_of_other_texts_is_taken_out(small, observe, defense):
    model = small("llama", CAUSAL_LM)
    texts = ["she told us that", "nobody knows it all"]
    first, second = (tuple(ids) for ids in model.encode(texts))
    with torch.enable_grad():
        seen = observe(model, texts).seen
    if defense is not None:
        seen = replace(seen, update=defense(seen.update, rng=stream(0, "defense")))
    evidence = update_evidence.UpdateEvidence(model, seen, stream(0, "a"))
    left = evidence.without([first])
    own = certificate.mean_gradient(model, [(first, 0)], [*seen.update.tensors])
    for (name, sent), part in zip(seen.update.tensors.items(), own, strict=True):
        came = part * (sent != 0)
        rest = left._seen.update.tensors[name]
        assert not rest[sent == 0].any()
        assert abs(float((rest * came).sum())) < 1e-3 * float(sent.norm() * came.norm()) + 1e-12

    def nats(update, ids):
        return float(update.nats(update.gradients([ids])[1]))

    assert nats(left, first) < 0.1 * nats(evidence, first)
    assert nats(left, second) > nats(evidence, second)


@pytest.mark.parametrize(
    "defense",
    [
        pytest.param(GaussianNoise(relative=0.3), marks=pytest.mark.slow),
        Sign(),
        pytest.param(Quantize(bits=8), marks=pytest.mark.slow),
        pytest.param(Mask(fraction=0.5), marks=pytest.mark.slow),
    ],
)
def test_a_blurred_batch_is_read_one_text_after_the_other(small, observe, defense):
    model = small("llama", CAUSAL_LM, layers=3, width=48)
    texts = ["she told us that", "nobody knows it all"]
    seen = observe(model, texts).seen
    seen = replace(seen, update=defense(seen.update, rng=stream(0, "defense")))
    reading = StatePursuit(width=6, longest=8)(seen, model, rng=stream(0, "a"))
    assert {*reading.sequences} == {tuple(ids) for ids in model.encode(texts)}
    if not reading.verified:  # What came of a mask is as it was.
        assert "only noise or rounding" in reading.reason
        assert reading.diagnostics["likely"] == [True, True]


@torch.no_grad()
def test_beside_another_text_a_text_explains_what_is_left(adapted):
    texts = [tuple(ids) for ids in adapted.encode(["she told us that", "nobody knows it all"])]
    seen = sent(adapted, texts)
    _, alone = searched(adapted, seen)
    _, beside = searched(adapted, seen, [Judged(texts[0], 0.0, 0.0)])
    both = score(alone, texts[0]) + score(beside, texts[1])
    _, other = searched(adapted, seen, [Judged(texts[1], 0.0, 0.0)])
    assert both == pytest.approx(score(alone, texts[1]) + score(other, texts[0]), rel=1e-3)
    assert score(beside, texts[1]) > score(beside, texts[0])


@torch.no_grad()
def test_tokens_of_texts_beside_are_taken_out_of_the_first_layer(small, observe, monkeypatch):
    model = small("gpt2", CAUSAL_LM)
    texts = [tuple(ids) for ids in model.encode(["she told us that", "nobody knows it all"])]
    with torch.enable_grad():
        seen = observe(model, ["she told us that", "nobody knows it all"]).seen
    _, search = searched(model, seen, [Judged(texts[0], 0.0, 0.0)])
    known_sets, nats = [], update_evidence.FirstLayer.nats

    def noted(own, known):
        known_sets.extend(known)
        return nats(own, known)

    monkeypatch.setattr(update_evidence.FirstLayer, "nats", noted)
    monkeypatch.setattr(state_pursuit, "_BEGINNINGS", 2)
    for search_part in (
        search._begun,
        lambda: search.best(1, Clock(None)),
        lambda: list(search._changed(texts[1])),
    ):
        known_sets.clear()
        search_part()
        assert known_sets
        assert all({*texts[0]} <= {*known} for known in known_sets)


def test_adapters_of_a_first_round_say_nothing_and_it_says_so(small):
    model = small("llama", CAUSAL_LM, layers=3, width=48)
    adapt_(model.module, Lora(6, 12.0), model.family.classifier)  # B is zero, so A has no gradient
    answer = StatePursuit()(sent(model, model.encode(["she told us"])), model, rng=stream(0, "a"))
    assert (answer.status, answer.sequences) == (Status.ABSTAINED, None)
    assert "did not change" in answer.reason


def test_weights_that_are_kept_transposed_are_read_too(small, observe):
    model = small("gpt2", CAUSAL_LM, layers=3, width=48)
    own, other = map(tuple, model.encode(["she told us that", "nobody knows it all"]))
    _, search = searched(model, observe(model, ["she told us that"]).seen)  # one exact gradient
    assert score(search, own) > score(search, other) + 100


def test_noise_alone_is_no_text(adapted):
    seen = sent(adapted, adapted.encode(["she told us that"]))
    rng = torch.Generator().manual_seed(1)
    noise = seen.update.changed(lambda tensor: torch.randn(tensor.shape, generator=rng))
    attack = StatePursuit(width=4, longest=6)
    answer = attack(replace(seen, update=noise), adapted, rng=stream(0, "a"))
    assert answer.status == Status.ABSTAINED


def test_of_several_steps_it_says_that_the_first_counts_most(adapted):
    own = adapted.encode(["she told us that", "nobody knows it all"])
    attack = StatePursuit(width=1, longest=4)
    two, single = (
        attack(sent(adapted, own, batch_size), adapted, rng=stream(0, "a")).reason
        for batch_size in (1, 2)
    )
    assert "of 2 local steps the texts of the first count most" in two
    assert "steps" not in single


@pytest.mark.slow
@pytest.mark.skipif(not STORIES.exists(), reason="FEDLEAK_ASSETS names no folder with stories15m")
def test_a_text_is_read_from_adamws_step_on_adapters_and_proved_by_replay():
    name = str(STORIES)
    model = loading.load(ModelSpec(name=name, task=CAUSAL_LM, num_labels=2, lora=Lora(8, 16.0)))
    earlier = model.encode([f"The {word} cat sat on the mat." for word in ("red", "big", "old")])
    for _ in range(8):
        local_update_(model, earlier, [0] * 3, ADAMW, seed=1)
    own = [tuple(ids) for ids in model.encode(["I put the table with the books."])]
    seen = sent(model, own)
    answer = StatePursuit()(seen, model, rng=stream(0, "a"))
    assert answer.sequences == tuple(own)
    assert replay.replay(model, answer.sequences, seen).verified


@pytest.mark.slow
@pytest.mark.skipif(not STORIES.exists(), reason="FEDLEAK_ASSETS names no folder with stories15m")
def test_noise_of_ten_times_the_size_of_a_gradient_hides_no_text():
    model = loading.load(ModelSpec(name=str(STORIES), task=CAUSAL_LM, num_labels=2))
    (own,) = map(tuple, model.encode(["The old man was happy that the rain had stopped."]))
    how = replace(ADAMW, kind=UpdateKind.GRADIENT, recipe=Recipe())
    update = local_update_(model, [own], [0], how, seed=3)
    noisy = GaussianNoise(relative=10.0)(update, rng=stream(0, "noise"))
    known = Knowledge(local_steps=1, dropout=False)
    seen = Observation(round=1, client=0, update=noisy, knowledge=known)
    answer = StatePursuit()(seen, model, rng=stream(0, "a"))
    assert answer.sequences == (own,)
    assert answer.diagnostics["nats"][0] > 5000


def test_out_of_time_it_ends_within_a_part_of_the_first_tokens(small, observe, monkeypatch):
    """Nothing begins all texts of GPT-2, so that several words are tried as the first one."""
    model = small("gpt2", CAUSAL_LM)
    seen, calls = observe(model, 2).seen, []

    def counted(name):
        function = getattr(update_evidence.UpdateEvidence, name)
        monkeypatch.setattr(
            update_evidence.UpdateEvidence,
            name,
            lambda *given: calls.append(name) or function(*given),
        )

    counted("inputs")
    counted("gradients")
    monkeypatch.setattr(state_pursuit, "_AT_ONCE", 8)
    answer = StatePursuit(seconds=1e-6)(seen, model, rng=stream(0, "texts"))
    assert len(calls) <= 3
    assert answer.diagnostics["time_up"]
    ticks = iter(range(10**6))
    monkeypatch.setattr("fedleak.attacks.clock.now", lambda: float(next(ticks)))
    counts = []
    for seconds in (30, 300):
        calls.clear()
        StatePursuit(seconds=seconds)(seen, model, rng=stream(0, "texts"))
        counts.append(len(calls))
    assert 3 < counts[0] < 60 < counts[1]


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_model_writes_as_if_it_read_all_again_for_each_token(small, family, monkeypatch):
    model = small(family, CAUSAL_LM)
    draws = []

    def noted(probabilities, rng):
        draws.append(probabilities)
        return drawn(probabilities, rng)

    drawn = update_evidence._drawn
    monkeypatch.setattr(update_evidence, "_drawn", noted)
    with torch.no_grad():
        texts_NT = update_evidence.own_texts(model, stream(0, "own"))
        begun = texts_NT.shape[1] - update_evidence.OWN_TOKENS
        for length, next_NV in enumerate(draws[-update_evidence.OWN_TOKENS :], begun):
            again = update_evidence.log_probabilities(model, texts_NT[:, :length])
            torch.testing.assert_close(next_NV, again[:, -1].exp())


@pytest.mark.parametrize("left", [0.0, 1e-9])
def test_of_a_text_that_occurs_twice_nothing_is_left(small, observe, monkeypatch, left):
    """Rounding may leave nothing at all, or a little of everything."""
    model = small("llama", CAUSAL_LM, layers=3, width=48)
    seen = observe(model, ["she told us"] * 2).seen
    without = update_evidence.UpdateEvidence.without

    def rounded(evidence, texts):
        tensors = {
            name: left * torch.randn(value.shape, generator=torch.Generator().manual_seed(1))
            for name, value in evidence._seen.update.tensors.items()
        }
        update = replace(evidence._seen.update, tensors=tensors)
        evidence._seen = replace(evidence._seen, update=update)
        return without(evidence, texts)

    monkeypatch.setattr(update_evidence.UpdateEvidence, "without", rounded)
    answer = StatePursuit(width=4, longest=6)(seen, model, rng=stream(0, "a"))
    (own, _) = (tuple(ids) for ids in model.encode(["she told us"] * 2))
    assert answer.sequences == (own, own)
    assert answer.verified
