"""The mode and the attack `adapter_imprint`: where heads look, by hand, and batches as a whole."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from fedleak.attacks import AttackSetting
from fedleak.attacks.imprinted.adapters import AdapterImprintReader, Looked, _linked, _looked
from fedleak.attacks.reconstruction import Status
from fedleak.attacks.server_modes import ModeSetting
from fedleak.attacks.server_modes.adapter_imprint import AdapterImprint, adapters
from fedleak.models import load_parameters_
from fedleak.models.lora import Lora, adapt_
from fedleak.training.observation import UpdateKind
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream

QUERY_A, QUERY_B, VALUE_B = (
    f"bert.encoder.layer.0.attention.self.{name}.default.weight"
    for name in ("query.lora_A", "query.lora_B", "value.lora_B")
)


def adapted(small, family="bert", **lora):
    model = small(family, width=48, layers=3)
    adapt_(model.module, Lora(**({"rank": 6, "alpha": 12.0} | lora)), model.family.classifier)
    return model


def change_(model, observe):
    public = observe(model, 1).candidates.public
    before = {name: value.clone() for name, value in model.parameters().items()}
    mode = AdapterImprint()
    changes = mode.broadcast(model, targeted=True, public=public, rng=stream(0, "server"))
    load_parameters_(model, {**before, **changes})
    return before, changes


@pytest.fixture
def changed(small, observe):
    model = adapted(small)
    change_(model, observe)
    return model


def ask(seen, model):
    return AdapterImprintReader()(seen, model, rng=stream(1, "attack"))


def setting(model, sent=None):
    local = LocalTraining(
        kind=UpdateKind.GRADIENT, batch_size=2, epochs=1, learning_rate=0.1, dropout=False
    )
    sent = frozenset(model.trained()) if sent is None else sent
    return ModeSetting(sees="updates", local=local, sent=sent)


@torch.no_grad()
def attention(model, ids):
    """Returns how much each head of the first block attends from each token to each [H, T, T]."""
    block, place_T = model.family.first_block(model.module), torch.arange(len(ids))
    _, input_TD = block.enter(torch.tensor(ids), place_T)
    query_THK, key_THK, _ = block.project(input_TD, place_T)
    score_HTT = torch.einsum("qhk,shk->hqs", query_THK, key_THK)
    return (score_HTT / query_THK.shape[-1] ** 0.5).softmax(-1)


def test_a_row_and_a_column_are_changed_and_nothing_else(small, observe):
    model = adapted(small)
    before, changes = change_(model, observe)
    assert adapters(model.family) == (QUERY_A, QUERY_B, VALUE_B)
    assert changes.keys() == {QUERY_A, QUERY_B}
    assert torch.equal(changes[QUERY_A][1:], before[QUERY_A][1:])
    assert torch.equal(changes[QUERY_B][:, 1:], before[QUERY_B][:, 1:])
    assert torch.isclose(changes[QUERY_A][0].norm(), changes[QUERY_B][:, 0].norm(), rtol=1e-3)


@pytest.mark.core
def test_all_tokens_of_a_text_look_at_the_same_one_and_the_gradient_holds_these_alone(
    changed, observe, texts
):
    truth = observe(changed, texts[:3])
    where = [attention(changed, ids) for ids in truth.sequences]
    assert min(float(at_HTT.amax(-1).min()) for at_HTT in where) > 0.999
    assert all(bool((at_HTT.argmax(-1) == at_HTT.argmax(-1)[:, :1]).all()) for at_HTT in where)
    looked = {own.head: own for own in _looked(changed, truth.seen.update.tensors)}
    assert len(looked) == 4
    for head, own in looked.items():
        places = [int(at_HTT[head, 0].argmax()) for at_HTT in where]
        wanted = {(place, ids[place]) for place, ids in zip(places, truth.sequences, strict=True)}
        assert set(own.tokens) == wanted
    everywhere = {token for own in looked.values() for token in own.tokens}
    assert len(everywhere) > 6, "heads look at different tokens"


def test_parts_of_a_gradient_find_each_other_also_where_two_texts_share_a_token():
    rng = torch.Generator().manual_seed(0)
    mix_2O = torch.randn(2, 12, generator=rng, dtype=torch.float64)
    of_S2 = torch.randn(3, 2, generator=rng, dtype=torch.float64)
    moment_OO = mix_2O.T @ mix_2O + 1e-9 * torch.eye(12)
    first_S4, second_S4, third_S4 = (of_S2 @ mix_2O).chunk(3, 1)
    shared_C4 = torch.stack([third_S4[0] + third_S4[2], third_S4[1]])
    looked = [
        Looked(0, [(1, 10), (1, 11), (1, 12)], first_S4),
        Looked(1, [(2, 22), (2, 20), (2, 21)], second_S4[[2, 0, 1]]),
        Looked(2, [(3, 30), (3, 31)], shared_C4),
    ]
    assert _linked(looked, moment_OO) == [
        {1: 10, 2: 20, 3: 30},
        {1: 11, 2: 21, 3: 31},
        {1: 12, 2: 22, 3: 30},
    ]


@pytest.mark.core
@pytest.mark.parametrize("kind", list(UpdateKind))
def test_a_short_batch_is_read_and_proved(changed, observe, texts, kind):
    truth = observe(changed, texts[:2], max_length=4, kind=kind, server_mode="adapter_imprint")
    answer = ask(truth.seen, changed)
    assert Counter(answer.sequences) == Counter(truth.sequences)
    assert answer.verified


def test_what_is_not_read_is_left_out_and_the_rest_is_right(changed, observe, texts):
    truth = observe(changed, texts[:3], server_mode="adapter_imprint")
    answer = ask(truth.seen, changed)
    assert not answer.verified
    real = {token for ids in truth.sequences for token in ids}
    assert set(answer.tokens) <= real


def test_honest_adapters_noise_and_as_many_texts_as_ranks_give_nothing(
    small, changed, observe, texts
):
    truth = observe(changed, texts[:2], server_mode="adapter_imprint")
    rng = torch.Generator().manual_seed(1)
    noisy = {
        name: value + 1e-3 * value.norm() * torch.randn(value.shape, generator=rng)
        for name, value in truth.seen.update.tensors.items()
    }
    seen = replace(truth.seen, update=replace(truth.seen.update, tensors=noisy))
    assert ask(seen, changed).status == Status.ABSTAINED
    assert ask(observe(changed, texts[:8]).seen, changed).status == Status.ABSTAINED
    # A span of two directions, in which no word lies.
    rows_OR = torch.randn(48, 2, generator=rng) @ torch.randn(2, 6, generator=rng)
    seen = replace(seen, update=replace(seen.update, tensors={**noisy, VALUE_B: rows_OR}))
    assert ask(seen, changed).status == Status.ABSTAINED
    honest = adapted(small)
    assert ask(observe(honest, texts[:2]).seen, honest).status == Status.ABSTAINED


def test_it_says_where_it_cannot_work(small, changed, observe):
    mode, gpt2, dora = AdapterImprint(), small("gpt2"), adapted(small, dora=True)
    assert mode.obstacle(setting(changed), changed) is None
    assert "which a gpt2 has not" in mode.obstacle(setting(gpt2), gpt2)
    assert "lora.dora" in mode.obstacle(setting(dora), dora)
    rest = frozenset(changed.trained()) - {VALUE_B}
    assert "model.lora" in mode.obstacle(setting(changed, rest), changed)
    read = AttackSetting.of(observe(changed, 1).seen, changed)
    assert "server.mode = 'adapter_imprint'" in AdapterImprintReader().obstacle(read)
    whole = small("bert")
    seen = observe(whole, 1, server_mode="adapter_imprint").seen
    assert "lora.targets" in AdapterImprintReader().obstacle(AttackSetting.of(seen, whole))
