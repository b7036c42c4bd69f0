"""After Adam the signs of word and position rows place the words, and a climb sorts the texts."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from fedleak.attacks import replay
from fedleak.attacks.analytic.position_marginals import PositionMarginals
from fedleak.attacks.analytic.sign_tables import Climb, SignTable
from fedleak.attacks.auto.attack import Auto
from fedleak.attacks.clock import UNLIMITED
from fedleak.attacks.reconstruction import Status
from fedleak.training.observation import UpdateKind
from fedleak.training.recipe import Recipe
from fedleak.training.steps import Batch, gradient
from fedleak.util.rng import stream

PAIR = ["the patient has a fever today", "my sister lost her job last week"]
AGAIN = ["my dog saw the old dog of my friend and the cat"]


@pytest.fixture(scope="module")
def wide(small):
    """Signs of 32 numbers tell little."""
    return small("bert", width=128)


@pytest.fixture
def adam(wide, observe):
    """What a server sees after one step of Adam on texts."""

    def make(texts, model=wide, optimiser="adamw", **options) -> SimpleNamespace:
        recipe = Recipe(optimiser=optimiser, weight_decay=0.01 if optimiser == "adamw" else 0.0)
        options = {"kind": UpdateKind.DELTA, "learning_rate": 5e-5, "recipe": recipe} | options
        observed = observe(model, texts, **options)
        before = model.parameters()
        without = {
            name: recipe.without_decay(value, before[name], 5e-5, 1)
            for name, value in observed.seen.update.tensors.items()
        }
        update = replace(observed.seen.update, tensors=without)
        observed.seen = replace(observed.seen, update=update)
        return observed

    return make


def table_of(seen, model):
    names = model.family.word_embedding, model.family.position_embedding
    return SignTable.of(*(seen.update.tensors[name] for name in names))


def read(attack, seen, model):
    return attack(seen, model, rng=stream(0, "attack"))


@pytest.mark.parametrize(
    ("texts", "dropout"),
    [(PAIR[:1], False), (PAIR[:1], True), (AGAIN, False)],
    ids=["no dropout", "dropout", "words that occur twice"],
)
@pytest.mark.parametrize("optimiser", ["adam", "adamw"])
def test_one_text_is_read(adam, wide, texts, optimiser, dropout):
    observed = adam(texts, optimiser=optimiser, dropout=dropout)
    answer = read(PositionMarginals(), observed.seen, wide)
    assert answer.status == Status.RECOVERED
    assert answer.sequences == tuple(observed.sequences)
    assert not answer.verified  # by a gradient; the steps are another matter
    assert answer.diagnostics["likely"] == [True]
    if not dropout:
        assert replay.replay(wide, answer.sequences, observed.seen).verified


def test_two_texts_are_sorted_and_auto_proves_them(adam, wide):
    observed = adam(PAIR)
    answer = read(Auto(seconds=60.0), observed.seen, wide)
    assert sorted(answer.sequences) == sorted(observed.sequences)
    assert answer.verified
    # The gradient behind the step is too large to be known.
    assert answer.diagnostics["asked"] == {"position_marginals": "recovered"}


def test_the_climb_begins_with_texts_that_it_makes_better(adam, wide):
    observed = adam(PAIR)
    table = table_of(observed.seen, wide)
    end = wide.tokenizer.sep_token_id
    begun = table.begun(2, end)
    assert [ids[-1] for ids in begun] == [end, end]
    climb = Climb(wide, observed.seen, table, end)
    before = climb._alike(Batch(begun, [0, 0]))
    batch, alike = climb.best(begun, UNLIMITED, stream(0, "attack"))
    assert alike > max(before, 0.99)
    assert sorted(map(tuple, batch.sequences)) == sorted(observed.sequences)


def test_it_compares_the_signs_of_the_gradient_of_the_whole_batch(adam, wide):
    observed = adam(PAIR)
    climb = Climb(wide, observed.seen, table_of(observed.seen, wide), wide.tokenizer.sep_token_id)
    batch = Batch([observed.sequences[0], (2, 9, 8, 7, 3)], [1, 0])
    whole = gradient(wide, batch, Recipe())
    names = [
        name for layer in range(wide.num_layers) for name in wide.family.attention_parameters(layer)
    ]
    sent, made = (
        torch.cat([tensors[name].sign().flatten() for name in names])
        for tensors in (observed.seen.update.tensors, whole)
    )
    expected = -float(F.cosine_similarity(sent, made, dim=0))
    # Where two gradients cancel, rounding decides.
    assert climb._alike(batch) == pytest.approx(expected, abs=1e-3)


def test_a_table_takes_out_what_words_have_in_common(adam, wide):
    table = table_of(adam(PAIR).seen, wide)
    alike_MM = table.unit_MD @ table.unit_MD.T + 0.1 * torch.eye(len(table.words_M))
    torch.testing.assert_close(table.score_TM @ alike_MM, table.cosine_TM)


def test_a_table_is_worth_what_texts_have_of_it():
    score_TM = torch.tensor([[0.5, 0.0, -0.2], [0.0, 0.3, 0.2]])
    table = SignTable(torch.tensor([5, 6, 7]), torch.eye(3), score_TM, score_TM)
    assert table.agreement([(5, 6), (5, 7)]) == pytest.approx(1.0)
    assert table.agreement([(5, 6), (5, 6)]) == pytest.approx(0.8 - 1 / 3)
    assert table.agreement([(5, 5)]) == pytest.approx(0.5 - 2 / 3)


def test_changes_are_of_one_word_and_of_two_texts(adam, wide):
    observed = adam(PAIR)
    end = wide.tokenizer.sep_token_id
    climb = Climb(wide, observed.seen, table_of(observed.seen, wide), end)
    first, second = observed.sequences
    changes = list(climb._changes(Batch([first, second], [0, 1])))
    texts = [tuple(change.sequences) for change in changes]
    assert ((*first[:3], *first[4:]), second) in texts  # a word less
    assert ((*first[:3], end), second) in texts  # ended
    assert ((*first[:3], *second[3:]), (*second[:3], *first[3:])) in texts
    swapped = (*first[:3], second[3], *first[4:]), (*second[:3], first[3], *second[4:])
    assert swapped in texts
    assert [change.labels for change in changes if change.sequences == [first, second]]
    assert all(ids[-1] == end for pair in texts for ids in pair)


def test_what_cannot_be_read_is_said(adam, wide, small):
    gpt2 = small("gpt2", width=128)
    answer = read(PositionMarginals(), adam(PAIR, gpt2).seen, gpt2)
    assert (answer.status, "no token ends each" in answer.reason) == (Status.ABSTAINED, True)
    observed = adam(PAIR).seen
    tensors = dict(observed.update.tensors)
    tensors[wide.family.position_embedding] = torch.zeros(64, 128)
    frozen = replace(observed, update=replace(observed.update, tensors=tensors))
    assert "that table was frozen" in read(PositionMarginals(), frozen, wide).reason


def test_what_is_read_of_a_sum_over_two_texts_is_not_called_likely(adam, wide):
    """Each place has the signs of two words, so a single text is none."""
    seen = adam(PAIR).seen
    alone = replace(seen, update=replace(seen.update, num_examples=1))
    assert read(PositionMarginals(), alone, wide).diagnostics["likely"] == [False]
    noise = {
        name: torch.randn(value.shape, generator=stream(0, name)) * value.any(-1, keepdim=True)
        for name, value in seen.update.tensors.items()
    }
    noisy = replace(seen, update=replace(seen.update, tensors=noise))
    assert not any(read(PositionMarginals(seconds=1.0), noisy, wide).diagnostics["likely"])


def test_a_model_of_other_weights_is_not_proved(adam, wide, small):
    """The tables are of the update alone, and so is a text; its proof is of the weights."""
    observed = adam(PAIR[:1])
    other = small("bert", width=128, seed=1)
    answer = read(PositionMarginals(), observed.seen, other)
    assert answer.sequences == tuple(observed.sequences)
    assert not replay.replay(other, answer.sequences, observed.seen).verified
