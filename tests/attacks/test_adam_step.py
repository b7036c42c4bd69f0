"""A first step of Adam gives its gradient away, as far as float32 shows how much the step lacks."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fedleak.attacks import replay
from fedleak.attacks.adam_step import BehindAdam, behind_adam
from fedleak.attacks.auto.attack import Auto
from fedleak.attacks.certificate import flat
from fedleak.attacks.reconstruction import Status
from fedleak.attacks.subspace.completion import completed
from fedleak.attacks.subspace.keyspan import Keyspan
from fedleak.defenses.cast import Cast
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.defenses.mask import Mask
from fedleak.defenses.quantize import Quantize
from fedleak.models import CAUSAL_LM, ModelSpec, loading
from fedleak.models.lora import Lora
from fedleak.training.observation import UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

TEXTS = ["the patient has a fever today", "my sister lost her job last week"]
SENTENCES = [
    "The little girl gave her old doll to a friend.",
    "My brother has been ill since Monday, and nobody knows why.",
    "She found the letters that he had hidden under the stairs.",
    "We sold our house because of the money.",
]
RATE = 1e-3
ADAMW = Recipe(optimiser="adamw", weight_decay=0.01)
SMALL = replace(ADAMW, max_grad_norm=0.02)


@pytest.fixture(scope="module")
def model(small):
    return small("bert", width=128, layers=3)


@pytest.fixture
def stepped(observe):
    """What a server sees of a client that makes a step of Adam, and the gradient behind it."""

    def make(model, recipe=ADAMW, texts=TEXTS, rate=RATE, **options) -> SimpleNamespace:
        options = {"kind": UpdateKind.DELTA, "learning_rate": rate} | options
        observed = observe(model, texts, recipe=recipe, **options)
        before = model.parameters()
        tensors = {
            name: recipe.without_decay(value, before[name], rate, 1)
            for name, value in observed.seen.update.tensors.items()
        }
        seen = replace(observed.seen, update=replace(observed.seen.update, tensors=tensors))
        gradient = observe(model, texts).seen.update.tensors
        if recipe.max_grad_norm is not None:
            share = min(1.0, recipe.max_grad_norm / float(flat(gradient).norm()))
            gradient = {name: share * value for name, value in gradient.items()}
        return SimpleNamespace(seen=seen, gradient=gradient, sequences=observed.sequences)

    return make


@pytest.mark.parametrize(
    "recipe",
    [Recipe(optimiser="adam"), ADAMW, replace(ADAMW, max_grad_norm=0.1)],
    ids=["adam", "adamw", "clipped"],
)
def test_a_known_number_is_wrong_by_what_rounding_says(model, stepped, recipe):
    observed = stepped(model, recipe)
    behind = behind_adam(observed.seen, model)
    assert behind.update.kind == UpdateKind.GRADIENT
    names = [name for name, value in observed.gradient.items() if value.dim() == 2 and value.any()]
    variance_X = flat({name: behind.variance(model, name) for name in names}).double()
    told_X = flat({name: behind.update.tensors[name] for name in names}).double()
    truth_X = flat({name: observed.gradient[name] for name in names}).double()
    known_X, used_X = variance_X.isfinite(), truth_X != 0
    assert known_X[used_X].float().mean() > 0.05
    share_X = ((told_X - truth_X).square() / variance_X)[known_X & used_X]
    # Rounding is uniform: 3 u^2, with u between 0 and 1.
    assert share_X.median() == pytest.approx(0.75, abs=0.25)
    assert (share_X > 4).double().mean() < 0.06  # near what is not known, to first order
    assert not told_X[~used_X].any()
    # Of the others the sign is known.
    assert torch.equal(told_X[~known_X].sign(), truth_X[~known_X].sign())


def test_dropout_does_not_matter(model, stepped):
    seen = stepped(model, dropout=True).seen
    assert behind_adam(seen, model).knowledge.dropout


def changed(**known):
    return lambda seen: replace(seen, knowledge=replace(seen.knowledge, **known))


def behind(defense):
    return lambda seen: replace(seen, update=defense(seen.update, rng=stream(0, "sent")))


@pytest.mark.parametrize(
    "change",
    [
        changed(local_steps=2),
        changed(local_steps=None),
        changed(learning_rate=None),
        changed(learning_rate=RATE / 2),
        changed(recipe=Recipe()),
        changed(recipe=None),
        changed(recipe=Recipe(optimiser="adam", weight_decay=0.01)),
        changed(recipe=replace(ADAMW, precision="bfloat16")),
        changed(noise_scale=1e-9),
        behind(GaussianNoise(sigma=1e-8)),
        behind(Quantize(bits=8)),
        behind(Cast(dtype="float16")),
        behind(Cast(dtype="bfloat16")),
        lambda seen: replace(
            seen, update=seen.update.changed(lambda step_X: step_X.bfloat16().float())
        ),
        lambda seen: replace(seen, update=seen.update.changed(lambda step_X: 0.999 * step_X)),
        lambda seen: replace(seen, client=-1),
    ],
    ids=[
        "two steps",
        "steps are not known",
        "no rate",
        "half the rate",
        "sgd",
        "no recipe",
        "decay in the gradient",
        "half precision",
        "noise that is known",
        "noise",
        "8 bits",
        "float16",
        "bfloat16",
        "bfloat16, widened again",
        "shorter steps, off the grid",
        "a sum",
    ],
)
def test_nothing_is_said_of_what_is_no_first_step(model, stepped, change):
    seen = stepped(model).seen
    assert isinstance(behind_adam(seen, model), BehindAdam)
    assert behind_adam(change(seen), model) is None


def test_a_mask_leaves_the_numbers_that_came(model, stepped):
    seen = stepped(model).seen
    masked = behind(Mask(fraction=0.5))(seen)
    whole, part = (flat(behind_adam(some, model).update.tensors) for some in (seen, masked))
    came_X = flat(masked.update.tensors) != 0
    assert torch.equal(part[came_X], whole[came_X])


def test_an_adapter_that_is_zero_shows_numbers_up_to_a_hundredth(stepped):
    spec = ModelSpec(name="builtin/llama-tiny", task="causal-lm", num_labels=2, lora=Lora(4, 8.0))
    model = loading.load(spec)
    observed = stepped(model, replace(ADAMW, weight_decay=0.0))
    (name, *_) = [name for name, value in observed.seen.update.tensors.items() if value.any()]
    told_X = behind_adam(observed.seen, model).update.tensors[name]
    small_X = observed.gradient[name].abs() < 0.01
    apart_X = (told_X - observed.gradient[name]).abs()[small_X]
    assert small_X.float().mean() > 0.2
    assert apart_X.max() < 0.5 * observed.gradient[name].abs()[small_X].max()


def test_the_first_attention_is_fitted_in_the_span_of_words_and_places(model, stepped):
    observed = stepped(model, SMALL)
    seen, names = behind_adam(observed.seen, model), model.family.attention_parameters(0)
    with torch.no_grad():
        fitted = completed(model, seen, seen.update.tensors, names).gradients
    query, key, _ = names
    for name in (query, key):
        size = observed.gradient[name].norm()
        assert (fitted[name] - observed.gradient[name]).norm() < 0.01 * size


def test_auto_reads_a_batch_from_the_gradient_and_proves_it_by_the_step(model, stepped):
    observed = stepped(model, SMALL)
    answer = Auto(seconds=60.0)(observed.seen, model, rng=stream(0, "attack"))
    assert sorted(answer.sequences) == sorted(observed.sequences)
    assert answer.verified
    assert answer.diagnostics["asked"] == {"keyspan": "recovered"}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_auto_reads_a_batch_of_a_decoder_from_the_gradient(small, observe, stepped, family):
    decoder = small(family, CAUSAL_LM, width=128, layers=3)
    observed = stepped(decoder, SMALL, [*TEXTS, "the old dog sleeps"])
    answer = Auto(seconds=60.0)(observed.seen, decoder, rng=stream(0, "attack"))
    assert sorted(answer.sequences) == sorted(observed.sequences)
    assert answer.verified
    assert answer.diagnostics["asked"] == {"keyspan": "recovered"}


@pytest.mark.parametrize("lacking", ["numbers", "the embedding"])
def test_of_a_decoder_whose_rows_cannot_be_completed_keyspan_says_so(small, stepped, lacking):
    decoder = small("llama", CAUSAL_LM, width=128, layers=3)
    # Without clipping, and at a small rate, large numbers of a small model are signs alone.
    seen = stepped(decoder, ADAMW if lacking == "numbers" else SMALL, rate=1e-4).seen
    if lacking == "the embedding":
        words = decoder.family.word_embedding
        tensors = {name: step for name, step in seen.update.tensors.items() if name != words}
        seen = replace(seen, update=replace(seen.update, tensors=tensors))
    assert isinstance(behind_adam(seen, decoder), BehindAdam)
    answer = Keyspan()(seen, decoder, rng=stream(0, "attack"))
    assert answer.status == Status.ABSTAINED
    assert "no row of the first attention can be completed" in answer.reason


def test_a_real_decoders_batch_is_read_whose_words_have_the_longest_of_all_rows(assets, stepped):
    spec = ModelSpec(name=str(assets / "models" / "stories15m"), task=CAUSAL_LM, num_labels=2)
    decoder = loading.load(spec)
    recipe = replace(ADAMW, max_grad_norm=1.0)
    observed = stepped(decoder, recipe, SENTENCES, rate=5e-5)
    assert observed.seen.update.tensors[decoder.family.word_embedding].any(1).all()
    answer = Auto(seconds=120.0)(observed.seen, decoder, rng=stream(0, "attack"))
    assert sorted(answer.sequences) == sorted(observed.sequences)
    assert answer.verified


def test_classes_are_those_that_explain_a_step(model, stepped):
    labels = [0, 2, 1, 2]
    texts = [*TEXTS, "the old dog sleeps", "we will meet you at the station"]
    observed = stepped(model, texts=texts, labels=labels)
    assert replay._labels(model, observed.sequences, observed.seen) == tuple(labels)
    granted = replace(observed.seen.knowledge, labels=tuple(labels))
    known = replace(observed.seen, knowledge=granted)
    assert replay._labels(model, observed.sequences, known) is None
