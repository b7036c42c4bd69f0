from dataclasses import replace

import pytest
import torch

from fedleak.attacks import replay
from fedleak.attacks.auto.attack import Auto
from fedleak.attacks.clock import Clock
from fedleak.attacks.reconstruction import Status
from fedleak.attacks.subspace import step_peeling
from fedleak.attacks.subspace.answer import Judged, telling
from fedleak.attacks.subspace.step_peeling import StepPeeling, alone, left_by
from fedleak.models import CAUSAL_LM, load_parameters_
from fedleak.training.local import local_update_
from fedleak.training.observation import Knowledge, Observation, UpdateKind
from fedleak.training.recipe import Recipe, copied_parameters
from fedleak.training.settings import LocalTraining
from fedleak.training.steps import Batch, gradient, steps_
from fedleak.util.rng import stream

TEXTS = [
    "she told us that he pays",
    "nobody knows it",
    "my old friends say so",
    "they pay for all of his",
    "he knows",
]
PLAIN = LocalTraining(
    kind=UpdateKind.DELTA, batch_size=2, epochs=1, learning_rate=0.05, dropout=False
)


@pytest.fixture
def decoder(small):
    return small("llama", CAUSAL_LM, layers=3, width=64)


def sent(model, how, texts=TEXTS):
    """The update of a client that makes steps of SGD, and its texts; the model stays as it is."""
    sequences = [tuple(ids) for ids in model.encode(texts)]
    before = {name: value.clone() for name, value in model.parameters().items()}
    update = local_update_(model, sequences, [0] * len(sequences), how, seed=3)
    load_parameters_(model, before)
    rate, recipe, steps = how.learning_rate, how.recipe, how.steps(len(sequences))
    tensors = {
        name: recipe.without_decay(value, before[name], rate, steps)
        for name, value in update.tensors.items()
    }
    known = Knowledge(
        learning_rate=rate,
        local_steps=steps,
        local_epochs=how.epochs,
        dropout=how.dropout,
        recipe=recipe,
    )
    update = replace(update, tensors=tensors)
    return Observation(round=1, client=0, update=update, knowledge=known), sequences


def read(seen, model, attack=StepPeeling()):  # noqa: B008 (a frozen value)
    return attack(seen, model, rng=stream(0, "attack"))


RATES = (0.05, 0.04, 0.03)


@pytest.mark.parametrize(
    ("recipe", "epochs"),
    [
        pytest.param(Recipe(), 1, marks=pytest.mark.slow),
        (Recipe(), 2),
        pytest.param(Recipe(momentum=0.9), 1, marks=pytest.mark.slow),
        (Recipe(weight_decay=0.1), 1),
        (Recipe(max_grad_norm=2.0), 1),
        (Recipe(momentum=0.5, rates=RATES), 1),
    ],
)
def test_all_steps_are_read_and_making_them_again_proves_them(decoder, recipe, epochs):
    texts = TEXTS if epochs == 1 else TEXTS[:3]
    seen, sequences = sent(decoder, replace(PLAIN, recipe=recipe, epochs=epochs), texts)
    weights = {name: value.clone() for name, value in decoder.parameters().items()}
    answer = read(seen, decoder)
    assert sorted(answer.sequences) == sorted(sequences)
    steps = seen.knowledge.local_steps
    assert answer.diagnostics["steps"] == [steps, steps]
    assert all(answer.diagnostics["likely"])
    assert replay.replay(decoder, answer.sequences, seen).verified
    for name, value in decoder.parameters().items():
        assert torch.equal(value, weights[name])


def test_positions_are_no_obstacle(small):
    model = small("gpt2", CAUSAL_LM, layers=3, width=64)
    seen, sequences = sent(model, PLAIN)
    assert sorted(read(seen, model).sequences) == sorted(sequences)


