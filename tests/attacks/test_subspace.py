import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedleak.attacks.rows import CLEAR, used_rows
from fedleak.attacks.subspace import ACCEPT, Span, row_space, tokens_in_span
from fedleak.models import CAUSAL_LM, CLASSIFICATION
from fedleak.models.family import TokenTable
from fedleak.streams import stream

KINDS = [("bert", CLASSIFICATION), ("gpt2", CLASSIFICATION), ("gpt2", CAUSAL_LM)]


def made_gradient(rank, seed=0, width=24, outputs=40):
    """A float32 gradient D^T X of `rank` inputs X [N, I], and the inputs."""
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rank, width, generator=rng)
    return torch.randn(outputs, rank, generator=rng) @ inputs, inputs


def dense_excess(span, x):
    """The definition, one vector at a time: least squares residual over Wedin's bound."""
    found = []
    for one in x.double():
        one = one / one.norm()
        c = torch.linalg.lstsq(span.basis_DR, one[:, None]).solution[:, 0]
        bound = span.floor * math.sqrt(
            sum((float(a) / float(s)) ** 2 for a, s in zip(c, span.singular_R, strict=True))
        )
        found.append(float((one - span.basis_DR @ c).norm()) / (bound + 2e-6))
    return torch.tensor(found, dtype=torch.float64)


@given(st.integers(1, 23), st.integers(0, 1000))
def test_the_span_has_every_input_and_its_rank(rank, seed):
    gradient, inputs = made_gradient(rank, seed)
    span = row_space([gradient])
    others = torch.randn(200, 24, generator=torch.Generator().manual_seed(seed + 1))
    assert span.rank == rank
    assert span.width == 24
    assert (span.excess(inputs) < ACCEPT).all()
    if rank < 22:  # else chance comes near
        assert not (span.excess(others) < ACCEPT).any()
    torch.testing.assert_close(
        span.basis_DR.T @ span.basis_DR, torch.eye(rank, dtype=torch.float64)
    )


