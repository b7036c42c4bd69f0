"""The choice among sequences, by the observed gradient alone."""

import math
from dataclasses import replace

import pytest
import torch

from fedleak.attacks.auto import evidence
from fedleak.attacks.auto.evidence import Factors, Pairs, choose, compare, directions, weights
from fedleak.attacks.certificate import as_gradient, close, units
from fedleak.attacks.clock import Clock
from fedleak.defenses.cast import Cast
from fedleak.defenses.gaussian_noise import GaussianNoise
from fedleak.defenses.mask import Mask
from fedleak.defenses.prune import Prune
from fedleak.defenses.sign import Sign
from fedleak.models import CAUSAL_LM, CLASS_LOSSES, CLASSIFICATION
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

TEXTS = ("she told us that", "nobody knows it", "he pays for all of his old friends")
WRONG = ("she told them that", "it knows nobody", "he pays for all of her old friends", "that")
KINDS = [
    ("bert", CLASSIFICATION),
    ("gpt2", CLASSIFICATION),
    ("gpt2", CAUSAL_LM),
    ("llama", CLASSIFICATION),
    ("llama", CAUSAL_LM),
]
DEFENSES = {
    "none": None,
    "noise": GaussianNoise(sigma=0.02),
    "mask": Mask(fraction=0.5),
    "prune": Prune(fraction=0.9),
    "sign": Sign(),
    "bfloat16": Cast(dtype="bfloat16"),
}


def opened(model, sequences):
    """Returns sequences as attacks on spans give them."""
    return [ids if close(model, ids) == ids else tuple(ids[:-1]) for ids in sequences]


def pool_of(model):
    return opened(model, [tuple(ids) for ids in model.encode([*WRONG, *TEXTS])])


@pytest.mark.parametrize(
    ("built", "classes", "together"),
    # Next-token training has no classes; how many go together is a matter of size alone.
    [
        *((kind, 2 + i % 2, (2, 8)[i % 2]) for i, kind in enumerate(KINDS)),
        *((kind, 3 - i % 2, (2, 8)[i % 2]) for i, kind in enumerate(KINDS[:2])),
    ],
)
def test_inner_products_are_those_of_gradients_that_are_formed(
    small, observe, monkeypatch, built, classes, together
):
    monkeypatch.setattr(evidence, "_TOGETHER", together)
    model = small(*built, num_labels=classes)
    truth = observe(model, TEXTS)
    observed, pool = as_gradient(truth.seen), pool_of(model)
    tied = {model.family.word_embedding} if model.tied else set()
    for name in tied | model.family.null_parameters(observed):
        del observed[name]  # says nothing, or more than these sequences do
    pairs = compare(model, pool, observed)
    weights = {n: int(g.count_nonzero()) / float(g.square().sum()) for n, g in observed.items()}
    weights = {name: weights[name] for name, g in observed.items() if float(g.norm()) > 1e-15}
    columns = []
    for ids, unit in zip(pool, units(model, pool, list(weights)), strict=True):
        if model.task == CAUSAL_LM:
            share = 1 / (len(close(model, ids)) - 1)
            columns.append({name: share * g for name, g in unit.gradients[0].items()})
            continue
        for label in range(model.num_labels):
            logits = unit.logits_C[None].clone().requires_grad_()
            model.class_loss(logits, torch.tensor([label])).backward()
            columns.append(
                {
                    n: sum(k * g[n] for k, g in zip(logits.grad[0], unit.gradients, strict=True))
                    for n in weights
                }
            )
    for i, column in enumerate(columns):
        inner = sum(weights[n] * float((g * observed[n]).sum()) for n, g in column.items())
        assert float(pairs.observed_K[i]) == pytest.approx(inner, rel=1e-3, abs=1e-2)
        for j, other_column in enumerate(columns):
            inner = sum(weights[n] * float((g * other_column[n]).sum()) for n, g in column.items())
            size = float((pairs.gram_KK[i, i] * pairs.gram_KK[j, j]).sqrt())
            assert float(pairs.gram_KK[i, j]) == pytest.approx(inner, abs=1e-3 * size)


def test_products_in_parts_are_those_at_once(small, observe, monkeypatch):
    model = small("bert")
    truth = observe(model, TEXTS)
    at_once = compare(model, pool_of(model), as_gradient(truth.seen))
    monkeypatch.setattr(evidence, "_PRODUCTS", 500)
    in_parts = compare(model, pool_of(model), as_gradient(truth.seen))
    assert torch.allclose(at_once.gram_KK, in_parts.gram_KK, rtol=1e-5)


@pytest.mark.parametrize("shape", [(), (7,), (4000, 500), (30, 20, 50)], ids=str)
def test_squares_are_as_exact_as_in_float64(shape):
    value = torch.rand(shape, generator=torch.Generator().manual_seed(0)) ** 8
    exact = float(value.double().square().sum())
    assert evidence._square(value) == pytest.approx(exact, rel=1e-6)


