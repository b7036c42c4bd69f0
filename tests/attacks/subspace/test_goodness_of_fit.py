import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch

from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.attacks.subspace import goodness_of_fit
from fedleak.attacks.subspace.goodness_of_fit import leaves_only_blur, rectangles
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.defenses.mask import Mask
from fedleak.defenses.quantize import Quantize
from fedleak.defenses.sign import Sign
from fedleak.models import CAUSAL_LM
from fedleak.util.rng import stream

TEXTS = ["she told us that", "nobody knows it all"]


def test_rectangles_are_those_of_a_slow_sum():
    left_OI = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = square = 0.0
    for i, other in itertools.permutations(range(5), 2):
        for j, k in itertools.permutations(range(4), 2):
            product = left_OI[i, j] * left_OI[i, k] * left_OI[other, j] * left_OI[other, k]
            total, square = total + product, square + product**2
    # Each rectangle is four of these terms.
    assert rectangles(left_OI) == pytest.approx(float(total / (4 * square).sqrt()))
    assert rectangles(3 * left_OI.T) == pytest.approx(rectangles(left_OI))
    # A zero in each rectangle, or none at all, says nothing.
    for nothing_OI in (torch.zeros(5, 4), torch.eye(5)[:1].T @ torch.ones(1, 4), torch.ones(5, 1)):
        assert rectangles(nothing_OI) == 0


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "of two sizes"])
def test_of_independent_numbers_rectangles_are_about_normal(kind):
    rng = torch.Generator().manual_seed(1)
    drawn = []
    for _ in range(300):
        left_OI = torch.randn(48, 32, generator=rng)
        if kind == "laplace":
            left_OI = left_OI.sign() * torch.empty(48, 32).exponential_(generator=rng)
        elif kind == "of two sizes":
            left_OI[:24] *= 2
        drawn.append(rectangles(left_OI))
    drawn_N = torch.tensor(drawn)
    assert abs(float(drawn_N.mean())) < 0.2
    assert 0.8 < float(drawn_N.std()) < 1.2
    # A product of two vectors is not.
    hidden_OI = left_OI + torch.randn(48, 1, generator=rng) * torch.randn(1, 32, generator=rng)
    assert rectangles(hidden_OI) > 6


@pytest.fixture
def blurred(small, observe):
    """A model, its texts, and a function: the update behind a defense."""
    model = small("llama", CAUSAL_LM)
    seen = observe(model, TEXTS).seen

    def behind(defense):
        return replace(seen, update=defense(seen.update, rng=stream(0, "defense")))

    return model, [tuple(ids) for ids in model.encode(TEXTS)], behind


@pytest.mark.parametrize(
    "defense", [GaussianNoise(relative=1.0), Sign(), Quantize(bits=4), Mask(fraction=0.9)]
)
def test_the_right_texts_alone_leave_nothing_but_blur(blurred, defense):
    model, (first, second), behind = blurred
    seen = behind(defense)
    assert leaves_only_blur(model, seen, UNLIMITED, (first, second))
    wrong_word = (*first[:2], second[1], *first[3:])
    swapped = (first[0], first[2], first[1], *first[3:])
    for texts in ((wrong_word, second), (swapped, second), (first, first), (first,), ((), ())):
        assert not leaves_only_blur(model, seen, UNLIMITED, texts)
    assert not leaves_only_blur(model, seen, Clock(1e-9), (first, second))
    dropped = replace(seen, knowledge=replace(seen.knowledge, dropout=True))
    assert not leaves_only_blur(model, dropped, UNLIMITED, (first, second))


def test_of_other_tensors_it_says_nothing(blurred):
    model, texts, behind = blurred
    seen = behind(GaussianNoise(relative=0.3))
    for part in (model.family.word_embedding, "layernorm.weight"):
        tensors = {name: value for name, value in seen.update.tensors.items() if part in name}
        assert tensors
        left = replace(seen, update=replace(seen.update, tensors=tensors))
        assert not leaves_only_blur(model, left, UNLIMITED, texts)


def test_noise_that_hides_other_words_tells_nothing(blurred):
    model, texts, behind = blurred
    assert not leaves_only_blur(model, behind(GaussianNoise(relative=300.0)), UNLIMITED, texts)


def test_where_layers_do_not_tell_a_missing_word_a_part_of_a_text_does_not_fit(
    small, observe, monkeypatch
):
    """Even if near words in its words' places showed, as their own rows may tell."""
    monkeypatch.setattr(goodness_of_fit, "_neighbours", lambda *given: iter(()))
    model = small("llama", CAUSAL_LM)
    seen = observe(model, ["she told us that nobody knows it all"]).seen
    (ids,) = map(tuple, model.encode(["she told us that nobody knows it all"]))
    part = (*ids[:4], ids[-1])
    noisy = GaussianNoise(relative=20.0)(seen.update, rng=stream(0, "defense"))
    fits = partial(leaves_only_blur, model, replace(seen, update=noisy), UNLIMITED)
    assert not fits([part])
    monkeypatch.setattr(goodness_of_fit, "_shorter", lambda *given: iter(()))
    assert fits([part])


def test_of_two_words_that_a_model_does_not_tell_apart_their_own_rows_tell(small, observe):
    model = small("llama", CAUSAL_LM)
    (own,) = map(tuple, model.encode(TEXTS[:1]))
    twin = next(token for token in range(10, 99) if token not in own)
    for table in (model.module.get_input_embeddings(), model.module.get_output_embeddings()):
        table.weight.data[twin] = table.weight.data[own[2]] * (1 + 1e-6)
    seen = observe(model, TEXTS[:1]).seen
    noise = GaussianNoise(relative=0.3)
    seen = replace(seen, update=noise(seen.update, rng=stream(0, "defense")))
    assert leaves_only_blur(model, seen, UNLIMITED, (own,))
    assert not leaves_only_blur(model, seen, UNLIMITED, ((*own[:2], twin, *own[3:]),))
