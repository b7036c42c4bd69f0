"""Answers after several steps and after Adam: proved by making the client's steps again."""

from dataclasses import replace

import pytest
import torch

from fedleak.attacks import replay
from fedleak.attacks.clock import UNLIMITED
from fedleak.attacks.reconstruction import Reconstruction, Status
from fedleak.attacks.subspace.dager import Dager
from fedleak.defenses.mask import Mask
from fedleak.defenses.prune import Prune
from fedleak.models import CAUSAL_LM, CLASSIFICATION, load_parameters_
from fedleak.running.workers import attempt
from fedleak.running.workers.model_state import changed, state
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, Observation, UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.training.settings import LocalTraining
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

RECIPES = {
    "sgd": (Recipe(), 0.05),
    "momentum": (Recipe(momentum=0.9), 0.05),
    "adam": (Recipe(optimiser="adam", max_grad_norm=1.0), 1e-4),
    "adamw": (Recipe(optimiser="adamw", weight_decay=0.01), 1e-4),
    "mixed": (Recipe(optimiser="adamw", precision="bfloat16-mixed"), 1e-4),
}
LABELS = [0, 2, 1, 2]


def sent_by_client(model, sequences, name, *, steps=2, epochs=1, labels=LABELS, **known):
    """What the server sees of a client that makes so many steps on these texts in each epoch."""
    recipe, rate = RECIPES[name]
    how = LocalTraining(
        kind=UpdateKind.DELTA,
        batch_size=-(-len(sequences) // steps),
        epochs=epochs,
        learning_rate=rate,
        dropout=False,
        recipe=recipe,
    )
    before = {name: value.clone() for name, value in model.parameters().items()}
    update = local_update_(model, sequences, labels[: len(sequences)], how, seed=11)
    load_parameters_(model, before)
    tensors = {
        name: recipe.without_decay(value, before[name], rate, steps * epochs)
        for name, value in update.tensors.items()
    }
    facts = {"learning_rate": rate, "local_steps": steps * epochs, "dropout": False}
    return Observation(
        round=1,
        client=0,
        update=replace(update, tensors=tensors),
        knowledge=Knowledge(**facts | {"recipe": recipe, "local_epochs": epochs} | known),
    )


def other_word(sequences):
    """The texts with one word changed."""
    first = list(sequences[0])
    first[2] = first[2] + 1
    return [tuple(first), *map(tuple, sequences[1:])]


@pytest.mark.parametrize("name", RECIPES)
def test_the_texts_of_two_steps_are_proved_and_no_others(small, texts, name):
    model = small("llama", CAUSAL_LM)
    sequences = [tuple(ids) for ids in model.encode(texts[:3])]
    seen = sent_by_client(model, sequences, name)
    before = state(model)
    right = replay.replay(model, sequences[::-1], seen)  # in an order that is not the client's
    wrong = replay.replay(model, other_word(sequences)[::-1], seen)
    assert right.verified
    assert right.apart < right.limit
    assert not wrong.verified
    assert wrong.cosine < right.cosine
    assert changed(model, before) == []


# Without the size of batches there is more to search.
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.slow), None])
def test_all_orders_of_two_epochs_are_searched_where_they_are_few(small, texts, size):
    model = small("llama", CAUSAL_LM, layers=1, width=16)
    sequences = [tuple(ids) for ids in model.encode(texts[12:16])]
    seen = sent_by_client(model, sequences, "adamw", epochs=2, batch_size=size)
    assert replay.replay(model, sequences, seen).verified
    wrong = replay.replay(model, other_word(sequences), seen)
    assert wrong.complete
    assert not wrong.verified