def test_two_classes_of_another_loss_have_two_directions(small):
    model = small("bert", num_labels=2)
    assert directions(model) == 1
    assert directions(replace(model, class_loss=CLASS_LOSSES["squared"])) == 2
    assert directions(small("bert")) == 3
    assert directions(small("gpt2", CAUSAL_LM)) == 1


@pytest.mark.parametrize("counts", [[2, 1, 3], [40, 25, 33]], ids=["few tokens", "many tokens"])
def test_products_of_factors_are_those_of_matrices(counts):
    rng = torch.Generator().manual_seed(0)
    left_MX, right_MY, observed = (
        torch.randn(*size, generator=rng).double()
        for size in ((sum(counts), 8), (sum(counts), 9), (8, 9))
    )
    parts = [
        Factors(left_MX[: counts[0]], right_MY[: counts[0]], counts[:1]),
        Factors(left_MX[counts[0] :], right_MY[counts[0] :], counts[1:]),
    ]
    gram_KK, inner_K = evidence._products(parts, observed)
    pairs = zip(left_MX.split(counts), right_MY.split(counts), strict=True)
    slow_KX = torch.stack([(left.T @ right).flatten() for left, right in pairs])
    assert torch.allclose(gram_KK, slow_KX @ slow_KX.T)
    assert torch.allclose(inner_K, slow_KX @ observed.flatten())


@pytest.mark.parametrize("defense", DEFENSES.values(), ids=DEFENSES)
@pytest.mark.parametrize("built", KINDS, ids="-".join)
def test_the_true_batch_is_chosen_among_wrong_sentences(small, observe, built, defense):
    model = small(*built)
    truth = observe(model, TEXTS)
    seen = truth.seen
    if defense is not None:
        seen = replace(seen, update=defense(seen.update, rng=stream(0, "defense")))
    pool = pool_of(model)
    pairs = compare(model, pool, as_gradient(seen))
    picks = choose(pairs, 3)
    assert sorted(pool[pairs.sequence[k]] for k in picks) == sorted(opened(model, truth.sequences))
    if model.task == CLASSIFICATION:
        labels = dict(zip(truth.sequences, truth.labels, strict=True))
        assert all(labels[pool[pairs.sequence[k]]] == pairs.label[k] for k in picks)


def test_an_exchange_mends_a_greedy_choice():
    """Two gradients make up the observed one, and a third alone is nearest to it."""
    gradients_KX = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.3]]).double()
    observed_X = torch.tensor([1.0, 1.0, 0.0]).double()
    pairs = Pairs(
        sequence=(0, 1, 2),
        label=(0, 0, 0),
        gram_KK=gradients_KX @ gradients_KX.T,
        observed_K=gradients_KX @ observed_X,
        total=2.0,
    )
    assert choose(pairs, 1) == [2]
    assert sorted(choose(pairs, 2)) == [0, 1]


def random_pairs(rng, size, others, width):
    """Pairs of which some make up an observed gradient, and some are nearly alike."""
    gradients_KX = torch.randn(size + others, width, generator=rng, dtype=torch.float64)
    gradients_KX[size:] = 0.8 * gradients_KX[torch.arange(others) % size] + gradients_KX[size:]
    noise_X = torch.randn(width, generator=rng, dtype=torch.float64)
    observed_X = gradients_KX[:size].mean(0) + 0.1 * noise_X
    return Pairs(
        sequence=tuple(range(size + others)),
        label=(0,) * (size + others),
        gram_KK=gradients_KX @ gradients_KX.T,
        observed_K=gradients_KX @ observed_X,
        total=float(observed_X @ observed_X),
    )


def test_a_pair_joins_others_as_in_least_squares_on_all_of_them():
    rng = torch.Generator().manual_seed(0)
    for _ in range(20):
        pairs = random_pairs(rng, 5, 12, 20)
        for chosen in ([], [3], [0, 8, 2], [4, 1, 16, 9]):
            slow = [
                math.inf if k in chosen else pairs.residual([*chosen, k])
                for k in range(len(pairs.sequence))
            ]
            assert pairs.residuals_with(chosen) == pytest.approx(slow, abs=1e-8)


def test_no_pair_is_exchanged_after_time_is_up():
    rng = torch.Generator().manual_seed(1)
    choices = [random_pairs(rng, 6, 30, 20) for _ in range(20)]
    in_time = [pairs.residual(choose(pairs, 6)) for pairs in choices]
    late = [pairs.residual(choose(pairs, 6, Clock(-1.0))) for pairs in choices]
    assert all(low <= high for low, high in zip(in_time, late, strict=True))
    assert in_time != late


def test_a_number_counts_in_units_of_the_noise_where_its_scale_is_known(small, observe):
    model = small("bert")
    observed = as_gradient(observe(model, TEXTS[:1]).seen)
    known = weights(model, observed, noise=0.1)
    assert known == pytest.approx(dict.fromkeys(weights(model, observed), 100.0))