@given(st.integers(1, 20), st.integers(0, 1000))
def test_excess_is_the_dense_residual_over_its_bound(rank, seed):
    gradient, inputs = made_gradient(rank, seed)
    span = row_space([gradient])
    x = torch.cat([inputs, torch.randn(5, 24, generator=torch.Generator().manual_seed(seed))])
    torch.testing.assert_close(span.excess(x), dense_excess(span, x), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(span.excess(1e3 * x.double()), span.excess(x), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scale", [1e-4, 1e4, -1.0])
def test_the_scale_of_a_gradient_does_not_matter(scale):
    gradient, inputs = made_gradient(7)
    one, other = row_space([gradient]), row_space([scale * gradient])
    x = torch.cat([inputs, torch.randn(9, 24, generator=torch.Generator().manual_seed(1))])
    assert other.rank == one.rank
    assert torch.equal(other.excess(x) < ACCEPT, one.excess(x) < ACCEPT)


def test_a_gradient_beside_a_much_larger_one_counts_as_much():
    (one, _), (other, inputs) = made_gradient(7), made_gradient(3, seed=5)
    for scale in (1.0, 1e-9, 1e9):
        span = row_space([one, scale * other])
        assert span.rank == 10
        assert (span.excess(inputs) < ACCEPT).all()


@pytest.mark.parametrize(
    ("what", "gradients"),
    [
        ("nothing", []),
        ("zeros", [torch.zeros(40, 24)]),
        ("as many inputs as dimensions", [made_gradient(24)[0]]),
        ("more inputs than dimensions", [made_gradient(40)[0]]),
        ("one output", [made_gradient(1)[0][:1]]),
        ("noise", [torch.randn(40, 24, generator=stream(0, "noise"))]),
        (
            "a little noise",
            [made_gradient(5)[0] + 1e-3 * torch.randn(40, 24, generator=stream(0, "noise"))],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_without_an_end_of_the_spectrum_there_is_no_span(what, gradients):
    assert row_space(gradients) is None
    assert all(row_space([g]) is None for g in gradients)


def test_a_gradient_of_zeros_beside_another_is_left_out():
    gradient, _ = made_gradient(4)
    assert row_space([torch.zeros(40, 24), gradient]).rank == 4


@pytest.mark.parametrize("columns", [1, 8, 64])
def test_the_sketch_is_orthonormal_and_blind_to_inputs(columns):
    gradient, inputs = made_gradient(7)
    span = row_space([gradient])
    z = span.null_sketch(columns, stream(0, "z"))
    assert z.shape == (24, min(columns, 17))
    torch.testing.assert_close(z.T @ z, torch.eye(z.shape[1], dtype=torch.float64))
    assert (inputs.double() @ z).norm() < 1e-5 * inputs.norm()


@pytest.mark.parametrize(("family", "task"), KINDS)
@pytest.mark.parametrize("layer", [0, 1])
def test_spans_of_a_model_have_the_rank_of_its_distinct_tokens(small, observe, family, task, layer):
    model = small(family, task, width=48)
    truth = observe(model, 2, max_length=7)
    span = row_space(model.family.attention_gradients(truth.seen.update.tensors, layer))
    # The last token of a causal model has no target, so nothing flows through it.
    counted = [one[:-1] if task == CAUSAL_LM else one for one in truth.sequences]
    if layer == 0:
        distinct = {(token, at) for one in counted for at, token in enumerate(one)}
    elif model.family.causal:
        distinct = {one[: at + 1] for one in counted for at in range(len(one))}
    else:
        distinct = {(one, at) for one in counted for at in range(len(one))}
    assert span.rank == len(distinct)


# --- the search for tokens ------------------------------------------------------------------


def exhaustive(table, span, positions):
    vocabulary = torch.arange(len(table.token_VD))
    return [
        vocabulary[span.excess(table(vocabulary, torch.full_like(vocabulary, p))) < ACCEPT].tolist()
        for p in range(positions)
    ]


@pytest.mark.parametrize("shortlist", [16, 2048])
@pytest.mark.parametrize("seed", [0, 1, 2])
@torch.no_grad()
def test_tokens_in_span_are_those_of_the_exhaustive_test(shortlist, seed):
    rng = torch.Generator().manual_seed(seed)
    norm = nn.LayerNorm(32)
    norm.weight.copy_(torch.rand(32, generator=rng) + 0.5)
    norm.bias.copy_(torch.randn(32, generator=rng))
    # Off-centre rows: the search subtracts means that the LayerNorm would.
    token_VD = torch.randn(300, 32, generator=rng) + 2
    table = TokenTable(token_VD, torch.randn(9, 32, generator=rng) - 1, norm)
    ids = torch.randint(300, (3, 6), generator=rng)
    inputs = table(ids, torch.arange(6).expand_as(ids)).flatten(0, 1)
    span = row_space([torch.randn(50, 18, generator=rng) @ inputs])
    found = tokens_in_span(table, span, stream(seed, "sketch"), shortlist=shortlist)
    assert [one.tolist() for one in found] == exhaustive(table, span, 6)
    assert [set(one.tolist()) for one in found] == [set(ids[:, p].tolist()) for p in range(6)]


@torch.no_grad()
def test_an_empty_position_inside_does_not_end_the_search_but_patience_does():
    table = TokenTable(torch.eye(8), 0.01 * torch.randn(9, 8), nn.LayerNorm(8))
    basis = torch.stack([table(torch.tensor(3), torch.tensor(p)) for p in (0, 3, 8)])
    span = row_space([torch.randn(20, 3) @ basis])
    found = tokens_in_span(table, span, stream(0, "sketch"), patience=3)
    assert [one.tolist() for one in found] == [[3], [], [], [3]]
    assert len(tokens_in_span(table, span, stream(0, "sketch"), patience=5)) == 9
    nothing = Span(torch.eye(8, dtype=torch.float64)[:, :0], torch.ones(0), 0.0)
    assert tokens_in_span(table, nothing, stream(0, "sketch")) == []


# --- rows -----------------------------------------------------------------------------------


@given(st.sets(st.integers(0, 29), min_size=1, max_size=29), st.floats(1e-20, 1e10))
def test_rows_that_are_not_zero_are_the_used_ones(used, scale):
    rows = torch.zeros(30, 4)
    rows[sorted(used)] = scale * torch.randn(len(used), 4, generator=stream(0, "rows"))
    assert used_rows(rows) == (sorted(used), math.inf)


@given(st.sets(st.integers(0, 29), min_size=1, max_size=29), st.floats(1.1, 9.0))
def test_used_rows_must_be_clearly_larger_than_the_others(used, gap):
    rows = torch.ones(30, 4) / torch.linspace(1, 1.05, 30)[:, None]
    rows[sorted(used)] *= gap * 1.05
    found = used_rows(rows)
    if gap > CLEAR * 1.06:
        assert found[0] == sorted(used)
        assert found[1] == pytest.approx(gap, rel=0.12)
    elif gap < CLEAR / 1.2:
        assert found is None


def test_no_row_stands_out_of_zeros_noise_or_a_full_table():
    assert used_rows(torch.zeros(5, 3)) is None
    assert used_rows(torch.randn(500, 30, generator=stream(0, "rows"))) is None
    assert used_rows(torch.full((5, 3), torch.nan)) is None
