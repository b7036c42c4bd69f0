import itertools
from dataclasses import replace

import pytest
import torch

from fedleak.attacks import certificate
from fedleak.attacks.clock import UNLIMITED
from fedleak.attacks.reconstruction import Status
from fedleak.attacks.subspace.atoms import weights
from fedleak.attacks.subspace.keyspan import Keyspan
from fedleak.attacks.subspace.prefix_tree import LONGEST_TAIL, followers, grow, make_prefixes, tails
from fedleak.attacks.subspace.span import ACCEPT
from fedleak.models import CAUSAL_LM, CLASSIFICATION, ModelSpec, loading
from fedleak.training.wire import partial_update
from fedleak.util.rng import stream

TASKS = [CLASSIFICATION, CAUSAL_LM]
TEXTS = [
    "nobody knows that we pay for it",
    "he pays for it",
    "they told us that he knows it",
    "nobody knows us",
]


def read(model, seen):
    return Keyspan()(seen, model, rng=stream(0, "keyspan"))


def inputs_of(model, truth):
    """The tokens that something flows through: the last target is no input."""
    end = -1 if model.task == CAUSAL_LM else None
    return sorted(tuple(ids[:end]) for ids in truth.sequences)


@torch.no_grad()
def prefixes_of(model, seen):
    names = set(model.family.attention_parameters(0))
    gradients = {n: g for n, g in certificate.as_gradient(seen).items() if n in names}
    return make_prefixes(model, gradients, gradients, among_N=None, rng=stream(0, "prefixes"))


@pytest.fixture(params=[(task, kv_heads) for task in TASKS for kv_heads in (2, 4)], ids=str)
def batch(small, observe, request):
    """A model with shared or own keys, the gradients at its tokens, and the true texts."""
    task, kv_heads = request.param
    model = small("llama", task, width=96, layers=2, kv_heads=kv_heads)
    truth = observe(model, TEXTS)
    prefixes = prefixes_of(model, truth.seen)
    index = {token: i for i, token in enumerate(prefixes.bag.tokens_N.tolist())}
    texts = [tuple(index[token] for token in ids) for ids in inputs_of(model, truth)]
    return prefixes, texts


def places_of(texts):
    """The prefixes of each token."""
    places = {}
    for text in texts:
        for at, token in enumerate(text):
            places.setdefault(token, set()).add(text[:at])
    return places


def slow_square(prefixes, path, token):
    """What the keys of a sentence leave of a token's gradient, by least squares from scratch."""
    _, k_NHK, _ = prefixes.block.project(prefixes.x_ND[[*path, token]], torch.arange(-len(path), 1))
    square = 0.0
    for head, target_K in enumerate(prefixes.query.target_NGK[token]):
        keys_KM = k_NHK[:, head].double().T
        fitted = torch.linalg.lstsq(keys_KM, target_K[:, None], driver="gelsd").solution
        square += float((target_K - (keys_KM @ fitted)[:, 0]).square().sum())
    return square


@torch.no_grad()
@pytest.mark.parametrize("run", [0, 1, 2])
def test_the_excess_is_what_least_squares_over_all_keys_leaves(batch, run):
    prefixes, texts = batch
    path, others = texts[0][:2], torch.tensor([3, 5, 8, 11])
    sought = torch.tensor([4, 7])
    fit = followers(prefixes, path, run, others, sought)
    for i, token in enumerate(sought.tolist()):
        runs = itertools.product(others.tolist(), repeat=run)
        squares = {between: slow_square(prefixes, (*path, *between), token) for between in runs}
        best = min(squares, key=squares.get)
        assert fit.path[i] == (*path, *best)
        bound = prefixes.query.bound(24 - len(path) - run - 1)[token]
        assert float(fit.excess_U[i] ** 2 * bound) == pytest.approx(squares[best], rel=1e-5)


@torch.no_grad()
def test_a_token_passes_behind_its_only_prefix_and_nowhere_else(batch):
    prefixes, texts = batch
    everything = torch.arange(len(prefixes.x_ND))
    places = places_of(texts)
    beginnings = {text[:at] for text in texts for at in range(1, len(text))}
    for path in beginnings:
        fit = followers(prefixes, path, 0, everything, everything)
        passed = {i for i, excess in enumerate(fit.excess_U.tolist()) if excess < ACCEPT}
        assert passed - set(path) == {t for t, own in places.items() if own == {path}}


@torch.no_grad()
def test_the_tree_has_each_token_of_one_prefix_and_only_true_beginnings(batch):
    prefixes, texts = batch
    ((nodes, loose),) = grow(prefixes, 2, UNLIMITED)
    beginnings = {text[:at] for text in texts for at in range(1, len(text) + 1)}
    assert {node.path for node in nodes} <= beginnings
    once = {token for token, own in places_of(texts).items() if len(own) == 1}
    assert {node.path[-1] for node in nodes} == once
    assert set(loose.tolist()) == places_of(texts).keys() - once