def test_auto_asks_it_first_and_stops_at_its_proof(decoder):
    seen, sequences = sent(decoder, PLAIN)
    answer = read(seen, decoder, Auto())
    assert answer.verified
    assert sorted(answer.sequences) == sorted(sequences)
    assert [*answer.diagnostics["asked"]] == ["step_peeling"]


def test_of_a_round_that_is_not_read_to_its_end_auto_keeps_the_steps_that_were(
    decoder, monkeypatch
):
    seen, sequences = sent(decoder, PLAIN)
    whole = step_peeling._Peeling._read

    def once(self, rest, sizes):
        return whole(self, rest, sizes) if self.done == 0 else ([], None)

    monkeypatch.setattr(step_peeling._Peeling, "_read", once)
    alone_read = read(seen, decoder)
    assert alone_read.status == Status.RECOVERED
    assert alone_read.diagnostics["steps"] == [1, 3]
    assert len(alone_read.sequences) == 2
    assert {*alone_read.sequences} < {*sequences}
    answer = read(seen, decoder, Auto(seconds=2.0, steps=2))
    assert answer.sequences[:2] == alone_read.sequences
    assert answer.diagnostics["likely"][:2] == [True, True]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dropout": True}, "dropout"),
        ({"local_steps": 1}, "one step"),
        ({"recipe": Recipe(optimiser="adamw")}, "along gradients"),
        ({"learning_rate": None}, "known steps"),
        ({"local_steps": 4}, "grant batch_size"),
    ],
)
def test_what_it_cannot_read_is_named(decoder, change, reason):
    seen, _ = sent(decoder, PLAIN)
    answer = read(replace(seen, knowledge=replace(seen.knowledge, **change)), decoder)
    assert answer.status == Status.ABSTAINED
    assert reason in answer.reason


def test_noise_hides_the_first_step(decoder):
    seen, _ = sent(decoder, PLAIN)
    rng = torch.Generator().manual_seed(0)
    noisy = seen.update.changed(
        lambda value: value + value.std() * torch.randn(value.shape, generator=rng)
    )
    answer = read(replace(seen, update=noisy), decoder)
    assert answer.diagnostics["steps"][0] == 0
    assert not any(answer.diagnostics.get("likely", ()))


@pytest.mark.parametrize("recipe", [Recipe(momentum=0.9), Recipe(weight_decay=0.3), Recipe()])
def test_what_is_left_is_what_the_later_steps_add(decoder, recipe):
    """Against the client's own steps, the later of which have a gradient of zero."""
    how = replace(PLAIN, recipe=recipe)
    seen, sequences = sent(decoder, how)
    orders = [sequences[:2], sequences[2:4], sequences[4:]]
    broadcast = {name: value.clone() for name, value in decoder.parameters().items()}
    passed = list[dict]()

    def gradients(real):
        for number, batch in enumerate(orders):
            passed.append({name: value.clone() for name, value in decoder.parameters().items()})
            step = gradient(decoder, Batch(batch, [0] * len(batch)), recipe)
            yield step if number < real else {name: 0 * value for name, value in step.items()}

    ends = []
    for real in (1, 3):
        with copied_parameters(decoder.module.parameters()):
            steps_(decoder, gradients(real), recipe, how.learning_rate)
            ends.append({name: value.clone() for name, value in decoder.parameters().items()})
    made = {name: ends[1][name] - broadcast[name] for name in broadcast}
    made = {
        name: recipe.without_decay(value, broadcast[name], how.learning_rate, 3)
        for name, value in made.items()
    }
    seen = replace(seen, update=replace(seen.update, tensors=made))
    tell = telling(lambda _: None, decoder)
    peeling = step_peeling._Peeling(
        seen, decoder, stream(0, "attack"), Clock(None), tell, recipe, 3, done=1
    )
    rest = peeling._rest(broadcast, passed[0], passed[1])
    for name, value in rest.update.tensors.items():
        expected = ends[1][name] - ends[0][name]
        torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-3)


