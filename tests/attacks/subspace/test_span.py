import math

import pytest
import torch
from cases import some
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedleak.attacks.analytic.facts import CLEAR, used_rows
from fedleak.attacks.clock import Clock
from fedleak.attacks.subspace import span as span_module
from fedleak.attacks.subspace.span import ACCEPT, SPARE, Span, row_space, tokens_in_span
from fedleak.models import CAUSAL_LM, CLASSIFICATION, batch_loss, pad
from fedleak.models.family import TokenTable
from fedleak.util.rng import stream

KINDS = [
    ("bert", CLASSIFICATION),
    ("gpt2", CLASSIFICATION),
    ("gpt2", CAUSAL_LM),
    ("llama", CLASSIFICATION),
    ("llama", CAUSAL_LM),
]


def made_gradient(rank, seed=0, width=24, outputs=40, decades=0.0):
    """A float32 gradient D^T X of `rank` inputs X [N, I], and the inputs.

    Its spectrum falls by about so many decades.
    """
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rank, width, generator=rng)
    pulls = torch.randn(outputs, rank, generator=rng) * torch.logspace(0, -decades, rank)
    return pulls @ inputs, inputs


def strangers(width, seed=1000, count=200):
    """Vectors that were no inputs."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed + 10**7))


def noise_like(gradient, relative, seed=0):
    """Gaussian noise, its standard deviation relative to that of the gradient."""
    rng = torch.Generator().manual_seed(seed + 10**6)
    return relative * gradient.std() * torch.randn(gradient.shape, generator=rng)


def dense_excess(span, x):
    """The definition, one vector at a time: least squares residual over Wedin's bound."""
    excesses = []
    for vector_D in x.double():
        vector_D = vector_D / vector_D.norm()
        c = torch.linalg.lstsq(span.basis_DR, vector_D[:, None]).solution[:, 0]
        bound = span.floor * math.sqrt(
            sum((float(a) / float(s)) ** 2 for a, s in zip(c, span.singular_R, strict=True))
        )
        excesses.append(float((vector_D - span.basis_DR @ c).norm()) / (bound + 2e-6))
    return torch.tensor(excesses, dtype=torch.float64)


def dense_span(gradient, rank):
    """The leading part of the whole singular value decomposition."""
    square = torch.linalg.qr(gradient.double())[1]
    _, s_R, vh_RD = torch.linalg.svd(square, full_matrices=False)
    s_R = s_R / s_R[0]
    return Span(basis_DR=vh_RD[:rank].T, singular_R=s_R[:rank], floor=float(s_R[rank]))


@pytest.mark.core
@given(st.integers(1, 24 - SPARE), st.integers(0, 1000))
def test_the_span_has_every_input_and_its_rank(rank, seed):
    gradient, inputs = made_gradient(rank, seed)
    span = row_space([gradient])
    assert (span.rank, span.width, span.exact) == (rank, 24, True)
    assert (span.excess(inputs) < ACCEPT).all()
    assert not (span.excess(strangers(24, seed + 1)) < ACCEPT).any()
    torch.testing.assert_close(
        span.basis_DR.T @ span.basis_DR, torch.eye(rank, dtype=torch.float64)
    )