def test_an_answer_says_why_it_is_not_proved(small, texts, monkeypatch):
    model = small("llama", CAUSAL_LM, layers=1, width=16)
    sequences = tuple(tuple(ids) for ids in model.encode(texts[:4]))
    seen = sent_by_client(model, sequences, "adamw", epochs=2, batch_size=2)

    def reason_of(sequences, seen=seen):
        guess = Reconstruction(
            status=Status.RECOVERED, sequences=sequences, evidence=(0.0,) * 4, reason="a guess"
        )
        (answer,) = attempt.answers(None, [guess], [seen], model, ())
        assert not answer.verified
        assert answer.reason.startswith("a guess; no proof by replay: ")
        return answer.reason

    few = {name: v for name, v in seen.update.tensors.items() if name.endswith("norm.weight")}
    narrow = replace(seen, update=replace(seen.update, tensors=few))
    assert "too few numbers" in reason_of(sequences, narrow)
    assert "differ from the update" in reason_of(tuple(other_word(sequences)))
    with monkeypatch.context() as limited:
        limited.setattr(replay, "REPLAYS", 3)
        assert "ran out of time or replays" in reason_of(sequences)
    # No word that is so near as this one can be told apart.
    monkeypatch.setattr(replay, "_one_token_changed", lambda *_: [sequences])
    assert "one token changed" in reason_of(sequences)


def test_a_word_with_a_twin_is_not_proved_where_embeddings_are_not_sent(small, texts):
    model = small("llama", CLASSIFICATION)
    sequences = [tuple(ids) for ids in model.encode(texts[:3])]
    embedding = model.module.get_parameter(model.family.word_embedding)
    with torch.no_grad():
        embedding[other_word(sequences)[0][2]] = embedding[sequences[0][2]] * (1 + 1e-5)
    seen = sent_by_client(model, sequences, "sgd")
    kept = {n: t for n, t in seen.update.tensors.items() if "self_attn" in n}
    frozen = replace(seen, update=replace(seen.update, tensors=kept))

    assert not replay.replay(model, other_word(sequences), frozen).verified
    assert not replay.replay(model, sequences, frozen).verified


def test_classes_that_nobody_granted_are_found(small, texts):
    model = small("bert", CLASSIFICATION)
    sequences = [tuple(ids) for ids in model.encode(texts[:2])]
    seen = sent_by_client(model, sequences, "adamw", steps=1)
    assert replay.replay(model, sequences, seen).verified
    assert not replay.replay(model, other_word(sequences), seen).verified


def test_texts_of_one_class_are_found_with_a_replay_for_each_class(small, texts, monkeypatch):
    model = small("bert", CLASSIFICATION)
    sequences = [tuple(ids) for ids in model.encode(texts[:4])]
    monkeypatch.setitem(globals(), "LABELS", [model.num_labels - 1] * 4)
    monkeypatch.setattr(replay, "REPLAYS", model.num_labels)
    seen = sent_by_client(model, sequences, "sgd", steps=1)
    assert replay.replay(model, sequences, seen).verified


def test_what_cannot_be_made_again_is_not_proved(small, texts):
    model = small("llama", CAUSAL_LM)
    sequences = [tuple(ids) for ids in model.encode(texts[:2])]
    seen = sent_by_client(model, sequences, "adamw", steps=1)
    assert replay.replay(model, sequences, seen).verified
    for fact in ({"dropout": True}, {"dropout": None}, {"noise_scale": 0.1}):
        known = replace(seen.knowledge, **fact)
        assert replay.replay(model, sequences, replace(seen, knowledge=known)) is None, fact
    other = replace(seen.knowledge, recipe=Recipe(optimiser="other"))
    assert replay.replay(model, sequences, replace(seen, knowledge=other)) is None
    assert replay.replay(model, sequences, replace(seen, client=-1)) is None
    assert replay.replay(model, sequences[:1], seen) is None
    few = {name: v for name, v in seen.update.tensors.items() if name.endswith("norm.weight")}
    assert not replay.replay(
        model, sequences, replace(seen, update=replace(seen.update, tensors=few))
    ).verified


@pytest.mark.parametrize("steps", [1, 2])
def test_a_text_that_the_model_is_sure_of_proves_no_answer(small, texts, steps):
    """It changes nearly nothing, so another such text could stand in its place."""
    model = small("bert", num_labels=2)
    sequences = [tuple(ids) for ids in model.encode(texts[8:10])]
    head, pooled = model.module.classifier, []
    hook = head.register_forward_pre_hook(lambda _, given: pooled.append(given[0]))
    for ids in sequences:
        sent_by_client(model, [ids], "sgd", steps=1)
    hook.remove()
    unsure, sure = (state_1D.detach()[0].double() for state_1D in pooled)
    axis = sure - (sure @ unsure) / (unsure @ unsure) * unsure
    with torch.no_grad():
        head.weight.zero_()[1] = (14 * axis / (axis @ sure)).float()
        head.bias.zero_()
    verified = []
    for scale in (1.0, 0.2):
        with torch.no_grad():
            head.weight.mul_(scale)
        seen = sent_by_client(model, sequences, "sgd", steps=steps, labels=[0, 1])
        verified.append(replay.replay(model, sequences, seen).verified)
    assert verified == [False, True]


