"""What is told of a batch before its text is looked for."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from fedleak.attacks.matching.batch_structure import (
    Clues,
    Frame,
    Shape,
    bag,
    frame,
    rows_of,
    shapes,
)
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.models import CAUSAL_LM, CLASSIFICATION
from fedleak.training.wire import partial_update
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

KINDS = [
    ("bert", CLASSIFICATION),
    ("gpt2", CLASSIFICATION),
    ("llama", CLASSIFICATION),
    ("gpt2", CAUSAL_LM),
    ("llama", CAUSAL_LM),
]
WITH_POSITIONS = [KINDS[0], KINDS[1], KINDS[3]]
# No two begin alike.
TEXTS = ("she told us that it is over", "nobody knows", "he pays for it now")
INNER = ["layer.1.attention.self", "h.1.attn.c_attn", "layers.1.self_attn"]
WORDS = ["word_embeddings", "wte", "embed_tokens"]


def shared(seen, patterns):
    return replace(seen, update=partial_update(seen.update, patterns))


def without(seen, patterns):
    kept = [n for n in seen.update.tensors if not any(pattern in n for pattern in patterns)]
    return shared(seen, kept)


def noisy(seen, sigma):
    return replace(seen, update=GaussianNoise(sigma=sigma)(seen.update, rng=stream(0, "noise")))


def lengths(truth):
    return tuple(map(len, truth.sequences))


def told_of(seen, model, most=16):
    return shapes(seen, model, stream(0, "shapes"), most)


@pytest.mark.parametrize(
    ("family", "task", "first", "last"),
    [
        ("bert", CLASSIFICATION, "cls", "sep"),
        ("gpt2", CLASSIFICATION, None, None),
        ("gpt2", CAUSAL_LM, None, "eos"),
        ("llama", CLASSIFICATION, "bos", None),
        ("llama", CAUSAL_LM, "bos", "eos"),
    ],
)
def test_the_frame_is_what_begins_and_ends_every_text(small, texts, family, task, first, last):
    model = small(family, task)

    def ids(name):
        return () if name is None else (getattr(model.tokenizer, f"{name}_token_id"),)

    around = frame(model)
    assert around == Frame(ids(first), ids(last))
    for sequence in model.encode(texts[:5]):
        inner = sequence[len(around.first) : len(sequence) - len(around.last)]
        assert (*around.first, *inner, *around.last) == tuple(sequence)
        assert not set(inner) & model.special_ids()


@pytest.mark.parametrize(("family", "task"), KINDS)
@pytest.mark.parametrize("patterns", [["*"], ["ln_", "norm", "Norm"]])
def test_granted_facts_are_used_as_they_are(small, observe, family, task, patterns):
    model = small(family, task)
    truth = observe(model, TEXTS, [2, 0, 2], granted=("lengths", "labels"))
    labels = (2, 0, 2) if task == CLASSIFICATION else ()
    batch_shapes = told_of(shared(truth.seen, patterns), model)
    assert batch_shapes == ([Shape(lengths(truth), labels)], True)


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_the_length_of_a_single_text_stands_in_its_update(small, observe, texts, family, task):
    model = small(family, task, width=64, layers=3)
    for i in range(3):
        truth = observe(model, texts[i : i + 1], granted=("labels",))
        for seen in (truth.seen, shared(truth.seen, INNER)):
            batch_shapes = told_of(seen, model)
            assert batch_shapes.lengths_known
            assert [shape.lengths for shape in batch_shapes.each] == [lengths(truth)]


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_the_last_layer_of_a_classifier_does_not_tell_lengths(small, observe, texts, family):
    model = small(family, width=64, layers=2)
    truth = observe(model, texts[:1], granted=("labels",))
    batch_shapes = told_of(shared(truth.seen, INNER), model)
    assert not batch_shapes.lengths_known or lengths(truth) in [
        shape.lengths for shape in batch_shapes.each
    ]


@pytest.mark.parametrize(("family", "task"), WITH_POSITIONS)
def test_the_lengths_of_two_texts_stand_in_their_update(small, observe, family, task):
    model = small(family, task, width=64, layers=3)
    for two in (TEXTS[:2], TEXTS[1:], (TEXTS[2], TEXTS[0])):
        truth = observe(model, two, granted=("labels",))
        batch_shapes = told_of(truth.seen, model)
        assert batch_shapes.lengths_known
        assert batch_shapes.each[0].lengths == lengths(truth)
        # Decoders cannot tell whether the texts begin alike.
        assert family != "bert" or len(batch_shapes.each) == 1


@pytest.mark.parametrize("second", ["she pays for it", "she told us"])
@pytest.mark.parametrize(("family", "task"), WITH_POSITIONS[1:])
def test_the_lengths_of_two_texts_that_begin_alike_are_among_those_told(
    small, observe, family, task, second
):
    model = small(family, task, width=64, layers=3)
    truth = observe(model, ["she told us that it is over", second], granted=("labels",))
    batch_shapes = told_of(truth.seen, model)
    assert not batch_shapes.lengths_known or lengths(truth) in [
        shape.lengths for shape in batch_shapes.each
    ]


def test_the_lengths_of_a_batch_with_a_text_twice_are_among_those_told(small, observe):
    model = small("bert", width=64, layers=3)
    truth = observe(model, ["nobody knows it", "nobody knows it", "he pays"], granted=("labels",))
    batch_shapes = told_of(truth.seen, model)
    assert not batch_shapes.lengths_known or lengths(truth) in [
        shape.lengths for shape in batch_shapes.each
    ]


def test_the_lengths_of_three_texts_are_among_those_with_their_sum_and_longest(small, observe):
    model = small("bert", width=64, layers=3)
    truth = observe(model, TEXTS, granted=("labels",))
    batch_shapes = told_of(truth.seen, model)
    told_lengths = [shape.lengths for shape in batch_shapes.each]
    assert batch_shapes.lengths_known
    assert lengths(truth) in told_lengths
    # At least a token between the special ones.
    longest, total = lengths(truth)[0], sum(lengths(truth))
    expected = {
        (longest, b, c)
        for b, c in product(range(3, longest + 1), repeat=2)
        if b >= c and longest + b + c == total
    }
    assert set(told_lengths) == expected
    assert len(told_lengths) == len(expected)
    assert abs(told_lengths[0][1] - told_lengths[0][2]) <= 1, "the most even first"


@pytest.mark.parametrize("label", range(3))
def test_the_label_of_a_single_text_is_tried_as_every_class(small, observe, label):
    model = small("bert", width=64)
    truth = observe(model, TEXTS[:1], [label], granted=("lengths",))
    batch_shapes = told_of(truth.seen, model)
    assert batch_shapes == ([Shape(lengths(truth), (i,)) for i in range(3)], True)


def test_labels_are_tried_in_every_order_of_the_counts_that_the_classifier_tells(small, observe):
    model = small("bert", width=64, initializer_range=0.02)
    truth = observe(model, TEXTS, [2, 0, 2], granted=("lengths",))
    batch_shapes = told_of(truth.seen, model)
    assert len(set(lengths(truth))) == 3
    assert {shape.lengths for shape in batch_shapes.each} == {lengths(truth)}
    assert sorted(shape.labels for shape in batch_shapes.each) == [(0, 2, 2), (2, 0, 2), (2, 2, 0)]


def test_labels_that_nothing_tells_are_enumerated(small, observe):
    model = small("bert", width=64)
    truth = observe(model, TEXTS[:2], granted=("lengths",))
    batch_shapes = told_of(without(truth.seen, ["classifier"]), model)
    assert lengths(truth)[0] > lengths(truth)[1]
    assert sorted(shape.labels for shape in batch_shapes.each) == sorted(
        product(range(3), repeat=2)
    )
    assert {shape.lengths for shape in batch_shapes.each} == {lengths(truth)}


def test_labels_of_equally_long_texts_are_enumerated_without_order(small, observe):
    model = small("bert", width=64)
    truth = observe(model, [TEXTS[0]] * 2, granted=("lengths",))
    batch_shapes = told_of(without(truth.seen, ["classifier"]), model)
    labels = [tuple(sorted(shape.labels)) for shape in batch_shapes.each]
    assert sorted(labels) == sorted((a, b) for a in range(3) for b in range(a, 3))


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("granted", [(), ("lengths",), ("labels",)])
@pytest.mark.parametrize("patterns", [["*"], ["norm", "Norm"]])
def test_there_are_never_more_shapes_than_asked_for_and_always_one(
    small, observe, most, granted, patterns
):
    model = small("bert", width=64)
    truth = observe(model, TEXTS, granted=granted)
    assert 1 <= len(told_of(shared(truth.seen, patterns), model, most).each) <= most


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_where_nothing_tells_lengths_are_only_tried(small, observe, family, task):
    model = small(family, task)
    truth = observe(model, TEXTS[:2], granted=("labels",))
    batch_shapes = told_of(shared(truth.seen, ["norm", "Norm", "ln_"]), model, 4)
    assert not batch_shapes.lengths_known
    assert all(
        len(set(shape.lengths)) == 1 and len(shape.lengths) == 2 for shape in batch_shapes.each
    )
    tried = [shape.lengths[0] for shape in batch_shapes.each]
    assert 1 < len(tried) == len(set(tried)) <= 4
    assert min(tried) > sum(map(len, frame(model)))
    assert max(tried) <= model.max_length


def test_lengths_of_guesses_are_tried_first_unless_the_update_contradicts_them(small, observe):
    model = small("bert", width=64, layers=3)
    truth = observe(model, TEXTS[:2], granted=("labels",))
    longest, shortest = lengths(truth)

    def first_tried(seen, *guessed):
        clues = Clues(sequences=tuple((5,) * length for length in guessed))
        return shapes(seen, model, stream(0, "shapes"), 16, clues).each[0].lengths

    assert first_tried(truth.seen, shortest + 1, longest) == (longest, shortest + 1)
    assert first_tried(truth.seen, longest - 1, shortest + 1) == (longest, shortest)
    assert first_tried(truth.seen, longest + 1, shortest) == (longest, shortest)
    silent = without(truth.seen, ["position_embeddings", *INNER])
    assert first_tried(silent, longest - 1, shortest + 1) == (longest - 1, shortest + 1)


def test_noise_hides_lengths(small, observe):
    model = small("bert")
    truth = observe(model, TEXTS[:1], granted=("labels",))
    assert told_of(truth.seen, model).lengths_known
    assert not told_of(noisy(truth.seen, 1.0), model).lengths_known


# --- tokens -----------------------------------------------------------------------------------


def inputs(model, truth):
    """The distinct content tokens that the model read."""
    cut = 1 if model.task == CAUSAL_LM else 0
    read = {token for ids in truth.sequences for token in ids[: len(ids) - cut]}
    return sorted(read - model.special_ids())


def content(token_ids, model):
    return None if token_ids is None else sorted(set(token_ids.tolist()) - model.special_ids())


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_the_rows_of_the_word_embedding_are_the_tokens(small, observe, family, task):
    model = small(family, task, width=64)
    truth = observe(model, TEXTS[:2])
    token_ids = bag(shared(truth.seen, WORDS), model, stream(0, "bag"))
    assert content(token_ids, model) == inputs(model, truth)


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_the_first_layer_tells_the_tokens_of_a_model_with_positions(small, observe, family, task):
    model = small(family, task, width=64)
    truth = observe(model, TEXTS[1:2])
    token_ids = bag(without(truth.seen, WORDS), model, stream(0, "bag"))
    if (family, task) in WITH_POSITIONS:
        assert content(token_ids, model) == inputs(model, truth)
    else:
        assert token_ids is None


@pytest.mark.parametrize(("family", "task"), WITH_POSITIONS)
@pytest.mark.parametrize("hidden", [(), WORDS])
def test_under_noise_the_tokens_cannot_be_told(small, observe, family, task, hidden):
    model = small(family, task, width=64)
    truth = observe(model, TEXTS[:2])
    seen = noisy(without(truth.seen, hidden), 1.0)
    assert bag(seen, model, stream(0, "bag")) is None


def test_without_embeddings_and_attention_nothing_tells_the_tokens(small, observe):
    model = small("bert")
    truth = observe(model, 1)
    assert bag(shared(truth.seen, ["classifier"]), model, stream(0, "bag")) is None
    assert torch.is_tensor(bag(truth.seen, model, stream(0, "bag")))


def test_rows_hold_what_is_known_of_each_shape(model):
    around = frame(model)
    longest, short = len(around.first + around.last) + 4, len(around.first + around.last) + 1
    labels = (2, 1) if model.task == CLASSIFICATION else ()
    rows = rows_of([Shape((longest, short), labels), Shape((short,), labels[:1])], around, model)
    padding = model.tokenizer.pad_token_id
    for r, lengths in enumerate([(longest, short), (short,)]):
        assert [len(ids) for ids in rows.sequences(r, rows.ids_RBT[r])] == list(lengths)
        targets = sum(length - 1 for length in lengths)
        for b, length in enumerate(lengths):
            content = range(len(around.first), length - len(around.last))
            assert rows.content(r, b) == list(content)
            expected = [0] * length + [padding] * (longest - length)
            expected[: len(around.first)] = around.first
            expected[content.stop : length] = around.last
            assert rows.ids_RBT[r, b].tolist() == expected
            assert rows.mask_RBT[r, b].tolist() == [1] * length + [0] * (longest - length)
            assert float(rows.weights_RB[r, b]) == pytest.approx(
                1 / (len(lengths) if model.task == CLASSIFICATION else targets)
            )
    assert rows.labels_RB[:, 0].tolist() == list((labels or (0,))[:1]) * 2
    # What fills up the smaller batch counts for nothing.
    assert rows.content(1, 1) == []
    assert float(rows.weights_RB[1, 1]) == 0
