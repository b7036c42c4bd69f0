import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedleak.attacks.subspace.span import ACCEPT, SPARE, row_space
from fedleak.attacks.subspace.token_bag import pairs, read_token_bag
from fedleak.models import CAUSAL_LM, CLASSIFICATION, batch_loss, pad
from fedleak.models.family import TokenTable
from fedleak.util.rng import stream

pytestmark = pytest.mark.core

TABLES = ["bert", "gpt2", "llama"]
LEARNED = TABLES[:2]
KINDS = [
    ("bert", CLASSIFICATION),
    ("gpt2", CLASSIFICATION),
    ("gpt2", CAUSAL_LM),
    ("llama", CLASSIFICATION),
    ("llama", CAUSAL_LM),
]


@torch.no_grad()
def made_table(like, seed=0, width=64, vocabulary=300, available=48):
    """Random rows: a LayerNorm with a bias, one with none, or an RMSNorm without positions."""
    rng = torch.Generator().manual_seed(seed)
    norm = nn.RMSNorm(width, eps=1e-5) if like == "llama" else nn.LayerNorm(width)
    norm.weight.copy_(torch.rand(width, generator=rng) + 0.5)
    if like == "bert":
        norm.bias.copy_(torch.randn(width, generator=rng))
    token_VD = torch.randn(vocabulary, width, generator=rng) + 1
    position_PD = torch.randn(available, width, generator=rng) - 1
    if like == "llama":
        return TokenTable(token_VD, None, norm, rms_eps=1e-5)
    return TokenTable(token_VD, position_PD, norm)


class Made(NamedTuple):
    pairs: list
    gradient: torch.Tensor
    bag: list
    longest: int


@torch.no_grad()
def made_batch(table, sequences, seed=0, outputs=160):
    """A float32 gradient D^T X of all tokens of the sequences."""
    rng = torch.Generator().manual_seed(seed + 10**6)
    every = [(token, at) for ids in sequences for at, token in enumerate(ids)]
    tokens, positions = torch.tensor(every).T
    inputs = table(tokens, positions)
    gradient = torch.randn(outputs, len(every), generator=rng) @ inputs
    return Made(every, gradient, sorted({t for t, _ in every}), max(map(len, sequences)))


def made_sequences(lengths, pool, seed=0, vocabulary=300):
    rng = torch.Generator().manual_seed(seed)
    words = torch.randperm(vocabulary, generator=rng)[:pool]
    return [words[torch.randint(pool, (n,), generator=rng)].tolist() for n in lengths]


def read(table, made):
    span = row_space([made.gradient])
    return read_token_bag(table.directions(), span, stream(0, "factors")), span


def check(table, made, bag):
    assert bag.tokens_N.tolist() == made.bag
    assert bag.positions == (made.longest if table.position_PD is not None else 0)
    assert bag.exact
    assert bag.worst_accepted < 1 < ACCEPT < bag.best_rejected
    token_VD, position_PD, constant_CD = table.directions()
    basis = torch.cat([token_VD[made.bag], position_PD[: bag.positions], constant_CD])
    assert torch.equal(bag.basis_MD, basis.double())


# --- fact 1: the bag ------------------------------------------------------------------------


@pytest.mark.parametrize("like", TABLES)
@given(
    st.lists(st.integers(1, 14), min_size=1, max_size=9), st.integers(1, 20), st.integers(0, 10**6)
)
def test_the_bag_and_the_number_of_positions_are_exact(like, lengths, pool, seed):
    table = made_table(like)
    made = made_batch(table, made_sequences(lengths, pool, seed), seed)
    bag, _ = read(table, made)
    check(table, made, bag)


@pytest.mark.parametrize("like", TABLES)
@pytest.mark.parametrize("batch", [8, 16, 32])
def test_a_batch_may_have_more_tokens_than_the_hidden_size(like, batch):
    table = made_table(like)
    made = made_batch(table, made_sequences([15] * batch, 32), outputs=640)
    assert len(made.pairs) > 64 * batch / 8
    assert len(set(made.pairs)) > 64
    bag, _ = read(table, made)
    check(table, made, bag)


@pytest.mark.parametrize("like", TABLES)
def test_one_token_is_a_bag_and_so_are_repeated_ones(like):
    table = made_table(like)
    for sequences in ([[7]], [[7], [7], [7]], [[7, 7, 7]], [[7], [8]], [[7, 8], [7, 8]]):
        made = made_batch(table, sequences)
        bag, _ = read(table, made)
        check(table, made, bag)