def test_alone_is_the_least_square_that_a_direction_with_the_state_in_it_has():
    """Against a search over directions, without the formula."""
    rng = torch.Generator().manual_seed(0)
    rows_OD = torch.randn(9, 6, generator=rng, dtype=torch.float64)
    states_ND = torch.nn.functional.normalize(
        torch.randn(4, 6, generator=rng, dtype=torch.float64), dim=1
    )
    for state_D, value in zip(states_ND, alone(rows_OD, states_ND, 0.1), strict=True):
        # All directions u with x u = 1: one of them, and any of those with x u = 0.
        others_D5 = torch.linalg.svd(state_D[None]).Vh[1:].T
        system = torch.cat([rows_OD, 0.1 * torch.eye(6, dtype=torch.float64)])
        free_5 = torch.linalg.lstsq(system @ others_D5, -system @ state_D).solution
        best_D = state_D + others_D5 @ free_5
        torch.testing.assert_close(value, (system @ best_D).square().sum())


def test_texts_of_the_step_leave_nothing_and_others_do(decoder):
    how = replace(PLAIN, batch_size=5)
    seen, sequences = sent(decoder, how)
    gradients = {name: -value / how.learning_rate for name, value in seen.update.tensors.items()}
    rest = replace(seen, knowledge=replace(seen.knowledge, local_steps=2))
    tell = telling(lambda _: None, decoder)
    peeling = step_peeling._Peeling(
        rest, decoder, stream(0, "attack"), Clock(None), tell, Recipe(), 2
    )
    rows_OD = peeling._rows(gradients).double()

    @torch.no_grad()
    def left(*texts):
        judged = [Judged(ids[:-1], 0.0, 1.0) for ids in texts]
        return left_by([peeling._seen_in(text, gradients) for text in judged], rows_OD)

    gone = step_peeling._GONE
    assert left(*sequences) < gone / 10
    # By itself, with a weight of its own; of few states the mark that begins all is too many.
    assert all(left(ids) < gone for ids in sequences if len(ids) > 4)
    (other,) = map(tuple, decoder.encode(["she knows that they pay for it"]))
    assert left(sequences[0], other) > 10 * gone
    shorter = (*sequences[0][:-2], sequences[0][-1])
    assert left(shorter) > 10 * gone
    # One of five is enough.
    assert left(shorter, *sequences[1:]) > 10 * gone


def test_words_with_equal_embeddings_are_told_apart_by_their_targets(decoder):
    (own,) = decoder.encode([TEXTS[0]])
    words_VD = decoder.module.get_parameter(decoder.family.word_embedding)
    twins = range(1000, 1040)
    with torch.no_grad():
        words_VD[[*twins]] = words_VD[own[3]].clone()
    sequences = [(*own[:3], twins[7], *own[4:]), *map(tuple, decoder.encode(TEXTS[1:4]))]
    before = {name: value.clone() for name, value in decoder.parameters().items()}
    update = local_update_(decoder, sequences, [0] * 4, PLAIN, seed=3)
    load_parameters_(decoder, before)
    known = Knowledge(learning_rate=0.05, local_steps=2, local_epochs=1, dropout=False)
    seen = Observation(round=1, client=0, update=update, knowledge=known)
    answer = read(seen, decoder)
    assert sorted(answer.sequences) == sorted(sequences)


@pytest.mark.parametrize("size", [1.0, 1e12])
def test_a_text_whose_gradient_hides_the_rows_is_no_reason_to_crash(size):
    rng = torch.Generator().manual_seed(0)
    rows_OD = torch.randn(9, 12, generator=rng, dtype=torch.float64)
    own_OD = size * torch.randn(9, 1, generator=rng) @ torch.randn(1, 12, generator=rng)
    text = step_peeling._Text(
        Judged((1, 2, 3), 0.0, 1.0), torch.randn(3, 12, generator=rng), own_OD
    )
    assert left_by([text], rows_OD) > step_peeling._GONE
