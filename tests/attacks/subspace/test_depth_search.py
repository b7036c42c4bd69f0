import pytest
import torch

from fedleak.attacks import certificate, replay
from fedleak.attacks.auto.attack import Auto
from fedleak.attacks.subspace.dager import Dager
from fedleak.models import CAUSAL_LM, load_parameters_
from fedleak.models.lora import Lora, adapt_
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, Observation, UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream

CLIPPED = LocalTraining(
    kind=UpdateKind.DELTA,
    batch_size=8,
    epochs=1,
    learning_rate=2e-4,
    dropout=False,
    recipe=Recipe(optimiser="adamw", max_grad_norm=0.05),
)
TEXTS = ["she told us that", "nobody knows it all"]


def unheard(step, steps, best):
    """Progress that nobody asked for."""


@pytest.fixture
def adapted(small):
    """Returns a decoder with adapters, whose second matrices are zero in a first round."""

    def make(family="llama", *, first=False, rank=24):
        model = small(family, CAUSAL_LM, layers=4, width=64)
        adapt_(model.module, Lora(rank, 2.0 * rank), model.family.classifier)
        rng = stream(0, "adapters")
        for name, parameter in model.trained().items():
            if "lora_A" in name or ("lora_B" in name and not first):
                size = 0.1 if "lora_A" in name else 0.01
                parameter.data = size * torch.randn(parameter.shape, generator=rng)
        return model

    return make


def sent(model, texts, how=CLIPPED):
    before = {name: value.clone() for name, value in model.parameters().items()}
    own = [tuple(ids) for ids in model.encode(texts)]
    update = local_update_(model, own, [0] * len(own), how, seed=3)
    load_parameters_(model, before)
    known = Knowledge(
        learning_rate=how.learning_rate, local_steps=1, dropout=False, recipe=how.recipe
    )
    return own, Observation(round=2, client=0, update=update, knowledge=known)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("first", [False, True], ids=["trained", "first round"])
@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_is_read_from_adapters_behind_a_step_of_adam(adapted, family, first, count):
    model = adapted(family, first=first)
    own, seen = sent(model, TEXTS[:count])
    answer = Dager()(seen, model, rng=stream(0, "attack"))
    closed = [certificate.close(model, ids) for ids in answer.sequences]
    assert sorted(closed) == sorted(own)
    assert replay.replay(model, closed, seen).verified


def test_auto_proves_it_before_slower_attacks_run(adapted):
    model = adapted()
    own, seen = sent(model, TEXTS)
    answer = Auto(seconds=60.0)(seen, model, rng=stream(0, "attack"))
    assert sorted(answer.sequences) == sorted(own)
    assert answer.verified
    assert [*answer.diagnostics["asked"]][-1] == "dager"
    assert "state_pursuit" not in answer.diagnostics["asked"]
