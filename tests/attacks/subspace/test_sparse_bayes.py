"""Sparse Bayesian learning finds the few vectors that rows are mixes of."""

import math
from dataclasses import replace

import pytest
import torch
from ticking import Ticking

from fedleak.attacks import certificate
from fedleak.attacks.clock import UNLIMITED, Clock
from fedleak.attacks.measured_gradient import measured
from fedleak.attacks.subspace.sparse_bayes import Bag, _Rows, placed_text, sparse_support
from fedleak.attacks.subspace.weighted_span import LowRank
from fedleak.training.observation import UpdateKind

WIDTH, VECTORS, KNOWN = 64, 400, 5


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def noisy(rows_OD: torch.Tensor, rng: torch.Generator, size: float = 3e-3) -> LowRank:
    """Returns rows whose numbers have noise of a known size."""
    noise_OD = size * torch.randn(rows_OD.shape, generator=rng, dtype=torch.float64)
    variance_OD = torch.full_like(rows_OD, size**2)
    return LowRank.of(rows_OD + noise_OD, variance_OD)


def random(*shape: int, rng: torch.Generator) -> torch.Tensor:
    """Returns Gaussian numbers."""
    return torch.randn(shape, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize(("rows", "count"), [(3, 10), (6, 20), (20, 12)])
def test_vectors_are_found_also_where_they_are_more_than_rows(
    rows: int, count: int, rng: torch.Generator
) -> None:
    vector_VD, known_KD = random(VECTORS, WIDTH, rng=rng), random(KNOWN, WIDTH, rng=rng)
    right = torch.randperm(VECTORS, generator=rng)[:count]
    mixed_OD = random(rows, count, rng=rng) @ vector_VD[right]
    mixed_OD += random(rows, KNOWN, rng=rng) @ known_KD
    support = sparse_support(noisy(mixed_OD, rng), vector_VD, known_KD, UNLIMITED)
    assert support is not None
    assert sorted(support.index_M.tolist()) == sorted(right.tolist())
    assert support.noise == 0


def test_vectors_that_resemble_each_other_are_told_apart(rng: torch.Generator) -> None:
    """Many explain the rows soon, and a search that ended there would name all of them."""
    token_ND, position_PD = random(12, WIDTH, rng=rng), random(12, WIDTH, rng=rng)
    vector_VD = (token_ND[:, None] + position_PD).flatten(0, 1)
    vector_VD = vector_VD + random(*vector_VD.shape, rng=rng) / 4
    right = [13 * place for place in range(8)]
    mixed_OD = random(4, len(right), rng=rng) @ vector_VD[right]
    support = sparse_support(noisy(mixed_OD, rng), vector_VD, vector_VD[:0], UNLIMITED)
    assert support is not None
    assert sorted(support.index_M.tolist()) == right


def test_numbers_whose_noise_differs_most_hide_nothing(rng: torch.Generator) -> None:
    """As behind a step of Adam, where a fifth of them does not even come."""
    vector_VD = random(VECTORS, WIDTH, rng=rng)
    right = torch.randperm(VECTORS, generator=rng)[:12]
    rows_OD = random(6, 12, rng=rng) @ vector_VD[right]
    size_OD = 10 ** (4 * torch.rand(rows_OD.shape, generator=rng).double() - 4)
    size_OD[torch.rand(rows_OD.shape, generator=rng) < 0.2] = torch.inf
    noise_OD = random(*rows_OD.shape, rng=rng) * size_OD.nan_to_num(posinf=10.0)
    matrix = LowRank.of(rows_OD + noise_OD, size_OD.square())
    support = sparse_support(matrix, vector_VD, vector_VD[:0], UNLIMITED)
    assert support is not None
    assert sorted(support.index_M.tolist()) == sorted(right.tolist())


def test_numbers_that_did_not_come_are_those_of_the_mixes(rng: torch.Generator) -> None:
    x_MD = random(8, WIDTH, rng=rng)
    size_O1 = torch.tensor([[1.0], [1.0], [0.1], [0.01]])  # The last rows hide behind the others.
    rows_OD = (random(1, 8, rng=rng) + size_O1 * random(4, 8, rng=rng)) @ x_MD
    variance_OD = torch.full_like(rows_OD, 1e-6)
    variance_OD[torch.rand(rows_OD.shape, generator=rng) < 0.2] = torch.inf
    matrix = LowRank.of(rows_OD.where(variance_OD.isfinite(), 0), variance_OD)
    axis_DM, _ = torch.linalg.qr(x_MD.T)
    value_OD = _Rows.of(matrix, x_MD[:0], torch.ones(WIDTH).double()).turned(x_MD).value_OD
    torch.testing.assert_close(value_OD @ axis_DM @ axis_DM.T, value_OD, atol=0.1, rtol=0)
    same_OO = value_OD @ value_OD.T / WIDTH
    torch.testing.assert_close(same_OO, torch.eye(4).double(), atol=1e-3, rtol=0)


def test_a_change_of_weights_is_measured_as_well_as_float32_holds_it(
    small, observe, rng: torch.Generator
) -> None:
    model = small("bert")
    seen = observe(model, 1, kind=UpdateKind.DELTA, learning_rate=1e-3).seen
    name = model.family.attention_parameters(0)[0]
    weight_X = model.module.get_parameter(name).detach()
    gradient_X = 1e-3 * random(*weight_X.shape, rng=rng)
    came_X = (weight_X - 1e-3 * gradient_X.float()) - weight_X
    seen = replace(seen, update=replace(seen.update, tensors={name: came_X}))
    gradient = measured(seen, certificate.as_gradient(seen))
    assert gradient is not None
    square_X = (gradient.update.tensors[name] - gradient_X).square()
    assert 0.2 < float((square_X / gradient.variance(model, name)).mean()) < 2


@pytest.mark.parametrize("rows", [2, 8])
def test_a_text_of_repeated_tokens_is_placed(rows: int, rng: torch.Generator) -> None:
    own = (7, 3, 5, 3, 9, 5, 3, 11, 12, 4)
    place_TO = 50 * random(len(own), rows, rng=rng)
    tokens_N = torch.tensor(sorted({*own}))
    token_NO = torch.stack(
        [place_TO[[token == word for token in own]].sum(0) for word in tokens_N.tolist()]
    )
    position_PO = torch.cat([place_TO, torch.zeros(5, rows)])
    noisy_token_NO, noisy_position_PO = (
        shares + random(*shares.shape, rng=rng) for shares in (token_NO, position_PO)
    )
    shares = noisy_token_NO, noisy_position_PO
    alike_A, axis_MD, error_O = tokens_N[:0], torch.eye(len(tokens_N)), torch.ones(rows)
    bag = Bag(tokens_N, 1.0, *shares, alike_A, axis_MD, token_NO, error_O)
    assert placed_text(bag) == own
    assert placed_text(replace(bag, position_PO=position_PO[:0])) is None


def test_rows_that_few_vectors_do_not_explain_have_no_support(rng: torch.Generator) -> None:
    vector_VD, known_KD = random(VECTORS, WIDTH, rng=rng), random(KNOWN, WIDTH, rng=rng)
    rows = noisy(random(6, WIDTH, rng=rng), rng)
    assert sparse_support(rows, vector_VD, known_KD, UNLIMITED) is None


def test_rows_that_are_noise_alone_have_no_support(rng: torch.Generator) -> None:
    vector_VD = random(VECTORS, 2 * WIDTH, rng=rng)
    noise_OD = random(2, 2 * WIDTH, rng=rng)
    rows = LowRank.of(noise_OD, torch.ones_like(noise_OD))
    assert sparse_support(rows, vector_VD, vector_VD[:0], UNLIMITED) is None


@pytest.mark.parametrize(("size", "lost"), [(0.03, 0), (0.3, 0), (1.0, 6)])
def test_noise_of_which_nothing_is_known_hides_weak_vectors_alone(
    size: float, lost: int, rng: torch.Generator
) -> None:
    vector_VD, known_KD = random(VECTORS, 128, rng=rng), random(KNOWN, 128, rng=rng)
    right = torch.randperm(VECTORS, generator=rng)[:12]
    rows_OD = random(6, 12, rng=rng) @ vector_VD[right] / math.sqrt(12)
    rows_OD += size * random(*rows_OD.shape, rng=rng)
    rows = LowRank.of(rows_OD, torch.full_like(rows_OD, 1e-10))
    support = sparse_support(rows, vector_VD, known_KD, UNLIMITED)
    assert support is not None
    index = {*support.index_M.tolist()}
    assert index <= {*right.tolist()}
    assert len(index) >= 12 - lost
    if not lost:
        share_O = size / rows_OD.square().mean(1).sqrt()
        assert support.noise == pytest.approx(float(share_O.square().mean().sqrt()), rel=0.1)


@pytest.mark.parametrize("heavy", [False, True], ids=["alike columns", "heavy columns"])
def test_dropout_changes_inputs_alike_in_all_rows_and_names_no_others(
    heavy: bool, rng: torch.Generator
) -> None:
    size_D = 10 ** random(192, rng=rng).clamp(-1, 1) if heavy else torch.ones(192).double()
    vector_VD = random(VECTORS, 192, rng=rng) * size_D
    right = torch.randperm(VECTORS, generator=rng)[:16]
    kept_ND = torch.rand((16, 192), generator=rng) > 0.1
    rows_OD = random(8, 16, rng=rng) @ (vector_VD[right] * kept_ND / 0.9)
    rows = LowRank.of(rows_OD, 1e-8 * rows_OD.square())
    support = sparse_support(rows, vector_VD, vector_VD[:0], UNLIMITED)
    assert support is not None
    index = {*support.index_M.tolist()}
    assert index <= {*right.tolist()}
    assert len(index) >= 12


@pytest.mark.parametrize(
    ("heavy", "count", "enough"), [(False, 24, 22), (True, 16, 14)], ids=["even", "heavy columns"]
)
def test_weak_vectors_show_once_the_rows_are_orthonormal(
    heavy: bool, count: int, enough: int
) -> None:
    """One search by the rows as they came names 15 of the 24, and 12 of the 16."""
    rng = torch.Generator().manual_seed(6)
    size_D = 10 ** random(192, rng=rng).clamp(-1, 1) if heavy else torch.ones(192).double()
    vector_VD = random(VECTORS, 192, rng=rng) * size_D
    right = torch.randperm(VECTORS, generator=rng)[:count]
    kept_ND = torch.rand((count, 192), generator=rng) > 0.1
    share_ON = random(8, count, rng=rng) * torch.logspace(0, 1, count)
    rows_OD = share_ON @ (vector_VD[right] * kept_ND / 0.9)
    support = sparse_support(
        LowRank.of(rows_OD, 1e-8 * rows_OD.square()), vector_VD, vector_VD[:0], UNLIMITED
    )
    assert support is not None
    index = {*support.index_M.tolist()}
    assert index <= {*right.tolist()}
    assert len(index) >= enough


def test_noise_that_is_large_in_few_columns_names_no_vectors() -> None:
    rng = torch.Generator().manual_seed(6)
    vector_VD = random(2000, 128, rng=rng)
    right = torch.randperm(2000, generator=rng)[:8]
    rows_OD = random(6, 8, rng=rng) @ vector_VD[right]
    few_D = torch.rand(128, generator=rng) < 0.02
    rows_OD += few_D * random(6, 128, rng=rng) * 10
    rows = LowRank.of(rows_OD, torch.full_like(rows_OD, 1e-6))
    support = sparse_support(rows, vector_VD, vector_VD[:0], UNLIMITED)
    assert support is not None
    assert {*support.index_M.tolist()} <= {*right.tolist()}


def test_most_vectors_of_a_table_may_be_nearly_the_same(rng: torch.Generator) -> None:
    """As those of words that a model did not meet in training."""
    other_VD, alike_VD = random(3000, WIDTH, rng=rng), random(6000, WIDTH, rng=rng)
    vector_VD = torch.cat([other_VD, alike_VD[0] + 0.02 * alike_VD])
    right = [5, 17, 230, 1420, 3500, 8200]
    rows = noisy(random(6, len(right), rng=rng) @ vector_VD[right], rng, 1e-3)
    support = sparse_support(rows, vector_VD, vector_VD[:0], UNLIMITED)
    assert support is not None
    assert sorted(support.index_M.tolist()) == right


def test_columns_in_which_no_input_has_anything_do_no_harm(rng: torch.Generator) -> None:
    vector_VD = random(VECTORS, 128, rng=rng)
    vector_VD[:, :3] = 0
    rows_OD = random(4, 5, rng=rng) @ vector_VD[:5]
    rows_OD += 0.1 * random(*rows_OD.shape, rng=rng)
    rows = LowRank.of(rows_OD, torch.full_like(rows_OD, 1e-10))
    support = sparse_support(rows, vector_VD, vector_VD[:0], UNLIMITED)
    assert support is not None
    assert sorted(support.index_M.tolist()) == [0, 1, 2, 3, 4]


def test_no_time_gives_no_support(rng: torch.Generator) -> None:
    vector_VD = random(VECTORS, WIDTH, rng=rng)
    rows = noisy(random(3, 4, rng=rng) @ vector_VD[:4], rng)
    assert sparse_support(rows, vector_VD, vector_VD[:0], Clock(0.0)) is None


def test_what_was_found_when_time_is_up_counts(rng: torch.Generator) -> None:
    vector_VD = random(VECTORS, WIDTH, rng=rng)
    rows = noisy(random(20, 12, rng=rng) @ vector_VD[:12], rng)
    support = sparse_support(rows, vector_VD, vector_VD[:0], Ticking(2))
    assert support is not None
    assert sorted(support.index_M.tolist()) == list(range(12))


def test_behind_divided_numbers_no_search_looks_for_even_noise(
    rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes most of the time, and what is not known of a quotient is relative."""
    vector_VD = random(VECTORS, WIDTH, rng=rng) * 10 ** random(WIDTH, rng=rng).clamp(-1, 1)
    rows_OD = (random(12, 5, rng=rng) @ vector_VD[:5]).sign() * vector_VD.square().mean(0).sqrt()
    matrix = LowRank.of(rows_OD, torch.full_like(rows_OD, 1e-10))
    begun, taken = list[torch.Tensor](), _Rows.of
    monkeypatch.setattr(_Rows, "of", lambda *given: begun.append(given[2]) or taken(*given))
    both = sparse_support(matrix, vector_VD, vector_VD[:0], UNLIMITED)
    of_both = len(begun)
    divided = sparse_support(matrix, vector_VD, vector_VD[:0], UNLIMITED, divided=True)
    assert both is not None
    assert divided is not None
    assert divided.index_M.tolist() == both.index_M.tolist()
    assert (of_both, len(begun)) == (2, 3)
    assert begun[-1].std() > 0.1


def test_rows_of_which_nothing_came_have_no_support(rng: torch.Generator) -> None:
    vector_VD = random(VECTORS, WIDTH, rng=rng)
    nothing = LowRank.of(torch.zeros(3, WIDTH), torch.full((3, WIDTH), torch.inf))
    assert sparse_support(nothing, vector_VD, vector_VD[:0], UNLIMITED) is None
