"""What an imprinted model is, and what makes it none."""

import pytest
import torch
from torch.nn import functional as F

from fedleak.attacks.reconstruction import Status
from fedleak.attacks.server_modes import ModeSetting
from fedleak.attacks.server_modes.imprint import Imprint, planted
from fedleak.config.loading import parse
from fedleak.flower.engines import train
from fedleak.models import CAUSAL_LM, load_parameters_, pad
from fedleak.running import pipeline, preparation
from fedleak.store.records import LEAKAGE
from fedleak.training.observation import UpdateKind
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream

BLOCK = "bert.encoder.layer.0."
FIRST = f"{BLOCK}intermediate.dense"


@pytest.fixture
def imprinted(small, observe):
    model = small("bert", width=48)
    public = observe(model, 1).candidates.public
    changes = Imprint().broadcast(model, targeted=True, public=public, rng=stream(0, "server"))
    before = {name: value.clone() for name, value in model.parameters().items()}
    load_parameters_(model, {**model.parameters(), **changes})
    return model, before, changes, public


def setting(model, sent=None):
    local = LocalTraining(
        kind=UpdateKind.GRADIENT, batch_size=2, epochs=1, learning_rate=0.1, dropout=False
    )
    sent = frozenset(model.trained()) if sent is None else sent
    return ModeSetting(sees="updates", local=local, sent=sent)


@pytest.mark.core
def test_it_changes_the_first_block_alone_and_can_be_read_back(imprinted):
    model, _, changes, _ = imprinted
    assert all(name.startswith(BLOCK) for name in changes)
    assert not any("output.LayerNorm" in name and "attention" not in name for name in changes)
    known = planted(model)
    assert known.project_KD.shape == (12, 48)
    assert (known.edge_N.diff() >= 0).all()
    assert float(known.probe_D.norm()) == pytest.approx(1)
    assert known.sign_N.tolist() == [1, -1] * 48


@torch.no_grad()
def test_what_the_layer_reads_is_token_place_and_tag_and_bins_are_even(imprinted):
    """By hand, from the inputs of the layer itself."""
    model, _, _, public = imprinted
    known = planted(model)
    inputs = []
    layer = model.module.get_submodule(FIRST)
    hook = layer.register_forward_hook(lambda module, args, out: inputs.append(args[0]))
    sequences = [example.ids for example in public]
    ids_BT, mask_BT = pad(sequences, 0, model.device)
    model.family.logits(model.module, mask_BT, ids_BT=ids_BT, embeds_BTD=None)
    hook.remove()
    gain = model.module.get_parameter(f"{BLOCK}attention.output.LayerNorm.weight")[0]
    table, put = model.family.token_table(model.module), []
    for ids, input_TD in zip(sequences, inputs[0] / gain, strict=True):
        row_TD = table(torch.tensor(ids), torch.arange(len(ids)))
        tag_K = (row_TD @ known.project_KD.T).mean(0) + known.shift_K
        wanted_TD = F.layer_norm(row_TD + F.pad(tag_K, (0, 36)), (48,))
        assert torch.allclose(input_TD[: len(ids)], wanted_TD, atol=1e-4)
        put.append(wanted_TD @ known.probe_D)
    counts_N = torch.bincount(torch.searchsorted(known.edge_N, torch.cat(put)), minlength=97)
    assert counts_N[0] == 0
    assert float(counts_N[1:].float().max()) < 4 * float(counts_N[1:].float().mean())


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (f"{FIRST}.weight", lambda value: torch.cat([value[:1].roll(1, 1), value[1:]])),
        (f"{FIRST}.bias", lambda value: value.flip(0)),
        (f"{BLOCK}attention.self.query.weight", lambda value: value + 1),
        (f"{BLOCK}attention.output.LayerNorm.bias", lambda value: value + 1),
        (f"{BLOCK}attention.output.dense.weight", lambda value: 0 * value),
    ],
    ids=["another probe", "falling edges", "attends", "shifted", "no tag"],
)
def test_a_block_that_differs_in_one_thing_is_not_taken_for_an_imprinted_one(
    imprinted, name, change
):
    model = imprinted[0]
    assert planted(model) is not None
    parameter = model.module.get_parameter(name)
    parameter.data.copy_(change(parameter.detach().clone()))
    assert planted(model) is None


def test_an_honest_model_is_none(small):
    assert planted(small("bert")) is None
    assert planted(small("gpt2")) is None


def test_it_says_where_it_cannot_work(small):
    bert, gpt2 = small("bert"), small("gpt2", CAUSAL_LM)
    assert Imprint().obstacle(setting(bert), bert) is None
    assert Imprint().obstacle(setting(gpt2), gpt2) is None
    rest = frozenset(name for name in bert.trained() if FIRST not in name)
    assert "update.share" in Imprint().obstacle(setting(bert, rest), bert)
    sent = setting(bert)
    bert.module.requires_grad_(False)
    assert "model.lora" in Imprint().obstacle(sent, bert)


def test_a_run_reads_the_batches_of_its_malicious_round_and_no_other(tmp_path, saved, in_process):
    table = {
        "name": "imprinted",
        "seed": 3,
        "model": {"name": saved("bert")},
        "data": {"name": "builtin/notes", "samples": 4, "held_out": 30, "max_length": 6},
        "federation": {"clients": 2, "rounds": 2, "batch_size": 2, "learning_rate": 0.1},
        "server": {"mode": "imprint", "rounds": [2]},
        "attack": [{"kind": "imprint"}],
        "audit": {"controls": False},
        "utility": {"rounds": []},
        "workers": {"devices": ["cpu"]},
    }
    experiment = parse(table)
    run = preparation.prepare(experiment, tmp_path / "run")
    pipeline.carry_out(run, experiment, train)
    rows = [row for row in run.rows(LEAKAGE) if row.attack == "imprint"]
    assert [row.status for row in rows if row.round == 1] == [Status.INADMISSIBLE] * 2
    read = [(row.exact_match, row.verified) for row in rows if row.round == 2]
    assert read == [(1.0, True)] * 2
