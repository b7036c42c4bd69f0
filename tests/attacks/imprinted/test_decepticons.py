"""The mode and the attack `decepticons`: what is sent, by hand, and batches as a whole."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from fedleak.attacks import AttackSetting
from fedleak.attacks.imprinted.decepticons import DecepticonsReader
from fedleak.attacks.reconstruction import Status
from fedleak.attacks.server_modes import ModeSetting
from fedleak.attacks.server_modes.decepticons import Decepticons, blocks, planted
from fedleak.models import CAUSAL_LM, CLASSIFICATION, load_parameters_, pad
from fedleak.training.observation import UpdateKind
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream

BUILT = [("bert", CLASSIFICATION), ("gpt2", CLASSIFICATION), ("gpt2", CAUSAL_LM)]


def change_(model, observe):
    public = observe(model, 1).candidates.public
    before = {name: value.clone() for name, value in model.parameters().items()}
    changes = Decepticons().broadcast(model, targeted=True, public=public, rng=stream(0, "server"))
    load_parameters_(model, {**before, **changes})
    return public


def ask(seen, model):
    return DecepticonsReader()(seen, model, rng=stream(1, "attack"))


def setting(model, sent=None):
    local = LocalTraining(
        kind=UpdateKind.GRADIENT, batch_size=2, epochs=1, learning_rate=0.1, dropout=False
    )
    sent = frozenset(model.trained()) if sent is None else sent
    return ModeSetting(sees="updates", local=local, sent=sent)


@pytest.mark.core
@pytest.mark.parametrize(("family", "task"), BUILT)
def test_each_layer_reads_tokens_and_the_first_word_of_their_text(small, observe, family, task):
    """From what goes into the feed-forward layers themselves."""
    model = small(family, task, width=48, layers=3)
    sequences = [ids for ids, _ in change_(model, observe)][:4]
    known, passed = planted(model), []
    for block in blocks(model):
        name = model.family.modules(block)["f"][0].removesuffix(".weight")
        layer = model.module.get_submodule(name)
        layer.register_forward_hook(lambda module, args, out: passed.append(args[0]))
    ids_BT, mask_BT = pad(sequences, 0, model.device)
    with torch.no_grad():
        model.family.logits(model.module, mask_BT, ids_BT=ids_BT, embeds_BTD=None)
    table, anchor = model.family.token_table(model.module), int(family == "bert")
    for input_BTD in passed:
        for ids, input_TD in zip(sequences, input_BTD, strict=True):
            place_T = torch.arange(len(ids))
            attended_TD = table(torch.tensor(ids), place_T).detach()
            tag_K = (known[0].project_KD @ attended_TD[anchor]) + known[0].shift_K
            stream_TD = table.embed(torch.tensor(ids), place_T)
            if family == "bert":
                stream_TD = attended_TD
            wanted_TD = F.layer_norm(stream_TD + F.pad(tag_K, (0, 48 - len(tag_K))), (48,))
            assert torch.allclose(input_TD[: len(ids), :-1], wanted_TD[:, :-1], atol=1e-3)
    assert len(passed) == len(known) == 3 - (task == CLASSIFICATION)
    edges_X = torch.cat([own.edge_N for own in known])
    assert (edges_X.diff() >= 0).all()
    assert not edges_X.isnan().any()


@pytest.mark.core
@pytest.mark.parametrize(("family", "task"), BUILT)
def test_a_batch_is_read_and_proved(small, observe, texts, family, task):
    model = small(family, task, width=64, layers=4)
    change_(model, observe)
    truth = observe(model, texts[:2], max_length=7, server_mode="decepticons")
    answer = ask(truth.seen, model)
    assert Counter(answer.sequences) == Counter(truth.sequences)
    assert answer.verified


def test_what_is_wrong_or_noise_is_not_proved(small, observe, texts):
    model = small("bert", width=64, layers=4)
    change_(model, observe)
    truth = observe(model, texts[:2], max_length=7, server_mode="decepticons")
    other = small("bert", width=64, layers=4, seed=1)
    change_(other, observe)
    assert not ask(observe(other, texts[:2], max_length=7).seen, model).verified
    rng = torch.Generator().manual_seed(1)
    noisy = {
        name: value + value.norm() * torch.randn(value.shape, generator=rng)
        for name, value in truth.seen.update.tensors.items()
    }
    answer = ask(replace(truth.seen, update=replace(truth.seen.update, tensors=noisy)), model)
    assert answer.status == Status.ABSTAINED
    honest = small("bert", width=64)
    assert planted(honest) is None
    assert "were not changed" in ask(observe(honest, 1).seen, honest).reason


def test_it_says_where_it_cannot_work(small, observe):
    bert, llama = small("bert"), small("llama", CAUSAL_LM)
    mode = Decepticons()
    assert mode.obstacle(setting(bert), bert) is None
    assert "which a llama has not" in mode.obstacle(setting(llama), llama)
    assert "two layers" in mode.obstacle(setting(bert), small("bert", layers=1))
    rest = frozenset(name for name in bert.trained() if "intermediate" not in name)
    assert "update.share" in mode.obstacle(setting(bert, rest), bert)
    sent = setting(bert)
    bert.module.requires_grad_(False)
    assert "model.lora" in mode.obstacle(sent, bert)
    bert.module.requires_grad_(True)
    seen = observe(bert, 1).seen
    obstacle = DecepticonsReader().obstacle(AttackSetting.of(seen, bert))
    assert "server.mode = 'decepticons'" in obstacle