@torch.no_grad()
def test_what_is_behind_the_last_token_that_passes_is_found(batch):
    prefixes, texts = batch
    ((nodes, loose),) = grow(prefixes, 2, UNLIMITED)
    inner = {node.path[:at] for node in nodes for at in range(1, len(node.path))}
    read_texts = set()
    for path in {node.path for node in nodes} - inner:
        (tail,) = tails(prefixes, path[-1], loose)
        behind = [text for text in texts if text[: len(path)] == path]
        # Several tails behind one token are no tail, until all but one are taken out.
        alone = len(behind) == 1 and len(behind[0]) - len(path) <= LONGEST_TAIL
        assert (tail.excess < ACCEPT) == alone
        if alone:
            assert [(*path, *tail.path)] == behind
            read_texts |= {*behind}
    assert len(read_texts) >= 2


def noisy(prefixes, tokens, signal):
    """The same under noise, of which the gradients of some tokens are so many times as large."""
    size_N = (prefixes.query.square() / prefixes.query.target_NGK[0].numel()).sqrt()
    noise_NG = prefixes.query.noise_NG.clone()
    noise_NG[tokens] = size_N[tokens, None] / signal
    span = replace(prefixes.span, exact=False)
    return replace(prefixes, span=span, query=prefixes.query._replace(noise_NG=noise_NG))


@torch.no_grad()
def test_under_noise_the_tree_is_yielded_before_tokens_with_unclear_gradients_join(batch):
    prefixes, texts = batch
    once = {token for token, own in places_of(texts).items() if len(own) == 1}
    ((nodes, _),) = grow(prefixes, 2, UNLIMITED)
    weak = max((node.path for node in nodes), key=len)[-1]
    clear, whole = (
        {node.path[-1] for node in nodes}
        for nodes, _ in map(copied, grow(noisy(prefixes, [weak], 20.0), 2, UNLIMITED))
    )
    assert whole == once
    assert clear == once - {weak}


def copied(tree):
    """A tree that does not grow any more."""
    nodes, loose = tree
    return [*nodes], loose.clone()


@torch.no_grad()
def test_under_noise_a_sentence_is_yielded_with_all_ends_that_may_be(batch):
    prefixes, texts = batch
    blurred = noisy(prefixes, [], 1.0)
    *_, (nodes, loose) = grow(blurred, 2, UNLIMITED)
    loud = blurred.key._replace(noise_NG=torch.full_like(blurred.key.noise_NG, 1e6))
    inner = {node.path[:at] for node in nodes for at in range(1, len(node.path))}
    for path in {node.path for node in nodes} - inner:
        ends = tails(blurred, path[-1], loose)
        for some in (ends, tails(replace(blurred, key=loud), path[-1], loose)):
            assert {len(end.path) for end in some} == set(range(LONGEST_TAIL + 1))
        behind = [text[len(path) :] for text in texts if text[: len(path)] == path]
        if len(behind) == 1 and len(behind[0]) <= LONGEST_TAIL:
            assert behind[0] in {end.path for end in ends}


def test_outputs_count_in_units_of_their_noise_where_there_is_some():
    target_NHK = torch.tensor([[[2.0, 0.0, 4.0]], [[1.0, 0.0, 8.0]]]).double()
    noise_NHK = torch.tensor([[[0.5, 0.0, 2.0]], [[0.25, 0.0, 1.0]]]).double()
    assert weights(target_NHK, noise_NHK, exact=True).tolist() == [[1.0, 0.0, 1.0]]
    assert weights(target_NHK, noise_NHK, exact=False).tolist() == [[2.0, 0.0, 0.5]]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("shared", [["q_proj"], ["q_proj", "k_proj"], ["q_proj", "embed_tokens"]])
def test_part_of_the_update_is_enough(small, observe, task, shared):
    model = small("llama", task, width=96, layers=2)
    # Without keys only one token behind the last one that passes is sought.
    truth = observe(model, ["nobody knows that we pay", "he pays for it", "they told us that"])
    only = ["embed_tokens" if p == "embed_tokens" else f"layers.0.self_attn.{p}" for p in shared]
    seen = replace(truth.seen, update=partial_update(truth.seen.update, only))
    assert sorted(read(model, seen).sequences) == inputs_of(model, truth)


def test_more_distinct_tokens_than_dimensions_are_not_read(small, observe, texts):
    model = small("llama", CLASSIFICATION, width=32, layers=2)
    answer = read(model, observe(model, texts[:12]).seen)
    assert answer.status == Status.ABSTAINED or not answer.verified


def test_a_real_rotary_model_is_read_where_its_tokens_are_more_than_dimensions(
    assets, observe, texts
):
    name = str(assets / "models" / "stories15m")
    model = loading.load(ModelSpec(name=name, task=CLASSIFICATION, num_labels=2))
    truth = observe(model, texts[:4])
    answer = read(model, truth.seen)
    assert answer.verified
    assert sorted(answer.sequences) == inputs_of(model, truth)
