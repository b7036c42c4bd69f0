"""Reading an imprinted decoder: what is planted, single parts, and batches as a whole."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from fedleak.attacks.imprinted.attack import ImprintReader
from fedleak.attacks.imprinted.bins import Words, read_bins
from fedleak.attacks.imprinted.chains import Chains
from fedleak.attacks.reconstruction import Status
from fedleak.attacks.server_modes import sectors
from fedleak.attacks.server_modes.imprint import Imprint
from fedleak.models import CAUSAL_LM, CLASSIFICATION, load_parameters_, pad
from fedleak.util.rng import stream

FAMILIES = ["gpt2", "llama"]


def imprint_(model, observe, seed=0):
    public = observe(model, 1).candidates.public
    before = {name: value.clone() for name, value in model.parameters().items()}
    changes = Imprint().broadcast(model, targeted=True, public=public, rng=stream(seed, "server"))
    load_parameters_(model, {**before, **changes})
    return changes


def seen_of(observe, model, texts):
    return observe(model, texts, max_length=8, server_mode="imprint")


def ask(seen, model):
    return ImprintReader()(seen, model, rng=stream(1, "attack"))


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


@pytest.mark.core
def test_neurons_are_on_for_tokens_on_one_side_as_the_bins_have_it(family, small, observe, texts):
    """By hand, from what goes into the layer itself."""
    model = small(family, CAUSAL_LM, width=64)
    changes = imprint_(model, observe)
    assert all(".0." in name for name in changes)
    known = sectors.planted(model)
    assert (known.edge_N.diff() >= 0).all()
    assert known.sign_N.tolist() == [1, -1] * (len(known.sign_N) // 2)
    name = model.family.modules(0)["f"][0].removesuffix(".weight")
    layer, passed = model.module.get_submodule(name), []
    hook = layer.register_forward_hook(lambda module, args, out: passed.append((args[0], out)))
    (ids,) = model.encode(texts[:1])
    ids_BT, mask_BT = pad([tuple(ids)], 0, model.device)
    with torch.no_grad():
        model.family.logits(model.module, mask_BT, ids_BT=ids_BT, embeds_BTD=None)
    hook.remove()
    model.module.requires_grad_(False)
    (input_BTD, out_BTN), table = passed[0], model.family.token_table(model.module)
    place_T = torch.arange(len(ids))
    tag_TK = (table(torch.tensor(ids), place_T) @ known.project_KD.T).cumsum(0)
    tag_TK /= place_T[:, None] + 1
    stream_TD = table.embed(torch.tensor(ids), place_T).clone()
    stream_TD[:, : tag_TK.shape[1]] += tag_TK
    row_TD = known.clear(stream_TD)
    assert torch.cosine_similarity(row_TD, input_BTD[0]).min() > 1 - 1e-5
    angle_T, step_T = known.angles(row_TD)
    on_TN = out_BTN[0] > 0
    for token in range(len(ids)):
        # Below the edge a token is on one side, above it on the other.
        sure_N = (known.edge_N - angle_T[token]).abs() > step_T[token] / 20
        below_N = known.edge_N <= angle_T[token]
        sides_N = on_TN[token] == on_TN[token, 0]
        assert below_N[0]
        assert torch.equal(sides_N[sure_N], below_N[sure_N])


@pytest.mark.core
@pytest.mark.parametrize("task", [CLASSIFICATION, CAUSAL_LM])
def test_a_batch_is_read_and_proved(family, task, small, observe, texts):
    model = small(family, task, width=64)
    imprint_(model, observe)
    truth = seen_of(observe, model, texts[:3])
    answer = ask(truth.seen, model)
    assert Counter(answer.sequences) == Counter(truth.sequences)
    assert answer.verified
    assert answer.diagnostics["chance"] < 1e-12


def test_another_imprint_and_noise_certify_nothing_wrong(family, small, observe, texts):
    model, other = small(family, width=64), small(family, width=64)
    imprint_(model, observe)
    imprint_(other, observe, seed=1)
    truth = seen_of(observe, other, texts[:3])
    answer = ask(truth.seen, model)
    assert not answer.diagnostics.get("certified")
    assert not answer.verified
    rng = torch.Generator().manual_seed(1)
    for share in (1e-5, 1e-2, 1.0):
        noisy = {
            name: value + share * value.std() * torch.randn(value.shape, generator=rng)
            for name, value in truth.seen.update.tensors.items()
            if value.numel() > 1
        }
        update = replace(truth.seen.update, tensors=noisy)
        answer = ask(replace(truth.seen, update=update), other)
        certain = (answer.sequences or ())[: answer.diagnostics.get("certified", 0)]
        assert set(certain) <= set(truth.sequences)


def test_a_decoder_that_was_not_imprinted_is_refused(family, small, observe, texts):
    honest = small(family)
    assert sectors.planted(honest) is None
    answer = ask(seen_of(observe, honest, texts[:2]).seen, honest)
    assert answer.status == Status.ABSTAINED
    assert "not imprinted" in answer.reason


def test_a_text_is_not_certain_where_no_bin_shows_a_word_or_the_word_has_a_twin(
    small, observe, texts
):
    model = small("llama", width=64)
    imprint_(model, observe)
    truth = seen_of(observe, model, texts[:1])
    model.module.requires_grad_(False)
    known, table = sectors.planted(model), model.family.token_table(model.module)
    first = model.family.modules(0)["f"][0]
    bins = read_bins(truth.seen.update.tensors[first], known)
    (ids,) = truth.sequences
    used = torch.tensor(sorted(set(ids)))

    def certain(bins, ids, words):
        of_model = Words(sectors.Stream.of(table, known), words, 1)
        chains = Chains(bins, of_model, known, [], model)
        node = 0
        for place, token in enumerate(ids):
            word = words.tolist().index(token)
            node = chains.tree.add(node, word, chains._own(word, place))
        return [text.chance < math.inf for text in chains.texts()]

    assert certain(bins, ids, used) == [True]
    assert certain(bins, (*ids[:-1], ids[1]), used) == [False]
    embedding = model.module.get_parameter(model.family.word_embedding)
    twin = next(token for token in range(10, model.vocabulary) if token not in ids)
    embedding[twin] = embedding[ids[1]] * (1 + 1e-6)
    both = torch.tensor(sorted({*ids, twin}))
    assert certain(bins, ids, both) == [False]