def test_an_update_of_zeros_is_told_nothing(small, texts):
    model = small("llama", CAUSAL_LM)
    sequences = [tuple(ids) for ids in model.encode(texts[:2])]
    seen = sent_by_client(model, sequences, "sgd")
    nothing = {name: torch.zeros_like(value) for name, value in seen.update.tensors.items()}
    seen = replace(seen, update=replace(seen.update, tensors=nothing))
    assert replay.replay(model, sequences, seen) is None


def test_another_rounding_is_within_the_limit_and_another_recipe_is_not(small, texts):
    model = small("llama", CAUSAL_LM)
    sequences = [tuple(ids) for ids in model.encode(texts[:2])]
    seen = sent_by_client(model, sequences, "adamw", steps=1)
    twice = small("llama", CAUSAL_LM)
    twice.module.double()
    load_parameters_(twice, model.parameters())
    exact = sent_by_client(twice, sequences, "adamw", steps=1).update
    tensors = {name: value.float() for name, value in exact.tensors.items()}
    assert replay.replay(
        model, sequences, replace(seen, update=replace(exact, tensors=tensors))
    ).verified
    adam = replace(seen.knowledge, recipe=Recipe(optimiser="adamw"), learning_rate=2e-4)
    assert not replay.replay(model, sequences, replace(seen, knowledge=adam)).verified


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_worker_proves_right_answers_and_refuses_wrong_claims(small, texts, name):
    model = small("llama", CAUSAL_LM)
    sequences = tuple(tuple(ids) for ids in model.encode(texts[:2]))
    seen = sent_by_client(model, sequences, name, steps=1)

    def answered(texts, *, claims):
        guess = Reconstruction(
            status=Status.RECOVERED, sequences=tuple(texts), evidence=(0.0, 0.0), verified=claims
        )
        (answer,) = attempt.answers(None, [guess], [seen], model, ())
        return answer

    right = answered(sequences, claims=False)
    assert right.verified
    assert "replay" in right.reason
    wrong = answered(other_word(sequences), claims=False)
    assert not wrong.verified
    assert (
        wrong.diagnostics["replay_cosine"] < right.diagnostics["replay_cosine"] == pytest.approx(1)
    )
    assert answered(other_word(sequences), claims=True).status == Status.FAILED


def test_a_replay_has_no_more_time_than_the_attack_had(small, texts, monkeypatch):
    model, limits = small("llama", CAUSAL_LM), []
    sequences = tuple(tuple(ids) for ids in model.encode(texts[:2]))
    seen = sent_by_client(model, sequences, "sgd")
    wrong = tuple(other_word(sequences))  # a proof is remembered
    guess = Reconstruction(status=Status.RECOVERED, sequences=wrong, evidence=(0.0, 0.0))
    monkeypatch.setattr(replay, "Clock", lambda seconds: limits.append(seconds) or UNLIMITED)
    for attack in (Dager(seconds=7.0), Dager(), Dager(seconds=600.0)):
        attempt.answers(attack, [guess], [seen], model, ())
    assert limits == [7.0, 60.0, 60.0]


BEHIND = [Mask(fraction=0.5), Mask(fraction=0.9), Prune(fraction=0.8)]
# What came is compared in the same way, whatever left it out and however the client steps.
BEHIND_EACH = [
    *(("sgd", defense) for defense in BEHIND[1:]),
    pytest.param("sgd", BEHIND[0], marks=pytest.mark.slow),
    ("momentum", BEHIND[1]),
    ("adamw", BEHIND[2]),
]