@pytest.mark.parametrize("longest", [1, 2, 7, 8, 16, 17, 31, 32, 33, 36, 40])
def test_the_longest_sequence_may_have_any_length_within_the_budget(longest):
    table = made_table("bert", width=96)
    made = made_batch(table, made_sequences([longest, (longest + 1) // 2, 1], 12))
    assert len(made.bag) + longest + 1 + 20 < 96
    bag, _ = read(table, made)
    check(table, made, bag)


@pytest.mark.parametrize("longest", [20, 24, 34, 40, 50])
def test_what_fits_is_read_where_twice_as_many_positions_would_not(longest):
    table = made_table("bert", width=128, available=128)
    pool = 128 - longest - 16
    made = made_batch(table, made_sequences([longest] * 20, pool), outputs=300)
    assert len(made.bag) + 2 * longest > 128 > len(made.bag) + longest + 1 + SPARE
    bag, _ = read(table, made)
    check(table, made, bag)


@pytest.mark.parametrize("like", TABLES)
@pytest.mark.parametrize("few", [True, False])
def test_beyond_the_budget_there_are_no_factors(like, few):
    table = made_table(like)
    # A few long sequences (their pairs span less than tokens and positions do), or many tokens.
    sequences = (
        [[*range(27)], [*range(27, 54)]] if few else [[*range(n, n + 8)] for n in range(0, 64, 8)]
    )
    made = made_batch(table, sequences)
    span = row_space([made.gradient])
    if like == "llama" and few:
        assert span.rank == 54  # without positions there is room
        check(table, made, read(table, made)[0])
    elif span is None or not span.exact:
        assert len(set(made.pairs)) > 64 - 8
    else:
        assert read_token_bag(table.directions(), span, stream(0, "factors")) is None


@pytest.mark.parametrize("like", TABLES)
def test_only_tokens_that_may_be_there_are_looked_at(like):
    table = made_table(like)
    made = made_batch(table, made_sequences([9, 6, 4], 20))
    span, directions = row_space([made.gradient]), table.directions()
    more = torch.tensor(sorted({*made.bag, *range(0, 300, 7)}))
    bag = read_token_bag(directions, span, stream(0, "factors"), among_N=more)
    check(table, made, bag)
    fewer = torch.tensor(made.bag[::2])
    bag = read_token_bag(directions, span, stream(0, "factors"), among_N=fewer)
    assert bag is None or bag.tokens_N.tolist() == fewer.tolist()


@pytest.mark.parametrize("like", TABLES)
@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_the_scale_of_a_gradient_does_not_matter(like, scale):
    table = made_table(like)
    made = made_batch(table, made_sequences([9, 6, 4], 20))
    bag, _ = read(table, made._replace(gradient=scale * made.gradient))
    check(table, made, bag)


@pytest.mark.parametrize("like", TABLES)
@pytest.mark.parametrize("change", ["noise", "float16", "bfloat16"])
def test_noise_makes_the_bag_a_guess_and_a_little_of_it_a_right_one(like, change):
    table = made_table(like, width=128)
    made = made_batch(table, made_sequences([12, 9, 9], 24), outputs=256)
    if change == "noise":
        rng = torch.Generator().manual_seed(5)
        noise = torch.randn(made.gradient.shape, generator=rng)
        spoilt = made.gradient + 1e-3 * made.gradient.std() * noise
    else:
        spoilt = made.gradient.to(getattr(torch, change)).float()
    bag, span = read(table, made._replace(gradient=spoilt))
    assert not span.exact
    assert not bag.exact
    bag_tokens, real = set(bag.tokens_N.tolist()), set(made.bag)
    assert len(bag_tokens & real) >= 0.9 * max(len(real), len(bag_tokens))


# --- pairs ----------------------------------------------------------------------------------


def inside_by_the_graph(every, biased):
    """The pairs that combine to an input: those that the graph of tokens and positions joins.

    Walking from token to position, inputs times their scale add and cancel; what is left of a
    norm's bias cancels only where a cycle gives the bias itself.
    """
    root = {}

    def find(node):
        while root.setdefault(node, node) != node:
            node = root[node]
        return node

    cycle = False
    for token, at in sorted(set(every)):
        token_root, position_root = find(("token", token)), find(("position", at))
        cycle |= token_root == position_root
        root[token_root] = position_root
    if biased and not cycle:
        return set(every)
    tokens, positions = {t for t, _ in every}, {p for _, p in every}
    return {
        (t, p) for t in tokens for p in positions if find(("token", t)) == find(("position", p))
    }


@pytest.mark.parametrize("like", LEARNED)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(2, 40), st.integers(0, 999))
def test_pairs_are_those_that_the_graph_of_tokens_and_positions_joins(like, lengths, pool, seed):
    table = made_table(like, width=96)
    made = made_batch(table, made_sequences(lengths, pool, seed), seed)
    bag, span = read(table, made)
    bag_A, position_A = pairs(table, bag, span)
    read_pairs = list(zip(bag.tokens_N[bag_A].tolist(), position_A.tolist(), strict=True))
    assert len(read_pairs) == len(set(read_pairs))
    assert set(read_pairs) == inside_by_the_graph(made.pairs, like == "bert")
    # The same from every token of the vocabulary, one by one.
    everything = [
        (v, p)
        for p in range(bag.positions)
        for v in (span.excess(table(torch.arange(300), torch.full((300,), p))) < ACCEPT).nonzero()
    ]
    assert {(int(v), p) for v, p in everything} == set(read_pairs)


@pytest.mark.parametrize("relative", [1e-4, 1e-2, 0.1, 0.5])
def test_noise_excludes_no_pair_that_is_there(relative):
    table = made_table("bert", width=128)
    made = made_batch(table, [[1, 2, 3], [4, 5]], outputs=256)
    noise = torch.randn(made.gradient.shape, generator=stream(0, "noise"))
    spoilt = made.gradient + relative * made.gradient.std() * noise
    bag, span = read(table, made._replace(gradient=spoilt))
    assert not span.exact
    bag_A, position_A = pairs(table, bag, span)
    read_pairs = set(zip(bag.tokens_N[bag_A].tolist(), position_A.tolist(), strict=True))
    assert len(read_pairs) == len(bag_A) <= len(bag.tokens_N) * bag.positions
    if set(made.bag) <= set(bag.tokens_N.tolist()) and bag.positions >= made.longest:
        assert set(made.pairs) <= read_pairs
    assert relative > 0.3 or set(made.pairs) <= read_pairs


# --- fact 2: the gradient of each token -----------------------------------------------------


def projected(model, sequences, labels):
    """The gradient [N, O] at each token's query, key and value, by hooks, and the pairs."""
    outputs = {}

    def keep(side):
        def hook(_, __, output):
            output.retain_grad()
            outputs[side] = output

        return hook

    handles = []
    names = model.family.attention_parameters(0)
    sides = ("query", "key", "value") if len(names) == 3 else ("fused",)
    for side, name in zip(sides, names, strict=True):
        layer = model.module.get_submodule(name.rpartition(".")[0])
        handles.append(layer.register_forward_hook(keep(side)))
    ids, mask = pad(sequences, model.tokenizer.pad_token_id, model.device)
    batch_loss(model, ids, mask, torch.tensor(labels)).backward()
    for handle in handles:
        handle.remove()
    model.module.zero_grad()
    if "fused" in outputs:
        gradients = dict(
            zip(("query", "key", "value"), outputs["fused"].grad.chunk(3, -1), strict=True)
        )
    else:
        gradients = {side: output.grad for side, output in outputs.items()}
    real = mask.bool()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return {side: g[real].double() for side, g in gradients.items()}, ids[real], positions[real]


@pytest.mark.parametrize(("family", "task"), KINDS)
def test_a_token_s_coefficient_is_the_sum_of_its_gradients_over_their_scales(
    small, observe, family, task
):
    model = small(family, task, width=64, layers=3)
    truth = observe(model, 3, max_length=9)
    table = model.family.token_table(model.module)
    gradients, ids, positions = projected(model, truth.sequences, truth.labels)
    sides = model.family.projections(truth.seen.update.tensors, 0)
    span = row_space(list(sides.values()))
    bag = read_token_bag(table.directions(), span, stream(0, "factors"))
    counted = [sequence[:-1] if task == CAUSAL_LM else sequence for sequence in truth.sequences]
    real = sorted({token for sequence in counted for token in sequence})
    assert bag.tokens_N.tolist() == real
    sigma = table.scale(ids, positions)[:, None].double()
    once = 0
    for side in ("query", "key", "value"):
        coefficients = bag.coefficients(sides[side])
        size = coefficients.value_NO.norm(dim=1).max()
        assert (coefficients.noise_NO < 1e-4 * size).all()
        for v, token in enumerate(real):
            here = ids == token
            once += int(here.sum()) == 1
            expected = (gradients[side][here] / sigma[here]).sum(0)
            bound = 8 * coefficients.noise_NO[v].norm() + 1e-5 * expected.norm() + 1e-7 * size
            assert (coefficients.value_NO[v] - expected).norm() < bound
    assert once > 10


@pytest.mark.parametrize("like", TABLES)
def test_the_noise_of_coefficients_is_that_of_the_gradient_through_least_squares(like):
    table = made_table(like, width=128)
    made = made_batch(table, made_sequences([10, 8, 6], 20), outputs=200)
    bag, _ = read(table, made)
    clean = bag.coefficients(made.gradient)
    loud = torch.linspace(1e-3, 3e-3, 200)[:, None]
    errors, stated = [], []
    for seed in range(20):
        noise = loud * torch.randn(made.gradient.shape, generator=stream(seed, "noise"))
        coefficients = bag.coefficients(made.gradient + noise)
        errors.append(coefficients.value_NO - clean.value_NO)
        stated.append(coefficients.noise_NO)
    measured = torch.stack(errors).square().mean(0).sqrt() / torch.stack(stated).mean(0)
    assert measured.mean() == pytest.approx(1, abs=0.05)
    assert measured.mean(0)[:50].mean() == pytest.approx(1, abs=0.1)  # in the quiet rows too
    assert measured.mean(1).min() > 0.85  # and for every token
    assert measured.mean(1).max() < 1.15
    assert math.isfinite(float(measured.max()))