@pytest.mark.core
@given(st.integers(1, 24 - SPARE), st.integers(0, 1000))
def test_excess_is_the_dense_residual_over_its_bound(rank, seed):
    gradient, inputs = made_gradient(rank, seed)
    span = row_space([gradient])
    x = torch.cat([inputs, strangers(24, seed, 5)])
    torch.testing.assert_close(span.excess(x), dense_excess(span, x), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(span.excess(1e3 * x.double()), span.excess(x), atol=1e-6, rtol=1e-5)


# (width, outputs, rank): up to a few columns short of what the first random sketches hold.
SIZES = [
    (256, 256, 20),
    (256, 512, 50),
    (300, 256, 63),
    (512, 512, 60),
    (512, 640, 126),
    (768, 2304, 32),
]


@pytest.mark.parametrize(
    ("width", "outputs", "rank", "decades"),
    some([(*size, decades) for size in SIZES for decades in (0.0, 2.0, 4.0)], every=5),
)
def test_of_a_large_gradient_a_random_sketch_tells_what_the_whole_spectrum_does(
    width, outputs, rank, decades
):
    for seed in range(2):
        gradient, inputs = made_gradient(rank, seed, width, outputs, decades)
        span, dense = row_space([gradient]), dense_span(gradient, rank)
        assert (span.rank, span.exact) == (rank, True)
        torch.testing.assert_close(span.singular_R, dense.singular_R, atol=0, rtol=1e-3)
        assert dense.floor / 2 < span.floor < 2 * dense.floor
        assert (dense.excess(inputs) < 1).all()
        assert (span.excess(inputs) < ACCEPT).all()
        # A sketch may bend the span where it is least certain, by less than rounding does.
        weighed = span.basis_DR - dense.basis_DR @ (dense.basis_DR.T @ span.basis_DR)
        assert (weighed.norm(dim=0) * span.singular_R < 3 * dense.floor).all()
        others = strangers(width, seed)
        torch.testing.assert_close(span.excess(others), dense.excess(others), atol=0, rtol=0.6)
        assert not (span.excess(others) < 100 * ACCEPT).any()


@pytest.mark.core
@pytest.mark.parametrize("scale", [1e-4, 1e4, -1.0])
@pytest.mark.parametrize("change", ["exact", "noise", "bfloat16"])
def test_the_scale_of_a_gradient_does_not_matter(change, scale):
    gradient, inputs = made_gradient(12, width=64, outputs=96)
    if change == "noise":
        gradient = gradient + noise_like(gradient, 1e-2)
    if change == "bfloat16":
        gradient = gradient.bfloat16().float()
        scale = math.copysign(2.0 ** round(math.log2(abs(scale))), scale)  # rounds the same
    span, scaled_span = row_space([gradient]), row_space([scale * gradient])
    x = torch.cat([inputs, strangers(64)])
    assert (scaled_span.rank, scaled_span.exact) == (span.rank, span.exact)
    assert torch.equal(scaled_span.excess(x) < ACCEPT, span.excess(x) < ACCEPT)


@pytest.mark.core
@pytest.mark.parametrize("seed", [2, 7, 11])
def test_a_mask_that_leaves_directions_without_noise_leaves_finite_numbers(seed):
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(20, 128, generator=rng)
    gradient = torch.randn(3 * 128, 20, generator=rng) @ inputs
    kept = torch.rand(gradient.shape, generator=rng) < 0.01
    span = row_space(list((gradient * kept).split(128)))
    assert span is None or bool(span.basis_DR.isfinite().all() and span.singular_R.isfinite().all())


@pytest.mark.core
def test_singular_values_whose_squares_vanish_are_no_noise():
    """Of coarsely quantised gradients a decomposition gives values such as 1e-269."""
    lengths = torch.tensor([10.0 ** (-12 * i) for i in range(24)], dtype=torch.float64)
    noise = torch.randn(48, 24, generator=stream(0, "noise"))
    assert row_space([torch.diag(lengths), noise]).rank == 1


@pytest.mark.core
def test_a_gradient_beside_a_much_larger_one_counts_as_much():
    (gradient, _), (other, inputs) = made_gradient(7), made_gradient(3, seed=5)
    for scale in (1.0, 1e-9, 1e9):
        span = row_space([gradient, scale * other])
        assert span.rank == 10
        assert (span.excess(inputs) < ACCEPT).all()


@pytest.mark.core
@pytest.mark.parametrize(
    ("case", "gradients"),
    [
        ("nothing", []),
        ("zeros", [torch.zeros(40, 24)]),
        ("too many inputs", [made_gradient(64 - SPARE + 1, width=64, outputs=80)[0]]),
        ("one output", [made_gradient(1)[0][:1]]),
        ("noise", [torch.randn(40, 24, generator=stream(0, "noise"))]),
        ("wide noise", [torch.randn(64, 256, generator=stream(1, "noise"))]),
        ("tall noise", [torch.randn(300, 64, generator=stream(2, "noise"))]),
        ("half noise", [torch.randn(96, 64, generator=stream(3, "noise")).half().float()]),
        ("noises", [torch.randn(40, 64, generator=stream(n, "more")) for n in range(3)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_without_an_end_of_the_spectrum_there_is_no_span(case, gradients):
    assert row_space(gradients) is None
    assert all(row_space([g]) is None for g in gradients)


@pytest.mark.core
@given(st.integers(24 - SPARE + 1, 60), st.integers(0, 1000))
def test_more_inputs_than_there_is_room_for_give_no_exact_span(rank, seed):
    span = row_space([made_gradient(rank, seed)[0]])
    assert span is None or not span.exact


@pytest.mark.core
@pytest.mark.parametrize("outputs", [3, 40])
def test_outputs_without_a_gradient_change_nothing(outputs):
    gradient, _ = made_gradient(5, outputs=outputs)
    among = torch.cat([torch.zeros(2, 24), gradient, torch.zeros(1, 24)])
    there, plain = row_space([among]), row_space([gradient])
    # Three outputs span three dimensions, however many inputs there were.
    for span in (plain, there):
        assert (span is not None and span.exact) == (outputs == 40)
    if outputs == 40:
        assert (there.rank, there.floor) == (plain.rank, pytest.approx(plain.floor))


@pytest.mark.core
def test_rows_that_are_exactly_equal_leave_a_floor():
    row = torch.zeros(24)
    row[3] = 0.5
    span = row_space([row.expand(12, 24)])
    assert span.rank == 1
    assert span.floor > 0
    inside, outside = span.excess(torch.stack([row, row.roll(1)]))
    assert inside == 0
    assert ACCEPT < outside < math.inf


@pytest.mark.core
def test_a_gradient_of_zeros_beside_another_is_left_out():
    gradient, _ = made_gradient(4)
    assert row_space([torch.zeros(40, 24), gradient]).rank == 4


# --- noise ----------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.parametrize("relative", [1e-5, 1e-3, 0.1, 0.3])
@pytest.mark.parametrize(("width", "outputs", "rank"), [(64, 64, 5), (128, 384, 40), (256, 96, 20)])
def test_of_a_noisy_gradient_the_rank_is_what_stands_above_the_noise(
    width, outputs, rank, relative
):
    for seed in range(3):
        gradient, inputs = made_gradient(rank, seed, width, outputs)
        noise = noise_like(gradient, relative, seed)
        span = row_space([gradient + noise])
        assert (span.rank, span.exact) == (rank, False)
        assert (span.excess(inputs) < 1).all()
        assert span.excess(inputs).max() < 0.5 * span.excess(strangers(width)).min()
        # The floor is the edge of the noise's own spectrum, give or take.
        largest = torch.linalg.svdvals(noise.double())[0]
        assert largest / torch.linalg.svdvals(gradient.double())[0] == pytest.approx(
            span.floor, rel=0.3
        )


@pytest.mark.core
@pytest.mark.parametrize(("family", "task"), KINDS[:2])
def test_a_batch_with_more_tokens_than_dimensions_is_not_taken_for_noise(
    small, observe, texts, family, task
):
    model = small(family, task, width=48, layers=3)
    rng = stream(0, "noise")
    for batch, full, noise in ((40, True, 1.0), (1, False, 1e-2)):
        tensors = observe(model, texts[:batch]).seen.update.tensors
        plain = model.family.attention_gradients(tensors, 0)
        noisy = [g + noise * g.std() * torch.randn(g.shape, generator=rng) for g in plain]
        assert row_space(plain).full == full
        assert not row_space(noisy).exact
        assert not row_space(noisy).full


@pytest.mark.core
def test_what_noise_buries_does_not_count():
    gradient, inputs = made_gradient(20, width=128, outputs=128, decades=3.0)
    noise = noise_like(gradient, 0.1)
    span = row_space([gradient + noise])
    largest = torch.linalg.svdvals(noise.double())[0]
    above = [int((torch.linalg.svdvals(gradient.double()) > f * largest).sum()) for f in (2, 0.5)]
    assert 0 < above[0] <= span.rank <= above[1] < 20
    assert not span.exact
    assert (span.excess(inputs[:3]) < 1).all()


@pytest.mark.core
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("width", "outputs", "rank", "decades"),
    [(128, 128, 20, 0.0), (128, 384, 40, 0.0), (128, 384, 40, 2.0), (256, 256, 60, 2.0)],
)
def test_a_gradient_in_half_precision_keeps_its_rank(width, outputs, rank, decades, dtype):
    for seed in range(3):
        gradient, inputs = made_gradient(rank, seed, width, outputs, decades)
        sent = gradient.to(dtype)
        for span in (row_space([sent]), row_space([sent.float()])):
            assert (span.rank, span.exact) == (rank, False)
            assert (span.excess(inputs) < 1).all()
            assert span.excess(strangers(width)).min() > 5 * ACCEPT


@pytest.mark.core
def test_a_gradient_in_half_precision_beside_one_that_is_not():
    (gradient, a), (other, b) = (made_gradient(9, seed, 128, 128) for seed in (1, 2))
    span = row_space([gradient.bfloat16().float(), other + noise_like(other, 0.01)])
    assert (span.rank, span.exact) == (18, False)
    assert (span.excess(torch.cat([a, b])) < 1).all()


@pytest.mark.core
@pytest.mark.parametrize("relative", [1e-6, 1e-5, 1e-4])
def test_noise_within_the_rounding_that_is_known_is_rounding(relative):
    gradient, inputs = made_gradient(10, width=64, outputs=64)
    rng = torch.Generator().manual_seed(0)
    rounded = gradient * (1 + relative * torch.randn(gradient.shape, generator=rng))
    assert not row_space([rounded]).exact
    for rounding in (relative, 100 * relative):
        span = row_space([rounded], rounding)
        assert (span.rank, span.exact) == (10, True)
        assert (span.excess(inputs) < 1).all()
        assert not (span.excess(strangers(64)) < 100 * ACCEPT).any()


# --- parts of a span ------------------------------------------------------------------------


@pytest.mark.core
@given(st.integers(1, 10), st.integers(0, 6), st.integers(0, 6), st.integers(0, 1000))
def test_beside_known_vectors_is_what_the_span_adds_to_theirs(rank, others, inside, seed):
    gradient, inputs = made_gradient(rank, seed, width=40)
    # Known are vectors that have nothing to do with the span, and mixtures of its inputs.
    inside = min(inside, rank)
    mixtures = 3 * inputs[:inside].double() + inputs[: inside and 1]
    known = torch.cat([strangers(40, seed, others).double(), mixtures])
    if not len(known):
        return
    span = row_space([gradient])
    added = span.beside(known)
    project = torch.linalg.svd(known, full_matrices=False).Vh
    rest = inputs.double() - inputs.double() @ project.T @ project
    assert added.rank == rank - inside == int(torch.linalg.matrix_rank(rest, atol=1e-4))
    assert (added.floor, added.exact) == (span.floor, span.exact)
    assert (added.basis_DR.T @ project.T).norm() < 1e-6
    torch.testing.assert_close(
        added.basis_DR.T @ added.basis_DR, torch.eye(added.rank, dtype=torch.float64)
    )
    kept = rest[rest.norm(dim=1) > 1e-3]
    assert (added.excess(kept) < ACCEPT).all()
    far = strangers(40, seed + 1, 50).double()
    far = far - far @ project.T @ project
    assert not (added.excess(far) < 100 * ACCEPT).any()


@pytest.mark.core
@pytest.mark.parametrize("columns", [1, 8, 64])
def test_the_sketch_is_orthonormal_and_blind_to_inputs(columns):
    gradient, inputs = made_gradient(7)
    span = row_space([gradient])
    z = span.null_sketch(columns, stream(0, "z"))
    assert z.shape == (24, min(columns, 17))
    torch.testing.assert_close(z.T @ z, torch.eye(z.shape[1], dtype=torch.float64))
    assert (inputs.double() @ z).norm() < 1e-5 * inputs.norm()


# --- models ---------------------------------------------------------------------------------


def attention_inputs(model, layer, truth):
    """The inputs [N, D] of a layer's attention at tokens that count, and each one's prefix."""
    name = model.family.attention_parameters(layer)[0].rpartition(".")[0]
    recorded = []
    hook = model.module.get_submodule(name).register_forward_pre_hook(
        lambda _, inputs: recorded.append(inputs[0].detach())
    )
    ids, mask = pad(truth.sequences, model.tokenizer.pad_token_id, model.device)
    batch_loss(model, ids, mask, torch.tensor(truth.labels))
    hook.remove()
    # The last token of a sequence trained on its next tokens has none, so nothing flows through.
    counted = [
        sequence[:-1] if model.task == CAUSAL_LM else sequence for sequence in truth.sequences
    ]
    return torch.cat(
        [x[: len(sequence)] for x, sequence in zip(recorded[0], counted, strict=True)]
    ), counted


@pytest.mark.core
@pytest.mark.parametrize(("family", "task"), KINDS)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_every_row_of_a_layer_s_gradients_lies_in_the_span_of_its_inputs(
    small, observe, family, task, layer
):
    model = small(family, task, width=48, layers=3)
    truth = observe(model, 3, max_length=8)
    inputs, _ = attention_inputs(model, layer, truth)
    basis = torch.linalg.svd(inputs.double(), full_matrices=False)
    span = basis.Vh[: int((basis.S / basis.S[0] > 1e-6).sum())]
    gradients = model.family.attention_gradients(truth.seen.update.tensors, layer)
    assert len(gradients) == 3
    for gradient in gradients:
        rows = gradient.double()
        outside = rows - rows @ span.T @ span
        assert rows.norm() > 0
        assert outside.norm() < 1e-5 * rows.norm()
        assert span.shape[0] < 40  # else any row would


def components(pairs):
    """The number of connected parts of the graph of tokens and positions, and if it has a cycle."""
    parent = {}

    def root(node):
        while parent.setdefault(node, node) != node:
            node = parent[node]
        return node

    cycle = False
    for token, position in pairs:
        token_root, position_root = root(("token", token)), root(("position", position))
        cycle |= token_root == position_root
        parent[token_root] = position_root
    return len({root(node) for node in list(parent)}), cycle


def expected_rank(model, layer, counted):
    if layer == 0:
        tokens = {token for ids in counted for token in ids}
        if model.family.position_embedding is None:
            return len(tokens)
        pairs = {(token, at) for ids in counted for at, token in enumerate(ids)}
        parts, cycle = components(pairs)
        return len(tokens) + max(map(len, counted)) - parts + cycle
    if model.family.causal:
        return len({ids[: at + 1] for ids in counted for at in range(len(ids))})
    return len({(ids, at) for ids in counted for at in range(len(ids))})


# Words that recur at other positions: the graph of tokens and positions gets cycles.
RECURRING = ["we pay and they pay", "they pay and we", "pay and we pay", "and they and they"]


@pytest.mark.core
@pytest.mark.parametrize(("family", "task"), KINDS)
@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("recurring", [False, True])
def test_spans_of_a_model_have_the_rank_that_tokens_and_positions_imply(
    small, observe, family, task, layer, recurring
):
    # Of a classifier's last layer only the pooled token's query counts, so it is not looked at.
    model = small(family, task, width=64, layers=3)
    truth = observe(model, RECURRING if recurring else 3, max_length=10)
    inputs, counted = attention_inputs(model, layer, truth)
    rank = expected_rank(model, layer, counted)
    if layer == 0 and recurring and model.family.position_embedding:
        assert components({(t, i) for ids in counted for i, t in enumerate(ids)})[1]
    span = row_space(model.family.attention_gradients(truth.seen.update.tensors, layer))
    assert (span.rank, span.exact) == (rank, True)
    assert (span.excess(inputs) < ACCEPT).all()


# --- the search for tokens ------------------------------------------------------------------


def exhaustive(table, span, positions):
    vocabulary = torch.arange(len(table.token_VD))
    return [
        vocabulary[span.excess(table(vocabulary, torch.full_like(vocabulary, p))) < ACCEPT].tolist()
        for p in range(positions)
    ]


@pytest.mark.core
@pytest.mark.parametrize("shortlist", [16, 2048])
@pytest.mark.parametrize("seed", [0, 1, 2])
@torch.no_grad()
def test_tokens_in_span_are_those_of_the_exhaustive_test(monkeypatch, shortlist, seed):
    monkeypatch.setattr(span_module, "_SHORTLIST", shortlist)
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
    by_position = tokens_in_span(table, span, stream(seed, "sketch"), Clock(None))
    assert [tokens.tolist() for tokens in by_position] == exhaustive(table, span, 6)
    assert [set(tokens.tolist()) for tokens in by_position] == [
        set(ids[:, p].tolist()) for p in range(6)
    ]


@pytest.mark.core
@torch.no_grad()
def test_an_empty_position_inside_does_not_end_the_search_but_patience_and_time_do(
    ticking, monkeypatch
):
    rng = torch.Generator().manual_seed(0)
    table = TokenTable(torch.eye(16), 0.01 * torch.randn(9, 16, generator=rng), nn.LayerNorm(16))
    basis = torch.stack([table(torch.tensor(3), torch.tensor(p)) for p in (0, 3, 8)])
    span = row_space([torch.randn(20, 3, generator=rng) @ basis])
    by_position = tokens_in_span(table, span, stream(0, "sketch"), Clock(None))
    assert [tokens.tolist() for tokens in by_position] == [[3], [], [], [3]]
    with monkeypatch.context() as patient:
        patient.setattr(span_module, "_PATIENCE", 5)
        assert len(tokens_in_span(table, span, stream(0, "sketch"), Clock(None))) == 9
    hurried = ticking(span_module, 1).clock
    assert [tokens.tolist() for tokens in tokens_in_span(table, span, stream(0, "z"), hurried)] == [
        [3]
    ]
    nothing = Span(
        basis_DR=torch.eye(16, dtype=torch.float64)[:, :0], singular_R=torch.ones(0), floor=0.0
    )
    assert tokens_in_span(table, nothing, stream(0, "sketch"), Clock(None)) == []


# --- rows -----------------------------------------------------------------------------------


@pytest.mark.core
@given(st.sets(st.integers(0, 29), min_size=1, max_size=29), st.floats(1e-20, 1e10))
def test_rows_that_are_not_zero_are_the_used_ones(used, scale):
    rows = torch.zeros(30, 4)
    rows[sorted(used)] = scale * torch.randn(len(used), 4, generator=stream(0, "rows"))
    assert used_rows(rows) == (sorted(used), math.inf, True)


@pytest.mark.core
@given(st.sets(st.integers(0, 29), min_size=1, max_size=29), st.floats(1.1, 9.0))
def test_used_rows_must_be_clearly_larger_than_the_others(used, gap):
    rows = torch.ones(30, 4) / torch.linspace(1, 1.05, 30)[:, None]
    rows[sorted(used)] *= gap * 1.05
    rows_and_gap = used_rows(rows)
    if gap > CLEAR * 1.06:
        assert rows_and_gap[0] == sorted(used)
        assert rows_and_gap[1] == pytest.approx(gap, rel=0.12)
    elif gap < CLEAR / 1.2:
        assert rows_and_gap is None


@pytest.mark.core
def test_no_row_stands_out_of_zeros_noise_or_a_full_table():
    assert used_rows(torch.zeros(5, 3)) is None
    assert used_rows(torch.randn(500, 30, generator=stream(0, "rows"))) is None
    assert used_rows(torch.full((5, 3), torch.nan)) is None
