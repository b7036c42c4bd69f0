import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedleak.attacks import replay
from fedleak.attacks.certificate import as_gradient
from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Status
from fedleak.attacks.subspace import state_pursuit
from fedleak.attacks.subspace.answer import Judged
from fedleak.attacks.subspace.state_pursuit import StatePursuit
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


def sent(model, sequences):
    """The update of a client that makes one step of AdamW; the model stays as it is."""
    before = {name: value.clone() for name, value in model.parameters().items()}
    update = local_update_(model, sequences, [0] * len(sequences), ADAMW, seed=3)
    load_parameters_(model, before)
    known = Knowledge(
        learning_rate=ADAMW.learning_rate, local_steps=1, dropout=False, recipe=ADAMW.recipe
    )
    return Observation(round=2, client=0, update=update, knowledge=known)


@pytest.fixture
def adapted(small):
    """A random decoder whose adapters were trained in earlier rounds."""
    model = small("llama", CAUSAL_LM, layers=3, width=48)
    adapt_(model.module, Lora(6, 12.0), model.family.classifier)
    rng = torch.Generator().manual_seed(0)
    for name, parameter in model.trained().items():
        if "lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=rng)
    return model


@torch.no_grad()
def nats(model, seen, ids):
    """What a text explains of an update, token by token."""
    layers = state_pursuit._layers(seen, model, stream(0, "texts"))
    nothing = [layer.whiten_DD.new_empty(0, len(layer.whiten_DD)) for layer in layers]
    change = {name: -value for name, value in as_gradient(seen).items()}
    search = state_pursuit._Search(model, layers, nothing, change, 4, len(ids))
    whole = search._followed(search._begin(), ids[len(search._first) :])
    return float(whole.gain_B[0]), layers, whole, search


def test_of_signs_a_right_text_explains_more_than_another(adapted):
    own, other = adapted.encode(["she told us that", "nobody knows it all"])
    seen = sent(adapted, [own])
    assert nats(adapted, seen, own[:-1])[0] > nats(adapted, seen, other[:-1])[0] + 20


def test_after_adam_numbers_count_by_the_size_of_the_states(adapted):
    for layer in adapted.module.model.layers:  # sizes that differ, as in trained models
        layer.input_layernorm.weight.data = torch.logspace(-1.5, 1.5, adapted.hidden_size)
    (own,) = adapted.encode(["she told us that"])
    seen = sent(adapted, [own])
    undivided = replace(seen, knowledge=replace(seen.knowledge, recipe=None))
    assert nats(adapted, seen, own[:-1])[0] > nats(adapted, undivided, own[:-1])[0]


def test_what_is_explained_is_that_of_least_squares(adapted):
    (own,) = adapted.encode(["she told us that"])
    _, layers, whole, _ = nats(adapted, sent(adapted, [own]), own[:-1])
    modules = [layer.module for layer in layers]
    with torch.no_grad():
        states, _, _ = state_pursuit._run(adapted, modules, torch.tensor([own[:-1]]), ())
    for layer, states_1TD, left_1AD in zip(layers, states, whole.left_LBAD, strict=True):
        white_TD = (states_1TD[0] @ layer.whiten_DD).double()
        rows_AD = layer.rows_AD.double()
        fit = torch.linalg.lstsq(white_TD.T, rows_AD.T).solution
        rest_AD = rows_AD - fit.T @ white_TD
        assert float(left_1AD[0].norm()) == pytest.approx(float(rest_AD.norm()), rel=1e-3)


def test_an_update_makes_likelier_what_it_was_trained_on(adapted):
    (own,) = adapted.encode(["she told us that nobody knows it all"])
    *_, search = nats(adapted, sent(adapted, [own]), own[:-1])
    places = []
    with torch.no_grad():
        beam = search._begin()
        for token in own[len(search._first) : -1]:
            likelier_V = search._made_likelier(beam)[0]
            places.append(float((likelier_V < likelier_V[token]).float().mean()))
            beam = search._followed(beam, [token])
    # By chance places are uniform: three deviations of their mean.
    assert sum(places) / len(places) > 0.5 + 3 * (12 * len(places)) ** -0.5


def test_a_wrong_word_a_missing_one_and_two_exchanged_are_mended(small, observe):
    model = small("llama", CAUSAL_LM, layers=3, width=48)
    seen = observe(model, ["she told us that"]).seen  # of one exact gradient
    (own,) = model.encode(["she told us that"])
    own = tuple(own[:-1])
    *_, search = nats(model, seen, own)
    wrong, missing = (*own[:2], own[2] + 1, *own[3:]), (*own[:3], *own[4:])
    exchanged = (*own[:2], own[3], own[2], *own[4:])
    with torch.no_grad():
        for ids in (wrong, missing, exchanged):
            begun = search._followed(search._begin(), ids[len(search._first) :])
            text = Judged(ids, -float(begun.scores[0]), math.inf)
            assert search.mended(text, Clock(None)).ids == own


def test_nats_are_those_of_the_share_that_is_explained():
    left_AD = torch.tensor([[3.0, 0.0, 4.0], [0.0, 5.0, 0.0]])
    unit_JD = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    explained, nothing = state_pursuit._nats(left_AD, unit_JD).tolist()
    assert explained == pytest.approx(-0.5 * 2 * 3 * torch.tensor(1 - 9 / 50).log().item() - 1)
    assert nothing == 0


def test_adapters_of_a_first_round_say_nothing_and_it_says_so(small):
    model = small("llama", CAUSAL_LM, layers=3, width=48)
    adapt_(model.module, Lora(6, 12.0), model.family.classifier)  # B is zero, so A has no gradient
    answer = StatePursuit()(sent(model, model.encode(["she told us"])), model, rng=stream(0, "a"))
    assert (answer.status, answer.sequences) == (Status.ABSTAINED, None)
    assert "did not change" in answer.reason


def test_noise_alone_is_no_text(adapted):
    seen = sent(adapted, adapted.encode(["she told us that"]))
    rng = torch.Generator().manual_seed(1)
    noise = seen.update.changed(lambda tensor: torch.randn(tensor.shape, generator=rng))
    attack = StatePursuit(width=4, longest=6)
    answer = attack(replace(seen, update=noise), adapted, rng=stream(0, "a"))
    assert answer.status == Status.ABSTAINED


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