@pytest.mark.parametrize(("name", "defense"), BEHIND_EACH, ids=str)
def test_behind_a_mask_the_texts_are_proved_and_no_others(small, texts, name, defense):
    # What Adam makes of rounding is too much to tell all words of this model apart by what came.
    model = small("bert") if name == "adamw" else small("llama", CAUSAL_LM, layers=1)
    steps = 3 if name == "adamw" else 2
    sequences = [tuple(ids) for ids in model.encode(texts[:steps])]
    longest = sorted(range(steps), key=lambda i: len(sequences[i]), reverse=True)
    # Classes are known: which text was in which step is search enough.
    known = tuple(LABELS[i] for i in longest)
    seen = sent_by_client(model, sequences, name, steps=steps, labels=known)
    seen = replace(seen, update=defense(seen.update, rng=stream(1, "sent")))
    assert replay.replay(model, sequences, seen).verified == (name != "adamw")
    words = sequences[0]
    for place in (1, 4) if name == "adamw" else (1, 3):
        other_one = (*words[:place], words[place] + 1, *words[place + 1 :])
        swapped = (*words[:place], words[place + 1], words[place], *words[place + 2 :])
        for other in (other_one, swapped):
            assert not replay.replay(model, [other, *sequences[1:]], seen).verified


def test_a_word_of_which_no_row_came_has_to_be_told_from_its_nearest(small, texts):
    model = small("bert")
    sequences = [tuple(ids) for ids in model.encode(texts[:2])]
    seen = sent_by_client(model, sequences, "sgd", steps=1)
    seen = replace(seen, update=Mask(fraction=0.5)(seen.update, rng=stream(1, "sent")))
    assert replay.replay(model, sequences, seen).verified
    table = model.family.word_embedding
    tensors = {**seen.update.tensors, table: seen.update.tensors[table].clone()}
    word = sequences[0][2]
    tensors[table][word] = 0
    words = model.parameters()[table]
    with torch.no_grad():
        words[word] = words[word + 1]  # now either of the two makes the same steps
    again = sent_by_client(model, sequences, "sgd", steps=1)
    masked = {name: value * (tensors[name] != 0) for name, value in again.update.tensors.items()}
    twin = replace(seen, update=replace(seen.update, tensors=masked))
    assert not replay.replay(model, sequences, twin).verified


def test_passes_that_nobody_told_are_found(small, texts):
    model = small("llama", CAUSAL_LM)
    sequences = [tuple(ids) for ids in model.encode(texts[:2])]
    seen = sent_by_client(model, sequences, "sgd", steps=2, local_epochs=None)
    assert replay.replay(model, sequences, seen).verified


def test_a_proof_is_remembered_until_a_weight_is_written(small, texts, monkeypatch):
    model = small("llama", CAUSAL_LM)
    sequences = [tuple(ids) for ids in model.encode(texts[:2])]
    seen = sent_by_client(model, sequences, "sgd")
    made = replay.replay(model, sequences, seen)
    steps_again = replay.steps_again
    monkeypatch.setattr(replay, "steps_again", None)
    assert made.verified
    assert replay.replay(model, sequences[::-1], seen) == made
    for other in (replace(seen), seen):
        with pytest.raises(TypeError):
            replay.replay(model, other_word(sequences) if other is seen else sequences, other)
    monkeypatch.setattr(replay, "steps_again", steps_again)
    with torch.no_grad():
        next(model.module.parameters()).mul_(1.01)
    assert not replay.replay(model, sequences, seen).verified


def test_a_cosine_is_told_beyond_what_float32_holds():
    generator = torch.Generator().manual_seed(0)
    a_X, b_X = torch.randn(2, 50_000, generator=generator).unbind()
    for scale in (1.0, 1e-2, 1e-4, 1e-6):
        near_X = 3 * (a_X + scale * b_X)
        exact = torch.cosine_similarity(a_X.double(), near_X.double(), 0)
        assert 1 - replay.cosine(a_X, near_X) == pytest.approx(
            float(1 - exact), rel=1e-2, abs=1e-13
        )


def test_what_torch_does_not_count_is_not_remembered(small, texts, monkeypatch):
    model = small("llama", CAUSAL_LM)
    sequences = [tuple(ids) for ids in model.encode(texts[:2])]
    seen = sent_by_client(model, sequences, "sgd")
    with torch.inference_mode():
        tensors = {name: value.clone() for name, value in seen.update.tensors.items()}
    seen = replace(seen, update=replace(seen.update, tensors=tensors))
    assert replay.replay(model, sequences, seen).verified
    monkeypatch.setattr(replay, "steps_again", None)
    with pytest.raises(TypeError):
        replay.replay(model, sequences, seen)
