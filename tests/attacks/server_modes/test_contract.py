"""What every server mode owes, whatever it does: a new mode is in here without being named."""

import pytest
import torch

from fedleak.attacks import server_modes
from fedleak.attacks.server_modes import ModeSetting, ServerMode, changed_state
from fedleak.models import CAUSAL_LM, CLASSIFICATION, LanguageModel, ModelSpec, loading
from fedleak.models.lora import Lora
from fedleak.training.local import local_update_
from fedleak.training.observation import Example, UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.training.settings import LocalTraining
from fedleak.util.errors import FedleakError
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

SETTINGS: dict[str, dict[str, object]] = {}
"""Settings of modes that have no defaults."""

MODELS = [
    (family, task, lora)
    for family in ("bert", "gpt2", "llama")
    for task in (CLASSIFICATION, CAUSAL_LM)
    for lora in (None, Lora(2, 4.0))
    if (family, task) != ("bert", CAUSAL_LM)
]
KINDS = sorted(server_modes.kinds())
ISOLATING = [k for k in KINDS if server_modes.kinds()[k].isolated is not ServerMode.isolated]


def made(kind):
    return server_modes.kinds()[kind](**SETTINGS.get(kind, {}))


def model_of(family: str, task: str, lora: Lora | None) -> LanguageModel:
    """Returns a tiny model; the second factors of adapters are not zero, as after a round."""
    spec = ModelSpec(name=f"builtin/{family}-tiny", task=task, num_labels=2, lora=lora)
    model = loading.load(spec)
    rng = stream(5, family)
    for name, value in model.parameters().items():
        if ".lora_B." in name:
            value.copy_(0.1 * torch.randn(value.shape, generator=rng))
    return model


def training(**changes) -> LocalTraining:
    local = {"kind": UpdateKind.GRADIENT, "batch_size": 2, "epochs": 1, "learning_rate": 0.1}
    return LocalTraining(**(local | {"dropout": False} | changes))


def setting_of(model, sees, local=None):
    sent = frozenset(model.trained())
    return ModeSetting(sees=sees, local=local or training(), sent=sent)


def public(model, count=8):
    texts = [f"the patient number {i} has slept for {i + 2} hours" for i in range(count)]
    return [Example(tuple(ids), i % 2) for i, ids in enumerate(model.encode(texts))]


def sent(mode, model, *, targeted):
    """Returns what a mode changes; its random stream is that of a round."""
    return mode.broadcast(
        model, targeted=targeted, public=public(model), rng=stream(1, "server", 3)
    )


@pytest.fixture(scope="module", params=MODELS, ids=lambda p: f"{p[0]}-{p[1]}-{'lora' * bool(p[2])}")
def model(request):
    return model_of(*request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mode_keeps_names_shapes_and_the_model_itself_and_says_the_same_again(kind, model):
    mode = made(kind)
    assert mode.changes()
    if all(mode.obstacle(setting_of(model, sees), model) for sees in ("updates", "sum")):
        pytest.skip("it does not work on this model")
    before = {name: value.clone() for name, value in model.parameters().items()}
    for targeted in (True, False):
        changes = sent(mode, model, targeted=targeted)
        state = changed_state(before, changes, kind)
        assert all(bool(torch.isfinite(value).all()) for value in state.values())
        again = sent(mode, model, targeted=targeted)
        assert changes.keys() == again.keys()
        assert all(torch.equal(changes[name], again[name]) for name in changes)
    assert all(torch.equal(before[name], value) for name, value in model.parameters().items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_target_is_one_of_the_round_and_the_same_again(kind):
    mode = made(kind)
    for round in range(1, 6):
        targets = {mode.target([2, 5, 7], round, rng=stream(1, "target", round)) for _ in range(3)}
        assert len(targets) == 1
        assert targets <= {None, 2, 5, 7}


@pytest.mark.parametrize("kind", ISOLATING)
@pytest.mark.parametrize(
    "local",
    [
        {},
        {"dropout": True},
        {"kind": UpdateKind.DELTA, "batch_size": 1, "epochs": 3, "learning_rate": 1.0},
        {
            "kind": UpdateKind.DELTA,
            "batch_size": 1,
            "epochs": 2,
            "learning_rate": 1e-3,
            "recipe": Recipe(optimiser="adamw", weight_decay=0.1),
        },
        pytest.param(
            {
                "kind": UpdateKind.DELTA,
                "batch_size": 1,
                "epochs": 2,
                "learning_rate": 0.1,
                "recipe": Recipe(momentum=0.9),
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=["a gradient", "dropout", "several steps", "AdamW with weight decay", "momentum"],
)
def test_other_clients_send_nothing_of_what_is_called_the_targets(kind, local, model):
    mode, names = made(kind), frozenset(model.trained())
    isolated = mode.isolated(names, model)
    if mode.obstacle(setting_of(model, "sum", training(**local)), model):
        pytest.skip("it does not work on this model")
    assert isolated
    texts = public(model, 3)
    own = {name: value.clone() for name, value in model.parameters().items()}
    changes = sent(mode, model, targeted=False)
    try:
        for name, value in changes.items():
            model.parameters()[name].copy_(value)
        update = local_update_(
            model, [t.ids for t in texts], [t.label for t in texts], training(**local), seed=0
        )
    finally:
        for name, value in own.items():
            model.parameters()[name].copy_(value)
    sizes = {name: float(value.abs().max()) for name, value in update.tensors.items()}
    assert max(sizes[name] for name in isolated) == 0
    # And no more is left out than has to be.
    assert all(sizes[name] > 0 for name in names - isolated)


def test_the_honest_server_changes_nothing(model):
    assert sent(made("honest"), model, targeted=True) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"other": torch.zeros(2)}, "sends 'other', which nobody trains"),
        ({"w": torch.zeros(3)}, r"sends 'w' as torch.float32 \(3,\), and the model has"),
        ({"w": torch.zeros(2, dtype=torch.float64)}, r"sends 'w' as torch.float64 \(2,\)"),
    ],
)
def test_what_is_no_model_of_this_shape_is_refused(changes, message):
    with pytest.raises(FedleakError, match=message):
        changed_state({"w": torch.ones(2)}, changes, "mine")
